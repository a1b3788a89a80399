"""Prepare the documentation site: the pages of docs/ and every file they link to, as MkDocs wants them.

Owns three things that MkDocs lacks: its navigation is read from docs/index.md, links that leave docs/ lead to pages
made of those files, and lists need no blank line before them. `make site` runs it, then MkDocs.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
HOME = "docs/index.md"
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^()\s]+(?:\([^()\s]*\))?)(?=\))")
_TITLED = re.compile(r"\[([^\]]+)\]\(([^()\s#]+)\)")
_LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".py": "python", ".sh": "bash", ".json": "json"}
_FOLDERS = {"index.md", "README.md"}
SETTINGS: dict[str, Any] = {
    "site_name": "gpu-efficiency-exporter",
    "use_directory_urls": False,  # so that pages can be read from disk
    "theme": {
        "name": "material",
        "font": False,  # nothing is fetched from other hosts
        "features": ["navigation.indexes", "navigation.top", "content.code.copy", "search.highlight", "toc.follow"],
        "palette": [
            {
                "media": f"(prefers-color-scheme: {scheme})", "scheme": name,
                "toggle": {"icon": f"material/{icon}", "name": f"Show {other} colours"},
            }
            for scheme, name, icon, other in (
                ("light", "default", "weather-night", "dark"), ("dark", "slate", "weather-sunny", "light"),
            )
        ],
    },
    "plugins": ["search"],
    "markdown_extensions": [
        "tables",
        "pymdownx.superfences",
        "pymdownx.highlight",
        {"toc": {"permalink": True, "slugify": "SLUGIFY"}},
    ],
    "extra": {"generator": False},
    "extra_css": ["site.css"],
    "validation": {"anchors": "warn", "unrecognized_links": "warn", "absolute_links": "warn"},
}  # fmt: skip
_STYLE = """.md-grid { max-width: 84rem; }
.md-typeset table:not([class]) { font-size: .64rem; }
.md-typeset table:not([class]) th, .md-typeset table:not([class]) td { min-width: 0; padding: .5em .8em; }
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; }
"""


def target_of(page: str, link: str) -> str:
    """Path below the repository that a relative link of a page means; empty for other hosts and for the page itself."""
    name = link.partition("#")[0]
    if not name or re.match(r"[a-z][a-z+.-]*:", link):
        return ""
    path = (ROOT / page).parent.joinpath(name).resolve()
    if path.is_dir():
        path = next((path / each for each in sorted(_FOLDERS) if (path / each).is_file()), path)
    return str(path.relative_to(ROOT))


def place_of(path: str) -> str:
    """Where a file of the repository is on the site; what is not of docs/ is a page of its own."""
    if (ROOT / path).is_dir():
        path = f"{path}/index.md"
    # MkDocs leaves out what begins with a dot.
    place = path.removeprefix("docs/") if path.startswith("docs/") else "files/" + re.sub(r"(^|/)\.", r"\1", path)
    return place if is_copied(path) or place.endswith(".md") else f"{place}.md"


def is_copied(path: str) -> bool:
    """Whether the site has the file as it is: a picture, a schema, the man page."""
    return path.endswith((".png", ".svg", ".1", ".schema.json"))


def text_of(path: str) -> str:
    """A page of the site: Markdown as it is, a folder as a list of its files, any other file as code."""
    found = ROOT / path
    if found.is_dir():
        files = sorted(each.name for each in found.iterdir() if each.is_file())
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in files)
    text = found.read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n```{_LANGUAGES.get(found.suffix, '')}\n{text}\n```\n"


def links(path: str) -> Iterator[str]:
    """Targets of a page's links; of a folder's list, its files."""
    if path.endswith(".md"):
        yield from filter(
            None, (target_of(path, link) for part in prose(text_of(path)) for link in _LINK.findall(part))
        )
    elif (ROOT / path).is_dir():
        yield from (f"{path}/{each.name}" for each in sorted((ROOT / path).iterdir()) if each.is_file())


def prose(text: str) -> Iterator[str]:
    """Yield a page without its fenced code."""
    yield from _FENCE.split(text)[::2]


def rewritten(path: str) -> str:
    """Give a page's text as MkDocs wants it: links to the site's places, a blank line before each list."""
    parts = _FENCE.split(text_of(path))
    base = f"{path}/index.md" if (ROOT / path).is_dir() else path
    here = Path(place_of(path)).parent

    def moved(found: re.Match[str]) -> str:
        target = target_of(base, found[1])
        _, mark, anchor = found[1].partition("#")
        return f"{relpath(place_of(target), here)}{mark}{anchor}" if target else found[1]

    if not path.endswith(".md") and not (ROOT / path).is_dir():
        return "".join(parts)
    parts[::2] = (_LINK.sub(moved, _spaced(part)) for part in parts[::2])
    return "".join(parts)


def _spaced(part: str) -> str:
    """A list that follows a line of text gets the blank line that Python-Markdown needs."""
    return re.sub(r"(?m)^(?!\s*(?:[-*]|\d+\.) |[ \t]|\s*$)(.+)\n(?=(?:[-*]|\d+\.) )", r"\1\n\n", part)


def reachable() -> tuple[list[str], list[str]]:
    """All pages and all other files (pictures, the man page) that are linked from docs/, directly or not."""
    pages, others = [HOME], dict[str, None]()
    for page in pages:
        for target in links(page):
            if is_copied(target):
                others[target] = None
            elif target not in pages:
                pages.append(target)
    return pages, list(others)


def navigation(pages: list[str]) -> list[Any]:
    """Sections and titles of docs/index.md; a page of a folder's contents brings the folder's other pages."""
    found: list[Any] = [{"Home": "index.md"}]
    for section in re.split(r"(?m)^## ", (ROOT / HOME).read_text(encoding="utf-8"))[1:]:
        title, _, body = section.partition("\n")
        rows = [(_capital(name), target_of(HOME, to)) for name, to in _TITLED.findall(body)]
        found.append({title: [_entry(name, path, pages) for name, path in rows]})
    return found


def _entry(name: str, path: str, pages: list[str]) -> dict[str, Any]:
    folder = path if (ROOT / path).is_dir() else str(Path(path).parent)
    if not folder.startswith("docs/") or (path != folder and Path(path).name not in _FOLDERS):
        return {name: place_of(path)}
    others = sorted(page for page in pages if page.startswith(f"{folder}/") and page != path)
    return {name: [place_of(path), *map(place_of, others)]}


def _capital(name: str) -> str:
    text = re.sub(r"[`*]", "", name)
    return text[:1].upper() + text[1:]


def write(folder: Path) -> None:
    """Write the pages into `folder`/pages and the settings into `folder`/mkdocs.yml."""
    pages, others = reachable()
    shutil.rmtree(folder, ignore_errors=True)
    for page in pages:
        out = folder / "pages" / place_of(page)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(rewritten(page), encoding="utf-8")
    for other in others:
        out = folder / "pages" / place_of(other)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / other, out)
    (folder / "pages" / "site.css").write_text(_STYLE)
    settings = SETTINGS | {"docs_dir": "pages", "site_dir": "html", "nav": navigation(pages)}
    slug = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120).replace("SLUGIFY", slug)
    (folder / "mkdocs.yml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
