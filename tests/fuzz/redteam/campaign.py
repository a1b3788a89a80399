"""Attack classes that rotate and overlap at random, while honest readers and jobs go on; the course of one run.

Owns the processes of attackers and honest ones, and where they run: never on the daemon's processor, if
there is another.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from tests.fuzz.redteam.attacks import (
    crowds,
    doors,
    floods,
    guesses,
    handshakes,
    impostors,
    logs,
    messages,
    nonsense,
    pages,
)
from tests.fuzz.redteam.child import Child
from tests.fuzz.redteam.honest import Reporter, Scrape, Scraper, start_as_slurm
from tests.fuzz.redteam.logins import COST, FirstLogins, Login, number_of_logins
from tests.fuzz.redteam.node import Node, running
from tests.fuzz.redteam.tally import Tally
from tests.fuzz.redteam.target import BY_HTTP, HONEST, SERVING, Attack, Episode, Job

GUESSES = "wrong passwords"
ATTACKS: dict[str, Attack] = {
    "stalled TLS handshakes": handshakes.attack,
    "floods of /metrics": floods.attack,
    GUESSES: guesses.attack,
    "crowds on the reports' socket": crowds.attack,
    "held connections to the reports' HTTP": doors.attack,
    "impostors of a Slurm job": impostors.attack,
    "engine pages": pages.attack,
    "followed logs": logs.attack,
    "HTTP and TLS nonsense": nonsense.attack,
    "malformed reports": messages.attack,
}
_SHORTEST, _LONGEST = 6.0, 25.0
_CALM = 4.0
"""Seconds of scrapes after the last attack."""
_GRACE = 8.0
_NICE, _FAVOURED = 10, -10


class Plan(Struct, frozen=True):
    """How long and how hard."""

    seconds: float
    seed: int
    settle: float = 65.0
    """Seconds before the attack. The daemon prefers addresses that it has served for a minute (docs/security.md)."""
    intensity: float = 1.0
    overlap: int = 3
    """Attacks at the same time."""
    only: tuple[str, ...] = ()
    """Attacks by name; none: all."""
    cost: int = COST
    """Of the bcrypt hashes of all users."""


class Ran(Struct, frozen=True):
    """An episode that has ended."""

    attack: str
    since: float
    until: float


class Course(Struct):
    """What happened."""

    plan: Plan
    attacked_from: float
    honest_began: float
    core: int
    others: tuple[int, ...]
    episodes: list[Ran]
    tallies: dict[str, Tally]
    scrapes: list[Scrape]
    logins: list[Login]
    check_seconds: float
    """Processor time of one check of a password."""
    reports: dict[int, Tally]
    alive: bool
    how_ended: str
    memory: object
    peak_resident: int
    log: str
    log_bytes: int
    daemon_seconds: float
    core_busy_seconds: float


def run(plan: Plan, tell: Callable[[str], None]) -> Course:
    """Run the whole of it on a daemon of its own; `tell` hears of the progress."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1]
    others = tuple(cores[:-1]) or (core,)
    os.sched_setaffinity(0, others)
    try:
        people = number_of_logins(plan.seconds)
        with running(core, plan.intensity, people=people, cost=plan.cost) as node:
            return _Run(plan, node, others, tell).course()
    finally:
        os.sched_setaffinity(0, cores)


class _Run:
    def __init__(self, plan: Plan, node: Node, others: tuple[int, ...], tell: Callable[[str], None]) -> None:
        self._plan, self._node, self._others, self._tell = plan, node, others, tell
        self._dice = Random(plan.seed)  # noqa: S311  dice, no secret
        self._bag: list[str] = []
        self._ran: list[Ran] = []
        self._tallies = {name: Tally() for name in plan.only or ATTACKS}
        self._live: list[tuple[str, float, float, Child]] = []
        self._began = time.monotonic()
        self._attack_from = self._began + plan.settle
        self._attack_until = self._attack_from + plan.seconds
        self._end = self._attack_until + _CALM

    def course(self) -> Course:
        notes, logins = (self._node.target.folder / f"{name}.jsonl" for name in ("scrapes", "logins"))
        with self._honest(notes, logins) as (scraper, reporters):
            ran, busy = _cpu(self._node.target.pid), _core_busy(self._node.core)
            self._attack()
            used, core = _cpu(self._node.target.pid) - ran, _core_busy(self._node.core) - busy
            self._idle_until(self._end + _GRACE, scraper.ended)
            alive = self._node.alive()
            reports = {job.id: child.wait(_GRACE) for job, child in reporters}
        scrapes = [msgspec.json.decode(text, type=Scrape) for text in notes.read_bytes().splitlines()]
        self._node.memory.watch(self._node.target.pid)
        log = self._node.log.read_text(encoding="utf-8", errors="replace")
        return Course(
            plan=self._plan,
            attacked_from=self._attack_from,
            honest_began=self._began,
            core=self._node.core,
            others=self._others,
            episodes=self._ran,
            tallies=self._tallies,
            scrapes=scrapes,
            logins=[msgspec.json.decode(text, type=Login) for text in logins.read_bytes().splitlines()],
            check_seconds=self._node.check_seconds,
            reports=reports,
            alive=alive,
            how_ended="" if alive else f"exit status {self._node.process.poll()}",
            memory=self._node.memory.read(),
            peak_resident=self._node.memory.peak_resident(),
            log=log[-2_000_000:],
            log_bytes=len(log),
            daemon_seconds=used,
            core_busy_seconds=core,
        )

    @contextmanager
    def _honest(self, notes: Path, logins: Path) -> Iterator[tuple[Child, list[tuple[Job, Child]]]]:
        target = self._node.target
        scraper = Child(Scraper(target, self._end, notes), cpus=self._others, nice=_FAVOURED)
        people = FirstLogins(target, since=self._attack_from, until=self._attack_until, notes=logins)
        children = [scraper, Child(people, cpus=self._others, nice=_FAVOURED)]
        reporters = []
        try:
            for job in (HONEST, BY_HTTP):
                work = Reporter(target, job, began=self._began, counted=self._attack_from, until=self._end)
                first = start_as_slurm(job, target)
                child = Child(work, uid=job.uid, cpus=self._others, nice=_FAVOURED, first=first)
                reporters.append((job, child))
                children.append(child)
            engine = Child(
                pages.Engine(target, Random(self._plan.seed), self._end),  # noqa: S311  dice, no secret
                uid=SERVING.uid,
                cpus=self._others,
                nice=_NICE,
                first=start_as_slurm(SERVING, target),
            )
            children.append(engine)
            target.show_on_gpu(SERVING, engine.pid)
            self._node.list_processes({job.gpu: child.pid for job, child in reporters})
            self._idle_until(self._attack_from)
            yield scraper, reporters
        finally:
            for child in children:
                child.end()

    def _attack(self) -> None:
        told = 0.0
        while time.monotonic() < self._attack_until and self._node.alive():
            while len(self._live) < min(self._plan.overlap, len(self._tallies)):
                if not self._begin():
                    break
            self._collect()
            self._beat()
            if time.monotonic() - told > 30:
                told = time.monotonic()
                left = self._attack_until - told
                self._tell(f"{left:.0f} s left; now: {', '.join(name for name, *_ in self._live)}")
        until = time.monotonic() + _GRACE
        while self._live and time.monotonic() < until:
            self._collect()
            self._beat()
        self._collect(all_of_them=True)

    def _begin(self) -> bool:
        now = time.monotonic()
        length = self._dice.uniform(_SHORTEST, _LONGEST) if self._plan.seconds > _LONGEST else self._plan.seconds / 2
        until = min(now + length, self._attack_until)
        if until - now < 1:
            return False
        live = {name for name, *_ in self._live}
        if not self._bag:
            self._bag = list(self._tallies)
            self._dice.shuffle(self._bag)
        name = next((name for name in self._bag if name not in live), "")
        if not name:
            self._bag = []
            return False
        self._bag.remove(name)
        dice = Random(self._dice.getrandbits(32))  # noqa: S311  dice, no secret
        self._live.append(
            (name, now, until, Child(self._work(name, dice, until), cpus=self._others, nice=_NICE, group=True))
        )
        return True

    def _work(self, name: str, dice: Random, until: float) -> Callable[[Tally], None]:
        return lambda tally: ATTACKS[name](Episode(self._node.target, dice, until, tally))

    def _collect(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for entry in list(self._live):
            name, since, until, child = entry
            if child.ended() or now > until + _GRACE or all_of_them:
                self._live.remove(entry)
                self._tallies[name].add(child.end(group=True))
                self._ran.append(Ran(name, since, min(now, until + _GRACE)))

    def _beat(self) -> None:
        self._node.list_processes()
        self._node.memory.watch(self._node.target.pid)
        time.sleep(0.1)

    def _idle_until(self, end: float, also: Callable[[], bool] = lambda: False) -> None:
        while time.monotonic() < end and self._node.alive() and not also():
            self._beat()


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _core_busy(core: int) -> float:
    """Return the seconds for which anybody used that processor: proc(5), all but idle and iowait."""
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *numbers = line.split()
        if name == f"cpu{core}":
            return sum(int(number) for n, number in enumerate(numbers[:8]) if n not in (3, 4)) / os.sysconf(
                "SC_CLK_TCK"
            )
    return 0.0
