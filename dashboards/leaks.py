"""One folded row of panels for each leak of a side, and one for all that is small or none of the twelve.

Owns what stands in them, alike for every leak, so that a new one has its panels by itself. Refuses what leaks are and
how they are asked for (`losses`).
"""

from collections.abc import Iterator

from dashboards import words
from dashboards.leak_table import JOBS, is_large
from dashboards.losses import (
    CHOSEN_LEAK,
    INFO,
    SHARE,
    Loss,
    Side,
    booked,
    by_job,
    losses,
    share_now,
    shares_now,
    told,
)
from dashboards.parts import Column, Lines, Note, Panel, Query, Row, Table
from dashboards.series import TO_JOB, at
from dashboards.watching import curve, title_of
from exporter.core.leak_guide import LITERATURE


def rows(side: Side) -> tuple[Row, ...]:
    """One folded row for each of the twelve that matters here, and one for all the rest."""
    these = losses(side)
    rest = tuple(loss for loss in these if not is_large(loss))
    return (*(_row(loss, side) for loss in these if is_large(loss)), _rest(rest, side))


def _row(loss: Loss, side: Side) -> Row:
    width = 24 // min(3, len(loss.series))
    curves = [curve(each, side, f"{int(loss.key)}: {title_of(each)}", width=width) for each in loss.series]
    return Row(loss.title, (_over_time(loss, side), _note(loss, side), *curves), folded=True)


def _rest(these: tuple[Loss, ...], side: Side) -> Row:
    shares = f"{SHARE}{{leak="
    series = [name for loss in these if not loss.of_twelve for name in loss.series if not name.startswith(shares)]
    leaks = f'leak=~"{"|".join(row for loss in these for row in loss.rows)}"'
    return Row(
        "Other losses",
        (
            _rest_over_time(leaks, side),
            *(_note(loss, side) for loss in these),
            *(curve(name, side, f"Other: {title_of(name)}", width=8) for name in series),
        ),
        folded=True,
    )


def _over_time(loss: Loss, side: Side) -> Panel:
    low, high = loss.expected.low, loss.expected.high
    return Panel(
        title=f"{int(loss.key)}: of 100 GPU-hours",
        kind=Lines(stacked=len(loss.rows) > 1, colours=_colours(loss), band=(low, high)),
        shows=f"{loss.name.capitalize()}: hours of 100 that {side.jobs} held. Green: the range to expect, {low:g} to"
        f" {high:g} (an engineering estimate).",
        bad="above the range for hours",
        do=loss.fix,
        queries=tuple(Query(share_now(row, loss, side), legend=row) for row in loss.rows),
        unit="none",
        width=12,
        empty=f"no data: needs {loss.needs}",
        fills=_story(loss),
    )


def _colours(loss: Loss) -> dict[str, str]:
    return {row: words.LEAKS.get(row, words.UNKNOWN) for row in loss.rows}


def _story(loss: Loss) -> str:
    """What only a report or an engine tells of may have nothing to show in a fleet."""
    return loss.rows[0] if told(loss) else ""


def jobs(side: Side, *, width: int, height: int) -> Panel:
    """The jobs that lose most now to the leak that is chosen at the top."""
    worst = f"topk(10, {by_job(side)})"
    return Panel(
        title=f"{side.jobs.capitalize()} that lose most to the leak chosen at the top",
        kind=Table((*_whose(side), *_LOST_NOW), sort="A"),
        shows="Money an hour that each loses now to the leak chosen at the top, and which share of its time that is."
        " A leak that only a report or an engine tells of has no jobs while none speaks.",
        bad="a job far above the others",
        do="click on the job; what to do first about the leak is in the table above and in its row below",
        queries=(
            Query(f"{worst} * on (cluster, job_id) group_left (name, user, workload_namespace) {at(INFO)}"),
            Query(f"sum by (cluster, job_id) ({at(SHARE, CHOSEN_LEAK)}) and on (cluster, job_id) {worst}"),
        ),
        width=width,
        height=height,
        number=JOBS,
        empty="no job loses any now, or none is heard: see the note in the leak's row",
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


def _note(loss: Loss, side: Side) -> Panel:
    return Panel(
        title=f"{int(loss.key)}: whose it is, what to do" if is_large(loss) else f"Other: {loss.title}",
        kind=Note("  \n".join(_lines(loss, side))),
        shows="What it is, who acts, and which signal it needs.",
        bad="a loss above the range to expect",
        do=loss.fix,
        width=12,
        height=8,
        empty="a text",
    )


def _lines(loss: Loss, side: Side) -> Iterator[str]:
    low, high = loss.expected.low, loss.expected.high
    yield f"**Role that acts** {loss.team}"
    yield f"**Do first** {loss.fix}"
    yield f"**Watch** {loss.watch}"
    yield f"**Seen by** {', '.join(loss.evidence)}: {loss.needs}"
    yield f"**Expect** (an estimate) {low:g} to {high:g} of 100 hours; an example: {loss.example(side):g}"
    drawn = "; ".join(LITERATURE[name].work for name in loss.expected.sources)
    if drawn:
        yield f"**Drawn after** {drawn}"
    for leak in booked(loss):
        yield f"`{leak.name}` ({leak.layer}): {leak.description}"
    if loss.runbook:
        yield f"**Runbook** docs/runbooks/{loss.runbook}.md"


def _rest_over_time(leaks: str, side: Side) -> Panel:
    return Panel(
        title="Other losses, of 100 GPU-hours",
        kind=Lines(stacked=True, colours=words.LEAKS),
        shows=f"Losses that are none of the twelve, or small here: hours of 100 that {side.jobs} held.",
        bad="a band above what the notes below expect",
        do="see the note of that loss",
        queries=(Query(shares_now(leaks, side), legend="{{leak}}"),),
        unit="none",
        width=24,
        empty=f"no {side.jobs} seen",
    )
