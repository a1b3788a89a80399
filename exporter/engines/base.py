"""Defines what an engine is and the metrics that all engines are translated to, and why a scrape can fail.

One page has no time: differences between pages are computed in `replica`.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypedDict, Unpack, cast

from msgspec import Struct

from exporter.engines.page import Histogram, MetricsPage

_PERCENT = 100.0


class EngineCounters(TypedDict, total=False):
    """Counters that engines report, since the engine's start."""

    prompt: float | None
    """Tokens of prompts, the cached ones included unless `cached` is missing."""
    cached: float | None
    """Tokens of prompts that were found in a cache."""
    prefilled: float | None
    """Tokens that went through a prefill, repeated ones included."""
    generated: float | None
    """Tokens of answers."""
    preemptions: float | None
    evicted: float | None
    """Tokens whose keys and values were thrown away while their request ran."""
    drafted: float | None
    """Tokens of drafts."""
    accepted: float | None
    """Tokens of drafts that became part of an answer."""
    verified: float | None
    """Passes of one request that checked a draft."""
    passes: float | None
    """Passes of the model."""
    flops: float | None
    """FLOPs of one GPU, as the engine estimates them."""
    bytes: float | None
    """Bytes that one GPU read and wrote in its memory, as the engine estimates them."""
    lengths: float | None
    """Tokens of requests that ended, without half of their answers."""
    ended: float | None
    """Requests that ended."""


class EngineHistograms(TypedDict, total=False):
    """Latencies that engines report, in seconds."""

    ttft: Histogram | None
    """From a request to its first token."""
    itl: Histogram | None
    """Between two tokens."""
    queue: Histogram | None
    """From a request to the start of its prefill."""
    e2e: Histogram | None
    """From a request to its last token."""


LATENCIES = tuple(EngineHistograms.__annotations__)


class EngineMetrics(Struct, frozen=True):
    """All figures of one page. What is missing, the engine or this version of it does not report."""

    engine: str
    model: str = ""
    """The model's name in the engine."""
    frontend: bool = False
    """The page is that of a front end, which reports for workers elsewhere, not that of a replica."""
    running: float | None = None
    """Requests in the batch."""
    waiting: float | None = None
    """Requests that wait for a place in it."""
    slots: float | None = None
    """Requests that the batch can hold."""
    kv_use: float | None = None
    """The used share of the KV cache, 0-1; that of the fullest where there are several."""
    counters: Mapping[str, float] = {}
    """By the names of EngineCounters, without those that the engine does not report."""
    histograms: Mapping[str, Histogram] = {}
    """By the names of EngineHistograms, likewise."""
    accept_length: float | None = None
    """Tokens that a pass of one request yields now, the model's own token included."""
    accept_rate: float | None = None
    """The share of drafted tokens that is accepted now, 0-1."""
    draft_length: float | None = None
    """Tokens drafted for a pass of one request."""

    @property
    def recognized(self) -> bool:
        """Whether it has what every engine reports: requests that run, or tokens that were generated."""
        return self.running is not None or "generated" in self.counters


class Engine(Struct, frozen=True):
    """A serving engine: how it is recognised and how its page is read."""

    name: str
    prefixes: tuple[str, ...]
    """Beginnings of its metrics' names, with underscores for colons."""
    command: re.Pattern[str]
    """Found in the command line of its processes."""
    read: Callable[[MetricsPage, str], EngineMetrics]
    """Takes its page and the command lines of its processes, a line each."""
    paths: tuple[str, ...] = ("/metrics",)
    """Paths of its metrics page, in the order in which they are tried."""
    parallel: tuple[tuple[str, ...], ...] = ()
    """Options of its command line whose product is the number of a replica's GPUs, each under all its names."""


def known_counters(**values: Unpack[EngineCounters]) -> dict[str, float]:
    """The counters that the page has."""
    return cast("dict[str, float]", _without_none(values))


def known_histograms(**values: Unpack[EngineHistograms]) -> dict[str, Histogram]:
    """The histograms that the page has."""
    return cast("dict[str, Histogram]", _without_none(values))


def _without_none(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def share(value: float | None, *, percent: bool = False) -> float | None:
    """A share as 0-1, or None. `percent`: a value above 1 is in percent, as some releases report it."""
    if value is None:
        return None
    return min(1.0, value / _PERCENT if percent and value > 1 else value)


def option_number(command: str, *names: str) -> float | None:
    """The number that a command line gives an option (--max-num-seqs 8, --max_num_seqs=8, -tp 2), or None.

    Of an option given twice the last counts, as for argparse and clap.
    """
    spelled = "|".join(re.escape(name).replace(r"\-", "[-_]") for name in names)
    found = re.findall(rf"(?:^|\s)-{{1,2}}(?:{spelled})[=\s]\s*(\d{{1,9}})(?=\s|$)", command)
    return float(found[-1]) if found else None


def sum_known(*values: float | None) -> float | None:
    """The sum of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def multiply(value: float | None, factor: float | None) -> float | None:
    """The product; None if either is None."""
    return None if value is None or factor is None else value * factor


class ScrapeFailure(Exception):  # noqa: N818  what went wrong is the engine's, not this program's
    """Why a page gave no figures: the kind of failure, what was found, and what to do."""

    def __init__(self, kind: str, what: str, remedy: str) -> None:
        super().__init__(what)
        self.kind, self.what, self.remedy = kind, what, remedy


FAILURE_KINDS = (
    "refused", "timeout", "status", "redirect", "html", "not_an_engine", "too_large", "half_page", "encoding",
    "dialect", "malformed", "silent", "unreachable",
)  # fmt: skip
"""All kinds of failure."""
