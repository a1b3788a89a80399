"""Turns what the hands bring home into Observations, one an interval, whatever happens to the hands.

Owns the grid of ticks, the deadline for an answer, and what was said last, so that only changes are said. Tells each
fault to the log when it appears and when it is over. Refuses to touch source or scheduler.
"""

import logging
import threading
from collections.abc import Iterable, Iterator

from exporter.agent.hands import Answer, Hands
from exporter.clock import Clock
from exporter.core.model import NEVER, SECOND, Allocation, Device, Fault, Health, Observation

log = logging.getLogger(__name__)
_EVENTS = ("clock_step", "unknown_model", "xid_unassigned")
"""Kinds of faults that happen, or are said once for good: it makes no sense to tell that they are over."""


class Observer:
    """One Observation an interval, from hands that may be slow, late or lost.

    `first` is what the hands have brought home already: it makes the first Observation, and nothing is asked for that.
    """

    def __init__(
        self, hands: Hands, clock: Clock, *, interval: float, deadline: float, first: Answer | None = None
    ) -> None:
        self._hands, self._clock, self._first = hands, clock, first
        self.name = "" if first is None else first.source
        self._interval, self._deadline = round(interval * 1000) * SECOND // 1000, round(deadline * SECOND)
        self._pending: int | None = None
        self._given_up = False
        self._settled = 0
        self._devices: tuple[Device, ...] | None = None
        self._allocations: tuple[Allocation, ...] | None = None
        self._allocations_at = NEVER
        self._faults = Standing()
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
            return self._said_nothing(now, faults=(Fault("source_failed", f"observing failed: {err}"),))

    def _observe(self, now: int) -> Observation:
        first, self._first = self._first, None
        if first is not None:
            return self._came(first)
        if self._pending is None:
            self._hands.ask(now, resync=self._given_up)
            self._pending, self._given_up = now, False
        answer = self._hands.answer(timeout=self._interval / SECOND)
        if answer is None:
            return self._nothing_yet(now)
        self._pending = None
        return self._came(answer)

    def _came(self, answer: Answer) -> Observation:
        self.read_seconds += answer.seconds
        if answer.allocations is not None:
            self._unanswered_since = answer.unanswered_since
        self.messages = answer.messages or self.messages
        self.name, self.reason = answer.source or self.name, answer.reason
        return self._lost(answer) if self._given_up else self._seen(answer)

    def _nothing_yet(self, now: int) -> Observation:
        """The hands are still out: leave the time open until the deadline, then give it up."""
        if self._pending is not None and now - self._pending <= self._deadline:
            return self._said_nothing(now, settled=self._settled)
        self._given_up = True
        waited = (now - (self._pending or now)) / SECOND
        fault = Fault("source_hung", f"{self.name or 'the source'}: no answer for {waited:.0f} s; still waiting")
        self._faults.stand((fault,), now)
        return self._said_nothing(now, faults=(fault,))

    def _lost(self, answer: Answer) -> Observation:
        """An answer came after its time was given up: that must not be counted twice. What it says beside is kept."""
        now = self._clock.now()
        log.info("source answers again")
        self._faults.stand(answer.faults, now)
        faults = (Fault("source_hung", "the late answer was dropped"), *answer.faults)
        return self._said_nothing(now, faults=faults, health=answer.batch.health if answer.batch is not None else ())

    def _said_nothing(
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

    def _seen(self, answer: Answer) -> Observation:
        now, batch = self._clock.now(), answer.batch
        if batch is None:
            self._faults.stand(answer.faults, now)
            return self._said_nothing(now, faults=answer.faults)
        self._faults.are(answer.faults, now)
        self._settled = answer.asked if batch.settled is None else min(batch.settled, answer.asked)
        changed = answer.allocations is not None and answer.allocations != self._allocations
        if answer.allocations is not None:
            self._allocations, self._allocations_at = answer.allocations, answer.allocations_at
        return Observation(
            at=now,
            wall=self._clock.wall(),
            settled=self._settled,
            readings=batch.readings,
            devices=self._changed(answer.devices),
            allocations=answer.allocations if changed else None,
            allocations_at=self._allocations_at,
            source=self.name,
            faults=answer.faults,
            health=batch.health,
            reports=answer.reports,
            serving=answer.serving,
        )

    def _changed(self, devices: tuple[Device, ...]) -> tuple[Device, ...] | None:
        """The inventory where it is not what was said last."""
        if devices == self._devices:
            return None
        self._devices = devices
        return devices


class Standing:
    """Faults that have appeared and are not over: one line in the log at either end, none between.

    A fault is its kind and its GPU; what its message says may change from tick to tick.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], int] = {}

    def stand(self, faults: Iterable[Fault], now: int) -> None:
        """These are known to stand; of the others nothing is known."""
        for fault in faults:
            if (fault.kind, fault.uuid) not in self._since:
                self._since[fault.kind, fault.uuid] = now
                log.warning("%s: %s", fault.kind, fault.message)

    def are(self, faults: Iterable[Fault], now: int) -> None:
        """These and no others stand."""
        faults = tuple(faults)
        self.stand(faults, now)
        stands = {(fault.kind, fault.uuid) for fault in faults}
        for kind, uuid in [key for key in self._since if key not in stands]:
            seconds = (now - self._since.pop((kind, uuid))) / SECOND
            if kind not in _EVENTS:
                log.info("%s%s is over after %.0f s", kind, f" of {uuid}" if uuid else "", seconds)
