"""Plays a scenario to the end and keeps what an examiner needs: the story, the truth and the books.

Owns which size of each scenario is examined, and how the core's answers are read. Refuses to judge: expected
figures are worked out in `physics` and in the tests.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Observation, Reading
from exporter.core.pipeline import advance
from exporter.simulate.plan import GroundTruth
from exporter.simulate.simulation import Simulation, simulate
from tests.hidden import without

BOARDS = ("H100-SXM5-80GB", "A100-SXM4-80GB", "L40S")
SEEDS = (1, 2, 3)


class Size(NamedTuple):
    """How much of a scenario is played: as little as shows its rule."""

    gpus: int
    period: float
    """Seconds of each reading."""
    duration: float
    """Seconds, altogether."""


SIZES: dict[str, Size] = {
    "healthy_training": Size(2, 2, 1900),  # the checkpoint of the first half hour included
    "memory_bound_decode": Size(4, 5, 900),  # two GPUs together, two alone
    "input_starved_training": Size(2, 1, 900),  # its waits last seconds
    "zombie_notebook": Size(2, 10, 9000),
    "leaked_process": Size(4, 2, 1000),
    "deadlock": Size(4, 5, 1800),
    "straggler": Size(3, 5, 900),
    "throttled": Size(2, 5, 1500),
    "lost_gpu": Size(3, 5, 1500),
    "telemetry_outage": Size(2, 5, 1500),
    "copy_loop": Size(1, 5, 600),
    "large_gemm": Size(1, 5, 600),
    "spin_kernel": Size(2, 5, 600),
    "idle_context": Size(1, 20, 2400),
    "carpenter": Size(1, 60, 28_800),
}

Mood = tuple[int, str, str]
"""Since when (ns), state, reason."""


class Case(NamedTuple):
    """One scenario on one board with one seed; `missing` signals are taken away from the story."""

    scenario: str
    board: str = BOARDS[0]
    seed: int = SEEDS[0]
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.scenario, self.board, str(self.seed), *self.missing))


class Run(NamedTuple):
    """A case played to its end. Times are nanoseconds from 0, the beginning of every story."""

    case: Case
    simulation: Simulation
    observations: tuple[Observation, ...]
    ledger: Ledger
    moods: dict[str, list[Mood]]
    """By GPU, each state and reason it was seen in, in order."""

    @property
    def uuids(self) -> tuple[str, ...]:
        return self.simulation.uuids

    @property
    def period(self) -> int:
        return self.simulation.period_ms * SECOND // 1000

    @property
    def end(self) -> int:
        return self.observations[-1].at

    def readings(self, uuid: str) -> list[Reading]:
        return [r for o in self.observations for r in o.readings if r.uuid == uuid]

    def truth(self, uuid: str) -> list[GroundTruth]:
        return [entry for entry in self.simulation.truth if entry.uuid == uuid]

    def final(self, uuid: str) -> tuple[str, str]:
        """State and reason at the end."""
        return self.moods[uuid][-1][1:]

    def entered(self, uuid: str, state: str) -> int | None:
        """When the GPU first entered a state; None if it never did."""
        return next((since for since, name, _ in self.moods[uuid] if name == state), None)

    def book(self, uuid: str) -> dict[str, int]:
        """Nanoseconds by leak."""
        return dict(zip(LEAK_NAMES, self.ledger.gpus[uuid].book.parts, strict=True))


@lru_cache(maxsize=24)
def play(case: Case) -> Run:
    """Play a case; the last few stay in memory, for several tests look at one."""
    size = SIZES[case.scenario]
    simulation = simulate(
        case.scenario,
        seed=case.seed,
        board=case.board,
        gpus=size.gpus,
        period_seconds=size.period,
        duration_seconds=size.duration,
    )
    story = without(simulation.observations, signals=case.missing) if case.missing else simulation.observations
    observations = tuple(story)
    ledger, moods = fed(observations)
    return Run(case, simulation, observations, ledger, moods)


def fed(observations: Iterable[Observation]) -> tuple[Ledger, dict[str, list[Mood]]]:
    """A ledger that has seen all of this, and every mood its GPUs were in after each observation."""
    ledger = Ledger()
    moods: dict[str, list[Mood]] = {}
    for observation in observations:
        advance(ledger, observation)
        for uuid, gpu in ledger.gpus.items():
            seen = moods.setdefault(uuid, [])
            if not seen or seen[-1][1:] != (gpu.state.value, gpu.reason):
                seen.append((gpu.since, gpu.state.value, gpu.reason))
    return ledger, moods


def cases(*scenarios: str) -> list[Case]:
    """Return these scenarios, all if none is named, on every board, each board with a seed of its own."""
    pairs = list(zip(BOARDS, SEEDS, strict=True))
    return [Case(scenario, board, seed) for scenario in scenarios or tuple(SIZES) for board, seed in pairs]
