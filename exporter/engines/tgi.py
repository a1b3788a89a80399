"""Reads the metrics page of the router of Text Generation Inference 1.0 to 3.x.

Sources: docs/source/reference/metrics.md, router/src/server.rs, backends/v2 and v3 (queue.rs, backend.rs) and
router/src/infer of huggingface/text-generation-inference.

Caveats: counters have no `_total` suffix, and histograms without buckets of their own are summaries.
`tgi_request_input_length` is observed when a request arrives, `tgi_request_generated_tokens` when it ends.
`tgi_request_skipped_tokens` is observed at every pass of a request: its tokens beyond the first, which are the accepted
draft tokens. The number of draft tokens is not exported; it is --speculate on the command line. There is no time to
first token; the time per token is the mean of a request. KV cache use is not exported, nor are preemptions: TGI admits
only requests that fit.
"""

import re

from exporter.engines.base import Engine, EngineMetrics, known_counters, known_histograms, option_number
from exporter.engines.page import MetricsPage


def read(page: MetricsPage, command: str) -> EngineMetrics:
    """Read the router's page."""
    drafts = option_number(command, "speculate")
    beyond, passes = (page.total(f"tgi_request_skipped_tokens_{of}") for of in ("sum", "count"))
    return EngineMetrics(
        "tgi",
        running=page.total("tgi_batch_current_size"),
        waiting=page.total("tgi_queue_size"),
        slots=option_number(command, "max-batch-size"),
        counters=known_counters(
            prompt=page.total("tgi_request_input_length_sum"),
            generated=page.total("tgi_request_generated_tokens_sum"),
            accepted=beyond if drafts else None,
            verified=passes if drafts else None,
            passes=page.total("tgi_batch_inference_count"),
        ),
        histograms=known_histograms(
            itl=page.histogram("tgi_request_mean_time_per_token_duration"),
            queue=page.histogram("tgi_request_queue_duration"),
            e2e=page.histogram("tgi_request_duration"),
        ),
        draft_length=drafts or None,
    )


ENGINE = Engine(
    "tgi",
    ("tgi_",),
    re.compile(r"(?:^|[\s/])text-generation-(?:launcher|server|router)"),
    read,
    parallel=(("num-shard",),),
)
