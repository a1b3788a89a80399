"""The measurement of our accuracy, whole: on the stand-in NVML, which plays back worlds with known answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.known.loads import LOADS
from benchmarks.known.questions import QUESTIONS
from benchmarks.known.record import POLICY
from benchmarks.machine import ROOT
from exporter.core.leaks import USEFUL_INDEX
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.trace import read_trace
from tests.benchmarks import played
from tests.nvml_stub.build import LIBRARY, build
from tests.shared_library import compiler

ROUNDING = 1e-5
"""The ledger counts parts per million."""


class Outcome:
    """What one run of the command left behind."""

    def __init__(self, done: subprocess.CompletedProcess[str], folder: Path) -> None:
        self.status, self.said, self.page, self.folder = done.returncode, done.stderr, done.stdout, folder

    @property
    def result(self) -> dict[str, Any]:
        assert self.status == 0, self.said
        result: dict[str, Any] = json.loads((self.folder / "accuracy.json").read_bytes())
        return result

    def row(self, load: str) -> dict[str, Any]:
        (row,) = [row for row in self.result["rows"] if row["load"]["name"] == load]
        found: dict[str, Any] = row
        return found

    def answer(self, words: str) -> str:
        (answer,) = [answer for ask, answer in self.result["questions"].items() if words in ask]
        return str(answer)


@pytest.fixture(scope="session")
def library() -> Path:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in NVML")
    return build()


class Command:
    """Runs `python -m benchmarks.accuracy` beside the stand-in, as a process of its own."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library, self._folder = library, folder

    def __call__(self, *arguments: str, **environment: str) -> Outcome:
        out = self._folder / "out"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self._library), **environment}
        command = [sys.executable, "-m", "benchmarks.accuracy", "--out", str(out), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return Outcome(done, out)

    def play(self, loads: dict[str, Any], *world: str, options: tuple[str, ...] = ()) -> Outcome:
        return self("--player", str(played.write(self._folder, loads, *world)), *options)


@pytest.fixture
def command(library: Path, tmp_path: Path) -> Command:
    return Command(library, tmp_path)


@pytest.fixture(scope="module")
def exact(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Every load, in a world whose counters are right."""
    return Command(library, tmp_path_factory.mktemp("exact")).play(played.exact())


# -- counters that are right --


@pytest.mark.slow
def test_right_counters_meet_the_target_with_no_error(exact: Outcome) -> None:
    assert exact.result["mean_absolute_error"] == pytest.approx(0, abs=ROUNDING)
    assert "meets the target" in exact.page
    assert "on 12 large products" in exact.page


def test_right_counters_give_every_figure_of_every_load(exact: Outcome) -> None:
    rows = exact.result["rows"]
    assert [row["load"]["name"] for row in rows] == [load.name for load in LOADS if not load.changes_board]
    for row in rows:
        errors = [row["errors"][name] for name in ("ofu", "wait", "memory_bound", "host_overhead")]
        assert errors == pytest.approx([error and 0 for error in errors], abs=ROUNDING), row["load"]["name"]
        assert (row["errors"]["state"], row["unobserved"], row["judged"]) == ("", 0, True)


@pytest.mark.parametrize(
    ("load", "shares", "state"),
    [
        # OFU, wait, memory_bound, host_overhead; None: not known
        ("no_context", (0, 1, 0, 0), "stalled"),
        ("idle_context", (0, 1, 0, 0), "stalled"),
        ("spin", (0, 0, 0, 0), "hung"),
        ("spin_one_block", (0, 0, 0, 0), "hung"),
        ("small_kernels", (0, 0.5, 0, 0.5), "active"),
        ("copy", (0, 0, 1, 0), "active"),
        ("copy_kernel", (0, 0, 1, 0), "active"),
        ("mma", (0.62 * 1980 / 1830, 0, 0, 0), "active"),
        # 60 % of the pipes at 1525 of 1830 MHz: half of the peak, whatever the type.
        ("bf16_8192", (0.5, 0, None, 0), "active"),
        ("tf32_8192", (0.5, 0, None, 0), "active"),
        ("fp8_8192", (0.5, 0, None, 0), "active"),
        ("bf16_1024", (0.5, None, None, None), "active"),
        ("bf16_4096_gaps", (0.25, 0.5, None, 0), "active"),
        ("bf16_8192_gaps", (0.3 * 1980 / 1830, 0.5, None, 0), "active"),  # above the reference: more than the peak
        ("transformer", (0.375, None, None, None), "active"),
    ],
)
def test_what_is_expected_is_what_the_load_did(
    exact: Outcome, load: str, shares: tuple[float | None, ...], state: str
) -> None:
    row = exact.row(load)
    names = ("ofu", "wait", "memory_bound", "host_overhead")
    assert [row["expected"][name] for name in names] == pytest.approx(list(shares), abs=1e-3)
    assert row["expected"]["state"] == row["reported"]["state"] == state


def test_an_idle_context_waits_and_does_not_start_up(exact: Outcome) -> None:
    for load in ("idle_context", "no_context"):
        assert exact.row(load)["leaks"] == {"unattributed_stall": 1.0}


def test_the_questions_a_stand_in_can_answer_are_answered(exact: Outcome) -> None:
    assert exact.answer("1 / number of SMs").startswith("yes: sm_active 0.00758")
    assert exact.answer("spin kernel draw") == (
        "+10 W: 1.4% of the enforced limit, one block +2 W; the policy allows a spin 8%, and 15% where the FP pipes"
        " are seen at rest"
    )
    assert "110 W; 80 W without a context" in exact.answer("idle context read")
    assert exact.answer("100 ms apart").startswith("no: the error of OFU is +0.00")
    assert exact.answer("copies by the driver").startswith("yes: gr_engine_active 1.000 while the driver copied 100.0%")
    assert "copy: dram_active 0.930, by its bytes 0.930" in exact.answer("dram_ceiling")
    assert exact.answer("FP8").startswith("fp8: yes, the counter implies a peak of 2.000")
    assert exact.result["questions"][QUESTIONS[0].ask] is None  # no board whose clock could be held down


def test_the_page_says_that_no_gpu_was_measured_and_what_did_not_run(exact: Outcome) -> None:
    assert "**NOT A MEASUREMENT: the driver was a stand-in" in exact.page
    assert "played back from a file: no kernel ran" in exact.page
    assert "`mma_power_capped`: it changes a limit of the board: allow that with --limits" in exact.page
    assert "NVIDIA H100 80GB HBM3" in exact.page
    assert "power limit 700 W" in exact.page
    assert (exact.folder / "accuracy.md").read_text() == exact.page.rstrip("\n") + "\n"


def test_each_load_leaves_a_trace_from_which_its_figures_follow_again(exact: Outcome) -> None:
    names = {path.name.removesuffix(".jsonl.gz") for path in exact.folder.glob("*.jsonl.gz")}
    assert names == {row["load"]["name"] for row in exact.result["rows"]}
    trace = read_trace(exact.folder / "bf16_8192.jsonl.gz")
    assert trace.header.simulated
    assert trace.header.note == "accuracy: bf16_8192; NVIDIA H100 80GB HBM3, driver 0.0 stand-in, not NVIDIA"
    ledger, useful, tensor, began = Ledger(POLICY), {}, list[float | None](), 0
    for observation in trace:
        advance(ledger, observation)
        assert bool(observation.readings) is bool(began)  # the first is the baseline, and vouches for nothing before it
        began = began or observation.at
        (gpu,) = ledger.gpus.values()
        tensor += [reading.tensor_active for reading in observation.readings]
        useful[(observation.at - began) / SECOND] = gpu.book.parts[USEFUL_INDEX]
    # It warms up for 1.5 s at 50 %, is at 33 % for one, then at 60 %, and OFU 50 %, for six.
    assert tensor[:4] == pytest.approx([0.5, (0.5 + 0.33) / 2, (0.33 + 0.6) / 2, 0.6])
    assert (useful[8] - useful[3]) / (5 * SECOND) == pytest.approx(0.5, abs=ROUNDING)


# -- counters that are wrong --


def _large(off: float) -> dict[str, Any]:
    """All large products, of which every other is read `off` points too high, the others too low."""
    large = [(name, dtype) for name, dtype in played.PRODUCTS if name.split("_")[1] not in ("1024", "2048")]
    signs = [off if i % 2 else -off for i in range(len(large))]
    return {name: played.product(dtype, off=sign) for (name, dtype), sign in zip(large, signs, strict=True)}


def test_a_counter_five_points_off_misses_the_target_by_what_it_is_off(command: Command) -> None:
    outcome = command.play(_large(off=5.0))
    assert outcome.result["mean_absolute_error"] == pytest.approx(0.05, abs=ROUNDING)
    assert "MISSES the target: the mean absolute error of OFU on 12 large products is 5.00 percentage" in outcome.page
    assert outcome.row("bf16_4096")["errors"]["ofu"] == pytest.approx(-0.05, abs=ROUNDING)
    assert outcome.row("bf16_8192")["errors"]["ofu"] == pytest.approx(0.05, abs=ROUNDING)
    assert outcome.row("bf16_8192")["expected"]["ofu"] == pytest.approx(0.5, abs=ROUNDING)


@pytest.mark.parametrize(("off", "verdict"), [(1.99, "meets the target"), (2.01, "MISSES the target")])
def test_the_target_is_two_points(command: Command, off: float, verdict: str) -> None:
    assert verdict in command.play(_large(off=off)).page


def test_only_large_products_without_gaps_are_held_against_the_target(command: Command) -> None:
    wrong = {name: played.product("bf16", off=20) for name in ("bf16_1024", "bf16_8192_often", "transformer")}
    wrong["bf16_8192_gaps"] = played.product("bf16", duty=0.5, off=10)
    outcome = command.play({**wrong, "bf16_8192": played.product("bf16", off=1)})
    assert outcome.result["mean_absolute_error"] == pytest.approx(0.01, abs=ROUNDING)
    assert outcome.row("bf16_8192_gaps")["errors"]["ofu"] == pytest.approx(0.1, abs=ROUNDING)


def test_without_a_large_product_nothing_is_judged(command: Command) -> None:
    outcome = command.play({"bf16_1024": played.product("bf16", off=9)})
    assert outcome.result["mean_absolute_error"] is None
    assert "NOT JUDGED" in outcome.page
    assert "target:" not in outcome.page.partition("## Expected")[0]


def test_a_spin_that_looks_like_work_is_a_wrong_state(command: Command) -> None:
    """Its power is that of a board at work: the rule of section 5 acquits it."""
    outcome = command.play({"spin": played.load("gr 100; sm 100; power_mw 500000", settle=7.0, busy=1.0)})
    assert outcome.row("spin")["errors"]["state"] == outcome.row("spin")["reported"]["state"] == "active"
    assert "| hung | **active** |" in outcome.page


def test_a_copy_that_the_engine_does_not_count_is_told(command: Command) -> None:
    copy = played.load("dram 93; power_mw 300000", bytes=0.93 * played.BANDWIDTH, busy=1.0)
    outcome = command.play({"copy": copy})
    row = outcome.row("copy")
    assert (row["errors"]["memory_bound"], row["errors"]["wait"]) == pytest.approx((-1.0, 1.0), abs=ROUNDING)
    assert row["errors"]["state"] == "stalled"
    assert outcome.answer("copies by the driver").startswith("no: gr_engine_active 0.000")


def test_a_copy_below_the_ceiling_of_the_spec_is_short_of_memory_bound(command: Command) -> None:
    """0.69 of 0.92 x 0.96, which kernels reach, on nine tenths of the SMs."""
    copy = played.load("gr 100; sm 90; dram 69", bytes=0.69 * played.BANDWIDTH, busy=1.0)
    short = 0.69 / (0.92 * 0.96) * 0.9 - 1
    assert command.play({"copy": copy}).row("copy")["errors"]["memory_bound"] == pytest.approx(short, abs=1e-4)


def test_fp8_counted_at_the_sixteen_bit_peak_is_seen(command: Command) -> None:
    """The FLOP/s are those of 30 % of the FP8 peak; the counter shows 60 %."""
    outcome = command.play({"fp8_8192": played.product("fp8", tensor=30, mhz=1830, off=30)})
    assert outcome.answer("FP8").startswith("fp8: no, the counter implies a peak of 1.000")


def test_samples_close_together_that_read_otherwise_are_seen(command: Command) -> None:
    loads = {"bf16_8192": played.product("bf16"), "bf16_8192_often": played.product("bf16", off=4)}
    assert (
        command.play(loads).answer("100 ms apart").startswith("yes: the error of OFU is +0.00 points at 1 s and +4.00")
    )


# -- what was not seen --

_BLIND = "error nvmlGpmSampleGet 4; error nvmlDeviceGetUtilizationRates 4"


def test_a_load_that_was_not_seen_has_no_row(command: Command) -> None:
    outcome = command.play({"mma": played.load("gr 100; sm 100"), "copy": played.load(_BLIND, flops=1e14, busy=1.0)})
    assert "copy" not in [row["load"]["name"] for row in outcome.result["rows"]]
    assert outcome.result["not_run"]["copy"].startswith("nothing of it was observed: NVML: GPU 0")


def test_a_load_of_which_too_much_was_not_seen_is_shown_and_not_judged(command: Command) -> None:
    product = played.product("bf16", off=10)
    right = product["phases"][2]
    blind = {**right, "seconds": 2.0, "says": played.says(_BLIND), "lap": {"flops": right["lap"]["flops"] / 3}}
    rest = {**right, "seconds": 4.0, "lap": {"flops": right["lap"]["flops"] * 2 / 3}}
    product["phases"][2:3] = [blind, rest]
    outcome = command.play({"bf16_8192": product, "bf16_4096": played.product("bf16", off=1)})
    row = outcome.row("bf16_8192")
    assert (row["judged"], row["unobserved"]) == (False, pytest.approx(0.2))  # a second of five
    assert "| (bf16_8192) |" in outcome.page
    assert outcome.result["mean_absolute_error"] == pytest.approx(0.01, abs=ROUNDING)


def test_tensor_activity_that_was_not_seen_is_no_figure_rather_than_zero(command: Command) -> None:
    product = played.product("bf16")
    product["phases"][2]["says"].append("gpu 0 metric 5 4")  # NVML_GPM_METRIC_ANY_TENSOR_UTIL: no permission
    row = command.play({"bf16_8192": product}).row("bf16_8192")
    assert (row["reported"]["ofu"], row["errors"]["ofu"]) == (None, None)
    assert row["expected"]["ofu"] == pytest.approx(0.5, abs=ROUNDING)


def test_a_load_too_short_to_measure_has_no_row(command: Command) -> None:
    outcome = command.play({"mma": played.load("gr 100; sm 100"), "copy": played.load("gr 100; sm 100", seconds=0.5)})
    assert "too short for two samples" in outcome.result["not_run"]["copy"]


@pytest.mark.parametrize("outcome", ["skipped", "failed"])
def test_a_load_that_did_not_run_is_told_with_its_reason(command: Command, outcome: str) -> None:
    loads = {"mma": played.load("gr 100; sm 100"), "fp8_8192": {"outcome": outcome, "reason": "no FP8 here"}}
    told = command.play(loads)
    assert told.result["not_run"]["fp8_8192"] == f"{outcome}: no FP8 here"
    assert f"`fp8_8192`: {outcome}: no FP8 here" in told.page
    assert not (told.folder / "fp8_8192.jsonl.gz").exists()


# -- what cannot be measured --


def test_without_a_driver_it_says_so(command: Command, tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"not a library")  # found first, so a driver on this machine does not matter
    outcome = command(LD_LIBRARY_PATH=str(tmp_path))
    assert outcome.status == 3
    assert outcome.said.startswith("accuracy: not measured: NVML: libnvidia-ml.so.1 not found: is the NVIDIA driver")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "status", "words"),
    [
        (("gpu 0 process 77",), 1, "GPU 0 (NVIDIA H100 80GB HBM3) is in use by process 77: end it"),
        (("gpu 0 gr 40",), 1, "is 40% busy though no process is listed"),
        (("gpu 0 gpm 0",), 3, "gives no tensor activity through NVML: GPM needs a Hopper board"),
        (("gpu 0 name NVIDIA Imaginary", "gpu 0 pci 0x999910DE"), 3, "is a 'NVIDIA Imaginary', which is not in"),
        (("gpu 0 lost",), 3, "lost"),
        (("driver gone",), 3, "the kernel driver is not loaded"),
    ],
)
def test_a_board_that_cannot_be_measured_is_refused_in_words(
    command: Command, world: tuple[str, ...], status: int, words: str
) -> None:
    outcome = command.play(played.exact(), *world)
    assert (outcome.status, outcome.page) == (status, "")
    assert outcome.said.startswith("accuracy: not measured: ")
    assert words in outcome.said
    assert not outcome.folder.exists()


def test_force_measures_a_board_in_use_and_the_page_says_so(command: Command) -> None:
    outcome = command.play({"mma": played.load("gr 100; sm 100")}, "gpu 0 process 77", options=("--force",))
    assert "**FORCED: the GPU is in use by process 77, whose work is in these figures**" in outcome.page


def test_a_gpu_that_is_not_there_is_told_with_those_that_are(command: Command) -> None:
    outcome = command.play(played.exact(), options=("--gpu", "3"))
    assert outcome.status == 3
    assert "there is no GPU 3: this node has 0 (NVIDIA H100 80GB HBM3)" in outcome.said


def test_a_gpu_is_found_by_its_uuid_and_the_others_are_left_alone(command: Command) -> None:
    uuid = "GPU-5700b000-0000-0000-0000-000000000001"
    busy = ("count 2", "gpu 0 process 9", "gpu 1 idle", *(f"gpu 1 {key}" for key in played.IDLE.split("; ")))
    outcome = command.play({"mma": played.load("gr 100; sm 100")}, *busy, options=("--gpu", uuid))
    assert outcome.row("mma")["reported"]["state"] == "stalled"  # GPU 1 rests while GPU 0 runs
    readings = [r.uuid for observation in read_trace(outcome.folder / "mma.jsonl.gz") for r in observation.readings]
    assert set(readings) == {uuid}


def test_when_no_load_can_run_it_is_not_measured(command: Command) -> None:
    nobody = played.exact()["no_context"]
    outcome = command.play({"no_context": nobody, "mma": {"outcome": "skipped", "reason": "no libcuda"}})
    assert (outcome.status, outcome.page) == (1, "")
    assert "no load could run: " in outcome.said
    assert "skipped: no libcuda" in outcome.said.splitlines()[-1]


def test_an_unknown_load_is_a_wrong_command_line(command: Command) -> None:
    outcome = command.play({}, options=("--only", "mma", "nosuch"))
    assert outcome.status == 2
    assert "nosuch: no such load; there are no_context, " in outcome.said


@pytest.mark.slow
def test_only_and_quick_choose(command: Command) -> None:
    only = command.play(played.exact(), options=("--only", "mma", "no_context"))
    assert [row["load"]["name"] for row in only.result["rows"]] == ["no_context", "mma"]
    quick = command.play(played.exact(), options=("--quick",))
    names = {row["load"]["name"] for row in quick.result["rows"]}
    assert names == {load.name for load in LOADS if load.quick}
    assert "(--quick)" in quick.page


def test_all_of_it_takes_less_than_ten_minutes() -> None:
    assert sum(load.warm + load.seconds + 1.5 for load in LOADS) < 9 * 60


def test_the_page_of_the_docs_asks_the_same_questions() -> None:
    page = " ".join((ROOT / "docs" / "accounting.md").read_text().split())
    for question in QUESTIONS:
        assert f"- **{question.ask}** {question.how}. " in page
