"""Discovers the metrics endpoints of this node's serving engines, starting from the processes on its GPUs.

Reads the process tree and listening sockets from /proc. An endpoint is a configured port on which a process of the same
job listens. Opens no connection.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from exporter.config import ConfigError, EngineSettings
from exporter.connections import plain_address
from exporter.engines.base import Engine, option_number
from exporter.engines.registry import DEFAULT_PATHS, engine_of_command, lines_of_server
from exporter.engines.replica import ReplicaPlacement
from exporter.procfs import parent_pid, read_bytes
from exporter.redact import redact_secrets
from exporter.sockets import (
    ListeningSocket,
    addresses,
    listeners,
    network_namespace,
    reachable_hosts,
    socket_inodes,
)
from exporter.workloads import WorkloadProcess

MAX_ANCESTORS = 8
"""Maximum number of ancestors of a process that are searched."""
MAX_RELATIVES = 512
"""Maximum number of relatives that are searched, for all processes on GPUs together."""
_COMMAND_BYTES = 16384


class ProcessTree(Struct, frozen=True):
    """A snapshot of the parents and children of all processes, by pid."""

    parents: Mapping[int, int]
    children: Mapping[int, tuple[int, ...]]

    def ancestors(self, pid: int) -> Iterator[int]:
        """Yield the ancestors from the parent upwards, without init."""
        for _ in range(MAX_ANCESTORS):
            pid = self.parents.get(pid, 0)
            if pid <= 1:
                return
            yield pid

    def descendants(self, pid: int) -> set[int]:
        """Return the process and all its descendants."""
        return set(self._walk([pid]))

    def relatives(self, pids: Iterable[int]) -> tuple[int, ...]:
        """Return the processes, their ancestors, and the descendants of all these, the nearest first."""
        found: dict[int, None] = {}
        for start in (ancestor for pid in pids for ancestor in (pid, *self.ancestors(pid))):
            found.update(dict.fromkeys(self._walk([start])))
            if len(found) >= MAX_RELATIVES:
                break
        return tuple(found)[:MAX_RELATIVES]

    def _walk(self, start: list[int]) -> Iterator[int]:
        queue, seen = deque(start), 0
        while queue and seen < MAX_RELATIVES:
            pid = queue.popleft()
            seen += 1
            yield pid
            queue.extend(self.children.get(pid, ()))


def read_process_tree(proc: Path) -> ProcessTree:
    """Read the parent of every process. Raises OSError if `proc` cannot be listed."""
    parents = {int(folder.name): parent_pid(folder) for folder in proc.iterdir() if folder.name.isdecimal()}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    return ProcessTree(parents, {parent: tuple(sorted(pids)) for parent, pids in children.items()})


def command_line(proc: Path, pid: int) -> str:
    """Return the command line with a space for each NUL; empty if it cannot be read.

    A line feed becomes a semicolon, which ends a command in a shell's script likewise.
    """
    try:
        raw = read_bytes(proc / str(pid) / "cmdline", _COMMAND_BYTES)
        return raw.decode(errors="replace").replace("\0", " ").replace("\n", " ; ").strip()
    except OSError:
        return ""


class MetricsEndpoint(Struct, frozen=True):
    """An endpoint to scrape."""

    base: str
    """http://host:port, or the whole URL if the operator configured it; a server may have several."""
    placement: ReplicaPlacement
    paths: tuple[str, ...]
    command_lines: str = ""
    """Command lines of the listening process and its ancestors, one per line."""
    pid: int = 0
    """Pid of the listening process; 0: configured by the operator."""


class DiscoveredEngines(Struct, frozen=True):
    """The result of one discovery."""

    endpoints: tuple[MetricsEndpoint, ...] = ()
    not_listening: tuple[tuple[str, str], ...] = ()
    """(job id, engine) of jobs whose command line is an engine's and which listen on none of the configured ports."""
    unreachable: tuple[tuple[str, int], ...] = ()
    """(job id, port) of jobs whose socket the daemon cannot reach, such as on the loopback of another namespace."""


class EngineDiscovery:
    """Discovers endpoints in two steps: `relatives` returns pids that the scheduler must identify for `discover`."""

    def __init__(self, engines: EngineSettings, *, proc: str | Path = "/proc", own: str | Path = "/proc/self") -> None:
        """`own` is this daemon's /proc folder. Raises ConfigError for an invalid URL or pattern."""
        self._proc, self._own = Path(proc), Path(own)
        self._ports = {port: rank for rank, port in enumerate(engines.ports)}
        self._configured = tuple(
            (_check_url(index, e.url), _compile_pattern(index, e.job_id)) for index, e in enumerate(engines.endpoints)
        )
        self._tree = ProcessTree({}, {})
        self._not_serving: frozenset[int] = frozenset()
        """Pids of the last processes if none of them is an engine's, to skip reading /proc for them again."""

    def relatives(self, processes: Sequence[WorkloadProcess]) -> tuple[int, ...]:
        """Return the pids of the engines among `processes` and of their relatives, which may belong to the same job."""
        pids = frozenset(process.pid for process in processes)
        if pids == self._not_serving and not any(process.workload_class == "serving" for process in processes):
            return ()
        try:
            self._tree = read_process_tree(self._proc)
        except OSError:
            return ()
        serving = self._serving_processes(processes)
        self._not_serving = pids if not serving else frozenset()
        return self._tree.relatives(process.pid for process in serving)

    def discover(
        self, processes: Sequence[WorkloadProcess], members: Mapping[int, WorkloadProcess]
    ) -> DiscoveredEngines:
        """Return the engines' endpoints; `members` are the relatives that the scheduler assigned to a job, by pid."""
        serving = self._serving_processes(processes)
        jobs = sorted({process.job_id for process in serving})
        results = [self._discover_job(job, [g for g in processes if g.job_id == job], members) for job in jobs]
        configured = tuple(self._configured_endpoints(processes))
        endpoints = self._not_configured([found for result in results for found in result.endpoints], configured)
        configured_jobs = {target.placement.job_id for target in configured}
        return DiscoveredEngines(
            configured + endpoints,
            tuple(job for result in results for job in result.not_listening if job[0] not in configured_jobs),
            tuple(job for result in results for job in result.unreachable if job[0] not in configured_jobs),
        )

    def _not_configured(
        self, found: Sequence[MetricsEndpoint], configured: Sequence[MetricsEndpoint]
    ) -> tuple[MetricsEndpoint, ...]:
        """Return the servers that were found, without those that the operator's addresses, as far as known, lead to.

        Names are not resolved: that may take long, and the address of a Kubernetes Service is none of the pod's. They
        stand for all servers of their job and port, unless there are more servers than names: which is which is not
        known then, and none must be missed.
        """
        others = [target for target in configured if not any(self._is_at(target, server) for server in found)]
        rest = [server for server in found if not any(self._is_at(target, server) for target in configured)]
        servers = Counter(place for place, _ in {(_job_and_port(server), server.pid) for server in rest})
        return tuple(
            server
            for server in rest
            if sum(self._may_lead_to(target, server) for target in others) < servers[_job_and_port(server)]
        )

    def _is_at(self, configured: MetricsEndpoint, found: MetricsEndpoint) -> bool:
        """Return whether the operator's address is one of the server's; within its job, of its network namespace."""
        address, server = _address(configured), _address(found)
        if address is None or server is None or _job_and_port(configured)[1] != _job_and_port(found)[1]:
            return False
        if address == server or (address.is_loopback and server.is_loopback):
            return True
        return configured.placement.job_id == found.placement.job_id and address in _owned(self._proc / str(found.pid))

    def _may_lead_to(self, configured: MetricsEndpoint, found: MetricsEndpoint) -> bool:
        """Return whether the operator's address may lead to the server: a name, or an address of this machine."""
        address = _address(configured)
        here = address is None or address.is_loopback or address.is_unspecified or address in _owned(self._own)
        return here and _job_and_port(configured) == _job_and_port(found)

    def _serving_processes(self, processes: Sequence[WorkloadProcess]) -> list[WorkloadProcess]:
        return [
            process
            for process in processes
            if process.workload_class == "serving" or engine_of_command(self._command_lines(process.pid)) is not None
        ]

    def _command_lines(self, pid: int) -> str:
        """Return the command lines of a process and its ancestors, one per line."""
        return "\n".join(command_line(self._proc, each) for each in (pid, *self._tree.ancestors(pid)))

    def _configured_endpoints(self, processes: Sequence[WorkloadProcess]) -> Iterator[MetricsEndpoint]:
        jobs = sorted({process.job_id for process in processes})
        for url, pattern in self._configured:
            job = next((job for job in jobs if pattern.fullmatch(job)), None)
            if job is not None:
                yield MetricsEndpoint(url, _placement(job, [g for g in processes if g.job_id == job], (), ""), ("",))

    def _discover_job(
        self, job: str, processes: Sequence[WorkloadProcess], members: Mapping[int, WorkloadProcess]
    ) -> DiscoveredEngines:
        relatives = [pid for pid, member in members.items() if member.job_id == job]
        sockets = self._sockets_by_pid(list(dict.fromkeys([process.pid for process in processes] + relatives)))
        hosts = [(pid, sock, self._hosts(pid, sock)) for pid, owned in sockets.items() for sock in owned]
        bases = {f"http://{host}:{sock.port}": (pid, sock) for pid, sock, reachable in hosts for host in reachable}
        unreachable = tuple((job, sock.port) for _, sock, reachable in hosts if not reachable)
        in_order = sorted(bases, key=lambda base: self._ports[bases[base][1].port])
        endpoints = tuple(self._endpoint(base, bases[base][0], job, processes, sockets) for base in in_order)
        engine = engine_of_command("\n".join(self._command_lines(process.pid) for process in processes))
        not_listening = ((job, engine.name),) if engine is not None and not endpoints and not unreachable else ()
        return DiscoveredEngines(endpoints, not_listening, unreachable)

    def _sockets_by_pid(self, pids: Sequence[int]) -> dict[int, list[ListeningSocket]]:
        """Return the sockets on configured ports, each under the first of these processes that has it open."""
        tables: dict[str, list[ListeningSocket]] = {}
        found = {pid: self._sockets_of(pid, tables) for pid in pids}
        return {pid: sockets for pid, sockets in found.items() if sockets}

    def _sockets_of(self, pid: int, tables: dict[str, list[ListeningSocket]]) -> list[ListeningSocket]:
        """Return one process's sockets, one per port, and remove their ports from its network namespace's table."""
        folder = self._proc / str(pid)
        try:
            network_ns = network_namespace(folder)
            if network_ns not in tables:
                tables[network_ns] = [sock for sock in listeners(folder) if sock.port in self._ports]
        except (OSError, ValueError):  # it has just ended, or may not be read
            return []
        if not tables[network_ns]:
            return []
        inodes = socket_inodes(folder)
        by_port = {sock.port: sock for sock in reversed(tables[network_ns]) if sock.inode in inodes}
        tables[network_ns] = [sock for sock in tables[network_ns] if sock.port not in by_port]
        return list(by_port.values())

    def _hosts(self, pid: int, sock: ListeningSocket) -> tuple[str, ...]:
        folder = self._proc / str(pid)
        try:
            return reachable_hosts(sock, folder, here=network_namespace(folder) == network_namespace(self._own))
        except OSError:
            return ()

    def _endpoint(
        self, base: str, pid: int, job: str, processes: Sequence[WorkloadProcess], owners: Mapping[int, object]
    ) -> MetricsEndpoint:
        commands = lines_of_server(self._command_lines(pid))
        engine = engine_of_command(commands)
        uuids = self._gpus(pid, processes, owners)
        return MetricsEndpoint(
            base,
            _placement(job, processes, uuids, commands, engine),
            engine.paths if engine else DEFAULT_PATHS,
            commands,
            pid,
        )

    def _gpus(self, owner: int, processes: Sequence[WorkloadProcess], owners: Iterable[int]) -> tuple[str, ...]:
        """Return the GPUs of the replica of process `owner`; empty: all GPUs of the job.

        Goes up the process tree from `owner` until a descendant uses a GPU, but not to an ancestor of another server of
        the job.
        """
        everything = {uuid for process in processes for uuid in process.uuids}
        for root in (owner, *self._tree.ancestors(owner)):
            below = self._tree.descendants(root)
            if any(other in below for other in owners if other != owner) and root != owner:
                return ()
            uuids = {uuid for process in processes if process.pid in below for uuid in process.uuids}
            if uuids:
                return () if uuids == everything else tuple(sorted(uuids))
        return ()


def _placement(
    job: str, processes: Sequence[WorkloadProcess], uuids: tuple[str, ...], commands: str, engine: Engine | None = None
) -> ReplicaPlacement:
    here = len(uuids or {uuid for process in processes for uuid in process.uuids})
    whole = _gpus_of_page(engine, commands) if engine else 1
    return ReplicaPlacement(job, uuids, gpus=whole if whole > here else 0, shared=max(whole, here) if here else 0)


def _gpus_of_page(engine: Engine, commands: str) -> int:
    return int(
        prod(option_number(commands, *names) or 1 for names in engine.parallel) * (engine.replicas(commands) or 1)
    )


_DEFAULT_PORTS = {"http": 80, "https": 443}


def _owned(folder: Path) -> set[IPv4Address | IPv6Address | None]:
    """Return the addresses of a process's network namespace."""
    return {plain_address(host.strip("[]")) for host in addresses(folder)}


def _address(endpoint: MetricsEndpoint) -> IPv4Address | IPv6Address | None:
    """Return the IP address in the URL; None if it has a name."""
    return plain_address(urlsplit(endpoint.base).hostname or "")


def _job_and_port(endpoint: MetricsEndpoint) -> tuple[str, int]:
    parts = urlsplit(endpoint.base)
    return endpoint.placement.job_id, parts.port or _DEFAULT_PORTS[parts.scheme]


def _check_url(index: int, url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, or no port
        usable = False
    if not usable:
        raise ConfigError(
            f"engines.endpoints[{index}].url: {redact_secrets(url)!r} is no address (example: http://10.0.0.7:8000/metrics)"
        )
    return url


def _compile_pattern(index: int, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"engines.endpoints[{index}].job_id: {text!r} is no regular expression: {error}") from error
