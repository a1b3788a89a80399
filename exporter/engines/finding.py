"""Where the serving engines of this node answer: from the processes on the GPUs to the addresses to ask.

Owns the way from guests to targets. Only ports of the configuration are looked at, and only where a process of the
same job listens on them. Refuses to ask: it opens no connection.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from exporter.config import ConfigError, Engines
from exporter.engines.family import Family, command, look
from exporter.engines.figures import Engine, option
from exporter.engines.intervals import Holder
from exporter.engines.known import PATHS, engine_of
from exporter.engines.sockets import Listening, listeners, namespace, reachable, sockets
from exporter.wording import without_secrets
from exporter.workloads import Guest


class Target(Struct, frozen=True):
    """One address to ask."""

    base: str
    """http://host:port, or the whole address where the operator gave it."""
    holder: Holder
    paths: tuple[str, ...]
    command: str = ""
    """Command lines of the process that listens and of those that started it, a line each."""
    owner: int = 0
    """Pid of the process that listens; 0: the operator's address."""


class Found(Struct, frozen=True):
    """What a look around gave."""

    targets: tuple[Target, ...] = ()
    silent: tuple[tuple[str, str], ...] = ()
    """Jobs whose engine is known by its command line and listens on no port to try: (job id, engine)."""
    unreachable: tuple[tuple[str, int], ...] = ()
    """Jobs that listen on the loopback of a network namespace of their own: (job id, port)."""


class Finder:
    """Looks around in two steps: whom to ask the scheduler for, then where those who are the job's listen."""

    def __init__(self, engines: Engines, *, proc: str | Path = "/proc", own: str | Path = "/proc/self") -> None:
        """`own` is this daemon's folder. Raises ConfigError for a pattern or an address that cannot be used."""
        self._proc, self._own = Path(proc), Path(own)
        self._ports = {port: rank for rank, port in enumerate(engines.ports)}
        self._fixed = tuple(
            (_checked(index, e.url), _pattern(index, e.job_id)) for index, e in enumerate(engines.endpoints)
        )
        self._family = Family({}, {})
        self._idle: frozenset[int] = frozenset()
        """Processes on GPUs none of which serves: that does not change."""

    def relatives(self, guests: Sequence[Guest]) -> tuple[int, ...]:
        """Pids around the serving ones of these, which may be of the same job."""
        pids = frozenset(guest.pid for guest in guests)
        if pids == self._idle and not any(guest.workload_class == "serving" for guest in guests):
            return ()
        try:
            self._family = look(self._proc)
        except OSError:
            return ()
        serving = self._serving(guests)
        self._idle = pids if not serving else frozenset()
        return self._family.around(guest.pid for guest in serving)

    def find(self, guests: Sequence[Guest], members: Mapping[int, Guest]) -> Found:
        """Where they answer; `members` are those of the relatives that the scheduler knows to be a job's."""
        serving = self._serving(guests)
        jobs = sorted({guest.job_id for guest in serving})
        looks = [self._job(job, [g for g in guests if g.job_id == job], members) for job in jobs]
        fixed = tuple(self._fixed_targets(guests))
        taken = {_host(target.base) for target in fixed}
        targets = tuple(t for one in looks for t in one.targets if _host(t.base) not in taken)
        claimed = {target.holder.job_id for target in fixed}
        return Found(
            fixed + targets,
            tuple(s for one in looks for s in one.silent if s[0] not in claimed),
            tuple(u for one in looks for u in one.unreachable if u[0] not in claimed),
        )

    def _serving(self, guests: Sequence[Guest]) -> list[Guest]:
        return [g for g in guests if g.workload_class == "serving" or engine_of(self._commands(g.pid)) is not None]

    def _commands(self, pid: int) -> str:
        """Its own and its ancestors' command lines."""
        return "\n".join(command(self._proc, one) for one in (pid, *self._family.ancestors(pid)))

    def _fixed_targets(self, guests: Sequence[Guest]) -> Iterator[Target]:
        jobs = sorted({guest.job_id for guest in guests})
        for url, pattern in self._fixed:
            job = next((job for job in jobs if pattern.fullmatch(job)), None)
            if job is not None:
                yield Target(url, _holder(job, [g for g in guests if g.job_id == job], (), ""), ("",))

    def _job(self, job: str, guests: Sequence[Guest], members: Mapping[int, Guest]) -> Found:
        pids = list(dict.fromkeys([g.pid for g in guests] + [p for p, who in members.items() if who.job_id == job]))
        owners = self._owners(pids)
        reached = {pid: [(one, self._address(pid, one)) for one in owned] for pid, owned in owners.items()}
        targets = {
            f"http://{host}:{one.port}": (pid, one) for pid, owned in reached.items() for one, host in owned if host
        }
        blocked = tuple((job, one.port) for owned in reached.values() for one, host in owned if not host)
        first = sorted(targets, key=lambda base: self._ports[targets[base][1].port])
        made = tuple(self._target(base, targets[base][0], job, guests, owners) for base in first)
        engine = engine_of("\n".join(self._commands(guest.pid) for guest in guests))
        silent = ((job, engine.name),) if engine is not None and not made and not blocked else ()
        return Found(made, silent, blocked)

    def _owners(self, pids: Sequence[int]) -> dict[int, list[Listening]]:
        """The sockets on ports to try, by the first of these processes that has them."""
        tables: dict[str, list[Listening]] = {}
        owners: dict[int, list[Listening]] = {}
        for pid in pids:
            for one in self._listened(pid, tables):
                owners.setdefault(pid, []).append(one)
        return owners

    def _listened(self, pid: int, tables: dict[str, list[Listening]]) -> list[Listening]:
        """Of one process; what it has is taken off the table of its network namespace."""
        folder = self._proc / str(pid)
        try:
            space = namespace(folder)
            if space not in tables:
                tables[space] = [one for one in listeners(folder) if one.port in self._ports]
        except (OSError, ValueError):  # it has just ended, or may not be asked
            return []
        if not tables[space]:
            return []
        inodes = sockets(folder)
        mine = [one for one in tables[space] if one.inode in inodes]
        ports = {one.port for one in mine}
        tables[space] = [one for one in tables[space] if one.port not in ports]
        return list({one.port: one for one in reversed(mine)}.values())

    def _address(self, pid: int, one: Listening) -> str:
        folder = self._proc / str(pid)
        try:
            return reachable(one, folder, here=namespace(folder) == namespace(self._own))
        except OSError:
            return ""

    def _target(self, base: str, pid: int, job: str, guests: Sequence[Guest], owners: Mapping[int, object]) -> Target:
        commands = self._commands(pid)
        engine = engine_of(commands)
        uuids = self._gpus(pid, guests, owners)
        return Target(
            base, _holder(job, guests, uuids, commands, engine), engine.paths if engine else PATHS, commands, pid
        )

    def _gpus(self, owner: int, guests: Sequence[Guest], owners: Iterable[int]) -> tuple[str, ...]:
        """GPUs of the processes that it started, or that were started with it; empty: all of the job's.

        Upwards until somebody is on a GPU; no further than to where another server of the job was started too.
        """
        everything = {uuid for guest in guests for uuid in guest.uuids}
        for root in (owner, *self._family.ancestors(owner)):
            below = self._family.below(root)
            if any(other in below for other in owners if other != owner) and root != owner:
                return ()
            uuids = {uuid for guest in guests if guest.pid in below for uuid in guest.uuids}
            if uuids:
                return () if uuids == everything else tuple(sorted(uuids))
        return ()


def _holder(
    job: str, guests: Sequence[Guest], uuids: tuple[str, ...], commands: str, engine: Engine | None = None
) -> Holder:
    here = len(uuids or {uuid for guest in guests for uuid in guest.uuids})
    whole = int(prod(option(commands, *names) or 1 for names in engine.parallel)) if engine else 1
    return Holder(job, uuids, gpus=whole if whole > here else 0, shared=max(whole, here) if here else 0)


def _host(base: str) -> str:
    return urlsplit(base).netloc


def _checked(index: int, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"engines.endpoints[{index}].url: {without_secrets(url)!r} is no address (example: http://10.0.0.7:8000/metrics)"
        )
    return url


def _pattern(index: int, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"engines.endpoints[{index}].job_id: {text!r} is no regular expression: {error}") from error
