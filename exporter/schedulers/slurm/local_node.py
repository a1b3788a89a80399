"""Reads what this node shows of its jobs without slurmctld: slurm.conf, sockets, processes, GPU numbering.

Slurm's GPU index is a position in the list of `slurmd -G`, a device file's number is the driver's minor, and
/proc/driver/nvidia maps that to the UUID; if this chain breaks, a ValueError has the reason. Only processes started by
slurmstepd count, and what slurmctld reports takes precedence.
"""

import logging
import os
import re
import shlex
import socket
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

from msgspec import Struct

from exporter.core.model import Device
from exporter.files import may_exist, readable_part
from exporter.procfs import command_name, parent_pid, user_id
from exporter.schedulers.mapping_dir import JobFiles
from exporter.schedulers.procfs import SLUID, ProcessInfo, read_process, read_text, read_uuids, user_name
from exporter.schedulers.slurm.client import MissingCommandError, SlurmUnavailableError
from exporter.schedulers.slurm.notation import GPU_GRES, expand_hostlist, expand_numbers

log = logging.getLogger(__name__)
DEFAULT_PATHS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Where the packages put it, and where slurmd puts the controller's ("configless")."""
DEFAULT_SPOOL = "/var/spool/slurmd"
_MOST_INCLUDES = 8
_MOST_BYTES = 64 * 1024 * 1024


class SlurmConf(Struct, frozen=True):
    """The values read from a slurm.conf and the files it includes."""

    path: str
    spool: str = DEFAULT_SPOOL
    """SlurmdSpoolDir, with %n and %h not replaced."""
    nodes: tuple[str, ...] = ()
    """NodeNames that are this host."""

    def spool_dir(self, node: str, *, host: str | None = None) -> Path:
        """Return the spool directory of the slurmd of `node`."""
        return Path(self.spool.replace("%n", node).replace("%h", host or short_hostname()))


def find_conf(configured: str, environ: Mapping[str, str]) -> str:
    """Return the path of slurm.conf: as configured, in SLURM_CONF, or a default; empty if there is none.

    One that this user may not read is returned, too.
    """
    path = configured or environ.get("SLURM_CONF", "")
    return path or next((candidate for candidate in DEFAULT_PATHS if may_exist(Path(candidate))), "")


def read_conf(path: str, *, host: str | None = None) -> SlurmConf:
    """Read slurm.conf; `host` is this host's short name. Raises OSError, ValueError."""
    host, spool, nodes = host or short_hostname(), DEFAULT_SPOOL, []
    for line in _conf_lines(Path(path), _MOST_INCLUDES):
        key, _, value = (part.strip() for part in line.partition("="))
        if key.lower() == "slurmdspooldir":
            spool = value.strip('"')
        elif key.lower() == "nodename":
            nodes += _names_of_host(line, host)
    return SlurmConf(path, spool, tuple(nodes))


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def short_hostname() -> str:
    """Return the same as `hostname -s`."""
    return socket.gethostname().partition(".")[0]


def _conf_lines(path: Path, deep: int) -> Iterator[str]:
    """Yield lines without comments, with continued lines joined and included files in place."""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_MOST_BYTES)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        stripped = re.sub(r"(?<!\\)#.*", "", line).strip()
        keyword, _, rest = stripped.partition(" ")
        if keyword.lower() == "include":
            if not deep:
                raise ValueError(f"{path}: more than {_MOST_INCLUDES} files include one another")
            yield from _conf_lines(path.parent / rest.strip().strip('"'), deep - 1)
        elif stripped:
            yield stripped


def _names_of_host(line: str, host: str) -> list[str]:
    """Return the names in a NodeName= line that are this host."""
    values = {key.lower(): value for key, _, value in (pair.partition("=") for pair in shlex.split(line))}
    names = expand_hostlist(values.get("nodename", ""))
    if names == ("DEFAULT",):
        return []
    hosts = expand_hostlist(values.get("nodehostname", "")) or names
    if len(hosts) != len(names):
        hosts = (hosts * len(names))[: len(names)]
    return [name for name, its in zip(names, hosts, strict=True) if its.partition(".")[0] == host]


_SOCKET = re.compile(r"(.+)_(\d{1,10})\.\d{1,10}(?:\.\d{1,10})?")
_LASTING_STEP = re.compile(r".+_\d{1,10}\.(?:4294967291|4294967292)(?:\.\d{1,10})?")
"""Sockets of batch and extern steps."""
_MOST_ENTRIES = 20_000


class JobPresence(Struct, frozen=True):
    """The sockets and mapping files of one job on this node."""

    sockets: frozenset[tuple[str, int, int]] = frozenset()
    """Name, inode and change time of each; another inode with the same name is another step."""
    files: tuple[str, ...] = ()
    """Names of its mapping files: "0", "0.7", a UUID."""
    written: int = 0
    """Modification time of the oldest mapping file; Unix nanoseconds."""

    @property
    def lasting(self) -> frozenset[tuple[str, int, int]]:
        """Sockets of the steps that last as long as the job: batch and extern."""
        return frozenset(bound for bound in self.sockets if _LASTING_STEP.fullmatch(bound[0]))


class SpoolState(Struct, frozen=True):
    """What the spool and mapping directories show at one moment."""

    jobs: Mapping[str, JobPresence]
    problems: tuple[str, ...] = ()
    foreign_nodes: tuple[str, ...] = ()
    """Nodes other than ours whose sockets are there."""

    @property
    def misnamed(self) -> bool:
        """Whether steps run here, and only those of another node's name."""
        return bool(self.foreign_nodes) and not any(presence.sockets for presence in self.jobs.values())


class SpoolReader:
    """Reads the spool and mapping directories."""

    def __init__(self, node: str, *, spool: Path | None, mapping: Path | None) -> None:
        """Either directory may be None: absent."""
        self._node, self._spool = node, spool
        self._files = None if mapping is None else JobFiles(mapping)

    def read(self, wall: int) -> SpoolState:
        """Read both now, `wall` in Unix nanoseconds. Raises OSError if a directory cannot be read."""
        sockets, foreign_nodes = self._sockets()
        files: defaultdict[str, list[str]] = defaultdict(list)
        written: dict[str, int] = {}
        problems = []
        for name, content in sorted(self._files.read(wall).items()) if self._files else ():
            problems += [content.problem] if content.problem else []
            for job in content.jobs:
                files[job].append(name)
                written[job] = min(content.written, written.get(job, content.written))
        jobs = {
            job: JobPresence(frozenset(sockets[job]), tuple(files[job]), written.get(job, 0))
            for job in sorted(sockets.keys() | files.keys())
        }
        return SpoolState(jobs, tuple(problems), tuple(sorted(foreign_nodes)))

    def _sockets(self) -> tuple[defaultdict[str, set[tuple[str, int, int]]], set[str]]:
        """Return our sockets by job, and the other nodes that have some here."""
        found: defaultdict[str, set[tuple[str, int, int]]] = defaultdict(set)
        foreign_nodes = set()
        with os.scandir(self._spool) if self._spool is not None else nullcontext(()) as entries:
            for entry in islice(entries, _MOST_ENTRIES):
                match = _SOCKET.fullmatch(entry.name)
                bound = _socket_id(entry) if match is not None else None
                if match is not None and bound is not None and match[1] == self._node:
                    found[match[2]].add(bound)
                elif match is not None and bound is not None:
                    foreign_nodes.add(match[1])
        return found, foreign_nodes


def _socket_id(entry: os.DirEntry[str]) -> tuple[str, int, int] | None:
    """Return name, inode and change time; None if it is no socket or gone."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    return (entry.name, status.st_ino, status.st_ctime_ns) if stat.S_ISSOCK(status.st_mode) else None


_LINE = re.compile(r"Gres Name=(\S+) Type=(\S*) Count=(\d{1,9})(?: Index=\S+)?(?: ID=\d+)?(?: File=(\S+))?")
_BOARD = re.compile(r"nvidia(\d{1,4})")
_CAPABILITY = re.compile(r"nvidia-cap(\d{1,6})")
_CAP_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d{1,6})\s*$", re.MULTILINE)


class Slot(Struct, frozen=True):
    """One entry in slurmd's list of GPUs."""

    minor: int | None = None
    """Number in /dev/nvidiaN; None if the slot has no such file."""
    capabilities: tuple[int, ...] = ()
    """Numbers in /dev/nvidia-caps/nvidia-capN, if the slot is a MIG instance."""


class GpuMap(Struct, frozen=True):
    """Slurm's and the driver's lists of GPUs, as last read."""

    slots: Mapping[str, tuple[Slot, ...]] | None = None
    """By resource name; None if slurmd is not on this machine: an index is then taken for a minor."""
    uuids: Mapping[int, str] = {}
    """UUID by minor; empty without the driver's /proc: a minor is then taken for the driver's ordinal."""
    instances: Mapping[int, tuple[int, int]] = {}
    """The board's minor and the GPU instance's number, by a capability's minor."""
    problem: str = ""
    """Why slurmd gave no list now."""

    @property
    def fault(self) -> str:
        """What follows from the problem, and the problem; empty if there is none."""
        if not self.problem:
            return ""
        if self.slots is None:
            return f"gres index N is taken for /dev/nvidiaN, because {self.problem}"
        known = "the last list of GPUs stays in use" if self.slots else "the GPUs of jobs are unknown"
        return f"{known}: {self.problem}"

    def uuids_at(self, name: str, index: int, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return the GPU's UUID, or those of all its MIG instances. Raises ValueError with the reason."""
        slot = self._slot(name, index)
        if slot.capabilities:
            return (self._instance(slot, devices),)
        if slot.minor is None:
            raise ValueError(f"index {index} of gres/{name} has no device file in `slurmd -G`")
        board = self._board(slot.minor, devices)
        cut = tuple(device.uuid for device in devices if device.parent == board.uuid)
        return cut or (board.uuid,)

    def _slot(self, name: str, index: int) -> Slot:
        if self.slots is None:
            return Slot(index)
        slots = self.slots.get(name) or self.slots.get("gpu", ())
        if index >= len(slots):
            raise ValueError(f"index {index} of gres/{name} is not in `slurmd -G`, which lists {len(slots)}")
        return slots[index]

    def _board(self, minor: int, devices: Sequence[Device]) -> Device:
        uuid = self.uuids.get(minor)
        if self.uuids and uuid is None:
            raise ValueError(f"/dev/nvidia{minor} is not in /proc/driver/nvidia")
        # Boards only: an instance's index is "0:1".
        found = [d for d in devices if not d.parent and (d.uuid == uuid if uuid else d.index == str(minor))]
        if len(found) != 1:
            raise ValueError(f"/dev/nvidia{minor} ({uuid or 'by its number'}) is no GPU that the source sees")
        return found[0]

    def _instance(self, slot: Slot, devices: Sequence[Device]) -> str:
        instances = {self.instances[capability] for capability in slot.capabilities if capability in self.instances}
        if len(instances) != 1:
            raise ValueError(f"nvidia-cap{slot.capabilities[0]} is no MIG instance in /proc/driver/nvidia/capabilities")
        minor, instance = instances.pop()
        board = self._board(minor, devices)
        found = [d.uuid for d in devices if d.parent == board.uuid and d.index.rpartition(":")[2] == str(instance)]
        if len(found) != 1:
            raise ValueError(f"GPU instance {instance} of /dev/nvidia{minor} is no device that the source sees")
        return found[0]


def parse_slots(text: str) -> dict[str, tuple[Slot, ...]]:
    """Parse what `slurmd -G` prints to standard error. Raises ValueError if it lists no GPU.

    A MIG instance has several files (MultipleFiles): newer versions print them on one line, 22.05 prints one per
    line, its board's first.
    """
    slots: dict[str, list[Slot]] = {}
    types: dict[str, str] = {}
    for match in _LINE.finditer(text):
        name, kind, count, files = match.groups()
        if name in GPU_GRES:
            _add_slots(slots.setdefault(name, []), files or "", int(count), same=types.get(name) == kind)
            types[name] = kind
    if not any(slots.values()):
        raise ValueError(f"no GPU in what slurmd -G printed: {text.strip()[-200:]!r}")
    return {name: tuple(each) for name, each in slots.items()}


def _add_slots(slots: list[Slot], files: str, count: int, *, same: bool) -> None:
    """Add the slots of one line; `same`: its type is that of the line before."""
    boards, capabilities = _device_numbers(_BOARD, files), _device_numbers(_CAPABILITY, files)
    if capabilities and not boards and same and slots and slots[-1].minor is not None:
        slots[-1] = Slot(slots[-1].minor, slots[-1].capabilities + capabilities)
    elif capabilities:
        slots += [Slot(boards[0], capabilities)] if boards else [Slot(None, (cap,)) for cap in capabilities]
    elif boards:
        slots += map(Slot, boards)
    else:
        slots += [Slot()] * min(count, 1024)


def _device_numbers(pattern: re.Pattern[str], files: str) -> tuple[int, ...]:
    names = (path.rpartition("/")[2] for path in expand_hostlist(files, most=1024))
    return tuple(int(match[1]) for match in map(pattern.fullmatch, names) if match)


def read_instances(proc: Path) -> dict[int, tuple[int, int]]:
    """Return (board's minor, GPU instance) by a capability's minor, for GPU and compute instances alike."""
    root = proc / "driver/nvidia/capabilities"
    patterns = ("gpu*/mig/gi*/access", "gpu*/mig/gi*/ci*/access")
    paths = [path for pattern in patterns for path in readable_part(root.glob(pattern))]
    return dict(_instances(root, paths))


def _instances(root: Path, paths: Iterable[Path]) -> Iterable[tuple[int, tuple[int, int]]]:
    for path in paths:
        board, _, instance = path.relative_to(root).parts[:3]
        match = _CAP_MINOR.search(_read_or_empty(path))
        numbers = board.removeprefix("gpu"), instance.removeprefix("gi")
        if match and all(each.isascii() and each.isdigit() for each in numbers):
            yield int(match[1]), (int(numbers[0]), int(numbers[1]))


_SLUID = re.compile(SLUID)
_HIERARCHIES = ("freezer", "devices", "memory", "cpuset", "cpuacct", "cpu,cpuacct")
_SLICES = ("*.slice", "*.slice/*.slice")
"""`a-b.slice` is in `a.slice` (systemd.slice(5))."""
_MOST_PROCESSES = 4096
_MOST_GPUS = 1024
_STEP_VARIABLES = frozenset({"SLURM_STEP_ID", "SLURM_STEPID"})
_NODE_VARIABLE = re.compile("\0SLURMD_NODENAME=([^\0]*)\0")
_LISTENER = re.compile(r"/([^/\s]+)$", re.MULTILINE)


class JobTasks(Struct, frozen=True):
    """What the processes of one job on this node show."""

    user: str = ""
    command: str = ""
    """Of the batch script, or else of a task."""
    batch: tuple[int, ...] | None = None
    """All its GPUs here, by Slurm's index; None: its batch script is not here or does not show them."""
    steps: frozenset[int] = frozenset()
    """GPUs of its running steps, perhaps not all of the job's."""
    uuids: tuple[str, ...] = ()
    """GPUs in the batch script's CUDA_VISIBLE_DEVICES, if these are UUIDs."""
    processes: int = 0
    """Running processes started by slurmstepd."""


class LocalNode:
    """Inspects this node's jobs, sockets and GPUs, without a query to slurmctld."""

    def __init__(
        self,
        name: str,
        *,
        slots: Callable[[], str],
        proc: str | Path = "/proc",
        cgroup: str | Path = "/sys/fs/cgroup",
        conf: str = "",
    ) -> None:
        """`slots` returns what `slurmd -G` prints, or raises SlurmUnavailableError; `conf` is slurm.conf, if any."""
        self._name, self._slots, self._proc, self._cgroup = name, slots, Path(proc), Path(cgroup)
        self._conf = conf
        self._told = False

    def inspect_jobs(self, jobs: Iterable[str]) -> dict[str, JobTasks]:
        """Return what these jobs' processes show. Walks /proc and may query a name service, so it may be slow."""
        wanted = set(jobs)
        found = {job: list(self._in_cgroups(job)) for job in wanted}
        if not all(found.values()):
            for process in self._in_sluid_groups() or self._started(self._pids()):
                job = process.environ.get("SLURM_JOB_ID", "")
                if job in wanted:
                    found[job].append(process)
        return {
            job: _summarize([s for s in each if s.environ.get("SLURM_JOB_ID") == job]) for job, each in found.items()
        }

    def listening(self) -> frozenset[str]:
        """Return the names of all unix sockets bound in the host's network namespace; empty when unreadable."""
        try:
            with (self._proc / "1/net/unix").open(encoding="utf-8", errors="replace") as file:
                return frozenset(_LISTENER.findall(file.read(16 * 1024 * 1024)))
        except OSError:
            return frozenset()

    def conf_times(self) -> tuple[int, ...]:
        """Return when slurm.conf and the gres.conf beside it were last changed; may block on a network file system."""
        conf = Path(self._conf)
        return tuple(_modified(file) for file in (conf, conf.with_name("gres.conf"))) if self._conf else ()

    def gpu_map(self) -> GpuMap:
        """Read Slurm's and the driver's lists of GPUs; `problem` is set if Slurm's is unknown."""
        uuids, instances = read_uuids(self._proc), read_instances(self._proc)
        if not uuids and not self._told:
            log.info("slurm: no %s/driver/nvidia: /dev/nvidiaN is taken for the driver's GPU N", self._proc)
        self._told = True
        try:
            return GpuMap(parse_slots(self._slots()), uuids, instances)
        except MissingCommandError as err:
            return GpuMap(None, uuids, instances, str(err))
        except (SlurmUnavailableError, ValueError) as err:
            return GpuMap({}, uuids, instances, str(err))

    def _is_ours(self, pid: str) -> bool:
        """Several slurmds may share a host and run the same job; the process must belong to ours."""
        match = _NODE_VARIABLE.search("\0" + _read_or_empty(self._proc / pid / "environ"))
        return match is None or match[1] == self._name

    def _in_cgroups(self, job: str) -> Iterator[ProcessInfo]:
        """Yield a job's processes in cgroup v1 `slurm[_NODE]/uid_U/job_J`, v2 `[NODE_]slurmstepd.scope/job_J`."""
        trees = [self._cgroup / each for each in _HIERARCHIES]
        groups = [path for tree in trees for path in readable_part(tree.glob(f"slurm*/uid_*/job_{job}"))]
        groups += [path for scope in self._scopes() for path in readable_part(scope.glob(f"job_{job}"))]
        return self._started(_pids_in(groups))

    def _in_sluid_groups(self) -> list[ProcessInfo]:
        """Return all jobs' processes in cgroup v2 `[NODE_]slurmstepd.scope/SLUID` (26.05), whose name has no job id."""
        inside = (group for scope in self._scopes() for group in readable_part(scope.glob("*")))
        groups = (group for group in inside if _SLUID.fullmatch(group.name))
        return list(self._started(_pids_in(groups)))

    def _scopes(self) -> Iterator[Path]:
        """Yield the groups v2 of slurmd's jobs, in system.slice or in the slice that CgroupSlice names."""
        return (
            scope for slices in _SLICES for scope in readable_part(self._cgroup.glob(f"{slices}/*slurmstepd.scope"))
        )

    def _pids(self) -> Iterator[str]:
        return (path.name for path in readable_part(self._proc.glob("*")) if path.name.isdigit())

    def _started(self, pids: Iterable[str]) -> Iterator[ProcessInfo]:
        """Yield those of these processes that slurmstepd started."""
        trusted: dict[str, bool] = {}
        for pid in pids:
            parent = str(parent_pid(self._proc / pid))
            if parent not in trusted:
                trusted[parent] = self._is_stepd(parent)
            if trusted[parent] and self._is_ours(pid):
                try:
                    yield read_process(self._proc / pid)
                except (OSError, ValueError):
                    continue

    def _is_stepd(self, pid: str) -> bool:
        """Whether the process is slurmstepd, and not a user's process of that name, which may be setuid."""
        folder = self._proc / pid
        return command_name(folder) == "slurmstepd" and user_id(folder) in {0, os.geteuid()}


def _pids_in(groups: Iterable[Path]) -> set[str]:
    files = (file for group in groups for file in readable_part(group.rglob("cgroup.procs")))
    return {pid for file in files for pid in _read_or_empty(file).split()[:_MOST_PROCESSES] if pid.isdigit()}


def _summarize(processes: list[ProcessInfo]) -> JobTasks:
    outside_steps = (process for process in processes if _STEP_VARIABLES.isdisjoint(process.environ))
    batch = next((process for process in outside_steps if "SLURM_JOB_GPUS" in process.environ), None)
    steps = {gpu for process in processes for gpu in _gpus(process.environ, "SLURM_STEP_GPUS")}
    named = batch or next(iter(processes), None)
    if named is None:
        return JobTasks()
    return JobTasks(
        user="" if named.uid is None else user_name(named.uid),
        command=named.command,
        batch=_gpus(batch.environ, "SLURM_JOB_GPUS") or None if batch else None,
        steps=frozenset(steps),
        uuids=_uuids(batch.environ) if batch else (),
        processes=len(processes),
    )


def _gpus(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, expand_numbers(environ.get(name, ""), most=_MOST_GPUS)))
    except ValueError:
        return ()


def _uuids(environ: Mapping[str, str]) -> tuple[str, ...]:
    uuids = tuple(environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    return uuids if all(each.startswith(("GPU-", "MIG-")) for each in uuids) else ()


def _read_or_empty(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""
