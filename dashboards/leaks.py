"""Two rows of panels that the leak chosen at the top fills: who loses to it and what to do, and what to watch.

Owns what stands in them, alike for every leak, so that a new one is there by itself. Refuses what leaks are and how
they are asked for (`losses`).
"""

from collections.abc import Iterator, Mapping

from dashboards import words
from dashboards.leak_table import JOBS
from dashboards.losses import (
    INFO,
    Loss,
    Side,
    booked,
    by_job,
    chosen_bound,
    chosen_note,
    chosen_shares,
    if_chosen,
    losses,
    lost_by_job,
)
from dashboards.parts import Column, Lines, Panel, Query, Row, Table
from dashboards.series import TO_JOB, at, first_series
from dashboards.watching import SPREAD, curves, title_of
from exporter.core.leak_guide import LITERATURE

EXPECTED_FROM, EXPECTED_TO = "at least expected", "at most expected"
CHOSEN, WATCHED = "The leak chosen at the top: ${leak:text}", "What to watch of the leak chosen at the top"
_NOTES = ("Role that acts", "Do first", "Watch", "Seen by", "Expect", "Drawn after", "Runbook")


def rows(side: Side) -> tuple[Row, Row]:
    """What one reads of any leak first, and a folded row with its curves."""
    return (
        Row(CHOSEN, (_over_time(side), jobs(side), note(side))),
        Row(WATCHED, tuple(_watched(side)), folded=True),
    )


def _over_time(side: Side) -> Panel:
    return Panel(
        title="Of 100 GPU-hours, over time",
        kind=Lines(
            stacked=True,
            colours={**words.LEAKS, EXPECTED_FROM: words.UNKNOWN, EXPECTED_TO: words.QUIET},
            dashed=(EXPECTED_FROM, EXPECTED_TO),
        ),
        shows=f"Hours of 100 that {side.jobs} held, of the leak chosen at the top. Dashed: the range to expect (an"
        " engineering estimate).",
        bad="above the range for hours",
        do="what the note below says first",
        queries=(
            Query(chosen_shares(side), legend="{{leak}}"),
            Query(chosen_bound(side, lambda expected: expected.low), legend=EXPECTED_FROM),
            Query(chosen_bound(side, lambda expected: expected.high), legend=EXPECTED_TO),
        ),
        unit="none",
        width=10,
        height=9,
        empty="no data: see below what it is seen by",
    )


def note(side: Side) -> Panel:
    """What the chosen leak is, who acts, and which signal it needs."""
    written = {
        f"{what}:{'|'.join(loss.rows)}": words.prose(said) for loss in losses(side) for what, said in _said(loss, side)
    }
    return Panel(
        title="Whose it is, what to do",
        kind=Table(
            (
                Column(of="what", title="The leak chosen", width=170, texts=words.LEAK_NAMES),
                Column(of="said", title="Note", texts=written, wrapped=True),
            )
        ),
        shows="What the leak chosen at the top is, who acts, and which signal it needs.",
        bad="a loss above the range to expect",
        do="what stands beside Do first",
        queries=(Query(chosen_note("said", side, _NOTES)),),
        unit="none",
        width=24,
        height=12,
    )


def _said(loss: Loss, side: Side) -> Iterator[tuple[str, str]]:
    low, high = loss.expected.low, loss.expected.high
    for leak in booked(loss):
        yield leak.name, leak.description
    yield "Role that acts", loss.team
    yield "Do first", loss.fix
    yield "Watch", loss.watch
    yield "Seen by", f"{', '.join(loss.evidence)}: {loss.needs}"
    yield "Expect", f"{low:g} to {high:g} of 100 hours (an estimate); an example: {loss.example(side):g}"
    yield "Drawn after", "; ".join(LITERATURE[name].work for name in loss.expected.sources) or "no publication"
    yield "Runbook", f"docs/runbooks/{loss.runbook}.md" if loss.runbook else "none"


def jobs(side: Side) -> Panel:
    """The jobs that lose most now to the leak that is chosen at the top."""
    worst = f"topk(10, {by_job(side)})"
    return Panel(
        title=f"{side.jobs.capitalize()} that lose most to it",
        kind=Table((*_whose(side), *_LOST_NOW), sort="A"),
        shows="Money an hour that each loses now to the leak chosen at the top, and which share of its time that is."
        " A leak that only a report or an engine tells of has no jobs while none speaks.",
        bad="a job far above the others",
        do="click on the job; what to do first about the leak is in the note below",
        queries=(
            Query(f"{worst} * on (cluster, job_id) group_left (name, user, workload_namespace) {at(INFO)}"),
            Query(f"{lost_by_job()} and on (cluster, job_id) {worst}"),
        ),
        width=14,
        height=9,
        number=JOBS,
        empty="no job loses any now, or none is heard: see the note below",
        fills="memory_bound_decode" if side.name == "inference" else "memory_bound",
    )


def _whose(side: Side) -> tuple[Column, ...]:
    if side.name == "inference":
        where = Column(of="workload_namespace", title="Namespace", width=100)
        return Column(of="job_id", title="Server", link=TO_JOB), where
    user = Column(of="user", title="User", width=90)
    return Column(of="job_id", title="Job", link=TO_JOB, width=100), Column(of="name", title="Name"), user


_LOST_NOW = (
    Column(of="A", title="Lost an hour", unit="short", decimals=2, width=115),
    Column(of="currency", title="Currency", width=80),
    Column(of="B", title="Of its time", unit="percentunit", decimals=1, width=92),
)


_AXES = {"percentunit": "Shares and ratios", "s": "Times"}
"""What is drawn together; all other units have one panel, in which a leak has mostly one of them."""


def _watched(side: Side) -> Iterator[Panel]:
    """One panel for each axis, with the metrics of whichever leak is chosen."""
    for title in (*_AXES.values(), "Amounts"):
        yield _curves(title, {loss: _of_axis(title, loss) for loss in losses(side)}, side)


def _of_axis(title: str, loss: Loss) -> tuple[str, ...]:
    return tuple(series for series in loss.series if _AXES.get(_unit(series), "Amounts") == title)


def _unit(series: str) -> str:
    return words.unit_of(first_series(series))


def _curves(title: str, of_each: Mapping[Loss, tuple[str, ...]], side: Side) -> Panel:
    each = [(loss, series, query) for loss, group in of_each.items() for series in group
            for query in curves(series, side)]  # fmt: skip
    alone = (series for group in of_each.values() if len(group) == 1 for series in group)
    return Panel(
        title=title,
        kind=Lines(colours={f"{title_of(name)}: {what}": colour for name in alone for what, colour in SPREAD.items()}),
        shows="Metrics that show whether the leak chosen at the top grows. Of single jobs the 10th, 50th and 90th"
        f" percentile across {side.jobs}, each counted once; latencies of the server in the middle and the slowest.",
        bad="a change without a change of the work; p90 far from p50: a few jobs are unlike the others",
        do="see who: the table of jobs above",
        queries=tuple(Query(if_chosen(loss, query.expr), query.legend, _unit(series)) for loss, series, query in each),
        height=9,
        empty="this leak has no such metric, or nobody reports it",
    )
