"""The two programs that a bug report asks: journalctl for the daemon's log, nvidia-smi for the driver's own words.

Owns their starting, without a shell, with a time limit and a limit on what is kept. Refuses any other program: see
docs/adr/0040.
"""

import shutil
import subprocess  # of root's programs alone, see _run  # nosec B404
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_SECONDS = 15.0
MOST_BYTES = 5 << 20
"""Of a log, its end."""
_FOLDERS = "/usr/bin:/bin:/usr/sbin:/usr/local/bin:/usr/local/nvidia/bin"


class ProgramError(Exception):
    """It is not here, or did not do it; the message says which."""


def journal(unit: str) -> str:
    """The last hour of a unit's log; raises ProgramError."""
    return _printed("journalctl", "--unit", unit, "--since", "-1h", "--no-pager", "--output", "short-iso", "--quiet")


def nvidia_smi() -> str:
    """`nvidia-smi -q`; raises ProgramError."""
    return _printed("nvidia-smi", "-q")


def end_of(path: Path) -> str:
    """The end of a log file; raises OSError."""
    with path.open("rb") as file:
        return _end(file)


def _end(file: IO[bytes]) -> str:
    size = file.seek(0, 2)
    file.seek(max(0, size - MOST_BYTES))
    return file.read(MOST_BYTES).decode(errors="replace")


def _printed(name: str, *arguments: str) -> str:
    path = shutil.which(name, path=_FOLDERS)
    if path is None:
        raise ProgramError(f"{name} is not here")
    with tempfile.TemporaryFile() as out:
        status = _run([path, *arguments], out)
        text = _end(out)
    if status:
        raise ProgramError(f"{name} failed with status {status}: {' '.join(text.split())[-200:] or 'without a word'}")
    return text


def _run(words: Sequence[str], out: IO[bytes]) -> int:
    """A folder of root's, words of our own: nobody else chooses what is run."""
    try:
        environ = {"PATH": _FOLDERS, "LC_ALL": "C", "TZ": "UTC0"}
        done = subprocess.run(  # nosec B603  # noqa: S603
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environ,
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as err:
        raise ProgramError(f"{words[0]} gave no answer within {_SECONDS:g} s") from err
    except OSError as err:
        raise ProgramError(f"{words[0]} cannot be started: {err.strerror or err}") from err
    return done.returncode
