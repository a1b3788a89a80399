"""The thread that alone touches source and scheduler, so that whatever blocks there blocks nobody else.

Owns going out when asked and coming home with an Answer: pauses, choosing and losing sources, and the GPUs that should
be there are handled here, where time may be lost. Refuses to judge how late an answer may be: that is the observer's.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from exporter.agent.inventory import Inventory, InventoryFile, told
from exporter.agent.joining import Joining, guests, invited, with_condition, with_members
from exporter.agent.pause import PauseFile
from exporter.core.model import Allocation, Device, Fault, Report, Serving
from exporter.schedulers import Scheduler, SchedulerError, Word
from exporter.schedulers.rules import Rules
from exporter.schedulers.telling import Mask, Telling, without_paths
from exporter.sources import Batch, SourceError
from exporter.sources.ladder import Ladder
from exporter.wording import without_secrets, writable
from exporter.workloads import Guest, Heard, Listener

log = logging.getLogger(__name__)
PAUSED = "paused"
"""Kind of the fault that a pause is, and so the reason of its unobserved time."""


class Answer(Struct):
    """What one visit to source and scheduler brought home."""

    asked: int
    batch: Batch | None = None
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
    reports: tuple[Report, ...] = ()
    serving: tuple[Serving, ...] = ()
    messages: tuple[tuple[str, int], ...] = ()
    """What listeners have heard since the start, by what became of it."""
    source: str = ""
    """Name of the source; empty where there is none."""
    reason: str = ""
    """Why that one, for people."""
    seconds: float = 0.0


class Hands:
    """Asked by one other thread; answers in the order of the questions."""

    def __init__(
        self,
        ladder: Ladder,
        scheduler: Scheduler,
        *,
        pause: PauseFile | None = None,
        inventory: Inventory | None = None,
        remembered: InventoryFile | None = None,
        listeners: Sequence[Listener] = (),
        mask: Mask | None = None,
    ) -> None:
        """`mask`: how people are told in all that is brought home; None: as they are."""
        self._mask = mask
        self._listeners, self._complaint = tuple(listeners), ""
        self._word: Word | None = None
        """The scheduler's latest."""
        self._ladder, self._pause = ladder, pause
        self._scheduler = scheduler if mask is None else Telling(scheduler, mask)
        self._inventory, self._remembered = inventory or Inventory(), remembered
        self._joining, self._condition = Joining(), ""
        self._paused = False
        self._asked: queue.SimpleQueue[tuple[int, bool] | Rules | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def first(self, now: int) -> Answer:
        """Go out before anything is sampled, to see whether there is a source at all; takes as long as it takes."""
        self.ask(now, resync=False)
        return self._answers.get()

    def ask(self, now: int, *, resync: bool) -> None:
        """Send the hands out once; `resync` makes the source forget what lies before."""
        self._asked.put((now, resync))

    def adopt(self, rules: Rules) -> None:
        """Have the scheduler judge by these from the next visit on; from any thread."""
        self._asked.put(rules)

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
            if isinstance(asked, Rules):
                self._judge_by(asked)
                continue
            began = time.perf_counter()
            answer = self._guarded(*asked)
            answer.seconds = time.perf_counter() - began
            self._answers.put(answer)
            if answer.batch is not None:
                self._look_up(answer.asked)
        for listener in self._listeners:
            listener.close()
        self._ladder.close()
        self._scheduler.close()

    def _judge_by(self, rules: Rules) -> None:
        try:
            self._scheduler.adopt(rules)
        except Exception:
            log.exception("the new rules were not taken; please report this")

    def _guarded(self, now: int, resync: bool) -> Answer:  # noqa: FBT001  as `ask` queued it
        try:
            answer = self._visit(now, resync=resync)
        except Exception as err:  # a fault of ours must not end the thread, or no time would be seen any more
            log.exception("a visit to the source failed; please report this")
            answer = Answer(now, faults=(Fault("source_failed", f"the visit failed: {err}"),))
        answer.source, answer.reason = self._ladder.name, self._tell(self._ladder.reason)
        answer.faults = tuple(replace(fault, message=self._tell(fault.message)) for fault in answer.faults)
        if self._mask is not None and answer.batch is not None:
            # Its faults are among the answer's.
            answer.batch = replace(answer.batch, faults=(), readings=without_paths(answer.batch.readings))
        return answer

    def _tell(self, words: str) -> str:
        """What anybody may read of it, and what can be written."""
        words = without_secrets(writable(words))
        return words if self._mask is None else self._mask.text(words)

    def _visit(self, now: int, *, resync: bool) -> Answer:
        words = self._pause.look() if self._pause is not None else ""
        if words:
            return self._rest(now, words)
        resumed, self._paused = self._paused, False
        if resync or resumed:
            self._ladder.resync()
        faults = (Fault(PAUSED, "the pause is over, what was not read is forgotten"),) if resumed else ()
        try:
            return self._seen(now, self._ladder.read(now), faults)
        except SourceError as err:
            return Answer(now, faults=(*faults, Fault("source_failed", str(err))))

    def _rest(self, now: int, words: str) -> Answer:
        """One tick of a pause: the counters are let go of once, at its beginning."""
        if not self._paused:
            self._paused = True
            self._ladder.pause()
        return Answer(now, faults=(Fault(PAUSED, words),))

    def _seen(self, now: int, batch: Batch, faults: tuple[Fault, ...]) -> Answer:
        devices = self._inventory.take(batch.devices)
        if self._remembered is not None:
            self._remembered.keep(self._inventory.boards())
        answer = Answer(now, batch, devices=devices, faults=faults + batch.faults + told(devices, batch.devices))
        try:
            word = self._scheduler.look(now, devices, batch.readings)
        except Exception as err:
            if not isinstance(err, SchedulerError):
                log.warning("scheduler failed", exc_info=err)
            answer.faults += (Fault("scheduler_failed", str(err)),)
        else:
            if word is not None:
                self._join(answer, word, batch)
        answer.devices = with_condition(devices, self._condition)
        if self._listeners and self._word is not None:
            self._listen(answer, self._word, batch)
        return answer

    def _listen(self, answer: Answer, word: Word, batch: Batch) -> None:
        """Take what workloads have said; one that cannot be listened to keeps nobody else from being heard."""
        present = self._proven(guests(word, batch.readings))
        counts: Counter[str] = Counter()
        for listener in self._listeners:
            try:
                heard = listener.take(answer.asked, present, self._whose)
            except Exception as err:
                if self._complaint != (complaint := f"{err!r}"):  # a bug of every tick is told once
                    self._complaint = complaint
                    log.exception("listening to workloads failed; please report this")
                heard = Heard(faults=(Fault("listening_failed", f"listening failed: {err}"),))
            answer.reports += heard.reports
            answer.serving += heard.serving
            answer.faults += heard.faults
            counts.update(dict(heard.counts))
        answer.messages = tuple(sorted(counts.items()))

    def _proven(self, listed: Sequence[Guest]) -> tuple[Guest, ...]:
        """Those whose job does not rest on what the process itself could have written into its environment."""
        known = self._scheduler.members([guest.pid for guest in listed]) if listed else {}
        return tuple(guest for guest in listed if guest.pid in known and known[guest.pid].job_id == guest.job_id)

    def _whose(self, pids: Sequence[int]) -> Mapping[int, Guest]:
        word = self._word
        return {} if word is None else invited(word, self._scheduler.members(pids), {})

    def _join(self, answer: Answer, word: Word, batch: Batch) -> None:
        self._condition, self._word = word.condition, word
        answer.allocations, answer.allocations_at = self._joining.allocations(word, batch.readings), word.at
        answer.batch = replace(batch, readings=with_members(batch.readings, word))
        answer.unanswered_since = word.unanswered_since
        answer.faults += word.faults

    def _look_up(self, now: int) -> None:
        """After the answer has been given, so that a source that blocks when it is opened delays no reading."""
        try:
            self._ladder.look_up(now)
        except Exception:
            log.exception("looking for a better source failed; please report this")
