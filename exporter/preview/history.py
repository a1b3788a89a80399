"""A preview from what Prometheus has stored: when each GPU last worked, and who held it.

Owns the windows in which that is asked for, and the judgement of rests by each row's thresholds. It approximates: the
duty cycle is not seen from outside, so any effective work ends a rest; a moment is known to one step; what happened
while nothing was scraped is not seen. Refuses thresholds that only the core can judge.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from exporter.config import ConfigError
from exporter.core.model import UNKNOWN_JOB
from exporter.core.policy import Policy
from exporter.preview.choices import SHORT_NAMES, ZOMBIE, Row
from exporter.preview.facts import Facts
from exporter.preview.prometheus import Prometheus, PrometheusError
from exporter.preview.rests import Gpu, Rest, Rests, merged
from exporter.preview.tally import HOUR, Answer, Episode, Person, Tally, listed

WORKED = "last_work_timestamp_seconds"
MOST_POINTS = 10_000
"""Of one series in one answer; Prometheus refuses 11,000."""
MOST_SAMPLES = 1_000_000
"""In one answer: some 30 MB on the way and 200 MB here."""
MOST_STORED = 20_000_000
"""Samples in which a fact is looked for: Prometheus loads 50 million at most for one query."""
_SCRAPED_SECONDS = 15.0
"""A usual interval between two scrapes; a shorter one costs more samples."""
_LOOKS = 200
"""At which the size of the fleet is counted beforehand."""
_CLASSES = ("batch", "interactive", "serving")
_NOTE = (
    "approximate: any effective work ends a rest, for the duty cycle is not seen from outside; moments are known to "
    "one step; replay a trace for the core's own word"
)


def check(rows: Sequence[Row]) -> None:
    """Raise ConfigError for a threshold whose evidence is not stored."""
    seen = [f"zombie_{kind}_seconds" for kind in _CLASSES]
    for name in sorted({name for row in rows for name in row.settings} - set(seen)):
        shown = next((short for short, field in SHORT_NAMES.items() if field == name), name)
        raise ConfigError(
            f"--policy {shown}: what it judges is not stored in Prometheus: give a trace instead, or preview one of "
            "zombie.batch, zombie.interactive, zombie.serving"
        )


def patience(policy: Policy, workload_class: str) -> float:
    """Seconds that a job of that class may rest."""
    kind = workload_class if workload_class in _CLASSES else "batch"
    return float(getattr(policy, f"zombie_{kind}_seconds"))


def windows(start: float, end: float, step: float, series: int) -> list[tuple[float, float]]:
    """[start, end] in parts of few enough samples, one step between them."""
    series = max(1, series)
    stored = MOST_STORED * _SCRAPED_SECONDS / (series * step)
    points = max(1, min(MOST_POINTS, MOST_SAMPLES // series, int(stored)))
    parts, at = [], start
    while at <= end:
        parts.append((at, min(end, at + (points - 1) * step)))
        at += points * step
    return parts


class History:
    """A preview over one Prometheus."""

    def __init__(self, server: Prometheus, found: Sequence[Row], *, selector: str = "") -> None:
        self._server, self._rows = server, found
        self._facts = Facts(server, selector)
        self._tallies = [Tally(row.label, row.settings) for row in found]
        self._rests = Rests(self._judge)
        self._first = 0.0
        self._own: set[str] = set()
        self._exempt: set[str] = set()
        self._unknown: set[Gpu] = set()

    def run(self, start: float, end: float, step: float) -> Iterator[tuple[int, int]]:
        """Ask and judge window by window; yields how many are done, and of how many. Raises PrometheusError."""
        self._first = start
        parts = windows(start, end, step, self._size(start, end, step))
        for number, (a, b) in enumerate(parts, 1):
            self._facts.learn(a, b, step)
            limits = chain(self._facts.limits.values(), self._class_limits())
            self._rests.shortest = min(limits)
            self._feed(a, b, step)
            yield number, len(parts)
        self._rests.end()

    def _size(self, start: float, end: float, step: float) -> int:
        """GPUs held at once, at most, at some moments."""
        held, looks = f"count({self._facts.series(WORKED)})", max(step, (end - start) / _LOOKS)
        query = f"max_over_time({held}[{round(end - start) or 1}s:{round(looks) or 1}s]) or {held}"
        found = self._server.now(query, end)
        if not found:
            raise PrometheusError(
                f"no {self._facts.series(WORKED)} is stored there in that time: does it scrape gpu-efficiency, of a"
                " version that has that metric, and was any GPU held? Try another --since or --match"
            )
        return int(float(found[0].value[1]))

    def _class_limits(self) -> Iterator[float]:
        for row in self._rows:
            yield from (patience(row.policy, kind) for kind in _CLASSES)

    def _feed(self, start: float, end: float, step: float) -> None:
        series: dict[Gpu, list[tuple[str, tuple[tuple[float, str], ...]]]] = defaultdict(list)
        for row in self._server.over(self._facts.on_holders(WORKED), start, end, step):
            gpu = row.metric.get("cluster", ""), row.metric.get("uuid", "")
            series[gpu].append((row.metric.get("job_id", ""), row.values))
        for gpu, rows in series.items():
            self._rests.feed(gpu, merged(rows), starts=self._facts.starts(gpu), step=step)

    def _judge(self, gpu: Gpu, rest: Rest, worked: float | None) -> None:
        """Score a rest in every row."""
        if UNKNOWN_JOB in rest.jobs:
            self._unknown.add(gpu)
            return
        exempt = {job for job in rest.jobs if (gpu[0], job) in self._facts.exempt}
        if exempt:
            self._exempt |= exempt
            return
        for row, tally in zip(self._rows, self._tallies, strict=True):
            self._score(gpu, rest, worked, row.policy, tally)

    def _score(self, gpu: Gpu, rest: Rest, worked: float | None, policy: Policy, tally: Tally) -> None:
        moment = rest.work + self._limit(gpu[0], rest.jobs, policy)
        if rest.last < moment:
            return
        taken = max(moment, rest.first)
        tally.add(
            Episode(
                uuid=gpu[1],
                jobs=tuple(self._person(gpu[0], job) for job in sorted(rest.jobs)),
                start=taken,
                seconds=(rest.last if worked is None else worked) - taken,
                worked=worked is not None,
                weight=self._facts.weights.get(gpu, 1.0),
                price=self._facts.price(gpu),
            )
        )

    def _limit(self, cluster: str, jobs: frozenset[str], policy: Policy) -> float:
        """The most patient holder's."""
        return max(self._limit_of((cluster, job), policy) for job in jobs)

    def _limit_of(self, key: tuple[str, str], policy: Policy) -> float:
        """A job's own, which no row moves, else its class's."""
        own, known = self._facts.limits.get(key), self._facts.jobs.get(key)
        if own is not None:
            self._own.add(key[1])
            return own
        return patience(policy, known.workload_class if known else "batch")

    def _person(self, cluster: str, job: str) -> Person:
        known = self._facts.jobs.get((cluster, job))
        return known.person if known else Person(job, cluster=cluster)

    def answer(self, source: str, end: float) -> Answer:
        """What it came to."""
        return Answer(
            source=source,
            since=self._first,
            until=end,
            gpu_hours_held=self._held() / HOUR,
            taken_back_when=(ZOMBIE,),
            rows=tuple(tally.score() for tally in self._tallies),
            notes=tuple(self._notes()),
        )

    def _held(self) -> float:
        return sum(seconds * self._facts.weights.get(gpu, 1.0) for gpu, seconds in self._rests.held.items())

    def _notes(self) -> Iterator[str]:
        yield _NOTE
        if self._own:
            yield f"jobs with a limit of their own, which no row moves: {len(self._own)} ({listed(self._own)})"
        if self._exempt:
            yield f"jobs exempted at some time in it, and left alone: {len(self._exempt)} ({listed(self._exempt)})"
        if self._unknown:
            yield f"GPUs left alone because the scheduler did not say whose they were: {len(self._unknown)}"
