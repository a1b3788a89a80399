"""Builds a stand-in's shared library from its C; owns where the result is kept, never commits it."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")


def compiler() -> str | None:
    """Return the C compiler's path; None when there is none and no stand-in can be built."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def built(sources: Path, library: str, into: Path | None = None) -> Path:
    """Return the folder holding `library`, built once for each state of the C files in `sources`.

    Without `into` it is kept in the machine's temporary folder, by user and by hash of the sources.
    Raises CalledProcessError with the compiler's words, RuntimeError when there is no compiler.
    """
    folder = into or Path(tempfile.gettempdir()) / f"{sources.name}-{os.getuid()}-{_digest(sources)}"
    if not (folder / library).exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(sources, folder / library)
    return folder


def _digest(sources: Path) -> str:
    files = sorted(sources.glob("*.[ch]"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _compile(sources: Path, target: Path) -> None:
    cc = compiler()
    if cc is None:
        raise RuntimeError(f"no C compiler: install gcc, or point CC at one, to build the stand-in {target.name}")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    files = sorted(str(path) for path in sources.glob("*.c"))
    subprocess.run([cc, *_FLAGS, f"-Wl,-soname,{target.name}", "-o", str(draft), *files, "-lm"], check=True)
    draft.replace(target)  # two tests may build at once: each replaces the whole file
