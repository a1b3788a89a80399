"""What is remembered of the jobs and GPUs of a node along the way, for a Snapshot tells only of now.

Owns a tally for each job (what it cost, which GPUs it had, what happened to them, its course) and the events that two
Snapshots, one after the other, make. Refuses disks. All of it costs a few microseconds a GPU and a job.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from exporter.core.model import NEVER, PPM, SECOND, State
from exporter.core.money import NO_PRICE
from exporter.core.snapshot import GpuView, JobView, Snapshot
from exporter.core.statement import Event, Sample, Statement, sample_of, statement_of

MOST_SAMPLES = 96
"""Of one job: where there are more, every other one goes, and from then on they lie twice as far apart."""
MOST_PAST = 1024
_HOUR = 3600.0
_LOOK_EVERY = 60 * SECOND
_TOLD = (State.HUNG, State.ZOMBIE, State.UNAVAILABLE)
"""States whose beginning and end are events."""


class Tally(Struct, kw_only=True):
    """What must be known of a job beside its book."""

    start: float
    """Unix seconds. Fixed: with it, the job and the life it is the statement's name."""
    paid: int = 0
    """GPU-nanoseconds that are in `money`."""
    money: dict[str, float] = {}
    gpus: dict[str, str] = {}
    models: dict[str, None] = {}
    whole_gpus: float = 0.0
    rates: dict[str, float] = {}
    """What a GPU-hour of it costs, by currency, as far as was seen last."""
    happened: dict[str, int] = {}
    apart: float = 0.0
    """Seconds between its samples, at least."""
    ended: bool = False
    """It holds no GPU any more, and its statement was made."""


class Memory:
    """Tallies and courses of all jobs that a node's Snapshots show."""

    def __init__(self, *, node: str, life: str, sample_seconds: float = 300.0) -> None:
        self.node, self.life, self.sample_seconds = node, life, sample_seconds
        self.tallies: dict[str, Tally] = {}
        self.courses: dict[str, list[Sample]] = {}
        self.past: dict[str, float] = {}
        """Up to when jobs are booked whose books are closed: Unix seconds."""
        self._states: dict[str, State] = {}
        self._xids: dict[str, int] = {}
        self._holding: frozenset[str] = frozenset()
        self._next_look = NEVER

    def take_in(self, snapshot: Snapshot) -> tuple[list[Event], list[Statement]]:
        """Compare with the Snapshot before: what happened, and the statements of jobs that have ended."""
        events = [event for gpu in snapshot.gpus for event in self._events(gpu, snapshot)]
        holding = frozenset(job.owner.job_id for job in snapshot.jobs if job.gpus)
        if snapshot.at >= self._next_look:
            self._next_look = snapshot.at + _LOOK_EVERY
            self.look_closer(snapshot)
        elif holding != self._holding:
            self._note_gpus(snapshot)
        ended = [
            self._ended(job, snapshot)
            for job in snapshot.jobs
            if not job.gpus and (job.owner.job_id in self._holding or not self._tally(job).ended)
        ]
        ended += [self._departed(job, snapshot) for job in snapshot.departed]
        self._holding = holding
        return events, ended

    def look_closer(self, snapshot: Snapshot) -> None:
        """What need not be done at every tick: see what is held, count money, take samples."""
        self._note_gpus(snapshot)
        for job in snapshot.jobs:
            tally = self._tally(job)
            self._count(job, tally)
            course = self.courses.setdefault(job.owner.job_id, [])
            apart = max(tally.apart, self.sample_seconds)
            if job.gpus and (not course or snapshot.wall / SECOND - course[-1].at >= apart):
                course.append(sample_of(job, snapshot.wall))
                if len(course) > MOST_SAMPLES:
                    del course[1:-1:2]
                    tally.apart = 2 * apart

    def statements(self, snapshot: Snapshot) -> Iterator[Statement]:
        """Of the jobs that hold a GPU now: what would be said if they ended here."""
        return (self._statement(job, snapshot) for job in snapshot.jobs if job.gpus)

    def every_statement(self, snapshot: Snapshot) -> list[Statement]:
        """Of all jobs, as ended: nobody counts on from here."""
        return [msgspec.structs.replace(self._statement(job, snapshot), running=False) for job in snapshot.jobs]

    # -- jobs --

    def _tally(self, job: JobView) -> Tally:
        tally = self.tallies.get(job.owner.job_id)
        if tally is None:
            start = max(job.start / SECOND, self.past.get(job.owner.job_id, 0.0))
            tally = self.tallies[job.owner.job_id] = Tally(start=start)
        if job.gpus:  # again, perhaps: its book goes on, and so does its statement
            tally.ended = False
        return tally

    def _ended(self, job: JobView, snapshot: Snapshot) -> Statement:
        self._tally(job).ended = True
        return self._statement(job, snapshot)

    def _departed(self, job: JobView, snapshot: Snapshot) -> Statement:
        """Its book is closed. If it comes back, it is another statement's, which must not take this one's name."""
        statement, name = self._ended(job, snapshot), job.owner.job_id
        del self.tallies[name]
        self.courses.pop(name, None)
        self.past[name] = statement.end
        while len(self.past) > MOST_PAST:
            del self.past[next(iter(self.past))]
        return statement

    def _statement(self, job: JobView, snapshot: Snapshot) -> Statement:
        tally = self._tally(job)
        self._count(job, tally)
        until = (snapshot.wall - (snapshot.at - job.counters.now.until)) / SECOND
        last = sample_of(job, round(until * SECOND))
        course = [sample for sample in self.courses.get(job.owner.job_id, ()) if sample.at < last.at]
        made = statement_of(
            job,
            node=self.node,
            life=self.life,
            until=until,
            money=tally.money,
            gpus=tally.gpus,
            models=tuple(tally.models),
            whole_gpus=tally.whole_gpus,
            happened=tally.happened,
            samples=(*course, last),
            simulated=snapshot.meta.simulated,
        )
        return msgspec.structs.replace(made, start=min(tally.start, until))

    def _count(self, job: JobView, tally: Tally) -> None:
        """Put a price to what was paid since the last time."""
        hours = (job.counters.now.paid - tally.paid) / SECOND / _HOUR
        tally.paid = job.counters.now.paid
        for currency, rate in tally.rates.items():
            tally.money[currency] = tally.money.get(currency, 0.0) + hours * rate

    def _note_gpus(self, snapshot: Snapshot) -> None:
        """Which GPUs each job has, how many that is, and what an hour of them costs."""
        holders: dict[str, list[GpuView]] = {}
        for gpu in snapshot.gpus:
            for owner in gpu.owners:
                holders.setdefault(owner.job_id, []).append(gpu)
        for job in snapshot.jobs:
            held = holders.get(job.owner.job_id, ())
            tally = self._tally(job)
            tally.gpus.update((gpu.device.uuid, gpu.device.index) for gpu in held)
            tally.models.update((gpu.device.model, None) for gpu in held)
            share = sum(gpu.device.weight / PPM / len(gpu.owners) for gpu in held)
            if share:
                if tally.whole_gpus:  # what was paid before its price was first looked up is priced like what follows
                    self._count(job, tally)
                tally.whole_gpus = max(tally.whole_gpus, share)
                tally.rates = {of: cost / share for of, cost in job.costs if of != NO_PRICE.currency}

    # -- events --

    def _events(self, gpu: GpuView, snapshot: Snapshot) -> Iterator[Event]:
        uuid = gpu.device.uuid
        before, self._states[uuid] = self._states.get(uuid), gpu.state
        told, self._xids[uuid] = self._xids.get(uuid, gpu.xids), gpu.xids
        if gpu.xids > told:
            yield self._event("xid", gpu, snapshot, f"the driver told critical error {gpu.last_xid}")
        if before is gpu.state or before is None:
            return
        if before in _TOLD:
            yield self._event(f"{before}_over", gpu, snapshot, f"{before} is over; now {gpu.state}")
        if gpu.state in _TOLD:
            yield self._event(gpu.state, gpu, snapshot, gpu.reason)

    def _event(self, kind: str, gpu: GpuView, snapshot: Snapshot, text: str) -> Event:
        for owner in gpu.owners:
            tally = self.tallies.get(owner.job_id)
            if tally is not None and not kind.endswith("_over"):
                tally.happened[kind] = tally.happened.get(kind, 0) + 1
        return Event(
            at=snapshot.wall / SECOND,
            kind=kind,
            uuid=gpu.device.uuid,
            gpu=gpu.device.index,
            job_id=",".join(owner.job_id for owner in gpu.owners),
            text=text,
        )

    # -- over a restart --

    def frozen_tallies(self) -> bytes:
        """Tallies as bytes, and the ends of jobs that are gone."""
        return msgspec.msgpack.encode((self.tallies, self.past))

    def frozen_courses(self) -> bytes:
        """Courses as bytes: larger, and worth less."""
        return msgspec.msgpack.encode(self.courses)

    def thaw(self, tallies: bytes, courses: bytes) -> None:
        """Go on with those; raises msgspec.DecodeError."""
        self.tallies, self.past = msgspec.msgpack.decode(tallies, type=tuple[dict[str, Tally], dict[str, float]])
        self.courses = msgspec.msgpack.decode(courses, type=dict[str, list[Sample]])
