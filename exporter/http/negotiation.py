"""Which form of an answer a client wants: Accept and Accept-Encoding (RFC 9110, section 12.5).

Refuses nobody: who asks for what we do not have gets the plain text.
"""

from collections.abc import Iterator

_OPENMETRICS = "application/openmetrics-text"
_TEXT = ("text/plain", "text/*", "*/*")
"""From the most specific range to the least: the first that is named decides."""


def wants_openmetrics(accept: str) -> bool:
    """True when OpenMetrics 1.0 is named, and no less wanted than plain text. Wildcards mean plain text.

    A client that knows only OpenMetrics 0.0.1 (Prometheus before 2.23 or so) gets plain text.
    """
    openmetrics = 0.0
    text: dict[str, float] = {}
    for kind, parameters in _ranges(accept):
        weight = _weight(parameters)
        if kind == _OPENMETRICS and parameters.get("version", "1.0.0") == "1.0.0":
            openmetrics = max(openmetrics, weight)
        elif kind in _TEXT:
            text[kind] = max(text.get(kind, 0.0), weight)
    return openmetrics > 0 and openmetrics >= next((text[kind] for kind in _TEXT if kind in text), 0.0)


def wants_gzip(accept_encoding: str) -> bool:
    """True when gzip is allowed by name, or by `*` where it is not named."""
    weights = {coding: _weight(parameters) for coding, parameters in _ranges(accept_encoding)}
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _ranges(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    for item in header.lower().split(","):
        kind, *rest = item.split(";")
        pairs = (pair.partition("=") for pair in rest)
        yield kind.strip(), {name.strip(): value.strip().strip('"') for name, _, value in pairs}


def _weight(parameters: dict[str, str]) -> float:
    """q, 0-1; what is no number is not wanted."""
    try:
        weight = float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0
