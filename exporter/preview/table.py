"""The answer as text, 80 columns wide. Owns words and widths; refuses to add anything up."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from exporter import wording
from exporter.preview.tally import Answer, Hit, Score
from exporter.wording import moment, short

WIDTH = 80
MOST_HITS = 10
"""Of a row."""
_NAME = 30
_STATES = {
    "zombie": "it is a zombie",
    "hung": "it hangs",
    "no_process": "it has had no process for too long",
}


def text(answer: Answer) -> str:
    """Lines for a terminal: what was looked at, the table, whom each row hits, and what to keep in mind."""
    return "\n".join([*_head(answer), "", *_table(answer.rows), *_hits(answer.rows), *_notes(answer.notes)]) + "\n"


def _head(answer: Answer) -> Iterator[str]:
    yield from wrap(answer.source, WIDTH)
    yield f"{moment(answer.since)} to {moment(answer.until)}, {answer.gpu_hours_held:,.1f} GPU-hours held"
    yield from wrap("A GPU is taken back when " + " or ".join(_STATES[s] for s in answer.taken_back_when) + ".", WIDTH)


def _table(rows: Sequence[Score]) -> Iterator[str]:
    priced = any(row.money_freed or row.money_wrongly_freed for row in rows)
    money = f"{'money':>16}" if priced else ""
    yield f"{'':{_NAME}}{'':>6}{'GPU-hours freed':>20}{'':{len(money)}}{'jobs':>8}"
    yield f"{'threshold':{_NAME}}{'times':>6}{'rightly':>10}{'wrongly':>10}{money}{'hit':>8}"
    for row in rows:
        yield from _row(row, priced=priced)


def _row(row: Score, *, priced: bool) -> Iterator[str]:
    """A long label has lines of its own; so has each further currency."""
    *lines, label = wrap(row.label, _NAME, break_long_words=True) or [""]
    yield from lines
    sums = [f"{amount:,.2f} {currency}" for currency, amount in sorted(row.money_freed.items())] or ["0"]
    money = f"{sums[0]:>16}" if priced else ""
    hours = f"{row.gpu_hours_freed:>10,.1f}{row.gpu_hours_wrongly_freed:>10,.1f}"
    hit = f"{row.jobs_hit}/{row.jobs_reclaimed}"
    yield f"{label:{_NAME}}{row.episodes:>6}{hours}{money}{hit:>8}"
    for more in sums[1:]:
        yield f"{more:>{_NAME + 42}}"


def _hits(rows: Sequence[Score]) -> Iterator[str]:
    for row in rows:
        if row.hits:
            yield ""
            yield from wrap(f"{row.label} would have hit, soonest first:", WIDTH)
            for hit in row.hits[:MOST_HITS]:
                yield from _hit(hit)
        if len(row.hits) > MOST_HITS:
            yield f"  and {len(row.hits) - MOST_HITS} more; --json lists them all"


def _hit(hit: Hit) -> Iterator[str]:
    who = f"{short(hit.name or hit.job_id, 28):28} {short(hit.user or '-', 12):12}"
    yield f"  {who} worked {elapsed(hit.after_seconds)} later"
    times = f", {hit.times} times" if hit.times > 1 else ""
    gpus = "1 GPU" if len(hit.gpus) == 1 else f"{len(hit.gpus)} GPUs"
    where = f" in {short(hit.cluster, 16)}" if hit.cluster else ""
    yield from wrap(
        f"job {short(hit.job_id, 24)}{where}, taken back {moment(hit.taken_at)}, {gpus}{times}",
        WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
    )


def elapsed(seconds: float) -> str:
    """As everywhere, but below a minute in whole seconds: that is how far apart two samples are."""
    return f"{seconds:.0f} s" if seconds < 60 else wording.elapsed(seconds)  # noqa: PLR2004  a minute


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield ""
    for note in notes:
        yield from wrap(f"- {note}", WIDTH, subsequent_indent="  ")
