"""A source, a scheduler and a serving engine that answer at once: what rows of the registries in `registered` name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exporter.checkup.base import OK, CheckContext, Finding, Findings
from exporter.core.model import Allocation, Device, Owner, Reading
from exporter.engines.base import Engine, EngineMetrics
from exporter.engines.page import MetricsPage
from exporter.schedulers.base import Member, SchedulerState
from exporter.sources.base import ReadResult

DEVICE = Device("GPU-0", "0", "NVIDIA H100 80GB HBM3", None)


class DummySource:
    """One GPU without a reading."""

    name = "dummy-source"
    signals = frozenset({"tensor_active", "processes"})

    def read(self, now: int) -> ReadResult:
        return ReadResult((DEVICE,), (Reading(uuid="GPU-0", start=now - 10**9, end=now),))

    def resync(self) -> None: ...

    def pause(self) -> None: ...

    def close(self) -> None: ...


def open_source(config: Any) -> DummySource:
    assert config.dummy_source.answer == 42
    return DummySource()


def check_source(context: CheckContext, _: Findings) -> Iterator[Finding]:
    if context.tries_source("dummy-source"):
        yield Finding("telemetry", "dummy-source", OK, "the dummy source answers")


class DummyScheduler:
    """One job on everything."""

    name = "dummy-scheduler"

    def __init__(self, node: str) -> None:
        self.node = node

    def poll(self, now: int, devices: Sequence[Device], _: Sequence[Reading]) -> SchedulerState:
        return SchedulerState(tuple(Allocation(d.uuid, Owner(job_id="j"), now) for d in devices), now)

    def members(self, _: Sequence[int]) -> Mapping[int, Member]:
        return {}

    def update(self, rules: object) -> None: ...

    def close(self) -> None: ...


def open_scheduler(config: Any) -> DummyScheduler:
    return DummyScheduler(config.dummy_scheduler.node)


def check_scheduler(context: CheckContext, _: Findings) -> Iterator[Finding]:
    yield Finding("jobs", "dummy-scheduler", OK, f"this is {open_scheduler(context.config).node}")


def _read(page: MetricsPage, _: str) -> EngineMetrics:
    return EngineMetrics("dummy", running=page.total("dummy_running"))


ENGINE = Engine("dummy", ("dummy_",), re.compile("dummy-serve"), _read)
