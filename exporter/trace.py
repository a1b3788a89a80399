"""Reads and writes recordings of Observations as JSON lines, for replay, tests and bug reports.

Owns the file format: a header line with a version, then one Observation a line; gzip when the name ends in `.gz`.
Another format, an unknown version or a damaged line raises `TraceError`. Only a truncated last line is accepted, since
every recorder that is killed leaves one: see `TraceReader.truncated`.
"""

import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import SECOND, Observation
from exporter.formatting import format_time

FORMAT = "gpu-efficiency-trace"
VERSION = 1
KNOWN_VERSIONS = (VERSION,)
_LONGEST_LINE = 64 << 20
"""Bytes. An observation of a node has some ten thousand; a file of another kind, or a gzip bomb, must not exhaust the
memory."""
_LEVEL = 6
"""The gzip command's default; higher levels cost more CPU than they save."""


_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a damaged line may raise."""


class TraceError(Exception):
    """The trace cannot be written or read; the message contains the file, the line and what to do."""


class TraceHeader(Struct, frozen=True):
    """The first line of a trace."""

    format: str = FORMAT
    version: int = VERSION
    host: str = ""
    simulated: bool = False
    """True if the data was simulated: no report may show it as measured."""
    created_wall: int = 0
    """Unix nanoseconds; informational."""
    note: str = ""


class _HeaderVersion(Struct):
    """The header's fields that decide whether the rest can be decoded."""

    format: str = ""
    version: int = 0


class TraceWriter:
    """Appends Observations to a new trace. As a context manager, closes it on exit.

    `target` is a path, or an open binary file (which `close` flushes but leaves open). An existing path is an error
    unless `overwrite`. Flushes after every `flush_every` observations, so that they survive this process; 0: only in
    `flush()` and `close()`. Never calls fsync: a power failure may lose the last seconds. Raises TraceError if the
    file cannot be created or written; a failed write ends the recording, because the next line would follow a partial
    line.
    """

    def __init__(
        self,
        target: str | Path | BinaryIO,
        header: TraceHeader,
        *,
        flush_every: int = 1,
        overwrite: bool = False,
    ) -> None:
        self._name = str(target if isinstance(target, (str, Path)) else getattr(target, "name", "trace"))
        self._file, self._close = _create(target, overwrite=overwrite)
        self._failed = ""
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._flush_every = flush_every
        self.observations = 0
        self._write(header)
        self.flush()

    def append(self, observation: Observation) -> None:
        """Write one observation; flush after every `flush_every`."""
        self._write(observation)
        if self._flush_every and (self.observations + 1) % self._flush_every == 0:
            self.flush()
        self.observations += 1

    def _write(self, value: TraceHeader | Observation) -> None:
        if self._failed:
            raise TraceError(self._failed)
        # Line and newline in one write: a reader that follows the file sees a newline only after a whole line.
        self._encoder.encode_into(value, self._buffer)
        self._buffer += b"\n"
        with self._writing():
            self._file.write(self._buffer)

    def flush(self) -> None:
        """Flush everything written so far to the operating system."""
        with self._writing():
            self._file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = (
                f"{self._name}: the recording stopped after {self.observations:,} observations: "
                f"{error.strerror or error}; make room, then start a new recording"
            )
            raise TraceError(self._failed) from error

    def close(self) -> None:
        """Flush, and close the file if this writer opened it; after a failed write, raise nothing."""
        with suppress(OSError) if self._failed else self._writing():
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(target: str | Path | BinaryIO, *, overwrite: bool) -> tuple[BinaryIO, Callable[[], None]]:
    if not isinstance(target, (str, Path)):
        return target, target.flush
    try:
        raw = Path(target).open("wb" if overwrite else "xb")  # noqa: SIM115  the writer owns and closes it
    except FileExistsError as error:
        raise TraceError(
            f"{target}: a file of that name exists; name another one, or move the old recording away"
        ) from error
    except OSError as error:
        raise TraceError(f"{target}: cannot be created: {error.strerror or error}") from error
    if not str(target).endswith(".gz"):
        return raw, raw.close
    # No name and no time in the gzip header, so that the same observations give the same bytes.
    packed = gzip.GzipFile(fileobj=raw, filename="", mode="wb", compresslevel=_LEVEL, mtime=0)

    def close() -> None:
        packed.close()
        raw.close()

    return cast("BinaryIO", packed), close


class TraceReader:
    """An open trace: its header, and an iterator over its Observations, which decodes each once.

    Iteration raises TraceError for a broken line, and closes the file at the end; a caller that stops earlier must
    call `close`. `truncated` stays None unless the end of the trace is cut off, which it then describes;
    `observations` is the number read so far.
    """

    def __init__(self, file: BinaryIO, name: str, *, close: Callable[[], None], raw: BinaryIO | None = None) -> None:
        self._name = name
        self._file = file
        self._raw = file if raw is None else raw
        self._close = close
        self.truncated: str | None = None
        self.observations = 0
        line, _ = self._line(1)
        if not line:
            raise TraceError(f"{self._name}: is empty: not even a header was written; record it again")
        self.header = _header(line, self._name)
        self._iterator = self._observations()

    def _line(self, number: int) -> tuple[bytes, bool]:
        """Return the next line, and whether a compressed file ended before its end-of-stream marker."""
        try:
            line = self._file.readline(_LONGEST_LINE + 1)
        except EOFError:
            return b"", True
        except (zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(
                f"{self._name}: cannot be unpacked at line {number}: {error}; "
                "the file was damaged after it was written, or is not gzip: fetch it again"
            ) from error
        if len(line) > _LONGEST_LINE:
            raise TraceError(
                f"{self._name}: line {number} has more than {_LONGEST_LINE:,} bytes: no recording has such"
            )
        return line, False

    def _observations(self) -> Iterator[Observation]:
        decode = msgspec.json.Decoder(Observation).decode
        try:
            for number in count(2):
                line, broke_off = self._line(number)
                if broke_off:
                    self._truncate(
                        f"the compressed stream breaks off after line {number - 1:,}: the recorder was stopped before"
                        " it could close the file, and what came last may be missing"
                    )
                if not line:
                    return
                try:
                    observation = decode(line)
                except _UNDECODABLE as error:
                    if line.endswith(b"\n"):
                        raise TraceError(
                            f"{self._name}: line {number} is not an observation: {error}; "
                            "the file was changed after it was recorded: fetch it again or delete that line"
                        ) from error
                    self._truncate(
                        f"line {number:,} is cut off after {len(line):,} bytes: the recording ended in the middle of a"
                        " write"
                    )
                    return
                self.observations += 1
                yield observation
        finally:
            self._close()

    def _truncate(self, what: str) -> None:
        self.truncated = f"{what}; {self.observations:,} observations were read"

    def __iter__(self) -> Iterator[Observation]:
        return self._iterator

    @property
    def size(self) -> int | None:
        """Size of the file on disk, bytes; None if unknown, as for a pipe."""
        try:
            return os.fstat(self._raw.fileno()).st_size if self._raw.seekable() else None
        except (OSError, ValueError):
            return None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file read so far; 0 if unknown."""
        with suppress(OSError, ValueError):
            return self._raw.tell()
        return 0

    def close(self) -> None:
        """Close the file that `read_trace` opened; a file that the caller opened stays open."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(source: str | Path | BinaryIO) -> TraceReader:
    """Open a trace and read its header; iterate over the result for its Observations.

    `source` is a path (gzip if it ends in `.gz`) or an open binary file, which may be a pipe. Raises TraceError if it
    cannot be opened, is not a trace, or has an unknown version.
    """
    if not isinstance(source, (str, Path)):
        return TraceReader(source, str(getattr(source, "name", "trace")), close=lambda: None)
    try:
        raw = Path(source).open("rb")  # noqa: SIM115  the trace owns and closes it
    except OSError as error:
        raise TraceError(f"{source}: cannot be opened: {error.strerror or error}") from error
    packed = str(source).endswith(".gz")
    file = cast("BinaryIO", gzip.GzipFile(fileobj=raw, mode="rb")) if packed else raw
    try:
        return TraceReader(file, str(source), close=raw.close, raw=raw)
    except BaseException:
        raw.close()
        raise


def _header(line: bytes, name: str) -> TraceHeader:
    try:
        kind = msgspec.json.decode(line, type=_HeaderVersion)
    except _UNDECODABLE as error:
        raise _not_a_trace(line, name) from error
    if kind.format != FORMAT:
        raise _not_a_trace(line, name)
    if kind.version not in KNOWN_VERSIONS:
        known = ", ".join(map(str, KNOWN_VERSIONS))
        raise TraceError(
            f"{name}: is a trace of version {kind.version}; this program knows version {known}: "
            "replay it with the release that recorded it, or a newer one"
        )
    try:
        return msgspec.json.decode(line, type=TraceHeader)
    except _UNDECODABLE as error:
        raise TraceError(f"{name}: line 1, the header, cannot be read: {error}") from error


def _not_a_trace(line: bytes, name: str) -> TraceError:
    return TraceError(
        f"{name}: is not a trace: line 1 should be a header with format {FORMAT!r}, "
        f"but starts with {line[:40]!r}; is a .gz missing from its name, or is it another file?"
    )


def shift_observation(observation: Observation, nanoseconds: int, *, wall: int = 0) -> Observation:
    """Return `observation` with all its monotonic times moved by `nanoseconds`, and its wall clock by `wall`."""

    def later(moment: int | None) -> int | None:
        return None if moment is None else moment + nanoseconds

    return replace(
        observation,
        at=observation.at + nanoseconds,
        wall=observation.wall + wall,
        settled=later(observation.settled),
        allocations_at=later(observation.allocations_at),
        readings=tuple(replace(r, start=r.start + nanoseconds, end=r.end + nanoseconds) for r in observation.readings),
        allocations=None
        if observation.allocations is None
        else tuple(replace(a, start=a.start + nanoseconds, end=later(a.end)) for a in observation.allocations),
        reports=tuple(replace(r, start=r.start + nanoseconds, end=r.end + nanoseconds) for r in observation.reports),
        serving=tuple(replace(s, start=s.start + nanoseconds, end=s.end + nanoseconds) for s in observation.serving),
    )


class TraceSpan(NamedTuple):
    """What a trace is of: its first and last observation, Unix nanoseconds."""

    node: str
    gpu: str
    """One of its GPUs: nodes of two clusters may have the same name. Empty: its name tells."""
    first: int
    last: int
    name: str
    simulated: bool = False


def refuse_overlaps(spans: Iterable[TraceSpan]) -> None:
    """Raise TraceError if two traces are of one node and the same time: its GPUs would count twice."""
    for before, after in pairwise(sorted(spans)):
        if (before.node, before.gpu) == (after.node, after.gpu) and after.first <= before.last:
            raise TraceError(
                f"{after.name} begins {format_time(after.first / SECOND)}, before {before.name} of the same node"
                f" {before.node} ends ({format_time(before.last / SECOND)}): traces of one node must not overlap; omit"
                " one of them"
            )
