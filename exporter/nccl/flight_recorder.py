"""Reads PyTorch's Flight Recorder of a job's processes on this node, and finds the rank that has fallen behind.

Two ways. The worker's control plane serves handlers over HTTP on a unix socket (TORCH_WORKER_SERVER_SOCKET):
dump_nccl_trace_json, fr_trace_json for other backends such as Gloo, and dump_traceback for the Python stacks. Or any
write to a pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE) makes the process dump a pickle to a file of its own; that writes a
file of the job, so an operator must allow it.
Sources: pytorch/pytorch torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, control_plane/*.cpp,
ProcessGroupNCCL.cpp (BSD-3).
"""

import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.nccl.comparison import Comparison, compare
from exporter.nccl.connection import BoundedConnection, NoAnswerError
from exporter.nccl.job_files import open_owned, open_written_after
from exporter.nccl.pickle_reader import PickleRefusedError, read_pickle
from exporter.nccl.processes import LocalProcess
from exporter.nccl.ras import Communicator, Number, RasAnswer, RasRank
from exporter.sockets import peer_credentials

LIMIT_BYTES = 8 << 20
HANDLERS = ("dump_nccl_trace_json?onlyactive=false", "fr_trace_json")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_NOT_FOUND = 404
_MAIN_FRAME = re.compile(r'File "([^"\n]{1,400})", line (\d{1,9}) in ([^\n]{1,200})')
_FRAME_LENGTH = 200
_FRAMES = 8
"""Topmost frames that are looked at."""
_WRAPPERS = frozenset({"distributed_c10d.py", "c10d_logger.py"})
"""Files of torch.distributed through which every collective is called."""
_HERE = "this node"
MOST_ENTRIES = 20_000
"""Newest entries that are read; PyTorch keeps 2,000 by default."""
MOST_GROUPS = 512
MOST_VALUES = 600_000
"""Values of a dump in JSON, by their commas and brackets: an entry has about 30."""
_TEXT_LENGTH = 128


class _Frame(Struct, frozen=True):
    name: str = ""
    filename: str = ""
    line: Number = 0


class _Entry(Struct, frozen=True):
    collective_seq_id: Number = 0
    pg_id: Number = 0
    process_group: tuple[str, ...] = ()
    """Name and description."""
    profiling_name: str = ""
    state: str = ""
    retired: bool = False
    """It has ended, as of Gloo, whose collectives stay "scheduled"."""
    time_discovered_started_ns: Number | None = None
    is_p2p: bool = False
    frames: tuple[_Frame, ...] = ()


class _GroupStatus(Struct, frozen=True):
    """Its numbers are of collectives and of point-to-point transfers alike, so they show movement, and no order."""

    last_completed_collective: Number = -1


class _Dump(Struct, frozen=True):
    entries: tuple[_Entry, ...] = ()
    pg_config: tuple[str, ...] = ()
    """Names of the process groups."""
    pg_status: dict[str, _GroupStatus] = {}
    """By the process's own number of the process group."""


class RecordedCollective(Struct, frozen=True):
    """A collective in the Flight Recorder's buffer."""

    group: str
    """Name of the process group."""
    sequence: int
    """Its number in the process group."""
    name: str
    """Such as nccl:all_reduce."""
    state: str
    """scheduled, started or completed."""
    started_ns: int | None
    """When its start was seen, Unix nanoseconds."""
    frame: str
    """Top of the stack that called it; empty in JSON, which has no stacks."""


class RankTrace(Struct, frozen=True):
    """The Flight Recorder of one process."""

    process: LocalProcess
    collectives: tuple[RecordedCollective, ...]
    enqueued: dict[str, int]
    """By process group, the number of the last collective that it has begun, if that is in the buffer."""
    completed: dict[str, int]
    """By process group, the number of the last collective or point-to-point transfer that has ended."""


def to_trace(process: LocalProcess, value: object) -> RankTrace:
    """Convert a decoded dump. Raises NoAnswerError."""
    try:
        dump = msgspec.convert(_trimmed(value), _Dump, strict=False)  # not strict: JSON has numbers as text
    except (msgspec.ValidationError, RecursionError, TypeError) as err:
        raise NoAnswerError("recorder_malformed", f"no dump of the Flight Recorder: {err}") from err
    names = {entry.pg_id: entry.process_group[0] for entry in dump.entries if entry.process_group}
    collectives = tuple(_collective(entry) for entry in dump.entries if entry.process_group and not entry.is_p2p)
    enqueued: dict[str, int] = {}
    for each in collectives:
        if each.group not in enqueued and len(enqueued) == MOST_GROUPS:
            continue
        enqueued[each.group] = max(each.sequence, enqueued.get(each.group, 0))
    completed: dict[str, int] = {}
    for number, status in dump.pg_status.items():
        name = names.get(int(number), number) if number.isdecimal() and len(number) < 10 else number  # noqa: PLR2004
        if name in dump.pg_config or name in enqueued:
            completed[name] = status.last_completed_collective
    return RankTrace(process, collectives, enqueued, completed)


def _trimmed(value: object) -> dict[str, object]:
    """What is converted of a dump. A pickle may have one large value in many places, so each is cut before that."""
    if not isinstance(value, dict):
        raise NoAnswerError("recorder_malformed", "a dump of the Flight Recorder is a dict")
    entries, status = value.get("entries") or (), value.get("pg_status") or {}
    if not isinstance(entries, list | tuple) or not isinstance(status, dict):
        raise NoAnswerError("recorder_malformed", "a dump of the Flight Recorder has a list of entries")
    names = islice(value.get("pg_config") or (), MOST_GROUPS)
    return {
        "entries": [_trimmed_entry(entry) for entry in entries[-MOST_ENTRIES:]],
        "pg_config": [_cut(name) for name in names if isinstance(name, str)],
        "pg_status": {_cut(key): _picked(each, _GroupStatus) for key, each in islice(status.items(), MOST_GROUPS)},
    }


def _trimmed_entry(entry: object) -> dict[str, object]:
    cut = _picked(entry, _Entry) if isinstance(entry, dict) else {}
    frames, group = cut.get("frames"), cut.get("process_group")
    if isinstance(frames, list | tuple):
        cut["frames"] = [_picked(frame, _Frame) for frame in frames[:_FRAMES]]
    if isinstance(group, list | tuple):
        cut["process_group"] = [_cut(name) for name in group[:2]]
    return cut


def _picked(value: Any, kind: type[Struct]) -> Any:
    """The known fields of a dict; anything else is left for the conversion to refuse."""
    if not isinstance(value, dict):
        return value
    return {name: _cut(value[name]) for name in kind.__struct_fields__ if name in value}


def _cut(value: Any) -> Any:
    """A text's end: of a path that is the file's name."""
    return value[-_TEXT_LENGTH:] if isinstance(value, str) else value


def _collective(entry: _Entry) -> RecordedCollective:
    frame = _shown_frame((each.name, each.filename, each.line) for each in entry.frames)
    started = entry.time_discovered_started_ns or None  # JSON has 0 for a collective that has not started
    name, state = entry.profiling_name, "completed" if entry.retired else entry.state
    return RecordedCollective(entry.process_group[0], entry.collective_seq_id, name, state, started, frame)


def _shown_frame(frames: Iterable[tuple[str, str, int]]) -> str:
    """The topmost frame outside of PyTorch's wrappers, without the file's folder, which often has the user's name."""
    shown = [(name, file.rpartition("/")[2], line) for name, file, line in islice(frames, _FRAMES)]
    own = [frame for frame in shown if frame[1] not in _WRAPPERS]
    return next((f"{name} ({file}:{line})"[:_FRAME_LENGTH] for name, file, line in (*own, *shown)), "")


def compare_traces(first: Sequence[RankTrace], second: Sequence[RankTrace]) -> Comparison:
    """Compare two readings of the same processes, as `comparison.compare` does with answers of RAS."""
    ended = {trace.process.pid: trace.completed for trace in first}
    if any(trace.process.pid in ended and trace.completed != ended[trace.process.pid] for trace in second):
        return Comparison(related=True, moving=True)
    processes = [(_HERE, trace.process.pid, 0) for trace in second]
    found = compare(_as_answer(first), _as_answer(second), processes=processes)
    if found.culprit is None:
        return found
    pid = found.culprit.process[1]
    name = _waited_for(second, pid=pid, sequence=found.culprit.sequence)
    rank = next((trace.process.rank for trace in second if trace.process.pid == pid), "")
    return replace(found, culprit=replace(found.culprit, rank=rank, collective=name))


def _as_answer(traces: Iterable[RankTrace]) -> RasAnswer:
    """The ranks' progress in the form of RAS: a process group is a communicator with one function."""
    groups: dict[str, list[RasRank]] = {}
    for index, trace in enumerate(traces):
        rank = int(trace.process.rank) if trace.process.rank.isdecimal() else index
        for name, reached in trace.enqueued.items():
            counts = {name: max(0, reached)}
            groups.setdefault(name, []).append(RasRank(rank, _HERE, trace.process.pid, 0, -1, counts))
    return RasAnswer(tuple(Communicator(name, size=len(ranks), ranks=tuple(ranks)) for name, ranks in groups.items()))


def _waited_for(traces: Iterable[RankTrace], *, pid: int, sequence: int | None) -> str:
    """Name of the collective of that number that other processes wait in; empty: not in their buffers."""
    names = (
        each.name
        for trace in traces if trace.process.pid != pid
        for each in trace.collectives if each.sequence == sequence and each.state != "completed"
    )  # fmt: skip
    return next(names, "")


def remembered(trace: RankTrace) -> RankTrace:
    """What a later comparison, and `last_frame`, need of it."""
    last = next((each for each in reversed(trace.collectives) if each.frame), None)
    return replace(trace, process=replace(trace.process, variables={}), collectives=(last,) if last else ())


def last_frame(trace: RankTrace) -> str:
    """Top of the stack of the last collective that the process has begun; empty: unknown."""
    return next((each.frame for each in reversed(trace.collectives) if each.frame), "")


# The control plane's handlers.


def read_handlers(process: LocalProcess, proc: Path, *, seconds: float) -> RankTrace:
    """Read the Flight Recorder over the process's own control plane. Raises NoAnswerError."""
    for handler in HANDLERS:
        status, body = _request(process, proc, handler, seconds=seconds)
        trace = None if status == _NOT_FOUND else _parse_json(process, body)
        if trace is not None and (trace.enqueued or trace.completed):  # without NCCL, NCCL's handler has nothing
            return trace
    raise NoAnswerError("recorder_empty", "the Flight Recorder is empty, or this PyTorch has no handler for it")


def _parse_json(process: LocalProcess, body: bytes) -> RankTrace:
    if (values := sum(map(body.count, (b",", b"[", b"{")))) > MOST_VALUES:  # a few bytes of text may be many objects
        raise NoAnswerError("recorder_too_large", f"a Flight Recorder of {values} values; {MOST_VALUES} are read")
    try:
        return to_trace(process, msgspec.json.decode(body))
    except (msgspec.DecodeError, RecursionError, ValueError) as err:
        raise NoAnswerError("recorder_malformed", f"the Flight Recorder's JSON cannot be decoded: {err}") from err


def read_stack(process: LocalProcess, proc: Path, *, seconds: float) -> str:
    """Top of the stack of the process's main thread. Raises NoAnswerError.

    Python's faulthandler writes the main thread last, and of each thread the latest call first.
    """
    status, body = _request(process, proc, "dump_traceback", seconds=seconds)
    if status == _NOT_FOUND:
        raise NoAnswerError("recorder_no_handler", "this PyTorch has no handler for stacks")
    threads = body.decode(errors="replace").split("hread 0x")
    return _shown_frame((found[3], found[1], int(found[2])) for found in _MAIN_FRAME.finditer(threads[-1]))


def _request(process: LocalProcess, proc: Path, handler: str, *, seconds: float) -> tuple[int, bytes]:
    """POST to a handler; return the status and the body."""
    with _connect(process, proc, seconds=seconds) as sock:
        connection = BoundedConnection(sock, seconds=seconds, limit=LIMIT_BYTES, prefix="recorder")
        # HTTP/1.0: the server must close the connection at the end, and may not send chunks.
        request = f"POST /handler/{handler} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
        connection.send(request.encode())
        head, _, body = connection.rest().partition(b"\r\n\r\n")
    status = _STATUS_LINE.match(head)
    if status is None:
        raise NoAnswerError("recorder_malformed", "the control plane's reply is not HTTP")
    if int(status[1]) not in (200, _NOT_FOUND):
        raise NoAnswerError("recorder_status", f"the control plane replied HTTP {int(status[1])}")
    return int(status[1]), body


def _connect(process: LocalProcess, proc: Path, *, seconds: float) -> socket.socket:
    """Connect to the process's control plane, after checking that it is this process that listens."""
    path = process.variables.get("TORCH_WORKER_SERVER_SOCKET", "")
    sock = socket.socket(socket.AF_UNIX)
    try:
        with open_owned(path, process, proc, kind=stat.S_ISSOCK) as descriptor:
            sock.settimeout(seconds)
            sock.connect(f"/proc/self/fd/{descriptor}")
        _check_server(sock, process)
    except OSError as err:
        sock.close()
        raise NoAnswerError("recorder_closed", f"{path} cannot be reached: {err}") from err
    except NoAnswerError:
        sock.close()
        raise
    return sock


def _check_server(sock: socket.socket, process: LocalProcess) -> None:
    if peer_credentials(sock)[0] != process.pid:
        raise NoAnswerError("recorder_foreign", f"another process than {process.pid} serves its socket")


# The dump to a file.


def dump_and_read(process: LocalProcess, proc: Path, *, seconds: float) -> RankTrace:
    """Let the process dump its Flight Recorder to its own file, and read that. Raises NoAnswerError.

    Only to a file that the job has chosen: PyTorch's default is in /tmp or in its user's home, by its release.
    """
    variables, rank = process.variables, process.variables.get("RANK") or process.rank
    pipe = variables.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    target = variables.get("TORCH_FR_DUMP_TEMP_FILE") or variables.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if not pipe or not target or not rank.isdecimal():
        raise NoAnswerError("recorder_no_handler", "the process has no pipe that triggers a dump, or no file for it")
    since = time.time_ns()
    _trigger(f"{pipe}{rank}.pipe", process, proc)
    data = open_written_after(since, f"{target}{rank}", process, proc, seconds=seconds, limit=LIMIT_BYTES)
    try:
        return to_trace(process, read_pickle(data))
    except PickleRefusedError as err:
        raise NoAnswerError("recorder_malformed", f"the Flight Recorder's dump is refused: {err}") from err


def _trigger(path: str, process: LocalProcess, proc: Path) -> None:
    with open_owned(path, process, proc, kind=stat.S_ISFIFO, write=True) as descriptor:
        try:
            os.write(descriptor, b"1\n")
        except OSError as err:
            raise NoAnswerError("recorder_closed", f"{path} is not read by its process: {err}") from err
