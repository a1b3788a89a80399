"""Keeps how certain a job's leaks are: on which evidence their time was booked, and the bounds of what was estimated.

Bounds add up as if all intervals erred in the same direction, which holds for levels that are mistaken for a whole job.
They never change what is booked: useful time, and the product of the layers, do not depend on them.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from exporter.core.communication import Estimate
from exporter.core.leaks import LEAK_NAMES, LEAKS, LeakShares, Span
from exporter.core.timers import BEGINNING

_COMMUNICATION = LEAK_NAMES.index("exposed_communication")
_AFTER_COMMUNICATION = frozenset(
    LEAK_NAMES.index(name) for name in ("memory_bound", "low_parallelism", "other_compute")
)
"""They share what exposed communication leaves of the time of kernels without tensor work."""
_BY_INDICATORS = frozenset(i for i, leak in enumerate(LEAKS) if leak.evidence.endswith("estimated")) - {_COMMUNICATION}
"""A cause chosen by indicators: if they mislead, none of it is true."""
_ALTERNATIVES = {i: leak.evidence.split(" or ") for i, leak in enumerate(LEAKS) if " or " in leak.evidence}
MARGIN = 0.3
"""E: with assumed levels the true time may lie that share beyond either bound of the estimate."""
_ESTIMATED = sorted(_BY_INDICATORS | _AFTER_COMMUNICATION | {_COMMUNICATION})
ESTIMATED_LEAKS = tuple(LEAK_NAMES[i] for i in _ESTIMATED)
"""Leaks that have bounds wherever they rest on an estimate."""


def evidence_of(span: Span, index: int) -> str:
    """Kind of evidence on which a span books a leak: measured, reported, engine, calibrated or estimated."""
    known = () if span.credit is None else span.credit.known
    if index == _COMMUNICATION:
        if span.exposed is not None:
            return span.exposed.evidence
        return "measured" if span.spinning else "reported"
    alternatives = _ALTERNATIVES.get(index)
    if alternatives is None:
        return LEAKS[index].evidence
    reported, otherwise = alternatives
    if otherwise == "measured":  # what precedes the first work, which needs no report
        return otherwise if BEGINNING in span.signs else reported
    return reported if LEAKS[index].balance in known else otherwise


def _zeros() -> list[int]:
    return [0] * len(LEAK_NAMES)


class Uncertainty(Struct, eq=False):
    """Of one job, nanoseconds by leak, in the order of LEAK_NAMES."""

    below: list[int] = field(default_factory=_zeros)
    """How much less than booked may be true."""
    above: list[int] = field(default_factory=_zeros)
    """How much more than booked may be true."""
    reported: list[int] = field(default_factory=_zeros)
    """What was booked as the job reported it, of leaks that can also be measured or estimated."""
    calibrated: list[int] = field(default_factory=_zeros)
    """What was estimated by levels that were measured for this job."""
    measured: list[int] = field(default_factory=_zeros)
    """What needed no estimate, of leaks that are otherwise estimated."""

    def add(self, span: Span, taken: LeakShares, ms: int) -> None:
        """Add `ms` milliseconds of a span that was split into `taken`."""
        for index, ppm in taken:
            alternatives = _ALTERNATIVES.get(index)
            kind = "" if alternatives is None else evidence_of(span, index)
            if alternatives is not None and kind != alternatives[1]:
                column: list[int] = getattr(self, kind)
                column[index] += ppm * ms
            elif index in _BY_INDICATORS:
                self.below[index] += ppm * ms
        if span.exposed is not None and span.exposed.high > span.exposed.low:
            self._add_communication(span, span.exposed, taken, ms)

    def _add_communication(self, span: Span, exposed: Estimate, taken: LeakShares, ms: int) -> None:
        """Add the bounds of estimated communication; what it may gain, the leaks after it lose pro rata."""
        booked = rest = 0
        for index, ppm in taken:
            if index == _COMMUNICATION:
                booked = ppm
            elif index in _AFTER_COMMUNICATION:
                rest += ppm
        margin = MARGIN if exposed.evidence == "estimated" else 0.0
        low, high = (
            max(0, span.owned(bound) - span.polled)
            for bound in (exposed.low * (1.0 - margin), exposed.high * (1.0 + margin))
        )
        below = booked - min(booked, low)
        above = min(booked + rest, max(booked, high)) - booked
        self.below[_COMMUNICATION] += below * ms
        self.above[_COMMUNICATION] += above * ms
        for index, ppm in taken:
            if rest and index in _AFTER_COMMUNICATION:
                self.below[index] += above * ppm // rest * ms
                self.above[index] += below * ppm // rest * ms


class Bounds(Struct, frozen=True, array_like=True):
    """The least and the most that a leak's time may be, nanoseconds."""

    low: int
    high: int


def bounds_by_leak(parts: Sequence[int], uncertainty: Uncertainty) -> dict[str, Bounds]:
    """Bounds of the leaks whose time rests on an estimate."""
    below, above = uncertainty.below, uncertainty.above
    return {
        name: Bounds(parts[index] - below[index], parts[index] + above[index])
        for name, index in zip(ESTIMATED_LEAKS, _ESTIMATED, strict=True)
        if below[index] or above[index]
    }


def evidence_by_leak(parts: Sequence[int], uncertainty: Uncertainty) -> dict[str, dict[str, int]]:
    """Nanoseconds by kind of evidence, of leaks that can have several."""
    return {
        LEAK_NAMES[index]: dict(_kinds(parts[index], uncertainty, index))
        for index in _ALTERNATIVES
        if parts[index]
    }  # fmt: skip


def _kinds(booked: int, uncertainty: Uncertainty, index: int) -> Iterator[tuple[str, int]]:
    for kind in ("measured", "reported", "calibrated"):
        amount: int = getattr(uncertainty, kind)[index]
        if amount:
            booked -= amount
            yield kind, amount
    if booked > 0:
        yield _ALTERNATIVES[index][1], booked


def main_evidence(kinds: Mapping[str, int]) -> str:
    """The kind of most of the time; of two equal ones the weaker."""
    return max(reversed([*kinds]), key=lambda kind: kinds[kind])
