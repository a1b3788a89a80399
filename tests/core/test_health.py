"""Board health: counters, conditions that make a GPU unavailable, and missing values."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.config import ConfigError, load
from exporter.core.board_health import CLOCK_LIMITERS
from exporter.core.exposition import render
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.metrics import METRICS
from exporter.core.model import MS, Health, Observation, Reading, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.trace import TraceHeader, TraceWriter, read_trace
from tests.core.test_laws import POLICY, finite, halved, relaxed, run, signals, totals
from tests.worlds import RESTING, SPINNING, WORKING, S, cut, device, first, held, reading, seen

FELL_OFF_THE_BUS, PAGE_RETIRED = 79, 63


def told(*xids: int, uuid: str = "GPU-0", **more: Any) -> tuple[Health, ...]:
    return (Health(uuid, xids, **more),)


def opened(policy: Policy | None = None) -> Ledger:
    """One GPU of one job, after ten seconds of work."""
    ledger = Ledger(policy)
    advance(ledger, first([device()], [held(), *(held(part.uuid) for part in cut(4, 3)[1:])]))
    advance(ledger, seen(10, reading(0, 10)))
    return ledger


def mood(ledger: Ledger, uuid: str = "GPU-0") -> tuple[State, str, float]:
    gpu = ledger.gpus[uuid]
    return gpu.state, gpu.reason, gpu.since / S


def lost(ledger: Ledger, leak: str, uuid: str = "GPU-0") -> float:
    return ledger.gpus[uuid].book.parts[LEAK_NAMES.index(leak)] / S


def test_a_fatal_error_makes_a_gpu_unavailable_from_the_observation_on() -> None:
    """Readings after a fatal Xid are unavailable, whatever they show; earlier ones stay as booked."""
    ledger = opened()
    advance(ledger, seen(20, reading(10, 20), health=told(FELL_OFF_THE_BUS)))
    advance(ledger, seen(30, reading(20, 30, RESTING)))
    assert mood(ledger) == (State.UNAVAILABLE, "xid", 10.0)
    assert lost(ledger, "unavailable") == 20.0


def test_it_stands_while_nothing_is_seen_or_believed() -> None:
    """Gaps and stale, incomplete or contradictory readings are no evidence of a kernel."""
    ledger = opened()
    advance(ledger, seen(20, health=told(FELL_OFF_THE_BUS)))
    advance(ledger, seen(30, reading(20, 30, distrust="stale")))
    advance(ledger, seen(40, reading(30, 40, gr_engine_active=None, gpu_utilization=None)))
    advance(ledger, seen(50, reading(40, 50, gr_engine_active=0.009, sm_active=0.0, tensor_active=0.0)))
    advance(ledger, seen(60, reading(50, 60, gr_engine_active=0.5, sm_active=0.0, tensor_active=0.0)))
    assert mood(ledger) == (State.UNAVAILABLE, "xid", 10.0)
    assert lost(ledger, "unobserved") == 0.0


def test_a_kernel_in_a_later_interval_ends_it_at_that_interval_s_beginning() -> None:
    ledger = opened()
    advance(ledger, seen(20, reading(10, 20), health=told(FELL_OFF_THE_BUS)))
    advance(ledger, seen(40, reading(20, 25, RESTING), reading(25, 40)))
    advance(ledger, seen(50, reading(40, 50, RESTING)))
    assert mood(ledger) == (State.STALLED, "idle_context", 40.0)
    assert lost(ledger, "unavailable") == 15.0


def test_an_interval_that_began_before_the_error_was_told_proves_nothing() -> None:
    """With late values, [15, 25) was in progress when the error was reported at 20."""
    ledger = opened()
    advance(ledger, seen(20, settled=15 * S, health=told(FELL_OFF_THE_BUS)))
    advance(ledger, seen(25, reading(15, 25)))
    assert mood(ledger)[:2] == (State.UNAVAILABLE, "xid")
    advance(ledger, seen(30, reading(25, 30)))
    assert mood(ledger) == (State.ACTIVE, "computing", 25.0)


def test_a_second_fatal_error_counts_from_its_own_time() -> None:
    ledger = opened()
    advance(ledger, seen(20, health=told(FELL_OFF_THE_BUS)))
    advance(ledger, seen(30, reading(20, 30)))
    advance(ledger, seen(40, reading(30, 40), health=told(FELL_OFF_THE_BUS)))
    assert mood(ledger) == (State.UNAVAILABLE, "xid", 30.0)
    advance(ledger, seen(50, reading(40, 50)))
    assert mood(ledger)[0] is State.ACTIVE


def test_an_error_that_is_not_fatal_is_counted_and_changes_nothing() -> None:
    plain, troubled = opened(), opened()
    for ledger, xids in ((plain, ()), (troubled, (PAGE_RETIRED, 13))):
        advance(ledger, seen(20, reading(10, 20), health=told(*xids)))
        advance(ledger, seen(30, reading(20, 30, RESTING)))
    assert totals(troubled) == totals(plain)
    assert mood(troubled)[0] is State.STALLED
    view = take_snapshot(troubled, DaemonMetadata()).gpus[0]
    assert (view.xids, view.last_xid) == (2, 13)


def test_errors_add_up_and_the_last_is_kept() -> None:
    """A Health without an error keeps the error count and condition, and replaces all other values."""
    ledger = opened()
    advance(ledger, seen(20, health=told(13, PAGE_RETIRED, ecc_corrected=4)))
    advance(ledger, seen(30, health=told(13)))
    advance(ledger, seen(40, health=told(nvlink_errors=7)))
    advance(ledger, seen(50))
    view = take_snapshot(ledger, DaemonMetadata()).gpus[0]
    assert (view.xids, view.last_xid) == (3, 13)
    assert view.health == Health("GPU-0", nvlink_errors=7)


def test_an_error_of_one_gpu_is_no_other_s() -> None:
    ledger = Ledger()
    advance(ledger, first([device(), device("GPU-1", "1")]))
    advance(ledger, seen(10, health=told(FELL_OFF_THE_BUS, uuid="GPU-1") + told(FELL_OFF_THE_BUS, uuid="GPU-9")))
    assert [mood(ledger, uuid)[1] for uuid in ("GPU-0", "GPU-1")] == ["gap", "xid"]
    assert [gpu.xids for gpu in take_snapshot(ledger, DaemonMetadata()).gpus] == [0, 1]


def test_a_condition_the_source_names_is_told_before_the_error() -> None:
    """The condition "lost" takes precedence over an Xid."""
    ledger = opened()
    advance(ledger, seen(20, devices=[device(condition="lost")], health=told(FELL_OFF_THE_BUS)))
    assert mood(ledger)[:2] == (State.UNAVAILABLE, "lost")


RESET, DRAIN_AND_RESET = 1, 4
IN_RECOVERY = {"devices": (device(condition="recovery"),)}


def test_a_gpu_in_recovery_works_for_its_holder_once_a_kernel_has_run() -> None:
    """NVIDIA lets work that is not affected finish before the GPU is drained and reset; new work should not begin."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(end=50 * S)]))
    advance(ledger, seen(10, reading(0, 10)))
    advance(ledger, seen(20, reading(10, 20), health=told(recovery_action=DRAIN_AND_RESET), **IN_RECOVERY))
    assert mood(ledger) == (State.UNAVAILABLE, "recovery", 10.0), "this reading began before it was requested"
    advance(ledger, seen(40, reading(20, 30), reading(30, 40, RESTING), health=told(13)))
    assert mood(ledger) == (State.STALLED, "idle_context", 30.0)
    advance(ledger, seen(60, reading(40, 50), reading(50, 60, RESTING | {"processes": ()})))
    assert mood(ledger) == (State.UNAVAILABLE, "recovery", 50.0)
    assert lost(ledger, "unavailable") == 10.0 + 10.0


def test_another_action_has_to_be_outlived_anew() -> None:
    ledger = opened()
    advance(ledger, seen(20, health=told(recovery_action=DRAIN_AND_RESET), **IN_RECOVERY))
    advance(ledger, seen(30, reading(20, 30)))
    assert mood(ledger)[0] is State.ACTIVE
    advance(ledger, seen(30, health=told(recovery_action=RESET)))
    advance(ledger, seen(40, reading(30, 40, RESTING)))
    assert mood(ledger) == (State.UNAVAILABLE, "recovery", 30.0)
    advance(ledger, seen(50, devices=[device()], health=told(recovery_action=0)))
    advance(ledger, seen(60, reading(50, 60, RESTING)))
    assert mood(ledger)[0] is State.STALLED


def test_a_fatal_error_after_the_last_kernel_is_told_in_spite_of_a_recovery_that_was_outlived() -> None:
    ledger = opened()
    advance(ledger, seen(20, health=told(recovery_action=DRAIN_AND_RESET), **IN_RECOVERY))
    advance(ledger, seen(30, reading(20, 30)))
    advance(ledger, seen(40, reading(30, 40, RESTING), health=told(FELL_OFF_THE_BUS)))
    assert mood(ledger) == (State.UNAVAILABLE, "xid", 30.0)
    advance(ledger, seen(50, reading(40, 50)))
    assert mood(ledger)[0] is State.ACTIVE


def test_an_instance_that_works_shows_that_its_board_does() -> None:
    board, *parts = cut(4, 3)
    ledger = Ledger()
    advance(ledger, first([board, *parts], [held(part.uuid) for part in parts]))
    broken = [replace(one, condition="recovery") for one in (board, *parts)]
    advance(ledger, seen(10, devices=broken, health=told(recovery_action=DRAIN_AND_RESET)))
    one, other = (part.uuid for part in parts)
    advance(ledger, seen(20, reading(10, 20, uuid=one), reading(10, 20, RESTING, uuid=other)))
    assert [mood(ledger, uuid)[0] for uuid in (one, other)] == [State.ACTIVE, State.STALLED]


def test_which_errors_are_fatal_is_the_policys_word() -> None:
    ledger = opened(Policy(fatal_xids=(13,)))
    advance(ledger, seen(20, health=told(FELL_OFF_THE_BUS)))
    assert mood(ledger)[0] is State.UNOBSERVED
    advance(ledger, seen(30, health=told(13)))
    assert mood(ledger)[0] is State.UNAVAILABLE


@pytest.mark.parametrize("xid", Policy().fatal_xids)
def test_every_error_of_the_default_table_is_fatal(xid: int) -> None:
    ledger = opened()
    advance(ledger, seen(20, health=told(xid)))
    assert mood(ledger)[:2] == (State.UNAVAILABLE, "xid")


def test_no_error_of_an_application_is_in_the_default_table() -> None:
    """13, 31, 43 and 45 end a process, 48, 63, 64, 92 and 94 are contained; 74 is a link's."""
    assert not {13, 31, 43, 45, 48, 63, 64, 74, 92, 94} & set(Policy().fatal_xids)


def test_a_boards_fatal_error_takes_its_instances_with_it_and_a_kernel_on_one_brings_them_all_back() -> None:
    """Health belongs to the board: an instance has none, and a board in MIG mode runs nothing itself."""
    parts = cut(4, 3)
    ledger = opened()
    advance(ledger, seen(10, devices=parts))
    advance(ledger, seen(20, *(reading(10, 20, uuid=d.uuid) for d in parts[1:]), health=told(FELL_OFF_THE_BUS)))
    assert {mood(ledger, d.uuid)[:2] for d in parts} == {(State.UNAVAILABLE, "xid")}
    rows = [reading(20, 30, s, d.uuid) for s, d in zip((RESTING, RESTING, WORKING), parts, strict=True)]
    advance(ledger, seen(30, *rows))
    assert [mood(ledger, d.uuid)[0] for d in parts] == [State.STALLED, State.STALLED, State.ACTIVE]
    assert {lost(ledger, "unavailable", d.uuid) for d in parts} == {10 * d.weight / 1e6 for d in parts}


def test_instances_smooth_their_power_if_the_board_does() -> None:
    """With power smoothing, power does not rule out a spin on an instance; without it, it does.

    The job's other instance is not seen: a hang after half an hour.
    """
    for smooths, state in ((True, State.HUNG), (False, State.ACTIVE), (None, State.ACTIVE)):
        ledger = opened()
        advance(ledger, seen(10, devices=cut(4, 3), health=told(power_smoothing=smooths)))
        advance(ledger, seen(30, reading(10, 30, uuid=cut(4, 3)[1].uuid)))
        warm = SPINNING | {"power_watts": 600.0}
        advance(ledger, seen(1900, reading(30, 1900, warm, cut(4, 3)[1].uuid), allocations_at=1900 * S))
        assert mood(ledger, cut(4, 3)[1].uuid)[0] is state


def limited(ledger: Ledger, uuid: str = "GPU-0") -> dict[str, float]:
    gpu = next(gpu for gpu in take_snapshot(ledger, DaemonMetadata()).gpus if gpu.device.uuid == uuid)
    return {name: nanoseconds / S for name, nanoseconds in gpu.limited}


@pytest.mark.parametrize(
    ("bits", "groups"),
    [
        (0x000, ""), (0x001, ""), (0x004, "power"), (0x005, "power"), (0x020, "thermal"), (0x040, "thermal"),
        (0x008, "hardware"), (0x080, "hardware"), (0x002, "settings"), (0x010, "settings"), (0x100, "settings"),
        (0x024, "power thermal"), (0x060, "thermal"), (0x1FE, "power thermal hardware settings"), (0x200, ""), (-1, ""),
    ],
)  # fmt: skip
def test_time_under_a_clock_limit_is_counted_by_its_reason(bits: int, groups: str) -> None:
    """Each group counts, two bits of one group count once; the idle bit and unknown bits do not count."""
    ledger = opened()
    advance(ledger, seen(13, reading(10, 13, clock_event_reasons=bits)))
    assert limited(ledger) == {name: 3.0 if name in groups.split() else 0.0 for name in CLOCK_LIMITERS}


def test_limits_that_were_never_seen_are_not_zero_but_absent() -> None:
    """Distrusted readings and gaps add no limited time."""
    ledger = opened()
    advance(ledger, seen(20, reading(10, 20, clock_event_reasons=4, distrust="stale")))
    advance(ledger, seen(30, reading(20, 30, clock_event_reasons=4, gr_engine_active=None, gpu_utilization=None)))
    advance(ledger, seen(40))
    assert limited(ledger) == {}
    advance(ledger, seen(45, reading(40, 45, clock_event_reasons=0)))
    assert limited(ledger) == dict.fromkeys(CLOCK_LIMITERS, 0.0)


def test_limited_seconds_of_a_board_are_wall_seconds_whatever_is_left_of_it() -> None:
    ledger = opened()
    advance(ledger, seen(20, reading(10, 20, RESTING | {"clock_event_reasons": 4}), devices=cut(4, 3)))
    assert limited(ledger)["power"] == 10.0


whether = st.one_of(st.none(), st.booleans())
counts = st.one_of(st.none(), st.integers(0, 1 << 40))
degrees = st.one_of(st.none(), st.floats(-50, 150))
healths = st.builds(
    Health,
    uuid=st.sampled_from(["GPU-0", "GPU-0", "GPU-1", "GPU-9"]),
    xids=st.lists(st.sampled_from([13, 79]), max_size=3).map(tuple),
    recovery_action=st.one_of(st.none(), st.integers(0, 5)),
    ecc_corrected=counts,
    ecc_uncorrected=counts,
    row_remap_pending=whether,
    row_remap_failed=whether,
    nvlink_errors=counts,
    memory_temperature_celsius=degrees,
    temperature_margin_celsius=degrees,
    power_smoothing=whether,
)


@st.composite
def troubled(draw: st.DrawFn) -> list[Observation]:
    """A board with changing MIG layouts beside another, with errors at any time and any clock limits."""
    other, parts = device("GPU-1", "1"), draw(st.sampled_from([cut(), cut(4, 3)]))
    story = [first([other, *parts], [held(d.uuid) for d in (other, *parts, *cut(4, 3))])]
    for _ in range(draw(st.integers(1, 6))):
        before = story[-1].at
        now = before + draw(st.integers(1, 3_000)) * MS
        if draw(st.integers(0, 3)) == 0:
            parts = draw(st.sampled_from([cut(), cut(4, 3)]))
        rows = [
            Reading(d.uuid, before, now, **draw(signals()), clock_event_reasons=draw(st.integers(0, 0x1FF)))
            for d in (other, *parts)
            if draw(st.integers(0, 5))
        ]
        health = tuple(draw(st.lists(healths, max_size=2)))
        story.append(Observation(now, now, readings=tuple(rows), devices=(other, *parts), health=health))
    return finite(story)


@pytest.mark.untraced
@pytest.mark.slow
@relaxed
@given(troubled())
def test_a_recorded_story_of_troubles_says_the_same_bytes_again(story: list[Observation]) -> None:
    """Round trip through the trace format keeps every observation and every derived figure.

    Fails when `TraceWriter.append` writes an observation without its health.
    """
    file = BytesIO()
    with TraceWriter(file, TraceHeader()) as writer:
        for observation in story:
            writer.append(observation)
    file.seek(0)
    again = list(read_trace(file))
    assert again == story
    once = render(take_snapshot(run(story), DaemonMetadata()), metrics=METRICS)
    assert render(take_snapshot(run(again), DaemonMetadata()), metrics=METRICS) == once


@pytest.mark.untraced
@pytest.mark.slow
@relaxed
@given(troubled())
def test_troubles_lose_no_time_and_no_error(story: list[Observation]) -> None:
    """Conservation holds; every error of a listed GPU is counted, no counter falls, limited time stays within time.

    Fails when `BoardHealth.update` counts a Health's errors once whatever their number.
    """
    ledger, before = Ledger(POLICY), dict[str, int]()
    for observation in story:
        advance(ledger, observation)
        for gpu in take_snapshot(ledger, DaemonMetadata()).gpus:
            uuid = gpu.device.uuid
            assert all(0 <= nanoseconds <= observation.at for _, nanoseconds in gpu.limited)
            assert gpu.xids >= before.get(uuid, 0)
            before[uuid] = gpu.xids
    assert ledger.conservation_errors == 0
    for uuid in ("GPU-0", "GPU-1"):
        assert ledger.gpus[uuid].board_health.xids == sum(
            len(h.xids) for o in story for h in o.health if h.uuid == uuid
        )
    assert sum(gpu.book.paid for gpu in ledger.gpus.values()) == 2 * story[-1].at


def one_instance_wakes() -> list[Observation]:
    """A board with two instances reports a fatal Xid; then the second instance computes while the first is idle."""
    parts = cut(4, 3)
    rows = reading(1, 3, RESTING, parts[1].uuid), reading(1, 3, WORKING, parts[2].uuid)
    return [first(parts, [held(d.uuid) for d in parts]), seen(1, health=told(FELL_OFF_THE_BUS)), seen(3, *rows)]


@pytest.mark.untraced
@pytest.mark.slow
@relaxed
@given(troubled())
@example(one_instance_wakes())
def test_cutting_a_reading_in_two_changes_nothing_about_an_error(story: list[Observation]) -> None:
    """Both halves in the same observation. Fails when a kernel on one instance clears only those read after it."""
    assert totals(run(halved(story))) == totals(run(story))


def test_fatal_errors_are_a_list_in_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "gpu-efficiency.toml"
    path.write_text("[policy]\nfatal_xids = [79, 154]\n", encoding="utf-8")
    assert load(path, environ={}).policy.fatal_xids == (79, 154)
    assert load(path, environ={"GPU_EFFICIENCY_POLICY_FATAL_XIDS": "[46, 62]"}).policy.fatal_xids == (46, 62)
    path.write_text("[policy]\nfatal_xids = []\n", encoding="utf-8")
    assert load(path, environ={}).policy.fatal_xids == ()


@pytest.mark.parametrize(
    ("bad", "where"), [("79", r"\$.policy.fatal_xids`"), ('["79"]', r"\$.policy.fatal_xids\[0\]`")]
)
def test_a_list_of_fatal_errors_that_is_none_is_named(bad: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu-efficiency.toml"
    path.write_text(f"[policy]\nfatal_xids = {bad}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=where):
        load(path, environ={})
