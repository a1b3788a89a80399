"""A node of a simulated cluster: a kubelet, optionally an API server, and the scheduler on both."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from uuid import NAMESPACE_DNS, uuid5

from msgspec import structs

from exporter.clock import SystemClock
from exporter.config import Config, HostSettings
from exporter.core.model import Allocation, Device, Reading
from exporter.registry import KubernetesSettings as Settings
from exporter.schedulers.base import SchedulerError, SchedulerState
from exporter.schedulers.kubernetes.api import ApiTimeouts
from exporter.schedulers.kubernetes.scheduler import KubernetesScheduler, WatchIntervals, open_kubernetes
from tests.kubernetes.api import ApiServer, Json
from tests.kubernetes.kubelet import Kubelet
from tests.waiting import PATIENCE

NODE = "node-1"
INTERVALS = WatchIntervals(refresh=0.1, sync=5.0, grace=1.0, settle=0.0, retry=0.05, publish=0.01, restart_grace=1.0)
PACE = ApiTimeouts(first=0.05, most=0.2, response=1.0, watch_idle=5.0)
Found = TypeVar("Found")


def gpu_uuid(index: int) -> str:
    return f"GPU-5700b000-0000-0000-0000-{index:012d}"


GPUS = tuple(Device(gpu_uuid(index), f"{index}") for index in range(8))


def uid_of(name: str) -> str:
    return str(uuid5(NAMESPACE_DNS, name))


def pod_object(name: str, *, namespace: str = "ml", phase: str = "Running", **more: Any) -> Json:
    """Return a pod of this node as the API server has it; `more` goes into metadata."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid_of(f"{namespace}/{name}"),
            "creationTimestamp": "2026-01-02T03:04:05Z",
        }
        | more,
        "spec": {
            "nodeName": NODE,
            "containers": [{"name": "main", "image": "registry/train:1", "command": ["python"], "args": ["train.py"]}],
        },
        "status": {"phase": phase, "startTime": instant(time.time() - 60)},
    }


def requesting(name: str, *, init: int, main: int, sidecar: int = 0, **more: Any) -> Json:
    """Return a pod of this node with an ordinary init container and a sidecar that request GPUs, too."""
    thing = pod_object(name, **more)

    def requests(gpus: int) -> Json:
        return {"resources": {"limits": {"nvidia.com/gpu": f"{gpus}", "memory": "1Gi"}}}

    thing["spec"]["containers"][0] |= requests(main)
    first = {"name": "first", "image": "i"} | requests(init)
    beside = {"name": "beside", "image": "i", "restartPolicy": "Always"} | requests(sidecar)
    thing["spec"]["initContainers"] = [first, beside]
    return thing


def kept_by(kind: str, name: str, version: str = "batch/v1") -> list[Json]:
    """Return `ownerReferences` with a controller."""
    return [{"apiVersion": version, "kind": kind, "name": name, "uid": uid_of(name), "controller": True}]


def node_object(*, ready: str = "True", **spec: Any) -> Json:
    conditions = [{"type": "Ready", "status": ready}, {"type": "DiskPressure", "status": "False"}]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "uid": uid_of(NODE)},
        "spec": spec,
        "status": {"conditions": conditions},
    }


def slice_object(*devices: Json, generation: int = 1, name: str = "slice-1", driver: str = "gpu.nvidia.com") -> Json:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name, "uid": uid_of(name)},
        "spec": {
            "driver": driver,
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": generation, "resourceSliceCount": 1},
            "devices": list(devices),
        },
    }


def offered(name: str, **attributes: str) -> Json:
    """Return a device of a slice."""
    return {"name": name, "attributes": {key: {"string": value} for key, value in attributes.items()}}


def instant(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Node:
    """The objects and the scheduler of a node."""

    def __init__(self, folder: Path, kubelet: Kubelet, api: ApiServer | None) -> None:
        self.folder, self.kubelet, self._api = folder, kubelet, api
        self.devices = GPUS
        self.clock = SystemClock()
        self.scheduler: KubernetesScheduler | None = None
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.ended: list[Allocation] = []
        self.faults: set[tuple[str, str]] = set()
        if api is not None:
            self.token = folder / "token"
            self.token.write_text(api.token)

    @property
    def api(self) -> ApiServer:
        assert self._api is not None
        return self._api

    def config(self, **more: Any) -> Config:
        settings = Settings(pod_resources_socket=f"{self.kubelet.socket}", node_name=NODE)
        if self._api is not None:
            settings = structs.replace(
                settings, api_url=self.api.url, ca_file=f"{self.api.ca}", token_file=f"{self.token}"
            )
        return Config(
            scheduler="kubernetes", kubernetes=structs.replace(settings, **more), host=HostSettings(f"{self.proc}")
        )

    def opens(
        self, intervals: WatchIntervals = INTERVALS, *, pace: ApiTimeouts = PACE, **settings: Any
    ) -> KubernetesScheduler:
        config = self.config(**settings)
        self.scheduler = open_kubernetes(config, environ={}, intervals=intervals, timeouts=pace)
        return self.scheduler

    def look(self, *readings: Reading) -> SchedulerState | None:
        """Poll once; ends and faults are collected, because each is reported once."""
        scheduler = self.scheduler or self.opens()
        state = scheduler.poll(self.clock.now(), self.devices, readings)
        if state is not None:
            self.ended += [each for each in state.allocations if each.end is not None]
            self.faults |= {(fault.kind, fault.message) for fault in state.faults}
        return state

    def until(self, true: Callable[[SchedulerState], Any], what: str, *readings: Reading) -> SchedulerState:
        """Poll until `true` holds for the scheduler's state."""
        return wait_for(lambda: state if (state := self.look(*readings)) is not None and true(state) else None, what)

    def refusal(self) -> str:
        """Poll until the scheduler raises, and return its message."""

        def look() -> str:
            try:
                self.look()
            except SchedulerError as err:
                return str(err)
            return ""

        return wait_for(look, "an error of the scheduler's")

    def held(self, *expected: tuple[int, str]) -> SchedulerState:
        """Poll until exactly these GPUs, by index, are held by these jobs."""
        wanted = {(gpu_uuid(index), job) for index, job in expected}
        return self.until(lambda state: holds(state) == wanted, f"{sorted(wanted)}")


def holds(state: SchedulerState) -> set[tuple[str, str]]:
    """Return UUID and job id of the current allocations."""
    return {(each.uuid, each.owner.job_id) for each in state.allocations if each.end is None}


def wait_for(ask: Callable[[], Found | None], what: str) -> Found:
    """Poll until the answer is true; an error of the scheduler counts as false."""
    deadline, last = time.monotonic() + PATIENCE, ""
    while time.monotonic() < deadline:
        try:
            if found := ask():
                return found
        except SchedulerError as err:
            last = str(err)
        time.sleep(0.01)
    raise AssertionError(f"not so after {PATIENCE:g} s: {what}; {last}")


def closed(scheduler: KubernetesScheduler) -> None:
    """Close it, and collect its garbage here and now.

    httpcore 1.0 does not release a connection whose TLS handshake is cancelled, so Python warns of it whenever it is
    collected: perhaps in another test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        scheduler.close()
        gc.collect()
    assert not scheduler.alive, "the scheduler's thread goes on after close()"


@contextmanager
def node(*, with_api: bool = True) -> Iterator[Node]:
    """A node for the length of a block, in a folder with a path short enough for a unix socket's address."""
    with TemporaryDirectory(prefix="k8s-") as name:
        folder = Path(name)
        kubelet = Kubelet(folder / "kubelet.sock")
        api = ApiServer(folder).has(node_object()) if with_api else None
        made = Node(folder, kubelet, api)
        try:
            yield made
        finally:
            if made.scheduler is not None:
                closed(made.scheduler)
            kubelet.stop()
            if api is not None:
                api.stop()
