"""The documentation site: built by MkDocs itself, whole, and without a request to another host."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from alerts.build_runbooks import alerts
from dashboards.build import boards
from docs.build_site import ROOT, place_of, rewritten, target_of, write
from exporter.core.leaks import LEAK_NAMES
from exporter.core.metrics import METRICS

MKDOCS = ROOT / ".venv/site/bin/mkdocs"


def test_a_link_that_leaves_the_pages_leads_to_a_page_made_of_the_file() -> None:
    assert target_of("docs/install.md", "../helm/gpu-efficiency/README.md#a") == "helm/gpu-efficiency/README.md"
    assert target_of("docs/install.md", "https://example.org/") == target_of("docs/install.md", "#here") == ""
    assert place_of("helm/gpu-efficiency/README.md") == "files/helm/gpu-efficiency/README.md"
    assert place_of("examples/prometheus") == "files/examples/prometheus/index.md"
    assert place_of("alerts/jobs.yaml") == "files/alerts/jobs.yaml.md"
    assert place_of(".github/CODEOWNERS") == "files/github/CODEOWNERS.md"
    assert place_of("docs/pictures/page.png") == "pictures/page.png"
    assert "](files/examples/prometheus/index.md)" in rewritten("docs/prometheus.md")
    assert rewritten("alerts/jobs.yaml").startswith("# alerts/jobs.yaml\n\n```yaml\n")


def test_lists_get_the_blank_line_that_python_markdown_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs.build_site.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("# A\nText:\n- one\n  more\n- two\n```\nno:\n- list\n```\n")
    assert rewritten("docs/a.md") == "# A\nText:\n\n- one\n  more\n- two\n```\nno:\n- list\n```\n"


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (MKDOCS.parents[1] / ".installed").exists():
        pytest.skip("needs MkDocs")
    folder = tmp_path_factory.mktemp("site")
    write(folder)
    command = [f"{MKDOCS}", "build", "--quiet", "--strict", "--config-file", f"{folder}/mkdocs.yml"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def references(page: Path) -> Iterator[str]:
    """What a page's links lead to and what it loads, of this site."""
    for found in re.findall(r'(?:href|src)="([^"]*)"', page.read_text(encoding="utf-8")):
        name = unquote(found.partition("#")[0].partition("?")[0])
        if name and not re.match(r"[a-z]+:", name):
            yield name


@pytest.mark.slow
def test_all_that_is_linked_is_there(built: Path) -> None:
    pages = [page for page in built.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 80
    linked = {(page.parent, name) for page in pages for name in references(page)}
    assert [f"{folder.name}: {name}" for folder, name in sorted(linked) if not (folder / name).exists()] == []


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(built: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//')
    assert [page.name for page in built.rglob("*.html") if loads.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_every_metric_leak_alert_and_board_is_found_by_the_search(built: Path) -> None:
    index = json.loads((built / "search/search_index.json").read_text(encoding="utf-8"))
    text = re.sub(r"<[^>]+>", "", " ".join(f"{each['title']} {each['text']}" for each in index["docs"]))
    wanted = [row.name for row in METRICS] + list(LEAK_NAMES) + [each.name for each in alerts()]
    wanted += [board.title for board in boards()]
    assert [name for name in wanted if name not in text] == []


@pytest.mark.slow
def test_every_page_of_the_documentation_can_be_reached_by_the_navigation(built: Path) -> None:
    home = (built / "index.html").read_text(encoding="utf-8")
    left = [path.stem for path in (ROOT / "docs").glob("*.md") if f'href="{path.stem}.html"' not in home]
    assert [name for name in left if name != "index"] == []
