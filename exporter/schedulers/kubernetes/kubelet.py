"""The kubelet's pod-resources service, asked over its unix socket.

Owns the connection: a new one when the socket is replaced or a call failed, and a deadline on each call. Refuses to
keep an answer: what was said last is the caller's.

Sources: Kubernetes' "Monitoring device plugin resources" (the service is v1 since 1.20); kubelet limits it to 100 calls
a second with bursts of 10, and answers more with RESOURCE_EXHAUSTED.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from exporter.schedulers import SchedulerError
from exporter.schedulers.kubernetes import wire

T = TypeVar("T")
DEADLINE_SECONDS = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel may be given the old one's connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.default_authority", "localhost"),
)
_MOUNT = (
    "mount the host's /var/lib/kubelet/pod-resources, the folder and not the socket, for a restarted kubelet makes a"
    " new one; kubernetes.pod_resources_socket names it"
)


class KubeletError(SchedulerError):
    """The kubelet did not answer; the message says what was tried and what to do."""


class Kubelet:
    """Asks the kubelet behind `socket`; used on one event loop."""

    def __init__(self, socket: str, *, deadline: float = DEADLINE_SECONDS) -> None:
        """Raises KubeletError where grpcio is not installed."""
        self._socket, self._deadline, self._grpc = socket, deadline, _grpc()
        self._caller = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kubelet")
        self._channel: Any = None
        self.connections = 0
        """Made so far: one more, and the kubelet may be another."""
        self._met: tuple[int, int, int] | None = None

    async def held(self) -> tuple[wire.Held, ...]:
        """What each pod of the node holds (List); raises KubeletError."""
        return self._read(await self._call(wire.LIST), wire.read_list)

    async def allocatable(self) -> tuple[wire.Devices, ...]:
        """What device plugins offer to pods (GetAllocatableResources); raises KubeletError."""
        return self._read(await self._call(wire.ALLOCATABLE), wire.read_allocatable)

    def close(self) -> None:
        """Let the connection go, and with it a call that is under way."""
        self._disconnect()
        self._caller.shutdown()

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _read(self, message: bytes, read: Callable[[bytes], T]) -> T:
        try:
            return read(message)
        except ValueError as err:
            raise KubeletError(f"{self._socket}: the kubelet's answer cannot be read: {err}") from err

    async def _call(self, method: str) -> bytes:
        self._meet()
        # Blocking in a thread of our own: grpc's call that blocks nobody starts a thread each time, at 2 ms of CPU.
        ask = partial(self._channel.unary_unary(method), b"", timeout=self._deadline)
        try:
            answer: bytes = await asyncio.get_running_loop().run_in_executor(self._caller, ask)
        except self._grpc.RpcError as err:
            self._disconnect()
            raise KubeletError(self._told(method, err)) from err
        return answer

    def _meet(self) -> None:
        """Connect, or anew where another socket is in the old one's place; raises KubeletError where there is none."""
        try:
            found = Path(self._socket).stat()
        except OSError as err:
            raise KubeletError(f"{self._socket}: no kubelet there: {err.strerror}: {_MOUNT}") from err
        identity = (found.st_dev, found.st_ino, found.st_mtime_ns)  # inode numbers are used again
        if self._channel is None or self._met != identity:
            self._disconnect()
            self._met = identity
            self.connections += 1
            address = f"unix:{Path(self._socket).absolute()}"
            self._channel = self._grpc.insecure_channel(address, options=_OPTIONS)

    def _told(self, method: str, err: Any) -> str:
        code = self._grpc.StatusCode
        advice = {
            code.UNAVAILABLE: f"is the kubelet running, and this its socket? {_MOUNT}",
            code.DEADLINE_EXCEEDED: "the kubelet is too busy or hangs: look at its log",
            code.UNIMPLEMENTED: "the kubelet is older than 1.20, or its KubeletPodResources feature gate is off",
            code.RESOURCE_EXHAUSTED: "others on this node ask it too often, or its answer is too long",
        }.get(err.code(), "look at the kubelet's log")
        name = method.rpartition("/")[2]
        return f"{self._socket}: {name} failed: {err.code().name}: {err.details()}: {advice}"


def _grpc() -> Any:
    try:
        import grpc  # noqa: PLC0415  only nodes of a cluster pay for it
    except ImportError as err:
        message = f"grpcio is missing ({err}): pip install 'gpu-efficiency-exporter[kubernetes]'"
        raise KubeletError(message) from err
    return grpc
