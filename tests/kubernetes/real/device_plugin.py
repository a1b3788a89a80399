"""A device plugin that registers GPUs with a real kubelet, as NVIDIA's does: kubelet/pkg/apis/deviceplugin/v1beta1."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.kubernetes.kubelet import STRING, message_classes
from tests.waiting import PATIENCE

FOLDER = Path("/var/lib/kubelet/device-plugins")
MESSAGES = message_classes("v1beta1", {
    "Empty": {},
    "RegisterRequest": {"version": (1, STRING), "endpoint": (2, STRING), "resource_name": (3, STRING)},
    "Device": {"ID": (1, STRING), "health": (2, STRING)},
    "ListAndWatchResponse": {"devices": (1, ["Device"])},
    "DevicePluginOptions": {},
    "ContainerAllocateRequest": {"devices_ids": (1, [STRING])},
    "AllocateRequest": {"container_requests": (1, ["ContainerAllocateRequest"])},
    "ContainerAllocateResponse": {},
    "AllocateResponse": {"container_responses": (1, ["ContainerAllocateResponse"])},
})  # fmt: skip


class DevicePlugin:
    """Offers devices of one resource from `start` until `stop`."""

    def __init__(self, resource: str, ids: Sequence[str]) -> None:
        self.resource, self.ids = resource, ids
        self.given: list[str] = []
        """What the kubelet has allocated, in its order."""
        self._over = threading.Event()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Listen and register; to be repeated after each start of the kubelet, which removes its plugins' sockets."""
        self.stop()
        self._over = threading.Event()
        socket = FOLDER / f"{self.resource.replace('/', '-')}.sock"
        with grpc.insecure_channel(f"unix:{FOLDER / 'kubelet.sock'}") as channel:
            grpc.channel_ready_future(channel).result(PATIENCE)
            self._server = self._listen(socket)
            request = MESSAGES["RegisterRequest"](version="v1beta1", endpoint=socket.name, resource_name=self.resource)
            call = channel.unary_unary("/v1beta1.Registration/Register", bytes, bytes)
            call(request.SerializeToString(), timeout=PATIENCE)

    def stop(self) -> None:
        """Withdraw the devices."""
        self._over.set()
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def _listen(self, socket: Path) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(max_workers=4))
        unary = {"GetDevicePluginOptions": _options, "Allocate": self._allocate}
        handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in unary.items()}
        handlers["ListAndWatch"] = grpc.unary_stream_rpc_method_handler(self._list)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),))
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        return server

    def _list(self, _request: bytes, _context: Any) -> Iterator[bytes]:
        over = self._over
        devices = [MESSAGES["Device"](ID=each, health="Healthy") for each in self.ids]
        yield MESSAGES["ListAndWatchResponse"](devices=devices).SerializeToString()
        over.wait()

    def _allocate(self, request: bytes, _context: Any) -> bytes:
        asked = MESSAGES["AllocateRequest"].FromString(request).container_requests
        self.given += [each for one in asked for each in one.devices_ids]
        responses = [MESSAGES["ContainerAllocateResponse"]() for _ in asked]
        answer: bytes = MESSAGES["AllocateResponse"](container_responses=responses).SerializeToString()
        return answer


def _options(_request: bytes, _context: Any) -> bytes:
    return b""
