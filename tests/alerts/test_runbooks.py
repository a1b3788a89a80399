"""Each alert has a runbook that says what its rule says, and that a tired person can follow: all it names exists."""

import re
import shlex
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from alerts.build_runbooks import (
    FOLDER,
    INDEX,
    ROOT,
    SECTIONS,
    Alert,
    alerts,
    block,
    index,
    refreshed,
    sections,
    skeleton,
)
from exporter.cli import build_parser
from exporter.config import LIVE, Config, load
from exporter.core.policy import Policy
from exporter.preview.scoring import policy_rows
from exporter.web.app import PATHS
from exporter.web.security import OPEN_PATHS
from tests.alerts.lint import Rule, faults, known_to
from tests.alerts.lint import rules as all_rules
from tests.each import each

ALERTS = alerts()
TEXTS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.name != INDEX}
KNOWN = known_to(all_rules())
EACH = each("name", TEXTS)
WRITTEN = {name: "\n".join(sections(text).values()) for name, text in TEXTS.items()}
"""What people wrote; the rule's own words are checked where rules are."""
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


class Fence(NamedTuple):
    runbook: str
    text: str


def fences(kind: str) -> list[Fence]:
    """Blocks in that language."""
    found = ((name, FENCED.findall(text)) for name, text in WRITTEN.items())
    return [Fence(name, body) for name, blocks in found for language, body in blocks if language == kind]


def queries() -> Iterator[tuple[str, str]]:
    """(runbook, expression): a comment ends a query, and so does a line that is not continued on the next."""
    for fence in fences("promql"):
        yield from ((fence.runbook, query) for query in split(fence.text))


def split(text: str) -> list[str]:
    found: list[str] = []
    for line in (line for line in text.splitlines() if not line.startswith("#")):
        if found and line[:1] in {" ", ")"}:
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found


def commands() -> Iterator[str]:
    """Every call of our own program: lines of shell blocks, and what the text quotes."""
    for text in WRITTEN.values():
        yield from re.findall(r"^gpu-efficiency [^|#`\n]+", text, re.MULTILINE)
        yield from re.findall(r"`(gpu-efficiency [^`]+)`", text.replace("\n", " "))


# -- rules and runbooks --


def test_each_rule_has_a_runbook_and_each_runbook_a_rule() -> None:
    assert set(TEXTS) == {alert.name for alert in ALERTS}


@each("alert", ALERTS, ids=lambda alert: alert.name)
def test_the_block_says_what_the_rule_says(alert: Alert) -> None:
    text = TEXTS.get(alert.name, skeleton(alert))
    assert refreshed(text, alert) == text, "run `make docs`, then see whether the text is still true"


@each("alert", ALERTS, ids=lambda alert: alert.name)
def test_runbook_url_leads_to_the_runbook(alert: Alert) -> None:
    url = urllib.parse.urlparse(alert.rule["annotations"]["runbook_url"])
    assert url.path.endswith(f"docs/runbooks/{alert.name}.md")
    assert (FOLDER / Path(url.path).name).is_file()


def test_the_index_is_what_make_docs_writes() -> None:
    assert (FOLDER / INDEX).read_text() == index(ALERTS, TEXTS)


def test_every_alert_has_a_meaning_in_the_index() -> None:
    assert [line for line in index(ALERTS, TEXTS).splitlines() if line.endswith("|  |")] == []


# -- what is in a runbook --


@EACH
def test_a_runbook_has_all_sections_in_order_and_none_is_empty(name: str) -> None:
    found = sections(TEXTS[name])
    assert tuple(found) == SECTIONS
    assert [heading for heading, body in found.items() if len(body.split()) < 10] == []


@EACH
def test_three_commands_are_three(name: str) -> None:
    commands = sections(TEXTS[name])["First three commands"]
    assert re.findall(r"^# (\d)\.", commands, re.MULTILINE) == ["1", "2", "3"]


@EACH
def test_look_alikes_are_a_table(name: str) -> None:
    table = sections(TEXTS[name])["Look-alikes"].splitlines()
    assert "| look-alike | what differs |" in table
    assert len([line for line in table if line.startswith("| ")]) >= 4


@EACH
def test_money_can_be_asked_for(name: str) -> None:
    assert "```promql" in sections(TEXTS[name])["Impact in money"]


@EACH
def test_links_lead_somewhere(name: str) -> None:
    assert [link for link in LINK.findall(TEXTS[name]) if not (FOLDER / link).resolve().is_relative_to(ROOT)] == []
    assert [link for link in LINK.findall(TEXTS[name]) if not (FOLDER / link).exists()] == []


# -- what it names exists --


@EACH
def test_every_series_a_runbook_names_is_exported_or_recorded(name: str) -> None:
    assert faults(Rule(name, name, "vector(0) or up", record=False, text=WRITTEN[name]), KNOWN) == []


@each("name, query", queries())
def test_a_query_names_labels_that_exist_and_keeps_clusters_apart(name: str, query: str) -> None:
    assert faults(Rule(name, name, query, record=False, text=""), KNOWN) == []


@pytest.mark.parametrize("fence", fences("toml"), ids=lambda fence: fence.runbook)
def test_an_example_is_a_configuration(fence: Fence, tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    file.write_text(fence.text)
    assert load(file, environ={}) != load(None, environ={})


def test_every_runbook_shows_how_to_tune() -> None:
    assert {fence.runbook for fence in fences("toml")} == set(TEXTS)


NO_SETTING = "no setting: "
RESTARTS = {
    "GPUEfficiencyConservationBroken": [
        f"{NO_SETTING}books that do not add up are begun anew", f"{NO_SETTING}the alert's own text says the same",
    ],
    "GPUEfficiencyExporterDown": [f"{NO_SETTING}it does not answer"],
    "GPUEfficiencyExporterMissing": ["slurm.node_name"],
    "GPUEfficiencyGPULost": ["inventory.file"],
    "GPUEfficiencyHistoryFailing": ["history.file", f"{NO_SETTING}when it is safe, not that it helps"],
    "GPUEfficiencySchedulerDataStale": ["scheduler"],
}  # fmt: skip
"""For what a runbook or its alert asks to restart the daemon, as often as it does: a setting that a reload does not
take, or why else. A restart after any other change would make the daemon prove hangs and zombies anew for nothing."""
_RESTART = re.compile(
    r"(?<!not )restart (?:the daemon|the exporter|the daemonset|it only|gpu-efficiency)|(?<!no )restart is needed"
    r"|then restart(?! the job)|needs? (?:a|to be) restart|rollout restart",
    re.IGNORECASE,
)


@each("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_restart_of_the_daemon_is_asked_for_only_where_a_reload_is_not_enough(alert: Alert) -> None:
    said = " ".join(f"{WRITTEN[alert.name]} {alert.rule['annotations']['description']}".split())
    assert len(_RESTART.findall(said)) == len(RESTARTS.get(alert.name, ())), said


def test_settings_after_which_a_runbook_asks_for_a_restart_are_not_reloaded() -> None:
    settings = [each for found in RESTARTS.values() for each in found if not each.startswith(NO_SETTING)]
    sections = {setting.partition(".")[0] for setting in settings}
    assert sections <= set(Config.__struct_fields__)
    assert not sections & set(LIVE)


@each("command", sorted(set(commands())))
def test_our_own_commands_are_what_the_program_takes(command: str) -> None:
    words = shlex.split(command)[1:]
    given = build_parser(words[0]).parse_args(words)
    assert all(policy_rows(Policy(), [text]) for text in getattr(given, "policy", []))


@EACH
def test_pages_that_are_fetched_are_served(name: str) -> None:
    assert set(re.findall(r":19400(/[\w/]*)", TEXTS[name])) <= set(PATHS)


@EACH
def test_what_is_for_the_loopback_alone_is_fetched_over_it(name: str) -> None:
    """Beyond it the page and the JSON API answer 403."""
    fetched = re.findall(r"curl [^|\n]*?([\w.]+):19400(/[\w/]*)", TEXTS[name])
    assert [path for host, path in fetched if host != "localhost" and path not in OPEN_PATHS] == []


@EACH
def test_thresholds_in_the_text_are_in_the_policy(name: str) -> None:
    named = re.findall(r"`(\w+_(?:share|excess|duty|xids))`", TEXTS[name])
    assert set(named) <= set(Policy.__struct_fields__)


@pytest.mark.e2e
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    asked = [{"record": f"a:b{number}", "expr": query} for number, (_, query) in enumerate(queries())]
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": asked}]}))
    done = subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- how they are written --

RULES = """groups:
  - name: a
    rules:
      - record: job:half:ratio
        expr: >-
          a
          / b
      - alert: New
        expr: >-
          job:half:ratio
          > on (cluster) gpu_efficiency_threshold{name="clock_skew_seconds"}
        for: 2m
        labels: {severity: ticket, team: '{{ or $labels.team "platform" }}'}
"""


@pytest.fixture
def new(tmp_path: Path) -> Alert:
    (tmp_path / "a.yaml").write_text(RULES)
    (alert,) = alerts(tmp_path)
    return alert


def test_a_block_has_the_rule_as_it_is_written_its_record_and_its_thresholds(new: Alert) -> None:
    text = block(new)
    assert "# job:half:ratio\na\n/ b\n\n# New\njob:half:ratio\n> on (cluster)" in text
    assert "| **ticket** | `evaluation_interval` | 2m | 0 | `team=the job's, else platform` |" in text
    assert re.search(r"\| `clock_skew_seconds` \| 30 \| the rule \| E: ", text)


def test_a_threshold_that_a_record_of_another_file_reads_is_in_the_block(tmp_path: Path) -> None:
    large = """expr: 'a < on (cluster) gpu_efficiency_threshold{name="hang_page_gpus"}'"""
    (tmp_path / "a.yaml").write_text(f"groups: [{{name: a, interval: 2m, rules: [{{record: job:large, {large}}}]}}]")
    alert = "{alert: New, expr: job:large > 0, labels: {severity: page, team: a}}"
    (tmp_path / "b.yaml").write_text(f"groups: [{{name: b, interval: 30s, rules: [{alert}]}}]")
    (found,) = alerts(tmp_path)
    assert "| `hang_page_gpus` | 8 | the rule |" in block(found)
    assert "| **page** | 30s |" in block(found)
    assert "job:large > 0\n```" in block(found)
    assert "# job:large" not in block(found)


def test_a_new_alert_gets_the_headings_which_are_empty(new: Alert) -> None:
    assert sections(skeleton(new)) == dict.fromkeys(SECTIONS, "")


def test_words_around_the_block_are_kept(new: Alert) -> None:
    text = skeleton(new).replace("# New\n\n", "# New, mine\n\n") + "Mine.\n"
    assert refreshed(text.replace("300", "299"), new) == text


def test_a_runbook_without_its_marks_is_not_written_over(new: Alert) -> None:
    with pytest.raises(ValueError, match=r"New\.md: needs the lines <!-- from"):
        refreshed("# New\n", new)


def test_two_rules_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(RULES)
    with pytest.raises(ValueError, match="two rules are called New"):
        alerts(tmp_path)
