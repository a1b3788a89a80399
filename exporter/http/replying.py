"""One way to answer: status, type, the headers of every answer, and compression where it is worth it."""

import gzip

import msgspec
from fastapi import Request, Response

from exporter.http.access import HEADERS
from exporter.http.api import Problem
from exporter.http.frame import CONTENT_SECURITY_POLICY
from exporter.http.negotiation import wants_gzip

PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
MIN_GZIP_BYTES = 1024
GZIP_LEVEL = 1
"""Exposition text shrinks twentyfold at any level; higher ones only take the node's CPU."""
encode = msgspec.json.Encoder().encode


def reply(
    body: bytes, kind: str, *, status: int = 200, request: Request | None = None, extra: dict[str, str] | None = None
) -> Response:
    """One answer, compressed where `request` allows it and it is worth it."""
    headers = HEADERS | {"Vary": "Accept, Accept-Encoding"} | (extra or {})
    accepted = "" if request is None else ",".join(request.headers.getlist("accept-encoding"))
    if len(body) >= MIN_GZIP_BYTES and wants_gzip(accepted):
        body, headers = gzip.compress(body, GZIP_LEVEL, mtime=0), headers | {"Content-Encoding": "gzip"}
    # The type goes in as a header: Starlette would add a second charset to a media type that it takes for text.
    return Response(body, status, headers | {"Content-Type": kind})


def trouble(status: int, why: str) -> Response:
    """Why there is no answer, as JSON."""
    return reply(encode(Problem(detail=why)), JSON, status=status)


def html(shown: str, request: Request, *, status: int) -> Response:
    """A page for a person, under its own policy."""
    extra = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
    return reply(shown.encode(), HTML, status=status, request=request, extra=extra)
