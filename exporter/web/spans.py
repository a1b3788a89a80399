"""Tells what each minute of a GPU's last hour went to, from the samples that its book keeps a minute apart.

Owns the choice of one outcome for each minute. Does not draw: the page and `top` do.
"""

from itertools import pairwise
from operator import sub

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.hangs import HUNG
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


def hour_spans(gpu: GpuView, wall: int, *, hung_since: float | None = None) -> list[SpanOut]:
    """List the spans of the last hour, the earliest first; after a restart since the restart. `wall`: Unix ns now.

    The time from `hung_since`, Unix seconds, is one hang, although what came before its confirmation is booked as other
    leaks.
    """
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
    return spans if hung_since is None else _with_hang(spans, hung_since)


def _with_hang(spans: list[SpanOut], since: float) -> list[SpanOut]:
    """Let a hang that began at `since` and lasts take all of the time from then on."""
    before = [replace(span, end=min(span.end, since)) for span in spans if span.start < since]
    hang = SpanOut(start=max(since, spans[0].start), end=spans[-1].end, outcome=HUNG) if spans else None
    return [*before, hang] if hang and hang.start < hang.end else before
