"""What an attack is given: where the daemon listens, whose jobs there are, how hard and until when to attack."""

import os
import ssl
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from random import Random

from msgspec import Struct

from tests.fuzz.redteam.tally import Tally

USER = "prometheus"
FORGED_STEP = 777_777
"""The step that attackers report for others, and that stands in a file which nobody but root may read."""


class Job(Struct, frozen=True):
    """A job of the stand-in for Slurm, and its GPU."""

    id: int
    uid: int
    gpu: int
    partition: str = "gpu"


HONEST, BY_HTTP = Job(904001, 20001, 0), Job(904005, 20005, 5)
"""They report, one over the socket and one over HTTP."""
REPORTING, SERVING, LOGGING = Job(904002, 20002, 1), Job(904003, 20003, 2, "serve"), Job(904004, 20004, 3)
"""Jobs of attackers."""
JOBS = (HONEST, REPORTING, SERVING, LOGGING, BY_HTTP)
STRANGERS = (20011, 20012, 20013, 20014)
"""Users of the node that have no job."""


def group_of(job: Job) -> str:
    """Return the control group that Slurm makes for the job's first step, below the root of a v1 hierarchy."""
    return f"slurm/uid_{job.uid}/job_{job.id}/step_0"


def enter(job: Job, cgroups: tuple[Path, ...]) -> None:
    """Put this process into the control groups of the job, as slurmstepd does."""
    for root in cgroups:
        procs = root / group_of(job) / "cgroup.procs"
        if procs.exists() and os.access(procs, os.W_OK):
            procs.write_text(str(os.getpid()))


class Target(Struct, frozen=True):
    """The daemon under attack, as its users know it."""

    port: int
    password: str
    socket: Path
    door: int
    """Port of the reports' HTTP."""
    folder: Path
    """Every user may enter it."""
    engine_ports: tuple[int, ...]
    """Of which the daemon scrapes some by its configuration, some when a serving job listens on them."""
    pid: int
    intensity: float = 1.0
    cgroups: tuple[Path, ...] = ()
    """Folders of the control group file systems that may be written."""

    def many(self, number: int) -> int:
        """Return the number at full intensity, less where the attack is to be weak."""
        return max(round(number * self.intensity), 1)

    def authorization(self, password: str | None = None) -> str:
        return "Basic " + b64encode(f"{USER}:{password or self.password}".encode()).decode()

    def show_on_gpu(self, job: Job, pid: int) -> None:
        """Ask for the driver to list that process on the job's GPU, as long as it lives."""
        path = self.folder / "guests" / str(job.gpu)
        path.with_suffix(".draft").write_text(f"{pid} {job.uid}", encoding="ascii")
        path.with_suffix(".draft").replace(path)

    def logs(self, job: Job) -> Path:
        return self.folder / "logs" / str(job.id)


class Episode(Struct, frozen=True):
    """One attack: its target, its dice, its end and its books."""

    target: Target
    dice: Random
    until: float
    tally: Tally

    def left(self) -> float:
        return self.until - time.monotonic()

    def over(self) -> bool:
        return self.left() <= 0


Attack = Callable[[Episode], None]


def client_tls(least: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> ssl.SSLContext:
    """Return an attacker's context: it does not care whom it attacks."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = least
    return context


def addresses(number: int) -> list[str]:
    """Return as many loopback addresses of attackers."""
    return [f"127.0.{1 + n // 250}.{2 + n % 250}" for n in range(number)]
