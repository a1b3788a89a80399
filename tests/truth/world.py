"""A node of GPUs with jobs on it, and the truth about where its time went.

All times of this interface are seconds since the world's beginning; inside tracks they are milliseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from random import Random

from tests.truth.boards import H100, Board, Condition
from tests.truth.causes import CAUSES, MEMORY_BOUND, OTHER_COMPUTE, THROTTLED, USEFUL
from tests.truth.loads import UNUSED, Load
from tests.truth.tracks import Integrals, Track

GPUS = 8


@dataclass(eq=False)
class Gpu:
    """One board of the node and all it does."""

    index: int
    uuid: str
    condition: Condition
    track: Track = field(default_factory=Track)
    memory: list[tuple[int, float]] = field(default_factory=list)
    """Bytes used, from a millisecond on."""

    @cached_property
    def pipe(self) -> str:
        """What its work computes with: the tensor cores, FP32 where these hardly work, or FP64 where that is most."""
        pipes = ("tensor", "fp64", "fp32")
        integrals = Integrals(self.track, lambda load: [getattr(load, pipe) for pipe in pipes])
        tensor, fp64, fp32 = (row[-1] for row in integrals.until((0.0, self.track.end)))
        if fp64 > max(tensor, fp32):
            return "fp64"
        return "fp32" if fp32 > 100 * tensor else "tensor"

    def rates(self, load: Load) -> list[float]:
        """Seconds per second by cause, in the order of CAUSES."""
        row, gained = dict.fromkeys(CAUSES, 0.0), 0.0
        active = getattr(load, self.pipe)
        if load.counts and active:
            ratio = self.condition.clock_ratio(load)
            row[USEFUL] = active * ratio
            row[THROTTLED] = active * max(0.0, 1.0 - ratio)
            gained = active * max(0.0, ratio - 1.0)
        lost = sum(share for _, share in load.losses)
        for cause, share in load.losses:
            row[cause] += share - gained * share / lost if lost else 0.0
        if load.counts and self.pipe != "tensor":
            row[OTHER_COMPUTE] += load.tensor
            _take(row, active)
        return list(row.values())


def _take(row: dict[str, float], amount: float) -> None:
    """What another pipe computes is a part of what kernels without tensor work do."""
    slack = {cause: row[cause] for cause in (MEMORY_BOUND, OTHER_COMPUTE)}
    for cause, share in slack.items():
        row[cause] -= amount * share / sum(slack.values()) if amount else 0.0


@dataclass(frozen=True)
class Job:
    """A job as its scheduler describes it."""

    job_id: str
    user: str = "user1"
    name: str = ""
    workload_class: str = "batch"
    gpus: int = GPUS
    """Of the whole job, on all its nodes."""
    nodes: int = 1
    account: str = "team1"


@dataclass(frozen=True)
class Holding:
    """A job's hold on some of the node's GPUs; times in milliseconds, negative before the world's beginning."""

    job: Job
    gpus: tuple[int, ...]
    start: int = 0
    end: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class Hang:
    """A hang that deserves a page. Seconds."""

    job_id: str
    onset: float
    end: float | None
    """None: until the world ends."""
    culprit: int | None
    """Rank that caused it; None: no single one."""
    what: str


@dataclass(frozen=True)
class Zombie:
    """A GPU that is held without work. Seconds."""

    uuid: str
    start: float
    end: float | None


@dataclass(frozen=True)
class Progress:
    """What a training process knows about a stretch of its own work. Milliseconds."""

    job_id: str
    start: int
    end: int
    steps: int = 0
    flops: float = 0.0
    """Model FLOPs per GPU."""
    waits: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """By phase, milliseconds of each rank of this node."""
    communication: tuple[float, ...] = ()
    """Milliseconds that each rank spent in exposed communication."""
    phase: str = ""
    """Set for a stretch outside the steps."""


@dataclass(frozen=True)
class Served:
    """What a server knows about a stretch of its own work. Milliseconds; counts are totals of its GPUs."""

    job_id: str
    start: int
    end: int
    running: float
    waiting: float
    slots: float
    generated: float
    prompted: float
    gpus: tuple[int, ...]


@dataclass(eq=False)
class World:
    """Everything true about a node for some time."""

    name: str
    seed: int
    milliseconds: int
    gpus: list[Gpu]
    holdings: list[Holding] = field(default_factory=list)
    hang: Hang | None = None
    zombies: list[Zombie] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    dtype: str = ""
    one_reporter: bool = False
    """Rank 0 reports for all GPUs of its job on the node; else each rank reports for its own."""

    @property
    def seconds(self) -> float:
        """Length of the world."""
        return self.milliseconds / 1e3

    def random(self, purpose: str) -> Random:
        """Return a generator of random numbers that depends on the world and the purpose alone."""
        return Random(f"{self.name}:{self.seed}:{purpose}")  # noqa: S311  noise, no secret

    def finish(self) -> "World":
        """Fill up with unused time, cut off the excess, and return the world."""
        for gpu in self.gpus:
            gpu.track.until(self.milliseconds, UNUSED)
            gpu.track.trim(self.milliseconds)
        self.progress = [p for p in self.progress if p.end <= self.milliseconds]
        self.served = [s for s in self.served if s.end <= self.milliseconds]
        return self


def new_world(
    name: str,
    seed: int,
    seconds: float,
    *,
    gpus: int = GPUS,
    board: Board = H100,
    limit_watts: float | None = None,
    locked_hz: float | None = None,
) -> World:
    """Return a world with unused GPUs whose boards differ a little."""
    world = World(name=name, seed=seed, milliseconds=round(seconds * 1e3), gpus=[])
    rng = world.random("boards")
    for index in range(gpus):
        silicon = min(max(rng.gauss(1.0, 0.025), 0.93), 1.07)
        limit = board.limit_watts if limit_watts is None else limit_watts
        condition = Condition(board=board, limit_watts=limit, silicon=silicon, locked_hz=locked_hz)
        uuid = f"GPU-{rng.getrandbits(32):08x}-{seed & 0xFFFF:04x}-4000-8000-{index:012x}"
        world.gpus.append(Gpu(index=index, uuid=uuid, condition=condition))
    return world


@lru_cache(maxsize=8)
def _integrals(world: World) -> dict[str, Integrals]:
    return {gpu.uuid: Integrals(gpu.track, gpu.rates) for gpu in world.gpus}


def truth_windows(world: World, edges: Sequence[float]) -> dict[str, list[dict[str, float]]]:
    """Seconds by GPU and cause in each window between two neighbouring edges (seconds)."""
    milliseconds = [min(max(edge * 1e3, 0.0), world.milliseconds) for edge in edges]
    result: dict[str, list[dict[str, float]]] = {}
    for uuid, integrals in _integrals(world).items():
        rows = integrals.until(milliseconds)
        result[uuid] = [
            {cause: row[i + 1] - row[i] for cause, row in zip(CAUSES, rows, strict=True)}
            for i in range(len(milliseconds) - 1)
        ]
    return result


def truth_between(world: World, start: float, end: float) -> dict[str, dict[str, float]]:
    """Seconds by GPU and cause between two moments (seconds)."""
    return {uuid: rows[0] for uuid, rows in truth_windows(world, (start, end)).items()}


def truth(world: World) -> dict[str, dict[str, float]]:
    """Seconds by GPU and cause over the whole world; they add up to its length."""
    return truth_between(world, 0.0, world.seconds)


def doubts_between(world: World, start: float, end: float) -> dict[str, dict[tuple[str, str], float]]:
    """Seconds by GPU that are counted under the first cause, but for which the second is as fair an answer.

    A rank that polls in a collective because another one saves a checkpoint waits for a peer and for the checkpoint.
    """
    result: dict[str, dict[tuple[str, str], float]] = {}
    for gpu in world.gpus:
        keys = sorted({(a, b) for p in gpu.track.patterns for load in p.loads for a, b, _ in load.doubts})
        if not keys:
            result[gpu.uuid] = {}
            continue

        def rates(load: Load, keys: Sequence[tuple[str, str]] = keys) -> list[float]:
            found: Mapping[tuple[str, str], float] = {(a, b): share for a, b, share in load.doubts}
            return [found.get(key, 0.0) for key in keys]

        rows = Integrals(gpu.track, rates).until((start * 1e3, end * 1e3))
        result[gpu.uuid] = {key: row[1] - row[0] for key, row in zip(keys, rows, strict=True)}
    return result


def hang_of(world: World) -> Hang | None:
    """Return the hang that deserves a page, if there is one."""
    return world.hang


def is_zombie(world: World, uuid: str, at: float) -> bool:
    """Whether the GPU is held without any work to come at a moment (seconds)."""
    return any(z.uuid == uuid and z.start <= at and (z.end is None or at < z.end) for z in world.zombies)
