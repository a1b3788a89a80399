"""A message's figures from what a line says of an interval.

Owns the arithmetic. All figures are of one GPU: what a line tells of all of them is divided by the world's size, and
left out where the log has not told that.
"""

import math
from collections.abc import Mapping
from typing import Any

from exporter.reports.follow.said import Said
from exporter.reports.message import Degrees, Schedule

Facts = Mapping[str, float | str]
_MOST_RANKS = 10**6
_ROUNDED_SECONDS = 0.0005
"""Of a step's time, printed with three decimals: fewer tokens than that makes up for are no padding."""
_DEGREES = ("tensor", "pipeline", "data", "context", "expert")


def figures(said: Said, facts: Facts, *, steps: int, seconds: float) -> dict[str, Any]:
    """Fields of a Message over an interval; none where its length is not known."""
    if seconds <= 0.0:
        return {}
    world, sequence = size(facts, "world"), facts.get("sequence")
    share = None if world is None else steps / world
    samples = _product(said.samples, share)
    tokens = _product(said.tokens, seconds)
    if tokens is None and isinstance(sequence, float):
        tokens = _product(samples, sequence)
    model, hardware = _product(_flops(said, facts), seconds), _product(said.hardware_flops, seconds)
    found = {
        "seconds": seconds,
        "steps": steps,
        "samples": samples,
        "tokens": tokens,
        "padding": _padding(tokens, _product(said.trained, share), rounded=_ROUNDED_SECONDS * steps / seconds),
        "model_flops": model,
        # Rounding can put it below.
        "hardware_flops": None if hardware is None or hardware < (model or 0.0) else hardware,
    }
    return {name: value for name, value in found.items() if value is not None}


def constants(facts: Facts) -> dict[str, Any]:
    """Fields of a Message that hold for the whole job."""
    degrees = {name: found for name in _DEGREES if (found := size(facts, name)) is not None}
    granularity = facts.get("recompute")
    return {
        "gpus": 1,
        "world_size": size(facts, "world"),
        "parallel": Degrees(**degrees) if degrees else None,
        "pipeline": _schedule(facts),
        "recompute": {"None": "none", "selective": "selective", "full": "full"}.get(str(granularity), ""),
        "dtype": _dtype(facts),
    }


def loss_word(loss: float | None) -> Any:
    """The same as a message has it."""
    return loss if loss is None or math.isfinite(loss) else str(loss)


def size(facts: Facts, name: str) -> int | None:
    """A number of ranks among the facts; None where it is none."""
    found = facts.get(name)
    return int(found) if isinstance(found, float) and 1.0 <= found <= _MOST_RANKS else None


def _product(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


def _flops(said: Said, facts: Facts) -> float | None:
    peak = facts.get("peak")
    return said.flops if said.flops is not None else _product(said.mfu, peak if isinstance(peak, float) else None)


def _padding(tokens: float | None, trained: float | None, *, rounded: float) -> float | None:
    if tokens is None or trained is None:
        return None
    return 0.0 if tokens - trained <= tokens * rounded else tokens - trained


def _schedule(facts: Facts) -> Schedule | None:
    stages, microbatches = size(facts, "pipeline"), size(facts, "microbatches")
    if stages is None or microbatches is None or stages == 1:
        return None
    chunks = size(facts, "chunks") or 1
    return Schedule(stages, microbatches, chunks, "interleaved" if chunks > 1 else "1f1b")


def _dtype(facts: Facts) -> str:
    if facts.get("fp8", "None") not in ("None", "False"):
        return "fp8"
    return next((name for name in ("bf16", "fp16") if facts.get(name) == "True"), "")
