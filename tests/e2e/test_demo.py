"""The demo, and Prometheus itself: what a first visitor sees, and what is stored of it."""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import fsum
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from msgspec import Struct

from exporter.core.metrics import METRICS
from exporter.trace import TraceHeader, TraceWriter
from tests.e2e.running import ROOT, Daemon, daemon, environment, running, site
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for
from tests.worlds import RESTING, WORKING, device, first, held, reading, seen

pytestmark = pytest.mark.e2e
RULES = ROOT / "alerts" / "recording.yaml"
PLAIN = "text/plain;version=0.0.4"
SCRAPE_TIMEOUT = 1
"""Seconds, of Prometheus; also its interval."""
ENOUGH = 8
"""Scrapes of each target before the stored samples are looked at."""
CARPENTER = {"gau": 6 / 8, "ectr": 4 / 6, "emfu": 0.4}
"""Two of eight GPUs are nobody's, two rest, four run the tensor pipes at 40 %."""


@pytest.fixture(name="demo", scope="module")
def _demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("demo"), "demo") as served:
        yield served


def test_the_demo_is_marked_as_simulated_wherever_one_looks(demo: Daemon) -> None:
    page = demo.page()
    assert page.total("simulated") == 1
    assert page.by("source", "source_info") == {"simulation": 1}
    assert "SIMULATED" in demo.get("/").text
    for path in ("/api/v1/gpus", "/api/v1/jobs"):
        assert demo.get(path).json()["node"]["simulated"] is True
    assert "SIMULATED" in demo.program.log()


def test_the_demo_has_hours_behind_it_and_something_to_find(demo: Daemon) -> None:
    page = demo.until(lambda page: page.total("hang_suspected"), "a hang is suspected")
    assert len(page.states()) == 8
    assert min(page.by("gpu", "paid_seconds_total").values()) >= 3 * 3600
    states = [state for state, _ in page.states().values()]
    assert (states.count("zombie"), states.count("active") >= 5) == (1, True), page.states()
    assert all(page.total("seconds_total", leak=leak) > 0 for leak in ("useful", "idle_allocation", "memory_bound"))
    later = demo.after(2)
    assert later.total("paid_seconds_total") > page.total("paid_seconds_total")


def test_the_demo_s_interface_says_what_its_metrics_say(demo: Daemon) -> None:
    gpus = demo.get("/api/v1/gpus").json()["gpus"]
    jobs = demo.get("/api/v1/jobs").json()["jobs"]
    page = demo.page()
    assert {gpu["index"]: gpu["state"] for gpu in gpus}.keys() == page.states().keys()
    assert {gpu["uuid"] for gpu in gpus} == page.by("uuid", "paid_seconds_total").keys()
    assert {job["owner"]["job_id"] for job in jobs} == page.by("job_id", "job_paid_seconds_total").keys()
    for gpu in gpus:
        assert fsum(gpu["last_hour"]["leaks"].values()) == pytest.approx(gpu["last_hour"]["seconds"])


def test_the_demo_s_jobs_speak_for_themselves(demo: Daemon) -> None:
    page = demo.page()
    jobs = {job["owner"]["job_id"]: job for job in demo.get("/api/v1/jobs").json()["jobs"]}
    (trained,) = (job["training"] for job in jobs.values() if job["training"])
    (served,) = (job["serving"] for job in jobs.values() if job["serving"])
    assert 0 < trained["mfu"] < trained["goodput"] <= 1
    assert 0 < trained["padding_tokens"] < 0.1 * trained["tokens"]
    assert (trained["run"], trained["checkpoints"]) == ("pretrain-8b", 1)
    assert served["running"] > 0 == served["waiting"]
    assert served["latency_seconds"].keys() == {"ttft", "itl", "queue", "e2e"}
    assert all(page.total("job_seconds_total", leak=leak) > 0 for leak in ("padding", "recomputation"))
    html = demo.get("/").text
    assert all(word in html for word in ("MFU ", "goodput ", "ttft p99 ", "KV "))


def test_the_demo_documents_its_interface(demo: Daemon) -> None:
    document = demo.get("/openapi.json").json()
    assert document["paths"].keys() == {f"/api/v1/{name}" for name in ("node", "gpus", "jobs", "receipts", "events")}
    assert demo.get("/healthz").text == "ok\n"


ONLY_WHERE_IT_OCCURRED = {
    f"gpu_efficiency_{name}"
    for name in (
        "exemption_expiry_timestamp_seconds", "grams_co2_per_kwh", "hang_confidence_ratio", "hang_sign",
        "hang_suspected", "idle_budget_per_hour", "job_bubble_ratio", "job_draft_acceptance_ratio", "job_epoch",
        "job_exempt", "job_fitting_slice_ratio", "job_hang_suspected_gpus", "job_label_info", "job_no_process_gpus",
        "job_no_process_since_timestamp_seconds", "job_quality", "job_quality_start", "job_quality_target",
        "job_samples_total",
        "job_spin_since_timestamp_seconds", "job_target_reached_timestamp_seconds",
        "job_tensor_parallel_lost_bytes_per_second", "job_time_limit_seconds", "job_unneeded_seconds_total",
        "job_useful_pipe",
        "job_zombie_limit_seconds", "last_xid", "otlp_pushes_total", "price_per_kwh", "scheduler_unanswered_seconds",
        "shared_seconds_total",
        "c2c_bytes_per_second", "job_collective_bus_bytes_per_second", "job_collective_bytes_total",
        "job_collective_seconds_total", "job_collectives_total", "job_communication_ratio", "job_cpu_cores",
        "job_hang_culprit", "job_pressure_ratio", "job_slowest_rank", "job_stall_seconds_total", "rdma_active",
        "rdma_bytes_total", "rdma_rate_bytes_per_second", "rdma_wait_ticks_total", "video_engine_ratio",
        "spin_dram_active_ratio", "spin_link_bytes_per_second",
        "spin_since_timestamp_seconds", "unobserved_seconds_total", "workload_messages_total",
    )
}  # fmt: skip
"""The demo's jobs have no limit and a GPU each, nobody schedules them or listens at a socket, and its hang comes and
goes. Its training has no pipeline, no tensor parallelism and no target, and its chat server drafts nothing."""


def test_promtool_finds_no_fault_with_the_demo_s_metrics(demo: Daemon) -> None:
    text = demo.get("/metrics").text
    assert {m.name for m in METRICS if f"# TYPE {m.name} {m.type}\n" not in text} <= ONLY_WHERE_IT_OCCURRED
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def carpenter(folder: Path) -> Path:
    """Write twenty-five minutes of a node whose layers are known without any program."""
    trace = folder / "carpenter.jsonl.gz"
    devices = [device(f"GPU-{n}", f"{n}") for n in range(8)]
    work = WORKING | {"gr_engine_active": 1.0, "sm_active": 1.0, "tensor_active": 0.4}
    signals = [RESTING | {"processes": ()}] * 2 + [RESTING] * 2 + [work] * 4
    with TraceWriter(trace, TraceHeader(host="carpenter"), flush_every=0) as writer:
        writer.append(first(devices, [held(d.uuid, gpus=6) for d in devices[2:]]))
        for at in range(1, 1500):
            writer.append(seen(at, *(reading(at - 1, at, s, d.uuid) for d, s in zip(devices, signals, strict=True))))
    return trace


class Prometheus(Struct, frozen=True):
    """The real thing, asked over its HTTP interface."""

    client: httpx.Client

    def ask(self, path: str, **parameters: str) -> Any:
        answer = self.client.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def stored(self, selector: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Every sample stored of the last minutes: labels, and (time, value) as they were scraped or recorded."""
        found = self.ask("query", query=f"{selector}[10m]")["result"]
        return [(row["metric"], [(at, float(value)) for at, value in row["values"]]) for row in found]

    def newest(self, query: str) -> dict[str, float]:
        """The value of each job's series."""
        found = self.ask("query", query=query)["result"]
        return {row["metric"].get("job", row["metric"].get("instance", "")): float(row["value"][1]) for row in found}


@contextmanager
def prometheus(folder: Path, targets: dict[str, int]) -> Iterator[Prometheus]:
    """Scrape each target once a second; the instance is the target's name, so that rules tell them apart."""
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}]}
        for name, port in targets.items()
    ]
    timeout = f"{SCRAPE_TIMEOUT}s"
    pace = {"scrape_interval": timeout, "scrape_timeout": timeout, "evaluation_interval": "1s"}
    rules = folder / "recording.yaml"
    rules.write_text(re.sub(r"(?m)^ *interval: .*\n", "", RULES.read_text()))
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump({"global": pace, "rule_files": [f"{rules}"], "scrape_configs": jobs})
    )
    port = free_port()
    words = [
        "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (
        running(words, folder / "prometheus.log", environment()) as program,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as client,
    ):
        wait_for(lambda: program.alive() and _ready(client), "Prometheus is ready")
        yield Prometheus(client)
        assert program.end() == 0
        assert "level=error" not in program.log()


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(name="stored", scope="module")
def _stored(demo: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, having scraped for some seconds: the demo in both formats, and the carpenter's node replayed.

    It always asks for OpenMetrics, so the plain text comes to it through a site that asks for that.
    """
    folder = tmp_path_factory.mktemp("prometheus")

    def plain() -> tuple[bytes, str]:
        answer = demo.get("/metrics", accept=PLAIN)
        return answer.content, answer.headers["content-type"]

    with ExitStack() as stack:
        replayed = stack.enter_context(daemon(folder, "replay", f"{carpenter(folder)}", "--serve", "--speed", "10"))
        text = stack.enter_context(site(plain))
        targets = {"openmetrics": demo.port, "text": text.port, "carpenter": replayed.port}
        found = stack.enter_context(prometheus(folder, targets))
        wait_for(lambda: set(targets) == enough(found), f"{ENOUGH} scrapes of each target")
        yield found


def enough(found: Prometheus) -> set[str]:
    """Targets scraped often enough and also evaluated by the rules."""
    scraped = {job for job, count in found.newest("count_over_time(up[10m])").items() if count >= ENOUGH}
    ruled = found.newest("count_over_time(node:gpu_efficiency_product:ratio_rate5m[10m])")
    return scraped & {job for job, count in ruled.items() if count >= ENOUGH // 2}


def test_prometheus_takes_every_scrape_in_both_formats(stored: Prometheus) -> None:
    up = stored.stored("up")
    assert {labels["job"] for labels, _ in up} == {"openmetrics", "text", "carpenter"}
    refused = {(labels["job"], at) for labels, values in up for at, value in values if value != 1}
    took = {
        (labels["job"], at): took for labels, values in stored.stored("scrape_duration_seconds") for at, took in values
    }
    assert all(took[scrape] >= SCRAPE_TIMEOUT for scrape in refused), "a busy machine may take too long, nothing else"
    wait_for(
        lambda: (
            [(target["health"], target["lastError"]) for target in stored.ask("targets")["activeTargets"]]
            == [("up", "")] * 3
        ),
        "all are up",
    )
    own = stored.client.get("/metrics").text
    trouble = re.findall(r"^(prometheus_target_scrapes?_\w*(?:duplicate|out_of|exceeded)\w*) (\S+)$", own, re.MULTILINE)
    assert len(trouble) >= 3
    assert {value for _, value in trouble} == {"0"}


def test_both_formats_are_stored_under_the_same_names(stored: Prometheus) -> None:
    names = {
        job: stored.newest(f'count by (job) (count by (job, __name__) ({{job="{job}",__name__=~"gpu_efficiency_.*"}}))')
        for job in ("openmetrics", "text")
    }
    assert names["openmetrics"]["openmetrics"] == names["text"]["text"]
    assert len(METRICS) - len(ONLY_WHERE_IT_OCCURRED) <= names["text"]["text"] <= len(METRICS)
    missing = stored.ask("query", query='{job="text"} unless on (__name__) {job="openmetrics"}')["result"]
    assert missing == []


@pytest.mark.parametrize("book", [("", "uuid"), ("job_", "job_id")])
def test_the_ledger_s_law_holds_in_every_stored_sample(stored: Prometheus, book: tuple[str, str]) -> None:
    prefix, key = book
    parts: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for labels, values in stored.stored(f"gpu_efficiency_{prefix}seconds_total"):
        for at, value in values:
            parts[labels["job"], labels[key], at].append(value)
    newest = {job: max(at for other, _, at in parts if other == job) for job, *_ in parts}
    paid = {
        (labels["job"], labels[key], at): value
        for labels, values in stored.stored(f"gpu_efficiency_{prefix}paid_seconds_total")
        for at, value in values
        if at <= newest[labels["job"]]  # another scrape may have come between the two questions
    }
    assert parts.keys() == paid.keys()
    assert len(paid) >= 3 * ENOUGH
    assert max(abs(fsum(parts[moment]) - paid[moment]) for moment in paid) < 1e-6


def test_the_law_as_a_query_holds_at_every_step(stored: Prometheus) -> None:
    query = (
        "max(abs(sum by (job, uuid) (gpu_efficiency_seconds_total) - on (job, uuid) gpu_efficiency_paid_seconds_total))"
    )
    end = stored.newest("timestamp(max(up))")[""]
    (row,) = stored.ask("query_range", query=query, start=f"{end - 60}", end=f"{end}", step="1s")["result"]
    assert len(row["values"]) >= ENOUGH - 1
    assert max(float(value) for _, value in row["values"]) < 1e-6


def test_the_recording_rules_are_loaded_and_healthy(stored: Prometheus) -> None:
    (group,) = stored.ask("rules")["groups"]
    wanted = [rule["record"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert [(rule["name"], rule["health"]) for rule in group["rules"]] == [(name, "ok") for name in wanted]


@pytest.mark.parametrize("layer", CARPENTER)
def test_recorded_ratios_are_the_daemon_s_own_and_the_carpenter_s(stored: Prometheus, layer: str) -> None:
    recorded = stored.newest(f'node:gpu_efficiency_{layer}:ratio_rate5m{{instance="carpenter"}}')
    daemon_s = stored.newest(f'gpu_efficiency_node_{layer}_ratio{{job="carpenter"}}')
    assert recorded == pytest.approx({"carpenter": CARPENTER[layer]}, abs=1e-6)
    assert daemon_s == pytest.approx({"carpenter": CARPENTER[layer]}, abs=1e-6)


def test_the_recorded_product_is_a_fifth_and_all_of_it_was_seen(stored: Prometheus) -> None:
    for name, share in (("product", 0.2), ("product_floor", 0.2), ("coverage", 1.0), ("kernel_utilization", 0.5)):
        recorded = stored.newest(f'node:gpu_efficiency_{name}:ratio_rate5m{{instance="carpenter"}}')
        assert recorded == pytest.approx({"carpenter": share}, abs=1e-6), name


def test_both_formats_record_the_same_layers(stored: Prometheus) -> None:
    for layer in CARPENTER:
        recorded = stored.newest(f"node:gpu_efficiency_{layer}:ratio_rate5m")
        assert recorded["text"] == pytest.approx(recorded["openmetrics"], abs=0.05)
