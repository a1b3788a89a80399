"""Defines the Engine interface, the engine-independent metrics of one page, and the reasons why a scrape fails.

Differences between two pages are computed in `replica`.
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
    """Prompt tokens, including cached ones unless `cached` is missing."""
    cached: float | None
    """Prompt tokens found in the prefix cache."""
    prefilled: float | None
    """Tokens computed by prefills, including repeated prefills."""
    generated: float | None
    """Generated tokens."""
    preemptions: float | None
    evicted: float | None
    """Tokens whose KV cache was evicted while their request ran."""
    drafted: float | None
    """Draft tokens (speculative decoding)."""
    accepted: float | None
    """Draft tokens that were accepted."""
    verified: float | None
    """Verification passes, counted per request."""
    passes: float | None
    """Forward passes of the model."""
    flops: float | None
    """FLOPs of one GPU, as estimated by the engine."""
    bytes: float | None
    """Bytes that one GPU read from and wrote to its memory, as estimated by the engine."""
    lengths: float | None
    """Prompt tokens and half of the generated tokens of finished requests."""
    ended: float | None
    """Finished requests."""


class EngineHistograms(TypedDict, total=False):
    """Latencies that engines report, in seconds."""

    ttft: Histogram | None
    """Time to the first token."""
    itl: Histogram | None
    """Inter-token latency."""
    queue: Histogram | None
    """Time from the request's arrival to the start of its prefill."""
    e2e: Histogram | None
    """Time from the request's arrival to its last token."""


LATENCIES = tuple(EngineHistograms.__annotations__)


class EngineMetrics(Struct, frozen=True):
    """All metrics of one page; None or missing if the engine, or this version of it, does not report the metric."""

    engine: str
    model: str = ""
    """The model's name as served by the engine."""
    frontend: bool = False
    """True for a front end, which reports for workers elsewhere; False for a replica."""
    running: float | None = None
    """Requests in the batch."""
    waiting: float | None = None
    """Requests that are not in the batch."""
    deferred: float | None = None
    """Of `waiting`, those that could not join the batch if it had room: their KV cache is transferred, for instance."""
    outdated_seconds: float = 0.0
    """For how long after the last forward pass the gauges may stay as they were in it; 0: they are never outdated."""
    slots: float | None = None
    """Maximum number of requests in the batch."""
    kv_use: float | None = None
    """Used share of the KV cache, 0-1; the highest if there are several caches."""
    counters: Mapping[str, float] = {}
    """Counters by the names of EngineCounters, without those that the engine does not report."""
    histograms: Mapping[str, Histogram] = {}
    """Histograms by the names of EngineHistograms, without those that the engine does not report."""
    accept_length: float | None = None
    """Current mean number of tokens that a verification pass of one request yields, including the model's own token."""
    accept_rate: float | None = None
    """Current share of draft tokens that is accepted, 0-1."""
    draft_length: float | None = None
    """Draft tokens per verification pass of one request."""

    @property
    def recognized(self) -> bool:
        """True if the page has a metric that every engine reports: running requests or generated tokens."""
        return self.running is not None or "generated" in self.counters


class Engine(Struct, frozen=True):
    """A serving engine: how its processes and pages are recognised and read."""

    name: str
    prefixes: tuple[str, ...]
    """Prefixes of its metric names, with underscores for colons."""
    command: re.Pattern[str]
    """Pattern to search for in the command line of its processes."""
    read: Callable[[MetricsPage, str], EngineMetrics]
    """Function of the page and of its processes' command lines, one per line."""
    paths: tuple[str, ...] = ("/metrics",)
    """URL paths of its metrics page, in the order in which they are tried."""
    parallel: tuple[tuple[str, ...], ...] = ()
    """Command-line options whose product is the number of GPUs of a replica; each is a tuple of its spellings."""
    replicas: Callable[[str], float | None] = lambda _: None
    """Function of the command lines: the number of such replicas on one page (data parallel); None: one."""


def known_counters(**values: Unpack[EngineCounters]) -> dict[str, float]:
    """Return the counters without those that are None."""
    return cast("dict[str, float]", _without_none(values))


def known_histograms(**values: Unpack[EngineHistograms]) -> dict[str, Histogram]:
    """Return the histograms without those that are None."""
    return cast("dict[str, Histogram]", _without_none(values))


def _without_none(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def share(value: float | None, *, percent: bool = False) -> float | None:
    """Clamp a share to at most 1; None stays None. With `percent`, a value above 1 is taken as a percentage."""
    if value is None:
        return None
    return min(1.0, value / _PERCENT if percent and value > 1 else value)


def option_number(command: str, *names: str) -> float | None:
    """Return the number given to a command-line option (--max-num-seqs 8, --max_num_seqs=8, -tp 2); None if not given.

    Of several command lines, the first that gives it counts: the process's own precedes its ancestors'. If it is given
    twice in one, the last one counts, as in argparse and clap.
    """
    option = re.compile(rf"{_option(names)}[=\s]\s*(\d{{1,9}})(?=\s|$)")
    given = (option.findall(line) for line in command.split("\n"))
    return next((float(numbers[-1]) for numbers in given if numbers), None)


def has_option(command: str, *names: str) -> bool:
    """Return whether one of these command-line options is given, with a value or without."""
    return re.search(rf"{_option(names)}(?=[=\s]|$)", command) is not None


def _option(names: tuple[str, ...]) -> str:
    spelled = "|".join(re.escape(name).replace(r"\-", "[-_]") for name in names)
    return rf"(?:^|\s)-{{1,2}}(?:{spelled})"


def sum_known(*values: float | None) -> float | None:
    """Return the sum of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def multiply(value: float | None, factor: float | None) -> float | None:
    """Return the product; None if either is None."""
    return None if value is None or factor is None else value * factor


class ScrapeFailure(Exception):  # noqa: N818  the failure is the engine's, not this program's
    """A page could not be scraped: the kind of failure, a description, and what to do."""

    def __init__(self, kind: str, what: str, remedy: str) -> None:
        super().__init__(what)
        self.kind, self.what, self.remedy = kind, what, remedy


FAILURE_KINDS = (
    "refused", "timeout", "status", "redirect", "html", "not_an_engine", "too_large", "half_page", "encoding",
    "dialect", "malformed", "silent", "unreachable",
)  # fmt: skip
"""All kinds of failure."""
