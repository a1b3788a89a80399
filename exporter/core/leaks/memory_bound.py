"""The tensor pipes starve because DRAM is at its practical ceiling: decode, normalisation, optimiser steps."""

from exporter.core.leaks.span import Span


def take(span: Span, left: int) -> int:
    """Of the slack, DRAM activity over its ceiling while the engine runs; nothing where DRAM is not seen."""
    ev, spec = span.ev, span.ev.device.spec
    if ev.dram is None or spec is None or not ev.engine:
        return 0
    return int(left * min(1.0, ev.dram / (spec.dram_ceiling * ev.engine)))
