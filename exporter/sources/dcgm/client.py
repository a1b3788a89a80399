"""Makes calls to one DCGM host engine and decodes their results: values, blanks and error codes.

A dead connection is a SourceError, after which the source is reopened; any other error concerns one request only. Uses
only the low-level functions of the bindings: the classes above them call a dead engine from their destructors.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import byref, c_double, c_uint, sizeof
from enum import Enum
from itertools import count
from math import isfinite
from struct import Struct as Layout
from typing import Any, NamedTuple

from msgspec import Struct

from exporter.sources.base import FP64_BLANK, INT32_BLANK, INT32_LAST_BLANK, SourceError
from exporter.sources.dcgm.connection import Bindings


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


_HEAD = "=4xIIHhi4xq"
"""A c_dcgmFieldValue_v2 up to its value: entity group and id, field, type, status, time stamp (dcgm_structs.h)."""


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
LOST_STATUSES = (3, 4)
"""dcgmGetGpuStatus of a GPU that cannot be reached, or fell off the bus (dcgm_structs.h)."""
DETACHED_STATUS = 7
"""Of a GPU that was detached or unbound on purpose."""
_DEAD_CONNECTION = ("connection_not_valid", "uninitialized", "init_error", "timeout", "ver_mismatch")
_numbers = count()
_token = os.urandom(4).hex()


class DcgmRefusal(Exception):  # noqa: N818  the engine's response, not a failure of this program
    """The engine refused a request; `kind` is the name of DCGM's status ("not_supported")."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class DcgmSample(Struct, frozen=True, gc=False):
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
        head = Layout(_HEAD).size
        rest = sizeof(self._structs.c_dcgmFieldValue_v2) - head - sizeof(c_double)
        self._integers, self._doubles = Layout(f"{_HEAD}q{rest}x"), Layout(f"={head}xd{rest}x")
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
        return list(self._samples(values))

    def _samples(self, values: Any) -> Iterator[DcgmSample]:
        """Decode an array of c_dcgmFieldValue_v2. Nearly all are numbers, which its bytes give five times faster."""
        raw = memoryview(values).cast("B")
        both = zip(self._integers.iter_unpack(raw), self._doubles.iter_unpack(raw), strict=True)
        for place, ((group, entity, field, kind, status, stamp, integer), (double,)) in enumerate(both):
            if kind == _DOUBLE and not status and 0.0 <= double < FP64_BLANK:
                value: Value = double
            elif kind in _INTEGERS and not status and 0 <= integer < INT32_BLANK:
                value = integer
            else:
                value = decode_value(values[place])
            yield DcgmSample((group, entity), field, stamp, value)

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
            self.drop_group(group_id)
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

    def unwatch(self, group: Any, field_group: Any) -> None:
        """End a watch. Ignores errors."""
        with suppress(DcgmRefusal):
            self._call("end a watch", self._agent.dcgmUnwatchFields, group, field_group)

    def drop_group(self, group: Any) -> None:
        """Destroy a group of entities. Ignores errors."""
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
