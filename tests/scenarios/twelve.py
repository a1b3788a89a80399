"""What each story of the twelve leaks must cost, worked out by hand beside it; and how such a story is played.

Owns the examiner's figures: shares of all paid time on an H100, after docs/accounting.md, from the figures of
kernels, programs and engines in `exporter.simulate.leak_scenarios`. Imports nothing of the core but its books. Refuses
to round in anyone's favour: each row says what it may be off by, and why.

Common to all: a program's first 20 s are start-up, and so is its waiting until 10 s of work are done (a server: 1 s);
t, s, d are shares of one second, d of the DRAM ceiling, of which the busiest pipes' 0.35 are taken off (0.35/0.92 =
0.38 of the ceiling) and the rest goes by 0.96; clocks are at the reference, seen up to 15 MHz low in one reading of
five (0.16 % of tensor time, which is throttled).
"""

from collections.abc import Mapping
from typing import NamedTuple

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Observation
from exporter.core.pipeline import advance
from exporter.simulate.plan import Scenario
from exporter.simulate.simulation import Simulation, simulate


class Expected(NamedTuple):
    """One leak: its share in its own story and in the twin's, and what they may be off by."""

    share: float
    error: float
    why: str
    gpus: int = 1
    twin_gpus: int = 1
    floor: float = 0.0
    """The twin has at most so much: 0 where a program, an engine or the scheduler says so; else of an estimate."""
    leak: str = ""
    """The row of LEAKS; empty: as the story."""
    period: float = 5.0


EXPECTED: Mapping[str, Expected] = {
    "memory_bound": Expected(
        (0.6 - 0.38 * 0.24) / 0.96 * 0.908 * 1180 / 1200, 0.005,
        "400 ms of products (t 0.6, s 0.92, d 0.15) and 600 ms of copies (d 0.9, s 0.9) a step: t 0.24, d 0.06 + 0.54, "
        "s 0.368 + 0.54. Twin: 60 ms of fused kernels: d 0.17 is less than the tensor cores' 0.38 x 0.52",
        floor=0.001,
    ),
    "low_parallelism": Expected(
        0.668 * 1180 / 1200, 0.005,
        "300 ms of products (s 0.92) and 700 ms on a twelfth of the SMs (s 0.08): s 0.332. Twin: 40 ms on 0.9 of them: "
        "0.0824 of 400 s in 420",
        floor=0.08,
    ),
    "idle_allocation": Expected(
        (2 * 1200 + 880) / 4800, 0.0025,
        "two of four GPUs free for 1,200 s, one a server nobody asks from 320 s on. A poll takes 5 s, twice 5 s of "
        "4,800. Twin: the same server is taken down at 320 s, and the GPU given on",
        gpus=4, twin_gpus=2,
    ),
    "oversized_allocation": Expected(
        7200 / 10_800 * 6 / 7, 0.005,
        "s 0.06, d 0.02 and 9 % of the memory fit 1g, 1/7 of the GPU; of every second 0.97 is lost, so all 6/7 of it, "
        "from the second hour on. One reading of 60 s in 10,800. Twin: seven need 57 % of the memory, and no slice",
        gpus=7, period=60.0,
    ),
    "host_overhead": Expected(
        7 / 12 * 1180 / 1200, 0.005,
        "5 ms of kernel (s/g 0.4), 7 ms until the next; told from the job's first report of its phases on, 20 s. "
        "Twin: 0.02 ms between the same kernels, g above 0.99",
    ),
    "hung": Expected(
        900 / 1800, 0.003,
        "stuck at 600 s, hung 300 s later, by the owner's limit, all ranks, to the end. One reading of 5 s. Twin: 580 "
        "steps and no more",
        gpus=4, twin_gpus=4,
    ),
    "failure_recovery": Expected(
        4 * 170 / 1200, 0.006,
        "four restores of 170 s; the 10 s before each, while no process is there, nobody explains. 2 s of lag each. "
        "Twin: 460 steps without a failure",
        gpus=2, twin_gpus=2,
    ),
    "checkpoint": Expected(
        6 * 96 / 1200, 0.01,
        "six times 96 s on both GPUs, at 1.2 GB/s: below what the hardware's own estimate asks; rank 0 says it for "
        "all. 2 s of lag each. Twin: written behind the steps",
        gpus=2, twin_gpus=2,
    ),
    "rework": Expected(
        0.65 * 560 / 1200, 0.01,
        "steps 21 to 300 made three times, each a second of t 0.65. 4 s of lag at six edges, 24 s x 0.65 of 1,200 at "
        "most. Twin: no step is made twice",
        gpus=2, twin_gpus=2,
    ),
    "exposed_communication": Expected(
        0.6 * 1180 / 1200, 0.005,
        "600 of 1,000 ms in an exchange, told by the program. 2 s of lag. Twin: the bytes go behind the products, and "
        "the program says that it waits for none",
        gpus=4, twin_gpus=4,
    ),
    "pipeline_bubble": Expected(
        3 / 7 * 1180 / 1200, 0.005,
        "4 stages, 4 microbatches: (4 - 1) / (4 + 4 - 1) of every step, told by the schedule. Twin: zero-bubble",
        gpus=4, twin_gpus=4,
    ),
    "recomputation": Expected(
        0.8 / 4 * 1180 / 1200, 0.005,
        "t 0.8, of which a fourth is the second forward pass: MFU 0.6. Twin: 750 ms a step, nothing twice",
    ),
    "kv_cache_wait": Expected(
        0.6 * 1180 / 1200, 0.006,
        "600 of 1,000 ms the GPU waits for swapped blocks, KV use 0.99, 40 in the queue. One poll of 5 s. Twin: no "
        "swaps",
    ),
    "kv_cache_pressure": Expected(
        (33_840 + 180) / 60_000 * 20_000 / 34_020 * 1180 / 1200, 0.006,
        "34,020 tokens a second go through the model, t 0.567; 20,000 of them again. Twin: none again",
    ),
    "prefill_decode_interference": Expected(
        (1 - 1400 / 60 / 75) * 2 / 3 * 1180 / 1200, 0.006,
        "1,400 tokens in 75 ms: t 0.311; a token comes every 75 ms instead of 25: 2/3 of the slack. Twin: prompts are "
        "read on other GPUs",
        twin_gpus=3,
    ),
    "batching": Expected(
        (1 - 16 / 60 / 30) * 48 / 64 * 1180 / 1200, 0.006,
        "16 tokens in 30 ms: t 0.009; 48 of 64 slots empty, 40 in the queue. The pauses of the first minute, "
        "0.05 x 60 s, may be taken for loading. Twin: 64 of 64",
    ),
    "rejected_speculation": Expected(
        0.6 * 560 / 720 * 1180 / 1200, 0.006,
        "720 tokens in 20 ms: t 0.6; 640 drafted, 80 right: 560 of 720 for nothing. Twin: no drafts",
    ),
    "unused_drafts": Expected(
        (0.95 - 0.38 * 0.02) / 0.96 * 0.7 * 1180 / 1200, 0.005,
        "8 tokens in 10 ms, d 0.95, s 0.7, FP32 0.02. Twin: as much of it, but three times the tokens",
        floor=1.0, leak="memory_bound",
    ),
    "data_stall": Expected(
        0.6 * (1180 - 2) / 1200, 0.005,
        "600 of 1,000 ms until the batch is there, told by the program; its first step ends the start-up. 2 s of lag. "
        "Twin: it always is",
    ),
    "padding": Expected(
        0.75 * 0.5 * 1180 / 1200, 0.006,
        "half of the tokens at t 0.75. Twin: none; what is left is the difference of two clocks, seen and counted",
        floor=0.005,
    ),
}  # fmt: skip
ADVICE = 0.5 * (0.95 - 0.38 * 0.02) / 0.96 * 0.7 * 1180
"""GPU-seconds that drafts might save in `unused_drafts`: half of decode's memory-bound time (E)."""


class Played(NamedTuple):
    """A story and its books at the end."""

    simulation: Simulation
    observations: tuple[Observation, ...]
    ledger: Ledger

    @property
    def paid(self) -> int:
        """GPU-nanoseconds."""
        return sum(sum(gpu.book.parts) for gpu in self.ledger.gpus.values())

    def spent(self) -> dict[str, int]:
        """GPU-nanoseconds by leak, of the whole node."""
        books = [gpu.book.parts for gpu in self.ledger.gpus.values()]
        return dict(zip(LEAK_NAMES, map(sum, zip(*books, strict=True)), strict=True))

    def share(self, *names: str) -> float:
        """Of all paid time."""
        spent = self.spent()
        return sum(spent[name] for name in names) / self.paid

    def hours(self) -> dict[str, float]:
        """GPU-hours by leak."""
        return {name: part / SECOND / 3600 for name, part in self.spent().items()}


def listened(
    story: str,
    stories: Mapping[str, Scenario],
    *,
    gpus: int,
    period: float,
    seed: int = 1,
    duration: float | None = None,
) -> Played:
    """Play a story of a table to its end."""
    simulation = simulate(
        story, stories=stories, seed=seed, gpus=gpus, period_seconds=period, duration_seconds=duration
    )
    observations = tuple(simulation.observations)
    ledger = Ledger()
    for observation in observations:
        advance(ledger, observation)
    return Played(simulation, observations, ledger)
