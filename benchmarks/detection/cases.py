"""The cases that the detectors are scored on: which story, what is true of it, and what is drawn by chance.

Owns labels and draws. What is true of a run is read from the simulation's own record (`Truth`), by the name of the
phase in which it begins: never from readings, nor from what was made of them.
"""

from collections.abc import Callable
from random import Random
from typing import Literal

from msgspec import Struct

from exporter.simulate.plan import GroundTruth, Scenario
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import PROFILED
from tests.lookalikes import LOOKALIKES

Detector = Literal["hang", "zombie", "no_process", "unowned", "lost"]
DETECTORS: tuple[Detector, ...] = ("hang", "zombie", "no_process", "unowned", "lost")
Twist = Literal["", "mig", "stray", "restart", "stale_owners", "dark_chief"]
"""What happens to the observations on their way: see `detection_play`."""

SXM = ("H100-SXM5-80GB", "H200-SXM", "A100-SXM4-80GB", "B200-SXM")
BOARDS = (*SXM, "L40S", "L4")
PERIODS = (1, 10, 30)
"""Seconds between two readings."""
NOISES = (0.5, 1.0, 2.0)
"""Of every sensor, times its usual error."""

FP = ("fp64_active", "fp32_active", "fp16_active")
HARMLESS: tuple[tuple[str, ...], ...] = (
    ("sm_clock_hz",), ("sm_occupancy",), ("temperature_celsius",), ("memory_used_bytes",), ("energy_joules",),
    ("gpu_utilization",), ("sm_active",), ("processes",), ("power_watts",), FP,
)  # fmt: skip
"""Fields without which a hang can still be confirmed; not power and the FP pipes both."""
ACQUITTING: tuple[tuple[str, ...], ...] = (
    ("dram_active",),
    ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"),
    ("pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"),
    (*FP, "power_watts"),
)
"""Fields that could acquit: without one of these a hang may be suspected, never confirmed."""
DRIVER_ONLY: tuple[tuple[str, ...], ...] = (PROFILED,)
"""A board, or a driver, that gives no performance counters: utilisation, power and heat are left."""
_KINDS = (((),), ((),), HARMLESS, ACQUITTING, DRIVER_ONLY)
"""What is missing, in equal parts: nothing (twice), something harmless, something that could acquit, all counters."""


class Label(Struct, frozen=True):
    """What is true from the first entry of the record on for which `when` holds; its job or GPU is the subject."""

    detector: Detector
    when: Callable[[GroundTruth], bool]
    window: float = 0.0
    """Seconds it must last before it counts: how long a job of this class may rest."""
    early: float = 0.0
    """Seconds that it may have rested before, in a pause that turned into this."""


class Case(Struct, frozen=True, kw_only=True):
    """One row: a story, with what is true of it. Whatever has no label is a look-alike for every detector."""

    name: str
    story: str
    labels: tuple[Label, ...] = ()
    gpus: int = 2
    nodes: int = 1
    boards: tuple[str, ...] = BOARDS
    periods: tuple[int, ...] = PERIODS
    whole: bool = False
    """Nothing is ever missing: the twist needs all fields."""
    twist: Twist = ""
    seconds: float | None = None
    """How much of the story is played; None: all of it."""
    grace: float = 0.0
    """Seconds that a hang may take longer, by the rule as it is written: a stray reading costs 19 times its length."""
    brief: bool = False
    """The hang is over before anything is due."""
    rests: bool = False
    """A GPU of the job that hangs rests, or the job has never worked: it might evaluate, save or load."""

    @property
    def deadlines(self) -> tuple[int, int]:
        """Seconds within which a hang must be suspected and confirmed, beside two sampling periods."""
        return (1500, 1800) if self.rests else (120, 600)

    @property
    def long(self) -> bool:
        """Hours of it: too dear to be played once more for each guard."""
        return (self.seconds or self.row.duration_seconds) > 3600

    @property
    def row(self) -> Scenario:
        """The story itself."""
        return {**SCENARIOS, **LOOKALIKES}[self.story]


class Draw(Struct, frozen=True):
    """What chance decided about one run."""

    board: str
    period: int
    noise: float
    missing: tuple[str, ...]
    start_ms: int
    """Offset of the story from the minute."""
    leftover: Literal["nothing", "zeros", "stale"]
    """What a profiler leaves."""


def draw(case: Case, seed: int) -> Draw:
    """The same for the same case and seed, on every machine."""
    rng = Random(f"{case.name}/{seed}")  # noqa: S311  a repeatable draw, not a secret
    return Draw(
        board=rng.choice(case.boards),
        period=rng.choice(case.periods),
        noise=rng.choice(NOISES),
        missing=() if case.whole else rng.choice(rng.choice(_KINDS)),
        start_ms=rng.randrange(60_000),
        leftover=rng.choice(("nothing", "zeros", "stale")),
    )


def _in(*phases: str) -> Callable[[GroundTruth], bool]:
    return lambda entry: entry.phase in phases


def _left_behind(entry: GroundTruth) -> bool:
    return entry.process and not entry.held and entry.engine_active > 0


def _hang(name: str, story: str, phase: str, **more: object) -> Case:
    return Case(name=name, story=story, labels=(Label("hang", _in(phase)),), **more)  # type: ignore[arg-type]


def _zombie(name: str, story: str, phase: str, window: float, **more: object) -> Case:
    return Case(name=name, story=story, labels=(Label("zombie", _in(phase), window),), **more)  # type: ignore[arg-type]


def _look(name: str, story: str = "", **more: object) -> Case:
    return Case(name=name, story=story or name, **more)  # type: ignore[arg-type]


_LOST = Label("lost", _in("off the bus"))
_GONE = _in("held without a process")
STUCK = (
    _hang("missing_rank", "missing_rank", "one rank never comes", gpus=4, rests=True),
    _hang("all_ranks_wait", "all_ranks_wait", "all ranks wait", gpus=3),
    _hang("deadlock_across_nodes", "deadlock_across", "all ranks wait", nodes=2),
    _hang("missing_node", "missing_node", "the other node never comes", nodes=2),
    _hang("nic_hang", "nic_hang", "the network card never answers"),
    _hang("one_gpu_hang", "one_gpu_hang", "a kernel waits for ever", gpus=1),
    _hang("startup_hang", "startup_hang", "the first collective never ends", rests=True),
    _hang("smoothed_hang", "smoothed_hang", "all ranks wait", boards=("B200-SXM",)),
    _hang("hang_beside_training", "hang_beside_training", "one rank never comes", gpus=4, rests=True),
    _hang("mig_hang", "one_gpu_hang", "a kernel waits for ever", twist="mig", whole=True, gpus=1,
          boards=("H100-SXM5-80GB", "A100-SXM4-80GB", "B200-SXM")),
    _hang("hang_with_stray_readings", "all_ranks_wait", "all ranks wait", twist="stray", whole=True, periods=(1,),
          grace=120.0),
    Case(name="lost_gpu", story="lost_gpu", labels=(Label("hang", _in("a peer is gone")), _LOST), gpus=3, seconds=1150,
         brief=True),
)  # fmt: skip
FORGOTTEN = (
    Case(
        name="forgotten_notebook",
        story="zombie_notebook",
        labels=(Label("zombie", _in("nobody is at the keyboard"), 7200, early=90),),
    ),
    _zombie("idle_context", "idle_context", "a context and no kernel", 1800),
    _zombie("keeper", "keeper", "resting", 1800),
    _zombie("server_for_nobody", "serving_for_nobody", "nobody asks", 18_000, gpus=1),
    Case(name="dead_program", story="dead_program", labels=(Label("zombie", _GONE, 1800), Label("no_process", _GONE))),
    Case(name="leaked_process", story="leaked_process", labels=(Label("unowned", _left_behind),), gpus=4),
)
WAITING = (
    _look("healthy_training"),
    _look("rank0_checkpoint", gpus=3),
    _look("rank0_long_checkpoint", gpus=3),
    _look("checkpoint_of_8_minutes", story="rank0_slow_checkpoint", gpus=3),
    _look("rank0_evaluation", gpus=3),
    _look("evaluation_elsewhere", nodes=2),
    _look("evaluation_on_a_dark_node", story="evaluation_elsewhere", nodes=2, twist="dark_chief"),
    _look("restart_in_checkpoint", story="rank0_long_checkpoint", twist="restart"),
    _look("pipeline_bubbles"),
    _look("collectives"),
    _look("straggler", gpus=3, seconds=1200),
    _look("autotune"),
    _look("long_first_step"),
    _look("throttled", seconds=1500),
)
SERVING = (
    _look("serving_lull", gpus=1),
    _look("idle_poller", gpus=1),
    _look("host_poller", gpus=1),
    _look("decode", story="memory_bound_decode", gpus=4, seconds=900),
    _look("few_requests"),
)
ONE_PLACE = (
    _look("fp64_in_registers", gpus=1),
    _look("fp32_in_registers", gpus=1),
    _look("integers_in_registers", gpus=1),
    _look("tiny_kernels", gpus=1),
    _look("thin_fp64", gpus=1),
    _look("thin_tensor", gpus=1),
    _look("pointer_chase", gpus=1),
    _look("host_gather", gpus=1),
    _look("small_puts", boards=SXM),
    _look("copy_loop", gpus=1),
    _look("mig_work", story="thin_fp64", gpus=1, twist="mig", whole=True, boards=("H100-SXM5-80GB", "A100-SXM4-80GB")),
)
RESTING = (
    _look("slow_loader"),
    _look("input_starved_training", seconds=1200),
    _look("used_notebook", gpus=1),
    _look("slow_image"),
    _look("two_parts"),
    _look("slow_epilog"),
    _look("agent_on_free_gpu"),
    _look("drained_gpus"),
    _look("profiler_attached"),
    _look("telemetry_outage", seconds=1500),
    _look("stale_owners", story="healthy_training", twist="stale_owners", seconds=1500),
)
CASES: tuple[Case, ...] = (*STUCK, *FORGOTTEN, *WAITING, *SERVING, *ONE_PLACE, *RESTING)
BEYOND = (_look("index_on_rank0", gpus=3),)
"""Healthy jobs that no rule on one node's counters can tell from a hang: played, told, and not scored."""
