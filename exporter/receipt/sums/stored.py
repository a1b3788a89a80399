"""Lots of jobs, and of nobody, from what a Prometheus has stored of the daemons' own series.

Owns the order of the questions; no recording rule is needed. Jobs come from their own series; what nobody had, and
what the nodes count beyond their jobs, from the nodes' counters. Refuses to rank.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from exporter.receipt.asking import LOOKBACK_SECONDS, SCRAPED_SECONDS, ReceiptError, Sample, Server, quoted, span
from exporter.receipt.model import Who
from exporter.receipt.sums.growth import PER_DAEMON, Count, Counting, peak
from exporter.receipt.sums.lots import Lot, Period
from exporter.receipt.sums.summary import Fleet

_AT_ONCE = 200
"""Jobs that one question names."""
_GRAIN = 300.0
"""The peak of what is held is of means over so long, at least."""
_DAY = 86_400.0
_UNTOLD = 0.01
"""Share of what a node's jobs had from which on it is worth saying that their own series do not tell of it."""
_INFO = {
    "name": "name", "user": "user", "account": "account", "team": "team", "partition": "partition",
    "namespace": "workload_namespace", "workload_class": "workload_class",
}  # fmt: skip
Place = tuple[str, str]
Told = Callable[[float, float], None]
Money = dict[str, float]


class Only(Struct, frozen=True, kw_only=True):
    """Whose jobs; empty fields pick all."""

    user: str = ""
    account: str = ""
    namespace: str = ""
    team: str = ""

    @property
    def matchers(self) -> str:
        """Of `job_info`."""
        own = {"user": self.user, "account": self.account, "workload_namespace": self.namespace, "team": self.team}
        return ",".join(f"{label}={quoted(value)}" for label, value in own.items() if value)

    def __str__(self) -> str:
        said = [f"{field} {getattr(self, field)}" for field in self.__struct_fields__ if getattr(self, field)]
        return ", ".join(said) or "all"


class Answer(Struct, frozen=True, kw_only=True):
    """What is stored of a time."""

    lots: tuple[Lot, ...]
    known: Period
    """Of which anything is known."""
    fleet: Fleet | None
    """Only of all."""
    anew: int
    """Times that daemons began anew."""
    by_rules: bool
    """Whether recording rules told what was too much to be counted leak by leak."""
    simulated: bool = False
    """Any of the daemons that were heard at the end serves a simulated node."""


class Stored:
    """Asks one server about a time. `matchers` narrow it, as in a selector, without braces."""

    def __init__(self, server: Server, only: Only, *, matchers: str = "") -> None:
        self._server, self._only = server, only
        self._matchers = matchers.strip().removeprefix("{").removesuffix("}").strip(", ")
        self._interval = SCRAPED_SECONDS
        self._counting = Counting(self._now, interval=SCRAPED_SECONDS)
        self.anew = 0

    def answer(self, times: Sequence[Period], *, progress: Told = lambda _, __: None) -> Answer:
        """Of these periods, which follow one another. Raises ReceiptError."""
        known = self._known(Period(times[0].start, times[-1].end))
        lots: list[Lot] = []
        for number, period in enumerate(times):
            progress(number, len(times))
            if period.end > known.start and period.start < known.end:
                lots += self._lots(number, period)
        fleet = None if self._only.matchers else self._fleet(lots, known)
        return Answer(
            lots=tuple(lots), known=known, fleet=fleet, anew=self.anew, by_rules=self._counting.by_rules,
            simulated=bool(self._one(f"max(last_over_time({self._series('simulated')}[1h]))", known.end)),
        )  # fmt: skip

    # -- selectors and answers --

    def _series(self, name: str, *matchers: str) -> str:
        inside = ",".join(filter(None, (*matchers, self._matchers)))
        return f"gpu_efficiency_{name}{{{inside}}}"

    def _now(self, query: str, at: float) -> list[Sample]:
        return [Sample(row.metric, float(row.value[1])) for row in self._server.now(query, at)]

    def _one(self, query: str, at: float) -> float | None:
        return next((row.value for row in self._now(query, at)), None)

    # -- what time is known --

    def _known(self, asked: Period) -> Period:
        """From the first sample to the last; to the edges where these are as near as scrapes are."""
        days = list(_days(asked))
        first = next((at for day in days if (at := self._heard("min", day)) is not None), None)
        last = next((at for day in days[::-1] if (at := self._heard("max", day)) is not None), None)
        if first is None or last is None:
            raise ReceiptError(
                "nothing of gpu-efficiency is stored there in that time: does that Prometheus scrape the daemons? Try"
                " --at with a time at which it did, a longer --since, or another --match"
            )
        day = Period(first - 1, min(last, first + _DAY))
        count = self._one(f"max(count_over_time({self._series('ticks_total')}[{span(*day)}]))", day.end) or 1.0
        self._interval = max(1.0, (day.end - first) / max(1.0, count - 1))
        self._counting = Counting(self._now, interval=self._interval)
        near = 2 * self._interval
        return Period(
            asked.start if first - asked.start <= near else first, asked.end if asked.end - last <= near else last
        )

    def _heard(self, which: str, day: Period) -> float | None:
        """When any daemon was first or last heard on a day, by Prometheus' clock: nodes' own may be wrong."""
        when = f"timestamp({self._series('ticks_total')})"
        coarse = f"{which}_over_time({when}[{span(*day)}:{span(0, LOOKBACK_SECONDS)}])"
        about = self._one(f"{which}({which}({coarse}) or {which}({when}))", day.end)
        if about is None or which == "max":
            return about
        fine = f"min_over_time({when}[{span(0, LOOKBACK_SECONDS)}:5s])"
        return max(day.start, min(about, self._one(f"min({fine})", about) or about))

    @property
    def _grain(self) -> float:
        return max(_GRAIN, 4 * self._interval)

    # -- a period --

    def _lots(self, number: int, period: Period) -> Iterator[Lot]:
        who, prices = self._who(period), self._prices(period)
        held: dict[Place, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (place, job_id), seconds in self._jobs(period, who).items():
            for leak, value in seconds.items():
                held[place][leak] += value
            known = who.get((place[0], job_id), Who(job_id=job_id, cluster=place[0]))
            yield self._lot(number, known, seconds, prices.get((place, "true"), {}))
        if not self._only.matchers:
            yield from self._rest(number, period, held, prices)

    def _lot(self, number: int, who: Who, seconds: dict[str, float], price: Money, *, told: bool = True) -> Lot:
        hours = sum(seconds.values()) / 3600
        money = {currency: hours * each for currency, each in price.items()}
        return Lot(period=number, who=who, seconds=seconds, money=money, told=told)

    def _who(self, period: Period) -> dict[tuple[str, str], Who]:
        info = self._series("job_info", self._only.matchers)
        rows = self._now(f"last_over_time({info}[{span(*period)}])", period.end)
        return {
            (row.labels.get("cluster", ""), row.labels.get("job_id", "")): Who(
                job_id=row.labels.get("job_id", ""),
                cluster=row.labels.get("cluster", ""),
                **{field: row.labels.get(label, "") for field, label in _INFO.items()},
            )
            for row in rows
        }

    def _prices(self, period: Period) -> dict[tuple[Place, str], Money]:
        """Of a GPU-hour, by node, and whether somebody has it; on a node with several models, of its mean GPU."""
        whole = span(*period)
        told = self._series("price_per_gpu_hour")
        price = f"max by ({PER_DAEMON}, model, held, currency) (avg_over_time({told}[{whole}]))"
        gpus = f"max by ({PER_DAEMON}, model) (avg_over_time({self._series('node_gpus')}[{whole}]))"
        query = (
            f"sum by ({PER_DAEMON}, held, currency) ({price} * on ({PER_DAEMON}, model) group_left () {gpus})"
            f" / on ({PER_DAEMON}) group_left () sum by ({PER_DAEMON}) ({gpus})"
        )
        found: dict[tuple[Place, str], Money] = defaultdict(dict)
        for row in self._now(query, period.end):
            found[row.place, row.labels.get("held", "")][row.labels.get("currency", "")] = row.value
        return found

    def _jobs(self, period: Period, who: dict[tuple[str, str], Who]) -> dict[tuple[Place, str], dict[str, float]]:
        """GPU-seconds by daemon, job and leak."""
        found: dict[tuple[Place, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for matcher in self._named(sorted({job for _, job in who})):
            count = Count(
                by_leak=self._series("job_seconds_total", matcher),
                paid=self._series("job_paid_seconds_total", matcher),
                recorded=f"job_leak:{self._series('seconds:rate5m', matcher)}",
                of=("cluster", "instance", "job_id"),
                recorded_of=("cluster", "job_id"),
                parts=("leak",),
                began=self._series("job_start_timestamp_seconds", matcher),
                daemon=f"process_start_time_seconds{{{self._matchers}}}",
            )
            for (cluster, instance, job, leak), seconds in self._counting.time(count, period):
                if not self._only.matchers or (cluster, job) in who:
                    found[(cluster, instance), job][leak] += seconds
        return found

    def _named(self, jobs: list[str]) -> Iterator[str]:
        """Matchers of all jobs that are asked for; of all there are, none is needed."""
        if not self._only.matchers:
            yield ""
            return
        for first in range(0, len(jobs), _AT_ONCE):
            yield f"job_id=~{quoted('|'.join(map(re.escape, jobs[first : first + _AT_ONCE])))}"

    # -- what no job had --

    def _rest(
        self, number: int, period: Period, held: dict[Place, dict[str, float]], prices: dict[tuple[Place, str], Money]
    ) -> Iterator[Lot]:
        """Of each node what nobody had, and what somebody had of whom no series tells."""
        for (place, had), seconds in self._nodes(period).items():
            price = prices.get((place, had), {})
            if had == "false":
                yield self._lot(number, Who(job_id="", cluster=place[0]), seconds, price)
                continue
            jobs = held.get(place, {})
            left = {leak: value - jobs.get(leak, 0.0) for leak, value in seconds.items()}
            left = {leak: value for leak, value in left.items() if value > 0}
            if sum(left.values()) > max(self._interval, _UNTOLD * sum(seconds.values())):
                yield self._lot(number, Who(job_id="", cluster=place[0]), left, price, told=False)

    def _nodes(self, period: Period) -> dict[tuple[Place, str], dict[str, float]]:
        """GPU-seconds by daemon, whether somebody had them, and leak."""
        found: dict[tuple[Place, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        ticks = self._series("ticks_total")
        self.anew += round(self._one(f"sum(resets({ticks}[{span(*period)}]))", period.end) or 0.0)
        count = Count(
            by_leak=self._series("node_seconds_total"),
            paid=self._series("paid_seconds_total"),
            recorded=f"node_model_leak:{self._series('seconds:rate5m')}",
            of=("cluster", "instance"),
            recorded_of=("cluster", "instance"),
            parts=("held", "leak"),
            began="",
        )
        for (cluster, instance, held, leak), seconds in self._counting.time(count, period):
            found[(cluster, instance), held][leak] += seconds
        return found

    # -- GPUs --

    def _fleet(self, lots: Sequence[Lot], known: Period) -> Fleet:
        length = known.end - known.start
        paid = sum(sum(lot.seconds.values()) for lot in lots)
        nobody = sum(sum(lot.seconds.values()) for lot in lots if not lot.who.job_id and lot.told)
        rate = f"sum(rate({self._series('job_paid_seconds_total')}[{span(0, self._grain)}]))"
        there = f"sum(last_over_time({self._series('node_gpus')}[{span(0, self._grain)}]))"
        return Fleet(
            gpus=paid / length,
            gpus_peak=self._peak(there, known),
            held=(paid - nobody) / length,
            held_peak=self._peak(rate, known),
            grain_seconds=self._grain,
        )

    def _peak(self, question: str, known: Period) -> float | None:
        """Day by day."""
        asked = (self._one(peak(question, *day, every=self._grain / 2), day.end) for day in _days(known))
        return max((most for most in asked if most is not None), default=None)


def _days(span: Period) -> Iterator[Period]:
    start = span.start
    while start < span.end:
        yield Period(start, min(span.end, start + _DAY))
        start += _DAY
