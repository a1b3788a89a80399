"""docs/supported.md: each row has how it was tested, by what exists, and on which commit; or that it was not run."""

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.documents.blocks import ROOT
from tests.each import each

PAGE = "docs/supported.md"
HEAD = "| part | version | tested | by | commit |"
EACH, BY_HAND = ("run", "stand-in", "recorded"), "by hand"
NOT_RUN = ("declared", "documents", "not run")
_DAY = re.compile(r"([0-9a-f]{7,}), \d{1,2} \w+ 20\d\d")


def rows() -> Iterator[list[str]]:
    """Cells of each row of the tables that have all five columns."""
    for table in (ROOT / PAGE).read_text(encoding="utf-8").split(HEAD)[1:]:
        for line in table.strip().split("\n\n")[0].splitlines()[1:]:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def name(row: list[str]) -> str:
    return " ".join(row[:2])


def exists(quoted: str) -> bool:
    """Whether a test or a target of make is there."""
    if quoted.startswith("tests/"):
        return (ROOT / quoted).exists()
    target = quoted.removeprefix("make ")
    return re.search(rf"(?m)^{re.escape(target)}:", (ROOT / "Makefile").read_text(encoding="utf-8")) is not None


@each("row", list(rows()), ids=name)
def test_a_row_has_what_ran_it_and_on_which_commit(row: list[str]) -> None:
    _, _, tested, by, commit = row
    kind = re.split(r"[:,] | \(|$", tested, maxsplit=1)[0]
    assert kind in {*EACH, BY_HAND, *NOT_RUN}
    quoted = re.findall(r"`([^`]+)`", by)
    assert [each for each in quoted if not exists(each)] == []
    if kind in NOT_RUN:
        assert (by, commit) == ("", "")
    elif kind == BY_HAND:
        assert by
        assert _DAY.fullmatch(commit)
    else:
        assert quoted
        assert commit == "each"


def test_every_row_is_read() -> None:
    _, *tables = (ROOT / PAGE).read_text(encoding="utf-8").split(HEAD)
    lines = [line for line in "".join(tables).splitlines() if line.startswith("| ")]
    assert len(list(rows())) == len(lines) > 40


def test_the_commits_are_of_this_history() -> None:
    commits = {found[1] for row in rows() if (found := _DAY.fullmatch(row[4]))}
    assert commits
    for commit in commits:
        words = ["git", "-C", f"{ROOT}", "merge-base", "--is-ancestor", commit, "HEAD"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 128:
            pytest.skip("needs git's whole history")
        assert done.returncode == 0, commit
