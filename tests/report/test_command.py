"""Errors of the command: one line, what to do, and the same exit status as other commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.commands import run
from tests.report.stated import owner, stated
from tests.report.test_sums_stores import store

NOBODY = "--prometheus http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "status", "hint"),
    [
        (NOBODY, 2, "give a job's id, or --compare and two"),
        (f"7 --compare 7 8 {NOBODY}", 2, "and not both"),
        (f"7 --json --markdown {NOBODY}", 2, "only one of --json, --markdown"),
        ("7 --node http://127.0.0.1:9", 1, "no node answered: http://127.0.0.1:9 cannot be reached"),
        (f"7 --store a {NOBODY}", 2, "--prometheus, or --store and --node"),
        (f"7 --wait 5 {NOBODY}", 2, "--prometheus, or --store and --node"),
        ("7 --store a --compare 7 8", 2, "and not both"),
        ("--compare 7 8 --line --store a", 2, "--short is of one job"),
        ("--compare 7 8 --short --store a", 2, "--short is of one job"),
        ("7 --target-emfu 60", 2, "no ratio between 0 and 1, such as 0.6"),
        ("7 --target-emfu 0", 2, "no ratio"),
        ("7 --node http://127.0.0.1:9 --ca-file absent.pem", 2, "absent.pem: no certificate can be read of it"),
        (f"7 --at yesterday {NOBODY}", 2, "neither Unix seconds nor like 2026-01-31T12:00"),
        (f"7 --since soon {NOBODY}", 2, "--since"),
        (f"7 --header nonsense {NOBODY}", 2, "is not 'Name: value'"),
        (f"7 {NOBODY}", 1, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_errors(words: str, status: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found, out, err = run(words)
    assert (found, out) == (status, "")
    assert hint in err


def test_a_time_may_have_a_zone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "headers").write_text("X-Scope-OrgID: a\n")
    for at in ("2026-01-31", "2026-01-31T12:00+02:00", "1767225600"):
        assert run(f"7 --at {at} --header @{tmp_path}/headers {NOBODY}")[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", ["7", "7 --markdown", "--all", "--all --markdown"])
def test_an_output_that_is_not_utf_8_lacks_characters_and_nothing_else(tmp_path: Path, words: str) -> None:
    """As on a terminal or in a file of an old locale: names and bars have characters that its encoding lacks."""
    jobs = [stated(owner=owner(job_id=job, name="Vorf\u00fchrung", account="\u65e5\u672c")) for job in ("7", "8")]
    line = [*words.split(), "--store", f"{store(tmp_path / 'history.db', *jobs)}", "--at", "2026-01-02"]
    outputs = [
        subprocess.run(
            [sys.executable, "-m", "exporter", "report", *line],
            env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, check=True,
        )
        for encoding in ("utf-8", "ascii")
    ]  # fmt: skip
    whole, reduced = (each.stdout for each in outputs)
    assert not whole.isascii()
    assert reduced == whole.decode("utf-8").encode("ascii", errors="replace")
    assert [each.stderr for each in outputs] == [b"", b""]
