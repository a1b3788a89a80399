"""Adds one row to each registry in a process of its own, and prints as JSON what is derived from it.

Rows are added before the modules that derive from the tables are imported, as if they were typed into them: so this
module imports nothing of the exporter at its top.
"""

import importlib.util
import io
import json
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct

CONFIG = """
source = "dummy-source"
scheduler = "dummy-scheduler"
cluster.scheduler = "dummy-scheduler"
[dummy_source]
answer = 42
[dummy_scheduler]
node = "n1"
"""
LEAK = """    Leak(
        "dummy_leak", "emfu", "what the dummy takes", pools=(SLACK,), detector=lambda span, left: left // 2,
        watch="the dummy", fix="remove the dummy", colour="#123456",
    ),
"""
_LAST_LEAK = '    Leak("oversized_allocation"'


class DummySourceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[dummy_source]: settings of the dummy."""

    answer: int = 41
    """What the dummy answers."""


class DummySchedulerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[dummy_scheduler]: settings of the other dummy."""

    node: str = "nowhere"
    """The node of the dummy."""


def add_rows() -> None:
    """One row a table."""
    registry = import_module("exporter.registry")
    registry.SOURCES["dummy-source"] = registry.SourceEntry(
        opener="tests.dummies:open_source",
        settings=DummySourceSettings,
        location=lambda settings: f"where the answer is {settings.answer}",
        check="tests.dummies:check_source",
        check_seconds=2.0,
        advice="",
        profiling_advice="",
        unsupported_signals=registry.PROFILING_SIGNALS,
    )
    registry.SCHEDULERS["dummy-scheduler"] = registry.SchedulerEntry(
        opener="tests.dummies:open_scheduler",
        settings=DummySchedulerSettings,
        check="tests.dummies:check_scheduler",
        in_pods=True,
        cluster_opener="tests.dummies:open_scheduler",
    )
    registry.ENGINES["dummy"] = registry.EngineEntry("tests.dummies:ENGINE", ports=(1234,))
    _add_leak()
    metrics: Any = import_module("exporter.core.metrics")
    row = metrics.Metric(
        "gpu_efficiency_dummy", "gauge", "What the dummy counts.", lambda _: (((), 7),), scope="node", max_series=3
    )
    metrics.METRICS = (*metrics.METRICS, row)


def _add_leak() -> None:
    """Type the row into the source of the table, from which the same module derives."""
    core = import_module("exporter.core")
    spec = importlib.util.find_spec("exporter.core.leaks")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(_LAST_LEAK) == 1
    module = sys.modules[spec.name] = core.leaks = importlib.util.module_from_spec(spec)  # type: ignore[attr-defined]
    exec(compile(source.replace(_LAST_LEAK, LEAK + _LAST_LEAK), spec.origin, "exec"), vars(module))  # noqa: S102


def derived(folder: Path) -> dict[str, Any]:
    """What each place makes of the rows."""
    path = folder / "config.toml"
    path.write_text(CONFIG)
    wrong = folder / "wrong.toml"
    wrong.write_text("[dummy_source]\nquestion = 1")
    configs = import_module("exporter.config")
    config = configs.load(path, environ={})
    found: dict[str, Any] = {"loaded_early": sorted(sys.modules.keys() & {"tests.dummies", "httpx", "grpc", "sqlite3"})}
    try:
        configs.load(wrong, environ={})
    except configs.ConfigError as err:
        found["refused"] = str(err)
    by_variable = configs.load(None, environ={"GPU_EFFICIENCY_DUMMY_SOURCE_ANSWER": "43"})
    found |= {
        "chosen": [config.source, config.scheduler, config.cluster.scheduler],
        "by_variable": by_variable.dummy_source.answer,
        "ports": config.engines.ports,
        "toml": import_module("exporter.cli.tables").as_toml(config),
        "reference": import_module("exporter.cli.reference").markdown(),
        "schema": import_module("helm.build_schema").schema(),
    }
    return found | _opened(config) | _checked(config) | _counted() | _shown()


def _opened(config: Any) -> dict[str, Any]:
    selector = import_module("exporter.sources.selector").open_selector(config)
    selector.read(10**9)
    scheduler = import_module("exporter.schedulers.base").choose_scheduler(config)
    page = import_module("exporter.engines.page").MetricsPage("dummy_running 3\n")
    metrics = import_module("exporter.engines.registry").read_metrics(page, "")
    return {"selected": selector.reason, "node": scheduler.node, "engine": [metrics.engine, metrics.running]}


def _checked(config: Any) -> dict[str, Any]:
    checks = import_module("exporter.checkup.report").CHECKS
    base = import_module("exporter.checkup.base")
    names = {"dummy-source", "source", "dummy-scheduler", "scheduler"}
    findings = base.run_checks([one for one in checks if one.name in names], base.CheckContext(config=config))
    return {"findings": [[one.check, str(one.verdict), one.message] for one in findings]}


def _counted() -> dict[str, Any]:
    cardinality = import_module("exporter.cardinality")
    counts = {
        source: cardinality.scraped_series(cardinality.FleetSize(source=source))
        for source in ("dcgm", "driver", "dummy-source")
    }
    out = io.StringIO()
    with redirect_stdout(out):
        import_module("exporter.cli").main(["cardinality", "--source", "dummy-source", "--json"])
    return {
        "series_of_metric": counts["dcgm"]["gpu_efficiency_dummy"],
        "series_of_leaks": counts["dcgm"]["gpu_efficiency_seconds_total"] / 8,
        "series_of_sources": {source: sum(found.values()) for source, found in counts.items()},
        "fleet": json.loads(out.getvalue())["fleet"]["source"],
    }


def _shown() -> dict[str, Any]:
    out = io.StringIO()
    with redirect_stdout(out):
        import_module("exporter.cli").main(["metrics", "--markdown"])
    snapshot = import_module("exporter.core.snapshot")
    empty = snapshot.take_snapshot(import_module("exporter.core.ledger").Ledger(), snapshot.DaemonMetadata())
    draw = import_module("dashboards.drawing").draw
    return {
        "metrics": out.getvalue(),
        "page": import_module("exporter.core.exposition").render(empty).decode(),
        "page_colour": import_module("exporter.web.page").LEAK_COLOURS["dummy_leak"],
        "boards": {board.uid: draw(board) for board in import_module("dashboards.build").boards()},
    }


if __name__ == "__main__":
    add_rows()
    json.dump(derived(Path(sys.argv[1])), sys.stdout)
