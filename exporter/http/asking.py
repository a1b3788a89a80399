"""What a query string asks for. Owns the parameters of the JSON API, their checks and their documentation.

Refuses what it does not know: a filter that is misspelt and therefore ignored would answer with everybody's jobs.
"""

import re
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from msgspec import Struct

from exporter.core.statement import Wanted

MOST = 5000
"""Receipts or events of one answer."""
USUAL = 100
_LONGEST = 512
_SHOWN = 40
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
"""As JSON and shells write what is not negative; float() would take much more."""


class AskedError(ValueError):
    """A query that cannot be answered; the message says why, for who sent it."""


class Parameter(Struct, frozen=True):
    """One parameter: how its text is read, and what OpenAPI says of it."""

    name: str
    read: Callable[[str], Any]
    schema: dict[str, Any]
    about: str


def _text(value: str) -> str:
    if len(value) > _LONGEST:
        raise AskedError(f"is longer than {_LONGEST} characters")
    return value


def _moment(value: str) -> float:
    moment = float(value) if _NUMBER.fullmatch(value) else inf
    if not moment < inf:
        raise AskedError(f"{_cut(value)} is no time in Unix seconds, such as 1767225600")
    return moment


def _count(value: str) -> int:
    if not (value.isascii() and value.isdigit() and 1 <= int(value[:_SHOWN]) <= MOST):
        raise AskedError(f"{_cut(value)} is no whole number from 1 to {MOST}")
    return int(value)


_NAME = {"type": "string", "maxLength": _LONGEST}
_MOMENT = {"type": "number", "minimum": 0}
_COUNT = {"type": "integer", "minimum": 1, "maximum": MOST, "default": USUAL}
_SINCE = Parameter("since", _moment, _MOMENT, "Unix seconds: what ended before is left out")
_LIMIT = Parameter("limit", _count, _COUNT, "the latest so many")
RECEIPTS = (
    Parameter("job_id", _text, _NAME, "of that job alone, as the scheduler names it"),
    Parameter("user", _text, _NAME, "of that user alone"),
    Parameter("account", _text, _NAME, "of that account alone"),
    Parameter("namespace", _text, _NAME, "of that namespace alone"),
    _SINCE,
    Parameter("until", _moment, _MOMENT, "Unix seconds: what began after is left out"),
    _LIMIT,
)
EVENTS = (_SINCE, _LIMIT)


def asked(given: Iterable[tuple[str, str]], known: tuple[Parameter, ...]) -> dict[str, Any]:
    """Values by name, of those that were given. Raises AskedError."""
    rows, found, seen = {row.name: row for row in known}, {}, set()
    for name, value in given:
        if name not in rows:
            raise AskedError(f"no parameter {_cut(name)}; there are {', '.join(rows)}")
        if name in seen:
            raise AskedError(f"{name} is given twice")
        seen.add(name)
        try:
            found[name] = rows[name].read(value)
        except AskedError as err:
            raise AskedError(f"{name}: {err}") from None
    return found


def wanted_of(given: Iterable[tuple[str, str]]) -> Wanted:
    """Which statements are asked for. Raises AskedError."""
    return Wanted(**{"limit": USUAL} | asked(given, RECEIPTS))


def events_of(given: Iterable[tuple[str, str]]) -> tuple[float, int]:
    """Since when, and how many. Raises AskedError."""
    found = asked(given, EVENTS)
    return found.get("since", 0.0), found.get("limit", USUAL)


def documented(known: tuple[Parameter, ...]) -> list[dict[str, Any]]:
    """The parameters as OpenAPI says them."""
    return [
        {"name": row.name, "in": "query", "required": False, "description": row.about, "schema": row.schema}
        for row in known
    ]


def _cut(value: str) -> str:
    return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "…")
