"""Compare what two checkouts of this project say to the world, byte for byte.

    python tests/compat/compare_checkouts.py OLD_CHECKOUT NEW_CHECKOUT [--python PATH] [--only REGEX]

Commands, pages and files of both are asked for in processes of their own, through `python -m exporter` and HTTP alone:
modules may be others in the new one. What differs is shown, and lies whole in `.cache/compat/last`; exit status 1.
Differences that are meant stand in `meant.toml`. What the old one said is kept in `.cache/compat`, and asked once.

Owns the cache, the comparison and what is printed. What is asked is in `cases.py`, what is scrubbed in `plays.py`.
"""

import argparse
import gzip
import hashlib
import html
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, f"{ROOT}")
from tests.compat.cases import CASES  # noqa: E402  found once the root is on the path
from tests.compat.checkouts import Checkout, DriverError, close_spawners  # noqa: E402  likewise
from tests.compat.plays import HERE, Inputs, Outputs, Play  # noqa: E402  likewise

BROKEN = "the case broke off"
CACHE = ROOT / ".cache/compat"
_MOST_KEPT = 2
"""Old checkouts, or states of what is asked of them."""
_NOT_ASKED = frozenset({"compare_checkouts.py", "test_resume.py"})
"""What has no part in the outputs."""
_SHOWN = 40
"""Lines of each difference."""
_SPACES = re.compile(r"\s+")
_HASHES = re.compile(r"'sha256-[^']+'|(?<=data-version=\")\w+")
_BETWEEN = re.compile(r"(?<=>) | (?=<)")


class Meant(NamedTuple):
    """A difference that is meant: `old` becomes `new` in what the old one said, before both are compared."""

    old: re.Pattern[str]
    new: str
    reason: str
    where: re.Pattern[str]
    """Outputs that it may change: `case: output`."""
    both: bool
    """Whether the new one's output is changed, too: what matches is compared on neither side."""


class Difference(NamedTuple):
    """An output that is not the same."""

    where: str
    old: str | None
    new: str | None
    formal: bool
    """No reader would notice: white space, entities and hashes of a page, the order of keys in JSON, a number's 13th
    digit."""


def meant_in(file: Path) -> list[Meant]:
    """The table of differences that are meant."""
    rows = tomllib.loads(file.read_text(encoding="utf-8")).get("meant", [])
    wrong = [
        row for row in rows if not {"old", "new", "reason"} <= row.keys() <= {"old", "new", "reason", "where", "both"}
    ]
    if wrong:
        raise SystemExit(f"{file}: a row has old, new and reason, and may have where and both: {wrong[0]}")
    return [
        Meant(
            re.compile(row["old"], re.MULTILINE),
            row["new"],
            row["reason"],
            re.compile(row.get("where", "")),
            "both" in row,
        )
        for row in rows
    ]


def digest(paths: Iterable[Path]) -> str:
    """Of the files' names and contents."""
    told = hashlib.sha256()
    for path in sorted(paths):
        told.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return told.hexdigest()[:12]


def name_of(checkout: Checkout) -> str:
    """Of what it said: the commit, and what the package really holds."""
    words = ["git", "-C", f"{checkout.path}", "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(words, check=False, capture_output=True, text=True).stdout.strip() or "no-commit"
    package = [path for path in (checkout.path / "exporter").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    asked = [path for path in HERE.rglob("*") if path.suffix in {".py", ".gz"} and path.name not in _NOT_ASKED]
    return f"{commit}-{digest(package)}-{digest(asked)}"


class Comparison:
    """Both checkouts, and what is known of them."""

    def __init__(self, old: Checkout, new: Checkout, scratch: Path) -> None:
        self._old, self._new, self._scratch = old, new, scratch
        self._kept = CACHE / name_of(old)
        self._kept.mkdir(parents=True, exist_ok=True)
        self._kept.touch()
        for stale in sorted(CACHE.glob("*-*-*"), key=lambda path: path.stat().st_mtime)[:-_MOST_KEPT]:
            shutil.rmtree(stale, ignore_errors=True)
        self._inputs = Inputs(old, self._kept / "inputs")
        self._versions = {checkout: _version(checkout, scratch) for checkout in (old, new)}
        self.asked_old = 0
        self._lock = threading.Lock()

    def outputs(self, case: str) -> tuple[Outputs, Outputs]:
        """What the old one says, or has said, and what the new one says; a case that breaks is an output of its own."""
        return _guarded(lambda: self._of_old(case)), _guarded(lambda: self._played(self._new, case, "new"))

    def _of_old(self, case: str) -> Outputs:
        file = self._kept / f"{case}.json.gz"
        if file.exists():
            kept: Outputs = json.loads(gzip.decompress(file.read_bytes()))
            return kept
        found = self._played(self._old, case, "old")
        part = file.with_suffix(".part")
        part.write_bytes(gzip.compress(json.dumps(found).encode(), 1))
        part.replace(file)
        with self._lock:
            self.asked_old += 1
        return found

    def _played(self, checkout: Checkout, case: str, side: str) -> Outputs:
        folder = self._scratch / side / case
        play = Play(checkout, folder, self._inputs, self._versions[checkout])
        CASES[case](play)
        shutil.rmtree(folder)
        return play.outputs


def _guarded(play: Callable[[], Outputs]) -> Outputs:
    try:
        return play()
    except (DriverError, OSError, http.client.HTTPException, KeyError, ValueError, subprocess.SubprocessError) as err:
        return {BROKEN: "".join(traceback.format_exception(err))}


def _version(checkout: Checkout, folder: Path) -> str:
    """Its own, and a look whether it is this checkout that answers."""
    found = checkout.imported(folder)
    if found.parent != checkout.path / "exporter":
        raise SystemExit(f"{checkout.path}: {found} is imported instead")
    print(f"{checkout.path}: {found}")  # noqa: T201  so that nobody compares a checkout with itself unawares
    return checkout.version(folder)


def differences(
    case: str, old: Mapping[str, str], new: Mapping[str, str], meant: Sequence[Meant]
) -> Iterator[Difference]:
    """What is not the same, in the order of the outputs."""
    for name in dict.fromkeys([*old, *new]):
        where, before, after = f"{case}: {name}", old.get(name), new.get(name)
        for row in meant:
            if before is not None and row.where.search(where):
                before = row.old.sub(row.new, before)
            if after is not None and row.both and row.where.search(where):
                after = row.old.sub(row.new, after)
        if before != after or name == BROKEN:
            yield Difference(where, before, after, _only_form(before, after))


def _only_form(before: str | None, after: str | None) -> bool:
    if before is None or after is None:
        return False
    if _HASHES.sub("", before) == _HASHES.sub("", after):
        return True
    if "<html" in before.lower() and "<html" in after.lower():
        return _page(before) == _page(after)
    (head, one), (other_head, other) = (_json(text) for text in (before, after))
    return head == other_head and one is not None and one == other


def _page(text: str) -> str:
    """Without what is no matter to a browser; a page's hashes follow from its other parts."""
    return _BETWEEN.sub("", _SPACES.sub(" ", html.unescape(_HASHES.sub("(hash)", text)))).strip()


def _json(text: str) -> tuple[str, object]:
    """What stands before an object, and the object; None: there is none."""
    head, brace, rest = text.partition("\n{")
    try:
        return head, json.loads(brace + rest, parse_float=lambda digits: float(f"{float(digits):.12g}"))
    except ValueError:
        return text, None


def diff(difference: Difference) -> str:
    """Its first lines."""
    if difference.old is None or difference.new is None:
        said = difference.new or difference.old or ""
        why = f":\n{said[-1500:]}" if difference.where.endswith(BROKEN) else ""
        return f"  only the {'new' if difference.old is None else 'old'} one says this{why}"
    old, new = (_lines(text) for text in (difference.old, difference.new))
    lines = list(islice(unified_diff(old, new, "old", "new", n=1, lineterm=""), _SHOWN + 1))
    more = ["..."] if len(lines) > _SHOWN else []
    return "\n".join([f"  {line[:400]}" for line in lines[:_SHOWN]] + more)


def _lines(text: str) -> list[str]:
    """JSON in one line, and pages in few, are cut where a person would."""
    return text.replace(',"', ',\n"').replace("><", ">\n<").split("\n")


def keep(found: Sequence[Difference]) -> None:
    """Lay both texts of each difference into a folder, for `diff -r`."""
    shutil.rmtree(CACHE / "last", ignore_errors=True)
    for number, each in enumerate(found):
        for side, text in (("old", each.old), ("new", each.new)):
            if text is not None:
                name = re.sub(r"[^\w.-]+", "_", each.where)[:120]
                path = CACHE / "last" / side / f"{number:03}-{name}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 1: something differs that is not meant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("new", type=Path, metavar="NEW_CHECKOUT")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="with all packages; default: this one"
    )
    parser.add_argument("--only", type=re.compile, default="", metavar="REGEX", help="only cases with such a name")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cases at once; 2")
    parser.add_argument("--strict", action="store_true", help="differences of form count, too")
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    args = parser.parse_args(argv)
    chosen = [case for case in CASES if re.search(args.only, case)]
    if args.list:
        print("\n".join(chosen))  # noqa: T201
        return 0
    return _compare(args, chosen)


def _compare(args: argparse.Namespace, chosen: Sequence[str]) -> int:
    began, meant = time.monotonic(), meant_in(HERE / "meant.toml")
    python = args.python.absolute()  # not resolved: a virtual environment's is a link
    old, new = (Checkout(path.resolve(), python) for path in (args.old, args.new))
    found: list[Difference] = []
    count = 0
    with tempfile.TemporaryDirectory(prefix="compat-") as made, ThreadPoolExecutor(args.jobs) as pool:
        comparison = Comparison(old, new, Path(made).resolve())
        for case, (before, after) in zip(chosen, pool.map(comparison.outputs, chosen), strict=True):
            count += len(before)
            for each in differences(case, before, after, meant):
                found.append(each)
                if args.strict or not each.formal:
                    print(f"\n{each.where}\n{diff(each)}", flush=True)  # noqa: T201
    close_spawners()
    keep(found)
    counted = [each for each in found if args.strict or not each.formal]
    formal = [each.where for each in found if each not in counted]
    if formal:
        print(f"\n{len(formal)} differ in form alone, which no reader notices: {'; '.join(formal)}")  # noqa: T201
    print(  # noqa: T201
        f"\n{len(chosen)} cases, {count} outputs, {len(counted)} differ; {comparison.asked_old} cases were new to the"
        f" cache of {name_of(old)}; {time.monotonic() - began:.0f} s"
    )
    return 1 if counted else 0


if __name__ == "__main__":
    sys.exit(main())
