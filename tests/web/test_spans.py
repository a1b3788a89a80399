"""What the minutes of a GPU's last hour went to, of stories whose hours are known."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.simulate.simulation import simulate
from exporter.web.spans import SpanOut, hour_spans

BEGAN = 1_767_225_600


def after(scenario: str) -> Snapshot:
    ledger = Ledger()
    for observation in simulate(scenario, gpus=2, period_seconds=5.0, wall=BEGAN * SECOND).observations:
        advance(ledger, observation)
    return take_snapshot(ledger, DaemonMetadata(host="n1", simulated=True))


def spans_of(scenario: str) -> tuple[list[SpanOut], float]:
    snapshot = after(scenario)
    return hour_spans(snapshot.gpus[0], snapshot.wall), snapshot.wall / SECOND


def test_spans_follow_one_another_up_to_now_and_neighbours_differ() -> None:
    spans, now = spans_of("deadlock")
    assert [spans[0].start, spans[-1].end] == pytest.approx([BEGAN, now])
    assert all(one.end == next_.start and one.outcome != next_.outcome for one, next_ in pairwise(spans))
    assert spans[-1].outcome == "hung"
    assert spans[-1].start == pytest.approx(BEGAN + 20 * 60, abs=120), "five minutes after it began to spin"
    assert "useful" in {span.outcome for span in spans}


def test_a_hang_takes_the_time_before_it_was_confirmed() -> None:
    snapshot = after("deadlock")
    began, gpu = snapshot.hung_since["0"], snapshot.gpus[0]
    spans = hour_spans(gpu, snapshot.wall, hung_since=began)
    assert began == pytest.approx(BEGAN + 15 * 60, abs=10)
    assert (spans[-1].outcome, spans[-1].start, spans[-2].end) == ("hung", began, began)
    assert spans[-1].end == snapshot.wall / SECOND
    earlier = hour_spans(gpu, snapshot.wall, hung_since=BEGAN - 100.0)
    assert [(span.start, span.outcome) for span in earlier] == [(BEGAN, "hung")], "no earlier than it was observed"
    assert hour_spans(replace(gpu, minutes=()), snapshot.wall, hung_since=began) == []


@pytest.mark.slow
def test_no_more_than_an_hour_and_a_minute_is_kept() -> None:
    spans, now = spans_of("zombie_notebook")
    assert 3600 <= now - spans[0].start <= 3720
    assert {span.outcome for span in spans} <= {"idle_allocation", "unattributed_stall", "startup"}


def test_a_gpu_without_time_has_none() -> None:
    snapshot = after("lost_gpu")
    assert {span.outcome for span in hour_spans(snapshot.gpus[1], snapshot.wall)} > {"unavailable"}
    assert hour_spans(replace(snapshot.gpus[1], minutes=()), snapshot.wall) == []
