"""What estimates find alone: stories in which nobody says anything, against what the hardware was really doing.

Owns one table. The truth is the seconds of each mechanism in the simulation's own timeline (exchanging, waiting for
input, copying a save), with no rule between them and the figure: a rule that is a poor estimate shows here.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.group import Table
from benchmarks.truth.conditions import Condition, heard
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.pipeline import advance
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.plan import Scenario, timeline
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate

SEED = 101
PERIODS = (1.0, 10.0, 30.0)
"""Seconds of a reading."""
_SILENT = Condition(name="no word", words="nobody says anything")


class Mechanism(Struct, frozen=True, kw_only=True):
    """A leak that is estimated, a story that has it, and the mechanisms that it stands for."""

    leak: str
    story: str
    stories: Mapping[str, Scenario]
    seconds: float
    mechanisms: tuple[str, ...]
    why: str


MECHANISMS = (
    Mechanism(
        leak="exposed_communication", story="healthy_training", stories=SCENARIOS, seconds=3600,
        mechanisms=("exchanging", "waiting_peer"),
        why="traffic behind kernels, and SMs that healthy kernels leave empty, are taken for exchanges",
    ),
    Mechanism(
        leak="exposed_communication", story="exposed_communication", stories=LEAK_SCENARIOS, seconds=1200,
        mechanisms=("exchanging",), why="a link at a fifth of its pace: the estimate goes by bytes, not by time",
    ),
    Mechanism(
        leak="checkpoint", story="healthy_training", stories=SCENARIOS, seconds=3600, mechanisms=("copying (save)",),
        why="seen while a reading is not longer than the save",
    ),
    Mechanism(
        leak="data_stall", story="input_starved_training", stories=SCENARIOS, seconds=1800,
        mechanisms=("waiting_input", "copying"),
        why="its sign is an engine that stops and goes from one reading to the next: longer ones show a mean",
    ),
    Mechanism(
        leak="data_stall", story="data_stall", stories=LEAK_SCENARIOS, seconds=1200,
        mechanisms=("waiting_input", "copying"),
        why="waits of 0.6 s are shorter than a reading: never seen without a word",
    ),
)  # fmt: skip


def true_share(simulation: Simulation, mechanisms: tuple[str, ...]) -> float:
    """Share of all GPU time in which these were going on."""
    total, end = 0.0, simulation.duration_ms
    for slot in range(len(simulation.uuids)):
        for piece in timeline(simulation.plan, slot, board=simulation.board, seed=simulation.seed):
            if piece.start >= end:
                break
            if piece.job is None:
                continue
            saves = " (save)" if "checkpoint" in piece.name else ""
            shares = (s.ms / piece.cycle.ms for s in piece.cycle.segments if f"{s.mechanism}{saves}" in mechanisms)
            total += (min(piece.end, end) - piece.start) * sum(shares)
    return total / (end * len(simulation.uuids))


def found(one: Mechanism, period: float) -> tuple[float, float]:
    """Shares of paid time: what was really so, and what is booked."""
    simulation = simulate(
        one.story, stories=one.stories, seed=SEED, gpus=2, period_seconds=period, duration_seconds=one.seconds,
        preroll_seconds=0,
    )  # fmt: skip
    ledger = Ledger()
    for observation in heard(simulation, _SILENT):
        advance(ledger, replace(observation, reports=(), serving=()))
    place = LEAK_NAMES.index(one.leak)
    books = [gpu.book.parts for gpu in ledger.gpus.values()]
    return true_share(simulation, one.mechanisms), sum(book[place] for book in books) / sum(map(sum, books))


def table() -> Table:
    """A line a mechanism."""
    lines = []
    for one in MECHANISMS:
        shares = [found(one, period) for period in PERIODS]
        booked = (f"{100 * share:.1f} %" for _, share in shares)
        lines.append((one.leak, one.story.replace("_", " "), f"{100 * shares[0][0]:.1f} %", *booked, one.why))
    head = (
        "estimated leak",
        "story",
        "really so",
        *(f"booked, readings of {p:g} s" for p in PERIODS),
        "why they differ",
    )
    about = (
        "Estimates against mechanisms: the same kind of stories with every report and engine silent, and the truth in "
        "seconds of what the hardware did, not of what a rule should book. One seed, two H100s."
    )
    return Table(about=about, head=head, rows=tuple(lines))
