"""How far each leak is off: what the core books of a simulated story against what was put into it, worked out by hand.

Owns the runs and the figures. The shares that are expected are those of the tests' examiner: by hand for the twelve
leaks and their kin (`tests/scenarios/twelve.py`), by his own arithmetic from the simulation's record for the rest
(`tests/scenarios/physics.py`). Neither imports a formula of the core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct

from benchmarks.figures import Row
from benchmarks.group import Curves, Group, Measured, Picture, Table
from benchmarks.truth import mechanisms
from benchmarks.truth.conditions import CONDITIONS, Condition, heard
from exporter.core.leaks import LEAK_NAMES, LEAKS
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from tests.scenarios.physics import foreseen
from tests.scenarios.stage import SIZES, Case, Run
from tests.scenarios.twelve import EXPECTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (101, 102, 103)
"""None of them is a test's."""
_WAITING = (
    "startup", "checkpoint", "data_stall", "host_overhead", "unattributed_stall", "wait",
)  # fmt: skip
"""Causes of waiting that nobody told: the truth knows the waiting, and its causes are estimates."""


class Subject(Struct, frozen=True, kw_only=True):
    """A leak, the story that has it, and where the expected share comes from."""

    leak: str
    story: str
    scenario: str = ""
    """Of the examined scenarios; empty: a story of the twelve leaks, its share by hand."""
    parts: tuple[str, ...] = ()
    """What is added up; empty: the leak alone."""

    @property
    def names(self) -> tuple[str, ...]:
        """Leaks that are added up."""
        return self.parts or (self.leak,)


SUBJECTS = (
    *(Subject(leak=row.leak or story, story=story) for story, row in EXPECTED.items() if story != "unused_drafts"),
    Subject(leak="unavailable", story="a lost GPU", scenario="lost_gpu"),
    Subject(leak="throttled", story="slow clocks", scenario="throttled"),
    Subject(leak="other_compute", story="healthy training", scenario="healthy_training"),
    Subject(leak="useful", story="healthy training", scenario="healthy_training"),
    Subject(leak="unobserved", story="an outage of telemetry", scenario="telemetry_outage"),
    Subject(leak="startup and other waiting", story="an idle context", scenario="idle_context",
            parts=_WAITING),
)  # fmt: skip


class Found(Struct, frozen=True, kw_only=True):
    """One story, once: shares of paid time, and whether all of it is somewhere."""

    subject: int
    condition: int
    seed: int
    expected: float
    booked: float
    spent: dict[str, float]
    """Shares by leak."""
    lost: int
    """Nanoseconds that are in no leak, or in two."""
    readings: int


def examined(subject: int, condition: int, seed: int) -> Found:
    """Play one story, as one kind of node sees it."""
    of, how = SUBJECTS[subject], CONDITIONS[condition]
    simulation = _simulated(of, how, seed)
    ledger, count, paid = Ledger(), 0, 0
    for observation in (told := tuple(heard(simulation, how))):
        advance(ledger, observation)
        count += len(observation.readings)
    for gpu in ledger.gpus.values():
        paid += sum(gpu.book.parts)
    due = len(simulation.uuids) * (told[-1].at - told[0].at)
    spent = {name: sum(gpu.book.parts[place] for gpu in ledger.gpus.values()) for place, name in enumerate(LEAK_NAMES)}
    shares = {name: part / due for name, part in spent.items() if part}
    return Found(
        subject=subject, condition=condition, seed=seed, expected=_expected(of, seed, simulation, told, ledger),
        booked=sum(shares.get(name, 0.0) for name in of.names), spent=shares,
        lost=abs(paid - due) + ledger.conservation_errors, readings=count,
    )  # fmt: skip


def _simulated(of: Subject, how: Condition, seed: int) -> Simulation:
    if of.scenario:
        size = SIZES[of.scenario]
        return simulate(
            of.scenario, seed=seed, gpus=size.gpus, period_seconds=how.seconds(size.period),
            duration_seconds=size.duration,
        )  # fmt: skip
    row = EXPECTED[of.story]
    return simulate(of.story, stories=LEAK_SCENARIOS, seed=seed, gpus=row.gpus, period_seconds=how.seconds(row.period))


def _expected(of: Subject, seed: int, simulation: Simulation, told: tuple, ledger: Ledger) -> float:  # type: ignore[type-arg]
    if not of.scenario:
        return EXPECTED[of.story].share
    run = Run(Case(of.scenario, seed=seed), simulation, told, ledger, {})
    foretold = [foreseen(run, uuid) for uuid in run.uuids]
    return sum(each.get(name, 0.0) for each in foretold for name in of.names) / (len(foretold) * run.end / SECOND)


def estimates(*, seeds: Sequence[int] = SEEDS, subjects: Sequence[int] = range(len(SUBJECTS))) -> Measured:
    """Examine all, on every core of the machine."""
    every = list(product(subjects, range(len(CONDITIONS)), seeds))
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(examined, *zip(*every, strict=True), chunksize=4))
    return Measured(
        rows=list(rows(found)), tables=[table(found), losers(found), mechanisms.table()], curves=curves(found)
    )


def errors(found: Sequence[Found]) -> dict[tuple[int, int], list[float]]:
    """In points of a hundred of paid time, by subject and condition; one a seed."""
    by: dict[tuple[int, int], list[float]] = {}
    for one in found:
        by.setdefault((one.subject, one.condition), []).append(100 * (one.booked - one.expected))
    return by


def rows(found: Sequence[Found]) -> Iterator[Row]:
    """Conservation, and the error under each condition."""
    lost, seen = sum(one.lost for one in found), sum(one.readings for one in found)
    yield Row(
        group="estimates", what="Paid time that is in no leak, or in two", often=f"{len(found)} stories",
        median=f"{lost} ns", spread=f"{seen:,} readings", budget="<= 0 ns", met=lost == 0,
    )  # fmt: skip
    by = errors(found)
    for place, condition in enumerate(CONDITIONS):
        each = {subject: values for (subject, where), values in by.items() if where == place}
        sizes = sorted(abs(median(values)) for values in each.values())
        worst = max(each, key=lambda subject: abs(median(each[subject])))
        allowed = 1.0 if place == 0 else None
        yield Row(
            group="estimates", what=f"Error of a leak, {condition.name}: {condition.words}",
            often=f"{len(each)} leaks x {len(next(iter(each.values())))} seeds", median=f"{median(sizes):.2f} points",
            spread=f"largest {median(each[worst]):+.2f} ({SUBJECTS[worst].leak})",
            budget="" if allowed is None else f"<= {allowed:g} point, largest",
            met=None if allowed is None else abs(median(each[worst])) <= allowed,
        )  # fmt: skip


_EVIDENCE: Mapping[str, str] = {leak.name: leak.evidence for leak in LEAKS}


def table(found: Sequence[Found]) -> Table:
    """A line a leak, a column a condition."""
    by = errors(found)
    lines = []
    for place in dict.fromkeys(one.subject for one in found):
        of = SUBJECTS[place]
        share = median(one.expected for one in found if one.subject == place)
        cells = [_error(by[place, condition]) for condition in range(len(CONDITIONS))]
        lines.append(
            (of.leak, of.story.replace("_", " "), _EVIDENCE.get(of.leak, "measured"), f"{100 * share:.1f} %", *cells)
        )
    head = ("leak", "story", "evidence", "truth", *(condition.name for condition in CONDITIONS))
    about = "Error in points of a hundred of paid time: the median of the seeds, and the farthest from 0 if it differs."
    return Table(about=about, head=head, rows=tuple(lines))


def _error(values: Sequence[float]) -> str:
    middle, far = median(values), max(values, key=abs)
    return f"{middle:+.1f}" if f"{middle:+.1f}" == f"{far:+.1f}" else f"{middle:+.1f} ({far:+.1f})"


def losers(found: Sequence[Found]) -> Table:
    """Where a leak's time goes when it cannot be seen: the row that gains most, for errors of two points and more."""
    first = {(one.subject, one.seed): one for one in found if one.condition == 0}
    lines, said = [], set[tuple[int, int]]()
    for one in found:
        whole = first[one.subject, one.seed]
        missed = 100 * (whole.booked - one.booked)
        if missed < 2.0 or (one.subject, one.condition) in said:
            continue
        said.add((one.subject, one.condition))
        gains = {name: one.spent.get(name, 0.0) - whole.spent.get(name, 0.0) for name in LEAK_NAMES}
        for name in SUBJECTS[one.subject].names:
            gains.pop(name, None)
        winner = max(gains, key=gains.__getitem__)
        cells = (
            CONDITIONS[one.condition].name,
            SUBJECTS[one.subject].leak,
            f"{missed:.1f}",
            winner,
            f"{100 * gains[winner]:.1f}",
        )
        lines.append(cells)
    head = ("condition", "leak", "points it loses", "most of it goes to", "points that gains")
    about = (
        "What cannot be seen is not guessed. Where a leak loses two points or more, the time is booked here instead:"
    )
    return Table(about=about, head=head, rows=tuple(sorted(lines)))


# -- the picture --


def curves(found: Sequence[Found]) -> Curves:
    """Median errors, leak by condition."""
    by = errors(found)
    subjects = list(dict.fromkeys(one.subject for one in found))
    return {
        "leaks": [SUBJECTS[place].leak for place in subjects],
        "conditions": [condition.name for condition in CONDITIONS],
        "errors": [[median(by[place, condition]) for condition in range(len(CONDITIONS))] for place in subjects],
    }


def draw(figure: Figure, told: Curves) -> None:
    """A square a leak and condition: white is right, blue is booked too low, red too high."""
    axes = figure.subplots()
    errors_, limit = told["errors"], 20.0
    shown = axes.imshow(errors_, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.set_xticks(range(len(told["conditions"])), [name.replace(" ", "\n", 1) for name in told["conditions"]])
    axes.set_yticks(range(len(told["leaks"])), told["leaks"])
    axes.grid(visible=False)
    for y, line in enumerate(errors_):
        for x, error in enumerate(line):
            if abs(error) >= 0.5:
                axes.text(x, y, f"{error:+.0f}" if abs(error) >= 2 else f"{error:+.1f}", ha="center", va="center",
                          fontsize=8, color="white" if abs(error) > 12 else "black")  # fmt: skip
    title = "Noise and coarse figures cost little; what is not measured cannot be named"
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=12)
    figure.colorbar(shown, ax=axes, label="booked less true, points of paid time", extend="both", shrink=0.6)


ESTIMATES = Group(
    name="estimates",
    title="How far each leak is off",
    about=(
        "Every leak in a simulated story that has it, on an H100, as the core books it from eight kinds of sensors, "
        "against the share that was put into the story: by hand for the leaks of `gpu-efficiency leaks`, "
        "by an examiner's arithmetic of its own from the simulation's record for the rest "
        "(`tests/scenarios/twelve.py`, `physics.py`). Three seeds, none of which a test uses. Leaks that a program or "
        "an engine tells of are as good as its word, and hardly need a counter; estimates rest on counters, and `no "
        "word` shows what they find alone. The truth is what the rules should give: a hang counts from its 300th "
        "second (16.7 points of its story before that are not in it), a GPU is too large from the second hour on. The "
        "stories and the core are of the same authors, who share an idea of how GPUs behave: `make accuracy` asks a "
        "real board."
    ),
    measures=(
        "exporter/core", "exporter/simulate", "tests/scenarios/physics.py", "tests/scenarios/stage.py",
        "tests/scenarios/twelve.py",
    ),
    run=estimates,
    quick=lambda: estimates(seeds=(101,), subjects=(0, 9, 22)),
    pictures=(
        Picture(
            name="estimates", draw=draw, inches=(9.0, 7.6),
            words="Leaks by conditions: with noise, whole percents or 30-second readings errors stay small; without "
            "DRAM, SM or link counters, and with the driver's figures alone, leaks that need them are booked too low, "
            "and their time elsewhere.",
        ),
    ),
)  # fmt: skip
