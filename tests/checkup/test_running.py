"""Tests run_checks: an exception and a timeout become findings, and earlier findings are kept."""

import threading
from collections.abc import Iterator

import pytest

from exporter.checkup.base import (
    FAIL,
    INFO,
    OK,
    WARN,
    Check,
    CheckContext,
    Finding,
    Findings,
    always,
    run_checks,
    split_advice,
)
from exporter.config import Config
from tests.waiting import PATIENCE

HERE = CheckContext(config=Config())


def well(_here: CheckContext, _before: Findings) -> Iterator[Finding]:
    yield Finding("ports", "well", OK, "all is well")


def breaks(_here: CheckContext, _before: Findings) -> Iterator[Finding]:
    yield Finding("ports", "first", OK, "this was seen")
    raise ZeroDivisionError("by whom?")


def test_a_check_that_breaks_is_a_finding_and_neither_an_end_nor_a_loss() -> None:
    found = run_checks((Check("ports", "breaks", breaks), Check("ports", "well", well)), HERE)
    assert [(one.check, one.verdict) for one in found] == [("first", OK), ("breaks", WARN), ("well", OK)]
    assert "ZeroDivisionError: by whom?" in found[1].message
    assert "report" in found[1].do


def test_what_the_configuration_cannot_do_without_fails_when_it_breaks() -> None:
    (_, broken) = run_checks((Check("ports", "breaks", breaks, needed=always),), HERE)
    assert broken.verdict is FAIL


def test_a_check_that_hangs_is_given_up_and_the_others_are_made() -> None:
    over = threading.Event()

    def hangs(_here: CheckContext, _before: Findings) -> Iterator[Finding]:
        over.wait(PATIENCE)
        yield Finding("ports", "late", OK, "too late")

    try:
        found = run_checks((Check("ports", "hangs", hangs, seconds=0.02), Check("ports", "well", well)), HERE)
    finally:
        over.set()
    assert [(one.check, one.verdict) for one in found] == [("hangs", WARN), ("well", OK)]
    assert found[0].message == "gave no answer within 0.02 s"


def test_a_check_knows_what_was_found_before_it_and_the_watcher_what_is_looked_at() -> None:
    def counts(_here: CheckContext, before: Findings) -> Iterator[Finding]:
        yield Finding("ports", "counts", INFO, f"{len(before)} before")

    told: list[str] = []
    found = run_checks((Check("ports", "well", well), Check("files", "counts", counts)), HERE, told.append)
    assert found[-1].message == "1 before"
    assert told == ["ports: well", "files: counts"]


def test_no_finding_tells_the_password_in_an_address() -> None:
    def tells(_here: CheckContext, _before: Findings) -> Iterator[Finding]:
        yield Finding("ports", "tells", WARN, "http://ada:lovelace@host/x is closed", "ask http://ada:lovelace@host/y")

    (found,) = run_checks((Check("ports", "tells", tells),), HERE)
    assert "lovelace" not in found.message + found.do
    assert "@host/x is closed" in found.message


@pytest.mark.parametrize(
    ("words", "said", "do"),
    [
        ("x is not there: install y, or set z", "x is not there", "install y, or set z"),
        ("x is not there; try `y`", "x is not there", "try `y`"),
        ("x is not there. On a Slurm node set y", "x is not there", "On a Slurm node set y"),
        ("x:\n  is it late? Wait", "x", "is it late? Wait"),
        ("/x: is no socket: move it away", "/x: is no socket", "move it away"),
        ("no word of advice: really", "no word of advice: really", "otherwise"),
        ("this is x and that: a, b", "this is x and that: a, b", "otherwise"),
    ],
)
def test_an_error_of_ours_is_what_is_wrong_and_then_what_to_do(words: str, said: str, do: str) -> None:
    assert split_advice(words, "otherwise") == (said, do)
