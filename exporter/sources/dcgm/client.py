"""Talks to one DCGM host engine: loads NVIDIA's bindings, connects, makes calls and decodes their results.

Contains the table of DCGM fields (names, ids, units) and the meaning of blanks and error codes. A dead connection is a
SourceError, after which the source is reopened; any other error concerns one request only. Uses only the low-level
functions of the bindings: the classes above them call a dead engine from their destructors.
"""

import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import byref, c_uint
from enum import Enum
from importlib import import_module, util
from itertools import count
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from msgspec import Struct

from exporter.sources.base import FP64_BLANK, INT32_BLANK, INT32_LAST_BLANK, SourceError

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
    location = next((location for location in folders if (Path(location) / "dcgm_agent.py").is_file()), None)
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
    try:
        return (agent.dcgmConnect_v3 if by_url else agent.dcgmConnect_v2)(target, params)
    except structs.DCGMError as error:
        raise SourceError(
            f"the host engine at {address} does not answer ({error}): it hangs, is of another DCGM major version, or"
            " may not be reached from here; try `dcgmi discovery -l`"
        ) from error


class Blank(Enum):
    """Why a field has no value."""

    BLANK = "blank"
    NOT_FOUND = "not_found"
    NOT_SUPPORTED = "not_supported"
    NOT_PERMISSIONED = "not_permissioned"
    UNKNOWN_FIELD = "unknown_field"


Value = float | int | str | bytes | Blank


_STATUSES = {-6: Blank.NOT_SUPPORTED, -13: Blank.UNKNOWN_FIELD, -17: Blank.NOT_PERMISSIONED}
"""DCGM_ST_NOT_SUPPORTED, _UNKNOWN_FIELD, _NO_PERMISSION; any other error status means BLANK."""
_INT64_BLANK = 0x7FFFFFFFFFFFFFF0
_KINDS = (Blank.BLANK, Blank.NOT_FOUND, Blank.NOT_SUPPORTED, Blank.NOT_PERMISSIONED)
_TEXTS = {"<<<NOT_FOUND>>>": Blank.NOT_FOUND, "<<<NOT_SUPPORTED>>>": Blank.NOT_SUPPORTED, "<<<NOT_PERM>>>": _KINDS[3]}
_DOUBLE, _STRING, _INTEGERS = ord("d"), ord("s"), (ord("i"), ord("t"))
raw_attribute = object.__getattribute__
"""Reads a member of the bindings' structures; several times faster than their own __getattribute__."""


def decode_value(raw: Any) -> Value:
    """Return the value of a c_dcgmFieldValue_v1 or _v2; a Blank if it has none, or its status is not OK."""
    status = raw_attribute(raw, "status")
    if status:
        return _STATUSES.get(status, Blank.BLANK)
    kind, value = raw_attribute(raw, "fieldType"), raw_attribute(raw, "value")
    if kind == _DOUBLE:
        return _decode_double(raw_attribute(value, "dbl"))
    if kind in _INTEGERS:
        return _decode_integer(raw_attribute(value, "i64"))
    if kind == _STRING:
        return _decode_text(raw_attribute(value, "str"))
    return bytes(raw_attribute(value, "blob"))


def _decode_double(value: float) -> float | Blank:
    if not isfinite(value):
        return Blank.BLANK
    return value if value < FP64_BLANK else _blank_kind(int(value - FP64_BLANK))


def _decode_integer(value: int) -> int | Blank:
    if value >= _INT64_BLANK:
        return _blank_kind(value - _INT64_BLANK)
    if INT32_BLANK <= value <= INT32_LAST_BLANK:
        return _blank_kind(value - INT32_BLANK)
    return value


def _decode_text(value: str | bytes) -> str | Blank:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return _TEXTS.get(text, Blank.BLANK) if text.startswith("<<<") else text


def _blank_kind(offset: int) -> Blank:
    return _KINDS[offset] if offset < len(_KINDS) else Blank.BLANK


EntityId = tuple[int, int]
"""DCGM's (entity group, entity id)."""
LOST_STATUSES = (3, 4, 7)
"""dcgmGetGpuStatus of a GPU that cannot be reached, fell off the bus, or was detached (dcgm_structs.h)."""
_DEAD_CONNECTION = ("connection_not_valid", "uninitialized", "init_error", "timeout", "ver_mismatch")
_numbers = count()
_token = os.urandom(4).hex()


class DcgmRefusal(Exception):  # noqa: N818  the engine's response, not a failure of this program
    """The engine refused a request; `kind` is the name of DCGM's status ("not_supported")."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class DcgmSample(NamedTuple):
    """A value from the engine's cache; `stamp` is Unix microseconds by the engine's clock."""

    entity: EntityId
    field: int
    stamp: int
    value: Value


class GpuInstance(NamedTuple):
    """A MIG GPU instance."""

    entity: EntityId
    gpu: int
    instance_id: int
    """GPU instance id in NVML."""
    slices: int
    """Number of compute slices."""
    compute_instances: tuple[EntityId, ...]


class DcgmClient:
    """The connection to one host engine; not thread-safe."""

    def __init__(self, bindings: Bindings, handle: Any, *, address: str) -> None:
        self._agent, self._structs, self.fields = bindings.agent, bindings.structs, bindings.fields
        self._handle, self.address = handle, address
        prefix = "DCGM_ST_"
        names = (name for name in dir(self._structs) if name.startswith(prefix))
        self._codes = {getattr(self._structs, name): name.removeprefix(prefix).lower() for name in names}
        self.gpu, self.instance = self.fields.DCGM_FE_GPU, self.fields.DCGM_FE_GPU_I
        self._drained: list[DcgmSample] = []
        self._on_values = self._agent.dcgmFieldValueEntityEnumeration_f(self._collect)

    def gpus(self) -> list[int]:
        """Return the ids of all GPUs that the engine lists, including unsupported and lost ones."""
        return list(self._call("list the GPUs", self._agent.dcgmGetAllDevices))

    def status(self, gpu: int) -> int:
        """Return the result of dcgmGetGpuStatus; 1: the GPU works."""
        return int(self._call(f"report the status of GPU {gpu}", self._get_status, gpu))

    def _get_status(self, handle: Any, gpu: int) -> int:
        """Call libdcgm directly: it has the function since DCGM 2, the bindings only since 4.2."""
        status, structs = c_uint(), self._structs
        structs._dcgmCheckReturn(structs._dcgmGetFunctionPointer("dcgmGetGpuStatus")(handle, gpu, byref(status)))  # noqa: SLF001
        return status.value

    def instances(self) -> list[GpuInstance]:
        """Return the GPU instances of all boards."""
        hierarchy = self._call("report the MIG layout", self._agent.dcgmGetGpuInstanceHierarchy)
        rows = [hierarchy.entityList[i] for i in range(hierarchy.count)]
        computes: dict[int, list[EntityId]] = {}
        for row in rows:
            if row.entity.entityGroupId == self.fields.DCGM_FE_GPU_CI:
                computes.setdefault(row.parent.entityId, []).append((row.entity.entityGroupId, row.entity.entityId))
        return [
            GpuInstance(
                entity=(self.instance, row.entity.entityId),
                gpu=row.parent.entityId,
                instance_id=row.info.nvmlInstanceId,
                slices=row.info.nvmlProfileSlices,
                compute_instances=tuple(computes.get(row.entity.entityId, ())),
            )
            for row in rows
            if row.entity.entityGroupId == self.instance
        ]

    def metric_groups(self, gpu: int) -> list[tuple[int, int, list[int]]]:
        """Return (major id, minor id, fields) of the profiling groups; those of one major id exclude each other."""
        result = self._call(
            f"list the profiling groups of GPU {gpu}", self._agent.dcgmProfGetSupportedMetricGroups, gpu
        )
        groups = [result.metricGroups[i] for i in range(result.numMetricGroups)]
        return [(group.majorId, group.minorId, list(group.fieldIds[: group.numFieldIds])) for group in groups]

    def latest(self, entities: Sequence[EntityId], fields: Sequence[int], *, live: bool = False) -> list[DcgmSample]:
        """Read the newest value of each field of each entity in one round trip; `live` bypasses the engine's cache."""
        pairs = [self._structs.c_dcgmGroupEntityPair_t(*entity) for entity in entities]
        flags = self._structs.DCGM_FV_FLAG_LIVE_DATA if live else 0
        function = self._agent.dcgmEntitiesGetLatestValues
        values = self._call("return the latest values", function, pairs, list(fields), flags)
        return [
            DcgmSample(
                (raw_attribute(v, "entityGroupId"), raw_attribute(v, "entityId")),
                raw_attribute(v, "fieldId"),
                raw_attribute(v, "ts"),
                decode_value(v),
            )
            for v in values
        ]

    def drain(self, group: Any, field_group: Any, since: int) -> list[DcgmSample]:
        """Return all cached values of the group's entities stamped `since` (microseconds) or later, oldest first."""
        self._drained = []
        function = self._agent.dcgmGetValuesSince_v2
        self._call("return the values since the last read", function, group, field_group, since, self._on_values, None)
        return self._drained

    def _collect(self, entity_group: int, entity: int, values: Any, number: int, _: Any) -> int:
        for raw in values[:number]:
            self._drained.append(
                DcgmSample(
                    (entity_group, entity), raw_attribute(raw, "fieldId"), raw_attribute(raw, "ts"), decode_value(raw)
                )
            )
        return 0

    def group(self, entities: Iterable[EntityId]) -> Any:
        """Create a group of entities."""
        group_id = self._call(
            "create a group", self._agent.dcgmGroupCreate, self._structs.DCGM_GROUP_EMPTY, _unique_name()
        )
        try:
            for entity in entities:
                self._call(f"add {entity} to a group", self._agent.dcgmGroupAddEntity, group_id, *entity)
        except DcgmRefusal:
            self.unwatch(group_id, ())
            raise
        return group_id

    def field_group(self, fields: Sequence[int]) -> Any:
        """Create a group of fields."""
        return self._call("create a group of fields", self._agent.dcgmFieldGroupCreate, list(fields), _unique_name())

    def supported(self, fields: Sequence[int]) -> list[int]:
        """Return the fields that the engine supports, by bisection: a group with one unknown field is refused."""
        if not fields:
            return []
        try:
            group = self.field_group(fields)
        except DcgmRefusal as refusal:
            if refusal.kind not in ("badparam", "unknown_field"):
                raise
            middle = len(fields) // 2
            return self.supported(fields[:middle]) + self.supported(fields[middle:]) if middle else []
        with suppress(DcgmRefusal):
            self._call("drop a group of fields", self._agent.dcgmFieldGroupDestroy, group)
        return list(fields)

    def watch(self, group: Any, field_group: Any, *, period: int, keep_seconds: float) -> None:
        """Have the engine sample every `period` microseconds, and limit its cache by age and by number of samples.

        A limit of 0 samples would mean no limit, and some versions then do not update profiling fields on Hopper.
        """
        samples = int(keep_seconds * 1_000_000 / period) + 2
        self._call("watch", self._agent.dcgmWatchFields, group, field_group, period, keep_seconds, samples)

    def unwatch(self, group: Any, field_groups: Iterable[Any]) -> None:
        """End the watches of a group and destroy it. Ignores errors, and None, a group that was never created."""
        if group is None:
            return
        for field_group in field_groups:
            with suppress(DcgmRefusal):
                self._call("end a watch", self._agent.dcgmUnwatchFields, group, field_group)
        with suppress(DcgmRefusal):
            self._call("drop a group", self._agent.dcgmGroupDestroy, group)

    def pause(self) -> None:
        """Make the engine release the profiling counters, for all its clients."""
        self._call("pause profiling", self._agent.dcgmProfPause)

    def resume(self) -> None:
        """Make the engine acquire the profiling counters again."""
        self._call("resume profiling", self._agent.dcgmProfResume)

    def close(self) -> None:
        """Disconnect; the engine drops our watches and groups with the connection. Never raises."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        end = self._agent.dcgmStopEmbedded if self.address == "embedded" else self._agent.dcgmDisconnect
        with suppress(self._structs.DCGMError):
            end(handle)

    def _call(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._handle is None:
            raise SourceError(f"DCGM: the connection to {self.address} was closed: open a new one")
        try:
            return call(self._handle, *arguments)
        except self._structs.DCGMError as error:
            kind = self._codes.get(error.value, str(error.value))
            text = f"DCGM at {self.address} failed to {what}: {error} ({kind})"
            if kind in _DEAD_CONNECTION:
                raise SourceError(f"{text}: the connection is dead, a new one is needed") from error
            raise DcgmRefusal(kind, text) from error


def _unique_name() -> str:
    """Return a group name that is unique on the engine; the pid is not enough, as it is 1 in each container."""
    return f"gpu-efficiency-{os.getpid()}-{_token}-{next(_numbers)}"


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
