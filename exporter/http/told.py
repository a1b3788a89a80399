"""What workloads say of themselves, as the JSON API has it: null for what was never said.

Owns these shapes and how a job's view becomes them. Refuses to judge, and to speak HTTP.
"""

from msgspec import Struct

from exporter.core.model import SECOND
from exporter.core.snapshot import JobView


class TrainingOut(Struct, frozen=True, kw_only=True):
    """What a training job reports. Tokens, samples and FLOPs are those of the GPUs here that its reports speak of."""

    run: str
    step: int | None
    steps: int
    rework_steps: int
    """Of the steps those that the run had made before."""
    epoch: float | None
    mfu: float | None
    """Over the last 5 minutes, by the job's own count, 0-1."""
    goodput: float | None
    """Of the run's time so far the share in steps that were new."""
    tokens: float
    padding_tokens: float
    samples: float
    model_flops: float
    gpu_seconds: float
    """GPU-seconds here that the reports speak of."""
    phase_seconds: dict[str, float]
    """Wall time by what the job did."""
    checkpoints: int
    restarts: int
    recovery_seconds: float
    bubble: float | None
    loss: float | None
    """null also while it is no number: see loss_events."""
    loss_events: dict[str, int]
    quality: float | None
    quality_name: str
    quality_target: float | None
    target_reached_at: float | None
    """Unix seconds."""


class LatencyOut(Struct, frozen=True, kw_only=True):
    """Seconds below which so many requests of the slowest replica stayed, at the last look."""

    p50: float
    p95: float
    p99: float


class ServingOut(Struct, frozen=True, kw_only=True):
    """What a job's serving engines say."""

    engine: str
    running: float | None
    waiting: float | None
    batch_fill: float | None
    kv_cache: float | None
    preemptions: float
    tokens: dict[str, float]
    draft_acceptance: float | None
    tokens_per_pass: float | None
    latency_seconds: dict[str, LatencyOut]
    """By kind: ttft, itl, queue, e2e."""


def training(job: JobView) -> TrainingOut | None:
    """None where the job has reported nothing."""
    told = job.progress
    if told is None:
        return None
    name, value, _, target = told.quality or ("", None, None, None)
    finite = told.loss is not None and abs(told.loss) < float("inf")
    return TrainingOut(
        run=told.run,
        step=told.step,
        steps=told.steps,
        rework_steps=told.rework_steps,
        epoch=told.epoch,
        mfu=job.counters.short_ratio("reported", "reportable"),
        goodput=told.goodput,
        tokens=told.tokens,
        padding_tokens=told.padding,
        samples=told.samples,
        model_flops=told.flops,
        gpu_seconds=told.gpu_time / SECOND,
        phase_seconds={phase: spent / SECOND for phase, spent in told.phases},
        checkpoints=told.checkpoints,
        restarts=told.restarts,
        recovery_seconds=told.recovery / SECOND,
        bubble=told.bubble,
        loss=told.loss if finite else None,
        loss_events=dict(told.events),
        quality=value,
        quality_name=name,
        quality_target=target,
        target_reached_at=None if told.target_at is None else told.target_at / SECOND,
    )


def serving(job: JobView) -> ServingOut | None:
    """None where no engine of the job was found."""
    said = job.service
    if said is None:
        return None
    return ServingOut(
        engine=said.engine,
        running=said.running,
        waiting=said.waiting,
        batch_fill=said.fill,
        kv_cache=said.kv_use,
        preemptions=said.preemptions,
        tokens=dict(said.tokens),
        draft_acceptance=said.acceptance,
        tokens_per_pass=said.per_pass,
        latency_seconds={one.kind: LatencyOut(p50=one.p50, p95=one.p95, p99=one.p99) for one in said.latencies},
    )
