"""Where the store is kept, and what tells this boot of the host from others. Owns no file."""

import os
from collections.abc import Mapping
from pathlib import Path

USUAL = Path("/var/lib/gpu-efficiency")
_NAME = "history.db"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def place_of(file: str, environ: Mapping[str, str], usual: Path = USUAL) -> Path | None:
    """The store that `[history] file` means; None: none is kept.

    systemd gives a unit its folder in STATE_DIRECTORY, several separated by colons (systemd.exec(5)).
    """
    if file != "auto":
        return Path(file) if file else None
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given) / _NAME
    return usual / _NAME if os.access(usual, os.W_OK | os.X_OK) else None


def boot_id(path: Path = _BOOT) -> str:
    """What the kernel calls this boot (random(4)); empty where it does not tell: then no two boots are the same."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
