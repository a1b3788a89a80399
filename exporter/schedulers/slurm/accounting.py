"""Asks Slurm's accounting (sacct, through slurmdbd) on which nodes a user's jobs ran."""

import re
import time
from collections.abc import Iterator

from exporter.core.job_record import JobRecordQuery
from exporter.schedulers.slurm.client import Commands, SlurmUnavailableError
from exporter.schedulers.slurm.notation import expand_hostlist

_JOB = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?")
"""What `sacct -j` takes for one job: an id, a task of an array, a component of a heterogeneous job."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_NOT_STARTED = "None assigned"
_GPUS = "gres/gpu"
"""In AllocTRES of a job with GPUs, if AccountingStorageTRES has it."""
_DEFAULT_SECONDS = 30 * 86_400
"""How far back jobs are looked for if the query does not say."""


def nodes_of_jobs(commands: Commands, user: str, wanted: JobRecordQuery) -> tuple[str, ...]:
    """Return the nodes on which jobs of the user ran, of the query's job or since its time.

    Where Slurm accounts for GPUs, jobs without any are left out. Nodes of another's job are not among them, as if it
    did not exist. Raises SlurmUnavailableError.
    """
    job = wanted.job_id or wanted.array_id
    if job and not _JOB.fullmatch(job):
        return ()
    seconds = time.time() - wanted.since if wanted.since else _DEFAULT_SECONDS
    which = ("-j", job) if job else ("-S", f"now-{max(1, round(seconds))}")
    # -D: also the runs of a job before it was requeued, on other nodes.
    output = commands.output("sacct", "-X", "-D", "-n", "-P", f"--user={user}", *which, "--format=AllocTRES,NodeList")
    try:
        return tuple(dict.fromkeys(_names(output)))
    except ValueError as err:
        raise SlurmUnavailableError(f"sacct: {err}") from err


def _names(output: str) -> Iterator[str]:
    rows = [line.rpartition("|") for line in output.splitlines()]
    with_gpus = [row for row in rows if _GPUS in row[0]]
    for hosts in dict.fromkeys(hosts for _, _, hosts in with_gpus or rows):
        for name in () if hosts == _NOT_STARTED else expand_hostlist(hosts):
            if not _HOST.fullmatch(name):  # it becomes part of an address
                raise ValueError(f"{name[:80]!r} is no node's name")
            yield name
