"""Builds a program of a Go module, pinned by the go.mod and go.sum of a folder. Needs Go (go.dev) on the PATH."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(folder: Path, package: str, program: Path, *flags: str) -> None:
    """Build `package` as `program`, unless it was, with the same pins and flags.

    Raises CalledProcessError, and SystemExit without Go.
    """
    pins = ((folder / name).read_bytes() for name in ("go.mod", "go.sum"))
    digest = hashlib.sha256(b"\0".join((*pins, *(word.encode() for word in (package, *flags))))).hexdigest()
    stamp = program.parent / ".built"
    if stamp.is_file() and stamp.read_text(encoding="ascii") == digest:
        return
    go = shutil.which("go")
    if go is None:
        sys.exit(f"{package} cannot be built without Go: install it from go.dev/doc/install")
    program.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"Building {package} ...\n")
    sys.stdout.flush()
    subprocess.run([go, "build", "-p", "2", *flags, "-o", f"{program}", package], cwd=folder, check=True)
    stamp.write_text(digest, encoding="ascii")
