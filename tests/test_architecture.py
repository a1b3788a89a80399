"""The pages that lead through the code name files that exist, and the architecture page names every package."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "exporter"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ARCHITECTURE, *sorted((ROOT / "docs" / "contributing").glob("*.md"))]
_PATH = re.compile(r"(?<![\w/.<])(?:[a-z_][\w-]*/)+(?:[\w-]+\.\w+)?|(?<![\w/.<`])`?([a-z_]\w*\.py)\b")
_LINK = re.compile(r"\]\(([^)#]+)")


def named(page: Path) -> set[str]:
    """Files and folders that a page names, beginning at the repository or at the package."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))
    return {match.group(1) or match.group(0) for match in _PATH.finditer(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    allowed = set(re.findall(r"<!-- made up: (\S+) -->", page.read_text(encoding="utf-8")))
    missing = {path for path in named(page) if not any((root / path).exists() for root in (ROOT, PACKAGE))}
    assert missing - allowed == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_architecture_page_names_every_package_and_module_of_the_top() -> None:
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert there - named(ARCHITECTURE) == set()


def test_of_the_core_the_simulation_may_import_the_model_alone() -> None:
    """A module that is new in the core must be added to the contract that the linter of imports enforces."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (each for each in settings["contracts"] if each.get("source_modules") == ["exporter.simulate"])
    core = {f"exporter.core.{path.stem}" for path in (PACKAGE / "core").glob("*.py") if path.stem != "__init__"}
    assert core - set(contract["forbidden_modules"]) == {"exporter.core.model"}
