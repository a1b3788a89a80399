"""Tests rows: filtering, sorting, and that old values are not shown as live."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.top.columns import (
    COLUMNS,
    SORTS,
    ListKind,
    ListRow,
    filter_and_sort,
    gpu_rows,
    job_rows,
    shown_id,
    urgency,
)
from exporter.top.view import lost_share
from tests.top.nodes import NOW, answers, seen, snapshot, view

SHORT = "last_5_minutes"


def gpus(**changes: Any) -> list[ListRow]:
    return gpu_rows(view(seen(**changes)), SHORT)


def sorts(kind: ListKind) -> list[str]:
    return [name for name, _, _ in SORTS[kind]]


def by(name: str, rows: list[ListRow], kind: ListKind = "gpus", *, reverse: bool = False) -> list[ListRow]:
    return filter_and_sort(rows, kind, sort=sorts(kind).index(name), reverse=reverse)


def test_a_gpu_is_as_old_in_its_state_as_the_daemon_says_and_what_passed_since() -> None:
    told = answers(snapshot())
    told[0]["gpus"][0]["state_seconds"] = 100.0
    told[0]["node"]["age_seconds"] = 0.5
    assert gpus(told=told)[0].since == pytest.approx(101.5)


def test_of_a_node_that_is_silent_nothing_is_the_present_and_no_time_passes() -> None:
    told = answers(snapshot())
    told[0]["gpus"][0]["state_seconds"] = 100.0
    row = gpus(told=told, problem="gone", since=NOW)[0]
    assert row.since == pytest.approx(100.0)
    assert not row.live


def test_a_gpu_without_a_live_reading_is_not_the_present_either() -> None:
    told = answers(snapshot())
    told[0]["gpus"][1]["live"] = False
    assert [row.live for row in gpus(told=told)][:3] == [True, False, True]


def test_indices_are_numbers_and_devices_without_one_come_last() -> None:
    told = answers(snapshot())
    for gpu, index in zip(told[0]["gpus"], ("10", "9", "", "1", "0", "2", "3", "4"), strict=True):
        gpu["index"] = index
    assert [row.gpu.index for row in filter_and_sort(gpus(told=told), "gpus") if row.gpu] == [*"012349", "10", ""]


@pytest.mark.parametrize(
    "text", ["ada", "ADA", "41001", "pretrain", "research ada", "active 41001", "memory_bound ada", "node-00 pretrain"]
)
def test_a_search_finds_rows_with_all_of_its_words(text: str) -> None:
    found = filter_and_sort(gpus(), "gpus", text=text)
    assert {row.owner.job_id for row in found} == {"41001"}


def test_a_search_for_what_is_not_there_finds_nothing() -> None:
    assert filter_and_sort(gpus(), "gpus", text="ada nobody") == []


def test_by_product_the_least_comes_first_and_none_last() -> None:
    told = answers(snapshot())
    for gpu, product in zip(told[0]["gpus"], (0.5, None, 0.0, 0.3, 0.2, 0.4, 0.6, 0.1), strict=True):
        gpu[SHORT]["product"] = product
    found = [row.window.product for row in by("product", gpus(told=told))]
    assert found == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, None]


def test_by_lost_the_gpu_that_lost_most_time_comes_first() -> None:
    found = [lost_share(row.window) * row.window.seconds for row in by("lost", gpus())]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_by_state_a_suspected_hang_comes_first_and_work_last() -> None:
    told = answers(snapshot())
    for gpu in told[0]["gpus"]:
        gpu["state"], gpu["hang_suspected"] = "active", False
    told[0]["gpus"][3]["state"] = "zombie"
    told[0]["gpus"][5]["state"] = "unavailable"
    told[0]["gpus"][6]["hang_suspected"] = True
    told[0]["gpus"][7]["state"] = "of_tomorrow"
    assert [row.gpu.index for row in by("state", gpus(told=told)) if row.gpu][:3] == ["6", "5", "3"]
    assert urgency("of_tomorrow") == urgency("active")


@pytest.mark.parametrize("name", sorts("gpus"))
def test_turned_around_is_the_same_from_the_other_end(name: str) -> None:
    rows = gpus()
    assert by(name, rows, reverse=True) == by(name, rows)[::-1]


def test_a_job_is_in_the_worst_state_of_its_gpus_and_says_of_how_many() -> None:
    told = answers(snapshot())
    held = [gpu for gpu in told[0]["gpus"] if [owner["job_id"] for owner in gpu["owners"]] == ["41001"]]
    for gpu in held:
        gpu["state"] = "active"
    held[2]["state"] = "stalled"
    row = next(row for row in job_rows(view(seen(told=told)), SHORT) if row.owner.job_id == "41001")
    assert (row.state, row.states) == ("stalled", ("active", "active", "stalled", "active"))


def test_a_job_without_a_gpu_has_ended_and_comes_after_those_that_run() -> None:
    told = answers(snapshot())
    for gpu in told[0]["gpus"]:
        gpu["owners"] = [owner for owner in gpu["owners"] if owner["job_id"] != "41001"]
    rows = by("state", job_rows(view(seen(told=told)), SHORT), "jobs")
    ended = [row.state == "ended" for row in rows]
    assert ended == sorted(ended)
    assert "41001" in [row.owner.job_id for row in rows if row.state == "ended"]


def test_rows_of_two_nodes_with_the_same_devices_are_not_mixed_up() -> None:
    shown = view(seen(), seen(address="http://b:1"))
    keys = [row.key for row in (*gpu_rows(shown, SHORT), *job_rows(shown, SHORT))]
    assert len(set(keys)) == len(keys)


def test_a_task_of_an_array_is_shown_and_found_under_the_name_that_squeue_has() -> None:
    told = answers(snapshot())
    for owner in (job["owner"] for job in told[1]["jobs"] if job["owner"]["job_id"] == "41001"):
        owner.update(array_id="41000", array_task_id="7", display_id="41000_7")
    shown = view(seen(told=told))
    (row,) = filter_and_sort(job_rows(shown, SHORT), "jobs", text="41000_7")
    assert row.owner.job_id == "41001"
    assert row.key == ("job", seen().address, "41001")
    assert [column.cell(row, shown)[0] for column in COLUMNS["jobs"] if column.name == "job"] == ["41000_7"]
    assert shown_id(replace(row.owner, display_id="")) == "41001", "of an older daemon"
