"""The DCGM source examined from outside: random worlds against their own truth, and every way to be in trouble.

Beneath it run NVIDIA's real bindings over the stand-in `libdcgm.so.4`; nothing here trusts the source's own words.
"""

import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.clock import JumpClock
from exporter.config import load as load_config
from exporter.core.ledger import Ledger, conserved
from exporter.core.model import MS, SECOND, Device, Observation, Reading
from exporter.core.pipeline import advance
from exporter.sources import Batch, SourceError
from exporter.sources.dcgm import DcgmSource, open_dcgm
from exporter.sources.dcgm.bindings import PATHS, Bindings, connect, load
from exporter.sources.dcgm.clocks import Clocks
from exporter.sources.dcgm.engine import Engine
from exporter.sources.dcgm.fields import CYCLES, GAUGES, HEALTH, RATES, RATIOS, STATIC, VISIBLE
from tests.dcgm_stub.bindings import missing, unpack
from tests.dcgm_stub.stub import MODULES, Stub, stand_in
from tests.shared_library import compiler

ADDRESS = "unix:/tests/engine"
WALL = 1_700_000_000 * SECOND
FIELDS = {1001: "gr_engine_active", 1002: "sm_active", 1004: "tensor_active", 1005: "dram_active", 1007: "fp32_active"}
KEYS = ("gr", "sm", "tensor", "dram", "fp32")
"""What the script calls them."""
UNITS = ("GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001")


class World:
    """The stand-in with two GPUs, a clock for both sides, and the source over them."""

    def __init__(self, stub: Stub, bindings: Bindings) -> None:
        self.stub, self.bindings = stub, bindings
        self.clock = JumpClock(1000 * SECOND, wall=WALL)
        self.start()

    def start(self, *lines: str) -> None:
        """Another engine, over another world; time goes on."""
        self.stub.lines = [f"listen {ADDRESS.removeprefix('unix:')}", *lines]
        self.stub.restart()
        self.wait(0)

    def wait(self, ms: int) -> None:
        self.clock._now += ms * MS
        self.stub.run(self.clock.wall() // 1000)

    def open(self, period: float = 1.0) -> DcgmSource:
        handle = connect(self.bindings, ADDRESS, timeout_seconds=1.0)
        engine = Engine(self.bindings, handle, address=ADDRESS)
        self.source = DcgmSource(engine, period_seconds=period, clock=self.clock)
        return self.source

    def read(self, ms: int = 1000) -> Batch:
        """Wait so long, then read."""
        self.wait(ms)
        return self.source.read(self.clock.now())

    def reads(self, times: int, ms: int = 1000, gpu: int = 0) -> list[Reading]:
        """Readings of one GPU from so many reads."""
        return [reading for _ in range(times) for reading in self.read(ms).readings if reading.uuid == UNITS[gpu]]

    def left(self) -> list[int]:
        """What there is on the engine."""
        return [self.stub.count(what) for what in ("connections", "groups", "field_groups", "watches")]


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in DCGM")
    if reason := missing():
        pytest.skip(reason)
    return unpack(tmp_path_factory.mktemp("bindings"))


@pytest.fixture(name="world")
def _world(bindings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with stand_in(tmp_path, monkeypatch, bindings) as stub:
        world = World(stub, load(str(bindings), str(stub.folder)))
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
    """What GPU 0 really did, and a ledger that hears what the source says of both."""

    def __init__(self, world: World) -> None:
        self.world, self.ledger = world, Ledger()
        self.levels: list[tuple[int, tuple[int, ...]]] = []
        self.floor = world.clock.now()
        self.ends = dict.fromkeys(UNITS, self.floor)
        self.devices: tuple[Device, ...] | None = None
        self.told: dict[str, list[Reading]] = {uuid: [] for uuid in UNITS}

    def work(self, levels: tuple[int, ...]) -> None:
        """GPU 0 is so busy from now on."""
        before = self.levels[-1][1] if self.levels else ()
        self.world.stub.unsay(*_busy(before))
        self.world.stub.say(*_busy(levels))
        self.levels.append((self.world.clock.now(), levels))

    def integral(self, place: int, start: int, end: int) -> float:
        """Of the field in that place, over [start, end), nanoseconds."""
        spans = pairwise([*self.levels, (end, ())])
        return sum(max(0, min(b, end) - max(a, start)) * levels[place] / 100 for (a, levels), (b, _) in spans)

    def hear(self, batch: Batch) -> None:
        """Check what no batch may break, then let the ledger have it as the observer does."""
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
        """Read so often, a second apart."""
        for _ in range(times):
            self.hear(self.world.read())

    def take_in(self, settled: int, batch: Batch | None) -> None:
        now, wall = self.world.clock.now(), self.world.clock.wall()
        batch = batch or Batch(self.devices or ())
        changed = batch.devices if batch.devices != self.devices else None
        self.devices = batch.devices
        advance(self.ledger, Observation(now, wall, batch.readings, settled, changed, faults=batch.faults))
        assert all(conserved(gpu.book) for gpu in self.ledger.gpus.values())
        assert not self.ledger.rejected.keys() & {"overlap", "bad_interval", "future", "unknown_gpu", "clock_step"}


def _busy(levels: tuple[int, ...]) -> list[str]:
    return [f"gpu 0 {key} {level}" for key, level in zip(KEYS, levels, strict=True)] if levels else []


class Peace(NamedTuple):
    """What the others do on the node, and how busy GPU 0 is from read to read."""

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


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(peace=PEACE)
def test_in_peace_every_moment_is_told_once_and_as_it_was(world: World, peace: Peace) -> None:
    """On a board before Hopper, where each value is the mean since the one before, whoever asks how often."""
    steps, period = peace.steps, peace.period
    watchers = [f"watcher {field} {ms}" for field, ms in peace.watchers.items()]
    late = [f"late {field} {min(ms, period)}" for field, ms in peace.late.items()]
    world.start("gpu * gpm 0", f"jitter {peace.jitter}", *watchers, *late)
    truth = Truth(world)
    world.open(period / 1000)
    idle, rest = (5, 4, 0, 3, 1), steps[-1][0]
    for levels, wait in [*[(idle, period)] * 6, *steps, *[(rest, period)] * 8]:
        truth.work(levels)
        truth.hear(world.read(wait))
    ours = truth.told[UNITS[0]]
    assert all(one.end == two.start for one, two in pairwise(ours))
    assert world.clock.now() - ours[-1].end <= (3 * period + 700) * MS
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
    """Let it happen; a trouble lasts until it is taken back."""
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
    """Read; where the connection is dead, connect again, as the ladder does after a while."""
    try:
        truth.hear(world.read(wait))
    except SourceError:
        truth.take_in(world.clock.now(), None)
        world.source.close()
        world.open()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize(("state", "kind"), [("lost", "gpu_lost"), ("unsupported", "profiling_refused")])
def test_a_gpu_that_cannot_be_watched_does_not_hide_the_others(world: World, state: str, kind: str) -> None:
    """It is refused by groups: dcgmGroupAddEntity says GPU_IS_LOST or GPU_NOT_SUPPORTED."""
    world.start(f"gpu 0 {state}")
    world.open()
    batches = [world.read() for _ in range(30)]
    assert {r.uuid for batch in batches for r in batch.readings} == {UNITS[1]}
    assert {fault.kind for batch in batches for fault in batch.faults} == {kind}
    assert world.stub.count("groups") == 1
    world.stub.unsay(f"gpu 0 {state}")
    back = world.reads(15)
    assert back[-1].tensor_active
    assert [device.uuid for device in world.read().devices] == list(UNITS)


def test_a_gpu_that_is_lost_and_back_is_watched_anew(world: World) -> None:
    """Whether the engine kept our watches over its absence is not promised."""
    world.open()
    world.reads(3)
    world.stub.say("gpu 0 gone")
    world.reads(3)
    watched = world.stub.calls("dcgmWatchFields")
    world.stub.unsay("gpu 0 gone")
    assert world.reads(4)
    assert world.stub.calls("dcgmWatchFields") == watched + 4
    assert world.left()[:2] == [1, 2]


def test_a_lapse_is_not_filled_by_the_value_after_it(world: World) -> None:
    """Not even its energy: the counter moved all the while, and only the last part of the time is told of."""
    world.open()
    truth = Truth(world)
    world.stub.say("gpu 0 power 400")
    truth.hears(4)
    world.stub.say("gpu 0 stuck")
    truth.hears(20)
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


def test_where_only_the_rates_are_refused_the_ratios_go_on(world: World) -> None:
    """Another client watches as many passes of the links' counters as the engine can take turns in."""
    links = (1011, 1012, 1013, 1014, 1015)
    groups = [f"gpu * group 2 {pass_} {field}" for pass_, field in enumerate(links, 2)]
    others = [f"watcher {field} 1000" for field in links]
    world.start("gpu * gpm 0", "gpu * group 1 1 1001 1002 1004 1005", "gpu * group 2 1 1009 1010", *groups, *others)
    world.open()
    assert "tensor_active" in world.source.signals
    batch = world.read()
    assert [fault.uuid for fault in batch.faults if fault.kind == "profiling_refused"] == list(UNITS)
    assert "another client" in batch.faults[0].message
    told = world.reads(25)
    assert all(one.end == two.start for one, two in pairwise(told))
    assert {reading.pcie_tx_bytes_per_second for reading in told} == {None}
    assert all(reading.tensor_active for reading in told[1:])
    world.stub.unsay(*others)
    again = world.reads(15)
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


# -- what fails as a whole --


@pytest.mark.parametrize("call", ["dcgmEntitiesGetLatestValues", "dcgmGetAllDevices"])
def test_what_the_engine_refuses_as_a_whole_is_a_source_error(world: World, call: str) -> None:
    world.open()
    world.reads(3)
    world.stub.say(f"error {call} -3")
    with pytest.raises(SourceError, match="DCGM at unix:/tests/engine would not"):
        world.reads(11)


def test_a_refused_pause_is_told_and_harms_nothing(world: World) -> None:
    """Where there is no profiling module there is nothing to pause or resume."""
    world.open()
    world.reads(3)
    world.stub.say("error dcgmProfPause -33", "error dcgmProfResume -33")
    world.wait(0)
    world.source.pause()
    (fault,) = world.read(30_000).faults
    assert "was not paused" in fault.message
    assert world.reads(3)[-1].tensor_active


def test_a_refused_resume_is_told_and_not_asked_for_again(world: World) -> None:
    world.open()
    world.reads(3)
    world.source.pause()
    world.stub.say("error dcgmProfResume -33")
    (fault,) = world.read(30_000).faults
    assert "was not resumed" in fault.message
    world.reads(3)
    assert world.stub.calls("dcgmProfResume") == 1


def test_a_pause_is_taken_back_though_its_connection_died(world: World) -> None:
    """A pause is the engine's, for all its clients: left behind, nobody would see a counter again."""
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
    """In containers every agent is process 1, and field groups of one name are refused (DUPLICATE_KEY)."""
    other = world.stub.connect(ADDRESS.removeprefix("unix:"))
    monkeypatch.setattr("os.getpid", lambda: 1)
    for number in range(5):
        world.stub.agent.dcgmFieldGroupCreate(other, [155], f"gpu-efficiency-1-{number}")
    monkeypatch.setattr("exporter.sources.dcgm.engine._numbers", iter(range(100)))
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
    """The engine samples nothing until it is where it was, and what it had stamped lies in the time to come."""
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


class Sleepy:
    """A clock whose reader is put to sleep between the two clocks, once for each time it is told to."""

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
    clocks = Clocks(clock)
    clock.sleeps = 2
    assert clocks.follow() == 0
    assert clocks.host(WALL // 1000) == 5 * SECOND
    assert clocks.stamped(6 * SECOND) == (WALL + SECOND) // 1000


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
    """Bindings that have the newest names and fields only."""
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


def story(folder: Path, monkeypatch: pytest.MonkeyPatch, bindings: Path, *lines: str) -> list[Batch]:
    """What a node with a cut board and a whole one comes to."""
    folder.mkdir()
    with stand_in(folder, monkeypatch, bindings) as stub:
        world = World(stub, load(str(bindings), str(stub.folder)))
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
    """And none of the older ones is asked for, which would warn: warnings are errors here."""
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
    """A late cycle makes GPM's next value reach over two periods: the ratio's integral is off, the counter's is not."""
    counting(world, monkeypatch, mma=1086)
    world.stub.say("jitter 20000")
    world.open()
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
    """A process that has seen no bindings yet, and leaves none."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("DCGM_BINDINGS", raising=False)
    for name in MODULES:
        sys.modules.pop(name, None)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def folder_of(path: Path, agent: str = AGENT) -> str:
    """A folder of bindings that only say where they are."""
    path.mkdir(parents=True)
    (path / "dcgm_agent.py").write_text(agent)
    (path / "dcgm_structs.py").write_text(STRUCTS)
    (path / "dcgm_fields.py").write_text("")
    return str(path)


def test_the_places_of_every_packaging_are_looked_at() -> None:
    """The packages of DCGM 4, of DCGM 3, and of distributions."""
    assert {"/usr/share/datacenter-gpu-manager-4/bindings/python3", "/usr/local/dcgm/bindings/python3"} <= set(PATHS)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("there", range(3))
def test_bindings_are_found_wherever_a_package_puts_them(
    there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / f"{place}" for place in range(3)]
    monkeypatch.setattr("exporter.sources.dcgm.bindings.PATHS", tuple(map(str, places)))
    wanted = folder_of(places[there])
    found = load()
    assert (found.place, found.agent.FOUND) == (wanted, f"{wanted}/dcgm_agent.py")


@pytest.mark.usefixtures("bare")
def test_the_first_place_of_several_wins_and_the_configuration_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged, environment, configured = (folder_of(tmp_path / name) for name in ("a", "b", "c"))
    monkeypatch.setattr("exporter.sources.dcgm.bindings.PATHS", (str(tmp_path / "none"), packaged, environment))
    assert load().place == packaged
    _forget_bindings()
    monkeypatch.setenv("DCGM_BINDINGS", environment)
    assert found_by() == f"{environment}/dcgm_agent.py"
    _forget_bindings()
    assert found_by(configured) == f"{configured}/dcgm_agent.py"
    assert sys.path[-1] == configured  # behind everything else: the folder holds modules with common names


def found_by(wanted: str = "") -> str:
    """The file of the module that was loaded."""
    return str(load(wanted).agent.FOUND)


def _forget_bindings() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if not (Path(path) / "dcgm_agent.py").exists()]


@pytest.mark.usefixtures("bare")
def test_bindings_that_are_installed_as_modules_need_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder_of(tmp_path / "site"))
    assert found_by() == f"{tmp_path}/site/dcgm_agent.py"


@pytest.mark.usefixtures("bare")
def test_no_bindings_are_told_with_every_place_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = tuple(str(tmp_path / name) for name in ("one", "two"))
    monkeypatch.setattr("exporter.sources.dcgm.bindings.PATHS", places)
    with pytest.raises(SourceError) as said:
        load()
    for word in (*places, "dcgm_agent.py", "datacenter-gpu-manager-4-core", "DCGM_BINDINGS", "dcgm.bindings"):
        assert word in str(said.value)
    with pytest.raises(SourceError, match=re.escape(f"not in {tmp_path}/mine:")):
        load(f"{tmp_path}/mine")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("agent", ["import no_such_module", "def broken(:", "raise RuntimeError('no')"])
def test_broken_bindings_are_told_with_their_place_and_the_cause(agent: str, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "broken", agent)
    with pytest.raises(SourceError, match=rf"in {re.escape(place)} cannot be imported: \w+Error"):
        load(place)


@pytest.mark.usefixtures("bare")
def test_a_library_that_is_missing_is_told_with_what_to_install(bindings: Path, tmp_path: Path) -> None:
    """NVIDIA's own modules, and a folder without libdcgm."""
    with pytest.raises(SourceError, match="libdcgm cannot be loaded") as said:
        load(str(bindings), str(tmp_path))
    for word in (str(bindings), "datacenter-gpu-manager-4-core", "dcgm.library", "libdcgm.so.4"):
        assert word in str(said.value)


def test_a_tcp_engine_is_connected_to_once_it_listens(world: World) -> None:
    address = world.stub.listen()
    handle = connect(world.bindings, address, timeout_seconds=1.0)
    assert Engine(world.bindings, handle, address=address).gpus() == [0, 1]


def test_nobody_listening_is_told_with_what_to_do(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    connects = world.stub.calls("dcgmConnect_v2")
    with pytest.raises(SourceError, match=f"nobody listens on {address} .*refused.*nvidia-dcgm.*dcgm.address"):
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
    with pytest.raises(SourceError, match="nobody listens"):
        connect(world.bindings, address, timeout_seconds=1.0)
    assert tried == [(knocked, True)]


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
    engine = Engine(world.bindings, connect(world.bindings, "embedded", timeout_seconds=1.0), address="embedded")
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
