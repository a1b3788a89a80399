"""Properties of every TelemetrySource, as functions of a rig; each source's test file runs them all on its own rig.

    @pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
    def test_the_source_keeps_the_law(law: Law, rig: Rig) -> None:
        law(rig)

Contains only what holds for all sources; units, error codes and fallbacks are tested per source.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from exporter.core.model import SECOND, Reading
from exporter.sources.base import LONGEST_READING_SECONDS, ReadResult, TelemetrySource

START = 100 * SECOND


class Rig(Protocol):
    """A newly opened source with at least two healthy, busy GPUs, which a law can change and break."""

    @property
    def source(self) -> TelemetrySource:
        """The source under test."""
        ...

    lag: int
    """Nanoseconds by which what it measured may come later than the read that follows it."""

    def run(self, until: int) -> None:
        """Let the GPUs work until `until` (monotonic nanoseconds)."""
        ...

    def fail(self, uuid: str) -> None:
        """Make one GPU unreadable from now on."""
        ...

    def mend(self, uuid: str) -> None:
        """Undo `fail`."""
        ...

    def hide(self, uuid: str) -> str:
        """Make one signal of one GPU unavailable from now on; return its field of `Reading`."""
        ...


Law = Callable[[Rig], None]


def _step(rig: Rig, now: int) -> ReadResult:
    rig.run(now)
    return rig.source.read(now)


def _steps(rig: Rig, *seconds: int) -> list[ReadResult]:
    return [_step(rig, START + second * SECOND) for second in seconds]


def _by_uuid(batch: ReadResult) -> dict[str, Reading]:
    return {reading.uuid: reading for reading in batch.readings}


def the_first_read_sets_the_baseline(rig: Rig) -> None:
    first, *rest = _steps(rig, 0, *(1 + second for second in range(1 + rig.lag // SECOND)))
    assert all(reading.start >= START for batch in (first, *rest) for reading in batch.readings)
    assert {device.uuid for device in first.devices} == set(_by_uuid(rest[-1]))
    assert len(first.devices) > 1


def every_device_has_a_name_of_its_own(rig: Rig) -> None:
    (first,) = _steps(rig, 0)
    assert len({device.uuid for device in first.devices}) == len(first.devices)
    assert all(device.uuid and device.model and device.condition == "" for device in first.devices)


def a_reading_lies_between_what_was_settled_and_this_read(rig: Rig) -> None:
    settled = START
    for second in (0, 1, 3, 4, 9):
        now = START + second * SECOND
        batch = _step(rig, now)
        for reading in batch.readings:
            assert settled <= reading.start < reading.end <= now
        settled = now if batch.settled is None else batch.settled
        assert now - settled <= 4 * rig.lag


def readings_of_one_gpu_never_overlap(rig: Rig) -> None:
    ends: dict[str, int] = {}
    for batch in _steps(rig, 0, 1, 2, 2, 3, 5):
        for reading in batch.readings:
            assert reading.start >= ends.get(reading.uuid, START)
            ends[reading.uuid] = reading.end
    assert all(START + 5 * SECOND - rig.lag <= end <= START + 5 * SECOND for end in ends.values())


def reading_the_same_moment_twice_gives_nothing_twice(rig: Rig) -> None:
    *_, once, again = _steps(rig, 0, 1, 2, 2)
    assert once.readings
    assert (again.readings, again.faults) == ((), ())
    assert again.devices == once.devices


def what_was_given_up_is_not_reported_later(rig: Rig) -> None:
    _steps(rig, 0, 1)
    rig.source.resync()
    late, *_, then = _steps(rig, 60, 61, 62)
    assert late.readings == ()
    assert then.readings
    assert all(reading.start >= START + 60 * SECOND for reading in then.readings)


def one_gpu_in_trouble_leaves_the_others_alone(rig: Rig) -> None:
    before = _steps(rig, -1, 0, 1)[-1]
    broken = before.devices[0].uuid
    rig.fail(broken)
    (after,) = _steps(rig, 2)
    assert set(_by_uuid(after)) == set(_by_uuid(before)) - {broken}
    assert broken in {device.uuid for device in after.devices}
    assert broken in {fault.uuid for fault in after.faults}
    assert all(fault.kind and fault.message for fault in after.faults)


def a_gpu_that_answers_again_begins_anew(rig: Rig) -> None:
    broken = _steps(rig, 0, 1)[-1].devices[0].uuid
    rig.fail(broken)
    _steps(rig, 2, 3)
    rig.mend(broken)
    back, *_, then = _steps(rig, 4, 5, 6, 7)
    assert broken not in _by_uuid(back)
    assert _by_uuid(then)[broken].start >= START + 4 * SECOND
    assert all(device.condition == "" for device in then.devices)


def what_is_not_seen_is_none_and_never_zero(rig: Rig) -> None:
    uuid = _steps(rig, 0, 1)[-1].devices[0].uuid
    field = rig.hide(uuid)
    *_, after = _steps(rig, 2, 3)
    seen = {other: getattr(reading, field) for other, reading in _by_uuid(after).items()}
    assert seen.pop(uuid) is None
    assert seen
    assert None not in seen.values()


def what_is_seen_was_announced(rig: Rig) -> None:
    *_, batch = _steps(rig, 0, 1, 2)
    assert batch.readings
    identity = {"uuid", "start", "end", "distrust"}
    for reading in batch.readings:
        seen = {field for field, value in msgspec.structs.asdict(reading).items() if value is not None}
        assert seen - identity <= rig.source.signals


def ratios_and_rates_are_in_range(rig: Rig) -> None:
    *_, batch = _steps(rig, 0, 1, 2)
    assert batch.readings
    for reading in batch.readings:
        for field, value in msgspec.structs.asdict(reading).items():
            if field.endswith(("_active", "_occupancy", "_utilization")) and value is not None:
                assert 0.0 <= value <= 1.05, field
            if field.endswith("_per_second") and value is not None:
                assert value >= 0.0, field


def a_pause_lets_go_and_the_next_read_begins_anew(rig: Rig) -> None:
    _steps(rig, 0, 1)
    rig.source.pause()
    back, *_, then = _steps(rig, 30, 31, 32)
    assert back.readings == ()
    assert then.readings
    assert all(reading.start >= START + 30 * SECOND for reading in then.readings)


def a_pause_before_the_first_read_delays_nothing(rig: Rig) -> None:
    """As a source is paused that is opened after a pause."""
    rig.source.pause()
    first, *_, last = _steps(rig, 0, 1, 2)
    assert (first.readings, first.faults) == ((), ())
    assert last.readings


def after_a_standstill_no_reading_covers_it(rig: Rig) -> None:
    """A daemon that was stopped (SIGSTOP) for five minutes reads once: that is no word about five minutes."""
    batches = _steps(rig, 0, 1, 2, 302, 303, 304)
    longest = max(reading.end - reading.start for batch in batches for reading in batch.readings)
    assert longest <= LONGEST_READING_SECONDS * SECOND
    assert batches[-1].readings


def closing_twice_is_closing_once(rig: Rig) -> None:
    _steps(rig, 0, 1)
    rig.source.close()
    assert rig.source.close() is None  # type: ignore[func-returns-value]  # it must not raise


LAWS: tuple[Law, ...] = (
    the_first_read_sets_the_baseline,
    every_device_has_a_name_of_its_own,
    a_reading_lies_between_what_was_settled_and_this_read,
    readings_of_one_gpu_never_overlap,
    reading_the_same_moment_twice_gives_nothing_twice,
    what_was_given_up_is_not_reported_later,
    one_gpu_in_trouble_leaves_the_others_alone,
    a_gpu_that_answers_again_begins_anew,
    what_is_not_seen_is_none_and_never_zero,
    what_is_seen_was_announced,
    ratios_and_rates_are_in_range,
    a_pause_lets_go_and_the_next_read_begins_anew,
    a_pause_before_the_first_read_delays_nothing,
    after_a_standstill_no_reading_covers_it,
    closing_twice_is_closing_once,
)
