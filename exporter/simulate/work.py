"""What a GPU is given to do: kernels, copies and waits, in the order a program issues them.

Owns the vocabulary of mechanisms (`Load`, `Segment`, `Cycle`, `Stage`) and the sum of a cycle over any
interval. Refuses names for what is good or bad about them: it knows what hardware does, not what anyone
thinks of it.
"""

from collections.abc import Iterator
from random import Random
from typing import Literal, NamedTuple

from msgspec import Struct

from exporter.simulate.words import Service, Step

Mechanism = Literal["computing", "exchanging", "copying", "waiting_input", "waiting_peer", "idle"]
MECHANISMS: tuple[Mechanism, ...] = (
    "computing",
    "exchanging",
    "copying",
    "waiting_input",
    "waiting_peer",
    "idle",
)

FOREVER_MS = 10 * 365 * 86_400_000
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
            self._sums.append(add(self._sums[-1], segment.load, weight=segment.ms))

    def integral(self, start: float, end: float) -> Load:
        """Sum loads times milliseconds over [start, end): exact for any interval, however long."""
        if len(self.segments) == 1:
            return add(Load(), self.segments[0].load, weight=end - start)
        return add(self._until(end), self._until(start), weight=-1.0)

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
                return add(add(total, before), segment.load, weight=rest)
            rest -= segment.ms
        return add(total, self._sums[-1])


def add(left: Load, right: Load, *, weight: float = 1.0) -> Load:
    """Sum of two loads, unit by unit, the right one weighted."""
    return Load(*[a + weight * b for a, b in zip(left, right, strict=True)])


class Climate(Struct, frozen=True):
    """What the machine room imposes on a board, from outside its own power limit."""

    clock_cap_hz: float = float("inf")
    event_reasons: int = 0
    """Bits of NVML's `nvmlClocksEventReasons` that the cap sets."""
    inlet_kelvin: float = 0.0
    """How much warmer than usual the air comes in."""


CALM = Climate()


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
    climates: tuple[Climate, ...] = (CALM,)
    step: Step | None = None
    """What a training program would say of it; None: it says nothing."""
    service: Service | None = None
    """What a serving engine would answer meanwhile; None: nothing answers."""

    def cycle(self, rank: int) -> Cycle:
        """Give the cycle of one rank."""
        return self.cycles[rank] if len(self.cycles) > 1 else self.cycles[0]

    def climate(self, rank: int) -> Climate:
        """Give the climate of one rank."""
        return self.climates[rank] if len(self.climates) > 1 else self.climates[0]


Stages = Iterator[Stage]


def dice(*key: object) -> Random:
    """Random numbers of their own for this key: the same on every run and machine, and no one else's."""
    return Random("/".join(map(str, key)))  # nosec B311  # noqa: S311  repeatable noise, not a secret


NOTHING = Cycle(Segment(1000.0, Load(), "idle"))
"""No kernel and no copy."""
