"""What the recording rules buy: five questions of the boards, each asked of recorded series and of raw ones.

Owns the ten queries and the asking. Refuses questions that no board asks.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from urllib.parse import quote

from msgspec import Struct

from benchmarks.fleet.server import Server

_TIMES = 3
_SPAN, _STEP = 240, 15
"""Seconds a question looks back, and between two points of its answer."""
_LEAKS = "cluster, instance, model, held, leak, layer"


class Question(Struct, frozen=True):
    """One question, in both ways."""

    asks: str
    recorded: str
    raw: str


QUESTIONS = (
    Question(
        "How much of the fleet's time is useful",
        "cluster:gpu_efficiency_product_floor:ratio_rate5m",
        'sum by (cluster) (rate(gpu_efficiency_node_seconds_total{layer="useful"}[5m]))'
        ' / sum by (cluster) (rate(gpu_efficiency_node_seconds_total{layer!="unobserved"}[5m]))',
    ),
    Question(
        "Where the rest goes, by leak",
        "cluster_leak:gpu_efficiency_seconds:rate5m",
        "sum by (cluster, leak, layer) (rate(gpu_efficiency_node_seconds_total[5m])) > 0",
    ),
    Question(
        "What each leak costs an hour",
        "cluster_leak:gpu_efficiency_cost:per_hour",
        f"sum by (cluster, currency, leak, layer) (sum by ({_LEAKS}) (rate(gpu_efficiency_node_seconds_total[5m]))"
        " * on (cluster, instance, model, held) group_left (currency)"
        " max by (cluster, instance, model, held, currency) (gpu_efficiency_price_per_gpu_hour)) > 0",
    ),
    Question(
        "The ten jobs that lose most GPUs",
        'topk(10, sum by (cluster, job_id) (job_layer:gpu_efficiency_seconds:rate5m{layer=~"gau|ectr|emfu"}))',
        'topk(10, sum by (cluster, job_id) (rate(gpu_efficiency_job_seconds_total{layer=~"gau|ectr|emfu"}[5m])))',
    ),
    Question(
        "What each team has, by layer",
        "team_layer:gpu_efficiency_seconds:rate5m",
        'sum by (cluster, team, layer) (rate(gpu_efficiency_account_seconds_total{team!=""}[5m]))',
    ),
)


class Answer(Struct, frozen=True):
    """What it took: milliseconds in the server, and samples it read."""

    milliseconds: float
    samples: int


def asked(server: Server) -> Mapping[str, tuple[Answer, Answer]]:
    """Ask all: recorded, then raw. RuntimeError where one has no answer: its time would mean nothing."""
    return {each.asks: (answer(server, each.recorded), answer(server, each.raw)) for each in QUESTIONS}


def answer(server: Server, query: str) -> Answer:
    """Ask one, of three times the one in the middle."""
    found = [_once(server, query) for _ in range(_TIMES)]
    return Answer(median(each.milliseconds for each in found), found[0].samples)


def _once(server: Server, query: str) -> Answer:
    now = int(time.time())
    words = f"query={quote(query)}&start={now - _SPAN}&end={now}&step={_STEP}&stats=all"
    found = server.ask(f"query_range?{words}")
    if not found["result"]:
        raise RuntimeError(f"nothing answers {query}: the rules or the fleet are not what they were")
    stats = found["stats"]
    return Answer(1e3 * stats["timings"]["execTotalTime"], stats["samples"]["totalQueryableSamples"])


def cells(answers: Mapping[str, tuple[Answer, Answer]]) -> Sequence[tuple[str, ...]]:
    """Rows of the table."""
    return [
        (asks, _ms(recorded), f"{recorded.samples:,}", _ms(raw), f"{raw.samples:,}", _times(recorded, raw))
        for asks, (recorded, raw) in answers.items()
    ]


def _ms(answer: Answer) -> str:
    return f"{answer.milliseconds:,.1f}"


def _times(recorded: Answer, raw: Answer) -> str:
    return f"{raw.samples / max(1, recorded.samples):,.0f}"


HEAD = ("question", "recorded, ms", "samples read", "raw, ms", "samples read", "raw reads times as much")
