"""A job's number that comes again: the board tells of the job that runs, and of the last one where none does."""

import json
from collections.abc import Iterator, Mapping

import httpx
import pytest

from dashboards.build import FOLDER
from tests.dashboards.grafana import Span, asker, opened
from tests.dashboards.past import Series, named, prometheus
from tests.dashboards.variables import Ask

pytestmark = pytest.mark.e2e
END = 1_767_873_600.0
HOUR = 3600.0
FIRST, NOW = (END - 5 * HOUR, END - 4 * HOUR), (END - HOUR, END)
"""When a number was a job's."""


def job(number: str, user: str, *, limit: float | None, rate: float, held: tuple[float, float]) -> Series:
    """A sample a minute of what the board reads of a job; its money grows by `rate` an hour."""
    began, ended = held
    moments = [began + 60 * minute for minute in range(int((ended - began) // 60) + 1)]
    of, node = {"cluster": "a", "job_id": number}, f"{user}-{number}"
    on = {**of, "instance": node}
    limited = named("gpu_efficiency_job_time_limit_seconds", **on)
    limits: Series = {} if limit is None else {limited: [(t, limit) for t in moments]}
    gpus = 8.0 if held is FIRST else 2.0
    price = named("gpu_efficiency_price_per_gpu_hour", cluster="a", instance=node, currency="USD", held="true")
    return {
        named("gpu_efficiency_job_state_gpus", **on, state="active"): [(t, gpus) for t in moments],
        named("gpu_efficiency_job_paid_seconds_total", **on): [(t, gpus * (t - began)) for t in moments],
        price: [(t, rate / gpus) for t in moments],
        named("job:gpu_efficiency_info", **of, user=user): [(t, 1.0) for t in moments],
        named("job:gpu_efficiency_gpus", **of): [(t, gpus) for t in moments],
        named("job:gpu_efficiency_cost", **of, currency="USD"): [(t, rate * (t - began) / HOUR) for t in moments],
        named("gpu_efficiency_job_start_timestamp_seconds", **on): [(t, began) for t in moments],
        **limits,
    }  # fmt: skip


@pytest.fixture(name="ask", scope="module")
def _ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with prometheus(tmp_path_factory.mktemp("prometheus")) as past:
        past.write(job("77", "alice", limit=7200, rate=100, held=FIRST))
        past.write(job("77", "zoe", limit=None, rate=10, held=NOW))
        past.write(job("78", "alice", limit=7200, rate=100, held=FIRST))
        with httpx.Client(base_url=past.url, trust_env=False, timeout=60) as client:
            yield asker(client)


def figures(ask: Ask, number: str) -> Mapping[str, list[tuple[Mapping[str, str], float]]]:
    """What each query of the receipt's panels answers over the last six hours."""
    drawn = json.loads((FOLDER / "gpu-efficiency-job.json").read_text())
    panels = [each for panel in drawn["panels"] for each in (panel, *panel.get("panels", ()))]
    kept = [each for each in panels if each["title"] in {"Who it is", "How long yet", "Cost so far"}]
    found = opened(drawn | {"panels": kept}, ask, Span(END - 6 * HOUR, END), chosen={"job_id": [number]})
    return {
        f"{panel.title} {answer.ref}": [(each.labels, each.points[-1][1]) for each in answer.series]
        for panel in found for answer in panel.answers
    }  # fmt: skip


def test_a_number_that_comes_again_is_the_job_that_runs(ask: Ask) -> None:
    told = figures(ask, "77")
    assert [labels["user"] for labels, _ in told["Who it is A"]] == ["zoe"]
    assert [value for _, value in told["Who it is E"]] == [2]
    assert [value for _, value in told["Cost so far A"]] == [pytest.approx(10)]
    assert [value for _, value in told["How long yet A"]] == [1000 * NOW[0]]
    assert told["How long yet C"] == [], "this one has no time limit"


def test_a_job_that_has_ended_is_told_as_it_was_last(ask: Ask) -> None:
    told = figures(ask, "78")
    assert [labels["user"] for labels, _ in told["Who it is A"]] == ["alice"]
    assert [value for _, value in told["Who it is E"]] == [8]
    assert [value for _, value in told["Cost so far A"]] == [pytest.approx(100)]
    assert [value for _, value in told["How long yet C"]] == [7200]
    assert [value for _, value in told["How long yet E"]] == [1000 * (FIRST[0] + 7200)]
