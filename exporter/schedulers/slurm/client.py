"""Queries slurmctld with Slurm's own commands, one RPC each.

Runs scontrol, squeue, sinfo and slurmd without a shell, with an environment of their own, killed at the timeout.
Refuses to list all jobs: a query is about one job, and `-d` is used only where nothing else shows which GPUs a job has.
"""

import contextlib
import os
import re
import subprocess  # there is no other way to run scontrol  # nosec B404
import threading
from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from exporter.schedulers.slurm.parsing import (
    SQUEUE_COLUMNS,
    NodeState,
    SlurmJob,
    parse_job_columns,
    parse_job_json,
    parse_job_text,
    parse_node_states,
)

_KEPT_VARIABLES = ("PATH", "HOME", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Of our environment: what finds and admits to the cluster, but nothing that changes what is printed or asked."""
_FIXED_VARIABLES = {
    "TZ": "UTC0",  # scontrol prints local time
    "LC_ALL": "C",
    "SLURM_TIME_FORMAT": "standard",  # the one form that `parse_time` reads
    "SLURM_BITSTR_LEN": "0",  # else the list of an array's tasks ends in "..." after 64 characters (squeue(1))
}
_MESSAGE_CHARS = 300


class SlurmUnavailableError(Exception):
    """No answer; the message has the command, its errors, and what to do."""


class CommandResult(Struct, frozen=True):
    """What a command did."""

    command_line: str
    out: str
    errors: str
    """What it printed to standard error."""
    status: int

    @property
    def message(self) -> str:
        """The end of its errors on one line."""
        return " ".join(self.errors.split())[-_MESSAGE_CHARS:]

    def output(self) -> str:
        """Give what it printed; raises SlurmUnavailableError, with its errors, where it failed."""
        if self.status:
            message = self.message or "without a word"
            raise SlurmUnavailableError(f"{self.command_line}: exit {self.status}: {message}")
        return self.out


class Commands:
    """Runs one command after another; `close` may come from another thread."""

    def __init__(self, *, bin_dir: str = "", conf: str = "", timeout: float = 5.0) -> None:
        """`bin_dir` "": on PATH; `conf` "": as the commands find it; `timeout` in seconds, of each."""
        self._bin, self._timeout = bin_dir, timeout
        self._environ = _environ(os.environ, conf)
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def run(self, command: str, *arguments: str) -> CommandResult:
        """Run it to its end; raises SlurmUnavailableError where it does not start or does not end in time."""
        path = os.path.join(self._bin, command) if self._bin else command  # noqa: PTH118  "" is PATH, not "."
        try:
            child = self._start([path, *arguments])
        except OSError as err:
            raise SlurmUnavailableError(f"{path}: cannot be started: {err.strerror or err}. Set slurm.bin_dir") from err
        command_line = " ".join((command, *arguments))
        out, errors = self._wait(child, command_line)
        return CommandResult(
            command_line, out.decode(errors="replace"), errors.decode(errors="replace"), child.returncode
        )

    def output(self, command: str, *arguments: str) -> str:
        """Give what it printed; raises SlurmUnavailableError, with its errors, where it failed."""
        return self.run(command, *arguments).output()

    def close(self) -> None:
        """End what is running and start nothing more. Never raises."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                _kill(self._child)

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise OSError("this daemon is being stopped")
            self._child = subprocess.Popen(  # nosec B603  # noqa: S603  a list of our own; numbers and the node's name are checked
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
            )
            return self._child

    def _wait(self, child: subprocess.Popen[bytes], command_line: str) -> tuple[bytes, bytes]:
        try:
            return child.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired as err:
            _kill(child)
            child.communicate()
            raise SlurmUnavailableError(
                f"{command_line}: no answer within {self._timeout:g} s: is slurmctld up and reachable from here?"
            ) from err
        finally:
            with self._lock:
                self._child = None


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, 9)


def _environ(environ: Mapping[str, str], conf: str) -> dict[str, str]:
    kept = {name: environ[name] for name in _KEPT_VARIABLES if name in environ}
    return kept | _FIXED_VARIABLES | ({"SLURM_CONF": conf} if conf else {})


_JSON_SINCE = (23, 2)
"""`scontrol show job --json` (Slurm 23.02 release notes); 22.05 refuses it."""
_VERSION = re.compile(r"(\d{2})\.(\d{2})")
_INVALID_JOB = "Invalid job id"


class UnknownJobError(Exception):
    """The controller does not know the job (any more)."""


def job_in(response: str | bytes, job_id: str) -> SlurmJob:
    """The one job of that number in an answer in JSON; raises UnknownJobError where it has none, ValueError."""
    jobs = parse_job_json(response)
    if not jobs:
        raise UnknownJobError(job_id)
    found = [job for job in jobs if job.job_id == job_id]
    if len(found) != 1:
        raise ValueError(f"{len(found)} jobs of number {job_id} in the answer")
    return found[0]


class SlurmClient(Protocol):
    """Sends one query and waits for the answer; raises SlurmUnavailableError, and ValueError for a doubtful answer."""

    def job(self, job_id: str) -> SlurmJob:
        """Give the job; raises UnknownJobError."""
        ...

    def detail(self, job_id: str) -> SlurmJob | None:
        """Give the job with its GPUs at whatever price; None: `job` gives all there is."""
        ...

    def node(self, name: str) -> NodeState:
        """Give the node's state."""
        ...

    def close(self) -> None:
        """Give up a question that is being asked. Never raises."""
        ...


class CommandClient:
    """The `SlurmClient` that starts scontrol, sinfo and squeue; also slurmd, for what it alone knows."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._json: bool | None = None

    def job(self, job_id: str) -> SlurmJob:
        """See SlurmClient. One REQUEST_JOB_INFO_SINGLE; --local saves a second call about federations."""
        if self._supports_json():
            try:
                return self._job_json(job_id)
            except ValueError:
                self._json = False  # without the serializer plugin; the text has the same
        try:
            return parse_job_text(self._scontrol("--local", "show", "job", job_id), job_id)
        except ValueError:
            # Perhaps a name with line breaks: two small calls for the columns that are no user's to write.
            columns = ",".join(f"{name}:|" for name in SQUEUE_COLUMNS)
            output = self._commands.output("squeue", "--local", "-h", "-j", job_id, "-O", columns)
            return parse_job_columns(output, job_id)

    def detail(self, job_id: str) -> SlurmJob | None:
        """See SlurmClient. -d also fetches the table of all nodes: on old versions alone."""
        if self._json:
            return None
        return parse_job_text(self._scontrol("--local", "-d", "show", "job", job_id), job_id)

    def node(self, name: str) -> NodeState:
        """See SlurmClient. Two small calls: this node, and the partitions."""
        output = self._commands.output("sinfo", "-h", "-N", "-n", name, "-O", "NodeList:|,StateLong:|,Reason:|")
        found = [state for state in parse_node_states(output) if state.name == name]
        if not found:
            raise ValueError(f"sinfo does not know node {name}: set slurm.node_name")
        return found[0]

    def slurmd_gpus(self, name: str) -> str:
        """What `slurmd -G` prints of its GPUs, whatever its status; asks nobody. Raises SlurmUnavailableError."""
        return self._commands.run("slurmd", "-N", name, "-G").errors

    def close(self) -> None:
        """See SlurmClient."""
        self._commands.close()

    def _supports_json(self) -> bool:
        if self._json is None:
            match = _VERSION.search(self._commands.output("scontrol", "--version"))
            self._json = match is not None and (int(match[1]), int(match[2])) >= _JSON_SINCE
        return self._json

    def _job_json(self, job_id: str) -> SlurmJob:
        return job_in(self._scontrol("--local", "show", "job", job_id, "--json"), job_id)

    def _scontrol(self, *arguments: str) -> str:
        """What it printed; raises UnknownJobError for a job that the controller does not know (any more)."""
        result = self._commands.run("scontrol", *arguments)
        if result.status and _INVALID_JOB in result.message:
            raise UnknownJobError(result.message)
        return result.output()
