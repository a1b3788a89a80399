"""Tests what jobs use and wait for: in trees of files, and in real control groups where this machine lets us make some.

The real tests need root, cgroup v2 with PSI (mounted alone or beside v1) and, for a quota, the controller `cpu`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.core.model import SECOND, HostUsage
from exporter.host.pressure import MAX_JOBS, JobMeter
from exporter.host.processes import TICKS_PER_SECOND
from tests.host.test_cgroups import PRESSURE

HOUR = 3600 * SECOND
JOB = "system.slice/slurmstepd.scope/job_{}"


class Host:
    """A tree of /proc and a cgroup v2, which a test writes."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.proc.mkdir()
        self.cgroup.mkdir()
        (self.cgroup / "cgroup.procs").touch()
        self.meter = JobMeter(proc=self.proc, cgroup=self.cgroup)

    def process(
        self, pid: int, cgroup: str = "", *, parent: int = 1, ticks: int = 0, start: int = 9, name: str = "python"
    ) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "cgroup").write_text(f"0::/{cgroup}\n")
        fields = ["S", parent, *(0,) * 9, ticks, 0, *(0,) * 6, start, *(0,) * 30]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")

    def group(self, path: str, *, usec: int = 0, throttled: int = 0, usec_throttled: int = 0, **pressure: int) -> None:
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        stat = f"usage_usec {usec}\nnr_periods 99\nnr_throttled {throttled}\nthrottled_usec {usec_throttled}\n"
        (folder / "cpu.stat").write_text(stat)
        (folder / "cpu.max").write_text("max 100000\n")
        for resource in ("cpu", "io", "memory"):
            (folder / f"{resource}.pressure").write_text(PRESSURE.format(some=pressure.get(resource, 0)))

    def measure(self, seconds: float, **jobs: list[int]) -> dict[str, HostUsage]:
        pids = {job.removeprefix("job_"): found for job, found in jobs.items()}
        return {usage.job_id: usage for usage in self.meter.measure(pids, round(seconds * SECOND))}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_job_uses_and_waits_as_its_control_group_counts(host: Host) -> None:
    host.process(100, f"{JOB.format(7)}/step_0/user/task_0")
    host.group(JOB.format(7), usec=5_000_000, cpu=0, io=1_000_000, memory=0)
    host.group(f"{JOB.format(7)}/step_0/user/task_0")
    assert host.measure(10, job_7=[100]) == {}
    host.group(JOB.format(7), usec=25_000_000, cpu=500_000, io=4_000_000, memory=100_000)
    usage = host.measure(15, job_7=[100])["7"]
    assert (usage.start, usage.end, usage.cpu_seconds, usage.cpu_throttled) == (10 * SECOND, 15 * SECOND, 20.0, 0.0)
    pressure = [usage.cpu_pressure, usage.io_pressure, usage.memory_pressure]
    assert pressure == pytest.approx([0.1, 0.6, 0.02])


def test_a_quota_on_any_level_stops_the_job_for_no_longer_than_both_its_counters_say(host: Host) -> None:
    own = f"{JOB.format(7)}/step_0"
    host.process(100, own)
    host.group(JOB.format(7))
    host.group(own)
    host.measure(10, job_7=[100])
    host.group(own, throttled=20, usec_throttled=40_000_000)  # on 20 CPUs at once, in 20 of 50 periods
    assert host.measure(15, job_7=[100])["7"].cpu_throttled == pytest.approx(0.4)
    host.group(own, throttled=60, usec_throttled=40_500_000)
    assert host.measure(20, job_7=[100])["7"].cpu_throttled == pytest.approx(0.1)


def test_containers_of_a_pod_are_one_job_and_two_groups_of_a_job_add_up(host: Host) -> None:
    paths = [f"docker/{digit * 64}" for digit in "ab"]
    for pid, path in enumerate(paths, 100):
        host.process(pid, path)
        host.group(path, io=0)
    host.measure(10, job_x=[100, 101])
    host.group(paths[0], usec=3_000_000, io=1_000_000)
    host.group(paths[1], usec=2_000_000, io=2_000_000)
    usage = host.measure(15, job_x=[100, 101])["x"]
    assert usage.cpu_seconds == 5.0
    assert usage.io_pressure == pytest.approx(0.4)


def test_a_counter_that_began_anew_says_nothing_once(host: Host) -> None:
    host.process(100, JOB.format(7))
    host.group(JOB.format(7), usec=9_000_000, io=9_000_000, cpu=1)
    host.measure(10, job_7=[100])
    host.group(JOB.format(7), usec=1_000_000, io=0, cpu=2)
    usage = host.measure(15, job_7=[100])["7"]
    assert (usage.cpu_seconds, usage.io_pressure) == (None, None)
    assert usage.cpu_pressure is not None
    host.group(JOB.format(7), usec=2_000_000)
    assert host.measure(20, job_7=[100])["7"].cpu_seconds == 1.0


def test_more_waiting_than_time_is_all_of_the_time(host: Host) -> None:
    host.process(100, JOB.format(7))
    host.group(JOB.format(7))
    host.measure(10, job_7=[100])
    host.group(JOB.format(7), io=5_000_001)
    assert host.measure(15, job_7=[100])["7"].io_pressure == 1.0


def test_without_a_group_of_its_own_the_processes_and_their_children_are_summed(host: Host) -> None:
    def at(ticks: int) -> None:
        host.process(100, "system.slice/slurmd.service", ticks=ticks)
        host.process(101, parent=100, ticks=2 * ticks, name="data worker) 1")
        host.process(102, parent=101, ticks=3 * ticks)
        host.process(200, ticks=1000 * ticks)

    at(0)
    host.process(103, parent=100, ticks=5000, start=1)
    host.measure(10, job_7=[100])
    at(TICKS_PER_SECOND)
    host.process(103, parent=100, ticks=9000, start=2)  # another process with the same pid
    usage = host.measure(15, job_7=[100])["7"]
    assert usage == HostUsage("7", 10 * SECOND, 15 * SECOND, cpu_seconds=6.0)


def test_a_slow_scan_of_proc_is_repeated_less_often(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**12, SECOND // 10))  # each scan takes a tenth of a second of CPU
    monkeypatch.setattr("time.thread_time_ns", lambda: next(clock))
    host.process(100, ticks=0)
    host.group(JOB.format(8))
    host.process(101, JOB.format(8))
    host.measure(10, job_7=[100], job_8=[101])
    host.process(100, ticks=TICKS_PER_SECOND)
    assert host.measure(15, job_7=[100], job_8=[101]).keys() == {"8"}
    assert host.measure(29, job_7=[100], job_8=[101]).keys() == {"8"}
    assert host.measure(31, job_7=[100], job_8=[101])["7"] == HostUsage("7", 10 * SECOND, 31 * SECOND, cpu_seconds=1.0)


def test_a_group_that_two_jobs_share_is_neither_ones(host: Host) -> None:
    shared = f"docker/{'a' * 64}"
    host.group(shared, usec=0, io=0)
    for pid in (100, 101):
        host.process(pid, shared, ticks=0)
    host.measure(10, job_a=[100], job_b=[101])
    host.group(shared, usec=9_000_000, io=4_000_000)
    host.process(100, shared, ticks=TICKS_PER_SECOND)
    found = host.measure(15, job_a=[100], job_b=[101])
    assert found["a"] == HostUsage("a", 10 * SECOND, 15 * SECOND, cpu_seconds=1.0)
    assert found["b"] == HostUsage("b", 10 * SECOND, 15 * SECOND, cpu_seconds=0.0)


def test_our_own_group_is_no_jobs(host: Host) -> None:
    (host.proc / "self").mkdir()
    (host.proc / "self/cgroup").write_text(f"0::/docker/{'a' * 64}\n")
    host.group(f"docker/{'a' * 64}")
    host.process(100, f"docker/{'a' * 64}")
    host.measure(10, job_a=[100])
    assert host.measure(15, job_a=[100])["a"].io_pressure is None


def test_a_job_that_pauses_begins_anew_and_one_that_is_new_has_no_usage(host: Host) -> None:
    host.process(100, JOB.format(7))
    host.group(JOB.format(7))
    host.measure(10, job_7=[100])
    assert host.measure(15) == {}
    assert host.measure(20, job_7=[100]) == {}
    assert host.measure(20, job_7=[100]) == {}, "no time has passed"


def test_a_process_that_is_gone_and_files_that_are_none_leave_values_out(host: Host) -> None:
    host.measure(10, job_7=[100])
    (host.proc / "100").mkdir()
    (host.proc / "100/stat").write_text("100 (python S 1")
    (host.proc / "101").mkdir()
    assert host.measure(15, job_7=[100]) == {"7": HostUsage("7", 10 * SECOND, 15 * SECOND)}


def test_no_more_jobs_are_measured_than_a_node_can_have(host: Host) -> None:
    jobs = {f"job_{number}": [number] for number in range(1, MAX_JOBS + 10)}
    host.measure(10, **jobs)
    assert len(host.measure(15, **jobs)) == MAX_JOBS


def test_a_proc_that_cannot_be_listed_is_no_error(tmp_path: Path) -> None:
    meter = JobMeter(proc=tmp_path / "none", cgroup=tmp_path)
    meter.measure({"7": [1]}, SECOND)
    assert meter.measure({"7": [1]}, 2 * SECOND) == (HostUsage("7", SECOND, 2 * SECOND),)


# -- real control groups --

ROOT = Path("/sys/fs/cgroup")
BURN = """
import sys
print("up", flush=True)
for line in sys.stdin:
    print(sum(range(int(line))), flush=True)
"""


def _unified() -> Path | None:
    mounts = (mount for mount in (ROOT, ROOT / "unified") if (mount / "cgroup.procs").exists())
    mount = next((mount for mount in mounts if (mount / "cpu.stat").exists()), None)
    return mount if mount is not None and os.geteuid() == 0 and os.access(mount, os.W_OK) else None


@contextmanager
def _group_of_job(base: Path, job_id: str, quota: str = "") -> Iterator[Path]:
    """A job's group of our own, with a CPU quota if one is given: below a folder with our pid, removed by its path."""
    ours = base / f"gpu-efficiency-test-{os.getpid()}_slurmstepd.scope"
    job = ours / f"job_{job_id}"
    try:
        ours.mkdir()
        job.mkdir()
        if quota and (job / "cpu.max").exists():
            (job / "cpu.max").write_text(f"{quota} 100000\n")
        elif quota:
            (job / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    except OSError as err:
        pytest.skip(f"needs control groups of its own: {err}")
    try:
        yield job
    finally:
        job.rmdir()
        ours.rmdir()


@pytest.fixture
def group() -> Iterator[Path]:
    """A job's group."""
    unified = _unified()
    if unified is None:
        pytest.skip("needs control groups of its own: root, and cgroup v2")
    with _group_of_job(unified, "4711") as job:
        yield job


@pytest.mark.slow
def test_a_real_job_is_measured_by_its_real_control_group(group: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        (group / "cgroup.procs").write_text(f"{job.pid}\n")
        assert job.stdout.readline() == "up\n"
        meter = JobMeter(proc=Path("/proc"), cgroup=ROOT)
        assert meter.measure({"4711": [job.pid]}, 10 * SECOND) == ()
        job.stdin.write("20000000\n")
        job.stdin.flush()
        job.stdout.readline()
        (usage,) = meter.measure({"4711": [job.pid]}, 15 * SECOND)
        ticks = _ticks(job.pid)
        job.stdin.close()
    # The group counts what the process used since it moved there, as /proc does within its ticks.
    assert usage.cpu_seconds == pytest.approx(ticks / TICKS_PER_SECOND, abs=0.5)
    assert usage.cpu_seconds is not None
    assert usage.cpu_seconds > 0.1
    shown = {name for name in ("cpu", "io", "memory") if (group / f"{name}.pressure").exists()}
    assert {name for name in ("cpu", "io", "memory") if getattr(usage, f"{name}_pressure") is not None} == shown


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.fixture
def throttled() -> Iterator[Path]:
    """A job's group with a tenth of a CPU: in version 1 where the controller is there, else in version 2."""
    base = next((ROOT / name for name in ("cpu,cpuacct", "cpu") if (ROOT / name / "cpu.cfs_quota_us").exists()), None)
    unified = _unified()
    if unified is not None and base is None and "cpu" in (unified / "cgroup.subtree_control").read_text().split():
        base = unified
    if base is None or os.geteuid() != 0 or not os.access(base, os.W_OK):
        pytest.skip("needs control groups of its own: root, and the controller cpu")
    with _group_of_job(base, "4712", quota="10000") as job:
        yield job


@pytest.mark.slow
def test_a_real_quota_throttles_a_real_job(throttled: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        (throttled / "cgroup.procs").write_text(f"{job.pid}\n")
        meter = JobMeter(proc=Path("/proc"), cgroup=ROOT)
        meter.measure({"4712": [job.pid]}, 0)
        for _ in range(100):
            job.stdin.write("2000000\n")
            job.stdin.flush()
            job.stdout.readline()
            # An hour by the meter's clock: where the group has no CPU time, a scan of /proc that took 5 ms or more
            # is not repeated within a second.
            (usage,) = meter.measure({"4712": [job.pid]}, HOUR)
            if usage.cpu_throttled:
                break
            meter = JobMeter(proc=Path("/proc"), cgroup=ROOT)
            meter.measure({"4712": [job.pid]}, 0)
        job.stdin.close()
    assert usage.cpu_throttled is not None
    assert usage.cpu_throttled > 0.0
