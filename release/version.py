"""Sets the version of the next release everywhere, or checks it: `make version VERSION=1.2.0`.

    python -m release.version                 # whether all places agree with exporter/__init__.py
    python -m release.version 1.2.0           # set it, and close the section "Unreleased" of CHANGELOG.md
    python -m release.version --tag v1.2.0    # whether that tag is this version
    python -m release.version --notes         # this version's section of CHANGELOG.md

The version is declared in `exporter/__init__.py`; the other places are read by programs that cannot import it.
"""

import argparse
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from exporter import __version__

ROOT = Path(__file__).resolve().parents[1]
_NUMBER = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
_EXAMPLES = rf"(?:gpu-efficiency(?:-exporter)?(?::|, tag: )|gpu_efficiency_exporter-|`CREATED` \| `)({_NUMBER})"
PLACES = {
    "exporter/__init__.py": rf'__version__ = "({_NUMBER})"',
    "pyproject.toml": rf'(?m)^version = "({_NUMBER})"',
    "Dockerfile": rf"(?m)^ARG VERSION=({_NUMBER})",
    "helm/gpu-efficiency/Chart.yaml": rf"(?m)^appVersion: ({_NUMBER})",
    "docs/install.md": _EXAMPLES,
    "docs/image.md": _EXAMPLES,
    "docs/gpu-efficiency.1": rf"gpu\\-efficiency\\-exporter ({_NUMBER})",
}
"""Files that have the version, and where in them: the first group of each match."""
UNRELEASED = "## Unreleased\n"


def disagreements(root: Path, version: str) -> list[str]:
    """Places that have another version, or none."""
    found = {name: set(re.findall(pattern, (root / name).read_text("utf-8"))) for name, pattern in PLACES.items()}
    return [f"{name}: {', '.join(sorted(versions)) or 'none'}" for name, versions in found.items()
            if versions != {version}]  # fmt: skip


def set_version(root: Path, version: str, day: str) -> None:
    """Write the version into every place, and the heading of its section, with the day, into the change log."""
    for name, pattern in PLACES.items():
        text = (root / name).read_text(encoding="utf-8")
        written = re.sub(pattern, lambda match: match[0].replace(match[1], version), text)
        (root / name).write_text(written, encoding="utf-8")
    log = root / "CHANGELOG.md"
    text = log.read_text(encoding="utf-8")
    log.write_text(text.replace(UNRELEASED, f"{UNRELEASED}\n## {version} - {day}\n", 1), encoding="utf-8")


def notes(log: str, version: str) -> str:
    """Return a version's section of the change log, without its heading; empty if it has none."""
    for section in log.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        if heading.split(" ")[0] == version:
            return f"{body.strip()}\n" if body.strip() else ""
    return ""


def main(arguments: list[str]) -> int:
    """Return 0 if what was asked for is done or true, 1 with the reason on standard error otherwise."""
    parser = argparse.ArgumentParser(prog="python -m release.version")
    parser.add_argument("version", nargs="?", help="the version to set, such as 1.2.0")
    parser.add_argument("--tag", help="a tag that must be this version's")
    parser.add_argument("--notes", action="store_true", help="print this version's section of CHANGELOG.md")
    asked = parser.parse_args(arguments)
    problems = []
    if asked.version:
        if not re.fullmatch(_NUMBER, asked.version):
            problems = [f"{asked.version} is no version: write MAJOR.MINOR.PATCH, such as 1.2.0 or 1.2.0rc1"]
        else:
            set_version(ROOT, asked.version, f"{datetime.now(UTC):%Y-%m-%d}")
            print("Now run `make docs`, read the diff, and commit.")
    elif asked.notes:
        said = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
        print(said, end="")
        problems = [] if said else [f"CHANGELOG.md has no section {__version__}: `make version VERSION={__version__}`"]
    else:
        problems = disagreements(ROOT, __version__)
        if asked.tag and asked.tag != f"v{__version__}":
            problems.append(f"the tag {asked.tag} is not v{__version__}, the version in exporter/__init__.py")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
