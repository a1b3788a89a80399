"""What it costs to know who holds the GPUs: a tick of the Slurm scheduler, a refresh of the Kubernetes one, a daemon.

Owns these measurements. Slurm's traces are real sockets and the processes are real; its controller and the cluster's
servers are stand-ins, in another process where their work would be counted as ours. Run with a folder as its argument
it is those servers.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct, structs

from benchmarks.figures import Row, percentile, row
from benchmarks.group import Group, Measured
from benchmarks.machine import ROOT
from benchmarks.rig.daemon import memory, running
from exporter.clock import SystemClock
from exporter.config import Config
from exporter.core.model import SECOND, Device, Process, Reading
from exporter.registry import KubernetesSettings
from exporter.schedulers.base import Scheduler
from exporter.schedulers.kubernetes.scheduler import WatchIntervals, open_kubernetes
from tests.kubernetes.cluster import gpu_uuid, kept_by, node, node_object, pod_object
from tests.nvml_stub.build import build
from tests.schedulers.slurm_rig import Rig, job

SLURM_BUDGET_MS = 20.0
KUBERNETES_BUDGET_MS = 5.0
MEMORY_BUDGET_MIB = 110.0
_JOBS, _STEPS, _PROCESSES = 8, 4, 200
_PODS = 50
_LOOKS, _REFRESHES = 300, 200
_DEVICES = tuple(Device(gpu_uuid(index), f"{index}") for index in range(8))


def schedulers() -> list[Row]:
    """Measure both, one after the other."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        pids = stack.enter_context(_sleepers(_PROCESSES))
        slurm = _slurm(folder, pids)
    with _servers() as served:
        return [*slurm, _refresh(served), _resident(served)]


# -- Slurm --


def _slurm(folder: Path, pids: Sequence[int]) -> list[Row]:
    """Eight jobs of one GPU and four steps each; 25 of the processes are on each GPU."""
    rig = Rig(folder)
    for number in range(_JOBS):
        rig.answers.jobs[f"{number}"] = job(f"{number}", number)
        rig.socket(f"{number}")
        for step in range(_STEPS):
            rig.socket(f"{number}", f"{step}")
    devices = tuple(Device(f"GPU-{index}", f"{index}") for index in range(_JOBS))
    share = len(pids) // len(devices)
    readings = [
        Reading(device.uuid, 0, SECOND, processes=tuple(map(Process, pids[n * share : (n + 1) * share])))
        for n, device in enumerate(devices)
    ]
    rig.tick(devices=devices)
    asked = len(rig.answers.asked)
    spent = [_timed(rig, devices, readings) for _ in range(_LOOKS)]
    rig.scheduler.close()
    if len(rig.answers.asked) != asked:
        raise RuntimeError("the controller was asked though no job changed")
    what = f"Slurm, a look while no job changes: {_JOBS} jobs, {_JOBS * (_STEPS + 1)} steps, {len(pids)} processes"
    return [
        row(
            "schedulers", what, often=f"{_LOOKS} looks, no question asked", values=spent, unit="ms", digits=2,
            budget=SLURM_BUDGET_MS, judged=percentile(spent, 0.99), spread=f"p99 {percentile(spent, 0.99):.2f}",
        ),
    ]  # fmt: skip


def _timed(rig: Rig, devices: tuple[Device, ...], readings: Sequence[Reading]) -> float:
    """Processor time of one look, in ms; the budget is a node's, so it is that of this thread."""
    rig.now += SECOND
    began = time.thread_time()
    rig.scheduler.poll(rig.now, devices, readings)
    return (time.thread_time() - began) * 1e3


@contextmanager
def _sleepers(number: int) -> Iterator[list[int]]:
    """Processes that do nothing."""
    sleeping = [subprocess.Popen(["sleep", "3600"]) for _ in range(number)]
    try:
        yield [process.pid for process in sleeping]
    finally:
        for process in sleeping:
            process.kill()
        for process in sleeping:
            process.wait()


# -- Kubernetes --


class _Served(Struct, frozen=True):
    """Where the kubelet and the API server are."""

    socket: str
    url: str
    token: str
    ca: str


def _refresh(served: _Served) -> Row:
    """Processor time of the whole process, for the work is on other threads; the looks beside it are in it."""
    settings = KubernetesSettings(
        pod_resources_socket=served.socket, api_url=served.url, token_file=served.token, ca_file=served.ca,
        node_name="node-1",
    )  # fmt: skip
    config = Config(scheduler="kubernetes", kubernetes=settings)
    scheduler = open_kubernetes(config, intervals=structs.replace(WatchIntervals(), refresh=0.02))
    clock = SystemClock()
    while (word := scheduler.poll(clock.now(), _DEVICES, ())) is None or len(word.allocations) < _PODS:
        time.sleep(0.05)
    spent = [_refreshed(scheduler, clock, _REFRESHES // 10) for _ in range(10)]
    scheduler.close()
    return row(
        "schedulers", f"Kubernetes, a refresh with {_PODS} pods", often=f"10 x {_REFRESHES // 10} refreshes",
        values=spent, unit="ms", digits=2, budget=KUBERNETES_BUDGET_MS,
    )  # fmt: skip


def _refreshed(scheduler: Scheduler, clock: SystemClock, times: int) -> float:
    """Mean processor time of a refresh, in ms."""
    answers, began = set[int](), time.process_time()
    while len(answers) < times:
        word = scheduler.poll(clock.now(), _DEVICES, ())
        answers.add(word.at if word else 0)
        time.sleep(0.01)
    return (time.process_time() - began) / times * 1e3


def _resident(served: _Served) -> Row:
    """A daemon on the stand-in driver, after a minute of refreshes once a second."""
    ours = {
        "POD_RESOURCES_SOCKET": served.socket, "REFRESH_SECONDS": "1", "NODE_NAME": "node-1",
        "API_URL": served.url, "TOKEN_FILE": served.token, "CA_FILE": served.ca,
    }  # fmt: skip
    environ = {f"GPU_EFFICIENCY_KUBERNETES_{key}": value for key, value in ours.items()}
    words = ("-m", "exporter", "serve", "--web.listen-address", "127.0.0.1:0", "--source", "nvml")
    with running([*words, "--scheduler", "kubernetes"], environ | {"LD_LIBRARY_PATH": str(build())}) as daemon:
        time.sleep(60.0)
        resident = memory(daemon.pid)
    return row(
        "schedulers", f"Resident memory with Kubernetes on, {_PODS} pods (stand-in NVML)", often="after 60 s",
        values=[resident.now], unit="MiB", budget=MEMORY_BUDGET_MIB, judged=resident.peak,
        spread=f"peak {resident.peak:.1f}",
    )  # fmt: skip


@contextmanager
def _servers() -> Iterator[_Served]:
    """A kubelet and an API server with fifty pods on eight GPUs, in a process of their own."""
    with TemporaryDirectory() as name:
        where = Path(name) / "where"
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.node.schedulers", name], stdin=subprocess.PIPE, cwd=ROOT
        )
        try:
            while not where.exists():
                if child.poll() is not None:
                    raise RuntimeError("the stand-ins for the kubelet and the API server ended at once")
                time.sleep(0.1)
            yield _Served(*where.read_text().split())
        finally:
            child.communicate()


def _serve(folder: Path) -> None:
    """Be those servers until standard input ends."""
    with node() as made:
        for index in range(_PODS):
            made.kubelet.gives(f"p-{index}", f"{gpu_uuid(index % 8)}::{index}")
            made.api.has(pod_object(f"p-{index}", ownerReferences=kept_by("Job", f"j-{index}")))
        made.api.has(node_object())
        draft = folder / "draft"
        draft.write_text(f"{made.kubelet.socket} {made.api.url} {made.token} {made.api.ca}")
        draft.rename(folder / "where")
        sys.stdin.read()


SCHEDULERS = Group(
    name="schedulers",
    title="Who holds the GPUs",
    about=(
        "The Slurm scheduler reads real sockets and asks /proc about real processes, in processor time of the reading "
        "thread; while no job changes nothing is started and nobody is asked, which this run makes sure of. The "
        "Kubernetes scheduler asks a gRPC kubelet and an API server over TLS, stand-ins in another process, in "
        "processor time of the whole process. Memory is a daemon's, by its peak."
    ),
    measures=("exporter/core/model.py", "exporter/schedulers"),
    run=lambda: Measured(rows=schedulers()),
)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
