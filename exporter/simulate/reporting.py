"""Produces training reports and serving-engine polls of simulated programs, and adds counts to existing programs.

Decides when a report is made and what it counts. Does not change the simulated hardware activity.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import takewhile
from math import ceil, floor
from random import Random
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import MS, ServingReport, TrainingReport
from exporter.simulate.boards import BoardModel
from exporter.simulate.plan import Plan, SimulatedJob, TimelineInterval, clock_ratio, timeline
from exporter.simulate.stages import FLOPS_PER_TOKEN, TOKENS_PER_MS, latencies
from exporter.simulate.workload import (
    Mechanism,
    Program,
    ReportingOptions,
    Segment,
    ServingCounts,
    Stage,
    Stages,
    StepCounts,
    as_program,
)

_FILLED = 0.92
"""Share of tensor-core work that is useful; the rest is lost in partially filled tiles (an estimate)."""
_RECOMPUTED = 0.04
"""Share of a step's FLOPs for recomputing attention (Korthikanti et al. 2022: 2 to 4 %)."""
_PADDED = 0.03
"""Share of padding tokens with packed sequences."""
_PHASE_OF_STAGE = {
    "weights are loaded": "startup",
    "kernels are compiled": "startup",
    "waiting for input": "data",
    "input is copied in": "data",
    "a checkpoint is written": "checkpoint",
}
_PHASE_OF_MECHANISM: dict[Mechanism, str] = {"computing": "compute", "exchanging": "communication", "idle": "compute"}
_KV_SHARE = 0.011
"""Share of the KV cache per request: some 4,500 of 420,000 tokens."""
_CACHED = 30.0
"""Prompt tokens found in the prefix cache per token that is not: a chat resends the whole conversation."""
_TTFT = 0.004
"""Seconds to the first token, per request in the batch."""
_STEP_ROUNDING = 1e-6
"""Tolerance for binary rounding, in steps."""


@as_program
def reporting_trainer(rng: Random, program: Program, board: BoardModel) -> Stages:
    """Return the program with training counts, the same on every rank.

    Raises KeyError if a mechanism of a stage has no phase.
    """
    done = 0
    for stage in program(rng):
        step = _step(stage, board, after=done)
        yield replace(stage, step=step)
        if step is not None and step.after is not None:
            done += floor(stage.ms / stage.cycle(0).ms + _STEP_ROUNDING)


def _step(stage: Stage, board: BoardModel, *, after: int) -> StepCounts | None:
    if not stage.context:
        return None
    if stage.name in _PHASE_OF_STAGE:
        phase = _PHASE_OF_STAGE[stage.name]
        return StepCounts(phases=(phase,), checkpoints=int(phase == "checkpoint"), within=phase == "data")
    segments = stage.cycle(0).segments
    done = sum(_work(stage, segment, board) for segment in segments) * board.peak_flops / 1000
    own = (1 - _RECOMPUTED) * done
    tokens = own / FLOPS_PER_TOKEN
    return StepCounts(
        phases=tuple(_PHASE_OF_MECHANISM[segment.mechanism] for segment in segments),
        model_flops=own,
        hardware_flops=done,
        tokens=tokens,
        padding=_PADDED * tokens,
        after=after,
    )


def _work(stage: Stage, segment: Segment, board: BoardModel) -> float:
    """Return a segment's useful tensor work in milliseconds at the board's peak: independent of a slowed clock.

    The clock is constant within a cycle.
    """
    ratio = clock_ratio(board, stage.cycle(0).mean(), stage.climate(0))
    return _FILLED * ratio * segment.load.tensor * segment.ms


@as_program
def reporting_server(rng: Random, program: Program, board: BoardModel) -> Stages:
    """Return the program with serving counts while it decodes, for a server on one GPU."""
    for stage in program(rng):
        yield replace(stage, service=_service(stage, board)) if stage.name == "decoding" else stage


def _service(stage: Stage, board: BoardModel) -> ServingCounts:
    """Count one pass: a token for each request in the batch, and a part of a prompt."""
    cycle = stage.cycle(0)
    decode, prefill = cycle.segments[:2]
    generated, prompt = (TOKENS_PER_MS * _work(stage, segment, board) for segment in (decode, prefill))
    mean, seconds = cycle.mean(), cycle.ms / 1000
    return ServingCounts(
        running=round(generated),
        kv_use=_KV_SHARE * generated,
        prompt_tokens=prompt,
        cached_tokens=_CACHED * prompt,
        generated_tokens=generated,
        passes=1,
        flops=(generated + prompt) / TOKENS_PER_MS / 1000 * board.peak_flops,
        bytes=mean.dram * seconds * board.bandwidth,
        inter_token_seconds=seconds,
        calm_inter_token_seconds=seconds - prefill.ms / 1000,
        latencies=latencies(ttft=_TTFT * generated, itl=seconds, queue=0.02),
    )


POLL_MS = 5_000
"""Interval at which an engine is polled."""
_ROUNDING = 1e-6
"""Tolerance for binary rounding, in cycles."""
_COUNTS = (
    "preemptions", "prompt_tokens", "cached_tokens", "generated_tokens", "recomputed_tokens", "drafted_tokens",
    "accepted_tokens", "passes",
)  # fmt: skip


Waits = tuple[tuple[str, int], ...]
"""Phases since the last step that were not reported yet, with their milliseconds."""


class ReportingProcess(Struct, frozen=True):
    """A process that reports: its job, rank and GPU."""

    job: SimulatedJob
    options: ReportingOptions
    rank: int
    uuid: str

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole job."""
        return self.job.gpus or len(self.job.slots)


def reports(plan: Plan, uuids: Sequence[str], *, board: BoardModel, seed: int) -> Iterator[TrainingReport]:
    """Yield all reports of all processes on this node in order of time; times are ns from 0."""
    streams = [
        _process_reports(
            ReportingProcess(job, job.reporting, rank, uuids[slot]),
            _job_intervals(plan, job, slot, board=board, seed=seed),
        )
        for job in plan.jobs
        if job.reporting is not None
        for rank, slot in enumerate(job.slots)
        if rank == 0 or not job.reporting.alone
    ]
    return merge(*streams, key=lambda report: report.end)


def _job_intervals(
    plan: Plan, job: SimulatedJob, slot: int, *, board: BoardModel, seed: int
) -> Iterator[TimelineInterval]:
    """Yield a job's intervals on one of its GPUs until its allocation ends."""
    ours = takewhile(lambda interval: interval.start < job.end_ms, timeline(plan, slot, board=board, seed=seed))
    return (interval for interval in ours if interval.job is job)


def _process_reports(process: ReportingProcess, intervals: Iterable[TimelineInterval]) -> Iterator[TrainingReport]:
    """Yield all reports of one process."""
    since: int | None = None
    waits: Waits = ()
    for interval in intervals:
        step = interval.stage.step if interval.stage else None
        if step is None:
            since, waits = None, ()
            continue
        if step.within and since is not None:
            waits = (*waits, (step.phases[0], interval.end - interval.start))
            continue
        if since is None or step.after is None or step.restart:
            begun = interval.start if since is None or step.restart else since
            yield _opening_report(process, step, begun, interval.start)
            since, waits = interval.start, ()
        made = (
            _closing_report(process, step, interval)
            if step.after is None
            else _step_reports(process, step, interval, since=since, waits=waits)
        )
        for report in made:
            yield report
            since, waits = report.end // MS, ()


def _opening_report(process: ReportingProcess, step: StepCounts, since: int, now: int) -> TrainingReport:
    """Return the report at the start of a phase, or of the first steps; it covers the time since the last report."""
    return replace(
        _empty_report(process, since, now),
        phase=step.phases[0] if step.after is None else "",
        highest_step=step.highest,
        restart=step.restart,
    )


def _closing_report(
    process: ReportingProcess, step: StepCounts, interval: TimelineInterval
) -> Iterator[TrainingReport]:
    """Yield the report at the end of a phase; none if the process is killed in it."""
    if interval.complete:
        lasted = ((step.phases[0], (interval.end - interval.start) * MS),)
        yield replace(
            _empty_report(process, interval.start, interval.end),
            phases=lasted,
            step=step.resumes,
            highest_step=step.highest,
            checkpoints=step.checkpoints,
        )


def _step_reports(
    process: ReportingProcess, step: StepCounts, interval: TimelineInterval, *, since: int, waits: Waits = ()
) -> Iterator[TrainingReport]:
    """Yield a report each time it is due, and one of the remaining steps at the end of the interval.

    `waits` are the phases between `since` and the start of the interval.
    """
    after, length, before = step.after or 0, interval.cycle.ms, 0
    last = floor((interval.end - interval.origin) / length + _ROUNDING)
    while before < last:
        due = (since + process.options.every_ms - interval.origin) / length
        now = min(max(before + 1, ceil(due - _ROUNDING)), last)
        end = min(interval.end, ceil(interval.origin + now * length - _ROUNDING))
        if now == last and not interval.complete and end < since + process.options.every_ms:
            return  # killed before it was due
        phases = _phase_times(interval, step, process.options, since, end, waits=() if before else waits)
        report = replace(_empty_report(process, since, end), phases=phases)
        made = step.checkpoints if now == last and interval.complete else 0
        yield _with_counts(report, process, step, now - before, at=after + now, checkpoints=made)
        before, since = now, end


def _with_counts(
    report: TrainingReport, process: ReportingProcess, step: StepCounts, steps: int, *, at: int, checkpoints: int
) -> TrainingReport:
    total_steps = steps * (process.gpus if process.options.alone else 1)
    hardware = step.hardware_flops
    return replace(
        report,
        step=at,
        steps=steps,
        model_flops=step.model_flops * total_steps,
        hardware_flops=None if hardware is None else hardware * total_steps,
        tokens=step.tokens * total_steps,
        padding=step.padding * total_steps,
        checkpoints=checkpoints,
        loss=2.0 + 8.0 / (1.0 + at / 100),
        bubble=process.options.bubble,
    )


def _empty_report(process: ReportingProcess, start: int, end: int) -> TrainingReport:
    return TrainingReport(
        job_id=process.job.owner.job_id,
        start=start * MS,
        end=end * MS,
        gpus=process.gpus if process.options.alone else 1,
        uuids=(process.uuid,),
        rank=str(process.rank),
        run=process.options.run,
        recompute=process.options.recompute,
        dtype="bf16",
        parallel=process.options.parallel,
        world_size=process.gpus,
    )


def _phase_times(
    interval: TimelineInterval, step: StepCounts, options: ReportingOptions, since: int, end: int, *, waits: Waits
) -> tuple[tuple[str, int], ...]:
    """Return nanoseconds by phase from `since` to `end`, for the phases that the program measures."""
    times = {name: float(sum(ms for phase, ms in waits if phase == name)) for name in options.times}
    position = 0.0
    start, end = max(since, interval.start) - interval.origin, end - interval.origin
    for segment, phase in zip(interval.cycle.segments, step.phases, strict=True):
        if phase in times:
            before = _time_in_segment(start, position, segment.ms, interval.cycle.ms)
            times[phase] += _time_in_segment(end, position, segment.ms, interval.cycle.ms) - before
        position += segment.ms
    return tuple((phase, int(ms * MS)) for phase, ms in times.items())


def _time_in_segment(now: float, begin: float, length: float, cycle_ms: float) -> float:
    """Return milliseconds spent until `now` in a segment that begins `begin` ms into each cycle."""
    rounds, rest = divmod(now, cycle_ms)
    return rounds * length + min(max(rest - begin, 0.0), length)


def servings(plan: Plan, uuids: Sequence[str], *, board: BoardModel, seed: int) -> Iterator[ServingReport]:
    """Yield all polls of all engines on this node in order of time; times are ns from 0."""
    streams = [
        _engine_polls(job, uuids, _job_intervals(plan, job, job.slots[0], board=board, seed=seed))
        for job in plan.jobs
        if job.serves
    ]
    return merge(*streams, key=lambda poll: poll.end)


def _engine_polls(
    job: SimulatedJob, uuids: Sequence[str], intervals: Iterable[TimelineInterval]
) -> Iterator[ServingReport]:
    """Yield the polls of one engine; each counts the difference to the poll before."""
    job_uuids = tuple(uuids[slot] for slot in job.slots)
    polled = job.start_ms - job.start_ms % POLL_MS
    known: list[TimelineInterval] = []
    for interval in intervals:
        known.append(interval)
        if interval.stage is None or interval.stage.service is None:
            polled = max(polled, interval.end - interval.end % POLL_MS)
        while interval.end > polled + POLL_MS:
            known = [interval for interval in known if interval.end > polled]
            polled += POLL_MS
            poll = _poll(job, known, polled)
            if poll is not None:
                yield replace(poll, uuids=job_uuids, gpus=len(job_uuids))


def _poll(job: SimulatedJob, known: Sequence[TimelineInterval], now: int) -> ServingReport | None:
    """Return counts since the last poll; None if the engine did not respond throughout."""
    then = now - POLL_MS
    services = [(interval, interval.stage.service) for interval in known if interval.stage and interval.stage.service]
    if len(services) < len(known) or services[0][0].start > then:
        return None
    gauge = services[-1][1]
    mostly = max(services, key=lambda one: min(now, one[0].end) - max(then, one[0].start))[1]
    counts: dict[str, Any] = {
        name: float(sum(_increase(p, s, name, then, now) for p, s in services)) for name in _COUNTS
    }
    return ServingReport(
        job_id=job.owner.job_id,
        start=then * MS,
        end=now * MS,
        engine="vllm",
        running=gauge.running,
        waiting=gauge.waiting,
        slots=gauge.slots,
        kv_use=gauge.kv_use,
        **counts,
        flops=sum(_amount(p, s.flops, then, now) for p, s in services),
        bytes=sum(_amount(p, s.bytes, then, now) for p, s in services),
        inter_token_seconds=mostly.inter_token_seconds,
        calm_inter_token_seconds=mostly.calm_inter_token_seconds,
        latencies=mostly.latencies,
    )


def _increase(interval: TimelineInterval, service: ServingCounts, name: str, then: int, now: int) -> int:
    """Return the increase of an integer counter from `then` to `now`."""
    each: float = getattr(service, name)
    start, end = max(then, interval.start), min(now, interval.end)
    return _count_until(interval, each, end) - _count_until(interval, each, start)


def _count_until(interval: TimelineInterval, each: float, at: int) -> int:
    return floor((at - interval.origin) / interval.cycle.ms * each + _ROUNDING)


def _amount(interval: TimelineInterval, each: float, then: int, now: int) -> float:
    return (min(now, interval.end) - max(then, interval.start)) / interval.cycle.ms * each


Emitted = TypeVar("Emitted", TrainingReport, ServingReport)


def emitter(stream: Iterator[Emitted], start: int) -> Callable[[int], tuple[Emitted, ...]]:
    """Return a function that returns the items of the stream up to a time, each once.

    Times are ns from 0; `start` is added to the returned items.
    """
    ahead = next(stream, None)

    def until(now: int) -> tuple[Emitted, ...]:
        nonlocal ahead
        emitted: list[Emitted] = []
        while ahead is not None and ahead.end <= now:
            emitted.append(replace(ahead, start=start + ahead.start, end=start + ahead.end))
            ahead = next(stream, None)
        return tuple(emitted)

    return until
