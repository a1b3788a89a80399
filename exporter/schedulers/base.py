"""The `Scheduler` protocol, the values it returns, and the selection for `scheduler = "auto"`.

Owns the order in which schedulers are tried. Refuses to switch later: the scheduler opened at the start is kept, so
name it in the configuration where it may start after this daemon.
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
"""Why nothing new may be placed on a node: what no one holds there is unavailable, not idle."""


class SchedulerError(Exception):
    """The scheduler could not be asked; the message has what was tried and what to do."""


class Member(Struct, frozen=True):
    """What a process is to its job."""

    job_id: str
    rank: str = ""
    """Its global rank, digits; empty: not known."""


class SchedulerState(Struct, frozen=True):
    """What a scheduler reports at one moment."""

    allocations: tuple[Allocation, ...]
    """Every allocation that still holds a GPU, or ended since the last time (with its `end`)."""
    at: int
    """When this was last known to be true; monotonic nanoseconds."""
    condition: str = ""
    """One of CONDITIONS; empty: the node takes new work."""
    members: Mapping[int, Member] = {}
    """By pid, of processes in the readings."""
    faults: tuple[Fault, ...] = ()
    unanswered_since: int | None = None
    """Since when a question to the controller or the API server has had no answer; None: none is open."""


class Scheduler(Protocol):
    """Reports who holds each GPU. Called on the reading thread, one call at a time; nothing there may block."""

    name: str
    node: str
    """What it calls this node."""

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """What is known at `now` (monotonic nanoseconds on whole milliseconds) of who holds `devices`.

        None: nothing is known yet, which is not "nobody". Raises SchedulerError when it cannot be found out.
        """
        ...

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """Of these processes (the host's pids), on a GPU or not, those of jobs that the last `poll` knew.

        As in `SchedulerState.members`, but where a process itself could have written what makes it a job's, it must
        run as the job's user. /proc is asked once for a process. Never raises.
        """
        ...

    def update(self, rules: "Rules") -> None:
        """Apply these from now on, also to jobs that hold a GPU; nothing is queried and no allocation begins anew.

        Called on the reading thread, between two polls.
        """
        ...

    def close(self) -> None:
        """Give back what the scheduler holds. Never raises."""
        ...


def open_scheduler(name: str, config: Any) -> Scheduler:
    """Open the scheduler called `name`; raises SchedulerError with the reason and what to do."""
    try:
        opener = import_object(SCHEDULERS[name].opener)
    except ModuleNotFoundError as err:
        extra = f"pip install 'gpu-efficiency-exporter[{name}]'"
        raise SchedulerError(f"scheduler {name}: the Python package {err.name} is missing: {extra}") from err
    scheduler: Scheduler = opener(config)
    return scheduler


log = logging.getLogger(__name__)


def choose_scheduler(config: Any) -> Scheduler:
    """Open the scheduler that `config` names, or the first of SCHEDULERS that is at home; raises SchedulerError."""
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
        log.info("scheduler %s; %s", name, "; ".join(refusals) or "the first that was tried")
        return scheduler
    raise SchedulerError("\n".join(refusals))


def _require_present(name: str, config: Any) -> None:
    """Refuse before libraries are loaded, 20 MiB for Kubernetes, for which this node has no use."""
    explain_absence = SCHEDULERS[name].explain_absence
    absence = explain_absence(getattr(config, section_of(name))) if explain_absence else ""
    if absence:
        raise SchedulerError(absence)
