"""Receipts and events as the JSON API says them: what the node's store keeps, and the jobs that run now.

Owns the shapes of these answers, and the part of the store that HTTP knows. Refuses to keep anything itself, and to
join what several nodes say of one job.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from exporter.core.model import PPM, SECOND, State
from exporter.core.money import NO_PRICE
from exporter.core.snapshot import JobView, Snapshot
from exporter.core.statement import Event, Statement, Wanted, sample_of, statement_of

MOST_BYTES = 16 << 20
"""Of one answer: a client that reads slowly must not hold more of the daemon's memory."""
UNREADABLE = (OSError, sqlite3.Error)
"""What a store raises that cannot be read."""
_HOUR = 3600 * SECOND
_encode = msgspec.json.Encoder().encode


class Kept(Protocol):
    """The node's store, as far as it is asked here; called on request threads, and raises one of UNREADABLE."""

    def statements(self, wanted: Wanted) -> list[Statement]:
        """Those that fit, the newest end first."""

    def events(self, since: float, limit: int) -> list[Event]:
        """The latest `limit` since then (Unix seconds), the newest first."""

    def cover(self, snapshot: Snapshot) -> Snapshot | None:
        """What may be told in its place, so that no restart goes back behind it; None: nothing yet."""


class ReceiptsOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/receipts."""

    node: str
    """What its scheduler calls it."""
    host: str
    at: float
    """Unix seconds of the newest sample; 0 before the first."""
    kept: bool
    """False: nothing is kept on this node, and only jobs that it holds now, or held lately, are told of."""
    cut: bool
    """True: there are more, but the answer would be too large: ask for fewer."""
    receipts: list[Statement]
    """The newest end first; running jobs are among them."""


class EventsOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/events."""

    node: str
    host: str
    at: float
    kept: bool
    events: list[Event]
    """The newest first."""


def receipts_body(found: Sequence[Statement], snapshot: Snapshot | None, *, kept: bool) -> bytes:
    """The answer as JSON, cut where it grows too large."""
    node, host, at = name_of(snapshot)
    texts, size = [], 0
    for statement in found:
        texts.append(msgspec.Raw(_encode(statement)))
        size += len(texts[-1])
        if size > MOST_BYTES:
            break
    cut = len(texts) < len(found)
    return _encode({"node": node, "host": host, "at": at, "kept": kept, "cut": cut, "receipts": texts})


def events_out(found: list[Event], snapshot: Snapshot | None, *, kept: bool) -> EventsOut:
    """The answer."""
    node, host, at = name_of(snapshot)
    return EventsOut(node=node, host=host, at=at, kept=kept, events=found)


def name_of(snapshot: Snapshot | None) -> tuple[str, str, float]:
    """The node's name, its host's, and when it was seen last."""
    if snapshot is None:
        return "", "", 0.0
    meta = snapshot.meta
    return meta.terms.node or meta.host, meta.host, snapshot.wall / SECOND


def gathered(kept: Kept | None, snapshot: Snapshot | None, wanted: Wanted) -> list[Statement]:
    """What the store has, and the jobs that it does not know yet: those that run, or without a store all."""
    told = [] if kept is None else kept.statements(wanted)
    known = {statement.owner.job_id for statement in told if statement.running}
    jobs = [] if snapshot is None else [job for job in snapshot.jobs if kept is None or job.gpus]
    unknown = [job for job in jobs if job.owner.job_id not in known]
    live = [] if snapshot is None else [_live(job, snapshot) for job in unknown]
    return newest([*told, *(one for one in live if wanted.has(one))])[: wanted.limit]


def newest(statements: Iterable[Statement]) -> list[Statement]:
    """The newest end first; of those that end together the one that began later."""
    return sorted(statements, key=lambda one: (-one.end, -one.start, one.owner.job_id))


def _live(job: JobView, snapshot: Snapshot) -> Statement:
    """A statement of what only the snapshot remembers: what happened before now, and its course, are not in it."""
    node, _, _ = name_of(snapshot)
    held = [gpu for gpu in snapshot.gpus if gpu.device.uuid in job.gpus]
    whole = sum(gpu.device.weight / PPM / max(1, len(gpu.owners)) for gpu in held)
    ended = snapshot.wall - (snapshot.at - job.counters.now.until)
    until = (snapshot.wall if job.gpus else ended) / SECOND
    states = dict(job.states)
    return statement_of(
        job,
        node=node,
        life=f"{node}@{snapshot.meta.started:.6f}",
        until=until,
        money=_money(job, whole),
        gpus={gpu.device.uuid: gpu.device.index for gpu in held},
        models=tuple(sorted({gpu.device.model for gpu in held})),
        whole_gpus=whole,
        happened={"hung": states.get(State.HUNG, 0), "zombie": states.get(State.ZOMBIE, 0)},
        samples=(sample_of(job, snapshot.wall),),
        simulated=snapshot.meta.simulated,
    )


def _money(job: JobView, whole: float) -> dict[str, float]:
    """All its time at the price of what it holds now."""
    hours = job.counters.now.paid / _HOUR
    costs = [(currency, cost) for currency, cost in job.costs if currency != NO_PRICE.currency]
    return {currency: hours * cost / whole for currency, cost in costs} if whole else {}
