"""When simulated programs speak: reports of training processes, answers of serving engines.

Owns the times at which something is said, and how much was done between two of them. Refuses physics: what goes on is
the plan's, and a program knows of it only what its `Step` or `Service` says.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import takewhile
from math import ceil, floor
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import MS, Report, Serving
from exporter.simulate.boards import Board
from exporter.simulate.plan import Job, Piece, Plan, timeline
from exporter.simulate.words import Service, Step, Voice

POLL_MS = 5_000
"""How often an engine is asked."""
_GRAIN = 1e-6
"""Of a time round: where it ends is known to a few binary digits."""
_COUNTS = (
    "preemptions", "prompt_tokens", "cached_tokens", "generated_tokens", "recomputed_tokens", "drafted_tokens",
    "accepted_tokens", "passes",
)  # fmt: skip


Waits = tuple[tuple[str, int], ...]
"""Phases between two steps that have not been told, with their milliseconds."""


class Seat(Struct, frozen=True):
    """Where a process speaks from: its job, its rank, and the GPUs it has on this node."""

    job: Job
    voice: Voice
    rank: int
    uuid: str

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.job.gpus or len(self.job.slots)


def reports(plan: Plan, uuids: Sequence[str], *, board: Board, seed: int) -> Iterator[Report]:
    """All reports of all processes on this node in the order in which they are made; times are ns from 0."""
    told = [
        _of_process(Seat(job, job.voice, rank, uuids[slot]), _played(plan, job, slot, board=board, seed=seed))
        for job in plan.jobs
        if job.voice is not None
        for rank, slot in enumerate(job.slots)
        if rank == 0 or not job.voice.alone
    ]
    return merge(*told, key=lambda report: report.end)


def _played(plan: Plan, job: Job, slot: int, *, board: Board, seed: int) -> Iterator[Piece]:
    """What a job does on one of its GPUs, as long as it holds it."""
    ours = takewhile(lambda piece: piece.start < job.end_ms, timeline(plan, slot, board=board, seed=seed))
    return (piece for piece in ours if piece.job is job)


def _of_process(seat: Seat, pieces: Iterable[Piece]) -> Iterator[Report]:
    """One process from its first word to its last."""
    since: int | None = None
    waits: Waits = ()
    for piece in pieces:
        step = piece.stage.step if piece.stage else None
        if step is None:
            since, waits = None, ()
            continue
        if step.within and since is not None:
            waits = (*waits, (step.phases[0], piece.end - piece.start))
            continue
        if since is None or step.after is None or step.restart:
            begun = piece.start if since is None or step.restart else since
            yield _first_word(seat, step, begun, piece.start)
            since, waits = piece.start, ()
        told = _spell(seat, step, piece) if step.after is None else _steps(seat, step, piece, since=since, waits=waits)
        for report in told:
            yield report
            since, waits = report.end // MS, ()


def _first_word(seat: Seat, step: Step, since: int, now: int) -> Report:
    """A phase begins; what came since the last word, if anything, was the end of the one before."""
    return replace(
        _word(seat, since, now),
        phase=step.phases[0] if step.after is None else "",
        highest_step=step.highest,
        restart=step.restart,
    )


def _spell(seat: Seat, step: Step, piece: Piece) -> Iterator[Report]:
    """The closing word of a phase; none if the process is killed in it."""
    if piece.whole:
        lasted = ((step.phases[0], (piece.end - piece.start) * MS),)
        yield replace(
            _word(seat, piece.start, piece.end),
            phases=lasted,
            step=step.resumes,
            highest_step=step.highest,
            checkpoints=step.checkpoints,
        )


def _steps(seat: Seat, step: Step, piece: Piece, *, since: int, waits: Waits = ()) -> Iterator[Report]:
    """A report after every so many steps, and one of those that are left when the stage is over.

    `waits`: what came between `since` and the piece.
    """
    after, length, before = step.after or 0, piece.cycle.ms, 0
    last = floor((piece.end - piece.origin) / length + _GRAIN)
    while before < last:
        due = (since + seat.voice.every_ms - piece.origin) / length
        now = min(max(before + 1, ceil(due - _GRAIN)), last)
        end = min(piece.end, ceil(piece.origin + now * length - _GRAIN))
        if now == last and not piece.whole and end < since + seat.voice.every_ms:
            return  # killed before it was due
        phases = _timed(piece, step, seat.voice, since, end, waits=() if before else waits)
        word = replace(_word(seat, since, end), phases=phases)
        made = step.checkpoints if now == last and piece.whole else 0
        yield _counted(word, seat, step, now - before, at=after + now, checkpoints=made)
        before, since = now, end


def _counted(word: Report, seat: Seat, step: Step, steps: int, *, at: int, checkpoints: int) -> Report:
    many = steps * (seat.gpus if seat.voice.alone else 1)
    hardware = step.hardware_flops
    return replace(
        word,
        step=at,
        steps=steps,
        model_flops=step.model_flops * many,
        hardware_flops=None if hardware is None else hardware * many,
        tokens=step.tokens * many,
        padding=step.padding * many,
        checkpoints=checkpoints,
        loss=2.0 + 8.0 / (1.0 + at / 100),
        bubble=seat.voice.bubble,
    )


def _word(seat: Seat, start: int, end: int) -> Report:
    return Report(
        job_id=seat.job.owner.job_id,
        start=start * MS,
        end=end * MS,
        gpus=seat.gpus if seat.voice.alone else 1,
        uuids=(seat.uuid,),
        rank=str(seat.rank),
        run=seat.voice.run,
        recompute=seat.voice.recompute,
        dtype=seat.voice.dtype,
        parallel=seat.voice.parallel,
        world_size=seat.gpus,
    )


def _timed(
    piece: Piece, step: Step, voice: Voice, since: int, end: int, *, waits: Waits
) -> tuple[tuple[str, int], ...]:
    """Nanoseconds by phase from `since` to `end`, for the phases that the program measures."""
    told = {name: float(sum(ms for phase, ms in waits if phase == name)) for name in voice.times}
    position = 0.0
    start = max(since, piece.start) - piece.origin
    for segment, phase in zip(piece.cycle.segments, step.phases, strict=True):
        if phase in told:
            told[phase] += _passed(end - piece.origin, position, segment.ms, piece.cycle.ms) - _passed(
                start, position, segment.ms, piece.cycle.ms
            )
        position += segment.ms
    return tuple((phase, int(ms * MS)) for phase, ms in told.items())


def _passed(now: float, begin: float, lasts: float, around: float) -> float:
    """Milliseconds until `now` of a segment that begins `begin` into each time round."""
    rounds, rest = divmod(now, around)
    return rounds * lasts + min(max(rest - begin, 0.0), lasts)


def servings(plan: Plan, uuids: Sequence[str], *, board: Board, seed: int) -> Iterator[Serving]:
    """All answers of all engines on this node in the order in which they are given; times are ns from 0."""
    told = [
        _of_engine(job, uuids, _played(plan, job, job.slots[0], board=board, seed=seed))
        for job in plan.jobs
        if job.serves
    ]
    return merge(*told, key=lambda answer: answer.end)


def _of_engine(job: Job, uuids: Sequence[str], pieces: Iterable[Piece]) -> Iterator[Serving]:
    """One engine, asked again and again: an answer needs the one before it, for counts are differences."""
    here = tuple(uuids[slot] for slot in job.slots)
    asked = job.start_ms - job.start_ms % POLL_MS
    known: list[Piece] = []
    for piece in pieces:
        known.append(piece)
        if piece.stage is None or piece.stage.service is None:
            asked = max(asked, piece.end - piece.end % POLL_MS)
        while piece.end > asked + POLL_MS:
            known = [one for one in known if one.end > asked]
            asked += POLL_MS
            answer = _answer(job, known, asked)
            if answer is not None:
                yield replace(answer, uuids=here, gpus=len(here))


def _answer(job: Job, known: Sequence[Piece], now: int) -> Serving | None:
    """What has come since the last poll; nothing where the engine did not answer at both ends, or all the time."""
    then = now - POLL_MS
    services = [(piece, piece.stage.service) for piece in known if piece.stage and piece.stage.service]
    if len(services) < len(known) or services[0][0].start > then:
        return None
    gauge = services[-1][1]
    mostly = max(services, key=lambda one: min(now, one[0].end) - max(then, one[0].start))[1]
    count = {name: float(sum(_whole(p, s, name, then, now) for p, s in services)) for name in _COUNTS}
    return Serving(
        job_id=job.owner.job_id,
        start=then * MS,
        end=now * MS,
        engine=gauge.engine,
        running=gauge.running,
        waiting=gauge.waiting,
        slots=gauge.slots,
        kv_use=gauge.kv_use,
        preemptions=count["preemptions"],
        prompt_tokens=count["prompt_tokens"],
        cached_tokens=count["cached_tokens"],
        generated_tokens=count["generated_tokens"],
        recomputed_tokens=count["recomputed_tokens"],
        drafted_tokens=count["drafted_tokens"],
        accepted_tokens=count["accepted_tokens"],
        passes=count["passes"],
        flops=sum(_amount(p, s.flops, then, now) for p, s in services),
        bytes=sum(_amount(p, s.bytes, then, now) for p, s in services),
        inter_token_seconds=mostly.inter_token_seconds,
        calm_inter_token_seconds=mostly.calm_inter_token_seconds,
        latencies=mostly.latencies,
    )


def _whole(piece: Piece, service: Service, name: str, then: int, now: int) -> int:
    """What a counter of whole things has gained."""
    each: float = getattr(service, name)
    start, end = max(then, piece.start), min(now, piece.end)
    return _until(piece, each, end) - _until(piece, each, start)


def _until(piece: Piece, each: float, moment: int) -> int:
    return floor((moment - piece.origin) / piece.cycle.ms * each + _GRAIN)


def _amount(piece: Piece, each: float, then: int, now: int) -> float:
    return (min(now, piece.end) - max(then, piece.start)) / piece.cycle.ms * each


Word = TypeVar("Word", Report, Serving)


def teller(stream: Iterator[Word], start: int) -> Callable[[int], tuple[Word, ...]]:
    """Give a function that hands out what was said up to a moment and has not been handed out.

    Moments of the stream are ns from 0; `start` is added to what is handed out.
    """
    ahead = next(stream, None)

    def until(now: int) -> tuple[Word, ...]:
        nonlocal ahead
        told: list[Word] = []
        while ahead is not None and ahead.end <= now:
            told.append(replace(ahead, start=start + ahead.start, end=start + ahead.end))
            ahead = next(stream, None)
        return tuple(told)

    return until
