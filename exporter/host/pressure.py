"""Measures CPU use and pressure of jobs between two looks at their control groups, or else at their processes."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct

from exporter.core.model import SECOND, HostUsage
from exporter.host.cgroups import CgroupTree, Counters, JobGroup, exclusive, levels, read_counters
from exporter.host.processes import ProcessTime, family, scan, used_seconds
from exporter.procfs import read_bytes

MAX_JOBS = 256
"""Jobs that are measured; more than a node has GPUs and MIG instances."""
_MOST_PIDS = 256
"""Processes of one job whose control groups are looked up."""
_MOST_DIRECTORIES = 64
"""Control groups of one job that are read."""
_CGROUP_BYTES = 64 * 1024
_RESOURCES = ("cpu", "io", "memory")
_SCAN_SHARE = 200
"""A scan of /proc waits for so many times the CPU time that the last one took: 0.5 % of a core at most."""


class _Sample(Struct, frozen=True):
    """What was read of one job at one moment."""

    at: int
    groups: tuple[JobGroup, ...]
    counters: Mapping[Path, Counters]
    """Of its groups, and of those between them and its processes."""
    processes: Mapping[int, ProcessTime]
    """Read only if no group has CPU time."""


class JobMeter:
    """Measures jobs from their processes' pids; keeps the last sample of each job."""

    def __init__(self, *, proc: Path, cgroup: Path) -> None:
        self._proc, self._tree = proc, CgroupTree(cgroup)
        self._samples: dict[str, _Sample] = {}
        self._scan_due = 0

    def measure(self, jobs: Mapping[str, Sequence[int]], now: int) -> tuple[HostUsage, ...]:
        """Return the use of each of `jobs` (pids by job) since it was last measured; nothing for a new job.

        `now` is monotonic nanoseconds. Jobs that are not given are forgotten.
        """
        before, self._samples = self._samples, {}
        groups = self._groups(dict(islice(jobs.items(), MAX_JOBS)))
        counters = {job: _read_all(each) for job, each in groups.items()}
        alone = {job for job in groups if not any("cpu" in each for each in counters[job].values())}
        processes = self._scan(now) if alone and now >= self._scan_due else None
        for job, each in groups.items():
            its = family(processes or {}, jobs[job]) if job in alone else {}
            known = before.get(job) if job in alone and processes is None else None
            self._samples[job] = known or _Sample(now, each, counters[job], its)
        pairs = ((job, before.get(job), sample) for job, sample in self._samples.items())
        return tuple(_usage(job, old, new) for job, old, new in pairs if old is not None and old.at < new.at)

    def _scan(self, now: int) -> dict[int, ProcessTime]:
        began = time.thread_time_ns()
        try:
            return scan(self._proc)
        except OSError:
            return {}
        finally:
            self._scan_due = now + _SCAN_SHARE * (time.thread_time_ns() - began)

    def _groups(self, jobs: Mapping[str, Sequence[int]]) -> dict[str, tuple[JobGroup, ...]]:
        """Find each job's control groups, without those that it shares with another job or with this daemon."""
        found = {job: tuple(dict.fromkeys(self._of_pids(job, pids))) for job, pids in jobs.items()}
        return exclusive(found, tuple(self._tree.groups(self._cgroup_text("self"), "")))

    def _of_pids(self, job: str, pids: Iterable[int]) -> Iterator[JobGroup]:
        for pid in islice(pids, _MOST_PIDS):
            yield from self._tree.groups(self._cgroup_text(str(pid)), job)

    def _cgroup_text(self, pid: str) -> str:
        try:
            return read_bytes(self._proc / pid / "cgroup", _CGROUP_BYTES).decode(errors="replace")
        except OSError:
            return ""


def _read_all(groups: Iterable[JobGroup]) -> dict[Path, Counters]:
    paths = dict.fromkeys(path for group in groups for path in (group.top, *levels(group)))
    return {path: read_counters(path) for path in islice(paths, _MOST_DIRECTORIES)}


def _usage(job: str, old: _Sample, new: _Sample) -> HostUsage:
    seconds = (new.at - old.at) / SECOND
    used = {path: _differences(old, new, path) for path in new.counters}
    tops = [used[path] for path in {group.top for group in new.groups} & used.keys()]
    throttled = (
        min(each["throttled"], each["throttled_periods"])
        for each in used.values()
        if {"throttled", "throttled_periods"} <= each.keys()
    )
    pressures = {resource: _most(each.get(f"pressure_{resource}") for each in tops) for resource in _RESOURCES}
    return HostUsage(
        job_id=job,
        start=old.at,
        end=new.at,
        cpu_seconds=_cpu_seconds(old, new, used),
        cpu_throttled=_share(_most(throttled), seconds),
        **{f"{resource}_pressure": _share(spent, seconds) for resource, spent in pressures.items()},
    )


def _cpu_seconds(old: _Sample, new: _Sample, used: Mapping[Path, Counters]) -> float | None:
    """Return the sum over the job's groups of the hierarchy that shows most, or else over its processes."""
    sums: dict[str, float] = {}
    for hierarchy, top in {(group.hierarchy, group.top) for group in new.groups}:
        if "cpu" in used.get(top, {}):
            sums[hierarchy] = sums.get(hierarchy, 0.0) + used[top]["cpu"]
    if sums:
        return max(sums.values())
    return used_seconds(old.processes, new.processes) if old.processes and new.processes else None


def _differences(old: _Sample, new: _Sample, path: Path) -> Counters:
    """Return the increases of one group's counters; a counter that began anew, or a new group, has none."""
    before, now = old.counters.get(path, {}), new.counters.get(path, {})
    return {name: value - before[name] for name, value in now.items() if name in before and value >= before[name]}


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _share(spent: float | None, seconds: float) -> float | None:
    return None if spent is None else min(1.0, spent / seconds)
