"""No stable part of the public surface changes or goes without a line in CHANGELOG.md, and none comes unrecorded."""

import re
from collections import Counter
from collections.abc import Callable
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
    """Parts without an entry that begins with "**Changed:**" or "**Removed:**" and has every word of their name.

    A part that has changed twice needs two entries.
    """
    entries = re.findall(r"^- \*\*(?:Changed|Removed):\*\* (.*(?:\n  .*)*)", log, re.MULTILINE)
    changes = Counter(map(surface.words_of, lines))
    explained = {words: sum(all(map(_within(entry), words)) for entry in entries) for words in changes}
    return [line for line in lines if explained[words := surface.words_of(line)] < changes[words]]


def _within(text: str) -> Callable[[str], bool]:
    return lambda word: re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


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
    missing = {line: sorted(surface.words_of(line)) for line in unexplained(surface.recorded()[1], log)}
    assert missing == {}, 'each needs an entry "- **Changed:** ..." (or Removed) in CHANGELOG.md with these words'


def test_a_part_that_goes_or_changes_stays_in_the_record_until_it_is_explained(now: list[str]) -> None:
    metric = next(line for line in now if line.startswith("metric gpu_efficiency_node_gpus "))
    without = [line for line in now if line != metric]
    lines = surface.lines_to_record(without, now, [])
    assert lines[0] == f"- {metric}"
    back = surface.lines_to_record(now, without, [metric])
    assert back == now, "what has come back is no longer gone"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("metric gpu_efficiency_node_gpus gauge node", "gpu_efficiency_node_gpus"),
        ("command top", "top"),
        ("flag report:--log.format 1 values", "report --log.format"),
        ("choice serve:--source dcgm-exporter", "serve --source dcgm-exporter"),
        ("setting web.listen_address text", "web listen_address"),
        ("json report.JobReport.gpus [string]", "report JobReport gpus"),
        ("file store-3 0123456789abcdef", "store-3"),
    ],
)
def test_only_an_entry_about_a_part_explains_it(line: str, words: str) -> None:
    names = words.split()
    assert surface.words_of(line) == set(names)
    assert unexplained([line], f"- **Changed:** `{'`, `'.join(names)}` now count.") == []
    assert unexplained([line], "- **Removed:** " + "\n  of ".join(reversed(names)) + ".") == []
    for other in (
        f"- {words} is new", f"**Changed:** {words}", f"- Changed: {words}", f"- **Changed:** {words}_total",
        f"- **Changed:** another-{words}", f"- **Changed:** something\n- Fixed: {words}",
        f"- **Changed:** {' '.join(names[1:])}", f"- **Changed:** {' '.join(names[:-1])}",
    ):  # fmt: skip
        assert unexplained([line], other) == [line], other


def test_a_part_that_changes_again_needs_another_entry() -> None:
    lines = ["flag report:--json 0 values", "flag report:--json 1 values", "flag top:--once 0 values"]
    first = "- **Changed:** `--json` of `report` takes a file; `--once` of `top` takes a count."
    assert unexplained(lines, first) == lines[:2]
    assert unexplained(lines, f"{first}\n- **Removed:** `report --json`.") == []


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
