"""Ours beside the rules of thumb, on the same runs: how often right, how soon, wrong where, and why.

Owns the side-by-side tables and their picture. Refuses to score: every figure is a sum over `Run`s. All rules ask for a
scrape and an evaluation before anybody is told; how long that takes at worst is part of every time here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from benchmarks.detection.cases import Detector
from benchmarks.detection.rules import THUMBS
from benchmarks.detection.runs import NCCL, Run
from benchmarks.detection.score import Score, merged, wilson
from benchmarks.figures import percentile
from benchmarks.group import Curves, Picture, Table
from benchmarks.machine import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCRAPE, SLOW = 30.0, 60.0
"""Seconds at most to a scrape, as `alerts/jobs.yaml` reckons; and to an evaluation by Prometheus's own default."""
_INTERVAL = re.compile(r"^ +interval: (\d+)s$", re.MULTILINE)


def fast() -> float:
    """Seconds between two evaluations of the group that pages, as it is written: the first in its file."""
    found = _INTERVAL.search((ROOT / "alerts" / "jobs.yaml").read_text(encoding="utf-8"))
    if found is None:
        raise RuntimeError(
            "alerts/jobs.yaml names no interval in seconds for the group that pages: see its first group"
        )
    return float(found[1])


FAST = fast()
_NAMED = 5
"""So many cases are named; the others are counted."""


class Entrant(Struct, frozen=True):
    """One rule in the comparison."""

    key: str
    name: str
    detector: Detector
    road: float
    """Seconds at most from the moment that it holds until somebody is told."""
    why: str
    ours: bool = False


def _thumb(index: int, why: str) -> Entrant:
    return Entrant(f"{index}", THUMBS[index].words, THUMBS[index].detector, SCRAPE + FAST, why)


ENTRANTS: tuple[Entrant, ...] = (
    Entrant(
        "hang", "GPUEfficiencyJobDeadlocked (ours, page)", "hang", SCRAPE + FAST,
        "asks for every guard below at once, and for the whole job: one rank may work while the others wait. It is "
        "silent where a field that could acquit is not there; the ticket is for those", ours=True,
    ),
    Entrant(
        "tickets", "GPUEfficiencyJobHungSuspected (ours, ticket)", "hang", SCRAPE + SLOW,
        "not better than a coin: one rank that evaluates for long looks the same from outside. It is no page, and "
        "the only word of ours on blind boards, after twice the time of a rule of thumb", ours=True,
    ),
    _thumb(0, "low power is not rest: polling, thin work and walks through memory draw as little, and so do ranks "
              "that wait for a checkpoint. A spin draws more than 30 % of a small board's limit, a board that smooths "
              "its power hides it, and an instance of MIG has no sensor: hangs are missed"),
    _thumb(1, "the same, and the clock stays up on a board that does nothing: an open notebook is a hang to it"),
    _thumb(2, "finds every hang, and as soon as ours does; but all that uses no tensor cores is a hang to it, FP64, "
              "a long checkpoint and idle GPUs too. It would do where all jobs train in half precision and save fast"),
    _thumb(5, "the nearest to ours: links at rest are two of its guards. It takes work inside one GPU for a hang, and "
              "it does not see instances of MIG, nor a spin that polls a network card"),
    Entrant(
        NCCL, "a collective takes 10 min (NCCL's watchdog)", "hang", 0.0,
        "needs no sensor, so no board is blind to it, and it ends the job by itself. It takes twice as long, "
        "knows no hang without a collective, and ends a job whose rank 0 evaluates for longer",
    ),
    Entrant(
        "zombie", "GPUEfficiencyGPUZombie (ours, ticket)", "zombie", SCRAPE + SLOW,
        "waits as long as the job's class may rest: 30 min of a batch job, 2 h of a notebook, 5 h of a service. What "
        "has no process is another alert's", ours=True,
    ),
    _thumb(3, "an hour and a half sooner than ours for a forgotten notebook, and so wrong about one that is used; a "
              "keeper's short kernels keep it silent for ever"),
    _thumb(4, "the same with more patience: it lets a used notebook be, and gives a batch job two hours"),
    _thumb(6, "for boards that never show a strict zero; else like 30 min of zero"),
    _thumb(7, "sees through a keeper's short kernels, as ours does, and finds a notebook and a service sooner; but it "
              "knows no classes: a lull of a service and a used notebook are zombies to it"),
)  # fmt: skip


class Result(Struct, frozen=True):
    """What one rule did over all runs."""

    score: Score
    blind: tuple[int, int]
    """Of so many hangs that ours cannot prove, how many it named."""
    seconds: tuple[float, ...]
    """From the true onset until somebody is told, at worst."""


def result(entrant: Entrant, done: Iterable[Run]) -> Result:
    """Add up; a run on which the rule is not scored does not count for its times either."""
    scored = [run for run in done if entrant.key in run.scores]
    seconds = sorted(entrant.road + s for run in scored for s in run.took.get(entrant.key, ()))
    blind = [run.blind[entrant.key] for run in done if entrant.key in run.blind]
    return Result(
        merged(run.scores[entrant.key] for run in scored), (sum(one.true for one in blind), len(blind)), tuple(seconds)
    )


def tables(done: Sequence[Run]) -> list[Table]:
    """Hangs, then zombies."""
    return [_table("hang", _HANGS, done), _table("zombie", _ZOMBIES, done)]


_HANGS = (
    "**Hangs, ours beside the field's rules, on the same runs.** Minutes from the true onset until somebody is told, "
    "with a scrape and an evaluation at their slowest. Shares with their 95 % interval (Wilson's), as if every draw "
    "were independent. Behind each case: how many of its runs went wrong. *Blind boards*: hangs with a field missing "
    "that could acquit, of which ours never pages; how many of them the rule names, and nothing else."
)
_ZOMBIES = (
    "**Zombies, in the same way.** The onset is the moment from which nothing more is done. Ours is wrong when it "
    "speaks before the job's class may not rest any longer; the others only when it is no zombie at all."
)
_HEAD = ("rule", "precision", "recall", "minutes: median, p90, worst", "false alarms on", "misses")


def _table(detector: Detector, about: str, done: Sequence[Run]) -> Table:
    blind = ("blind boards",) if detector == "hang" else ()
    rows = [_line(one, result(one, done)) for one in ENTRANTS if one.detector == detector]
    return Table(about=about, head=(*_HEAD, *blind, "why"), rows=tuple(rows))


def _line(one: Entrant, found: Result) -> tuple[str, ...]:
    score = found.score
    blind = (_blind(one, found),) if one.detector == "hang" else ()
    return (
        one.name, share(score.true, score.true + score.false), share(score.true, score.true + score.missed),
        minutes(found.seconds), where(score.wrong, "false"), where(score.wrong, "missed"), *blind, one.why,
    )  # fmt: skip


def _blind(one: Entrant, found: Result) -> str:
    right, of = found.blind
    return "none: it never pages there" if one.key == "hang" else f"{right} of {of}"


def share(right: int, of: int) -> str:
    """A share with its interval and its counts."""
    if not of:
        return "-"
    least, most = wilson(right, of)
    return f"{right / of:.2f} ({least:.2f} - {most:.2f}), {right} of {of}"


def minutes(seconds: Sequence[float]) -> str:
    """Median, 90th percentile and longest."""
    if not seconds:
        return "-"
    return ", ".join(f"{percentile(seconds, part) / 60:.1f}" for part in (0.5, 0.9, 1.0))


def where(wrong: Iterable[str], how: str) -> str:
    """Cases that went wrong in this way, the most frequent first."""
    count = Counter(line.split("/")[0] for line in wrong if how in line.split()[1:])
    ordered = sorted(count.items(), key=lambda one: (-one[1], one[0]))
    named = [f"{name} {times}" for name, times in ordered[:_NAMED]]
    more = [f"and {len(ordered) - _NAMED} more cases"] if len(ordered) > _NAMED else []
    return ", ".join([*named, *more]) or "none"


def curves(done: Sequence[Run]) -> Curves:
    """What the picture is drawn of: a point a rule."""
    return {"rules": [_point(one, result(one, done)) for one in ENTRANTS]}


def _point(one: Entrant, found: Result) -> dict[str, Any]:
    score = found.score
    shares = {"precision": (score.true, score.true + score.false), "recall": (score.true, score.true + score.missed)}
    return {
        "name": one.name,
        "detector": one.detector,
        "ours": one.ours,
        "minutes": [percentile(found.seconds, part) / 60 for part in (0.5, 1.0)] if found.seconds else [],
        **{name: [right / of if of else 1.0, *wilson(right, of)] for name, (right, of) in shares.items()},
    }


def draw(figure: Figure, curves: Curves) -> None:
    """A line a rule: precision, recall, and minutes until it is told."""
    rules = curves["rules"]
    places = [-i - (one["detector"] == "zombie") for i, one in enumerate(rules)]
    figure.suptitle(_finding(rules), fontweight="bold", x=0.01, ha="left")
    precise, recalled, timed = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.2))
    for one, place in zip(rules, places, strict=True):
        _drawn(precise, one["precision"], place, ours=one["ours"])
        _drawn(recalled, one["recall"], place, ours=one["ours"])
        _timed(timed, one["minutes"], place, ours=one["ours"])
    precise.set_yticks(places, [one["name"] for one in rules], fontsize=8)
    precise.set_title("Precision", fontsize=10)
    precise.set_xlabel("right, of its alarms")
    recalled.set_title("Recall", fontsize=10)
    recalled.set_xlabel("named, of all in trouble")
    timed.set_title("Time to detect", fontsize=10)
    timed.set_xlabel("minutes: median, to the worst")
    for axes in (precise, recalled):
        axes.set_xlim(0, 1.04)
    timed.set_xscale("log")
    timed.set_xticks([5, 10, 30, 60, 120, 300], ["5", "10", "30", "60", "120", "300"])
    timed.minorticks_off()


def _finding(rules: Sequence[dict[str, Any]]) -> str:
    """What the first picture is about: whether a page for a hang is right."""
    field = max(
        (one for one in rules if one["detector"] == "hang" and not one["ours"]), key=lambda r: r["precision"][0]
    )
    ours = next(one for one in rules if one["ours"])
    return (
        f"Simulated hangs: a page of ours is right {ours['precision'][0]:.0%} of the time; "
        f"of the field's rules the best is {field['precision'][0]:.0%}"
    )


def _look(*, ours: bool) -> dict[str, Any]:
    from benchmarks.drawing import COLOURS  # noqa: PLC0415 - the tables do not need it

    return {"color": COLOURS[0] if ours else COLOURS[1], "marker": "o" if ours else "s", "markersize": 6}


def _drawn(axes: Axes, shares: Sequence[float], place: float, *, ours: bool) -> None:
    look = _look(ours=ours)
    axes.plot(shares[1:], [place, place], color=look["color"], linewidth=2, alpha=0.45)
    axes.plot(shares[:1], [place], **look)


def _timed(axes: Axes, minutes: Sequence[float], place: float, *, ours: bool) -> None:
    look = _look(ours=ours)
    axes.plot(minutes, [place] * len(minutes), color=look["color"], linewidth=2, alpha=0.45)
    axes.plot(minutes[:1], [place] * len(minutes[:1]), **look)


VERSUS = Picture(
    name="detection",
    words=(
        "A line for each rule that finds hangs or zombies: its precision and recall with their 95 % intervals, and the "
        "minutes from the onset until somebody is told. Ours are round and blue, the field's square and orange. "
        "Where ours are slower than the field's, it is to be seen too."
    ),
    draw=draw,
    inches=(11.0, 5.4),
)
