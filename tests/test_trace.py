"""Tests the trace format: round trips, and the messages for damaged files."""

import gzip
import io
from pathlib import Path

import pytest

from exporter.core.model import (
    SECOND,
    Allocation,
    Device,
    Fault,
    Observation,
    Owner,
    Process,
    Reading,
    Spec,
    TrainingReport,
)
from exporter.trace import FORMAT, TraceError, TraceHeader, TraceWriter, read_trace, shift_observation

HEADER = TraceHeader(host="node-1", simulated=True, created_wall=17, note="a test")
FIRST = Observation(
    at=0,
    wall=5,
    devices=(Device("GPU-a", index="0", model="X", spec=Spec("X", peak_flops=1e15), lacks=("fp64_active",)),),
    allocations=(Allocation("GPU-a", Owner("7", user="ada"), start=0, gpus=2, restarts=1),),
    source="test",
)
SECOND_ONE = Observation(
    at=SECOND,
    wall=5 + SECOND,
    readings=(
        Reading(
            "GPU-a",
            0,
            SECOND,
            gr_engine_active=0.1 + 0.2,
            tensor_active=0.0,
            clock_event_reasons=4,
            processes=(Process(12, memory_bytes=1 << 40, name="python\nà"),),
        ),
    ),
    settled=SECOND - 1,
    faults=(Fault("x", "what", "GPU-a"),),
)
LAST = Observation(at=2 * SECOND, wall=0, devices=(), allocations=())
STORY = (FIRST, SECOND_ONE, LAST)


def write(path: Path) -> Path:
    with TraceWriter(path, HEADER) as writer:
        for observation in STORY:
            writer.append(observation)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_goes_in_comes_out(tmp_path: Path, name: str) -> None:
    with read_trace(write(tmp_path / name)) as trace:
        assert trace.header == HEADER
        assert tuple(trace) == STORY
        assert trace.truncated is None
        assert trace.observations == 3


def test_absent_is_not_the_same_as_empty_or_zero(tmp_path: Path) -> None:
    first, second, last = read_trace(str(write(tmp_path / "a.jsonl")))
    assert second.devices is None
    assert second.allocations is None
    assert last.devices == ()
    assert last.allocations == ()
    assert second.readings[0].tensor_active == 0.0
    assert second.readings[0].sm_active is None
    assert first.settled is None


def test_gzip_bytes_depend_on_the_observations_alone(tmp_path: Path) -> None:
    assert write(tmp_path / "a.gz").read_bytes() == write(tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[3:8] == bytes(5)  # neither a name nor a time (RFC 1952)
    assert len(gzip.decompress((tmp_path / "a.gz").read_bytes()).splitlines()) == 4


def test_open_files_are_used_and_left_open() -> None:
    file = io.BytesIO()
    with TraceWriter(file, HEADER) as writer:
        writer.append(FIRST)
    file.seek(0)
    with read_trace(file) as trace:
        assert list(trace) == [FIRST]
    assert not file.closed


def test_each_observation_can_be_read_before_the_recorder_ends(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        with TraceWriter(tmp_path / name, HEADER) as writer:
            writer.append(FIRST)
            trace = read_trace(tmp_path / name)
            assert next(iter(trace)) == FIRST
            trace.close()


def test_flush_every_is_kept_to(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with TraceWriter(path, HEADER, flush_every=2) as writer:
        writer.append(FIRST)
        assert len(path.read_bytes().splitlines()) == 1
        writer.append(SECOND_ONE)
        assert len(path.read_bytes().splitlines()) == 3
    path = tmp_path / "b.jsonl"
    with TraceWriter(path, HEADER, flush_every=0) as writer:
        for _ in range(3):
            writer.append(FIRST)
        assert len(path.read_bytes().splitlines()) == 1
        writer.flush()
        assert len(path.read_bytes().splitlines()) == 4


def test_a_recording_is_not_overwritten_unasked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    before = path.read_bytes()
    with pytest.raises(TraceError, match=r"a\.jsonl: a file of that name exists"):
        TraceWriter(path, HEADER)
    assert path.read_bytes() == before
    TraceWriter(path, HEADER, overwrite=True).close()
    assert list(read_trace(path)) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone/a\.jsonl: cannot be created: No such file"):
        TraceWriter(tmp_path / "gone" / "a.jsonl", HEADER)
    with pytest.raises(TraceError, match=r"gone/a\.jsonl: cannot be opened: No such file"):
        read_trace(tmp_path / "gone" / "a.jsonl")


class FullDisk(io.BytesIO):
    """A file that accepts `room` bytes and half of the next line, then fails."""

    room = 10_000

    def write(self, data: object, /) -> int:
        line = bytes(data)  # type: ignore[call-overload]
        if len(self.getvalue()) + len(line) > self.room:
            super().write(line[: len(line) // 2])
            raise OSError(28, "No space left on device")
        return super().write(line)


def test_a_full_disk_ends_the_recording_and_what_was_written_stays_readable() -> None:
    file = FullDisk()
    writer = TraceWriter(file, HEADER)
    writer.append(FIRST)
    file.room = len(file.getvalue()) + 10
    with pytest.raises(TraceError, match="stopped after 1 observations: No space left on device; make room"):
        writer.append(SECOND_ONE)
    file.room = 10_000
    with pytest.raises(TraceError, match="start a new recording"):
        writer.append(LAST)
    writer.close()
    file.seek(0)
    trace = read_trace(file)
    assert list(trace) == [FIRST]
    assert trace.truncated is not None


def read_cut(path: Path, whole: bytes, kept: int) -> tuple[int, str | None]:
    path.write_bytes(whole[:kept])
    trace = read_trace(path)
    seen = tuple(trace)
    assert seen == STORY[: len(seen)]
    return len(seen), trace.truncated


def test_a_last_line_cut_anywhere_is_told_not_raised(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = write(path).read_bytes()
    for kept in range(whole.index(b"\n") + 1, len(whole)):
        seen, truncated = read_cut(path, whole, kept)
        lines, rest = whole[:kept].count(b"\n"), whole[:kept].rpartition(b"\n")[2]
        # A line that lacks nothing but its newline is whole: JSON says itself where it ends.
        complete = bool(rest) and whole[kept:].startswith(b"\n")
        assert seen == lines - 1 + complete
        assert (truncated is None) == (complete or not rest)


def test_a_compressed_recording_cut_anywhere_is_told_not_raised(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = write(path).read_bytes()
    counts = set()
    for kept in range(140, len(whole)):
        seen, truncated = read_cut(path, whole, kept)
        counts.add(seen)
        assert truncated is not None
        assert f"breaks off after line {seen + 1}: " in truncated
        assert f"{seen} observations were read" in truncated
    assert counts == {0, 1, 2, 3}


def test_the_cut_is_located(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:31])
    trace = read_trace(tmp_path / "a.jsonl")
    assert trace.truncated is None
    assert len(list(trace)) == 2
    assert trace.truncated == (
        "line 4 is cut off after 31 bytes: the recording ended in the middle of a write; 2 observations were read"
    )


def test_zeros_after_a_power_cut_are_a_cut_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + bytes(4096))
    trace = read_trace(path)
    assert tuple(trace) == STORY
    assert trace.truncated is not None


@pytest.mark.parametrize("broken", [b"{}\n", b"\n", b"{'at': 1}\n", b'{"at":"now","wall":0}\n', b"\xff\xfe\n"])
def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path, broken: bytes) -> None:
    lines = write(tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join([*lines[:2], broken, *lines[2:]]))
    trace = iter(read_trace(tmp_path / "a.jsonl"))
    assert next(trace) == FIRST
    with pytest.raises(TraceError, match=r"a\.jsonl: line 3 is not an observation: .+: fetch it again"):
        next(trace)


def test_a_whole_but_broken_last_line_is_no_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + b'{"at":3}\n')
    with pytest.raises(TraceError, match="line 5"):
        list(read_trace(path))


def test_an_unknown_version_names_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"format":"%s","version":9,"host":[1]}\n{"other":1}\n' % FORMAT.encode())
    with pytest.raises(TraceError, match="trace of version 9; this program knows version 1: replay it with"):
        read_trace(path)


@pytest.mark.parametrize("line", [b"# HELP x\n", b"{}\n", b'{"format":"other","version":1}\n', b"[1]\n", b"\x1f\x8b"])
def test_another_kind_of_file_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(TraceError, match=r"a\.jsonl: is not a trace: line 1 should be a header .* is a \.gz missing"):
        read_trace(tmp_path / "a.jsonl")


def test_a_header_that_lies_about_its_types_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"format":"%s","version":1,"host":7}\n' % FORMAT.encode())
    with pytest.raises(TraceError, match="line 1, the header, cannot be read"):
        read_trace(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(TraceError, match="is empty"):
        read_trace(tmp_path / name)


def test_a_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz")
    packed = bytearray(path.read_bytes())
    packed[-6] ^= 0xFF
    path.write_bytes(packed)
    with pytest.raises(TraceError, match="cannot be unpacked at line 5"):
        list(read_trace(path))
    path.write_bytes(b"plain text\n")
    with pytest.raises(TraceError, match="cannot be unpacked at line 1"):
        read_trace(path)


def test_fields_of_a_later_release_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + b'{"at":3000000000,"wall":0,"later":[1]}\n')
    assert [observation.at for observation in read_trace(path)][-1] == 3 * SECOND


def test_a_shifted_observation_is_the_same_at_another_time_by_both_clocks() -> None:
    then = Observation(
        100, 5000, readings=(Reading("GPU-0", 10, 100),), settled=100, allocations_at=90,
        allocations=(Allocation("GPU-0", Owner("1"), 20),), reports=(TrainingReport("1", 30, 60, 1e15),),
    )  # fmt: skip
    now = shift_observation(then, 1000, wall=7)
    assert (now.at, now.wall, now.settled, now.allocations_at) == (1100, 5007, 1100, 1090)
    assert (now.readings[0].start, now.readings[0].end) == (1010, 1100)
    assert now.allocations == (Allocation("GPU-0", Owner("1"), 1020),)
    assert now.reports == (TrainingReport("1", 1030, 1060, 1e15),)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_how_much_of_the_file_was_taken_is_told_in_bytes_of_the_disk(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with TraceWriter(path, TraceHeader()) as writer:
        for number in range(20_000):
            writer.append(Observation(number, number, source=f"{number * 7919 % 10_007}"))
    size = path.stat().st_size
    with read_trace(path) as trace:
        assert trace.size == size
        taken = [trace.bytes_read for _ in trace if trace.observations % 5000 == 1]
    assert taken == sorted(taken)
    assert 0 < taken[0] < size / 2 < taken[-1] <= size


def test_a_file_that_is_not_on_a_disk_has_no_size() -> None:
    file = io.BytesIO()
    TraceWriter(file, TraceHeader()).close()
    file.seek(0)
    with read_trace(file) as trace:
        assert (trace.size, trace.bytes_read) == (None, len(file.getvalue()))
