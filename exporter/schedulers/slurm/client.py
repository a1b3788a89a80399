"""Queries slurmctld with Slurm's own commands, one RPC each.

Runs them without a shell, with a fixed environment, killed at the timeout. Never lists all jobs: a query is about one
job, and `-d` is used only where nothing else shows which GPUs a job has. The list of GPUs is in slurmd.py.
"""

import contextlib
import logging
import os
import re
import shutil
import subprocess  # there is no other way to run scontrol  # nosec B404
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from exporter.schedulers.slurm.parsing import (
    SINFO_COLUMNS,
    SQUEUE_COLUMNS,
    NodeState,
    NotJsonError,
    SlurmJob,
    parse_job_columns,
    parse_job_json,
    parse_job_text,
    parse_node_states,
)

_KEPT_VARIABLES = ("PATH", "HOME", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Inherited variables: those that locate and authenticate to the cluster, none that changes output or filters."""
_FIXED_VARIABLES = {
    "TZ": "UTC0",  # scontrol prints local time
    "LC_ALL": "C",
    "SLURM_TIME_FORMAT": "standard",  # the only format that `parse_time` reads
    "SLURM_BITSTR_LEN": "0",  # else the list of an array's tasks ends in "..." after 64 characters (squeue(1))
}
_MESSAGE_CHARS = 300
_SLURMCTLD = "is slurmctld up and reachable from here, or is this user's rate limited (rl_enable)?"
_QUESTIONS = {
    "sacct": "is slurmdbd up and reachable from here?",
    "slurmd": "does AutoDetect in gres.conf wait for a GPU?",
}
"""What to look at when a command does not answer, by the beginning of its name; else _SLURMCTLD."""

log = logging.getLogger(__name__)


class SlurmUnavailableError(Exception):
    """Slurm gave no answer; the message has the command, its errors, and how to fix it."""


class MissingCommandError(SlurmUnavailableError):
    """The command is not on this machine, or may not be run."""


class Commands:
    """Runs one command at a time; `close` may be called from another thread."""

    def __init__(self, *, bin_dir: str = "", conf: str = "", timeout: float = 5.0) -> None:
        """Empty `bin_dir`: use PATH, as for a slurmd that is not there. Empty `conf`: the commands' default.

        `timeout` is seconds per command.
        """
        self._bin, self._timeout, self.conf = bin_dir, timeout, conf
        self._environ = _environ(os.environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def run(
        self, command: str, *arguments: str, conf: str = "", timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, perhaps with another slurm.conf and timeout than all the others.

        Raises SlurmUnavailableError if it cannot start or times out.
        """
        path = self._path(command)
        try:
            child = self._start([path, *arguments], conf or self.conf)
        except (FileNotFoundError, PermissionError) as err:
            raise MissingCommandError(f"{path}: cannot be started: {err.strerror}. Set slurm.bin_dir") from err
        except OSError as err:
            raise SlurmUnavailableError(f"{path}: cannot be started: {err.strerror or err}") from err
        command_line = " ".join((command, *arguments))
        output, errors = self._wait(child, command_line, timeout or self._timeout)
        return subprocess.CompletedProcess(
            command_line, child.returncode, output.decode(errors="replace"), errors.decode(errors="replace")
        )

    def output(self, command: str, *arguments: str) -> str:
        """Run and return standard output. Raises SlurmUnavailableError as `run`, or if the command fails."""
        return _output_of(self.run(command, *arguments))

    def close(self) -> None:
        """Kill a running command and start no more. Never raises."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                _kill(self._child)

    def _path(self, command: str) -> str:
        """Return the command in slurm.bin_dir or, where an installation from source has slurmd, in sbin beside it."""
        if not self._bin:
            return command
        folder = Path(self._bin)
        found = shutil.which(command, path=f"{folder}{os.pathsep}{folder.parent / 'sbin'}")
        return found or (command if command == "slurmd" else f"{folder / command}")

    def _start(self, arguments: list[str], conf: str) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise OSError("this daemon is being stopped")
            self._child = subprocess.Popen(  # nosec B603  # noqa: S603  no shell; the numbers and the node's name are checked
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ | ({"SLURM_CONF": conf} if conf else {}),
                start_new_session=True,
            )
            return self._child

    def _wait(self, child: subprocess.Popen[bytes], command_line: str, timeout: float) -> tuple[bytes, bytes]:
        try:
            return child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as err:
            _kill(child)
            child.communicate()
            question = next((text for name, text in _QUESTIONS.items() if command_line.startswith(name)), _SLURMCTLD)
            raise SlurmUnavailableError(f"{command_line}: no answer within {timeout:g} s: {question}") from err
        finally:
            with self._lock:
                self._child = None


def _output_of(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        message = _message_of(done) or "no error output"
        raise SlurmUnavailableError(f"{done.args}: exit {done.returncode}: {message}")
    return done.stdout


def _message_of(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())[-_MESSAGE_CHARS:]


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, 9)


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in _KEPT_VARIABLES if name in environ} | _FIXED_VARIABLES


_JSON_SINCE = (23, 2)
"""First version with `scontrol show job --json` (Slurm 23.02 release notes); 22.05 rejects it."""
_MOST_REJECTED = 3
"""Jobs in a row whose JSON is rejected until text alone is read: the cause is then the version (another data_parser),
not the jobs, and each query would cost a second RPC."""
_VERSION = re.compile(r"(\d{2})\.(\d{2})")
_INVALID_JOB = "Invalid job id"


class UnknownJobError(Exception):
    """The controller does not know the job (any more)."""


def job_in(response: str | bytes, job_id: str) -> SlurmJob:
    """Return the job with this id from a JSON response. Raises UnknownJobError if absent, ValueError if invalid."""
    jobs = parse_job_json(response)
    if not jobs:
        raise UnknownJobError(job_id)
    found = [job for job in jobs if job.job_id == job_id]
    if len(found) != 1:
        raise ValueError(f"{len(found)} jobs of number {job_id} in the answer")
    return found[0]


def node_in(states: Iterable[NodeState], name: str, *, source: str) -> NodeState:
    """Return the state of the node called `name`; raises ValueError if `source` did not report it."""
    found = next((state for state in states if state.name == name), None)
    if found is None:
        raise ValueError(f"{source} does not know node {name}: set slurm.node_name")
    return found


class SlurmClient(Protocol):
    """Sends one query and waits. Methods raise SlurmUnavailableError, and ValueError for an invalid response."""

    def job(self, job_id: str) -> SlurmJob:
        """Return the job. Raises UnknownJobError."""
        ...

    def detail(self, job_id: str) -> SlurmJob | None:
        """Return the job with its GPUs, at a higher cost; None if `job` already returns all there is."""
        ...

    def node(self, name: str) -> NodeState:
        """Return the node's state."""
        ...

    def close(self) -> None:
        """Abort a running query. Never raises."""
        ...


class CommandClient:
    """The `SlurmClient` that runs scontrol, sinfo and squeue."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._json: bool | None = None
        self._rejected: set[str] = set()
        """Jobs whose JSON was rejected since that of another was accepted."""

    def job(self, job_id: str) -> SlurmJob:
        """See SlurmClient. One REQUEST_JOB_INFO_SINGLE; --local avoids a second RPC about federations."""
        found = self._job_from_json(job_id)
        if found is not None:
            return found
        try:
            return parse_job_text(self._scontrol("--local", "show", "job", job_id), job_id)
        except ValueError:
            # Perhaps a name with line breaks: two small RPCs for columns that users cannot write.
            columns = ",".join(f"{name}:|" for name in SQUEUE_COLUMNS)
            output = self._commands.output("squeue", "--local", "-h", "-j", job_id, "-O", columns)
            return parse_job_columns(output, job_id)

    def detail(self, job_id: str) -> SlurmJob | None:
        """See SlurmClient. -d also fetches the table of all nodes, so it is used only where there is no JSON."""
        found = self._job_from_json(job_id)
        return found or parse_job_text(self._scontrol("--local", "-d", "show", "job", job_id), job_id)

    def node(self, name: str) -> NodeState:
        """See SlurmClient. Two small RPCs: this node, and the partitions.

        -a: without it, a node that only hidden partitions have, or ones that this user may not use, is left out.
        """
        output = self._commands.output("sinfo", "-a", "--local", "-h", "-N", "-n", name, "-O", SINFO_COLUMNS)
        return node_in(parse_node_states(output), name, source="sinfo")

    def close(self) -> None:
        """See SlurmClient."""
        self._commands.close()

    def _job_from_json(self, job_id: str) -> SlurmJob | None:
        """Return the job; None where Slurm writes no JSON, or if this job's cannot be read. Raises as `_scontrol`."""
        if self._supports_json():
            try:
                found = job_in(self._scontrol("--local", "show", "job", job_id, "--json"), job_id)
            except NotJsonError:
                self._json = False  # the serializer plugin is missing; the text has the same data
            except ValueError as err:
                self._rejected.add(job_id)
                self._json = len(self._rejected) < _MOST_REJECTED
                log.info("Slurm: the JSON of job %s is rejected (%s); its text is read instead", job_id, err)
                if not self._json:
                    log.warning("Slurm: the JSON of %d jobs in a row is rejected; no more is asked for", _MOST_REJECTED)
            else:
                self._rejected.clear()
                return found
        return None

    def _supports_json(self) -> bool:
        if self._json is None:
            match = _VERSION.search(self._commands.output("scontrol", "--version"))
            self._json = match is not None and (int(match[1]), int(match[2])) >= _JSON_SINCE
        return self._json

    def _scontrol(self, *arguments: str) -> str:
        """Return standard output. Raises UnknownJobError, SlurmUnavailableError."""
        done = self._commands.run("scontrol", *arguments)
        if done.returncode and _INVALID_JOB in _message_of(done):
            raise UnknownJobError(_message_of(done))
        return _output_of(done)
