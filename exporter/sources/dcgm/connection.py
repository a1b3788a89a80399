"""Loads NVIDIA's Python bindings of DCGM and connects to a host engine, within a time limit."""

import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from msgspec import Struct

from exporter.sources.base import SourceError

BINDINGS_PATHS = (
    "/usr/share/datacenter-gpu-manager-4/bindings/python3",
    "/usr/local/dcgm/bindings/python3",
    "/usr/share/dcgm/bindings/python3",
    "/usr/src/dcgm/bindings/python3",
    "/usr/local/dcgm/bindings",
)
"""Install locations of the packages of DCGM 4, then 3 and 2."""
DEFAULT_PORT = 5555
_PROBE_SECONDS = 1.0
_LAST_PORT = 65535
_TCP = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d+))?")
"""[IPv6] or a host name, with an optional port."""
_VSOCK = re.compile(r"\d+:\d+")


class Bindings(NamedTuple):
    """The imported modules of the bindings, and where they were found."""

    agent: ModuleType
    structs: ModuleType
    fields: ModuleType
    location: str


def load_bindings(folder: str = "", library: str = "") -> Bindings:
    """Import the bindings from `folder` or DCGM_BINDINGS if given, else from the Python path or BINDINGS_PATHS.

    `library` is the folder of libdcgm, if the bindings do not find it. Raises SourceError with the folders searched.
    """
    folder = folder or os.environ.get("DCGM_BINDINGS", "")
    if not folder and util.find_spec("dcgm_agent") is not None:
        return _import_bindings("the Python path", library)
    folders = (folder,) if folder else BINDINGS_PATHS
    location = next((location for location in folders if os.access(Path(location) / "dcgm_agent.py", os.R_OK)), None)
    if location is None:
        raise SourceError(
            f"NVIDIA's Python bindings of DCGM (dcgm_agent.py) are not in {', '.join(folders)}: install the package"
            " datacenter-gpu-manager-4-core, or set DCGM_BINDINGS or dcgm.bindings to their folder"
        )
    sys.path.insert(0, location)
    try:
        return _import_bindings(location, library)
    finally:
        sys.path.remove(location)  # the folder also holds modules with common names


def _import_bindings(location: str, library: str) -> Bindings:
    try:
        agent, structs, fields = (import_module(f"dcgm_{name}") for name in ("agent", "structs", "fields"))
    except Exception as error:
        raise SourceError(f"NVIDIA's Python bindings of DCGM in {location} cannot be imported: {error!r}") from error
    try:
        structs._dcgmInit(library or None)  # noqa: SLF001  the bindings' own way to load libdcgm
        agent.dcgmInit()
    except structs.DCGMError as error:
        raise SourceError(
            f"libdcgm cannot be loaded ({error}): the bindings in {location} want the library of the same version;"
            " install datacenter-gpu-manager-4-core, or set dcgm.library to the folder of libdcgm.so.4"
        ) from error
    return Bindings(agent, structs, fields, location)


def connect(bindings: Bindings, address: str, *, timeout_seconds: float) -> Any:
    """Connect to the engine at `address` (see `[dcgm] address`) and return its handle. Raises SourceError."""
    if address == "embedded":
        return _start_embedded(bindings)
    kind, _, target_address = address.partition(":")
    target_address = target_address.removeprefix("//")
    if kind == "vsock" and _VSOCK.fullmatch(target_address):
        return _connect_to(bindings, f"vsock://{target_address}", address, timeout_seconds)
    if kind == "unix" and target_address.startswith("/"):
        return _connect_to(bindings, target_address, address, timeout_seconds)
    found = _TCP.fullmatch(address)
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if kind in ("vsock", "unix") or not found or not 0 < port <= _LAST_PORT:
        raise SourceError(
            f"dcgm.address {address!r} is none of host:port, [IPv6]:port, unix:/path, vsock:CID:PORT, embedded"
        )
    _probe_port(found[1] or found[2], port, address)
    return _connect_to(bindings, address, address, timeout_seconds)


def _start_embedded(bindings: Bindings) -> Any:
    try:
        return bindings.agent.dcgmStartEmbedded(bindings.structs.DCGM_OPERATION_MODE_AUTO)
    except bindings.structs.DCGMError as error:
        raise SourceError(
            f"an embedded host engine cannot be started ({error}): is the NVIDIA driver loaded (`nvidia-smi`)?"
        ) from error


def _probe_port(host: str, port: int, address: str) -> None:
    """Try a TCP connection, because libdcgm takes seconds to fail, with a less clear error. Raises SourceError."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise SourceError(
            f"nothing listens on {address} ({getattr(error, 'strerror', None) or error}): is the host engine running"
            " (`systemctl status nvidia-dcgm`)? Set dcgm.address if it listens elsewhere"
        ) from error


def _connect_to(bindings: Bindings, target: str, address: str, timeout_seconds: float) -> Any:
    """Connect in a thread, because a listener that answers nothing holds libdcgm for much longer than its timeout."""
    call = _connect_call(bindings, target, address, timeout_seconds)
    attempt: Future[Any] = Future()
    with _lock:
        if address in _unanswered:
            raise SourceError(f"the host engine at {address} still does not answer an earlier attempt: it hangs")
        _unanswered.add(address)
    threading.Thread(target=_attempt, args=(call, attempt, address), name="dcgm-connect", daemon=True).start()
    try:
        return attempt.result(timeout_seconds + _GRACE_SECONDS)
    except TimeoutError:
        attempt.add_done_callback(partial(_disconnect, bindings))
        raise SourceError(
            f"the host engine at {address} has not answered for {timeout_seconds:g} s: it hangs, or another program"
            " listens there; try `dcgmi discovery -l`"
        ) from None
    except bindings.structs.DCGMError as error:
        raise SourceError(
            f"the host engine at {address} does not answer ({error}): it hangs, is of another DCGM major version, or"
            " may not be reached from here; try `dcgmi discovery -l`"
        ) from error


_GRACE_SECONDS = 1.0
"""For libdcgm to keep to its own timeout, whose error says more than ours."""
_lock = threading.Lock()
_unanswered: set[str] = set()
"""Addresses with an attempt under way: one at a time, or a listener that hangs would collect threads."""


def _attempt(call: Callable[[], Any], attempt: "Future[Any]", address: str) -> None:
    try:
        attempt.set_result(call())
    except Exception as error:  # noqa: BLE001  the bindings may raise anything; it is raised where it is awaited
        attempt.set_exception(error)
    finally:
        with _lock:
            _unanswered.discard(address)


def _disconnect(bindings: Bindings, attempt: "Future[Any]") -> None:
    """Give back the connection of an attempt that nobody waited for."""
    if attempt.exception() is None:
        with suppress(bindings.structs.DCGMError):
            bindings.agent.dcgmDisconnect(attempt.result())


def _connect_call(bindings: Bindings, target: str, address: str, timeout_seconds: float) -> Callable[[], Any]:
    agent, structs = bindings.agent, bindings.structs
    by_url = target.startswith("vsock:")
    if by_url and not hasattr(agent, "dcgmConnect_v3"):
        raise SourceError(
            f"{address}: vsock needs DCGM 4.5 or later, and the bindings in {bindings.location} are older:"
            " install newer ones, or set dcgm.address to host:port or unix:/path"
        )
    params = structs.c_dcgmConnectV3Params_v1() if by_url else structs.c_dcgmConnectV2Params_v2()
    params.timeoutMs = int(timeout_seconds * 1000)
    params.persistAfterDisconnect = 0  # the engine drops our watches and groups with the connection
    if not by_url:
        params.addressIsUnixSocket = int(address.startswith("unix:"))
    return partial(agent.dcgmConnect_v3 if by_url else agent.dcgmConnect_v2, target, params)


_VERSION = re.compile(r"version:\s*([^;\s]+)")


class DcgmDescription(Struct, frozen=True):
    """Location of the bindings and version of the library; empty if unknown."""

    location: str
    library: str = ""


def describe_dcgm(config: Any) -> DcgmDescription:
    """Load the bindings and their library. Raises SourceError as `open_dcgm` does."""
    bindings = load_bindings(config.dcgm.bindings, config.dcgm.library)
    return DcgmDescription(bindings.location, _version_from(bindings.agent, "dcgmVersionInfo"))


def host_engine_version(config: Any) -> str:
    """Return the version of the host engine; empty if unknown. Raises SourceError if it cannot be reached."""
    bindings = load_bindings(config.dcgm.bindings, config.dcgm.library)
    section = config.dcgm
    handle = connect(bindings, section.address, timeout_seconds=section.connect_timeout_seconds)
    try:
        return _version_from(bindings.agent, "dcgmHostengineVersionInfo", handle)
    finally:
        bindings.agent.dcgmDisconnect(handle)


def _version_from(agent: Any, name: str, *arguments: Any) -> str:
    """Return the version reported by a function that older bindings, or libraries, do not have; else empty."""
    try:
        build_info = getattr(agent, name)(*arguments).rawBuildInfoString
    except Exception:  # noqa: BLE001  optional, and the bindings may raise anything
        return ""
    text = build_info.decode(errors="replace") if isinstance(build_info, bytes) else str(build_info)
    found = _VERSION.search(text)
    return found[1] if found else text
