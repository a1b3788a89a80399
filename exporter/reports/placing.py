"""From a message to a Report: when it speaks of, and what it says of that time.

Owns the bounds of that time. Refuses to know who speaks: a `Guest` is given.
"""

from exporter.core.model import MS, NEVER, SECOND, Parallel, Report
from exporter.reports.message import Message, bubble, loss_of, model_flops
from exporter.reports.outcomes import RefusedError
from exporter.workloads import Guest

SLACK = SECOND
"""Clocks, schedulers and queues shift a message by so much; within it an interval is cut to what is possible."""
OLDEST = 3600 * SECOND


def placed(
    message: Message, *, at: int | None, arrived: int, begun: int = NEVER, until: int = NEVER
) -> tuple[int, int]:
    """Give [start, end) of the message, on whole milliseconds; raises RefusedError.

    `at` is when the message says that its interval ended, `begun` when its process began, `until` how far that has
    spoken: time is spoken of once.
    """
    end = _ended(at, arrived)
    length = max(round(message.seconds * 1000), 1) * MS if message.seconds else 0
    start = end - length
    if start < begun - SLACK or (length and end <= begun):
        raise RefusedError(
            "before_start", f"begins {_seconds(begun - start)} before the process did", field="$.seconds"
        )
    if (length and end <= until) or until - start > SLACK:
        raise RefusedError("replayed", f"the process has spoken of the last {_seconds(until - start)}", field="$.at")
    start = max(start, begun, until)
    return start, max(start, end)


def _ended(at: int | None, arrived: int) -> int:
    if at is None:
        return arrived
    if at > arrived + SLACK:
        raise RefusedError(
            "future",
            f"is {_seconds(at - arrived)} in the future: nanoseconds of CLOCK_MONOTONIC are wanted, not Unix time",
            field="$.at",
        )
    if at < arrived - OLDEST:
        raise RefusedError("old", f"is {_seconds(arrived - at)} ago: an hour is the most", field="$.at")
    return min(at // MS * MS, arrived)


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / SECOND:.3f} s"


def report_of(message: Message, guest: Guest, *, start: int, end: int, each: bool = False) -> Report:
    """Give the message in the core's words, as what its process, which is `guest`, says of [start, end)."""
    quality, degrees = message.quality, message.parallel
    return Report(
        job_id=guest.job_id,
        start=start,
        end=end,
        model_flops=model_flops(message),
        gpus=message.gpus or message.world_size or 1,
        each=each,
        uuids=guest.uuids,
        rank=guest.rank if message.rank is None else str(message.rank),
        run=message.run,
        step=message.step,
        steps=message.steps,
        highest_step=message.highest_step,
        epoch=message.epoch,
        tokens=message.tokens,
        padding=message.padding,
        samples=message.samples,
        hardware_flops=message.hardware_flops,
        dtype=message.dtype,
        recompute=message.recompute,
        phase=message.phase,
        phases=_phases(message, end - start) if message.phases else (),
        bubble=bubble(message.pipeline),
        checkpoints=message.checkpoints,
        restart=message.restart,
        loss=loss_of(message),
        quality=quality.value if quality else None,
        quality_name=quality.name if quality else "",
        quality_target=quality.target if quality else None,
        quality_falls=quality.falls if quality else False,
        parallel=Parallel(degrees.tensor, degrees.pipeline, degrees.data, degrees.context, degrees.expert)
        if degrees
        else None,
        world_size=message.world_size or 0,
    )


def _phases(message: Message, length: int) -> tuple[tuple[str, int], ...]:
    """Nanoseconds by phase, together not more than the interval, which may have been cut."""
    told = {phase: int(seconds * SECOND) for phase, seconds in message.phases.items()}
    whole = sum(told.values())
    if whole > length:
        told = {phase: spent * length // whole for phase, spent in told.items()}
    return tuple(told.items())
