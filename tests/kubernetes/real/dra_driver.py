"""A DRA driver that offers GPUs to a real scheduler and a real kubelet, as NVIDIA's does: kubelet/pkg/apis/dra/v1.

Devices have the names and attributes of kubernetes-sigs/dra-driver-nvidia-gpu (deviceinfo.go, mig.go). There are no
files for the CDI names: containerd before 1.7, such as Debian 12's, does not look at them.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.kubernetes.kubelet import STRING, message_classes
from tests.kubernetes.real.control_plane import ControlPlane, Json
from tests.waiting import PATIENCE

DRIVER = "gpu.nvidia.com"
API = "/apis/resource.k8s.io/v1"
ROOT = Path("/var/lib/kubelet")
REGISTRATION = message_classes("pluginregistration", {
    "InfoRequest": {},
    "PluginInfo": {
        "type": (1, STRING), "name": (2, STRING), "endpoint": (3, STRING), "supported_versions": (4, [STRING])
    },
    "RegistrationStatus": {"error": (2, STRING)},
    "RegistrationStatusResponse": {},
})  # fmt: skip
MESSAGES = message_classes("dra", {
    "Claim": {"namespace": (1, STRING), "uid": (2, STRING), "name": (3, STRING)},
    "ClaimsRequest": {"claims": (1, ["Claim"])},
    "Device": {
        "request_names": (1, [STRING]), "pool_name": (2, STRING), "device_name": (3, STRING),
        "cdi_device_ids": (4, [STRING]),
    },
    "Devices": {"devices": (1, ["Device"])},
    "Entry": {"key": (1, STRING), "value": (2, "Devices")},
    "ClaimsResponse": {"claims": (1, ["Entry"])},
})  # fmt: skip
"""Requests and responses of both calls; a map is a list of entries on the wire."""


def gpu(minor: int, uuid: str) -> Json:
    """Return a whole GPU as it is offered."""
    attributes = _attributes(type="gpu", uuid=uuid, productName="NVIDIA H100 80GB HBM3", architecture="Hopper")
    return {"name": f"gpu-{minor}", "attributes": attributes, "capacity": {"memory": {"value": "80Gi"}}}


def instance(minor: int, board: str, profile: str, place: str, **uuid: str) -> Json:
    """Return a MIG instance as it is offered: one without a `uuid` is made when a claim needs it."""
    attributes = _attributes(type="mig", parentUUID=board, profile=profile, **uuid)
    return {"name": f"gpu-{minor}-mig-{profile.replace('.', '')}-{place}", "attributes": attributes}


def _attributes(**given: str) -> Json:
    return {name: {"string": value} for name, value in given.items()} | {"driverVersion": {"version": "580.65.6"}}


class DraDriver:
    """Offers devices of a node from `start` until `stop`."""

    def __init__(self, cluster: ControlPlane, node: str, devices: Sequence[Json]) -> None:
        self._cluster, self._node, self._devices = cluster, node, devices
        self._servers: list[grpc.Server] = []
        self._registered, self._over = threading.Event(), threading.Event()
        self._publisher = threading.Thread()

    def start(self) -> None:
        """Listen, wait for the kubelet to register the driver, and publish the devices."""
        self._registered.clear()
        self._over.clear()
        endpoint = ROOT / "plugins" / DRIVER / "dra.sock"
        info = REGISTRATION["PluginInfo"](
            type="DRAPlugin", name=DRIVER, endpoint=f"{endpoint}", supported_versions=["v1.DRAPlugin"]
        ).SerializeToString()
        self._listen(endpoint, "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", {
            "NodePrepareResources": self._prepare, "NodeUnprepareResources": _unprepare,
        })  # fmt: skip
        self._listen(ROOT / "plugins_registry" / f"{DRIVER}-reg.sock", "pluginregistration.Registration", {
            "GetInfo": lambda _request, _context: info, "NotifyRegistrationStatus": self._notified,
        })  # fmt: skip
        assert self._registered.wait(PATIENCE), "the kubelet registers the driver"
        self._publisher = threading.Thread(target=self._publish)
        self._publisher.start()

    def stop(self) -> None:
        """Be away; the devices stay published until the kubelet deletes them."""
        self._over.set()
        if self._publisher.is_alive():
            self._publisher.join()
        while self._servers:
            self._servers.pop().stop(None).wait()

    def slices(self) -> list[Json]:
        """Return what is published of the node."""
        found: list[Json] = self._cluster.get(f"{API}/resourceslices?fieldSelector=spec.nodeName={self._node}")["items"]
        return found

    def _publish(self) -> None:
        """Publish the devices whenever they are not: a kubelet that has started deletes them once it knows its node."""
        pool = {"name": self._node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": self._node, "pool": pool, "devices": self._devices}
        while True:
            with suppress(httpx.TransportError):  # while a test has the API server killed
                if not self.slices():
                    metadata = {"generateName": f"{self._node}-{DRIVER}-"}
                    self._cluster.create(f"{API}/resourceslices", {"metadata": metadata, "spec": spec})
            if self._over.wait(0.5):
                return

    def _listen(self, socket: Path, service: str, methods: dict[str, Callable[[bytes, Any], bytes]]) -> None:
        socket.parent.mkdir(parents=True, exist_ok=True)
        server = grpc.server(ThreadPoolExecutor(max_workers=4))
        handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        self._servers.append(server)

    def _notified(self, request: bytes, _context: Any) -> bytes:
        error = REGISTRATION["RegistrationStatus"].FromString(request).error
        if not error:
            self._registered.set()
        return b""

    def _prepare(self, request: bytes, _context: Any) -> bytes:
        entries = [
            MESSAGES["Entry"](key=claim.uid, value=MESSAGES["Devices"](devices=self._allocated(claim)))
            for claim in MESSAGES["ClaimsRequest"].FromString(request).claims
        ]
        answer: bytes = MESSAGES["ClaimsResponse"](claims=entries).SerializeToString()
        return answer

    def _allocated(self, claim: Any) -> list[Any]:
        """Return the devices that the scheduler has allocated to a claim."""
        found = self._cluster.get(f"{API}/namespaces/{claim.namespace}/resourceclaims/{claim.name}")
        assert found["metadata"]["uid"] == claim.uid, "the claim that was asked for is there"
        return [
            MESSAGES["Device"](
                request_names=[each["request"]],
                pool_name=each["pool"],
                device_name=each["device"],
                cdi_device_ids=[f"k8s.{DRIVER}/claim={claim.uid}-{each['device']}"],
            )
            for each in found["status"]["allocation"]["devices"]["results"]
        ]


def _unprepare(request: bytes, _context: Any) -> bytes:
    claims = MESSAGES["ClaimsRequest"].FromString(request).claims
    entries = [MESSAGES["Entry"](key=claim.uid, value=MESSAGES["Devices"]()) for claim in claims]
    answer: bytes = MESSAGES["ClaimsResponse"](claims=entries).SerializeToString()
    return answer
