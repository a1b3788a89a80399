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
    """Return the engine whose pattern matches the command line; None if none does."""
    return next((engine for engine in ENGINES if engine.command.search(command)), None)


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
