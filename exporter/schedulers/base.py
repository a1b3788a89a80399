"""The `Scheduler` protocol, the values it returns, and the selection for `scheduler = "auto"`.

Owns the order in which schedulers are tried. Refuses to switch later: the scheduler opened at startup is kept. Name
it in the configuration if it may start after this daemon.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from exporter.core.model import Allocation, Device, Fault, Reading
from exporter.registry import SCHEDULERS, import_object, section_of

if TYPE_CHECKING:
    from exporter.schedulers.rules import Rules

CONDITIONS = frozenset({
    "drained", "draining", "down", "maintenance", "reserved", "planned", "cordoned", "not_ready",
})  # fmt: skip
"""Reasons why a node takes no new work. Its unallocated GPUs count as unavailable, not as idle."""


class SchedulerError(Exception):
    """The scheduler cannot be queried; the message names what was tried and how to fix it."""


class Member(Struct, frozen=True):
    """The job and the rank of one process."""

    job_id: str
    rank: str = ""
    """Global rank, as digits; empty when unknown."""


class SchedulerState(Struct, frozen=True):
    """The allocations, node condition and job members that a scheduler reports at one moment."""

    allocations: tuple[Allocation, ...]
    """Allocations that hold a GPU, and those that ended since the last poll (with their `end`)."""
    at: int
    """When this state was last confirmed; monotonic nanoseconds."""
    condition: str = ""
    """One of CONDITIONS; empty when the node accepts new work."""
    members: Mapping[int, Member] = {}
    """By pid, of the processes in the readings."""
    faults: tuple[Fault, ...] = ()
    unanswered_since: int | None = None
    """When the oldest unanswered query to the controller or API server was sent; None: no query is waiting."""


class Scheduler(Protocol):
    """Reports which job holds each GPU. Called on the reading thread, one call at a time; no method may block."""

    name: str
    node: str
    """This node's name in the scheduler."""

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """Return the allocations of `devices` at `now` (monotonic nanoseconds, whole milliseconds).

        None while nothing is known yet, which does not mean unallocated. Raises SchedulerError if it cannot be known.
        """
        ...

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """Return the members among these host pids: processes of the jobs that the last `poll` reported.

        The processes need not use a GPU. If only something that the process itself can write links it to a job, it must
        run as the job's user. /proc is read once per process. Never raises.
        """
        ...

    def update(self, rules: "Rules") -> None:
        """Replace the rules, also for jobs that hold a GPU. Sends no query and restarts no allocation.

        Called on the reading thread, between two polls.
        """
        ...

    def close(self) -> None:
        """Release threads, connections and files. Never raises."""
        ...


def open_scheduler(name: str, config: Any) -> Scheduler:
    """Open the scheduler called `name`. Raises SchedulerError with the reason and how to fix it."""
    try:
        opener = import_object(SCHEDULERS[name].opener)
    except ModuleNotFoundError as err:
        extra = f"pip install 'gpu-efficiency-exporter[{name}]'"
        raise SchedulerError(f"scheduler {name}: the Python package {err.name} is missing: {extra}") from err
    scheduler: Scheduler = opener(config)
    return scheduler


log = logging.getLogger(__name__)


def choose_scheduler(config: Any) -> Scheduler:
    """Open the configured scheduler, or for "auto" the first of SCHEDULERS found here. Raises SchedulerError."""
    if config.scheduler in SCHEDULERS:
        return open_scheduler(config.scheduler, config)
    refusals = []
    for name in SCHEDULERS:
        try:
            _require_present(name, config)
            scheduler = open_scheduler(name, config)
        except SchedulerError as err:
            refusals.append(f"{name}: {err}")
            continue
        log.info("scheduler %s; %s", name, "; ".join(refusals) or "the first candidate")
        return scheduler
    raise SchedulerError("\n".join(refusals))


def _require_present(name: str, config: Any) -> None:
    """Raise SchedulerError for an absent scheduler before its libraries are loaded (20 MiB for Kubernetes)."""
    explain_absence = SCHEDULERS[name].explain_absence
    absence = explain_absence(getattr(config, section_of(name))) if explain_absence else ""
    if absence:
        raise SchedulerError(absence)
