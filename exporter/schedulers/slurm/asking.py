"""Questions to the controller by Slurm's own commands, one remote call each.

Owns which question is put how, and which answer is believed. Refuses to list jobs: `squeue --json` on 22.05 and `-d`
make the controller send whole tables (measured with sdiag), so a question is about one job, and -d is asked only where
nothing else says which GPUs a job has.
"""

import re
from typing import Protocol

from exporter.schedulers.slurm.commands import Commands, SilentError
from exporter.schedulers.slurm.jobs import Job
from exporter.schedulers.slurm.parsing import COLUMNS, NodeState, parse_job_columns, parse_job_text, parse_node_states
from exporter.schedulers.slurm.parsing_json import parse_job_json

_JSON_SINCE = (23, 2)
"""`scontrol show job --json` (Slurm 23.02 release notes); 22.05 refuses it."""
_VERSION = re.compile(r"(\d{2})\.(\d{2})")
_UNKNOWN = "Invalid job id"


class GoneError(Exception):
    """The controller does not know the job (any more)."""


def job_in(answer: str | bytes, job_id: str) -> Job:
    """The one job of that number in an answer in JSON; raises GoneError where it has none, ValueError."""
    jobs = parse_job_json(answer)
    if not jobs:
        raise GoneError(job_id)
    found = [job for job in jobs if job.job_id == job_id]
    if len(found) != 1:
        raise ValueError(f"{len(found)} jobs of number {job_id} in the answer")
    return found[0]


class Asker(Protocol):
    """Puts one question and waits for the answer. All raise SilentError, and ValueError for one not to be believed."""

    def job(self, job_id: str) -> Job:
        """Give the job; raises GoneError."""
        ...

    def detail(self, job_id: str) -> Job | None:
        """Give the job with its GPUs at whatever price; None: `job` has told all there is."""
        ...

    def node(self, name: str) -> NodeState:
        """Give the node's state."""
        ...

    def close(self) -> None:
        """Give up a question that is being asked. Never raises."""
        ...


class ByCommands:
    """The `Asker` that starts scontrol, sinfo and squeue; also slurmd, for what it alone knows."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._json: bool | None = None

    def job(self, job_id: str) -> Job:
        """See Asker. One REQUEST_JOB_INFO_SINGLE; --local saves a second call about federations."""
        if self._speaks_json():
            try:
                return self._job_json(job_id)
            except ValueError:
                self._json = False  # without the serializer plugin; text says it too
        try:
            return parse_job_text(self._scontrol("--local", "show", "job", job_id), job_id)
        except ValueError:
            # Perhaps a name with line breaks: two small calls for the columns that are no user's to write.
            columns = ",".join(f"{name}:|" for name in COLUMNS)
            said = self._commands.printed("squeue", "--local", "-h", "-j", job_id, "-O", columns)
            return parse_job_columns(said, job_id)

    def detail(self, job_id: str) -> Job | None:
        """See Asker. -d also fetches the table of all nodes: on old versions alone."""
        if self._json:
            return None
        return parse_job_text(self._scontrol("--local", "-d", "show", "job", job_id), job_id)

    def node(self, name: str) -> NodeState:
        """See Asker. Two small calls: this node, and the partitions."""
        said = self._commands.printed("sinfo", "-h", "-N", "-n", name, "-O", "NodeList:|,StateLong:|,Reason:|")
        found = [state for state in parse_node_states(said) if state.name == name]
        if not found:
            raise ValueError(f"sinfo does not know node {name}: set slurm.node_name")
        return found[0]

    def places(self, name: str) -> str:
        """What `slurmd -G` prints of its GPUs, whatever its status; asks nobody. Raises SilentError."""
        return self._commands.run("slurmd", "-N", name, "-G").errors

    def close(self) -> None:
        """See Asker."""
        self._commands.close()

    def _speaks_json(self) -> bool:
        if self._json is None:
            match = _VERSION.search(self._commands.printed("scontrol", "--version"))
            self._json = match is not None and (int(match[1]), int(match[2])) >= _JSON_SINCE
        return self._json

    def _job_json(self, job_id: str) -> Job:
        return job_in(self._scontrol("--local", "show", "job", job_id, "--json"), job_id)

    def _scontrol(self, *arguments: str) -> str:
        """What it printed; raises GoneError for a job that the controller does not know (any more)."""
        ran = self._commands.run("scontrol", *arguments)
        if ran.status and _UNKNOWN in ran.words:
            raise GoneError(ran.words)
        if ran.status:
            asked = f"scontrol {' '.join(arguments)}"
            raise SilentError(f"{asked}: exit {ran.status}: {ran.words or 'without a word'}")
        return ran.out
