"""Tests periods without work, from samples of a GPU's last work: which events end them, and which do not."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from exporter.preview.history import (
    START_GRACE_SECONDS,
    GpuKey,
    HeldGpu,
    PauseTracker,
    WorkSample,
    merge_holders,
    split_windows,
)

GPU = ("a", "GPU-0")
ADA, BOB = frozenset({"41"}), frozenset({"42"})


def holds(
    *parts: Sequence[WorkSample],
    starts: Sequence[float] = (),
    scraped: Sequence[Sequence[float]] = (),
    shortest: float = 100.0,
) -> list[HeldGpu]:
    """Who held the GPU, of samples fed in parts, in order of time."""
    found: list[HeldGpu] = []

    def judge(gpu: GpuKey, held: HeldGpu) -> None:
        assert gpu == GPU
        found.append(held)

    tracker = PauseTracker(judge)
    tracker.min_seconds = shortest
    for part in parts:
        tracker.feed(GPU, part, starts=starts, scraped=scraped, step=60)
    tracker.end()
    return sorted(found, key=lambda held: held.pauses[0].first_seen)


def told(
    *parts: Sequence[WorkSample], starts: Sequence[float] = (), shortest: float = 100.0
) -> list[tuple[object, ...]]:
    """Pauses as (jobs, since when, last seen, worked again)."""
    return [
        (held.jobs, pause.last_work, pause.last_seen, pause.resumed)
        for held in holds(*parts, starts=starts, shortest=shortest)
        for pause in held.pauses
        if pause.last_seen - pause.last_work >= shortest
    ]


def same(times: range, jobs: frozenset[str], work: float) -> list[WorkSample]:
    return [(float(at), jobs, work) for at in times]


def test_a_rest_ends_at_the_work_that_is_told_later() -> None:
    samples = [*same(range(0, 601, 60), ADA, 0.0), (660.0, ADA, 640.0)]
    assert told(samples) == [(ADA, 0.0, 600.0, 640.0)]


def test_the_moment_of_work_lies_between_the_two_samples() -> None:
    """A clock behind or ahead of the server's moves no time by more than a step."""
    early = [*same(range(0, 601, 60), ADA, 0.0), (660.0, ADA, 500.0)]
    late = [*same(range(0, 601, 60), ADA, 0.0), (660.0, ADA, 700.0)]
    assert [rest[3] for rest in told(early, shortest=200) + told(late)] == [600.0, 660.0]


def test_a_new_holder_is_no_work() -> None:
    samples = [*same(range(0, 601, 60), ADA, 0.0), *same(range(660, 1201, 60), BOB, 650.0)]
    assert told(samples) == [(ADA, 0.0, 600.0, None), (BOB, 650.0, 1200.0, None)]


def test_a_gap_with_the_same_moment_after_it_ends_nothing() -> None:
    samples = [*same(range(0, 301, 60), ADA, 0.0), *same(range(3600, 3901, 60), ADA, 0.0)]
    assert told(samples) == [(ADA, 0.0, 3900.0, None)]


def test_a_rest_goes_on_from_one_window_to_the_next() -> None:
    parts = [same(range(0, 301, 60), ADA, 0.0), same(range(360, 901, 60), ADA, 0.0)]
    assert told(*parts) == [(ADA, 0.0, 900.0, None)]


def test_a_daemon_that_starts_anew_has_seen_no_work() -> None:
    """It first reports its start as the time of last work; later values are measured."""
    after = [*same(range(660, 901, 60), ADA, 630.0), (960.0, ADA, 950.0)]
    samples = [*same(range(0, 601, 60), ADA, 0.0), *after]
    assert told(samples, starts=[620.0]) == [(ADA, 0.0, 900.0, 950.0)]


@pytest.mark.parametrize("starts", [[], [500.0], [630.0 - START_GRACE_SECONDS - 1], [640.0 + START_GRACE_SECONDS]])
def test_a_start_at_another_time_excuses_nothing(starts: Sequence[float]) -> None:
    samples = [*same(range(0, 601, 60), ADA, 0.0), *same(range(900, 1201, 60), ADA, 850.0)]
    assert told(samples, starts=starts)[0] == (ADA, 0.0, 600.0, 850.0)


def test_a_start_before_the_last_sample_excuses_nothing() -> None:
    samples = [*same(range(0, 601, 60), ADA, 0.0), *same(range(660, 901, 60), ADA, 640.0)]
    assert [rest[3] for rest in told(samples, starts=[590.0])] == [640.0, None]


def test_a_moment_that_goes_back_is_no_work() -> None:
    samples = [*same(range(500, 801, 60), ADA, 400.0), *same(range(860, 1201, 60), ADA, 0.0)]
    assert told(samples) == [(ADA, 400.0, 1160.0, None)]


def test_short_rests_are_not_told_of() -> None:
    samples = [(at + 10.0, ADA, float(at)) for at in range(0, 900, 60)]
    assert told(samples) == []


def test_time_held_leaves_out_changes_of_holder_and_not_a_gap_with_the_same_one_on_both_sides() -> None:
    rests = PauseTracker(lambda _gpu, _held: None)
    samples = [*same(range(0, 601, 60), ADA, 0.0), *same(range(660, 1201, 60), BOB, 650.0), (9000.0, BOB, 650.0)]
    rests.feed(GPU, samples, step=60)
    assert rests.held_seconds == {GPU: 600.0 + 540.0 + 7800.0}


BACK = [*same(range(0, 601, 60), ADA, 0.0), *same(range(7200, 7801, 60), ADA, 7190.0)]
"""A job that has the GPU again after 110 minutes; by the second sample it last worked ten seconds before."""


def test_a_job_that_left_a_gpu_and_has_it_again_holds_it_anew() -> None:
    """Its daemon was scraped meanwhile. The moment of its allocation is no work."""
    left, back = holds(BACK, scraped=[(0.0, 7800.0)])
    assert (left.last_seen, left.pauses[-1].resumed, left.work_seconds) == (600.0, None, 0.0)
    assert (back.pauses[0].first_seen, back.last_seen, back.work_seconds) == (7200.0, 7800.0, 0.0)
    tracker = PauseTracker(lambda _gpu, _held: None)
    tracker.feed(GPU, BACK, scraped=[(0.0, 7800.0)], step=60)
    assert tracker.held_seconds == {GPU: 1200.0}


def test_a_job_whose_daemon_is_not_scraped_has_not_left_and_worked_at_some_time() -> None:
    """A daemon that starts anew knows who holds its GPUs a moment later than it is scraped."""
    (held,) = holds(BACK, scraped=[(0.0, 600.0), (7080.0, 7800.0)])
    assert (held.pauses[0].resumed, held.work_seconds) == (7190.0, 120.0)
    assert (held.observed_seconds(0.0, 7800.0), held.observed_seconds(300.0, 7000.0)) == (600 + 120 + 600, 300 + 120)


def test_a_scheduler_that_is_silent_for_long_ends_no_hold() -> None:
    samples = [*same(range(0, 601, 60), ADA, 0.0), *same(range(7200, 7801, 60), ADA, 0.0)]
    assert len(holds(samples, scraped=[(0.0, 7800.0)])) == 1


def test_the_jitter_of_a_clock_is_no_work_and_a_second_in_each_short_step_is() -> None:
    jittered = [(float(at), ADA, 0.0009 * (at // 60 % 3)) for at in range(0, 7201, 60)]
    (held,) = holds([*jittered, (7260.0, ADA, 7250.0)])
    assert [(pause.last_seen, pause.resumed) for pause in held.pauses] == [(7200.0, 7250.0), (7260.0, None)]
    (busy,) = holds([(float(at), ADA, at - 0.0009 * (at % 3)) for at in range(100)])
    assert busy.work_seconds == pytest.approx(99, abs=0.1)


def test_a_pause_has_the_work_before_it_also_that_between_pauses_too_short_to_keep() -> None:
    works = [(float(at), ADA, float(at)) for at in range(0, 601, 60)]
    (held,) = holds([*works, *same(range(660, 1201, 60), ADA, 600.0)])
    assert [pause.worked_before for pause in held.pauses] == [600.0]


def test_work_after_a_pause_adds_up_at_most_and_short_pauses_are_not_kept() -> None:
    """It works in three steps of four, the first time only for its last twenty seconds."""
    work = [(660.0, ADA, 660.0), (720.0, ADA, 720.0), (780.0, ADA, 720.0), (840.0, ADA, 840.0)]
    samples = [*same(range(0, 601, 60), ADA, 0.0), *work, *same(range(900, 1501, 60), ADA, 840.0)]
    (held,) = holds(samples)
    assert [(pause.last_work, pause.last_seen, pause.work_seconds) for pause in held.pauses] == [
        (0.0, 600.0, 180.0), (840.0, 1500.0, 0.0),
    ]  # fmt: skip


def test_a_clock_that_is_behind_hides_no_work() -> None:
    samples = [(at + 0.0, ADA, at - 500.0) for at in range(1200, 2401, 60)]
    (held,) = holds([*same(range(0, 1141, 60), ADA, -500.0), *samples])
    assert sum(pause.work_seconds for pause in held.pauses) == 21 * 60.0


@pytest.mark.parametrize(("missing", "known"), [(2, 1), (3, 3)])
def test_a_sample_or_two_with_other_holders_is_no_new_hold(missing: int, known: int) -> None:
    others = same(range(660, 660 + 60 * missing, 60), BOB, 650.0)
    after = same(range(660 + 60 * missing, 1501, 60), ADA, 0.0)
    found = holds([*same(range(0, 601, 60), ADA, 0.0), *others, *after])
    assert len(found) == known
    assert found[-1].last_seen == 1500.0


def test_holders_who_come_and_go_are_all_reported() -> None:
    eve = frozenset({"43"})
    parts = [same(range(0, 601, 60), ADA, 0.0), same(range(660, 1201, 60), BOB, 650.0)]
    found = holds(*parts, same(range(1260, 1801, 60), eve, 1250.0))
    assert [held.jobs for held in found] == [ADA, BOB, eve]


def test_samples_of_several_holders_are_one_moment_of_the_gpu() -> None:
    series = [("41", [(0.0, "5"), (60.0, "5")]), ("42", [(60.0, "7")])]
    assert list(merge_holders(series)) == [(0.0, ADA, 5.0), (60.0, ADA | BOB, 7.0)]
    assert list(merge_holders(series[:1])) == [(0.0, ADA, 5.0), (60.0, ADA, 5.0)]


def test_a_window_of_long_steps_is_bounded_by_what_is_stored_in_it() -> None:
    """100 GPUs scraped every 15 s for 90 days are 52 million samples."""
    hours = split_windows(0, 90 * 86400, 3600, 100)
    assert [round((b - a) / 3600) for a, b in hours] == [832, 832, 494]


def test_windows_have_few_enough_samples_and_no_gap() -> None:
    few, many = split_windows(0, 600_000, 60, 8), split_windows(0, 600_000, 60, 10_000)
    assert few == [(0, 599_940), (600_000, 600_000)]
    assert many[:2] == [(0, 99 * 60), (100 * 60, 199 * 60)]
    assert {after[0] - before[1] for before, after in pairwise(many)} == {60}
    assert many[-1][1] == 600_000
