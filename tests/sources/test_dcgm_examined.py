"""Tests the DCGM source as a black box: random workloads against their ground truth, and every kind of failure.

Uses NVIDIA's real bindings over the stand-in `libdcgm.so.4`, and relies on nothing that the source claims.
"""

import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.config import load as load_config
from exporter.core.ledger import Ledger, conserved
from exporter.core.model import MS, SECOND, Device, Observation, Reading
from exporter.core.pipeline import advance
from exporter.sources.base import ReadResult, SourceError
from exporter.sources.cycles import CycleCounters
from exporter.sources.dcgm.client import Blank, DcgmClient, Value
from exporter.sources.dcgm.connection import BINDINGS_PATHS, Bindings, connect, load_bindings
from exporter.sources.dcgm.intervals import SampleSeries
from exporter.sources.dcgm.source import DcgmSource, HostEngineClock, open_dcgm
from exporter.sources.dcgm_fields import CYCLES, GAUGES, HEALTH, RATES, RATIOS, STATIC, VISIBLE
from tests.clocks import JumpClock
from tests.dcgm_stub.stub import MODULES, Stub, stand_in
from tests.sources.dcgm_rig import unpacked

ADDRESS = "unix:/tests/engine"
WALL = 1_700_000_000 * SECOND
FIELDS = {1001: "gr_engine_active", 1002: "sm_active", 1004: "tensor_active", 1005: "dram_active", 1007: "fp32_active"}
KEYS = ("gr", "sm", "tensor", "dram", "fp32")
"""What the script calls them."""
UNITS = ("GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001")


class World:
    """The stand-in with two GPUs, a common clock, and the source."""

    def __init__(self, stub: Stub, bindings: Bindings) -> None:
        self.stub, self.bindings = stub, bindings
        self.clock = JumpClock(1000 * SECOND, wall=WALL)
        self.start()

    def start(self, *lines: str) -> None:
        """Start another engine with other GPUs; the clock continues."""
        self.stub.lines = [f"listen {ADDRESS.removeprefix('unix:')}", *lines]
        self.stub.restart()
        self.wait(0)

    def wait(self, ms: int) -> None:
        self.clock._now += ms * MS
        self.stub.run(self.clock.wall() // 1000)

    def open(self, period: float = 1.0) -> DcgmSource:
        handle = connect(self.bindings, ADDRESS, timeout_seconds=1.0)
        engine = DcgmClient(self.bindings, handle, address=ADDRESS)
        self.source = DcgmSource(engine, period_seconds=period, clock=self.clock)
        return self.source

    def read(self, ms: int = 1000) -> ReadResult:
        """Wait, then read."""
        self.wait(ms)
        return self.source.read(self.clock.now())

    def reads(self, times: int, ms: int = 1000, gpu: int = 0) -> list[Reading]:
        """Return the readings of one GPU from that many reads."""
        return [reading for _ in range(times) for reading in self.read(ms).readings if reading.uuid == UNITS[gpu]]

    def left(self) -> list[int]:
        """Return the numbers of connections, groups, field groups and watches on the engine."""
        return [self.stub.count(what) for what in ("connections", "groups", "field_groups", "watches")]


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("bindings"))


@pytest.fixture(name="world")
def _world(bindings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with stand_in(tmp_path, monkeypatch, bindings) as stub:
        world = World(stub, load_bindings(str(bindings), str(stub.folder)))
        yield world
        if hasattr(world, "source"):
            world.source.close()


# -- random worlds against their own truth --

LEVELS = st.sampled_from([(90, 60, 40, 30, 10), (5, 4, 0, 3, 1), (100, 100, 100, 100, 100), (50, 20, 10, 80, 0)])
"""Of FIELDS, in their order."""
WATCHERS = st.dictionaries(
    st.sampled_from(list(FIELDS)), st.sampled_from([50, 80, 130, 300, 453, 700, 1500]), max_size=3
)
LATE = st.dictionaries(st.sampled_from(list(FIELDS)), st.integers(10, 1500), max_size=1)


class Truth:
    """The ground truth of GPU 0, and a ledger that is fed by the source."""

    def __init__(self, world: World) -> None:
        self.world, self.ledger = world, Ledger()
        self.levels: list[tuple[int, tuple[int, ...]]] = []
        self.floor = world.clock.now()
        self.ends = dict.fromkeys(UNITS, self.floor)
        self.devices: tuple[Device, ...] | None = None
        self.told: dict[str, list[Reading]] = {uuid: [] for uuid in UNITS}

    def work(self, levels: tuple[int, ...]) -> None:
        """Set how busy GPU 0 is from now on."""
        before = self.levels[-1][1] if self.levels else ()
        self.world.stub.unsay(*_busy(before))
        self.world.stub.say(*_busy(levels))
        self.levels.append((self.world.clock.now(), levels))

    def integral(self, place: int, start: int, end: int) -> float:
        """Integrate the field with that index over [start, end), nanoseconds."""
        spans = pairwise([*self.levels, (end, ())])
        return sum(max(0, min(b, end) - max(a, start)) * levels[place] / 100 for (a, levels), (b, _) in spans)

    def hear(self, batch: ReadResult) -> None:
        """Check the invariants of a result, then pass it to the ledger as the sampler does."""
        now = self.world.clock.now()
        for reading in batch.readings:
            assert self.floor <= reading.start < reading.end <= now
            assert reading.start >= self.ends[reading.uuid]
            self.ends[reading.uuid] = reading.end
            self.told[reading.uuid].append(reading)
        assert batch.settled is not None
        assert self.floor <= batch.settled <= now
        self.floor = batch.settled
        self.take_in(batch.settled, batch)

    def hears(self, times: int) -> None:
        """Read that many times, a second apart."""
        for _ in range(times):
            self.hear(self.world.read())

    def take_in(self, settled: int, batch: ReadResult | None) -> None:
        now, wall = self.world.clock.now(), self.world.clock.wall()
        batch = batch or ReadResult(self.devices or ())
        changed = batch.devices if batch.devices != self.devices else None
        self.devices = batch.devices
        advance(self.ledger, Observation(now, wall, batch.readings, settled, changed, faults=batch.faults))
        assert all(conserved(gpu.book) for gpu in self.ledger.gpus.values())
        assert not self.ledger.rejected.keys() & {"overlap", "bad_interval", "future", "unknown_gpu", "clock_step"}


def _busy(levels: tuple[int, ...]) -> list[str]:
    return [f"gpu 0 {key} {level}" for key, level in zip(KEYS, levels, strict=True)] if levels else []


class Peace(NamedTuple):
    """Other clients of the engine, and how busy GPU 0 is from read to read."""

    steps: list[tuple[tuple[int, ...], int]]
    """Levels, and milliseconds until the next read."""
    watchers: dict[int, int]
    """Another client's periods, milliseconds by field."""
    late: dict[int, int]
    jitter: int
    period: int
    """Ours, milliseconds."""


STEPS = st.lists(st.tuples(LEVELS, st.integers(40, 3000)), min_size=1, max_size=20)
PEACE = st.builds(Peace, STEPS, WATCHERS, LATE, st.integers(0, 30_000), st.sampled_from([200, 1000]))


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(peace=PEACE)
def test_in_peace_every_moment_is_told_once_and_as_it_was(world: World, peace: Peace) -> None:
    """On a board before Hopper, each value is the mean since the one before, for all clients."""
    steps, period = peace.steps, peace.period
    watchers = [f"watcher {field} {ms}" for field, ms in peace.watchers.items()]
    late = [f"late {field} {min(ms, period * 3 // 2)}" for field, ms in peace.late.items()]
    world.start("gpu * gpm 0", f"jitter {peace.jitter}", *watchers, *late)
    truth = Truth(world)
    world.open(period / 1000)
    idle, rest = (5, 4, 0, 3, 1), steps[-1][0]
    for levels, wait in [*[(idle, period)] * 6, *steps, *[(rest, period)] * 8]:
        truth.work(levels)
        truth.hear(world.read(wait))
    ours = truth.told[UNITS[0]]
    assert all(one.end == two.start for one, two in pairwise(ours))
    assert world.clock.now() - ours[-1].end <= (4 * period + 700) * MS
    assert not any(reading.distrust for reading in ours[1:])
    changes = sum(one != two for one, two in pairwise([idle, *(levels for levels, _ in steps)]))
    for place, name in enumerate(FIELDS.values()):
        known = [(r.end - r.start, value) for r in ours[1:] if (value := getattr(r, name)) is not None]
        assert len(known) == len(ours) - 1, name
        told = sum(lasted * value for lasted, value in known)
        real = truth.integral(place, ours[1].start, ours[-1].end)
        # Boundaries are on whole milliseconds: each change of level may be a little off at either end.
        assert told == pytest.approx(real, abs=(1 + 3 * changes) * MS), name


TROUBLES = (
    *("gpu 0 lost", "gpu 0 stuck", "gpu 0 gone", "gpu 0 detached", "paused 1", "gpu 0 status 1001 -14"),
    *(
        f"gpu 0 blank {field} {kind}"
        for field in (1001, 1004)
        for kind in ("blank", "not_supported", "not_permissioned")
    ),
    "gpu 0 error dcgmGetValuesSince_v2 -3",
)
EVENTS = st.one_of(st.sampled_from(TROUBLES), st.sampled_from(["", "", "resync", "pause", "drop", "restart", "clock"]))
NODE = ("paused 1", "resync", "pause", "drop", "restart", "clock")
"""What the other GPU feels, too."""


def befall(world: World, event: str) -> None:
    """Cause the failure; it lasts until it is reverted."""
    if event == "restart":
        world.stub.restart()
    elif event == "drop":
        world.stub.drop()
    elif event == "clock":
        world.clock.step_wall(4 * SECOND)
    elif event in ("resync", "pause"):
        getattr(world.source, event)()
    elif event:
        world.stub.say(event)


def seen(world: World, truth: Truth, wait: int) -> None:
    """Read; if the connection is dead, reconnect, as the selector does."""
    try:
        truth.hear(world.read(wait))
    except SourceError:
        truth.take_in(world.clock.now(), None)
        world.source.close()
        world.open()


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(EVENTS, st.integers(1, 6), st.integers(100, 2500)), min_size=1, max_size=6),
    watchers=WATCHERS,
    late=LATE,
    gpm=st.booleans(),
)
def test_whatever_befalls_one_gpu_the_books_balance_the_other_goes_on_and_both_come_back(
    world: World, steps: list[tuple[str, int, int]], watchers: dict[int, int], late: dict[int, int], gpm: bool
) -> None:
    world.start(f"gpu * gpm {int(gpm)}", *(f"watcher {f} {p}" for f, p in watchers.items()))
    world.stub.say(*(f"late {field} {min(by, 1000)}" for field, by in late.items()))
    truth = Truth(world)
    world.open()
    for _ in range(5):
        seen(world, truth, 1000)
    for event, times, wait in steps:
        befall(world, event)
        for _ in range(times):
            seen(world, truth, wait)
        world.stub.unsay(event)
    mended = world.clock.now()
    for _ in range(8):
        seen(world, truth, 1000)
    for uuid in UNITS:
        back = [r.start for r in truth.told[uuid] if r.end > mended and r.gr_engine_active is not None]
        assert back, uuid
        assert back[0] <= mended + 2 * SECOND, (back[0] - mended) / SECOND
        assert world.clock.now() - truth.told[uuid][-1].end <= 4 * SECOND
    if not any(event in NODE for event, _, _ in steps):
        other = truth.told[UNITS[1]]
        assert all(one.end == two.start for one, two in pairwise(other))
        assert not any(reading.distrust for reading in other[1:])
    assert world.stub.count("connections") == 1
    assert world.stub.count("groups") == 2
    world.source.close()
    assert world.left() == [0, 0, 0, 0]


# -- GPUs in trouble --


@pytest.mark.parametrize(
    ("state", "kind", "words", "name"),
    [
        ("lost", "gpu_lost", "dmesg", "unknown-0"),
        ("unsupported", "profiling_refused", "DCGM does not support this board", UNITS[0]),
        ("error dcgmWatchFields -24", "profiling_refused", "max_limit", UNITS[0]),
    ],
)
def test_a_gpu_that_cannot_be_watched_does_not_hide_the_others(
    world: World, state: str, kind: str, words: str, name: str
) -> None:
    """dcgmGroupAddEntity returns GPU_IS_LOST or GPU_NOT_SUPPORTED."""
    world.start(f"gpu 0 {state}")
    world.open()
    batches = [world.read() for _ in range(30)]
    assert {r.uuid for batch in batches for r in batch.readings} == {UNITS[1]}
    assert {fault.kind for batch in batches for fault in batch.faults} == {kind}
    assert all(words in fault.message for batch in batches for fault in batch.faults)
    assert batches[0].devices[0].uuid == name
    assert world.stub.count("groups") == 1
    world.stub.unsay(f"gpu 0 {state}")
    back = world.reads(15)
    assert back[-1].tensor_active
    assert [device.uuid for device in world.read().devices] == list(UNITS)


def test_a_gpu_that_is_lost_and_back_is_watched_anew(world: World) -> None:
    """The engine may or may not keep watches while a GPU is absent."""
    world.open()
    world.reads(3)
    world.stub.say("gpu 0 gone")
    world.reads(3)
    watched = world.stub.calls("dcgmWatchFields")
    world.stub.unsay("gpu 0 gone")
    assert world.reads(4)
    assert world.stub.calls("dcgmWatchFields") == watched + 3
    assert world.left()[:2] == [1, 2]


@pytest.mark.parametrize("reads", [20, 0])
def test_a_lapse_is_not_filled_by_the_value_after_it(world: World, reads: int) -> None:
    """Nor its energy: the counter moved all the time, but only the last part of the time is reported."""
    world.open()
    truth = Truth(world)
    world.stub.say("gpu 0 power 400")
    truth.hears(4)
    world.stub.say("gpu 0 stuck")
    truth.hears(reads)
    world.wait(20_000)
    world.stub.unsay("gpu 0 stuck")
    truth.hears(4)
    after = [r for r in truth.told[UNITS[0]] if r.end > world.clock.now() - 5 * SECOND]
    assert after[0].end - after[0].start <= 4 * SECOND
    for reading in after:
        assert reading.energy_joules == pytest.approx(400 * (reading.end - reading.start) / SECOND, rel=0.01)


def test_without_profiling_too_a_lapse_is_told_and_not_filled(world: World) -> None:
    world.start("gpu 0 profiling -36")
    world.open()
    truth = Truth(world)
    truth.hears(4)
    world.stub.say("gpu 0 stuck")
    told = [world.read() for _ in range(10)]
    for batch in told:
        truth.hear(batch)
    assert {fault.kind for fault in told[-1].faults} == {"profiling_refused", "stale"}
    world.stub.unsay("gpu 0 stuck")
    truth.hear(world.read())
    (last,) = [r for r in truth.told[UNITS[0]] if r.end == world.clock.now()]
    assert last.end - last.start <= 4 * SECOND


def test_a_board_whose_counters_are_given_back_is_told_of_from_then_on(world: World) -> None:
    """The first profiling value must not stand for the time before profiling began."""
    world.start("gpu 0 profiling -37")
    world.open()
    truth = Truth(world)
    truth.hears(9)
    world.stub.unsay("gpu 0 profiling -37")
    truth.hears(6)
    profiled = [r for r in truth.told[UNITS[0]] if r.tensor_active is not None]
    assert profiled
    assert all(r.end - r.start <= 1.01 * SECOND for r in profiled)


def test_where_only_the_rates_are_refused_the_ratios_go_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Another client already watches as many passes of link counters as the engine can multiplex."""
    links = (1011, 1012, 1013, 1014, 1015)
    groups = [f"gpu * group 2 {pass_} {field}" for pass_, field in enumerate(links, 2)]
    others = [f"watcher {field} 1000" for field in links]
    world.start("gpu * gpm 0", "gpu * group 1 1 1001 1002 1004 1005", "gpu * group 2 1 1009 1010", *groups, *others)
    world.open()
    assert "tensor_active" in world.source.signals
    assert world.read().faults == ()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [uuid in line for uuid, line in zip(UNITS, lines, strict=True)] == [True, True]
    assert all("does not give" in line and "another client" in line for line in lines)
    told = world.reads(25)
    assert all(one.end == two.start for one, two in pairwise(told))
    assert {reading.pcie_tx_bytes_per_second for reading in told} == {None}
    assert all(reading.tensor_active for reading in told[1:])
    world.stub.unsay(*others)
    again = world.reads(15) + world.reads(60, 10_000)
    assert all(one.end == two.start for one, two in pairwise(told[-1:] + again))
    assert again[-1].pcie_tx_bytes_per_second == pytest.approx(100 * 2**20)


def test_all_fields_not_supported_for_a_while_is_seen_as_an_unprofiled_board(world: World) -> None:
    """As while a driver restarts: the ratios are None, and are back when they are."""
    world.open()
    truth = Truth(world)
    lines = [f"gpu 0 blank {field} not_supported" for field in (1001, 1002, 1004, 1005, 1006, 1007, 1008)]
    truth.hears(4)
    world.stub.say(*lines)
    truth.hears(6)
    dark = truth.told[UNITS[0]][-1]
    assert dark.tensor_active is None
    assert dark.gpu_utilization == pytest.approx(0.95)
    world.stub.unsay(*lines)
    truth.hears(4)
    assert truth.told[UNITS[0]][-1].tensor_active == pytest.approx(0.4)


@pytest.mark.parametrize(("code", "lost"), [(-18, True), (-3, False)])
@pytest.mark.parametrize("call", ["dcgmGetGpuStatus", "dcgmGetValuesSince_v2"])
def test_gpu_is_lost_means_so_wherever_it_is_said(world: World, call: str, code: int, lost: bool) -> None:
    """Another refusal does not mean that it is lost."""
    world.open()
    world.reads(3)
    world.stub.say(f"gpu 0 error {call} {code}")
    batches = [world.read() for _ in range(12)]
    assert {device.condition for device in batches[-1].devices if device.uuid == UNITS[0]} == {"lost" if lost else ""}
    assert {reading.uuid for reading in batches[-1].readings} >= {UNITS[1]}


def test_a_final_refusal_is_asked_for_once(world: World) -> None:
    world.start("gpu 0 profiling -36")
    world.open()
    watched = world.stub.calls("dcgmWatchFields")
    world.reads(25)
    assert world.stub.calls("dcgmWatchFields") == watched


@pytest.mark.parametrize("kind", ["blank", "not_found", "not_supported", "not_permissioned"])
@pytest.mark.parametrize("width", ["", "int32_"])
def test_no_blank_of_any_type_is_taken_for_a_value(world: World, width: str, kind: str) -> None:
    """Integer blanks exist in both widths (dcgm_structs.h: DCGM_INT32_BLANK, DCGM_INT64_BLANK and the values above)."""
    whole = {203: "gpu_utilization", 150: "temperature_celsius", 100: "sm_clock_hz", 252: "memory_used_bytes"}
    whole |= {250: "memory_total_bytes", 112: "clock_event_reasons", 1009: "pcie_tx_bytes_per_second"}
    double = {155: "power_watts", 164: "enforced_power_limit_watts", 1003: "sm_occupancy"}
    world.start(*(f"gpu 0 blank {field} {width}{kind}" for field in (*whole, 156, *(() if width else double))))
    world.open()
    last = world.reads(5)[-1]
    assert {name: getattr(last, name) for name in whole.values()} == dict.fromkeys(whole.values())
    assert last.energy_joules is None
    assert width or {getattr(last, name) for name in double.values()} == {None}
    assert last.tensor_active is not None


@pytest.mark.parametrize("nothing", ["nan", "inf", "-inf"])
def test_what_is_not_a_number_is_not_a_value(world: World, nothing: str) -> None:
    world.start(f"gpu 0 power {nothing}")
    world.open()
    assert world.reads(4)[-1].power_watts is None


def test_texts_that_say_there_is_none_are_no_names(world: World) -> None:
    world.start("gpu 0 blank 54 not_found", "gpu 0 blank 50 blank")
    world.open()
    device = world.read().devices[0]
    assert (device.uuid, device.model) == ("unknown-0", "")


# -- energy --


def test_a_counter_that_was_set_back_gives_no_energy_and_goes_on(world: World) -> None:
    """A reloaded driver counts from 0."""
    world.open()
    world.reads(4)
    world.stub.say("gpu 0 energy 5")
    told = [reading.energy_joules for reading in world.reads(1)]
    world.stub.unsay("gpu 0 energy 5")
    told += [reading.energy_joules for reading in world.reads(5)]
    assert None in told
    assert {round(joules) for joules in told if joules is not None} == {500}


def test_energy_of_time_that_was_given_up_is_nobodys(world: World) -> None:
    world.open()
    world.stub.say("gpu 0 power 100")
    world.reads(4)
    world.stub.unsay("gpu 0 power 100")
    world.source.resync()
    told = [reading.energy_joules for reading in world.reads(1, 30_000) + world.reads(5)]
    assert {round(joules) for joules in told if joules is not None} == {500}


def test_energy_between_two_tellings_is_spread_over_all_that_is_told_then(world: World) -> None:
    """Another client makes the engine sample it more often than the ratios; a read may return nothing else."""
    world.start("watcher 156 100")
    world.open()
    world.stub.say("gpu 0 power 400")
    world.reads(5)
    world.stub.say("gpu 0 power 900")
    first = world.reads(1, 500)
    world.stub.say("gpu 0 power 100")
    (reading,) = first + world.reads(1, 500)
    assert reading.energy_joules == pytest.approx(500, rel=0.1)


def test_a_boards_energy_is_shared_out_and_nothing_is_lost(world: World) -> None:
    world.start("gpu 0 mig 3g.40gb 2g.20gb")
    world.open()
    world.reads(6)
    shares: dict[str, float] = {}
    for _ in range(10):
        for reading in world.read().readings:
            shares[reading.uuid] = shares.get(reading.uuid, 0.0) + (reading.energy_joules or 0.0)
    assert shares.pop(UNITS[1]) == pytest.approx(5000, rel=0.01)
    assert sum(shares.values()) == pytest.approx(5000, rel=0.01)
    assert sorted(shares.values()) == pytest.approx([5000 * part / 7 for part in (2, 2, 3)], rel=0.01)


# -- layouts and health --


def test_a_new_layout_ends_what_was_watched_and_tells_what_happened_meanwhile(world: World) -> None:
    world.start("watcher 230 1000", "gpu 1 xid 31 1")
    world.open()
    batches = [world.read() for _ in range(3)]
    assert not any(health.xids for batch in batches for health in batch.health)  # it was there before us
    world.stub.say("gpu 1 mig 3g.40gb 2g.20gb/0", "gpu 1 xid 63 2")
    batches = [world.read() for _ in range(12)]
    assert [h.xids for batch in batches for h in batch.health if h.xids] == [(63,)]
    (instance,) = [device for device in batches[-1].devices if device.parent]  # nothing can run in the other
    assert instance.profile.startswith("3g")
    assert world.stub.calls("dcgmUnwatchFields") == 3
    assert world.left()[:2] == [1, 3]  # two boards, and the instances of one


def test_a_layout_that_is_not_told_is_as_before(world: World) -> None:
    world.open()
    world.reads(3)
    world.stub.say("gpu 0 blank 67 blank")
    told = world.reads(25)
    assert all(one.end == two.start for one, two in pairwise(told))


def test_of_groups_that_share_a_field_the_first_is_watched(world: World) -> None:
    """DCGM lists the tensor pipe in one group with the SMs, and in another with another pipe."""
    world.start("gpu * gpm 0", "gpu * group 1 1 1002 1004", "gpu * group 1 2 1004 1006", "gpu * group 2 0 1001")
    world.open()
    last = world.reads(5)[-1]
    assert None not in {last.sm_active, last.tensor_active, last.gr_engine_active}
    assert last.fp64_active is None


def test_a_board_that_wants_a_reset_still_does_when_it_is_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.bindings.fields, "DCGM_FI_DEV_GPU_RECOVERY_ACTION", 1523, raising=False)
    world.start("knows 1523", "gpu 0 recovery 1")
    world.open()
    world.reads(12)
    world.stub.say("gpu 0 lost")
    assert world.read(10_000).devices[0].condition == "lost"
    world.stub.unsay("gpu 0 lost")
    assert world.read().devices[0].condition == "recovery"


def test_a_temperature_of_0_is_a_memory_without_a_sensor(world: World) -> None:
    world.start("gpu 0 memory_temp 0")
    world.open()
    assert [h.memory_temperature_celsius for h in world.read().health] == [None, 70]


def test_a_utilisation_given_as_a_ratio_is_one(world: World) -> None:
    """Field 203 is an integer percentage; as a double, in later versions, it is a ratio."""
    source = world.open()
    world.reads(2)
    unit = source._boards[0].whole
    unit.latest[203] = replace(unit.latest[203], value=0.5)
    assert source._fields.gauges(unit)["gpu_utilization"] == 0.5


# -- what fails as a whole --


@pytest.mark.parametrize("code", [-7, -10, -11, -12, -21])
def test_a_connection_that_is_dead_is_told_as_such(world: World, code: int) -> None:
    """INIT_ERROR, UNINITIALIZED, TIMEOUT, VER_MISMATCH, CONNECTION_NOT_VALID: the connection is dead."""
    world.open()
    world.reads(3)
    world.stub.say(f"error dcgmGetValuesSince_v2 {code}")
    with pytest.raises(SourceError, match="the connection is dead, a new one is needed"):
        world.read()


def test_what_was_closed_is_closed_once_and_answers_nothing(world: World) -> None:
    source = world.open()
    world.reads(2)
    source.close()
    source.close()
    assert world.stub.calls("dcgmDisconnect") == 1
    with pytest.raises(SourceError, match="was closed: open a new one"):
        source.read(world.clock.now())


@pytest.mark.parametrize("call", ["dcgmEntitiesGetLatestValues", "dcgmGetAllDevices"])
def test_what_the_engine_refuses_as_a_whole_is_a_source_error(world: World, call: str) -> None:
    world.open()
    world.reads(3)
    world.stub.say(f"error {call} -3")
    with pytest.raises(SourceError, match="DCGM at unix:/tests/engine failed to"):
        world.reads(11)


def test_a_refused_pause_is_told_and_harms_nothing(world: World) -> None:
    """Without a profiling module there is nothing to pause or resume."""
    world.open()
    world.reads(3)
    world.stub.say("error dcgmProfPause -33", "error dcgmProfResume -33")
    world.wait(0)
    world.source.pause()
    (fault,) = world.read(30_000).faults
    assert "was not paused" in fault.message
    assert world.reads(3)[-1].tensor_active


def test_a_refused_resume_is_told_and_not_asked_for_again(world: World) -> None:
    world.start("gpu * gpm 0")
    world.open()
    world.reads(3)
    world.source.pause()
    world.stub.say("error dcgmProfResume -33")
    (fault,) = world.read(30_000).faults
    assert "was not resumed" in fault.message
    world.reads(3)
    assert world.stub.calls("dcgmProfResume") == 1


def test_a_pause_is_taken_back_though_its_connection_died(world: World) -> None:
    """A pause is global to the engine: if it were left behind, no client would get profiling values any more."""
    world.start("gpu * gpm 0")
    world.open()
    world.reads(3)
    world.source.pause()
    world.stub.drop()
    with pytest.raises(SourceError):
        world.read(30_000)
    world.source.close()
    world.open()
    assert world.reads(5)[-1].tensor_active


def test_names_on_the_engine_are_ours_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers every agent may be process 1, and two field groups of one name are refused (DUPLICATE_KEY)."""
    other = world.stub.connect(ADDRESS.removeprefix("unix:"))
    monkeypatch.setattr("os.getpid", lambda: 1)
    for number in range(5):
        world.stub.agent.dcgmFieldGroupCreate(other, [155], f"gpu-efficiency-1-{number}")
    monkeypatch.setattr("exporter.sources.dcgm.client._numbers", iter(range(100)))
    world.open()
    assert world.reads(4)


# -- time --


def test_a_read_that_was_kept_waiting_tells_nothing_beyond_its_own_moment(world: World) -> None:
    world.open()
    truth = Truth(world)
    truth.hears(3)
    asked = world.clock.now() + SECOND
    world.wait(5000)
    late = world.source.read(asked)
    assert late.readings
    assert all(reading.end <= asked for reading in late.readings)
    rest = world.reads(1)
    assert rest[0].start == max(r.end for r in late.readings if r.uuid == UNITS[0])


@pytest.mark.parametrize(("by", "told"), [(400, set()), (-400, set()), (600, {"clock_step"}), (-600, {"clock_step"})])
def test_a_clock_that_is_disciplined_was_not_set(world: World, by: int, told: set[str]) -> None:
    world.open()
    truth = Truth(world)
    truth.hears(4)
    world.clock.step_wall(by * MS)
    batch = world.read()
    truth.hear(batch)
    assert {fault.kind for fault in batch.faults} == told
    truth.hears(5)
    assert truth.told[UNITS[0]][-1].end >= world.clock.now() - 2 * SECOND


def test_a_clock_set_back_tells_nothing_twice_and_says_for_how_long(world: World) -> None:
    """The engine samples nothing until its last stamp has passed, and its cached values have stamps in the future."""
    world.open()
    truth = Truth(world)
    truth.hears(5)
    stepped = world.clock.now()
    world.clock.step_wall(-10 * SECOND)
    world.source.resync()
    for second in range(12):  # the cache still has what was stamped before the step
        if second == 4:
            world.source.resync()
        world.clock._now += SECOND
        world.stub.run(max(world.stub.now, world.clock.wall() // 1000))
        batch = world.source.read(world.clock.now())
        truth.hear(batch)
        assert second or "no new ones for 10 s" in batch.faults[0].message
    truth.hears(4)
    after = [r.start for r in truth.told[UNITS[0]] if r.start > stepped]
    assert stepped + 9 * SECOND < after[0] < stepped + 13 * SECOND


def test_a_clock_set_forward_joins_nothing_over_its_step(world: World) -> None:
    """Values stamped before the step and read after it are dropped."""
    world.start(*(f"watcher {field} 50" for field in FIELDS))
    world.open()
    truth = Truth(world)
    truth.hears(4)
    world.wait(700)
    stepped = world.clock.now()
    world.clock.step_wall(3600 * SECOND)
    world.wait(0)
    truth.hear(world.read(300))
    truth.hears(4)
    told = truth.told[UNITS[0]]
    assert not any(reading.start < stepped < reading.end for reading in told)
    assert told[-1].end > stepped + 3 * SECOND


class Sleepy:
    """A clock that simulates a delay between reading the wall clock and the monotonic clock."""

    def __init__(self, clock: JumpClock) -> None:
        self._clock, self.sleeps = clock, 0

    def now(self) -> int:
        slept, self.sleeps = self.sleeps > 0, max(0, self.sleeps - 1)
        return self._clock.now() + (700 * MS if slept else 0)

    def wall(self) -> int:
        return self._clock.wall()

    def wait(self, until: int, stop: threading.Event) -> None:
        self._clock.wait(until, stop)


def test_a_thread_that_is_put_to_sleep_between_two_clocks_sees_no_step() -> None:
    clock = Sleepy(JumpClock(5 * SECOND, wall=WALL))
    clocks = HostEngineClock(clock)
    clock.sleeps = 2
    assert clocks.update() == 0
    assert clocks.to_monotonic(WALL // 1000) == 5 * SECOND
    assert clocks.to_stamp(6 * SECOND) == (WALL + SECOND) // 1000


# -- one entity's values, by themselves --

ENGINE, SM, TENSOR = 1001, 1002, 1004
S = 1_000_000


def line(rows: Iterable[tuple[int, int, Value]], *, counters: tuple[int, ...] = ()) -> SampleSeries:
    series = SampleSeries((ENGINE, SM, TENSOR), period=S, since=0, counters=counters)
    for field, at, value in rows:
        series.add(field, at, value)
    return series


def cycles(*fields: int, to: int) -> list[tuple[int, int, Value]]:
    return [(field, second * S + 10, 0.5) for second in range(1, to + 1) for field in fields]


def test_the_newest_stamp_is_of_any_field() -> None:
    assert line([(ENGINE, 9 * S, 0.5), (SM, 5 * S, 0.5)]).newest == 9 * S


def test_a_field_that_ceases_is_waited_for_a_while_and_then_no_more() -> None:
    series = line([*cycles(ENGINE, SM, TENSOR, to=3), *cycles(ENGINE, SM, to=5)])
    assert series.complete_until(5 * S + 20) < 4 * S
    series = line([*cycles(ENGINE, SM, TENSOR, to=3), *cycles(ENGINE, SM, to=6)])
    assert series.complete_until(6 * S + 20) >= 6 * S


def test_values_that_cease_all_at_once_are_not_waited_for_for_ever() -> None:
    series = line([*cycles(ENGINE, SM, TENSOR, to=3), (ENGINE, 4 * S + 10, 0.5)])
    assert series.complete_until(4 * S + 20) < 4 * S
    assert series.complete_until(7 * S) >= 4 * S + 10


def test_a_field_that_exists_again_does_not_speak_for_the_time_it_did_not() -> None:
    absent = [(ENGINE, second * S + 10, Blank.NOT_SUPPORTED) for second in (3, 4, 5)]
    series = line([*cycles(ENGINE, SM, TENSOR, to=2), *absent, *cycles(SM, TENSOR, to=6), (ENGINE, 6 * S + 10, 0.9)])
    taken = series.intervals_until(7 * S)
    assert [(i.end, i.values.get(ENGINE)) for i in taken] == [
        (second * S + 10, value) for second, value in ((2, 0.5), (3, None), (4, None), (5, None), (6, 0.9))
    ]


def test_a_value_from_before_a_field_ceased_to_exist_is_still_told() -> None:
    series = line([*cycles(ENGINE, SM, TENSOR, to=2), (ENGINE, 3 * S + 10, Blank.NOT_SUPPORTED)])
    (only,) = series.intervals_until(2 * S + 20)
    assert only.values[ENGINE] == 0.5


def test_of_a_counter_the_value_at_the_end_counts_and_one_far_from_it_does_not() -> None:
    rows: list[tuple[int, int, Value]] = [(ENGINE, S, 0.5), (ENGINE, 2 * S, 0.5), (ENGINE, 3 * S, 0.5)]
    rows += [(TENSOR, at, at) for at in (S, 3 * S // 2, 2 * S + 5, 5 * S // 2)]
    first, second = line(rows, counters=(TENSOR,)).intervals_until(3 * S)
    assert first.values[TENSOR] == 2 * S + 5
    assert TENSOR not in second.values


def test_more_cycles_than_there_were_are_not_believed() -> None:
    counted = CycleCounters(SM, {TENSOR: ENGINE})
    for tick in range(20):
        values = {ENGINE: 1.0, SM: 100.0 * tick, TENSOR: 101.0 * tick}
        counted.correct(values)
        assert values[ENGINE] == 1.0


# -- names of both generations --

TABLES = (*RATIOS, *CYCLES, *RATES, *GAUGES, *HEALTH, *STATIC, VISIBLE)
ALIASES = """

class _Older(type(__import__("sys"))):
    def __getattr__(self, name):
        import warnings

        if name not in _OLDER:
            raise AttributeError(name)
        warnings.warn(f"{name} is deprecated", DeprecationWarning, stacklevel=2)
        return getattr(self, _OLDER[name])


__import__("sys").modules[__name__].__class__ = _Older
"""
"""How the bindings of DCGM 4.7 answer to the older names."""


def renamed(bindings: Path, into: Path) -> Path:
    """Remove all but the newest names and fields from the bindings."""
    shutil.copytree(bindings, into)
    pairs = {f"DCGM_FI_{old}": f"DCGM_FI_{field.aliases[-1]}" for field in TABLES for old in field.aliases[:-1]}
    for path in into.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"\bDCGM_FI_\w+", lambda m: pairs.get(m[0], m[0]), text), encoding="utf-8")
    newer = {"DEV_GPU_TEMP_MARGIN_CELSIUS": 153, "DEV_GPU_RECOVERY_ACTION": 1523, "DEV_PWR_SMOOTHING_ENABLED": 1425}
    newer |= {f"PROF_{name}_CYCLES_{what}_TOTAL": number for (name, what), number in COUNTERS.items()}
    with (into / "dcgm_fields.py").open("a", encoding="utf-8") as file:
        file.writelines(f"DCGM_FI_{name} = {number}\n" for name, number in newer.items())
        file.write(f"_OLDER = {pairs!r}\n{ALIASES}")
    return into


COUNTERS = {
    ("SM", "ELAPSED"): 1084,
    ("SM", "ACTIVE"): 1085,
    ("MMA", "ACTIVE"): 1086,
    ("FP64", "ACTIVE"): 1094,
    ("FP32", "ACTIVE"): 1095,
    ("FP16", "ACTIVE"): 1096,
}
"""Cumulative since DCGM 4.6."""


def story(folder: Path, monkeypatch: pytest.MonkeyPatch, bindings: Path, *lines: str) -> list[ReadResult]:
    """Return the readings of a node with one board in MIG mode and one that is not."""
    folder.mkdir()
    with stand_in(folder, monkeypatch, bindings) as stub:
        world = World(stub, load_bindings(str(bindings), str(stub.folder)))
        world.start("gpu 0 mig 3g.40gb 2g.20gb", "gpu 1 ecc_dbe 1", "gpu 1 nvlink_replay 2", *lines)
        world.open()
        batches = [world.read() for _ in range(3)]
        stub.say("gpu 1 xid 63 1")
        batches += [world.read() for _ in range(12)]
        world.source.close()
    return batches


def test_the_names_of_every_generation_give_the_same_readings(
    bindings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older names are not used: they would warn, and warnings are errors here."""
    older = story(tmp_path / "older", monkeypatch, bindings)
    newer = story(tmp_path / "newer", monkeypatch, renamed(bindings, tmp_path / "renamed"))
    assert newer == older
    told = [health for batch in older for health in batch.health]
    assert {health.temperature_margin_celsius for health in told} == {27}
    assert [health.xids for health in told if health.xids] == [(63,)]
    assert {health.recovery_action for health in told} == {None}
    board = next(r for r in older[-1].readings if r.uuid == UNITS[1])
    assert all(getattr(board, name) is not None for name in (*FIELDS.values(), "power_watts", "sm_clock_hz"))


def test_what_only_newer_versions_have_is_used_there(
    bindings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows = [f"knows {field}" for field in (1425, 1523, *COUNTERS.values())]
    lines = (*knows, "gpu 1 recovery 2", "gpu 1 smoothing 1", "gpu 1 margin 5")
    batches = story(tmp_path / "newer", monkeypatch, renamed(bindings, tmp_path / "renamed"), *lines)
    (health,) = [health for health in batches[10].health if health.uuid == UNITS[1]]
    assert (health.recovery_action, health.power_smoothing, health.temperature_margin_celsius) == (2, True, 5)
    assert batches[-1].devices[-1].condition == "recovery"


# -- cycle counters --


def counting(world: World, monkeypatch: pytest.MonkeyPatch, mma: int) -> None:
    """An engine of DCGM 4.6 or later, where the tensor pipe's counter is that field."""
    for (name, what), number in {**COUNTERS, ("MMA", "ACTIVE"): mma}.items():
        monkeypatch.setattr(world.bindings.fields, f"DCGM_FI_PROF_{name}_CYCLES_{what}_TOTAL", number, raising=False)
    world.start(*(f"knows {field}" for field in (*COUNTERS.values(), 1088)))


def test_counters_are_used_once_they_have_agreed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(world, monkeypatch, mma=1088)
    world.stub.say("gpu 0 tensor 40", "gpu 0 hmma 41")
    world.open()
    told = [reading.tensor_active for reading in world.reads(20)]
    assert told[:9] == [pytest.approx(0.40)] * 9
    assert told[12:] == [pytest.approx(0.41)] * len(told[12:])
    world.source.resync()
    world.stub.unsay("gpu 0 hmma 41")
    world.stub.say("gpu 0 hmma 20")
    world.wait(4000)
    world.stub.unsay("gpu 0 hmma 20")
    world.stub.say("gpu 0 hmma 41")
    again = world.reads(6)
    assert {round(reading.tensor_active or 0.0, 6) for reading in again} <= {0.40, 0.41}
    assert again[-1].tensor_active == pytest.approx(0.41)


def test_counters_of_something_else_are_never_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(world, monkeypatch, mma=1088)
    world.stub.say("gpu 0 tensor 40", "gpu 0 hmma 30")
    world.open()
    assert {round(reading.tensor_active or 0.0, 6) for reading in world.reads(30)} == {0.4}


def test_counters_that_cease_to_agree_are_left_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(world, monkeypatch, mma=1088)
    world.stub.say("gpu 0 tensor 40", "gpu 0 hmma 41")
    world.open()
    world.reads(16)
    world.stub.unsay("gpu 0 hmma 41")
    world.stub.say("gpu 0 hmma 0")
    assert world.reads(30)[-1].tensor_active == pytest.approx(0.4)


def test_counters_are_exact_where_the_ratios_look_back_too_far(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a late cycle GPM's next value covers two periods: the ratio's integral is wrong, the counter's is not."""
    counting(world, monkeypatch, mma=1086)
    world.stub.say("jitter 20000")
    world.open()
    assert world.stub.count("field_groups") == 4
    truth = Truth(world)
    for turn in range(60):
        truth.work((5, 4, 0, 3, 1) if turn % 7 < 4 else (90, 60, 40, 30, 10))
        truth.hear(world.read())
    sure = [r for r in truth.told[UNITS[0]] if r.start > truth.levels[15][0]]
    told = sum((r.end - r.start) * (r.tensor_active or 0.0) for r in sure)
    real = truth.integral(2, sure[0].start, sure[-1].end)
    assert told == pytest.approx(real, abs=30 * MS)


# -- finding the bindings, and the engine --

AGENT = "FOUND = __file__\ndef dcgmInit(): pass\n"
STRUCTS = """
class DCGMError(Exception):
    pass

def _dcgmInit(path=None):
    if path == "broken":
        raise DCGMError("no library")
"""


@pytest.fixture(name="bare")
def _bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the bindings from this process, before and after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("DCGM_BINDINGS", raising=False)
    for name in MODULES:
        sys.modules.pop(name, None)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def folder_of(path: Path, agent: str = AGENT) -> str:
    """Create a folder of bindings that contain only their location."""
    path.mkdir(parents=True)
    (path / "dcgm_agent.py").write_text(agent)
    (path / "dcgm_structs.py").write_text(STRUCTS)
    (path / "dcgm_fields.py").write_text("")
    return str(path)


def test_the_places_of_every_packaging_are_looked_at() -> None:
    """Install locations of DCGM 4, of DCGM 3, and of distributions."""
    assert {"/usr/share/datacenter-gpu-manager-4/bindings/python3", "/usr/local/dcgm/bindings/python3"} <= set(
        BINDINGS_PATHS
    )


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("there", range(3))
def test_bindings_are_found_wherever_a_package_puts_them(
    there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / f"{place}" for place in range(3)]
    monkeypatch.setattr("exporter.sources.dcgm.connection.BINDINGS_PATHS", tuple(map(str, places)))
    wanted = folder_of(places[there])
    found = load_bindings()
    assert (found.location, found.agent.FOUND) == (wanted, f"{wanted}/dcgm_agent.py")


@pytest.mark.usefixtures("bare")
def test_the_first_place_of_several_wins_and_the_configuration_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged, environment, configured = (folder_of(tmp_path / name) for name in ("a", "b", "c"))
    monkeypatch.setattr(
        "exporter.sources.dcgm.connection.BINDINGS_PATHS", (str(tmp_path / "none"), packaged, environment)
    )
    assert load_bindings().location == packaged
    _forget_bindings()
    monkeypatch.setenv("DCGM_BINDINGS", environment)
    assert found_by() == f"{environment}/dcgm_agent.py"
    _forget_bindings()
    assert found_by(configured) == f"{configured}/dcgm_agent.py"
    assert configured not in sys.path  # the folder holds modules with common names, too


def found_by(wanted: str = "") -> str:
    """Return the file of the loaded module."""
    return str(load_bindings(wanted).agent.FOUND)


def _forget_bindings() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if not (Path(path) / "dcgm_agent.py").exists()]


@pytest.mark.usefixtures("bare")
def test_bindings_that_are_installed_as_modules_need_no_place_unless_one_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder_of(tmp_path / "site"))
    wanted = folder_of(tmp_path / "wanted")
    assert found_by() == f"{tmp_path}/site/dcgm_agent.py"
    for name in MODULES:
        sys.modules.pop(name, None)
    assert found_by(wanted) == f"{wanted}/dcgm_agent.py"


@pytest.mark.usefixtures("bare")
def test_no_bindings_are_told_with_every_place_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = tuple(str(tmp_path / name) for name in ("one", "two"))
    monkeypatch.setattr("exporter.sources.dcgm.connection.BINDINGS_PATHS", places)
    with pytest.raises(SourceError) as said:
        load_bindings()
    for word in (*places, "dcgm_agent.py", "datacenter-gpu-manager-4-core", "DCGM_BINDINGS", "dcgm.bindings"):
        assert word in str(said.value)
    with pytest.raises(SourceError, match=re.escape(f"not in {tmp_path}/mine:")):
        load_bindings(f"{tmp_path}/mine")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("agent", ["import no_such_module", "def broken(:", "raise RuntimeError('no')"])
def test_broken_bindings_are_told_with_their_place_and_the_cause(agent: str, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "broken", agent)
    with pytest.raises(SourceError, match=rf"in {re.escape(place)} cannot be imported: \w+Error"):
        load_bindings(place)


@pytest.mark.usefixtures("bare")
def test_the_library_is_looked_for_where_it_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"libdcgm cannot be loaded \(no library\): the bindings in"):
        load_bindings(folder_of(tmp_path / "bindings"), "broken")


@pytest.mark.usefixtures("bare")
def test_a_library_that_is_missing_is_told_with_what_to_install(bindings: Path, tmp_path: Path) -> None:
    """Uses NVIDIA's modules and a folder without libdcgm."""
    with pytest.raises(SourceError, match="libdcgm cannot be loaded") as said:
        load_bindings(str(bindings), str(tmp_path))
    for word in (str(bindings), "datacenter-gpu-manager-4-core", "dcgm.library", "libdcgm.so.4"):
        assert word in str(said.value)


def test_a_tcp_engine_is_connected_to_once_it_listens(world: World) -> None:
    address = world.stub.listen()
    handle = connect(world.bindings, address, timeout_seconds=1.0)
    assert DcgmClient(world.bindings, handle, address=address).gpus() == [0, 1]


def test_nobody_listening_is_told_with_what_to_do(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    connects = world.stub.calls("dcgmConnect_v2")
    with pytest.raises(SourceError, match=f"nothing listens on {address} .*refused.*nvidia-dcgm.*dcgm.address"):
        connect(world.bindings, address, timeout_seconds=1.0)
    assert world.stub.calls("dcgmConnect_v2") == connects


@pytest.mark.parametrize(
    ("address", "knocked"),
    [
        ("node7", ("node7", 5555)),
        ("node7:6000", ("node7", 6000)),
        ("[::1]:6000", ("::1", 6000)),
        ("[fd00::7]", ("fd00::7", 5555)),
    ],
)
def test_an_address_is_knocked_at_where_it_says(
    world: World, monkeypatch: pytest.MonkeyPatch, address: str, knocked: tuple[str, int]
) -> None:
    tried = []

    def refuse(at: tuple[str, int], timeout: float) -> None:
        tried.append((at, timeout <= 2))
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(SourceError, match="nothing listens"):
        connect(world.bindings, address, timeout_seconds=1.0)
    assert tried == [(knocked, True)]


@pytest.mark.parametrize("cause", [TimeoutError("timed out"), OSError(113, "No route"), UnicodeError("too long")])
def test_whatever_keeps_a_knock_from_being_heard_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, cause: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr("socket.create_connection", fail)
    with pytest.raises(SourceError, match=r"nothing listens on node7:5555 \((timed out|No route|too long)\)"):
        connect(world.bindings, "node7:5555", timeout_seconds=1.0)


@pytest.mark.parametrize(
    "address",
    [
        *(":5555", "localhost:", "localhost:0", "localhost:65536", "localhost:x", "::1", "tcp://localhost"),
        *("unix:", "unix:engine", "vsock:", "vsock:3", "vsock:cid:5555", ""),
    ],
)
def test_an_address_that_is_none_is_told_with_the_forms_there_are(world: World, address: str) -> None:
    with pytest.raises(SourceError) as said:
        connect(world.bindings, address, timeout_seconds=1.0)
    for word in (repr(address), "dcgm.address", "host:port", "unix:/path", "vsock:CID:PORT", "embedded"):
        assert word in str(said.value)


@pytest.mark.parametrize("address", ["unix:/nobody/there", "unix:///nobody/there"])
def test_an_engine_that_does_not_answer_is_told(world: World, address: str) -> None:
    with pytest.raises(SourceError, match=f"the host engine at {address} does not answer .*dcgmi discovery"):
        connect(world.bindings, address, timeout_seconds=1.0)


def test_a_unix_socket_may_be_written_as_a_url(world: World) -> None:
    assert connect(world.bindings, ADDRESS.replace("unix:", "unix://"), timeout_seconds=1.0)


def test_vsock_without_its_function_is_told_with_what_else_there_is(world: World) -> None:
    with pytest.raises(SourceError, match=r"vsock:3:5555: vsock needs DCGM 4\.5.*install newer ones, or set"):
        connect(world.bindings, "vsock:3:5555", timeout_seconds=1.0)


def test_vsock_is_connected_to_by_its_url(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Params:
        """c_dcgmConnectV3Params_v1 has no addressIsUnixSocket."""

        __slots__ = ("persistAfterDisconnect", "timeoutMs")

    def connect_v3(target: str, params: Any) -> tuple[str, int, int]:
        return target, params.timeoutMs, params.persistAfterDisconnect

    monkeypatch.setattr(world.bindings.agent, "dcgmConnect_v3", connect_v3, raising=False)
    monkeypatch.setattr(world.bindings.structs, "c_dcgmConnectV3Params_v1", Params, raising=False)
    assert connect(world.bindings, "vsock:3:5555", timeout_seconds=1.5) == ("vsock://3:5555", 1500, 0)


def test_an_engine_of_our_own_is_started_read_and_stopped(world: World) -> None:
    engine = DcgmClient(world.bindings, connect(world.bindings, "embedded", timeout_seconds=1.0), address="embedded")
    world.source = DcgmSource(engine, period_seconds=1.0, clock=world.clock)
    assert world.reads(4)
    world.source.close()
    assert world.stub.calls("dcgmStopEmbedded") == 1
    assert world.left() == [0, 0, 0, 0]


def test_an_engine_of_our_own_that_does_not_start_is_told(world: World) -> None:
    world.start("embedded -7")
    with pytest.raises(SourceError, match=r"embedded host engine cannot be started .*nvidia-smi"):
        connect(world.bindings, "embedded", timeout_seconds=1.0)


@pytest.mark.parametrize("fault", ["count 0", "error dcgmGetAllDevices -3", "error dcgmGetAllDevices -21"])
def test_a_source_that_cannot_be_opened_leaves_no_connection(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    world.start(fault)
    monkeypatch.setenv("GPU_EFFICIENCY_DCGM_ADDRESS", ADDRESS)
    monkeypatch.setenv("GPU_EFFICIENCY_DCGM_LIBRARY", str(world.stub.folder))
    config = load_config(None)
    with pytest.raises(SourceError):
        open_dcgm(config)
    assert world.left() == [0, 0, 0, 0]
    world.stub.unsay(fault)
    world.wait(1000)
    source = open_dcgm(config)
    assert "tensor_active" in source.signals
    source.close()
