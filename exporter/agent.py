"""The loop: wake, read, advance, publish.

Owns the sampling thread, the reading thread with its deadline outside it, and the one reference that readers of
the newest Snapshot share. The only place that catches broadly, and it counts what it catches. Refuses to judge.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from exporter.clock import Clock
from exporter.core.ledger import Ledger
from exporter.core.model import NEVER, SECOND, Allocation, Device, Fault, Observation
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import Meta, Snapshot, take_snapshot
from exporter.schedulers import Scheduler, SchedulerError
from exporter.sources import Batch, Source, SourceError

log = logging.getLogger(__name__)
LONGEST_PAUSE = 60 * SECOND


class Answer(Struct):
    """What one visit to source and scheduler brought home."""

    asked: int
    batch: Batch | None = None
    allocations: tuple[Allocation, ...] | None = None
    faults: tuple[Fault, ...] = ()
    seconds: float = 0.0


class Hands:
    """A thread of its own that alone touches source and scheduler, so that whatever blocks there blocks nobody else."""

    def __init__(self, open_source: Callable[[], Source], scheduler: Scheduler) -> None:
        self._open, self._scheduler = open_source, scheduler
        self._source: Source | None = None
        self._failures, self._retry_at = 0, 0
        self._asked: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def ask(self, now: int, *, resync: bool) -> None:
        """Send the hands out once; `resync` makes the source forget what lies before."""
        self._asked.put((now, resync))

    def answer(self, timeout: float) -> Answer | None:
        """The answer, if it comes within `timeout` seconds."""
        try:
            return self._answers.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let go. A thread stuck inside a vendor's call is left to the end of the process."""
        self._asked.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            began = time.perf_counter()
            answer = self._visit(*asked)
            answer.seconds = time.perf_counter() - began
            self._answers.put(answer)
        if self._source is not None:
            self._source.close()
        self._scheduler.close()

    def _visit(self, now: int, resync: bool) -> Answer:  # noqa: FBT001  as `ask` queued it
        answer = Answer(now)
        if now < self._retry_at:
            answer.faults = (Fault("source_failed", "waiting before the next try"),)
            return answer
        try:
            answer.batch = self._read(now, resync=resync)
        except Exception as err:  # noqa: BLE001  a vendor's library can raise anything; it is counted and told
            answer.faults = (Fault("source_failed", self._failed(err, now)),)
            return answer
        self._failures = 0
        try:
            answer.allocations = self._scheduler.allocations(now, answer.batch.readings)
        except Exception as err:
            if not isinstance(err, SchedulerError):
                log.warning("scheduler failed", exc_info=err)
            answer.faults = (Fault("scheduler_failed", str(err)),)
        return answer

    def _read(self, now: int, *, resync: bool) -> Batch:
        if self._source is None:
            self._source = self._open()
        if resync:
            self._source.resync()
        return self._source.read(now)

    def _failed(self, err: Exception, now: int) -> str:
        """Drop the source, to be opened afresh after a pause that doubles up to a minute."""
        if not isinstance(err, SourceError):
            log.warning("source failed in a way it does not know", exc_info=err)
        self._failures += 1
        self._retry_at = now + min(LONGEST_PAUSE, (1 << min(self._failures - 1, 6)) * SECOND)
        source, self._source = self._source, None
        if source is not None:
            source.close()
        return str(err)


class Observer:
    """Turns a live source and scheduler into Observations, one an interval, whatever they do."""

    def __init__(self, hands: Hands, clock: Clock, *, interval: float, deadline: float, name: str = "") -> None:
        self._hands, self._clock, self.name = hands, clock, name
        self._interval, self._deadline = round(interval * 1000) * SECOND // 1000, round(deadline * SECOND)
        self._pending: int | None = None
        self._given_up = False
        self._settled = 0
        self._known: dict[str, Device] = {}
        self._said: tuple[Device, ...] | None = None
        self._allocations: tuple[Allocation, ...] | None = None
        self._allocations_at = NEVER
        self.late = 0
        self.read_seconds = 0.0

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
            return self._said_nothing(now, faults=(Fault("source_failed", f"observing failed: {err}"),))

    def _observe(self, now: int) -> Observation:
        if self._pending is None:
            self._hands.ask(now, resync=self._given_up)
            self._pending, self._given_up = now, False
        answer = self._hands.answer(timeout=self._interval / SECOND)
        if answer is None:
            return self._nothing_yet(now)
        self._pending = None
        self.read_seconds += answer.seconds
        return self._lost() if self._given_up else self._seen(answer)

    def _nothing_yet(self, now: int) -> Observation:
        """The hands are still out: leave the time open until the deadline, then give it up."""
        if self._pending is not None and now - self._pending <= self._deadline:
            return self._said_nothing(now, settled=self._settled)
        self._given_up = True
        message = f"{self.name}: no answer for {(now - (self._pending or now)) / SECOND:.0f} s; still waiting"
        log.warning("source hangs: %s", message)
        return self._said_nothing(now, faults=(Fault("source_hung", message),))

    def _lost(self) -> Observation:
        """An answer came after its time was given up: it must not be counted twice."""
        now = self._clock.now()
        log.info("source answers again")
        return self._said_nothing(now, faults=(Fault("source_hung", "the late answer was dropped"),))

    def _said_nothing(self, now: int, *, settled: int | None = None, faults: tuple[Fault, ...] = ()) -> Observation:
        self._settled = now if settled is None else settled
        return Observation(
            now,
            self._clock.wall(),
            settled=settled,
            allocations_at=self._allocations_at,
            source=self.name,
            faults=faults,
        )

    def _seen(self, answer: Answer) -> Observation:
        batch = answer.batch
        for fault in (*answer.faults, *(batch.faults if batch is not None else ())):
            log.warning("%s: %s", fault.kind, fault.message)
        if batch is None:
            return self._said_nothing(self._clock.now(), faults=answer.faults)
        self._settled = now = answer.asked
        changed = answer.allocations is not None and answer.allocations != self._allocations
        if answer.allocations is not None:
            self._allocations, self._allocations_at = answer.allocations, now
        return Observation(
            at=self._clock.now(),
            wall=self._clock.wall(),
            settled=now,
            readings=batch.readings,
            devices=self._inventory(batch),
            allocations=answer.allocations if changed else None,
            allocations_at=self._allocations_at,
            source=self.name,
            faults=batch.faults + answer.faults,
        )

    def _inventory(self, batch: Batch) -> tuple[Device, ...] | None:
        """The inventory where it changed. A GPU that is no longer listed is missing, and still paid for.

        A stand-in name ("unknown-3", of a GPU that has not told its own) ends when it is no longer used.
        """
        listed = {device.uuid: device for device in batch.devices}
        missing = {
            uuid: replace(device, condition="missing")
            for uuid, device in self._known.items()
            if uuid not in listed and not uuid.startswith("unknown-")
        }
        self._known = missing | listed
        devices = tuple(self._known.values())
        if devices == self._said:
            return None
        self._said = devices
        return devices


class Agent:
    """Advances one ledger by Observations and publishes an immutable Snapshot after each."""

    def __init__(
        self,
        *,
        meta: Meta,
        policy: Policy | None = None,
        record: Callable[[Observation], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.ledger = Ledger(policy)
        self._meta, self._record, self._observer = meta, record, observer
        self._latest: Snapshot | None = None
        self._errors: Counter[str] = Counter({"core": 0, "record": 0, "snapshot": 0})
        self._ticks, self._core_seconds, self._last_error = 0, 0.0, ""

    def latest(self) -> Snapshot | None:
        """The newest Snapshot; safe from any thread."""
        return self._latest

    def last_error(self) -> str:
        """What went wrong last, in words; empty while all is well."""
        return self._last_error

    def run(self, observations: Iterable[Observation]) -> None:
        """Take in every observation; return when there are no more, or the feed itself breaks."""
        try:
            for observation in observations:
                self.take_in(observation)
        except Exception as err:
            self._last_error = f"the feed of observations ended: {err}"
            log.exception("the feed of observations broke; nothing more is sampled")

    def take_in(self, observation: Observation) -> None:
        """One tick. What fails is counted and logged; the next tick goes on."""
        began = time.perf_counter()
        messages = [fault.message for fault in observation.faults if fault.message]
        self._last_error = messages[-1] if messages else ""
        self._guarded("core", lambda: advance(self.ledger, observation))
        self._core_seconds += time.perf_counter() - began
        self._ticks += 1
        if self._record is not None:
            record = self._record
            self._guarded("record", lambda: record(observation))
        self._guarded("snapshot", self._publish)

    def _publish(self) -> None:
        self._latest = take_snapshot(self.ledger, self._self_portrait())

    def _guarded(self, kind: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as err:  # a fault of ours must not stop the node's accounting
            self._errors[kind] += 1
            self._last_error = f"{kind}: {err}"
            log.exception("the %s step failed; please report this", kind)

    def _self_portrait(self) -> Meta:
        observer = self._observer
        return replace(
            self._meta,
            source=self.ledger.source or self._meta.source,
            ticks=self._ticks,
            late_ticks=observer.late if observer else 0,
            read_seconds=observer.read_seconds if observer else 0.0,
            core_seconds=self._core_seconds,
            errors=tuple(sorted(self._errors.items())),
            last_error=self._last_error,
        )


def paced(
    observations: Iterable[Observation], clock: Clock, stop: threading.Event, *, speed: float = 1.0
) -> Iterator[Observation]:
    """Let recorded or simulated observations out at their own pace; the first comes at once."""
    began: tuple[int, int] | None = None
    for observation in observations:
        if began is None:
            began = clock.now(), observation.at
        clock.wait(began[0] + round((observation.at - began[1]) / speed), stop)
        if stop.is_set():
            return
        yield observation
