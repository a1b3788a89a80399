"""Parses the records of CoMMA (google/CoMMA), a profiler plugin for NCCL 2.23 and later, one JSON object a line.

Source: docs/json-format.md and src/event.rs there. `ts` is the operation's enqueue in Unix microseconds and `dur` the
time from then to its end, so most of `dur` is waiting in the stream; `child_dur`, the time of its proxy operations or
kernel channels up to the same end, is its execution. Without children (the default for jobs within a node, and for what
timed out) it is not timed. By default small collectives are left out, and nine of ten receives.
"""

import msgspec
from msgspec import Struct

from exporter.nccl.events import (
    LONGEST_MICROSECONDS,
    MOST_BYTES,
    MOST_MICROSECONDS,
    MOST_RANKS,
    MOST_SEQUENCE,
    NAME_LENGTH,
    CollectiveEvent,
    EventError,
    checked,
    standard_name,
)

_OPERATIONS = ("COLL", "P2P")
"""Categories of operations; others are groups and proxy operations."""


class _Arguments(Struct):
    size: int = 0


class _Record(Struct):
    cat: str
    name: str = ""
    ts: int = 0
    dur: int = 0
    child_dur: int | None = None
    rank: int = 0
    peer: int = 0
    comm_hash: str = ""
    seq_num: int = 0
    args: _Arguments | None = None


_decode = msgspec.json.Decoder(_Record).decode


class CommaReader:
    """Reads the lines of one file in order."""

    source = "comma"
    dropped = 0
    """CoMMA does not report what it loses."""

    def reset(self) -> None:
        """Each line is read by itself: there is nothing to forget."""

    def read(self, raw: bytes) -> CollectiveEvent | None:
        """Parse a line; None if it is no collective or transfer. Raises EventError."""
        try:
            record = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            raise EventError("malformed") from err
        if record.cat not in _OPERATIONS:
            return None
        if record.child_dur is None:
            raise EventError("untimed")
        return _event(record, record.child_dur)


def _event(record: _Record, executed: int) -> CollectiveEvent:
    size = 0 if record.args is None else record.args.size
    start = checked(record.ts, MOST_MICROSECONDS, kind="absurd")
    return CollectiveEvent(
        name=standard_name(record.name),
        end=start + checked(record.dur, LONGEST_MICROSECONDS, kind="absurd"),
        duration=checked(executed, LONGEST_MICROSECONDS, kind="absurd"),
        bytes=checked(size, MOST_BYTES, kind="absurd"),
        communicator=record.comm_hash[:NAME_LENGTH],
        rank=checked(record.rank, MOST_RANKS, kind="absurd"),
        sequence=checked(record.seq_num, MOST_SEQUENCE, kind="absurd"),
        peer=record.peer if record.cat == "P2P" else None,
    )
