"""QUESTIONS: what no document settles about the counters, and how one run of this measurement answers it.

Owns the questions and the reading of their answers from the rows. Refuses an answer where a row is missing, was not
seen well enough, or where its figures lie too close together to tell: None, with nothing guessed.
`docs/accounting.md` lists the same questions; a test holds the two together.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct

from benchmarks.known.compare import Row
from benchmarks.known.formulas import PEAK_RATIO
from exporter.core.model import Spec
from exporter.core.policy import Policy

_APART = 0.1
"""Two clocks closer than this, in parts of the higher, do not tell two explanations apart."""
_SAME = 0.02
"""Two shares closer than this are the same: the measurement's own target."""


class Results(Struct, frozen=True):
    """What an answer may look at."""

    rows: Mapping[str, Row]
    """Those judged, by load."""
    spec: Spec
    multiprocessors: int = 0

    def signal(self, load: str, name: str) -> float | None:
        """Mean of a signal over a load; None when it did not run or the signal was not seen."""
        row = self.rows.get(load)
        return None if row is None else row.signals.get(name)


class Question(Struct, frozen=True):
    """One row."""

    ask: str
    how: str
    """How the table answers it."""
    answer: Callable[[Results], str | None]


def _clock(results: Results) -> str | None:
    """Compare the same kernel at two clocks: its FLOP/s follow the clock; does `tensor_active`?"""
    for limited in ("mma_clock_locked", "mma_power_capped"):
        said = _two_clocks(results, limited)
        if said:
            return said
    return None


def _two_clocks(results: Results, limited: str) -> str | None:
    free, held = results.rows.get("mma"), results.rows.get(limited)
    if free is None or held is None or not free.truth.flops:
        return None
    tensor = [row.signals.get("tensor_active") for row in (free, held)]
    clocks = [row.signals.get("sm_clock_hz") for row in (free, held)]
    done = held.truth.flops / free.truth.flops
    if not tensor[0] or tensor[1] is None or not clocks[0] or clocks[1] is None or done > 1 - _APART:
        return None
    moved = tensor[1] / tensor[0]
    actual = abs(moved - 1) < abs(moved - done)
    return (
        f"{'the actual clock' if actual else 'a fixed reference clock'}: from {clocks[0] / 1e6:.0f} to "
        f"{clocks[1] / 1e6:.0f} MHz ({limited}) the true FLOP/s fell to {done:.1%} of what they were, tensor_active to "
        f"{moved:.1%}; OFU = tensor_active x clock is {'right' if actual else 'wrong: the clock counts twice'}"
    )


def _idle(results: Results) -> str | None:
    row = results.rows.get("idle_context")
    if row is None:
        return None
    names = ("gr_engine_active", "sm_active", "tensor_active", "dram_active")
    read = ", ".join(f"{name} {row.signals[name]:.4f}" for name in names if name in row.signals)
    without = results.signal("no_context", "power_watts")
    watts, noted = row.signals.get("power_watts"), results.spec.idle_context_watts
    beside = [f"{watts:.0f} W" if watts is not None else "power not seen"]
    beside += [f"{without:.0f} W without a context"] if without is not None else []
    beside += [f"{noted:.0f} W in the table of specs"] if noted is not None else []
    return f"{read}; {'; '.join(beside)}"


def _spin(results: Results) -> str | None:
    spinning, idle = results.signal("spin", "power_watts"), results.signal("idle_context", "power_watts")
    one, row = results.signal("spin_one_block", "power_watts"), results.rows.get("spin")
    if spinning is None or idle is None or row is None:
        return None
    alone = f", one block {one - idle:+.0f} W" if one is not None else ""
    limit = row.signals.get("enforced_power_limit_watts")
    share = f": {(spinning - idle) / limit:.1%} of the enforced limit" if limit else ""
    policy = Policy()
    return (
        f"{spinning - idle:+.0f} W{share}{alone}; the policy allows a spin "
        f"{policy.spin_power_share:.0%}, and {policy.spin_power_share_with_fp:.0%} where the FP pipes are seen at rest"
    )


def _one_block(results: Results) -> str | None:
    active = results.signal("spin_one_block", "sm_active")
    if active is None or not results.multiprocessors:
        return None
    one = 1 / results.multiprocessors
    verdict = "yes" if abs(active - one) <= one / 10 else "no"
    return f"{verdict}: sm_active {active:.5f}, 1/{results.multiprocessors} is {one:.5f}"


def _ceiling(results: Results) -> str | None:
    said = []
    for load in ("copy", "copy_kernel"):
        active, row, width = results.signal(load, "dram_active"), results.rows.get(load), _bandwidth(results.spec)
        if active is not None and row is not None and width:
            said.append(f"{load}: dram_active {active:.3f}, by its bytes {row.truth.bytes / width:.3f}")
    return f"{'; '.join(said)}; the spec's dram_ceiling is {results.spec.dram_ceiling:g}" if said else None


def _bandwidth(spec: Spec) -> float | None:
    return spec.memory_bandwidth_bytes_per_second


def _often(results: Results) -> str | None:
    slow, often = results.rows.get("bf16_8192"), results.rows.get("bf16_8192_often")
    if slow is None or often is None or slow.errors.ofu is None or often.errors.ofu is None:
        return None
    apart = often.errors.ofu - slow.errors.ofu
    return (
        f"{'no' if abs(apart) <= _SAME else 'yes'}: the error of OFU is {100 * slow.errors.ofu:+.2f} points at "
        f"{slow.load.interval:g} s and {100 * often.errors.ofu:+.2f} at {often.load.interval:g} s "
        f"({often.readings} readings, {often.unobserved:.1%} of the time unobserved)"
    )


def _copies(results: Results) -> str | None:
    driver, own = (results.signal(load, "gr_engine_active") for load in ("copy", "copy_kernel"))
    if driver is None:
        return None
    beside = f"; for a copy kernel of our own {own:.3f}" if own is not None else ""
    row = results.rows["copy"]
    verdict = "yes" if abs(driver - row.truth.busy) <= _SAME else "no"
    return f"{verdict}: gr_engine_active {driver:.3f} while the driver copied {row.truth.busy:.1%} of the time{beside}"


def _fp8(results: Results) -> str | None:
    return _implied(results, ("fp8_4096", "fp8_8192", "fp8_16384"), PEAK_RATIO["fp8"])


def _other_types(results: Results) -> str | None:
    said = [
        text
        for dtype in ("bf16", "fp16", "tf32")
        if (text := _implied(results, tuple(f"{dtype}_{n}" for n in (4096, 8192, 16384)), PEAK_RATIO[dtype]))
    ]
    return "; ".join(said) or None


def _implied(results: Results, loads: tuple[str, ...], ratio: float) -> str | None:
    """Divide the FLOP/s done by the OFU the ledger booked: the peak at which the two agree."""
    implied = [_peak_behind(results.rows[load]) for load in loads if load in results.rows]
    known = [
        peak / (results.spec.peak_flops or 0.0) for peak in implied if peak is not None and results.spec.peak_flops
    ]
    if not known:
        return None
    mean = sum(known) / len(known)
    verdict = "yes" if abs(mean / ratio - 1) <= 0.05 else "no"
    dtype = loads[0].split("_")[0]
    return f"{dtype}: {verdict}, the counter implies a peak of {mean:.3f} times the 16-bit one ({ratio:g} expected)"


def _peak_behind(row: Row) -> float | None:
    return row.truth.flops / row.reported.ofu if row.reported.ofu else None


QUESTIONS: tuple[Question, ...] = (
    Question(
        "Does GPM's tensor utilisation count cycles of the actual clock, or of a reference clock?",
        "`mma` against `mma_clock_locked` or `mma_power_capped`: the same kernel, fewer FLOP/s; a counter of actual"
        " cycles stays where it was, one of reference cycles falls with the FLOP/s",
        _clock,
    ),
    Question(
        "What does an idle context read?",
        "the signals and the power of `idle_context`, beside `no_context` and the table of specs",
        _idle,
    ),
    Question(
        "What does a spin kernel draw beyond an idle context?",
        "the power of `spin` and `spin_one_block` less that of `idle_context`, against the policy's shares",
        _spin,
    ),
    Question(
        "Is sm_active of a spin on one block 1 / number of SMs?",
        "`sm_active` of `spin_one_block` against the driver's count of SMs; within a tenth is yes",
        _one_block,
    ),
    Question(
        "Is dram_active of a copy the dram_ceiling of the spec?",
        "`dram_active` of `copy` and `copy_kernel` beside the bytes they moved over the bandwidth of the spec",
        _ceiling,
    ),
    Question(
        "Do samples 100 ms apart say something else than those 1 s apart?",
        "the error of OFU of `bf16_8192_often` (110 ms) against that of `bf16_8192`; within 2 points is no",
        _often,
    ),
    Question(
        "Does gr_engine_active count copies by the driver?",
        "`gr_engine_active` of `copy` against the share of time it copied; `copy_kernel` runs on the SMs for certain",
        _copies,
    ),
    Question(
        "Is FP8 counted at twice the 16-bit peak?",
        "FLOP/s of the FP8 products over their reported OFU: the peak that the counter implies; within 5 % is yes",
        _fp8,
    ),
    Question(
        "Do BF16, FP16 and TF32 products imply the peaks of the data sheet?",
        "the same for the other types: 1, 1 and 0.5 times the 16-bit peak",
        _other_types,
    ),
)
