"""Hand-made job records: 2 GPUs for an hour at 2 USD, half of it useful, easy to add up."""

from typing import Any

from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobSample
from exporter.core.model import Owner, Parallel
from exporter.core.progress import WALL_TIME_PHASES, TrainingView
from exporter.core.serving import ServingView

BEGIN = 1_767_225_600.0
HOUR = 3600 * 1_000_000_000
"""Convert to nanoseconds."""
_STATEMENT = JobRecord(
    node="n1",
    life="a",
    owner=Owner(job_id="7", user="ada", account="nlp", name="train"),
    start=BEGIN,
    end=BEGIN + 3600,
    running=False,
    paid=2 * HOUR,
    parts={"useful": HOUR, "data_stall": HOUR // 2, "memory_bound": HOUR // 2},
    energy={"useful": 1.8e6, "data_stall": 0.6e6, "memory_bound": 1.2e6},
    money={"USD": 4.0},
    gpus={"GPU-a": "0", "GPU-b": "1"},
    models=("NVIDIA H100 80GB HBM3",),
    whole_gpus=2.0,
)
_PROGRESS = TrainingView(
    run="r", step=100, steps=100, rework_steps=10, epoch=None, world=2, flops=1e18, hardware_flops=1.25e18,
    tokens=72_000.0, padding=7_200.0, samples=720.0, gpu_time=2 * HOUR,
    phases=tuple(
        (name, HOUR // 10 * {"compute": 6, "data": 2, "checkpoint": 2}.get(name, 0)) for name in WALL_TIME_PHASES
    ),
    goodput=0.6, checkpoints=4, restarts=2, recovery=240 * 1_000_000_000, bubble=None,
    ranks=(("0", 1.0, 0.9), ("1", 1.0, 0.6)), loss=2.5, loss_spread=None,
    events=(("spike", 3), ("not_finite", 0), ("rollback", 0)), quality=("accuracy", 0.7, 0.2, 0.6),
    target_at=round((BEGIN + 1800) * 1e9), parallel=Parallel(),
)  # fmt: skip
_SERVICE = ServingView(
    engine="vllm", tokens=(("generated", 3600.0), ("drafted", 1000.0), ("accepted", 600.0)), preemptions=5.0,
    running=8.0, waiting=2.0, fill=0.5, kv_use=0.9, acceptance=0.6, per_pass=1.5, latencies=(), bytes_per_second=None,
    undrafted=HOUR // 4,
)  # fmt: skip


def stated(**changes: Any) -> JobRecord:
    return replace(_STATEMENT, **changes)


def owner(**changes: Any) -> Owner:
    return replace(_STATEMENT.owner, **changes)


def trained(**changes: Any) -> TrainingView:
    return replace(_PROGRESS, **changes)


def serves(**changes: Any) -> ServingView:
    return replace(_SERVICE, **changes)


def sample(minute: float, paid: float, *, useful: float = 0.0, joules: float = 0.0) -> JobSample:
    """Build a sample at a minute of the run: GPU-seconds, all of them observed, occupied and computing."""
    return JobSample(BEGIN + 60 * minute, paid, paid, paid, paid, useful, joules)
