"""Builds the stand-in `libnvidia-ml.so.1` from the C beside it; owns where the result is kept, never commits it.

Run as a program it prints the folder to put first in LD_LIBRARY_PATH, so that any program that loads NVML, such as
a long-running daemon, meets the stand-in:

    LD_LIBRARY_PATH="$(python tests/nvml_stub/build.py)" gpu-efficiency serve
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libnvidia-ml.so.1"
_FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}")


def compiler() -> str | None:
    """Return the C compiler's path; None when there is none and the stand-in cannot be built."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def build(into: Path | None = None) -> Path:
    """Return the folder holding the library, built once for each state of its sources.

    Without `into` it is kept in the machine's temporary folder, by user and by hash of the sources.
    Raises CalledProcessError with the compiler's words, RuntimeError when there is no compiler.
    """
    folder = into or Path(tempfile.gettempdir()) / f"nvml-stand-in-{os.getuid()}-{_digest()}"
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
        raise RuntimeError("no C compiler: install gcc, or point CC at one, to build the stand-in NVML")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    sources = sorted(str(path) for path in HERE.glob("*.c"))
    subprocess.run([cc, *_FLAGS, "-o", str(draft), *sources, "-lm"], check=True)
    draft.replace(target)  # two tests may build at once: each replaces the whole file


if __name__ == "__main__":
    print(build())  # noqa: T201  the folder is this command's answer
