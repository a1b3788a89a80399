"""Reads the metrics page of SGLang 0.4 to 0.5 (with --enable-metrics).

Source: python/sglang/srt/metrics/collector.py, later srt/observability/metrics_collector.py, of sgl-project/sglang.

Caveats: with --enable-metrics-for-all-schedulers all tensor and pipeline ranks export the same values: only the first
rank counts; data-parallel ranks are added. With --enable-priority-scheduling requests are counted under an empty
`priority`, and again under each. `prompt_tokens`, `cached_tokens` and `generation_tokens` are updated when a request
ends, `realtime_tokens{mode}` (since 0.5.6) continuously; a mode without a token has no line, as `prefill_compute` of a
decode server. Speculative decoding is exported as gauges of the last log interval only, which are 0 without a draft
model; `spec_accept_length` and `spec_num_draft_tokens` include the model's own token. All tokens of a retracted request
are discarded (`num_retracted_*_tokens`). Other gauges are those of the last batch that was logged, and up to July 2026
stay for 30 s after it (sgl-project/sglang#26495, #31517). Servers that only prefill or only decode have queues of their
own (PD disaggregation), whose requests are not in `num_queue_reqs`.
"""

import re

from exporter.engines.base import (
    Engine,
    EngineMetrics,
    known_counters,
    known_histograms,
    multiply,
    option_number,
    share,
    sum_known,
)
from exporter.engines.page import MetricsPage

_LOG_SECONDS = 30.0
"""Between two updates of an idle server's gauges."""
RANK_LABELS = ("pp_rank", "tp_rank", "moe_ep_rank")


def read(page: MetricsPage, command: str) -> EngineMetrics:
    """Read the page; data-parallel ranks are added up."""
    page = page.ranked(*RANK_LABELS)
    running = _all_priorities(page, "sglang_num_running_reqs")
    slots = option_number(command, "max-running-requests")
    deferred = [count for name in _DEFERRED for count in _all_priorities(page, name)]
    length = page.highest("sglang_spec_num_draft_tokens") or option_number(command, "speculative-num-draft-tokens")
    return EngineMetrics(
        "sglang",
        model=page.label("sglang_num_running_reqs", "model_name"),
        running=sum_known(*running),
        waiting=sum_known(
            *(count for name in _QUEUES for count in _all_priorities(page, name)),
            page.total("sglang_num_grammar_queue_reqs"),
            *deferred,
        ),
        deferred=sum_known(*deferred),
        outdated_seconds=_LOG_SECONDS,
        slots=page.total("sglang_max_running_requests") or multiply(slots, len(running) or 1),
        kv_use=share(page.highest("sglang_token_usage")),
        counters=_counters(page),
        histograms=known_histograms(
            ttft=page.histogram("sglang_time_to_first_token_seconds"),
            itl=page.histogram("sglang_inter_token_latency_seconds", "sglang_time_per_output_token_seconds"),
            queue=page.histogram("sglang_queue_time_seconds"),
            e2e=page.histogram("sglang_e2e_request_latency_seconds"),
        ),
        accept_length=page.highest("sglang_spec_accept_length") or None,
        accept_rate=share(page.highest("sglang_spec_accept_rate")) or None,
        draft_length=length - 1 if length else None,
    )


_QUEUES = ("sglang_num_queue_reqs", "sglang_num_decode_prealloc_queue_reqs")
"""Requests that wait for a place in the batch or, in a decode server, for KV cache."""
_DEFERRED = (
    *("sglang_num_prefill_bootstrap_queue_reqs", "sglang_num_prefill_prealloc_queue_reqs"),
    *("sglang_num_prefill_inflight_queue_reqs", "sglang_num_decode_transfer_queue_reqs"),
)
"""Requests of prefill and decode servers that wait for the other server, or for the transfer of their KV cache; the
second is the older name of the first."""


def _all_priorities(page: MetricsPage, name: str) -> list[float]:
    """Return the values of the samples of `name` that count requests of all priorities, one per data-parallel rank."""
    return [sample.value for sample in page.samples(name, priority="") or page.samples(name)]


def _counters(page: MetricsPage) -> dict[str, float]:
    live: dict[str, float | None] = dict.fromkeys(("prefill_compute", "decode"))
    if page.total("sglang_realtime_tokens") is not None:
        live = {mode: page.total("sglang_realtime_tokens", mode=mode) or 0.0 for mode in live}
    return known_counters(
        prompt=page.total("sglang_prompt_tokens"),
        cached=page.total("sglang_cached_tokens"),
        prefilled=live["prefill_compute"],
        generated=page.total("sglang_generation_tokens") if live["decode"] is None else live["decode"],
        preemptions=page.total("sglang_num_retracted_requests"),
        evicted=sum_known(
            page.total("sglang_num_retracted_input_tokens"), page.total("sglang_num_retracted_output_tokens")
        ),
        verified=page.total("sglang_spec_verify_calls"),
        passes=page.total("sglang_cuda_graph_passes"),
    )


ENGINE = Engine(
    "sglang",
    ("sglang_",),
    re.compile(r"(?:^|[\s/])(?:sglang\.launch_server|sglang serve|sglang::|dynamo\.sglang)"),
    read,
    parallel=(("tp-size", "tensor-parallel-size", "tp"), ("pp-size", "pipeline-parallel-size", "pp")),
)
