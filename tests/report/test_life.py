"""Start and end of a job, from hand-made Prometheus responses."""

import pytest

from exporter.report.model import ReportError
from exporter.report.query import DAY_SECONDS, JobQuery, PrometheusRun, find_run
from tests.report.answers import Row, Scripted, row, track

A = {"cluster": "", "instance": "a"}
B = {"cluster": "", "instance": "b"}


def life(starts: list[Row], seen: list[Row], paid: list[Row], *, at: float = 10_000.0) -> PrometheusRun:
    server = Scripted({"(timestamp(": seen, "start_timestamp": starts, "paid_seconds": paid})
    return find_run(JobQuery(server, "7"), at, since=30 * DAY_SECONDS)


def test_the_end_is_the_first_sample_that_has_the_last_value() -> None:
    paid = [track((8800, 0.0), (8860, 60.0), (8920, 90.0), (8980, 90.0), (9040, 90.0), **A)]
    found = life([row(8800, **A)], [row(9040, **A)], paid)
    assert (found.start, found.end, found.query_end, found.running) == (8800, 8920, 9040, False)
    assert (found.instance_runs[0].ended, found.instance_runs[0].scrape_interval) == (True, 60)


def test_a_job_whose_last_sample_grew_a_moment_ago_runs() -> None:
    paid = [track((9800, 0.0), (9860, 60.0), (9920, 120.0), **A)]
    assert life([row(9800, **A)], [row(9920, **A)], paid).running is True


def test_one_that_grew_to_the_last_and_was_not_heard_since_does_not_run() -> None:
    paid = [track((8800, 0.0), (8860, 60.0), **A)]
    found = life([row(8800, **A)], [row(8860, **A)], paid)
    assert (found.running, found.instance_runs[0].ended) == (False, False)


def test_nodes_at_one_time_are_one_run_and_an_earlier_one_is_told() -> None:
    paid = [
        track((9000, 0.0), (9900, 900.0), **A),
        track((5000, 0.0), (6000, 1000.0), (6060, 1000.0), **B),
    ]
    found = life([row(9000, **A), row(5000, **B)], [row(9900, **A), row(9900, **B)], paid)
    assert [stay.instance for stay in found.instance_runs] == [("", "a")]
    assert (found.start, found.previous_end) == (9000, 6000)


def test_a_node_that_left_before_the_others_belongs_to_the_run() -> None:
    paid = [track((5000, 0.0), (9900, 4900.0), **A), track((5000, 0.0), (6000, 1000.0), (6060, 1000.0), **B)]
    found = life([row(5000, **A), row(5000, **B)], [row(9900, **A), row(9900, **B)], paid)
    assert (len(found.instance_runs), found.previous_end, found.end) == (2, None, 9900)


def test_what_begins_later_is_not_looked_at() -> None:
    server = Scripted({"start_timestamp": [row(20_000, **A)], "build_info": [row(3, **A)]})
    with pytest.raises(ReportError, match="no job 7"):
        find_run(JobQuery(server, "7"), 10_000.0, since=DAY_SECONDS)


def test_where_no_daemon_is_stored_that_is_said() -> None:
    with pytest.raises(ReportError, match="does that Prometheus scrape the daemons"):
        find_run(JobQuery(Scripted(), "7"), 10_000.0, since=DAY_SECONDS)


def test_a_start_without_time_is_an_old_daemon_s() -> None:
    with pytest.raises(ReportError, match="too old"):
        life([row(5000, **A)], [], [])


def test_a_job_of_two_clusters_must_be_picked() -> None:
    with pytest.raises(ReportError, match="several clusters"):
        life([row(5000, cluster="x", instance="a"), row(5000, cluster="y", instance="a")], [], [])
