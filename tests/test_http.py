"""HTTP on a real server on the loopback: forms, refusals, hostile names, threads; and the page for a person."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from html.parser import HTMLParser
from itertools import cycle
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from fastapi import FastAPI
from msgspec import structs
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporter.core.evidence import HANG_SIGNS
from exporter.core.exposition import OPENMETRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE, render
from exporter.core.leaks import LEAK_NAMES, LEAKS
from exporter.core.ledger import Ledger
from exporter.core.model import (
    PPM,
    Allocation,
    Device,
    Health,
    HostUsage,
    Latency,
    NetworkPort,
    Observation,
    Owner,
    Reading,
    ServingReport,
    Spec,
    State,
    TrainingReport,
)
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.formatting import duration, whole_percent
from exporter.web.api import GpusOut, HealthOut, JobsOut, accounts_out, gpus_out, jobs_out
from exporter.web.app import PATHS, create_app
from exporter.web.page import CONTENT_SECURITY_POLICY, LEAK_COLOURS, SCRIPT, STYLE, PageData, printable
from exporter.web.page import render_node_page as render_page
from exporter.web.responses import wants_gzip, wants_openmetrics
from exporter.web.server import WebListenError, listen, uvicorn_config
from exporter.web.summary import STATE_SYMBOLS, health_problems
from tests import worlds

S = 1_000_000_000
WALL = 1_767_225_600 * S
H100 = Spec(name="H100", peak_flops=989.4e12, tensor_reference_clock_hz=1830e6, dram_ceiling=0.92)
WORKING: dict[str, Any] = {
    "gr_engine_active": 0.95,
    "sm_active": 0.8,
    "tensor_active": 0.45,
    "dram_active": 0.4,
    "gpu_utilization": 1.0,
    "power_watts": 600.0,
    "temperature_celsius": 61.0,
    "sm_clock_hz": 1830e6,
}
ADA = Owner(job_id="4711", user="ada", name="pretrain", scheduler="slurm")
META = DaemonMetadata(version="9.9", source="nvml", scheduler="slurm", host="node-7", interval=1.0)
_PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
_OPENMETRICS = "application/openmetrics-text;version="
PROMETHEUS_3 = (
    f"{_OPENMETRICS}1.0.0;escaping=allow-utf-8;q=0.6,{_OPENMETRICS}0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
SCRAPERS = {
    # Recorded from Prometheus 2.42.0 and 3.5.3; 2.53 as its source composes it.
    "2.42": f"{_OPENMETRICS}1.0.0,{_OPENMETRICS}0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "2.42, native histograms": (
        f"{_PROTOBUF},{_OPENMETRICS}1.0.0;q=0.8,{_OPENMETRICS}0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    ),
    "2.53": f"{_OPENMETRICS}1.0.0;q=0.5,{_OPENMETRICS}0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "2.53, native histograms": (
        f"{_PROTOBUF};q=0.5,{_OPENMETRICS}1.0.0;q=0.4,{_OPENMETRICS}0.0.1;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    ),
    "3.5": PROMETHEUS_3,
    "3.5, native histograms": (
        f"{_PROTOBUF};q=0.6,{_OPENMETRICS}1.0.0;escaping=allow-utf-8;q=0.5,{_OPENMETRICS}0.0.1;q=0.4,"
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    ),
    "3.5, scrape_protocols: [PrometheusText1.0.0, PrometheusProto]": (
        f"text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,{_PROTOBUF};q=0.5,*/*;q=0.4"
    ),
}
"""What servers of Prometheus send as Accept."""


def gpu(number: int, **changes: Any) -> Device:
    known: dict[str, Any] = {"uuid": f"GPU-{number}", "index": f"{number}", "model": "H100", "spec": H100}
    return Device(**known | changes)


def world(
    devices: tuple[Device, ...],
    *,
    owner: Owner = ADA,
    holds: tuple[str, ...] = ("GPU-0",),
    seconds: int = 60,
    signals: dict[str, Any] | None = None,
    meta: DaemonMetadata = META,
    silent: tuple[str, ...] = (),
) -> Snapshot:
    """A node after `seconds` of the same signals on all GPUs that are not `silent`."""
    ledger = Ledger()
    held = tuple(Allocation(uuid=uuid, owner=owner, start=0, gpus=len(holds)) for uuid in holds)
    advance(ledger, Observation(0, WALL, devices=devices, allocations=held))
    for second in range(1, seconds + 1):
        at = second * S
        seen = [device.uuid for device in devices if device.uuid not in silent]
        readings = tuple(Reading(uuid, at - S, at, **(WORKING if signals is None else signals)) for uuid in seen)
        advance(ledger, Observation(at, WALL + at, readings=readings, allocations_at=at))
    return take_snapshot(ledger, meta)


NODE = world((gpu(0), gpu(1)))
SIMULATED = replace(NODE, meta=replace(NODE.meta, simulated=True))
"""One GPU at work for a minute, one nobody holds."""


class Box:
    """What an agent would be to the app: the newest snapshot, a clock, and a last error, all set by hand."""

    def __init__(self, snapshot: Snapshot | None = NODE, *, age: int = 0, error: str = "") -> None:
        self.snapshot, self.age, self.error = snapshot, age, error
        self.threads: set[int] = set()

    def latest(self) -> Snapshot | None:
        self.threads.add(threading.get_ident())
        return self.snapshot

    def now(self) -> int:
        return self.age + (0 if self.snapshot is None else self.snapshot.at)

    def app(self, latest: Callable[[], Snapshot | None] | None = None) -> FastAPI:
        return create_app(latest or self.latest, now=self.now, max_age_seconds=10.0, why_not=lambda: self.error)


class Site:
    """A served app: a client that keeps its connections, and the thread of its event loop."""

    def __init__(self, app: FastAPI) -> None:
        self._socket = listen("127.0.0.1", 0)
        self._server = uvicorn.Server(uvicorn_config(app))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        self.loop_thread = self._thread.ident
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=30)
        self.client.get("/healthz")

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@contextmanager
def serving(box: Box, *, latest: Callable[[], Snapshot | None] | None = None) -> Iterator[Site]:
    site = Site(box.app(latest))
    try:
        yield site
    finally:
        site.close()


@pytest.fixture(scope="module")
def live() -> Iterator[Site]:
    with serving(Box()) as site:
        yield site


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        *((accept, _OPENMETRICS in accept) for accept in SCRAPERS.values()),
        (_PROTOBUF, False),
        ("text/plain;version=0.0.4;q=1,*/*;q=0.1", False),
        ("application/openmetrics-text", True),
        ('Application/OpenMetrics-Text; Version="1.0.0"', True),
        ("application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.5", True),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0.4,*/*;q=0.5", False),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.1,*/*;q=0.9", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
        (";,;=,q=", False),
    ],
)
def test_openmetrics_is_given_to_those_who_want_it_no_less(accept: str, *, openmetrics: bool) -> None:
    assert wants_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("accept_encoding", "gzip"),
    [
        ("gzip", True), ("", False), ("identity", False), ("br, gzip;q=0.5", True), ("gzip;q=0", False), ("*", True),
        ("gzip;q=0, *", False), ("deflate, x-gzip", True), ("GZIP", True),
    ],
)  # fmt: skip
def test_gzip_is_given_to_those_who_allow_it(accept_encoding: str, *, gzip: bool) -> None:
    assert wants_gzip(accept_encoding) is gzip


@pytest.mark.parametrize("accept", SCRAPERS.values(), ids=SCRAPERS)
def test_each_version_of_prometheus_gets_a_format_that_it_reads(live: Site, accept: str) -> None:
    """All names are valid in every version, so that no escaping is needed."""
    answer = live.client.get("/metrics", headers={"Accept": accept})
    kind, parse = (
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", parse_openmetrics)
        if _OPENMETRICS in accept
        else ("text/plain; version=0.0.4; charset=utf-8", parse_text)
    )
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    families = list(parse(answer.text))
    assert any(family.name == "gpu_efficiency_build_info" for family in families)
    names = [text for family in families for each in family.samples for text in (each.name, *each.labels)]
    assert all(re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) for name in names)


def raw(site: Site, path: str, **headers: str) -> tuple[httpx.Response, bytes]:
    """The answer and its body as it came over the wire."""
    with site.client.stream("GET", path, headers=headers) as answer:
        return answer, b"".join(answer.iter_raw())


def test_a_scrape_is_compressed_when_allowed_and_the_same_otherwise(live: Site) -> None:
    packed, wire = raw(live, "/metrics", **{"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) == len(wire)
    plain, body = raw(live, "/metrics", **{"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert len(wire) * 4 < len(body)
    unpacked = live.client.get("/metrics", headers={"Accept-Encoding": "gzip"}).text
    kept = [line for line in body.decode().splitlines() if "gpu_efficiency_" in line]
    assert kept == [line for line in unpacked.splitlines() if "gpu_efficiency_" in line]
    assert "content-encoding" not in raw(live, "/readyz", **{"Accept-Encoding": "gzip"})[0].headers


def sums(families: Any) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Seconds over all leaks by GPU, seconds paid by GPU, names of all families."""
    parts: dict[str, float] = {}
    paid: dict[str, float] = {}
    names = set()
    for family in families:
        names.add(family.name)
        for sample in family.samples:
            if sample.name == "gpu_efficiency_seconds_total":
                parts[sample.labels["gpu"]] = parts.get(sample.labels["gpu"], 0.0) + sample.value
            elif sample.name == "gpu_efficiency_paid_seconds_total":
                paid[sample.labels["gpu"]] = sample.value
    return parts, paid, names


def test_text_is_the_default_and_parses(live: Site) -> None:
    answer = live.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == TEXT_CONTENT_TYPE
    assert "# EOF" not in answer.text
    parts, paid, names = sums(parse_text(answer.text))
    assert paid == {"0": 60.0, "1": 60.0}
    assert parts == pytest.approx(paid)
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"} <= names
    assert not any(name.startswith("python_") for name in names)


def test_openmetrics_when_prometheus_asks_and_it_parses_to_its_end(live: Site) -> None:
    answer = live.client.get("/metrics", headers={"Accept": PROMETHEUS_3})
    assert answer.headers["content-type"] == OPENMETRICS_CONTENT_TYPE
    assert answer.text.endswith("# EOF\n")
    assert answer.text.count("# EOF") == 1
    parts, paid, names = sums(parse_openmetrics(answer.text))  # type: ignore[no-untyped-call]
    assert parts == pytest.approx(paid)
    assert "process_resident_memory_bytes" in names


@pytest.mark.parametrize("path", PATHS)
def test_head_says_what_get_would(live: Site, path: str) -> None:
    got, told = live.client.get(path), live.client.head(path)
    assert (told.status_code, told.content) == (200, b"")
    assert told.headers["content-type"] == got.headers["content-type"]
    assert told.headers["x-content-type-options"] == "nosniff"
    assert told.headers["cache-control"] == "no-store"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("box", "why"),
    [
        (Box(None), "nothing has been sampled yet"),
        (Box(None, error="NVML: driver not loaded"), "NVML: driver not loaded"),
        (Box(age=37 * S), "the newest sample is 37 s old (10 s allowed): the sampling loop gives no reason"),
        (Box(SIMULATED, age=37 * S), "(10 s allowed): the simulated hours before the start are still being computed"),
        (Box(age=37 * S, error="the source hangs"), "the source hangs"),
    ],
    ids=["none", "none_and_why", "stale", "simulated", "stale_and_why"],
)
def test_without_a_live_sample_nothing_is_served_as_live(box: Box, why: str) -> None:
    with serving(box) as site:
        for path in ("/metrics", "/readyz", "/api/v1/node", "/api/v1/gpus", "/api/v1/jobs", "/api/v1/receipts", "/"):
            answer = site.client.get(path)
            assert answer.status_code == 503, path
            assert why in answer.text.replace("The newest", "the newest").replace("Nothing", "nothing"), path
        assert "gpu_efficiency_" not in site.client.get("/metrics").text
        assert set(site.client.get("/api/v1/gpus").json()) == {"detail"}
        assert site.client.get("/healthz").text == "ok\n"


def test_one_sample_is_rendered_once_for_each_format_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def counted(snapshot: Snapshot, *, openmetrics: bool) -> bytes:
        rendered.append(openmetrics)
        return render(snapshot, openmetrics=openmetrics)

    monkeypatch.setattr("exporter.web.app.render", counted)
    box = Box()
    with serving(box) as site:
        first = site.client.get("/metrics")
        assert [site.client.get("/metrics").text for _ in range(5)] == [first.text] * 5
        site.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert rendered == [False, True]
        assert box.snapshot is not None
        box.snapshot = replace(box.snapshot, at=box.snapshot.at + S)
        site.client.get("/metrics")
        assert rendered == [False, True, False]


def test_a_source_that_cannot_be_read_is_named_and_the_daemon_stays_ready() -> None:
    """A pod that is not ready would not be scraped, and its unobserved time never be seen."""
    snapshot = Box().snapshot
    assert snapshot is not None
    blind = replace(snapshot, meta=replace(snapshot.meta, last_error="dcgm: the engine went blind: restart it"))
    with serving(Box(), latest=lambda: blind) as site:
        answer = site.client.get("/readyz")
        assert (answer.status_code, answer.text) == (200, "ok, but: dcgm: the engine went blind: restart it\n")


def test_a_sample_is_live_up_to_its_allowed_age_and_again_when_a_new_one_comes() -> None:
    box = Box(age=10 * S)
    with serving(box) as site:
        assert site.client.get("/readyz").text == "ok\n"
        box.age += 1
        assert site.client.get("/readyz").status_code == 503
        box.age = 0
        assert site.client.get("/metrics").status_code == 200


def test_a_stale_page_shows_the_past_as_past() -> None:
    with serving(Box(age=400 * S)) as site:
        page = site.client.get("/").text
    assert "Not live." in page
    assert "was active" in page
    assert "> active" not in page
    assert "600 W" not in page
    assert "no data" in page


def test_json_has_the_ledgers_figures(live: Site) -> None:
    gpus = msgspec.json.decode(live.client.get("/api/v1/gpus").content, type=GpusOut)
    busy, free = gpus.gpus
    assert (busy.state, free.state) == ("active", "unallocated")
    assert (busy.index, busy.owners[0].user, busy.power_watts) == ("0", "ada", 600.0)
    assert free.owners == []
    for window in (busy.last_hour, free.last_hour, gpus.node.last_hour, busy.last_5_minutes):
        assert sum(window.leaks.values()) == pytest.approx(window.seconds)
        assert set(window.leaks) == set(LEAK_NAMES)
    assert busy.last_hour.leaks["useful"] == pytest.approx(0.45 * 60)
    assert (busy.last_hour.gau, busy.last_hour.driver_utilization) == (1.0, 1.0)
    assert gpus.node.last_hour.product == pytest.approx(0.45 / 2)
    assert (free.last_hour.gau, free.last_hour.ectr, free.last_hour.emfu, free.last_hour.product) == (0, None, None, 0)
    assert (gpus.node.node, gpus.node.simulated, gpus.node.sampled_at) == ("node-7", False, WALL / S + 60)
    jobs = msgspec.json.decode(live.client.get("/api/v1/jobs").content, type=JobsOut)
    (job,) = jobs.jobs
    assert (job.owner.job_id, job.gpus, job.paid_seconds) == ("4711", ["0"], 60.0)
    assert job.useful_seconds == pytest.approx(27.0)
    assert job.energy_joules == pytest.approx(36_000.0)
    assert job.useful_energy_joules == pytest.approx(36_000.0 * job.useful_seconds / job.paid_seconds)
    assert job.useful_energy_joules > 0


def test_jobs_name_their_gpus_in_the_drivers_order() -> None:
    devices = tuple(gpu(number, uuid=f"GPU-{90 - number}") for number in range(12))
    snapshot = world(devices, holds=tuple(device.uuid for device in devices), seconds=2)
    assert jobs_out(snapshot, 0).jobs[0].gpus == [str(number) for number in range(12)]


KINDS: dict[str, Any] = {
    "string": str, "boolean": bool, "number": (int, float), "integer": int, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip


def fits(value: Any, schema: dict[str, Any], known: dict[str, Any]) -> bool:
    """Does a value fit the part of JSON Schema that our answers use?"""
    if "$ref" in schema:
        return fits(value, known[schema["$ref"].removeprefix("#/components/schemas/")], known)
    if "anyOf" in schema:
        return any(fits(value, option, known) for option in schema["anyOf"])
    if not isinstance(value, KINDS[schema["type"]]):
        return False
    return all(fits(item, inner, known) for item, inner in inside(value, schema))


def inside(value: Any, schema: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """What a list or an object holds, each with its schema; all properties must be there, and no others."""
    if "prefixItems" in schema:
        return list(zip(value, schema["prefixItems"], strict=True))
    if schema["type"] == "array":
        return [(item, schema["items"]) for item in value]
    if schema["type"] != "object":
        return []
    if "properties" not in schema:
        return [(item, schema["additionalProperties"]) for item in value.values()]
    assert set(schema["required"]) <= set(value) <= set(schema["properties"])
    return [(value[key], inner) for key, inner in schema["properties"].items() if key in value]


API = ("/api/v1/node", "/api/v1/gpus", "/api/v1/jobs", "/api/v1/receipts", "/api/v1/events")


@pytest.mark.parametrize("path", API)
def test_openapi_describes_the_real_answers(live: Site, path: str) -> None:
    document = live.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert set(document["paths"]) == set(API)
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == set(schemas)
    said = document["paths"][path]["get"]["responses"]
    assert fits(live.client.get(path).json(), said["200"]["content"]["application/json"]["schema"], schemas)
    assert fits({"detail": "x"}, said["503"]["content"]["application/json"]["schema"], schemas)
    assert not fits({"detail": 1}, said["503"]["content"]["application/json"]["schema"], schemas)


def test_nothing_is_rendered_on_the_event_loop() -> None:
    box = Box()
    with serving(box) as site:
        for path in PATHS:
            site.client.get(path)
        assert site.loop_thread is not None
        assert box.threads
        assert site.loop_thread not in box.threads


@pytest.mark.slow
def test_twenty_scrapes_at_once_each_see_one_whole_snapshot() -> None:
    snapshots = [world((gpu(0), gpu(1)), seconds=seconds) for seconds in (11, 15, 19)]
    forever = cycle(snapshots)
    lock = threading.Lock()

    def latest() -> Snapshot:
        with lock:
            return next(forever)

    box = Box(snapshots[-1])
    with serving(box, latest=latest) as site, ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: site.client.get("/metrics"), range(100)))
    assert {answer.status_code for answer in answers} == {200}
    lengths = set()
    for answer in answers:
        parts, paid, _ = sums(parse_text(answer.text))
        assert parts == pytest.approx(paid)
        lengths.add(paid["0"])
    assert lengths == {11.0, 15.0, 19.0}


def test_unknown_paths_say_what_there_is_and_methods_are_refused(live: Site) -> None:
    lost = live.client.get("/metrix")
    assert lost.status_code == 404
    assert "/metrics" in lost.json()["detail"]
    assert live.client.post("/metrics").status_code == 405
    assert live.client.get("/docs").status_code == 404


def test_a_failure_inside_shows_no_traceback_and_the_next_request_works() -> None:
    box = Box()
    failures = iter([RuntimeError("secret detail")])

    def latest() -> Snapshot | None:
        for failure in failures:
            raise failure
        return box.snapshot

    with serving(box, latest=latest) as site:
        failed = site.client.get("/metrics")
        assert failed.status_code == 500
        assert "secret" not in failed.text
        assert "Traceback" not in failed.text
        assert failed.headers["connection"] == "close"
        assert site.client.get("/metrics").status_code == 200


HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>\n\u202eevil&amp;"
WORDS = [field.name for field in structs.fields(Owner) if field.type is str]
HELD = structs.replace(Owner(HOSTILE), **dict.fromkeys(WORDS, HOSTILE) | {"workload_class": "batch"})
ATTACKED = world(
    (gpu(0, model=HOSTILE, index=HOSTILE),),
    owner=HELD,
    meta=DaemonMetadata(
        version=HOSTILE,
        source=HOSTILE,
        scheduler=HOSTILE,
        host=HOSTILE,
        last_error=HOSTILE,
        interval=1.0,
        simulated=True,
    ),
)


class Tags(HTMLParser):
    """Every tag and attribute name of a page but its own script's, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.words: list[str] = []
        self.feed(page.replace(f"<script>{SCRIPT}</script>", "", 1))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.values.extend(value or "" for _, value in attrs)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_hostile_names_stay_text_on_the_page() -> None:
    with serving(Box(ATTACKED, error=HOSTILE)) as site:
        page = Tags(site.client.get("/").text)
    assert "\u202e" not in printable(HOSTILE)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not {"style", "src"} & page.attributes
    assert any("<script>alert('x')</script>" in word for word in page.words)
    assert len(printable("x" * 10_000)) == 120


def test_a_hostile_reason_to_refuse_stays_text_too() -> None:
    with serving(Box(ATTACKED, age=99 * S, error=HOSTILE)) as site:
        page = Tags(site.client.get("/").text)
        assert site.client.get("/readyz").headers["content-type"].startswith("text/plain")
    assert "script" not in page.tags
    assert "img" not in page.tags


def test_hostile_names_survive_the_metrics_unharmed() -> None:
    with serving(Box(ATTACKED)) as site:
        body = site.client.get("/metrics").text
    named = {s.labels["job_id"] for f in parse_text(body) for s in f.samples if s.name == "gpu_efficiency_job_info"}
    assert named == {HOSTILE}


def test_the_page_fetches_nothing_and_its_policy_allows_nothing_else(live: Site) -> None:
    answer = live.client.get("/")
    page = Tags(answer.text)
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    digest = b64encode(sha256(STYLE.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}';" in CONTENT_SECURITY_POLICY
    digest = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'")
    assert f"<style>{STYLE}</style>" in answer.text
    assert answer.text.count("<script") == answer.text.count(f"<script>{SCRIPT}</script>") == 1
    assert not {"script", "link", "img", "iframe", "form", "object"} & page.tags
    assert "style" not in page.attributes
    assert not [value for value in page.values if "//" in value]
    assert not re.findall(r"url\((?!#)|@import", answer.text)


def view_of(snapshot: Snapshot, *, live: bool = True) -> PageData:
    return PageData(
        accounts=accounts_out(snapshot, 0), gpus=gpus_out(snapshot, 0, live=live), jobs=jobs_out(snapshot, 0)
    )


def words_of(snapshot: Snapshot, *, problem: str = "") -> str:
    """The page's words, with one space between any two, after when it was sampled."""
    page = Tags(render_page(view_of(snapshot, live=not problem), problem=problem))
    words = " ".join(page.words[page.words.index(STYLE) + 2 :])
    return " ".join(words.replace("\N{MULTIPLICATION SIGN}", "x").replace("\N{EN DASH}", "-").split())


def test_the_page_multiplies_the_layers_out_in_a_sentence() -> None:
    words = words_of(NODE)
    sentence = "Of what was paid in the last 60 s, 50 % was allocated and working x 95 % computing x 47 % useful = 22 %"
    assert sentence in words
    assert "nvidia-smi shows 50 %" not in words
    assert "nvidia-smi shows 100 %" in words
    assert "unallocated GPU 1" in words
    assert "active GPU 0" in words
    assert re.search(r"GPU 0 \S active 60 s 4711 ada .{1,80} 45 % 100 % 600 W Active: computing\.", words)
    assert "held by 4711 ada" in words
    assert "SIMULATED" not in words


def test_a_simulated_node_says_so_loudly() -> None:
    words = words_of(world((gpu(0),), meta=DaemonMetadata(simulated=True)))
    assert words.startswith("SIMULATED")


def test_zero_none_unseen_and_unsupported_look_different() -> None:
    free = words_of(world((gpu(0),), holds=()))
    assert "0 % allocated x - computing x - useful = 0 %" in free
    unseen = words_of(world((gpu(0),), silent=("GPU-0",)))
    assert "no data allocated" in unseen
    assert "power no data" in unseen
    assert "data none yet" in unseen
    assert "GPU 0 ? unobserved 60 s 4711 ada" in unseen
    dumb = WORKING | {"power_watts": None, "temperature_celsius": None, "gpu_utilization": None}
    lacking = words_of(world((gpu(0, lacks=("temperature_celsius",)),), signals=dumb))
    assert "power not reported" in lacking
    assert "temperature unsupported" in lacking
    assert "nvidia-smi not reported" in lacking
    unknown = words_of(world((gpu(0, spec=None),)))
    assert "95 % computing x unknown useful = unknown" in unknown
    assert "57 s of kernel time is unresolved; counted as not useful, the product would be 0 %." in unknown


def test_a_gpu_opened_names_useful_work_and_the_three_largest_losses() -> None:
    words = words_of(world((gpu(0),)))
    start = words.index("Active: computing.")
    opened = words[start : words.index("model", start)]
    named = opened.rpartition("nvidia-smi")[2]
    said = [name for name in (leak.name.replace("_", " ") for leak in LEAKS) if name in named]
    assert "useful 27 s" in opened
    assert len(said) == 3


def test_a_board_and_its_instances_are_one_gpu_and_each_says_what_it_is() -> None:
    board = gpu(0, weight=4 * PPM // 7)
    part = gpu(0, uuid="MIG-1", index="0:3", weight=PPM - 4 * PPM // 7, parent="GPU-0", profile="3g.40gb")
    answer = gpus_out(world((board, part), holds=("MIG-1",), meta=replace(META, source_reason="nvml: sees")), 0)
    told = " ".join(" ".join(Tags(render_page(replace(view_of(NODE), gpus=answer))).words).split())
    assert "node-7 1 GPU" in told
    assert "MIG 3g.40gb of H100" in told
    assert "57 % unpartitioned" in told.replace("\N{NO-BREAK SPACE}", " ")
    assert "Source nvml: sees." in told
    assert [(one.parent, one.profile, round(one.share, 2)) for one in answer.gpus] == [
        ("", "", 0.57),
        ("GPU-0", "3g.40gb", 0.43),
    ]


def test_what_is_wrong_with_a_board_is_said_and_nothing_while_all_is_well() -> None:
    well = HealthOut(
        xids=0,
        last_xid=None,
        recovery_action=0,
        ecc_corrected=9,
        ecc_uncorrected=0,
        row_remap_pending=False,
        row_remap_failed=None,
        nvlink_errors=0,
        memory_temperature_celsius=None,
        temperature_margin_celsius=12.0,
        clock_limited_seconds={},
    )
    assert health_problems(well) == ""
    ill = replace(
        well, last_xid=79, recovery_action=1, ecc_uncorrected=1, row_remap_pending=True, row_remap_failed=True
    )
    assert health_problems(ill).split("; ") == [
        "Xid 79",
        "driver recommends: reset this GPU",
        "1 uncorrected ECC error",
        "row remapping failed: replace the board",
        "row remapping pending: reset the GPU",
    ]
    assert health_problems(replace(well, recovery_action=5)) == "driver recommends: recover the IMEX domain"
    assert health_problems(replace(well, recovery_action=9)) == "driver recommends: see NVML"


def test_the_api_tells_health_and_null_where_nothing_is_known() -> None:
    ledger = Ledger()
    advance(ledger, Observation(0, WALL, devices=(gpu(0), gpu(1))))
    reading = Reading("GPU-0", 0, S, **WORKING, clock_event_reasons=4)
    health = Health("GPU-0", xids=(13, 31), ecc_uncorrected=2)
    advance(ledger, Observation(S, WALL + S, readings=(reading,), health=(health,)))
    told, unknown = (one.health for one in gpus_out(take_snapshot(ledger, META), 0).gpus)
    assert (told.xids, told.last_xid, told.ecc_uncorrected, told.ecc_corrected) == (2, 31, 2, None)
    assert told.clock_limited_seconds["power"] == 1.0
    assert (unknown.xids, unknown.last_xid, unknown.recovery_action) == (0, None, None)


def test_a_node_without_gpus_or_samples_has_a_page() -> None:
    assert "No GPU in the inventory of source nvml." in words_of(world(()))
    assert "No data. The driver is not loaded" in render_page(None, problem="the driver is not loaded")
    just_born = words_of(world((gpu(0),), seconds=0))
    assert "no time yet" in just_born


def test_every_leak_has_a_colour_of_its_own_and_every_state_a_mark() -> None:
    assert set(LEAK_COLOURS) == set(LEAK_NAMES)
    assert len(set(LEAK_COLOURS.values())) == len(LEAK_NAMES)
    assert set(STATE_SYMBOLS) == {state.value for state in State}
    assert len(set(STATE_SYMBOLS.values())) == len(STATE_SYMBOLS)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"), (0.2, "<1 s"), (1, "1 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"),
        (12 * 3600 + 60, "12 h 1 min"), (86400, "1 d 0 h"), (10 * 86400 + 7300, "10 d 2 h"),
    ],
)  # fmt: skip
def test_durations_are_in_the_units_people_use(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(("ratio", "shown"), [(0, "0 %"), (0.004, "<1 %"), (0.2, "20 %"), (1, "100 %")])
def test_what_is_not_nothing_never_shows_as_zero(ratio: float, shown: str) -> None:
    assert whole_percent(ratio) == shown


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """The option is inherited by what the listening socket accepts."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_host_may_be_a_name() -> None:
    with listen("localhost", 0) as named:
        assert named.getsockname()[0] in {"127.0.0.1", "::1"}


def test_an_address_in_use_is_told_with_what_to_do() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            WebListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}: address in use: .*listen_address"
        ):
            listen("127.0.0.1", port)
        with pytest.raises(WebListenError, match=r"or set web\.page_address to another port"):
            listen("127.0.0.1", port, name="web.page_address")


def test_an_address_of_another_machine_is_told_with_what_to_do() -> None:
    with pytest.raises(WebListenError, match=r"cannot listen on 192\.0\.2\.1:0: no such address on this machine"):
        listen("192.0.2.1", 0)


DAEMON = """
from exporter.web.app import create_app
from exporter.web.server import run
app = create_app(lambda: None, now=lambda: 0, max_age_seconds=10.0, why_not=lambda: "x" * 30_000_000)
run(app, host="127.0.0.1", port=0, on_listening=lambda port: print(port, flush=True))
print("tidy", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_in_order_though_clients_hold_connections(number: signal.Signals) -> None:
    """At rest, with a request half sent, or deaf to the answer: what follows `run` still runs, and the status is 0."""
    with subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        port = int(daemon.stdout.readline())
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client,
            socket.create_connection(("127.0.0.1", port)) as half,
            socket.create_connection(("127.0.0.1", port)) as deaf,
        ):
            half.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
            deaf.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert deaf.recv(8) == b"HTTP/1.1"
            assert client.get("/healthz").text == "ok\n"
            daemon.send_signal(number)
            said, _ = daemon.communicate(timeout=60)
    assert (said, daemon.returncode) == ("tidy\n", 0)


@pytest.mark.slow
def test_a_signal_before_the_server_runs_ends_it() -> None:
    """As of a service manager that stops a daemon which has just said that it serves."""
    early = DAEMON.replace("lambda port: print(port, flush=True)", "lambda port: signal.raise_signal(signal.SIGTERM)")
    words = [sys.executable, "-c", f"import signal\n{early}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("tidy\n", 0), done.stderr


def test_json_has_the_evidence_of_a_hang_while_there_is_one() -> None:
    ledger = Ledger()
    began_before = worlds.held(start=-60.0)
    advance(ledger, worlds.first([worlds.device(), worlds.device("GPU-1", "1")], [began_before]))
    rest = worlds.RESTING | {"processes": ()}
    spins = worlds.reading(0, 20), worlds.reading(20, 200, worlds.SPINNING)  # a job that never worked may load first
    advance(ledger, worlds.seen(200, *spins, worlds.reading(0, 200, rest, "GPU-1")))
    stuck, free = gpus_out(take_snapshot(ledger, DaemonMetadata()), 0).gpus
    assert (stuck.hang_suspected, stuck.spin_since, stuck.hang_confidence, stuck.last_work) == (True, 20.0, 7 / 8, 20.0)
    assert stuck.hang_signs == dict.fromkeys(set(HANG_SIGNS) - {"temperature_falling"}, True)
    assert (free.spin_since, free.hang_confidence, free.hang_signs, free.last_work) == (None, None, {}, None)


def spoken(*, reports: tuple[TrainingReport, ...] = (), serving: tuple[ServingReport, ...] = ()) -> Snapshot:
    """A minute of job 41 on one GPU, which then says that."""
    ledger = Ledger()
    advance(ledger, Observation(0, WALL, devices=(worlds.device(),), allocations=(worlds.held(),)))
    advance(ledger, Observation(60 * S, WALL + 60 * S, readings=(worlds.reading(0, 60),)))
    advance(ledger, Observation(61 * S, WALL + 61 * S, reports=reports, serving=serving))
    return take_snapshot(ledger, DaemonMetadata())


def test_what_a_training_job_says_is_in_the_json_and_on_the_page() -> None:
    told = TrainingReport(
        "41", 0, 60 * S, model_flops=0.4 * 989.4e12 * 60, gpus=1, run="base", step=1200, steps=30, tokens=900.0,
        padding=90.0, loss=float("nan"), phases=(("data", 6 * S),), quality=0.5, quality_name="accuracy",
    )  # fmt: skip
    snapshot = spoken(reports=(told,))
    (job,) = msgspec.json.decode(msgspec.json.encode(jobs_out(snapshot, 0)), type=JobsOut).jobs
    assert job.serving is None
    assert job.training is not None
    assert (job.training.step, job.training.run, job.training.loss) == (1200, "base", None)
    assert job.training.mfu == pytest.approx(0.4)
    assert (job.training.padding_tokens, job.training.gpu_seconds) == (90.0, 60.0)
    assert (job.training.phase_seconds["data"], job.training.phase_seconds["compute"]) == (6.0, 54.0)
    assert job.training.loss_events["not_finite"] == 1
    assert (job.training.quality, job.training.quality_name) == (0.5, "accuracy")
    words = words_of(snapshot)
    assert "user reported GPUs" in words
    assert "step 1,200, MFU 40 %, goodput 90 %" in words


def test_what_a_serving_engine_says_is_in_the_json_and_on_the_page() -> None:
    latencies = (Latency("ttft", 0.1, 0.5, 1.25), Latency("itl", 0.02, 0.03, 0.05), Latency("queue", 0.0, 0.0, 0.0))
    said = ServingReport("41", 55 * S, 60 * S, "vllm", running=12.0, waiting=3.0, kv_use=0.87, latencies=latencies)
    snapshot = spoken(serving=(said,))
    (job,) = jobs_out(snapshot, 0).jobs
    assert job.training is None
    assert job.serving is not None
    assert (job.serving.engine, job.serving.running, job.serving.batch_fill) == ("vllm", 12.0, None)
    assert (job.serving.latency_seconds["ttft"].p95, sorted(job.serving.latency_seconds)) == (
        0.5,
        ["itl", "queue", "ttft"],
    )
    assert "12 running, 3 waiting, KV 87 %, itl p99 50 ms, ttft p99 1.2 s" in words_of(snapshot)


def test_what_the_host_shows_of_a_job_and_of_ports_is_in_the_json() -> None:
    ledger = Ledger()
    advance(ledger, Observation(0, WALL, devices=(worlds.device(),), allocations=(worlds.held(),)))
    for at in (60, 65, 70):
        resting = worlds.reading(at - 5, at, worlds.RESTING) if at > 60 else worlds.reading(0, 60)
        usage = HostUsage("41", (at - 10) * S, (at - 5) * S, cpu_seconds=10.0, io_pressure=0.5)
        port = NetworkPort("mlx5_0:1", at * S, "roce", active=True, bytes_per_second=5e10, transmitted_bytes=at * 1000)
        hosts = (usage,) if at > 60 else ()
        advance(ledger, Observation(at * S, WALL + at * S, readings=(resting,), hosts=hosts, ports=(port,)))
    snapshot = take_snapshot(ledger, DaemonMetadata())
    (job,) = msgspec.json.decode(msgspec.json.encode(jobs_out(snapshot, 0)), type=JobsOut).jobs
    assert (job.cpu_seconds, job.cpu_cores, job.pressure) == (20.0, 2.0, {"io": 0.5})
    assert job.stall_seconds == {"storage": 5.0}
    (found,) = accounts_out(snapshot, 0).ports
    assert (found.name, found.link, found.active, found.tx_bytes_per_second) == ("mlx5_0:1", "roce", True, 1000.0)
    assert (found.rx_bytes_per_second, found.waiting, found.bytes_per_second) == (None, None, 5e10)
    (silent,) = jobs_out(spoken(), 0).jobs
    assert (silent.cpu_seconds, silent.cpu_cores, silent.pressure, silent.stall_seconds) == (None, None, {}, {})
    assert accounts_out(spoken(), 0).ports == []


def test_where_no_job_speaks_the_page_has_no_column_for_it() -> None:
    assert "user reported GPUs" not in words_of(spoken())
