"""Finds the control groups of a job from the paths of its processes (cgroups(7)), and reads their counters.

The counters of cgroup v2 are described in Documentation/admin-guide/cgroup-v2.rst, those of pressure (PSI) in
Documentation/accounting/psi.rst, both of Linux. cgroup v1 has CPU time and throttling, and no pressure. A process's
path is the kernel's; a user can create groups below one's own only.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from exporter.procfs import read_bytes

_FILE_BYTES = 16 * 1024
_SLURM_SCOPE = "slurmstepd.scope"
_SLURM_OWN = "system"
"""Group of slurmstepd itself, beside those of the jobs."""
_SLURM_V1 = re.compile(r"slurm(?:_.+)?")
_JOB = re.compile(r"job_\d+")
_POD = re.compile(r"(?:.*-)?pod(?:[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?")
"""A pod, as the kubelet's two cgroup drivers name it; a static pod's uid has no hyphens."""
_CONTAINER = re.compile(r"(?:[a-z-]+-)?[0-9a-f]{64}(?:\.scope)?|lxc\.payload\..+")
_UNIT = re.compile(r".+\.(?:service|scope)")
_PARENTS = (
    "", "kubepods.slice", "kubepods.slice/kubepods-burstable.slice", "kubepods.slice/kubepods-besteffort.slice",
    "kubepods", "kubepods/burstable", "kubepods/besteffort", "system.slice", f"system.slice/{_SLURM_SCOPE}",
)  # fmt: skip
"""Where a path may begin that the kernel shows relative to this process's cgroup namespace ("/../../...")."""


def job_path(path: str, job_id: str) -> str:
    """Return the part of a process's cgroup path that is its job's own group; empty if no part is certainly that.

    That is Slurm's directory of the job (`job_4711`, or its SLUID from 26.05 on), a pod, a container, or the systemd
    unit that the job is named after. Anything else, such as slurmd.service, may hold other jobs too.
    """
    parts = [part.replace(r"\x2d", "-") for part in path.split("/")]
    length = _slurm_length(parts) or _last(parts, _POD) or _last(parts, _CONTAINER) or _unit_length(parts, job_id)
    return "/".join(path.split("/")[:length])


def _slurm_length(parts: list[str]) -> int:
    for index, (parent, part) in enumerate(pairwise(parts), 2):
        if parent.endswith(_SLURM_SCOPE) and part != _SLURM_OWN:
            return index
        if _JOB.fullmatch(part) and index > 3 and _SLURM_V1.fullmatch(parts[index - 3]):  # noqa: PLR2004  slurm/uid_U/job_J
            return index
    return 0


def _last(parts: list[str], pattern: re.Pattern[str]) -> int:
    return max((index for index, part in enumerate(parts, 1) if pattern.fullmatch(part)), default=0)


def _unit_length(parts: list[str], job_id: str) -> int:
    unit = job_id.rpartition("/")[2]
    return _last(parts, re.compile(re.escape(unit))) if _UNIT.fullmatch(unit) else 0


def parse_paths(text: str) -> Iterator[tuple[str, str]]:
    """Yield (controllers, path) of the lines of /proc/PID/cgroup; v2 has no controllers."""
    for line in text.splitlines():
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if first and second and path.startswith("/"):
            yield controllers, path


class JobGroup(Struct, frozen=True):
    """A job's control group in one hierarchy, and that of one of its processes below it."""

    hierarchy: str
    """Its controllers; empty: cgroup v2."""
    top: Path
    """Directory of the job's group."""
    own: Path
    """Directory of the process's group: the same, or below it."""


class CgroupTree:
    """The mounted hierarchies below `root`, usually /sys/fs/cgroup: v2 there or in `unified`, v1 in one per set."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def groups(self, cgroup_text: str, job_id: str) -> Iterator[JobGroup]:
        """Yield the groups of the job in which a process with this text of /proc/PID/cgroup is."""
        for controllers, path in parse_paths(cgroup_text):
            base = self._base(controllers)
            own = None if base is None else _existing(base, path)
            top = "" if own is None else job_path(own, job_id)
            if base is not None and own is not None and top:
                yield JobGroup(controllers, base / top.strip("/"), base / own.strip("/"))

    def _base(self, controllers: str) -> Path | None:
        if not controllers:
            mounts = (self._root, self._root / "unified")
            return next((mount for mount in mounts if os.access(mount / "cgroup.procs", os.F_OK)), None)
        return None if {"cpu", "cpuacct"}.isdisjoint(controllers.split(",")) else self._root / controllers


def _existing(base: Path, path: str) -> str | None:
    """Return the path of an existing directory; one outside of our namespace is looked for below known parents."""
    inside = re.sub(r"^(?:/\.\.)+", "", path).strip("/")
    if ".." in inside.split("/"):
        return None
    parents = ("",) if not path.startswith("/..") else _PARENTS
    candidates = (f"{parent}/{inside}".strip("/") for parent in parents)
    return next((f"/{each}" for each in candidates if each and _is_directory(base / each)), None)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def levels(group: JobGroup) -> Iterator[Path]:
    """Yield the directories from a process's own up to its job's; each may have a CPU quota."""
    return (path for path in (group.own, *group.own.parents) if path.is_relative_to(group.top))


Counters = dict[str, float]
"""Cumulative seconds by name: cpu, throttled, throttled_periods (the periods in which it was), and by resource
pressure_cpu, pressure_io and pressure_memory."""


def read_counters(directory: Path) -> Counters:
    """Return the counters of one group; those that it does not have, or that cannot be read, are missing."""
    stat = dict(_pairs(directory / "cpu.stat"))
    found: Counters = {}
    if "usage_usec" in stat:
        found["cpu"] = stat["usage_usec"] / 1e6
    elif (usage := _number(directory / "cpuacct.usage")) is not None:
        found["cpu"] = usage / 1e9
    period = _period(directory)
    if "nr_throttled" in stat and period is not None:
        throttled = stat["throttled_usec"] / 1e6 if "throttled_usec" in stat else stat.get("throttled_time", 0.0) / 1e9
        found |= {"throttled": throttled, "throttled_periods": stat["nr_throttled"] * period}
    for resource in ("cpu", "io", "memory"):
        total = _some(directory / f"{resource}.pressure")
        if total is not None:
            found[f"pressure_{resource}"] = total
    return found


def _period(directory: Path) -> float | None:
    """Return the period of the CPU quota in seconds; None without the files of a quota."""
    words = _text(directory / "cpu.max").split()
    microseconds = _whole(words[1]) if len(words) > 1 else _number(directory / "cpu.cfs_period_us")
    return None if microseconds is None else microseconds / 1e6


def _some(path: Path) -> float | None:
    """Return the total of the line `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, in seconds."""
    for line in _text(path).splitlines():
        kind, _, rest = line.partition(" ")
        total = _whole(rest.rpartition(" total=")[2]) if kind == "some" else None
        if total is not None:
            return total / 1e6
    return None


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        number = _whole(value)
        if number is not None:
            yield name, number


def _number(path: Path) -> int | None:
    return _whole(_text(path).strip())


_DIGITS = 20
"""Digits of the largest 64-bit number."""


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def _text(path: Path) -> str:
    try:
        return read_bytes(path, _FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def exclusive(by_job: Mapping[str, Iterable[JobGroup]], ours: Iterable[JobGroup]) -> dict[str, tuple[JobGroup, ...]]:
    """Return each job's groups without those in which another job's, or one in `ours`, lies."""
    users: dict[Path, set[str]] = {}
    for job, groups in [*by_job.items(), ("", ours)]:
        for group in groups:
            for path in (group.top, *group.top.parents):
                users.setdefault(path, set()).add(job)
    return {job: tuple(group for group in groups if users[group.top] == {job}) for job, groups in by_job.items()}
