"""Who holds the GPU. One module or package a scheduler, one row in SCHEDULERS."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from exporter.core.model import Allocation, Device, Fault, Reading

if TYPE_CHECKING:
    from exporter.schedulers.rules import Rules

CONDITIONS = frozenset({
    "drained", "draining", "down", "maintenance", "reserved", "planned", "cordoned", "not_ready",
})  # fmt: skip
"""Why nothing new may be placed on a node: what no one holds there is unavailable, not idle."""


class SchedulerError(Exception):
    """The scheduler could not be asked; the message says what was tried and what to do."""


class Member(Struct, frozen=True):
    """What a process is to its job."""

    job_id: str
    rank: str = ""
    """Its global rank, digits; empty: not known."""


class Word(Struct, frozen=True):
    """What a scheduler says at one moment."""

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
    """Says who holds each GPU. Called on the reading thread, one call at a time; what may block is not done there."""

    name: str
    node: str
    """What it calls this node."""

    def look(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> Word | None:
        """What is known at `now` (monotonic nanoseconds on whole milliseconds) of who holds `devices`.

        None: nothing can be said yet, which is not "nobody". Raises SchedulerError when it cannot be told.
        """
        ...

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """Of these processes (the host's pids), on a GPU or not, those of jobs that the last `look` knew.

        As in `Word.members`, but where a process itself could have written what makes it a job's, it must run as the
        job's user. /proc is asked once for a process. Never raises.
        """
        ...

    def adopt(self, rules: "Rules") -> None:
        """Judge by these from now on, those who hold a GPU already too; nobody is asked anew, and no hold begins anew.

        Called on the reading thread, between two looks.
        """
        ...

    def close(self) -> None:
        """Give back what the scheduler holds. Never raises."""
        ...


SCHEDULERS = {
    "slurm": "exporter.schedulers.slurm:open_slurm",
    "kubernetes": "exporter.schedulers.kubernetes:open_kubernetes",
    "mapping-dir": "exporter.schedulers.mapping_dir:open_mapping_dir",
    "processes": "exporter.schedulers.processes:open_processes",
}
"""Name -> module:opener, in the order in which `scheduler = "auto"` tries them; the last opens anywhere. Imported only
when tried."""


def open_scheduler(name: str, config: Any) -> Scheduler:
    """Open the scheduler called `name`; raises SchedulerError with the reason and what to do."""
    module, opener = SCHEDULERS[name].split(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as err:
        extra = f"pip install 'gpu-efficiency-exporter[{name}]'"
        raise SchedulerError(f"scheduler {name}: the Python package {err.name} is missing: {extra}") from err
    scheduler: Scheduler = getattr(found, opener)(config)
    return scheduler
