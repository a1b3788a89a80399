"""The machine and the state of the code, in words that name neither host nor folder."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MEASURED = ("exporter", "tests/nvml_stub", "tests/dcgm_stub")


def machine() -> str:
    """Name processor, cores, Python and how busy the machine was before this began."""
    usable = len(os.sched_getaffinity(0))
    shared = f"load average {os.getloadavg()[0]:.1f} before the run"
    return f"{_processor()}, {usable} cores, {platform.python_implementation()} {platform.python_version()}, {shared}"


def today() -> str:
    """The day, in UTC."""
    return datetime.now(tz=UTC).date().isoformat()


def commit() -> str:
    """The commit that is checked out, in short."""
    return _git("rev-parse", "--short", "HEAD") or "no commit"


def state_of_code() -> str:
    """Date and commit, and whether what was measured differs from it."""
    changed = _git("status", "--porcelain", "--", *_MEASURED)
    return f"{today()}, commit {commit()}{' with uncommitted changes' if changed else ''}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
