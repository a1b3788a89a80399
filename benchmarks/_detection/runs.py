"""How well the detectors find what is true, and nothing else: labelled cases, each with several seeds.

Owns the runs and the rows. Every case is played through the real core; whatever carries no label is a look-alike for
every detector. Run as a module it prints each case instead: `python -m benchmarks.detection`.
"""

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby, product
from operator import attrgetter

from msgspec import Struct, field

from benchmarks.detection_cases import BEYOND, CASES, DETECTORS, Case, Detector, Draw, draw
from benchmarks.detection_play import Findings, played, simulations, stories
from benchmarks.detection_rules import GUARDS, THUMBS, Watch, without_guard
from benchmarks.detection_score import CONFIRM, SUSPECT, Score, merged, provable, truth
from exporter.core.model import SECOND

TUNING = tuple(range(1, 7))
"""Seeds that were looked at while the cases and the rules were written."""
SCORING = tuple(range(101, 107))
"""Seeds that the figures are of; no threshold was moved for either."""
_ALL = {case.name: case for case in (*CASES, *BEYOND)}


class Run(Struct, frozen=True):
    """One case with one seed, judged."""

    case: str
    seed: int
    drawn: Draw
    provable: str
    scores: dict[str, Score]
    """By detector; `ungated`, `suspected` and the number of a rule of thumb beside them."""
    late: tuple[str, ...] = ()
    """Deadlines that were missed, in words."""
    guards: dict[str, Score] = field(default_factory=dict)


def run(name: str, seed: int, *, guards: bool = False) -> Run:
    """Play and judge one case with one seed; with `guards` also with each guard of the hang rule taken away."""
    case, drawn = _ALL[name], draw(_ALL[name], seed)
    told, true, watch = stories(case, seed), truth(case, simulations(case, seed, drawn)), Watch()
    play = partial(played, told, restart=case.twist == "restart")
    found, proof = play(look=watch.look), provable(case, drawn)
    judge = partial(_judged, f"{name}/{seed}", early=drawn.period * SECOND)
    hangs = true.get("hang", {})
    paged = hangs if proof == "confirmed" else {}
    scores: dict[str, Score] = {d: judge(found.by[d], _to_find(d, true.get(d, {}), proof, drawn)) for d in DETECTORS}
    scores |= {
        "ungated": judge(found.ungated, paged),
        "suspected": judge(found.suspected, hangs if proof != "nothing" else {}),
        "tickets": judge(found.tickets, hangs if proof == "suspected" and not case.brief else {}),
    }
    for index, rule in enumerate(THUMBS):
        if paged == hangs or rule.detector != "hang":  # a hang that ours cannot prove is no test of the others either
            scores[f"{index}"] = judge(watch.fired[index], true.get(rule.detector, {}))
    toothless = {guard: judge(play(policy=without_guard(guard)).by["hang"], paged) for guard in GUARDS if guards}
    return Run(name, seed, drawn, proof, scores, tuple(_late(case, drawn, found, hangs, proof)), toothless)


def _to_find(detector: Detector, subjects: dict[str, int], proof: str, drawn: Draw) -> dict[str, int]:
    """Who can be found with the fields there are."""
    unseen = (detector == "hang" and proof != "confirmed") or (
        detector == "no_process" and "processes" in drawn.missing
    )
    return {} if unseen else subjects


def _judged(label: str, told: dict[str, int], subjects: dict[str, int], *, early: int) -> Score:
    score = Score()
    score.judge(label, told, subjects, early=early)
    return score


def _late(case: Case, drawn: Draw, found: Findings, hangs: dict[str, int], proof: str) -> Iterable[str]:
    """Which deadlines of a true hang were not kept."""
    allowed = 2 * drawn.period + case.grace
    asked = {"nothing": (), "suspected": ((SUSPECT, found.suspected),)}.get(
        proof, ((SUSPECT, found.suspected), (CONFIRM, found.by["hang"]))
    )
    for seconds, told in asked:
        for job, since in hangs.items():
            took = (told[job] - since) / SECOND if job in told else float("inf")
            if took > seconds + allowed:
                yield f"{case.name}: {took:.0f} s, not {seconds} + {allowed:.0f}"


def runs(cases: Iterable[Case], seeds: Iterable[int], *, guards: bool = False) -> list[Run]:
    """Play all, on every core of the machine."""
    every = list(product([case.name for case in cases], seeds))
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(_run, guards=guards), every, chunksize=2))


def _run(which: tuple[str, int], *, guards: bool) -> Run:
    return run(*which, guards=guards)


def _print(done: Sequence[Run]) -> None:
    """Each case on a line: runs, what was said rightly, wrongly, and not at all; then the draws that went wrong."""
    for name, of in groupby(done, key=attrgetter("case")):
        group = list(of)
        total = {d: merged(r.scores[d] for r in group) for d in (*DETECTORS, "suspected", "tickets", "ungated")}
        said = " ".join(f"{d} {s.true}/{s.false}/{s.missed}" for d, s in total.items() if s.true + s.false + s.missed)
        late = "; ".join(line for r in group for line in r.late)
        print(f"{name:28} {len(group)} runs  {said}  {total['hang'].took()}  {late}")
        for line in (wrong for d in DETECTORS for wrong in total[d].wrong):
            print("     ", line, draw(_ALL[name], int(line.split("/")[1].split()[0])))


if __name__ == "__main__":
    _print(runs([_ALL[name] for name in sys.argv[1:]] or CASES, TUNING))
