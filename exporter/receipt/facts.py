"""All that is stored of a job's run, node by node. Owns counters across restarts of a daemon; refuses ratios and words.

A counter that fell began anew: what it had reached before is added, sample by sample, never by the slope. Two
addresses of one node are one node; where a daemon has counted on under another address (a pod that was replaced), what
was counted under the first is not counted twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from exporter.receipt.asking import (
    LOOKBACK_SECONDS,
    MOST_READ,
    SCRAPED_SECONDS,
    Asking,
    Place,
    Sample,
    Track,
    parts,
    quoted,
    span,
)
from exporter.receipt.figures import Count, Rows, summed, weighed
from exporter.receipt.life import Life

_LOOKS = 1000
_HEAD_SECONDS = 900.0
"""A daemon that speaks of a job for the first time later than this after its start speaks of all of it then."""
_SCRAPE_LABELS = frozenset({"__name__", "cluster", "instance", "job"})
"""Labels that say where a series comes from and not what it is of."""


class Facts:
    """Asks once for what a receipt needs of every series, and later for what only some need."""

    def __init__(self, asking: Asking, life: Life) -> None:
        self.asking, self.life = asking, life
        self.series = len(life.stays)
        """Daemons: about how many series there are of one name without labels of its own."""
        ends = {stay.place: stay.end for stay in life.stays}
        gauges = self._look(ends, asking.selector("", '__name__=~"gpu_efficiency_job_.+"'))
        self.nodes = self._named(ends)
        self.restarted = self._restarted()
        """Paid seconds of daemons that began anew in the run, every sample."""
        self._heads = self._first_samples()
        self._before = self._counted_on()
        """Of each daemon that has counted on from another address, that one."""
        self.rows = Rows(gauges, self._counted())

    @property
    def start(self) -> float:
        """Unix seconds of the job's start."""
        return self.life.start

    def mean(self, name: str, *more: str, series: int = 1) -> list[Sample]:
        """Of each series of a gauge, of which a daemon has so many, the mean of all samples of the run."""
        life = self.life
        return self.asking.mean(self.asking.series(name, *more), life.begin, life.heard, series=self.series * series)

    def weighed(self, name: str, *more: str, weights: Mapping[Place, float]) -> float | None:
        """The mean of a quotient that each daemon tells, over the run and all daemons."""
        pairs = [(row.value, weights.get(row.place, 0.0)) for row in self.mean(name, *more)]
        return weighed(pairs)

    def greatest(self, name: str, *more: str, series: int = 1) -> list[Sample]:
        """Of each series of a gauge the greatest value of the run."""
        life = self.life
        return self.asking.most(self.asking.series(name, *more), life.begin, life.heard, series=self.series * series)

    def tracks(self, name: str) -> list[Track]:
        """All samples of the run."""
        return self.asking.raw(self.asking.series(name), self.life.begin, self.life.heard, series=self.series)

    def heads(self) -> dict[Place, tuple[float, float]]:
        """The first sample of paid seconds of each daemon; what another address had counted before is not in it."""
        found = dict(self._heads)
        for place, (_, carried) in self._before.items():
            first, had = found[place]
            found[place] = first, max(0.0, had - carried)
        return found

    def _first_samples(self) -> dict[Place, tuple[float, float]]:
        last = max(stay.start for stay in self.life.stays) + _HEAD_SECONDS
        paid = self.asking.series("paid_seconds_total")
        tracks = self.asking.raw(paid, self.life.begin, min(last, self.life.heard), series=self.series)
        return {track.place: track.points[0] for track in tracks}

    def gpus(self) -> dict[str, float]:
        """The most GPUs the job had on each node at a time."""
        held = f"sum by (cluster, instance) ({self.asking.series('state_gpus')})"
        whole = span(self.life.begin, self.life.heard)
        rows = self.asking.now(f"max_over_time({held}[{whole}:{self._every}s])", self.life.heard)
        found: dict[str, float] = {}
        for row in rows:
            node = self.nodes.get(row.place)
            if node is not None:
                found[node] = max(found.get(node, 0.0), row.value)
        return found

    def prices(self) -> list[Sample]:
        """Of each daemon, what an hour of all that the job held there cost on average, by currency."""
        price = f"(sum by (cluster, instance, currency) ({self.asking.series('price_per_hour')}))"
        return self.asking.mean(price, self.life.begin, self.life.heard, series=2 * self.series, step=self._every)

    def devices(self) -> dict[Place, float]:
        """Of each daemon, how many GPUs or instances the job held there on average, while it held any."""
        held = f"(sum by (cluster, instance) ({self.asking.series('state_gpus')}) > 0)"
        rows = self.asking.mean(held, self.life.begin, self.life.heard, series=2 * self.series, step=self._every)
        return {row.place: row.value for row in rows}

    @property
    def _every(self) -> int:
        """Seconds between two looks at what has to be computed first."""
        return round(max(SCRAPED_SECONDS, (self.life.heard - self.life.begin) / _LOOKS))

    def grams(self) -> float | None:
        """Carbon dioxide of a kilowatt-hour: the most that any of its nodes says."""
        rows = self.asking.now(
            f"last_over_time({self.asking.anyone('gpu_efficiency_grams_co2_per_kwh')}[5m])", self.life.end
        )
        return max((row.value for row in rows if row.place in self.nodes), default=None)

    def models(self) -> tuple[str, ...]:
        """Of the job's GPUs."""
        held = f"last_over_time({self.asking.selector('gpu_efficiency_allocation_info')}[5m])"
        boards = f"last_over_time({self.asking.anyone('gpu_efficiency_gpu_info')}[5m])"
        rows = self.asking.now(f"group by (model) ({boards} and on (cluster, instance, uuid) {held})", self.life.end)
        return tuple(sorted(row.labels.get("model", "") for row in rows))

    def _counted_on(self) -> dict[Place, tuple[Place, float]]:
        """A daemon that begins with more than its node had counted under another address before has gone on from it."""
        stays = sorted(self.life.stays, key=lambda stay: stay.heard)
        found: dict[Place, tuple[Place, float]] = {}
        for n, stay in enumerate(stays):
            node = self.nodes[stay.place]
            before = next((one for one in reversed(stays[:n]) if self.nodes[one.place] == node), None)
            if before is None:
                continue
            first = self._heads.get(stay.place) or self._first_after(stay.place, before.heard)
            carried = self._paid_at(before.place, before.heard)
            if first is not None and first[0] > before.heard and first[1] >= carried > 0:
                self._heads[stay.place] = first
                found[stay.place] = before.place, carried
        return found

    def _first_after(self, place: Place, moment: float) -> tuple[float, float] | None:
        paid = self.asking.series("paid_seconds_total", *_at(place))
        tracks = self.asking.raw(paid, moment, self.life.heard)
        return tracks[0].points[0] if tracks else None

    def _paid_at(self, place: Place, moment: float) -> float:
        rows = self.asking.now(self.asking.series("paid_seconds_total", *_at(place)), moment)
        return rows[0].value if rows else 0.0

    # -- looking --

    def _look(self, moments: Mapping[Place, float], selector: str) -> list[Sample]:
        """The last sample of every series that a daemon told within five minutes of a moment of its own."""
        found: list[Sample] = []
        left = dict(sorted(moments.items(), key=lambda item: -item[1]))
        while left:
            at = next(iter(left.values()))
            group = {place for place, moment in left.items() if moment > at - LOOKBACK_SECONDS}
            rows = self.asking.now(f"last_over_time({selector}[{span(0, 2 * LOOKBACK_SECONDS)}])", at)
            found += [row for row in rows if row.place in group]
            left = {place: moment for place, moment in left.items() if place not in group}
        return found

    def _named(self, ends: Mapping[Place, float]) -> dict[Place, str]:
        """Node of each daemon; its address where nobody says the node's name."""
        own = self.asking.series("start_timestamp_seconds")
        info = self.asking.anyone("gpu_efficiency_node_info")
        wide = span(0, 2 * LOOKBACK_SECONDS)
        at = sorted(set(ends.values()))
        query = f"last_over_time({info}[{wide}]) and on (cluster, instance) last_over_time({own}[{wide}])"
        rows = [row for moment in _sparse(at) for row in self.asking.now(query, moment)]
        known = {row.place: row.labels.get("node", "") for row in rows}
        return {place: known.get(place) or place[1] or "this node" for place in ends}

    def _restarts(self) -> dict[Place, list[float]]:
        return {
            place: [before for (before, high), (_, low) in pairwise(track.points) if low < high]
            for place, track in self.restarted.items()
        }

    def _restarted(self) -> dict[Place, Track]:
        """All paid seconds of daemons where they fell. A part is looked at together with the end of the one before."""
        life, paid = self.life, self.asking.series("paid_seconds_total")
        fell: set[Place] = set()
        for a, b in parts(life.begin, life.heard, series=self.series, most=MOST_READ):
            query = f"resets({paid}[{span(a - LOOKBACK_SECONDS, b)}]) > 0"
            fell |= {row.place for row in self.asking.now(query, b)}
        return {place: track for place in sorted(fell & self.nodes.keys()) for track in self._whole(place)}

    def _whole(self, place: Place) -> list[Track]:
        return self.asking.raw(self.asking.series("paid_seconds_total", *_at(place)), self.life.begin, self.life.heard)

    def _counted(self) -> dict[str, list[Count]]:
        """What each counter came to: its last value, and at each restart what it had reached since the one before."""
        which = '__name__=~"gpu_efficiency_job_.+_total"'
        heard = {stay.place: stay.heard for stay in self.life.stays}
        steady = {place: at for place, at in heard.items() if place not in self.restarted}
        rows = self._look(steady, self.asking.selector("", which))
        for place, falls in self._restarts().items():
            selector = self.asking.selector("", which, *_at(place))
            for after, at in pairwise([self.life.begin, *falls, heard[place]]):
                back = min(2 * LOOKBACK_SECONDS, at - after - 0.001)
                rows += self.asking.now(f"last_over_time({selector}[{span(0, back)}])", at)
        return self._placed(rows)

    def _placed(self, rows: Iterable[Sample]) -> dict[str, list[Count]]:
        rows = list(rows)
        last = {(row.name, row.place, _own(row.labels)): row.value for row in rows}
        sums = summed(((row.name, row.place, _own(row.labels)), row.value) for row in rows)
        for name, place, labels in sums:
            if place in self._before:
                carried = last.get((name, self._before[place][0], labels), 0.0)
                sums[name, place, labels] = max(0.0, sums[name, place, labels] - carried)
        found: dict[str, list[Count]] = defaultdict(list)
        for (name, place, labels), value in sums.items():
            found[name.removesuffix("_total")].append(Count(self.nodes[place], place, dict(labels), value))
        return found


def _at(place: Place) -> tuple[str, str]:
    """Matchers of one daemon."""
    return f"cluster={quoted(place[0])}", f"instance={quoted(place[1])}"


def _own(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in labels.items() if key not in _SCRAPE_LABELS))


def _sparse(moments: list[float]) -> Iterator[float]:
    """Of times in their order so many that each is at most five minutes before one of them."""
    while moments:
        last = moments[-1]
        yield last
        moments = [moment for moment in moments if moment <= last - LOOKBACK_SECONDS]
