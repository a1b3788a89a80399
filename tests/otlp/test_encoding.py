"""What is pushed: the samples of /metrics, the conventions' names for a GPU, and when counters were 0."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.semconv._incubating.attributes import hw_attributes
from opentelemetry.semconv._incubating.metrics import hw_metrics
from opentelemetry.semconv.schemas import Schemas

from exporter.core.checkpoint import dump_ledger, load_ledger
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.metrics import COUNTED_SINCE, METRICS
from exporter.core.model import SECOND, Health, Observation, Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.otlp.encoding import SCHEMA_URL, encode, node_resource
from exporter.otlp.hardware import HARDWARE, STATES
from tests.core.test_exposition import HEALTH, busy_node, cut_node
from tests.e2e.running import Page
from tests.otlp.receiver import Push, points_of
from tests.worlds import WORKING, cut, device, first, held, reading, seen

META = DaemonMetadata(
    version="9", host="node7", started=1_700_000_000.5, pushes=(("accepted", 3), ("failed", 1)), ticks=7
)


def pushed(snapshot: Snapshot) -> Push:
    """Encode and decode."""
    return Push(encode_metrics(encode(snapshot, node_resource(snapshot))))


EPOCH = 1_700_000_000 * SECOND


def dated(observation: Observation, *, drift: int = 0) -> Observation:
    """The observation in Unix time; `drift` is how much the clocks were corrected since the start."""
    return replace(observation, wall=EPOCH + observation.at + drift)


def node(*, health: Health = HEALTH, **signals: Any) -> Ledger:
    """A GPU that works for three seconds, for a job from the second one on."""
    ledger = Ledger()
    advance(ledger, dated(first([device()], [])))
    job = (held("GPU-0", Owner(job_id="41"), start=1),)
    for k in range(3):
        advance(ledger, dated(seen(k + 1, reading(k, k + 1, WORKING | signals), allocations=job, health=(health,))))
    return ledger


@pytest.mark.parametrize("make", [busy_node, cut_node])
def test_what_is_pushed_is_what_a_scrape_gets(make: Callable[[], Snapshot]) -> None:
    snapshot = replace(make(), meta=META)
    page = Page(render(snapshot).decode())
    unescaped = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

    def plain(text: str) -> str:
        for escaped, sign in unescaped.items():
            text = text.replace(escaped, sign)
        return text

    scraped = {
        (name, frozenset((key, plain(text)) for key, text in labels if text)): float(value)
        for (name, labels), value in page.samples.items()
    }
    assert pushed(snapshot).samples("gpu_efficiency_") == scraped
    assert len(scraped) > 100


def test_a_metric_keeps_its_name_type_and_time() -> None:
    snapshot = take_snapshot(node(), META)
    push = pushed(snapshot)
    types = {metric.name: metric.type for metric in METRICS}
    for name, metric in push.metrics.items():
        if name not in types:
            continue
        assert metric.unit == "", f"{name}: a receiver would append its unit"
        assert metric.HasField("sum") == (types[name] == "counter"), name
        assert metric.HasField("gauge") or (metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2), name
        assert {point.time_unix_nano for point in points_of(metric)} == {snapshot.wall}, name
    assert push.resource["service.name"] == "gpu-efficiency"
    assert push.resource["service.instance.id"] == push.resource["host.name"] == "node7"


def test_attributes_of_the_environment_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod,service.name=other")
    resource = pushed(take_snapshot(node(), META)).resource
    assert resource["deployment.environment.name"] == "prod"
    assert resource["service.name"] == "gpu-efficiency"


def starts(push: Push) -> dict[str, set[int]]:
    """The start times of each of our counters."""
    return {
        name: {point.start_time_unix_nano for point in points_of(metric)}
        for name, metric in push.metrics.items()
        if metric.HasField("sum") and name.startswith("gpu_efficiency_")
    }


def test_a_counter_begins_when_it_was_0_and_a_restart_of_the_daemon_changes_that_of_its_own_alone() -> None:
    before = node()
    was = take_snapshot(before, META)
    # The clock of the wall is corrected before the restart and after it.
    advance(before, dated(seen(4, reading(3, 4)), drift=SECOND))
    after = Ledger()
    load_ledger(after, dump_ledger(before))
    advance(after, dated(seen(9, reading(4, 9), devices=(device(),)), drift=3 * SECOND))
    now = take_snapshot(after, replace(META, started=META.started + 100))
    old, new, since = starts(pushed(was)), starts(pushed(now)), {metric.name: metric.since for metric in METRICS}
    assert set(since.values()) == set(COUNTED_SINCE)
    for name, found in new.items():
        expected = {
            "ledger": {was.counted_since},
            "job": {was.jobs[0].counted_since},
            "daemon": {round((META.started + 100) * SECOND)},
            "driver": {0},
        }[since[name]]
        assert found == expected, name
        if since[name] != "daemon":
            assert found == old.get(name, found), name
    assert was.counted_since == EPOCH
    assert was.jobs[0].counted_since == EPOCH + SECOND


def test_a_checkpoint_of_an_older_version_has_no_start_and_gets_one_before_its_first_second() -> None:
    before = node()
    expected = take_snapshot(before, META).counted_since
    before.first = None
    after = Ledger()
    load_ledger(after, dump_ledger(before))
    assert take_snapshot(after, META).counted_since == expected


def test_which_counters_go_on_after_a_restart_is_what_their_rows_say() -> None:
    before = node()
    before.conservation_errors = 2
    before.faults["stale"] = before.refused["report"] = 3
    after = Ledger()
    load_ledger(after, dump_ledger(before))
    was, now = (pushed(take_snapshot(ledger, META)).samples("gpu_efficiency_") for ledger in (before, after))
    since = {metric.name: metric.since for metric in METRICS if metric.type == "counter"}
    for (name, labels), value in was.items():
        if since.get(name) in ("ledger", "job"):
            assert now[name, labels] == value, (name, labels)
    assert now["gpu_efficiency_conservation_errors_total", frozenset()] == 0


class _Meter:
    """Notes what the conventions' own functions create."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[str, str]] = {}

    def __getattr__(self, create: str) -> Callable[..., None]:
        kind = create.removeprefix("create_").removeprefix("observable_").replace("_", "")

        def made(name: str, *, unit: str = "", **_: object) -> None:
            self.made[name] = kind, unit

        return made


def test_hardware_metrics_are_those_of_the_conventions() -> None:
    meter: Any = _Meter()
    for name in dir(hw_metrics):
        if name.startswith("create_hw_"):
            create = getattr(hw_metrics, name)
            create(meter, *([None] if "callbacks" in create.__code__.co_varnames else []))
    assert {metric.name: (metric.kind, metric.unit) for metric in HARDWARE}.items() <= meter.made.items()
    assert {state.value for state in hw_attributes.HwStateValues} >= set(STATES)
    assert SCHEMA_URL in {schema.value for schema in Schemas}


def hardware(ledger: Ledger) -> dict[tuple[str, str], float]:
    """Values by name and the attribute that tells a metric's series apart."""
    found = {}
    for (name, labels), value in pushed(take_snapshot(ledger, META)).samples("hw.").items():
        attributes = dict(labels)
        assert attributes["hw.id"].startswith("GPU-0")
        further = ("hw.gpu.task", "error.type", "hw.state", "hw.sensor_location")
        found[name, next((attributes[key] for key in further if key in attributes), "")] = value
    return found


def test_a_gpu_under_the_names_of_the_conventions() -> None:
    signals = {
        "gpu_utilization": 0.75, "encoder_utilization": 0.5, "memory_used_bytes": 20e9, "memory_total_bytes": 80e9,
        "power_watts": 600.0, "temperature_celsius": 61.0, "energy_joules": 600.0,
    }  # fmt: skip
    health = replace(HEALTH, xids=(79,), ecc_corrected=4, memory_temperature_celsius=70.0)
    assert hardware(node(health=health, **signals)) == {
        ("hw.gpu.utilization", "general"): 0.75,
        ("hw.gpu.utilization", "encoder"): 0.5,
        ("hw.gpu.memory.limit", ""): 80e9,
        ("hw.gpu.memory.usage", ""): 20e9,
        ("hw.gpu.memory.utilization", ""): 0.25,
        ("hw.power", ""): 600.0,
        ("hw.energy", ""): 1800.0,
        ("hw.errors", "corrected"): 4,
        ("hw.errors", "uncorrected"): 0,
        ("hw.errors", "nvlink"): 0,
        ("hw.errors", "xid"): 3,
        ("hw.temperature", "gpu"): 61.0,
        ("hw.temperature", "memory"): 70.0,
        **{("hw.status", state): float(state == "failed") for state in STATES},
    }


def status(health: Health) -> Iterable[str]:
    """States that are 1."""
    found = hardware(node(health=health))
    return [state for (name, state), value in found.items() if name == "hw.status" and value]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "ok"),
        ({"row_remap_pending": True}, "degraded"),
        ({"recovery_action": 1}, "degraded"),
        ({"row_remap_failed": True}, "predicted_failure"),
    ],
)
def test_the_state_of_a_gpu(changes: dict[str, Any], state: str) -> None:
    assert status(replace(HEALTH, **changes)) == [state]


def test_errors_of_the_driver_have_no_known_start_and_a_value_that_is_not_current_is_left_out() -> None:
    ledger = node(power_watts=600.0)
    errors = pushed(take_snapshot(ledger, META)).metrics["hw.errors"]
    known = {point.start_time_unix_nano > 0 for point in points_of(errors)}
    assert known == {True, False}
    advance(ledger, seen(9, reading(3, 9, distrust="stale")))
    later = hardware(ledger)
    assert ("hw.power", "") not in later
    assert ("hw.energy", "") in later


def test_a_mig_instance_names_its_board() -> None:
    ledger = Ledger()
    advance(ledger, first(cut(3, 4), []))
    points = points_of(pushed(take_snapshot(ledger, META)).metrics["hw.energy"])
    named = [{pair.key: pair.value.string_value for pair in point.attributes} for point in points]
    assert [attributes.get("hw.parent") for attributes in named] == [None, "GPU-0", "GPU-0"]
    assert {attributes["hw.vendor"] for attributes in named} == {"NVIDIA"}
