"""Reads the metrics pages of TensorRT-LLM: Triton with its backend (port 8002), and trtllm-serve.

Sources: inflight_batcher_llm/src/custom_metrics_reporter of triton-inference-server/tensorrtllm_backend
(`nv_trt_llm_*`, Triton 23.11 on; `nv_llm_*_token_len` 24.x on), docs/user_guide/metrics.md of
triton-inference-server/server (the first response's histogram, 24.08 on, if enabled), tensorrt_llm/metrics/
collector.py of NVIDIA/TensorRT-LLM (`trtllm_*`; those of iterations with enable_iter_perf_stats, from 1.2 on).

Caveats: all `nv_trt_llm_*` metrics are gauges, even the iteration counter. `scheduled` requests are in the batch;
`active` ones are in the batch or wait for it: if `waiting` is missing, it is `active` minus `scheduled`. trtllm-serve's
/metrics is JSON, and reading it empties a queue: only /prometheus/metrics is scraped. Its counters are updated when a
request ends, its gauges as a pass begins: a server that has become idle keeps those of its last pass, with the requests
that ended in it (`_get_init_iter_stats` in tensorrt_llm/_torch/pyexecutor/py_executor.py). Triton's gauges are set once
more when the last request ends (`executionLoop` in cpp/tensorrt_llm/executor/executorImpl.cpp).
"""

import re
from math import inf

from exporter.engines.base import (
    Engine,
    EngineMetrics,
    known_counters,
    known_histograms,
    multiply,
    option_number,
    share,
)
from exporter.engines.page import MetricsPage


def read_serve(page: MetricsPage, command: str) -> EngineMetrics:
    """Read a page of trtllm-serve, or of a Dynamo worker with this engine."""
    return EngineMetrics(
        "trtllm",
        model=page.label("trtllm_request_success_total", "model_name") or _any_model(page),
        running=page.total("trtllm_num_requests_running"),
        waiting=page.total("trtllm_num_requests_waiting"),
        outdated_seconds=inf,
        slots=page.total("trtllm_max_batch_size_runtime", "trtllm_max_batch_size_static")
        or option_number(command, "max-batch-size"),
        kv_use=share(page.highest("trtllm_kv_cache_utilization")),
        counters=known_counters(
            prompt=page.total("trtllm_prompt_tokens"),
            cached=_cached_tokens(page),
            generated=page.total("trtllm_generation_tokens"),
            drafted=page.total("trtllm_spec_decode_num_draft_tokens", "trtllm_spec_decode_drafted_tokens") or None,
            accepted=page.total("trtllm_spec_decode_num_accepted_tokens", "trtllm_spec_decode_accepted_tokens"),
        ),
        histograms=known_histograms(
            ttft=page.histogram("trtllm_time_to_first_token_seconds"),
            itl=page.histogram("trtllm_time_per_output_token_seconds"),
            queue=page.histogram("trtllm_request_queue_time_seconds"),
            e2e=page.histogram("trtllm_e2e_request_latency_seconds"),
        ),
    )


def _any_model(page: MetricsPage) -> str:
    return next((found for name in page.names(("trtllm_",)) if (found := page.label(name, "model_name"))), "")


def _cached_tokens(page: MetricsPage) -> float | None:
    """Return the cached tokens; in versions without a counter of them, the tokens in reused KV cache blocks."""
    if page.names(("trtllm_prompt_cached_tokens_total",)):
        return page.total("trtllm_prompt_cached_tokens")
    return multiply(page.total("trtllm_kv_cache_reused_blocks"), page.highest("trtllm_kv_cache_tokens_per_block"))


def read_triton(page: MetricsPage, _command: str) -> EngineMetrics:
    """Read Triton's page."""
    model = page.label("nv_trt_llm_request_metrics", "model")
    requests = {kind: _request(page, kind) for kind in ("scheduled", "active", "waiting", "max")}
    scheduled, active, waiting = requests["scheduled"], requests["active"], requests["waiting"]
    if waiting is None and active is not None and scheduled is not None:
        waiting = max(0.0, active - scheduled)
    return EngineMetrics(
        "trtllm",
        model=model,
        running=active if scheduled is None else scheduled,
        waiting=waiting,
        slots=requests["max"],
        kv_use=share(_kv_use(page)),
        counters=known_counters(
            prompt=page.total("nv_llm_input_token_len_sum"),
            generated=page.total("nv_llm_output_token_len_sum"),
            passes=page.total("nv_trt_llm_general_metrics", general_type="iteration_counter"),
        ),
        histograms=known_histograms(
            ttft=page.histogram("nv_inference_first_response_histogram_ms", scale=1e-3, model=model),
        ),
    )


def _request(page: MetricsPage, kind: str) -> float | None:
    return page.total("nv_trt_llm_request_metrics", request_type=kind)


def _kv_use(page: MetricsPage) -> float | None:
    name = "nv_trt_llm_kv_cache_block_metrics"
    fraction = page.highest(name, kv_cache_block_type="fraction")
    if fraction is not None:
        return fraction
    used, maximum = (page.total(name, kv_cache_block_type=kind) for kind in ("used", "max"))
    return used / maximum if used is not None and maximum else None


TRITON = Engine("trtllm", ("nv_trt_llm_",), re.compile(r"(?:^|[\s/])tritonserver(?=\s|$)"), read_triton)
SERVE = Engine(
    "trtllm",
    ("trtllm_",),
    re.compile(r"(?:^|[\s/])(?:trtllm-serve|trtllm-llmapi-launch|tensorrt_llm\.commands\.serve)"),
    read_serve,
    paths=("/prometheus/metrics",),
    parallel=(("tp-size",), ("pp-size",)),
)
