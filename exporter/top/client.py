"""Polls nodes over their JSON API, each in its own thread, with limits on time and size.

Refuses redirects, which could send a password to another host. A node that fails keeps its last values, with the
reason.
"""

import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.connections import is_loopback
from exporter.http_body import ACCEPTED, BodyError, read_body
from exporter.redact import redact_secrets
from exporter.tls import public_context
from exporter.top.view import PolledNode
from exporter.urls import complete_url
from exporter.web.api import AccountsOut, GpusOut, JobsOut, Problem, ReceiptsOut

TIMEOUT_SECONDS = 5.0
"""Timeout of each step of a request; the whole request may take three times as long."""
MAX_BYTES = 32 << 20
_UNAUTHORIZED = (401, 403)
_NOT_FOUND, _UNAVAILABLE, _OK = 404, 503, 200
_MAX_MESSAGE_CHARS = 300
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
"""Python's prefix of messages of the operating system."""
ResponseT = TypeVar("ResponseT")


class NodeUnavailableError(Exception):
    """The node gave no usable response; the message has the reason and the remedy."""


class NodeAddressError(ValueError):
    """The given text is not the address of a node."""


class NodeTarget(Struct, frozen=True, kw_only=True):
    """URL and credentials of a node."""

    url: str
    """Without a trailing slash; may contain a user and a password."""
    headers: dict[str, str] = {}
    verify: ssl.SSLContext | None = None
    """What its certificate is verified with, the same for all nodes; None: the public authorities."""

    @property
    def address(self) -> str:
        """The URL without secrets, for display."""
        return redact_secrets(self.url)


def parse_target(url: str, *, headers: Mapping[str, str], verify: ssl.SSLContext | None = None) -> NodeTarget:
    """Parse an address; without a scheme it is http. Raises NodeAddressError."""
    full_url = complete_url(url).rstrip("/")
    try:
        parsed = httpx.URL(full_url)
    except httpx.InvalidURL as err:
        raise NodeAddressError(f"{redact_secrets(url)} is not a node's address: {err}") from err
    readable = not any(char.isspace() or not char.isprintable() for char in full_url)
    if parsed.scheme not in ("http", "https") or not parsed.host or not readable:
        raise NodeAddressError(f"{redact_secrets(url)} is not a node's address (example: http://node17:19400)")
    return NodeTarget(url=full_url, headers=dict(headers), verify=verify)


class NodeClient:
    """HTTP client of one node with a persistent connection; a context manager, which closes it."""

    def __init__(
        self, target: NodeTarget, *, timeout: float = TIMEOUT_SECONDS, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.target, self._timeout = target, timeout
        local = httpx.URL(target.url).host
        self._client = httpx.Client(
            headers=ACCEPTED | {"Accept": "application/json", "User-Agent": "gpu-efficiency top"} | target.headers,
            timeout=timeout,
            verify=target.verify or public_context(),
            transport=transport,
            trust_env=not (local == "localhost" or is_loopback(local)),
        )
        self._missing_paths = set[str]()

    def gpus(self) -> GpusOut:
        """Request the node's GPUs. Raises NodeUnavailableError."""
        return self._get("/api/v1/gpus", GpusOut)

    def jobs(self) -> JobsOut:
        """Request the node's jobs. Raises NodeUnavailableError."""
        return self._get("/api/v1/jobs", JobsOut)

    def accounts(self) -> AccountsOut | None:
        """Request the node's accounts; None if the daemon is too old for it. Raises NodeUnavailableError."""
        return self._get_if_supported("/api/v1/node", "", AccountsOut)

    def receipts(self, job_id: str) -> ReceiptsOut | None:
        """Request the records of a job; None if the daemon is too old for it. Raises NodeUnavailableError."""
        return self._get_if_supported("/api/v1/receipts", f"?job_id={quote(job_id, safe='')}", ReceiptsOut)

    def _get_if_supported(self, path: str, query: str, shape: type[ResponseT]) -> ResponseT | None:
        """Request a path that older daemons do not have; after a 404 it is not requested again."""
        if path in self._missing_paths:
            return None
        try:
            return self._get(path + query, shape)
        except _NotFoundError:
            self._missing_paths.add(path)
            return None

    def _get(self, path: str, shape: type[ResponseT]) -> ResponseT:
        try:
            status, body = self._read(f"{self.target.url}{path}")
        except httpx.TimeoutException as err:
            raise NodeUnavailableError(f"no response within {self._timeout:g} s") from err
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as err:
            raise NodeUnavailableError(_explain_connection_error(err)) from err
        return _decode(status, body, shape)

    def _read(self, url: str) -> tuple[int, bytes]:
        """Return status and body, within the limits of time and size."""
        seconds = 3 * self._timeout
        with self._client.stream("GET", url) as response:
            try:
                body = read_body(response, limit=MAX_BYTES, deadline=time.monotonic() + seconds)
            except BodyError as err:
                if err.kind == "timeout":
                    raise NodeUnavailableError(f"its response was not complete after {seconds:g} s") from err
                raise NodeUnavailableError(f"its response {err}: is this a node's address?") from err
            return response.status_code, body

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


class _NotFoundError(NodeUnavailableError):
    """The node responded 404."""


def _decode(status: int, body: bytes, shape: type[ResponseT]) -> ResponseT:
    if status == _OK:
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.MsgspecError as err:
            raise NodeUnavailableError(
                f"its response is not that of this exporter ({err}): is this its address?"
            ) from err
    raise _status_error(status, body)


def _status_error(status: int, body: bytes) -> NodeUnavailableError:
    message = _error_detail(body)
    if status in _UNAUTHORIZED:
        return NodeUnavailableError(
            f"it responds HTTP {status}{f' ({message})' if message else ''}: pass a user name and password, --header"
            " 'Authorization: ...' or --header @FILE; see docs/security.md"
        )
    if status == _NOT_FOUND:
        return _NotFoundError("it responds HTTP 404: is this the complete address of an exporter's node?")
    if status == _UNAVAILABLE and message:
        return NodeUnavailableError(message)
    return NodeUnavailableError(f"it responds HTTP {status}{f': {message}' if message else ''}")


def _error_detail(body: bytes) -> str:
    try:
        message = msgspec.json.decode(body, type=Problem).detail
    except msgspec.MsgspecError:
        return ""
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS]


def _explain_connection_error(err: Exception) -> str:
    message = " ".join(redact_secrets(str(err)).split())[:_MAX_MESSAGE_CHARS] or type(err).__name__
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return f"{message}: pass its certificate authority with --ca-file"
    if isinstance(err, httpx.ConnectError):
        return f"{_ERRNO.sub('', message)}; is the exporter running there and reachable from this host?"
    return message


class NodePoller:
    """Holds the latest state of one node; each poll replaces `state` by a new immutable value."""

    def __init__(self, target: NodeTarget) -> None:
        self.target = target
        self.state = PolledNode(address=target.address)
        self.wake = threading.Event()

    def poll(self, client: NodeClient, job_id: str = "") -> None:
        """Poll once; NodeUnavailableError becomes the `problem` of the state."""
        before = self.state
        try:
            gpus, jobs, accounts = client.gpus(), client.jobs(), client.accounts()
            receipts = client.receipts(job_id) if job_id else None
        except NodeUnavailableError as err:
            since = before.since if before.problem else time.monotonic()
            self.state = replace(before, problem=str(err), since=since)
        else:
            self.state = PolledNode(
                address=before.address, gpus=gpus, jobs=jobs, accounts=accounts, receipts=receipts, at=time.monotonic()
            )


class NodePollers:
    """Polls all nodes, each in its own thread, which calls `changed` after every poll."""

    def __init__(self, targets: Sequence[NodeTarget], *, interval: float, changed: Callable[[], None]) -> None:
        self._pollers = [NodePoller(target) for target in targets]
        self._interval, self._changed = interval, changed
        self._stop = threading.Event()
        self._job = ""

    @property
    def states(self) -> tuple[PolledNode, ...]:
        """Latest states in the order of the targets."""
        return tuple(poller.state for poller in self._pollers)

    def request_receipts(self, job_id: str) -> None:
        """Also request this job's records, starting now; empty: of no job."""
        if job_id != self._job:
            self._job = job_id
            if job_id:
                self._wake_all()

    def start(self) -> None:
        """Start the threads; they are daemon threads, because one may wait several seconds for a node."""
        for poller in self._pollers:
            threading.Thread(target=self._run, args=(poller,), daemon=True).start()

    def stop(self) -> None:
        """Stop polling."""
        self._stop.set()
        self._wake_all()

    def _wake_all(self) -> None:
        for poller in self._pollers:
            poller.wake.set()

    def _run(self, poller: NodePoller) -> None:
        with NodeClient(poller.target) as client:
            while not self._stop.is_set():
                poller.wake.clear()
                poller.poll(client, self._job)
                if not self._stop.is_set():
                    self._changed()
                poller.wake.wait(self._interval)


def poll_once(targets: Sequence[NodeTarget]) -> tuple[PolledNode, ...]:
    """Poll all nodes once, concurrently."""
    pollers = [NodePoller(target) for target in targets]

    def work(poller: NodePoller) -> None:
        with NodeClient(poller.target) as client:
            poller.poll(client)

    threads = [threading.Thread(target=work, args=(poller,), daemon=True) for poller in pollers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(poller.state for poller in pollers)
