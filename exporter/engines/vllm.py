"""Reads the metrics page of vLLM V0 (0.4) to V1 (0.18).

Sources: vllm/engine/metrics.py (V0), vllm/v1/metrics/loggers.py, stats.py and perf.py, and
vllm/v1/spec_decode/metrics.py (V1) of vllm-project/vllm; a recorded page of V1 in the tests.

Caveats: `gpu_cache_usage_perc` became `kv_cache_usage_perc`, both 0-1 (1 means 100 percent). With several API servers
the new name had a line of each of them, by `pid`, all but one outdated (vllm-project/vllm#28792, November 2025). Gauges
are those of the last step: after all requests of a server were cancelled they stay (vllm-project/vllm#29928, December
2025) until the next one. `prompt_tokens` counts each prompt once, including its cached tokens: those of the engine's
own cache (`prefix_cache_hits`) and those that a KV connector loaded (`external_prefix_cache_hits`), as nearly all of a
decode instance. Up to 0.8 `gpu_prefix_cache_hits` counted blocks, then tokens; only its description tells which
(vllm-project/vllm#18003). `prompt_tokens_recomputed` does not count evictions, but the one token that a fully cached
prompt still costs, which is also in `prompt_tokens_by_source{source="local_compute"}`. Tokens discarded by a preemption
are not counted anywhere. `estimated_*_per_gpu` stay at 0 unless the server runs with --enable-mfu-metrics.
`max_num_seqs` is not exported: it is taken from the command line and left out otherwise, because its default depends on
version and board. With speculative decoding, `inter_token_latency` is per pass, not per token.
"""

import re
from math import inf

from exporter.engines.base import (
    Engine,
    EngineMetrics,
    has_option,
    known_counters,
    known_histograms,
    multiply,
    option_number,
    share,
    sum_known,
)
from exporter.engines.page import MetricsPage


def read(page: MetricsPage, command: str) -> EngineMetrics:
    """Read the page; the engines of one server (data parallel) are added up."""
    requests = page.samples("vllm_num_requests_running")
    engines = len({sample.labels.get("engine", "") for sample in requests}) or 1
    slots = option_number(command, "max-num-seqs")
    return EngineMetrics(
        "vllm",
        model=page.label("vllm_num_requests_running", "model_name"),
        running=page.total("vllm_num_requests_running"),
        # V0 swapped requests out to host memory: they wait for a slot in the batch.
        waiting=sum_known(page.total("vllm_num_requests_waiting"), page.total("vllm_num_requests_swapped")),
        deferred=page.total("vllm_num_requests_waiting_by_reason", reason="deferred"),
        outdated_seconds=inf,
        slots=None if slots is None else slots * engines,
        kv_use=share(_kv_use(page)),
        counters=_counters(page, engines),
        histograms=known_histograms(
            ttft=page.histogram("vllm_time_to_first_token_seconds"),
            itl=page.histogram("vllm_inter_token_latency_seconds", "vllm_time_per_output_token_seconds"),
            queue=page.histogram("vllm_request_queue_time_seconds"),
            e2e=page.histogram("vllm_e2e_request_latency_seconds"),
        ),
    )


def _kv_use(page: MetricsPage) -> float | None:
    """Return the fullest engine's KV cache use; None if each API server exports what it last knew of an engine."""
    use, before = "vllm_kv_cache_usage_perc", "vllm_gpu_cache_usage_perc"
    if any("pid" in sample.labels for sample in page.samples(use)):
        return page.highest(before)
    return page.highest(use, before)


def _counters(page: MetricsPage, engines: int) -> dict[str, float]:
    prompts, answers = (page.total(f"vllm_request_{of}_tokens_sum") for of in ("prompt", "generation"))
    return known_counters(
        prompt=page.total("vllm_prompt_tokens"),
        cached=_cached_tokens(page),
        generated=page.total("vllm_generation_tokens"),
        preemptions=page.total("vllm_num_preemptions"),
        drafted=page.total("vllm_spec_decode_num_draft_tokens"),
        accepted=page.total("vllm_spec_decode_num_accepted_tokens"),
        passes=page.total("vllm_iteration_tokens_total_count"),
        flops=_estimate(page, engines, "flops"),
        bytes=sum_known(_estimate(page, engines, "read_bytes"), _estimate(page, engines, "write_bytes")),
        lengths=None if prompts is None or answers is None else prompts + answers / 2,
        ended=page.total("vllm_request_prompt_tokens_count"),
    )


def _cached_tokens(page: MetricsPage) -> float | None:
    """Return the cached tokens; if they are not exported, the hits in the engine's own prefix cache and in others."""
    cached = page.total("vllm_prompt_tokens_cached")
    if cached is not None:
        return cached
    own = page.total("vllm_prefix_cache_hits")
    return sum_known(_gpu_hits(page) if own is None else own, page.total("vllm_external_prefix_cache_hits"))


_DIGITS = 9
"""Most digits of a plausible block size."""


def _gpu_hits(page: MetricsPage) -> float | None:
    """Return the tokens found in the prefix cache by the first versions of V1; None if they cannot be computed."""
    hits = page.total("vllm_gpu_prefix_cache_hits")
    if hits is None or "blocks" not in page.help("vllm_gpu_prefix_cache_hits"):
        return hits
    size = page.label("vllm_cache_config_info", "block_size")
    return hits * int(size) if size.isdecimal() and len(size) <= _DIGITS else None


def _estimate(page: MetricsPage, engines: int, what: str) -> float | None:
    """Return the estimate per GPU, averaged over the engines; None while the counter is 0, which means disabled."""
    return multiply(page.total(f"vllm_estimated_{what}_per_gpu") or None, 1 / engines)


_BALANCED_ELSEWHERE = (
    *("data-parallel-rank", "dpn", "data-parallel-external-lb", "dpe", "data-parallel-multi-port-external-lb", "dpm"),
    *("data-parallel-start-rank", "dpr", "data-parallel-hybrid-lb", "dph"),
)
"""Options of a server that is one of several (vllm/engine/arg_utils.py). One that has --headless too has no page."""


def _replicas(command: str) -> float | None:
    """Return the data-parallel engines on a page: all, or those of this server if requests are balanced elsewhere."""
    if has_option(command, *_BALANCED_ELSEWHERE):
        return option_number(command, "data-parallel-size-local", "dpl")
    return option_number(command, "data-parallel-size", "dp")


ENGINE = Engine(
    "vllm",
    ("vllm_",),
    re.compile(r"(?:^|[\s/])(?:vllm serve|vllm\.entrypoints|VLLM::|dynamo\.vllm)"),
    read,
    parallel=(("tensor-parallel-size", "tp"), ("pipeline-parallel-size", "pp")),
    replicas=_replicas,
)
