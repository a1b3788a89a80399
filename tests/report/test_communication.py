"""The part of a job report on communication: summed over nodes, and the rank that all of them wait for."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.collectives import CollectiveView, CommunicationView
from exporter.core.job_record import JobRecord
from exporter.core.model import SECOND, Owner
from exporter.history.store import decode_job_record, encode_job_record
from exporter.report.communication import communication_summary
from exporter.report.model import CollectiveSummary, CommunicationSummary, WaitedForRank
from exporter.report.records import join_records
from exporter.report.text import WIDTH, render_text, report_tables
from tests.report.answers import receipt

REDUCE = CollectiveView("AllReduce", 1000, 40 * SECOND, 16e9, 300e9)


def view(*uses: CollectiveView, **more: Any) -> CommunicationView:
    values: dict[str, Any] = {
        "source": "inspector",
        "busy": 30 * SECOND,
        "covered": 100 * SECOND,
        "ranks": (),
        "slowest": None,
    } | more
    return CommunicationView(uses=uses or (REDUCE,), **values)


def record(node: str, communication: CommunicationView | None, **more: Any) -> JobRecord:
    values: dict[str, Any] = {
        "life": node, "owner": Owner("41"), "start": 0.0, "end": 100.0, "running": True, "paid": 100 * SECOND,
        "parts": {"useful": 100 * SECOND}, "energy": {}, "gpus": {"GPU-0": "0"}, "whole_gpus": 1.0,
    } | more  # fmt: skip
    return JobRecord(node=node, communication=communication, **values)


def test_nodes_are_added_up() -> None:
    send = CollectiveView("Send", 2, SECOND, 10.0, None)
    slower = replace(REDUCE, bus_bytes_per_second=100e9)
    assert communication_summary([record("n1", view()), record("n2", view(slower, send, busy=0, source="comma"))]) == (
        CommunicationSummary(
            sources=("comma", "inspector"),
            share=0.15,
            collectives=(
                CollectiveSummary(name="AllReduce", calls=2000, seconds=80.0, bytes=32e9, bus_bytes_per_second=200e9),
                CollectiveSummary(name="Send", calls=2, seconds=1.0, bytes=10.0),
            ),
        )
    )


def test_a_job_that_no_plugin_timed_has_no_such_part() -> None:
    assert communication_summary([record("n1", None)]) is None
    assert "timed by" not in render_text(report_tables(receipt()))


def test_the_rank_that_all_wait_for_is_found_over_all_nodes() -> None:
    """On its own node none stands out: its ranks are all slow, and those of the other node wait for them."""
    first, second = view(ranks=(("0", 0.1), ("1", 0.12))), view(ranks=(("2", 0.6), ("3", 0.62), ("4", 0.58)))
    found = communication_summary([record("n1", first), record("n2", second)])
    assert found is not None
    assert found.waited_for is not None
    assert replace(found.waited_for, behind=0.0) == WaitedForRank(rank="0", node="n1", behind=0.0)
    assert found.waited_for.behind == pytest.approx(0.49)
    for ranks in ((), (("0", 0.1),), (("0", 0.1), ("1", 0.12))):
        found = communication_summary([record("n1", view(ranks=ranks)), record("n2", None)])
        assert found is not None
        assert found.waited_for is None


def test_a_report_shows_it_and_fits_the_terminal() -> None:
    found = communication_summary(
        [record("n1", view(ranks=(("0", 0.1), ("1", 0.5), ("2", 0.5))), link=450e9), record("n2", view(covered=0))]
    )
    text = render_text(report_tables(replace(receipt(), communication=found)))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "AllReduce      2,000         16M           80        300GB/s       66.7 %" in text
    assert "timed by NCCL Inspector: a collective executed in 60.0 % of the time" in text
    assert "the others wait for rank 0 on n1: it communicates 40.0 % of the time less" in text


def test_a_record_keeps_it_in_the_store_and_the_report_has_it() -> None:
    whole = record("n1", view(ranks=(("0", 0.1), ("1", 0.5))), link=450e9)
    stored = decode_job_record(*encode_job_record(whole))
    assert stored == whole
    report = join_records([stored], job_id="41", at=100.0)
    assert report.communication is not None
    assert report.communication.link_bytes_per_second == 450e9
