"""A real Slurm cluster on this machine: several slurmd on the loopback, fake GPUs, its own ports and directory.

Starts and stops the cluster, and does what its users and operators do: submit, cancel, suspend, drain, count RPCs.
Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge (and slurm-wlm-basic-plugins); for accounting
also slurmdbd and mariadb-server-core. The GPUs are device nodes that no program opens; Slurm accepts no plain files.
"""

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.slurm.database import database_socket, start_database
from tests.slurm.inside import Inside
from tests.slurm.layout import UNIFIED, lay_out
from tests.slurm.plan import OWNER, USER, Plan
from tests.slurm.processes import end, remove_groups
from tests.waiting import wait_for

_RPC = re.compile(r"^\s*(\S+)\s+\(\s*\d+\) count:(\d+)", re.MULTILINE)
_MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
_BARE = """
for folder in prolog.d epilog.d; do mount -t tmpfs tmpfs "$1/$folder"; done
shift
exec "$@"
"""
_HOST = """
hostname "$1"
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""
_STILL = "exec sleep 1000"
"""A job that waits to be cancelled."""


class SlurmRig:
    """The cluster, for the length of a `with` block."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        token = secrets.token_hex(3)
        self.nodes = tuple(f"r{token}n{number}" for number in range(1, self.plan.nodes + 1))
        # Slurm's commands find a slurm.conf by its path here, also the daemon's own copy of it.
        places = [] if self.plan.root == Path("/") else [self.plan.root / "tmp"]
        self.inside = Inside(self.plan.root, shared=places, unified=self.plan.unified)
        self._stack = ExitStack()
        self._commands: list[subprocess.Popen[str]] = []

    # -- the cluster --

    def __enter__(self) -> Self:
        assert os.geteuid() == 0, "a Slurm cluster of one's own needs root: slurmd starts the jobs of others"
        with ExitStack() as stack:
            stack.enter_context(self.inside)
            self.directory = Path(tempfile.mkdtemp(prefix="sr", dir=self.plan.root / "tmp"))
            """The rig's directory, as the host sees it."""
            stack.callback(self._remove)
            lay_out(self.directory, self.plan, self.nodes, self.inside)
            stack.callback(end, self.directory, self.nodes)
            stack.callback(self._end_commands)
            self._start()
            stack.callback(self._end_jobs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def conf(self) -> Path:
        """slurm.conf, as the host sees it."""
        return self.directory / "etc/slurm.conf"

    @property
    def controller_port(self) -> int:
        """SlurmctldPort."""
        return int(re.findall(r"^SlurmctldPort=(\d+)$", self.conf.read_text(), re.MULTILINE)[0])

    def spool(self, node: str) -> Path:
        """Return SlurmdSpoolDir of a node."""
        return self.directory / "spool" / node

    def mapping(self, node: str) -> Path:
        """Return the mapping directory that a node's prolog writes."""
        return self.directory / "jobs" / node

    def commands(self, node: str) -> Path:
        """Return a folder with Slurm's commands for the observer of a node; each use is logged, see `asked`."""
        return self.directory / "bin" / node

    def asked(self, node: str) -> list[str]:
        """Return the command lines run from there so far."""
        return (self.commands(node) / "asked").read_text(encoding="utf-8").splitlines()

    def _start(self) -> None:
        try:
            self._start_all()
        except AssertionError as err:
            err.add_note(self._logs())
            raise

    def _start_all(self) -> None:
        inner = self.inside.seen(self.directory)
        files = [f"--{name}={inner}/munge/{file}" for name, file in _MUNGE.items()]
        self.inside.run(self.inside.path("munged"), "--force", *files, user="munge:munge")
        if self.plan.accounting:
            start_database(self.directory, self.inside)
            self.start_accounting()
        self.start_controller()
        if self.plan.backup:
            self._start_backup()
        for node in self.nodes:
            self.start_node(node)
        wait_for(lambda: self._count("idle") == len(self.nodes), "all nodes are idle")

    def _logs(self) -> str:
        logs = sorted((self.directory / "log").iterdir())
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _daemon(self, name: str, *words: str) -> None:
        preload = self.plan.unified and name == "slurmd"
        env = {"LD_PRELOAD": self.inside.seen(self.directory / UNIFIED)} if preload else {}
        self.inside.run(self.inside.path(name), *words, "-f", self.inside.seen(self.conf), env=env)

    def _count(self, state: str) -> int:
        done = self.run("sinfo", "-h", "-o", "%t %D", check=False)
        return sum(int(line.split()[1]) for line in done.splitlines() if line.split()[0] == state)

    def _end_jobs(self) -> None:
        """Before the daemons: a slurmstepd outlives its slurmd."""
        if not self._controlled():
            self.start_controller()
        self.cancel_all()

    def _end_commands(self) -> None:
        for command in self._commands:
            command.kill()
            command.communicate()

    def _remove(self) -> None:
        remove_groups(self.nodes)
        shutil.rmtree(self.directory)

    # -- for its operator --

    def run(self, name: str, *words: str, user: str = "", check: bool = True) -> str:
        """Run one of Slurm's commands on this cluster and return its output."""
        return self.inside.run(self.inside.path(name), *words, user=user, env=self.env, check=check).stdout

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which Slurm's commands find this cluster."""
        return {"SLURM_CONF": self.inside.seen(self.conf)}

    def start_controller(self) -> None:
        """Start slurmctld; it restores its jobs and nodes."""
        self._daemon("slurmctld")
        wait_for(lambda: "UP" in self.run("scontrol", "ping", check=False), "slurmctld answers")

    def _start_backup(self) -> None:
        """Start the second slurmctld, as a host of another name: with a slurm.conf of its own, for its files' names."""
        etc = self.directory / "etc"
        (etc / "backup").mkdir()
        for file in etc.glob("*.conf"):
            shutil.copy2(file, etc / "backup")
        own = self.conf.read_text().replace("/slurmctld.", "/backup.")
        (etc / "backup/slurm.conf").write_text(own)
        (etc / "backup/hosts").write_text(f"127.0.0.1 localhost\n127.0.0.2 {self.plan.backup}\n")
        (self.directory / "log/backup.log").touch()
        inner = self.inside.seen(self.directory)
        self.inside.run("chown", OWNER, f"{inner}/log/backup.log")
        words = ("sh", "-ec", _HOST, "sh", self.plan.backup, f"{inner}/etc/backup/hosts")
        program = (self.inside.path("slurmctld"), "-f", f"{inner}/etc/backup/slurm.conf")
        self.inside.run("unshare", "--uts", "--mount", "--propagation", "private", *words, *program)

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        if node not in self.nodes[len(self.nodes) - self.plan.bare_nodes :]:
            self._daemon("slurmd", "-N", node)
            return
        inner = self.inside.seen(self.directory)
        words = ("sh", "-ec", _BARE, "sh", f"{inner}/etc", self.inside.path("slurmd"), "-N", node)
        self.inside.run("unshare", "--mount", "--propagation", "private", *words, "-f", self.inside.seen(self.conf))

    def stop_controller(self) -> None:
        """Stop slurmctld, and wait until it has ended."""
        self._stop("slurmctld")

    def start_accounting(self) -> None:
        """Start slurmdbd; its records are in the database."""
        env = self.env | {"MYSQL_UNIX_PORT": database_socket(self.directory, self.inside)}
        self.inside.run(self.inside.path("slurmdbd"), env=env)
        wait_for(lambda: "DbdHost" in self.run("sacctmgr", "show", "config", check=False), "slurmdbd answers")

    def stop_accounting(self) -> None:
        """Stop slurmdbd, and wait until it has ended."""
        self._stop("slurmdbd")

    def _stop(self, name: str) -> None:
        pid = int((self.directory / f"state/{name}.pid").read_text())
        os.kill(pid, 15)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"{name} has gone")

    def _controlled(self) -> bool:
        try:
            pid = int((self.directory / "state/slurmctld.pid").read_text())
        except (OSError, ValueError):
            return False
        return Path(f"/proc/{pid}").exists()

    def drain(self, node: str, reason: str = "bad fan") -> None:
        """Drain the node."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def undrain(self, node: str) -> None:
        """Resume the node."""
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def rpcs(self) -> dict[str, int]:
        """Return the number of RPCs to the controller since `forget_rpcs`, by name."""
        said = self.run("sdiag").partition("by message type")[2].partition("by user")[0]
        return {name: int(count) for name, count in _RPC.findall(said)}

    def forget_rpcs(self) -> None:
        """Reset the count of RPCs."""
        self.run("sdiag", "--reset")

    # -- for its users --

    def submit(self, *options: str, script: str = _STILL) -> str:
        """Submit a batch job and return its number."""
        out = f"--output={self.inside.seen(self.directory)}/out/%A_%a"
        words = ("--parsable", "--chdir=/tmp", out, "--mem=100", *options, f"--wrap={script}")
        return self.run("sbatch", *words, user=USER).strip()

    def submit_het(self, *components: Sequence[str], script: str = _STILL) -> str:
        """Submit a heterogeneous job with these options of its components, and return its leader's number."""
        out = f"--output={self.inside.seen(self.directory)}/out/%j"
        words = [word for options in components for word in (":", "--chdir=/tmp", out, "--mem=100", *options)][1:]
        return self.run("sbatch", "--parsable", *words, f"--wrap={script}", user=USER).strip()

    def started(self, *options: str, script: str = _STILL) -> str:
        """Submit a batch job that starts at once, and wait until it has."""
        return self.wait(self.submit(*options, script=script), "RUNNING")

    def allocate(self, *options: str) -> str:
        """Allocate GPUs without a process; the allocation outlives the command. Return its number."""
        command = self.begin("salloc", "--no-shell", "--mem=100", *options)
        assert command.stdout is not None
        # Not to the command's end: it polls the nodes, and ends seconds later.
        said = next((line for line in command.stdout if "Granted" in line), "")
        assert said, f"salloc {options}: nothing granted"
        return self.wait(said.split()[-1], "RUNNING")

    def begin(self, name: str, *words: str) -> subprocess.Popen[str]:
        """Start one of Slurm's commands as a user, and return the process: `srun` runs as long as its tasks."""
        command = self.inside.start(self.inside.path(name), *words, user=USER, env=self.env)
        self._commands.append(command)
        return command

    def srun(self, *options: str) -> str:
        """Start a job of one step by a bare srun, and return its number once it runs."""
        name = f"s{secrets.token_hex(4)}"
        self.begin("srun", f"--job-name={name}", "--chdir=/tmp", "--mem=100", *options, "sleep", "1000")
        found = wait_for(lambda: self.run("squeue", "-h", "-t", "RUNNING", "-n", name, "-o", "%A"), "srun's job runs")
        return found.split()[0]

    def cancel(self, *jobs: str) -> None:
        """Cancel jobs."""
        self.run("scancel", *jobs)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until none is left."""
        for state in ("PENDING", "RUNNING", "SUSPENDED"):
            self.run("scancel", f"--state={state}", "--partition=gpu", check=False)
        wait_for(lambda: not self.run("squeue", "-h"), "all jobs have ended")

    def suspend(self, job: str) -> None:
        """Suspend a job; it keeps its GPUs."""
        self.run("scontrol", "suspend", job)
        self.wait(job, "SUSPENDED")

    def resume(self, job: str) -> None:
        """Resume a job."""
        self.run("scontrol", "resume", job)
        self.wait(job, "RUNNING")

    def requeue(self, job: str) -> None:
        """Requeue a job; it waits, for minutes or until `release`, to start again."""
        self.run("scontrol", "requeue", job)
        self.wait(job, "PENDING")

    def release(self, job: str) -> None:
        """Let a requeued job start soon: slurmd refuses to start it in the second in which its last run was ended."""
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")
        self.wait(job, "RUNNING")

    def state(self, job: str) -> str:
        """Return a job's state as squeue names it; empty when it is unknown."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False).strip()

    def wait(self, job: str, state: str) -> str:
        """Wait until a job is in a state; return its number."""
        self._until(lambda: self.state(job) == state, f"job {job} is {state}", job)
        return job

    def _until(self, true: Callable[[], bool], what: str, job: str) -> None:
        try:
            wait_for(true, what)
        except AssertionError as err:
            err.add_note(self.run("scontrol", "show", "job", job, check=False) + self.run("sinfo", "-N", "-l"))
            err.add_note(self._logs())
            raise

    def given(self, job: str, node: str | None = None) -> list[str]:
        """Return Slurm's indices of a job's GPUs on a node (default: the first)."""
        return [index for index in self._noted("prolog", job, node).partition(" ")[0].split(",") if index]

    def sluids(self, job: str) -> list[str]:
        """Return the job's SLUID as its prolog and its epilog have it; empty before 25.11."""
        return [self._noted(script, job, None).rpartition(" ")[2] for script in ("prolog", "epilog")]

    def _noted(self, script: str, job: str, node: str | None) -> str:
        note = self.directory / f"given/{script}.{job}.{node or self.nodes[0]}"
        self._until(note.exists, f"the {script} of job {job} has run", job)
        return note.read_text().rstrip("\n")

    def ended(self, job: str, node: str | None = None) -> bool:
        """Whether the epilog of a job has run on a node (default: the first)."""
        return (self.directory / f"given/epilog.{job}.{node or self.nodes[0]}").exists()
