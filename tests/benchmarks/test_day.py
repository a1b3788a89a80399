"""A day at once: what its figures are made of, by figures worked out by hand, and a short one."""

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from benchmarks.group import Measured
from benchmarks.node.day import DAY_GROUP, Open, core_rows, day, hours, lived, open_rows, slope
from benchmarks.node.day_played import EVERY, Day, Pages, Point, looks
from benchmarks.node.working_day import HOUR, ROUND_HOURS, told
from benchmarks.rig.stand_ins import GPUS
from exporter.agent.agent import Agent
from exporter.core.exposition import render
from exporter.core.model import SECOND
from exporter.core.snapshot import DaemonMetadata
from tests.dcgm_stub.bindings import missing
from tests.shared_library import compiler

WHOLE = 24 * HOUR


@pytest.fixture
def _stand_ins() -> None:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in DCGM")
    if reason := missing():
        pytest.skip(reason)


def points(kib_an_hour: float, *, seconds: int = WHOLE) -> Iterator[Point]:
    """Memory that fills in the first round, and grows; within each round it rises and falls as the jobs come and go."""
    for second in range(0, seconds + 1, EVERY):
        phase = second % (ROUND_HOURS * HOUR)
        level = 30_000 + 2000 * min(1.0, second / HOUR) + (500 if phase < HOUR else 0)
        series = 1000 + (200 if phase == HOUR else 0)
        yield Point(second, level + kib_an_hour * second / HOUR, 120_000, series, series)


def a_day(kib_an_hour: float = 0.0) -> Day:
    return Day(list(points(kib_an_hour)), 0, GPUS * WHOLE * SECOND, 217)


def line_of(found: Day, word: str, *, seconds: int = WHOLE) -> tuple[str, bool | None]:
    (line,) = [line for line in core_rows(found, seconds) if word in line.what]
    return line.median, line.met


# -- rows --


def test_a_day_in_which_nothing_grows_meets_its_budgets() -> None:
    assert [line.what for line in core_rows(a_day(), WHOLE) if line.met is False] == []


@pytest.mark.parametrize(("kib", "met"), [(7.0, True), (28.0, False)])
def test_a_pointer_kept_each_tick_is_found(kib: float, met: bool) -> None:
    """28 KiB an hour; what jobs hold while they run is no growth, for the rounds are alike."""
    median, found = line_of(a_day(kib), "Resident memory gained")
    assert found is met
    assert float(median.split()[0]) == pytest.approx(kib, abs=3.0)


def test_a_slope_is_by_the_hour() -> None:
    line = [Point(hour * HOUR, 5.0 + 3 * hour, blocks=100 * hour) for hour in range(5)]
    assert slope(line, lambda point: point.kib) == pytest.approx(3.0)
    assert slope(line, lambda point: point.blocks) == pytest.approx(100.0)


def test_time_that_is_lost_or_booked_twice_misses_the_budget() -> None:
    for nanoseconds in (-1, 1):
        lost = replace(a_day(), paid_ns=GPUS * WHOLE * SECOND + nanoseconds)
        assert line_of(lost, "in no account") == ("1 ns", False)
    assert line_of(replace(a_day(), conservation_errors=1), "Conservation")[1] is False


def test_pages_that_become_longer_miss_the_budget() -> None:
    later = [replace(point, most=point.most + (51 if point.second > 20 * HOUR else 0)) for point in points(0.0)]
    assert line_of(replace(a_day(), points=later), "Series") == ("51 series", False)
    assert line_of(a_day(), "Series") == ("0 series", True)


def test_the_table_has_a_row_an_hour() -> None:
    found = hours(a_day(8.0)).rows
    assert len(found) == 25
    assert found[0] == ("0", "29.79", "120,000", "1,000")
    assert found[24] == ("24", "31.93", "120,000", "1,000")


def test_files_and_threads_that_stay_open_miss_the_budget() -> None:
    files, threads = open_rows(Open(8, 5), Open(9, 5), 300)
    assert (files.met, files.spread, threads.met) == (False, "8 before, 9 after", True)
    assert open_rows(Open(8, 5), Open(8, 6), 300)[1].met is False


# -- the day --


@pytest.mark.slow
def test_each_round_has_the_same_jobs_under_other_names_and_the_ledger_takes_them() -> None:
    agent, names, reported = Agent(meta=DaemonMetadata(source="simulation")), set[str](), set[str]()
    for observation in told(2 * ROUND_HOURS * HOUR, period_seconds=30.0):
        agent.process(observation)
        names |= {held.owner.job_id for held in observation.allocations or ()}
        reported |= {report.job_id for report in observation.reports}
    assert len(names) == 1 + 2 * 27
    assert len(reported) == 2 * 13
    ledger = agent.ledger
    assert (ledger.conservation_errors, ledger.rejected.total(), agent.last_error()) == (0, 0, "")
    assert {gpu.book.paid for gpu in ledger.gpus.values()} == {2 * ROUND_HOURS * HOUR * SECOND}


@pytest.mark.slow
def test_a_look_is_taken_every_five_minutes() -> None:
    found = looks(range(2 * EVERY + 2))
    assert [point.second for point in found] == [0, EVERY, 2 * EVERY]
    assert all(point.kib > 1000 and point.blocks > 1000 for point in found)


def test_series_are_lines_that_are_no_comments_and_the_largest_page_is_kept_once() -> None:
    agent = Agent(meta=DaemonMetadata(source="simulation"))
    pages = Pages(agent)
    with pytest.raises(RuntimeError, match="nothing to serve"):
        pages.write()
    for observation in told(120, period_seconds=60.0):
        agent.process(observation)
    pages.write()
    snapshot = agent.latest()
    assert snapshot is not None
    lines = render(snapshot, openmetrics=True).splitlines()
    assert pages.series == sum(not line.startswith(b"#") for line in lines) > 200
    assert (pages.largest(), pages.largest()) == (pages.series, 0)


def test_the_picture_is_drawn_of_hours_and_mebibytes() -> None:
    figure, level = Figure(), {"hours": [0.0, 24.0], "mib": [30.0, 33.0]}
    DAY_GROUP.pictures[0].draw(figure, {"core": level, "dcgm": level, "series": [400, 1200]})
    above, below = figure.axes
    assert (len(above.get_lines()), len(below.get_lines())) == (2, 1)
    assert above.get_ylim()[0] == 0


# -- for once, all of it --


@pytest.mark.benchmark
@pytest.mark.usefixtures("_stand_ins")
def test_a_daemon_is_scraped_until_the_day_is_over() -> None:
    over = iter([False, False, False, True])
    before, after, scrapes = lived(lambda: next(over))
    assert scrapes == 3
    assert min(before.files, before.threads, after.files) > 2


@pytest.mark.benchmark
@pytest.mark.usefixtures("_stand_ins")
def test_a_short_day_is_lost_to_nobody() -> None:
    found: Measured = day(quick=True)
    by_name = {line.what: line for line in found.rows}
    assert by_name["Conservation errors of the ledger"].met is True
    assert by_name["GPU time of the day that is in no account, or in two"].median == "0 ns"
    assert sum("Resident memory gained an hour" in what for what in by_name) == 2
    assert by_name["Threads of a live daemon at 10 Hz, gained"].met is True
    assert found.curves["series"][-1] > found.curves["series"][0]
