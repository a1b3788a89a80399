"""Kubelet and API server, each asked once: for people who look whether an installation works.

Owns the one question each, and the sockets and connections for it. Refuses to keep anything, and to watch.
"""

import asyncio
import errno
import os
import socket

import httpx

from exporter.schedulers import SchedulerError
from exporter.schedulers.kubernetes.api import Access, ApiError, judge
from exporter.schedulers.kubernetes.kubelet import Kubelet

KINDS = (("pods", "/api/v1/pods", "spec.nodeName"), ("nodes", "/api/v1/nodes", "metadata.name"))
"""What the scheduler lists of its node: a name, the path, the field that selects the node."""


def try_kubelet(path: str) -> tuple[int, int]:
    """How many pods the kubelet lists, and how many devices those have; raises SchedulerError."""
    _knock(path)
    return asyncio.run(_listed(path))


def _knock(path: str) -> None:
    """Connect without grpc first, which says "unavailable" of a socket that this user may not open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except PermissionError as err:
            raise SchedulerError(
                f"{path}: permission denied for uid {os.geteuid()}: the kubelet's socket is root's: run as root (no"
                " capability is needed), or give the socket a group"
            ) from err
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise SchedulerError(f"{path}: cannot be connected to: {err.strerror or err}") from err


async def _listed(path: str) -> tuple[int, int]:
    kubelet = Kubelet(path)
    try:
        held = await kubelet.held()
    finally:
        kubelet.close()
    return len(held), sum(len(devices.ids) for one in held for devices in one.devices)


def try_api(access: Access, node: str) -> dict[str, str]:
    """Of pods and nodes: what is wrong with asking for them, empty where nothing is."""
    return asyncio.run(_asked(access, node))


async def _asked(access: Access, node: str) -> dict[str, str]:
    try:
        async with access.client() as client:
            return {name: await _one(client, access, path, f"{field}={node}") for name, path, field in KINDS}
    except ApiError as err:
        return {"": str(err)}


async def _one(client: httpx.AsyncClient, access: Access, path: str, selector: str) -> str:
    try:
        params = {"fieldSelector": selector, "resourceVersion": "0", "limit": "1"}
        judge(await client.get(path, params=params, headers=access.headers()))
    except (ApiError, httpx.HTTPError, httpx.InvalidURL, OSError) as err:
        return str(err) or type(err).__name__
    return ""
