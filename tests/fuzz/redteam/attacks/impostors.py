"""Processes that claim to belong to another's Slurm job: by control groups they made themselves, by environment."""

import contextlib
import ctypes
import json
import os
import select
import socket
import time
from pathlib import Path

from tests.fuzz.redteam.child import Child
from tests.fuzz.redteam.tally import Tally, outcome, reason
from tests.fuzz.redteam.target import FORGED_STEP, HONEST, LOGGING, STRANGERS, Episode, Target

_STAY = 8.0
"""Seconds for which an impostor waits to be identified."""
_ENV_START = 47
"""Place of env_start in /proc/PID/stat behind the name, proc(5)."""
_NAMES = (
    "slurm/uid_{uid}/job_{id}/step_0",
    "slurm/uid_{uid}/job_{id}/step_batch/task_0",
    "slurm/uid_{mine}/job_{id}/step_0",
    "slurm_{node}/uid_{uid}/job_{id}/step_0",
    "system.slice/slurmstepd.scope/job_{id}/step_0/user/task_0",
    "system.slice/{node}_slurmstepd.scope/job_{id}/step_0/user/task_0",
    "slurmstepd.scope/job_{id}/step_extern",
    "gpu.slice/slurmstepd.scope/job_{id}/step_0/user/task_0",
    "job_{id}/step_0",
    "job_{id}",
    "x/../slurm/uid_{uid}/job_{id}",
    "slurm\n0::/slurm/uid_{uid}/job_{id}/step_0",
    "uid_{uid}/job_{id}/step_0",
)


def attack(episode: Episode) -> None:
    """Report a forged step as the honest job, from every kind of place."""
    while not episode.over():
        children, made = [], []
        for _ in range(episode.target.many(12)):
            uid = episode.dice.choice((*STRANGERS, LOGGING.uid))
            folder = _delegated(episode, uid) if episode.target.cgroups and os.getuid() == 0 else None
            name = episode.dice.choice(_NAMES).format(id=HONEST.id, uid=HONEST.uid, mine=uid, node="redteam")
            children.append(
                Child(Impostor(episode.target, folder, name, episode.until), uid=uid, first=_entering(folder))
            )
            made.append(folder)
            time.sleep(0.05)
        end = min(time.monotonic() + _STAY, episode.until + 1) + 2
        for child in children:
            episode.tally.add(child.wait(max(end - time.monotonic(), 0)))
        for folder in made:
            removed(folder)


def _delegated(episode: Episode, uid: int) -> Path:
    root = episode.dice.choice(episode.target.cgroups)
    # A run that was killed leaves its groups, and the same seed gives the same numbers.
    folder = root / f"redteam-{uid}-{os.getpid()}-{episode.dice.getrandbits(32):x}"
    folder.mkdir()
    _give(folder, uid)
    return folder


def _give(folder: Path, uid: int) -> None:
    os.chown(folder, uid, uid)
    for name in ("cgroup.procs", "tasks", "cgroup.subtree_control", "cgroup.threads"):
        with contextlib.suppress(FileNotFoundError):
            os.chown(folder / name, uid, uid)


def _entering(folder: Path | None) -> "_Entering":
    return _Entering(folder)


class _Entering:
    """What root does for a user to whom it delegates a group: it puts his first process there."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __call__(self) -> None:
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))


def removed(folder: Path | None) -> None:
    """Remove a group and those below it, once their processes are gone."""
    if folder is None or not folder.exists():
        return
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()


class Impostor:
    """A process that makes itself a group named like a job's, and reports for that job."""

    def __init__(self, target: Target, folder: Path | None, name: str, until: float) -> None:
        self._target, self._folder, self._name, self._until = target, folder, name, until

    def __call__(self, tally: Tally) -> None:
        tally.attempt()
        if self._folder is not None and not self._enter():
            tally.came("control group not allowed")
            return
        pretend({"SLURM_JOB_ID": str(HONEST.id), "SLURM_JOBID": str(HONEST.id), "SLURM_STEP_ID": "0"})
        tally.came(self._report())

    def _enter(self) -> bool:
        assert self._folder is not None
        group = self._folder / self._name.replace("x/../", "x-")
        try:
            group.mkdir(parents=True, exist_ok=True)
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            return False
        return True

    def _report(self) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.setblocking(False)  # noqa: FBT003
            try:
                line.connect(str(self._target.socket))
                end = min(time.monotonic() + _STAY, self._until + 1)
                while (left := end - time.monotonic()) > 0:
                    line.send(forged())
                    if select.select([line], [], [], min(left, 1))[0]:
                        text = line.recv(4096)
                        return reason(text) if text else "closed by the daemon"
            except OSError as error:
                return outcome(error)
        return "no reply"


def forged() -> bytes:
    """Return a report that would be seen in the figures of the job for which it is taken."""
    now = time.monotonic_ns()
    figures = {"v": 1, "at": now, "seconds": 0.01, "run": "forged", "step": FORGED_STEP, "steps": 1, "tokens": 1}
    return json.dumps(figures).encode()


def pretend(environ: dict[str, str]) -> None:
    """Overwrite the memory that /proc/PID/environ shows."""
    numbers = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(numbers[_ENV_START]), int(numbers[_ENV_START + 1])
    text = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
    if 0 < len(text) < end - start:
        ctypes.memmove(start, text, len(text))
