"""docs/faq.md: its queries ask for what exists, its commands are real, its links lead somewhere."""

import re
from pathlib import Path

import pytest

from exporter.cli import _COMMANDS
from exporter.config import Config
from tests.alerts.lint import faults_of_query, known_to, rules

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("faq.md", "prometheus.md", "configuration.md")
FAQ = (DOCS / "faq.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```promql\n(.+?)\n```", FAQ, re.DOTALL)
KNOWN = known_to(rules())


def anchor(heading: str) -> str:
    """As code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_exists(query: str) -> None:
    assert faults_of_query(query, KNOWN) == []


def test_every_question_is_answered_and_there_are_enough_queries() -> None:
    questions = re.split(r"^## (.+)\n", FAQ, flags=re.MULTILINE)[1:]
    assert len(questions) // 2 >= 16
    assert all(len(answer.strip()) > 80 for answer in questions[1::2])
    assert len(QUERIES) >= 14


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_real(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    said = set(re.findall(r"`gpu-efficiency ([a-z][a-z-]+)", text))
    assert said <= {name for name, *_ in _COMMANDS} | {"install-check"}
    assert said


def test_settings_it_names_exist() -> None:
    found = set(re.findall(r"`(web|policy|sampling|kubernetes)\.(\w+)", FAQ))
    assert found >= {("web", "open_page"), ("web", "config_file"), ("policy", "job_linger_seconds")}
    for section, key in found:
        assert hasattr(getattr(Config(), section), key), f"{section}.{key}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_page_and_a_heading(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", text):
        assert not target or target.startswith("https://") or (DOCS / target).exists(), target
    for target, heading in re.findall(r"\]\(([^)#]*\.md)?#([^)]*)\)", text):
        other = (DOCS / (target or page)).read_text(encoding="utf-8")
        assert heading in {anchor(each) for each in re.findall(r"^#+ (.+)$", other, re.MULTILINE)}, (target, heading)
