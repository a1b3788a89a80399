"""`gpu-efficiency advise`, against a real Prometheus that evaluated our rules over two weeks of counters.

The counters are those of two nodes that are busy in office hours. Nothing waits for a clock.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.cli import main
from exporter.preview.prometheus import PrometheusClient
from exporter.report.reservation import JOB_SIZES
from tests.dashboards.past import Past, Series, named, prometheus, rules

pytestmark = pytest.mark.e2e
BEGIN = 1_767_571_200
"""2026-01-05 00:00 UTC, a Monday."""
HOURS = 2 * 168
END = BEGIN + HOURS * 3600
SCRAPE = 120
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
RULES = frozenset({
    "node:gpu_efficiency_info", "node_model_leak:gpu_efficiency_seconds:rate5m",
    "node_model:gpu_efficiency_price:per_gpu_hour", "job_state:gpu_efficiency_gpus", "job:gpu_efficiency_gpus",
})  # fmt: skip
PAID, FREE_PRICE, RESERVED, ON_DEMAND = 16, 2.5, 2.0, 4.0
SIZED = (0.14, 1, 2, 7, 8, 9, 64, 65)
"""GPUs of jobs of cluster b, each an hour longer than the one before it."""


def in_office_hours(hour: int) -> bool:
    day, of_day = divmod(hour % 168, 24)
    return day < 5 and 9 <= of_day < 17


def jobs(hour: int) -> dict[str, int]:
    """GPUs by job: two notebooks always, a server on weekdays, training in office hours."""
    found = {"notebook-1": 1, "notebook-2": 1}
    if hour % 168 < 120:
        found["server"] = 4
    if in_office_hours(hour):
        found["train"] = 8
    return found


def counters() -> Series:
    """Cluster a, scraped from ten minutes before the first hour: the second notebook never works."""
    samples: Series = {}

    def put(name: str, value: float, at: int, **labels: str) -> None:
        key = named(f"gpu_efficiency_{name}", cluster="a", instance="n1:19400", job="gpu", **labels)
        samples.setdefault(key, []).append((at, value))

    sums = {"useful": 0.0, "zombie": 0.0, "free": 0.0}
    for at in range(BEGIN - 600, END + 1, SCRAPE):
        now = jobs((at - BEGIN) // 3600)
        for owner, gpus in {
            "zombie": 1, "useful": sum(jobs((at - 1 - BEGIN) // 3600).values()) - 1,
            "free": PAID - sum(jobs((at - 1 - BEGIN) // 3600).values()),
        }.items():  # fmt: skip
            sums[owner] += SCRAPE * gpus
        time = {"model": H100}
        put("node_seconds_total", sums["useful"], at, held="true", leak="useful", layer="useful", **time)
        put("node_seconds_total", sums["zombie"], at, held="true", leak="idle_allocation", layer="gau", **time)
        put("node_seconds_total", sums["free"], at, held="false", leak="idle_allocation", layer="gau", **time)
        for held in ("true", "false"):
            price = {"pool": "", "currency": "USD", "basis": "paid", "held": held}
            put("price_per_gpu_hour", FREE_PRICE, at, **time, **price)
        put("node_info", 1, at, node="n1")
        for job, gpus in now.items():
            put("job_state_gpus", gpus, at, job_id=job, state="active")
    return samples


def recorded() -> Series:
    """A week of cluster b as rules would have recorded it: jobs of every size, and a queue of 30 GPUs."""
    samples: Series = {}
    for at in range(BEGIN, BEGIN + 168 * 3600 + 1, 240):
        hour = (at - 1 - BEGIN) // 3600
        for number, gpus in enumerate(SIZED):
            if hour <= number:
                key = named("job:gpu_efficiency_gpus", cluster="b", job_id=f"{gpus}")
                samples.setdefault(key, []).append((at, gpus))
        leak = {"cluster": "b", "instance": "n9", "model": A100, "held": "true", "leak": "useful", "layer": "useful"}
        samples.setdefault(named("node_model_leak:gpu_efficiency_seconds:rate5m", **leak), []).append((at, 160))
        samples.setdefault(named("cluster:gpu_efficiency_queued:gpus", cluster="b"), []).append((at, 30))
    return samples


Ask = Callable[[str], str]


@pytest.fixture(name="past", scope="module")
def _past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    with prometheus(tmp_path_factory.mktemp("prometheus")) as past:
        past.write(counters())
        chosen = [
            replace(rule, interval=240.0)
            for rule in rules("recording.yaml", "recording-jobs.yaml")
            if rule.name in RULES
        ]
        past.record(chosen, start=BEGIN, end=END)
        past.write(recorded())
        yield past


@pytest.fixture(name="ask")
def _ask(past: Past, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """What the command prints."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def ask(words: str) -> str:
        status = main(["advise", "--quiet", "--prometheus", past.url, *words.split()])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return ask


def of(cluster: str, end: int = END) -> str:
    return f'--match cluster="{cluster}" --at {end} --reserved-price {RESERVED} --on-demand-price {ON_DEMAND}'


def test_warnings_of_the_prometheus_are_said(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrometheusClient, "remarks", property(lambda _: iter(["no store"])))
    assert json.loads(ask(f"{of('a')} --json"))["notes"] == ["no store"]
    assert "no store" in ask(of("a")).splitlines()[-1]


def test_the_number_with_least_cost_is_found_by_the_rules_series(ask: Ask) -> None:
    """Beside it every number is tried, hour by hour."""
    held = [sum(jobs(hour).values()) for hour in range(HOURS)]
    costs = [
        sum(count * RESERVED + max(0, gpus - count) * ON_DEMAND for gpus in held) for count in range(max(held) + 1)
    ]
    least = costs.index(min(costs))
    assert least == 6
    found = json.loads(ask(f"{of('a')} --json"))
    (gpu_type,) = found["types"]
    allocated = gpu_type["allocated"]
    assert (gpu_type["model"], found["known"], allocated["reserve"]) == (H100, pytest.approx(1), least)
    assert allocated["reserve_by_week"] == [least, least]
    assert allocated["costs"] == pytest.approx(costs, rel=0.02)
    assert gpu_type["paid"] == pytest.approx(PAID)
    assert gpu_type["cost_today"] == pytest.approx(PAID * HOURS * FREE_PRICE)
    assert sum(gpu_type["working"]["in_use"]) == pytest.approx(sum(allocated["in_use"]) - 1)
    assert gpu_type["working"]["reserve"] == least - 1
    by_hour = [mean for day in allocated["hours"] for mean in day]
    assert by_hour == pytest.approx(held[:168], abs=3)  # hours at whose start the number changes are means of both
    unchanged = [hour for hour in range(1, 168) if held[hour] == held[hour - 1]]
    assert [by_hour[hour] for hour in unchanged] == pytest.approx([held[hour] for hour in unchanged])


def test_the_text_names_number_hours_and_sizes(ask: Ask) -> None:
    text = ask(of("a"))
    assert "reserve 6: " in text
    assert "on demand: Mon-Fri 09-" in text
    assert "\n2-7 " in text


def hours_of_sizes(found: dict[str, Any]) -> dict[str, float]:
    return {size["gpus"]: size["gpu_hours"] for size in found["job_sizes"]}


def test_jobs_are_counted_by_their_gpus(ask: Ask) -> None:
    found = json.loads(ask(f"{of('b', BEGIN + 168 * 3600)} --json"))
    lengths = {gpus: number + 1 for number, gpus in enumerate(SIZED)}
    sizes = ((0.14, 1), (2, 7), (8,), (9, 64), (65,))
    by_hand = {name: sum(gpus * lengths[gpus] for gpus in size) for name, size in zip(JOB_SIZES, sizes, strict=True)}
    assert hours_of_sizes(found) == pytest.approx(by_hand, rel=0.1)
    assert [size["peak"] for size in found["job_sizes"]] == pytest.approx([1.14, 9, 8, 73, 65])
    assert found["queued"] == pytest.approx(30)


def test_without_price_table_and_prices_there_is_no_number(ask: Ask) -> None:
    (gpu_type,) = json.loads(ask(f'--match cluster="b" --at {BEGIN + 168 * 3600} --json'))["types"]
    assert (gpu_type["allocated"]["reserve"], gpu_type["cost_today"], gpu_type["stored_price"]) == (None, None, None)
    assert gpu_type["allocated"]["in_use"] == [1.0] * 160
