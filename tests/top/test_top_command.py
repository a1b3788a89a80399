"""Tests the command without a live view: one screen as text, exit statuses, and messages if it cannot run live.

The live view itself is in `tests/e2e/test_top.py`, on a real terminal.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from exporter.cli import main
from exporter.web.app import create_app
from tests.e2e.running import ROOT, environment
from tests.top.nodes import snapshot
from tests.web.serving import served


@pytest.fixture(name="url", scope="module")
def _url() -> Iterator[str]:
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with served(app) as site:
        yield f"http://127.0.0.1:{site.ports[0]}"


def ran(*words: str) -> int:
    try:
        return main(["top", *words])
    except SystemExit as end:
        return int(end.code or 0)


def test_once_says_all_and_its_status_is_0(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--once", "--url", url) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "\x1b" not in told.out
    assert all(line == line.rstrip() for line in told.out.splitlines())
    assert sum("H100" in line for line in told.out.splitlines()) >= 1
    rows = [line for line in told.out.splitlines() if " active " in line]
    assert [row.split()[0] for row in rows[:2]] == ["0", "1"]
    for words in ("SIMULATED", "allocated", "41001", "ada", "memory bound"):
        assert words in told.out


def test_once_may_be_of_jobs_of_the_hour_and_filtered(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--once", "--url", url, "--jobs", "--hour", "--filter", "ada") == 0
    out = capsys.readouterr().out
    assert "41001" in out
    assert "grace" not in out
    assert "MODEL" not in out


def test_a_node_that_does_not_answer_is_status_1_and_the_others_are_printed(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("--once", "--url", url, "--url", "http://ada:s3cret@127.0.0.1:1") == 1
    told = capsys.readouterr()
    assert "41001" in told.out
    assert "NOT RESPONDING" in told.out
    assert "127.0.0.1:1" in told.err
    assert "refused" in told.err
    assert "s3cret" not in told.out + told.err


def test_output_that_is_no_terminal_gets_one_look_and_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--url", url) == 0
    told = capsys.readouterr()
    assert "41001" in told.out
    assert "no terminal: this is one look, as --once gives it" in told.err


@pytest.mark.parametrize(
    "words",
    [
        ("--url", "ftp://x"),
        ("--url", ""),
        ("--header", "no colon"),
        ("--header", "@absent"),
        ("--ca-file", "absent.pem"),
        ("--interval", "0.1"),
    ],
)
def test_wrong_usage_is_status_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--once", *words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err


def test_once_needs_no_textual_and_does_not_import_it(url: str) -> None:
    code = (
        "import sys; from exporter.cli import main; status = main(['top', '--once', '--url', sys.argv[1]]);"
        " sys.exit(status or ('textual' in sys.modules))"
    )
    words = [sys.executable, "-c", code, url]
    done = subprocess.run(words, env=environment(), cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_locale_without_unicode_gets_ascii(url: str) -> None:
    words = [sys.executable, "-m", "exporter", "top", "--once", "--url", url]
    env = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.isascii()
    assert b"* active" in done.stdout
