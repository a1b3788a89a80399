"""Tells what each minute of a GPU's last hour went to, from the samples that its book keeps a minute apart.

Owns the choice of one outcome for each minute. Does not draw: the page and `top` do.
"""

from itertools import pairwise
from operator import sub

from msgspec import Struct

from exporter.core.leaks import LEAK_NAMES
from exporter.core.model import SECOND
from exporter.core.snapshot import GpuView


class SpanOut(Struct, frozen=True, kw_only=True):
    """A part of the last hour, in each of whose minutes the same outcome took most of the time."""

    start: float
    """Unix seconds."""
    end: float
    outcome: str
    """A leak, `useful`, `unresolved` or `unobserved`."""


def hour_spans(gpu: GpuView, wall: int) -> list[SpanOut]:
    """List the spans of the last hour, the earliest first; after a restart since the restart. `wall`: Unix ns now."""
    now, spans = gpu.counters.now, list[SpanOut]()
    for sample, later in pairwise((*gpu.minutes, now)):
        taken = tuple(map(sub, later.parts, sample.parts))
        if not any(taken):
            continue
        outcome = LEAK_NAMES[taken.index(max(taken))]
        start, end = ((wall - (now.until - each.until)) / SECOND for each in (sample, later))
        if spans and spans[-1].outcome == outcome and spans[-1].end == start:
            start = spans.pop().start
        spans.append(SpanOut(start=start, end=end, outcome=outcome))
    return spans
