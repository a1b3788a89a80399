"""A simulated Slurm node: real unix sockets in a spool directory, a made-up /proc, a controller with set answers."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from exporter.core.model import SECOND, Allocation, Device
from exporter.schedulers.base import SchedulerState
from exporter.schedulers.slurm.client import SlurmUnavailableError, UnknownJobError
from exporter.schedulers.slurm.controller import ControllerQueries
from exporter.schedulers.slurm.local_node import GpuMap, JobTasks, LocalNode, Slot, SpoolReader
from exporter.schedulers.slurm.notation import Gres
from exporter.schedulers.slurm.parsing import NodeState, SlurmJob
from exporter.schedulers.slurm.scheduler import SlurmScheduler

RECORDED = Path(__file__).parent / "recorded"
BATCH, EXTERN = "4294967291", "4294967292"
WALL = 1_800_000_000 * SECOND
"""Unix time when the rig's clock is at BEGIN."""
BEGIN = 10_000 * SECOND
NODE = "node1"
DEVICES = tuple(Device(f"GPU-{n}", str(n)) for n in range(4))


def recorded(name: str) -> str:
    """Return a recorded output of a real Slurm."""
    return (RECORDED / name).read_text()


def job(job_id: str = "7", *gpus: int, state: str = "RUNNING", started: float = 5.0, **facts: object) -> SlurmJob:
    """Return a job of alice's on this node with these GPUs, started `started` seconds before BEGIN."""
    given = {NODE: (Gres("gpu", "h100", len(gpus), gpus),)} if gpus and state in {"RUNNING", "SUSPENDED"} else None
    said = {
        "user": "alice",
        "account": "nlp",
        "partition": "gpu",
        "qos": "normal",
        "name": "train",
        "batch": True,
        "nodes": 1,
        "hosts": NODE,
        "start": (WALL - int(started * SECOND)) // SECOND,
        "gpus": len(gpus) or None,
        "gpus_here": len(gpus) or None,
        "on_gpus": bool(gpus),
        "given": given,
    }
    return SlurmJob(job_id, (state,), **(said | facts))  # type: ignore[arg-type]  # as each test names them


class Answers:
    """A controller that returns set answers, counts queries, and can stop answering."""

    def __init__(self) -> None:
        self.jobs: dict[str, SlurmJob] = {}
        self.details: dict[str, SlurmJob] = {}
        self.refuse: dict[str, str] = {}
        self.state = NodeState(NODE, "", "mixed")
        self.silent = ""
        self.asked: list[str] = []
        self.closed = False

    def job(self, job_id: str) -> SlurmJob:
        self._ask(job_id)
        if job_id in self.refuse:
            raise ValueError(self.refuse[job_id])
        if job_id not in self.jobs:
            raise UnknownJobError(job_id)
        return self.jobs[job_id]

    def detail(self, job_id: str) -> SlurmJob | None:
        if job_id not in self.details:
            return None
        self._ask(f"detail {job_id}")
        return self.details[job_id]

    def node(self, name: str) -> NodeState:
        self._ask(f"node {name}")
        return self.state

    def close(self) -> None:
        self.closed = True

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.silent:
            raise SlurmUnavailableError(self.silent)


class Here(LocalNode):
    """What the node itself shows of its jobs."""

    def __init__(self, conf: str = "") -> None:
        self._conf = conf
        self.tasks: dict[str, JobTasks] = {}
        self.bound: set[str] = set()
        self.inspected: list[str] = []
        self.gpu_map_read = 0
        self.slots: dict[str, tuple[Slot, ...]] | None = None
        self.problem = ""

    def inspect_jobs(self, jobs: Iterable[str]) -> dict[str, JobTasks]:
        self.inspected += sorted(jobs)
        return dict(self.tasks)

    def listening(self) -> frozenset[str]:
        return frozenset(self.bound)

    def gpu_map(self) -> GpuMap:
        self.gpu_map_read += 1
        return GpuMap(self.slots, problem=self.problem)


class Rig:
    """A scheduler on a simulated node; the test moves the clock, and queries are processed without a thread."""

    def __init__(
        self, folder: Path, *, node_state_seconds: float = 0.0, mapping: bool = False, phase: float = 0.0
    ) -> None:
        """`phase`: which of the moments within which the daemons of many nodes query is this one's, in [0, 1)."""
        self.spool, self.mapping = folder / "s", folder / "m" if mapping else None
        self.spool.mkdir()
        if self.mapping:
            self.mapping.mkdir()
        self.answers, self.here = Answers(), Here(f"{folder / 'slurm.conf'}")
        self.now, self.offset = BEGIN, WALL - BEGIN
        self.controller = ControllerQueries(
            self.answers, self.here, node=NODE, clock=lambda: self.now, phase=lambda: 1.0, threaded=False
        )
        self.scheduler = SlurmScheduler(
            NODE,
            SpoolReader(NODE, spool=self.spool, mapping=self.mapping),
            self.controller,
            node_state_seconds=node_state_seconds,
            wall=lambda: self.now + self.offset,
            phase=lambda: phase,
        )
        self.words: list[SchedulerState] = []

    def socket(self, job_id: str, step: str = BATCH, *, node: str = NODE) -> Path:
        """Bind the sockets that slurmstepd binds."""
        path = self.spool / f"{node}_{job_id}.{step}"
        bind(path)
        self.here.bound.add(path.name)
        return path

    def end(self, *paths: Path) -> None:
        """Remove the sockets as slurmstepd does."""
        for path in paths:
            path.unlink()
            self.here.bound.discard(path.name)

    def tick(self, seconds: float = 1.0, devices: tuple[Device, ...] = DEVICES) -> SchedulerState | None:
        """Advance the clock, poll, process all queries, and poll again within the same second."""
        self.now += int(seconds * SECOND)
        first = self.scheduler.poll(self.now, devices, ())
        self.work()
        second = self.scheduler.poll(self.now, devices, ())
        self.words = [word for word in (first, second) if word is not None]
        return second

    def work(self) -> None:
        while self.controller.step():
            pass

    def told(self, seconds: float = 1.0, devices: tuple[Device, ...] = DEVICES) -> tuple[Allocation, ...]:
        """The allocations of both polls that last, and once those that ended in them."""
        self.tick(seconds, devices)
        ended = [a for word in self.words[:-1] for a in word.allocations if a.end is not None]
        return (*ended, *self.words[-1].allocations)

    def held(self, seconds: float = 1.0) -> dict[str, str]:
        """Return the jobs by GPU after that time."""
        return {a.uuid: a.owner.job_id for a in self.told(seconds) if a.end is None}

    def faults(self) -> list[str]:
        """Kind and message of each fault of the last two polls."""
        return [f"{fault.kind}: {fault.message}" for word in self.words for fault in word.faults]


def bind(path: Path) -> None:
    """Create a unix socket of that name, however long its path is."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


class Proc:
    """A made-up /proc with processes that Slurm started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.add(1, parent=0, comm="init")
        self.add(50, parent=1, comm="slurmstepd")

    def add(
        self, pid: int, *, parent: int = 50, comm: str = "bash", environ: dict[str, str] | None = None, cgroup: str = ""
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} ({comm}) S {parent} {' '.join(['0'] * 17)} {pid} {' '.join(['0'] * 20)}\n")
        (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{os.getuid()}\t0\t0\t0\n")
        (folder / "cgroup").write_text(cgroup + "\n")
        (folder / "cmdline").write_text(f"{comm}\0train.py\0")
        pairs = "".join(f"{name}={value}\0" for name, value in (environ or {}).items())
        (folder / "environ").write_text(pairs)

    def board(self, minor: int, uuid: str) -> None:
        folder = self.root / f"driver/nvidia/gpus/0000:{minor:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 120\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )

    def capability(self, board: int, instance: str, minor: int) -> None:
        file = self.root / f"driver/nvidia/capabilities/gpu{board}/mig/{instance}/access"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n")

    def sockets(self, *paths: str) -> None:
        lines = [f"0000000000000000: 00000002 00000000 00010000 0001 01 {n} {p}" for n, p in enumerate(paths)]
        file = self.root / "1/net/unix"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(["Num       RefCount Protocol Flags    Type St Inode Path", *lines]) + "\n")
