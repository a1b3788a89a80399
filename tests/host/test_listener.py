"""Tests that the host is read in threads of its own, which may block or fail without delaying the agent."""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from exporter.clock import SystemClock
from exporter.config import Config
from exporter.core.model import SECOND, HostUsage
from exporter.host.listener import KEPT, SILENCE, HostListener, open_host
from exporter.host.pressure import MAX_JOBS
from exporter.workloads import WorkloadProcess, WorkloadUpdate
from tests.clocks import JumpClock
from tests.host.test_rdma import IB, port
from tests.waiting import PATIENCE, wait_for


class Meter:
    """Measures what a test says; may block or fail."""

    def __init__(self) -> None:
        self.jobs: Mapping[str, Sequence[int]] = {}
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def measure(self, jobs: Mapping[str, Sequence[int]], now: int) -> tuple[HostUsage, ...]:
        self.gate.wait(PATIENCE)
        self.jobs = jobs
        if self.error is not None:
            raise self.error
        return tuple(HostUsage(job, now - 1, now) for job in jobs)


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def listener(meter: Meter, tmp_path: Path) -> Iterator[HostListener]:
    port(tmp_path, "mlx5_0", **IB)
    made = HostListener(meter, SystemClock(), sysfs=tmp_path, seconds=0.01)  # type: ignore[arg-type]
    yield made
    meter.gate.set()
    made.close()


def poll(listener: HostListener, *processes: WorkloadProcess, now: int | None = None) -> WorkloadUpdate:
    return listener.poll(SystemClock().now() if now is None else now, processes, lambda _: {})


def until(what: Callable[[], bool]) -> None:
    wait_for(what, "it is so", step=0.005)


JOB = (WorkloadProcess(11, "7"), WorkloadProcess(12, "7"), WorkloadProcess(21, "8"))


def test_usage_and_ports_come_with_a_later_poll_once_each(listener: HostListener, meter: Meter) -> None:
    found: list[WorkloadUpdate] = []

    def both() -> bool:
        found.append(poll(listener, *JOB))
        return any(each.hosts for each in found) and any(each.ports is not None for each in found)

    until(both)
    assert meter.jobs == {"7": [11, 12], "8": [21]}
    assert {usage.job_id for each in found for usage in each.hosts} == {"7", "8"}
    (ports,) = {tuple(p.name for p in each.ports) for each in found if each.ports is not None}
    assert ports == ("mlx5_0:1",)
    assert all(each.faults == () for each in found)


class HandClock(JumpClock):
    """A clock that a test sets; who waits on it waits until then."""

    def wait(self, until: int, stop: threading.Event) -> None:
        while self._now < until and not stop.wait(0.001):
            pass


def test_all_usage_since_the_last_poll_is_kept_however_long_the_interval_but_not_that_of_a_long_pause(
    meter: Meter, tmp_path: Path
) -> None:
    clock = HandClock()
    made = HostListener(meter, clock, sysfs=tmp_path)  # type: ignore[arg-type]
    try:
        poll(made, *JOB[:1], now=0)
        for second in (0, 300, 305):
            read_at(made, clock, second)
        assert ends(poll(made, *JOB[:1])) == [0, 300, 305]
        for second in (400, 1000, 1001 + KEPT // SECOND):
            read_at(made, clock, second)
        assert ends(poll(made)) == [1001 + KEPT // SECOND]
    finally:
        made.close()


def read_at(listener: HostListener, clock: HandClock, second: int) -> None:
    clock._now = second * SECOND
    until(lambda: [usage.end for usage in tuple(listener._hosts)[-1:]] == [clock.now()])


def ends(update: WorkloadUpdate) -> list[int]:
    """The ends of the intervals, in seconds."""
    return [usage.end // SECOND for usage in update.hosts]


def test_a_reader_that_blocks_holds_up_nothing_and_becomes_a_fault(listener: HostListener, meter: Meter) -> None:
    meter.gate.clear()
    until(lambda: poll(listener, *JOB).ports is not None)
    assert poll(listener, *JOB).faults == ()
    late = SystemClock().now() + SILENCE + 10 * SECOND
    faults = {fault.message for fault in poll(listener, *JOB, now=late).faults}
    assert any("reading control groups has not come back for" in message for message in faults)
    meter.gate.set()
    until(lambda: bool(poll(listener, *JOB).hosts))
    assert poll(listener, *JOB).faults == ()


def test_a_reader_that_fails_is_a_fault_while_it_fails(listener: HostListener, meter: Meter) -> None:
    meter.error = ZeroDivisionError("no")
    until(lambda: bool(poll(listener, *JOB).faults))
    (fault,) = poll(listener, *JOB).faults
    assert fault.kind == "host_unread"
    assert "control groups failed: ZeroDivisionError('no')" in fault.message
    meter.error = None
    until(lambda: not poll(listener, *JOB).faults)


def test_no_more_jobs_are_kept_than_are_measured(listener: HostListener, meter: Meter) -> None:
    processes = [WorkloadProcess(number, f"{number}") for number in range(MAX_JOBS + 5)]
    until(lambda: bool(poll(listener, *processes).hosts))
    until(lambda: len(meter.jobs) == MAX_JOBS)


def test_a_node_without_ports_reports_none_and_one_that_lost_them_says_so_once(meter: Meter, tmp_path: Path) -> None:
    made = HostListener(meter, SystemClock(), sysfs=tmp_path, seconds=0.01)  # type: ignore[arg-type]
    try:
        until(lambda: bool(poll(made, *JOB).hosts))
        assert poll(made, *JOB).ports is None
        port(tmp_path, "mlx5_0", **IB)
        until(lambda: bool(poll(made, *JOB).ports))
        shutil.rmtree(tmp_path / "class")
        until(lambda: poll(made, *JOB).ports == ())
    finally:
        made.close()


def test_closing_before_any_poll_and_twice(tmp_path: Path) -> None:
    made = HostListener(Meter(), SystemClock(), sysfs=tmp_path)  # type: ignore[arg-type]
    made.close()
    made.close()


def test_the_hosts_paths_are_those_of_the_configuration() -> None:
    made = open_host(Config(), SystemClock())
    assert poll(made).hosts == ()
    made.close()
