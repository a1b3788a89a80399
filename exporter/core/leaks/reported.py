"""What only a training job can say: bubbles, and which of its tensor work moved the model.

`model` of a span is what of its tensor work the reported FLOPs account for. Between that and what the tensor pipes did
lie recomputation, as far as the reported policy explains it, and padding: of sequences, tiles, experts' slots.
"""

from exporter.core.leaks.span import SLACK, TENSOR, UNRESOLVED, Span
from exporter.core.told import AGAIN, BUBBLE, EXPLAINED


def bubble(span: Span, _: int) -> int:
    """What the job, or its pipeline's schedule, leaves empty."""
    return span.told(BUBBLE) or 0


def recomputation(span: Span, left: int) -> int:
    """Of tensor work beyond the model's FLOPs what the policy of recomputation explains."""
    if span.model is None or span.voice is None:
        return 0
    span.voice.explain(span.pools[TENSOR], span.ms)
    return min(left - span.model, span.voice.can(EXPLAINED, span.ms))


def padding(span: Span, left: int) -> int:
    """The rest of tensor work beyond the model's FLOPs."""
    return 0 if span.model is None else left - span.model


def rework(span: Span, left: int) -> int:
    """FLOPs of steps that had been made before; where no FLOPs are told, all while such steps are made."""
    voice = span.voice
    return 0 if voice is None else left if voice.rework else voice.can(AGAIN, span.ms)


def stand_in(span: Span) -> None:
    """Where no counter sees tensor work the model's FLOPs stand for it; the rest of kernel time is slack then."""
    pools, model = span.pools, span.model or 0
    known = min(model, pools[UNRESOLVED])
    pools[TENSOR] += known
    pools[SLACK] += pools[UNRESOLVED] - known
    pools[UNRESOLVED] = 0
