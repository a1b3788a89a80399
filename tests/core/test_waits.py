"""Which waits are for input, which are gaps between kernels, and which are a pipeline's bubbles."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.communication import UNKNOWN_LEVELS
from exporter.core.evidence import evaluate
from exporter.core.leaks import LEAK_NAMES, REPORTING, Span, split_into_leaks
from exporter.core.model import PPM, SECOND, State
from exporter.core.pipes import TENSOR, pools_of
from exporter.core.policy import Policy
from exporter.core.stages import Bubbles
from exporter.core.timers import STARVED
from exporter.core.workload import DATA, STARTUP, WorkloadCredit
from tests.core.test_told import lost, opened, parts, said, second
from tests.worlds import RESTING, SPINNING, WORKING, device, reading

FULL: dict[str, Any] = WORKING | {"gr_engine_active": 1.0}
GAPS: dict[str, Any] = WORKING | {"gr_engine_active": 0.96}


def test_who_polls_waits_for_a_peer_although_its_job_says_that_it_waits_for_input() -> None:
    """Rank 0 waited two seconds; this GPU polled for one of them and waited for the other."""
    ledger = opened()
    second(ledger, 2, FULL, said(0, 1.9, phases={"data": 2.0 - 0.1}))
    before = parts(ledger)
    second(ledger, 3, SPINNING)
    second(ledger, 4, RESTING)
    assert lost(ledger, before) == {"exposed_communication": pytest.approx(1.0), "data_stall": pytest.approx(1.0)}


def test_short_gaps_leave_what_was_told_of_input_to_the_longer_waits() -> None:
    """Each twenty seconds: eighteen with gaps of 0.04, two without a kernel, of which the job tells later."""
    ledger = opened()
    for turn in range(12):
        begun = 1 + 20 * turn
        if turn == 6:
            before = parts(ledger)
        for at in range(begun + 1, begun + 21):
            told = (said(begun - 20, begun, phases={"data": 2.0}),) if at == begun + 1 and turn else ()
            second(ledger, at, RESTING if at > begun + 18 else GAPS, *told)
    found = lost(ledger, before)
    assert found["data_stall"] == pytest.approx(6 * 2.0, abs=0.5)
    assert found["host_overhead"] == pytest.approx(6 * 18 * 0.04, abs=0.5)
    assert found.get("unattributed_stall", 0.0) == pytest.approx(0.0, abs=0.5)


def piped(*signs: str, credit: WorkloadCredit | None = None) -> dict[str, float]:
    """Shares of a second that is half without a kernel, of a stage of a pipeline."""
    ev = evaluate(reading(0, 1, WORKING | HALF), device(), Policy())
    span = Span(
        ev, State.ACTIVE, Policy(), pools_of(ev, TENSOR), PPM, gpus=2, signs=frozenset(signs), credit=credit, ms=1000,
        levels=PIPELINE,
    )  # fmt: skip
    return {LEAK_NAMES[index]: ppm / PPM for index, ppm in split_into_leaks(span)}


PIPELINE = replace(UNKNOWN_LEVELS, bubbles=Bubbles(idle=0.8))
HALF = {"gr_engine_active": 0.5, "sm_active": 0.45, "tensor_active": 0.3, "dram_active": 0.1}


def test_a_bubble_takes_no_kernel_time_where_another_wait_has_taken_the_waiting() -> None:
    credit = WorkloadCredit(known={DATA})
    credit.credit[DATA] = 10 * SECOND
    told = piped(REPORTING, credit=credit)
    assert told["data_stall"] == pytest.approx(0.5)
    assert "pipeline_bubble" not in told


def test_what_a_pipeline_that_times_its_phases_waits_beside_them_is_its_bubbles() -> None:
    told = piped(REPORTING, credit=WorkloadCredit(known={STARTUP}))
    assert told["pipeline_bubble"] == pytest.approx(0.5)
    assert piped()["pipeline_bubble"] == pytest.approx(0.4), "of others a share"


def test_a_stage_that_waits_while_another_computes_does_not_wait_for_input() -> None:
    found = piped(STARVED)
    assert found["data_stall"] == pytest.approx(0.1, abs=2e-6)
    assert found["pipeline_bubble"] == pytest.approx(0.4, abs=2e-6)
