"""All that a side loses, in one table and as bars.

Owns what stands above the rows of the chosen leak (`leaks`), and where a click in it leads. Refuses queries (`losses`).
"""

from collections.abc import Iterator

from dashboards import words
from dashboards.losses import (
    SECONDS,
    Loss,
    Side,
    by_loss,
    fleet_price,
    heard,
    losses,
    paid,
    price,
    share,
)
from dashboards.parts import Bars, Column, Link, Panel, Query, Table
from dashboards.series import CLICKED, to, total

JOBS = 1000
"""Id of the panel that names the jobs that lose most to the leak chosen at the top."""


def table(side: Side, *, width: int, height: int) -> Panel:
    """All losses with what they cost, whose they are and which signal they need."""
    these = losses(side)
    named = by_loss(these, lambda loss: f'label_replace({heard(loss, side)}, "who", "{"|".join(loss.rows)}", "", "")')
    for label in ("expected", "team", "needs"):
        named = f'label_replace({named}, "{label}", "$1", "loss", "(.*)")'
    return Panel(
        title=f"What {side.jobs} lose, whose it is, which signal it needs",
        kind=Table(tuple(_columns(these, side)), sort="C"),
        shows=f"Each of the twelve leaks, and the other losses, over the time shown: of 100 GPU-hours that {side.jobs}"
        " held, beside the range to expect (an engineering estimate, docs/leaks.md) and as a share of its upper end;"
        " money a month (730 h) at the mean rate, of these jobs and of the whole fleet, GPUs nobody holds included."
        " Coverage: the share of the GPU time that the best source covers. No data is not zero.",
        bad="more than the range, dearest first; and a low share heard, for then the figure is too low",
        do="click on jobs to see who loses most; the row below has its metric, who acts and what to do",
        queries=(
            Query(by_loss(these, lambda loss: share(loss, side))),
            Query(by_loss(these, lambda loss: share(loss, side, 100 / loss.expected.high))),
            Query(by_loss(these, lambda loss: price(loss, side))),
            Query(by_loss(these, fleet_price)),
            Query(named),
        ),
        unit="none",
        width=width,
        height=height,
        empty=f"no {side.jobs} seen",
    )


def _columns(these: tuple[Loss, ...], side: Side) -> Iterator[Column]:
    colours = {loss.key: words.LEAKS.get(loss.rows[0], words.UNKNOWN) for loss in these}
    against = ((None, words.EXPECTED), (1, words.WATCH), (2, words.BAD))
    spoken = ((None, words.UNKNOWN), (0.01, words.WATCH), (0.9, words.GOOD))
    yield Column(of="loss", title="Leak", texts={loss.key: loss.title for loss in these}, words=colours, width=320)
    yield Column(of="A", title="Of 100 h", unit="none", decimals=1, width=80, empty="no data")
    yield _said("expected", "Expect (E)", {k.key: f"{k.expected.low:g} to {k.expected.high:g}" for k in these}, 90)
    yield Column(of="B", title="Of its top", unit="percentunit", decimals=0, width=90, steps=against)
    yield Column(of="C", title="A month", unit="short", decimals=1, width=90)
    yield Column(of="currency", title="Currency", width=80)
    yield _said("team", "Role that acts", {loss.key: loss.team for loss in these}, 112)
    yield Column(of="E", title="Coverage", unit="percentunit", decimals=0, width=80, steps=spoken)
    jobs = Link("The jobs that lose most to it", f"{to(side.name, '', leak=CLICKED).url}&viewPanel=panel-{JOBS}")
    yield Column(of="who", title="Who", texts={"|".join(k.rows): "jobs" for k in these}, width=55, link=jobs)
    yield Column(of="D", title="Fleet, a month", unit="short", decimals=1, width=115)
    yield _said("needs", "Signal needed", {loss.key: f"{', '.join(loss.evidence)}: {loss.needs}" for loss in these})


def _said(label: str, title: str, texts: dict[str, str], width: int = 0) -> Column:
    return Column(of=label, title=title, texts=texts, width=width)


def waterfall(side: Side, *, width: int, height: int) -> Panel:
    """Where 100 GPU-hours of its jobs went."""
    asked = f"100 * {total(SECONDS, side.where, by='leak')} / on () group_left () ({paid(side)} > 0)"
    return Panel(
        title=f"Of 100 GPU-hours that {side.jobs} held",
        kind=Bars(colours=words.LEAKS),
        shows=f"Where the GPU time that {side.jobs} held went over the time shown; all bars are 100 together. Warm:"
        " allocation losses; purple: compute-time losses; blue: model-FLOPs losses; green: useful; grey: not known.",
        bad="a loss that is longer than useful",
        do="take the longest that is not green; the table beside it says whose it is",
        queries=(Query(f"sort_desc({asked})", legend="{{leak}}"),),
        unit="none",
        decimals=1,
        width=width,
        height=height,
        empty=f"no {side.jobs} seen",
    )
