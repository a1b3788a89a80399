"""Puts the receipt of a job that has ended where its user looks: an Event about its pod, or an annotation on it.

Owns the two requests that write, a thread of its own, and how often it writes: nobody waits for it, and what cannot be
written is counted and told once. Refuses to say what a receipt says: it is handed the words.

Sources: Kubernetes API reference, Event v1 core and Pod v1; "Annotations" (256 KiB for all of an object's). The API
server forgets an Event after an hour (kube-apiserver --event-ttl); events.k8s.io refuses a note of more than 1024
bytes, and v1 is read through it. The pod of a job that has ended may be gone: an Event can still name it, and there is
nothing to annotate.
"""

import hashlib
import logging
import queue
import random
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

import httpx
import msgspec

from exporter.core.statement import Statement
from exporter.schedulers.kubernetes.api import Access, ApiError, judge
from exporter.schedulers.kubernetes.objects import Listed, Pod
from exporter.wording import without_secrets

ANNOTATION = "gpu-efficiency.io/receipt"
REASON = "GPUEfficiency"
COMPONENT = "gpu-efficiency"
_MOST_BYTES = 1024
"""Of what is said."""
_WAITING = 256
"""Receipts that may wait; further ones are dropped."""
_BETWEEN = 1.0
"""Seconds between two that are written: a node whose jobs all end at once is no burden for the API server."""
_TRIES = 3
_OK, _FORBIDDEN, _NOT_FOUND, _CONFLICT, _BUSY, _SERVER = 200, 403, 404, 409, 429, 500
_NAME_CHARACTERS = 230
"""Of a pod's name in its Event's, which may have 253."""
_JOIN_SECONDS = 5.0
_CHANCE = random.SystemRandom()
Place = Literal["event", "annotation"]
log = logging.getLogger(__name__)


class _LaterError(Exception):
    """The API server may take it another time."""


class Placing:
    """From construction to `close`; `place` is what a history calls with each statement of a job that has ended."""

    def __init__(
        self, access: Access, what: Place, *, node: str, say: Callable[[Statement], str], between: float = _BETWEEN
    ) -> None:
        """`say` gives one line; it is called on this object's thread."""
        self._access, self._what, self._node, self._say, self._between = access, what, node, say, between
        self._queue: queue.Queue[Statement | None] = queue.Queue(_WAITING)
        self._over = threading.Event()
        self._troubled = False
        self.placed = 0
        self.failed = 0
        """That could not be written: gone pods, refusals, no answer."""
        self.dropped = 0
        """For which there was no room to wait."""
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()

    def place(self, statement: Statement) -> None:
        """Take in a statement of a job that has ended; returns at once, whatever the API server does."""
        owner = statement.owner
        if statement.running or owner.scheduler != "kubernetes" or not (owner.namespace and owner.pod):
            return
        try:
            self._queue.put_nowait(statement)
        except queue.Full:
            self.dropped += 1
            self._tell(f"{_WAITING} receipts wait for the API server: {owner.job_id}'s is dropped")

    def close(self) -> None:
        """End the thread; what waits is not written."""
        self._over.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.debug("the thread finds out by itself")
        self._thread.join(timeout=_JOIN_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether its thread goes on."""
        return self._thread.is_alive()

    def idle(self) -> bool:
        """Whether nothing waits or is being written."""
        return self._queue.unfinished_tasks == 0

    # -- all that follows is done on the thread --

    def _run(self) -> None:
        while not self._over.is_set():
            statement = self._queue.get()
            if statement is not None:
                self._one(statement)
            self._queue.task_done()
            self._over.wait(self._between if statement is not None else 0)

    def _one(self, statement: Statement) -> None:
        try:
            self._with_patience(statement)
        except Exception as err:  # noqa: BLE001  a receipt is never worth more than the thread that writes the next
            self.failed += 1
            self._tell(str(err) or type(err).__name__)
        else:
            self.placed += 1
            self._troubled = False

    def _tell(self, why: str) -> None:
        """Once, until one is written again."""
        level = logging.DEBUG if self._troubled else logging.WARNING
        self._troubled = True
        log.log(level, "no receipt could be placed in Kubernetes (%s): %s", self._what, without_secrets(why))

    def _with_patience(self, statement: Statement) -> None:
        """Raises ApiError or httpx.HTTPError where it cannot be written, in the end."""
        for attempt in range(1, _TRIES + 1):
            try:
                with self._client() as client:
                    return self._write(client, statement)
            except (_LaterError, httpx.TransportError, OSError) as err:
                if attempt == _TRIES or self._over.wait(self._wait(attempt)):
                    raise ApiError(f"{self._access.url}: {str(err) or type(err).__name__}") from err
        return None

    def _wait(self, attempt: int) -> float:
        pace = self._access.pace
        return min(pace.most, pace.first * 2.0**attempt) * _CHANCE.uniform(0.5, 1.0)

    def _client(self) -> httpx.Client:
        access = self._access
        try:
            context = ssl.create_default_context(cafile=access.ca_file if access.url.startswith("https:") else None)
        except OSError as err:
            raise ApiError(f"{access.ca_file} cannot be used as the API server's CA: {err}") from err
        timeout, headers = httpx.Timeout(access.pace.answer), access.headers()
        return httpx.Client(base_url=access.url, verify=context, timeout=timeout, headers=headers, trust_env=False)

    def _write(self, client: httpx.Client, statement: Statement) -> None:
        uid = _uid(client, statement)
        words = _cut(self._say(statement))
        if self._what == "event":
            _judged(client.post(_path(statement, "events"), json=event(statement, words, node=self._node, uid=uid)))
        elif uid:
            _judged(
                client.patch(
                    _path(statement, "pods", statement.owner.pod),
                    content=msgspec.json.encode({"metadata": {"uid": uid, "annotations": {ANNOTATION: words}}}),
                    headers={"Content-Type": "application/merge-patch+json"},
                )
            )
        else:
            owner = statement.owner
            raise ApiError(f"pod {owner.namespace}/{owner.pod} is gone, and with it the place of an annotation")


def event(statement: Statement, words: str, *, node: str, uid: str) -> dict[str, Any]:
    """The Event as the API takes it: its name is its statement's, so that it is made once however often it is tried."""
    owner, at = statement.owner, _time(statement.end)
    about = {"apiVersion": "v1", "kind": "Pod", "name": owner.pod, "namespace": owner.namespace}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": _name(statement), "namespace": owner.namespace},
        "involvedObject": about | ({"uid": uid} if uid else {}),
        "reason": REASON,
        "message": words,
        "type": "Normal",
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _name(statement: Statement) -> str:
    told = f"{statement.node}\n{statement.life}\n{statement.owner.job_id}\n{statement.start}"
    pod = statement.owner.pod[:_NAME_CHARACTERS].rstrip(".-")
    return f"{pod}.{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cut(words: str) -> str:
    """One line of so many bytes at most, of whole characters."""
    return " ".join(words.split()).encode()[:_MOST_BYTES].decode(errors="ignore")


def _path(statement: Statement, *parts: str) -> str:
    return "/api/v1/namespaces/" + "/".join(quote(part, safe="") for part in (statement.owner.namespace, *parts))


def _uid(client: httpx.Client, statement: Statement) -> str:
    """Of the job's pod; empty where that is gone. By a list, which the daemon may ask for; it may get no pod alone.

    A StatefulSet gives its next pod the same name: one that was made after the job's end is another.
    """
    answer = client.get(_path(statement, "pods"), params={"fieldSelector": f"metadata.name={statement.owner.pod}"})
    if answer.status_code == _NOT_FOUND:
        return ""
    _judged(answer)
    for raw in msgspec.json.decode(answer.content, type=Listed).items or ():
        metadata = msgspec.json.decode(raw, type=Pod).metadata
        made = metadata.creation_timestamp
        if metadata.name == statement.owner.pod and (made is None or made.timestamp() <= statement.end):
            return metadata.uid
    return ""


def _judged(answer: httpx.Response) -> None:
    """Raise ApiError for what will never go, `_LaterError` for what may; an Event that is there already is good."""
    code = answer.status_code
    if _OK <= code < 300 or (code == _CONFLICT and answer.request.method == "POST"):  # noqa: PLR2004  all 2xx
        return
    if code == _BUSY or code >= _SERVER:
        raise _LaterError(f"{code} {answer.text[:200]}")
    if code == _FORBIDDEN and answer.request.method != "GET":
        kind = "create events" if answer.request.method == "POST" else "patch pods"
        raise ApiError(
            f"403: the service account may not {kind}: the chart's receipts.kubernetes grants it; {answer.text[:300]}"
        )
    judge(answer)
