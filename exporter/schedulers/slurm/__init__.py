"""Slurm: which job holds each GPU of this node, told by what jobs leave here and by one question a job change.

Owns the loop of a tick: two small directories are read; only where a job came, went or changed is anybody asked, and
that by a thread of its own. Refuses to poll the controller: ten thousand of us must not be noticed by it.

A GPU is held as long as anything of its job is left here. A job whose last step is gone has ended where its batch
script, its extern step (PrologFlags=Contain) or its mapping file was seen; else it may be an allocation between two
steps, and the controller is asked, ever more seldom. While that is silent what was known stays, and what can be seen
here is added; `unanswered_since` tells the age.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from exporter.core.model import SECOND, UNKNOWN_JOB, Allocation, Device, Fault, Owner, Reading
from exporter.schedulers import Member, SchedulerError, Word
from exporter.schedulers.members import Facts, Members, user_name
from exporter.schedulers.rules import Rules
from exporter.schedulers.slurm.asking import Asker, ByCommands
from exporter.schedulers.slurm.commands import Commands
from exporter.schedulers.slurm.conf import Conf, find_conf, read_conf, short_hostname
from exporter.schedulers.slurm.controller import Controller
from exporter.schedulers.slurm.entries import Entries
from exporter.schedulers.slurm.holds import Holds
from exporter.schedulers.slurm.local import LocalNode
from exporter.schedulers.slurm.places import Places
from exporter.schedulers.slurm.tasks import Node
from exporter.schedulers.slurm.traces import Seen, Traces

FIRST_ANSWER_SECONDS = 0.2
"""Waited for the answer about a new job, so that one of a few seconds is billed to its account."""
_PLACES_EVERY = 60 * SECOND
_NODE_AGAIN = 30 * SECOND
"""From one question about the node's state to the next, however many jobs leave: it is two calls."""
_FIRST_NODE_STATE = 10.0
"""Seconds within which it is first asked: not all nodes at once, though all daemons may start together."""
_UNKNOWN = Owner(UNKNOWN_JOB, "slurm", name="a job of which nobody can say what it has")
_JOB = re.compile(r"/job_(\d{1,10})(?=/|$)", re.MULTILINE)


class SlurmScheduler:
    """The `Scheduler` of a Slurm node."""

    name = "slurm"

    def __init__(
        self,
        node: str,
        traces: Traces,
        controller: Controller,
        *,
        rules: Rules | None = None,
        proc: str | Path = "/proc",
        node_state_seconds: float = 300.0,
        wall: Callable[[], int] = time.time_ns,
        phase: Callable[[], float] = random.random,
        user_of: Callable[[int], str] = user_name,
    ) -> None:
        """`wall` gives Unix nanoseconds, `phase` a number in [0, 1) that tells this node from others.

        `user_of` names a uid.
        """
        self.node, self._traces, self._controller, self._wall = node, traces, controller, wall
        self._entries = Entries(controller, node)
        self._holds = Holds(rules or Rules())
        self._members = Members(self._job_of, proc=proc, proven=self._proven)
        self._user_of = cache(user_of)
        self._places: Places | None = None
        self._places_at: int | None = None
        self._every, self._phase = int(node_state_seconds * SECOND), phase
        self._node_at = self._node_again = 0
        self._condition = ""
        self._unsaid: tuple[Fault, ...] = ()

    def look(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> Word | None:
        """Give one allocation for each job on each GPU, and once, with `end=now`, each that is gone.

        None before it is known which GPU is which. Raises SchedulerError while the directories cannot be read: then
        nobody knows who came and who went.
        """
        if not self._controller.alive:
            raise SchedulerError("scheduler slurm: its thread has ended: please report what the log says of it")
        seen, wall = self._read(), self._wall()
        first = self._places_at is None
        if first:
            self._ask_places(now)
        if self._entries.follow(seen.jobs, now) or first:
            self._controller.settle(FIRST_ANSWER_SECONDS)
        news = self._controller.take()
        self._places, self._condition = (
            news.places or self._places,
            news.node.condition if news.node else self._condition,
        )
        self._entries.take(news.answers, now=now, wall=wall)
        self._entries.pursue(now)
        allocations = self._holds.follow(self._entries, self._places, devices, now=now, wall=wall)
        self._entries.contest(self._holds.contested, now)
        if self._holds.problems and now - (self._places_at or 0) >= _PLACES_EVERY:
            self._ask_places(now)
        self._ask_node(now, devices)
        self._unsaid += (*news.faults, *self._faults(seen))
        if self._places is None:
            return None
        faults, self._unsaid = self._unsaid, ()
        return Word(
            (*allocations, *self._dark(now, devices)),
            now,
            self._condition,
            self._members.look(readings),
            faults,
            self._controller.unanswered_since,
        )

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`."""
        return self._members.of(pids)

    def adopt(self, rules: Rules) -> None:
        """See `Scheduler.adopt`: each look judges anew what the controller has said of a job."""
        self._holds.adopt(rules)

    def close(self) -> None:
        """End the thread and what it has started. Never raises."""
        self._controller.close()

    def _dark(self, now: int, devices: Sequence[Device]) -> Iterator[Allocation]:
        """While it cannot be told what a job has, what seems free may be that job's."""
        if any(entry.dark for entry in self._entries):
            held = self._holds.held()
            for device in devices:
                if device.uuid not in held and not device.rest:
                    yield Allocation(device.uuid, _UNKNOWN, now)

    def _read(self) -> Seen:
        try:
            return self._traces.read(self._wall())
        except OSError as err:
            raise SchedulerError(
                f"scheduler slurm: {err.filename or 'the spool directory'}: {err.strerror or err}. Is slurmd at home"
                " here, and may this daemon read its SlurmdSpoolDir? Set slurm.spool_dir, slurm.mapping_dir"
            ) from err

    def _ask_places(self, now: int) -> None:
        self._places_at = now
        self._controller.ask_places()

    def _ask_node(self, now: int, devices: Sequence[Device]) -> None:
        """Ask for the node's state after a job has left, and now and then while a GPU is free."""
        if not self._every or not devices:
            return
        if not self._node_at:
            self._node_at = now + int(self._phase() * min(self._every, _FIRST_NODE_STATE * SECOND))
        held = self._holds.held()
        free = any(device.uuid not in held for device in devices if not device.rest)
        if free and (now >= self._node_at or (self._entries.left and now >= self._node_again)):
            self._node_at = now + self._every // 2 + int(self._phase() * self._every)
            self._node_again = now + min(self._every, _NODE_AGAIN)
            self._entries.left = False
            self._controller.ask_node()

    def _faults(self, seen: Seen) -> Iterator[Fault]:
        """One fault with all complaints, as long as there are any."""
        problems = {*self._holds.problems, *seen.problems, *self._strangers(seen)}
        problems |= {_refused(e.job_id, e.refused) for e in self._entries if e.refused}
        problems |= {_stale(e.job_id) for e in self._entries if e.stale}
        if problems:
            yield Fault("scheduler_refused", f"Slurm: {'; '.join(sorted(problems))}")

    def _strangers(self, seen: Seen) -> list[str]:
        if not seen.strangers or seen.jobs:
            return []
        return [f"the spool directory has steps of node {seen.strangers[0]}, not of {self.node}: set slurm.node_name"]

    def _job_of(self, said: Facts) -> str:
        """The control group's word before the environment's, which is the user's to change.

        Tasks of a heterogeneous step have its leader's id as theirs; their own is among those of the groups.
        """
        names = (*_JOB.findall(said.cgroup), said.environ.get("SLURM_JOB_ID", ""))
        groups = (job for name, job in said.environ.items() if name.startswith("SLURM_JOB_ID_HET_GROUP_"))
        return next((name for name in (*names, *groups) if name in self._entries), "")

    def _proven(self, said: Facts) -> str:
        """The environment's word counts where the process is run by the job's user."""
        job = self._job_of(said)
        if not job or job in _JOB.findall(said.cgroup):
            return job
        user = self._entries.user(job)
        return job if user and said.uid is not None and self._user_of(said.uid) == user else ""


def open_slurm(config: Any) -> SlurmScheduler:
    """Open this node's Slurm; raises SchedulerError where there is neither a spool nor a mapping directory."""
    slurm = config.slurm
    conf = _conf(find_conf(slurm.conf, os.environ))
    node = _node_name(slurm.node_name, conf)
    spool = Path(slurm.spool_dir) if slurm.spool_dir else conf.spool_dir(node) if conf else None
    mapping = Path(slurm.mapping_dir) if slurm.mapping_dir else None
    if mapping is None and (spool is None or not spool.is_dir()):
        raise SchedulerError(
            f"scheduler slurm: {spool or 'SlurmdSpoolDir'} is not there"
            f" ({conf.path if conf else 'no slurm.conf was found'}). On a Slurm node set slurm.conf or slurm.spool_dir,"
            " or slurm.mapping_dir where the prolog writes one"
        )
    proc = Path(config.host.proc)
    commands = ByCommands(
        Commands(bin_dir=slurm.bin_dir, conf=conf.path if conf else "", timeout=slurm.timeout_seconds)
    )
    here = Node(node, proc=proc, cgroup=config.host.cgroup)
    local = LocalNode(here, proc=proc, slots=lambda: commands.places(node))
    controller = Controller(_asker(slurm, commands), local, node=node, clock=time.monotonic_ns)
    return SlurmScheduler(
        node,
        Traces(node, spool=spool if spool is not None and spool.is_dir() else None, mapping=mapping),
        controller,
        rules=Rules(config.workload, config.exemptions),
        proc=proc,
        node_state_seconds=slurm.node_state_seconds,
    )


def _asker(slurm: Any, commands: ByCommands) -> Asker:
    if not slurm.restd_url:
        return commands
    from exporter.schedulers.slurm.restd import Restd  # noqa: PLC0415  an HTTP client is 13 MiB

    try:
        return Restd(slurm.restd_url, token_file=slurm.restd_token_file, timeout=slurm.timeout_seconds)
    except ValueError as err:
        raise SchedulerError(f"scheduler slurm: {err}") from err


def _conf(path: str) -> Conf | None:
    try:
        return read_conf(path) if path else None
    except (OSError, ValueError) as err:
        raise SchedulerError(f"scheduler slurm: {path}: {err}. Set slurm.conf, or make it readable") from err


def _node_name(configured: str, conf: Conf | None) -> str:
    said = configured or os.environ.get("SLURMD_NODENAME", "")
    if said or conf is None or not conf.nodes:
        return said or short_hostname()
    if len(conf.nodes) > 1:
        names = ", ".join(conf.nodes[:4])
        raise SchedulerError(
            f"scheduler slurm: several nodes of {conf.path} are this host ({names}): set slurm.node_name"
        )
    return conf.nodes[0]


def _refused(job_id: str, why: str) -> str:
    return f"what the controller says of job {job_id} is not believed: {why}. It is held without name and account"


def _stale(job_id: str) -> str:
    return f"job {job_id} has left a socket or a mapping file here and is over: it holds nothing"
