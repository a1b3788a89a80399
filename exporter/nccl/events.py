"""Defines a timed collective as NCCL's profiler plugins write it, and checks of untrusted numbers in their files."""

from typing import TypeVar

from msgspec import Struct

MOST_MICROSECONDS = 1 << 53
"""Largest plausible time in Unix microseconds, and the largest integer that JSON numbers keep exactly: year 2255."""
LONGEST_MICROSECONDS = 3600 * 1_000_000
"""Longest plausible execution of one collective: NCCL's watchdog of PyTorch ends it after 10 to 30 minutes."""
MOST_BYTES = 1 << 50
"""Largest plausible message."""
MOST_RANKS = 1 << 24
MOST_SEQUENCE = 1 << 53
"""Largest plausible sequence number or count of lost events."""
LINE_BYTES = 64 * 1024
"""Longest line that is read; a line with an event trace of 64 channels has some 20 KiB."""
NAME_LENGTH = 64

_NAMES = {
    "allreduce": "AllReduce", "allgather": "AllGather", "allgatherv": "AllGatherV", "reducescatter": "ReduceScatter",
    "broadcast": "Broadcast", "reduce": "Reduce", "alltoall": "AllToAll", "all2all": "AllToAll", "gather": "Gather",
    "scatter": "Scatter", "sendrecv": "SendRecv", "send": "Send", "recv": "Recv",
}  # fmt: skip
"""Names that Inspector (AllReduce, All2All) and CoMMA (all_reduce) write, without case and underscores."""

Number = TypeVar("Number", int, float)


class EventError(Exception):
    """A line is no usable event; `kind` is the name of its count, without prefix."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class CollectiveEvent(Struct, frozen=True):
    """One collective or point-to-point transfer that one process executed."""

    name: str
    """NCCL's name of the function, or "other": one of `core.collectives.COLLECTIVE_NAMES`."""
    end: int
    """Unix microseconds: when it ended, or, unless `exact`, by when it had ended."""
    duration: int
    """Microseconds of execution on the GPU."""
    bytes: int
    """Message size by NCCL's convention."""
    communicator: str
    rank: int
    """Rank in the communicator."""
    ranks: int = 0
    """Ranks of the communicator; 0: not reported."""
    nodes: int = 0
    """Nodes that it spans; 0: not reported."""
    sequence: int = 0
    peer: int | None = None
    """The other rank of a point-to-point transfer; None: a collective."""
    exact: bool = True
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    """Bytes per second by NCCL's convention; None: not reported."""
    timing: str = ""
    """How it was timed: kernel_gpu (GPU's clock), kernel_cpu or collective_cpu (upper bounds); empty: not reported."""

    @property
    def start(self) -> int:
        """Unix microseconds."""
        return self.end - self.duration


def standard_name(name: str) -> str:
    """NCCL's name of a function in any spelling; "other" if unknown."""
    return _NAMES.get(name[:NAME_LENGTH].replace("_", "").lower(), "other")


def checked(value: Number | None, most: Number, *, kind: str = "malformed") -> Number:
    """Return a number from 0 to `most`; raises EventError for any other, and if it is missing."""
    if value is None or not 0 <= value <= most:  # false for NaN too
        raise EventError(kind)
    return value
