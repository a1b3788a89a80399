"""Reads job records and events from the store and the snapshot, and combines the records of one job on this node.

Defines the interface of the store. Does not join records of several nodes.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import msgspec
from msgspec import Struct, structs

from exporter.core.job_record import (
    JobRecord,
    JobRecordQuery,
    JobSample,
    NodeEvent,
    build_job_record,
    job_sample,
    sum_bounds,
    sum_evidence,
)
from exporter.core.leaks import LEAK_NAMES
from exporter.core.model import PPM, SECOND, State
from exporter.core.prices import NO_PRICE
from exporter.core.snapshot import JobView, Snapshot
from exporter.web.api import EventsOut, WindowOut, from_attributes
from exporter.web.summary import LAYER_BY_LEAK

MAX_RESPONSE_BYTES = 16 << 20
"""Maximum size of one response, so that a client that reads slowly cannot hold more of the daemon's memory."""
STORE_ERRORS = (OSError, sqlite3.Error)
"""Exceptions of a store that cannot be read."""
_HOUR = 3600 * SECOND
_encode = msgspec.json.Encoder().encode


class HistoryReader(Protocol):
    """Interface of the node's store; methods are called on worker threads and raise one of STORE_ERRORS."""

    def job_records(self, query: JobRecordQuery) -> list[JobRecord]:
        """Return matching records, the latest end first."""

    def events(self, since: float, limit: int) -> list[NodeEvent]:
        """Return the latest `limit` events since `since` (Unix seconds), newest first."""

    def checkpointed_view(self, snapshot: Snapshot) -> Snapshot | None:
        """Return the newest checkpointed snapshot, whose counters survive a restart; None: none yet."""


def receipts_body(found: Sequence[JobRecord], snapshot: Snapshot | None, *, kept: bool) -> bytes:
    """Encode the response as JSON, truncated at about MAX_RESPONSE_BYTES."""
    node, host, at = node_identity(snapshot)
    texts, cut = encode_records(found)
    return _encode({"node": node, "host": host, "at": at, "kept": kept, "cut": cut, "receipts": texts})


def encode_records(found: Sequence[JobRecord]) -> tuple[list[msgspec.Raw], bool]:
    """Encode records up to about MAX_RESPONSE_BYTES, and return whether some were left out."""
    texts, size = list[msgspec.Raw](), 0
    for record in found:
        texts.append(msgspec.Raw(_encode(record)))
        size += len(texts[-1])
        if size > MAX_RESPONSE_BYTES:
            break
    return texts, len(texts) < len(found)


def events_out(found: list[NodeEvent], snapshot: Snapshot | None, *, kept: bool) -> EventsOut:
    """Build the response of /api/v1/events."""
    node, host, at = node_identity(snapshot)
    return EventsOut(node=node, host=host, at=at, kept=kept, events=found)


def node_identity(snapshot: Snapshot | None) -> tuple[str, str, float]:
    """Return the node's name, its host name, and the Unix time of the sample in seconds."""
    if snapshot is None:
        return "", "", 0.0
    meta = snapshot.meta
    return meta.node, meta.host, snapshot.wall / SECOND


def collect_records(history: HistoryReader | None, snapshot: Snapshot | None, query: JobRecordQuery) -> list[JobRecord]:
    """Combine the store's records with those of jobs not yet in it: running ones, or without a store all."""
    records = [] if history is None else history.job_records(query)
    running_ids = {stored.owner.job_id for stored in records if stored.running}
    jobs = [] if snapshot is None else [job for job in snapshot.jobs if history is None or job.gpus]
    unknown = [job for job in jobs if job.owner.job_id not in running_ids]
    live = [] if snapshot is None else [_live_record(job, snapshot) for job in unknown]
    return newest_first([*records, *(record for record in live if query.matches(record))])[: query.limit]


def records_of_job(history: HistoryReader | None, snapshot: Snapshot | None, name: str) -> list[JobRecord]:
    """Return the records of the job with this id; else of the latest that users know by it, such as `6_1`."""
    found = collect_records(history, snapshot, JobRecordQuery(job_id=name))
    ids = [record.owner.job_id for record in found]
    if not ids or name in ids:
        return [record for record in found if record.owner.job_id == name]
    return collect_records(history, snapshot, JobRecordQuery(job_id=ids[0]))


def newest_first(records: Iterable[JobRecord]) -> list[JobRecord]:
    """Sort by end, then by start, both latest first."""
    return sorted(records, key=lambda record: (-record.end, -record.start, record.owner.job_id))


def _live_record(job: JobView, snapshot: Snapshot) -> JobRecord:
    """Build a record from the snapshot alone: it lacks past events and all samples but the latest."""
    node, _, _ = node_identity(snapshot)
    held = [gpu for gpu in snapshot.gpus if gpu.device.uuid in job.gpus]
    whole = sum(gpu.device.weight / PPM / max(1, len(gpu.owners)) for gpu in held)
    ended = snapshot.wall - (snapshot.at - job.counters.now.until)
    until = (snapshot.wall if job.gpus else ended) / SECOND
    states = dict(job.states)
    return build_job_record(
        job,
        node=node,
        life=f"{node}@{snapshot.meta.started:.6f}",
        until=until,
        money=_estimate_money(job, whole),
        gpus={gpu.device.uuid: gpu.device.index for gpu in held},
        models=tuple(sorted({gpu.device.model for gpu in held})),
        whole_gpus=whole,
        happened={"hung": states.get(State.HUNG, 0), "zombie": states.get(State.ZOMBIE, 0)},
        samples=(job_sample(job, snapshot.wall),),
        simulated=snapshot.meta.simulated,
    )


def _estimate_money(job: JobView, whole: float) -> dict[str, float]:
    """Price all of the job's time at the rate of the GPUs that it holds now."""
    hours = job.counters.now.paid / _HOUR
    costs = [(currency, cost) for currency, cost in job.costs if currency != NO_PRICE.currency]
    return {currency: hours * cost / whole for currency, cost in costs} if whole else {}


_SUMMED_FIELDS = ("paid", "engine", "flops", "tensor_seen", "reported", "reportable", "unneeded")
_NO_SAMPLE = JobSample(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class UsageInterval(Struct, frozen=True):
    """Usage between two samples: start and end in Unix seconds, and GPU-seconds by band.

    Bands: useful; computing, not useful; held, not computing; unallocated or not working; unobserved.
    """

    start: float
    end: float
    bands: tuple[float, ...]


def records_by_job(records: Iterable[JobRecord]) -> list[list[JobRecord]]:
    """Group records by job in order of first appearance; each job's records are sorted by start."""
    found: dict[str, list[JobRecord]] = {}
    for record in records:
        found.setdefault(record.owner.job_id, []).append(record)
    return [sorted(job_records, key=lambda each: each.start) for job_records in found.values()]


def combine_records(records: Sequence[JobRecord]) -> JobRecord:
    """Combine one job's records on this node (at least one): sums amounts, takes other values from the latest."""
    last = max(records, key=lambda record: (record.running, record.end))
    if len(records) == 1:
        return last
    return structs.replace(
        last,
        start=min(record.start for record in records),
        end=max(record.end for record in records),
        running=any(record.running for record in records),
        **{name: sum(getattr(record, name) for record in records) for name in _SUMMED_FIELDS},
        **{
            name: _sum_by_key(getattr(record, name) for record in records)
            for name in ("parts", "energy", "money", "happened")
        },
        bounds=sum_bounds(records),
        evidence=sum_evidence(records),
        gpus={uuid: index for record in records for uuid, index in record.gpus.items()},
        models=tuple(sorted({model for record in records for model in record.models})),
        whole_gpus=max(record.whole_gpus for record in records),
        first_work=records[0].first_work,
        training=next((record.training for record in reversed(records) if record.training is not None), None),
        service=next((record.service for record in reversed(records) if record.service is not None), None),
        communication=next((record.communication for record in reversed(records) if record.communication), None),
    )


def _sum_by_key(amounts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    sums: Counter[str] = Counter()
    for amount in amounts:
        sums.update(amount)
    return dict(sums)


def job_window(job: JobRecord) -> WindowOut:
    """Return a job's totals as a window, so that they are drawn like one."""
    leaks = {name: job.parts.get(name, 0) / SECOND for name in LEAK_NAMES}
    return from_attributes(WindowOut, job.layers, seconds=job.paid / SECOND, leaks=leaks)


def job_timeline(records: Iterable[JobRecord]) -> list[UsageInterval]:
    """List the job's usage over time, record after record; there is a gap where no daemon ran."""
    intervals: list[UsageInterval] = []
    for record in sorted(records, key=lambda record: record.start):
        points = [structs.replace(_NO_SAMPLE, at=record.start), *record.samples, _final_sample(record)]
        intervals += [
            _interval(before, after)
            for before, after in pairwise(points)
            if after.at > before.at and after.paid > before.paid
        ]
    return intervals


def _final_sample(record: JobRecord) -> JobSample:
    """Build a sample of a record's totals at its end."""
    by_layer = Counter[str]()
    for name, part in record.parts.items():
        by_layer[LAYER_BY_LEAK[name]] += part
    seen = record.paid - by_layer["unobserved"]
    occupied = seen - by_layer["gau"]
    return JobSample(
        at=record.end,
        paid=record.paid / SECOND,
        seen=seen / SECOND,
        occupied=occupied / SECOND,
        computing=(occupied - by_layer["ectr"]) / SECOND,
        useful=by_layer["useful"] / SECOND,
        joules=sum(record.energy.values()),
    )


def _interval(before: JobSample, after: JobSample) -> UsageInterval:
    """Compute the usage between two samples. Rounding may lower a counter slightly: negative values become 0."""
    paid, seen, occupied, computing, useful = (
        max(0.0, getattr(after, name) - getattr(before, name))
        for name in ("paid", "seen", "occupied", "computing", "useful")
    )
    bands = (useful, computing - useful, occupied - computing, seen - occupied, paid - seen)
    return UsageInterval(before.at, after.at, tuple(max(0.0, band) for band in bands))


def downsample(intervals: Sequence[UsageInterval], limit: int) -> list[UsageInterval]:
    """Merge neighbouring intervals so that at most `limit` remain."""
    step = -(-len(intervals) // limit) or 1
    groups = [intervals[at : at + step] for at in range(0, len(intervals), step)]
    return [
        UsageInterval(group[0].start, group[-1].end, tuple(map(sum, zip(*(part.bands for part in group), strict=True))))
        for group in groups
    ]
