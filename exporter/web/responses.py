"""Builds HTTP responses: content negotiation (RFC 9110, section 12.5), compression, headers, JSON errors.

A client that accepts no supported format gets plain text.
"""

import gzip
from collections.abc import Callable, Iterator, Mapping

import msgspec
from fastapi import Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from exporter.core.exposition import OPENMETRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE
from exporter.web.api import Problem
from exporter.web.security import DEFAULT_HEADERS

_OPENMETRICS = "application/openmetrics-text"
_TEXT = ("text/plain", "text/*", "*/*")
"""Media ranges from the most specific to the least; the first that the client names decides."""


def wants_openmetrics(accept: str) -> bool:
    """Return whether OpenMetrics 1.0 is named with at least the weight of plain text. Wildcards mean plain text.

    A client that accepts only OpenMetrics 0.0.1 (Prometheus before about 2.23) gets plain text.
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
    """Return whether gzip is accepted by name, or by `*` if it is not named."""
    weights = {coding: _weight(parameters) for coding, parameters in _ranges(accept_encoding)}
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _ranges(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    for item in header.lower().split(","):
        kind, *rest = item.split(";")
        pairs = (pair.partition("=") for pair in rest)
        yield kind.strip(), {name.strip(): value.strip().strip('"') for name, _, value in pairs}


def _weight(parameters: dict[str, str]) -> float:
    """Return the weight q, 0-1; 0 if it is invalid."""
    try:
        weight = float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0


PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
MIN_GZIP_BYTES = 1024
GZIP_LEVEL = 1
"""Exposition text shrinks about twentyfold at any level; higher levels only cost CPU."""
encode_json = msgspec.json.Encoder().encode
_PROCESS = CollectorRegistry()
ProcessCollector(registry=_PROCESS)


def make_response(
    body: bytes,
    content_type: str,
    *,
    status: int = 200,
    request: Request | None = None,
    extra: dict[str, str] | None = None,
) -> Response:
    """Build a response, compressed if `request` accepts gzip and the body has at least MIN_GZIP_BYTES."""
    headers = DEFAULT_HEADERS | {"Vary": "Accept, Accept-Encoding"} | (extra or {})
    accepted = "" if request is None else ",".join(request.headers.getlist("accept-encoding"))
    if len(body) >= MIN_GZIP_BYTES and wants_gzip(accepted):
        body, headers = gzip.compress(body, GZIP_LEVEL, mtime=0), headers | {"Content-Encoding": "gzip"}
    # Passed as a header, because Starlette would add a second charset to a text media type.
    return Response(body, status, headers | {"Content-Type": content_type})


def error_response(status: int, reason: str) -> Response:
    """Build an error response with `reason` as JSON."""
    return make_response(encode_json(Problem(detail=reason)), JSON, status=status)


def status_response(problem: str, *, note: str = "") -> Response:
    """Respond 200 if there is no problem, otherwise 503 with the problem as plain text; `note` follows an "ok"."""
    body = problem or (f"ok, but: {note}" if note else "ok")
    return make_response(f"{body}\n".encode(), PLAIN, status=503 if problem else 200)


def metrics_response(request: Request, exposition: Callable[[bool], bytes]) -> Response:
    """Respond to a scrape: `exposition` (True: OpenMetrics, without `# EOF`), then metrics of this process."""
    return MetricsPage().respond(request, None, exposition)


class MetricsPage:
    """Responds to scrapes, and renders and compresses one state of the metrics once for all of them. Not thread-safe.

    A flood of scrapes then costs what its requests cost, not what the text does.
    """

    def __init__(self) -> None:
        self._state: object = None
        self._responses: dict[tuple[bool, bool], tuple[bytes, Mapping[str, str]]] = {}
        """(body, headers) by (OpenMetrics, gzip)."""

    def respond(self, request: Request, state: object, exposition: Callable[[bool], bytes]) -> Response:
        """Respond with `exposition` (True: OpenMetrics, without `# EOF`) of `state`, then metrics of this process."""
        if state is not self._state:
            self._state, self._responses = state, {}
        openmetrics = wants_openmetrics(",".join(request.headers.getlist("accept")))
        key = openmetrics, wants_gzip(",".join(request.headers.getlist("accept-encoding")))
        if key not in self._responses:
            process_metrics = generate_openmetrics(_PROCESS) if openmetrics else generate_latest(_PROCESS)  # type: ignore[no-untyped-call]
            content_type = OPENMETRICS_CONTENT_TYPE if openmetrics else TEXT_CONTENT_TYPE
            made = make_response(exposition(openmetrics) + process_metrics, content_type, request=request)
            self._responses[key] = bytes(made.body), dict(made.headers)
        body, headers = self._responses[key]
        return Response(body, 200, dict(headers))
