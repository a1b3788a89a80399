"""Tracks each job across Snapshots: its cost, GPUs, incidents and samples, none of which a single Snapshot has.

Also derives events from consecutive Snapshots. Costs a few microseconds per GPU and job. Does not access the disk.
"""

from collections.abc import Iterator
from math import isclose

import msgspec
from msgspec import Struct

from exporter.core.findings import describe_culprit
from exporter.core.job_record import JobRecord, JobSample, NodeEvent, PriceChange, build_job_record, job_sample
from exporter.core.model import NEVER, PPM, SECOND, State
from exporter.core.prices import NO_PRICE
from exporter.core.snapshot import GpuView, JobView, Snapshot

MOST_SAMPLES = 96
"""Samples kept per job. Beyond it every other sample is dropped, and the sampling interval doubles. As many changes of
its price are kept; beyond it every other one is dropped."""
MOST_CLOSED = 1024
"""Jobs with closed books whose end is remembered."""
_HOUR = 3600.0
_UPDATE_EVERY = 60 * SECOND
_XID_EVERY = 60 * SECOND
"""Critical errors of one GPU and code within that time are one event: a broken GPU may report one every second."""
_MOST_XID_CODES = 8
"""Codes of one GPU that have an event of their own within that time."""
_EVENT_STATES = (State.HUNG, State.ZOMBIE, State.UNAVAILABLE)
"""States that are recorded as events when they begin and end."""


def _reason(gpu: GpuView, snapshot: Snapshot) -> str:
    """Why a GPU is in its state; of a hang, also for which rank its job waits, if that is known."""
    owners = {owner.job_id for owner in gpu.owners} if gpu.state is State.HUNG else ()
    found = (job.finding for job in snapshot.jobs if job.owner.job_id in owners and job.finding is not None)
    return next((f"{gpu.reason}; its job waits for {describe_culprit(finding)}" for finding in found), gpu.reason)


class JobTally(Struct, kw_only=True):
    """Values of one job that its book in the ledger does not hold. Stored in checkpoints: field names must stay."""

    start: float
    """Unix seconds; does not change once `recorded`, because job id, ledger id and start identify the job's record."""
    paid: int = 0
    """GPU-nanoseconds already included in `money`."""
    money: dict[str, float] = {}
    """Cost so far by currency."""
    gpus: dict[str, str] = {}
    """Index of each GPU it has held, by uuid."""
    models: dict[str, None] = {}
    whole_gpus: float = 0.0
    """Most GPUs held at once, a slice or a shared GPU counting as a fraction."""
    rates: dict[str, float] = {}
    """Latest price of one GPU-hour, by currency."""
    price_changes: list[PriceChange] = []
    happened: dict[str, int] = {}
    """Number of events by kind."""
    apart: float = 0.0
    """Minimum seconds between its samples; 0 until samples were first dropped."""
    ended: bool = False
    """Whether it has released its GPUs and its record was made."""
    recorded: bool = False
    """Whether a record with this start was ever made for the store."""


def _set_rates(tally: JobTally, rates: dict[str, float]) -> None:
    """Set the price from now on; what the job has cost so far is kept beside a change, so that periods can be split."""
    if tally.rates and not (
        rates.keys() == tally.rates.keys() and all(isclose(rates[of], rate) for of, rate in tally.rates.items())
    ):
        tally.price_changes.append(PriceChange(tally.paid, dict(tally.money)))
        if len(tally.price_changes) > MOST_SAMPLES:
            del tally.price_changes[1:-1:2]
    tally.rates = rates


class JobTracker:
    """Holds a tally and the samples of each job in a node's Snapshots."""

    def __init__(self, *, node: str, ledger_id: str, sample_seconds: float = 300.0) -> None:
        self.node, self.ledger_id, self.sample_seconds = node, ledger_id, sample_seconds
        self.tallies: dict[str, JobTally] = {}
        self.samples: dict[str, list[JobSample]] = {}
        self.closed_until: dict[str, float] = {}
        """End of the closed book of each job, in Unix seconds, by job id."""
        self._states: dict[str, State] = {}
        self._xids: dict[str, int] = {}
        self._xids_told: dict[str, int] = {}
        """By GPU, number of critical errors at the latest event about them."""
        self._xid_events: dict[str, dict[int, int]] = {}
        """By GPU and code, time of the event within the last minute, monotonic nanoseconds."""
        self._holding: frozenset[str] = frozenset()
        self._next_update = NEVER

    def update(self, snapshot: Snapshot) -> tuple[list[NodeEvent], list[JobRecord]]:
        """Return events since the previous Snapshot, and records of jobs that have ended."""
        events = [event for gpu in snapshot.gpus for event in self._events(gpu, snapshot)]
        holding = frozenset(job.owner.job_id for job in snapshot.jobs if job.gpus)
        if snapshot.at >= self._next_update:
            self._next_update = snapshot.at + _UPDATE_EVERY
            self.update_jobs(snapshot)
        elif holding != self._holding:
            self._update_gpus(snapshot)
        ended = [
            self._ended_record(job, snapshot)
            for job in snapshot.jobs
            if not job.gpus and (job.owner.job_id in self._holding or not self._tally(job).ended)
        ]
        ended += [self._departed_record(job, snapshot) for job in snapshot.departed]
        self._holding = holding
        return events, ended

    def update_jobs(self, snapshot: Snapshot) -> None:
        """Update GPUs, costs and samples of every job; called once a minute and before each checkpoint."""
        self._update_gpus(snapshot)
        for job in snapshot.jobs:
            tally = self._tally(job)
            self._add_cost(job, tally)
            samples = self.samples.setdefault(job.owner.job_id, [])
            apart = max(tally.apart, self.sample_seconds)
            if job.gpus and (not samples or snapshot.wall / SECOND - samples[-1].at >= apart):
                samples.append(job_sample(job, snapshot.wall))
                if len(samples) > MOST_SAMPLES:
                    del samples[1:-1:2]
                    tally.apart = 2 * apart

    def running_records(self, snapshot: Snapshot) -> Iterator[JobRecord]:
        """Yield the record of each job that holds a GPU, as of this Snapshot."""
        return (self._record(job, snapshot) for job in snapshot.jobs if job.gpus)

    def all_records(self, snapshot: Snapshot) -> list[JobRecord]:
        """Return records of all jobs, marked as ended because this ledger is not continued."""
        records = (self._record(job, snapshot) for job in snapshot.jobs)
        return [msgspec.structs.replace(record, running=False, hang=None) for record in records]

    # -- jobs --

    def _tally(self, job: JobView) -> JobTally:
        tally = self.tallies.get(job.owner.job_id)
        if tally is None:
            start = max(job.start / SECOND, self.closed_until.get(job.owner.job_id, 0.0))
            tally = self.tallies[job.owner.job_id] = JobTally(start=start)
        if job.gpus:  # perhaps again, after a release: its book continues, and so does its record
            tally.ended = False
        return tally

    def _ended_record(self, job: JobView, snapshot: Snapshot) -> JobRecord:
        tally = self._tally(job)
        record = self._record(job, snapshot)
        tally.ended = tally.recorded = True
        return record

    def _departed_record(self, job: JobView, snapshot: Snapshot) -> JobRecord:
        """Return the last record of a job whose book is closed.

        If the job returns, it gets a new record with a later start, so that this record is not replaced.
        """
        record, name = self._ended_record(job, snapshot), job.owner.job_id
        del self.tallies[name]
        self.samples.pop(name, None)
        self.closed_until[name] = record.end
        while len(self.closed_until) > MOST_CLOSED:
            del self.closed_until[next(iter(self.closed_until))]
        return record

    def _record(self, job: JobView, snapshot: Snapshot) -> JobRecord:
        tally = self._tally(job)
        self._add_cost(job, tally)
        until = (snapshot.wall - (snapshot.at - job.counters.now.until)) / SECOND
        if tally.start > until:  # the wall clock was set back: by it, the job began at `job.start`
            if tally.recorded:
                until = tally.start + (until - job.start / SECOND)
            else:
                tally.start = job.start / SECOND
        last = job_sample(job, round(until * SECOND))
        samples = [sample for sample in self.samples.get(job.owner.job_id, ()) if sample.at < last.at]
        record = build_job_record(
            job,
            node=self.node,
            life=self.ledger_id,
            until=until,
            money=tally.money,
            gpus=tally.gpus,
            models=tuple(tally.models),
            whole_gpus=tally.whole_gpus,
            happened=tally.happened,
            samples=(*samples, last),
            price_changes=tuple(tally.price_changes),
            simulated=snapshot.meta.simulated,
        )
        return msgspec.structs.replace(record, start=tally.start)

    def _add_cost(self, job: JobView, tally: JobTally) -> None:
        """Add the cost of the GPU time since the previous call; time without a price is charged at the next price."""
        if not tally.rates:
            return
        hours = (job.counters.now.paid - tally.paid) / SECOND / _HOUR
        tally.paid = job.counters.now.paid
        for currency, rate in tally.rates.items():
            tally.money[currency] = tally.money.get(currency, 0.0) + hours * rate

    def _update_gpus(self, snapshot: Snapshot) -> None:
        """Update each job's GPUs, their number and their hourly price."""
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
                self._add_cost(job, tally)
                tally.whole_gpus = max(tally.whole_gpus, share)
                _set_rates(tally, {of: cost / share for of, cost in job.costs if of != NO_PRICE.currency})

    # -- events --

    def _events(self, gpu: GpuView, snapshot: Snapshot) -> Iterator[NodeEvent]:
        uuid = gpu.device.uuid
        before, self._states[uuid] = self._states.get(uuid), gpu.state
        xids_before, self._xids[uuid] = self._xids.get(uuid, gpu.xids), gpu.xids
        if gpu.xids > xids_before:
            new = gpu.xids - self._xids_told.get(uuid, gpu.xids)
            more = f" ({new} since the event before)" if new > 1 else ""
            event = self._event("xid", gpu, snapshot, f"the driver told critical error {gpu.last_xid}{more}")
            times = self._xid_events.get(uuid, {})
            times = {code: at for code, at in times.items() if snapshot.at - at < _XID_EVERY}
            if gpu.last_xid not in times and len(times) < _MOST_XID_CODES:
                times[gpu.last_xid] = snapshot.at
                self._xids_told[uuid] = gpu.xids
                yield event
            self._xid_events[uuid] = times
        if before is gpu.state or before is None:
            return
        if before in _EVENT_STATES:
            yield self._event(f"{before}_over", gpu, snapshot, f"{before} is over; now {gpu.state}")
        if gpu.state in _EVENT_STATES:
            yield self._event(gpu.state, gpu, snapshot, _reason(gpu, snapshot))

    def _event(self, kind: str, gpu: GpuView, snapshot: Snapshot, text: str) -> NodeEvent:
        for owner in gpu.owners:
            tally = self.tallies.get(owner.job_id)
            if tally is not None and not kind.endswith("_over"):
                tally.happened[kind] = tally.happened.get(kind, 0) + 1
        return NodeEvent(
            at=snapshot.wall / SECOND,
            kind=kind,
            uuid=gpu.device.uuid,
            gpu=gpu.device.index,
            job_id=",".join(owner.job_id for owner in gpu.owners),
            text=text,
        )

    # -- over a restart --

    def dump_tallies(self) -> bytes:
        """Serialize tallies and `closed_until`."""
        return msgspec.msgpack.encode((self.tallies, self.closed_until))

    def dump_samples(self) -> bytes:
        """Serialize samples: separate because they are larger and written less often."""
        return msgspec.msgpack.encode(self.samples)

    def load(self, tallies: bytes, samples: bytes) -> None:
        """Restore the state that `dump_tallies` and `dump_samples` wrote; raises msgspec.DecodeError."""
        self.tallies, self.closed_until = msgspec.msgpack.decode(
            tallies, type=tuple[dict[str, JobTally], dict[str, float]]
        )
        self.samples = msgspec.msgpack.decode(samples, type=dict[str, list[JobSample]])
