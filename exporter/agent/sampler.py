"""Produces one Observation per interval, even if the source or the scheduler fails or hangs.

`Collector` calls source, scheduler and workload listeners in a thread of its own, so that a blocking call blocks
nothing else. `Sampler` schedules the ticks, applies the deadline for a result, determines which values have changed,
and logs each fault when it begins and when it ends.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.agent.inventory import Inventory, InventoryFile, missing_faults
from exporter.agent.pause import PauseFile
from exporter.clock import Clock
from exporter.core.model import (
    NEVER,
    SECOND,
    Allocation,
    CollectiveReport,
    Device,
    Fault,
    HangFinding,
    Health,
    HostUsage,
    NetworkPort,
    Observation,
    Process,
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

if TYPE_CHECKING:  # it imports Unix's own modules, which commands that only ask other nodes do without
    from exporter.schedulers.page_labels import PageOwners


class RankTracker:
    """Adds the ranks of processes to the allocations of the GPUs on which they run."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str], str] = {}

    def allocations(self, state: SchedulerState, readings: Iterable[Reading]) -> tuple[Allocation, ...]:
        """Return the allocations with the ranks whose processes are on each GPU now, or were when any last was."""
        found = _ranks_by_gpu(state, readings)
        self._ranks |= {key: ",".join(map(str, sorted(ranks))) for key, ranks in found.items()}
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


def with_job_ids(readings: tuple[Reading, ...], state: SchedulerState) -> tuple[Reading, ...]:
    """Return the readings with the job id of each process that the scheduler identified."""
    members = state.members
    if not members:
        return readings

    def identified(process: Process) -> Process:
        return replace(process, job_id=members[process.pid].job_id) if process.pid in members else process

    return tuple(
        replace(reading, processes=tuple(map(identified, reading.processes))) if reading.processes else reading
        for reading in readings
    )


def with_condition(devices: tuple[Device, ...], condition: str) -> tuple[Device, ...]:
    """Return the devices; those without a condition of their own get the node's `condition`."""
    if not condition:
        return devices
    return tuple(device if device.condition else replace(device, condition=condition) for device in devices)


class ProcessTracker:
    """Keeps the processes that each GPU listed last, and their jobs.

    A tick without a reading of a GPU, or without its list, does not show that its processes are gone: values may arrive
    after the read, and listing may fail.
    """

    def __init__(self) -> None:
        self._listed: dict[str, tuple[int, ...]] = {}
        self._members: dict[int, Member] = {}

    def update(self, state: SchedulerState, readings: Iterable[Reading]) -> tuple[WorkloadProcess, ...]:
        """Return the processes on GPUs that belong to the job to which their GPU is allocated."""
        held = [
            (allocation.uuid, allocation.owner.job_id) for allocation in state.allocations if allocation.end is None
        ]
        lists = {r.uuid: tuple(each.pid for each in r.processes) for r in readings if r.processes is not None}
        known = self._listed | lists
        self._listed = {uuid: known[uuid] for uuid, _ in held if uuid in known}
        present = {pid for pids in self._listed.values() for pid in pids}
        self._members = {pid: who for pid, who in (self._members | dict(state.members)).items() if pid in present}
        uuids_by_pid: dict[int, list[str]] = {}
        for uuid, job_id in dict.fromkeys(held):
            for pid in self._listed.get(uuid, ()):
                if pid in self._members and self._members[pid].job_id == job_id:
                    uuids_by_pid.setdefault(pid, []).append(uuid)
        of_holders = {pid: self._members[pid] for pid in uuids_by_pid}
        return tuple(processes_of_holders(state, of_holders, uuids_by_pid).values())


def processes_of_holders(
    state: SchedulerState, members: Mapping[int, Member], uuids_by_pid: Mapping[int, Iterable[str]]
) -> dict[int, WorkloadProcess]:
    """Return the members whose job has a GPU on this node, by pid; `uuids_by_pid` has the GPUs of each process."""
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
"""Kind of the fault for a pause; the reason of its unobserved time."""


class Collected(Struct):
    """The result of one collection from source, scheduler and listeners."""

    requested_at: int
    batch: ReadResult | None = None
    """None: the read failed or was paused; see `faults`."""
    devices: tuple[Device, ...] = ()
    """The devices to account for, including missing ones."""
    allocations: tuple[Allocation, ...] | None = None
    """None: the scheduler reported nothing."""
    allocations_at: int = 0
    """When the scheduler last confirmed the allocations, monotonic nanoseconds."""
    unanswered_since: int | None = None
    """Since when the scheduler has waited for its controller, monotonic nanoseconds; None: it does not wait."""
    faults: tuple[Fault, ...] = ()
    """Faults of the source, the inventory, the scheduler and the listeners."""
    reports: tuple[TrainingReport, ...] = ()
    serving: tuple[ServingReport, ...] = ()
    collectives: tuple[CollectiveReport, ...] = ()
    findings: tuple[HangFinding, ...] = ()
    hosts: tuple[HostUsage, ...] = ()
    ports: tuple[NetworkPort, ...] | None = None
    messages: tuple[tuple[str, int], ...] = ()
    """Messages from workloads since the start, counted by outcome."""
    source: str = ""
    """Name of the source; empty if there is none."""
    reason: str = ""
    """Why that source was selected, as a sentence."""
    seconds: float = 0.0


class Collector:
    """Serves collection requests of one other thread, in order."""

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
        page_owners: "PageOwners | None" = None,
    ) -> None:
        """`mask` replaces user names in everything collected; None: they are kept.

        `page_owners` answers instead of the scheduler where the source's page names owners; None: labels are ignored.
        """
        self._mask, self._page_owners = mask, page_owners
        self._listeners, self._last_error = tuple(listeners), ""
        self._scheduler_state: SchedulerState | None = None
        """The newest state that the scheduler reported."""
        self._selector, self._pause = selector, pause
        self._scheduler = scheduler if mask is None else MaskedScheduler(scheduler, mask)
        self._inventory, self._inventory_file = inventory or Inventory(), inventory_file
        self._rank_tracker, self._process_tracker, self._condition = RankTracker(), ProcessTracker(), ""
        self._paused = False
        self._requests: queue.SimpleQueue[tuple[int, bool] | Rules | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Collected] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def collect_now(self, now: int) -> Collected:
        """Collect once before sampling starts, without a deadline, to find out whether any source works."""
        self.request(now, resync=False)
        return self._results.get()

    def request(self, now: int, *, resync: bool) -> None:
        """Queue one collection; `resync` makes the source drop its baseline first."""
        self._requests.put((now, resync))

    def update(self, rules: Rules) -> None:
        """Have the scheduler apply `rules` from the next collection on. Thread-safe."""
        self._requests.put(rules)

    def result(self, timeout: float) -> Collected | None:
        """Return the next result; None if there is none within `timeout` seconds."""
        try:
            return self._results.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop the thread and close everything it uses. A thread stuck in a vendor's call ends with the process."""
        self._requests.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            if isinstance(request, Rules):
                self._logged("applying the new rules", partial(self._scheduler.update, request))
                if self._page_owners is not None:
                    self._page_owners.update(request)
                continue
            started = time.perf_counter()
            collected = self._guarded(*request)
            collected.seconds = time.perf_counter() - started
            self._results.put(collected)
            if collected.batch is not None:  # after the result was queued: opening a source may block
                self._logged("trying a better source", partial(self._selector.try_better, collected.requested_at))
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._scheduler.close()

    def _logged(self, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            log.exception("%s failed; please report this", what)

    def _guarded(self, now: int, resync: bool) -> Collected:  # noqa: FBT001  as `request` queued it
        try:
            collected = self._collect(now, resync=resync)
        except Exception as err:  # a bug in this program must not end the thread: nothing would be observed any more
            log.exception("collecting failed; please report this")
            collected = Collected(now, faults=(Fault("source_failed", f"collecting failed: {err}"),))
        collected.source, collected.reason = self._selector.name, self._publishable(self._selector.reason)
        collected.faults = tuple(replace(fault, message=self._publishable(fault.message)) for fault in collected.faults)
        if self._mask is not None and collected.batch is not None:
            # Its faults are among the result's.
            collected.batch = replace(collected.batch, faults=(), readings=without_paths(collected.batch.readings))
        return collected

    def _publishable(self, text: str) -> str:
        """Return `text` without secrets, masked users' names and surrogates, which cannot be encoded."""
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
        """Return a result without readings; release the hardware counters at the beginning of the pause."""
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
            named = self._page_owners and self._page_owners.poll(now, devices, batch.owner_labels)
            state = named or self._scheduler.poll(now, devices, batch.readings)
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
        """Add the reports of workloads; a listener that fails does not affect the others."""
        processes = self._verified(self._process_tracker.update(state, batch.readings))
        counts: Counter[str] = Counter()
        for listener in self._listeners:
            try:
                messages = listener.poll(collected.requested_at, processes, self._identify)
            except Exception as err:
                if self._last_error != (error := f"{err!r}"):  # log a bug that recurs in every tick once
                    self._last_error = error
                    log.exception("listening to workloads failed; please report this")
                messages = WorkloadUpdate(faults=(Fault("listening_failed", f"listening failed: {err}"),))
            collected.reports += messages.reports
            collected.serving += messages.serving
            collected.collectives += messages.collectives
            collected.findings += tuple(
                replace(finding, stack=self._publishable(finding.stack)) for finding in messages.findings
            )
            collected.hosts += messages.hosts
            collected.ports = collected.ports if messages.ports is None else messages.ports
            collected.faults += messages.faults
            counts.update(dict(messages.counts))
        collected.messages = tuple(sorted(counts.items()))

    def _verified(self, listed: Sequence[WorkloadProcess]) -> tuple[WorkloadProcess, ...]:
        """Return the processes whose job the scheduler confirms; a process can forge its environment."""
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


_ONE_TIME_FAULTS = ("clock_step", "unknown_model", "xid_unassigned")
"""Kinds of faults that are events, or are reported once for good: their end is not logged."""


class Sampler:
    """Produces one Observation per interval from a Collector that may be slow or hang.

    `interval` and `deadline` are seconds. `first`, if given, is a result that makes the first Observation.
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
        """Why this source was selected, as a sentence."""
        self._unanswered_since: int | None = None
        self.messages: tuple[tuple[str, int], ...] = ()
        """Messages from workloads since the start, counted by outcome."""
        self.late = 0
        self.read_seconds = 0.0

    @property
    def unanswered_seconds(self) -> float:
        """Seconds since the scheduler sent its controller a request that is still unanswered; 0: none is."""
        since = self._unanswered_since
        return 0.0 if since is None else max(0, self._clock.now() - since) / SECOND

    def observations(self, stop: threading.Event) -> Iterator[Observation]:
        """Yield one Observation per interval until `stop` is set."""
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
        except Exception as err:  # a bug in this program must not end the node's accounting
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
        """Leave the time unsettled until the deadline; after it, book the time as unobserved."""
        if self._pending is not None and now - self._pending <= self._deadline:
            return self._without_readings(now, settled=self._settled)
        self._given_up = True
        waited = (now - (self._pending or now)) / SECOND
        fault = Fault("source_hung", f"{self.name or 'the source'}: no answer for {waited:.0f} s; still waiting")
        self._faults.add((fault,), now)
        return self._without_readings(now, faults=(fault,))

    def _late_answer(self, collected: Collected) -> Observation:
        """Drop the readings of a result that came after its time was booked as unobserved; keep faults and health."""
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
            collectives=collected.collectives,
            findings=collected.findings,
            hosts=collected.hosts,
            ports=collected.ports,
        )

    def _changed_devices(self, devices: tuple[Device, ...]) -> tuple[Device, ...] | None:
        """Return the devices if they differ from those of the last Observation, else None."""
        if devices == self._devices:
            return None
        self._devices = devices
        return devices


class ActiveFaults:
    """Logs each fault once when it begins and once when it ends.

    A fault is identified by its kind and its GPU; its message may change from tick to tick.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], int] = {}

    def add(self, faults: Iterable[Fault], now: int) -> None:
        """Mark `faults` as active; the state of all others is unknown."""
        for fault in faults:
            if (fault.kind, fault.uuid) not in self._since:
                self._since[fault.kind, fault.uuid] = now
                log.warning("%s: %s", fault.kind, fault.message)

    def set_active(self, faults: Iterable[Fault], now: int) -> None:
        """Mark `faults` as active, and all others as over."""
        faults = tuple(faults)
        self.add(faults, now)
        active = {(fault.kind, fault.uuid) for fault in faults}
        for kind, uuid in [key for key in self._since if key not in active]:
            seconds = (now - self._since.pop((kind, uuid))) / SECOND
            if kind not in _ONE_TIME_FAULTS:
                log.info("%s%s is over after %.0f s", kind, f" of {uuid}" if uuid else "", seconds)
