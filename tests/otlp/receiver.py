"""A receiver of OTLP/HTTP that decodes what it gets; it can refuse, be gone, and come back at the same address."""

import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, NumberDataPoint

PATH = "/v1/metrics"
Labels = frozenset[tuple[str, str]]


class Push:
    """One decoded request."""

    def __init__(self, request: ExportMetricsServiceRequest) -> None:
        (self.resource_metrics,) = request.resource_metrics
        self.resource = texts(self.resource_metrics.resource.attributes)
        self.metrics = {
            metric.name: metric for scope in self.resource_metrics.scope_metrics for metric in scope.metrics
        }

    def samples(self, prefix: str) -> dict[tuple[str, Labels], float]:
        """Values of the metrics whose name begins with `prefix`, by name and attributes."""
        return {
            (name, frozenset(texts(point.attributes).items())): value_of(point)
            for name, metric in self.metrics.items()
            for point in points_of(metric)
            if name.startswith(prefix)
        }


def points_of(metric: Metric) -> Sequence[NumberDataPoint]:
    """Return the data points of a sum or a gauge."""
    return metric.sum.data_points if metric.HasField("sum") else metric.gauge.data_points


def value_of(point: NumberDataPoint) -> float:
    """Return the value, whichever type it was sent as."""
    return point.as_int if point.HasField("as_int") else point.as_double


def texts(attributes: Sequence[KeyValue]) -> dict[str, str]:
    """Return attributes with their texts."""
    return {pair.key: pair.value.string_value for pair in attributes}


class Receiver:
    """What was received, and how to answer."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.pushes: list[Push] = []
        self.headers: list[dict[str, str]] = []
        self.status, self.answer, self.answer_headers = 200, b"", dict[str, str]()
        self.port = 0

    @property
    def url(self) -> str:
        """The endpoint to push to."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}{PATH}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answer while the block runs, at the port of the time before."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.headers.append({key.lower(): value for key, value in self.headers.items()})
                if receiver.status == 200 and self.path == PATH:
                    receiver.pushes.append(Push(ExportMetricsServiceRequest.FromString(body)))
                self.send_response(receiver.status)
                for name, value in receiver.answer_headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", f"{len(receiver.answer)}")
                self.end_headers()
                self.wfile.write(receiver.answer)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as http:
            http.daemon_threads = True
            if self._tls:
                http.socket = self._tls.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
            thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            self.port = http.server_port
            try:
                yield
            finally:
                http.shutdown()
                thread.join()
