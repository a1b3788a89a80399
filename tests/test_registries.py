"""Tests that a row added to SOURCES, SCHEDULERS, ENGINES, LEAKS or METRICS appears wherever something derives from it.

`registered` adds the rows in a process of its own. The rows of the tables as they are keep their promises too.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from exporter.cardinality import MISSING_SIGNALS
from exporter.config import Config
from exporter.core.leaks import LEAKS
from exporter.core.metrics import METRICS, SERIES_BUDGET, max_series_of_scope
from exporter.core.model import Health, Reading
from exporter.registry import ENGINES, SCHEDULERS, SOURCES, engine_ports, import_object, section_of
from helm.build_schema import ENGINE_PORTS, SCHEMA, ports, schema

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = (sys.executable, "-m", "tests.registered", str(tmp_path_factory.mktemp("registered")))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_configuration_takes_choices_and_settings(derived: Any) -> None:
    assert derived["chosen"] == ["dummy-source", "dummy-scheduler", "dummy-scheduler"]
    assert "[dummy_source]\nanswer = 42\n\n[dummy_scheduler]\nnode = " in derived["toml"]
    assert derived["refused"].endswith("unknown field `question` - at `$.dummy_source`; known are answer")
    assert derived["by_variable"] == 43


@pytest.mark.slow
def test_nothing_of_a_row_is_imported_before_it_is_used(derived: Any) -> None:
    assert derived["loaded_early"] == []


def test_what_a_row_names_is_opened(derived: Any) -> None:
    assert derived["selected"].startswith("dummy-source (where the answer is 42): announces tensor activity")
    assert derived["node"] == "n1"
    assert derived["engine"] == ["dummy", 3.0]


def test_the_ports_of_an_engine_are_tried(derived: Any) -> None:
    assert derived["ports"] == [*Config().engines.ports, 1234]


def test_install_check_runs_the_diagnoses(derived: Any) -> None:
    findings = {name: (verdict, said) for name, verdict, said in derived["findings"]}
    assert findings["dummy-source"] == ("ok", "the dummy source answers")
    assert findings["dummy-scheduler"] == ("ok", "this is n1")
    assert findings["source"][1].startswith("the daemon will read dummy-source")
    assert findings["scheduler"] == ("ok", "the daemon will use dummy-scheduler, as configured")


def test_the_pages_list_the_entries(derived: Any) -> None:
    page = derived["reference"]
    assert re.search(r"^\| `source` \| .*, `\"dummy-source\"` \|", page, re.MULTILINE)
    assert re.search(r"^\| `scheduler` \| .*, `\"dummy-scheduler\"` \|", page, re.MULTILINE)
    assert "## [dummy_source]\n\nSettings of the dummy. Needs a restart." in page
    assert (
        "| `answer` | whole number | `41` | `GPU_EFFICIENCY_DUMMY_SOURCE_ANSWER` |  | What the dummy answers. |" in page
    )
    assert f", {engine_ports()[-1]}, 1234]`" in page
    assert (
        "| `dummy_leak` | emfu | measured | what the dummy takes | the dummy | remove the dummy |" in derived["metrics"]
    )
    assert "| `gpu_efficiency_dummy` | gauge |  | node | What the dummy counts. |" in derived["metrics"]


def test_the_chart_offers_the_source_and_the_scheduler(derived: Any) -> None:
    offered, now = (json.loads(text)["properties"] for text in (derived["schema"], SCHEMA.read_text()))
    assert offered["source"]["enum"] == [*now["source"]["enum"], "dummy-source"]
    assert offered["scheduler"]["enum"] == [*now["scheduler"]["enum"], "dummy-scheduler"]


def test_cardinality_counts_the_leak_the_metric_and_what_the_source_does_not_measure(derived: Any) -> None:
    assert derived["series_of_leaks"] == len(LEAKS) + 4
    assert derived["series_of_metric"] == 3
    series = derived["series_of_sources"]
    assert series["dummy-source"] == series["driver"] < series["dcgm"], "both lack the profiling signals"
    assert derived["fleet"] == "dummy-source"


def test_the_leak_has_its_colour_on_the_page_and_the_boards(derived: Any) -> None:
    assert derived["page_colour"] == "#123456"
    boards = {uid for uid, text in derived["boards"].items() if "dummy_leak" in text and "#123456" in text}
    of_leaks = ("chargeback", "fleet", "inference", "job", "node", "training")
    assert boards == {f"gpu-efficiency-{name}" for name in of_leaks}


def test_the_metric_is_exported(derived: Any) -> None:
    assert "\ngpu_efficiency_dummy 7" in derived["page"]


# -- the rows as they are --


def test_every_row_names_what_is_there() -> None:
    paths = [path for entry in SOURCES.values() for path in (entry.opener, entry.check, entry.process_list)]
    paths += [path for entry in SCHEDULERS.values() for path in (entry.opener, entry.check, entry.cluster_opener)]
    paths += [entry.engine for entry in ENGINES.values()]
    assert [path for path in paths if path and import_object(path) is None] == []


def test_every_section_of_the_configuration_has_the_settings_of_its_row() -> None:
    sections = {field.name: field.type for field in fields(Config)}
    rows = {section_of(name): entry.settings for name, entry in SOURCES.items()}
    rows |= {section_of(name): entry.settings for name, entry in SCHEDULERS.items()}
    assert {name: sections.get(name) for name in rows} == rows


def test_signals_that_are_not_supported_are_signals() -> None:
    known = {*Reading.__struct_fields__, *Health.__struct_fields__}
    assert {signal for signals in MISSING_SIGNALS.values() for signal in signals} <= known


def test_every_leak_has_a_colour_of_its_own() -> None:
    assert len({leak.colour for leak in LEAKS}) == len(LEAKS)
    assert all(re.fullmatch("#[0-9A-F]{6}", leak.colour) for leak in LEAKS)


def test_the_chart_s_schema_is_the_registries() -> None:
    assert SCHEMA.read_text() == schema(), "run: python -m helm.build_schema"
    assert ENGINE_PORTS.read_text() == ports(), "run: python -m helm.build_schema"


def test_the_budget_of_series_is_kept_and_told_in_one_place() -> None:
    used = {scope: max_series_of_scope(scope) for scope in ("gpu", "job", "measured job")}
    used["node"] = max_series_of_scope("node") + max_series_of_scope("model")
    assert all(used[scope] <= most for scope, most in SERIES_BUDGET.items())
    assert all(metric.max_series >= 0 for metric in METRICS)
    readme = (ROOT / "README.md").read_text()
    assert f"at most {SERIES_BUDGET['gpu']} series per GPU" in readme
    assert f"{SERIES_BUDGET['job']} per job" in readme
