"""Defines the protocol by which all that is known of workloads beside the GPU counters reaches the agent."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from exporter.core.model import (
    CollectiveReport,
    Fault,
    HangFinding,
    HostUsage,
    NetworkPort,
    ServingReport,
    TrainingReport,
)


class OwnerLabels(NamedTuple):
    """The labels by which a line of a telemetry source names who holds the GPU, as they are; empty: absent."""

    namespace: str = ""
    pod: str = ""
    hpc_job: str = ""


class WorkloadProcess(Struct, frozen=True):
    """A process on this node that belongs to a known job."""

    pid: int
    """Process id in the host's pid namespace."""
    job_id: str
    uuids: tuple[str, ...] = ()
    """GPUs on which it has a context; empty: it belongs to the job, but no GPU lists it."""
    rank: str = ""
    """Global rank, decimal digits; empty: unknown."""
    workload_class: str = "batch"
    """Class of its job: batch, interactive or serving."""


ProcessLookup = Callable[[Sequence[int]], Mapping[int, WorkloadProcess]]
"""Takes pids of the host; returns those that belong to a job with a GPU of this node, whether or not they use it."""


class WorkloadUpdate(Struct, frozen=True):
    """What a listener received since the last poll."""

    reports: tuple[TrainingReport, ...] = ()
    serving: tuple[ServingReport, ...] = ()
    collectives: tuple[CollectiveReport, ...] = ()
    findings: tuple[HangFinding, ...] = ()
    hosts: tuple[HostUsage, ...] = ()
    ports: tuple[NetworkPort, ...] | None = None
    """All RDMA ports of the node; None: not read since the last poll."""
    faults: tuple[Fault, ...] = ()
    """Faults that are active now."""
    counts: tuple[tuple[str, int], ...] = ()
    """Totals since the start, by outcome: messages accepted, or rejected for which reason."""


class WorkloadListener(Protocol):
    """Receives data of workloads. The sampling thread calls it; blocking work runs in threads of its own."""

    def poll(self, now: int, processes: Sequence[WorkloadProcess], lookup: ProcessLookup) -> WorkloadUpdate:
        """Return what came since the last call; `now` is monotonic nanoseconds, rounded to milliseconds.

        `processes` are those that the GPUs listed last. Never raises an error that a workload could cause.
        """
        ...

    def close(self) -> None:
        """Release sockets, threads and files. Never raises."""
        ...
