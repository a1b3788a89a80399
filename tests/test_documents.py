"""Every Markdown page: relative links and their headings exist, and lines of text fit into 120 columns."""

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from tests.each import each

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
GENERATED = {
    "docs/benchmarks.md", "docs/configuration.md", "docs/leaks.md", "docs/metrics.md", "helm/gpu-efficiency/README.md",
}  # fmt: skip
"""Pages that `make docs` writes as a whole."""
GENERATED_BLOCK = re.compile(r"<!-- (?:from |measured: written).*?-->.*?<!-- (?:measured: )?end -->", re.DOTALL)
LONG_LINES = ("CHANGELOG.md", "docs/runbooks/")
"""The record of changes, and runbooks, which quote alerts and rules: not wrapped at this width."""
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_CODE_SPAN = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def pages() -> list[str]:
    """Markdown files of the repository, as git lists them; without git, those outside of hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    found = names or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md")]
    hidden = re.compile(r"(?:^|/)\.")
    return sorted(name for name in found if not hidden.search(name) and (ROOT / name).is_file())


PAGES = pages()


@cache
def text_of(path: Path) -> str:
    """A page without its fenced code."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as code hosts and MkDocs make them; a repeated heading has a number."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(text_of(path)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return frozenset(name if not n else f"{name}-{n}" for name, most in found.items() for n in range(most + 1))


def broken(page: str) -> list[str]:
    """Links of a page to a file or a heading that does not exist."""
    path = ROOT / page
    prose = _CODE_SPAN.sub("", re.sub(r"^(?: {4,}|\t).*$", "", text_of(path), flags=re.MULTILINE))
    return [link for link in _LINK.findall(prose) if not leads(path, unquote(link))]


def leads(page: Path, link: str) -> bool:
    """Whether a link of a page has a target; those of other hosts are not followed."""
    if re.match(r"[a-z][a-z+.-]*:", link):
        return True
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


def too_long(page: str) -> list[str]:
    """Lines of text beyond the width: no code, no table, no picture, nothing generated."""
    text = GENERATED_BLOCK.sub("", text_of(ROOT / page))
    lines = [line for line in text.splitlines() if not re.match(r" {4,}|\t|\s*\||!\[", line)]
    return [line for line in lines if len(line) > WIDTH]


@each("page", PAGES)
def test_relative_links_lead_to_a_file_and_a_heading(page: str) -> None:
    assert broken(page) == []


@each("page", sorted(set(PAGES) - GENERATED))
def test_lines_of_text_fit(page: str) -> None:
    if not page.startswith(LONG_LINES):
        assert too_long(page) == []


def test_a_page_that_is_broken_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page: `x`, 2\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n", encoding="utf-8")
    assert anchors(page) == {"a-page-x-2", "twice", "twice-1"}
    assert leads(page, "#twice-1")
    assert leads(page, "page.md#a-page-x-2")
    assert leads(page, "https://example.org/none.md#none")
    assert not leads(page, "none.md")
    assert not leads(page, "page.md#no-heading")


def test_every_page_of_the_documentation_is_on_its_home_page() -> None:
    home = ROOT / "docs" / "index.md"
    linked = {(home.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(text_of(home))}
    assert sorted(path.name for path in home.parent.glob("*.md") if path not in linked | {home}) == []
