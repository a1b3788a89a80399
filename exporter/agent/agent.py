"""Runs the main loop: advances the ledger by each Observation and publishes a Snapshot.

Owns the ledger and the reference to the newest Snapshot that all readers share. Catches and counts every exception of a
step, as Sampler and Collector do. Refuses to classify GPU time, which is the core's task.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from exporter.agent.sampler import Sampler
from exporter.clock import Clock
from exporter.core.checkpoint import load_ledger
from exporter.core.ledger import OTHER_ACCOUNTS, Ledger
from exporter.core.model import Device, Fault, Observation
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.prices import Terms, price_problems
from exporter.core.snapshot import DaemonMetadata, HistoryStatus, ReloadStatus, Snapshot, take_snapshot

log = logging.getLogger(__name__)


EXPORTER_DOWN = "exporter_down"
"""Kind of the fault for time while the daemon was not running; the reason of that unobserved time."""


class AgentSettings(Struct, frozen=True, kw_only=True):
    """The settings of an agent that can be changed while it runs."""

    terms: Terms
    policy: Policy
    by_model: Mapping[str, Policy]
    reload: ReloadStatus


class Agent:
    """Advances one ledger by Observations and publishes an immutable Snapshot after each."""

    def __init__(
        self,
        *,
        meta: DaemonMetadata,
        policy: Policy | None = None,
        by_model: Mapping[str, Policy] | None = None,
        record: Callable[[Observation], None] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._policies = policy, by_model
        self.ledger = Ledger(policy, by_model)
        self.ledger_lock = threading.Lock()
        """Guards `ledger`: its holder may read the ledger, which is then never behind the newest Snapshot."""
        self._on_snapshot: Callable[[Snapshot], None] | None = None
        self._history_status: Callable[[], HistoryStatus | None] = lambda: None
        self._pushes: Callable[[], tuple[tuple[str, int], ...]] = lambda: ()
        self._downtime: Fault | None = None
        """Fault for the time between an earlier ledger's end and the first observation; None without such a ledger."""
        self._meta, self._record, self._sampler = meta, record, sampler
        self._pending_settings: deque[AgentSettings] = deque(maxlen=1)
        self._latest: Snapshot | None = None
        self._errors: Counter[str] = Counter({"core": 0, "history": 0, "record": 0, "snapshot": 0})
        self._ticks, self._core_seconds, self._last_error = 0, 0.0, ""
        self._price_problems: tuple[str, ...] = ()
        """Models that no price fits, as last logged."""
        self._accounts_full = False
        """Whether an account without room was ever billed as `other`."""

    def latest(self) -> Snapshot | None:
        """Return the newest Snapshot. Thread-safe."""
        return self._latest

    def last_error(self) -> str:
        """Return the last error message; empty if there is none now."""
        return self._last_error

    def update(self, settings: AgentSettings) -> None:
        """Apply `settings` from the next observation on; of several pending, only the newest. Thread-safe."""
        self._pending_settings.append(settings)

    def set_history(
        self, on_snapshot: Callable[[Snapshot], None], history_status: Callable[[], HistoryStatus | None]
    ) -> None:
        """Pass every Snapshot to `on_snapshot`, which must not block; `history_status` returns the history's state."""
        self._on_snapshot, self._history_status = on_snapshot, history_status

    def set_pushes(self, counts: Callable[[], tuple[tuple[str, int], ...]]) -> None:
        """Export the numbers that `counts` returns: pushes by outcome. It must not block."""
        self._pushes = counts

    def resume(self, checkpoint: bytes, *, now: int, reason: str) -> None:
        """Continue from a checkpoint of the current boot; call before the first observation. Raises CheckpointError."""
        ledger = Ledger(*self._policies)
        load_ledger(ledger, checkpoint)
        self.ledger, self._downtime = ledger, Fault(EXPORTER_DOWN, reason)
        ledger.watched_since = now

    def start_fresh(self, booked_until: Mapping[str, int], *, now: int, reason: str) -> None:
        """Start an empty ledger where earlier ledgers of the same GPUs end; call before the first observation."""
        self.ledger = Ledger(*self._policies)
        self.ledger.paid_since, self._downtime = dict(booked_until), Fault(EXPORTER_DOWN, reason)
        self.ledger.watched_since = now

    def run(self, observations: Iterable[Observation]) -> None:
        """Process all observations; return at their end, or if the iterator raises."""
        try:
            for observation in observations:
                self.process(observation)
        except Exception as err:
            self._last_error = f"sampling stopped: {err}"
            log.exception("sampling failed; nothing more is sampled")

    def process(self, observation: Observation) -> None:
        """Process one observation. A step that fails is counted and logged; the next observation is processed."""
        began = time.perf_counter()
        if self._downtime is not None:
            observation = replace(observation, faults=(self._downtime, *observation.faults))
            self._downtime = None
        messages = [fault.message for fault in observation.faults if fault.message]
        self._last_error = messages[-1] if messages else ""
        with self.ledger_lock:
            if self._pending_settings:
                self._guarded("core", self._apply_settings)
            self._guarded("core", partial(advance, self.ledger, observation))
            if observation.devices is not None:
                self._warn_of_prices(observation.devices, wall_ns=observation.wall)
            self._warn_of_accounts()
            self._core_seconds += time.perf_counter() - began
            self._ticks += 1
            if self._record is not None:
                self._guarded("record", partial(self._record, observation))
            self._guarded("snapshot", self._publish)
            if self._on_snapshot is not None and self._latest is not None:
                self._guarded("history", partial(self._on_snapshot, self._latest))

    def _warn_of_prices(self, devices: tuple[Device, ...], *, wall_ns: int) -> None:
        """Log, when it changes, which GPUs no price fits and which prices fit no GPU anywhere."""
        problems = tuple(price_problems(self._meta.terms, devices, wall_ns=wall_ns))
        for problem in problems:
            if problem not in self._price_problems:
                log.warning("%s", problem)
        self._price_problems = problems

    def _warn_of_accounts(self) -> None:
        """Log the first time since the start that a job is billed as `other`."""
        if self._accounts_full or OTHER_ACCOUNTS not in self.ledger.accounts:
            return
        if any(job.account == OTHER_ACCOUNTS for job in self.ledger.jobs.values()):
            self._accounts_full = True
            log.warning(
                "more accounts (team, account, namespace) than policy.max_accounts = %d have jobs here: time of the "
                "others' jobs is billed as `other`; raise the limit if that is usual on this node",
                self.ledger.policy.max_accounts,
            )

    def _apply_settings(self) -> None:
        """Apply pending settings; time that is already booked keeps its classification."""
        settings = self._pending_settings.popleft()
        self._meta = replace(self._meta, terms=settings.terms, reload=settings.reload)
        self.ledger.update_policy(settings.policy, settings.by_model)

    def _publish(self) -> None:
        self._latest = take_snapshot(self.ledger, self._daemon_metadata())

    def _guarded(self, kind: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as err:  # a bug in this program must not stop the node's accounting
            self._errors[kind] += 1
            self._last_error = f"{kind}: {err}"
            log.exception("the %s step failed; please report this", kind)

    def _daemon_metadata(self) -> DaemonMetadata:
        sampler = self._sampler
        return replace(
            self._meta,
            source=self.ledger.source or self._meta.source,
            source_reason=sampler.reason if sampler else self._meta.source_reason,
            ticks=self._ticks,
            late_ticks=sampler.late if sampler else 0,
            messages=sampler.messages if sampler else (),
            unanswered_seconds=sampler.unanswered_seconds if sampler else None,
            read_seconds=sampler.read_seconds if sampler else 0.0,
            core_seconds=self._core_seconds,
            history=self._history_status(),
            pushes=self._pushes(),
            errors=tuple(sorted(self._errors.items())),
            last_error=self._last_error,
        )


def paced(
    observations: Iterable[Observation], clock: Clock, stop: threading.Event, *, speed: float = 1.0
) -> Iterator[Observation]:
    """Yield recorded or simulated observations at their own pace, times `speed`; the first at once."""
    began: tuple[int, int] | None = None
    for observation in observations:
        if began is None:
            began = clock.now(), observation.at
        clock.wait(began[0] + round((observation.at - began[1]) / speed), stop)
        if stop.is_set():
            return
        yield observation


def when_due(observations: Iterable[Observation], clock: Clock, stop: threading.Event) -> Iterator[Observation]:
    """Yield observations whose times are those of `clock`, each when its time comes; those of the past at once."""
    for observation in observations:
        clock.wait(observation.at, stop)
        if stop.is_set():
            return
        yield observation
