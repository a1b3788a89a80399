"""What only a serving engine can say: why a replica waits, and which tokens were computed for nothing."""

from exporter.core.leaks.span import TENSOR, Span
from exporter.core.model import PPM
from exporter.core.served import Shares

_SILENT = Shares()


def _shares(span: Span) -> Shares:
    return _SILENT if span.voice is None else span.voice.shares


def kv_cache_wait(span: Span, left: int) -> int:
    """All waiting while requests queue and the KV cache is full."""
    return left if _shares(span).kv_full else 0


def batching(span: Span, left: int) -> int:
    """Waiting and kernels without tensor work, as far as slots are empty though requests queue (E)."""
    return left * _shares(span).empty // PPM


def interference(span: Span, left: int) -> int:
    """As far as prefills beside them have stretched the time between two tokens (E)."""
    return left * _shares(span).stretched // PPM


def rejected(span: Span, _: int) -> int:
    """Tensor work on draft tokens that were thrown away."""
    return span.pools[TENSOR] * _shares(span).rejected // PPM


def computed_again(span: Span, _: int) -> int:
    """Tensor work on tokens that had been computed before they were evicted."""
    return span.pools[TENSOR] * _shares(span).again // PPM
