"""Defines the work of a GPU (load, segment, cycle, stage), and how programs count it as training steps or requests.

Owns exact sums of a cycle over any interval. Knows what hardware does, not whether that is good or bad.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Literal, NamedTuple

from msgspec import Struct

from exporter.core.model import Latency, Parallel


class ReportingOptions(Struct, frozen=True, kw_only=True):
    """How the training processes of a job speak of themselves, whatever they do."""

    run: str
    """What the job and its restarts have in common."""
    alone: bool = False
    """Rank 0 speaks for the GPUs of the whole job; else each rank for its own."""
    every_ms: int = 2000
    """A report is made at the end of the first step that comes so long after the last."""
    times: tuple[str, ...] = ("data", "communication")
    """Phases within a step that the program measures: told even where they take no time."""
    recompute: str = "none"
    dtype: str = "bf16"
    parallel: Parallel | None = None
    bubble: float | None = None
    """What the pipeline's schedule leaves empty of each step, 0-1, as the program works it out."""


class StepCounts(Struct, frozen=True, kw_only=True):
    """One time round of a cycle as a training program counts it, on one rank.

    Without `after` no optimiser step is made: a spell of one phase, which is told when it begins and when it ends.
    """

    phases: tuple[str, ...]
    """Of each segment of the cycle, one of model.PHASES."""
    model_flops: float = 0.0
    """Of the model's own passes, on one GPU."""
    hardware_flops: float | None = None
    """With those that are computed twice; None: the program does not count them."""
    tokens: float = 0.0
    """On one GPU."""
    padding: float = 0.0
    after: int | None = None
    """The last optimiser step that had ended before."""
    highest: int | None = None
    """How far the run had come, as the process has read in its checkpoint."""
    resumes: int | None = None
    """The step that it goes on from, as a process that has read its checkpoint knows when the spell ends."""
    restart: bool = False
    """The first word of a process that begins anew."""
    checkpoints: int = 0
    """Made by the end of it."""
    within: bool = False
    """A wait in the midst of steps: nothing is said until the next of them has ended, and then how long it was."""


class ServingCounts(Struct, frozen=True, kw_only=True):
    """One time round of a cycle as a serving engine counts it, of all its GPUs together; gauges hold throughout."""

    engine: str = "vllm"
    running: int = 0
    waiting: int = 0
    slots: int = 256
    kv_use: float = 0.0
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0
    recomputed_tokens: float = 0.0
    drafted_tokens: float = 0.0
    accepted_tokens: float = 0.0
    passes: float = 0.0
    flops: float = 0.0
    """On one GPU."""
    bytes: float = 0.0
    """To and from one GPU's memory."""
    inter_token_seconds: float | None = None
    calm_inter_token_seconds: float | None = None
    latencies: tuple[Latency, ...] = ()


Mechanism = Literal["computing", "exchanging", "copying", "waiting_input", "waiting_peer", "idle"]

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
FOREVER_MS = 10 * 365 * 24 * HOUR_MS
"""Longer than any simulation: the length of a stage that has no end of its own."""


class Load(NamedTuple):
    """How far each unit is in use while this goes on: shares of the whole board, and bytes per second.

    `engine` is 1 while a kernel is resident: a copy engine at work does not count (DCGM field 1001).
    """

    engine: float = 0.0
    sm: float = 0.0
    occupancy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0
    fp64: float = 0.0
    fp32: float = 0.0
    fp16: float = 0.0
    pcie_tx: float = 0.0
    pcie_rx: float = 0.0
    peer_tx: float = 0.0
    """To other GPUs, over NVLink or, where there is none, PCIe."""
    peer_rx: float = 0.0
    integer: float = 0.0
    """Integer pipes: they draw power, and no counter shows them."""


class Segment(NamedTuple):
    """One thing after another: `ms` milliseconds of one load."""

    ms: float
    load: Load
    mechanism: Mechanism


class Cycle:
    """Segments that repeat without end, as a training step or a decode iteration does.

    Positions and lengths are milliseconds from the first time round.
    """

    __slots__ = ("_sums", "ms", "segments")

    def __init__(self, *segments: Segment) -> None:
        self.segments = segments
        self.ms = sum(segment.ms for segment in segments)
        self._sums = [Load()]
        for segment in segments:
            self._sums.append(add_loads(self._sums[-1], segment.load, weight=segment.ms))

    def integral(self, start: float, end: float) -> Load:
        """Sum loads times milliseconds over [start, end): exact for any interval, however long."""
        if len(self.segments) == 1:
            return add_loads(Load(), self.segments[0].load, weight=end - start)
        return add_loads(self._until(end), self._until(start), weight=-1.0)

    def mean(self) -> Load:
        """Give the mean load of one time round."""
        return Load(*[total / self.ms for total in self._sums[-1]])

    def share(self, mechanism: Mechanism) -> float:
        """Share of time this mechanism has."""
        return sum(segment.ms for segment in self.segments if segment.mechanism == mechanism) / self.ms

    def _until(self, position: float) -> Load:
        rounds, rest = divmod(position, self.ms)
        total = Load(*[rounds * value for value in self._sums[-1]])
        for segment, before in zip(self.segments, self._sums, strict=False):
            if rest <= segment.ms:
                return add_loads(add_loads(total, before), segment.load, weight=rest)
            rest -= segment.ms
        return add_loads(total, self._sums[-1])


def add_loads(left: Load, right: Load, *, weight: float = 1.0) -> Load:
    """Sum of two loads, unit by unit, the right one weighted."""
    return Load(*[a + weight * b for a, b in zip(left, right, strict=True)])


class Climate(Struct, frozen=True):
    """What the machine room imposes on a board, from outside its own power limit."""

    clock_cap_hz: float = float("inf")
    event_reasons: int = 0
    """Bits of NVML's `nvmlClocksEventReasons` that the cap sets."""
    inlet_kelvin: float = 0.0
    """How much warmer than usual the air comes in."""


NORMAL_CLIMATE = Climate()


class Stage(Struct, frozen=True):
    """A stretch of a job during which every rank repeats its own cycle.

    `cycles` and `climates` hold one entry for all ranks, or one a rank.
    """

    name: str
    ms: int
    cycles: tuple[Cycle, ...]
    memory: float = 0.0
    """Share of the board's memory the process holds, beyond the context itself."""
    program: str = "python"
    context: bool = True
    """Whether the process has a CUDA context: before that the driver does not list it."""
    climates: tuple[Climate, ...] = (NORMAL_CLIMATE,)
    step: StepCounts | None = None
    """What a training program would say of it; None: it says nothing."""
    service: ServingCounts | None = None
    """What a serving engine would answer meanwhile; None: nothing answers."""

    def cycle(self, rank: int) -> Cycle:
        """Give the cycle of one rank."""
        return self.cycles[rank] if len(self.cycles) > 1 else self.cycles[0]

    def climate(self, rank: int) -> Climate:
        """Give the climate of one rank."""
        return self.climates[rank] if len(self.climates) > 1 else self.climates[0]


Stages = Iterator[Stage]
Program = Callable[[Random], Stages]
"""What the ranks of a job do; called anew for each rank, with equal random numbers."""


def seeded_random(*key: object) -> Random:
    """Random numbers of their own for this key: the same on every run and machine, and no one else's."""
    return Random("/".join(map(str, key)))  # nosec B311  # noqa: S311  repeatable noise, not a secret


IDLE_CYCLE = Cycle(Segment(1000.0, Load(), "idle"))
"""No kernel and no copy."""


def absent(name: str, ms: int) -> Stage:
    """No process is there."""
    return Stage(name, ms, (IDLE_CYCLE,), context=False)
