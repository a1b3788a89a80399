"""What a daemon's store kept of its jobs, as pages that a Prometheus can hold.

Owns which series those are, and at what moments: a few counters at every sample the store has (each five minutes as it
comes), the rest twice, as 0 when the job began and as it ended. So `increase()` over a whole job is exact for every
counter, and in between for paid seconds and energy alone. What was not kept is not made up: no series of a GPU, no
state, no gauge of the last five minutes.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from exporter import __version__
from exporter.cli.openmetrics import Headers, Page, Row
from exporter.cli.scraped import Told
from exporter.core.catalog import METRICS
from exporter.core.exposition import render
from exporter.core.leaks import NAMES
from exporter.core.ledger import Book, Ledger, Mark
from exporter.core.model import SECOND
from exporter.core.money import Terms
from exporter.core.snapshot import Counters, JobView, Meta, Snapshot, take_snapshot
from exporter.core.statement import Sample, Statement

_P = "gpu_efficiency_"
_NODE = frozenset({_P + "node_info", _P + "build_info", _P + "simulated"})
ALONG = frozenset({_P + "job_paid_seconds_total", _P + "job_energy_joules_total", _P + "job_start_timestamp_seconds",
                    _P + "job_info"})  # fmt: skip
"""What a store has of a job at each of its samples."""
AT_ENDS = frozenset(
    _P + name
    for name in (
        "job_seconds_total", "job_unneeded_seconds_total", "job_advice_seconds_total",
        "job_first_work_seconds", "job_reported_gpu_seconds_total",
        "job_model_flops_total", "job_tokens_total", "job_padding_tokens_total", "job_samples_total",
        "job_steps_total", "job_rework_steps_total", "job_run_seconds_total", "job_checkpoints_total",
        "job_restarts_total", "job_recovery_seconds_total", "job_loss_events_total", "job_preemptions_total",
        "job_engine_tokens_total", "job_world_size", "job_step", "job_epoch", "job_goodput_ratio",
        "job_progress_ratio", "job_loss", "job_quality", "job_quality_start", "job_quality_target", "job_run_info",
        "job_engine_info", "job_target_reached_timestamp_seconds",
    )
)  # fmt: skip
"""What it has of a job only as it ended; counters were 0 when it began."""


class _Moment(Struct, frozen=True):
    """One job at one moment."""

    at: int
    job: JobView
    begins: bool = False
    ends: bool = False


def restated(statements: Iterable[Statement], node: str, *, labels: str, told: Told) -> Iterator[Page]:
    """Pages of one node, of its jobs' statements, moment by moment."""
    lives = list(_lives(statements))
    simulated = any(each.simulated for each, _ in lives)
    meta = Meta(version=__version__, source="store", simulated=simulated, host=node, terms=Terms(node=node))
    empty = take_snapshot(Ledger(), meta)
    moments = heapq.merge(*(_moments(each, after) for each, after in lives), key=_when)
    for at, group in groupby(moments, key=_when):
        told.at(at)
        yield Page(at, labels, list(_rows(empty, list(group), told.headers)))


_when = attrgetter("at")


def _lives(statements: Iterable[Statement]) -> Iterator[tuple[Statement, int]]:
    """Each once, the earlier first, with the moment after which it may speak: another life of its job spoke till then.

    A store that was copied twice has the same life twice; the later copy knows more.
    """
    once: dict[tuple[str, str, float], Statement] = {}
    for each in statements:
        key = each.owner.job_id, each.life, each.start
        if key not in once or once[key].end < each.end:
            once[key] = each
    spoken: dict[str, int] = {}
    for each in sorted(once.values(), key=lambda one: (one.start, one.end)):
        yield each, spoken.get(each.owner.job_id, 0)
        spoken[each.owner.job_id] = _span(each, spoken.get(each.owner.job_id, 0))[1]


def _span(statement: Statement, after: int) -> tuple[int, int]:
    """First and last moment, Unix seconds, and at least one between."""
    begin = max(math.floor(statement.start), after + 1)
    return begin, max(begin + 1, math.ceil(statement.end))


def _moments(statement: Statement, after: int) -> Iterator[_Moment]:
    """Its begin, each sample between, and its end."""
    last, end = _span(statement, after)
    ended = _ended(statement)
    yield _Moment(last, ended, begins=True)
    for sample in statement.samples:
        at = math.ceil(sample.at)
        if last < at < end:
            yield _Moment(at, _along(statement, sample))
            last = at
    yield _Moment(end, ended, ends=True)


def _rows(empty: Snapshot, moments: Sequence[_Moment], headers: Headers) -> Iterator[Row]:
    yield from _section(empty, (), _NODE, headers)
    begun = [each.job for each in moments if each.begins]
    for row in _section(empty, begun, ALONG | AT_ENDS, headers):
        if row.family in headers.counters:
            yield replace(row, value="0.0")
        elif row.family in ALONG:
            yield row
    yield from _section(empty, [each.job for each in moments if not each.begins], ALONG, headers)
    yield from _section(empty, [each.job for each in moments if each.ends], AT_ENDS, headers)


def _section(empty: Snapshot, jobs: Sequence[JobView], names: frozenset[str], headers: Headers) -> list[Row]:
    told = [metric for metric in METRICS if metric.name in names]
    return headers.read(render(replace(empty, jobs=tuple(jobs)), openmetrics=True, metrics=told).decode())


def _ended(statement: Statement) -> JobView:
    """The view as it was when the statement was made, as far as it was kept."""
    parts = [statement.parts.get(name, 0) for name in NAMES]
    energy = tuple(statement.energy.get(name, 0.0) for name in NAMES)
    return JobView(
        owner=statement.owner,
        counters=_counters(parts, statement.paid, energy),
        gpus=(),
        memory_used=None,
        start=round(statement.start * SECOND),
        first_work=None if statement.first_work is None else round(statement.first_work * SECOND),
        unneeded=statement.unneeded or None,
        progress=statement.training,
        service=statement.service,
    )


def _along(statement: Statement, sample: Sample) -> JobView:
    """The little that a sample has."""
    counters = _counters([0] * len(NAMES), round(sample.paid * SECOND), (sample.joules,))
    return JobView(
        owner=statement.owner, counters=counters, gpus=(), memory_used=None, start=round(statement.start * SECOND)
    )


def _counters(parts: list[int], paid: int, energy: tuple[float, ...]) -> Counters:
    book = Book(0)
    book.parts, book.paid = parts, paid
    mark = Mark(book)
    return Counters(mark, mark, mark, energy)
