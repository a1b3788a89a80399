"""Finds long gaps between two scrapes of a daemon in which a period begins or ends, and counters' growth across them.

Such growth is in neither of the two periods if the value before the gap is older than the lookback of `growth_query`.
Each gap is counted in one period: that of the next scrape, or that of the last scrape if the next one is after the
report. If the gap reaches beyond the report, the share of it that lies within the report is counted.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from exporter.report.build import sum_by_key
from exporter.report.query import (
    DAY_SECONDS,
    LOOKBACK_SECONDS,
    InstanceKey,
    MetricQuery,
    QueryServer,
    VectorSample,
    promql_string,
    range_duration,
)
from exporter.report.usage import Period

MAX_GAP_SECONDS = 7 * DAY_SECONDS
"""A scrape that is further from the boundary of a period is not searched."""
_STEP = range_duration(0, LOOKBACK_SECONDS)
_INSTANCES_PER_QUERY = 200


class ScrapeGap(NamedTuple):
    """A gap between two scrapes of a daemon, Unix seconds, accurate to LOOKBACK_SECONDS: both times are a bit late."""

    instance: InstanceKey
    start: float
    end: float

    @property
    def earliest_end(self) -> float:
        """The next scrape was not before this time."""
        return self.end - LOOKBACK_SECONDS


class BeganWithin(NamedTuple):
    """Which of the holders that began within a gap to count: the others count as new ones after it."""

    start_metric: str
    """Selector of a gauge: the holder's start, Unix seconds."""
    on: str
    """Labels that identify the holder."""
    older: Callable[[float], str]
    """Makes the query for those to count from the end of a gap."""


class ScrapeGaps(MetricQuery):
    """Finds gaps longer than `lookback`, in seconds."""

    def __init__(self, server: QueryServer, *, matchers: str, lookback: float) -> None:
        super().__init__(server, matchers=matchers)
        self._lookback = lookback
        self._scraped: dict[float, frozenset[InstanceKey]] = {}
        self._shares: dict[Period, dict[ScrapeGap, float]] = defaultdict(dict)
        self._inner: dict[tuple[float, ...], set[ScrapeGap]] = {}
        """Gaps at the bounds of parts: the same for each counter."""
        self.found: set[ScrapeGap] = set()
        """Gaps that are counted."""
        self.report_end = 0.0

    def assign(self, times: Sequence[Period], known_period: Period) -> None:
        """Find the gaps of a report's periods, of which all between the first and the last scrape matter."""
        start, end = times[0].start, times[-1].end
        self.report_end = end
        bounds = [at for at in (*(each.start for each in times), end) if known_period.start <= at <= known_period.end]
        self.found = self._gaps_at([*bounds, known_period.end])
        if end in bounds:
            all_scraped = frozenset[InstanceKey]().union(*map(self._scraped_before, bounds))
            self.found |= set(self._find(end, all_scraped - self._scraped_before(end)))
        starts = [each.start for each in times]
        for gap in self.found:
            began = start not in bounds or gap.instance in self._scraped_before(start)
            ended = gap.end <= end or gap.instance in self._scraped_before(end)
            overlap = (gap.end if ended else end) - (gap.start if began else max(gap.start, start))
            last = gap.earliest_end if gap.end <= end else end - LOOKBACK_SECONDS
            number = max(0, bisect_right(starts, last if ended else gap.start) - 1)
            self._shares[times[number]][gap] = overlap / (gap.end - gap.start)

    def shares(self, period: Period, parts: Sequence[Period]) -> dict[ScrapeGap, float]:
        """Return the gaps to count in a period that is read in these parts, each with the share of its growth."""
        shares = dict(self._shares[period])
        if len(parts) > 1:
            bounds = (*(part.start for part in parts[1:]), parts[-1].end)
            if bounds not in self._inner:
                self._inner[bounds] = self._gaps_at(bounds) - self.found
            shares |= dict.fromkeys(self._inner[bounds], 1.0)
        return shares

    def growth(
        self,
        counter: str,
        labels: Iterable[str],
        gaps: Mapping[ScrapeGap, float],
        began_within: BeganWithin | None,
        *,
        of_time: bool,
    ) -> Iterator[VectorSample]:
        """Yield the growth of each counter across the gaps; a counter that fell has begun again at 0.

        `labels`, by which it is summed, include cluster and instance. `began_within` is None if no holder of the
        counter begins within a gap. `of_time`: whether it counts GPU-seconds.
        """
        shares_by_times: dict[tuple[float, float], dict[InstanceKey, float]] = defaultdict(dict)
        for gap, share in gaps.items():
            shares_by_times[gap.start, gap.end][gap.instance] = share
        for (start, end), shares in shares_by_times.items():
            for matcher in _instance_matchers(shares):
                growth = _growth_query(_add_matcher(counter, matcher), start, end, began_within)
                samples = self.instant_query(f"sum by ({', '.join(labels)}) ({growth}) > 0", end)
                if of_time:
                    samples = self._possible(samples, matcher, start, end)
                for sample in samples:
                    if sample.instance in shares:
                        yield VectorSample(sample.labels, sample.value * shares[sample.instance])

    def _possible(self, samples: Sequence[VectorSample], matcher: str, start: float, end: float) -> list[VectorSample]:
        """Omit daemons that had more GPU-seconds than a gap has: another machine got the name in it."""
        gpus = f"last_over_time({self.metric_selector('node_gpus', matcher)}[{_STEP}])"
        found = self.instant_query(f"sum by (cluster, instance) ({gpus})", end)
        limits = {each.instance: each.value * (end - start + LOOKBACK_SECONDS) for each in found}
        totals = sum_by_key((sample.instance, sample.value) for sample in samples)
        return [sample for sample in samples if totals[sample.instance] <= limits.get(sample.instance, inf)]

    def _gaps_at(self, bounds: Sequence[float]) -> set[ScrapeGap]:
        """Return gaps in which one of these times lies, of daemons that were scraped before a later one of them."""
        gaps, scraped_later = dict[InstanceKey, list[ScrapeGap]](), frozenset[InstanceKey]()
        for bound in sorted(bounds, reverse=True):
            scraped = self._scraped_before(bound)
            missing = scraped_later - scraped
            # A gap in which several of the times lie is searched once: each search is dear.
            unknown = frozenset(key for key in missing if key not in gaps or gaps[key][-1].start >= bound)
            for gap in self._find(bound, unknown):
                gaps.setdefault(gap.instance, []).append(gap)
            scraped_later |= scraped
        return {gap for each in gaps.values() for gap in each}

    def _scraped_before(self, at: float) -> frozenset[InstanceKey]:
        """Return the daemons that were scraped within the lookback."""
        if at not in self._scraped:
            query = f"max by (cluster, instance) (last_over_time({self._ticks()}[{range_duration(0, self._lookback)}]))"
            self._scraped[at] = frozenset(sample.instance for sample in self.instant_query(query, at))
        return self._scraped[at]

    def _find(self, at: float, instances: frozenset[InstanceKey]) -> Iterator[ScrapeGap]:
        """Yield the gap around `at` of each of these daemons that was scraped on both sides."""
        for matcher in _instance_matchers(instances):
            before = self._scrape_steps("max", matcher, at)
            after = self._scrape_steps("min", matcher, at + MAX_GAP_SECONDS) if before else {}
            yield from (ScrapeGap(key, before[key], after[key]) for key in before.keys() & after.keys() & instances)

    def _scrape_steps(self, extreme: str, matcher: str, end: float) -> dict[InstanceKey, float]:
        """Return the first or last step in MAX_GAP_SECONDS at which each was scraped in the LOOKBACK_SECONDS before."""
        scraped = f"timestamp(last_over_time({self._ticks(matcher)}[{_STEP}]))"
        steps = f"{extreme}_over_time({scraped}[{range_duration(0, MAX_GAP_SECONDS)}:{_STEP}])"
        samples = self.instant_query(f"{extreme} by (cluster, instance) ({steps})", end)
        return {sample.instance: sample.value for sample in samples}

    def _ticks(self, matcher: str = "") -> str:
        return self.metric_selector("ticks_total", matcher)


def _growth_query(selector: str, start: float, end: float, began_within: BeganWithin | None) -> str:
    """Return a query for the growth across a gap, to be evaluated at its end.

    There may be further samples in the LOOKBACK_SECONDS before either time; a left-closed range must not have that of
    the gap's start. The counter of a holder that began within the gap is counted in full: what its series had before
    the gap, if it has the same labels, is an earlier holder's.
    """
    first = f"min_over_time({selector}[{range_duration(start + 0.001, end)}])"
    before = f"last_over_time({selector}[{_STEP}] offset {range_duration(start, end)})"
    growth = f"({first} - {before})"
    known = f"({growth} >= 0 or ({first} and {growth} < 0))"
    if began_within is None:
        return known
    began = f"last_over_time({began_within.start_metric}[{_STEP}])"
    counted = f"({first} and on ({began_within.on}) {began_within.older(end)})"
    later = f"({began} > {start!r})"
    about = f"({began} > {start - LOOKBACK_SECONDS!r})"
    new = f"({counted} and on ({began_within.on}) {later})"
    newer = f"(({counted} unless {before}) and on ({began_within.on}) {about})"
    return f"(({known} unless on ({began_within.on}) {later}) or {new} or {newer})"


def _add_matcher(selector: str, matcher: str) -> str:
    name, _, matchers = selector.removesuffix("}").partition("{")
    return f"{name}{{{','.join(filter(None, (matchers, matcher)))}}}"


def _instance_matchers(instances: Iterable[InstanceKey]) -> Iterator[str]:
    names = sorted({instance for _, instance in instances})
    for first in range(0, len(names), _INSTANCES_PER_QUERY):
        escaped = "|".join(map(re.escape, names[first : first + _INSTANCES_PER_QUERY]))
        yield f"instance=~{promql_string(escaped)}"
