"""Loads the engines listed in `exporter.registry`, and identifies the engine of a metrics page or command line."""

import re
from itertools import pairwise

from exporter import registry
from exporter.engines.base import Engine, EngineMetrics, ScrapeFailure
from exporter.engines.page import MetricsPage

ENGINES: tuple[Engine, ...] = tuple(registry.import_object(entry.engine) for entry in registry.ENGINES.values())
DEFAULT_PATHS = ("/metrics", "/prometheus/metrics")
"""URL paths to try if the engine is not known."""
_SHOWN = 5
"""Number of unknown metric names in an error message."""


def engine_of_command(command: str) -> Engine | None:
    """Return the engine whose pattern matches the command line, the first of several that matches one; else None."""
    lines = command.split("\n")
    return next((engine for line in lines for engine in ENGINES if engine.command.search(line)), None)


def lines_of_server(commands: str) -> str:
    """Return a process's own command line and those of its ancestors that start no other server beside it.

    The options in a shell's script for several servers are not this one's.
    """
    own, *ancestors = commands.split("\n")
    return "\n".join([own, *(line for line in ancestors if _servers(line) <= 1)])


_RUNS = re.compile(r"(?:\s+(?:\S*/)?python[\d.]*(?:\s+-m)?)?(?:\s+/\S*)?")
"""Between a launcher's name and that of the server which it runs."""
_PRINTED = re.compile(r"(?:^|[\s;&|])(?:echo|printf)\s[^;&|]*$")


def _servers(line: str) -> int:
    """Return how many servers a line starts: engines that it names, without those that only run the next, or print."""
    ends = {match.start(): match.end() for engine in ENGINES for match in engine.command.finditer(line)}
    starts = sorted(start for start in ends if not _PRINTED.search(line[:start]))
    return len(starts) - sum(_RUNS.fullmatch(line, ends[one], two) is not None for one, two in pairwise(starts))


def read_metrics(page: MetricsPage, command: str) -> EngineMetrics:
    """Read the metrics of a page. Raises ScrapeFailure if no engine, or no known version of it, wrote the page."""
    candidates = [(engine, names) for engine in ENGINES if (names := page.names(engine.prefixes))]
    for engine, _ in candidates:
        metrics = engine.read(page, command)
        if metrics.recognized:
            return metrics
    if not candidates:
        raise ScrapeFailure("not_an_engine", "has no metrics of a known engine", "name the engine's metrics page")
    engine, names = candidates[0]
    raise ScrapeFailure(
        "dialect",
        f"is a page of {engine.name} with unknown metric names ({', '.join(sorted(names)[:_SHOWN])}, ...)",
        "update this exporter, or report the engine's version to its maintainers",
    )
