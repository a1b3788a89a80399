"""Builds the stand-in `libdcgm.so.4` from the C beside it; owns where the result is kept, never commits it.

Run as a program it prints a folder of NVIDIA's Python bindings that load the stand-in, so that any program that reads
DCGM through them meets it:

    DCGM_BINDINGS="$(python -m tests.dcgm_stub.build)" gpu-efficiency serve
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.dcgm_stub.bindings import missing, unpack

HERE = Path(__file__).resolve().parent
LIBRARY = "libdcgm.so.4"
_FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", f"-Wl,-soname,{LIBRARY}")


def compiler() -> str | None:
    """Return the C compiler's path; None when there is none and the stand-in cannot be built."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def build(into: Path | None = None) -> Path:
    """Return the folder holding the library, built once for each state of its sources.

    Without `into` it is kept in the machine's temporary folder, by user and by hash of the sources.
    Raises CalledProcessError with the compiler's words, RuntimeError when there is no compiler.
    """
    folder = into or Path(tempfile.gettempdir()) / f"dcgm-stand-in-{os.getuid()}-{_digest()}"
    if not (folder / LIBRARY).exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(folder / LIBRARY)
    return folder


def _digest() -> str:
    sources = sorted(HERE.glob("*.[ch]"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _compile(target: Path) -> None:
    cc = compiler()
    if cc is None:
        raise RuntimeError("no C compiler: install gcc, or point CC at one, to build the stand-in libdcgm")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    sources = sorted(str(path) for path in HERE.glob("*.c"))
    subprocess.run([cc, *_FLAGS, "-o", str(draft), *sources], check=True)
    draft.replace(target)  # two tests may build at once: each replaces the whole file


def main() -> None:
    """Print the folder of bindings over the stand-in."""
    if reason := missing():
        raise SystemExit(reason)
    library = build()
    print(unpack(library / "bindings", library=library))  # noqa: T201  the folder is this command's answer


if __name__ == "__main__":
    main()
