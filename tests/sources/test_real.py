"""Runs on real hardware those conformance tests that break nothing; skipped, with a reason, where there is none."""

import time
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from exporter.clock import SystemClock
from exporter.config import Config, SamplingSettings
from exporter.core.model import MS, SECOND
from exporter.sources.base import ReadResult, SourceError, TelemetrySource
from exporter.sources.dcgm.source import open_dcgm
from exporter.sources.nvml.source import open_nvml
from tests.sources import conformance
from tests.sources.conformance import START, Law

UNBROKEN: tuple[Law, ...] = (
    conformance.every_device_has_a_name_of_its_own,
    conformance.a_reading_lies_between_what_was_settled_and_this_read,
    conformance.readings_of_one_gpu_never_overlap,
    conformance.reading_the_same_moment_twice_gives_nothing_twice,
    conformance.what_is_seen_was_announced,
    conformance.ratios_and_rates_are_in_range,
    conformance.closing_twice_is_closing_once,
)


class RealTime:
    """A source in real time: it waits, and shifts its times to begin at START."""

    def __init__(self, source: TelemetrySource) -> None:
        self.inner, self.name = source, source.name
        self._clock = SystemClock()
        self._ahead = self._clock.now() - START

    @property
    def signals(self) -> frozenset[str]:
        return self.inner.signals

    def wait(self, until: int) -> None:
        time.sleep(max(0.0, (until + self._ahead - self._clock.now()) / SECOND))

    def read(self, now: int) -> ReadResult:
        batch = self.inner.read(now + self._ahead)
        back = tuple(replace(one, start=one.start - self._ahead, end=one.end - self._ahead) for one in batch.readings)
        settled = None if batch.settled is None else batch.settled - self._ahead
        return replace(batch, readings=back, settled=settled)

    def resync(self) -> None:
        self.inner.resync()

    def pause(self) -> None:
        self.inner.pause()

    def close(self) -> None:
        self.inner.close()


class RealRig:
    """The part of a `Rig` that real hardware allows."""

    def __init__(self, source: TelemetrySource, *, lag: int) -> None:
        self.source, self.lag = RealTime(source), lag

    def run(self, until: int) -> None:
        self.source.wait(until)

    def fail(self, uuid: str) -> None:
        raise NotImplementedError(f"{uuid} is somebody's: no test breaks it")

    def mend(self, uuid: str) -> None:
        raise NotImplementedError(uuid)

    def hide(self, uuid: str) -> str:
        raise NotImplementedError(uuid)


def _opened(opener: Callable[[Config], TelemetrySource], reason: str) -> TelemetrySource:
    try:
        return opener(Config(sampling=SamplingSettings(interval_seconds=1.0)))
    except SourceError as error:
        pytest.skip(f"{reason}: {error}")


@pytest.fixture
def nvml() -> Iterator[RealRig]:
    rig = RealRig(_opened(open_nvml, "needs a GPU"), lag=0)
    yield rig
    rig.source.close()


@pytest.fixture
def dcgm() -> Iterator[RealRig]:
    rig = RealRig(_opened(open_dcgm, "needs libdcgm and a host engine"), lag=SECOND + 500 * MS)
    yield rig
    rig.source.close()


@pytest.mark.parametrize("law", UNBROKEN, ids=lambda law: law.__name__)
def test_nvml_keeps_the_law(law: Law, nvml: RealRig) -> None:
    law(nvml)


@pytest.mark.parametrize("law", UNBROKEN, ids=lambda law: law.__name__)
def test_dcgm_keeps_the_law(law: Law, dcgm: RealRig) -> None:
    law(dcgm)
