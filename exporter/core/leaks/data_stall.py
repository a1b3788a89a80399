"""The GPU waits for its input: it works or rests, nothing between, and batches arrive in bursts."""

from exporter.core.leaks.span import WAIT, Span


def take(span: Span) -> int:
    """All waiting after a minute of bimodal engine activity with host-to-device bursts (E)."""
    return span.pools[WAIT] if span.minute.bimodal and span.minute.bursts else 0
