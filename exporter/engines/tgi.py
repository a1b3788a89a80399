"""Text Generation Inference: its router's metrics page, 1.0 to 3.x.

Owns its names. Sources: docs/source/reference/metrics.md, router/src/server.rs, backends/v2 and v3 (queue.rs,
backend.rs) and router/src/infer of huggingface/text-generation-inference.

Odd facts: counters have no `_total`, and what has no buckets of its own is a summary. `tgi_request_input_length` is
taken when a request comes in, `tgi_request_generated_tokens` when it ends. `tgi_request_skipped_tokens` is told for
every pass of a request: the tokens it yielded beyond one, which a draft's accepted tokens are. How many were drafted is
not told: --speculate on the command line is. There is no time to the first token; the time per token is a request's
mean. KV use is not told, nor preemptions: TGI admits only what fits.
"""

import re

from exporter.engines.figures import Engine, Figures, histograms, known, option
from exporter.engines.page import Page


def read(page: Page, command: str) -> Figures:
    """What the page says."""
    drafts = option(command, "speculate")
    beyond, passes = (page.total(f"tgi_request_skipped_tokens_{of}") for of in ("sum", "count"))
    return Figures(
        "tgi",
        running=page.total("tgi_batch_current_size"),
        waiting=page.total("tgi_queue_size"),
        slots=option(command, "max-batch-size"),
        counters=known(
            prompt=page.total("tgi_request_input_length_sum"),
            generated=page.total("tgi_request_generated_tokens_sum"),
            accepted=beyond if drafts else None,
            verified=passes if drafts else None,
            passes=page.total("tgi_batch_inference_count"),
        ),
        histograms=histograms(
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
