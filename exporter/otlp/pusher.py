"""Pushes the snapshot that a scrape would get to a receiver of OTLP/HTTP, in a thread of its own.

Nothing is queued: a push that fails is not repeated later, for the counters of the next one include its time. Owns what
is logged: one line when a receiver begins to fail, and one when it accepts again.
"""

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource

from exporter.config import ConfigError, OtlpSettings
from exporter.core.snapshot import Snapshot
from exporter.otlp.encoding import encode, node_resource
from exporter.worker import Worker

log = logging.getLogger(__name__)
_LONGEST_REASON = 300
"""Characters of a receiver's answer that the log shows."""
_JOIN_SECONDS = 1.0
OUTCOMES = ("accepted", "failed")


class PushSession(requests.Session):
    """Sends the headers of the moment, and remembers why its latest request failed, which the SDK does not return."""

    def __init__(self, headers: Callable[[], Mapping[str, str]]) -> None:
        """`headers` are read for each request, because a token in them may be replaced. Raises ConfigError."""
        super().__init__()
        self._current_headers = headers
        self.problem = ""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """See requests.Session. A redirection fails here: the SDK would take it for success."""
        # Session.request prefers REQUESTS_CA_BUNDLE of the environment to the authority that this session was given.
        options["verify"] = options.get("verify") if self.verify is True else self.verify
        try:
            request.headers.update(self._current_headers())
            response = super().send(request, **options)
        except (OSError, ConfigError) as err:
            self.problem = f"{err}"
            raise
        self.problem = "" if response.ok else f"{response.status_code} {response.reason}: {response.text}"
        if response.is_redirect:
            self.problem = f"it redirects to {response.headers['location']}: set otlp.endpoint to that, if it is right"
            raise requests.TooManyRedirects(self.problem)
        return response


class Pusher:
    """Pushes every `interval` seconds until closed."""

    def __init__(
        self,
        exporter: MetricExporter,
        session: PushSession,
        *,
        interval: float,
        receiver: str,
        scraped: Callable[[], Snapshot | None],
    ) -> None:
        """`scraped` returns what a scrape would get now, or None; `receiver` is the endpoint's name for the log."""
        self._exporter, self._session, self._scraped = exporter, session, scraped
        self._interval, self._receiver = interval, receiver
        self._counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._resource: Resource | None = None
        self._pushed_wall: int | None = None
        """Time of the snapshot that was accepted last."""
        self._failures = 0
        """Failed pushes since the last accepted one."""
        self._stop = threading.Event()
        self._worker = Worker("otlp", self._run, stop=self._stop)

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Return the number of pushes by outcome. Thread-safe."""
        return tuple((outcome, self._counts[outcome]) for outcome in OUTCOMES)

    def close(self) -> None:
        """Stop the thread; a push under way is abandoned."""
        self._stop.set()
        self._exporter.shutdown()
        self._worker.join(_JOIN_SECONDS)

    def push(self) -> None:
        """Push what a scrape would get now; nothing if that would be an error, or was pushed already."""
        snapshot = self._scraped()
        if snapshot is None or snapshot.wall == self._pushed_wall:
            return
        self._resource = self._resource or node_resource(snapshot)
        outcome = "failed"
        try:
            if self._exporter.export(encode(snapshot, self._resource)) is MetricExportResult.SUCCESS:
                outcome, self._pushed_wall = "accepted", snapshot.wall
        finally:
            self._counts[outcome] += 1
        if not self._stop.is_set():
            self._log_change(failed=outcome == "failed")

    def _log_change(self, *, failed: bool) -> None:
        if failed and not self._failures:
            why = self._session.problem[:_LONGEST_REASON] or "no reason is known"
            log.warning("OTLP: %s takes no metrics: %s; they are pushed again when it does", self._receiver, why)
        elif self._failures and not failed:
            log.info("OTLP: %s takes metrics again, after %d failed pushes", self._receiver, self._failures)
        self._failures = self._failures + 1 if failed else 0

    def _run(self) -> None:
        """Push until stopped. The first wait is a random part of the interval, or a fleet would push at once."""
        wait = random.uniform(0, self._interval)  # noqa: S311  # nosec B311
        while not self._stop.wait(wait):
            self.push()
            wait = self._interval


def open_pusher(
    settings: OtlpSettings, headers: Callable[[], Mapping[str, str]], scraped: Callable[[], Snapshot | None]
) -> Pusher:
    """Return the pusher that `settings` describe, not started yet."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the SDK logs each attempt
    session = PushSession(headers)
    exporter = OTLPMetricExporter(
        endpoint=settings.endpoint,
        certificate_file=settings.ca_file or None,
        timeout=settings.timeout_seconds,
        session=session,
    )
    parts = urlsplit(settings.endpoint)
    receiver = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
    return Pusher(exporter, session, interval=settings.interval_seconds, receiver=receiver, scraped=scraped)
