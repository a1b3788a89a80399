"""Tests the reports computed from two pages of each engine, served over HTTP, against values computed by hand."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path

import httpx
import pytest

from exporter.config import ServedModel
from exporter.core.model import SECOND, ServingReport
from exporter.engines.base import ScrapeFailure
from exporter.engines.page import MetricsPage
from exporter.engines.registry import ENGINES, engine_of_command, read_metrics
from exporter.engines.replica import Replica, ReplicaPlacement
from exporter.engines.scraper import fetch
from tests.engines.standins import Server, StandIn, served

SAMPLE = Path("../shared/samples/vllm/vllm-qwen0.5b-kops.prom")


class Look:
    """Scrapes one stand-in every five seconds."""

    def __init__(
        self, server: Server, command: str, *, holder: ReplicaPlacement, models: dict[str, ServedModel]
    ) -> None:
        self.server, self.command, self.holder = server, command, holder
        self.replica, self.at = Replica(models), 0

    def __call__(self) -> ServingReport:
        self.at += 5 * SECOND
        page = MetricsPage(asyncio.run(_get(f"{self.server.url}{self.server.path}")))
        assert not page.bad
        return self.replica.update(read_metrics(page, self.command), self.at, placement=self.holder)


async def _get(url: str) -> str:
    async with httpx.AsyncClient() as client:
        return await fetch(client, url, seconds=5)


def latencies(said: ServingReport) -> list[tuple[object, ...]]:
    return [(one.kind, one.p50, one.p95, one.p99) for one in said.latencies]


Open = Callable[..., tuple[StandIn, Look]]


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:

        def one(dialect: str, command: str = "", models: dict[str, ServedModel] | None = None) -> tuple[StandIn, Look]:
            engine = StandIn(dialect)
            server = stack.enter_context(served(Server(engine)))
            return engine, Look(server, command, holder=ReplicaPlacement("job", shared=2), models=models or {})

        yield one


@pytest.mark.skipif(not SAMPLE.exists(), reason="needs ../shared")
def test_a_recorded_vllm_that_rests() -> None:
    figures = read_metrics(MetricsPage(SAMPLE.read_text()), "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-num-seqs=64")
    assert (figures.engine, figures.model, figures.slots) == ("vllm", "Qwen/Qwen2.5-0.5B-Instruct", 64.0)
    assert (figures.running, figures.waiting, figures.kv_use) == (0.0, 0.0, 0.0)
    assert {k: v for k, v in figures.counters.items() if v} == {}
    assert {"prompt", "cached", "generated", "preemptions", "passes", "lengths", "ended"} == figures.counters.keys()
    assert set(figures.histograms) == {"ttft", "itl", "queue", "e2e"}
    assert figures.histograms["queue"].bounds[:3] == (0.3, 0.5, 0.8)
    replica = Replica({})
    replica.update(figures, 5 * SECOND, placement=ReplicaPlacement("j"))
    said = replica.update(figures, 10 * SECOND, placement=ReplicaPlacement("j"))
    assert (said.start, said.end, said.prompt_tokens, said.preemptions, said.recomputed_tokens) == (
        5 * SECOND,
        10 * SECOND,
        0,
        0,
        0,
    )
    assert (said.flops, said.bytes, said.drafted_tokens, said.inter_token_seconds, said.latencies) == (
        None,
        None,
        None,
        None,
        (),
    )


def test_vllm_v1(opened: Open) -> None:
    engine, look = opened("vllm 0.18", "/usr/bin/python3 /usr/bin/vllm serve m --max-num-seqs 8 -tp 2")
    for rank in ("0", "1"):
        engine.say("vllm:num_requests_running", 3, engine=rank)
        engine.say("vllm:num_requests_waiting", 2, engine=rank)
        engine.say("vllm:num_requests_waiting_by_reason", 1 + float(rank), engine=rank, reason="deferred")
        engine.say("vllm:num_requests_waiting_by_reason", 1 - float(rank), engine=rank, reason="capacity")
        engine.say("vllm:kv_cache_usage_perc", 0.5 + 0.4 * float(rank), engine=rank)
        engine.say("vllm:prompt_tokens_total", 10_000, engine=rank)
        engine.say("vllm:estimated_flops_per_gpu_total", 1e15, engine=rank)
        engine.say("vllm:prompt_tokens_cached_total", 1_000, engine=rank)
    engine.see("vllm:time_to_first_token_seconds", 9.0)
    engine.see("vllm:request_prompt_tokens", 100.0)
    engine.see("vllm:request_generation_tokens", 40.0)
    engine.say("vllm:prompt_tokens_recomputed_total", 5)
    first = look()
    assert (first.start, first.end) == (5 * SECOND, 5 * SECOND)
    assert (first.running, first.waiting, first.slots, first.kv_use) == (6.0, 4.0, 16.0, 0.9)
    assert first.deferred == 3.0
    assert (first.prompt_tokens, first.generated_tokens, first.flops, first.latencies) == (None, None, None, ())

    engine.say("vllm:prompt_tokens_total", 1_000, engine="0")
    engine.say("vllm:prompt_tokens_cached_total", 400, engine="0")
    engine.say("vllm:prompt_tokens_recomputed_total", 7)
    engine.say("vllm:generation_tokens_total", 500, engine="1")
    engine.say("vllm:num_preemptions_total", 3, engine="0")
    engine.say("vllm:estimated_flops_per_gpu_total", 4e12, engine="0")
    engine.say("vllm:estimated_flops_per_gpu_total", 2e12, engine="1")
    engine.say("vllm:estimated_read_bytes_per_gpu_total", 6e9, engine="0")
    engine.say("vllm:estimated_write_bytes_per_gpu_total", 2e9, engine="1")
    engine.say("vllm:spec_decode_num_draft_tokens_total", 90)
    engine.say("vllm:spec_decode_num_accepted_tokens_total", 60)
    engine.see("vllm:iteration_tokens_total", *[64.0] * 20)
    # Ten values of the first interval's bucket (0.1, 0.25], ten of (0.25, 0.5].
    engine.see("vllm:time_to_first_token_seconds", *[0.2] * 10, *[0.4] * 10)
    engine.see("vllm:inter_token_latency_seconds", *[0.02] * 3, 0.06)
    engine.see("vllm:request_queue_time_seconds", 7_000.0)
    second = look()
    assert (second.start, second.end) == (5 * SECOND, 10 * SECOND)
    assert second.cached_tokens == 400
    assert second.generated_tokens == 500
    # No request ended in the interval: those since the start were 100 + 40/2 long.
    assert second.recomputed_tokens == 3 * 120
    assert second.prompt_tokens == 1_000 - 400 + 360
    assert (second.flops, second.bytes) == (3e12, 4e9)  # a GPU: the mean of two engines
    assert (second.drafted_tokens, second.accepted_tokens, second.passes) == (90, 60, 20)
    assert second.inter_token_seconds == pytest.approx(0.03)
    # TTFT: the tenth of twenty ends the first bucket. ITL: three of four are in (0.01, 0.025], one in (0.05, 0.075].
    assert latencies(second) == [
        ("ttft", 0.25, pytest.approx(0.25 + 0.25 * 0.9), pytest.approx(0.25 + 0.25 * 0.98)),
        ("itl", pytest.approx(0.02), pytest.approx(0.05 + 0.025 * 0.8), pytest.approx(0.05 + 0.025 * 0.96)),
        ("queue", 60.0, 60.0, 60.0),
    ]


def test_vllm_v0(opened: Open) -> None:
    engine, look = opened("vllm 0.6", "python -m vllm.entrypoints.openai.api_server --max_num_seqs=256")
    engine.say("vllm:num_requests_running", 10)
    engine.say("vllm:num_requests_waiting", 1)
    engine.say("vllm:num_requests_swapped", 2)
    engine.say("vllm:gpu_cache_usage_perc", 0.97)
    engine.say("vllm:prompt_tokens_total", 10)
    look()
    engine.say("vllm:prompt_tokens_total", 800)
    engine.say("vllm:generation_tokens_total", 100)
    engine.say("vllm:num_preemptions_total", 1)
    engine.see("vllm:time_per_output_token_seconds", 0.03, 0.05)
    engine.see("vllm:request_prompt_tokens", 300.0, 100.0)
    engine.see("vllm:request_generation_tokens", 200.0, 0.0)
    said = look()
    assert (said.running, said.waiting, said.slots, said.kv_use) == (10, 3, 256, 0.97)
    assert (said.cached_tokens, said.flops, said.bytes) == (None, None, None)
    assert said.recomputed_tokens == (400 + 200 / 2) / 2
    assert said.prompt_tokens == 800 + 250
    assert said.inter_token_seconds == pytest.approx(0.04)


def test_prompts_from_another_cache_are_not_computed_before_vllm_says_so(opened: Open) -> None:
    """A decode instance of prefill and decode apart loads nearly all of its prompts from the other instance."""
    engine, look = opened("vllm 0.11", models={"m": ServedModel(5e9)})
    engine.say("vllm:num_requests_running", 4)
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_hits", "external_prefix_cache_hits"):
        engine.say(f"vllm:{name}_total", 1)
    look()
    engine.say("vllm:prompt_tokens_total", 80_000)
    engine.say("vllm:prefix_cache_hits_total", 20_000)
    engine.say("vllm:external_prefix_cache_hits_total", 59_990)
    engine.say("vllm:generation_tokens_total", 2_000)
    said = look()
    assert (said.prompt_tokens, said.cached_tokens) == (10, 79_990)
    assert said.flops == 2 * 5e9 * 2_010 / 2


@pytest.mark.parametrize(
    ("unit", "block_size", "cached"),
    [
        ("blocks", "16", 16 * 90),
        ("tokens", "16", 90),
        ("blocks", "None", None),
        ("blocks", "", None),
        ("blocks", "9" * 999, None),
    ],
)
def test_hits_of_the_first_vllm_v1_are_blocks_where_it_says_so(unit: str, block_size: str, cached: int | None) -> None:
    """Up to 0.8 a prefix was counted in blocks, under the same name as tokens later (vllm-project/vllm#18003)."""
    lines = [
        f"# HELP vllm:gpu_prefix_cache_hits_total GPU prefix cache hits, in terms of number of cached {unit}.",
        'vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 90.0',
        'vllm:num_requests_running{engine="0",model_name="m"} 1.0',
        f'vllm:cache_config_info{{block_size="{block_size}",engine="0"}} 1.0' if block_size else "",
    ]
    assert read_metrics(MetricsPage("\n".join(lines)), "vllm serve m").counters.get("cached") == cached


def test_two_flops_a_parameter_and_token_where_the_model_is_configured(opened: Open) -> None:
    engine, look = opened("vllm 0.18", models={"m": ServedModel(5e9)})
    engine.say("vllm:num_requests_running", 1)
    for name in ("prompt", "generation"):
        engine.say(f"vllm:{name}_tokens_total", 1)
    engine.say("vllm:spec_decode_num_draft_tokens_total", 1)
    engine.say("vllm:spec_decode_num_accepted_tokens_total", 1)
    assert look().flops is None
    engine.say("vllm:prompt_tokens_total", 1_000)
    engine.say("vllm:generation_tokens_total", 200)
    engine.say("vllm:spec_decode_num_draft_tokens_total", 300)
    engine.say("vllm:spec_decode_num_accepted_tokens_total", 120)
    assert look().flops == 2 * 5e9 * (1_000 + 300 + 200 - 120) / 2


def test_sglang_05(opened: Open) -> None:
    engine, look = opened("sglang 0.5.9", "python3 -m sglang.launch_server --max-running-requests 32 --tp 2")
    for tp in ("0", "1"):  # all tensor-parallel ranks say the same
        for dp in ("0", "1"):
            engine.say("sglang:num_running_reqs", 4 + float(dp), tp_rank=tp, dp_rank=dp)
            engine.say("sglang:num_queue_reqs", 1, tp_rank=tp, dp_rank=dp)
            engine.say("sglang:token_usage", 0.3 + 0.5 * float(dp), tp_rank=tp, dp_rank=dp)
            engine.say("sglang:spec_accept_length", 2.5, tp_rank=tp, dp_rank=dp)
            engine.say("sglang:spec_num_draft_tokens", 4, tp_rank=tp, dp_rank=dp)
        for mode in ("prefill_compute", "prefill_cache", "decode"):
            engine.say("sglang:realtime_tokens_total", 100, tp_rank=tp, mode=mode)
        for of in ("requests", "input_tokens", "output_tokens"):
            engine.say(f"sglang:num_retracted_{of}_total", 0, tp_rank=tp)
        engine.say("sglang:cuda_graph_passes_total", 7, mode="decode_cuda_graph", tp_rank=tp)
    engine.say("sglang:spec_verify_calls_total", 50)
    engine.say("sglang:cached_tokens_total", 30)
    first = look()
    assert (first.running, first.waiting, first.slots, first.kv_use) == (9, 2, 64, 0.8)
    for tp in ("0", "1"):
        engine.say("sglang:realtime_tokens_total", 900, tp_rank=tp, mode="prefill_compute")
        engine.say("sglang:realtime_tokens_total", 400, tp_rank=tp, mode="decode")
        engine.say("sglang:num_retracted_requests_total", 2, tp_rank=tp)
        engine.say("sglang:num_retracted_input_tokens_total", 120, tp_rank=tp)
        engine.say("sglang:num_retracted_output_tokens_total", 80, tp_rank=tp)
        engine.say("sglang:cuda_graph_passes_total", 40, mode="decode_cuda_graph", tp_rank=tp)
        engine.say("sglang:cuda_graph_passes_total", 2, mode="decode_none", tp_rank=tp)
    engine.say("sglang:cached_tokens_total", 70)
    engine.say("sglang:spec_verify_calls_total", 160)
    engine.see("sglang:inter_token_latency_seconds", 0.003, 0.005)
    said = look()
    assert (said.prompt_tokens, said.cached_tokens, said.generated_tokens) == (900, 70, 400)
    assert (said.preemptions, said.recomputed_tokens, said.passes) == (2, 200, 42)
    assert said.drafted_tokens == 160 * (4 - 1)
    assert said.accepted_tokens == pytest.approx(160 * (2.5 - 1))
    assert said.inter_token_seconds == pytest.approx(0.004)
    assert [one.kind for one in said.latencies] == ["itl"]


def test_sglang_counts_the_requests_of_all_priorities_once(opened: Open) -> None:
    engine, look = opened("sglang 0.5.9 with priorities", "sglang serve --max-running-requests 16")
    for dp in ("0", "1"):
        for priority, running, waiting in (("", 5, 3), ("1", 4, 3), ("HIGH", 1, 0)):
            engine.say("sglang:num_running_reqs", running, priority=priority, dp_rank=dp)
            engine.say("sglang:num_queue_reqs", waiting, priority=priority, dp_rank=dp)
        engine.say("sglang:num_grammar_queue_reqs", 1, priority="", dp_rank=dp)
    first = look()
    assert (first.running, first.waiting, first.slots) == (10, 8, 32)


@pytest.mark.parametrize(
    ("queues", "waiting", "deferred"),
    [
        ({"decode_prealloc": 120, "decode_transfer": 3}, 125, 3),
        ({"prefill_bootstrap": 200, "prefill_inflight": 40}, 242, 240),
        ({"prefill_prealloc": 200, "prefill_inflight": 40}, 242, 240),
        ({}, 2, None),
    ],
)
def test_requests_between_sglangs_prefill_and_decode_servers_wait(
    opened: Open, queues: dict[str, int], waiting: int, deferred: int | None
) -> None:
    """Only those that wait for KV cache could start at once; each is counted again under its priority."""
    engine, look = opened("sglang 0.5.9, prefill and decode apart", "sglang serve")
    for priority in ("", "1"):
        engine.say("sglang:num_running_reqs", 0, priority=priority)
        engine.say("sglang:num_queue_reqs", 2, priority=priority)
        for queue, requests in queues.items():
            engine.say(f"sglang:num_{queue}_queue_reqs", requests, priority=priority)
    engine.say("sglang:token_usage", 0.99, priority="")
    said = look()
    assert (said.running, said.waiting, said.deferred) == (0, waiting, deferred)


def test_what_an_api_server_of_vllm_knew_before_is_not_the_kv_cache_use(opened: Open) -> None:
    engine, look = opened("vllm 0.11 with several API servers", "vllm serve m --api-server-count 2")
    engine.say("vllm:num_requests_running", 5)
    for pid, use in (("271", 0.97), ("272", 0.1)):
        engine.say("vllm:kv_cache_usage_perc", use, pid=pid)
    assert look().kv_use is None
    engine.say("vllm:gpu_cache_usage_perc", 0.1)
    assert look().kv_use == 0.1


@pytest.mark.parametrize(
    ("series", "seconds"),
    [
        ("vllm:num_requests_running 1", inf),
        ("sglang:num_running_reqs 1", 30),
        ("trtllm_num_requests_running 1", inf),
        ('nv_trt_llm_request_metrics{request_type="active"} 1', 0),
        ("tgi_batch_current_size 1", 0),
        ('dynamo_component_inflight_requests{dynamo_endpoint="generate"} 1', 0),
        ("dynamo_frontend_active_requests 1", 0),
    ],
)
def test_how_long_an_engine_keeps_the_gauges_of_its_last_pass(series: str, seconds: float) -> None:
    figures = read_metrics(MetricsPage(f"{series}\n"), "")
    assert (figures.running, figures.outdated_seconds) == (1, seconds)


@pytest.mark.parametrize(("mode", "tokens"), [("decode", (0, 400)), ("prefill_compute", (400, 0))])
def test_a_mode_without_a_line_in_sglang_has_no_tokens(opened: Open, mode: str, tokens: tuple[int, int]) -> None:
    """A decode server gets its prompts' KV cache from a prefill server, and counts the prompts as its own."""
    engine, look = opened("sglang 0.5.9", "sglang serve")
    engine.say("sglang:num_running_reqs", 4)
    engine.say("sglang:realtime_tokens_total", 100, mode=mode)
    for of in ("prompt", "generation"):
        engine.say(f"sglang:{of}_tokens_total", 100)
    look()
    engine.say("sglang:realtime_tokens_total", 400, mode=mode)
    engine.say("sglang:prompt_tokens_total", 80_000)
    engine.say("sglang:generation_tokens_total", 40)
    said = look()
    assert (said.prompt_tokens, said.generated_tokens) == tokens


def test_sglang_04_knows_accepted_drafts_by_their_mean_length(opened: Open) -> None:
    engine, look = opened("sglang 0.4", "python3 -m sglang.launch_server --speculative-num-draft-tokens 4")
    engine.say("sglang:num_running_reqs", 5)
    engine.say("sglang:num_queue_reqs", 0)
    engine.say("sglang:token_usage", 0.28)
    engine.say("sglang:spec_accept_length", 2.0)
    for of in ("prompt", "generation", "cached"):
        engine.say(f"sglang:{of}_tokens_total", 10)
    look()
    engine.say("sglang:prompt_tokens_total", 1_000)
    engine.say("sglang:cached_tokens_total", 250)
    engine.say("sglang:generation_tokens_total", 600)
    engine.see("sglang:time_per_output_token_seconds", 0.02)
    said = look()
    assert (said.slots, said.preemptions, said.recomputed_tokens) == (None, None, None)
    assert (said.prompt_tokens, said.cached_tokens, said.generated_tokens) == (750, 250, 600)
    # 600 tokens at 2 a pass are 300 passes, each with one accepted of three drafted.
    assert (said.drafted_tokens, said.accepted_tokens) == (900, 300)
    assert said.inter_token_seconds == 0.02
    engine.say("sglang:spec_accept_length", 0.0)
    assert (look().drafted_tokens, look().accepted_tokens) == (None, None)


def test_triton_2503(opened: Open) -> None:
    engine, look = opened("triton 25.03", "tritonserver --model-repository=/models")
    for kind, value in (("scheduled", 8), ("active", 20), ("waiting", 9), ("max", 64), ("context", 1)):
        engine.say("nv_trt_llm_request_metrics", value, request_type=kind)
    engine.say("nv_trt_llm_kv_cache_block_metrics", 0.6, kv_cache_block_type="fraction")
    engine.say("nv_trt_llm_general_metrics", 1_000, general_type="iteration_counter")
    engine.see("nv_llm_input_token_len", 10.0, response_metric_type="total_input_tokens")
    engine.see("nv_llm_output_token_len", 10.0, response_metric_type="total_output_tokens")
    engine.see("nv_inference_first_response_histogram_ms", 90.0)
    engine.see("nv_inference_first_response_histogram_ms", 4_000.0, model="preprocessing")
    first = look()
    assert (first.engine, first.running, first.waiting, first.slots, first.kv_use) == ("trtllm", 8, 9, 64, 0.6)
    engine.say("nv_trt_llm_general_metrics", 1_250, general_type="iteration_counter")
    engine.see("nv_llm_input_token_len", 300.0, 200.0, response_metric_type="total_input_tokens")
    engine.see("nv_llm_output_token_len", 77.0, response_metric_type="total_output_tokens")
    engine.see("nv_inference_first_response_histogram_ms", 200.0, 300.0)
    engine.see("nv_inference_first_response_histogram_ms", 4_000.0, model="preprocessing")
    said = look()
    assert (said.passes, said.prompt_tokens, said.generated_tokens) == (250, 500, 77)
    assert (said.cached_tokens, said.preemptions, said.drafted_tokens) == (None, None, None)
    assert latencies(said) == [("ttft", pytest.approx(0.3), pytest.approx(0.48), pytest.approx(0.496))]


def test_triton_2311(opened: Open) -> None:
    engine, look = opened("triton 23.11", "tritonserver")
    for kind, value in (("scheduled", 1), ("active", 3), ("max", 512), ("context", 1)):
        engine.say("nv_trt_llm_request_metrics", value, request_type=kind)
    for kind, value in (("used", 1_500), ("max", 6_000), ("free", 4_500)):
        engine.say("nv_trt_llm_kv_cache_block_metrics", value, kv_cache_block_type=kind)
    said = look()
    assert (said.running, said.waiting, said.slots, said.kv_use) == (1, 2, 512, 0.25)
    assert look().generated_tokens is None


def test_trtllm_serve(opened: Open) -> None:
    engine, look = opened("trtllm-serve 1.2", "/usr/local/bin/trtllm-serve m")
    engine.say("trtllm_num_requests_running", 12)
    engine.say("trtllm_num_requests_waiting", 3)
    engine.say("trtllm_max_batch_size_runtime", 16)
    engine.say("trtllm_kv_cache_utilization", 0.4)
    drafts = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    names = ("prompt_tokens", "generation_tokens", "prompt_cached_tokens", *drafts)
    for name in names:
        engine.say(f"trtllm_{name}_total", 1)
    first = look()
    assert (first.engine, first.running, first.waiting, first.slots, first.kv_use) == ("trtllm", 12, 3, 16, 0.4)
    for name, value in zip(names, (500, 90, 100, 60, 45), strict=True):
        engine.say(f"trtllm_{name}_total", value)
    engine.see("trtllm_time_per_output_token_seconds", 0.02, 0.04)
    said = look()
    assert (said.prompt_tokens, said.cached_tokens, said.generated_tokens) == (400, 100, 90)
    assert (said.drafted_tokens, said.accepted_tokens) == (60, 45)
    assert said.inter_token_seconds == pytest.approx(0.03)


def test_an_older_trtllm_serve_says_latencies(opened: Open) -> None:
    engine, look = opened("trtllm-serve 0.21", "trtllm-serve m --max_batch_size 24")
    engine.say("trtllm_num_requests_running", 2)
    engine.say("trtllm_kv_cache_utilization", 0.2)
    engine.see("trtllm_e2e_request_latency_seconds", 1.0)
    look()
    engine.see("trtllm_e2e_request_latency_seconds", 4.0)
    said = look()
    assert (said.slots, said.waiting, said.generated_tokens, said.prompt_tokens) == (24, None, None, None)
    assert latencies(said) == [("e2e", 3.75, pytest.approx(4.875), pytest.approx(4.975))]


@pytest.mark.parametrize("dialect", ["tgi 1.4", "tgi 3.3"])
def test_tgi(opened: Open, dialect: str) -> None:
    engine, look = opened(dialect, "text-generation-launcher --max-batch-size 48 --speculate 3")
    engine.say("tgi_queue_size", 2)
    engine.say("tgi_batch_current_size", 30)
    engine.say("tgi_batch_inference_count", 100, method="decode")
    engine.say("tgi_batch_inference_count", 10, method="prefill")
    engine.see("tgi_request_mean_time_per_token_duration", 1.0)
    first = look()
    assert (first.engine, first.running, first.waiting, first.slots, first.kv_use) == ("tgi", 30, 2, 48, None)
    engine.say("tgi_batch_inference_count", 150, method="decode")
    engine.say("tgi_batch_inference_count", 12, method="prefill")
    engine.see("tgi_request_input_length", 200.0, 300.0)
    engine.see("tgi_request_generated_tokens", 70.0)
    engine.see("tgi_request_skipped_tokens", *[2.0] * 10, *[0.0] * 10)
    engine.see("tgi_request_mean_time_per_token_duration", 0.02, 0.04)
    said = look()
    assert (said.prompt_tokens, said.generated_tokens, said.passes) == (500, 70, 52)
    assert (said.cached_tokens, said.preemptions, said.recomputed_tokens) == (None, None, None)
    assert (said.drafted_tokens, said.accepted_tokens) == (3 * 20, 20)
    assert said.inter_token_seconds == pytest.approx(0.03)


def test_a_dynamo_worker(opened: Open) -> None:
    engine, look = opened("dynamo 0.4 worker", "python3 -m dynamo.mocker")
    engine.say("dynamo_component_inflight_requests", 7)
    engine.say("dynamo_component_inflight_requests", 5, dynamo_endpoint="clear_kv_blocks")
    engine.say("dynamo_component_kvstats_gpu_cache_usage_percent", 0.42)
    said = look()
    assert (said.engine, said.running, said.waiting, said.kv_use) == ("dynamo", 7, None, 0.42)
    engine.say("dynamo_component_kvstats_gpu_cache_usage_percent", 42.0)
    engine.see("dynamo_component_request_duration_seconds", 0.7)
    assert look().kv_use == 0.42


def test_a_dynamo_front_end(opened: Open) -> None:
    engine, look = opened("dynamo 1.0 front", "python3 -m dynamo.frontend")
    engine.say("dynamo_frontend_queued_requests", 3)
    engine.say("dynamo_frontend_inflight_requests", 11)
    engine.say("dynamo_frontend_model_max_num_seqs", 64)
    for worker in ("1", "2"):
        engine.say("dynamo_frontend_worker_active_decode_blocks", 10, worker_id=worker)
    engine.say("dynamo_frontend_output_tokens_total", 5)
    engine.see("dynamo_frontend_input_sequence_tokens", 5.0)
    first = look()
    assert (first.running, first.waiting, first.slots, first.kv_use) == (8, 3, 128, None)
    engine.say("dynamo_frontend_output_tokens_total", 600)
    engine.see("dynamo_frontend_input_sequence_tokens", 100.0, 50.0)
    engine.see("dynamo_frontend_inter_token_latency_seconds", 0.01, 0.03)
    said = look()
    assert (said.generated_tokens, said.prompt_tokens) == (600, 150)
    assert said.inter_token_seconds == pytest.approx(0.02)


def test_an_engine_inside_dynamo_speaks_for_itself() -> None:
    text = StandIn("vllm 0.18")
    text.say("vllm:num_requests_running", 2)
    worker = StandIn("dynamo 0.4 worker")
    worker.say("dynamo_component_inflight_requests", 3)
    assert read_metrics(MetricsPage((worker.page() + text.page()).decode()), "").engine == "vllm"


def test_rays_prefix_and_underscores_are_the_same_names() -> None:
    page = 'ray_vllm_num_requests_running{model_name="m",WorkerId="a"} 4\nvllm_generation_tokens{model_name="m"} 9\n'
    figures = read_metrics(MetricsPage(page), "")
    assert (figures.running, figures.counters["generated"]) == (4, 9)


def test_names_of_tomorrow_are_told_from_no_engine_at_all() -> None:
    with pytest.raises(ScrapeFailure, match="unknown metric names") as newer:
        read_metrics(MetricsPage("vllm:batch_now 1\nvllm:tokens_made_total 7\n"), "")
    with pytest.raises(ScrapeFailure) as stranger:
        read_metrics(MetricsPage("node_load1 1\n"), "")
    assert (newer.value.kind, stranger.value.kind) == ("dialect", "not_an_engine")


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        ("/usr/bin/python3 /usr/local/bin/vllm serve m", "vllm"),
        ("VLLM::EngineCore", "vllm"),
        ("python -m vllm.entrypoints.openai.api_server", "vllm"),
        ("python3 -m dynamo.vllm --model m", "vllm"),
        ("python3 -m sglang.launch_server", "sglang"),
        ("sglang::scheduler_TP0", "sglang"),
        ("/opt/tritonserver/bin/tritonserver --model-repository=/m", "trtllm"),
        ("/usr/local/bin/trtllm-serve m", "trtllm"),
        ("text-generation-launcher --model-id m", "tgi"),
        ("/usr/bin/python3.11 /usr/src/.venv/bin/text-generation-server serve m", "tgi"),
        ("python3 -m dynamo.frontend", "dynamo"),
        ("python train.py --data vllm_serve", None),
        ("vim tritonserver.conf", None),
    ],
)
def test_command_lines(command: str, engine: str | None) -> None:
    found = engine_of_command(command)
    assert (found.name if found else None) == engine


def test_json_that_empties_a_queue_is_never_asked_for() -> None:
    serve = engine_of_command("trtllm-serve m")
    assert serve is not None
    assert serve.paths == ("/prometheus/metrics",)
    assert {engine.name for engine in ENGINES} == {"vllm", "sglang", "trtllm", "tgi", "dynamo"}
