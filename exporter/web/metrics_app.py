"""Builds an app that serves only /metrics, /healthz, /readyz and an index page, for the cluster exporter."""

from collections.abc import Callable
from threading import Lock

from fastapi import FastAPI, Request, Response

from exporter import __version__
from exporter.web.responses import HTML, make_response, metrics_response, status_response

_INDEX = '<!doctype html><title>{0}</title><h1>{0}</h1><p><a href="/metrics">metrics</a> <a href="/readyz">ready?</a>'
MetricsRenderer = Callable[[bool], bytes]


def create_metrics_app(title: str, *, page: MetricsRenderer, problem: Callable[[], str]) -> FastAPI:
    """Build the app. `page` renders the exposition (True: OpenMetrics, without `# EOF`), one request at a time.

    `problem` returns why the exporter is not ready; empty if it is. Both are called on worker threads.
    """
    app = FastAPI(title=title, version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    turn = Lock()

    def metrics(request: Request) -> Response:
        with turn:
            return metrics_response(request, page)

    for path, answer in (
        ("/metrics", metrics),
        ("/readyz", lambda: status_response(problem())),
        ("/healthz", lambda: status_response("")),
        ("/", lambda: make_response(_INDEX.format(title).encode(), HTML)),
    ):
        app.add_api_route(path, answer, methods=["GET", "HEAD"], response_class=Response)
    return app
