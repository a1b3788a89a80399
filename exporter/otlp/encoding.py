"""Turns a Snapshot into OpenTelemetry's own metrics: those of /metrics under their names, and HARDWARE.

A counter's start is when it was 0: that of the ledger and of a job stay the same across restarts of the daemon, as the
counters do. Of a counter of the driver it is not known, which 0 stands for.
"""

from collections.abc import Callable, Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from exporter.core.exposition import label_value
from exporter.core.metrics import METRICS, Metric
from exporter.core.model import SECOND
from exporter.core.snapshot import Snapshot
from exporter.otlp.hardware import HARDWARE, HardwareMetric

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""Of the hardware metrics; ours are in no schema."""
_UNKNOWN = 0
Labels = tuple[str, ...]


def encode(snapshot: Snapshot, resource: Resource) -> MetricsData:
    """Return all metrics of a snapshot as data points of its own time."""
    starts = _starts(snapshot)
    own = [found for metric in METRICS if (found := _own(metric, snapshot, starts[metric.since]))]
    hardware = [found for metric in HARDWARE if (found := _hardware(metric, snapshot))]
    version = snapshot.meta.version
    scopes = [
        ScopeMetrics(InstrumentationScope("gpu-efficiency", version), own, ""),
        ScopeMetrics(InstrumentationScope("gpu-efficiency.hw", version, SCHEMA_URL), hardware, SCHEMA_URL),
    ]
    return MetricsData([ResourceMetrics(resource, scopes, "")])


def node_resource(snapshot: Snapshot) -> Resource:
    """Describe the node; attributes of OTEL_RESOURCE_ATTRIBUTES are added. In Prometheus the first two are labels."""
    meta = snapshot.meta
    return Resource.create(
        {
            "service.name": "gpu-efficiency",
            "service.instance.id": meta.node,
            "service.version": meta.version,
            "host.name": meta.host,
        }
    )


def _starts(snapshot: Snapshot) -> Mapping[str, Callable[[Labels], int]]:
    """Return functions from a counter's label values to its start, by COUNTED_SINCE."""
    jobs = {job.owner.job_id: job.counted_since for job in snapshot.jobs}
    started = round(snapshot.meta.started * SECOND)
    return {
        "ledger": lambda _: snapshot.counted_since,
        "job": lambda labels: jobs.get(labels[0], _UNKNOWN),
        "daemon": lambda _: started,
        "driver": lambda _: _UNKNOWN,
    }


def _own(metric: Metric, snapshot: Snapshot, start: Callable[[Labels], int]) -> OtlpMetric | None:
    """Encode a metric of /metrics. It has no unit: a receiver would append that to the name, which has it already."""
    counter, names, wall = metric.type == "counter", metric.labels, snapshot.wall
    points = [
        NumberDataPoint(_attributes(names, values), start(values) if counter else _UNKNOWN, wall, float(value))
        for values, value in metric.read(snapshot)
    ]
    return _otlp_metric(metric.name, metric.help, "", metric.type, points)


def _attributes(names: Labels, values: Labels) -> dict[str, str]:
    """Return labels as attributes: an empty label is none, as in Prometheus."""
    return {name: label_value(value) for name, value in zip(names, values, strict=True) if value}


def _hardware(metric: HardwareMetric, snapshot: Snapshot) -> OtlpMetric | None:
    points = []
    for gpu in snapshot.gpus:
        for attributes, value in metric.read(gpu):
            known = metric.kind == "counter" and attributes.get("error.type", "xid") == "xid"
            start = snapshot.counted_since if known else _UNKNOWN
            printable = {key: label_value(text) for key, text in attributes.items()}
            points.append(NumberDataPoint(printable, start, snapshot.wall, value))
    return _otlp_metric(metric.name, metric.help, metric.unit, metric.kind, points)


def _otlp_metric(name: str, description: str, unit: str, kind: str, points: list[NumberDataPoint]) -> OtlpMetric | None:
    if not points:
        return None
    if kind == "gauge":
        return OtlpMetric(name, description, unit, Gauge(points))
    return OtlpMetric(
        name, description, unit, Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=kind == "counter")
    )
