"""The serving engines of this node, asked one by one in a thread of their own.

Owns the thread, who is asked when, and what is handed over. Refuses to find (`finding`), to ask (`web`) and to
reckon (`intervals`).
"""

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import httpx

from exporter.clock import Clock
from exporter.config import Config
from exporter.core.model import SECOND, Fault, Serving
from exporter.engines.asking import GRACE, Asked
from exporter.engines.figures import Figures
from exporter.engines.finding import Finder, Found, Target
from exporter.engines.intervals import Replica
from exporter.engines.known import read
from exporter.engines.page import Page
from exporter.engines.web import TROUBLES, Trouble, fetch
from exporter.wording import without_secrets
from exporter.workloads import Guest, Heard, Listener, Whose

log = logging.getLogger(__name__)
TICK_SECONDS = 0.2
LOOK = 30 * SECOND
"""Between two looks around while the same processes are on the GPUs."""
MOST_WAITING = 4096
"""Intervals that nobody has taken; beyond, the oldest go."""
OUTCOMES = ("engine_page", "engine_restart", *(f"engine_{kind}" for kind in TROUBLES))
"""All that is counted."""


class _Nobody:
    """No engine is asked: they are switched off."""

    def take(self, _now: int, _guests: Sequence[Guest], _whose: Whose) -> Heard:
        return Heard()

    def close(self) -> None:
        """Nothing is held."""


def open_engines(config: Config, clock: Clock) -> Listener:
    """Listen to the engines of this node, as [engines] says. Raises ConfigError for an endpoint that cannot be used."""
    return Poller(config, clock) if config.engines.enabled else _Nobody()


class Poller:
    """The `Listener` of serving engines; its thread begins with the first guests, and ends with `close`."""

    def __init__(self, config: Config, clock: Clock, *, finder: Finder | None = None) -> None:
        self._config, self._clock = config.engines, clock
        self._finder = finder or Finder(config.engines, proc=config.host.proc)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._guests: tuple[Guest, ...] = ()
        self._wanted: tuple[int, ...] | None = None
        self._members: Mapping[int, Guest] | None = None
        self._heard: list[Serving] = []
        self._faults: tuple[Fault, ...] = ()
        self._counts = Counter(dict.fromkeys(OUTCOMES, 0))
        self._asked: dict[tuple[str, str], Asked] = {}
        self._found, self._seen = Found(), frozenset[tuple[int, str]]()
        self._looked: int | None = None
        self._quiet: dict[tuple[str, str], int] = {}
        """Since when a job is silent, or cannot be reached."""
        self._thread: threading.Thread | None = None

    def take(self, _now: int, guests: Sequence[Guest], whose: Whose) -> Heard:
        """See Listener. Asks `whose` once a look around, for at most 512 processes."""
        with self._lock:
            self._guests = tuple(guests)
            wanted, self._wanted = self._wanted, None
        members = whose(wanted) if wanted is not None else None
        with self._lock:
            self._members = members if members is not None else self._members
            heard, self._heard = self._heard, []
            said = Heard((), tuple(heard), self._faults, tuple(self._counts.items()))
        if guests and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="engines", daemon=True)
            self._thread.start()
        return said

    def close(self) -> None:
        """See Listener. Waits for the thread, which gives up what it asks."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._config.timeout_seconds + 5)

    def _work(self) -> None:
        try:
            asyncio.run(self._poll())
        except Exception as error:  # noqa: BLE001  a thread that ends without a word would leave its last one standing
            with self._lock:
                self._faults = (Fault("engine_failed", f"serving engines are asked no more ({error!r}): restart"),)

    async def _poll(self) -> None:
        # No proxy from the environment: engines are on this node. No kept connections: they would keep a server that
        # wants to end from ending.
        headers = {"Accept-Encoding": "gzip", "Accept": "text/plain", "Connection": "close"}
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(trust_env=False, headers=headers, limits=limits, timeout=None) as client,  # nosec B113  # noqa: S113  `fetch` times the whole
            asyncio.TaskGroup() as group,
        ):
            tasks: set[asyncio.Task[None]] = set()
            while not self._stop.is_set():
                self._look_around(self._clock.now())
                for asked in self._due(self._clock.now()):
                    asked.busy = True
                    tasks.add(group.create_task(self._ask(client, asked)))
                tasks = {task for task in tasks if not task.done()}
                await asyncio.sleep(TICK_SECONDS)
            for task in tasks:
                task.cancel()

    def _look_around(self, now: int) -> None:
        """First whom to ask the scheduler for; when it has answered, where they listen."""
        with self._lock:
            guests, members, self._members = self._guests, self._members, None
        if members is not None:
            self._found = self._finder.find(guests, members)
            self._meet(self._found.targets, {guest.job_id for guest in guests})
        seen = frozenset((guest.pid, guest.job_id) for guest in guests)
        if self._looked is None or now - self._looked >= LOOK or seen != self._seen:
            self._looked, self._seen = now, seen
            wanted = self._finder.relatives(guests)
            with self._lock:
                self._wanted = wanted
        self._tell(now)

    def _meet(self, targets: Sequence[Target], jobs: set[str]) -> None:
        """Ask these from now on; what is known of one goes on, and one of a job of `jobs` that has answered stays."""
        asked = {k: a for k, a in self._asked.items() if a.heard_at is not None and a.target.holder.job_id in jobs}
        for target in targets:
            key = (target.base, target.holder.job_id)
            known = self._asked.get(key)
            if known is None or known.target.owner != target.owner:
                known = self._new(target)
            known.target = target
            asked[key] = known
        self._asked = asked

    def _new(self, target: Target) -> Asked:
        interval = int(self._config.interval_seconds * SECOND)
        return Asked(target, Replica(self._config.models, interval=interval), interval=interval, chance=random.random)

    def _due(self, now: int) -> Iterator[Asked]:
        """Without other ports of a process that already answers on one."""
        answering = {a.target.owner: a for a in self._asked.values() if a.target.owner and a.answers(now)}
        for asked in self._asked.values():
            if asked.due <= now and not asked.busy and answering.get(asked.target.owner, asked) is asked:
                yield asked

    async def _ask(self, client: httpx.AsyncClient, asked: Asked) -> None:
        try:
            await self._hear(client, asked)
        except Trouble as trouble:
            asked.failed(self._clock.now(), trouble)
            self._count(f"engine_{trouble.kind}")
        except Exception as error:  # what one page does to us must not end the asking of the others
            if asked.trouble is None:
                log.exception("reading the page of %s failed; please report this", without_secrets(asked.target.base))
            asked.failed(self._clock.now(), Trouble("malformed", f"cannot be read ({error!r})", "please report this"))
            self._count("engine_malformed")
        finally:
            asked.busy = False

    async def _hear(self, client: httpx.AsyncClient, asked: Asked) -> None:
        target = asked.target
        figures = await self._page(client, asked)
        now = self._clock.now()
        restarts = asked.replica.restarts
        serving = asked.replica.hear(figures, now, holder=target.holder)
        asked.heard(now, front=figures.front)
        self._count("engine_page")
        self._count("engine_restart", asked.replica.restarts - restarts)
        if not (figures.front and self._has_replica(target.holder.job_id, now)):
            with self._lock:
                self._heard = [*self._heard, serving][-MOST_WAITING:]

    async def _page(self, client: httpx.AsyncClient, asked: Asked) -> Figures:
        """The path that answered last comes first; the others are tried only until one has."""
        paths = range(len(asked.target.paths)) if asked.heard_at is None else (asked.path,)
        trouble: Trouble | None = None
        for asked.path in paths:
            url = f"{asked.target.base}{asked.target.paths[asked.path]}"
            try:
                return _read(await fetch(client, url, seconds=self._config.timeout_seconds), asked.target.command)
            except Trouble as error:
                if error.kind in ("refused", "timeout"):
                    raise
                trouble = error
        raise trouble or Trouble("not_an_engine", "has no path to ask", "give its address in engines.endpoints")

    def _has_replica(self, job: str, now: int) -> bool:
        others = (asked for asked in self._asked.values() if asked.target.holder.job_id == job)
        return any(other.answers(now) and not other.front for other in others)

    def _count(self, outcome: str, times: int = 1) -> None:
        with self._lock:
            self._counts[outcome] += times

    def _tell(self, now: int) -> None:
        """What stands now."""
        speaking = {a.target.holder.job_id for a in self._asked.values() if a.answers(now)}
        each = (a.fault(now, alone=a.target.holder.job_id not in speaking) for a in self._asked.values())
        faults = [fault for fault in each if fault is not None] + self._of_quiet(now)
        with self._lock:
            self._faults = tuple(faults)

    def _of_quiet(self, now: int) -> list[Fault]:
        """Of jobs that cannot be asked at all: on another network's loopback at once, where none listens, once late."""
        found = {("unreachable", f"{job} port {port}"): (job, port) for job, port in self._found.unreachable}
        silent = {("silent", f"{job} {engine}"): (job, engine) for job, engine in self._found.silent}
        for kind, _ in (found.keys() | silent.keys()) - self._quiet.keys():
            self._count(f"engine_{kind}")
        self._quiet = {key: self._quiet.get(key, now) for key in (*found, *silent)}
        late = [who for key, who in silent.items() if now - self._quiet[key] >= GRACE]
        return [_blocked(job, port) for job, port in found.values()] + [_silent(job, engine) for job, engine in late]


def _read(text: str, command: str) -> Figures:
    """Of a page whose lines can all be read: a sum with one missing would be another sum."""
    page = Page(text)
    figures = read(page, command)
    if page.bad:
        raise Trouble(
            "malformed",
            f"has {page.bad} lines that are no metrics, or more or longer ones than any engine writes",
            "see what is between it and its address",
        )
    return figures


def _blocked(job: str, port: int) -> Fault:
    what = f"listens on port {port} of its own loopback only, or of no address it has: let it listen on 0.0.0.0"
    return _fault(job, f"{what}, or give engines.endpoints an address that leads there")


def _silent(job: str, engine: str) -> Fault:
    what = f"runs {engine}, none of whose processes listens on a port of engines.ports: add its port there"
    return _fault(job, f"{what}, or its address to engines.endpoints")


def _fault(job: str, what: str) -> Fault:
    return Fault("engine_failed", f"serving engine of job {job} {what}")
