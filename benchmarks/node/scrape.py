"""What a scrape costs: the time until the whole answer is here, and prometheus_client's own text beside it.

Owns these measurements. The client asks again as soon as it has its answer, on the same machine, while the daemon
samples eight GPUs once a second: harsher than any Prometheus server.
"""

import gzip
import time
from collections.abc import Mapping
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.figures import Row, own_garbage_only, percentile, row
from benchmarks.group import Group, Measured
from benchmarks.rig.client import METRICS, Client
from benchmarks.rig.daemon import cpu_seconds, running

SCRAPE_BUDGET_MS = 10.0
_ROUNDS = 5
_GETS = 300
"""Of each form in a round."""
_CALLS = 100
_OPENMETRICS = "application/openmetrics-text"
_FORMS: dict[str, dict[str, str]] = {
    "text": {"Accept": "text/plain", "Accept-Encoding": "identity"},
    "text, gzip": {"Accept": "text/plain", "Accept-Encoding": "gzip"},
    "OpenMetrics": {"Accept": f"{_OPENMETRICS};version=1.0.0", "Accept-Encoding": "identity"},
    "OpenMetrics, gzip": {"Accept": f"{_OPENMETRICS};version=1.0.0", "Accept-Encoding": "gzip"},
}
_FLOOR = "/healthz"
"""Says ok and nothing else: what the server, the client and the rest of the machine take of every answer."""
_LATE, _TICKS = "gpu_efficiency_late_ticks_total", "gpu_efficiency_ticks_total"
Rounds = list[list[float]]
"""Milliseconds of every GET, round by round."""


def scrape() -> list[Row]:
    """Time scrapes of every form, count the ticks they made late, and time the baseline on the same series."""
    with running(["-m", "benchmarks.rig.node"]) as daemon, Client(daemon.port) as client:
        _await_ticks(client, 5)
        for headers in _FORMS.values():
            _check(client, headers)
        late, ticks, cpu = client.value(_LATE), client.value(_TICKS), cpu_seconds(daemon.pid)
        times = _rounds(client)
        cpu = (cpu_seconds(daemon.pid) - cpu) * 1e3 / (len(times) * _ROUNDS * _GETS)
        late, ticks = client.value(_LATE) - late, client.value(_TICKS) - ticks
        _, body = client.get()
    return [*_timings(times), *_side_effects(late=late, ticks=ticks, cpu=cpu), *_baseline(body.decode())]


def _await_ticks(client: Client, count: int) -> None:
    """Wait for live ticks after the hour of history."""
    before = client.value(_TICKS)
    while client.value(_TICKS) < before + count:
        time.sleep(0.2)


def _rounds(client: Client) -> dict[str, Rounds]:
    """Time every form in turn, request by request, so that a busy moment of the machine falls on all alike."""
    times: dict[str, Rounds] = {name: [[] for _ in range(_ROUNDS)] for name in (*_FORMS, _FLOOR)}
    for number in range(_ROUNDS):
        for _ in range(_GETS):
            for name, headers in _FORMS.items():
                times[name][number].append(_timed(client, METRICS, headers))
            times[_FLOOR][number].append(_timed(client, _FLOOR, {}))
    return times


def _timed(client: Client, path: str, headers: Mapping[str, str]) -> float:
    began = time.perf_counter()
    client.get(path, headers)
    return (time.perf_counter() - began) * 1e3


def _timings(times: Mapping[str, Rounds]) -> list[Row]:
    forms = [_timing(f"GET /metrics, {name} (8 GPUs, 8 jobs): wall", times[name], SCRAPE_BUDGET_MS) for name in _FORMS]
    return [*forms, _timing(f"GET {_FLOOR}, the floor beneath these: wall", times[_FLOOR], None)]


def _timing(what: str, rounds: Rounds, budget: float | None) -> Row:
    every = [value for values in rounds for value in values]
    p99s = [percentile(values, 0.99) for values in rounds]
    spread = f"p99 {median(p99s):.2f} (rounds {min(p99s):.2f} - {max(p99s):.2f}), max {max(every):.2f}"
    often = f"{_ROUNDS} rounds x {_GETS} GETs"
    return row(
        "scrape", what, often=often, values=every, unit="ms", digits=2,
        budget=budget, judged=median(p99s), spread=spread,
    )  # fmt: skip


def _side_effects(*, late: float, ticks: float, cpu: float) -> list[Row]:
    return [
        row(
            "scrape", "Ticks late while scraped without a pause", often=f"{ticks:.0f} ticks", values=[late],
            unit="ticks", digits=0, budget=0, spread="-",
        ),
        row(
            "scrape", "CPU of the daemon for a GET (all of the above, sampling included)",
            often=f"mean of {(len(_FORMS) + 1) * _ROUNDS * _GETS:,}", values=[cpu], unit="ms", digits=2, spread="-",
        ),
    ]  # fmt: skip


def _check(client: Client, headers: Mapping[str, str]) -> None:
    """Refuse to time an answer of another form than the one the row names."""
    response, body = client.get(METRICS, headers)
    packed = response.getheader("Content-Encoding") == "gzip"
    openmetrics = (response.getheader("Content-Type") or "").startswith(_OPENMETRICS)
    wanted = headers["Accept-Encoding"] == "gzip", headers["Accept"].startswith(_OPENMETRICS)
    if (packed, openmetrics) != wanted or b"# HELP" not in (gzip.decompress(body) if packed else body):
        raise RuntimeError(f"asked for {dict(headers)}, got {dict(response.getheaders())}")


def _baseline(text: str) -> list[Row]:
    """Time prometheus_client on as many series with the same names, labels and values, set beforehand."""
    families = list(text_string_to_metric_families(text))
    registry = registry_of(families)
    series = sum(len(family.samples) for family in families)
    said = generate_latest(registry)
    found = sum(not line.startswith(b"#") for line in said.splitlines())
    if found != series:
        raise RuntimeError(f"the baseline writes {found} series, the exporter {series}: no comparison")
    with own_garbage_only():
        milliseconds = [_cpu(registry) for _ in range(_CALLS)]
    what = f"Baseline: prometheus_client's generate_latest, the same {series:,} series: CPU"
    return [row("scrape", what, often=f"{_CALLS} x", values=milliseconds, unit="ms", digits=2)]


def _cpu(registry: CollectorRegistry) -> float:
    began = time.process_time()
    generate_latest(registry)
    return (time.process_time() - began) * 1e3


def registry_of(families: list[Metric]) -> CollectorRegistry:
    """Build metrics of prometheus_client's own kinds that hold the samples of `families`."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the exporter publishes none either
    registry = CollectorRegistry()
    for family in families:
        labels = tuple(family.samples[0].labels)
        kind = Counter if family.type == "counter" else Gauge
        metric = kind(family.name, family.documentation, labels, registry=registry)
        for sample in family.samples:
            child = metric.labels(**sample.labels) if labels else metric
            child.inc(sample.value)
    return registry


SCRAPE = Group(
    name="scrape",
    title="Scrapes",
    about=(
        "One kept connection, the next request as soon as the answer is here, client and daemon on the same machine; "
        "wall time until the last byte. Meanwhile the daemon samples eight simulated GPUs with eight jobs once a "
        "second through its real loop. The forms take turns. The budget is held against the 99th percentile, "
        "the median of those of the rounds: a busy moment of a shared machine falls into one round, and slows "
        "`/healthz` too. The baseline makes the same series with prometheus_client's own metrics, without HTTP: "
        "compare it with [the text](#snapshot-and-text)."
    ),
    measures=("exporter/agent", "exporter/core", "exporter/web"),
    run=lambda: Measured(rows=scrape()),
)
