"""Tests the source selector with fake sources: which one is selected, what is logged, and what happens if it fails.

Every fake source checks that it is read only while no other one is open.
"""

import logging
import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from exporter.config import Config, load
from exporter.core.model import SECOND, Device, Reading
from exporter.registry import SOURCES
from exporter.sources.base import ReadResult, SourceError, TelemetrySource
from exporter.sources.selector import (
    JITTER,
    MAX_RECHECK_INTERVAL,
    MAX_WAIT,
    QUICK_TRIES,
    RECHECK_INTERVAL,
    SAME_SOURCE_TRIES,
    SourceSelector,
    open_selector,
)

AUTO = ("dcgm", "dcgm-exporter", "nvml")
PAGE = "http://127.0.0.1:9400/metrics"
WHERE = {
    "dcgm": "host engine at localhost:5555",
    "dcgm-exporter": PAGE,
    "nvml": "the driver",
}
NO_ENGINE = "nothing listens on localhost:5555: start nv-hostengine"
HANGS = "localhost:5555 took the\nconnection but said nothing in 5 s."
NO_PAGE = f"{PAGE} could not be read"
NO_DRIVER = "libnvidia-ml.so.1 not found"


class Rung(SimpleNamespace):
    """The state of one source, which a test changes over time."""

    gpus = 2
    blind: tuple[int, ...] = ()
    """Ordinals of the boards without tensor activity."""
    slow_by = 0
    """Reads before the boards show what they announce."""
    refuses: str | Exception = ""
    """Said when it is opened; empty: it opens."""
    dead: str | Exception = ""
    """Said when it is read."""
    instances = 0
    """MIG instances that each board is cut into; it then has no tensor activity of its own but 0."""


class Fake:
    """A fake source, which records its events."""

    def __init__(self, name: str, world: "World") -> None:
        self.name, self._world, self._rung = name, world, world.rungs[name]
        self._last: int | None = None
        self._reads = 0

    @property
    def signals(self) -> frozenset[str]:
        sees = len(self._rung.blind) < self._rung.gpus
        return frozenset({"gr_engine_active", *(("tensor_active",) if sees else ())})

    def read(self, now: int) -> ReadResult:
        self._world.note("read", self.name)
        assert self._world.open_now == [self.name]
        if self._rung.dead:
            raise _error(self._rung.dead)
        before, self._last = self._last, now
        self._reads += 1
        devices = [d for n in range(self._rung.gpus) for d in self._parts(n)]
        if before is None:
            return ReadResult(tuple(devices))
        return ReadResult(tuple(devices), tuple(self._reading(d, before, now) for d in devices))

    def _parts(self, n: int) -> list[Device]:
        board = Device(f"GPU-{n}", f"{n}")
        return [board, *(Device(f"GPU-{n}/{i}", f"{n}:{i}", parent=board.uuid) for i in range(self._rung.instances))]

    def _reading(self, device: Device, start: int, end: int) -> Reading:
        blind = int(device.index.partition(":")[0]) in self._rung.blind or self._reads <= 1 + self._rung.slow_by
        rest = self._rung.instances and not device.parent
        return Reading(device.uuid, start, end, tensor_active=0.0 if rest else None if blind else 0.4)

    def resync(self) -> None:
        self._world.note("resync", self.name)
        self._last = None

    def pause(self) -> None:
        self._world.note("pause", self.name)

    def close(self) -> None:
        self._world.note("close", self.name)
        self._world.open_now.remove(self.name)


class World:
    """The states of all sources by name, and a record of events in order."""

    def __init__(self, **rungs: Rung) -> None:
        self.rungs = {name.replace("_", "-"): rung for name, rung in rungs.items()}
        self.events: list[str] = []
        self.open_now: list[str] = []

    def note(self, event: str, name: str) -> None:
        self.events.append(f"{event} {name}")

    def open(self, name: str) -> TelemetrySource:
        self.note("open", name)
        if self.rungs[name].refuses:
            raise _error(self.rungs[name].refuses)
        self.open_now.append(name)
        return Fake(name, self)

    def ladder(self, *names: str, chance: float = 0.5) -> SourceSelector:
        return SourceSelector(names or AUTO, self.open, where=WHERE.__getitem__, chance=lambda: chance)

    def opened(self) -> list[str]:
        return [event.removeprefix("open ") for event in self.events if event.startswith("open ")]


def _error(said: str | Exception) -> Exception:
    return SourceError(said) if isinstance(said, str) else said


def down(why: str) -> Rung:
    return Rung(refuses=why)


def blind(gpus: int = 2) -> Rung:
    return Rung(gpus=gpus, blind=tuple(range(gpus)))


class Life:
    """A selector that is read once a second; errors are kept as messages."""

    def __init__(self, ladder: SourceSelector) -> None:
        self.ladder, self.now = ladder, 1000 * SECOND
        self.readings: list[Reading] = []
        self.told: list[tuple[int, str]] = []

    def live(self, seconds: int = 1) -> "Life":
        for _ in range(seconds):
            self.now += SECOND
            try:
                batch = self.ladder.read(self.now)
            except SourceError as err:
                self.told.append((self.now // SECOND, str(err)))
                continue
            self.readings += batch.readings
            self.ladder.try_better(self.now)
        return self

    def lost(self, uuid: str = "GPU-0") -> list[int]:
        """Return the seconds between consecutive readings that neither covers; check that readings do not overlap."""
        spans = [(r.start, r.end) for r in self.readings if r.uuid == uuid]
        gaps = [after[0] - before[1] for before, after in pairwise(spans)]
        assert all(gap >= 0 for gap in gaps)
        return [gap // SECOND for gap in gaps if gap]


class Case(NamedTuple):
    world: World
    chosen: str
    words: str
    opened: tuple[str, ...]


ENVIRONMENTS = {
    "a host engine with profiling": lambda: Case(
        World(dcgm=Rung(gpus=8), dcgm_exporter=Rung(gpus=8), nvml=Rung(gpus=8)),
        "dcgm",
        "dcgm (host engine at localhost:5555): sees tensor activity on 8 of 8 GPUs; not asked: dcgm-exporter, nvml",
        ("dcgm",),
    ),
    "an engine without its profiling module, boards with GPM": lambda: Case(
        World(dcgm=blind(8), dcgm_exporter=down(NO_PAGE), nvml=Rung(gpus=8)),
        "nvml",
        "nvml (the driver): sees tensor activity on 8 of 8 GPUs; opened but without tensor activity: dcgm; refused:"
        f" dcgm-exporter: {NO_PAGE}",
        AUTO,
    ),
    "an engine without its profiling module, an exporter that has it": lambda: Case(
        World(dcgm=blind(), dcgm_exporter=Rung(), nvml=Rung()),
        "dcgm-exporter",
        "dcgm-exporter (http://127.0.0.1:9400/metrics): sees tensor activity on 2 of 2 GPUs; opened but without tensor"
        " activity: dcgm; not asked: nvml",
        ("dcgm", "dcgm-exporter"),
    ),
    "no engine, an exporter's page": lambda: Case(
        World(dcgm=down(NO_ENGINE), dcgm_exporter=Rung(), nvml=Rung()),
        "dcgm-exporter",
        "dcgm-exporter (http://127.0.0.1:9400/metrics): sees tensor activity on 2 of 2 GPUs; refused: dcgm:"
        f" {NO_ENGINE}; not asked: nvml",
        ("dcgm", "dcgm-exporter"),
    ),
    "a page without profiling fields, boards with GPM": lambda: Case(
        World(dcgm=down(NO_ENGINE), dcgm_exporter=blind(), nvml=Rung()),
        "nvml",
        "nvml (the driver): sees tensor activity on 2 of 2 GPUs; opened but without tensor activity: dcgm-exporter;"
        f" refused: dcgm: {NO_ENGINE}",
        AUTO,
    ),
    "an old board and its driver": lambda: Case(
        World(dcgm=down(NO_ENGINE), dcgm_exporter=down(NO_PAGE), nvml=blind(1)),
        "nvml",
        "nvml (the driver): sees tensor activity on none of 1 GPUs, so that their kernel time stays unresolved;"
        f" refused: dcgm: {NO_ENGINE}; dcgm-exporter: {NO_PAGE}",
        AUTO,
    ),
    "nothing that sees: the first that opened": lambda: Case(
        World(dcgm=blind(), dcgm_exporter=blind(), nvml=blind()),
        "dcgm",
        "dcgm (host engine at localhost:5555): sees tensor activity on none of 2 GPUs, so that their kernel time stays"
        " unresolved; opened but without tensor activity: dcgm-exporter, nvml",
        AUTO,
    ),
    "an engine that hangs when it is connected to": lambda: Case(
        World(
            dcgm=down(HANGS),
            dcgm_exporter=down(NO_PAGE),
            nvml=Rung(),
        ),
        "nvml",
        "nvml (the driver): sees tensor activity on 2 of 2 GPUs; refused: dcgm: localhost:5555 took the connection but"
        f" said nothing in 5 s; dcgm-exporter: {NO_PAGE}",
        AUTO,
    ),
    "mixed boards, of which GPU 0 is an old one": lambda: Case(
        World(dcgm=Rung(gpus=4, blind=(0,)), dcgm_exporter=Rung(), nvml=Rung()),
        "dcgm",
        "dcgm (host engine at localhost:5555): sees tensor activity on 3 of 4 GPUs; not asked: dcgm-exporter, nvml",
        ("dcgm",),
    ),
    "boards cut into instances": lambda: Case(
        World(dcgm=Rung(gpus=3, instances=7, blind=(1,)), dcgm_exporter=Rung(), nvml=Rung()),
        "dcgm",
        "dcgm (host engine at localhost:5555): sees tensor activity on 2 of 3 GPUs; not asked: dcgm-exporter, nvml",
        ("dcgm",),
    ),
    "an engine that lists no GPU": lambda: Case(
        World(dcgm=Rung(gpus=0), dcgm_exporter=down(NO_PAGE), nvml=blind(1)),
        "nvml",
        "nvml (the driver): sees tensor activity on none of 1 GPUs, so that their kernel time stays unresolved;"
        f" refused: dcgm: opened, but lists no GPU: does `nvidia-smi -L`?; dcgm-exporter: {NO_PAGE}",
        (*AUTO, "nvml"),
    ),
    "an engine that opens and cannot be read": lambda: Case(
        World(dcgm=Rung(dead="requires root"), dcgm_exporter=down(NO_PAGE), nvml=Rung()),
        "nvml",
        "nvml (the driver): sees tensor activity on 2 of 2 GPUs; refused: dcgm: opened, but the first read failed:"
        f" requires root; dcgm-exporter: {NO_PAGE}",
        AUTO,
    ),
    "bindings that break in a way nobody knows": lambda: Case(
        World(dcgm=Rung(refuses=AttributeError("no dcgmInit")), dcgm_exporter=down(NO_PAGE), nvml=Rung()),
        "nvml",
        "nvml (the driver): sees tensor activity on 2 of 2 GPUs; refused: dcgm: AttributeError: no dcgmInit;"
        f" dcgm-exporter: {NO_PAGE}",
        AUTO,
    ),
    "counters that another profiler holds": lambda: Case(
        World(dcgm=Rung(slow_by=1000), dcgm_exporter=Rung(), nvml=Rung()),
        "dcgm",
        "dcgm (host engine at localhost:5555): should see tensor activity, but showed it on none of 2 GPUs in 5 reads;"
        " not asked: dcgm-exporter, nvml",
        ("dcgm",),
    ),
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_best_source_there_is_gets_chosen_and_the_choice_is_explained_once(
    environment: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world, chosen, words, opened = ENVIRONMENTS[environment]()
    life = Life(world.ladder()).live(20)
    assert life.told == []
    assert (life.ladder.name, life.ladder.reason) == (chosen, words)
    assert tuple(world.opened()) == opened
    assert world.open_now == [chosen]
    assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [f"source {words}"]
    assert life.lost() == []


def test_where_nothing_works_each_one_s_words_are_a_line_of_the_refusal() -> None:
    world = World(dcgm=down(NO_ENGINE), dcgm_exporter=down(NO_PAGE), nvml=down(NO_DRIVER))
    life = Life(world.ladder()).live()
    assert life.told == [(1001, f"dcgm: {NO_ENGINE}\ndcgm-exporter: {NO_PAGE}\nnvml: {NO_DRIVER}")]
    assert (life.ladder.name, life.ladder.reason) == ("", "")
    assert world.open_now == []


def test_a_source_that_is_configured_is_the_only_one_asked() -> None:
    world = World(dcgm=down(NO_ENGINE), nvml=Rung())
    life = Life(world.ladder("dcgm")).live(3000)
    assert set(world.opened()) == {"dcgm"}
    assert life.told[0] == (1001, f"dcgm: {NO_ENGINE}")
    world.rungs["dcgm"].refuses = ""
    life.live(100)
    assert life.ladder.reason == (
        "dcgm (host engine at localhost:5555): sees tensor activity on 2 of 2 GPUs; no other one is configured"
    )


def test_a_strange_error_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    world = World(dcgm=Rung(refuses=ZeroDivisionError("a bug")))
    Life(world.ladder("dcgm")).live()
    assert [record.message for record in caplog.records if record.exc_info] == [
        "source failed with an unexpected error; please report this"
    ]


def test_boards_that_show_what_they_announce_a_little_later_are_waited_for() -> None:
    world = World(nvml=Rung(gpus=4, slow_by=2))
    life = Life(world.ladder("nvml")).live(3)
    assert life.ladder.reason.startswith("nvml (the driver): announces tensor activity; ")
    assert life.live(1).ladder.reason.startswith("nvml (the driver): sees tensor activity on 4 of 4 GPUs; ")


def test_a_source_closed_before_it_showed_anything_has_been_told_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    life = Life(World(nvml=Rung()).ladder("nvml")).live()
    life.ladder.close()
    assert [record.message for record in caplog.records] == [
        "source nvml (the driver): announces tensor activity; no other one is configured"
    ]


# -- when it dies --


def tries(life: Life, world: World, seconds: int) -> list[int]:
    """Return the seconds from now at which any source was opened."""
    begun, at = life.now, []
    for _ in range(seconds):
        before = len(world.opened())
        life.live()
        if len(world.opened()) > before:
            at.append((life.now - begun) // SECOND)
    return at


def test_an_engine_that_restarts_is_connected_to_again_and_no_other_is_asked() -> None:
    world = World(dcgm=Rung(), dcgm_exporter=Rung(), nvml=Rung())
    life = Life(world.ladder()).live(10)
    words = life.ladder.reason
    world.rungs["dcgm"].dead, world.rungs["dcgm"].refuses = "the connection is not valid any more", NO_ENGINE
    assert tries(life, world, 5) == [2, 3, 4, 5]
    assert [said for _, said in life.told] == ["the connection is not valid any more", *[f"dcgm: {NO_ENGINE}"] * 4]
    assert world.open_now == []
    world.rungs["dcgm"].dead = world.rungs["dcgm"].refuses = ""
    life.live(10)
    assert set(world.opened()) == {"dcgm"}
    assert (life.ladder.name, life.ladder.reason) == ("dcgm", words)
    assert life.lost() == [6]  # back within a second of the engine


def test_an_engine_that_stays_away_is_replaced_after_the_waits_and_taken_back_when_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world = World(dcgm=down(NO_ENGINE), dcgm_exporter=Rung(), nvml=Rung())
    life = Life(world.ladder()).live(10)
    world.rungs["dcgm-exporter"].dead = world.rungs["dcgm-exporter"].refuses = NO_PAGE
    world.events.clear()
    life.live(20)
    assert world.opened() == ["dcgm-exporter"] * SAME_SOURCE_TRIES + list(AUTO)
    assert life.ladder.reason == (
        f"nvml (the driver): sees tensor activity on 2 of 2 GPUs; refused: dcgm: {NO_ENGINE}; dcgm-exporter: {NO_PAGE}"
    )
    assert life.lost() == [9]  # eight tries a second apart, and the read that failed
    world.rungs["dcgm-exporter"].dead = world.rungs["dcgm-exporter"].refuses = ""
    life.live(RECHECK_INTERVAL // SECOND)
    assert life.ladder.reason == (
        "dcgm-exporter (http://127.0.0.1:9400/metrics): sees tensor activity on 2 of 2 GPUs; in place of nvml"
    )
    assert life.lost() == [9, 1]
    assert world.open_now == ["dcgm-exporter"]
    assert sum("source " in record.message for record in caplog.records) == 3


def test_the_waits_double_up_to_a_minute_and_a_reading_makes_them_short_again() -> None:
    world = World(nvml=Rung())
    life = Life(world.ladder("nvml")).live(3)
    world.rungs["nvml"].dead = "the driver was unloaded"
    quick = list(range(2, QUICK_TRIES + 2))
    assert tries(life, world, 190) == [*quick, *(31 + wait for wait in (1, 3, 7, 15, 31, 63, 123))]
    world.rungs["nvml"].dead = ""
    life.live(70)
    world.rungs["nvml"].dead = "again"
    assert tries(life, world, 5) == [2, 3, 4, 5]


def test_a_source_that_only_ever_sets_its_baseline_is_not_tried_every_second() -> None:
    world = World(nvml=Rung())
    life = Life(world.ladder("nvml"))
    for _ in range(QUICK_TRIES + 5):  # the first read works, the second does not
        world.rungs["nvml"].dead = ""
        while not life.ladder.name:
            life.live()
        world.rungs["nvml"].dead = "gone"
        life.live()
    gone = [moment for moment, said in life.told if said == "gone"]
    assert [after - before for before, after in pairwise(gone)][-6:] == [2, 2, 2, 3, 5, 9]


@pytest.mark.parametrize(("chance", "factor"), [(0.0, 1 - JITTER), (0.5, 1.0), (1.0, 1 + JITTER)])
def test_waits_are_spread_by_chance_and_never_longer_than_a_minute(chance: float, factor: float) -> None:
    ladder = World(nvml=down(NO_DRIVER)).ladder("nvml", chance=chance)
    now = 0
    for failures in range(-QUICK_TRIES, 12):
        with pytest.raises(SourceError, match="libnvidia"):
            ladder.read(now)
        wait = min(MAX_WAIT, round(min(60, 2 ** max(0, failures)) * factor * SECOND))
        with pytest.raises(SourceError, match="next try in"):
            ladder.read(now + wait - 1)
        now += wait


@pytest.mark.slow
def test_a_thousand_nodes_do_not_come_back_at_once() -> None:
    seeded = random.Random(7)  # noqa: S311  spreads retries
    moments = set()
    for _ in range(1000):
        world = World(nvml=down(NO_DRIVER))
        life = Life(SourceSelector(("nvml",), world.open, chance=seeded.random))
        moments.add(tuple(tries(life, world, 60)))
    assert len(moments) > 20


# -- whether there is something better --


def looks(world: World, life: Life, seconds: int) -> list[tuple[int, str]]:
    """Return the seconds from now at which each other source was tried."""
    begun, found = life.now, []
    for _ in range(seconds):
        world.events.clear()
        life.live()
        found += [((life.now - begun) // SECOND, name) for name in world.opened()]
    return found


def test_the_rungs_above_are_asked_every_five_minutes_one_at_a_time() -> None:
    world = World(dcgm=down(NO_ENGINE), dcgm_exporter=blind(), nvml=Rung())
    life = Life(world.ladder()).live(1)
    assert looks(world, life, 610) == [(300, "dcgm"), (301, "dcgm-exporter"), (602, "dcgm"), (603, "dcgm-exporter")]
    assert life.ladder.name == "nvml"
    assert life.lost() == []
    assert world.open_now == ["nvml"]


def test_from_the_top_no_other_is_asked() -> None:
    world = World(dcgm=Rung(), dcgm_exporter=Rung(), nvml=Rung())
    assert looks(world, Life(world.ladder()).live(1), 1000) == []


def test_a_source_without_profiling_makes_way_for_one_below_that_has_it_by_now() -> None:
    world = World(dcgm=blind(), dcgm_exporter=down(NO_PAGE), nvml=blind())
    life = Life(world.ladder()).live(10)
    world.rungs["dcgm-exporter"] = Rung()
    life.live(310)
    assert life.ladder.reason == (
        "dcgm-exporter (http://127.0.0.1:9400/metrics): sees tensor activity on 2 of 2 GPUs; in place of dcgm"
    )
    assert life.lost() == [1]


def test_of_two_without_profiling_the_upper_one_is_taken_and_kept() -> None:
    world = World(dcgm=down(NO_ENGINE), dcgm_exporter=down(NO_PAGE), nvml=blind())
    life = Life(world.ladder()).live(10)
    world.rungs["dcgm"] = blind()
    life.live(2000)
    assert life.ladder.name == "dcgm"
    assert life.lost() == [1]


def test_the_one_in_use_is_closed_before_the_better_one_is_read() -> None:
    world = World(dcgm=down(NO_ENGINE), nvml=Rung())
    life = Life(world.ladder("dcgm", "nvml")).live(10)
    world.rungs["dcgm"] = Rung()
    world.events.clear()
    life.live(300)
    after = world.events[world.events.index("open dcgm") :]
    assert after[:3] == ["open dcgm", "close nvml", "read dcgm"]


@pytest.mark.slow
def test_a_better_one_that_cannot_be_read_after_all_costs_one_reading_and_is_asked_less_often() -> None:
    world = World(dcgm=down(NO_ENGINE), nvml=Rung())
    life = Life(world.ladder("dcgm", "nvml")).live(1)
    world.rungs["dcgm"] = Rung(dead="requires root")
    asked = [moment for moment, name in looks(world, life, 8 * RECHECK_INTERVAL // SECOND) if name == "dcgm"]
    # Each time once to look and once to choose again, when the first read has failed.
    assert asked == [300, 301, 901, 902, 2102, 2103]
    assert life.ladder.name == "nvml"
    assert life.lost() == [1, 1, 1]
    assert "refused: dcgm: opened, but the first read failed: requires root" in life.ladder.reason
    assert life.told == []
    life.live(10 * MAX_RECHECK_INTERVAL // SECOND)
    apart = [after - before for before, after in pairwise(m for m, name in looks(world, life, 8000) if name == "dcgm")]
    assert max(apart) == MAX_RECHECK_INTERVAL // SECOND
    world.rungs["dcgm"].dead = ""
    life.live(MAX_RECHECK_INTERVAL // SECOND + 10)
    assert life.ladder.name == "dcgm"
    world.rungs["dcgm"].dead = world.rungs["dcgm"].refuses = NO_ENGINE
    life.live(20)
    asked = [moment for moment, name in looks(world, life, 1000) if name == "dcgm"]
    assert [after - before for before, after in pairwise(asked)] == [RECHECK_INTERVAL // SECOND + 1] * 2


def test_resync_and_pause_reach_the_source_in_use(caplog: pytest.LogCaptureFixture) -> None:
    world = World(nvml=Rung())
    ladder = world.ladder("nvml")
    for act in (ladder.resync, ladder.close):
        act()
    assert world.events == []
    ladder.read(SECOND)
    with caplog.at_level("WARNING"):
        for act in (ladder.resync, ladder.pause, ladder.close, ladder.close):
            act()
    assert world.events == ["open nvml", "read nvml", "resync nvml", "pause nvml", "close nvml"]
    assert not caplog.messages


def test_a_source_that_was_not_open_during_a_pause_is_paused_once_before_its_first_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A daemon that was killed during the pause left DCGM paused: the read after `pause` resumes it."""
    world = World(dcgm=Rung(refuses="engine down"), nvml=Rung())
    ladder = world.ladder("dcgm", "nvml")
    ladder.pause()
    assert "cannot pause DCGM for other clients" in caplog.text
    assert world.events == []
    ladder.read(SECOND)
    assert world.events == ["open dcgm", "open nvml", "pause nvml", "read nvml"]
    world.rungs["dcgm"].refuses = ""
    world.events.clear()
    later = SECOND + RECHECK_INTERVAL
    ladder.try_better(later)
    ladder.read(later + SECOND)
    ladder.close()
    assert world.events == ["open dcgm", "pause dcgm", "close nvml", "read dcgm", "close dcgm"]
    world.events.clear()
    ladder.read(later + 2 * SECOND)
    assert world.events == ["open dcgm", "read dcgm"]


# -- as configured --


def addressed(flags: dict[str, Any]) -> Config:
    return load(None, environ={}, flags=flags)


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"source": "dcgm", "dcgm.address": "unix:/run/dcgm"}, "dcgm (host engine at unix:/run/dcgm): "),
        ({"source": "dcgm", "dcgm.address": "embedded"}, "dcgm (an engine of our own): "),
        ({"source": "dcgm-exporter", "dcgm_exporter.url": "http://[::1]:9/m"}, "dcgm-exporter (http://[::1]:9/m): "),
        ({"source": "nvml"}, "nvml (the driver's own library): "),
    ],
)
def test_the_words_say_where_the_configured_source_is(
    flags: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(dcgm=Rung(), dcgm_exporter=Rung(), nvml=Rung())
    opener: Callable[[str, Config], TelemetrySource] = lambda name, _: world.open(name)  # noqa: E731
    monkeypatch.setattr("exporter.sources.selector.open_source", opener)
    life = Life(open_selector(addressed(flags))).live(3)
    assert life.ladder.reason.startswith(where)
    assert world.opened() == [flags["source"]]


def test_auto_asks_every_source_in_the_table_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(name: str, _: Config) -> TelemetrySource:
        asked.append(name)
        raise SourceError("no")

    monkeypatch.setattr("exporter.sources.selector.open_source", refuse)
    with pytest.raises(SourceError):
        open_selector(addressed({})).read(0)
    assert asked == list(SOURCES)
