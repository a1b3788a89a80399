"""What was true, what the ledger said, and how far apart they are. All shares are of the observed time, 0-1.

Owns the window of time that is compared, and what each load's truth means for the ledger. Truth comes from what the
load did and the board's data sheet alone, never from a counter. Refuses to round, and to say what cannot be known:
None.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from benchmarks.known.formulas import PEAK_RATIO
from benchmarks.known.loads import LARGE, Load
from benchmarks.known.record import Recording, Tick
from benchmarks.known.stage import Lap
from exporter.core.model import SECOND, Reading, Spec

TARGET = 0.02
"""Mean absolute error of OFU on large products: two percentage points."""
_LAST = SECOND
_SEEN_ENOUGH = 0.95
"""Of the window: with more of it unobserved a row is shown and not judged."""
_SIGNALS = (
    "gr_engine_active", "sm_active", "tensor_active", "dram_active", "fp32_active", "sm_clock_hz", "power_watts",
    "enforced_power_limit_watts",
)  # fmt: skip


class Truth(Struct, frozen=True):
    """What the load did over the window: rates per second of wall time."""

    flops: float
    bytes: float
    launches: float
    busy: float
    """Share of the time with a kernel."""


class Figures(Struct, frozen=True):
    """What the table compares. None: not known, or not seen."""

    ofu: float | None = None
    wait: float | None = None
    memory_bound: float | None = None
    host_overhead: float | None = None
    state: str = ""


class Row(Struct, frozen=True):
    """A load that ran and could be compared."""

    load: Load
    seconds: float
    """Length of the window."""
    truth: Truth
    expected: Figures
    reported: Figures
    errors: Figures
    """Reported less expected; the state is "" where it is right."""
    unobserved: float
    leaks: dict[str, float]
    """What was booked, by leak and outcome, where it is more than nothing."""
    signals: dict[str, float]
    """Means of the source's signals over the window, in the units of `Reading`."""
    readings: int
    judged: bool
    """Enough of it was seen."""


class UnfitError(Exception):
    """A recording that cannot be compared; the message says why."""


def compare(recording: Recording, spec: Spec) -> Row:
    """Hold a recording against its truth. Raises UnfitError."""
    first, last = _window(recording)
    load, seen = recording.load, last.paid - first.paid - _booked("unobserved", first, last)
    if seen <= 0:
        raise UnfitError(f"nothing of it was observed: {'; '.join(recording.faults) or last.reason}")
    truth = _truth(recording.report.laps, first.at, last.at)
    expected, reported = expect(load, truth, spec), _reported(recording.ticks, first, last, seen)
    inside = list(_readings(recording.ticks, first, last))
    observed = seen / (last.paid - first.paid)
    return Row(
        load,
        (last.at - first.at) / SECOND,
        truth,
        expected,
        reported,
        _errors(expected, reported),
        1.0 - observed,
        {name: _booked(name, first, last) / seen for name in last.parts if _booked(name, first, last)},
        _means(inside),
        len(inside),
        observed >= _SEEN_ENOUGH,
    )


def expect(load: Load, truth: Truth, spec: Spec) -> Figures:
    """What a right ledger says of a load that did `truth` on a board of `spec` (accounting, section 4)."""
    peak = (spec.peak_flops or 0.0) * PEAK_RATIO[load.dtype or "bf16"]
    ofu = truth.flops / peak if peak else None
    kind, wait = load.kind, 1.0 - truth.busy
    # A small product leaves the pipes between two launches for a time nobody measured.
    known_wait = None if kind == "transformer" or (kind == "product" and load.size < LARGE) else wait
    # A copy does nothing but move data: all the time it runs is bound by memory. A product's share is not known.
    bound = {"copy": truth.busy, "copy_kernel": truth.busy, "product": None, "transformer": None}.get(kind, 0.0)
    host = {"storm": wait, "transformer": None}.get(kind, None if known_wait is None else 0.0)
    return Figures(ofu, known_wait, bound, host, load.state)


def mean_absolute_error(rows: Iterable[Row]) -> tuple[float | None, int]:
    """Of OFU on the large products that were judged, and how many there were; None without any."""
    errors = [abs(row.errors.ofu) for row in rows if row.load.large and row.judged and row.errors.ofu is not None]
    return (sum(errors) / len(errors) if errors else None), len(errors)


def _window(recording: Recording) -> tuple[Tick, Tick]:
    """The first and the last sample well inside the load."""
    load, laps = recording.load, recording.report.laps
    if not laps:
        raise UnfitError("it told of nothing that it did")
    since, until = laps[0].start + round(load.settle * SECOND), laps[-1].end - _LAST
    inside = [tick for tick in recording.ticks if since <= tick.at <= until]
    if len(inside) < 2:
        ran = (laps[-1].end - laps[0].start) / SECOND
        raise UnfitError(f"it ran for {ran:.1f} s: too short for two samples {load.settle:g} s in and 1 s from its end")
    return inside[0], inside[-1]


def _truth(laps: Sequence[Lap], start: int, end: int) -> Truth:
    """Sum over [start, end); a lap that is partly inside counts by the part of its time."""
    shares = [(lap, _overlap(lap, start, end) / (lap.end - lap.start)) for lap in laps if lap.end > lap.start]
    seconds = (end - start) / SECOND

    def rate(name: str) -> float:
        return float(sum(share * getattr(lap, name) for lap, share in shares)) / seconds

    return Truth(rate("flops"), rate("bytes"), rate("launches"), rate("busy"))


def _overlap(lap: Lap, start: int, end: int) -> int:
    return max(0, min(lap.end, end) - max(lap.start, start))


def _reported(ticks: Sequence[Tick], first: Tick, last: Tick, seen: int) -> Figures:
    def share(name: str) -> float:
        return _booked(name, first, last) / seen

    resolved = share("unresolved") <= 1 - _SEEN_ENOUGH
    return Figures(
        share("useful") if resolved else None,
        1.0 - (last.engine - first.engine) / seen,
        share("memory_bound"),
        share("host_overhead"),
        _state(ticks, first, last),
    )


def _state(ticks: Sequence[Tick], first: Tick, last: Tick) -> str:
    """The states the ledger was in, the longest first, with their share where there were several."""
    inside = [tick for tick in ticks if first.at <= tick.at <= last.at]
    held: Counter[str] = Counter()
    for before, after in pairwise(inside):
        held[after.state.value] += after.at - before.at
    if len(held) == 1:
        return next(iter(held))
    return ", ".join(f"{state} {time / held.total():.0%}" for state, time in held.most_common())


def _errors(expected: Figures, reported: Figures) -> Figures:
    def off(name: str) -> float | None:
        wanted, got = getattr(expected, name), getattr(reported, name)
        return None if wanted is None or got is None else got - wanted

    wrong = reported.state if reported.state != expected.state else ""
    return Figures(off("ofu"), off("wait"), off("memory_bound"), off("host_overhead"), wrong)


def _booked(name: str, first: Tick, last: Tick) -> int:
    return last.parts[name] - first.parts[name]


def _readings(ticks: Sequence[Tick], first: Tick, last: Tick) -> Iterable[Reading]:
    """Each reading within the window once."""
    told = {tick.reading.end: tick.reading for tick in ticks if tick.reading is not None}
    return (reading for reading in told.values() if first.at <= reading.start and reading.end <= last.at)


def _means(readings: Sequence[Reading]) -> dict[str, float]:
    """By time; a signal no reading gave is not there."""
    means = {}
    for name in _SIGNALS:
        given = [(getattr(each, name), each.end - each.start) for each in readings if getattr(each, name) is not None]
        if given:
            means[name] = sum(value * time for value, time in given) / sum(time for _, time in given)
    return means
