"""Builds an app that serves only /metrics, /healthz, /readyz and an index page, for the cluster exporter."""

from collections.abc import Callable
from threading import Lock

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector

from exporter import __version__
from exporter.web.responses import HTML, PLAIN, make_response, metrics_response

_INDEX = '<!doctype html><title>{0}</title><h1>{0}</h1><p><a href="/metrics">metrics</a> <a href="/readyz">ready?</a>'
MetricsRenderer = Callable[[bool], bytes]


def create_metrics_app(title: str, *, page: MetricsRenderer, problem: Callable[[], str]) -> FastAPI:
    """Build the app. `page` renders the exposition (True: OpenMetrics, without `# EOF`), one request at a time.

    `problem` returns why the exporter is not ready; empty if it is. Both are called on worker threads.
    """
    app = FastAPI(title=title, version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    process, turn = CollectorRegistry(), Lock()
    ProcessCollector(registry=process)

    def metrics(request: Request) -> Response:
        with turn:
            return metrics_response(request, page, process)

    def ready() -> Response:
        reason = problem()
        return make_response(f"{reason}\n".encode() if reason else b"ok\n", PLAIN, status=503 if reason else 200)

    for path, answer in (
        ("/metrics", metrics),
        ("/readyz", ready),
        ("/healthz", lambda: make_response(b"ok\n", PLAIN)),
        ("/", lambda: make_response(_INDEX.format(title).encode(), HTML)),
    ):
        app.add_api_route(path, answer, methods=["GET", "HEAD"], response_class=Response)
    return app
