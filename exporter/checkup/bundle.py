"""The archive for a bug report: what is in it, why, and what is not.

Owns the archive's form: one folder, MANIFEST.txt first, mode 0600, written whole or not at all. Refuses to overwrite
unless told to, to look anything up, and to let a text in that has not been through the redaction.
"""

import gzip
import io
import os
import re
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from exporter.checkup.redaction import Redaction

_PRIVATE = 0o600
_SERIAL = re.compile(r"^(\s*(?:[\w ]*Serial(?: Number)?|Name)\s*: ).*$", re.MULTILINE)
"""Lines of `nvidia-smi -q`: serial numbers, and the programs of processes, often below somebody's home."""


class Piece(Struct, frozen=True):
    """One file of the archive."""

    name: str
    why: str
    content: bytes


class Missing(Struct, frozen=True):
    """A file that is not in it."""

    name: str
    because: str


class BundleError(Exception):
    """The archive cannot be written; the message says where, why and what to do."""


def text_piece(name: str, why: str, text: str, redaction: Redaction) -> Piece:
    """A piece of a text, which is redacted here."""
    return Piece(name, why, redaction.text(text).encode(errors="replace"))


def packed(content: bytes) -> bytes:
    """Compressed, without a name or a time."""
    return gzip.compress(content, 6, mtime=0)


def without_serials(text: str) -> str:
    """What `nvidia-smi -q` prints, without serial numbers and programs' names; the UUIDs stay, traces have them too."""
    return _SERIAL.sub(r"\1***", text)


def refuse_to_overwrite(path: Path, *, force: bool) -> None:
    """Raise BundleError before a minute is spent on what cannot be written."""
    if path.exists() and not force:
        raise BundleError(f"{path}: a file of that name exists: name another, or overwrite it with --force")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise BundleError(f"{path}: this user may not write in {path.absolute().parent}: name another folder")


def write_bundle(
    path: Path, pieces: Sequence[Piece], missing: Sequence[Missing], *, head: str, force: bool = False
) -> None:
    """Write the archive, in which nothing is but these pieces and their manifest. Raises BundleError."""
    manifest = Piece("MANIFEST.txt", "what this archive holds", _manifest(pieces, missing, head).encode())
    folder = path.name.split(".", maxsplit=1)[0] or "bundle"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, _PRIVATE)
        with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for piece in (manifest, *pieces):
                archive.addfile(_entry(f"{folder}/{piece.name}", piece), io.BytesIO(piece.content))
        if force:
            draft.replace(path)
        else:
            os.link(draft, path)  # fails where somebody was faster, which a rename does not
    except OSError as err:
        raise BundleError(f"{path}: cannot be written: {err.strerror or err}: name another place") from err
    finally:
        draft.unlink(missing_ok=True)


def _entry(name: str, piece: Piece) -> tarfile.TarInfo:
    """Nobody's, and only for whoever unpacks it."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(piece.content), _PRIVATE, int(time.time())
    return entry


def _manifest(pieces: Sequence[Piece], missing: Sequence[Missing], head: str) -> str:
    lines = [head, "", "In this archive:"]
    lines += [f"  {piece.name:<22} {len(piece.content):>9,} bytes  {piece.why}" for piece in pieces]
    if missing:
        lines += ["", "Not in it:"]
        lines += [f"  {one.name:<22} {one.because}" for one in missing]
    return "\n".join(lines) + "\n"


def contents(pieces: Sequence[Piece], missing: Sequence[Missing]) -> str:
    """The same for whoever is about to send it."""
    lines = [f"  {piece.name:<22} {piece.why}" for piece in pieces]
    lines += [f"  {one.name:<22} is not in it: {one.because}" for one in missing]
    return "\n".join(lines)
