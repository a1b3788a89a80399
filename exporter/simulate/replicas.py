"""Serving of the twelve stories: what costs it time, and the same requests without that.

Owns the rounds of the engines and their figures. Refuses to say what a loss is: a story is what engines do.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from exporter.core.model import Latency
from exporter.simulate.boards import Board
from exporter.simulate.engines import latencies, loading, passes, pause, serving, swaps
from exporter.simulate.plan import Job, Plan
from exporter.simulate.setting import Setting, server
from exporter.simulate.trainers import START_MS
from exporter.simulate.words import Service
from exporter.simulate.work import Segment, Stage, Stages

Make = Callable[[Board], Iterable[Stage]]


def replica(make: Make, setting: Setting, slot: int) -> Job:
    """A server with an engine that answers, on one GPU."""

    def stages(_: Random) -> Stages:
        yield loading(setting.board, START_MS)
        yield from make(setting.board)

    return Job(owner=server(setting, slot), slots=(slot,), stages=stages, serves=True)


def replicas(*makes: Make) -> Callable[[Setting], Plan]:
    """A server on every GPU, of these kinds in turn."""
    return lambda setting: Plan(jobs=tuple(replica(makes[slot % len(makes)], setting, slot) for slot in setting.slots))


def _answers(name: str, *segments: Callable[[Board], Segment], **does: Any) -> Make:
    """A server that does this in every round."""
    return lambda board: [serving(board, name, *(segment(board) for segment in segments), does=Service(**does))]


# 9 to 12: serving.


def _queued(itl: float) -> tuple[Latency, ...]:
    return latencies(ttft=0.4, itl=itl, queue=6.0)


def _at_once(itl: float) -> tuple[Latency, ...]:
    return latencies(ttft=0.3, itl=itl, queue=0.05)


SWAPPING = _answers(
    "answering", lambda b: passes(b, 400, 2400, dram=0.8), lambda b: swaps(b, 600, wire=0.3),
    running=200, waiting=40, kv_use=0.99, preemptions=4, generated_tokens=2400, passes=12, latencies=_queued(0.083),
)  # fmt: skip
ROOMY = _answers(
    "answering", lambda b: passes(b, 400, 2400, dram=0.8),
    running=200, kv_use=0.6, generated_tokens=2400, passes=12, latencies=_at_once(0.033),
)  # fmt: skip


def _documents(again: int, ms: float, **does: Any) -> Make:
    """Long prompts and short answers: 13,840 tokens of prompts, those computed `again`, and 180 of answers a round."""
    return _answers(
        "reading documents",
        lambda b: passes(b, ms, 13_840 + again, dram=0.25, sm=0.9),
        lambda b: passes(b, 60.0, 180, dram=0.8),
        prompt_tokens=13_840 + again, recomputed_tokens=again, generated_tokens=180, passes=3, running=60,
        **does,
    )  # fmt: skip


EVICTING = _documents(20_000, 940.0, waiting=50, kv_use=0.98, preemptions=6, latencies=_queued(0.333))
KEEPING = _documents(0, 13_840 / 36, kv_use=0.7, latencies=_at_once(0.148))


def _prefill(board: Board) -> Segment:
    return passes(board, 50.0, 1350, dram=0.2, sm=0.9)


def _decode(board: Board) -> Segment:
    return passes(board, 25.0, 50, dram=0.8)


MIXED = _answers(
    "answering", _decode, _prefill,
    running=50, prompt_tokens=1350, generated_tokens=50, passes=2, kv_use=0.5,
    inter_token_seconds=0.075, calm_inter_token_seconds=0.025, latencies=latencies(ttft=0.4, itl=0.075, queue=0.2),
)  # fmt: skip
READS = _answers("reading prompts", _prefill, running=1, prompt_tokens=1350, passes=1, kv_use=0.1)
WRITES = _answers(
    "writing answers", _decode,
    running=50, generated_tokens=50, passes=1, kv_use=0.5,
    inter_token_seconds=0.025, calm_inter_token_seconds=0.025, latencies=latencies(ttft=0.1, itl=0.025, queue=0.1),
)  # fmt: skip
UNFILLED = _answers(
    "answering", lambda b: passes(b, 28.5, 16, dram=0.8), lambda _: pause(1.5),
    running=16, waiting=40, slots=64, generated_tokens=16, passes=1, kv_use=0.3, latencies=_queued(0.03),
)  # fmt: skip
FILLED = _answers(
    "answering", lambda b: passes(b, 31, 64, dram=0.8), lambda _: pause(1.5),
    running=64, waiting=12, slots=64, generated_tokens=64, passes=1, kv_use=0.8, latencies=_at_once(0.0325),
)  # fmt: skip
LONG_DRAFTS = _answers(
    "answering", lambda b: passes(b, 20, 720, dram=0.4),
    running=80, drafted_tokens=640, accepted_tokens=80, generated_tokens=160, passes=1, kv_use=0.5,
    latencies=_at_once(0.01),
)  # fmt: skip
NO_DRAFTS = _answers(
    "answering", lambda b: passes(b, 9, 80, dram=0.8),
    running=80, generated_tokens=80, passes=1, kv_use=0.5, latencies=_at_once(0.009),
)  # fmt: skip
ALONE = _answers(
    "answering", lambda b: passes(b, 10, 8, dram=0.95),
    running=8, generated_tokens=8, passes=1, kv_use=0.1,
    latencies=_at_once(0.01),
)  # fmt: skip
WITH_DRAFTS = _answers(
    "answering", lambda b: passes(b, 10.5, 32, dram=0.95),
    running=8, drafted_tokens=24, accepted_tokens=20, generated_tokens=28, passes=1, kv_use=0.1,
    latencies=_at_once(0.003),
)  # fmt: skip
