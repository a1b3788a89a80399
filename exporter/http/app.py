"""The FastAPI app: what is answered where, and when nothing may be answered.

Owns paths, status codes and headers. Every endpoint is a plain function, so that FastAPI runs it on a thread and
never on the event loop; and they take turns, for a sample must not wait behind twenty scrapes for the interpreter.
Refuses to serve an old snapshot as live: it says 503 and why, so that Prometheus' `up` goes to 0.
"""

import gzip
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from exporter import __version__
from exporter.core.exposition import OPENMETRICS, TEXT, render
from exporter.core.model import SECOND
from exporter.core.snapshot import Snapshot
from exporter.http import page
from exporter.http.access import HEADERS
from exporter.http.api import Problem, components, gpus_out, jobs_out
from exporter.http.negotiation import wants_gzip, wants_openmetrics

PLAIN = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
MIN_GZIP_BYTES = 1024
GZIP_LEVEL = 1
"""Exposition text shrinks twentyfold at any level; higher ones only take the node's CPU."""
PATHS = ("/", "/metrics", "/healthz", "/readyz", "/api/v1/gpus", "/api/v1/jobs", "/openapi.json")
_KEPT_OUT = {
    401: "A name and its password are needed",
    403: "Not for this connection: see docs/web.md",
    429: "Too many requests, or wrong passwords",
}
"""What the gate before the app answers (exporter/http/access.py)."""
_encode = msgspec.json.Encoder().encode
_ABOUT = "Where every paid GPU-second of this node goes. Ratios 0-1, seconds, bytes, watts; null is unknown, never 0."
Answer = Callable[[Request], Response]


class Seen(Struct, frozen=True):
    """The newest snapshot, how old it is in nanoseconds, and why it may not be called live, if so."""

    snapshot: Snapshot | None
    age: int = 0
    problem: str = ""


class Feed(Struct, frozen=True, kw_only=True):
    """Where snapshots come from, and how old one may be."""

    latest: Callable[[], Snapshot | None]
    now: Callable[[], int]
    """Monotonic nanoseconds, the clock of `Snapshot.at`."""
    max_age_seconds: float
    why_not: Callable[[], str]

    def look(self) -> Seen:
        """Take the newest snapshot once: the reference may change at any moment."""
        snapshot = self.latest()
        if snapshot is None:
            why = self.why_not() or "the first takes one interval; if this lasts, read the exporter's log"
            return Seen(None, problem=f"nothing has been sampled yet: {why}")
        age = max(0, self.now() - snapshot.at)
        if age <= self.max_age_seconds * SECOND:
            return Seen(snapshot, age)
        why = self.why_not() or "the sampling loop gives no reason; read the exporter's log and restart it"
        limit = f"{self.max_age_seconds:g} s allowed"
        return Seen(snapshot, age, f"the newest sample is {age / SECOND:.0f} s old ({limit}): {why}")


def create_app(
    latest: Callable[[], Snapshot | None],
    *,
    now: Callable[[], int],
    max_age_seconds: float,
    why_not: Callable[[], str] = lambda: "",
) -> FastAPI:
    """Build the app. `latest` gives the newest immutable Snapshot; `now` monotonic ns; `why_not` the last error.

    All three are called on request threads, one request at a time.
    """
    app = FastAPI(title="gpu-efficiency-exporter", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    feed = Feed(latest=latest, now=now, max_age_seconds=max_age_seconds, why_not=why_not)
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    turn = Lock()
    _add(app, "/", lambda request: _page(feed, request), turn)
    _add(app, "/metrics", lambda request: _metrics(feed, request, process), turn)
    _add(app, "/readyz", lambda _: _ready(feed), turn)
    _add(app, "/healthz", lambda _: reply(b"ok\n", PLAIN), Lock())
    _add(app, "/api/v1/gpus", lambda request: _json(feed, request, gpus_out), turn, schema="GpusOut")
    _add(app, "/api/v1/jobs", lambda request: _json(feed, request, jobs_out), turn, schema="JobsOut")
    _add(app, "/openapi.json", lambda _: reply(_encode(_openapi(app)), JSON), turn)
    app.add_exception_handler(404, _no_such_page)
    app.add_exception_handler(Exception, _broken)
    return app


def _add(app: FastAPI, path: str, answer: Answer, turn: AbstractContextManager[object], *, schema: str = "") -> None:
    """Serve GET and HEAD at `path`, one at a time among those that share `turn`; `schema` documents it."""

    def endpoint(request: Request) -> Response:
        with turn:
            return answer(request)

    operation = path.strip("/").replace("/", "_")
    said: dict[int | str, dict[str, Any]] | None = None
    if schema:
        said = {200: _content("The newest sample", schema), 503: _content("No live sample, and why", "Problem")}
        said |= {status: _content(why, "Problem") for status, why in _KEPT_OUT.items()}
    app.get(
        path, response_class=Response, responses=said, operation_id=operation, include_in_schema=bool(schema)
    )(endpoint)  # fmt: skip
    app.head(path, response_class=Response, include_in_schema=False)(endpoint)


def _content(description: str, schema: str) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {"description": description, "content": {JSON: {"schema": reference}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    password = {"type": "http", "scheme": "basic", "description": "where the web configuration names users"}
    document["components"] = {"schemas": components(), "securitySchemes": {"password": password}}
    document["security"] = [{}, {"password": []}]
    return document


def _metrics(feed: Feed, request: Request, process: CollectorRegistry) -> Response:
    seen = feed.look()
    if seen.snapshot is None or seen.problem:
        return _refused(seen)
    openmetrics = wants_openmetrics(",".join(request.headers.getlist("accept")))
    of_process = generate_openmetrics(process) if openmetrics else generate_latest(process)  # type: ignore[no-untyped-call]
    body = render(seen.snapshot, openmetrics=openmetrics) + of_process
    return reply(body, OPENMETRICS if openmetrics else TEXT, request=request)


def _ready(feed: Feed) -> Response:
    seen = feed.look()
    return _refused(seen) if seen.problem else reply(b"ok\n", PLAIN)


def _refused(seen: Seen) -> Response:
    return reply(f"{seen.problem}\n".encode(), PLAIN, status=503)


def _json(feed: Feed, request: Request, shape: Callable[[Snapshot, int], Struct]) -> Response:
    seen = feed.look()
    if seen.snapshot is None or seen.problem:
        return reply(_encode(Problem(detail=seen.problem)), JSON, status=503)
    return reply(_encode(shape(seen.snapshot, seen.age)), JSON, request=request)


def _page(feed: Feed, request: Request) -> Response:
    """The page shows what was last seen even when it is old, but says so in its first line, and not as live."""
    seen = feed.look()
    view = None
    if seen.snapshot is not None:
        view = gpus_out(seen.snapshot, seen.age, live=not seen.problem), jobs_out(seen.snapshot, seen.age)
    body = page.render(view, problem=seen.problem).encode()
    extra = {"Content-Security-Policy": page.CONTENT_SECURITY_POLICY}
    return reply(body, HTML, status=503 if seen.problem else 200, request=request, extra=extra)


def _no_such_page(_request: Request, _error: Exception) -> Response:
    return reply(_encode(Problem(detail=f"no such page; there are {', '.join(PATHS)}")), JSON, status=404)


def _broken(_request: Request, _error: Exception) -> Response:
    """The log has the traceback. uvicorn drops the connection after it, so the client is told not to use it again."""
    body = b"internal error: the exporter's log says where; please report it\n"
    return reply(body, PLAIN, status=500, extra={"Connection": "close"})


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
