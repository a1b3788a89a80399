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
_DIGITS = re.compile(r"\d+")
_redact: Callable[[str], str] = str
"""Applied to every line."""


class RateLimitFilter(logging.Filter):
    """Suppresses an event, numbers aside, for a minute after it was logged; the next one has the suppressed count."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[str, tuple[float, int]] = {}

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
        self._seen[key] = (now, 0)
        record.held = held
        return True


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
    return " | ".join(_redact(line.strip()) for line in text.splitlines())


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
