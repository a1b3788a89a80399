"""Defines how workloads' own reports reach the agent: the protocol that training jobs, logs and serving engines share.

Refuses to know how a workload is reached.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from exporter.core.model import Fault, ServingReport, TrainingReport


class WorkloadProcess(Struct, frozen=True):
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


ProcessLookup = Callable[[Sequence[int]], Mapping[int, WorkloadProcess]]
"""Of these pids (the host's) those that are a job's that holds a GPU here, whether or not they are on one."""


class WorkloadUpdate(Struct, frozen=True):
    """What was heard since the last time."""

    reports: tuple[TrainingReport, ...] = ()
    serving: tuple[ServingReport, ...] = ()
    faults: tuple[Fault, ...] = ()
    """That stand now."""
    counts: tuple[tuple[str, int], ...] = ()
    """Since the start, by kind: what was taken, and what was refused and why."""


class WorkloadListener(Protocol):
    """Listens to workloads. Called on the reading thread, one call at a time: what may block is done in its own."""

    def poll(self, now: int, processes: Sequence[WorkloadProcess], lookup: ProcessLookup) -> WorkloadUpdate:
        """All that has come since the last call; `now` is monotonic nanoseconds on whole milliseconds.

        `guests` are the processes that the GPUs list now. Never raises what a workload could cause.
        """
        ...

    def close(self) -> None:
        """Give back what is held. Never raises."""
        ...
