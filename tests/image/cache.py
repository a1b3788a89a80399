"""Folders that are made once and kept below `.cache` until what they are made of changes.

Owns their names and that they are whole or not there. Refuses to keep two of a kind.
"""

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache/image"


def kept(kind: str, made_of: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """The folder, which `make` fills if it is not there; what was made of other things is removed."""
    digest = hashlib.sha256()
    for part in made_of:
        digest.update(hashlib.sha256(part).digest())
    whole = CACHE / f"{kind}-{digest.hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{kind}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # another process of the tests may be making it
        if not whole.is_dir():
            _make_anew(kind, whole, make)
    return whole


def _make_anew(kind: str, whole: Path, make: Callable[[Path], None]) -> None:
    for old in CACHE.glob(f"{kind}-*"):
        shutil.rmtree(old)
    draft = CACHE / f"{kind}-draft"
    draft.mkdir()
    make(draft)
    draft.rename(whole)
