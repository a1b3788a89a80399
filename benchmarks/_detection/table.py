"""The rows of the group `detection`: our detectors, the rules of thumb, each guard taken away, and real recordings.

Owns words; every figure is a sum over the runs of `detection`.
"""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.detection import SCORING, Run, runs
from benchmarks.detection_cases import BEYOND, CASES, DETECTORS, ONE_PLACE, SERVING, STUCK, WAITING
from benchmarks.detection_rules import GUARDS, THUMBS
from benchmarks.detection_samples import samples
from benchmarks.detection_score import CONFIRM, SUSPECT, Score, merged
from benchmarks.figures import Row

ALERT = {
    "hang": "JobDeadlocked: pages for a job that hangs",
    "zombie": "GPUZombie: a GPU that rests longer than its class may",
    "no_process": "GPUAllocatedWithoutProcess: held 45 min without a process",
    "unowned": "GPUUnownedProcess: a kernel 10 min on a GPU nobody has",
    "lost": "GPULost: a GPU that is gone",
}


def detection(*, quick: bool = False) -> list[Row]:
    """Play everything; quick: one seed, and no guard is taken away."""
    seeds = SCORING[:1] if quick else SCORING
    hangs = [case for case in (*STUCK, *WAITING, *SERVING, *ONE_PLACE) if not case.long]
    short = runs(hangs, seeds, guards=not quick)
    done = short + runs([case for case in CASES if case not in hangs], seeds)
    guarded = [] if quick else short
    return [*_ours(done), *_thumbs(done), *_guards(guarded), *_beyond(runs(BEYOND, seeds[:3])), *samples()]


def _row(what: str, often: str, median: str, spread: str, **judged: object) -> Row:
    return Row(group="detection", what=what, often=often, median=median, spread=spread, **judged)  # type: ignore[arg-type]


def _said(score: Score) -> tuple[str, str]:
    figures = f"precision {score.precision:.3f}, recall {score.recall:.3f}"
    return figures, f"{score.true} right, {score.false} false, {score.missed} missed, {score.quiet} rightly silent"


def _size(done: Sequence[Run]) -> str:
    cases, seeds = len({r.case for r in done}), sorted({r.seed for r in done})
    return f"{cases} cases, seeds {seeds[0]} - {seeds[-1]}"


def _ours(done: Sequence[Run]) -> Iterator[Row]:
    for detector in DETECTORS:
        score = merged(r.scores[detector] for r in done)
        page = detector == "hang"
        budget = "0 false, 0 missed" if page else ""
        met = not (score.false or score.missed) if page else None
        figures, counts = _said(score)
        yield _row(ALERT[detector], _size(done), figures, counts, budget=budget, met=met)
    for name, seconds in (("suspected", SUSPECT), ("hang", CONFIRM)):
        score = merged(r.scores[name] for r in done)
        late = sorted({line for r in done for line in r.late if f"not {seconds}" in line})
        word = "confirmed" if name == "hang" else "suspected"
        yield _row(
            f"Time until a hang is {word}", f"{len(score.times)} jobs", score.took(),
            "; ".join(late) or "each within its time", budget=f"<= {seconds} s + 2 periods", met=not late,
        )  # fmt: skip
    tickets = merged(r.scores["tickets"] for r in done)
    figures, counts = _said(tickets)
    where = ", ".join(_names(tickets.wrong)) or "nowhere"
    yield _row("JobHungSuspected: a ticket after ten minutes of suspicion", _size(done), figures, f"{counts}: {where}")


def _thumbs(done: Sequence[Run]) -> Iterator[Row]:
    for index, rule in enumerate(THUMBS):
        figures, counts = _said(merged(r.scores[f"{index}"] for r in done if f"{index}" in r.scores))
        yield _row(f"Rule of thumb for a {rule.detector}: {rule.words}", _size(done), figures, counts)


def _guards(done: Sequence[Run]) -> Iterator[Row]:
    if not done:
        return
    yield _guard("none", _size(done), merged(r.scores["hang"] for r in done))
    for guard in GUARDS:
        yield _guard(guard, _size(done), merged(r.guards[guard] for r in done))
    yield _guard("what the other GPUs of the job do", _size(done), merged(r.scores["ungated"] for r in done))


def _guard(name: str, often: str, score: Score) -> Row:
    figures, _ = _said(score)
    cost = ", ".join(_names(score.wrong)) or "nothing"
    return _row(f"JobDeadlocked without the guard: {name}", often, figures, f"costs: {cost}")


def _names(wrong: Iterable[str]) -> list[str]:
    return sorted({f"{line.split('/')[0]} ({line.split()[-1]})" for line in wrong})


def _beyond(done: Sequence[Run]) -> Iterator[Row]:
    for case in BEYOND:
        group = [r for r in done if r.case == case.name]
        pages = sum(r.scores["hang"].false for r in group)
        why = "beyond one node's counters, not scored: " + case.row.description
        yield _row(f"Not told apart: {case.name}", f"{len(group)} runs", f"{pages} pages", why)
