"""A client of the stand-in's engine, through the flat layer of NVIDIA's bindings: what a test says in one line."""

import ctypes
from typing import Any, NamedTuple

import pytest

from tests.dcgm_stub.stub import START_US, Stub

GPU, INSTANCE, COMPUTE = 1, 4, 5
"""DCGM_FE_GPU, DCGM_FE_GPU_I, DCGM_FE_GPU_CI."""
S = 1_000_000
"""One second of the engine's clock, in microseconds."""


class Seen(NamedTuple):
    """One value as a client sees it; `at` is microseconds after the world began."""

    entity: tuple[int, int]
    field: int
    at: int
    status: int
    value: Any


def seen_value(entity: tuple[int, int], raw: Any) -> Seen:
    """What a c_dcgmFieldValue_v1 or _v2 holds, as its type has it."""
    value = getattr(raw.value, {"d": "dbl", "s": "str"}.get(chr(raw.fieldType), "i64"))
    return Seen(entity, raw.fieldId, raw.ts - START_US if raw.ts else 0, raw.status, value)


class Client:
    """One connection through the flat layer of the bindings."""

    def __init__(self, stub: Stub, *, persist: bool = False) -> None:
        self.stub = stub
        self.handle = stub.connect(persist=persist)
        self.made = 0

    def __getattr__(self, name: str) -> Any:
        """A function of dcgm_agent on this connection."""
        function = getattr(self.stub.agent, name)
        return lambda *arguments: function(self.handle, *arguments)

    def group(self, *entities: tuple[int, int]) -> Any:
        made = self.dcgmGroupCreate(1, "group")
        for entity in entities or ((GPU, 0),):
            self.dcgmGroupAddEntity(made, *entity)
        return made

    def field_group(self, *fields: int) -> Any:
        self.made += 1
        return self.dcgmFieldGroupCreate(list(fields), f"{self.handle.value}-{self.made}")

    def watch(
        self, *fields: int, entities: tuple[tuple[int, int], ...] = ((GPU, 0),), us: int = S, keep: float = 60.0
    ) -> tuple[Any, Any]:
        """Watch and give the groups; `us` microseconds is the period."""
        groups = self.group(*entities), self.field_group(*fields)
        self.dcgmWatchFields(*groups, us, keep, 0)
        return groups

    def since(self, groups: tuple[Any, Any], since: int = 0) -> list[Seen]:
        ear = self.ear()
        self.next = self.dcgmGetValuesSince_v2(*groups, since, ear, None)
        return self.heard

    def latest(self, *fields: int, entity: tuple[int, int] = (GPU, 0), live: bool = False) -> list[Seen]:
        pair = self.stub.structs.c_dcgmGroupEntityPair_t(*entity)
        return [
            seen_value((raw.entityGroupId, raw.entityId), raw)
            for raw in self.dcgmEntitiesGetLatestValues([pair], list(fields), int(live))
        ]

    def value(self, field: int, **entity: Any) -> Any:
        """The newest value of a field, which must have one."""
        (seen,) = self.latest(field, **entity)
        assert seen.status == 0
        return seen.value

    def status(self, gpu: int) -> int:
        """`dcgmGetGpuStatus`, which this version's bindings do not wrap."""
        status = ctypes.c_int()
        code = self.stub.structs._dcgmGetFunctionPointer("dcgmGetGpuStatus")(self.handle, gpu, ctypes.byref(status))
        self.stub.structs._dcgmCheckReturn(code)
        return status.value

    def ear(self) -> Any:
        """A callback that collects in `heard` what it is told from now on."""
        self.heard: list[Seen] = []

        def hear(group: int, entity: int, values: Any, number: int, _: Any) -> int:
            self.heard += [seen_value((group, entity), raw) for raw in values[:number]]
            return 0

        self.kept = self.stub.agent.dcgmFieldValueEntityEnumeration_f(hear)
        return self.kept

    def refusal(self, name: str, *arguments: Any) -> int:
        """The code that a function fails with."""
        with pytest.raises(self.stub.structs.DCGMError) as refused:
            getattr(self, name)(*arguments)
        return int(refused.value.value)
