"""Tests what two pages report about the time between them: restarts, baselines, quantiles and malformed pages."""

import time
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Published

from exporter.core.model import SECOND, ServingReport
from exporter.engines.base import FAILURE_KINDS, EngineMetrics, ScrapeFailure, option_number, share
from exporter.engines.page import Histogram, MetricsPage, merge_series
from exporter.engines.registry import ENGINES, read_metrics
from exporter.engines.replica import BaselineLatency, Replica, ReplicaPlacement

HOLDER = ReplicaPlacement("j", ("GPU-1",), gpus=4)


def gaps(total: float, count: float) -> Histogram:
    return Histogram((1.0, inf), (count, count), total)


def figures(running: float = 8, **counters: float) -> EngineMetrics:
    total, count = counters.pop("gap_sum", 0.0), counters.pop("gaps", 0.0)
    return EngineMetrics("vllm", running=running, counters=counters, histograms={"itl": gaps(total, count)})


def heard(*pages: EngineMetrics) -> list[ServingReport]:
    replica = Replica({})
    return [replica.update(page, 5 * SECOND * (n + 1), placement=HOLDER) for n, page in enumerate(pages)]


def test_a_counter_that_went_back_is_a_restart_and_its_interval_is_skipped() -> None:
    replica = Replica({})
    pages = [figures(generated=g, prompt=p) for g, p in ((100, 50), (160, 90), (10, 95), (30, 99))]
    said = [replica.update(page, 5 * SECOND * (n + 1), placement=HOLDER) for n, page in enumerate(pages)]
    assert [(s.start // SECOND, s.end // SECOND) for s in said] == [(5, 5), (5, 10), (15, 15), (15, 20)]
    assert [s.generated_tokens for s in said] == [None, 60, None, 20]
    assert [s.prompt_tokens for s in said] == [None, 40, None, 4]
    assert [s.running for s in said] == [8] * 4
    assert replica.restarts == 1
    assert (said[1].job_id, said[1].uuids, said[1].gpus) == ("j", ("GPU-1",), 4)


def test_fewer_latencies_than_before_are_a_restart_too() -> None:
    said = heard(figures(gaps=5, gap_sum=1.0), figures(gaps=2, gap_sum=0.1))
    assert said[1].start == said[1].end


def test_pages_too_far_apart_say_nothing_of_the_time_between() -> None:
    replica = Replica({})
    replica.update(figures(generated=1), 0, placement=HOLDER)
    assert replica.update(figures(generated=9), 119 * SECOND, placement=HOLDER).generated_tokens == 8
    assert replica.update(figures(generated=20), 240 * SECOND, placement=HOLDER).generated_tokens is None
    rare = Replica({}, interval=100 * SECOND)
    rare.update(figures(generated=1), 0, placement=HOLDER)
    assert rare.update(figures(generated=9), 240 * SECOND, placement=HOLDER).generated_tokens == 8


@pytest.mark.parametrize(("outdated", "wanted"), [(30.0, 30), (inf, 40), (0.0, 0)])
@pytest.mark.parametrize("tokens", ["generated", "prompt"])
def test_gauges_may_be_those_of_the_last_pass_until_so_long_after_it(tokens: str, outdated: float, wanted: int) -> None:
    """A page every five seconds: tokens on the first and the eighth, a restart on the sixteenth."""
    counts = [1.0] * 7 + [2.0] * 8 + [0.0] * 8
    said = heard(*(replace(figures(**{tokens: count}), outdated_seconds=outdated) for count in counts))
    of_last_pass = [s.last_pass for s in said]
    since = [*range(0, 35, 5), *range(0, 40, 5), *range(0, 40, 5)]
    assert of_last_pass == [seconds < wanted for seconds in since]


def test_what_an_engine_does_not_say_is_none() -> None:
    said = heard(figures(generated=0), figures(generated=5))[1]
    silent = ("waiting", "slots", "kv_use", "preemptions", "prompt_tokens", "cached_tokens", "recomputed_tokens")
    assert [
        getattr(said, name) for name in (*silent, "drafted_tokens", "accepted_tokens", "passes", "flops", "bytes")
    ] == [None] * 12
    assert said.inter_token_seconds is None


def test_no_more_is_computed_again_than_is_computed() -> None:
    pages = [figures(prefilled=p, evicted=e, preemptions=1.0) for p, e in ((0, 0), (100, 300))]
    assert heard(*pages)[1].recomputed_tokens == 100


def test_the_calm_gap_is_the_lower_quartile_at_about_this_batch() -> None:
    calm = BaselineLatency()
    for n, gap in enumerate((0.030, 0.020, 0.024)):
        assert calm.inter_token_seconds(8) is None
        calm.add(n * SECOND, running=8, inter_token=gap, prompt=0, generated=100)
    assert calm.inter_token_seconds(8) == pytest.approx(0.022)  # half way between the two lowest of three
    assert calm.inter_token_seconds(10.6) == pytest.approx(0.022)
    assert calm.inter_token_seconds(10.7) is None
    assert calm.inter_token_seconds(6) is None
    assert calm.inter_token_seconds(0) is None
    assert calm.inter_token_seconds(None) is None


def test_a_prefill_makes_an_interval_unlike_calm() -> None:
    calm = BaselineLatency()
    for n in range(9):
        calm.add(n, running=8, inter_token=0.02, prompt=1.0, generated=99.0)  # 1 %: not less
        calm.add(n, running=8, inter_token=0.02, prompt=None, generated=99.0)
        calm.add(n, running=8, inter_token=None, prompt=0.0, generated=99.0)
        calm.add(n, running=0, inter_token=0.02, prompt=0.0, generated=99.0)
    assert calm.inter_token_seconds(8) is None
    for n in range(3):
        calm.add(n, running=8, inter_token=0.02, prompt=0.99, generated=99.0)
    assert calm.inter_token_seconds(8) == pytest.approx(0.02)


def test_calm_is_forgotten_after_ten_minutes() -> None:
    calm = BaselineLatency()
    for n in range(3):
        calm.add(n * SECOND, running=8, inter_token=0.02, prompt=0.0, generated=9.0)
    calm.add(600 * SECOND, running=8, inter_token=0.05, prompt=9.0, generated=9.0)
    assert calm.inter_token_seconds(8) == pytest.approx(0.02)
    calm.add(601 * SECOND, running=8, inter_token=0.05, prompt=9.0, generated=9.0)
    assert calm.inter_token_seconds(8) is None


def test_calm_through_pages() -> None:
    pages = [figures(generated=100.0 * n, prompt=0.0, gaps=100.0 * n, gap_sum=2.0 * n) for n in range(5)]
    busy = figures(generated=500.0, prompt=900.0, gaps=500.0, gap_sum=8.0 + 5.0)
    said = heard(*pages, busy)
    assert [s.calm_inter_token_seconds for s in said] == [
        None,
        None,
        None,
        pytest.approx(0.02),
        pytest.approx(0.02),
        pytest.approx(0.02),
    ]
    assert said[-1].inter_token_seconds == pytest.approx(0.05)


def test_quantiles_as_prometheus_reckons_them() -> None:
    one = Histogram((1.0, 2.0, 4.0, inf), (10.0, 30.0, 40.0, 50.0), 100.0)
    # histogram_quantile: rank 25 is the 15th of the 20 in (1, 2].
    assert one.quantile(0.5) == pytest.approx(1.75)
    assert one.quantile(0.1) == pytest.approx(0.5)
    assert one.quantile(0.99) == 4.0
    assert Histogram((inf,), (5.0,), 1.0).quantile(0.5) == 0.0
    assert one.mean == 2.0
    assert one.since(Histogram((1.0, 2.0, 8.0, inf), (0.0, 0.0, 0.0, 0.0), 0.0)) is None
    assert one.since(Histogram(one.bounds, (11.0, 12.0, 12.0, 12.0), 9.0)) is None


@given(st.lists(st.floats(0.001, 20.0), min_size=1, max_size=50), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_within_the_bucket_of_the_value(values: list[float], of: float) -> None:
    registry = CollectorRegistry()
    bounds = (0.01, 0.1, 1.0, 10.0)
    published = Published("h", "h", registry=registry, buckets=bounds)
    for value in values:
        published.observe(value)
    one = MetricsPage(generate_latest(registry).decode()).histogram("h")
    assert one is not None
    assert one.count == len(values)
    assert one.total == pytest.approx(sum(values))
    true = sorted(values)[min(len(values) - 1, max(0, -int(-of * len(values) // 1) - 1))]
    low = max((b for b in bounds if b < true), default=0.0)
    assert low <= one.quantile(of) <= min((b for b in bounds if b >= true), default=10.0)


NAMES = st.sampled_from([
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "sglang:num_running_reqs",
    "sglang:token_usage",
    "sglang:realtime_tokens_total",
    "sglang:spec_accept_length",
    "nv_trt_llm_request_metrics",
    "nv_trt_llm_kv_cache_block_metrics",
    "trtllm_num_requests_running",
    "tgi_queue_size",
    "tgi_request_skipped_tokens_sum",
    "tgi_batch_current_size",
    "dynamo_component_inflight_requests",
    "dynamo_frontend_queued_requests",
    "dynamo_component_kvstats_total_blocks",
])  # fmt: skip
LABELS = st.dictionaries(
    st.sampled_from(["engine", "le", "tp_rank", "dp_rank", "mode", "request_type", "kv_cache_block_type", "model"]),
    st.sampled_from(["0", "1", "+Inf", "-Inf", "NaN", "0.5", "decode", "max", "used", "active", "", "é"]),
    max_size=3,
)
VALUES = st.one_of(st.floats(), st.integers(-5, 10**30), st.sampled_from(["", "NaN", "+Inf", "abc", "1 2 3", "0x1"]))


@st.composite
def lines(draw: st.DrawFn) -> str:
    labels = ",".join(f'{k}="{v}"' for k, v in draw(LABELS).items())
    return f"{draw(NAMES)}{{{labels}}} {draw(VALUES)}" if draw(st.booleans()) else draw(st.text(max_size=40))


@given(st.lists(st.lists(lines(), max_size=15).map("\n".join), min_size=2, max_size=4))
def test_no_page_breaks_anything_and_no_figure_is_absurd(texts: list[str]) -> None:
    replica = Replica({})
    for n, text in enumerate(texts):
        try:
            said = replica.update(
                read_metrics(MetricsPage(text), "vllm serve --max-num-seqs 4"), n * 5 * SECOND, placement=HOLDER
            )
        except ScrapeFailure as trouble:
            assert trouble.kind in FAILURE_KINDS  # noqa: PT017  either is right; what is not is any other error
            continue
        counts = [v for k in ServingReport.__struct_fields__ if isinstance(v := getattr(said, k), float)]
        assert all(value >= 0 for value in counts)
        assert said.kv_use is None or said.kv_use <= 1
        for one in said.latencies:
            assert one.p50 <= one.p95 <= one.p99


def test_a_line_that_is_no_metric_is_counted_once() -> None:
    page = MetricsPage('sglang:num_running_reqs{tp_rank="0" 4\nsglang:num_running_reqs{tp_rank="1"} 5\n')
    assert read_metrics(page, "").running == 5
    assert page.bad == 1


@pytest.mark.parametrize(
    "page",
    [
        'sglang:num_running_reqs{a="' + '\\"' * 1_500_000 + '"} 5\n',
        "sglang:num_running_reqs{" + ",".join(f'a{n}="b"' for n in range(300_000)) + "} 5\n",
        "".join(f'sglang:num_running_reqs{{a="{n}"}} 5\n' for n in range(90_000)),
    ],
    ids=["quotes", "labels", "lines"],
)
def test_a_page_that_would_take_minutes_to_read_is_refused(page: str) -> None:
    begun = time.thread_time()
    said = MetricsPage(page)
    said.samples("sglang_num_running_reqs")
    assert said.bad > 0
    assert time.thread_time() - begun < 10


def test_amounts_whose_sums_are_infinite_are_none() -> None:
    rows = [("running", 1.7e308), ("queue", 3)]
    page = "".join(f'sglang:num_{name}_reqs{{dp_rank="{n}"}} {value}\n' for name, value in rows for n in (0, 1))
    page += "sglang:num_running_reqs 4\n"
    for rank in (0, 1):
        for bound, count in (("-1e308", 1), ("1e308", 1.7e308), ("+Inf", 1.7e308)):
            page += f'sglang:inter_token_latency_seconds_bucket{{dp_rank="{rank}",le="{bound}"}} {count}\n'
    said = heard(*(read_metrics(MetricsPage(page), "") for _ in range(2)))[1]
    assert (said.running, said.waiting, said.latencies) == (4, 6, ())


def test_series_are_added_over_the_bounds_that_all_of_them_have() -> None:
    added = merge_series({0.1: [1.0], 0.5: [2.0, 3.0], inf: [4.0, 5.0]}, 1.0)
    assert added == Histogram((0.5, inf), (5.0, 9.0), 1.0)


def test_options_and_shares() -> None:
    assert option_number("vllm serve --max-num-seqs 8 --max_num_seqs=16", "max-num-seqs") == 16
    assert option_number("vllm serve --max-num-seqs-other 8", "max-num-seqs") is None
    assert option_number("vllm serve -tp 4", "tensor-parallel-size", "tp") == 4
    assert option_number("x --max-num-seqs eight", "max-num-seqs") is None
    assert option_number("vllm serve -tp 2\nbash -c vllm serve -tp 4", "tp") == 2
    assert option_number("VLLM::APIServer\nvllm serve -tp 4", "tp") == 4
    assert (share(None), share(0.5), share(42.0, percent=True), share(3.0)) == (None, 0.5, 0.42, 1.0)
    assert len({(engine.name, engine.prefixes) for engine in ENGINES}) == len(ENGINES)
