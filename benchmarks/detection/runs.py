"""How well the detectors find what is true, and nothing else: labelled cases, each with several seeds.

Owns the runs and the rows. Every case is played through the real core; whatever carries no label is a look-alike for
every detector. `python -m benchmarks.detection` prints each case.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby, product
from operator import attrgetter

from msgspec import Struct, field

from benchmarks.detection.cases import BEYOND, CASES, DETECTORS, Case, Detector, Draw, draw
from benchmarks.detection.play import Findings, played, simulations, stories
from benchmarks.detection.rules import GUARDS, THUMBS, Watch, without_guard
from benchmarks.detection.score import Score, merged, onsets, provable, truth
from benchmarks.detection.watchdog import TIMEOUT, collective_timeouts
from exporter.core.model import MS, SECOND
from exporter.simulate.simulation import Simulation

TUNING = tuple(range(1, 7))
"""Seeds that were looked at while the cases and the rules were written."""
SCORING = tuple(range(101, 119))
"""Seeds that the figures are of; no threshold was moved for either."""
GUARDED = SCORING[:6]
"""Seeds with which each guard is taken away, which plays a case eleven times."""
NCCL = "nccl"
FOR: Mapping[str, Detector] = {
    **{detector: detector for detector in DETECTORS},
    **{f"{index}": rule.detector for index, rule in enumerate(THUMBS)},
    NCCL: "hang",
}
"""What each rule that is scored is there to find."""
ALL = {case.name: case for case in (*CASES, *BEYOND)}
"""Every case by its name."""


class Run(Struct, frozen=True):
    """One case with one seed, judged."""

    case: str
    seed: int
    drawn: Draw
    provable: str
    scores: dict[str, Score]
    """By detector; `ungated`, `suspected`, `tickets`, the number of a rule of thumb and `nccl` beside them."""
    late: tuple[str, ...] = ()
    """Deadlines that were missed, in words."""
    guards: dict[str, Score] = field(default_factory=dict)
    took: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from the true onset to the word, for each that was in trouble and was named; by the keys of `scores`."""
    blind: dict[str, Score] = field(default_factory=dict)
    """Who finds a hang that ours cannot prove: the rules for hangs, and our tickets."""


def run(name: str, seed: int, *, guards: bool = False) -> Run:
    """Play and judge one case with one seed; with `guards` also with each guard of the hang rule taken away."""
    case, drawn = ALL[name], draw(ALL[name], seed)
    nodes = simulations(case, seed, drawn)
    told, true, watch = stories(case, seed), truth(case, nodes), Watch()
    play = partial(played, told, restart=case.twist == "restart")
    found, proof = play(look=watch.look), provable(case, drawn)
    judge = partial(_judged, f"{name}/{seed}", early=drawn.period * SECOND)
    hangs = true.get("hang", {})
    due = {} if case.brief else hangs
    paged = due if proof == "confirmed" else {}
    scores: dict[str, Score] = {
        d: judge(found.by[d], _to_find(d, due if d == "hang" else true.get(d, {}), proof, drawn)) for d in DETECTORS
    }
    scores |= {
        "ungated": judge(found.ungated, paged),
        "suspected": judge(found.suspected, due if proof != "nothing" else {}),
        "tickets": judge(found.tickets, due if proof == "suspected" else {}),
    }
    begun, lasts = onsets(case, nodes), nodes[0].duration_ms * MS - 2 * drawn.period * SECOND
    others = _others(watch, nodes)
    said = {rule: judge(words, _due(rule, words, begun, lasts)) for rule, words in others.items()}
    unproven = paged != hangs  # a hang that ours cannot prove is no test of the others either; it is told apart
    scores |= {rule: score for rule, score in said.items() if not (unproven and FOR[rule] == "hang")}
    blind = {rule: score for rule, score in said.items() if FOR[rule] == "hang"}
    blind["tickets"] = judge(found.tickets, hangs)
    toothless = {guard: judge(play(policy=without_guard(guard)).by["hang"], paged) for guard in GUARDS if guards}
    ours = {**{str(name): words for name, words in found.by.items()}, "tickets": found.tickets}
    late = tuple(_late(case, drawn, found, due, proof))
    return Run(
        name, seed, drawn, proof, scores, late, toothless, _took(ours | others, begun), blind if unproven else {}
    )


def _others(watch: Watch, nodes: Sequence[Simulation]) -> dict[str, dict[str, int]]:
    """What every rule that is not ours said."""
    others = {f"{index}": fired for index, fired in enumerate(watch.fired)}
    return others | {NCCL: collective_timeouts(nodes)}


def _due(rule: str, words: Mapping[str, int], begun: Mapping[Detector, dict[str, int]], lasts: int) -> dict[str, int]:
    """Who can be found by a rule that is not ours: from the onset on, and if the story lasts as long as it waits.

    Our classes of jobs are not theirs: a notebook that is forgotten may be named before its two hours are over.
    """
    waits = TIMEOUT if rule == NCCL else THUMBS[int(rule)].seconds * SECOND
    return {name: at for name, at in begun.get(FOR[rule], {}).items() if name in words or at + waits < lasts}


def _took(said: Mapping[str, Mapping[str, int]], begun: Mapping[Detector, Mapping[str, int]]) -> dict[str, list[float]]:
    """A word that came before the trouble is no detection of it."""
    since = {rule: begun.get(FOR.get(rule, "hang"), {}) for rule in said}
    return {
        rule: [(at - since[rule][name]) / SECOND for name, at in told.items() if at >= since[rule].get(name, at + 1)]
        for rule, told in said.items()
    }


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
    words = ("suspected", found.suspected), ("confirmed", found.by["hang"])
    count = {"nothing": 0, "suspected": 1}.get(proof, 2)
    for (word, told), seconds in tuple(zip(words, case.deadlines, strict=True))[:count]:
        for job, since in hangs.items():
            took = (told[job] - since) / SECOND if job in told else float("inf")
            if took > seconds + allowed:
                yield f"{case.name}: {word} after {took:.0f} s, not {seconds} + {allowed:.0f}"


def runs(cases: Iterable[Case], seeds: Iterable[int], *, guards: bool = False) -> list[Run]:
    """Play all, on every core of the machine."""
    every = list(product([case.name for case in cases], seeds))
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(_run, guards=guards), every, chunksize=2))


def _run(which: tuple[str, int], *, guards: bool) -> Run:
    return run(*which, guards=guards)


def tell(done: Sequence[Run]) -> None:
    """Each case on a line: runs, what was said rightly, wrongly, and not at all; then the draws that went wrong."""
    for name, of in groupby(done, key=attrgetter("case")):
        group = list(of)
        total = {d: merged(r.scores[d] for r in group) for d in (*DETECTORS, "suspected", "tickets", "ungated")}
        said = " ".join(f"{d} {s.true}/{s.false}/{s.missed}" for d, s in total.items() if s.true + s.false + s.missed)
        late = "; ".join(line for r in group for line in r.late)
        print(f"{name:28} {len(group)} runs  {said}  {total['hang'].took()}  {late}")
        for line in (wrong for d in DETECTORS for wrong in total[d].wrong):
            print("     ", line, draw(ALL[name], int(line.split("/")[1].split()[0])))
