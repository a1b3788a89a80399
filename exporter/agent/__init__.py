"""The loop: take in what was observed, advance the ledger, publish.

Owns the ledger and the one reference that readers of the newest Snapshot share. Catches broadly, as do the hands and
the observer that feed it, and counts what it catches. Refuses to judge.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from exporter.agent.observer import Observer
from exporter.clock import Clock
from exporter.core.checkpoint import thaw
from exporter.core.ledger import Ledger
from exporter.core.model import Fault, Observation
from exporter.core.money import Terms
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import Keeping, Meta, Reload, Snapshot, take_snapshot

log = logging.getLogger(__name__)


DOWN = "exporter_down"
"""Kind of the fault that the daemon's own absence is, and so the reason of its unobserved time."""


class Settings(Struct, frozen=True, kw_only=True):
    """What an agent may be given anew while it runs."""

    terms: Terms
    policy: Policy
    by_model: Mapping[str, Policy]
    reload: Reload


class Agent:
    """Advances one ledger by Observations and publishes an immutable Snapshot after each."""

    def __init__(
        self,
        *,
        meta: Meta,
        policy: Policy | None = None,
        by_model: Mapping[str, Policy] | None = None,
        record: Callable[[Observation], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._policies = policy, by_model
        self.ledger = Ledger(policy, by_model)
        self.resting = threading.Lock()
        """Whoever holds it may read the ledger, and has all that any Snapshot has told."""
        self._keep: Callable[[Snapshot], None] | None = None
        self._keeping: Callable[[], Keeping | None] = lambda: None
        self._returned: Fault | None = None
        """Why nobody saw the time before the first observation, if other books end before it."""
        self._meta, self._record, self._observer = meta, record, observer
        self._coming: deque[Settings] = deque(maxlen=1)
        self._latest: Snapshot | None = None
        self._errors: Counter[str] = Counter({"core": 0, "history": 0, "record": 0, "snapshot": 0})
        self._ticks, self._core_seconds, self._last_error = 0, 0.0, ""

    def latest(self) -> Snapshot | None:
        """The newest Snapshot; safe from any thread."""
        return self._latest

    def last_error(self) -> str:
        """What went wrong last, in words; empty while all is well."""
        return self._last_error

    def adopt(self, settings: Settings) -> None:
        """Judge and tell by these from the next observation on; from any thread. The newest is the one that counts."""
        self._coming.append(settings)

    def remember_with(self, keep: Callable[[Snapshot], None], keeping: Callable[[], Keeping | None]) -> None:
        """Show every Snapshot to `keep`, which must not block; `keeping` says how it goes."""
        self._keep, self._keeping = keep, keeping

    def go_on(self, frozen: bytes, *, now: int, why: str) -> None:
        """Count on from a checkpoint of this boot; before the first observation. Raises CheckpointError."""
        ledger = Ledger(*self._policies)
        thaw(ledger, frozen)
        self.ledger, self._returned = ledger, Fault(DOWN, why)
        ledger.watched_since = now

    def begin_anew(self, edges: Mapping[str, int], *, now: int, why: str) -> None:
        """Count from nothing, from where other books of the same GPUs end; before the first observation."""
        self.ledger = Ledger(*self._policies)
        self.ledger.edges, self._returned = dict(edges), Fault(DOWN, why)
        self.ledger.watched_since = now

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
        if self._returned is not None:
            observation = replace(observation, faults=(self._returned, *observation.faults))
            self._returned = None
        messages = [fault.message for fault in observation.faults if fault.message]
        self._last_error = messages[-1] if messages else ""
        with self.resting:
            if self._coming:
                self._guarded("core", self._adopt)
            self._guarded("core", lambda: advance(self.ledger, observation))
            self._core_seconds += time.perf_counter() - began
            self._ticks += 1
            if self._record is not None:
                record = self._record
                self._guarded("record", lambda: record(observation))
            self._guarded("snapshot", self._publish)
            self._guarded("history", self._remember)

    def _adopt(self) -> None:
        """Between two observations: what was booked by the old thresholds stays."""
        new = self._coming.popleft()
        self._meta = replace(self._meta, terms=new.terms, reload=new.reload)
        self.ledger.adopt(new.policy, new.by_model)

    def _publish(self) -> None:
        self._latest = take_snapshot(self.ledger, self._self_portrait())

    def _remember(self) -> None:
        if self._keep is not None and self._latest is not None:
            self._keep(self._latest)

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
            source_reason=observer.reason if observer else self._meta.source_reason,
            ticks=self._ticks,
            late_ticks=observer.late if observer else 0,
            messages=observer.messages if observer else (),
            unanswered_seconds=observer.unanswered_seconds if observer else None,
            read_seconds=observer.read_seconds if observer else 0.0,
            core_seconds=self._core_seconds,
            keeping=self._keeping(),
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
