"""Builds the FastAPI app of a node: paths, status codes, and locks between endpoints.

Every endpoint is a plain function, so FastAPI runs it in a worker thread and never on the event loop. Refuses to serve
an old snapshot as live: it responds 503 with the reason, so that `up` becomes 0 in Prometheus. Records in the history
store are also served while nothing is sampled.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from threading import Lock
from types import ModuleType
from typing import Annotated, Any, cast

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from pydantic import BaseModel, BeforeValidator, Field

from exporter import __version__
from exporter.core.exposition import render
from exporter.core.job_record import JobRecordQuery
from exporter.core.model import SECOND
from exporter.core.prices import Terms
from exporter.core.snapshot import Snapshot
from exporter.web import page
from exporter.web.api import (
    AccountsOut,
    EventsOut,
    GpusOut,
    JobsOut,
    Problem,
    ReceiptsOut,
    accounts_out,
    gpus_out,
    jobs_out,
)
from exporter.web.history_api import (
    STORE_ERRORS,
    HistoryReader,
    collect_records,
    events_out,
    receipts_body,
    records_of_job,
)
from exporter.web.responses import (
    HTML,
    JSON,
    PLAIN,
    MetricsPage,
    encode_json,
    error_response,
    make_response,
    status_response,
)


class LatestSnapshot(Struct, frozen=True):
    """The newest snapshot, its age in nanoseconds, and why it is not live (empty: it is)."""

    snapshot: Snapshot | None
    age: int = 0
    problem: str = ""


_SILENT = "the sampling loop gives no reason; read the exporter's log and restart it"
_SIMULATED_PAST = "the simulated hours before the start are still being computed"


class SnapshotProvider(Struct, frozen=True, kw_only=True):
    """Returns the newest snapshot and checks its age."""

    latest: Callable[[], Snapshot | None]
    now: Callable[[], int]
    """Monotonic nanoseconds, the clock of `Snapshot.at`."""
    max_age_seconds: float
    why_not: Callable[[], str]

    def poll(self) -> LatestSnapshot:
        """Read the newest snapshot once, because the sampler may replace it at any moment, and check its age."""
        snapshot = self.latest()
        if snapshot is None:
            why = self.why_not() or "the first takes one interval; if this lasts, read the exporter's log"
            return LatestSnapshot(None, problem=f"nothing has been sampled yet: {why}")
        age = max(0, self.now() - snapshot.at)
        if age <= self.max_age_seconds * SECOND:
            return LatestSnapshot(snapshot, age)
        silent = _SIMULATED_PAST if snapshot.meta.simulated else _SILENT
        why = self.why_not() or silent
        limit = f"{self.max_age_seconds:g} s allowed"
        return LatestSnapshot(snapshot, age, f"the newest sample is {age / SECOND:.0f} s old ({limit}): {why}")

    def poll_checkpointed(self, history: HistoryReader | None) -> LatestSnapshot:
        """As `poll`, the newest snapshot that is already checkpointed: what may leave this process as counters.

        After a restart counters resume from the checkpoint. If they resumed below the values exported before,
        Prometheus would take that for a counter reset and count the difference twice.
        """
        latest = self.poll()
        if latest.snapshot is None or latest.problem or history is None:
            return latest
        saved = history.checkpointed_view(latest.snapshot)
        missing = "" if saved else "no checkpoint has been saved yet: the history's disk does not respond"
        return LatestSnapshot(saved, latest.age, missing)


MAX_ITEMS = 5000
"""Maximum number of job records or events in one response."""
DEFAULT_ITEMS = 100
_MAX_CHARS, _SHOWN_CHARS = 512, 40
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
"""A non-negative number as JSON and shells write it; float() accepts much more."""


def _unix_time(text: str | float) -> float:
    if not isinstance(text, str):
        return text  # a default: FastAPI before 0.150 checks those as well
    seconds = float(text) if _NUMBER.fullmatch(text) else inf
    if seconds == inf:
        raise ValueError("is no time in Unix seconds, such as 1767225600")
    return seconds


def _count(text: str | int) -> int:
    if not isinstance(text, str):
        return text
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:_SHOWN_CHARS]) <= MAX_ITEMS):
        raise ValueError(f"is no whole number from 1 to {MAX_ITEMS}")
    return int(text)


_Name = Annotated[str, Field(max_length=_MAX_CHARS)]
_UnixTime = Annotated[float, Field(ge=0), BeforeValidator(_unix_time)]
_Count = Annotated[int, Field(ge=1, le=MAX_ITEMS), BeforeValidator(_count)]


class EventQuery(BaseModel, extra="forbid", frozen=True):
    """Parameters of /api/v1/events."""

    since: _UnixTime = Field(0.0, description="Unix seconds: leaves out what ended earlier")
    limit: _Count = Field(DEFAULT_ITEMS, description="maximum number, the latest first")


class ReceiptQuery(BaseModel, extra="forbid", frozen=True):
    """Parameters of /api/v1/receipts.

    Rejects unknown parameters, because with a misspelt filter the jobs of all users would be returned.
    """

    job_id: _Name = Field("", description="only this job, by the scheduler's id or the one users know, such as 6_1")
    array_id: _Name = Field("", description="only jobs of this job array or heterogeneous job")
    user: _Name = Field("", description="only jobs of this user")
    account: _Name = Field("", description="only jobs of this account")
    namespace: _Name = Field("", description="only jobs of this namespace")
    since: _UnixTime = Field(0.0, description="Unix seconds: leaves out what ended earlier")
    until: _UnixTime = Field(default_factory=lambda: inf, description="Unix seconds: leaves out what began later")
    limit: _Count = Field(DEFAULT_ITEMS, description="maximum number, the latest first")


_QUERIES: dict[str, type[BaseModel]] = {"/api/v1/receipts": ReceiptQuery, "/api/v1/events": EventQuery}


def invalid_query(request: Request, error: Exception) -> Response:
    """Respond 422 with the first validation error of a query and how to correct it."""
    first = cast("RequestValidationError", error).errors()[0]
    name = first["loc"][-1]
    if first["type"] == "extra_forbidden":
        known = ", ".join(_QUERIES[request.scope["route"].path].model_fields)
        return error_response(422, f"no parameter {_cut(name)}; there are {known}")
    if first["type"] == "string_too_long":
        return error_response(422, f"{name}: is longer than {_MAX_CHARS} characters")
    return error_response(422, f"{name}: {_cut(first['input'])} {first['ctx']['error']}")


def _cut(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "…")


def repeated_parameter(request: Request) -> str:
    """Return the first parameter that is given more than once; empty if there is none."""
    names = [name for name, _ in request.query_params.multi_items()]
    return next((name for index, name in enumerate(names) if name in names[:index]), "")


PATHS = (
    "/", "/metrics", "/healthz", "/readyz", "/api/v1/node", "/api/v1/gpus", "/api/v1/jobs", "/api/v1/receipts",
    "/api/v1/events", "/openapi.json",
)  # fmt: skip
_ACCESS_ERRORS = {
    401: "A user name and password are required",
    403: "Not served to this connection: see docs/security.md",
    429: "Too many requests, or wrong passwords",
}
"""Responses of access control, which runs before the app (exporter/web/security.py)."""
_ABOUT = "Where every paid GPU-second of this node goes. Ratios 0-1, seconds, bytes, watts; null is unknown, never 0."
_SCHEMAS = (AccountsOut, GpusOut, JobsOut, ReceiptsOut, EventsOut, Problem)


class _Endpoints:
    """The endpoints; called on worker threads.

    One lock serializes those that read the snapshot, another those that read the store: a scrape must not wait for I/O.
    """

    def __init__(self, provider: SnapshotProvider, history: HistoryReader | None) -> None:
        self._provider, self._history = provider, history
        self._turn, self._store_turn = Lock(), Lock()
        self._metrics_page = MetricsPage()

    def node_page(self, request: Request) -> Response:
        """Show the latest snapshot, also when it is old, but then not as live."""
        with self._store_turn:
            history = self._page_history()
            with self._turn:
                return self._render_node_page(request, history)

    def _page_history(self) -> page.PageHistory:
        """Read from the store what the page shows; an error is part of the result, so that live data is still shown."""
        history, snapshot = self._history, self._provider.poll().snapshot
        try:
            found = collect_records(history, snapshot, JobRecordQuery(limit=2 * page.RECEIPTS_SHOWN))
            events = [] if history is None else history.events(0.0, page.EVENTS_SHOWN)
        except STORE_ERRORS as err:
            return page.PageHistory(kept=True, error=str(err))
        return page.PageHistory(kept=history is not None, records=found, events=events)

    def _render_node_page(self, request: Request, history: page.PageHistory) -> Response:
        latest, data = self._provider.poll(), None
        if latest.snapshot is not None:
            data = page.PageData(
                accounts=accounts_out(latest.snapshot, latest.age),
                gpus=gpus_out(latest.snapshot, latest.age, live=not latest.problem),
                jobs=jobs_out(latest.snapshot, latest.age),
                history=history,
            )
        document = page.render_node_page(data, problem=latest.problem)
        return _html_response(document, request, status=503 if latest.problem else 200)

    def job_page(self, request: Request, job_id: str) -> Response:
        """Show a job, also while nothing is sampled: records of the past stay valid."""
        with self._store_turn:
            latest = self._provider.poll()
            try:
                records = records_of_job(self._history, latest.snapshot, job_id) if job_id else []
            except STORE_ERRORS as err:
                return status_response(f"the store of job records cannot be read: {err}")
            snapshot, kept = latest.snapshot, self._history is not None
            now = None if snapshot is None else snapshot.wall / SECOND
            terms = Terms() if snapshot is None else snapshot.meta.terms
            document = page.render_job_page(job_id, records, now=now, kept=kept, terms=terms, problem=latest.problem)
            return _html_response(document, request, status=200 if records else 404)

    def metrics(self, request: Request) -> Response:
        """Render the newest snapshot that is already checkpointed."""
        with self._turn:
            latest = self._provider.poll_checkpointed(self._history)
            saved = latest.snapshot
            if saved is None or latest.problem:
                return status_response(latest.problem)
            return self._metrics_page.respond(
                request, saved, lambda openmetrics: render(saved, openmetrics=openmetrics)
            )

    def ready(self) -> Response:
        """Respond 200 if the newest sample is live, otherwise 503 with the reason.

        A source that cannot be read is no reason: the daemon accounts for the time as unobserved, and a pod that is not
        ready would not be scraped. It is named after the "ok".
        """
        with self._turn:
            latest = self._provider.poll()
            note = latest.snapshot.meta.last_error if latest.snapshot is not None else ""
            return status_response(latest.problem, note=note)

    def node(self, request: Request) -> Response:
        """Return the node's time, energy and money by leak."""
        return self._live_json(request, accounts_out)

    def gpus(self, request: Request) -> Response:
        """Return all GPUs of this node."""
        return self._live_json(request, gpus_out)

    def jobs(self, request: Request) -> Response:
        """Return all jobs of this node."""
        return self._live_json(request, jobs_out)

    def _live_json(self, request: Request, build: Callable[[Snapshot, int], Struct]) -> Response:
        with self._turn:
            latest = self._provider.poll()
            if latest.snapshot is None or latest.problem:
                return error_response(503, latest.problem)
            return make_response(encode_json(build(latest.snapshot, latest.age)), JSON, request=request)

    def receipts(self, request: Request, query: Annotated[ReceiptQuery, Query()]) -> Response:
        """Return job records; with a store also while nothing is sampled, because records of the past stay valid."""
        if repeated := repeated_parameter(request):
            return error_response(422, f"{repeated} is given twice")
        with self._store_turn:
            latest, kept = self._provider.poll(), self._history is not None
            if not kept and (latest.snapshot is None or latest.problem):
                return error_response(503, latest.problem)
            try:
                found = collect_records(self._history, latest.snapshot, JobRecordQuery(**query.model_dump()))
            except STORE_ERRORS as err:
                return error_response(503, f"the store of job records cannot be read: {err}")
            return make_response(receipts_body(found, latest.snapshot, kept=kept), JSON, request=request)

    def events(self, request: Request, query: Annotated[EventQuery, Query()]) -> Response:
        """Return events of this node; without a store the list is empty and `kept` is false."""
        if repeated := repeated_parameter(request):
            return error_response(422, f"{repeated} is given twice")
        with self._store_turn:
            latest, kept = self._provider.poll(), self._history is not None
            try:
                found = [] if self._history is None else self._history.events(query.since, query.limit)
            except STORE_ERRORS as err:
                return error_response(503, f"the store of events cannot be read: {err}")
            return make_response(encode_json(events_out(found, latest.snapshot, kept=kept)), JSON, request=request)


def create_app(
    latest: Callable[[], Snapshot | None],
    *,
    now: Callable[[], int],
    max_age_seconds: float,
    why_not: Callable[[], str] = lambda: "",
    history: HistoryReader | None = None,
) -> FastAPI:
    """Build the app. `latest` returns the newest immutable Snapshot, `now` monotonic ns, `why_not` the last error.

    They are called on worker threads, by one request at a time; `history` may be called concurrently with them.
    """
    app = FastAPI(title="gpu-efficiency-exporter", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    provider = SnapshotProvider(latest=latest, now=now, max_age_seconds=max_age_seconds, why_not=why_not)
    endpoints = _Endpoints(provider, history)
    with without_pydantic_v1():
        _add_routes(app, endpoints)
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(RequestValidationError, invalid_query)
    app.add_exception_handler(Exception, internal_error)
    return app


@contextmanager
def without_pydantic_v1() -> Iterator[None]:
    """For each parameter FastAPI checks whether its type is of pydantic 1; importing that copy would cost 1.4 MiB.

    In its place is a module with a class that nothing derives from: FastAPI 0.128.0 needs one.
    """
    absent = "pydantic.v1" not in sys.modules
    if absent:
        sys.modules["pydantic.v1"] = stand_in = ModuleType("pydantic.v1")
        vars(stand_in)["BaseModel"] = type("BaseModel", (), {})
    try:
        yield
    finally:
        if absent:
            del sys.modules["pydantic.v1"]


def _add_routes(app: FastAPI, endpoints: _Endpoints) -> None:
    _add(app, "/", endpoints.node_page)
    _add(app, "/jobs/{job_id:path}", endpoints.job_page)
    _add(app, "/metrics", endpoints.metrics)
    _add(app, "/readyz", endpoints.ready)
    _add(app, "/healthz", lambda: status_response(""))
    _add(app, "/api/v1/node", endpoints.node, schema="AccountsOut")
    _add(app, "/api/v1/gpus", endpoints.gpus, schema="GpusOut")
    _add(app, "/api/v1/jobs", endpoints.jobs, schema="JobsOut")
    _add(app, "/api/v1/receipts", endpoints.receipts, schema="ReceiptsOut")
    _add(app, "/api/v1/events", endpoints.events, schema="EventsOut")
    _add(app, "/openapi.json", lambda: make_response(encode_json(_openapi(app)), JSON))


def _add(app: FastAPI, path: str, endpoint: Callable[..., Response], *, schema: str = "") -> None:
    """Serve GET and HEAD at `path`. `schema` is the response's name in OpenAPI; without one the path is not listed."""
    responses: dict[int | str, dict[str, Any]] | None = None
    if schema:
        responses = {200: _content("The newest sample", schema), 503: _content("No live sample, and why", "Problem")}
        responses |= {status: _content(description, "Problem") for status, description in _ACCESS_ERRORS.items()}
    if responses and path in _QUERIES:
        responses[422] = _content("Invalid parameters, and why", "Problem")
    operation = path.strip("/").replace("/", "_")
    app.get(path, response_class=Response, responses=responses, operation_id=operation, include_in_schema=bool(schema))(
        endpoint
    )
    app.head(path, response_class=Response, include_in_schema=False)(endpoint)


def _content(description: str, schema: str) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {"description": description, "content": {JSON: {"schema": reference}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    password = {"type": "http", "scheme": "basic", "description": "where the web configuration names users"}
    schemas = msgspec.json.schema_components(_SCHEMAS, ref_template="#/components/schemas/{name}")[1]
    for name, schema in schemas.items():
        if name.endswith("Out"):
            _require_all(schema)
    document["components"] = {"schemas": schemas, "securitySchemes": {"password": password}}
    document["security"] = [{}, {"password": []}]
    return document


def _require_all(schema: dict[str, Any]) -> None:
    """Mark every field as required: the daemon sends all of them, defaults are for clients of older daemons."""
    schema["required"] = list(schema["properties"])
    for field in schema["properties"].values():
        field.pop("default", None)


def _html_response(document: str, request: Request, *, status: int) -> Response:
    """Build the response of a page, with its own Content-Security-Policy."""
    extra = {"Content-Security-Policy": page.CONTENT_SECURITY_POLICY}
    return make_response(document.encode(), HTML, status=status, request=request, extra=extra)


def _not_found(_request: Request, _error: Exception) -> Response:
    return error_response(404, f"no such page; there are {', '.join(PATHS)}, /jobs/JOB")


def internal_error(_request: Request, _error: Exception) -> Response:
    """Respond 500; the log has the traceback. uvicorn closes the connection afterwards, so the header announces it."""
    body = b"internal error: the exporter's log says where; please report it\n"
    return make_response(body, PLAIN, status=500, extra={"Connection": "close"})
