"""A job is found under the name that squeue and sacct show, and a name that may mean several is refused."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from exporter.history.store import HistoryStore
from exporter.report.job_names import find_named, members_message, split_step
from exporter.report.model import JobIdentity, ReportError
from exporter.report.query import JobQuery, jobs_named, jobs_of_array
from tests.each import each
from tests.report.answers import Scripted, row
from tests.report.commands import run
from tests.report.stated import BEGIN, owner, stated


@each(
    "name, job, step",
    [
        ("4711", "4711", ""), ("4711.0", "4711", "0"), ("6_1.batch", "6_1", "batch"), ("7+1.extern", "7+1", "extern"),
        ("7.0+1", "7", "0+1"), ("8.interactive", "8", "interactive"), ("6_1", "6_1", ""), ("ns/pod.0", "ns/pod.0", ""),
        ("4711.other", "4711.other", ""), ("", "", ""), ("user.0", "user.0", ""),
    ],
)  # fmt: skip
def test_a_step_is_found_by_its_job(name: str, job: str, step: str) -> None:
    assert split_step(name) == (job, step)


def _identity(job_id: str, shown: str = "", cluster: str = "") -> JobIdentity:
    return JobIdentity(job_id=job_id, display_id=shown or job_id, cluster=cluster)


def test_a_raw_id_goes_before_a_name_and_a_name_of_several_jobs_is_none_of_them() -> None:
    first, other = _identity("8", "6_1"), _identity("6_1")
    assert find_named("6_1", [first, other]) is other
    assert find_named("6_1", [first, first]) is first
    assert find_named("9", [first]) is None
    with pytest.raises(ReportError, match=r"6_1 has been the name of 2 jobs: .* \(8, 9001\)"):
        find_named("6_1", [first, _identity("9001", "6_1")])
    with pytest.raises(ReportError, match=r"\(8, 8 in a\)"):
        find_named("6_1", [first, _identity("8", "6_1", cluster="a")])


def test_the_tasks_of_a_whole_array_are_listed_by_their_number() -> None:
    tasks = [_identity(f"{100 + n}", f"6_{n}") for n in (*range(12), 3)]
    listed = "6_0, 6_1, 6_2, 6_3, 6_4, 6_5, 6_6, 6_7, 6_8, 6_9 and 2 more. Name one of them"
    found = members_message("6", tasks)
    assert found.startswith(f"there is no job 6 of its own, but 12 tasks of array 6: {listed}")
    assert "2 components of heterogeneous job 7: 7+0, 7+1. " in members_message(
        "7", [_identity("7", "7+0"), _identity("8", "7+1")]
    )
    assert members_message("6", []) == ""


# -- the command, on a store --


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Path:
    """Array 6 (its tasks are jobs 7 and 8; the third has not run), heterogeneous job 10, array 20 and its last task."""
    path = tmp_path / "history.db"
    owners = (
        owner(job_id="7", array_id="6", array_task_id="1"),
        owner(job_id="8", array_id="6", array_task_id="2", name="second"),
        owner(job_id="10", array_id="10", het_job_offset="0"),
        owner(job_id="11", array_id="10", het_job_offset="1"),
        owner(job_id="20", array_id="20", array_task_id="5"),
        owner(job_id="21", array_id="20", array_task_id="4"),
        owner(job_id="30", array_id="29"),  # of a daemon that did not know which task
    )
    with closing(HistoryStore(path)) as store:
        store.write(job_records=[stated(owner=who) for who in owners])
        before = stated(owner=owner(job_id="8", array_id="6"), life="0", start=BEGIN - 1800, end=BEGIN)
        store.write(job_records=[before])
    return path


def _report(store: Path, name: str, *flags: str) -> tuple[int, str, str]:
    return run(f"{name} --store {store} --at 2026-01-02 {' '.join(flags)}")


@each(
    "name, job_id, shown",
    [
        ("6_1", "7", "6_1"), ("7", "7", "6_1"), ("6_2", "8", "6_2"), ("10+0", "10", "10+0"), ("10+1", "11", "10+1"),
        ("20_5", "20", "20_5"), ("20", "20", "20_5"), ("6_1.batch", "7", "6_1"), ("10+1.0", "11", "10+1"),
        ("30", "30", "30"),
    ],
)  # fmt: skip
def test_each_is_found_under_the_name_that_users_know(store: Path, name: str, job_id: str, shown: str) -> None:
    status, out, err = _report(store, name, "--json")
    assert (status, err) == (0, "")
    who = json.loads(out)["who"]
    assert (who["job_id"], who["display_id"]) == (job_id, shown)


@each(
    "flag, title",
    [
        ("", 'Job 6_2 "second" of ada'), ("--markdown", '# Job 6\\_2 "second" of ada'), ("--html", "<title>Job 6_2"),
        ("--short", "GPU efficiency of job 6_2 of ada"), ("--line", "job 6_2: "), ("", "JobIDRaw 8"),
        ("--short", "  all of it: gpu-efficiency report 6_2 --store "),
    ],
)  # fmt: skip
def test_it_is_in_every_form(store: Path, flag: str, title: str) -> None:
    status, out, _ = _report(store, "8", flag)
    assert status == 0
    assert title in out


def test_records_that_lack_the_name_are_of_the_same_job(store: Path) -> None:
    """A daemon that was updated while the job ran."""
    by_name, by_id = (json.loads(_report(store, name, "--json")[1]) for name in ("6_2", "8"))
    assert by_name == by_id
    assert by_name["when"]["start"] == BEGIN - 1800


def test_a_step_and_an_array_of_the_same_id_are_told_apart_from_the_job(store: Path) -> None:
    assert "step batch has no report of its own: this one is of all steps of job 6_1" in _report(store, "6_1.batch")[1]
    assert "20 is also the id of the whole array: this report is of 20_5 alone" in _report(store, "20")[1]
    assert "10 is also the id of the whole heterogeneous job: this report is of 10+0" in _report(store, "10")[1]
    for name in ("6_1", "7", "20_5", "21"):
        assert "whole" not in _report(store, name, "--json")[1]


def test_a_whole_array_is_answered_by_its_tasks_and_never_by_another_job(store: Path) -> None:
    status, out, err = _report(store, "6")
    assert (status, out) == (1, "")
    assert "there is no job 6 of its own, but 2 tasks of array 6: 6_1, 6_2. Name one of them" in err
    assert "1 task of array 29: 30." in _report(store, "29")[2]
    for name in ("6_3", "6+1", "10_1", "2_0", "9", "1", "60", "6_10"):
        status, out, err = _report(store, name)
        assert (status, out) == (1, "")
        assert f"no source has a record of job {name}" in err


def test_two_of_them_side_by_side(store: Path) -> None:
    status, out, _ = run(f"--compare 6_1 10+1 --store {store} --at 2026-01-02")
    assert status == 0
    assert "job 6_1" in out
    assert "job 10+1" in out


# -- a Prometheus --


def test_series_are_asked_for_by_the_place_in_the_array() -> None:
    labels = {"job_id": "8", "array_id": "6", "array_task_id": "1", "cluster": "a", "user": "ada"}
    server = Scripted({"job_info": [row(1.0, **labels)]})
    (found,) = jobs_named(JobQuery(server, "6_1", matchers='x="y"'), "6_1", 100.0, since=60.0)
    assert (found.job_id, found.display_id, found.cluster, found.user) == ("8", "6_1", "a", "ada")
    (query, _) = server.asked[0]
    assert query == (
        'last_over_time(gpu_efficiency_job_info{job_id="6_1",x="y"}[60000ms]) or last_over_time(gpu_efficiency_job_info'
        '{array_id="6",array_task_id="1",het_job_offset="",x="y"}[60000ms])'
    )
    jobs_of_array(JobQuery(server, "6"), "6", 100.0, since=60.0)
    assert server.asked[1][0] == 'last_over_time(gpu_efficiency_job_info{array_id="6"}[60000ms])'
