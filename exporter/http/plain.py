"""A small app for a page of metrics that is not a node's: /metrics, /healthz, /readyz and a line at /.

Owns paths, status codes and headers. Refuses to know what is on the page, and to withhold it: what is too old is
left out by who makes it.
"""

from collections.abc import Callable
from threading import Lock

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from exporter import __version__
from exporter.core.exposition import OPENMETRICS, TEXT
from exporter.http.negotiation import wants_openmetrics
from exporter.http.replying import HTML, PLAIN, reply

_INDEX = '<!doctype html><title>{0}</title><h1>{0}</h1><p><a href="/metrics">metrics</a> <a href="/readyz">ready?</a>'
Page = Callable[[bool], bytes]


def create_plain_app(title: str, *, page: Page, problem: Callable[[], str]) -> FastAPI:
    """Build the app. `page` gives the exposition (True: OpenMetrics, without `# EOF`), `problem` why it is not ready.

    Both are called on request threads, one request at a time.
    """
    app = FastAPI(title=title, version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    process, turn = CollectorRegistry(), Lock()
    ProcessCollector(registry=process)

    def metrics(request: Request) -> Response:
        with turn:
            return _metrics(page, request, process=process)

    def ready() -> Response:
        why = problem()
        return reply(f"{why}\n".encode() if why else b"ok\n", PLAIN, status=503 if why else 200)

    for path, answer in (
        ("/metrics", metrics),
        ("/readyz", ready),
        ("/healthz", lambda: reply(b"ok\n", PLAIN)),
        ("/", lambda: reply(_INDEX.format(title).encode(), HTML)),
    ):
        app.add_api_route(path, answer, methods=["GET", "HEAD"], response_class=Response)
    return app


def _metrics(page: Page, request: Request, *, process: CollectorRegistry) -> Response:
    openmetrics = wants_openmetrics(",".join(request.headers.getlist("accept")))
    of_process = generate_openmetrics(process) if openmetrics else generate_latest(process)  # type: ignore[no-untyped-call]
    return reply(page(openmetrics) + of_process, OPENMETRICS if openmetrics else TEXT, request=request)
