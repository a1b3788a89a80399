"""The benchmarks of the telemetry measure what they name: short runs of each, and what they do when it goes wrong."""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.node.sampling import CASES, Said, check, said_in, sampling
from benchmarks.node.sampling import rows as sampling_rows
from benchmarks.node.ticks import Booked, tick
from benchmarks.rig.meter import BINDINGS, LEDGER, LIBRARY, OURS, Meter
from benchmarks.rig.stand_ins import GPUS, START, Played
from exporter.core.model import SECOND
from tests.clocks import JumpClock
from tests.dcgm_stub.bindings import missing
from tests.rigs import FakeSource
from tests.shared_library import compiler
from tests.worlds import WORKING, device

FAST = CASES[0]


@pytest.fixture
def _stand_ins() -> None:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in DCGM")
    if reason := missing():
        pytest.skip(reason)


def number(text: str) -> float:
    return float(text.split(maxsplit=1)[0].replace(",", ""))


# -- whose time it was --


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def passes(self, nanoseconds: int, then: Callable[[], object] = lambda: None) -> Callable[[], object]:
        """A call that takes so long, does something, and takes as long again."""

        def call() -> object:
            self.now += nanoseconds
            done = then()
            self.now += nanoseconds
            return done

        return call


def test_every_moment_is_laid_to_the_innermost_call() -> None:
    """Ours calls the bindings, they the library, and that calls us: as DCGM does with values."""
    clock = Hand()
    meter = Meter(clock)
    ear = meter.timed(clock.passes(1), OURS)
    library = meter.timed(clock.passes(10, ear), LIBRARY)
    bindings = meter.timed(clock.passes(100, library), BINDINGS)
    clock.passes(1000, bindings)()
    meter.timed(clock.passes(10000), LEDGER)()
    assert meter.take() == [2002, 20000, 200, 20]
    assert meter.take() == [0, 0, 0, 0]


def test_a_call_that_fails_still_ends() -> None:
    clock = Hand()
    meter = Meter(clock)

    def fails() -> None:
        clock.now += 5
        raise LookupError

    with pytest.raises(LookupError):
        meter.timed(fails, LIBRARY)()
    clock.now += 7
    assert meter.take() == [7, 0, 0, 5]


def test_bindings_are_split_from_their_library() -> None:
    clock = Hand()
    meter = Meter(clock)
    nvml: Any = ModuleType("pynvml")
    nvml.nvmlLib = type("Library", (), {"nvmlAsk": staticmethod(clock.passes(10))})()
    nvml._nvmlGetFunctionPointer_cache = {"nvmlAsk": "stale"}

    def nvmlAsk() -> None:  # noqa: N802  the vendor's name
        clock.passes(100, nvml.nvmlLib.nvmlAsk)()

    nvml.nvmlAsk = nvmlAsk
    meter.split(nvml, nvml)
    clock.passes(1000, nvml.nvmlAsk)()
    assert meter.take() == [2000, 0, 200, 20]
    assert nvml._nvmlGetFunctionPointer_cache == {}


def test_what_the_library_tells_us_we_take_in_at_our_own_expense() -> None:
    """DCGM gives values by calling back, from within its own call."""
    clock = Hand()
    meter = Meter(clock)
    dcgm: Any = ModuleType("dcgm_agent")
    dcgm.dcgmLib, dcgm._dcgmGetFunctionPointer_cache = ModuleType("library"), {}
    dcgm.dcgmFieldValueEntityEnumeration_f = lambda hear: hear
    meter.split(dcgm, dcgm)
    heard = dcgm.dcgmFieldValueEntityEnumeration_f(clock.passes(1))
    meter.timed(clock.passes(10, heard), LIBRARY)()
    assert meter.take() == [2, 0, 0, 20]


# -- a tick --


class World(Played):
    """A source written by hand, of as many GPUs as the stand-ins have."""

    def __init__(self, signals: dict[str, Any]) -> None:
        self.fake = FakeSource()
        self.fake.devices = tuple(device(f"GPU-{n}", str(n)) for n in range(GPUS))
        self.fake.signals_of = {each.uuid: signals for each in self.fake.devices}
        super().__init__(self.fake, JumpClock(START), lambda: None, lambda: None)


ALL = WORKING | {
    **dict.fromkeys(("sm_occupancy", "fp64_active", "fp16_active"), 0.1),
    **dict.fromkeys(("energy_joules", "temperature_celsius", "memory_used_bytes", "memory_total_bytes"), 60.0),
}


def booked(signals: dict[str, Any], *, trouble: bool = False) -> Booked:
    made = Booked(World(signals))
    for second in range(1, 5):
        made.world.run(START + second * SECOND)
        if trouble and second == 3:
            made.world.fake.devices = made.world.fake.devices[1:]  # type: ignore[attr-defined]
        made.tick(START + second * SECOND)
    return made


def test_a_tick_is_read_and_booked_for_the_job_that_holds_the_gpus() -> None:
    done = booked(ALL)
    assert done.checked() >= 20
    (job,) = done.agent.ledger.jobs.values()
    assert job.book.engine > 0
    assert done.agent.latest() is not None


def test_a_tick_of_too_few_fields_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match=r"'fields of a reading': 1\d"):
        booked(WORKING).checked()


def test_a_tick_without_one_of_the_gpus_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="'readings of a tick': 7"):
        booked(ALL, trouble=True).checked()


def test_figures_that_the_ledger_refuses_are_not_measured() -> None:
    with pytest.raises(RuntimeError, match="'refused'"):
        booked(ALL | {"tensor_active": 7.0}).checked()


@pytest.mark.benchmark
@pytest.mark.usefixtures("_stand_ins")
def test_ticks_over_both_bindings_are_divided() -> None:
    found = tick(quick=True)
    assert [line.budget for line in found if line.budget] == ["<= 5 ms", "<= 5 ms"]
    for name, of in zip(("DCGM", "NVML"), (found[:5], found[5:]), strict=True):
        ours, ledger, bindings, library, whole = [number(line.median) for line in of]
        assert all(name in line.what for line in of)
        assert 0 < ledger < ours
        assert min(bindings, library) > 0
        assert whole > 0
        assert int(re.search(r"x (\d+) fields", of[0].what)[1]) >= 20  # type: ignore[index]


# -- whole daemons --

PAGE = """
gpu_efficiency_ticks_total 12
gpu_efficiency_late_ticks_total 3
gpu_efficiency_paid_seconds_total{uuid="GPU-0",gpu="0"} 1.25
gpu_efficiency_paid_seconds_total{uuid="GPU-1",gpu="1"} 1.5
gpu_efficiency_seconds_total{uuid="GPU-0",gpu="0",leak="useful",layer="useful"} 1
gpu_efficiency_seconds_total{uuid="GPU-0",gpu="0",leak="unobserved",layer="unobserved"} 0.25
gpu_efficiency_job_seconds_total{job_id="41",leak="unobserved",layer="unobserved"} 7
"""


def test_what_a_daemon_says_of_itself_is_read_off_its_page() -> None:
    assert said_in(PAGE, 7.0) == Said(at=7.0, devices=2, ticks=12, paid=2.75, unseen=0.25)


BEFORE, AFTER = Said(5.0, GPUS, 100, 100.0, 4.0), Said(35.0, GPUS, 400, 100.0 + 30 * GPUS, 28.0)
"""Of a daemon that ran for thirty seconds at ten ticks a second, a tenth of them unseen."""


def test_a_daemon_is_judged_by_all_of_its_time() -> None:
    used = [1.0, 2.0, 6.0]
    cpu, unobserved = sampling_rows(FAST, BEFORE, AFTER, used, often="3 x 10 s")
    assert (cpu.median, cpu.budget, cpu.met) == ("2.00 %", "<= 3 %", True)
    assert sampling_rows(replace(FAST, budget=2.9), BEFORE, AFTER, used, often="3 x 10 s")[0].met is False
    assert (unobserved.median, unobserved.often) == ("10.00 %", "300 ticks")


@pytest.mark.parametrize("wrong", [{"devices": 7}, {"ticks": 360}, {"paid": 100.0}])
def test_a_daemon_that_did_less_than_the_row_says_is_not_measured(wrong: dict[str, Any]) -> None:
    check(FAST, BEFORE, AFTER, share=0.9)
    with pytest.raises(RuntimeError, match="something else"):
        check(FAST, BEFORE, replace(AFTER, **wrong), share=0.9)


@pytest.mark.benchmark
@pytest.mark.usefixtures("_stand_ins")
def test_daemons_sample_fast_and_in_instances_and_are_scraped() -> None:
    found = sampling(quick=True)
    assert [line.budget for line in found if line.budget] == [f"<= {most} %" for most in (3, 3, 4, 4, 1, 6)]
    assert all(number(line.median) > 0 for line in found[::2])
