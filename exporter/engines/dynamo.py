"""Reads the metrics pages of NVIDIA Dynamo 0.3 to 1.x: workers and front end.

Sources: lib/runtime/src/metrics/prometheus_names.rs and lib/llm/src/http/service/metrics.rs of ai-dynamo/dynamo,
and its metrics catalog.

Caveats: a worker's page (DYN_SYSTEM_PORT) may also contain the metrics of its inference engine, which are richer; the
page is then read as that engine's. A front end's `queued_requests` counts requests until their first token, including
those in prefill; `inflight_requests`, later `active_requests`, includes them too. A front end reports for all its
workers on all nodes: its metrics count only if no worker of the same job answers. `*_usage_percent` is a ratio, but
0-100 according to the documentation of some releases: values above 1 are taken as percentages.
"""

import re

from exporter.engines.base import Engine, EngineMetrics, known_counters, known_histograms, multiply, share
from exporter.engines.page import MetricsPage

_USAGE = ("dynamo_component_kvstats_gpu_cache_usage_percent", "dynamo_component_gpu_cache_usage_percent")


def read(page: MetricsPage, _command: str) -> EngineMetrics:
    """Read a worker's page if it has any worker metric, else a front end's."""
    worker = page.names(("dynamo_component_kvstats_", *_USAGE)) or page.samples(
        "dynamo_component_inflight_requests", dynamo_endpoint="generate"
    )
    return _worker_metrics(page) if worker else _frontend_metrics(page)


def _worker_metrics(page: MetricsPage) -> EngineMetrics:
    active, blocks = (page.total(f"dynamo_component_kvstats_{of}_blocks") for of in ("active", "total"))
    use = page.highest(*_USAGE)
    if use is None and active is not None and blocks:
        use = active / blocks
    return EngineMetrics(
        "dynamo",
        model=page.label(_USAGE[0], "model") or page.label(_USAGE[1], "model"),
        running=page.total("dynamo_component_inflight_requests", dynamo_endpoint="generate"),
        kv_use=share(use, percent=True),
        histograms=known_histograms(
            e2e=page.histogram("dynamo_component_request_duration_seconds", dynamo_endpoint="generate"),
        ),
    )


def _frontend_metrics(page: MetricsPage) -> EngineMetrics:
    waiting = page.total("dynamo_frontend_queued_requests")
    inside = page.total("dynamo_frontend_active_requests", "dynamo_frontend_inflight_requests")
    workers = len(page.samples("dynamo_frontend_worker_active_decode_blocks"))
    return EngineMetrics(
        "dynamo",
        model=page.label("dynamo_frontend_requests_total", "model"),
        frontend=True,
        running=inside if inside is None or waiting is None else max(0.0, inside - waiting),
        waiting=waiting,
        slots=multiply(page.highest("dynamo_frontend_model_max_num_seqs"), workers or None),
        counters=known_counters(
            prompt=page.total("dynamo_frontend_input_sequence_tokens_sum"),
            cached=page.total("dynamo_frontend_cached_tokens_sum"),
            generated=page.total("dynamo_frontend_output_tokens", "dynamo_frontend_output_sequence_tokens_sum"),
        ),
        histograms=known_histograms(
            ttft=page.histogram("dynamo_frontend_time_to_first_token_seconds"),
            itl=page.histogram("dynamo_frontend_inter_token_latency_seconds"),
            e2e=page.histogram("dynamo_frontend_request_duration_seconds"),
        ),
    )


ENGINE = Engine(
    "dynamo",
    ("dynamo_frontend_", "dynamo_component_"),
    re.compile(r"(?:^|[\s/])dynamo(?:\.\w+|[ -](?:run|serve))"),
    read,
)
