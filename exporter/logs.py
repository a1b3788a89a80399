"""Configures logging: one line per event, as text or JSON; repeated events at most once a minute, with a count."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable

QUIET_SECONDS = 60.0
MOST_EVENTS = 1000
"""Maximum number of distinct events remembered; beyond it all are forgotten, to bound memory."""
MOST_ALIKE = 200
"""Maximum lines a minute of one kind of event: users choose names of files, and could fill a disk with them."""
_DIGITS = re.compile(r"\d+")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal would act on, and what UTF-8 cannot encode."""
_redact: Callable[[str], str] = str
"""Applied to every line."""


class RateLimitFilter(logging.Filter):
    """Suppresses an event, numbers aside, for a minute after it was logged; the next one has the suppressed count.

    Of events that differ in their texts only, such as names, at most MOST_ALIKE are logged in a minute.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[str, tuple[float, int]] = {}
        self._alike: dict[str, tuple[float, int, int]] = {}
        """By the unformatted message: start of its minute, lines logged in it, and events suppressed in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        try:
            key, now = f"{record.levelno}:{_DIGITS.sub('#', record.getMessage())}", self._now()
        except (TypeError, ValueError):  # a malformed log call; the handler reports those without raising
            return True
        if len(self._seen) > MOST_EVENTS:
            self._seen.clear()
        last, held = self._seen.get(key, (float("-inf"), 0))
        if now - last < QUIET_SECONDS:
            self._seen[key] = (last, held + 1)
            return False
        alike = self._count_alike(f"{record.levelno}:{record.msg}", now)
        if alike is None:
            return False
        self._seen[key] = (now, 0)
        record.held = held + alike
        return True

    def _count_alike(self, kind: str, now: float) -> int | None:
        """Count an event; return how many of its kind were suppressed in the minute before, None if this one is."""
        if len(self._alike) > MOST_EVENTS:
            self._alike.clear()
        began, logged, suppressed = self._alike.get(kind, (now, 0, 0))
        if now - began >= QUIET_SECONDS:
            self._alike[kind] = (now, 1, 0)
            return suppressed
        if logged >= MOST_ALIKE:
            self._alike[kind] = (began, logged, suppressed + 1)
            return None
        self._alike[kind] = (began, logged + 1, suppressed)
        return 0


class TextFormatter(logging.Formatter):
    """Formats "time level message" on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return f"{_timestamp(record)} {record.levelname.lower():7} {_message(self, record)}"


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time, level, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return json.dumps({
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(self, record),
        })  # fmt: skip


def _timestamp(record: logging.LogRecord) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{stamp}.{int(record.msecs):03d}Z"


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    held = getattr(record, "held", 0)
    text = record.getMessage() + (f" (and {held} like it, not shown)" if held else "")
    if record.exc_info:
        text += " | " + formatter.formatException(record.exc_info)
    lines = " | ".join(_redact(line.strip()) for line in text.splitlines())
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", lines)


def set_redaction(redact: Callable[[str], str]) -> None:
    """Apply `redact` to every line, so that secrets and personal data are removed in one place."""
    global _redact  # noqa: PLW0603  as logging itself, one for the process
    _redact = redact


def configure_logging(*, form: str, level: str) -> None:
    """Log to standard error as text or, if `form` is "json", JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(RateLimitFilter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for noisy in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
