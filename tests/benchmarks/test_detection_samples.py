"""What real recordings say to the detectors: nothing false, and little more."""

import pytest

from benchmarks.detection import samples as detection_samples
from benchmarks.detection.samples import CAPTURES, SAMPLES, busy_and_cool, hang_lines, phases, samples, shown

pytestmark = pytest.mark.skipif(not SAMPLES.exists(), reason="needs ../shared")

STATES = {
    "H100 idle (nvidia-smi)": ("stalled", "no_process"),
    "H100 under gpu_burn (nvidia-smi)": ("active", "computing"),
    "H100 in MIG mode under gpu_burn (nvidia-smi)": ("unobserved", "no_engine_signal"),
    "H200 in MIG mode under gpu_burn (nvidia-smi)": ("unobserved", "no_engine_signal"),
    "L4 idle (dcgm-exporter)": ("stalled", "processes_unseen"),
    "L40S idle (dcgm-exporter)": ("stalled", "processes_unseen"),
    "T4 idle (dcgm-exporter)": ("stalled", "processes_unseen"),
}


@pytest.mark.parametrize(("name", "capture"), CAPTURES)
def test_a_recorded_board_is_what_it_was_and_no_hang_is_suspected(
    name: str, capture: detection_samples.Capture
) -> None:
    found = shown(*capture())
    assert (found.state, found.reason) == STATES[name]
    assert not found.suspected


def test_the_first_step_and_the_saves_of_a_real_run_are_as_long_as_our_look_alikes() -> None:
    lasted = phases()
    assert lasted["step"][0] == pytest.approx(22 * 60, abs=60)
    assert max(lasted["step"][1:]) < 30
    assert lasted["save"] == pytest.approx([90, 90], abs=5)


def test_a_recorded_hang_says_nothing_of_its_gpus() -> None:
    assert hang_lines() == {"XPU_TIMER_COMMON_HANG"}


def test_full_utilisation_at_low_power_is_common_on_a_real_cluster() -> None:
    """By the marginals at least a tenth of all samples, so the rule of thumb has plenty to page for."""
    assert busy_and_cool("seren") == pytest.approx((0.205, 0.600), abs=0.005)
    assert busy_and_cool("kalos") == pytest.approx((0.100, 0.550), abs=0.005)


def test_where_there_are_no_recordings_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(samples()) == len(CAPTURES) + 4
    monkeypatch.setattr(detection_samples, "SAMPLES", SAMPLES / "missing")
    (only,) = samples()
    assert "not here" in only.spread
