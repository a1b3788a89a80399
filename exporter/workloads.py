"""What a workload says of itself, on its way to the agent: the words both sides share.

Owns the protocol of whoever listens to workloads: training jobs that report, logs that are followed, serving engines
that are asked. Refuses to know how they are reached.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from exporter.core.model import Fault, Report, Serving


class Guest(Struct, frozen=True):
    """A process on GPUs of this node that is known to be a job's."""

    pid: int
    """In the host's pid namespace."""
    job_id: str
    uuids: tuple[str, ...] = ()
    """GPUs it has a context on; empty: it is the job's, but on no GPU that lists it."""
    rank: str = ""
    """Global rank, digits; empty: not known."""
    workload_class: str = "batch"
    """Of its job: batch, interactive or serving."""


Whose = Callable[[Sequence[int]], Mapping[int, Guest]]
"""Of these pids (the host's) those that are a job's that holds a GPU here, whether or not they are on one."""


class Heard(Struct, frozen=True):
    """What was heard since the last time."""

    reports: tuple[Report, ...] = ()
    serving: tuple[Serving, ...] = ()
    faults: tuple[Fault, ...] = ()
    """That stand now."""
    counts: tuple[tuple[str, int], ...] = ()
    """Since the start, by kind: what was taken, and what was refused and why."""


class Listener(Protocol):
    """Listens to workloads. Called on the reading thread, one call at a time: what may block is done in its own."""

    def take(self, now: int, guests: Sequence[Guest], whose: Whose) -> Heard:
        """All that has come since the last call; `now` is monotonic nanoseconds on whole milliseconds.

        `guests` are the processes that the GPUs list now. Never raises what a workload could cause.
        """
        ...

    def close(self) -> None:
        """Give back what is held. Never raises."""
        ...
