"""Produces one Observation an interval, whatever happens to source and scheduler.

`Collector` is the thread that alone calls source, scheduler and workload listeners, so that what blocks there blocks
nobody else; `Sampler` owns the grid of ticks, the deadline for an answer, and which values have changed. It logs each
fault when it appears and when it is over. `Sampler` never touches source or scheduler itself.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from exporter.agent.inventory import Inventory, InventoryFile, missing_faults
from exporter.agent.pause import PauseFile
from exporter.clock import Clock
from exporter.core.model import (
    NEVER,
    SECOND,
    Allocation,
    Device,
    Fault,
    Health,
    Observation,
    Reading,
    ServingReport,
    TrainingReport,
)
from exporter.formatting import escape_surrogates
from exporter.redact import redact_secrets
from exporter.schedulers.base import Member, Scheduler, SchedulerError, SchedulerState
from exporter.schedulers.privacy import MaskedScheduler, UserMask, without_paths
from exporter.schedulers.rules import Rules
from exporter.sources.base import ReadResult, SourceError
from exporter.sources.selector import SourceSelector
from exporter.workloads import WorkloadListener, WorkloadProcess, WorkloadUpdate


class RankTracker:
    """What is said of one GPU by two sides, said together."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str], str] = {}

    def allocations(self, state: SchedulerState, readings: Iterable[Reading]) -> tuple[Allocation, ...]:
        """The allocations, with the ranks whose processes are, or were last, on each GPU."""
        self._ranks |= {key: _format_ranks(ranks) for key, ranks in _ranks_by_gpu(state, readings).items()}
        held = {(allocation.uuid, allocation.owner.job_id) for allocation in state.allocations}
        self._ranks = {key: ranks for key, ranks in self._ranks.items() if key in held}
        if not self._ranks:
            return state.allocations
        return tuple(
            replace(allocation, ranks=self._ranks.get((allocation.uuid, allocation.owner.job_id), ""))
            for allocation in state.allocations
        )


def _ranks_by_gpu(state: SchedulerState, readings: Iterable[Reading]) -> dict[tuple[str, str], set[int]]:
    ranks: dict[tuple[str, str], set[int]] = {}
    for reading in readings if state.members else ():
        for process in reading.processes or ():
            member = state.members.get(process.pid)
            if member is not None and member.rank:
                ranks.setdefault((reading.uuid, member.job_id), set()).add(int(member.rank))
    return ranks


def _format_ranks(ranks: Iterable[int]) -> str:
    return ",".join(map(str, sorted(ranks)))


def with_job_ids(readings: tuple[Reading, ...], state: SchedulerState) -> tuple[Reading, ...]:
    """The readings, each process with the job it belongs to."""
    if not state.members:
        return readings
    return tuple(_with_job_ids(reading, state) for reading in readings)


def _with_job_ids(reading: Reading, state: SchedulerState) -> Reading:
    if not reading.processes:
        return reading
    members = state.members
    joined = tuple(
        replace(process, job_id=members[process.pid].job_id) if process.pid in members else process
        for process in reading.processes
    )
    return replace(reading, processes=joined)


def with_condition(devices: tuple[Device, ...], condition: str) -> tuple[Device, ...]:
    """The devices, those that are well under the node's own condition."""
    if not condition:
        return devices
    return tuple(device if device.condition else replace(device, condition=condition) for device in devices)


def workload_processes(state: SchedulerState, readings: Iterable[Reading]) -> tuple[WorkloadProcess, ...]:
    """The processes on GPUs that are known to be those of the job that holds the GPU."""
    holds = {(allocation.uuid, allocation.owner.job_id) for allocation in state.allocations if allocation.end is None}
    uuids_by_pid: dict[int, list[str]] = {}
    for reading in readings if state.members else ():
        for process in reading.processes or ():
            member = state.members.get(process.pid)
            if member is not None and (reading.uuid, member.job_id) in holds:
                uuids_by_pid.setdefault(process.pid, []).append(reading.uuid)
    present = {pid: member for pid, member in state.members.items() if pid in uuids_by_pid}
    return tuple(processes_of_holders(state, present, uuids_by_pid).values())


def processes_of_holders(
    state: SchedulerState, members: Mapping[int, Member], uuids_by_pid: Mapping[int, Iterable[str]]
) -> dict[int, WorkloadProcess]:
    """Of these members those whose job holds a GPU here; `on` says on which GPUs a process is."""
    classes = {
        allocation.owner.job_id: allocation.owner.workload_class
        for allocation in state.allocations
        if allocation.end is None
    }
    return {
        pid: WorkloadProcess(pid, member.job_id, tuple(uuids_by_pid.get(pid, ())), member.rank, classes[member.job_id])
        for pid, member in members.items()
        if member.job_id in classes
    }


log = logging.getLogger(__name__)
PAUSED = "paused"
"""Kind of the fault that a pause is, and so the reason of its unobserved time."""


class Collected(Struct):
    """What one visit to source and scheduler brought home."""

    requested_at: int
    batch: ReadResult | None = None
    """None: nothing could be read, or was not to be; `faults` say why."""
    devices: tuple[Device, ...] = ()
    """Those to account for; some the source may not list."""
    allocations: tuple[Allocation, ...] | None = None
    """None: the scheduler said nothing."""
    allocations_at: int = 0
    """When they were last known to be true."""
    unanswered_since: int | None = None
    """Since when the scheduler has waited for an answer of its own; None: it does not."""
    faults: tuple[Fault, ...] = ()
    """All there are: the source's, the inventory's, the scheduler's, the listeners'."""
    reports: tuple[TrainingReport, ...] = ()
    serving: tuple[ServingReport, ...] = ()
    messages: tuple[tuple[str, int], ...] = ()
    """What listeners have heard since the start, by what became of it."""
    source: str = ""
    """Name of the source; empty where there is none."""
    reason: str = ""
    """Why that one, for people."""
    seconds: float = 0.0


class Collector:
    """Asked by one other thread; answers in the order of the questions."""

    def __init__(
        self,
        selector: SourceSelector,
        scheduler: Scheduler,
        *,
        pause: PauseFile | None = None,
        inventory: Inventory | None = None,
        inventory_file: InventoryFile | None = None,
        listeners: Sequence[WorkloadListener] = (),
        mask: UserMask | None = None,
    ) -> None:
        """`mask`: how people are told in all that is brought home; None: as they are."""
        self._mask = mask
        self._listeners, self._last_error = tuple(listeners), ""
        self._scheduler_state: SchedulerState | None = None
        """The scheduler's latest."""
        self._selector, self._pause = selector, pause
        self._scheduler = scheduler if mask is None else MaskedScheduler(scheduler, mask)
        self._inventory, self._inventory_file = inventory or Inventory(), inventory_file
        self._rank_tracker, self._condition = RankTracker(), ""
        self._paused = False
        self._requests: queue.SimpleQueue[tuple[int, bool] | Rules | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Collected] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def collect_now(self, now: int) -> Collected:
        """Go out before anything is sampled, to see whether there is a source at all; takes as long as it takes."""
        self.request(now, resync=False)
        return self._results.get()

    def request(self, now: int, *, resync: bool) -> None:
        """Send the hands out once; `resync` makes the source forget what lies before."""
        self._requests.put((now, resync))

    def update(self, rules: Rules) -> None:
        """Have the scheduler judge by these from the next visit on; from any thread."""
        self._requests.put(rules)

    def result(self, timeout: float) -> Collected | None:
        """The answer, if it comes within `timeout` seconds."""
        try:
            return self._results.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let go. A thread stuck inside a vendor's call is left to the end of the process."""
        self._requests.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            if isinstance(request, Rules):
                self._update_rules(request)
                continue
            started = time.perf_counter()
            collected = self._guarded(*request)
            collected.seconds = time.perf_counter() - started
            self._results.put(collected)
            if collected.batch is not None:
                self._upgrade_source(collected.requested_at)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._scheduler.close()

    def _update_rules(self, rules: Rules) -> None:
        try:
            self._scheduler.update(rules)
        except Exception:
            log.exception("the new rules were not taken; please report this")

    def _guarded(self, now: int, resync: bool) -> Collected:  # noqa: FBT001  as `ask` queued it
        try:
            collected = self._collect(now, resync=resync)
        except Exception as err:  # a fault of ours must not end the thread, or no time would be seen any more
            log.exception("a visit to the source failed; please report this")
            collected = Collected(now, faults=(Fault("source_failed", f"the visit failed: {err}"),))
        collected.source, collected.reason = self._selector.name, self._publishable(self._selector.reason)
        collected.faults = tuple(replace(fault, message=self._publishable(fault.message)) for fault in collected.faults)
        if self._mask is not None and collected.batch is not None:
            # Its faults are among the answer's.
            collected.batch = replace(collected.batch, faults=(), readings=without_paths(collected.batch.readings))
        return collected

    def _publishable(self, text: str) -> str:
        """What anybody may read of it, and what can be written."""
        text = redact_secrets(escape_surrogates(text))
        return text if self._mask is None else self._mask.text(text)

    def _collect(self, now: int, *, resync: bool) -> Collected:
        message = self._pause.poll() if self._pause is not None else ""
        if message:
            return self._collect_paused(now, message)
        resumed, self._paused = self._paused, False
        if resync or resumed:
            self._selector.resync()
        faults = (Fault(PAUSED, "the pause is over, what was not read is forgotten"),) if resumed else ()
        try:
            return self._collect_scheduler(now, self._selector.read(now), faults)
        except SourceError as err:
            return Collected(now, faults=(*faults, Fault("source_failed", str(err))))

    def _collect_paused(self, now: int, message: str) -> Collected:
        """One tick of a pause: the counters are let go of once, at its beginning."""
        if not self._paused:
            self._paused = True
            self._selector.pause()
        return Collected(now, faults=(Fault(PAUSED, message),))

    def _collect_scheduler(self, now: int, batch: ReadResult, faults: tuple[Fault, ...]) -> Collected:
        devices = self._inventory.update(batch.devices)
        if self._inventory_file is not None:
            self._inventory_file.save(self._inventory.boards())
        collected = Collected(
            now, batch, devices=devices, faults=faults + batch.faults + missing_faults(devices, batch.devices)
        )
        try:
            state = self._scheduler.poll(now, devices, batch.readings)
        except Exception as err:
            if not isinstance(err, SchedulerError):
                log.warning("scheduler failed", exc_info=err)
            collected.faults += (Fault("scheduler_failed", str(err)),)
        else:
            if state is not None:
                self._apply_scheduler(collected, state, batch)
        collected.devices = with_condition(devices, self._condition)
        if self._listeners and self._scheduler_state is not None:
            self._collect_workloads(collected, self._scheduler_state, batch)
        return collected

    def _collect_workloads(self, collected: Collected, state: SchedulerState, batch: ReadResult) -> None:
        """Take what workloads have said; one that cannot be listened to keeps nobody else from being heard."""
        processes = self._verified(workload_processes(state, batch.readings))
        counts: Counter[str] = Counter()
        for listener in self._listeners:
            try:
                messages = listener.poll(collected.requested_at, processes, self._identify)
            except Exception as err:
                if self._last_error != (error := f"{err!r}"):  # a bug of every tick is told once
                    self._last_error = error
                    log.exception("listening to workloads failed; please report this")
                messages = WorkloadUpdate(faults=(Fault("listening_failed", f"listening failed: {err}"),))
            collected.reports += messages.reports
            collected.serving += messages.serving
            collected.faults += messages.faults
            counts.update(dict(messages.counts))
        collected.messages = tuple(sorted(counts.items()))

    def _verified(self, listed: Sequence[WorkloadProcess]) -> tuple[WorkloadProcess, ...]:
        """Those whose job does not rest on what the process itself could have written into its environment."""
        members = self._scheduler.members([process.pid for process in listed]) if listed else {}
        return tuple(
            process for process in listed if process.pid in members and members[process.pid].job_id == process.job_id
        )

    def _identify(self, pids: Sequence[int]) -> Mapping[int, WorkloadProcess]:
        state = self._scheduler_state
        return {} if state is None else processes_of_holders(state, self._scheduler.members(pids), {})

    def _apply_scheduler(self, collected: Collected, state: SchedulerState, batch: ReadResult) -> None:
        self._condition, self._scheduler_state = state.condition, state
        collected.allocations, collected.allocations_at = (
            self._rank_tracker.allocations(state, batch.readings),
            state.at,
        )
        collected.batch = replace(batch, readings=with_job_ids(batch.readings, state))
        collected.unanswered_since = state.unanswered_since
        collected.faults += state.faults

    def _upgrade_source(self, now: int) -> None:
        """After the answer has been given, so that a source that blocks when it is opened delays no reading."""
        try:
            self._selector.try_better(now)
        except Exception:
            log.exception("looking for a better source failed; please report this")


_ONE_TIME_FAULTS = ("clock_step", "unknown_model", "xid_unassigned")
"""Kinds of faults that happen, or are said once for good: it makes no sense to tell that they are over."""


class Sampler:
    """One Observation an interval, from hands that may be slow, late or lost.

    `first` is what the hands have brought home already: it makes the first Observation, and nothing is asked for that.
    """

    def __init__(
        self, collector: Collector, clock: Clock, *, interval: float, deadline: float, first: Collected | None = None
    ) -> None:
        self._collector, self._clock, self._first = collector, clock, first
        self.name = "" if first is None else first.source
        self._interval, self._deadline = round(interval * 1000) * SECOND // 1000, round(deadline * SECOND)
        self._pending: int | None = None
        self._given_up = False
        self._settled = 0
        self._devices: tuple[Device, ...] | None = None
        self._allocations: tuple[Allocation, ...] | None = None
        self._allocations_at = NEVER
        self._faults = ActiveFaults()
        self.reason = ""
        """Why this source, in one sentence for people."""
        self._unanswered_since: int | None = None
        self.messages: tuple[tuple[str, int], ...] = ()
        """What workloads have said since the start, by what became of it."""
        self.late = 0
        self.read_seconds = 0.0

    @property
    def unanswered_seconds(self) -> float:
        """For how long a question of the scheduler's to its controller has had no answer; 0: none is open."""
        since = self._unanswered_since
        return 0.0 if since is None else max(0, self._clock.now() - since) / SECOND

    def observations(self, stop: threading.Event) -> Iterator[Observation]:
        """Yield an Observation an interval until `stop` is set."""
        due = self._settled = self._clock.now()
        while not stop.is_set():
            yield self._guarded(self._clock.now())
            due += self._interval
            now = self._clock.now()
            if now > due + self._interval // 2:
                self.late += 1
                due = now + self._interval - (now - due) % self._interval
                if due - now < self._interval // 2:  # two reads in quick succession measure nothing
                    due += self._interval
            self._clock.wait(due, stop)

    def _guarded(self, now: int) -> Observation:
        try:
            return self._observe(now)
        except Exception as err:  # a fault of ours must not end the node's accounting
            log.exception("observing failed; please report this")
            return self._without_readings(now, faults=(Fault("source_failed", f"observing failed: {err}"),))

    def _observe(self, now: int) -> Observation:
        first, self._first = self._first, None
        if first is not None:
            return self._received(first)
        if self._pending is None:
            self._collector.request(now, resync=self._given_up)
            self._pending, self._given_up = now, False
        collected = self._collector.result(timeout=self._interval / SECOND)
        if collected is None:
            return self._no_answer_yet(now)
        self._pending = None
        return self._received(collected)

    def _received(self, collected: Collected) -> Observation:
        self.read_seconds += collected.seconds
        if collected.allocations is not None:
            self._unanswered_since = collected.unanswered_since
        self.messages = collected.messages or self.messages
        self.name, self.reason = collected.source or self.name, collected.reason
        return self._late_answer(collected) if self._given_up else self._with_readings(collected)

    def _no_answer_yet(self, now: int) -> Observation:
        """The hands are still out: leave the time open until the deadline, then give it up."""
        if self._pending is not None and now - self._pending <= self._deadline:
            return self._without_readings(now, settled=self._settled)
        self._given_up = True
        waited = (now - (self._pending or now)) / SECOND
        fault = Fault("source_hung", f"{self.name or 'the source'}: no answer for {waited:.0f} s; still waiting")
        self._faults.add((fault,), now)
        return self._without_readings(now, faults=(fault,))

    def _late_answer(self, collected: Collected) -> Observation:
        """An answer came after its time was given up: that must not be counted twice. What it says beside is kept."""
        now = self._clock.now()
        log.info("source answers again")
        self._faults.add(collected.faults, now)
        faults = (Fault("source_hung", "the late answer was dropped"), *collected.faults)
        return self._without_readings(
            now, faults=faults, health=collected.batch.health if collected.batch is not None else ()
        )

    def _without_readings(
        self, now: int, *, settled: int | None = None, faults: tuple[Fault, ...] = (), health: tuple[Health, ...] = ()
    ) -> Observation:
        self._settled = now if settled is None else settled
        return Observation(
            now,
            self._clock.wall(),
            settled=settled,
            allocations_at=self._allocations_at,
            source=self.name,
            faults=faults,
            health=health,
        )

    def _with_readings(self, collected: Collected) -> Observation:
        now, batch = self._clock.now(), collected.batch
        if batch is None:
            self._faults.add(collected.faults, now)
            return self._without_readings(now, faults=collected.faults)
        self._faults.set_active(collected.faults, now)
        self._settled = collected.requested_at if batch.settled is None else min(batch.settled, collected.requested_at)
        changed = collected.allocations is not None and collected.allocations != self._allocations
        if collected.allocations is not None:
            self._allocations, self._allocations_at = collected.allocations, collected.allocations_at
        return Observation(
            at=now,
            wall=self._clock.wall(),
            settled=self._settled,
            readings=batch.readings,
            devices=self._changed_devices(collected.devices),
            allocations=collected.allocations if changed else None,
            allocations_at=self._allocations_at,
            source=self.name,
            faults=collected.faults,
            health=batch.health,
            reports=collected.reports,
            serving=collected.serving,
        )

    def _changed_devices(self, devices: tuple[Device, ...]) -> tuple[Device, ...] | None:
        """The inventory where it is not what was said last."""
        if devices == self._devices:
            return None
        self._devices = devices
        return devices


class ActiveFaults:
    """Faults that have appeared and are not over: one line in the log at either end, none between.

    A fault is its kind and its GPU; what its message says may change from tick to tick.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], int] = {}

    def add(self, faults: Iterable[Fault], now: int) -> None:
        """These are known to stand; of the others nothing is known."""
        for fault in faults:
            if (fault.kind, fault.uuid) not in self._since:
                self._since[fault.kind, fault.uuid] = now
                log.warning("%s: %s", fault.kind, fault.message)

    def set_active(self, faults: Iterable[Fault], now: int) -> None:
        """These and no others stand."""
        faults = tuple(faults)
        self.add(faults, now)
        active = {(fault.kind, fault.uuid) for fault in faults}
        for kind, uuid in [key for key in self._since if key not in active]:
            seconds = (now - self._since.pop((kind, uuid))) / SECOND
            if kind not in _ONE_TIME_FAULTS:
                log.info("%s%s is over after %.0f s", kind, f" of {uuid}" if uuid else "", seconds)
