"""The interval of a message: limits, replays, and its conversion to a TrainingReport. Times in milliseconds."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import MS, NEVER, Parallel, TrainingReport
from exporter.training.inbox import resolve_interval
from exporter.training.message import Degrees, Message, Quality, ReportRefusedError, Schedule, Shape, decode_message
from exporter.training.receiver import to_report
from exporter.workloads import WorkloadProcess

HOUR = 3_600_000
NOW = 2 * HOUR


def when(
    seconds: float = 0.0, *, at: float | None = None, begun: float | None = None, until: float | None = None
) -> Any:
    """Start and end in milliseconds, or the outcome of the rejection; times since boot."""
    times = {name: NEVER if time is None else int(time * MS) for name, time in (("begun", begun), ("until", until))}
    ended = None if at is None else int(at * MS)
    try:
        start, end = resolve_interval(Message(seconds=seconds), at=ended, arrived=NOW * MS, **times)
    except ReportRefusedError as err:
        return err.outcome
    return start / MS, end / MS


def test_an_interval_ends_when_the_message_says_or_when_it_arrives() -> None:
    assert when(2) == (NOW - 2000, NOW)
    assert when(2, at=NOW - 500) == (NOW - 2500, NOW - 500)
    assert when(2, at=NOW - 500.7) == (NOW - 2501, NOW - 501), "on whole milliseconds"
    assert when() == (NOW, NOW)
    assert when(0.0001) == (NOW - 1, NOW), "figures have an interval, however short"


def test_time_to_come_is_cut_within_a_second_and_refused_beyond() -> None:
    assert when(2, at=NOW + 1000) == (NOW - 2000, NOW)
    assert when(2, at=NOW + 1001) == "future"
    assert when(at=1.8e12) == "future", "somebody sends the time of day"


def test_an_hour_is_the_most() -> None:
    assert when(2, at=NOW - HOUR) == (NOW - HOUR - 2000, NOW - HOUR)
    assert when(2, at=NOW - HOUR - 1) == "old"


def test_nothing_was_done_before_the_process_began() -> None:
    assert when(2, begun=NOW - 1500) == (NOW - 1500, NOW), "within a second it is cut"
    assert when(2, begun=NOW - 999) == "before_start"
    assert when(0.5, begun=NOW) == "before_start", "not even its end is after that"
    assert when(at=NOW - 3000, begun=NOW - 1500) == "before_start"


def test_time_is_spoken_of_once() -> None:
    assert when(2, until=NOW - 2000) == (NOW - 2000, NOW)
    assert when(2, until=NOW - 1000) == (NOW - 1000, NOW), "what a queue shifts is cut"
    assert when(2, until=NOW - 999) == "replayed"
    assert when(2, at=NOW - 500, until=NOW - 500) == "replayed", "the same again"
    assert when(0.1, until=NOW) == "replayed"
    assert when(0.1, at=NOW - 50, until=NOW) == "replayed"


def test_an_event_may_be_late_by_a_second() -> None:
    assert when(at=NOW - 900, until=NOW) == (NOW, NOW), "but nothing goes back"
    assert when(at=NOW - 1001, until=NOW) == "replayed"


TIME = st.integers(-10 * HOUR, 10 * HOUR)


@given(st.floats(0, 86_400), st.none() | TIME, st.none() | TIME, st.none() | TIME)
def test_whatever_is_said_an_interval_is_within_bounds(
    seconds: float, at: int | None, begun: int | None, until: int | None
) -> None:
    found = when(seconds, at=at, begun=None if begun is None else min(begun, NOW), until=until and min(until, NOW))
    if isinstance(found, tuple):
        start, end = found
        assert start <= end <= NOW
        assert end >= NOW - HOUR
        assert start >= max(min(begun, NOW) if begun is not None else start, min(until, NOW) if until else start)
        assert end > start or not seconds


def test_what_is_said_is_told_in_the_core_s_words() -> None:
    message = Message(
        seconds=2.0, run="a", world_size=16, step=9, steps=3, highest_step=12, epoch=0.5, tokens=100.0, padding=10.0,
        samples=4.0, model=Shape(parameters=1000), hardware_flops=1e6, dtype="fp8", parallel=Degrees(tensor=8, data=2),
        pipeline=Schedule(2, 9), recompute="full", phase="data", phases={"data": 0.5, "checkpoint": 0.25},
        checkpoints=1, restart=True, loss="inf", quality=Quality(0.7, "accuracy", 0.9), rank=5, model_flops_16bit=3.0,
    )  # fmt: skip
    said = to_report(message, WorkloadProcess(1, "j", ("GPU-0", "GPU-1")), start=0, end=2000 * MS)
    assert said == TrainingReport(
        "j", 0, 2000 * MS, model_flops=6e5, gpus=16, uuids=("GPU-0", "GPU-1"), rank="5", run="a", step=9, steps=3,
        highest_step=12, epoch=0.5, tokens=100.0, padding=10.0, samples=4.0, hardware_flops=1e6, dtype="fp8",
        recompute="full", phase="data", phases=(("data", 500 * MS), ("checkpoint", 250 * MS)), bubble=0.1,
        checkpoints=1, restart=True, loss=float("inf"), quality=0.7, quality_name="accuracy", quality_target=0.9,
        parallel=Parallel(tensor=8, data=2), world_size=16, model_flops_16bit=3.0,
    )  # fmt: skip


def test_a_loss_that_json_cannot_represent() -> None:
    def loss(raw: bytes) -> float | None:
        return to_report(decode_message(raw), WorkloadProcess(1, "j"), start=0, end=0).loss

    assert math.isnan(loss(b'{"loss": "nan"}') or 0.0)
    assert (loss(b'{"loss": "-inf"}'), loss(b'{"loss": 2}'), loss(b"{}")) == (-math.inf, 2.0, None)


def test_the_process_knows_its_rank_better_than_who_started_it() -> None:
    """All workers spawned by one srun task have that task's rank; a claimed rank affects only its own job."""
    assert to_report(Message(rank=5), WorkloadProcess(1, "j", rank="3"), start=0, end=0).rank == "5"
    assert to_report(Message(), WorkloadProcess(1, "j", rank="3"), start=0, end=0).rank == "3"
    assert to_report(Message(rank=0), WorkloadProcess(1, "j"), start=0, end=0).rank == "0"
    assert to_report(Message(), WorkloadProcess(1, "j"), start=0, end=0).rank == ""


def test_figures_are_of_the_world_or_of_those_that_are_named_or_of_one() -> None:
    def of(message: Message) -> int:
        return to_report(message, WorkloadProcess(1, "j"), start=0, end=0).gpus

    assert [of(Message()), of(Message(world_size=8)), of(Message(world_size=8, gpus=2))] == [1, 8, 2]


@given(st.dictionaries(st.sampled_from(["data", "compute", "bubble"]), st.floats(0, 5)), st.integers(1, 10_000))
def test_phases_never_fill_more_than_their_interval(phases: Any, length: int) -> None:
    said = to_report(Message(seconds=20.0, phases=phases), WorkloadProcess(1, "j"), start=0, end=length * MS)
    assert sum(spent for _, spent in said.phases) <= length * MS
    assert all(spent >= 0 for _, spent in said.phases)
