"""A working day of a node of eight GPUs: the same three hours again and again, each time with jobs of new names.

Owns who comes and goes, and which of them speak. That the hours are alike is what makes growth visible: at the same
minute of every round the node holds the same.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from exporter.core.model import Observation, Parallel
from exporter.simulate import Scenario, narrated, programs, simulate
from exporter.simulate.plan import Job, Plan
from exporter.simulate.programs import MINUTE_MS
from exporter.simulate.setting import Setting, batch, interactive, server
from exporter.simulate.words import Voice

HOUR = 3600
ROUND_HOURS = 3
_ROUND_MS = ROUND_HOURS * 60 * MINUTE_MS
_SWEEP = 12
"""Short jobs one after the other on a GPU, in a round: a sweep of parameters."""
_JOBS = 3 + 2 * _SWEEP
"""In a round."""
_FOUR = (0, 1, 2, 3)


def told(seconds: int, *, period_seconds: float = 1.0) -> Iterator[Observation]:
    """So long of it."""
    stories = {"day": Scenario(description="jobs that come and go on eight GPUs", plan=_plan)}
    return simulate(
        "day", preroll_seconds=0, duration_seconds=seconds, period_seconds=period_seconds, stories=stories
    ).observations


def _plan(setting: Setting) -> Plan:
    board = setting.board
    chat = narrated.server(programs.decoding(board, 1), board)
    stays = Job(owner=server(setting, 7), slots=(7,), stages=chat, serves=True)
    rounds = range(-(-setting.duration_ms // _ROUND_MS))
    return Plan(jobs=(stays, *(job for number in rounds for job in _round(setting, number))))


def _round(setting: Setting, number: int) -> Iterator[Job]:
    """A job of four GPUs that speaks, one that hangs, a notebook, and two GPUs of short jobs; all end in the round."""
    made = _made(setting, number)
    return (replace(job, start_ms=number * _ROUND_MS + job.start_ms) for job in made)


def _made(setting: Setting, number: int) -> Iterator[Job]:
    """Those of one round; times are from its beginning."""
    board, first = setting.board, _JOBS * number
    speaking = narrated.trainer(programs.training(board, 4), board)
    voice = Voice(run=f"pretrain-{number}", recompute="selective", parallel=Parallel(data=4))
    owner = batch(setting, first, "pretrain", user="barbara")
    yield Job(owner=owner, slots=_FOUR, stages=speaking, start_ms=2 * MINUTE_MS, hold_ms=95 * MINUTE_MS, voice=voice)
    stuck = programs.deadlocking(board, 4, after_ms=20 * MINUTE_MS)
    owner = batch(setting, first + 1, "ablation", user="barbara")
    yield Job(owner=owner, slots=_FOUR, stages=stuck, start_ms=105 * MINUTE_MS, hold_ms=50 * MINUTE_MS)
    owner, left = interactive(setting, first + 2), programs.notebook(board)
    yield Job(owner=owner, slots=(4,), stages=left, start_ms=5 * MINUTE_MS, hold_ms=160 * MINUTE_MS)
    yield from _sweep(setting, 5, first=first + 3, start_ms=0)
    yield from _sweep(setting, 6, first=first + 3 + _SWEEP, start_ms=3 * MINUTE_MS, voice=Voice(run=f"sweep-{number}"))


def _sweep(setting: Setting, slot: int, *, first: int, start_ms: int, voice: Voice | None = None) -> Iterator[Job]:
    """Short jobs one after the other on one GPU."""
    short = narrated.trainer(programs.training(setting.board, 1), setting.board)
    for turn in range(_SWEEP):
        yield Job(
            owner=batch(setting, first + turn, "sweep"), slots=(slot,), stages=short, voice=voice,
            start_ms=start_ms + turn * 14 * MINUTE_MS, hold_ms=11 * MINUTE_MS,
        )  # fmt: skip
