"""Pipelines are recognized by how their stages wait: each while others compute, all for as long."""

from collections.abc import Sequence
from typing import Any

import pytest

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import Owner, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.stages import NO_BUBBLES, Bubbles
from tests.core.test_checkpoint import again
from tests.worlds import RESTING, SPINNING, WORKING, S, device, first, held, reading, seen

Signals = dict[str, Any]
COMPUTES: Signals = WORKING | {
    "gr_engine_active": 1.0, "sm_active": 0.955, "nvlink_tx_bytes_per_second": 2e8, "nvlink_rx_bytes_per_second": 2e8,
}  # fmt: skip
"""A kernel on all SMs, which sends activations to the next stage."""
ALONE = COMPUTES | {"nvlink_tx_bytes_per_second": 0.0, "nvlink_rx_bytes_per_second": 0.0}
HALF = COMPUTES | {"gr_engine_active": 0.5, "sm_active": 0.4775}
"""A second of which the second half waits without a kernel."""
BATCH = Owner("41", user="ada", workload_class="batch")


def opened(*, gpus: int = 2, owner: Owner = BATCH) -> Ledger:
    """A job that began before the daemon."""
    uuids = [f"GPU-{n}" for n in range(gpus)]
    ledger = Ledger()
    advance(ledger, first([device(u, u[-1]) for u in uuids], [held(u, owner, start=-60.0, gpus=gpus) for u in uuids]))
    return ledger


def train(ledger: Ledger, steps: Sequence[Sequence[Signals]], start: int, seconds: int) -> dict[str, float]:
    """Each step is a second of every GPU; return the mean shares by leak of the time of all."""
    before = [list(gpu.book.parts) for gpu in ledger.gpus.values()]
    for at in range(start, start + seconds):
        row = steps[at % len(steps)]
        advance(ledger, seen(at + 1, *(reading(at, at + 1, each, f"GPU-{n}") for n, each in enumerate(row))))
    found = zip(*(gpu.book.parts for gpu in ledger.gpus.values()), strict=True)
    sums = [sum(new) - sum(old) for new, old in zip(found, zip(*before, strict=True), strict=True)]
    return {name: part / S / seconds / len(before) for name, part in zip(LEAK_NAMES, sums, strict=True) if part}


def bubbles(ledger: Ledger) -> Bubbles:
    return ledger.jobs["41"].level_tracker.at(ledger.at or 0).bubbles


IDLE = [(COMPUTES, RESTING), (COMPUTES, COMPUTES), (COMPUTES, COMPUTES), (RESTING, COMPUTES)]
"""Two stages, each without work for a quarter of the time."""
POLLING = [tuple(SPINNING if each is RESTING else each for each in row) for row in IDLE]


def test_stages_that_wait_without_a_kernel_in_turn_wait_for_each_other() -> None:
    """What a minute shows is used from the next one on. All of the waiting was in turn."""
    ledger = opened()
    assert "pipeline_bubble" not in train(ledger, IDLE, 0, 60)
    found = train(ledger, IDLE, 60, 60)
    assert found["pipeline_bubble"] == pytest.approx(0.25)
    assert "unattributed_stall" not in found
    assert bubbles(ledger) == Bubbles(idle=1.0)
    assert again(ledger).jobs["41"].level_tracker.at(ledger.at or 0).bubbles == Bubbles(idle=1.0)


def test_stages_that_poll_for_each_other_are_not_in_communication() -> None:
    ledger = opened()
    assert train(ledger, POLLING, 0, 60)["exposed_communication"] == pytest.approx(0.25)
    found = train(ledger, POLLING, 60, 60)
    assert found["pipeline_bubble"] == pytest.approx(0.25)
    assert "exposed_communication" not in found
    assert bubbles(ledger) == Bubbles(polling=1.0)


def test_of_what_a_reading_hides_the_middle_is_booked() -> None:
    """One stage waits for half of a second, in which the other may compute in the other half: 0.5 of 0.75 is seen."""
    ledger = opened()
    steps = [(HALF, COMPUTES), (COMPUTES, HALF), (HALF, HALF), (COMPUTES, COMPUTES)]
    train(ledger, steps, 0, 60)
    found = train(ledger, steps, 60, 60)
    assert bubbles(ledger) == Bubbles(idle=0.75)
    assert found["pipeline_bubble"] == pytest.approx(0.75 * 0.25)


def test_a_part_of_a_reading_that_polls_is_its_share_of_the_communication() -> None:
    """What tensor work leaves, of idle SMs that are a peer's; low parallelism gains nothing."""
    part = COMPUTES | {"sm_active": 0.5}
    steps = [(part, COMPUTES), (COMPUTES, part)]
    ledger = opened()
    train(ledger, steps, 0, 60)
    found = train(ledger, steps, 60, 60)
    low, most = 2e8 / 450e9 / 0.75, 1 - 0.45 / 0.88
    assert found["pipeline_bubble"] == pytest.approx((low + 0.85 * (most - low)) / 2, abs=1e-5)
    assert found["low_parallelism"] == pytest.approx((0.5 - most * 0.86 + 0.045) / 2, abs=1e-5)
    assert "exposed_communication" not in found


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(COMPUTES, COMPUTES)], "nobody waits"),
        ([(COMPUTES, COMPUTES)] * 3 + [(RESTING, RESTING)], "all wait for the same, such as input"),
        ([(COMPUTES, SPINNING)] + [(COMPUTES, COMPUTES)] * 3, "one is slow, and the other waits for it"),
        ([(COMPUTES, RESTING)] + [(COMPUTES, COMPUTES)] * 3, "one has less to do"),
        ([[ALONE if each is COMPUTES else each for each in row] for row in IDLE], "they exchange nothing"),
        (
            [(COMPUTES, RESTING), (SPINNING, COMPUTES), (RESTING, COMPUTES), (COMPUTES, SPINNING)],
            "now one is late and now the other, and who is early polls",
        ),
        ([(COMPUTES, RESTING), *[(COMPUTES, COMPUTES)] * 30, (RESTING, COMPUTES)], "too little to tell"),
        ([(COMPUTES, SPINNING), *[(COMPUTES, COMPUTES)] * 12, (SPINNING, COMPUTES)], "too little to tell"),
        ([[each | {"sm_active": None} for each in row] for row in IDLE], "SM activity is not measured"),
    ],
)
def test_what_is_no_pipeline(steps: Sequence[Sequence[Signals]], why: str) -> None:
    ledger = opened()
    train(ledger, steps, 0, 60)
    assert "pipeline_bubble" not in train(ledger, steps, 60, 60), why
    assert bubbles(ledger) == NO_BUBBLES


FEW_BYTES = {"pcie_tx_bytes_per_second": 1e6, "pcie_rx_bytes_per_second": 1e6}
MIXED = COMPUTES | FEW_BYTES | {"sm_active": 0.5}
"""A reading of several steps: its idle SMs are of kernels that poll."""
LATE = MIXED | {"gr_engine_active": 0.8, "sm_active": 0.45}
"""The same with 0.2 of the time without a kernel; it polls for 0.35."""


def test_stages_whose_turns_a_reading_hides_poll_without_moving_data() -> None:
    """Short collectives would have moved what these did in 0.0024 of the time; they polled for 0.55."""
    ledger = opened()
    assert "pipeline_bubble" not in train(ledger, [(MIXED, MIXED)], 0, 60)
    found = train(ledger, [(MIXED, MIXED)], 60, 60)
    polling, moved = 0.55, 2e8 / 450e9 / 0.75 / 0.25
    assert bubbles(ledger).polling == pytest.approx(1 - moved / polling)
    assert found["pipeline_bubble"] > 20 * found["exposed_communication"]


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(MIXED, MIXED | {"pcie_tx_bytes_per_second": 1e8})], "one sends to other nodes"),
        ([(MIXED | {"pcie_tx_bytes_per_second": None, "pcie_rx_bytes_per_second": None},) * 2], "it may do so"),
        ([(MIXED | {"nvlink_tx_bytes_per_second": 4e10},) * 2], "data moves for most of that time"),
        ([(MIXED, MIXED | {"sm_active": 0.7})], "one hardly waits"),
        ([(LATE, LATE)], "gaps between small kernels look like polling"),
        ([(MIXED, MIXED)] * 9 + [(COMPUTES, COMPUTES)], "some steps have none of it"),
        ([(MIXED, MIXED)] * 9 + [(SPINNING, SPINNING)], "at times all wait for somebody else"),
        ([(MIXED | {"sm_active": 0.9},) * 2], "too little to tell"),
    ],
)
def test_what_polls_alike_and_is_no_pipeline(steps: Sequence[Sequence[Signals]], why: str) -> None:
    ledger = opened()
    train(ledger, steps, 0, 60)
    assert "pipeline_bubble" not in train(ledger, steps, 60, 60), why


def test_a_known_pipeline_may_wait_for_input_too() -> None:
    ledger = opened()
    train(ledger, [(MIXED, MIXED)], 0, 60)
    train(ledger, [(LATE, LATE)], 60, 60)
    found = train(ledger, [(LATE, LATE)], 120, 60)
    assert found["pipeline_bubble"] > 20 * found["exposed_communication"]
    assert bubbles(again(ledger)).polling > 0.9


def test_a_pipeline_stays_one_in_minutes_of_less_waiting() -> None:
    """As much waiting says too little of a job that was never seen to be one; half of that too little of any.

    What all wait for at once, such as a save, is no bubble of a pipeline either.
    """
    little = [(COMPUTES, SPINNING), *[(COMPUTES, COMPUTES)] * 12, (SPINNING, COMPUTES)]
    at_once = [(COMPUTES, SPINNING), *[(SPINNING, SPINNING)] * 3, *[(COMPUTES, COMPUTES)] * 9, (SPINNING, COMPUTES)]
    less = [(COMPUTES, SPINNING), *[(COMPUTES, COMPUTES)] * 28, (SPINNING, COMPUTES)]
    ledger = opened()
    train(ledger, POLLING, 0, 60)
    train(ledger, less, 60, 60)
    train(ledger, at_once, 120, 60)
    assert bubbles(ledger) == NO_BUBBLES
    assert "pipeline_bubble" not in train(ledger, little, 180, 60)
    restarted = again(ledger)
    found = train(restarted, little, 240, 60)
    assert bubbles(restarted) == Bubbles(polling=1.0)
    assert found["pipeline_bubble"] > 0.05
    assert "exposed_communication" not in found


def test_a_single_gpu_has_no_neighbour_on_this_node() -> None:
    ledger = opened(gpus=1)
    train(ledger, [(RESTING,), (COMPUTES,)], 0, 60)
    assert "pipeline_bubble" not in train(ledger, [(RESTING,), (COMPUTES,)], 60, 60)


def test_servers_that_work_in_turn_are_no_pipeline() -> None:
    """Prefill and decode on GPUs of their own, for instance."""
    ledger = opened(owner=Owner("41", user="ada", workload_class="serving"))
    train(ledger, IDLE, 0, 60)
    assert "pipeline_bubble" not in train(ledger, IDLE, 60, 60)


@pytest.mark.parametrize(("phase", "steps"), [("bubble", IDLE), ("communication", POLLING)])
def test_what_the_job_times_itself_goes_before_what_is_recognized(
    phase: str, steps: Sequence[Sequence[Signals]]
) -> None:
    """A second of each was reported."""
    ledger = opened()
    train(ledger, steps, 0, 60)
    report = TrainingReport("41", start=50 * S, end=60 * S, gpus=2, step=9, steps=3, phases=((phase, 1 * S),))
    advance(ledger, seen(60, reports=(report,)))
    assert train(ledger, steps, 60, 60).get("pipeline_bubble", 0.0) == pytest.approx(
        1 / 60 if phase == "bubble" else 0.0
    )
