"""No stable part of the public surface changes or goes without a line in CHANGELOG.md, and none comes unrecorded."""

import re
from pathlib import Path

import pytest

from exporter import stability
from exporter.cli.command_line import describe_commands
from exporter.cluster.metrics import METRICS as OF_CLUSTER
from exporter.config import Config
from exporter.core.metrics import METRICS
from tests.compat import surface

ROOT = Path(__file__).resolve().parents[2]


def unexplained(lines: list[str], log: str) -> list[str]:
    """Parts that no line of the change log names as a word of their own."""
    return [line for line in lines if not re.search(rf"(?<![\w-]){re.escape(surface.name_of(line))}(?![\w-])", log)]


@pytest.fixture(name="now", scope="module")
def _now() -> list[str]:
    return surface.surface()


def test_the_recorded_surface_is_that_of_this_version(now: list[str]) -> None:
    before, gone = surface.recorded()
    new, lost = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    assert (new, lost) == ([], []), "stable parts are new, changed or gone: python -m tests.compat.surface records them"
    assert not set(gone) & set(now)


def test_what_has_changed_or_gone_is_named_in_the_change_log() -> None:
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert unexplained(surface.recorded()[1], log) == [], "CHANGELOG.md must say what became of these"


def test_a_part_that_goes_or_changes_stays_in_the_record_until_it_is_explained(now: list[str]) -> None:
    metric = next(line for line in now if line.startswith("metric gpu_efficiency_node_gpus "))
    without = [line for line in now if line != metric]
    lines = surface.lines_to_record(without, now, [])
    assert lines[0] == f"- {metric}"
    assert unexplained([metric], "- `gpu_efficiency_node_gpus_total` is new") == [metric]
    assert unexplained([metric], "- `gpu_efficiency_node_gpus` has gone: use the sum") == []
    back = surface.lines_to_record(now, without, [metric])
    assert back == now, "what has come back is no longer gone"


def test_each_kind_of_part_is_recorded(now: list[str]) -> None:
    for line in (
        "metric gpu_efficiency_paid_seconds_total counter uuid,gpu", "command top", "flag report:--json 0 values",
        "choice serve:--source dcgm", "setting web.listen_address text", "file checkpoint 1",
    ):  # fmt: skip
        assert line in now
    assert {line.split(" ")[1].partition(".")[0] for line in now if line.startswith("json ")} == {
        "receipt", "report", "api", "message"
    }  # fmt: skip
    assert not [line for line in now if "nccl" in line.split(" ")[1] and not line.startswith("json")]


def test_what_is_declared_experimental_exists() -> None:
    names = [metric.name for metric in (*METRICS, *OF_CLUSTER)]
    for prefix in stability.EXPERIMENTAL_METRICS:
        assert any(name.startswith(prefix) for name in names), prefix
    assert set(stability.EXPERIMENTAL_SECTIONS) <= set(Config.__struct_fields__)
    assert set(stability.EXPERIMENTAL_COMMANDS) <= {command.name for command in describe_commands()}
