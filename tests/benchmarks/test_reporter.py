"""The reporter's benchmark: it measures what it says, and refuses figures of nothing."""

from pathlib import Path

import pytest

from benchmarks.node.reporter import reporter
from exporter.training.client import Reporter


@pytest.mark.benchmark
def test_every_case_is_measured_and_within_its_budget() -> None:
    rows = reporter(quick=True)
    assert [each.what for each in rows if each.budget] == [
        "step(), nobody listening, mean",
        "step(), a listener, mean",
        'with phase("data"), a listener, mean',
        "step(), a listener that never reads, its queue full, mean",
    ]
    assert all(each.met for each in rows if each.budget), "some tenths of a microsecond where 5 are allowed"
    assert [each.what for each in rows if "sends" in each.what]


@pytest.mark.slow
def test_a_listener_that_hears_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: Path, *, messages: int) -> list[float]:
        return [1.0] * messages * 1000

    monkeypatch.setattr("benchmarks.node.reporter._each_sent", silent)
    monkeypatch.setattr("benchmarks.node.reporter._stuck", lambda *_, **__: [])
    with pytest.raises(RuntimeError, match="has not heard"):
        reporter(quick=True)
    assert Reporter(socket=str(tmp_path / "nobody.sock"), http="").dropped == 1
