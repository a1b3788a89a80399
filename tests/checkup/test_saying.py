"""Tests the output of install-check: its order, its JSON, its exit status."""

import json

import pytest

from exporter.checkup.base import FAIL, INFO, OK, WARN, Finding, Verdict
from exporter.checkup.report import AREAS, CHECKS, CheckReport, as_json, as_text
from tests.e2e.running import ROOT

LONG = "long " * 40


def report(*findings: Finding) -> CheckReport:
    return CheckReport("1.2.3", "node-1", 1_700_000_000 * 10**9, 0, findings)


def finding(verdict: Verdict, check: str = "ports", area: str = "ports", **more: str) -> Finding:
    return Finding(area, check, verdict, more.get("message", "it was seen"), more.get("do", ""))


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ((), 0),
        ((finding(OK), finding(INFO), finding(WARN)), 0),
        ((finding(OK), finding(FAIL)), 1),
        ((finding(FAIL), finding(FAIL, "source")), 3),
        ((finding(WARN, "source"),), 0),
    ],
)
def test_the_exit_status(findings: tuple[Finding, ...], status: int) -> None:
    assert report(*findings).status == status


def test_the_summary_has_the_worst_first() -> None:
    assert report(finding(OK), finding(WARN), finding(FAIL), finding(FAIL)).summary == (
        "2 things do not work, 1 could be better, 1 is well"
    )
    assert report(finding(FAIL)).summary == "1 thing does not work, 0 are well"
    assert report(finding(OK), finding(OK), finding(INFO)).summary == "2 are well"


def test_the_text_is_by_area_with_what_to_do_below_what_was_said() -> None:
    told = as_text(report(finding(WARN, message="x is shut", do="open x"), finding(OK, "rights", "user", do="nothing")))
    lines = told.splitlines()
    assert lines[0] == "gpu-efficiency 1.2.3 on node-1, as root, 2023-11-14 22:13 UTC"
    assert lines[1] == "1 could be better, 1 is well"
    assert lines.index("User") < lines.index("Addresses")
    place = next(number for number, line in enumerate(lines) if "x is shut" in line)
    assert lines[place].startswith("  warn  ports ")
    assert lines[place + 1].strip() == "do: open x"
    assert "nothing" not in told


def test_what_is_wanted_by_nobody_is_no_command() -> None:
    assert "if wanted: install x" in as_text(report(finding(INFO, do="install x")))


def test_lines_are_as_wide_as_the_terminal_and_coloured_only_when_asked() -> None:
    wide = report(finding(FAIL, message=LONG, do=LONG))
    assert max(map(len, as_text(wide, width=80).splitlines())) <= 80
    assert "\x1b" not in as_text(wide)
    assert "\x1b[31;1mFAIL\x1b[0m" in as_text(wide, colour=True)


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    told = as_text(report(finding(FAIL, message="evil\x1b[2J\x07 words", do="\x1b]0;title\x07")))
    assert "\x1b" not in told
    assert "\x07" not in told


def test_the_json_has_the_keys_that_the_document_names() -> None:
    told = json.loads(as_json(report(finding(FAIL, do="do it"), finding(OK))))
    assert set(told) == {"format", "version", "host", "time", "uid", "status", "summary", "counts", "findings"}
    assert told["counts"] == {"ok": 1, "info": 0, "warn": 0, "fail": 1}
    assert told["findings"][0] == {
        "area": "ports", "check": "ports", "verdict": "fail", "do": "do it",
        "message": "it was seen", "said": "it was seen",
    }  # fmt: skip
    assert (told["status"], told["time"], told["format"]) == (1, 1_700_000_000, 1)
    document = (ROOT / "docs/install-check.md").read_text(encoding="utf-8")
    assert [key for key in told if f"`{key}`" not in document] == []


def test_each_area_has_its_checks_and_a_limit() -> None:
    assert {check.area for check in CHECKS} == set(AREAS)
    assert all(0 < check.seconds <= 30 for check in CHECKS)
    order = [check.name for check in CHECKS]
    assert order.index("nvml") < order.index("source") < order.index("sample") == len(order) - 1
