"""Reads jobs' CPU use and pressure, and the node's RDMA ports, every few seconds, each in a thread of its own.

The agent only collects what the threads have read, so that a file that blocks delays nothing but itself.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from exporter.clock import Clock
from exporter.config import Config
from exporter.core.model import SECOND, Fault, HostUsage, NetworkPort
from exporter.host.pressure import MAX_JOBS, JobMeter
from exporter.host.rdma import read_ports
from exporter.workloads import ProcessLookup, WorkloadProcess, WorkloadUpdate

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 5.0
"""Interval of both threads: long against the quota's period of 0.1 s, short against the minutes of a stall."""
SILENCE = 60 * SECOND
"""Time without a completed read after which a thread counts as blocked."""
KEPT = 600 * SECOND
"""How long usage waits for a poll: twice the longest `sampling.interval_seconds`. A pause may last a day."""


class PeriodicReader:
    """Calls `read` at an interval in a thread of its own, which ends with `stop`."""

    def __init__(
        self, name: str, read: Callable[[int], None], clock: Clock, *, seconds: float, stop: threading.Event
    ) -> None:
        """`read` takes the current time, monotonic nanoseconds."""
        self.name = name
        self._read, self._clock, self._stop, self._interval = read, clock, stop, round(seconds * SECOND)
        self._thread: threading.Thread | None = None
        self._done_at = 0
        self._error = ""

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._done_at = self._clock.now()
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def fault(self, now: int) -> Fault | None:
        """Return a fault if reading fails, or has not come back for SILENCE."""
        if self._thread is None:
            return None
        silent = now - self._done_at
        if silent > SILENCE:
            why = f"has not come back for {silent // SECOND} s: see dmesg for the adapter or file system"
            return Fault("host_unread", f"reading {self.name} {why}")
        return Fault("host_unread", f"reading {self.name} failed: {self._error}") if self._error else None

    def join(self, seconds: float) -> None:
        """Wait for the thread; one that is blocked ends with the process."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stop.is_set():
            now = self._clock.now()
            try:
                self._read(now)
                self._error = ""
            except Exception as error:  # it becomes a fault: a thread that ended would stay silent
                if self._error != repr(error):
                    log.exception("reading %s failed; please report this", self.name)
                self._error = repr(error)
            self._done_at = self._clock.now()
            self._clock.wait(now + self._interval, self._stop)


class HostListener:
    """The WorkloadListener of the host's own counters; its threads start with the first poll."""

    def __init__(
        self, meter: JobMeter, clock: Clock, *, sysfs: Path = Path("/sys"), seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._meter, self._sysfs = meter, sysfs
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._jobs: dict[str, list[int]] = {}
        self._hosts: deque[HostUsage] = deque()
        """What was measured since the last poll."""
        self._ports: tuple[NetworkPort, ...] | None = None
        self._had_ports = False
        """The last read found a port; on a node without any nothing is reported."""
        self._readers = tuple(
            PeriodicReader(name, read, clock, seconds=seconds, stop=self._stop)
            for name, read in (("control groups", self._measure_jobs), ("RDMA ports", self._read_ports))
        )

    def poll(self, now: int, processes: Sequence[WorkloadProcess], _lookup: ProcessLookup) -> WorkloadUpdate:
        """See WorkloadListener."""
        jobs: dict[str, list[int]] = {}
        for process in processes:
            if process.job_id in jobs or len(jobs) < MAX_JOBS:
                jobs.setdefault(process.job_id, []).append(process.pid)
        with self._lock:
            self._jobs = jobs
            hosts = tuple(self._hosts)
            self._hosts.clear()
            ports, self._ports = self._ports, None
        for reader in self._readers:
            reader.start()
        faults = tuple(fault for reader in self._readers if (fault := reader.fault(now)) is not None)
        return WorkloadUpdate(hosts=hosts, ports=ports, faults=faults)

    def close(self) -> None:
        """See WorkloadListener."""
        self._stop.set()
        for reader in self._readers:
            reader.join(1.0)

    def _measure_jobs(self, now: int) -> None:
        with self._lock:
            jobs = self._jobs
        measured = self._meter.measure(jobs, now)
        with self._lock:
            self._hosts.extend(measured)
            while self._hosts and now - self._hosts[0].end > KEPT:
                self._hosts.popleft()

    def _read_ports(self, now: int) -> None:
        ports = read_ports(self._sysfs, now)
        with self._lock:
            if ports or self._had_ports:
                self._ports, self._had_ports = ports, bool(ports)


def open_host(config: Config, clock: Clock) -> HostListener:
    """Create the listener for the paths in [host]."""
    return HostListener(JobMeter(proc=Path(config.host.proc), cgroup=Path(config.host.cgroup)), clock)
