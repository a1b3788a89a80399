"""A day of a node under faults, in virtual time: each comes several times, at moments that dice chose.

Owns the schedule, what is checked at every tick, and what is measured of each fault: seconds nobody saw, and how long
after its end the first good readings came. Refuses to know what the agent should do beside keep its books.
"""

import random
from collections.abc import Callable, Iterator
from typing import TypedDict

from msgspec import Struct

from exporter.core.checkpoint import dump_ledger
from exporter.core.ledger import conserved
from exporter.core.model import SECOND
from exporter.core.snapshot import Snapshot
from tests.fuzz.unwell import BOARDS, GPUS, Node

HOURS = 24
EACH = 6
"""Times that each fault comes in a day."""
_REST = 120
"""Seconds between two faults, at least; each has its end in it."""
_RECOVERY = 600
"""Seconds after which a node that sees nothing again has not recovered."""
_HOUR = 3600 * SECOND


class Fault(Struct, frozen=True, kw_only=True):
    """A way to fail: how it begins and ends."""

    what: str
    begin: Callable[[Node], None]
    end: Callable[[Node], None] = lambda _: None
    longest: int = 300
    """Seconds; 0: it happens at once."""
    seen: str
    """What the operator sees of it."""
    boards: int = GPUS
    """That cannot be seen meanwhile."""


class Met(Struct):
    """One fault, and what came of it."""

    what: str
    began: float
    """Hours since the day began."""
    lasted: float
    """Seconds, by the schedule."""
    unobserved: float = 0.0
    """GPU-seconds."""
    paid: float = 0.0
    recovered: float | None = None
    """Seconds from its end to the first observation that sees every board; None: never."""
    kinds: dict[str, int] = {}
    """Growth of `faults_total` and `rejected_total`, by kind."""
    reasons: dict[str, float] = {}
    """Unobserved GPU-seconds by their reason."""


class Day(Struct):
    """All of it."""

    met: list[Met] = []
    ticks: int = 0
    hours: float = 0.0
    conservation_errors: int = 0
    largest_error: int = 0
    """Nanoseconds by which any GPU's parts ever missed what was paid."""
    fell: int = 0
    """Times a counter was less than at the tick before."""
    lost: float = 0.0
    """Seconds by which paid time misses GPUs times hours, at the worst tick."""
    agent_errors: int = 0
    unanswered: int = 0
    """Ticks after which there was nothing to tell a scrape."""
    unobserved: float = 0.0
    needless: float = 0.0
    """GPU-seconds unobserved outside of any fault and its recovery."""
    curve: list[list[float]] = []
    """Hour, and share of the boards that was observed then."""


# -- the faults --


class _Ways(TypedDict):
    begin: Callable[[Node], None]
    end: Callable[[Node], None]


def _set(name: str, value: object) -> Callable[[Node], None]:
    part, _, field = name.partition(".")
    return lambda node: setattr(getattr(node, part), field, value)


def _trouble(kind: str) -> _Ways:
    return {"begin": _set("source.trouble", kind), "end": _set("source.trouble", "")}


def _present(count: int) -> _Ways:
    return {"begin": _set("source.present", BOARDS[:count]), "end": _set("source.present", BOARDS)}


def _steps(seconds: float) -> Callable[[Node], None]:
    return lambda node: node.clock.step_wall(round(seconds * SECOND))


def _sleeps(seconds: int) -> Callable[[Node], None]:
    """A virtual machine that was stopped: both clocks are further when it goes on."""
    return lambda node: node.clock.wait(node.clock.now() + seconds * SECOND, node.stopped)


def _restarts(node: Node) -> None:
    """The daemon is told to stop, is away for 20 s, and counts on from its checkpoint."""
    frozen = dump_ledger(node.agent.ledger)
    node.clock.wait(node.clock.now() + 20 * SECOND, node.stopped)
    node.agent = node.new_agent()
    node.agent.resume(frozen, now=node.clock.now(), reason="the exporter was down for 20 s")
    node.source.resync()


FAULTS: tuple[Fault, ...] = (
    Fault(
        what="the source hangs",
        begin=lambda node: node.source.well.clear(),
        end=lambda node: node.source.well.set(),
        seen='state unobserved, reason source_hung; log: "no answer for 15 s; still waiting"',
    ),
    Fault(what="the source raises", **_trouble("raises"), seen="source_failed, with the driver's words"),
    Fault(
        what="the source breaks in its own code", **_trouble("breaks"), seen='source_failed; log: "please report this"'
    ),
    Fault(what="the source talks nonsense", **_trouble("nonsense"), seen="rejected_total, by GPU and reason"),
    Fault(
        what="three GPUs vanish and return", **_present(5), seen="state unavailable (missing), still paid for", boards=0
    ),
    Fault(
        what="all GPUs vanish and return", **_present(0), seen="state unavailable (missing), still paid for", boards=0
    ),
    Fault(
        what="the wall clock steps by hours and years",
        begin=_steps(10 * 365 * 86400),
        end=_steps(-10 * 365 * 86400 - 3600),
        seen="nothing: it is never used for arithmetic",
        boards=0,
    ),
    Fault(
        what="the machine stands still for 10 min", begin=_sleeps(600), longest=0, seen="reason gap; late_ticks_total"
    ),
    Fault(
        what="ticks come 12 s late",
        begin=_set("clock.oversleeps", 12 * SECOND),
        end=_set("clock.oversleeps", 0),
        seen="late_ticks_total; all is seen, in longer readings",
        boards=0,
    ),
    Fault(
        what="the scheduler cannot be reached",
        begin=_set("scheduler.silent", value=True),
        end=_set("scheduler.silent", value=False),
        seen="scheduler_failed; later the job unknown",
        boards=0,
    ),
    Fault(
        what="a listener breaks",
        begin=_set("ear.breaks", value=True),
        end=_set("ear.breaks", value=False),
        seen="listening_failed, and its first time in the log",
        boards=0,
    ),
    Fault(what="the daemon restarts (20 s away)", begin=_restarts, longest=0, seen="reason exporter_down"),
)


# -- the day --


def day(*, hours: float = HOURS, each: int = EACH, seed: int = 1) -> Day:
    """Let it pass."""
    node = Node()
    try:
        return _Watch(node, hours * 3600).through(schedule(hours, each, seed))
    finally:
        node.close()


def schedule(hours: float, each: int, seed: int) -> list[tuple[float, float, Fault]]:
    """When each begins and how long it lasts, in seconds; none while another lasts, or in the rest after it."""
    dice = random.Random(seed)  # nosec B311  # noqa: S311  dice, no secret
    faults = [fault for fault in FAULTS for _ in range(each)]
    dice.shuffle(faults)
    room = hours * 3600 / max(1, len(faults))
    found: list[tuple[float, float, Fault]] = []
    for number, fault in enumerate(faults):
        lasts = dice.uniform(0.1, 1.0) * min(fault.longest, room - 2 * _REST)
        begins = number * room + dice.uniform(_REST, max(_REST, room - lasts - _REST))
        found.append((begins, lasts, fault))
    return found


class _Watch:
    """What is checked at every tick."""

    def __init__(self, node: Node, seconds: float) -> None:
        self._node, self._seconds, self.found = node, seconds, Day()
        self._began: int | None = None
        self._before: dict[tuple[str, str], float] = {}

    def through(self, plan: list[tuple[float, float, Fault]]) -> Day:
        """All of the plan, and the rest of the day."""
        self._until(30.0)
        for begins, lasts, fault in plan:
            self._quietly(begins)
            self._one(fault, lasts)
        self._quietly(self._seconds)
        self.found.hours, self.found.unobserved = self._now() / 3600, self._unobserved()
        return self.found

    def _one(self, fault: Fault, lasts: float) -> None:
        met = Met(fault.what, self._now() / 3600, lasts)
        before, kinds, reasons, paid = self._unobserved(), self._kinds(), self._reasons(), self._paid()
        began = self._now()
        fault.begin(self._node)
        self._until(began + lasts)
        fault.end(self._node)
        ended = self._now()
        met.lasted = ended - began
        met.recovered = next((self._now() - ended for _ in self._ticks(ended + _RECOVERY) if self._sees()), None)
        met.unobserved, met.paid = self._unobserved() - before, self._paid() - paid
        met.kinds = {
            kind: count - kinds.get(kind, 0) for kind, count in self._kinds().items() if count > kinds.get(kind, 0)
        }
        met.reasons = {
            why: round(spent - reasons.get(why, 0.0), 3)
            for why, spent in self._reasons().items()
            if spent > reasons.get(why, 0.0)
        }
        self.found.met.append(met)

    def _quietly(self, until: float) -> None:
        before = self._unobserved()
        self._until(until)
        self.found.needless += self._unobserved() - before

    def _until(self, until: float) -> None:
        for _ in self._ticks(until):
            pass

    def _ticks(self, until: float) -> Iterator[None]:
        while self._now() < until:
            self._node.tick()
            self._check()
            yield

    def _now(self) -> float:
        """Seconds since the first observation."""
        return 0.0 if self._began is None else (self._node.clock.now() - self._began) / SECOND

    def _sees(self) -> bool:
        """Whether every board has a good reading of this very tick."""
        gpus = self._node.agent.ledger.gpus.values()
        at = self._node.agent.ledger.at or 0
        fresh = (
            gpu.reading is not None and not gpu.reading.distrust and at - gpu.reading.end <= SECOND for gpu in gpus
        )
        return len(gpus) == GPUS and all(fresh)

    def _check(self) -> None:
        ledger, found = self._node.agent.ledger, self.found
        if self._began is None:
            self._began = self._node.clock.now()
        found.ticks += 1
        errors = [abs(sum(gpu.book.parts) - gpu.book.paid) for gpu in ledger.gpus.values()]
        found.largest_error = max([found.largest_error, *errors])
        found.conservation_errors += ledger.conservation_errors + sum(
            not conserved(gpu.book) for gpu in ledger.gpus.values()
        )
        snapshot = self._node.agent.latest()
        found.unanswered += snapshot is None
        if snapshot is not None:
            self._compare(snapshot)
        if found.ticks % 60 == 0:
            seen = sum(gpu.state.value not in ("unobserved", "unavailable") for gpu in ledger.gpus.values())
            found.curve.append([round(self._now() / 3600, 4), seen / GPUS])

    def _compare(self, snapshot: Snapshot) -> None:
        """Counters with those before, and what was paid with the time that has passed."""
        now: dict[tuple[str, str], float] = {
            (gpu.device.uuid, f"{n}"): part for gpu in snapshot.gpus for n, part in enumerate(gpu.counters.now.parts)
        }
        now |= {(f"job {job.owner.job_id}", "paid"): job.counters.now.paid for job in snapshot.jobs}
        self.found.fell += sum(value < self._before.get(key, 0) for key, value in now.items())
        self._before = now  # a job that has left its series, and comes again, begins a new one
        self.found.agent_errors = max(self.found.agent_errors, sum(count for _, count in snapshot.meta.errors))
        if self._began is not None:
            due = [(gpu.book.until - self._began) / SECOND for gpu in self._node.agent.ledger.gpus.values()]
            booked = [gpu.book.paid / SECOND for gpu in self._node.agent.ledger.gpus.values()]
            self.found.lost = max([self.found.lost, *(abs(a - b) for a, b in zip(due, booked, strict=True))])

    def _paid(self) -> float:
        return sum(gpu.book.paid for gpu in self._node.agent.ledger.gpus.values()) / SECOND

    def _reasons(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for gpu in self._node.agent.ledger.gpus.values():
            for why, spent in gpu.unobserved.items():
                sums[why] = sums.get(why, 0.0) + spent / SECOND
        return sums

    def _unobserved(self) -> float:
        return sum(self._reasons().values())

    def _kinds(self) -> dict[str, int]:
        ledger = self._node.agent.ledger
        rejected = [gpu.rejected for gpu in ledger.gpus.values()]
        refused = sum(sum(one.values()) for one in (*rejected, ledger.refused))
        return {**ledger.faults, "rejected": refused}
