"""Exposed communication, estimated from SM activity, with hand-made kernels of known SM activity.

A step of one second: COMPUTES for 0.8 s, then TALKS for 0.2 s.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from exporter.core.communication import LEVEL_ERROR, UNKNOWN_LEVELS, LevelTracker, SmLevels, estimate_communication
from exporter.core.evidence import evaluate
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import Allocation, CollectiveReport, Observation, Owner, Reading
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from tests.core.test_checkpoint import again
from tests.core.test_laws import halved
from tests.worlds import WORKING, S, device, first, held, reading, seen

POLICY = Policy()
Signals = dict[str, Any]
COMPUTES: Signals = WORKING | {
    "gr_engine_active": 1.0, "sm_active": 0.9, "tensor_active": 0.5, "dram_active": 0.3, "fp32_active": 0.0,
}  # fmt: skip
"""A kernel that fills 90 % of the SMs and uses no link."""
TALKS: Signals = COMPUTES | {
    "sm_active": 0.1, "tensor_active": 0.0, "dram_active": 0.02, "nvlink_tx_bytes_per_second": 100e9,
    "nvlink_rx_bytes_per_second": 100e9,
}  # fmt: skip
"""A collective on a tenth of the SMs; its DRAM activity is the link's own traffic."""
STEP = [COMPUTES] * 8 + [TALKS] * 2
"""A step in readings of 100 ms."""
MEAN: Signals = COMPUTES | {
    "sm_active": 0.74, "tensor_active": 0.4, "dram_active": 0.244, "nvlink_tx_bytes_per_second": 20e9,
    "nvlink_rx_bytes_per_second": 20e9,
}  # fmt: skip
"""The same steps in a long reading."""
MEASURED = (0.9 - 0.74) / (0.9 - 0.11)
"""Communication in MEAN by levels of 0.9 and 0.11, the middle of the bin that holds 0.1; true: 0.2."""
LOW = 20 / 450 / 0.75
"""At least what the link's rate needs at three quarters of its capacity."""
HIGH = (0.955 - 0.74) / (0.955 - 0.14)
"""At most what idle SMs allow by the policy's levels; tensor work leaves more: 1 - .4 / .88."""


def opened(*holders: Allocation, start: float = 0.0) -> Ledger:
    """A GPU whose job runs on two and began before the daemon."""
    ledger = Ledger()
    allocations = holders or (held(gpus=2, start=-60.0),)
    at = round(start * S)
    advance(ledger, Observation(at, at, devices=(device(),), allocations=allocations))
    return ledger


def short(ledger: Ledger, pattern: Sequence[Signals], *, start: float, seconds: float, ms: int = 100) -> None:
    """Readings of `ms` milliseconds of a repeated pattern."""
    for n in range(round(seconds * 1000) // ms):
        a, b = start + n * ms / 1000, start + (n + 1) * ms / 1000
        advance(ledger, seen(b, reading(a, b, pattern[n % len(pattern)])))


def levels(ledger: Ledger, at: float) -> SmLevels:
    return ledger.jobs["41"].level_tracker.at(round(at * S))


def lost(ledger: Ledger, start: float, end: float, signals: Signals = MEAN) -> dict[str, float]:
    """Shares by leak of one more reading."""
    before = list(ledger.gpus["GPU-0"].book.parts)
    advance(ledger, seen(end, reading(start, end, signals)))
    parts = zip(LEAK_NAMES, before, ledger.gpus["GPU-0"].book.parts, strict=True)
    return {name: (b - a) / S / (end - start) for name, a, b in parts if b > a}


def measured(seconds: float = 60) -> Ledger:
    ledger = opened()
    short(ledger, STEP, start=0, seconds=seconds)
    return ledger


def test_the_levels_of_a_job_are_measured_from_short_readings() -> None:
    """Of eight computing readings in a row the first and the last may hold a part of the collective: 6 a step, and 7.

    The very first reading follows nothing.
    """
    ledger = measured()
    tracker = ledger.jobs["41"].level_tracker
    assert (tracker.busy, tracker.communicating, tracker.computing) == (60_000, 12_000, 36_100)
    lost(ledger, 60, 120)
    found = levels(ledger, 60)
    assert found.computing == pytest.approx(0.9)
    assert (found.communicating, found.trust, found.dense) == (0.11, 1.0, True)


def test_a_long_reading_is_split_by_the_measured_levels() -> None:
    """Idle SMs: .26, of which communication leaves .89 of its time; the rest is the computing kernel's tenth."""
    found = lost(measured(), 60, 120)
    assert found["exposed_communication"] == pytest.approx(MEASURED, abs=2e-6)
    assert found["low_parallelism"] == pytest.approx(0.26 - MEASURED * 0.89, abs=2e-6)


def test_without_short_readings_the_estimate_lies_between_two_bounds() -> None:
    """In its first minute a tenth of the range is booked; then most SMs are seen to be filled, and it is 0.85."""
    ledger = opened()
    early, later = lost(ledger, 0, 60), lost(ledger, 60, 120)
    assert early["exposed_communication"] == pytest.approx(LOW + 0.1 * (HIGH - LOW), abs=2e-6)
    assert later["exposed_communication"] == pytest.approx(LOW + 0.85 * (HIGH - LOW), abs=2e-6)


SLOW: Signals = TALKS | {"nvlink_tx_bytes_per_second": 2e9, "nvlink_rx_bytes_per_second": 2e9, "dram_active": 0.005}
"""A collective that another network holds back: the links are almost at rest."""


def test_a_long_reading_that_only_exchanges_data_is_all_communication() -> None:
    """Up to what idle SMs allow, although links at that rate would take a hundredth of the time."""
    ledger = opened()
    assert lost(ledger, 0, 1, SLOW)["exposed_communication"] > 0.99
    still = SLOW | {"nvlink_tx_bytes_per_second": 1e6, "nvlink_rx_bytes_per_second": 1e6}
    assert lost(ledger, 1, 2, still)["exposed_communication"] < 0.2, "a small kernel, perhaps"


def test_without_short_readings_long_ones_that_only_exchange_data_measure_the_levels() -> None:
    """One of ten, at least ten seconds of them, is trusted; with fewer the policy's levels have a part."""
    ledger = opened()
    for second in range(120):
        advance(ledger, seen(second + 1, reading(second, second + 1, SLOW if second % 10 == 0 else COMPUTES)))
    assert levels(ledger, 60) == SmLevels(0.955, 0.14, dense=True), "six seconds"
    lost(ledger, 120, 180)
    found = levels(ledger, 120)
    assert (found.computing, found.communicating, found.dense) == (0.91, 0.11, True)
    assert found.trust == pytest.approx(1.0)
    lost(ledger, 180, 240)
    assert levels(ledger, 180).trust == pytest.approx(12 / 180 / 0.1)


def test_long_readings_that_all_exchange_data_measure_no_level_of_computing() -> None:
    ledger = opened()
    for second in range(60):
        advance(ledger, seen(second + 1, reading(second, second + 1, SLOW)))
    lost(ledger, 60, 120)
    assert levels(ledger, 60) == SmLevels(0.955, 0.14)


def test_a_job_with_small_kernels_loses_its_idle_sms_to_them() -> None:
    """A bit more than a third of the SMs are the limit, in 95 % of the time."""
    ledger = opened()
    for n in range(12):
        advance(
            ledger, seen(n * 5 + 5, reading(n * 5, n * 5 + 5, COMPUTES | {"sm_active": 0.33, "tensor_active": 0.3}))
        )
    lost(ledger, 60, 120)
    assert levels(ledger, 60) == SmLevels(0.955, 0.14, dense=False)
    lost(ledger, 120, 180)
    assert levels(ledger, 120).dense, "a minute of MEAN among three"


def test_what_a_minute_shows_is_used_from_the_next_one_on() -> None:
    """A reading over the end of the minute is split there."""
    ledger = measured(50)
    assert levels(ledger, 49).trust == 0.0
    found = lost(ledger, 50, 70)
    before, after = LOW + 0.1 * (HIGH - LOW), (0.9 - 0.74) / (0.9 - 0.11)
    assert found["exposed_communication"] == pytest.approx((before + after) / 2, abs=2e-6)
    assert (levels(ledger, 59.999).trust, levels(ledger, 60).trust) == (0.0, 1.0)


def test_time_before_any_level_is_split_by_the_policy_s() -> None:
    tracker = LevelTracker()
    assert tracker.at(0) == UNKNOWN_LEVELS
    lost(ledger := opened(), 120, 130)
    assert levels(ledger, 60) == UNKNOWN_LEVELS


@pytest.mark.parametrize(
    ("talks", "computes", "trust"),
    [(3, 57, 0.0), (4, 56, 1.0), (4, 396, 0.2), (3, 397, 0.0), (20, 3, 0.0), (20, 8, 1.0)],
)
def test_how_much_of_each_kind_must_be_seen(talks: int, computes: int, trust: float) -> None:
    """400 ms and 1 % must communicate; 10 % compute, with neighbours that do; 5 % communication are full trust."""
    ledger = opened()
    short(ledger, [COMPUTES] * computes + [TALKS] * talks, start=0, seconds=(talks + computes) / 10)
    lost(ledger, 60, 61)
    assert levels(ledger, 60).trust == pytest.approx(trust)


def test_levels_that_are_too_near_to_each_other_are_not_used() -> None:
    """0.19 and 0.11 differ by 0.08, 0.18 and 0.11 by less."""
    for sm, trust in ((0.191, 1.0), (0.18, 0.0)):
        ledger = opened()
        small = COMPUTES | {"sm_active": sm, "tensor_active": 0.1}
        short(ledger, [small] * 8 + [TALKS] * 2, start=0, seconds=60)
        lost(ledger, 60, 61)
        assert levels(ledger, 60).trust == trust


@pytest.mark.parametrize("change", [
    {"gr_engine_active": 0.5, "sm_active": 0.05}, {"tensor_active": 0.021}, {"dram_active": 0.15},
    {"fp32_active": 0.026}, {"sm_active": 0.51}, {"tensor_active": None}, {"sm_active": None},
])  # fmt: skip
def test_what_is_no_collective(change: Signals) -> None:
    """Own DRAM activity: .15 less the link's .0597."""
    ledger = opened()
    short(ledger, [COMPUTES] * 8 + [TALKS | change] * 2, start=0, seconds=6)
    assert ledger.jobs["41"].level_tracker.communicating == 0


def test_with_little_of_it_measured_half_of_the_rest_is_assumed() -> None:
    """Trust 0.2: of the other 0.8 half is the assumed value's, and all of it of the assumed bounds."""
    ev = evaluate(reading(0, 60, MEAN), device(), POLICY)
    found = estimate_communication(ev, SmLevels(0.9, 0.11, 0.2, dense=True), POLICY)
    assumed = LOW + 0.85 * (HIGH - LOW)
    assert found.value == pytest.approx(MEASURED + 0.4 * (assumed - MEASURED))
    error, distance = LEVEL_ERROR, 0.9 - 0.11
    low, high = ((0.9 + sign * error - 0.74) / (distance + sign * error) for sign in (-1, 1))
    assert [found.low, found.high] == pytest.approx([low + 0.8 * (LOW - low), high + 0.8 * (HIGH - high)])


def test_what_idle_sms_may_be_as_well_has_no_name() -> None:
    """Between the estimate and its upper bound they are neither communication nor small kernels."""
    ledger = opened()
    lost(ledger, 0, 60)
    found = lost(ledger, 60, 120)
    assert found["low_parallelism"] == pytest.approx(0.26 - HIGH * 0.86, abs=2e-6)


def test_idle_sms_of_computing_readings_are_collectives_where_the_links_move_data() -> None:
    """Readings of computing kernels with hidden collectives: a level of .74 instead of the assumed .955.

    Idle SMs of .215 in collectives of .11 would take .254 of the time; a quarter of the rate that needs is enough.
    """
    for rate, expected in ((0.0, 0.74), (450e9 * 0.75 * 0.25 * 0.1272, 0.74 + 0.215 / 2), (100e9, 0.955)):
        ledger = opened()
        mixed = MEAN | {"nvlink_tx_bytes_per_second": rate, "nvlink_rx_bytes_per_second": rate}
        short(ledger, [mixed] * 8 + [TALKS] * 2, start=0, seconds=60)
        lost(ledger, 60, 61)
        assert levels(ledger, 60).computing == pytest.approx(expected, abs=1e-3), rate


def test_a_level_above_the_assumed_one_hides_no_collectives() -> None:
    ledger = opened()
    short(ledger, [TALKS | COMPUTES | {"sm_active": 0.97}] * 8 + [TALKS] * 2, start=0, seconds=60)
    lost(ledger, 60, 61)
    assert levels(ledger, 60).computing == pytest.approx(0.97)


def test_kernels_that_wait_for_their_launch_own_their_idle_sms() -> None:
    """A minute at an even 60 % with half of the SMs: the next one's idle SMs are small kernels, not communication."""
    small = COMPUTES | {"gr_engine_active": 0.6, "sm_active": 0.3, "tensor_active": 0.1}
    for signals, launches in ((small, True), (small | {"sm_active": 0.4}, False), (COMPUTES, False)):
        ledger = opened()
        for n in range(60):
            advance(ledger, seen(n + 1, reading(n, n + 1, signals)))
        found = lost(ledger, 60, 61, small)
        high = 0.6 - 0.3 / (0.96 * 0.92)
        booked = (0.1 if launches else 0.85) * high
        assert found["exposed_communication"] == pytest.approx(booked, abs=2e-6)
        empty = 0.3 - (booked if launches else high) * 0.86
        assert found["low_parallelism"] == pytest.approx(empty, abs=2e-6)


def test_the_estimate_is_never_more_than_slack_nor_less_than_nothing() -> None:
    dense = evaluate(reading(0, 60, COMPUTES | {"sm_active": 0.97, "tensor_active": 0.9}), device(), POLICY)
    assert estimate_communication(dense, SmLevels(0.9, 0.11, 1.0), POLICY).value == 0.0
    idle = evaluate(reading(0, 60, COMPUTES | {"sm_active": 0.45, "tensor_active": 0.45}), device(), POLICY)
    assert estimate_communication(idle, SmLevels(0.9, 0.11, 1.0), POLICY).value == pytest.approx(0.55)


@pytest.mark.parametrize(("ms", "counted"), [(40, 0), (50, 6000), (250, 6000), (260, 0)])
def test_only_a_reading_that_may_hold_one_kernel_counts(ms: int, counted: int) -> None:
    ledger = opened()
    short(ledger, [COMPUTES], start=0, seconds=6, ms=ms)
    assert ledger.jobs["41"].level_tracker.busy == counted


def test_a_reading_counts_once_its_successor_is_known() -> None:
    """Three in a row, a gap, two in a row: two and one have a successor."""
    ledger = opened()
    short(ledger, [COMPUTES], start=0, seconds=0.3)
    short(ledger, [COMPUTES], start=1, seconds=0.2)
    assert ledger.jobs["41"].level_tracker.computing == 300


def test_levels_are_those_of_all_gpus_of_a_job_and_each_has_its_own_neighbours() -> None:
    ledger = Ledger()
    boards = [device(), device("GPU-1", "1")]
    advance(ledger, first(boards, [held(b.uuid, gpus=2, start=-60.0) for b in boards]))
    for n in range(6):
        a, b = n / 10, (n + 1) / 10
        advance(ledger, seen(b, reading(a, b, COMPUTES), reading(a, b, TALKS, "GPU-1")))
    tracker = ledger.jobs["41"].level_tracker
    assert (tracker.busy, tracker.communicating, tracker.computing) == (1200, 600, 500)


def test_jobs_that_have_one_gpu_or_share_it_have_no_levels() -> None:
    for holders in ([held(start=-60.0)], [held(gpus=2, start=-60.0), held(owner=Owner("42"), gpus=2, start=-60.0)]):
        ledger = opened(*holders)
        short(ledger, STEP, start=0, seconds=2)
        assert ledger.jobs["41"].level_tracker.busy == 0


def cut(story: Iterable[Observation], ms: int) -> list[Observation]:
    """Each observation as two, the first of which ends so many milliseconds after the start of the readings."""
    pieces: list[Observation] = []
    for observation in story:
        edge = min((r.start for r in observation.readings), default=0) + ms * 1_000_000
        for a, b in ((None, edge), (edge, None)):
            rows = [_part(r, a, b) for r in observation.readings if a is None or r.end > a]
            pieces.append(seen((b or observation.at) / S, *rows))
    return pieces


def _part(whole: Reading, start: int | None, end: int | None) -> Reading:
    changed = {"start": whole.start if start is None else start, "end": whole.end if end is None else end}
    return Reading(**{name: getattr(whole, name) for name in whole.__struct_fields__} | changed)


@pytest.mark.untraced
@pytest.mark.parametrize("ms", [1, 3_000, 7_001, 10_000, 19_999])
@pytest.mark.parametrize("calibrated", [False, True])
def test_cutting_readings_in_two_changes_nothing(ms: int, calibrated: bool) -> None:
    """Readings of 20 s from second 50 on; every third ends a minute 10 s after its start."""
    kinds = (MEAN, COMPUTES | {"sm_active": 0.3, "tensor_active": 0.2}, TALKS)
    story = [seen(70 + 20 * n, reading(50 + 20 * n, 70 + 20 * n, kinds[n // 2 % 3])) for n in range(20)]
    ends = []
    for pieces in (story, cut(story, ms), halved(story)):
        ledger = measured(50) if calibrated else opened(start=50)
        for observation in pieces:
            advance(ledger, observation)
        book = ledger.gpus["GPU-0"].book
        ends.append((book.paid, book.parts, ledger.jobs["41"].book.parts, levels(ledger, 470)))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][1][LEAK_NAMES.index("exposed_communication")] > 0


def test_the_first_reading_of_a_job_counts_whole_or_in_parts() -> None:
    """Fails when a job's first interval is measured only after it was booked."""
    whole = [seen(60, reading(0, 60)), seen(120, reading(60, 120, MEAN))]
    parts = [seen(30, reading(0, 30)), seen(60, reading(30, 60)), whole[1]]
    ends = []
    for story in (whole, parts):
        ledger = opened()
        for observation in story:
            advance(ledger, observation)
        ends.append(ledger.gpus["GPU-0"].book.parts)
    assert ends[0] == ends[1]


def test_levels_outlive_a_restart() -> None:
    ledger = measured()
    back = again(ledger)
    assert lost(back, 60, 120) == lost(ledger, 60, 120)
    assert levels(back, 60) == levels(ledger, 60)


@pytest.mark.parametrize(
    ("timed", "value", "low"),
    [(1.0, HIGH, LOW), (0.2, 0.2, LOW), (0.04, 0.04, 0.04), (0.0, 0.0, 0.0)],
)
def test_what_a_plugin_timed_bounds_communication(timed: float, value: float, low: float) -> None:
    """All of the idle SMs may be communication, but no more of them than collectives ran."""
    ev = evaluate(reading(0, 60, MEAN), device(), POLICY)
    estimate = estimate_communication(ev, UNKNOWN_LEVELS, POLICY, timed)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((value, low, value), abs=1e-6)


def test_timed_collectives_of_a_job_without_any_other_report_are_booked() -> None:
    """Collectives ran for a tenth of each second; the reports arrive a second late."""
    ledger = opened()
    for second in range(1, 61):
        report = CollectiveReport("41", (second - 1) * S, second * S, S // 10, ("GPU-0",))
        advance(ledger, seen(second, reading(second - 1, second, MEAN), collectives=(report,)))
    exposed = ledger.gpus["GPU-0"].book.parts[LEAK_NAMES.index("exposed_communication")]
    assert exposed == pytest.approx(0.1 * 60 * S, rel=0.1)


def test_kernels_that_compute_leave_fewer_sms_idle_than_those_that_communicate() -> None:
    """The estimate divides by the difference of the two levels."""
    with pytest.raises(ValueError, match=r"collective_sm, 0\.5, is not below computing_sm, 0\.5"):
        Policy(collective_sm=0.5, computing_sm=0.5)
