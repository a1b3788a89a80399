"""Logs: one line an event whatever it holds, in both forms; the same event once a minute; memory bounded."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from exporter.logs import (
    MOST_ALIKE,
    MOST_EVENTS,
    QUIET_SECONDS,
    JsonFormatter,
    RateLimitFilter,
    TextFormatter,
    configure_logging,
)

NASTY = ("one\ntwo", "tab\tand\r\nmore", "\u2028separators\u2029\x0b\x0c\x85", 'quotes " and \\', "日本 \ud800", "")
FORMS = [TextFormatter, JsonFormatter]


class Desk:
    """A logger of its own whose lines are kept, with a clock turned by hand."""

    def __init__(self, form: type[TextFormatter | JsonFormatter] = TextFormatter) -> None:
        self.now = 1000.0
        self.out = io.StringIO()
        self.filter = RateLimitFilter(lambda: self.now)
        self.log = logging.Logger("desk")  # noqa: LOG001  one of its own, out of the global tree
        handler = logging.StreamHandler(self.out)
        handler.setFormatter(form())
        handler.addFilter(self.filter)
        self.log.addHandler(handler)

    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def failure() -> Exception:
    try:
        json.loads("not JSON\nin two lines")
    except ValueError as err:
        err.add_note("a note\nin two lines")
        return err
    raise AssertionError


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("message", NASTY)
def test_an_event_is_one_line_whatever_it_holds(form: type[TextFormatter | JsonFormatter], message: str) -> None:
    desk = Desk(form)
    desk.log.warning("said: %s", message)
    assert len(desk.lines()) == 1
    assert "warning" in desk.lines()[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_traceback_is_on_the_same_line(form: type[TextFormatter | JsonFormatter]) -> None:
    desk = Desk(form)
    desk.log.error("it broke", exc_info=failure())
    (line,) = desk.lines()
    assert "it broke | Traceback" in line
    assert "in two lines" in line


def test_text_says_when_how_bad_and_what() -> None:
    desk = Desk()
    desk.log.info("up after %d s", 3)
    time, level, *words = desk.lines()[0].split()
    assert (time[-1], time[10], len(time)) == ("Z", "T", len("2026-01-01T00:00:00.000Z"))
    assert (level, words) == ("info", ["up", "after", "3", "s"])


def test_json_is_an_object_with_the_same_fields_each_time() -> None:
    desk = Desk(JsonFormatter)
    for message in NASTY:
        desk.log.warning(message or "empty")
    parsed = [json.loads(line) for line in desk.lines()]
    assert [list(line) for line in parsed] == [["time", "level", "logger", "message"]] * len(NASTY)
    assert {line["level"] for line in parsed} == {"warning"}
    assert parsed[3]["message"] == NASTY[3]


def test_the_same_event_comes_once_a_minute_with_how_often_it_was_held_back() -> None:
    desk = Desk()
    for second in range(200):
        desk.now = 1000.0 + second
        desk.log.warning("source hangs for %d s", second)
    shown = desk.lines()
    assert len(shown) == 4
    assert [line.endswith("(and 59 like it, not shown)") for line in shown] == [False, True, True, True]
    assert "hangs for 60 s" in shown[1]


def test_another_event_or_another_level_is_not_held_back() -> None:
    desk = Desk()
    for event in ("gpu %d is lost", "gpu %d is back"):
        desk.log.warning(event, 1)
        desk.log.error(event, 2)
    assert len(desk.lines()) == 4


def test_after_a_quiet_minute_an_event_is_news_without_a_count() -> None:
    desk = Desk()
    desk.log.warning("once")
    desk.now += QUIET_SECONDS
    desk.log.warning("once")
    assert len(desk.lines()) == 2
    assert "like it" not in desk.lines()[1]


def test_a_flood_of_different_events_cannot_fill_the_memory() -> None:
    desk = Desk()
    most = 0
    for number in range(3 * MOST_EVENTS):
        message = "event " + "".join(chr(97 + int(digit)) for digit in str(number))
        desk.log.warning(message)
        most = max(most, len(desk.filter._seen), len(desk.filter._alike))
    assert most <= MOST_EVENTS + 1
    assert len(desk.lines()) == 3 * MOST_EVENTS


def test_names_that_a_user_chooses_cannot_fill_the_disk() -> None:
    desk = Desk()
    for number in range(3 * MOST_ALIKE):
        desk.log.warning("no such file: %s", "x" * (number + 1))
    assert len(desk.lines()) == MOST_ALIKE
    desk.now += QUIET_SECONDS
    desk.log.warning("no such file: %s", "y")
    assert desk.lines()[-1].endswith(f"no such file: y (and {2 * MOST_ALIKE} like it, not shown)")
    desk.log.warning("another kind")
    assert desk.lines()[-1].endswith("another kind")


def test_what_a_terminal_would_act_on_is_shown_as_text() -> None:
    desk = Desk()
    desk.log.warning("no such file: %s", "a\x1b[2J\x07\x9b31mb\udcff")
    assert desk.lines()[0].endswith(r"no such file: a\x1b[2J\x07\x9b31mb\xdcff")


def test_hundreds_of_events_at_once_are_each_held_back() -> None:
    desk = Desk()
    for number in range(3 * 200):
        desk.log.warning("event %s", chr(0x4E00 + number % 200))
    assert len(desk.lines()) == 200


@pytest.fixture(name="_loggers_as_before")
def _restored() -> Iterator[None]:
    names = ("", "httpx", "httpcore", "uvicorn.access")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers
    for logger, level in before:
        logger.setLevel(level)


@pytest.mark.usefixtures("_loggers_as_before")
def test_set_up_sends_everything_of_that_level_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(form="json", level="warning")
    logging.getLogger("exporter.agent.agent").warning("seen")
    logging.getLogger("exporter.agent.agent").info("too low")
    logging.getLogger("httpx").info("each scrape of dcgm-exporter is not news")
    told = capsys.readouterr()
    assert told.out == ""
    assert [json.loads(line)["message"] for line in told.err.splitlines()] == ["seen"]
    configure_logging(form="text", level="debug")
    logging.getLogger("exporter.agent.agent").debug("now seen")
    logging.getLogger("httpx").info("still not")
    assert capsys.readouterr().err.strip().endswith("debug   now seen")
