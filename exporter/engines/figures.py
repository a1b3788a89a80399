"""What one page of an engine says, in one vocabulary: gauges as they are, counters and histograms since its start.

Owns the words between engines and intervals. Refuses time: one page knows none.
"""

import re
from collections.abc import Callable, Mapping

from msgspec import Struct

from exporter.engines.histograms import Histogram
from exporter.engines.page import Page

COUNTERS = (
    "prompt", "cached", "prefilled", "generated", "preemptions", "evicted", "drafted", "accepted", "verified", "passes",
    "flops", "bytes", "lengths", "ended",
)  # fmt: skip
"""prompt: tokens of prompts, cached ones among them unless `cached` is missing; prefilled: those that went through a
prefill, repeated ones among them; evicted: tokens whose keys and values were thrown away under a request; verified:
passes of one request that checked a draft; lengths: tokens of requests that ended, a half of their answers left out;
ended: those requests."""
LATENCIES = ("ttft", "itl", "queue", "e2e")
"""Of histograms, in seconds."""
_WHOLE = 100.0
"""Of a share that is told in percent."""


class Figures(Struct, frozen=True):
    """All that a page says. What is not there, the engine or this version of it does not say."""

    engine: str
    model: str = ""
    """By the engine's name for it."""
    front: bool = False
    """Of a front end that speaks for workers elsewhere, not of a replica."""
    running: float | None = None
    waiting: float | None = None
    slots: float | None = None
    kv_use: float | None = None
    """0-1; the fullest of several caches."""
    counters: Mapping[str, float] = {}
    """By COUNTERS."""
    histograms: Mapping[str, Histogram] = {}
    """By LATENCIES."""
    accept_length: float | None = None
    """Tokens that a pass of one request yields now, its own one among them."""
    accept_rate: float | None = None
    """Of drafted tokens those that are accepted now."""
    draft_length: float | None = None
    """Tokens drafted for a pass of one request."""

    @property
    def understood(self) -> bool:
        """Whether it says the least there is to say: how much is at work, or what came of it."""
        return self.running is not None or "generated" in self.counters


class Engine(Struct, frozen=True):
    """An engine: how it is recognised and read."""

    name: str
    prefixes: tuple[str, ...]
    """Of its metrics' names, colons being underscores."""
    command: re.Pattern[str]
    """Found in the command line of its processes."""
    read: Callable[[Page, str], Figures]
    """Its page and the command lines of its processes -> what it says."""
    paths: tuple[str, ...] = ("/metrics",)
    """Of its metrics page, in the order to try."""
    parallel: tuple[tuple[str, ...], ...] = ()
    """Options of its command line, each under all its names, whose product is the GPUs of a replica."""


def known(**values: float | None) -> dict[str, float]:
    """Those that are there."""
    return {name: value for name, value in values.items() if value is not None}


def histograms(**found: Histogram | None) -> dict[str, Histogram]:
    """Those that are there."""
    return {name: one for name, one in found.items() if one is not None}


def share(value: float | None, *, percent: bool = False) -> float | None:
    """A share as 0-1. `percent`: more than 1 is percent, as some releases have it."""
    if value is None:
        return None
    return min(1.0, value / _WHOLE if percent and value > 1 else value)


def option(command: str, *names: str) -> float | None:
    """The number that a command line gives an option (--max-num-seqs 8, --max_num_seqs=8, -tp 2); the last counts.

    What is given twice is decided by the last for argparse and clap both.
    """
    spelled = "|".join(re.escape(name).replace(r"\-", "[-_]") for name in names)
    found = re.findall(rf"(?:^|\s)-{{1,2}}(?:{spelled})[=\s]\s*(\d{{1,9}})(?=\s|$)", command)
    return float(found[-1]) if found else None


def together(*values: float | None) -> float | None:
    """The sum of those that are there; None if none is."""
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def times(value: float | None, factor: float | None) -> float | None:
    """None if either is."""
    return None if value is None or factor is None else value * factor
