"""Tests `PrometheusPreview` on what a server of this process has stored: one GPU of one job, a sample a minute."""

from collections.abc import Mapping, Sequence

import pytest

from exporter.core.policy import Policy
from exporter.preview.history import PrometheusPreview
from exporter.preview.prometheus import PrometheusClient, PrometheusSeries
from exporter.preview.scoring import PreviewResult, policy_rows

TARGET = {"cluster": "", "job": "gpu", "instance": "n1"}
GPU = {"cluster": "", "uuid": "GPU-0"}
Minutes = Sequence[tuple[int, float]]
"""Minute of a sample, and minute of the last work."""


class Stored(PrometheusClient):
    """A server that stores `works`; its daemon was scraped in the minutes `scraped`."""

    def __init__(
        self, works: Minutes, scraped: Sequence[int], prices: Mapping[str, float], at_end: str, *, simulated: float
    ) -> None:
        super().__init__("http://127.0.0.1:1")
        self.works, self.scraped, self.prices, self.at_end = works, scraped, prices, at_end
        self.simulated = simulated

    def instant_query(self, query: str, at: float) -> list[PrometheusSeries]:
        if "count(" in query:
            return [PrometheusSeries({}, value=(at, "1"))]
        if "job_info" in query:
            who = {"job_id": "ml/deployment/chat", "name": "chat", "workload_class": "batch"}
            return [PrometheusSeries(who, value=(at, "1"))]
        if "gpu_info" in query and "paid_seconds" not in query:
            return [PrometheusSeries(TARGET | GPU | {"model": "H100"}, value=(at, "1"))]
        if "price_per_gpu_hour" in query:
            assert 'currency!="GPU-hours"' in query
            found = self.prices if "max_over_time" in query else {self.at_end: self.prices[self.at_end]}
            labels = TARGET | {"model": "H100"}
            return [PrometheusSeries(labels | {"currency": c}, value=(at, f"{p}")) for c, p in found.items()]
        if "simulated" in query:
            return [PrometheusSeries({"cluster": ""}, value=(at, f"{self.simulated}"))]
        return []

    def range_query(self, query: str, start: float, end: float, step: float) -> list[PrometheusSeries]:
        assert step == 60.0
        if "process_start_time" in query:
            values = tuple((minute * 60.0, "-3600") for minute in self.scraped if start <= minute * 60 <= end)
            return [PrometheusSeries(TARGET, values=values)]
        holder = GPU | {"job_id": "ml/deployment/chat"}
        values = tuple((at * 60.0, repr(work * 60.0)) for at, work in self.works if start <= at * 60 <= end)
        return [PrometheusSeries(holder, values=values)] if values else []


def previewed(
    works: Minutes,
    *,
    scraped: Sequence[int] | None = None,
    prices: Mapping[str, float] | None = None,
    at_end: str = "USD",
    simulated: float = 0.0,
    policy: str = "zombie.batch=15m",
) -> PreviewResult:
    """The preview of all minutes."""
    minutes = range(works[-1][0] + 1) if scraped is None else scraped
    server = Stored(works, minutes, prices or {"USD": 2.0}, at_end, simulated=simulated)
    preview = PrometheusPreview(server, policy_rows(Policy(), [policy]))
    end = works[-1][0] * 60.0
    list(preview.run(0.0, end, 60.0))
    return preview.result("stored", end)


NIGHT = [*((at, 0.0) for at in range(181)), *((at, 900.0) for at in range(900, 1081))]
"""A deployment has a GPU for three hours, is scaled to 0 for twelve, and has it again for three; it never works."""


@pytest.mark.parametrize("window", [1_000_000, 100])
def test_a_job_that_returns_after_a_night_is_two_allocations(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr("exporter.preview.history.MAX_SAMPLES", window)
    found = previewed(NIGHT)
    before, after = found.rows
    assert found.gpu_hours_held == pytest.approx(6.0)
    assert (before.episodes_right, before.episodes_wrong, before.gpu_hours_work_lost) == (2, 0, 0.0)
    assert before.gpu_hours_freed == pytest.approx(2 * 2.5)
    assert before.money_freed == {"USD": pytest.approx(2 * 2.5 * 2)}
    assert after.gpu_hours_freed == pytest.approx(2 * 2.75)


def test_a_night_without_scrapes_is_not_judged() -> None:
    silent = [*range(61), *range(780, 841)]
    found = previewed([(at, 0.0) for at in silent], scraped=silent)
    assert found.gpu_hours_held == pytest.approx(14.0)
    assert (found.rows[0].episodes_unjudged, found.rows[0].gpu_hours_freed, found.rows[0].money_freed) == (1, 0.0, {})
    assert any("less than half of the time afterwards was observed" in note for note in found.notes)


def test_a_batch_job_that_has_worked_may_rest_for_longer() -> None:
    """Three hours of work, 45 minutes without, and work again: a zombie after 30 minutes if it had not worked."""
    works = [(at, float(at if at <= 180 or at >= 225 else 180)) for at in range(401)]
    before, shorter = previewed(works, policy="zombie.batch=20m").rows
    assert (before.episodes, shorter.episodes) == (0, 1)
    idle_first = [(at, float(at if at >= 45 else 0)) for at in range(401)]
    assert previewed(idle_first).rows[0].episodes_wrong == 1


@pytest.mark.parametrize("last", ["CHF", "USD"])
def test_of_two_currencies_in_a_window_the_later_counts(last: str) -> None:
    (row, _) = previewed([(at, 0.0) for at in range(181)], prices={"CHF": 3.0, "USD": 2.0}, at_end=last).rows
    assert row.money_freed == {last: pytest.approx(2.5 * (3.0 if last == "CHF" else 2.0))}


def test_what_is_simulated_is_marked() -> None:
    works = [(at, 0.0) for at in range(31)]
    assert previewed(works, simulated=1.0).source == "stored (SIMULATED)"
    assert previewed(works).source == "stored"
