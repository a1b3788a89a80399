"""Loads the engines listed in `exporter.registry`, and identifies the engine of a metrics page or command line."""

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
    """Return a process's own command line and those of its ancestors that start no other engine beside it.

    The options in a shell's script for several servers are not this one's.
    """
    own, *ancestors = commands.split("\n")
    return "\n".join([own, *(line for line in ancestors if len(_starts(line)) <= 1)])


def _starts(line: str) -> set[int]:
    """Return where in the line an engine is named; one that runs another is named at the same place."""
    return {match.start() for engine in ENGINES for match in engine.command.finditer(line)}


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
