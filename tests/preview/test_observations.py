"""Tests where observations are split, and that their parts hold all that the whole held."""

from msgspec.structs import replace

from exporter.core.model import Fault, Observation
from exporter.preview.observations import ObservationSplitter
from tests.worlds import S, device, first, held, reading, seen


def splitter(*observations: Observation) -> ObservationSplitter:
    """One that has seen these."""
    made = ObservationSplitter()
    for observation in observations:
        list(made.split(observation))
    return made


def spans(parts: list[Observation]) -> list[tuple[float, list[tuple[float, float]]]]:
    """When each part was observed, and its readings, in seconds."""
    return [(part.at / S, [(each.start / S, each.end / S) for each in part.readings]) for part in parts]


OPENING = first([device()], [held(end=55 * S)])


def test_an_observation_without_a_change_is_passed_on_as_it_is() -> None:
    told = seen(50, reading(0, 50))
    (part,) = splitter(OPENING).split(told)
    assert part is told


def test_an_end_of_an_allocation_splits_the_reading_and_its_energy() -> None:
    told = replace(seen(60, reading(50, 60, energy_joules=100.0)), faults=(Fault("x"),), allocations_at=58 * S)
    parts = list(splitter(OPENING, seen(50, reading(0, 50))).split(told))
    assert spans(parts) == [(55, [(50, 55)]), (60, [(55, 60)])]
    assert [each.energy_joules for part in parts for each in part.readings] == [50.0, 50.0]
    assert [part.wall for part in parts] == [55 * S, 60 * S]
    assert [part.allocations_at for part in parts] == [58 * S, 58 * S]
    assert [part.settled for part in parts] == [55 * S, None]


def test_new_owners_are_known_from_the_first_part_on() -> None:
    told = replace(seen(60, reading(0, 60)), allocations=(held(start=30.0004, end=45 * S),))
    parts = list(splitter(first([device()])).split(told))
    assert spans(parts) == [(30, [(0, 30)]), (45, [(30, 45)]), (60, [(45, 60)])]
    assert [part.allocations for part in parts] == [told.allocations, None, None]


def test_a_reading_that_comes_late_is_split_and_time_does_not_go_back() -> None:
    told = replace(seen(70, reading(50, 65)), settled=65 * S)
    parts = list(splitter(OPENING, seen(60)).split(told))
    assert spans(parts) == [(60, [(50, 55)]), (70, [(55, 65)])]
    assert [part.settled for part in parts] == [55 * S, 65 * S]


def test_time_without_a_reading_is_split_too() -> None:
    assert spans(list(splitter(OPENING, seen(50)).split(seen(60)))) == [(55, []), (60, [])]


def test_a_gap_after_a_reading_is_a_part_of_its_own_unless_it_may_be_filled_later() -> None:
    told = seen(40, reading(0, 30))
    assert spans(list(splitter(OPENING).split(told))) == [(30, [(0, 30)]), (40, [])]
    assert spans(list(splitter(OPENING).split(replace(told, settled=30 * S)))) == [(40, [(0, 30)])]


def test_several_readings_of_a_gpu_are_seen_one_by_one_and_those_of_others_are_cut_there() -> None:
    told = seen(30, reading(0, 10), reading(10, 20), reading(20, 30), reading(0, 30, uuid="GPU-1"))
    parts = list(splitter(first([device(), device("GPU-1", "1")])).split(told))
    assert spans(parts) == [(10, [(0, 10), (0, 10)]), (20, [(10, 20), (10, 20)]), (30, [(20, 30), (20, 30)])]


def test_readings_that_cannot_be_are_left_to_the_core() -> None:
    told = seen(60, reading(58, 52), reading(50, 70))
    parts = list(splitter(OPENING, seen(50)).split(told))
    assert max((each.start, each.end) for part in parts for each in part.readings) == (58 * S, 52 * S)
    assert parts[-1].readings[-1].end == 70 * S
