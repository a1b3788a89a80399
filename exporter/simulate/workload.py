"""Defines the work of a GPU (load, segment, cycle, stage), and how programs count it as training steps or requests.

Describes hardware activity only, without classifying it.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Concatenate, Literal, NamedTuple, ParamSpec

from msgspec import Struct

from exporter.core.model import Latency, Parallel


class ReportingOptions(Struct, frozen=True, kw_only=True):
    """How the training processes of a job report."""

    run: str
    """Name that the job and its restarts share."""
    alone: bool = False
    """Whether rank 0 reports for the GPUs of the whole job; otherwise each rank reports for its own."""
    every_ms: int = 2000
    """Minimum interval of reports, which are sent at the end of a step."""
    times: tuple[str, ...] = ("data", "communication")
    """Phases within a step that the program measures; reported even if their time is 0."""
    recompute: str = "none"
    parallel: Parallel | None = None
    bubble: float | None = None
    """Pipeline bubble as a share of each step, 0-1, as the program computes it from its schedule."""


class StepCounts(Struct, frozen=True, kw_only=True):
    """What a training program counts on one rank in one cycle.

    Without `after` it is not an optimiser step but a single phase, reported when it begins and when it ends.
    """

    phases: tuple[str, ...]
    """Phase of each segment of the cycle, one of model.PHASES."""
    model_flops: float = 0.0
    """FLOPs of the model's own passes on one GPU."""
    hardware_flops: float | None = None
    """FLOPs including recomputation; None if the program does not count them."""
    tokens: float = 0.0
    """Tokens on one GPU."""
    padding: float = 0.0
    """Padding tokens among them."""
    after: int | None = None
    """The last optimiser step completed before."""
    highest: int | None = None
    """The highest step that the run had reached, as read from its checkpoint."""
    resumes: int | None = None
    """The step from which training resumes, as read from its checkpoint; reported at the end of the phase."""
    restart: bool = False
    """Whether this begins with the first report of a restarted process."""
    checkpoints: int = 0
    """Checkpoints written by its end."""
    within: bool = False
    """Whether it is a wait between steps, whose duration is reported only with the next step."""


class ServingCounts(Struct, frozen=True, kw_only=True):
    """What a serving engine counts in one cycle on all its GPUs together; gauges are constant."""

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
    """FLOPs on one GPU."""
    bytes: float = 0.0
    """Bytes read from and written to one GPU's memory."""
    inter_token_seconds: float | None = None
    calm_inter_token_seconds: float | None = None
    latencies: tuple[Latency, ...] = ()


Mechanism = Literal["computing", "exchanging", "copying", "waiting_input", "waiting_peer", "idle"]

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
FOREVER_MS = 10 * 365 * 24 * HOUR_MS
"""Ten years, longer than any simulation: the length of a stage without end."""


class Load(NamedTuple):
    """Utilization of each unit of a board as a share of its capacity, and traffic in bytes per second.

    `engine` is 1 while a kernel is resident; copy engines do not count (DCGM field 1001).
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
    """Integer pipes: they draw power, but no performance counter measures them."""


class Segment(NamedTuple):
    """`ms` milliseconds of one load."""

    ms: float
    load: Load
    mechanism: Mechanism


class Cycle:
    """Segments that repeat without end, such as a training step or a decode iteration.

    Positions are milliseconds from the start of the first repetition.
    """

    __slots__ = ("_sums", "ms", "segments")

    def __init__(self, *segments: Segment) -> None:
        self.segments = segments
        self.ms = sum(segment.ms for segment in segments)
        self._sums = [Load()]
        for segment in segments:
            self._sums.append(add_loads(self._sums[-1], segment.load, weight=segment.ms))

    def integral(self, start: float, end: float) -> Load:
        """Integrate the load over [start, end), in load times milliseconds: exact for any interval."""
        if len(self.segments) == 1:
            return add_loads(Load(), self.segments[0].load, weight=end - start)
        return add_loads(self._until(end), self._until(start), weight=-1.0)

    def mean(self) -> Load:
        """Return the mean load over one cycle."""
        return Load(*[total / self.ms for total in self._sums[-1]])

    def share(self, mechanism: Mechanism) -> float:
        """Return the share of time spent in this mechanism."""
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
    """Return `left` plus `weight` times `right`, unit by unit."""
    return Load(*[a + weight * b for a, b in zip(left, right, strict=True)])


class Climate(Struct, frozen=True):
    """External limits on a board: a clock cap beside its own power limit, and inlet air temperature."""

    clock_cap_hz: float = float("inf")
    event_reasons: int = 0
    """Bits of NVML's `nvmlClocksEventReasons` that the cap sets."""
    inlet_kelvin: float = 0.0
    """How much warmer than usual the inlet air is."""


NORMAL_CLIMATE = Climate()


class Stage(Struct, frozen=True):
    """A part of a job in which every rank repeats its own cycle.

    `cycles` and `climates` hold one entry for all ranks, or one per rank.
    """

    name: str
    ms: int
    cycles: tuple[Cycle, ...]
    memory: float = 0.0
    """Share of the board's memory that the process holds in addition to its CUDA context."""
    program: str = "python"
    context: bool = True
    """Whether the process has a CUDA context; without one the driver does not list it."""
    climates: tuple[Climate, ...] = (NORMAL_CLIMATE,)
    step: StepCounts | None = None
    """What a training program reports of it; None if it does not report."""
    service: ServingCounts | None = None
    """What a serving engine's metrics contain meanwhile; None if it does not respond."""

    def cycle(self, rank: int) -> Cycle:
        """Return the cycle of one rank."""
        return self.cycles[rank] if len(self.cycles) > 1 else self.cycles[0]

    def climate(self, rank: int) -> Climate:
        """Return the climate of one rank."""
        return self.climates[rank] if len(self.climates) > 1 else self.climates[0]


Stages = Iterator[Stage]
Program = Callable[[Random], Stages]
"""Returns the stages of a job; called for each rank, with equal random numbers."""
Arguments = ParamSpec("Arguments")


def as_program(stages: Callable[Concatenate[Random, Arguments], Stages]) -> Callable[Arguments, Program]:
    """Turn a generator of stages into a function that returns a Program: the generator without its random numbers."""
    return lambda *args, **options: lambda rng: stages(rng, *args, **options)


def seeded_random(*key: object) -> Random:
    """Return a random generator seeded with this key, the same on every run and machine."""
    return Random("/".join(map(str, key)))  # nosec B311  # noqa: S311  repeatable noise, not a secret


IDLE_CYCLE = Cycle(Segment(1000.0, Load(), "idle"))
"""A cycle without kernels and copies."""


def absent(name: str, ms: int) -> Stage:
    """Build a stage without a process."""
    return Stage(name, ms, (IDLE_CYCLE,), context=False)
