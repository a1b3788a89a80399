"""What a real host engine does to time, each first a law of the stand-in: seen on DCGM 4.6 with eight H100s.

Values that describe another time than their neighbours, that are blank after a GPU was bound anew, or that end with
the engine's process.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Observation, Reading
from exporter.core.pipeline import advance
from exporter.sources.base import ReadResult, SourceError, TelemetrySource
from exporter.sources.selector import SourceSelector
from tests.dcgm_stub.client import Client
from tests.sources.conformance import START
from tests.sources.dcgm_rig import DcgmRig, gpu_of, rigged, unpacked

CYCLES = {"SM_CYCLES_ELAPSED": 1084, "SM_CYCLES_ACTIVE": 1085, "MMA_CYCLES_ACTIVE": 1086}
"""Counters of DCGM 4.6, which the bindings of older versions do not name."""
TICK = SECOND // 10
FIELDS = UTILIZATION, TENSOR, DRAM, IMMA = 203, 1004, 1005, 1013


@pytest.fixture(scope="session")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("bindings"))


@pytest.fixture
def closed(bindings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DcgmRig]:
    with rigged(bindings, tmp_path, monkeypatch) as rig:
        yield rig


def observed(now: int, batch: ReadResult) -> Observation:
    """What the sampler makes of a read."""
    settled = now if batch.settled is None else min(batch.settled, now)
    return Observation(now, now, settled=settled, devices=batch.devices, readings=batch.readings)


def live(rig: DcgmRig, now: int) -> None:
    """Let the GPUs do until then what the script says: it is read with the next call of the library."""
    rig.run(now)
    rig.stub.count("connections")


class Engine:
    """A client of the engine, with the time in milliseconds since it connected."""

    def __init__(self, rig: DcgmRig) -> None:
        self.stub = rig.stub
        self.stub.unsay("listen /tests/engine")
        self.start = (self.stub.now // 1_000_000 + 1) * 1_000_000
        self.stub.run(self.start)
        self.client = Client(self.stub)

    def run(self, ms: int) -> None:
        """Let the GPUs do until then what the script says."""
        self.stub.run(self.start + ms * 1000)
        self.stub.count("connections")


# -- the driver's utilisation is that of a while ago --


def test_the_drivers_utilization_is_the_mean_of_its_last_window(closed: DcgmRig) -> None:
    """E7."""
    engine = Engine(closed)
    engine.stub.say("driver_window 1000000", "gpu 0 gr 90")
    engine.run(0)
    engine.run(1500)
    assert engine.client.value(UTILIZATION, live=True) == 90
    engine.stub.say("gpu 0 gr 0")
    engine.run(1501)
    engine.run(1999)
    assert engine.client.value(UTILIZATION, live=True) == 90, "read up to a second later"
    engine.run(2500)
    assert engine.client.value(UTILIZATION, live=True) == 45, "a mean over up to a second"
    engine.run(3000)
    assert engine.client.value(UTILIZATION, live=True) == 0


@pytest.mark.parametrize(("period_ms", "window_ms"), [(100, 1000), (1000, 166), (1000, 1000)])
@pytest.mark.parametrize(("busy_ms", "idle_ms"), [(300, 400), (1700, 1700), (2300, 7100)])
def test_idle_moments_beside_busy_ones_are_not_taken_for_counters_at_zero(
    closed: DcgmRig, period_ms: int, window_ms: int, busy_ms: int, idle_ms: int
) -> None:
    """Busy and idle in turn; counters at exactly 0 beside a driver that says busy are the driver's lag."""
    closed.say(f"driver_window {window_ms * 1000}", f"watcher {UTILIZATION} 100")
    closed.open(period=period_ms / 1000)
    ledger = Ledger()
    for ms in range(0, 30_000, 100):
        busy = ms % (busy_ms + idle_ms) < busy_ms
        closed.stub.lines = [line for line in closed.stub.lines if not line.startswith("gpu ")]
        closed.say(*(f"gpu * {key} {90 * busy}" for key in ("gr", "sm", "tensor", "dram", "fp32", "fp16", "int")))
        now = START + ms * (SECOND // 1000)
        live(closed, now)
        if ms % period_ms == period_ms - 100:
            batch = closed.source.read(now)
            advance(ledger, observed(now, batch))
    for gpu in ledger.gpus.values():
        assert gpu.book.paid - sum(gpu.unobserved.values()) > 25 * SECOND
        assert gpu.unobserved["zero_filled"] == 0


# -- another client of the engine on other fields --


def test_another_client_on_other_fields_makes_the_engine_reuse_a_younger_sample(closed: DcgmRig) -> None:
    """E8: A value then describes a time that is shifted or longer than the one between its stamps."""

    def values() -> list[float]:
        groups = engine.client.watch(TENSOR)
        for number in range(8):
            engine.stub.lines = [line for line in engine.stub.lines if not line.startswith("gpu 0 tensor")]
            engine.stub.say(f"gpu 0 tensor {100 * (number % 2)}")
            engine.run(base + number * 1000)
        return [seen.value for seen in engine.client.since(groups)[4:]]

    engine, base = Engine(closed), 0
    assert {round(value, 2) for value in values()} <= {0.0, 1.0}
    engine.stub.say(f"watcher {DRAM} 700")
    base = 10_000
    engine.run(base)
    assert any(0.1 < value < 0.9 for value in values())


def mean_error(rig: DcgmRig, begin: int) -> float:
    """Read once a second while the tensor cores are more or less busy; return how far readings are off, on average."""
    rig.open(at=begin - 5 * SECOND)
    chance, levels, errors = random.Random(7), list[float](), list[float]()  # noqa: S311  a load
    for number in range(600):
        levels.append(chance.choice((0.0, 0.3, 0.9)) if number % 3 == 0 else levels[-1])
        rig.stub.lines = [line for line in rig.stub.lines if not line.startswith("gpu 0 tensor")]
        rig.say(f"gpu 0 tensor {100 * levels[-1]}")
        now = begin + (number + 1) * TICK
        live(rig, now)
        for reading in rig.source.read(now).readings if number % 10 == 9 else ():
            if gpu_of(reading.uuid) == 0 and reading.tensor_active is not None and number > 200:
                errors.append(abs(reading.tensor_active - mean_level(levels, begin, reading)))
    rig.source.close()
    assert len(errors) > 30
    return sum(errors) / len(errors)


def mean_level(levels: list[float], begin: int, reading: Reading) -> float:
    """Return the true mean over the reading's time, of levels that each last a tick."""
    spans = ((begin + n * TICK, begin + (n + 1) * TICK, level) for n, level in enumerate(levels))
    shared = ((min(reading.end, end) - max(reading.start, start), level) for start, end, level in spans)
    return sum(max(0, time) * level for time, level in shared) / (reading.end - reading.start)


def test_cycle_counters_describe_the_readings_own_time_whoever_else_samples(
    closed: DcgmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean that the engine computes from a younger sample is off; a difference of counters is not."""
    closed.say(f"watcher {IMMA} 700")
    without = mean_error(closed, START)
    for name, field in CYCLES.items():
        monkeypatch.setattr(closed.bindings.fields, f"DCGM_FI_PROF_{name}_TOTAL", field, raising=False)
        closed.say(f"knows {field}")
    assert without > 0.03
    assert mean_error(closed, START + 100 * SECOND) < without / 3


# -- GPUs that were unbound and bound again --


def test_a_gpu_bound_anew_is_blank_until_the_driver_has_values_of_it(closed: DcgmRig) -> None:
    engine = Engine(closed)
    groups = engine.client.watch(TENSOR, UTILIZATION)
    engine.run(5000)
    engine.stub.say(f"gpu 0 bound {engine.start + 8_500_000}")
    engine.run(12_500)
    values = {field: [seen.value for seen in engine.client.since(groups) if seen.field == field] for field in FIELDS}
    assert [value > 1e9 for value in values[TENSOR]][-7:] == [True] * 3 + [False] * 4
    assert [value > 1e9 for value in values[UTILIZATION]][-7:] == [True] * 3 + [False] * 4


@pytest.mark.parametrize("blank_seconds", [2.5, 4.0])
def test_after_a_gpu_was_bound_anew_all_are_blank_for_seconds_and_right_again(
    closed: DcgmRig, blank_seconds: float
) -> None:
    """No time is idle or busy meanwhile, and no engine is called blind."""
    closed.open()
    closed.readings(0, 1, 2)
    until = (closed.stub.now + round(blank_seconds * 1e6)) // 1000 * 1000
    closed.say("gpu 0 index 1", "gpu 1 index 0", f"gpu * bound {until}")
    batches = [closed.read(3 + number / 2) for number in range(40)]
    assert {gpu_of(device.uuid): device.index for device in batches[-1].devices} == {0: "1", 1: "0"}
    readings = [reading for batch in batches for reading in batch.readings if gpu_of(reading.uuid) == 0]
    blank = sum(reading.end - reading.start for reading in readings if reading.distrust == "blank")
    assert (blank_seconds - 2) * SECOND <= blank <= blank_seconds * SECOND
    seen = [reading for reading in readings if not reading.distrust]
    assert all(reading.gr_engine_active == pytest.approx(0.9) for reading in seen)
    assert all(one.end <= two.start for one, two in pairwise(readings))
    assert sum(reading.end - reading.start for reading in seen) >= (20 - blank_seconds - 4) * SECOND
    assert {fault.kind for batch in batches for fault in batch.faults} == set()


# -- an engine that is killed and back at once --


def test_an_engine_that_is_back_at_once_is_read_again_within_three_seconds(closed: DcgmRig) -> None:
    """E14."""

    def opened(_: str) -> TelemetrySource:
        return closed.open(at=closed.clock.now())

    ladder, seen = SourceSelector(("dcgm",), opened, chance=lambda: 0.5), list[Reading]()
    for number in range(60):
        now = START + number * TICK * 5
        live(closed, now)
        if number == 20:
            closed.stub.restart()
        with suppress(SourceError):
            seen += [one for one in ladder.read(now).readings if gpu_of(one.uuid) == 0]
    gaps = [two.start - one.end for one, two in pairwise(seen)]
    assert sum(gap > 0 for gap in gaps) == 1, "the restart is noticed, once"
    assert max(gaps) <= 3 * SECOND
    assert seen[-1].end > START + 28 * SECOND
