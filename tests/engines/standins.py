"""Stand-ins for serving engines: HTTP servers with the metrics of an engine, which a test sets.

Names, types, labels and buckets are those of the sources named in exporter/engines. Two versions of each engine.
"""

import gzip
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LENGTH = (1.0, 10.0, 100.0, 1000.0, 10000.0)
STEP = (1.0, 8.0, 64.0, 512.0, 4096.0)
SG_FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0)
SG_GAP = (0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.040, 0.060, 0.080, 0.100)
TGI_TIME = tuple(0.0001 * 1.5**n for n in range(1, 36))
FRONT = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

V = ("engine", "model_name")
S = ("model_name", "engine_type", "tp_rank", "pp_rank")
T = ("model", "version")
L = ("model_name", "engine_type")
W = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "model")

Declared = Mapping[str, tuple[Any, tuple[str, ...], tuple[float, ...]]]


def gauges(labels: tuple[str, ...], *names: str) -> Declared:
    return dict.fromkeys(names, (Gauge, labels, ()))


def counters(labels: tuple[str, ...], *names: str) -> Declared:
    return dict.fromkeys(names, (Counter, labels, ()))


def _vllm(labels: tuple[str, ...], usage: str, gap: str) -> dict[str, Any]:
    return {
        **gauges(labels, "vllm:num_requests_running", "vllm:num_requests_waiting", usage),
        **counters(
            labels,
            "vllm:num_preemptions_total",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        ),
        "vllm:time_to_first_token_seconds": (Histogram, labels, FIRST),
        gap: (Histogram, labels, GAP),
        "vllm:e2e_request_latency_seconds": (Histogram, labels, REQUEST),
        "vllm:request_prompt_tokens": (Histogram, labels, LENGTH),
        "vllm:request_generation_tokens": (Histogram, labels, LENGTH),
        "vllm:iteration_tokens_total": (Histogram, labels, STEP),
    }


def _sglang(labels: tuple[str, ...]) -> dict[str, Any]:
    return {
        **gauges(
            labels,
            *(f"sglang:{name}" for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate")),
            *(f"sglang:{name}" for name in ("gen_throughput", "spec_accept_length")),
        ),
        **counters(("model_name",), "sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
        **counters(("model_name",), "sglang:cached_tokens_total"),
        "sglang:time_to_first_token_seconds": (Histogram, ("model_name",), SG_FIRST),
        "sglang:e2e_request_latency_seconds": (Histogram, ("model_name",), SG_FIRST),
    }


def _triton() -> dict[str, Any]:
    return {
        "nv_trt_llm_request_metrics": (Gauge, ("request_type", *T), ()),
        "nv_trt_llm_kv_cache_block_metrics": (Gauge, ("kv_cache_block_type", *T), ()),
        "nv_trt_llm_inflight_batcher_metrics": (Gauge, ("inflight_batcher_specific_metric", *T), ()),
        "nv_trt_llm_general_metrics": (Gauge, ("general_type", *T), ()),
        **counters(T, "nv_inference_request_success"),
    }


def _tgi() -> dict[str, Any]:
    return {
        **gauges((), "tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens"),
        **gauges(("method",), "tgi_batch_inference_count"),
        **gauges((), "tgi_request_count", "tgi_request_success"),
        **dict.fromkeys(
            (
                "tgi_request_duration",
                "tgi_request_queue_duration",
                "tgi_request_mean_time_per_token_duration",
            ),
            (Histogram, (), TGI_TIME),
        ),
        "tgi_batch_inference_duration": (Histogram, ("method",), TGI_TIME),
        "tgi_request_input_length": (Histogram, (), LENGTH),
        "tgi_request_generated_tokens": (Histogram, (), LENGTH),
    }


DIALECTS: Mapping[str, Declared] = {
    "vllm 0.6": {
        **_vllm(("model_name",), "vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"),
        **gauges(("model_name",), "vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc"),
    },
    "vllm 0.11": {
        **_vllm(V, "vllm:kv_cache_usage_perc", "vllm:inter_token_latency_seconds"),
        **counters(V, "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"),
    },
    "vllm 0.18": {
        **_vllm(V, "vllm:kv_cache_usage_perc", "vllm:inter_token_latency_seconds"),
        **counters(V, "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_recomputed_total"),
        **counters(V, *(f"vllm:estimated_{what}_per_gpu_total" for what in ("flops", "read_bytes", "write_bytes"))),
        **gauges((*V, "reason"), "vllm:num_requests_waiting_by_reason"),
        "vllm:request_queue_time_seconds": (Histogram, V, REQUEST),
    },
    "vllm 0.11 with several API servers": {
        **_vllm(V, "vllm:gpu_cache_usage_perc", "vllm:inter_token_latency_seconds"),
        **gauges((*V, "pid"), "vllm:kv_cache_usage_perc"),
    },
    "sglang 0.4": {
        **_sglang(S),
        "sglang:time_per_output_token_seconds": (Histogram, ("model_name",), SG_GAP),
    },
    "sglang 0.5.9": {
        **_sglang((*S, "dp_rank")),
        **gauges((*S, "dp_rank"), "sglang:spec_accept_rate", "sglang:spec_num_draft_tokens"),
        **counters((*S, "mode"), "sglang:realtime_tokens_total"),
        **counters(S, *(f"sglang:num_retracted_{of}_total" for of in ("requests", "input_tokens", "output_tokens"))),
        **counters((*S, "mode"), "sglang:cuda_graph_passes_total"),
        **counters(("model_name",), "sglang:spec_verify_calls_total"),
        "sglang:inter_token_latency_seconds": (Histogram, ("model_name",), SG_GAP),
        "sglang:queue_time_seconds": (Histogram, S, SG_FIRST),
    },
    "sglang 0.5.9, prefill and decode apart": {
        **_sglang((*S, "priority")),
        **gauges((*S, "priority"), *(f"sglang:num_decode_{queue}_queue_reqs" for queue in ("prealloc", "transfer"))),
        **gauges(
            (*S, "priority"),
            *(f"sglang:num_prefill_{queue}_queue_reqs" for queue in ("bootstrap", "prealloc", "inflight")),
        ),
    },
    "sglang 0.5.9 with priorities": {
        **_sglang((*S, "dp_rank", "priority")),
        **gauges((*S, "dp_rank", "priority"), "sglang:num_grammar_queue_reqs"),
    },
    "triton 23.11": _triton(),
    "triton 25.03": {
        **_triton(),
        "nv_llm_input_token_len": (Histogram, ("response_metric_type", *T), (10.0, 50.0, 100.0, 500.0, 1000.0)),
        "nv_llm_output_token_len": (Histogram, ("response_metric_type", *T), (10.0, 50.0, 100.0, 500.0, 1000.0)),
        "nv_inference_first_response_histogram_ms": (Histogram, T, (100.0, 500.0, 2000.0, 5000.0)),
    },
    "trtllm-serve 0.21": {
        **counters((*L, "finished_reason"), "trtllm_request_success_total"),
        **gauges(L, "trtllm_kv_cache_hit_rate", "trtllm_kv_cache_utilization", "trtllm_num_requests_running"),
        "trtllm_time_to_first_token_seconds": (Histogram, L, FIRST),
        "trtllm_time_per_output_token_seconds": (Histogram, L, GAP),
        "trtllm_e2e_request_latency_seconds": (Histogram, L, REQUEST),
        "trtllm_request_queue_time_seconds": (Histogram, L, REQUEST),
    },
    "trtllm-serve 1.2": {
        **gauges(L, *(f"trtllm_num_requests_{of}" for of in ("running", "waiting")), "trtllm_max_batch_size_runtime"),
        **gauges(L, "trtllm_kv_cache_utilization", "trtllm_kv_cache_tokens_per_block"),
        **counters(L, *(f"trtllm_{of}_tokens_total" for of in ("prompt", "generation", "prompt_cached"))),
        **counters(L, *(f"trtllm_spec_decode_num_{of}_tokens_total" for of in ("draft", "accepted"))),
        "trtllm_time_to_first_token_seconds": (Histogram, L, FIRST),
        "trtllm_time_per_output_token_seconds": (Histogram, L, GAP),
    },
    "tgi 1.4": {**_tgi(), "tgi_request_skipped_tokens": (Histogram, (), (0.0, 1.0, 2.0, 3.0))},
    "tgi 3.3": {**_tgi(), "tgi_request_skipped_tokens": (Summary, (), ())},
    "dynamo 0.4 worker": {
        **gauges(W[:-1], "dynamo_component_inflight_requests"),
        **gauges(("model",), *(f"dynamo_component_kvstats_{of}" for of in ("active_blocks", "total_blocks"))),
        **gauges(("model",), "dynamo_component_kvstats_gpu_cache_usage_percent"),
        "dynamo_component_request_duration_seconds": (Histogram, W[:-1], FRONT),
    },
    "dynamo 1.0 front": {
        **gauges(("model",), "dynamo_frontend_queued_requests", "dynamo_frontend_inflight_requests"),
        **gauges(("model",), "dynamo_frontend_model_max_num_seqs"),
        **gauges(("worker_id", "dp_rank", "worker_type"), "dynamo_frontend_worker_active_decode_blocks"),
        **counters(("model",), "dynamo_frontend_output_tokens_total"),
        **counters(("model", "status"), "dynamo_frontend_requests_total"),
        "dynamo_frontend_input_sequence_tokens": (Histogram, ("model",), LENGTH),
        "dynamo_frontend_time_to_first_token_seconds": (Histogram, ("model",), FRONT),
        "dynamo_frontend_inter_token_latency_seconds": (Histogram, ("model",), FRONT),
        "dynamo_frontend_request_duration_seconds": (Histogram, ("model",), FRONT),
    },
}  # fmt: skip
USUAL = {
    "engine": "0", "model_name": "m", "model": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0",
    "dp_rank": "0", "version": "1", "status": "success", "worker_type": "decode", "dynamo_namespace": "ns",
    "dynamo_component": "backend", "dynamo_endpoint": "generate", "finished_reason": "stop",
}  # fmt: skip
"""Labels that are not given."""


class StandIn:
    """The metrics of one engine; `say` and `see` change them."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self._registry = CollectorRegistry()
        self._metrics = {
            name: kind(name, name, labels, registry=self._registry, **({"buckets": buckets} if buckets else {}))
            for name, (kind, labels, buckets) in DIALECTS[dialect].items()
        }

    def say(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge, or add to a counter."""
        child = self._child(name, labels)
        (child.inc if isinstance(self._metrics[name], Counter) else child.set)(value)

    def see(self, name: str, *values: float, **labels: str) -> None:
        """Observe values in a histogram or a summary."""
        for value in values:
            self._child(name, labels).observe(value)

    def page(self) -> bytes:
        """Render the page; Rust's exporter writes counters without `_total`."""
        text = generate_latest(self._registry).decode()
        if self.dialect.startswith("tgi"):
            text = re.sub(r"^# TYPE (\S+_(?:count|success)) gauge$", r"# TYPE \1 counter", text, flags=re.MULTILINE)
        return text.encode()

    def _child(self, name: str, labels: Mapping[str, str]) -> Any:
        wanted = DIALECTS[self.dialect][name][1]
        return (
            self._metrics[name].labels(**{k: {**USUAL, **labels}[k] for k in wanted}) if wanted else self._metrics[name]
        )


Manner = Callable[["Server", BaseHTTPRequestHandler, bytes], None]


class Server:
    """Serves a page in one of several ways; counts requests and the largest number at once."""

    def __init__(self, engine: StandIn | None = None, *, path: str = "/metrics") -> None:
        self.engine, self.path, self.manner = engine, path, "good"
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self.release = threading.Event()
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self.lock:
            self.asked.append(handler.path)
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            self._answer(handler)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with self.lock:
                self.at_once -= 1

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path != self.path:
            send(handler, 404, b'{"detail":"Not Found"}')
            return
        body = self.engine.page() if self.engine is not None else b"# nothing\nsomething_else 1\n"
        MANNERS[self.manner](self, handler, body)


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, *, length: int = -1, **headers: Any) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body) if length < 0 else length))
    handler.end_headers()
    handler.wfile.write(body)


def slow(server: Server, handler: BaseHTTPRequestHandler, body: bytes) -> None:
    server.release.wait(20)
    send(handler, 200, body)


def drip(server: Server, handler: BaseHTTPRequestHandler, _body: bytes) -> None:
    """Send a header byte by byte, so that no single read is long."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Drip: ")
    for _ in range(400):
        if server.release.is_set():
            break
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)


def always(status: int, body: bytes, **headers: Any) -> Manner:
    """Return the same response for every request."""

    def answer(_server: Server, handler: BaseHTTPRequestHandler, _body: bytes) -> None:
        send(handler, status, body, **headers)

    return answer


MANNERS: Mapping[str, Manner] = {
    "good": lambda _, handler, body: send(handler, 200, body),
    "gzip": lambda _, handler, body: send(handler, 200, gzip.compress(body), Content_Encoding="gzip"),
    "bomb": always(200, gzip.compress(b"a 1\n" * (4 << 20)), Content_Encoding="gzip"),
    "br": lambda _, handler, body: send(handler, 200, body, Content_Encoding="br"),
    "html": always(200, b"<!doctype html><p>hello\n"),
    "json": always(200, b"[]"),
    "broken": always(500, b"oh"),
    "redirect": always(307, b"", Location="http://127.0.0.1:9/metrics"),
    "half": lambda _, handler, body: send(handler, 200, body[: len(body) // 2], length=len(body)),
    "cut": lambda _, handler, body: send(handler, 200, body[:-3]),
    "huge": always(200, b"vllm:x 1\n" * (1 << 19)),
    "lines": always(200, b"a 1\n" * 60_000),
    "newer": always(200, b"vllm:batch_now 1\nvllm:tokens_made_total 7\n"),
    "stranger": always(200, b"node_load1 0.5\n"),
    "malformed": lambda _, handler, body: send(handler, 200, body + b'vllm:num_preemptions_total{engine="0" 4\n'),
    "slow": slow,
    "drip": drip,
}


@contextmanager
def served(server: Server, port: int = 0) -> Iterator[Server]:
    """Serve on 127.0.0.1 while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            server.release.set()
            http.shutdown()
            thread.join()
