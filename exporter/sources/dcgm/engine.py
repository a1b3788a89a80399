"""One connection to a host engine: what is asked over it, and what its errors mean.

Owns the handle, groups and watches. Refuses to keep values. A handle whose engine was restarted stays dead for ever:
every such error is a SourceError, upon which the source is opened anew; any other is a `Refusal` of that one question.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import byref, c_uint
from itertools import count
from typing import Any, NamedTuple

from exporter.sources import SourceError
from exporter.sources.dcgm.bindings import Bindings
from exporter.sources.dcgm.fields import Value, decoded, plain

Entity = tuple[int, int]
"""DCGM's (entity group, entity id)."""
LOST = (3, 4, 7)
"""dcgmGetGpuStatus of a GPU that cannot be reached, fell off the bus, or was detached (dcgm_structs.h)."""
_DEAD = ("connection_not_valid", "uninitialized", "init_error", "timeout", "ver_mismatch")
_numbers = count()
_token = os.urandom(4).hex()


class Refusal(Exception):  # noqa: N818  an answer, not a failure of ours
    """The engine declined one question; `kind` is DCGM's name of the reason ("not_supported")."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Sample(NamedTuple):
    """One value of the engine's cache; `at` is its own clock, microseconds since 1970."""

    entity: Entity
    field: int
    at: int
    value: Value


class Instance(NamedTuple):
    """A MIG GPU instance."""

    entity: Entity
    gpu: int
    number: int
    """The instance's id in NVML."""
    slices: int
    computes: tuple[Entity, ...]
    """Its compute instances."""


class Engine:
    """Asks one host engine; not thread-safe."""

    def __init__(self, bindings: Bindings, handle: Any, *, address: str) -> None:
        self._agent, self._structs, self.fields = bindings.agent, bindings.structs, bindings.fields
        self._handle, self.address = handle, address
        prefix = "DCGM_ST_"
        names = (name for name in dir(self._structs) if name.startswith(prefix))
        self._codes = {getattr(self._structs, name): name.removeprefix(prefix).lower() for name in names}
        self.gpu, self.instance = self.fields.DCGM_FE_GPU, self.fields.DCGM_FE_GPU_I
        self._heard: list[Sample] = []
        self._ear = self._agent.dcgmFieldValueEntityEnumeration_f(self._hear)

    def gpus(self) -> list[int]:
        """Ids of all GPUs the engine knows, supported or not, lost ones included."""
        return list(self._ask("list the GPUs", self._agent.dcgmGetAllDevices))

    def status(self, gpu: int) -> int:
        """dcgmGetGpuStatus: 1 is well."""
        return int(self._ask(f"tell the status of GPU {gpu}", self._get_status, gpu))

    def _get_status(self, handle: Any, gpu: int) -> int:
        """Ask by hand: the library has had the function since DCGM 2, the bindings only since 4.2."""
        status, structs = c_uint(), self._structs
        structs._dcgmCheckReturn(structs._dcgmGetFunctionPointer("dcgmGetGpuStatus")(handle, gpu, byref(status)))  # noqa: SLF001
        return status.value

    def instances(self) -> list[Instance]:
        """The MIG layout of all boards."""
        hierarchy = self._ask("tell the MIG layout", self._agent.dcgmGetGpuInstanceHierarchy)
        rows = [hierarchy.entityList[i] for i in range(hierarchy.count)]
        computes: dict[int, list[Entity]] = {}
        for row in rows:
            if row.entity.entityGroupId == self.fields.DCGM_FE_GPU_CI:
                computes.setdefault(row.parent.entityId, []).append((row.entity.entityGroupId, row.entity.entityId))
        return [
            Instance(
                entity=(self.instance, row.entity.entityId),
                gpu=row.parent.entityId,
                number=row.info.nvmlInstanceId,
                slices=row.info.nvmlProfileSlices,
                computes=tuple(computes.get(row.entity.entityId, ())),
            )
            for row in rows
            if row.entity.entityGroupId == self.instance
        ]

    def metric_groups(self, gpu: int) -> list[tuple[int, int, list[int]]]:
        """(major id, minor id, fields) of the profiling groups; those of one major id cannot be watched together."""
        answer = self._ask(f"GPU {gpu}: tell its profiling groups", self._agent.dcgmProfGetSupportedMetricGroups, gpu)
        groups = [answer.metricGroups[i] for i in range(answer.numMetricGroups)]
        return [(group.majorId, group.minorId, list(group.fieldIds[: group.numFieldIds])) for group in groups]

    def latest(self, entities: Sequence[Entity], fields: Sequence[int], *, live: bool = False) -> list[Sample]:
        """The newest value of each field of each entity, in one round trip; `live` asks the driver, not the cache."""
        pairs = [self._structs.c_dcgmGroupEntityPair_t(*entity) for entity in entities]
        flags = self._structs.DCGM_FV_FLAG_LIVE_DATA if live else 0
        ask = self._agent.dcgmEntitiesGetLatestValues
        values = self._ask("give the latest values", ask, pairs, list(fields), flags)
        return [
            Sample((plain(v, "entityGroupId"), plain(v, "entityId")), plain(v, "fieldId"), plain(v, "ts"), decoded(v))
            for v in values
        ]

    def drain(self, group: Any, field_group: Any, since: int) -> list[Sample]:
        """Every cached value of the group's entities stamped `since` (microseconds) or later, oldest first."""
        self._heard = []
        ask = self._agent.dcgmGetValuesSince_v2
        self._ask("give the values since the last read", ask, group, field_group, since, self._ear, None)
        return self._heard

    def _hear(self, entity_group: int, entity: int, values: Any, number: int, _: Any) -> int:
        for raw in values[:number]:
            self._heard.append(Sample((entity_group, entity), plain(raw, "fieldId"), plain(raw, "ts"), decoded(raw)))
        return 0

    def group(self, entities: Iterable[Entity]) -> Any:
        """A new group of entities."""
        made = self._ask("make a group", self._agent.dcgmGroupCreate, self._structs.DCGM_GROUP_EMPTY, _name())
        try:
            for entity in entities:
                self._ask(f"put {entity} into a group", self._agent.dcgmGroupAddEntity, made, *entity)
        except Refusal:
            self.unwatch(made, ())
            raise
        return made

    def field_group(self, fields: Sequence[int]) -> Any:
        """A new group of fields."""
        return self._ask("make a group of fields", self._agent.dcgmFieldGroupCreate, list(fields), _name())

    def known(self, fields: Sequence[int]) -> list[int]:
        """Those of the fields that this engine has: an older one than the bindings lacks some, and refuses them all."""
        if not fields:
            return []
        try:
            group = self.field_group(fields)
        except Refusal as refusal:
            if refusal.kind not in ("badparam", "unknown_field"):
                raise
            middle = len(fields) // 2
            return self.known(fields[:middle]) + self.known(fields[middle:]) if middle else []
        with suppress(Refusal):
            self._ask("drop a group of fields", self._agent.dcgmFieldGroupDestroy, group)
        return list(fields)

    def watch(self, group: Any, field_group: Any, *, period: int, keep_seconds: float) -> None:
        """Have the engine sample every `period` microseconds; the cache is bounded by age and by number.

        A bound of 0 samples means none, and keeps some versions from updating profiling fields on Hopper.
        """
        samples = int(keep_seconds * 1_000_000 / period) + 2
        self._ask("watch", self._agent.dcgmWatchFields, group, field_group, period, keep_seconds, samples)

    def unwatch(self, group: Any, field_groups: Iterable[Any]) -> None:
        """End the watches of a group and drop it; what fails is gone already, as is a group that was never made."""
        if group is None:
            return
        for field_group in field_groups:
            with suppress(Refusal):
                self._ask("end a watch", self._agent.dcgmUnwatchFields, group, field_group)
        with suppress(Refusal):
            self._ask("drop a group", self._agent.dcgmGroupDestroy, group)

    def pause(self) -> None:
        """Have the engine let go of the profiling counters, for all its clients."""
        self._ask("pause profiling", self._agent.dcgmProfPause)

    def resume(self) -> None:
        """Have it take them again."""
        self._ask("resume profiling", self._agent.dcgmProfResume)

    def close(self) -> None:
        """Disconnect; the engine drops our watches and groups with the connection. Never raises."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        end = self._agent.dcgmStopEmbedded if self.address == "embedded" else self._agent.dcgmDisconnect
        with suppress(self._structs.DCGMError):
            end(handle)

    def _ask(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._handle is None:
            raise SourceError(f"DCGM: the connection to {self.address} was closed: open a new one")
        try:
            return call(self._handle, *arguments)
        except self._structs.DCGMError as error:
            kind = self._codes.get(error.value, str(error.value))
            text = f"DCGM at {self.address} would not {what}: {error} ({kind})"
            if kind in _DEAD:
                raise SourceError(f"{text}: the connection is dead, a new one is needed") from error
            raise Refusal(kind, text) from error


def _name() -> str:
    """Unique on the engine, and telling whose it is: in containers every agent may be process 1."""
    return f"gpu-efficiency-{os.getpid()}-{_token}-{next(_numbers)}"
