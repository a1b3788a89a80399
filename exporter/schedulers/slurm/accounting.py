"""Asks Slurm's accounting (sacct, through slurmdbd) on which nodes a user's jobs ran."""

import re
import time
from collections.abc import Iterator

from exporter.core.job_record import JobRecordQuery
from exporter.schedulers.slurm.client import Commands, SlurmUnavailableError
from exporter.schedulers.slurm.notation import expand_hostlist

_JOB = re.compile(r"\d{1,10}(?:[_+]\d{1,10})?")
"""What `sacct -j` takes for one job: an id, a task of an array, a component of a heterogeneous job."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_NOT_STARTED = "None assigned"
_DEFAULT_SECONDS = 30 * 86_400
"""How far back jobs are looked for if the query does not say."""


def nodes_of_jobs(commands: Commands, user: str, wanted: JobRecordQuery) -> tuple[str, ...]:
    """Return the nodes on which jobs of the user ran, of the query's job or since its time.

    Nodes of another's job are not among them, as if it did not exist. Raises SlurmUnavailableError.
    """
    job = wanted.job_id or wanted.array_id
    if job and not _JOB.fullmatch(job):
        return ()
    seconds = time.time() - wanted.since if wanted.since else _DEFAULT_SECONDS
    which = ("-j", job) if job else ("-S", f"now-{max(1, round(seconds))}")
    # -D: also the runs of a job before it was requeued, on other nodes.
    output = commands.output("sacct", "-X", "-D", "-n", "-P", f"--user={user}", *which, "--format=NodeList")
    try:
        return tuple(dict.fromkeys(_names(output)))
    except ValueError as err:
        raise SlurmUnavailableError(f"sacct: {err}") from err


def _names(output: str) -> Iterator[str]:
    for line in output.splitlines():
        for name in () if line == _NOT_STARTED else expand_hostlist(line):
            if not _HOST.fullmatch(name):  # it becomes part of an address
                raise ValueError(f"{name[:80]!r} is no node's name")
            yield name
