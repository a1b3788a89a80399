"""The storm and the rolling restart: what is lost is counted right, and a small one runs."""

import pytest

from benchmarks.fleet import unrest
from benchmarks.fleet.storm import QUICK, Moment, Plan, gap, increased, measured, missed, restart_rows, storm_rows
from benchmarks.fleet.unrest import Daemon, Unrest, useful


def page(seconds: float) -> bytes:
    return (
        b'gpu_efficiency_node_seconds_total{held="true",leak="useful",layer="useful",model="H100"} %f\n'
        b'gpu_efficiency_node_seconds_total{held="true",leak="idle",layer="gau",model="H100"} 70\n'
        b'gpu_efficiency_job_info{job_id="41"} 1\n' % seconds
    )


def daemon(*, keeps: bool, due: int = -1) -> Daemon:
    return Daemon([page(100 + 10 * n) for n in range(8)], [page(10 * n) for n in range(8)], keeps=keeps, due=due)


def told(one: Daemon, times: int) -> list[float | None]:
    return [None if found is None else useful(found) for found in (one.page(held=False) for _ in range(times))]


def test_only_useful_seconds_are_counted() -> None:
    assert useful(page(12.5)) == 12.5


def test_who_keeps_a_history_goes_on_after_the_scrape_that_failed() -> None:
    one = daemon(keeps=True, due=1)
    assert told(one, 4) == [100.0, 110.0, None, 130.0]
    assert one.truth() == 30.0


def test_who_keeps_none_begins_at_nought_and_what_was_not_asked_for_is_still_booked() -> None:
    one = daemon(keeps=False, due=1)
    assert told(one, 5) == [100.0, 110.0, None, 10.0, 20.0]
    assert one.truth() == 20.0 + 20.0


def test_who_is_held_says_the_same_again() -> None:
    one = daemon(keeps=True)
    told(one, 2)
    assert [one.page(held=True), one.page(held=True)] == [page(110), page(110)]


def test_a_counter_that_falls_has_begun_at_nought() -> None:
    assert increased([(0, 100.0), (5, 110.0), (15, 4.0), (20, 14.0)]) == 10.0 + 4.0 + 10.0
    assert increased([]) == 0.0
    assert gap([(0, 1.0), (5, 1.0), (15, 1.0), (20, 1.0)]) == 10.0


def test_missed_is_what_was_booked_and_is_not_there() -> None:
    assert missed(40.0, [[(0, 0.0), (5, 10.0)], [(0, 5.0), (5, 25.0)]]) == 25.0


def test_rows_of_a_storm_are_of_what_it_created() -> None:
    before, after = Moment(1000.0, 1000.0, 100.0, 2.0, 50), Moment(4000.0, 4000.0, 106.0, 8.0, 60)
    found = {line.what: line.median for line in storm_rows(Plan(nodes=10, storm=3), before, after)}
    assert found["Series in the head before, 80 GPUs"] == "1,000 series"
    assert found["Series created by a node whose jobs are new"] == "100 series a scrape"
    assert found["Memory for a series created"] == "2.0 KiB"


def test_rows_of_a_restart_keep_those_with_a_history_apart() -> None:
    nodes = {
        "gpu-node-00000": [[(0.0, 0.0), (5.0, 10.0), (15.0, 30.0)]],
        "gpu-node-00001": [[(0.0, 0.0), (5.0, 10.0), (15.0, 4.0)]],
    }
    rows = restart_rows(Plan(nodes=2), 3.0, {"kept": 30.0, "begun_anew": 24.0}, nodes)
    found = {line.what: (line.median, line.met) for line in rows}
    assert found["Restart, with a history: useful time lost to Prometheus"] == ("0.000 %", True)
    assert found["Restart, without one: useful time lost to Prometheus"] == ("10.0 GPU-seconds a node", None)
    assert found["Restart: longest gap in a series, scrape every 5 s"] == ("10.0 s", None)
    worse = restart_rows(Plan(nodes=2), 3.0, {"kept": 31.0, "begun_anew": 24.0}, nodes)
    assert [line.met for line in worse if line.budget] == [False]


def test_a_site_restarts_a_few_at_a_time_and_storms_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrest, "story", lambda _kind, begins=0: [page((0 if begins else 100) + n) for n in range(9)])
    site = Unrest(12)
    assert b'job_id="0-41"' in (site.told("0") or b"")
    site.told("storm")
    assert b'job_id="storm-1-0-41"' in (site.told("0") or b"")
    site.told("calm")
    assert None not in [site.told(str(node)) for node in range(12)]
    site.told("restart")
    away = [[site.told(str(node)) is None for node in range(12)].count(True) for _ in range(9)]
    assert away == [2, 2, 2, 2, 1, 1, 1, 1, 0]
    site.told("hold")
    assert site.told("3") == site.told("3")


@pytest.mark.benchmark
def test_a_small_fleet_storms_and_is_restarted() -> None:
    found = {line.what: line for line in measured(QUICK).rows}
    assert int(found["Series created by a node whose jobs are new"].median.split()[0]) > 50
    assert found["Restart, with a history: useful time lost to Prometheus"].met is True
    assert float(found["Restart, without one: useful time lost to Prometheus"].median.split()[0]) > 0
