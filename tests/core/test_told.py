"""Training reports move losses to their leaks, never more than was reported nor than the pools hold.

Every figure is calculated by hand: a second of WORKING is 0.05 wait, 0.50 slack, 0.45 tensor; the board's dense peak
is 989.4 TFLOP/s.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import PPM, Allocation, Observation, Owner, Parallel, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.workload import MODEL
from tests.each import each
from tests.worlds import H100, JOB, RESTING, SPINNING, WORKING, S, cut, device, first, held, reading, seen

PEAK = 989.4e12
HALF: dict[str, Any] = WORKING | {
    "gr_engine_active": 0.5, "sm_active": 0.5, "tensor_active": 0.4, "dram_active": 0.0, "fp32_active": 0.0,
}  # fmt: skip
"""Half of the time nothing runs: 0.5 wait, 0.1 slack, 0.4 tensor."""


def said(start: float, end: float, **more: Any) -> TrainingReport:
    """A report of job 41 on one GPU; `start` and `end` in seconds."""
    phases = tuple((name, round(spent * S)) for name, spent in more.pop("phases", {}).items())
    return TrainingReport("41", round(start * S), round(end * S), gpus=more.pop("gpus", 1), phases=phases, **more)


def opened(*allocations: Allocation, policy: Policy | None = None, **board: Any) -> Ledger:
    """After a second of work of a job that began a minute before the daemon, so that its start-up is over."""
    ledger = Ledger(policy)
    advance(ledger, first([device(**board)], allocations or [held(gpus=2, start=-60.0)]))
    advance(ledger, seen(1, reading(0, 1)))
    return ledger


def second(ledger: Ledger, at: int, signals: dict[str, Any], *reports: TrainingReport) -> None:
    """The second before `at`, with reports, which are applied before it is booked."""
    advance(ledger, replace(seen(at, reading(at - 1, at, signals)), reports=reports))


def lost(ledger: Ledger, before: dict[str, int] | None = None) -> dict[str, float]:
    """Nonzero seconds by leak."""
    now = parts(ledger)
    return {
        name: (now[name] - (before or {}).get(name, 0)) / S
        for name in LEAK_NAMES
        if now[name] - (before or {}).get(name, 0)
    }


def parts(ledger: Ledger) -> dict[str, int]:
    assert ledger.conservation_errors == 0
    return dict(zip(LEAK_NAMES, ledger.gpus["GPU-0"].book.parts, strict=True))


@pytest.mark.parametrize(
    ("phase", "leak"),
    [
        ("data", "data_stall"),
        ("checkpoint", "checkpoint"),
        ("restore", "failure_recovery"),
        ("startup", "startup"),
    ],
)
def test_seconds_of_a_phase_are_booked_on_waiting_once(phase: str, leak: str) -> None:
    """1.2 s are reported; three seconds wait 0.5 s each: 0.5, 0.5, 0.2, and the rest is unattributed."""
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, HALF, said(0, 1.9, phases={phase: 1.2}))
    for at in (3, 4):
        second(ledger, at, HALF)
    found = lost(ledger, before)
    assert found[leak] == pytest.approx(1.2)
    assert found["unattributed_stall"] == pytest.approx(0.3)
    assert found["useful"] == pytest.approx(1.2)


def test_reported_communication_takes_slack_and_replaces_the_estimate() -> None:
    """The link is busy and half of the SMs are idle: the estimate would exceed the reported 0.05 s by far."""
    busy = WORKING | {"nvlink_tx_bytes_per_second": 200e9, "sm_active": 0.5}
    guessed, told = opened(), opened()
    before = parts(told)
    second(told, 2, busy, said(0, 1.9, phases={"communication": 0.05}))
    second(guessed, 2, busy)
    assert lost(guessed, before)["exposed_communication"] == pytest.approx(0.438636), "(.955 - .5) / .815 of .8"
    assert lost(told, before)["exposed_communication"] == pytest.approx(0.05)


def test_a_bubble_of_the_schedule_takes_waiting_then_slack() -> None:
    """4 stages, 12 microbatches: 3 of 15 parts of a step of 2 s are empty, 0.4 s: 0.05 of wait, 0.35 of slack."""
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(0, 2, bubble=0.2))
    found = lost(ledger, before)
    assert found["pipeline_bubble"] == pytest.approx(0.4)
    assert found["useful"] == pytest.approx(0.45)


def test_communication_that_was_seen_is_not_booked_again_when_it_is_reported() -> None:
    """A kernel that polls is booked at once, and the report of that time comes later; a later one counts anew."""
    ledger = opened()
    second(ledger, 2, WORKING, said(0, 2, phases={"communication": 0.0}))
    before = parts(ledger)
    second(ledger, 3, SPINNING)
    second(ledger, 4, WORKING, said(2, 4, phases={"communication": 1.0}))
    assert lost(ledger, before)["exposed_communication"] == pytest.approx(1.0)
    second(ledger, 5, WORKING, said(4, 5, phases={"communication": 0.2}))
    assert lost(ledger, before)["exposed_communication"] == pytest.approx(1.2)


def test_what_polled_and_was_not_reported_takes_nothing_from_later_reports() -> None:
    """As a hang that ends, whose first minutes are communication."""
    ledger = opened()
    second(ledger, 2, WORKING, said(0, 2, phases={"communication": 0.0}))
    for at in range(3, 13):
        second(ledger, at, SPINNING)
    second(ledger, 13, WORKING, said(2, 13, phases={"communication": 0.0}))
    before = parts(ledger)
    second(ledger, 14, WORKING, said(13, 14, phases={"communication": 0.2}))
    assert lost(ledger, before)["exposed_communication"] == pytest.approx(0.2)


def test_a_schedule_s_bubble_is_no_communication() -> None:
    """The program measures its bubble as communication: of 0.5 s reported, the schedule explains 0.4."""
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(0, 2, bubble=0.2, phases={"communication": 0.5}))
    found = lost(ledger, before)
    assert found["pipeline_bubble"] == pytest.approx(0.4)
    assert found["exposed_communication"] == pytest.approx(0.1)


def test_a_pipeline_s_communication_is_its_bubble_where_no_schedule_is_told() -> None:
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(0, 2, parallel=Parallel(pipeline=4), phases={"communication": 0.3}))
    found = lost(ledger, before)
    assert found["pipeline_bubble"] == pytest.approx(0.3)
    assert "exposed_communication" not in found


def test_a_reported_bubble_beats_the_schedule_s() -> None:
    ledger = opened()
    second(ledger, 2, WORKING, said(0, 2, bubble=0.2, phases={"bubble": 0.3}))
    assert lost(ledger)["pipeline_bubble"] == pytest.approx(0.3)


def test_model_flops_split_the_tensor_work() -> None:
    """MFU 0.3 of a tensor share of 0.45; full recomputation explains a quarter of 0.45, 0.1125; 0.0375 is padding."""
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.3 * PEAK, recompute="full"))
    found = lost(ledger, before)
    assert found["useful"] == pytest.approx(0.3)
    assert found["recomputation"] == pytest.approx(0.1125)
    assert found["padding"] == pytest.approx(0.0375)


@pytest.mark.parametrize(
    ("more", "share"),
    [({"recompute": "none"}, 0.0), ({}, 0.0), ({"recompute": "full"}, 0.1125),
     ({"recompute": "selective"}, 0.04 * 0.45), ({"hardware_flops": 0.36 * PEAK}, 0.45 / 6)],
)  # fmt: skip
def test_recomputation_is_at_most_what_the_policy_explains(more: dict[str, Any], share: float) -> None:
    """MFU 0.3: of the gap of 0.15, recomputation explains its share of tensor work; with HFU 0.36, a sixth."""
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.3 * PEAK, **more))
    found = lost(ledger)
    assert found.get("recomputation", 0.0) == pytest.approx(share, abs=1e-6)
    assert found["padding"] == pytest.approx(0.15 - share, abs=1e-6)


FP8: dict[str, Any] = {"dtype": "fp8", "recompute": "none"}


@pytest.mark.parametrize(
    ("more", "padding"),
    [
        ({}, 0.0), ({"recompute": "none"}, 0.15), ({"recompute": "full"}, 0.0375),
        ({"hardware_flops": 0.3 * PEAK}, 0.15),
        (FP8, 0.0), (FP8 | {"model_flops_16bit": 0.0}, 0.3),
    ],
)  # fmt: skip
def test_what_a_log_leaves_open_is_no_padding(more: dict[str, Any], padding: float) -> None:
    """FLOPs of 0.3 at the peak of 16 bits: what else the tensor cores did is only known with recomputation and formats.

    Of eight bits they take 0.15.
    """
    ledger = opened(spec=replace(H100, peak_flops_fp8=2 * PEAK))
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.3 * PEAK, each=True, **more))
    found = lost(ledger, before)
    assert found.get("padding", 0.0) == pytest.approx(padding)
    assert found["useful"] == pytest.approx(0.45 - padding - found.get("recomputation", 0.0))


def test_an_interval_without_flops_says_nothing_about_recomputation() -> None:
    """LoRA recomputes a third of its tensor work; messages between two steps have no FLOPs, and change nothing."""
    ledger = opened()
    lora: dict[str, Any] = {"model_flops": 0.2 * PEAK, "hardware_flops": 0.3 * PEAK, "recompute": "full"}
    second(ledger, 2, WORKING, said(1, 2, **lora))
    (credit,) = ledger.gpus["GPU-0"].credits.values()
    assert credit.recompute == pytest.approx(PPM / 3, abs=1)
    second(ledger, 3, WORKING, said(2, 3, model_flops=0.0, hardware_flops=0.0, recompute="full"))
    assert credit.recompute == pytest.approx(PPM / 3, abs=1)


def test_recomputation_is_no_more_than_the_gap() -> None:
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.44 * PEAK, recompute="full"))
    assert lost(ledger)["recomputation"] == pytest.approx(0.01)


def test_padded_tokens_move_no_model() -> None:
    """Reported MFU 0.45, a third of the tokens padding: 0.3 useful."""
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.45 * PEAK, tokens=300.0, padding=100.0))
    found = lost(ledger, before)
    assert found["useful"] == pytest.approx(0.3)
    assert found["padding"] == pytest.approx(0.15)


def test_more_flops_than_the_hardware_did_leave_the_hardware_s_figure() -> None:
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.9 * PEAK))
    found = lost(ledger, before)
    assert found["useful"] == pytest.approx(0.45)
    assert "padding" not in found


def test_flops_of_eight_bits_are_compared_with_the_peak_of_eight_bits() -> None:
    ledger = opened(spec=replace(H100, peak_flops_fp8=2 * PEAK))
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.6 * PEAK, dtype="fp8"))
    assert lost(ledger, before)["useful"] == pytest.approx(0.3)


def test_what_an_fp8_job_computes_in_16_bits_takes_twice_as_long() -> None:
    """D14. GEMMs of 0.4 at a peak of 2, attention of 0.25 at 1: 0.45 in all, as the tensor cores were active."""
    mixed = said(1, 2, model_flops=0.65 * PEAK, model_flops_16bit=0.25 * PEAK, dtype="fp8")
    board = replace(H100, peak_flops_fp8=2 * PEAK)
    ledger = opened(spec=board)
    before = parts(ledger)
    second(ledger, 2, WORKING, mixed)
    found = lost(ledger, before)
    assert "padding" not in found
    assert found["useful"] == pytest.approx(0.45)
    assert ledger.jobs["41"].book.reported == pytest.approx(0.9 * PEAK)
    apart = opened(spec=board)
    before = parts(apart)
    second(apart, 2, WORKING, replace(mixed, model_flops_16bit=None))
    assert lost(apart, before)["padding"] == pytest.approx(0.45 - 0.325)


def test_of_an_unknown_16_bit_peak_all_flops_are_alike() -> None:
    board = replace(H100, peak_flops=None, peak_flops_fp8=2 * PEAK)
    ledger = opened(spec=board)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.4 * PEAK, model_flops_16bit=0.2 * PEAK, dtype="fp8"))
    assert ledger.jobs["41"].book.reported == pytest.approx(0.4 * PEAK)


def test_no_more_than_all_flops_are_in_16_bits() -> None:
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.1 * PEAK, model_flops_16bit=0.2 * PEAK))
    assert ledger.refused["report"] == 1


def test_flops_of_many_gpus_are_shared() -> None:
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.3 * 64 * PEAK, gpus=64))
    assert lost(ledger, before)["useful"] == pytest.approx(0.3)


def test_what_is_told_late_is_booked_in_whole_over_time() -> None:
    """Steps of 2 s with MFU 0.3, reported after each: after twelve seconds all but the last two are booked."""
    ledger = opened()
    second(ledger, 2, WORKING, said(0, 2, model_flops=0.6 * PEAK))
    before = parts(ledger)
    for at in range(3, 13, 2):
        second(ledger, at, WORKING)
        second(ledger, at + 1, WORKING, said(at - 1, at + 1, model_flops=0.6 * PEAK))
    found = lost(ledger, before)
    assert found["useful"] + found["padding"] == pytest.approx(4.5)
    assert found["useful"] == pytest.approx(
        0.15 + 4 * 0.6 + 0.45
    )  # what was left of the first, and of the last one second


def test_flops_stand_for_tensor_work_that_no_counter_sees() -> None:
    """g 0.95 and no tensor counter: of the 0.95 unresolved 0.3 is the model's, and the rest was no tensor work.

    DRAM activity of .437 less .35 of the FP pipes' .05, over .96 of the ceiling of .92, in s / g of the time.
    """
    blind = WORKING | {"tensor_active": None, "dram_active": 0.92 * 0.95 / 2}
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, blind, said(1, 2, model_flops=0.3 * PEAK))
    found = lost(ledger, before)
    assert "unresolved" not in found
    assert found["useful"] == pytest.approx(0.3)
    assert found["memory_bound"] == pytest.approx((0.437 - 0.35 * 0.05) / (0.96 * 0.92) * 0.8 / 0.95, abs=2e-6)
    second(ledger, 3, blind)
    assert lost(ledger, before)["useful"] == pytest.approx(0.3)


def test_a_board_without_a_peak_stays_unresolved() -> None:
    ledger = opened(spec=None)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.3 * PEAK))
    assert lost(ledger)["unresolved"] == pytest.approx(2 * 0.95)
    assert ledger.refused["report"] == 0


def test_steps_that_were_made_before_are_rework() -> None:
    """The run had reached step 40; the program repeats steps 30 to 40 and adds a new one."""
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.4 * PEAK, step=30, steps=1, run="a", highest_step=40))
    found = lost(ledger, before)
    assert found["rework"] == pytest.approx(0.4)
    assert "useful" not in found
    before = parts(ledger)
    second(ledger, 3, WORKING, said(2, 3, model_flops=0.4 * PEAK, step=41, steps=11, run="a"))
    found = lost(ledger, before)
    assert found["useful"] == pytest.approx(0.4 / 11, abs=1e-6)
    assert found["rework"] == pytest.approx(0.4 * 10 / 11, abs=1e-6)


def test_rework_is_booked_in_whole_though_new_steps_are_made_by_then() -> None:
    """A repeated step of two seconds at MFU 0.3, reported at its end: 0.6 s, over the following two seconds."""
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.3 * PEAK, step=41, steps=1, highest_step=41))
    before = parts(ledger)
    second(ledger, 3, WORKING)
    second(ledger, 4, WORKING, said(2, 4, model_flops=0.6 * PEAK, step=41, steps=1))
    second(ledger, 5, WORKING)
    second(ledger, 6, WORKING, said(4, 6, model_flops=0.6 * PEAK, step=42, steps=1))
    assert lost(ledger, before)["rework"] == pytest.approx(0.6)


def test_rework_is_seen_without_flops_and_not_while_evaluating() -> None:
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, WORKING, said(1, 2, step=30, steps=1, highest_step=40))
    assert lost(ledger, before)["rework"] == pytest.approx(0.45)
    before = parts(ledger)
    second(ledger, 3, WORKING, said(2, 2, phase="evaluation"))
    assert lost(ledger, before)["useful"] == pytest.approx(0.45)


def test_an_open_phase_is_booked_as_it_goes_on() -> None:
    """Saving begins at 2.5 s: half of the second up to 3 and all of the next can be saving; nothing counts twice."""
    ledger = opened()
    second(ledger, 2, WORKING)
    before = parts(ledger)
    second(ledger, 3, RESTING, said(2.0, 2.5, phase="checkpoint"))
    second(ledger, 4, RESTING)
    found = lost(ledger, before)
    assert found["checkpoint"] == pytest.approx(1.5)
    assert found["unattributed_stall"] == pytest.approx(0.5)
    second(ledger, 5, RESTING, said(2.5, 4.5, phases={"checkpoint": 2.0}, checkpoints=1))
    second(ledger, 6, RESTING)
    assert lost(ledger, before)["checkpoint"] == pytest.approx(2.0)


def test_an_open_phase_that_was_shorter_than_it_looked_owes_the_rest() -> None:
    """A phase assumed open for two seconds lasted 0.4 s: the next 1.6 s reported are deducted."""
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, RESTING, said(0, 1, phase="data"))
    second(ledger, 3, RESTING)
    second(ledger, 4, RESTING, said(1, 4, phases={"data": 0.4}))
    second(ledger, 5, RESTING, said(4, 5, phases={"data": 1.0}))
    second(ledger, 6, RESTING, said(5, 6, phases={"data": 1.0}))
    assert lost(ledger, before)["data_stall"] == pytest.approx(2.4)


def test_what_was_told_of_is_no_longer_guessed() -> None:
    """High device-to-host traffic of an idle engine is estimated as checkpoint, until the job reports its saving."""
    saving = RESTING | {"pcie_tx_bytes_per_second": 5e9}
    ledger = opened()
    second(ledger, 2, saving)
    assert lost(ledger)["checkpoint"] == pytest.approx(1.0)
    second(ledger, 3, saving, said(0, 2.5, phases={"checkpoint": 0.25}))
    assert lost(ledger)["checkpoint"] == pytest.approx(1.25)


def test_a_word_that_is_too_old_holds_no_more() -> None:
    """A minute after the last report of a job that reported each second, only hardware counters are used."""
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.1 * PEAK, phases={"data": 0.9}))
    second(ledger, 5, WORKING)
    before = parts(ledger)
    advance(ledger, seen(70, reading(63, 70, HALF)))
    found = lost(ledger, before)
    assert found["useful"] == pytest.approx(0.4 * 7)
    assert "data_stall" not in found


def test_a_job_that_saved_for_minutes_is_expected_to_do_so_again() -> None:
    """It reports each save of 150 s only after it, so that the second is booked from what the first has left.

    Half as long again as the longest interval between reports of the last hour, this is believed.
    """
    ledger = opened()
    for begun in (2, 182):
        for at in range(begun, begun + 150):
            second(ledger, at, RESTING)
        before = parts(ledger)
        second(ledger, begun + 150, WORKING, said(begun, begun + 150, phases={"checkpoint": 150.0}))
        for at in range(begun + 151, begun + 180, 5):
            advance(ledger, replace(seen(at + 5, reading(at, at + 5)), reports=(said(at - 1, at),)))
    assert before["checkpoint"] / S == pytest.approx(150.0, abs=5.0)
    later = opened()
    advance(later, replace(seen(101, reading(1, 101)), reports=(said(1, 101),)))
    advance(later, seen(3990, reading(101, 3990)))
    for at in range(3991, 4001):
        second(later, at, WORKING, said(at - 1, at, phases={"data": 0.9}))
    before = parts(later)
    advance(later, seen(4100, reading(4070, 4100, HALF)))
    assert "data_stall" not in lost(later, before), "an hour later it is forgotten"


SMALL: dict[str, Any] = WORKING | {
    "gr_engine_active": 0.5, "sm_active": 0.25, "tensor_active": 0.02, "dram_active": 0.05, "fp32_active": 0.0,
}  # fmt: skip
"""Half of the time kernels run that fill half of the SMs."""


@pytest.mark.parametrize(("idle", "gaps", "data"), [(4, 4, 0), (0, 8, 0.5)])
def test_gaps_between_launches_are_waiting_for_input_only_if_nothing_else_is(idle: int, gaps: int, data: float) -> None:
    """In each twenty seconds four are reported as waiting for input: those without a kernel, or else the gaps'."""
    ledger, busy = opened(), WORKING | {"gr_engine_active": 1.0}
    for turn in range(12):
        begun = 1 + 20 * turn
        if turn == 6:
            before = parts(ledger)
        for at in range(begun + 1, begun + 21):
            place = at - begun
            signals = SMALL if place <= gaps else RESTING if place <= gaps + idle else busy
            told = (said(begun - 20, begun, phases={"data": 4.0}),) if place == 1 and turn else ()
            second(ledger, at, signals, *told)
    found = lost(ledger, before)
    assert found["data_stall"] == pytest.approx(6 * 4.0, abs=1.0)
    assert found.get("host_overhead", 0.0) == pytest.approx(6 * gaps * (0.5 - data), abs=1.5)


def test_tensor_work_after_the_last_interval_is_not_held_against_a_job() -> None:
    """The next report is late by more than half an interval and two seconds: an evaluation, perhaps."""
    ledger = opened()
    second(ledger, 2, WORKING, said(0, 2, model_flops=0.9 * PEAK))
    for at in range(3, 7):
        second(ledger, at, WORKING)
    before = parts(ledger)
    second(ledger, 7, WORKING)
    assert lost(ledger, before)["padding"] == pytest.approx(0.45)
    before = parts(ledger)
    second(ledger, 8, WORKING)
    assert lost(ledger, before)["useful"] == pytest.approx(0.45)


def test_a_short_word_between_long_ones_does_not_shorten_the_patience() -> None:
    """Ten seconds, then half a second because a phase began: FLOPs apply for 7.5 s and two more."""
    ledger = opened()
    second(ledger, 11, WORKING, said(0.5, 10.5, model_flops=1.0), said(10.5, 11, model_flops=0.0))
    for at in range(12, 20):
        second(ledger, at, WORKING)
    before = parts(ledger)
    second(ledger, 20, WORKING)
    assert lost(ledger, before)["padding"] == pytest.approx(0.45)
    before = parts(ledger)
    second(ledger, 21, WORKING)
    assert "padding" not in lost(ledger, before)


def test_work_in_an_evaluation_is_not_held_against_a_job() -> None:
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, model_flops=0.1 * PEAK, phase="evaluation"))
    assert lost(ledger)["useful"] == pytest.approx(0.9)


def test_waiting_before_the_first_work_is_no_debt() -> None:
    """Five seconds of start-up, which are booked as such anyway; later the job reports another second of it."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(start=0)]))
    second(ledger, 1, RESTING, said(0.1, 0.2, phases={"startup": 0.1}))
    for at in range(2, 6):
        second(ledger, at, RESTING)
    second(ledger, 6, WORKING)
    before = parts(ledger)
    second(ledger, 7, RESTING, said(5, 7, phases={"startup": 1.0}))
    assert lost(ledger, before) == {"startup": pytest.approx(1.0)}


def test_balances_do_not_pile_up() -> None:
    """Ten minutes of overlapped loading: at most two intervals, two readings and ten seconds are still to come."""
    busy = WORKING | {"gr_engine_active": 1.0}
    ledger = opened()
    for at in range(2, 602):
        second(ledger, at, busy, said(at - 1, at, phases={"data": 0.5}))
    before = parts(ledger)
    for at in range(602, 622):
        second(ledger, at, RESTING)
    assert lost(ledger, before)["data_stall"] == pytest.approx(14.0)


def test_a_silent_phase_of_a_program_that_died_is_not_believed_for_ever() -> None:
    ledger = opened(policy=Policy(phase_patience_seconds=100.0))
    second(ledger, 2, RESTING, said(1, 1.5, phase="checkpoint"))
    before = parts(ledger)
    advance(ledger, seen(200, reading(190, 200, RESTING)))
    assert lost(ledger, before)["unattributed_stall"] == pytest.approx(10.0)


def test_half_a_gpu_is_spoken_for_by_half() -> None:
    """A MIG instance of three slices of seven: its waits and its tensor work are 3/7 of a GPU's."""
    ledger = Ledger()
    board, instance = cut(3)
    advance(ledger, first([board, instance], [held(instance.uuid, start=-60.0)]))
    advance(ledger, seen(1, reading(0, 1, uuid=instance.uuid), reading(0, 1, RESTING, board.uuid)))
    told = said(0.5, 1.5, model_flops=0.3 * PEAK, phases={"data": 0.2})
    halves = reading(1, 2, HALF, instance.uuid), reading(1, 2, RESTING, board.uuid)
    before = list(ledger.gpus[instance.uuid].book.parts)
    advance(ledger, replace(seen(2, *halves), reports=(told,)))
    found = {n: b - a for n, a, b in zip(LEAK_NAMES, before, ledger.gpus[instance.uuid].book.parts, strict=True)}
    weight = instance.weight / PPM
    assert found["data_stall"] / S == pytest.approx(0.2 * weight, rel=1e-4)
    assert found["useful"] / S == pytest.approx(0.3 * weight, rel=1e-4)


def test_of_two_jobs_on_one_gpu_each_speaks_for_itself() -> None:
    """Two jobs share the waiting equally; only one of them loads data."""
    ledger = opened(held(gpus=2, start=-60.0), held(owner=Owner("42"), gpus=2, start=-60.0))
    second(ledger, 2, RESTING, said(1, 2, phases={"data": 1.0}))
    names = dict(zip(LEAK_NAMES, ledger.jobs["41"].book.parts, strict=True))
    assert names["data_stall"] / S == pytest.approx(0.5)
    assert dict(zip(LEAK_NAMES, ledger.jobs["42"].book.parts, strict=True))["data_stall"] == 0


def test_a_job_that_is_gone_speaks_no_more() -> None:
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, phases={"data": 1.0}))
    advance(ledger, replace(seen(3, reading(2, 3, RESTING)), allocations=(held(owner=Owner("42"), start=2),)))
    assert set(ledger.gpus["GPU-0"].credits) == set()
    assert "data_stall" not in {n for n, p in zip(LEAK_NAMES, ledger.jobs["42"].book.parts, strict=True) if p}


def test_a_process_speaks_for_its_own_gpus() -> None:
    ledger = Ledger()
    advance(ledger, first([device(), device("GPU-1", "1")], [held(gpus=2), held("GPU-1", gpus=2)]))
    both = reading(0, 1, RESTING), reading(0, 1, RESTING, "GPU-1")
    advance(ledger, replace(seen(1, *both), reports=(said(0, 1, rank="1", uuids=("GPU-1",), phases={"data": 1.0}),)))
    assert (set(ledger.gpus["GPU-0"].credits), set(ledger.gpus["GPU-1"].credits)) == (set(), {"41"})


def test_a_moving_step_acquits_of_a_hang() -> None:
    ledger = opened()
    advance(ledger, seen(700, reading(1, 700, SPINNING)))
    assert ledger.gpus["GPU-0"].timers.hung
    advance(ledger, replace(seen(701, reading(700, 701, SPINNING)), reports=(said(699, 700, step=7, steps=1),)))
    assert not ledger.gpus["GPU-0"].timers.hung
    assert ledger.gpus["GPU-0"].state.value == "active"


@pytest.mark.parametrize(("since", "hung"), [(0.0, False), (1.0, False), (2.0, True)])
def test_steps_that_began_after_a_phase_was_announced_end_its_excuse(since: float, hung: bool) -> None:
    """Announced at 2 s, it would explain half an hour of spinning; a late report of earlier steps changes nothing."""
    ledger = opened()
    second(ledger, 2, RESTING, said(1, 2, phase="evaluation"))
    advance(ledger, replace(seen(40, reading(2, 40)), reports=(said(since, 39, step=7, steps=2),)))
    advance(ledger, seen(740, reading(40, 740, SPINNING)))
    assert ledger.gpus["GPU-0"].timers.hung is hung


@pytest.mark.parametrize(
    "lie",
    [
        said(1, 2, model_flops=-1.0),
        said(1, 2, model_flops=9 * PEAK),
        said(1, 2, model_flops=float("nan")),
        said(1, 2, tokens=float("inf")),
        said(1, 2, padding=3.0, tokens=2.0),
        said(1, 2, hardware_flops=1.0, model_flops=2.0),
        said(1, 2, hardware_flops=1e30, model_flops=1.0),
        said(1, 2, model_flops=9 * PEAK, dtype="fp4"),
        said(1, 2, steps=3, step=2),
        said(1, 2, steps=-1, step=2),
        said(1, 2, phases={"data": 1.5}),
        said(1, 2, phases={"data": -0.5}),
        said(2, 1),
        said(1, 3),
        said(1, 1, steps=1, step=1),
        said(1, 1, tokens=1.0),
        said(1, 2, bubble=1.0),
        said(1, 2, rank="-1"),
        replace(said(1, 2, phases={"data": 1.0}), job_id="42"),
        said(1, 2, uuids=("GPU-9",)),
    ],
)  # fmt: skip
def test_a_lie_moves_nothing_but_a_counter(lie: TrainingReport) -> None:
    honest, lied = opened(), opened()
    second(honest, 2, HALF)
    second(lied, 2, HALF, lie)
    assert lied.refused["report"] == 1
    assert parts(lied) == parts(honest)
    assert all(job.progress is None for job in lied.jobs.values())


def test_a_step_of_many_messages_is_reported_in_the_one_that_ends_it() -> None:
    """Gradient accumulation: steps of 100 s, messages every 2 s, the step's FLOPs in the last of them."""
    ledger = opened()
    step = said(98, 100, model_flops=0.4 * 100 * PEAK, step=1, steps=1)
    for end in range(2, 100, 2):
        told = said(end - 2, end, phases={"data": 0.1}, uuids=("GPU-0",) if end > 50 else ())
        advance(ledger, replace(seen(end, reading(max(1, end - 2), end)), reports=(told,)))
    advance(ledger, replace(seen(100, reading(98, 100)), reports=(replace(step, uuids=("GPU-0",)),)))
    progress = ledger.jobs["41"].progress
    assert progress is not None
    assert (ledger.refused["report"], progress.steps) == (0, 1)
    later = replace(step, start=100 * S, end=102 * S, step=2, uuids=("GPU-0",))
    advance(ledger, replace(seen(102, reading(100, 102)), reports=(later,)))
    assert (ledger.refused["report"], progress.steps) == (1, 1), "100 s of work in the 2 s since that step"


def test_a_report_that_is_sent_again_moves_nothing_but_a_counter() -> None:
    once, twice = opened(), opened()
    told = said(1, 2, phases={"data": 1.0}, step=3, steps=3)
    second(once, 2, HALF, told)
    second(twice, 2, HALF, told, told)
    assert twice.refused["report"] == 1
    assert parts(twice) == parts(once)
    progress = twice.jobs["41"].progress
    assert progress is not None
    assert progress.steps == 3


def test_a_job_may_speak_before_its_first_reading() -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    advance(ledger, Observation(S // 2, S // 2, reports=(said(0.1, 0.4, restart=True, step=5),), settled=0))
    assert ledger.refused["report"] == 0
    assert ledger.jobs["41"].owner is JOB


def two_gpus(*reports: TrainingReport) -> Ledger:
    """A job on two GPUs, which work for a second, then wait for one, with all reports in the latter."""
    ledger = Ledger()
    holds = [held(uuid, gpus=2, start=-60.0) for uuid in ("GPU-0", "GPU-1")]
    advance(ledger, first([device(), device("GPU-1", "1")], holds))
    for at, signals in ((1, WORKING), (2, RESTING)):
        both = reading(at - 1, at, signals), reading(at - 1, at, signals, "GPU-1")
        advance(ledger, replace(seen(at, *both), reports=reports if at == 2 else ()))
    return ledger


def stalls(ledger: Ledger) -> list[float]:
    index = LEAK_NAMES.index("data_stall")
    return [gpu.book.parts[index] / S for gpu in ledger.gpus.values()]


def tokens(ledger: Ledger) -> float:
    progress = ledger.jobs["41"].progress
    assert progress is not None
    return progress.tokens


def test_who_speaks_of_more_gpus_than_its_own_speaks_for_all_of_the_job_here() -> None:
    """As the Trainer's callback on rank 0 does, whose figures are the whole job's."""
    one = said(0, 1.9, rank="0", uuids=("GPU-0",), gpus=2, tokens=20.0, phases={"data": 0.4})
    ledger = two_gpus(one)
    assert stalls(ledger) == [pytest.approx(0.4), pytest.approx(0.4)]
    assert tokens(ledger) == 20.0


def test_who_speaks_for_itself_is_not_spoken_for() -> None:
    """Both report figures of all eight GPUs of the job; each applies to its own GPU."""
    zero = said(0, 1.8, rank="0", uuids=("GPU-0",), gpus=8, tokens=80.0, phases={"data": 0.4})
    one = said(0, 1.8, rank="1", uuids=("GPU-1",), gpus=8, tokens=80.0, phases={"data": 0.1})
    ledger = two_gpus(one, zero)
    assert stalls(ledger) == [pytest.approx(0.5), pytest.approx(0.1)]  # rank 1 led until rank 0 reported
    ledger = two_gpus(zero, one)
    assert stalls(ledger) == [pytest.approx(0.4), pytest.approx(0.5)]
    both = two_gpus(zero, one, replace(zero, start=round(1.8 * S), end=2 * S, phases=(("data", S // 10),)))
    assert stalls(both) == [pytest.approx(0.5), pytest.approx(0.5)]


def test_nobody_speaks_for_more_gpus_than_its_figures_are_of() -> None:
    ledger = two_gpus(said(0, 1.9, rank="0", uuids=("GPU-0",), gpus=1, tokens=20.0, phases={"data": 0.4}))
    assert stalls(ledger) == [pytest.approx(0.4), 0.0]
    assert tokens(ledger) == 20.0
    ledger = two_gpus(said(0, 1.9, rank="0", gpus=1, tokens=20.0, phases={"data": 0.4}))
    assert stalls(ledger) == [pytest.approx(0.4), 0.0]


def test_a_mean_over_the_job_s_gpus_is_every_gpu_s() -> None:
    """As a log has it: 20 tokens a GPU."""
    ledger = two_gpus(said(0, 1.9, rank="0", uuids=("GPU-0",), gpus=1, each=True, tokens=20.0, phases={"data": 0.4}))
    assert stalls(ledger) == [pytest.approx(0.4), pytest.approx(0.4)]
    assert tokens(ledger) == 40.0


def test_a_process_with_more_gpus_than_its_figures_are_of_speaks_for_those_it_has() -> None:
    ledger = two_gpus(said(0, 1.9, rank="0", uuids=("GPU-0", "GPU-1"), gpus=1, tokens=20.0, phases={"data": 0.4}))
    assert stalls(ledger) == [pytest.approx(0.4), pytest.approx(0.4)]


def ranks_with(contexts: tuple[tuple[str, ...], ...]) -> list[dict[str, float]]:
    """Seconds by leak of each GPU over 100 s of ranks that report each 10 s: 1 s without data, MFU 0.2 of 0.4.

    `contexts`: the GPUs that each rank's process uses; its figures are of one.
    """
    uuids = [f"GPU-{n}" for n in range(len(contexts))]
    ledger = Ledger()
    boards = [device(uuid, uuid[-1]) for uuid in uuids]
    advance(ledger, first(boards, [held(uuid, gpus=len(uuids), start=-60.0) for uuid in uuids]))
    for at in range(10, 101, 10):
        told = tuple(
            said(at - 10, at, rank=f"{n}", uuids=own, gpus=1, phases={"data": 1.0}, model_flops=0.2 * 10 * PEAK)
            for n, own in enumerate(contexts)
        )
        rows = [reading(at - 10, at, HALF, uuid) for uuid in uuids]
        advance(ledger, replace(seen(at, *rows), reports=told))
    return [
        {name: part / S for name, part in zip(LEAK_NAMES, ledger.gpus[uuid].book.parts, strict=True)} for uuid in uuids
    ]


FOUR = tuple(f"GPU-{n}" for n in range(4))


@each("contexts, useful", [
    (tuple((uuid,) for uuid in FOUR), 20.0),
    (tuple(tuple(sorted({"GPU-0", uuid})) for uuid in FOUR), 20.0),
    (tuple(tuple(sorted({"GPU-0", uuid})) for uuid in FOUR[::-1]), 20.0),
    ((FOUR,) * 4, 19.5),
])  # fmt: skip
def test_what_a_process_reports_counts_once_on_however_many_gpus_it_has_a_context(contexts: Any, useful: float) -> None:
    """On its own GPU alone; on the first one, too, as many programs have; on all of them.

    In the last case the balance of FLOPs, limited by the rate of one report, holds three of the first four quarters.
    """
    for found in ranks_with(contexts):
        assert found["data_stall"] == pytest.approx(10.0, abs=0.01)
        assert found["useful"] == pytest.approx(useful, abs=0.01)
        assert found["padding"] == pytest.approx(40.0 - useful, abs=0.01)


def test_a_rank_that_is_silent_uses_no_gpu() -> None:
    """Rank 1, whose context on GPU-0 made GPU-1 rank 0's own, has ended: rank 0 speaks for both again."""
    both, one = ("GPU-0", "GPU-1"), ("GPU-0",)
    ledger = two_gpus(said(0, 1.8, rank="1", uuids=one), said(0, 1.8, rank="0", uuids=both, phases={"data": 0.4}))
    assert stalls(ledger) == [0.0, pytest.approx(0.4)]
    gone = said(-63, -61.2, rank="1", uuids=one)
    ledger = two_gpus(gone, said(0, 1.8, rank="0", uuids=both, phases={"data": 0.4}))
    assert stalls(ledger) == [pytest.approx(0.4), pytest.approx(0.4)]


def test_flops_of_one_gpu_are_divided_among_all_that_the_process_has() -> None:
    told = said(0, 1.9, rank="0", uuids=("GPU-0", "GPU-1"), gpus=1, model_flops=0.4 * PEAK)
    ledger = two_gpus(told)
    balances = [gpu.credits["41"] for gpu in ledger.gpus.values()]
    useful = LEAK_NAMES.index("useful")
    booked = [gpu.book.parts[useful] for gpu in ledger.gpus.values()]
    assert booked[0] == booked[1]
    assert [credit.model_rate for credit in balances] == [pytest.approx(0.2 * S / (1.9 * S))] * 2


def test_of_processes_whose_gpus_are_not_known_the_lowest_rank_speaks_for_all() -> None:
    ranks = [said(0, 1.9, rank=f"{n}", gpus=2, tokens=20.0, phases={"data": 0.4}) for n in (0, 1)]
    ledger = two_gpus(*ranks)
    assert stalls(ledger) == [pytest.approx(0.4), pytest.approx(0.4)]
    assert tokens(ledger) == 20.0


def test_a_phase_that_is_told_to_have_lasted_nothing_is_told() -> None:
    """Link traffic looks like exposed communication, but the job reports none."""
    busy = WORKING | {"nvlink_tx_bytes_per_second": 200e9, "sm_active": 0.5}
    ledger = opened()
    before = parts(ledger)
    second(ledger, 2, busy, said(0, 1.9, phases={"communication": 0.0}))
    assert "exposed_communication" not in lost(ledger, before)


def test_recomputation_is_told_whatever_the_beat_of_reports_and_readings() -> None:
    """MFU 0.3375 of 0.45 and full recomputation: a quarter; reports of two seconds, readings of five.

    Of the first reading's five seconds only four are reported: 0.3375 more than a quarter is missing there.
    """
    ledger = opened()
    now = 1.0
    for at in range(6, 106, 5):
        told = []
        while now + 2 <= at:
            told.append(said(now, now + 2, model_flops=0.3375 * 2 * PEAK, recompute="full"))
            now += 2
        advance(ledger, replace(seen(at, reading(at - 5, at)), reports=tuple(told)))
    found = lost(ledger)
    assert found["recomputation"] == pytest.approx(0.1125 * 100 - 0.3375, rel=1e-5)
    assert found["padding"] == pytest.approx(0.3375, rel=1e-3)


def test_many_words_that_come_with_one_long_reading_all_count() -> None:
    ledger = opened()
    for at in (31, 61):
        told = [said(n, n + 5, model_flops=0.3 * 5 * PEAK) for n in range(at - 30, at, 5)]
        advance(ledger, replace(seen(at, reading(at - 30, at)), reports=tuple(told)))
    assert lost(ledger)["useful"] == pytest.approx(0.45 + 0.3 * 60)


def test_the_last_word_of_a_job_that_has_ended_is_heard() -> None:
    ledger = opened()
    ended = held(gpus=2, end=round(1.8 * S))
    told = said(1, 1.7, step=7, steps=1)
    advance(ledger, replace(seen(2, reading(1, 2)), allocations=(ended,), reports=(told,)))
    assert ledger.refused["report"] == 0
    progress = ledger.jobs["41"].progress
    assert progress is not None
    assert progress.step == 7
    advance(ledger, replace(seen(3, reading(2, 3)), allocations=(), reports=(said(1.9, 2.5, step=8, steps=1),)))
    assert ledger.refused["report"] == 1


def test_a_reading_in_which_an_evaluation_begins_is_what_most_of_it_was() -> None:
    """Ten seconds, the last two of them an evaluation; then ten of which it was eight."""
    for edge, judged in ((18, True), (12, False)):
        ledger = opened()
        advance(ledger, replace(seen(10, reading(1, 10)), reports=(said(1, 10, model_flops=0.3 * 9 * PEAK),)))
        before = parts(ledger)
        told = said(10, edge, model_flops=0.3 * (edge - 10) * PEAK, phase="evaluation")
        advance(ledger, replace(seen(20, reading(10, 20)), reports=(told,)))
        assert ("padding" in lost(ledger, before)) is judged


def test_a_run_may_be_named_later() -> None:
    ledger = opened()
    second(ledger, 2, WORKING, said(1, 2, step=7, steps=1))
    second(ledger, 3, WORKING, said(2, 3, step=8, steps=1, run="base"))
    progress = ledger.jobs["41"].progress
    assert progress is not None
    assert (progress.run_id, progress.run.highest) == ("base", 8)


@pytest.mark.parametrize("rank", ["0", ""])
def test_equal_ranks_repeat_nothing_of_each_other(rank: str) -> None:
    """All processes of a job may have the batch script's rank, or none: each GPU's work is its own, and new."""
    boards = [device(f"GPU-{n}", f"{n}") for n in (0, 1)]
    ledger = Ledger()
    advance(ledger, first(boards, [held(board.uuid, gpus=2, start=-60.0) for board in boards]))
    for end in range(1, 6):
        told = tuple(
            said(end - 1, end, rank=rank, uuids=(board.uuid,), step=end, steps=1, model_flops=0.4 * PEAK)
            for board in boards
        )
        advance(ledger, replace(seen(end, *(reading(end - 1, end, uuid=b.uuid) for b in boards)), reports=told))
    for board in boards:
        found = dict(zip(LEAK_NAMES, ledger.gpus[board.uuid].book.parts, strict=True))
        assert found["rework"] == 0
        assert found["useful"] / S == pytest.approx(2.0)


def test_what_was_told_of_time_that_nobody_saw_is_not_booked_later() -> None:
    """A minute of saving without readings: nothing after it counts as saving."""
    ledger = opened()
    second(ledger, 2, HALF, said(1, 2, phase="checkpoint"))
    advance(ledger, seen(62))
    before = parts(ledger)
    second(ledger, 63, HALF, said(2, 62, phases={"checkpoint": 60}, model_flops=0.4 * PEAK * 60))
    for at in range(64, 84):
        second(ledger, at, HALF)
    assert lost(ledger, before).get("checkpoint", 0.0) == 0.0
    assert ledger.gpus["GPU-0"].credits["41"].credit[MODEL] == 0


def test_half_of_what_was_told_of_time_half_seen_is_booked() -> None:
    """Two seconds of loading in four, of which two were observed."""
    ledger = opened()
    second(ledger, 2, HALF, said(1, 2))
    advance(ledger, seen(4))
    before = parts(ledger)
    second(ledger, 6, HALF, said(2, 6, phases={"data": 2.0}))
    for at in range(7, 12):
        second(ledger, at, HALF)
    assert lost(ledger, before)["data_stall"] == pytest.approx(1.0)


def test_what_was_told_of_time_before_the_daemon_is_not_booked_later() -> None:
    """Half an hour of loading in the hour before it; of its first two seconds the same share."""
    ledger = Ledger()
    advance(ledger, Observation(3600 * S, 0, devices=(device(),), allocations=(held(gpus=2),)))
    before = parts(ledger)
    second(ledger, 3601, HALF)
    second(ledger, 3602, HALF, said(2, 3602, phases={"data": 1800.0}))
    for at in range(3603, 3623):
        second(ledger, at, HALF)
    assert lost(ledger, before)["data_stall"] == pytest.approx(1.0)
