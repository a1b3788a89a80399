"""Polls nodes over their JSON API, each on its own thread, within limits of time and size.

Refuses redirects, which could carry a password elsewhere. A node that fails keeps its last values, with the reason.
"""

import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.connections import is_loopback
from exporter.redact import redact_secrets
from exporter.top.view import PolledNode
from exporter.web.api import AccountsOut, GpusOut, JobsOut, Problem, ReceiptsOut

TIMEOUT_SECONDS = 5.0
"""For each step of one answer, and for the whole of it three times that."""
MAX_BYTES = 32 << 20
_UNAUTHORIZED = (401, 403)
_NOT_FOUND, _UNAVAILABLE, _OK = 404, 503, 200
_MAX_MESSAGE_CHARS = 300
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
"""Python's, before the words of the operating system."""
ResponseT = TypeVar("ResponseT")


class NodeUnavailableError(Exception):
    """No answer that can be used; the message says why, and what to do."""


class NodeAddressError(ValueError):
    """This cannot be the address of a node."""


class NodeTarget(Struct, frozen=True, kw_only=True):
    """Where a node is asked, and how."""

    url: str
    """Without a slash at the end; may hold a user and a password."""
    headers: dict[str, str] = {}
    ca_file: Path | None = None

    @property
    def address(self) -> str:
        """For people: without secrets."""
        return redact_secrets(self.url)


def parse_target(url: str, *, headers: Mapping[str, str], ca_file: Path | None) -> NodeTarget:
    """Read an address; without a scheme it is of http. Raises AddressError."""
    full_url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parsed = httpx.URL(full_url)
    except httpx.InvalidURL as err:
        raise NodeAddressError(f"{redact_secrets(url)} is no address of a node: {err}") from err
    readable = not any(char.isspace() or not char.isprintable() for char in full_url)
    if parsed.scheme not in ("http", "https") or not parsed.host or not readable:
        raise NodeAddressError(f"{redact_secrets(url)} is no address of a node (example: http://node17:19400)")
    return NodeTarget(url=full_url, headers=dict(headers), ca_file=ca_file)


def tls_verification(ca_file: Path | None) -> ssl.SSLContext | bool:
    """The authorities by which nodes prove who they are. Raises OSError, AddressError."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except ssl.SSLError as err:
        raise NodeAddressError(f"{ca_file} holds no certificates in PEM form ({err.reason or err})") from err


class NodeClient:
    """Asks one node, over a connection that is kept; also a context manager, which closes it."""

    def __init__(
        self, target: NodeTarget, *, timeout: float = TIMEOUT_SECONDS, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.target, self._timeout = target, timeout
        local = httpx.URL(target.url).host
        self._client = httpx.Client(
            headers={"Accept": "application/json", "User-Agent": "gpu-efficiency top", **target.headers},
            timeout=timeout,
            verify=tls_verification(target.ca_file),
            transport=transport,
            trust_env=not (local == "localhost" or is_loopback(local)),
        )
        self._missing_paths = set[str]()

    def gpus(self) -> GpusOut:
        """Raises SilentError."""
        return self._get("/api/v1/gpus", GpusOut)

    def jobs(self) -> JobsOut:
        """Raises SilentError."""
        return self._get("/api/v1/jobs", JobsOut)

    def accounts(self) -> AccountsOut | None:
        """The node in money; None where the daemon is too old to tell. Raises SilentError."""
        return self._get_if_supported("/api/v1/node", "", AccountsOut)

    def receipts(self, job_id: str) -> ReceiptsOut | None:
        """What it knows of a job's whole time; None where the daemon is too old to tell. Raises SilentError."""
        return self._get_if_supported("/api/v1/receipts", f"?job_id={quote(job_id, safe='')}", ReceiptsOut)

    def _get_if_supported(self, path: str, query: str, shape: type[ResponseT]) -> ResponseT | None:
        """A path that older daemons do not have: it is not asked for a second time."""
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
            raise NodeUnavailableError(f"no answer within {self._timeout:g} s") from err
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as err:
            raise NodeUnavailableError(_explain_connection_error(err)) from err
        return _decode(status, body, shape)

    def _read(self, url: str) -> tuple[int, bytes]:
        """Status and body, within the limits of time and size."""
        deadline, body = time.monotonic() + 3 * self._timeout, bytearray()
        with self._client.stream("GET", url) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise NodeUnavailableError(
                        f"its answer is larger than {MAX_BYTES >> 20} MiB: is this a node's address?"
                    )
                if time.monotonic() > deadline:
                    raise NodeUnavailableError(f"its answer was not complete after {3 * self._timeout:g} s")
            return response.status_code, bytes(body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


class _NotFoundError(NodeUnavailableError):
    """There is no such path."""


def _decode(status: int, body: bytes, shape: type[ResponseT]) -> ResponseT:
    if status == _OK:
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.MsgspecError as err:
            raise NodeUnavailableError(
                f"it does not answer as this exporter does ({err}): is this its address?"
            ) from err
    raise _status_error(status, body)


def _status_error(status: int, body: bytes) -> NodeUnavailableError:
    message = _error_detail(body)
    if status in _UNAUTHORIZED:
        return NodeUnavailableError(
            f"it answers HTTP {status}{f' ({message})' if message else ''}: give it a name and password, --header"
            " 'Authorization: ...' or --header @FILE; see docs/web.md"
        )
    if status == _NOT_FOUND:
        return _NotFoundError("it answers HTTP 404: is this the address of an exporter's node, and complete?")
    if status == _UNAVAILABLE and message:
        return NodeUnavailableError(message)
    return NodeUnavailableError(f"it answers HTTP {status}{f': {message}' if message else ''}")


def _error_detail(body: bytes) -> str:
    try:
        message = msgspec.json.decode(body, type=Problem).detail
    except msgspec.MsgspecError:
        return ""
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS]


def _explain_connection_error(err: Exception) -> str:
    message = " ".join(redact_secrets(str(err)).split())[:_MAX_MESSAGE_CHARS] or type(err).__name__
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return f"{message}: name its authority with --ca-file"
    if isinstance(err, httpx.ConnectError):
        return f"{_ERRNO.sub('', message)}; does the exporter run there, and may it be reached from here?"
    return message


class NodePoller:
    """One node: the latest of what is known of it, replaced whole and never changed."""

    def __init__(self, target: NodeTarget) -> None:
        self.state = PolledNode(address=target.address)
        self.target = target

    def poll(self, client: NodeClient, job_id: str = "") -> None:
        """Ask once. No failure of the node's leaves here."""
        before = self.state
        try:
            gpus, jobs, accounts = client.gpus(), client.jobs(), client.accounts()
            receipts = client.receipts(job_id) if job_id else None
        except NodeUnavailableError as err:
            since = before.since if before.problem else time.monotonic()
            self.state = replace(before, problem=str(err), since=since)
        else:
            self.state = PolledNode(
                address=before.address,
                gpus=gpus,
                jobs=jobs,
                accounts=accounts,
                receipts=receipts,
                at=time.monotonic(),
            )


class NodePollers:
    """All of them, for the length of a block; `changed` is called on their threads."""

    def __init__(self, targets: Sequence[NodeTarget], *, interval: float, changed: Callable[[], None]) -> None:
        self._node_pollers = [NodePoller(target) for target in targets]
        self._targets, self._interval, self._changed = targets, interval, changed
        self._stop = threading.Event()
        self._wake = [threading.Event() for _ in targets]
        self._job = ""

    @property
    def states(self) -> tuple[PolledNode, ...]:
        """In the order of the places."""
        return tuple(poller.state for poller in self._node_pollers)

    def request_receipts(self, job_id: str) -> None:
        """Ask for this job's receipts too, and now; empty: for none."""
        if job_id != self._job:
            self._job = job_id
            for wake in self._wake if job_id else ():
                wake.set()

    def start(self) -> None:
        """Begin to ask. The threads end with the program: one may wait for a node for seconds."""
        for poller, target, wake in zip(self._node_pollers, self._targets, self._wake, strict=True):
            threading.Thread(target=self._run, args=(poller, target, wake), daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()
        for wake in self._wake:
            wake.set()

    def _run(self, poller: NodePoller, target: NodeTarget, wake: threading.Event) -> None:
        with NodeClient(target) as client:
            while not self._stop.is_set():
                wake.clear()
                poller.poll(client, self._job)
                if not self._stop.is_set():
                    self._changed()
                wake.wait(self._interval)


def poll_once(targets: Sequence[NodeTarget]) -> tuple[PolledNode, ...]:
    """Ask each once, all at the same time."""
    pollers = [NodePoller(target) for target in targets]

    def work(poller: NodePoller, target: NodeTarget) -> None:
        with NodeClient(target) as client:
            poller.poll(client)

    threads = [
        threading.Thread(target=work, args=(poller, target), daemon=True)
        for poller, target in zip(pollers, targets, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(poller.state for poller in pollers)
