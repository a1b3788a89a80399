"""The engines that are known, and which of them a page or a command line is of.

Owns ENGINES: adding an engine is one module and one row.
"""

from exporter.engines import dynamo, sglang, tgi, trtllm, vllm
from exporter.engines.figures import Engine, Figures
from exporter.engines.page import Page
from exporter.engines.web import Trouble

ENGINES: tuple[Engine, ...] = (vllm.ENGINE, sglang.ENGINE, trtllm.TRITON, trtllm.SERVE, tgi.ENGINE, dynamo.ENGINE)
"""The first whose names a page has reads it: Dynamo's are on the pages of the engines that it runs."""
PATHS = ("/metrics", "/prometheus/metrics")
"""Where the engine is not known."""
_SHOWN = 5


def engine_of(command: str) -> Engine | None:
    """Whose command line it is."""
    return next((engine for engine in ENGINES if engine.command.search(command)), None)


def read(page: Page, command: str) -> Figures:
    """What the page says. Raises Trouble for one of no engine, or of one that speaks otherwise now."""
    there = [(engine, names) for engine in ENGINES if (names := page.names(engine.prefixes))]
    for engine, _ in there:
        figures = engine.read(page, command)
        if figures.understood:
            return figures
    if not there:
        raise Trouble("not_an_engine", "has no metrics of an engine that is known", "name the engine's metrics page")
    engine, names = there[0]
    raise Trouble(
        "dialect",
        f"is a page of {engine.name}, in names that are not known here ({', '.join(sorted(names)[:_SHOWN])}, ...)",
        "update this exporter, or tell its makers the engine's version",
    )
