"""Rows, tables and points of what a fleet costs a Prometheus, made of what was read of one or two of them.

Owns the arithmetic: shares of a core, of an interval, and what ten times as many would be. Refuses to measure.
"""

from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from benchmarks.figures import Row, row
from benchmarks.fleet.server import Evaluated
from benchmarks.group import Table

SCALE = 10
"""To 100,000 GPUs."""
SHARE = 0.25
"""Of its interval that an evaluation of everything may take there, on one core."""
_SLOWEST = 8


class Cost(Struct, frozen=True, kw_only=True):
    """What one fleet costs its Prometheus. CPU in shares of a core."""

    gpus: int
    scraped: float
    """Series, and so `recorded`."""
    recorded: float
    samples: float
    """A second, ingested and recorded."""
    mebibytes: float
    with_rules: Sequence[float]
    """By minutes."""
    without: float
    looks: Sequence[Sequence[Evaluated]]

    @property
    def rules(self) -> list[float]:
        """What the rules add, by minutes, in percent of a core; the mean of all is the figure."""
        return [100 * (each - self.without) for each in self.with_rules]

    @property
    def mean(self) -> float:
        """Of whole minutes in which every group was evaluated as often as in life."""
        return sum(self.rules) / len(self.rules)


def rows(looks: Sequence[Sequence[Evaluated]]) -> list[Row]:
    """Rows of all groups, and of the slowest rules: wall time, as the server tells it."""
    groups = {group["name"]: [_of(look, group["name"]) for look in looks] for look in looks[:1] for group in look}
    return [*(_group(name, seen) for name, seen in groups.items()), *_slowest(looks)]


def shares(cost: Cost) -> list[Row]:
    """Rows of the whole set: the share of one core it takes, and what it would ten times larger."""
    spread = f"{min(cost.rules):.1f} - {max(cost.rules):.1f}"
    of_minutes = f"mean of {len(cost.rules)} minutes with, less 2 without"
    wider = f"{SCALE * min(cost.rules):.1f} - {SCALE * max(cost.rules):.1f}"
    return [
        row(
            "rules", f"CPU of all rules, {cost.gpus:,} GPUs, share of a core", often=of_minutes,
            values=[cost.mean], unit="%", spread=spread, budget=100 * SHARE * cost.gpus / (10_000 * SCALE),
        ),
        *(
            [row(
                "rules", f"- extrapolated to {cost.gpus * SCALE:,} GPUs", often=f"{SCALE} x the row above",
                values=[SCALE * cost.mean], unit="%", spread=wider, budget=100 * SHARE,
            )]
            if cost.gpus >= 10_000 else []
        ),
        row(
            "rules", f"CPU of scraping and storing alone, {cost.gpus:,} GPUs, share of a core", often="once",
            values=[100 * cost.without], unit="%", spread="-",
        ),
    ]  # fmt: skip


def sizes(cost: Cost) -> list[Row]:
    """Rows of what it holds."""

    def once(what: str, value: float, unit: str) -> Row:
        name = f"{what}, {cost.gpus:,} GPUs"
        return row("rules", name, often="once", values=[value], unit=unit, digits=0, spread="-")

    return [
        once("Series scraped", cost.scraped, "series"),
        once("Series recorded", cost.recorded, "series"),
        once("Samples ingested, with those recorded", cost.samples, "a second"),
        once("Resident memory of Prometheus", cost.mebibytes, "MiB"),
    ]


def tightest(looks: Sequence[Sequence[Evaluated]]) -> tuple[str, float]:
    """The group that takes most of its interval, and the share (wall)."""
    names = [group["name"] for group in looks[0]]
    taken = {name: median(_of(look, name)["evaluationTime"] for look in looks) for name in names}
    every = {group["name"]: group["interval"] for group in looks[0]}
    worst = max(names, key=lambda name: taken[name] / every[name])
    return worst, taken[worst] / every[worst]


def table(costs: Sequence[Cost]) -> Table:
    """Fleets beside one another, and one that is ten times the largest."""
    largest = costs[-1]
    columns = [_column(cost, 1) for cost in costs] + [_column(largest, SCALE)]
    head = ("", *(f"{cost.gpus:,} GPUs" for cost in costs), f"{largest.gpus * SCALE:,} GPUs, extrapolated")
    return Table(
        about=(
            f"What a fleet costs its Prometheus. The last column is {SCALE} times the one before it, and measured by "
            "nobody: one server would not be asked to carry it (docs/prometheus.md)."
        ),
        head=head,
        rows=tuple((what, *(column[n] for column in columns)) for n, what in enumerate(_WHAT)),
    )


_WHAT = (
    "series scraped", "series recorded", "samples a second, ingested and recorded", "resident memory",
    "CPU of scraping and storing, of a core", "CPU of all rules, of a core", "group that takes most of its interval",
)  # fmt: skip


def _column(cost: Cost, times: int) -> tuple[str, ...]:
    name, share = tightest(cost.looks)
    return (
        f"{times * cost.scraped:,.0f}", f"{times * cost.recorded:,.0f}", f"{times * cost.samples:,.0f}",
        f"{times * cost.mebibytes / 1024:,.1f} GiB", f"{times * 100 * cost.without:.1f} %",
        f"{times * cost.mean:.1f} %", f"{name}: {times * 100 * share:.1f} %",
    )  # fmt: skip


def _of(look: Sequence[Evaluated], name: str) -> Evaluated:
    return next(group for group in look if group["name"] == name)


def _group(name: str, seen: Sequence[Evaluated]) -> Row:
    times = [1e3 * group["evaluationTime"] for group in seen]
    what = f"Evaluated {name}: {len(seen[0]['rules'])} rules every {seen[0]['interval']:.0f} s, wall"
    return row("rules", what, often=f"{len(seen)} evaluations", values=times, unit="ms", digits=0)


def _slowest(looks: Sequence[Sequence[Evaluated]]) -> list[Row]:
    times: dict[tuple[str, int, str], list[float]] = {}
    for look in looks:
        for group in look:
            for place, rule in enumerate(group["rules"]):
                times.setdefault((group["name"], place, rule["name"]), []).append(1e3 * rule["evaluationTime"])
    slowest = sorted(times.items(), key=lambda item: -median(item[1]))[:_SLOWEST]
    return [
        row("rules", f"- {name}, wall", often=f"{len(values)} evaluations", values=values, unit="ms", digits=0)
        for (_, _, name), values in slowest
    ]
