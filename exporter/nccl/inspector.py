"""Parses the JSON lines of NCCL Inspector, a profiler plugin that comes with NCCL (2.28 and later).

Source: NVIDIA/nccl, ext-profiler/inspector (format v4.0) and plugins/profiler/inspector (v4.1 to v4.3):
inspector_json.cc, inspector.cc, README.md. One line per operation, with the objects `header` (communicator),
`metadata` (version and time of the dump) and `coll_perf` or `p2p_perf`. Since v4.2 a line with `dump_stats` precedes
the operations of one dump of one communicator; since v4.3 only that line has header and metadata.

When an operation ended is written only with NCCL_INSPECTOR_DUMP_VERBOSE=1, per channel of its kernel. Otherwise it had
ended by the time of the dump, which `collectives.place_events` uses.
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

_MAJOR = "v4."
"""The format's major version; minor versions have added fields, and moved header and metadata (v4.3)."""
_MOST_GIGABYTES = 1e6
"""Largest plausible bandwidth, GB/s."""
_MOST_CHANNELS = 256
_GIGA = 1e9


class _Header(Struct):
    id: str
    rank: int
    n_ranks: int = 0
    nnodes: int = 0


class _Metadata(Struct):
    inspector_output_format_version: str
    dump_timestamp_us: int


class _KernelTimes(Struct):
    kernel_stop_ts: int = 0


class _EventTrace(Struct):
    kernel_events: list[_KernelTimes] = []


class _Collective(Struct):
    coll: str
    coll_sn: int = 0
    coll_msg_size_bytes: int = 0
    coll_exec_time_us: float | None = None
    coll_timing_source: str = ""
    coll_algobw_gbs: float | None = None
    coll_busbw_gbs: float | None = None
    event_trace_ts: _EventTrace | None = None


class _Transfer(Struct):
    p2p: str
    p2p_sn: int = 0
    p2p_peer: int = 0
    p2p_msg_size_bytes: int = 0
    p2p_exec_time_us: float | None = None
    p2p_timing_source: str = ""
    p2p_algobw_gbs: float | None = None
    p2p_busbw_gbs: float | None = None
    event_trace_ts: _EventTrace | None = None


class _Dump(Struct):
    coll_dropped_since_last_dump: int = 0
    p2p_dropped_since_last_dump: int = 0


class _Line(Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _Transfer | None = None
    dump_stats: _Dump | None = None


_decode = msgspec.json.Decoder(_Line).decode


class InspectorReader:
    """Reads the lines of one file in order."""

    source = "inspector"

    def __init__(self) -> None:
        self._context: tuple[_Header, _Metadata] | None = None
        """Header and metadata of the last line that had both."""
        self.dropped = 0
        """Operations that the plugin itself has lost because its buffer was full."""

    def reset(self) -> None:
        """Forget the context, because lines were skipped."""
        self._context = None

    def read(self, raw: bytes) -> CollectiveEvent | None:
        """Parse a line; None if it has no operation. Raises EventError."""
        try:
            line = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            raise EventError("malformed") from err
        header, metadata = self._header_of(line)
        if line.dump_stats is not None:
            self._count_dropped(line.dump_stats)
        operation, peer = _operation(line)
        if operation is None:
            return None
        if header is None or metadata is None:
            raise EventError("no_context")
        return _event(header, metadata, operation, peer)

    def _header_of(self, line: _Line) -> tuple[_Header | None, _Metadata | None]:
        if line.header is not None and line.metadata is not None:
            if not line.metadata.inspector_output_format_version.startswith(_MAJOR):
                self._context = None
                raise EventError("unknown_version")
            self._context = line.header, line.metadata
        return self._context or (None, None)

    def _count_dropped(self, dump: _Dump) -> None:
        for lost in (dump.coll_dropped_since_last_dump, dump.p2p_dropped_since_last_dump):
            self.dropped += checked(lost, MOST_SEQUENCE)


def _event(header: _Header, metadata: _Metadata, operation: _Collective, peer: int | None) -> CollectiveEvent:
    stopped = _kernel_end(operation.event_trace_ts)
    end = checked(stopped or metadata.dump_timestamp_us, MOST_MICROSECONDS, kind="absurd")
    return CollectiveEvent(
        name=standard_name(operation.coll),
        end=end,
        duration=round(_execution(operation)),
        bytes=checked(operation.coll_msg_size_bytes, MOST_BYTES, kind="absurd"),
        communicator=header.id[:NAME_LENGTH],
        rank=checked(header.rank, MOST_RANKS, kind="absurd"),
        ranks=checked(header.n_ranks, MOST_RANKS, kind="absurd"),
        nodes=checked(header.nnodes, MOST_RANKS, kind="absurd"),
        sequence=checked(operation.coll_sn, MOST_SEQUENCE, kind="absurd"),
        peer=peer,
        exact=stopped is not None,
        algorithm_bandwidth=_bytes_per_second(operation.coll_algobw_gbs),
        bus_bandwidth=_bytes_per_second(operation.coll_busbw_gbs),
        timing=operation.coll_timing_source[:NAME_LENGTH],
    )


def _operation(line: _Line) -> tuple[_Collective | None, int | None]:
    """The line's operation, under the names of a collective's fields, and the peer of a transfer."""
    transfer = line.p2p_perf
    if transfer is None:
        return line.coll_perf, None
    operation = _Collective(
        transfer.p2p,
        transfer.p2p_sn,
        transfer.p2p_msg_size_bytes,
        transfer.p2p_exec_time_us,
        transfer.p2p_timing_source,
        transfer.p2p_algobw_gbs,
        transfer.p2p_busbw_gbs,
        transfer.event_trace_ts,
    )
    return operation, transfer.p2p_peer


def _execution(operation: _Collective) -> float:
    if operation.coll_exec_time_us is None:
        raise EventError("untimed")
    return checked(operation.coll_exec_time_us, float(LONGEST_MICROSECONDS), kind="absurd")


def _kernel_end(trace: _EventTrace | None) -> int | None:
    """When the last channel of its kernel stopped; None if that is not written."""
    if trace is None:
        return None
    return max((channel.kernel_stop_ts for channel in trace.kernel_events[:_MOST_CHANNELS]), default=0) or None


def _bytes_per_second(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else checked(gigabytes, _MOST_GIGABYTES, kind="absurd") * _GIGA
