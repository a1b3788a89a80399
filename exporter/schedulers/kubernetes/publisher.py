"""Publishes the report of an ended job as an Event about its pod, or as an annotation on the pod.

Writes on a separate thread at a limited rate; failed writes are counted and logged once. The caller supplies the text.
Sources: Kubernetes API reference, Event v1 and Pod v1; kube-apiserver --event-ttl.
"""

import hashlib
import logging
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct

from exporter.clock import Backoff
from exporter.core.job_record import JobRecord
from exporter.core.model import Owner
from exporter.redact import redact_secrets
from exporter.schedulers.kubernetes.api import ApiError, ApiServer, check_response, spread_pause
from exporter.schedulers.kubernetes.objects import ObjectList, Pod

ANNOTATION = "gpu-efficiency.io/receipt"
REASON = "GPUEfficiency"
COMPONENT = "gpu-efficiency"
_MOST_TEXT_BYTES = 1024
"""Bytes of the text."""
_MOST_WAITING = 256
"""Queued reports; further ones are dropped."""
_SECONDS_BETWEEN = 1.0
"""Seconds between two writes, so that a node whose jobs all end at once does not load the API server."""
_TRIES = 3
_NAME_CHARACTERS = 230
"""Characters of the pod's name in the Event's, which may have 253."""
_JOIN_SECONDS = 5.0
Destination = Literal["event", "annotation"]
log = logging.getLogger(__name__)


class _RetryError(Exception):
    """A failed write that may succeed later."""


class _Report(Struct, frozen=True):
    """The record of an ended job, and the true namespace and name of its pod, which is where the report is written."""

    record: JobRecord
    namespace: str
    pod: str


def pod_of_owner(owner: Owner) -> tuple[str, str]:
    """Return the namespace and name of an owner's pod, where names of users are kept."""
    return owner.namespace, owner.pod


class JobReportPublisher:
    """Publishes job reports until `close`; the history calls `publish` with each record of an ended job."""

    def __init__(
        self,
        api_server: ApiServer,
        destination: Destination,
        *,
        node: str,
        render: Callable[[JobRecord], str],
        pod_of: Callable[[Owner], tuple[str, str]] = pod_of_owner,
        between: float = _SECONDS_BETWEEN,
    ) -> None:
        """`render` returns one line; it is called on this object's thread.

        `pod_of` returns the true namespace and name of an owner's pod, where those of the record may be masked; empty
        if they are unknown.
        """
        self._api_server, self._destination = api_server, destination
        self._node, self._render, self._between, self._pod_of = node, render, between, pod_of
        self._queue: queue.Queue[_Report | None] = queue.Queue(_MOST_WAITING)
        self._stopped = threading.Event()
        self._failing = False
        self.published = 0
        self.failed = 0
        """Reports that could not be written: pod gone or unknown, rejected, or no answer."""
        self.dropped = 0
        """Reports dropped because the queue was full."""
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()

    def publish(self, record: JobRecord) -> None:
        """Queue the record of an ended job; returns at once."""
        owner = record.owner
        if record.running or owner.scheduler != "kubernetes" or not (owner.namespace and owner.pod):
            return
        namespace, pod = self._pod_of(owner)
        if not pod:
            self.failed += 1
            self._log_failure(f"{owner.job_id}: its pod's true name is unknown since the daemon's start")
            return
        try:
            self._queue.put_nowait(_Report(record, namespace, pod))
        except queue.Full:
            self.dropped += 1
            self._log_failure(f"{_MOST_WAITING} job reports wait for the API server: {owner.job_id}'s is dropped")

    def close(self) -> None:
        """Stop the thread; queued reports are dropped."""
        self._stopped.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.debug("the queue is full: the thread stops after its current report")
        self._thread.join(timeout=_JOIN_SECONDS)

    # -- called on the thread --

    def _run(self) -> None:
        while not self._stopped.is_set():
            report = self._queue.get()
            if report is not None:
                self._publish_one(report)
            self._queue.task_done()
            self._stopped.wait(self._between if report is not None else 0)

    def _publish_one(self, report: _Report) -> None:
        try:
            self._publish_with_retries(report)
        except Exception as err:  # noqa: BLE001  a failed report must not end the thread that writes the next one
            self.failed += 1
            self._log_failure(str(err) or type(err).__name__)
        else:
            self.published += 1
            self._failing = False

    def _log_failure(self, why: str) -> None:
        """Log as a warning once, until a write succeeds again."""
        level = logging.DEBUG if self._failing else logging.WARNING
        self._failing = True
        log.log(level, "no job report could be written to Kubernetes (%s): %s", self._destination, redact_secrets(why))

    def _publish_with_retries(self, report: _Report) -> None:
        """Write the report. Raises ApiError or httpx.HTTPError after the last attempt."""
        timeouts = self._api_server.timeouts
        backoff = Backoff(2 * timeouts.first, timeouts.most)
        while True:
            try:
                with self._client() as client:
                    return self._write(client, report)
            except (_RetryError, httpx.TransportError, OSError) as err:
                pause = spread_pause(backoff.fail())
                if backoff.failures == _TRIES or self._stopped.wait(pause):
                    raise ApiError(f"{self._api_server.url}: {str(err) or type(err).__name__}") from err

    def _client(self) -> httpx.Client:
        server = self._api_server
        timeout, headers = httpx.Timeout(server.timeouts.response), server.headers()
        return httpx.Client(base_url=server.url, verify=server.tls(), timeout=timeout, headers=headers, trust_env=False)

    def _write(self, client: httpx.Client, report: _Report) -> None:
        uid = _pod_uid(client, report)
        message = _truncate(self._render(report.record))
        if self._destination == "event":
            _check_written(
                client.post(_path(report, "events"), json=_event_body(report, message, node=self._node, uid=uid))
            )
        elif uid:
            _check_written(
                client.patch(
                    _path(report, "pods", report.pod),
                    content=msgspec.json.encode({"metadata": {"uid": uid, "annotations": {ANNOTATION: message}}}),
                    headers={"Content-Type": "application/merge-patch+json"},
                )
            )
        else:
            owner = report.record.owner
            raise ApiError(f"pod {owner.namespace}/{owner.pod} is gone, and with it the place of an annotation")


def _event_body(report: _Report, message: str, *, node: str, uid: str) -> dict[str, Any]:
    """Return the Event; its name is derived from the record, so that retries create it only once."""
    at = _timestamp(report.record.end)
    about = {"apiVersion": "v1", "kind": "Pod", "name": report.pod, "namespace": report.namespace}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": _event_name(report), "namespace": report.namespace},
        "involvedObject": about | ({"uid": uid} if uid else {}),
        "reason": REASON,
        "message": message,
        "type": "Normal",
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _event_name(report: _Report) -> str:
    record = report.record
    identity = f"{record.node}\n{record.life}\n{record.owner.job_id}\n{record.start}"
    pod = report.pod[:_NAME_CHARACTERS].rstrip(".-")
    return f"{pod}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _truncate(text: str) -> str:
    """Return the text as one line of at most _MOST_TEXT_BYTES bytes, of whole characters."""
    return " ".join(text.split()).encode()[:_MOST_TEXT_BYTES].decode(errors="ignore")


def _path(report: _Report, *parts: str) -> str:
    return "/api/v1/namespaces/" + "/".join(quote(part, safe="") for part in (report.namespace, *parts))


def _pod_uid(client: httpx.Client, report: _Report) -> str:
    """Return the uid of the job's pod; "" if it is gone. Lists, because the daemon has no right to get a pod.

    A StatefulSet reuses the name for its next pod: a pod created after the job's end is not the job's.
    """
    response = client.get(_path(report, "pods"), params={"fieldSelector": f"metadata.name={report.pod}"})
    if response.status_code == HTTPStatus.NOT_FOUND:
        return ""
    _check_written(response)
    for raw in msgspec.json.decode(response.content, type=ObjectList).items or ():
        metadata = msgspec.json.decode(raw, type=Pod).metadata
        made = metadata.creation_timestamp
        if metadata.name == report.pod and (made is None or made.timestamp() <= report.record.end):
            return metadata.uid
    return ""


def _check_written(response: httpx.Response) -> None:
    """Raise ApiError for a permanent error, `_RetryError` for a temporary one; an existing Event is a success."""
    code = response.status_code
    if response.is_success or (code == HTTPStatus.CONFLICT and response.request.method == "POST"):
        return
    if code == HTTPStatus.TOO_MANY_REQUESTS or response.is_server_error:
        raise _RetryError(f"{code} {response.text[:200]}")
    if code == HTTPStatus.FORBIDDEN and response.request.method != "GET":
        kind = "create events" if response.request.method == "POST" else "patch pods"
        raise ApiError(
            f"403: the service account may not {kind}: the chart's receipts.kubernetes grants it; {response.text[:300]}"
        )
    check_response(response)
