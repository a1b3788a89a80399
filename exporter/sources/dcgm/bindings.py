"""NVIDIA's Python bindings of DCGM: where they lie, and the way from an address to a handle.

Owns finding, importing and connecting. Refuses everything after that. Uses the flat layer (`dcgm_agent`,
`dcgm_structs`, `dcgm_fields`): the classes above it call a dead engine from their destructors.
"""

import os
import re
import socket
import sys
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from exporter.sources import SourceError

PATHS = (
    "/usr/share/datacenter-gpu-manager-4/bindings/python3",
    "/usr/local/dcgm/bindings/python3",
    "/usr/share/dcgm/bindings/python3",
    "/usr/src/dcgm/bindings/python3",
    "/usr/local/dcgm/bindings",
)
"""Where the packages of DCGM 4, then 3 and 2, put them."""
DEFAULT_PORT = 5555
_KNOCK_SECONDS = 1.0
_LAST_PORT = 65535
_TCP = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d+))?")
"""[IPv6] or a name, and perhaps a port."""
_VSOCK = re.compile(r"\d+:\d+")


class Bindings(NamedTuple):
    """The modules that are used, and where they came from."""

    agent: ModuleType
    structs: ModuleType
    fields: ModuleType
    place: str


def load(wanted: str = "", library: str = "") -> Bindings:
    """Import the bindings from `wanted` or DCGM_BINDINGS if given, else from where packages put them.

    `library` is the folder of libdcgm, for one that lies where the bindings do not look. Raises SourceError naming
    every place that was looked at.
    """
    wanted = wanted or os.environ.get("DCGM_BINDINGS", "")
    if not wanted and util.find_spec("dcgm_agent") is not None:
        return _imported("the Python path", library)
    places = (wanted,) if wanted else PATHS
    place = next((place for place in places if (Path(place) / "dcgm_agent.py").is_file()), None)
    if place is None:
        raise SourceError(
            f"NVIDIA's Python bindings of DCGM (dcgm_agent.py) are not in {', '.join(places)}: install the package"
            " datacenter-gpu-manager-4-core, or set DCGM_BINDINGS or dcgm.bindings to their folder"
        )
    sys.path.insert(0, place)
    try:
        return _imported(place, library)
    finally:
        sys.path.remove(place)  # the folder also holds modules with common names


def _imported(place: str, library: str) -> Bindings:
    try:
        agent, structs, fields = (import_module(f"dcgm_{name}") for name in ("agent", "structs", "fields"))
    except Exception as error:
        raise SourceError(f"NVIDIA's Python bindings of DCGM in {place} cannot be imported: {error!r}") from error
    try:
        structs._dcgmInit(library or None)  # noqa: SLF001  the bindings' own way to load libdcgm
        agent.dcgmInit()
    except structs.DCGMError as error:
        raise SourceError(
            f"libdcgm cannot be loaded ({error}): the bindings in {place} want the library of the same version;"
            " install datacenter-gpu-manager-4-core, or set dcgm.library to the folder of libdcgm.so.4"
        ) from error
    return Bindings(agent, structs, fields, place)


def connect(bindings: Bindings, address: str, *, timeout_seconds: float) -> Any:
    """A handle to the engine at `address`; see `[dcgm] address`. Raises SourceError."""
    if address == "embedded":
        return _embedded(bindings)
    kind, _, rest = address.partition(":")
    rest = rest.removeprefix("//")
    if kind == "vsock" and _VSOCK.fullmatch(rest):
        return _connected(bindings, f"vsock://{rest}", address, timeout_seconds)
    if kind == "unix" and rest.startswith("/"):
        return _connected(bindings, rest, address, timeout_seconds)
    found = _TCP.fullmatch(address)
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if kind in ("vsock", "unix") or not found or not 0 < port <= _LAST_PORT:
        raise SourceError(
            f"dcgm.address {address!r} is none of host:port, [IPv6]:port, unix:/path, vsock:CID:PORT, embedded"
        )
    _knock(found[1] or found[2], port, address)
    return _connected(bindings, address, address, timeout_seconds)


def _embedded(bindings: Bindings) -> Any:
    try:
        return bindings.agent.dcgmStartEmbedded(bindings.structs.DCGM_OPERATION_MODE_AUTO)
    except bindings.structs.DCGMError as error:
        raise SourceError(
            f"an embedded host engine cannot be started ({error}): is the NVIDIA driver loaded (`nvidia-smi`)?"
        ) from error


def _knock(host: str, port: int, address: str) -> None:
    """Ask for a TCP connection first: libdcgm takes seconds to say less clearly that nobody listens."""
    try:
        socket.create_connection((host, port), timeout=_KNOCK_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise SourceError(
            f"nobody listens on {address} ({getattr(error, 'strerror', None) or error}): is the host engine running"
            " (`systemctl status nvidia-dcgm`)? Set dcgm.address if it listens elsewhere"
        ) from error


def _connected(bindings: Bindings, target: str, address: str, timeout_seconds: float) -> Any:
    agent, structs = bindings.agent, bindings.structs
    by_url = target.startswith("vsock:")
    if by_url and not hasattr(agent, "dcgmConnect_v3"):
        raise SourceError(
            f"{address}: vsock needs DCGM 4.5 or later, and the bindings in {bindings.place} are older: install newer"
            " ones, or set dcgm.address to host:port or unix:/path"
        )
    params = structs.c_dcgmConnectV3Params_v1() if by_url else structs.c_dcgmConnectV2Params_v2()
    params.timeoutMs = int(timeout_seconds * 1000)
    params.persistAfterDisconnect = 0  # the engine drops our watches and groups with the connection
    if not by_url:
        params.addressIsUnixSocket = int(address.startswith("unix:"))
    try:
        return (agent.dcgmConnect_v3 if by_url else agent.dcgmConnect_v2)(target, params)
    except structs.DCGMError as error:
        raise SourceError(
            f"the host engine at {address} does not answer ({error}): it hangs, is of another DCGM major version, or"
            " may not be reached from here; try `dcgmi discovery -l`"
        ) from error
