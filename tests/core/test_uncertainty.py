"""On which evidence a job's leaks were booked, and between which bounds those lie that rest on an estimate."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.communication import LEVEL_ERROR, Estimate
from exporter.core.evidence import evaluate
from exporter.core.job_record import JobRecord, build_job_record, sum_bounds, sum_evidence
from exporter.core.leaks import LEAK_NAMES, REPORTING, Span, split_into_leaks
from exporter.core.ledger import Ledger
from exporter.core.model import PPM, State, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, JobView, take_snapshot
from exporter.core.timers import BEGINNING, NO_SIGNS, RESTARTED, SAVING, STARVED, STEADY
from exporter.core.uncertainty import ESTIMATED_LEAKS, MARGIN, Bounds, Uncertainty, evidence_of, main_evidence
from exporter.core.workload import WorkloadCredit
from tests.core.test_checkpoint import again
from tests.core.test_communication import HIGH, LOW, MEAN, MEASURED, lost, measured, opened
from tests.worlds import RESTING, SPINNING, S, device, reading, seen

POLICY = Policy()


def job(ledger: Ledger) -> JobView:
    return take_snapshot(ledger, DaemonMetadata()).jobs[0]


def shares(ledger: Ledger, leak: str, seconds: float) -> list[float]:
    bounds = job(ledger).bounds[leak]
    return [bounds.low / S / seconds, bounds.high / S / seconds]


def span(
    signals: dict[str, Any], *, signs: frozenset[str] = NO_SIGNS, gpus: int = 1, known: set[int] | None = None
) -> Span:
    ev = evaluate(reading(0, 1, signals), device(), POLICY)
    pools = [ev.wait, ev.slack, ev.clock_loss, ev.ofu, ev.unresolved]
    made = Span(ev, State.ACTIVE, POLICY, pools, PPM, gpus, signs=signs)
    if known is not None:
        made.credit, made.ms, made.signs = WorkloadCredit(known=known), 1000, signs | {REPORTING}
    return made


def booked(made: Span) -> tuple[Uncertainty, dict[str, str]]:
    """One second of a span: its uncertainty, and the kind of evidence of each part."""
    taken, found = split_into_leaks(made), Uncertainty()
    found.add(made, taken, 1000)
    return found, {LEAK_NAMES[index]: evidence_of(made, index) for index, _ in taken if LEAK_NAMES[index] != "useful"}


def test_communication_without_measured_levels_lies_between_what_the_link_needs_and_what_idle_sms_allow() -> None:
    ledger = opened()
    lost(ledger, 0, 60)
    assert shares(ledger, "exposed_communication", 60) == pytest.approx(
        [LOW * (1 - MARGIN), HIGH * (1 + MARGIN)], abs=3e-6
    )
    amount = job(ledger).counters.now.parts[LEAK_NAMES.index("exposed_communication")]
    assert job(ledger).evidence["exposed_communication"] == {"estimated": amount}


def test_what_communication_may_gain_the_other_kernels_may_lose() -> None:
    """Their bounds are those of all kernels without tensor work less those of communication."""
    ledger = opened()
    parts = lost(ledger, 0, 60)
    rest = {leak: parts[leak] for leak in ("memory_bound", "low_parallelism", "other_compute") if leak in parts}
    slack = sum(rest.values()) + parts["exposed_communication"]
    low, high = (sum(shares(ledger, leak, 60)[bound] for leak in rest) for bound in (0, 1))
    assert (low, high) == pytest.approx((slack - HIGH * (1 + MARGIN), slack - LOW * (1 - MARGIN)), abs=1e-5)


def test_measured_levels_leave_the_doubt_of_one_level() -> None:
    ledger = measured()
    before = job(ledger).bounds.get("exposed_communication", Bounds(0, 0))
    lost(ledger, 60, 120)
    after = job(ledger).bounds["exposed_communication"]
    assert ((after.low - before.low) / S / 60, (after.high - before.high) / S / 60) == pytest.approx(
        ((0.9 - LEVEL_ERROR - 0.74) / (0.79 - LEVEL_ERROR), (0.9 + LEVEL_ERROR - 0.74) / (0.79 + LEVEL_ERROR)), abs=3e-6
    )
    assert job(ledger).evidence["exposed_communication"]["calibrated"] == pytest.approx(60 * S * MEASURED, rel=1e-4)


def test_a_collective_alone_is_measured() -> None:
    """A kernel that only polls, and one that only moves data, need no estimate."""
    assert booked(span(SPINNING, gpus=2))[1] == {"exposed_communication": "measured"}
    moves = RESTING | {"gr_engine_active": 1.0, "sm_active": 0.1, "nvlink_tx_bytes_per_second": 400e9}
    found, kinds = booked(span(moves, gpus=2))
    assert kinds == {"exposed_communication": "measured"}
    assert sum(found.measured) == S
    assert not any(found.below)
    assert not any(found.above)


def test_what_the_job_reports_has_no_bounds() -> None:
    ledger = opened()
    report = TrainingReport("41", 0, 60 * S, phases=(("communication", 12 * S), ("data", 0)), gpus=2)
    advance(ledger, seen(60, reading(0, 60, MEAN), reports=(report,)))
    view = job(ledger)
    assert "exposed_communication" not in view.bounds
    assert view.evidence["exposed_communication"] == {"reported": view.counters.now.parts[
        LEAK_NAMES.index("exposed_communication")]}  # fmt: skip


@pytest.mark.parametrize(
    ("leak", "signals", "signs", "kind"),
    [
        ("data_stall", RESTING, {STARVED}, "estimated"),
        ("checkpoint", RESTING, {SAVING}, "estimated"),
        ("startup", RESTING, {BEGINNING}, "measured"),
        ("failure_recovery", RESTING, {BEGINNING, RESTARTED}, "measured"),
        (
            "host_overhead",
            RESTING | {"gr_engine_active": 0.7, "sm_active": 0.1, "dram_active": 0.1},
            {STEADY},
            "estimated",
        ),
    ],
)
def test_a_cause_that_indicators_chose_may_be_none_of_it(
    leak: str, signals: dict[str, Any], signs: set[str], kind: str
) -> None:
    found, kinds = booked(span(signals, signs=frozenset(signs)))
    index = LEAK_NAMES.index(leak)
    assert kinds[leak] == kind
    assert (found.below[index] > 0) == (kind == "estimated")
    assert found.above[index] == 0


def test_what_is_in_doubt_survives_a_restart() -> None:
    ledger = measured()
    lost(ledger, 60, 120)
    assert job(again(ledger)).bounds == job(ledger).bounds
    assert job(again(ledger)).evidence == job(ledger).evidence


def test_records_of_a_job_are_added_and_one_without_bounds_is_certain() -> None:
    ledger = opened()
    lost(ledger, 0, 60)
    first = record(ledger)
    certain = replace(first, bounds={}, evidence={})
    leak = "exposed_communication"
    low, high = first.bounds[leak].low, first.bounds[leak].high
    assert sum_bounds([first, certain])[leak] == Bounds(low + first.parts[leak], high + first.parts[leak])
    assert sum_evidence([first, certain, first])[leak] == {"estimated": 2 * first.parts[leak]}


def record(ledger: Ledger) -> JobRecord:
    return build_job_record(
        job(ledger), node="n", life="l", until=60.0, money={}, gpus={}, models=(), whole_gpus=1.0, happened={},
        samples=(), simulated=False,
    )  # fmt: skip


def test_the_main_evidence_is_that_of_most_time_and_of_two_equal_ones_the_weaker() -> None:
    assert main_evidence({"measured": 1, "calibrated": 3, "estimated": 2}) == "calibrated"
    assert main_evidence({"reported": 2, "estimated": 2}) == "estimated"


def test_bounds_are_never_wider_than_what_they_share() -> None:
    """An estimate may allow more communication than there are kernels without tensor work."""
    made = span(MEAN, gpus=2)
    made.exposed = Estimate(0.1, 0.0, 1.0)
    taken = [(LEAK_NAMES.index("exposed_communication"), 100_000), (LEAK_NAMES.index("other_compute"), 200_000)]
    found = Uncertainty()
    found.add(made, taken, 1)
    assert found.above[LEAK_NAMES.index("exposed_communication")] == 200_000
    assert found.below[LEAK_NAMES.index("other_compute")] == 200_000


def test_the_bounds_of_communication_leave_out_the_bubbles_of_a_pipeline() -> None:
    made = span(MEAN, gpus=2)
    made.exposed, made.polled = Estimate(0.3, 0.25, 0.35, "calibrated"), 100_000
    taken = [(LEAK_NAMES.index("exposed_communication"), 200_000), (LEAK_NAMES.index("other_compute"), 400_000)]
    found = Uncertainty()
    found.add(made, taken, 1)
    index = LEAK_NAMES.index("exposed_communication")
    assert (found.below[index], found.above[index]) == (50_000, 50_000)


def test_the_leaks_with_bounds() -> None:
    assert ESTIMATED_LEAKS == (
        "checkpoint", "data_stall", "pipeline_bubble", "host_overhead", "exposed_communication", "memory_bound",
        "low_parallelism", "other_compute", "oversized_allocation",
    )  # fmt: skip
