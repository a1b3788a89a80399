"""Tracks CPU use and pressure of jobs and the node's RDMA ports, and names what best explains a job's waiting.

The GPU cannot show why it waits: these are facts of the host beside the leaks `data_stall` and `unattributed_stall`,
and change no entry of the ledger. Pressure is Linux's PSI of the job's control group, "some": the share of time in
which at least one task waited for the resource. A CPU quota raises CPU pressure too (kubernetes/enhancements#4230), so
time stopped by a quota is not counted as contention; reclaiming memory raises I/O pressure likewise.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from msgspec import Struct, field

from exporter.core.leaks import LEAK_NAMES
from exporter.core.model import NEVER, SECOND, HostUsage, NetworkPort, Observation
from exporter.core.policy import Policy

if TYPE_CHECKING:
    from exporter.core.ledger import Ledger

CAUSES = ("storage", "cpu_quota", "memory", "cpu", "network")
RESOURCES = ("cpu", "cpu_quota", "io", "memory")
"""What a job can wait for on its node; cpu includes the time in which the quota stopped it."""
STALLS = tuple(LEAK_NAMES.index(name) for name in ("data_stall", "unattributed_stall"))
"""Leaks whose time is divided by cause."""
_LONGEST_INTERVAL = 300 * SECOND
"""A longer interval is refused: its mean explains nothing."""
_MOST_CORES = 100_000
_GRACE = 15 * SECOND
"""E: how long a value stays current after the interval in which the next one is due."""
MAX_PORTS = 64
_PORT_AGE = 60 * SECOND
"""A port that was not read for so long is not current."""
_LARGEST_RATE = 1e15
_WORD_BYTES = 4
"""Bytes in a unit of InfiniBand's data counters; a tick of port_xmit_wait is compared with the time to send one (E)."""


class JobHost(Struct, eq=False):
    """What the host showed of one job on this node."""

    until: int = NEVER
    """End of the last interval."""
    stalled: int = 0
    """GPU-nanoseconds in STALLS at that time."""
    cpu_seconds: float = 0.0
    """Total CPU time of all cores since the job was first measured."""
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds of waiting by resource, of RESOURCES."""
    cpu_cores: float | None = None
    """Mean number of cores in use over the last interval; None: not measured. Valid until `current_until`."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of the last interval by resource; likewise."""
    current_until: int = NEVER
    stalls: dict[str, int] = field(default_factory=dict)
    """GPU-nanoseconds of STALLS by what explained them best, of CAUSES; only those that occurred."""

    def add(self, usage: HostUsage, *, stalled: int, network: float, policy: Policy) -> None:
        """Add one interval. `stalled`: GPU-nanoseconds in STALLS by now; `network`: see `network_share`."""
        duration = usage.end - usage.start
        grown = stalled - self.stalled if usage.start - self.until <= duration else 0
        self.until, self.stalled, self.current_until = usage.end, stalled, usage.end + duration + _GRACE
        self.cpu_cores = None if usage.cpu_seconds is None else usage.cpu_seconds * SECOND / duration
        self.cpu_seconds += usage.cpu_seconds or 0.0
        self.shares = {name: share for name, share in _shares(usage) if share is not None}
        for name, share in self.shares.items():
            self.waited[name] = self.waited.get(name, 0.0) + share * duration / SECOND
        cause = stall_cause(self.shares, network, policy)
        if cause and grown > 0:
            self.stalls[cause] = self.stalls.get(cause, 0) + grown

    def current(self, at: int) -> bool:
        """Whether `cpu_cores` and `shares` are current."""
        return at <= self.current_until


def _shares(usage: HostUsage) -> tuple[tuple[str, float | None], ...]:
    values = (usage.cpu_pressure, usage.cpu_throttled, usage.io_pressure, usage.memory_pressure)
    return tuple(zip(RESOURCES, values, strict=True))


def stall_cause(shares: Mapping[str, float], network: float, policy: Policy) -> str:
    """The cause that exceeds its threshold by most, of CAUSES; empty if none does. `shares`: by resource."""
    quota, memory = shares.get("cpu_quota", 0.0), shares.get("memory", 0.0)
    excess = {
        "storage": (shares.get("io", 0.0) - memory) / policy.stall_io_share,
        "cpu_quota": quota / policy.stall_throttled_share,
        "memory": memory / policy.stall_memory_share,
        "cpu": (shares.get("cpu", 0.0) - quota) / policy.stall_cpu_share,
        "network": network / policy.stall_network_share,
    }
    cause = max(CAUSES, key=lambda name: excess[name])
    return cause if excess[cause] >= 1.0 else ""


def is_credible_usage(usage: HostUsage, at: int) -> bool:
    """Whether the interval lies in the past and all values are possible."""
    duration = usage.end - usage.start
    if not (0 < duration <= _LONGEST_INTERVAL and usage.end <= at):
        return False
    most = _MOST_CORES * duration / SECOND
    if usage.cpu_seconds is not None and not 0.0 <= usage.cpu_seconds <= most:
        return False
    return all(share is None or 0.0 <= share <= 1.0 for _, share in _shares(usage))


class PortState(Struct, frozen=True):
    """One RDMA port as last read, and its rates since the read before; None: not measured."""

    port: NetworkPort
    sent: float | None = None
    """Bytes per second."""
    received: float | None = None
    waiting: float | None = None
    """Ticks of waiting over all ticks in which data was sent or waited, 0-1 (E)."""

    def busy(self) -> float:
        """Share of the link's rate in the busier direction, or of the time in which data waited, if more; 0-1."""
        rate = self.port.bytes_per_second
        used = max(self.sent or 0.0, self.received or 0.0) / rate if rate else 0.0
        return min(1.0, max(used, self.waiting or 0.0))


def port_states(
    before: Mapping[str, PortState], ports: Iterable[NetworkPort], at: int
) -> tuple[dict[str, PortState], int]:
    """The states of `ports` by name, given those before; and how many of them are not credible or too many."""
    states: dict[str, PortState] = {}
    refused = 0
    for port in ports:
        if len(states) >= MAX_PORTS or port.name in states or not _is_credible_port(port, at):
            refused += 1
            continue
        old = before.get(port.name)
        states[port.name] = PortState(port) if old is None or old.port.at >= port.at else _rates(old.port, port)
    return states, refused


def _is_credible_port(port: NetworkPort, at: int) -> bool:
    counters = (port.transmitted_bytes, port.received_bytes, port.wait_ticks)
    rate = port.bytes_per_second
    possible = all(counter is None or counter >= 0 for counter in counters)
    return possible and port.at <= at and (rate is None or (isfinite(rate) and 0.0 < rate < _LARGEST_RATE))


def _rates(old: NetworkPort, new: NetworkPort) -> PortState:
    """Rates between two reads; a counter that fell began anew and has none."""
    seconds = (new.at - old.at) / SECOND
    sent, received, ticks = (
        None if a is None or b is None or b < a else b - a
        for a, b in (
            (old.transmitted_bytes, new.transmitted_bytes),
            (old.received_bytes, new.received_bytes),
            (old.wait_ticks, new.wait_ticks),
        )
    )
    words = (sent or 0) / _WORD_BYTES
    return PortState(
        new,
        None if sent is None else sent / seconds,
        None if received is None else received / seconds,
        None if ticks is None or sent is None else ticks / (ticks + words) if ticks else 0.0,
    )


def network_share(states: Iterable[PortState], at: int) -> float:
    """How busy the busiest active port is, 0-1; 0 without a current one."""
    return max((state.busy() for state in current_ports(states, at) if state.port.active), default=0.0)


def current_ports(states: Iterable[PortState], at: int) -> list[PortState]:
    """The ports that were read lately."""
    return [state for state in states if at - state.port.at <= _PORT_AGE]


def apply_hosts(ledger: "Ledger", observation: Observation) -> None:
    """Apply what the host showed of jobs and ports. Usage that is not credible, or overlaps, is refused and counted."""
    at = observation.at
    if observation.ports is not None:
        ledger.ports, refused = port_states(ledger.ports, observation.ports, at)
        ledger.refused["host"] += refused
    last = {usage.job_id: usage.end for usage in observation.hosts}
    for usage in observation.hosts:
        job = ledger.jobs.get(usage.job_id)
        host = None if job is None else job.host or JobHost()
        if job is None or host is None or not is_credible_usage(usage, at) or usage.start < host.until:
            ledger.refused["host"] += 1
            continue
        # RDMA counters belong to the node: they say something about a job only if it has the node to itself.
        network = network_share(ledger.ports.values(), at) if ledger.holding == {usage.job_id} else 0.0
        stalled = sum(job.book.parts[index] for index in STALLS)
        if usage.end < last[usage.job_id]:  # of several intervals, each has its share of the time
            stalled = host.stalled + (stalled - host.stalled) * (usage.end - host.until) // (
                last[usage.job_id] - host.until
            )
        host.add(usage, stalled=stalled, network=network, policy=ledger.policy)
        job.host = host


class HostView(Struct, frozen=True):
    """What the host showed of one job, at the time of the snapshot."""

    cpu_seconds: float
    cpu_cores: float | None
    """None: not measured, or no longer current; likewise `shares`."""
    shares: tuple[tuple[str, float], ...]
    """Share of time in which the job waited, by resource."""
    stalls: tuple[tuple[str, int], ...]
    """GPU-nanoseconds of waiting, by cause."""


def host_view(host: JobHost, at: int) -> HostView:
    """The view of `host` at `at`."""
    current = host.current(at)
    return HostView(
        host.cpu_seconds,
        host.cpu_cores if current else None,
        tuple((name, host.shares[name]) for name in RESOURCES if current and name in host.shares),
        tuple((cause, host.stalls[cause]) for cause in CAUSES if cause in host.stalls),
    )
