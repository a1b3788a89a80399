"""Bad input at the door of the core: counted under its reason, no other GPU touched, the law kept.

Each test spoils one GPU's readings in a sound story of two, plays both, and compares. Nothing raises.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf, nan
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import MS, SECOND, Device, Fault, Observation, Reading
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.scenarios.stage import Case, fed, play

SOUND = play(Case("throttled"))
"""Two GPUs, a reading of five seconds each, 1,500 s: at work from the first minute to the end."""
BAD, GOOD = SOUND.uuids
MINUTE = slice(100, 112)
"""The observations that are spoilt: twelve readings, from 495 s to 555 s."""
COUNT = 12
PERIOD = 5 * SECOND

Story = list[Observation]
Spoil = Callable[[Reading], Reading]


def spoilt(spoil: Spoil, where: slice = MINUTE) -> Story:
    """The sound story with one GPU's readings changed for a minute."""
    story = list(SOUND.observations)
    story[where] = [
        replace(o, readings=tuple(spoil(r) if r.uuid == BAD else r for r in o.readings)) for o in story[where]
    ]
    return story


def setting(**fields: Any) -> Spoil:
    return lambda reading: replace(reading, **fields)


def parts(ledger: Ledger, uuid: str) -> dict[str, int]:
    run = SOUND._replace(ledger=ledger)
    return run.book(uuid)


def played(story: Iterable[Observation], *, good: str = GOOD) -> Ledger:
    """Play a spoilt story; whatever it does to one GPU, the law holds and the other's book is as it was."""
    ledger, _ = fed(story)
    assert ledger.conservation_errors == 0
    assert parts(ledger, good) == parts(SOUND.ledger, GOOD)
    for gpu in ledger.gpus.values():
        assert sum(gpu.book.parts) == gpu.book.paid == gpu.book.until - gpu.book.since
        assert min(gpu.book.parts) >= 0
    for family in parse_text(render(take_snapshot(ledger, DaemonMetadata())).decode()):
        assert all(0 <= sample.value < inf for sample in family.samples), family.name
    return ledger


def changed(ledger: Ledger) -> dict[str, int]:
    """Nanoseconds each leak of the spoilt GPU gained or lost."""
    sound, now = parts(SOUND.ledger, BAD), parts(ledger, BAD)
    return {name: now[name] - sound[name] for name in sound if now[name] != sound[name]}


RATIOS = ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "fp32_active", "gpu_utilization")
AMOUNTS = (
    "pcie_tx_bytes_per_second", "nvlink_rx_bytes_per_second", "power_watts", "energy_joules", "sm_clock_hz",
    "enforced_power_limit_watts", "memory_used_bytes",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("field", [*RATIOS, *AMOUNTS])
@pytest.mark.parametrize(
    ("value", "reason"), [(nan, "not_finite"), (inf, "not_finite"), (-0.01, "negative"), (-inf, "negative")]
)
def test_what_is_no_number_or_less_than_nothing_counts_as_not_seen(field: str, value: float, reason: str) -> None:
    """One refusal a reading, under the reason; the rest of the reading is used as if the field were missing."""
    ledger = played(spoilt(setting(**{field: value})))
    assert ledger.rejected == {reason: COUNT}
    blank = played(spoilt(setting(**{field: None})))
    assert parts(ledger, BAD) == parts(blank, BAD)


@pytest.mark.parametrize("field", ["temperature_celsius", "sm_occupancy", "memory_total_bytes", "clock_event_reasons"])
@pytest.mark.parametrize("value", [nan, inf, -1.0])
def test_a_field_no_leak_depends_on_changes_no_leak_and_is_not_published(field: str, value: float) -> None:
    last = slice(len(SOUND.observations) - 1, None)
    fields: dict[str, Any] = {field: -1 if field == "clock_event_reasons" else value}
    assert not changed(played(spoilt(setting(**fields), last)))


@pytest.mark.parametrize("field", AMOUNTS[:4])
def test_a_bad_last_value_is_not_published(field: str) -> None:
    """`played` looks at all of /metrics: the newest reading is where gauges come from."""
    last = slice(len(SOUND.observations) - 1, None)
    assert sum(played(spoilt(setting(**{field: nan}), last)).rejected.values()) == 1


def published(ledger: Ledger, name: str) -> list[float]:
    """Every value of one metric that /metrics has now."""
    families = parse_text(render(take_snapshot(ledger, DaemonMetadata())).decode())
    return [s.value for family in families for s in family.samples if s.name == f"gpu_efficiency_{name}"]


@pytest.mark.parametrize("value", [nan, inf, -5.0])
def test_a_bad_memory_figure_is_not_published(value: float) -> None:
    """A job's memory is a sum over its GPUs: one bad figure is as one not seen, and does not spoil the rest."""
    last = slice(len(SOUND.observations) - 1, None)
    ledger, _ = fed(spoilt(setting(memory_used_bytes=value), last))
    blank, _ = fed(spoilt(setting(memory_used_bytes=None), last))
    assert ledger.rejected.total() == 1
    assert published(ledger, "job_memory_used_bytes") == published(blank, "job_memory_used_bytes")


def test_memory_that_nobody_sees_any_more_is_not_served_as_live() -> None:
    """The source is silent: as the GPU's own gauges vanish, so does what its job is said to use."""
    story = [replace(o, readings=()) if index >= MINUTE.start else o for index, o in enumerate(SOUND.observations)]
    ledger, _ = fed(story)
    assert published(ledger, "memory_used_bytes") == []
    assert published(ledger, "job_memory_used_bytes") == []


@pytest.mark.parametrize("field", RATIOS)
def test_slightly_above_one_is_one(field: str) -> None:
    """Up to 0.05 is rounding and skew: clamped, counted, used."""
    busy = {"gr_engine_active": 1.0, "sm_active": 1.0, "tensor_active": 1.0}
    ledger = played(spoilt(setting(**busy | {field: 1.05})))
    assert ledger.rejected == {"clamped": COUNT}
    assert parts(ledger, BAD) == parts(played(spoilt(setting(**busy | {field: 1.0}))), BAD)


@pytest.mark.slow
@pytest.mark.parametrize("field", RATIOS)
@pytest.mark.parametrize("value", [1.051, 2.0, 98.0, 1e300])
def test_far_above_one_is_not_seen(field: str, value: float) -> None:
    """98 is a percentage where a ratio should be: refused, not guessed."""
    ledger = played(spoilt(setting(**{field: value})))
    assert ledger.rejected == {"above_one": COUNT}
    assert parts(ledger, BAD) == parts(played(spoilt(setting(**{field: None}))), BAD)


KERNEL = ("exposed_communication", "memory_bound", "low_parallelism", "other_compute", "throttled", "useful")


def test_tensor_slightly_above_sm_is_clamped() -> None:
    ledger = played(spoilt(setting(gr_engine_active=0.9, sm_active=0.5, tensor_active=0.55)))
    assert ledger.rejected == {"clamped": COUNT}
    sound = played(spoilt(setting(gr_engine_active=0.9, sm_active=0.5, tensor_active=0.5)))
    assert parts(ledger, BAD) == parts(sound, BAD)


def test_tensor_far_above_sm_is_missing_and_the_kernel_time_unresolved() -> None:
    """t > s, where s is credible: without t nothing of g is known, 0.9 of a minute."""
    ledger = played(spoilt(setting(gr_engine_active=0.9, sm_active=0.4, tensor_active=0.5)))
    assert ledger.rejected == {"order": COUNT}
    assert changed(ledger)["unresolved"] == COUNT * PERIOD * 9 // 10


def test_sm_slightly_above_the_engine_is_clamped() -> None:
    ledger = played(spoilt(setting(gr_engine_active=0.6, sm_active=0.64, tensor_active=0.5)))
    assert ledger.rejected == {"clamped": COUNT}
    sound = played(spoilt(setting(gr_engine_active=0.6, sm_active=0.6, tensor_active=0.5)))
    assert parts(ledger, BAD) == parts(sound, BAD)


def test_sm_far_above_the_engine_is_missing() -> None:
    """One of s and t alone above g: that field is missing, the reading stands."""
    ledger = played(spoilt(setting(gr_engine_active=0.6, sm_active=0.9, tensor_active=0.5)))
    assert ledger.rejected == {"order": COUNT}
    sound = played(spoilt(setting(gr_engine_active=0.6, sm_active=None, tensor_active=0.5)))
    assert parts(ledger, BAD) == parts(sound, BAD)


@pytest.mark.parametrize(
    "fields",
    [
        {"gr_engine_active": 0.0},
        {"gr_engine_active": 0.1},
        {"gr_engine_active": 0.0, "sm_active": 0.0, "tensor_active": 0.0},
    ],
)
def test_a_zero_filled_engine_makes_the_reading_unobserved(fields: dict[str, float]) -> None:
    """s and t above g, or all zero beside a busy driver: not idle, not busy, but unseen for a minute."""
    ledger = played(spoilt(setting(**fields)))
    assert not ledger.rejected
    assert ledger.unobserved == {"zero_filled": COUNT * PERIOD}
    assert changed(ledger)["unobserved"] == COUNT * PERIOD


@pytest.mark.parametrize("word", ["stale", "blank"])
def test_what_the_source_does_not_vouch_for_is_unobserved(word: str) -> None:
    ledger = played(spoilt(setting(distrust=word)))
    assert not ledger.rejected
    assert ledger.unobserved == {word: COUNT * PERIOD}


def test_counters_that_were_reset_cost_energy_its_counter_and_nothing_else() -> None:
    """After a driver reload there is no difference to tell: the power stands in, within what it wavers."""
    ledger = played(spoilt(setting(energy_joules=None)))
    assert not ledger.rejected
    assert not changed(ledger)
    sound, now = (sum(led.gpus[BAD].book.energy) for led in (SOUND.ledger, ledger))
    assert now == pytest.approx(sound, rel=0.001)
    assert now != sound


def shifted(start: int, end: int) -> Spoil:
    """Move a reading's edges by nanoseconds."""
    return lambda reading: replace(reading, start=reading.start + start, end=reading.end + end)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shifted(1, 0), "bad_interval"),
        (shifted(0, -1), "bad_interval"),
        (shifted(MS // 2, MS // 2), "bad_interval"),
        (shifted(0, -PERIOD), "bad_interval"),
        (shifted(0, -2 * PERIOD), "bad_interval"),
        (shifted(MS, MS), "future"),
        (shifted(PERIOD, PERIOD), "future"),
        (shifted(-MS, 0), "overlap"),
        (shifted(-PERIOD, -PERIOD), "overlap"),
        (lambda reading: replace(reading, uuid="GPU-of-another-node"), "unknown_gpu"),
    ],
    ids=["start", "end", "half-a-ms", "empty", "backwards", "a-ms-ahead", "ahead", "a-ms-back", "again", "unknown"],
)
def test_an_odd_interval_is_refused_and_its_time_unobserved(spoil: Spoil, reason: str) -> None:
    ledger = played(spoilt(spoil))
    assert ledger.rejected == {reason: COUNT}
    assert ledger.unobserved == {"gap": COUNT * PERIOD}
    assert changed(ledger)["unobserved"] == COUNT * PERIOD
    assert set(ledger.gpus) == {BAD, GOOD}


def test_a_reading_seen_twice_counts_once() -> None:
    """In one observation, and again in the next."""
    twice = [replace(o, readings=(*o.readings, *(r for r in o.readings if r.uuid == BAD))) for o in SOUND.observations]
    ledger = played(twice)
    assert ledger.rejected == {"overlap": len(SOUND.observations) - 1}
    assert not changed(ledger)


def test_an_observation_seen_twice_counts_once() -> None:
    story = [o for o in SOUND.observations for _ in range(2)]
    ledger = played(story)
    assert ledger.rejected == {"overlap": 2 * (len(SOUND.observations) - 1)}
    assert not changed(ledger)


def merged(observations: Sequence[Observation], *, backwards: bool) -> Observation:
    """All these readings at the moment of the last."""
    readings = [reading for o in observations for reading in o.readings]
    return replace(observations[-1], readings=tuple(reversed(readings) if backwards else readings))


def test_readings_of_one_observation_may_come_in_any_order() -> None:
    story = list(SOUND.observations)
    story[MINUTE] = [merged(story[MINUTE], backwards=True)]
    ledger = played(story)
    assert not ledger.rejected
    assert not changed(ledger)


def test_a_reading_that_comes_after_its_time_was_given_up_is_refused() -> None:
    """Entries are never reversed: what was posted as a gap stays one."""
    story = list(SOUND.observations)
    late = [r for r in story[100].readings if r.uuid == BAD]
    story[100] = replace(story[100], readings=tuple(r for r in story[100].readings if r.uuid != BAD))
    story[101] = replace(story[101], readings=(*late, *story[101].readings))
    ledger = played(story)
    assert ledger.rejected == {"overlap": 1}
    assert ledger.unobserved == {"gap": PERIOD}


def test_a_late_reading_is_welcome_while_its_time_is_not_settled() -> None:
    """`settled` says up to when nothing more will come."""
    story = list(SOUND.observations)
    late = [r for r in story[100].readings if r.uuid == BAD]
    kept = tuple(r for r in story[100].readings if r.uuid != BAD)
    story[100] = replace(story[100], readings=kept, settled=late[0].start)
    story[101] = replace(story[101], readings=(*late, *story[101].readings))
    ledger = played(story)
    assert not ledger.rejected
    assert not changed(ledger)


def test_time_settled_ahead_of_the_clock_is_settled_only_up_to_it() -> None:
    story = [replace(o, settled=o.at + 3600 * SECOND) for o in SOUND.observations]
    ledger = played(story)
    assert not ledger.rejected
    assert not changed(ledger)


@pytest.mark.parametrize("back", [1, MS, 17 * SECOND, 10_000 * SECOND])
def test_a_clock_that_steps_back_loses_that_observation_alone(back: int) -> None:
    """Repeated with an older time and news that must not be believed: counted once, changed nothing."""
    story = list(SOUND.observations)
    stepped = replace(story[100], at=story[100].at - back, devices=(), allocations=(), faults=(Fault("source_failed"),))
    story.insert(101, stepped)
    ledger = played(story)
    assert ledger.rejected == {"clock_step": 1}
    assert not changed(ledger)
    assert not ledger.faults


def test_an_observation_off_the_grid_settles_whole_milliseconds() -> None:
    """The host's clock has nanoseconds, the ledger's boundaries have not: the rest waits for the next one."""
    story = [replace(o, at=o.at + 123_457) for o in SOUND.observations]
    ledger = played(story)
    assert not ledger.rejected
    assert not changed(ledger)
    assert ledger.gpus[GOOD].book.until % MS == 0


def test_a_gpu_that_appears_late_is_paid_for_from_then_on() -> None:
    """With its first reading, not before; its sibling never notices."""
    story = [
        replace(
            o,
            readings=tuple(r for r in o.readings if r.uuid == GOOD or index >= MINUTE.start),
            devices=devices_from(index),
        )
        for index, o in enumerate(SOUND.observations)
    ]
    ledger = played(story)
    appeared = 495 * SECOND
    assert not ledger.rejected
    assert ledger.gpus[BAD].book.since == appeared
    assert ledger.gpus[BAD].book.paid == SOUND.end - appeared
    assert parts(ledger, BAD)["unobserved"] == 0


def devices_from(index: int) -> tuple[Device, ...] | None:
    """The inventory of a node on which one GPU is found at the hundredth observation."""
    both = SOUND.observations[0].devices
    assert both is not None
    if index == 0:
        return tuple(device for device in both if device.uuid == GOOD)
    return both if index == MINUTE.start else None


def without_its_readings(where: slice) -> Story:
    """The sound story, in which one GPU says nothing for a while."""
    silent = range(*where.indices(len(SOUND.observations)))
    return [
        replace(o, readings=tuple(r for r in o.readings if r.uuid == GOOD or index not in silent))
        for index, o in enumerate(SOUND.observations)
    ]


AWAY = slice(MINUTE.start, None)


def test_a_gpu_that_vanishes_without_a_word_is_still_paid_for() -> None:
    """It is listed and says nothing: unobserved for ever, never idle, never forgotten."""
    ledger = played(without_its_readings(AWAY))
    assert ledger.gpus[BAD].book.paid == SOUND.end
    assert parts(ledger, BAD)["unobserved"] == SOUND.end - 495 * SECOND
    assert ledger.gpus[BAD].state == "unobserved"


def test_a_gpu_taken_off_the_inventory_is_no_longer_paid_for() -> None:
    """Its book rests as it is; nothing of it is served as live, least of all a state it is not in."""
    story = without_its_readings(AWAY)
    story[MINUTE.start] = replace(story[MINUTE.start], devices=devices_from(0))
    ledger = played(story)
    sound, _ = fed(SOUND.observations[: MINUTE.start])
    assert parts(ledger, BAD) == parts(sound, BAD)
    assert ledger.gpus[BAD].book.paid == 495 * SECOND
    text = render(take_snapshot(ledger, DaemonMetadata())).decode()
    live = ("power_watts", "temperature_celsius", "memory_used_bytes", "state", "allocation_info")
    shown = [name for name in live if f'gpu_efficiency_{name}{{uuid="{BAD}"' in text]
    assert not shown


def test_a_job_no_longer_counts_a_gpu_taken_off_the_inventory() -> None:
    """Of the job's two, the other one is still there."""
    story = without_its_readings(AWAY)
    story[MINUTE.start] = replace(story[MINUTE.start], devices=devices_from(0))
    assert published(played(story), "job_state_gpus") == [1]


def test_a_gpu_back_on_the_inventory_goes_on_where_its_book_rested() -> None:
    """Twelve readings while nobody lists it are an unknown GPU's; then its book goes on, without that minute."""
    story = list(SOUND.observations)
    story[MINUTE.start] = replace(story[MINUTE.start], devices=devices_from(0))
    story[MINUTE.stop] = replace(story[MINUTE.stop], devices=devices_from(MINUTE.start))
    ledger = played(story)
    assert ledger.rejected == {"unknown_gpu": COUNT}
    assert ledger.gpus[BAD].book.paid == SOUND.end - COUNT * PERIOD
    assert parts(ledger, BAD)["unobserved"] == 0


def test_a_gpu_known_to_be_missing_is_unavailable_not_unobserved() -> None:
    story = without_its_readings(AWAY)
    devices = tuple(
        replace(device, condition="missing") if device.uuid == BAD else device
        for device in SOUND.observations[0].devices or ()
    )
    story[MINUTE.start] = replace(story[MINUTE.start], devices=devices)
    ledger = played(story)
    assert parts(ledger, BAD)["unavailable"] == SOUND.end - 495 * SECOND
    assert parts(ledger, BAD)["unobserved"] == 0


def test_a_source_silent_for_a_minute_is_a_gap_and_nothing_is_idle() -> None:
    """No observation at all, as when the host was suspended: the next one posts the gap for every GPU."""
    story = [o for index, o in enumerate(SOUND.observations) if not MINUTE.start <= index < MINUTE.stop]
    ledger, _ = fed(story)
    assert not ledger.rejected
    assert ledger.conservation_errors == 0
    assert ledger.unobserved == {"gap": 2 * COUNT * PERIOD}
    for uuid in SOUND.uuids:
        assert parts(ledger, uuid)["unobserved"] == COUNT * PERIOD
        assert parts(ledger, uuid)["idle_allocation"] == 0


def test_a_source_that_says_why_it_is_silent_is_quoted() -> None:
    """A fault of the source is the reason of the gap; a fault of one GPU is that GPU's."""
    story = list(SOUND.observations)
    for index in range(MINUTE.start, MINUTE.stop):
        kept = tuple(r for r in story[index].readings if r.uuid == GOOD)
        story[index] = replace(story[index], readings=kept, faults=(Fault("gpu_lost", "it does not answer", BAD),))
    ledger = played(story)
    assert ledger.unobserved == {"gpu_lost": COUNT * PERIOD}
    assert ledger.faults == {"gpu_lost": COUNT}


def test_everything_at_once_is_counted_by_reason() -> None:
    """A storm of every fault there is, one reading each: the counts add up, and the other GPU never notices."""
    storm: list[tuple[str, Spoil]] = [
        ("not_finite", setting(power_watts=nan)),
        ("negative", setting(pcie_tx_bytes_per_second=-1.0)),
        ("above_one", setting(dram_active=37.0)),
        ("clamped", setting(dram_active=1.01)),
        ("order", setting(gr_engine_active=0.9, sm_active=0.4, tensor_active=0.5)),
        ("bad_interval", shifted(1, 0)),
        ("future", shifted(MS, MS)),
        ("unknown_gpu", setting(uuid="GPU-of-another-node")),
    ]
    story = list(SOUND.observations)
    for index, (_, spoil) in enumerate(storm, start=MINUTE.start):
        kept = tuple(spoil(r) if r.uuid == BAD else r for r in story[index].readings)
        story[index] = replace(story[index], readings=kept)
    ledger = played(story)
    assert ledger.rejected == Counter(reason for reason, _ in storm)
    assert ledger.unobserved == {"gap": 3 * PERIOD}
