"""The FastAPI app: what is answered where, and when nothing may be answered.

Owns paths, status codes and headers. Every endpoint is a plain function, so that FastAPI runs it on a thread and
never on the event loop; and they take turns, for a sample must not wait behind twenty scrapes for the interpreter.
Refuses to serve an old snapshot as live: it says 503 and why, so that Prometheus' `up` goes to 0.
"""

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
from exporter.core.snapshot import Snapshot
from exporter.http import page
from exporter.http.account import AccountsOut, accounts_out
from exporter.http.api import GpusOut, JobsOut, Problem, gpus_out, jobs_out
from exporter.http.asking import EVENTS, RECEIPTS, Parameter, documented
from exporter.http.feed import Feed, Seen
from exporter.http.negotiation import wants_openmetrics
from exporter.http.past import events_answer, job_answer, past_of, receipts_answer
from exporter.http.replying import JSON, PLAIN, encode, html, reply, trouble
from exporter.http.statements import EventsOut, Kept, ReceiptsOut

PATHS = (
    "/", "/metrics", "/healthz", "/readyz", "/api/v1/node", "/api/v1/gpus", "/api/v1/jobs", "/api/v1/receipts",
    "/api/v1/events", "/openapi.json",
)  # fmt: skip
_KEPT_OUT = {
    401: "A name and its password are needed",
    403: "Not for this connection: see docs/web.md",
    429: "Too many requests, or wrong passwords",
}
"""What the gate before the app answers (exporter/http/access.py)."""
_ABOUT = "Where every paid GPU-second of this node goes. Ratios 0-1, seconds, bytes, watts; null is unknown, never 0."
_ANSWERS = (AccountsOut, GpusOut, JobsOut, ReceiptsOut, EventsOut, Problem)
Answer = Callable[[Request], Response]


def create_app(
    latest: Callable[[], Snapshot | None],
    *,
    now: Callable[[], int],
    max_age_seconds: float,
    why_not: Callable[[], str] = lambda: "",
    kept: Kept | None = None,
) -> FastAPI:
    """Build the app. `latest` gives the newest immutable Snapshot; `now` monotonic ns; `why_not` the last error.

    All are called on request threads, one request at a time; the store `kept`, where there is one, beside the others,
    for a scrape must not wait for a disk.
    """
    app = FastAPI(title="gpu-efficiency-exporter", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    feed = Feed(latest=latest, now=now, max_age_seconds=max_age_seconds, why_not=why_not)
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    turn, reading = Lock(), Lock()
    _add(app, "/", lambda request: _page(feed, request, past_of(feed, kept), turn), reading)
    _add(app, "/jobs/{job_id:path}", lambda request: job_answer(feed, request, kept), reading)
    _add(app, "/metrics", lambda request: _metrics(feed, request, process, kept), turn)
    _add(app, "/readyz", lambda _: _ready(feed), turn)
    _add(app, "/healthz", lambda _: reply(b"ok\n", PLAIN), Lock())
    _add_api(app, feed, kept, turn=turn, reading=reading)
    _add(app, "/openapi.json", lambda _: reply(encode(_openapi(app)), JSON), turn)
    app.add_exception_handler(404, _no_such_page)
    app.add_exception_handler(Exception, _broken)
    return app


def _add_api(app: FastAPI, feed: Feed, kept: Kept | None, *, turn: Lock, reading: Lock) -> None:
    """Serve what programs ask for."""
    _add(app, "/api/v1/node", lambda request: _json(feed, request, accounts_out), turn, schema="AccountsOut")
    _add(app, "/api/v1/gpus", lambda request: _json(feed, request, gpus_out), turn, schema="GpusOut")
    _add(app, "/api/v1/jobs", lambda request: _json(feed, request, jobs_out), turn, schema="JobsOut")
    _add(
        app, "/api/v1/receipts", lambda request: receipts_answer(feed, request, kept), reading, schema="ReceiptsOut",
        asking=RECEIPTS,
    )  # fmt: skip
    _add(
        app, "/api/v1/events", lambda request: events_answer(feed, request, kept), reading, schema="EventsOut",
        asking=EVENTS,
    )  # fmt: skip


def _add(
    app: FastAPI,
    path: str,
    answer: Answer,
    turn: AbstractContextManager[object],
    *,
    schema: str = "",
    asking: tuple[Parameter, ...] = (),
) -> None:
    """Serve GET and HEAD at `path`, one at a time among those that share `turn`; `schema` and `asking` document it."""

    def endpoint(request: Request) -> Response:
        with turn:
            return answer(request)

    operation = path.strip("/").replace("/", "_")
    said: dict[int | str, dict[str, Any]] | None = None
    if schema:
        said = {200: _content("The newest sample", schema), 503: _content("No live sample, and why", "Problem")}
        said |= {status: _content(why, "Problem") for status, why in _KEPT_OUT.items()}
    if said and asking:
        said[422] = _content("What was asked cannot be answered, and why", "Problem")
    app.get(
        path, response_class=Response, responses=said, operation_id=operation, include_in_schema=bool(schema),
        openapi_extra={"parameters": documented(asking)} if asking else None,
    )(endpoint)  # fmt: skip
    app.head(path, response_class=Response, include_in_schema=False)(endpoint)


def _content(description: str, schema: str) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {"description": description, "content": {JSON: {"schema": reference}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    password = {"type": "http", "scheme": "basic", "description": "where the web configuration names users"}
    schemas = msgspec.json.schema_components(_ANSWERS, ref_template="#/components/schemas/{name}")[1]
    document["components"] = {"schemas": schemas, "securitySchemes": {"password": password}}
    document["security"] = [{}, {"password": []}]
    return document


def _metrics(feed: Feed, request: Request, process: CollectorRegistry, kept: Kept | None) -> Response:
    seen = feed.look()
    if seen.snapshot is None or seen.problem:
        return _refused(seen)
    # What a scrape was told must be remembered by a restart: a counter that came back lower would be a reset to
    # Prometheus, which would then count what it has already seen once more.
    snapshot = seen.snapshot if kept is None else kept.cover(seen.snapshot)
    if snapshot is None:
        return _refused(Seen(None, problem="nothing can be told before it is saved, and the history's disk hangs"))
    openmetrics = wants_openmetrics(",".join(request.headers.getlist("accept")))
    of_process = generate_openmetrics(process) if openmetrics else generate_latest(process)  # type: ignore[no-untyped-call]
    body = render(snapshot, openmetrics=openmetrics) + of_process
    return reply(body, OPENMETRICS if openmetrics else TEXT, request=request)


def _ready(feed: Feed) -> Response:
    seen = feed.look()
    return _refused(seen) if seen.problem else reply(b"ok\n", PLAIN)


def _refused(seen: Seen) -> Response:
    return reply(f"{seen.problem}\n".encode(), PLAIN, status=503)


def _json(feed: Feed, request: Request, shape: Callable[[Snapshot, int], Struct]) -> Response:
    seen = feed.look()
    if seen.snapshot is None or seen.problem:
        return trouble(503, seen.problem)
    return reply(encode(shape(seen.snapshot, seen.age)), JSON, request=request)


def _page(feed: Feed, request: Request, past: page.Past, turn: Lock) -> Response:
    """The page shows what was last seen even when it is old, but says so in its first line, and not as live."""
    with turn:
        return _rendered(feed.look(), request, past)


def _rendered(seen: Seen, request: Request, past: page.Past) -> Response:
    view = None
    if seen.snapshot is not None:
        view = page.View(
            accounts=accounts_out(seen.snapshot, seen.age),
            gpus=gpus_out(seen.snapshot, seen.age, live=not seen.problem),
            jobs=jobs_out(seen.snapshot, seen.age),
            past=past,
        )
    return html(page.render(view, problem=seen.problem), request, status=503 if seen.problem else 200)


def _no_such_page(_request: Request, _error: Exception) -> Response:
    return trouble(404, f"no such page; there are {', '.join(PATHS)}, /jobs/JOB")


def _broken(_request: Request, _error: Exception) -> Response:
    """The log has the traceback. uvicorn drops the connection after it, so the client is told not to use it again."""
    body = b"internal error: the exporter's log says where; please report it\n"
    return reply(body, PLAIN, status=500, extra={"Connection": "close"})
