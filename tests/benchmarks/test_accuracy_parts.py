"""Parts of the accuracy measurement that the stand-in cannot show: formulas by hand, the board's limits, the clock."""

import csv
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.known.board import NotMeasuredError, RefusedError, limited
from benchmarks.known.compare import Figures, Row, Truth
from benchmarks.known.formulas import (
    PEAK_RATIO,
    copy_bytes,
    mma_kernel_flops,
    product_flops,
    training_flops_per_token,
    transformer_parameters,
)
from benchmarks.known.loads import LOADS, Load
from benchmarks.known.questions import QUESTIONS, Results
from benchmarks.known.record import Bench, record
from benchmarks.known.stage import Empty
from benchmarks.known.torch import SHAPE, product, transformer
from benchmarks.machine import ROOT
from exporter.core.model import MS, SECOND, Device, Spec
from exporter.sources.base import ReadResult
from exporter.trace import TraceHeader
from tests.clocks import JumpClock

_BY_NAME = {load.name: load for load in LOADS}
_SPEC = Spec(name="H100", peak_flops=989.4e12, tensor_reference_clock_hz=1830e6)


# -- formulas, against figures worked by hand --


def test_a_product_is_a_multiplication_and_an_addition_a_term() -> None:
    """[1 x 3] times [3 x 2]: two results of three multiplications and three additions each, counted as NVIDIA does."""
    assert product_flops(1, 2, 3) == 12
    assert product_flops(16384, 16384, 16384) == 8_796_093_022_208


def test_a_warps_instruction_is_its_product_of_16_by_8_by_16() -> None:
    assert mma_kernel_flops(blocks=1, threads=32, rounds=1, per_round=1) == product_flops(16, 8, 16) == 4096
    assert mma_kernel_flops(blocks=3, threads=64, rounds=5, per_round=7) == 4096 * 3 * 2 * 5 * 7


def test_a_copied_byte_is_read_and_written() -> None:
    assert copy_bytes(1000) == 2000


def test_gpt_2_has_the_weights_and_operations_it_is_known_for() -> None:
    """The smallest: 12 layers of 768, 50,257 words. 85 M in its layers and 38.6 M in its head multiply."""
    parameters = transformer_parameters(layers=12, hidden=768, vocabulary=50_257)
    assert parameters == 12 * 12 * 768 * 768 + 768 * 50_257 == 123_532_032
    per_token = training_flops_per_token(parameters, layers=12, heads=12, head_size=64, sequence=1024)
    assert per_token == 6 * 123_532_032 + 12 * 12 * 12 * 64 * 1024 == 854_438_400


def test_peaks_of_other_types_are_those_of_the_data_sheets() -> None:
    """Of the boards with GPM, within the rounding of a data sheet."""
    columns = {"tf32": "tf32_tensor_tflops", "fp8": "fp8_tensor_tflops"}
    rows = csv.DictReader((ROOT / "exporter" / "data" / "gpu_specs.csv").read_text().splitlines())
    boards = [row for row in rows if row["profiling_path"] == "gpm"]
    assert boards
    for row in boards:
        for dtype, column in columns.items():
            ratio = float(row[column]) / float(row["bf16_fp16_tensor_tflops"])
            assert ratio == pytest.approx(PEAK_RATIO[dtype], rel=0.005), (row["model"], dtype)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="needs PyTorch: it counts the operations of its own products")


def _counted(torch: Any, step: Any) -> int:
    counter = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    with counter, import_module("torch.nn.attention").sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        step()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp8"])
def test_pytorch_counts_a_product_as_we_do(torch: Any, dtype: str) -> None:
    work = product(torch, {"dtype": dtype, "size": 128}, device="cpu")
    assert _counted(torch, work.launch) == work.flops == 2 * 128**3


def test_pytorch_counts_a_training_step_as_the_formula_does(torch: Any) -> None:
    shape = {"layers": 3, "hidden": 128, "heads": 4, "sequence": 64, "batch": 2, "vocabulary": 500}
    assert shape.keys() == SHAPE.keys()
    work = transformer(torch, {}, device="cpu", shape=shape)
    assert _counted(torch, work.launch) == work.flops


# -- the limits of the board --


class BoardError(Exception):
    """As NVMLError."""


class PretendedNvml:
    """A board's limits as NVML keeps them: what is set stays, and who may not set gets an error."""

    NVMLError = BoardError

    def __init__(self, *, may: bool = True) -> None:
        self.may, self.stuck = may, False
        self.milliwatts, self.mhz = 700_000, 0

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802  NVML's names
        return f"board {index}"

    def nvmlDeviceGetPowerManagementLimit(self, _: str) -> int:  # noqa: N802
        return self.milliwatts

    def nvmlDeviceGetPowerManagementLimitConstraints(self, _: str) -> tuple[int, int]:  # noqa: N802
        return 450_000, 700_000

    def nvmlDeviceSetPowerManagementLimit(self, _: str, milliwatts: int) -> None:  # noqa: N802
        self._allowed()
        self.milliwatts = milliwatts

    def nvmlDeviceSetGpuLockedClocks(self, _: str, low: int, high: int) -> None:  # noqa: N802
        self._allowed()
        assert low == high
        self.mhz = high

    def nvmlDeviceResetGpuLockedClocks(self, _: str) -> None:  # noqa: N802
        self._allowed()
        self.mhz = 0

    def _allowed(self) -> None:
        if self.stuck or not self.may:
            raise BoardError("Insufficient Permissions")


_DEVICE = Device(uuid="GPU-1", index="0", model="NVIDIA H100 80GB HBM3", spec=_SPEC)
_CAPPED, _LOCKED = _BY_NAME["mma_power_capped"], _BY_NAME["mma_clock_locked"]


def test_a_limit_holds_while_its_load_runs_and_no_longer() -> None:
    nvml = PretendedNvml()
    with limited(nvml, _DEVICE, _CAPPED, allowed=True):
        assert nvml.milliwatts == 450_000  # 60 % of 700 W is less than the board takes
    with limited(nvml, _DEVICE, _LOCKED, allowed=True):
        assert (nvml.milliwatts, nvml.mhz) == (700_000, 1098)  # 60 % of 1830 MHz
    assert nvml.mhz == 0


@pytest.mark.parametrize("load", [_CAPPED, _LOCKED])
def test_a_limit_is_taken_back_when_the_load_is_interrupted(load: Load) -> None:
    nvml = PretendedNvml()
    with pytest.raises(KeyboardInterrupt), limited(nvml, _DEVICE, load, allowed=True):
        raise KeyboardInterrupt
    assert (nvml.milliwatts, nvml.mhz) == (700_000, 0)


@pytest.mark.parametrize("load", [_CAPPED, _LOCKED])
def test_a_limit_that_may_not_be_set_is_refused_with_the_drivers_words(load: Load) -> None:
    with (
        pytest.raises(RefusedError, match="Insufficient Permissions"),
        limited(PretendedNvml(may=False), _DEVICE, load, allowed=True),
    ):
        raise AssertionError("the load must not run")


def test_no_limit_is_touched_unasked() -> None:
    nvml = PretendedNvml()
    with pytest.raises(RefusedError, match="--limits"), limited(nvml, _DEVICE, _CAPPED, allowed=False):
        raise AssertionError("the load must not run")
    with limited(nvml, _DEVICE, _BY_NAME["mma"], allowed=True):
        assert (nvml.milliwatts, nvml.mhz) == (700_000, 0)


@pytest.mark.parametrize(
    ("load", "by_hand"), [(_CAPPED, "nvidia-smi -i GPU-1 -pl 700"), (_LOCKED, "nvidia-smi -i GPU-1 -rgc")]
)
def test_a_limit_that_cannot_be_taken_back_is_told_with_what_to_do(load: Load, by_hand: str) -> None:
    nvml = PretendedNvml()
    with pytest.raises(NotMeasuredError, match=by_hand), limited(nvml, _DEVICE, load, allowed=True):
        nvml.stuck = True


# -- the pace of sampling --


class SlowSource:
    """A source of which one read takes 2.3 s; it remembers when it was asked."""

    name, signals = "slow", frozenset[str]()

    def __init__(self, clock: JumpClock) -> None:
        self._clock, self.asked = clock, list[int]()

    def read(self, now: int) -> ReadResult:
        self.asked.append(now)
        if len(self.asked) == 3:
            self._clock.wait(now + 2300 * MS, threading.Event())
        return ReadResult((_DEVICE,))

    def resync(self) -> None:
        """Nothing is remembered."""

    def pause(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def test_after_a_slow_read_the_next_samples_do_not_come_in_a_burst(tmp_path: Path) -> None:
    clock = JumpClock()
    source = SlowSource(clock)
    record(Bench(source, clock, _DEVICE, tmp_path, TraceHeader()), Empty(clock), _BY_NAME["no_context"])
    assert [moment / SECOND for moment in source.asked] == [0, 1, 2, 4.8, 5.8, 6.8, 7.8, 8.8]


# -- the question of the clock --


def _mma(name: str, *, flops: float, tensor: float, mhz: float) -> Row:
    signals = {"tensor_active": tensor, "sm_clock_hz": mhz * 1e6}
    truth = Truth(flops=flops, bytes=0.0, launches=1.0, busy=1.0)
    nothing = Figures()
    return Row(_BY_NAME[name], 6.0, truth, nothing, nothing, nothing, 0.0, {}, signals, 6, judged=True)


def _said(*rows: Row) -> str | None:
    return QUESTIONS[0].answer(Results({row.load.name: row for row in rows}, _SPEC))


def test_a_counter_that_stays_where_it_was_counts_the_actual_clock() -> None:
    free = _mma("mma", flops=600e12, tensor=0.62, mhz=1830)
    said = _said(free, _mma("mma_clock_locked", flops=360e12, tensor=0.61, mhz=1098))
    assert said is not None
    assert said.startswith("the actual clock: from 1830 to 1098 MHz (mma_clock_locked) the true FLOP/s fell to 60.0%")
    assert said.endswith("is right")


def test_a_counter_that_falls_with_the_work_counts_a_reference_clock() -> None:
    free = _mma("mma", flops=600e12, tensor=0.62, mhz=1830)
    said = _said(free, _mma("mma_power_capped", flops=360e12, tensor=0.372, mhz=1098))
    assert said is not None
    assert said.startswith("a fixed reference clock: ")
    assert said.endswith("is wrong: the clock counts twice")


def test_clocks_too_close_together_answer_nothing() -> None:
    free = _mma("mma", flops=600e12, tensor=0.62, mhz=1830)
    assert _said(free, _mma("mma_power_capped", flops=570e12, tensor=0.62, mhz=1740)) is None
    assert _said(free) is None
