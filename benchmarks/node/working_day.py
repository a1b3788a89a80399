"""A working day of a node of eight GPUs: the same three hours again and again, each time with jobs of new names.

Owns who comes and goes, and which of them speak. That the hours are alike is what makes growth visible: at the same
minute of every round the node holds the same.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from exporter.core.model import Observation, Parallel
from exporter.simulate import programs, reporting
from exporter.simulate.plan import Plan, Scenario, Setting, SimulatedJob, batch_owner, notebook_owner, server_owner
from exporter.simulate.simulation import simulate
from exporter.simulate.workload import MINUTE_MS, ReportingOptions

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
    stories = {"day": Scenario(_plan, 1800, "jobs that come and go on eight GPUs")}
    return simulate(
        "day", preroll_seconds=0, duration_seconds=seconds, period_seconds=period_seconds, stories=stories
    ).observations


def _plan(setting: Setting) -> Plan:
    board = setting.board
    chat = reporting.reporting_server(programs.decoding(board, 1), board)
    stays = SimulatedJob(owner=server_owner(setting, 7), slots=(7,), stages=chat, serves=True)
    rounds = range(-(-setting.duration_ms // _ROUND_MS))
    return Plan(jobs=(stays, *(job for number in rounds for job in _round(setting, number))))


def _round(setting: Setting, number: int) -> Iterator[SimulatedJob]:
    """A job of four GPUs that speaks, one that hangs, a notebook, and two GPUs of short jobs; all end in the round."""
    made = _made(setting, number)
    return (replace(job, start_ms=number * _ROUND_MS + job.start_ms) for job in made)


def _made(setting: Setting, number: int) -> Iterator[SimulatedJob]:
    """Those of one round; times are from its beginning."""
    board, first = setting.board, _JOBS * number
    speaking = reporting.reporting_trainer(programs.training(board, 4), board)
    voice = ReportingOptions(run=f"pretrain-{number}", recompute="selective", parallel=Parallel(data=4))
    owner = batch_owner(setting, first, "pretrain", user="barbara")
    yield SimulatedJob(
        owner=owner, slots=_FOUR, stages=speaking, start_ms=2 * MINUTE_MS, hold_ms=95 * MINUTE_MS, reporting=voice
    )
    stuck = programs.deadlocking(board, 4, after_ms=20 * MINUTE_MS)
    owner = batch_owner(setting, first + 1, "ablation", user="barbara")
    yield SimulatedJob(owner=owner, slots=_FOUR, stages=stuck, start_ms=105 * MINUTE_MS, hold_ms=50 * MINUTE_MS)
    owner, left = notebook_owner(setting, first + 2), programs.notebook(board)
    yield SimulatedJob(owner=owner, slots=(4,), stages=left, start_ms=5 * MINUTE_MS, hold_ms=160 * MINUTE_MS)
    yield from _sweep(setting, 5, first=first + 3, start_ms=0)
    yield from _sweep(
        setting, 6, first=first + 3 + _SWEEP, start_ms=3 * MINUTE_MS, voice=ReportingOptions(run=f"sweep-{number}")
    )


def _sweep(
    setting: Setting, slot: int, *, first: int, start_ms: int, voice: ReportingOptions | None = None
) -> Iterator[SimulatedJob]:
    """Short jobs one after the other on one GPU."""
    short = reporting.reporting_trainer(programs.training(setting.board, 1), setting.board)
    for turn in range(_SWEEP):
        yield SimulatedJob(
            owner=batch_owner(setting, first + turn, "sweep"), slots=(slot,), stages=short, reporting=voice,
            start_ms=start_ms + turn * 14 * MINUTE_MS, hold_ms=11 * MINUTE_MS,
        )  # fmt: skip
