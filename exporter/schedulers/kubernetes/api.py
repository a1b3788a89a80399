"""A read-only client of the API server: one list per kind of object, then one watch that is kept open.

Handles address, certificate, token, resource versions and back-off. Never writes. Sources: Kubernetes' "API Concepts"
(efficient detection of changes, bookmarks, 410 Gone), "Accessing the API from a Pod".
"""

import asyncio
import logging
import random
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import httpx
import msgspec
from msgspec import Struct

from exporter.clock import Backoff
from exporter.core.model import Fault
from exporter.files import may_exist
from exporter.redact import redact_secrets
from exporter.registry import KubernetesSettings as Settings
from exporter.schedulers.kubernetes.objects import ApiStatus, ObjectList, ObjectMeta, WatchEvent
from exporter.tls import client_context
from exporter.worker import Worker


class ApiObject(Protocol):
    """An object of the API, of which only some fields are decoded."""

    @property
    def metadata(self) -> ObjectMeta:
        """Its name, uid and version."""
        ...


T = TypeVar("T", bound=ApiObject)
log = logging.getLogger(__name__)
_RANDOM = random.SystemRandom()
"""The kernel's generator: nodes started together from one image must not get the same pauses."""
_WATCH_SECONDS = (300, 600)
"""Range of a watch's timeout, random so that not all nodes reconnect at once."""
_JOIN_SECONDS = 5.0
_LINE_BYTES = 16 << 20
"""Longest line of a watch; far longer than any object: etcd's limit is 1.5 MiB."""
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Detects a server that vanished within half a minute."""
_ADVICE: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "the token is not accepted: is the service account's token mounted and current?",
    HTTPStatus.FORBIDDEN: "the service account may not: grant it list and watch, as the Helm chart's ClusterRole does",
}


_ANY_VERSION, _NEWEST_VERSION = "0", ""
"""Resource versions of a list: what the server has in memory, however old; and what etcd has now."""
_TOO_LARGE = "Too large resource version"
"""In the server's message (storage.NewTooLargeResourceVersionError)."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a response that is no valid JSON, no UTF-8, or nested thousands of levels deep."""


class ApiError(Exception):
    """The API server did not answer, or not as expected; the message has how to fix it."""


class ApiTimeouts(Struct, frozen=True):
    """Timeouts and pauses of the client, in seconds."""

    first: float = 1.0
    """First pause before a retry, and the pause between two watches."""
    most: float = 30.0
    """Longest pause before a retry."""
    response: float = 10.0
    """Timeout for a connection, and for a response to begin."""
    watch_idle: float = 90.0
    """A watch without data for so long is restarted; servers send a bookmark about every minute."""


def spread_pause(seconds: float) -> float:
    """Return a random pause between half of `seconds` and all, so that not all nodes reconnect at once."""
    return seconds * _RANDOM.uniform(0.5, 1.0)


class ApiServer(Struct, frozen=True):
    """The API server's address and credentials."""

    url: str
    token_file: str
    ca_file: str
    timeouts: ApiTimeouts = ApiTimeouts()

    def tls(self) -> ssl.SSLContext:
        """Return a TLS context with the current CA file. Raises ApiError."""
        try:
            return client_context(self.ca_file if self.url.startswith("https:") else None)
        except OSError as err:
            raise ApiError(f"{self.ca_file} cannot be used as the API server's CA: {err}") from err

    def client(self) -> httpx.AsyncClient:
        """Return a new client with the current CA file. Raises ApiError."""
        transport = httpx.AsyncHTTPTransport(verify=self.tls(), socket_options=_KEEPALIVE)
        timeout = httpx.Timeout(self.timeouts.response)
        return httpx.AsyncClient(base_url=self.url, transport=transport, timeout=timeout, trust_env=False)

    def headers(self) -> dict[str, str]:
        """Return the headers with the current token, which is replaced before it expires. Raises ApiError."""
        try:
            token = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as err:
            raise ApiError(f"the service account's token {self.token_file} cannot be read: {err}") from err
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


class Informer(Generic[T]):
    """Mirrors the selected objects of one kind from the API server; all on one event loop."""

    def __init__(
        self,
        api_server: ApiServer,
        kind: type[T],
        *,
        paths: tuple[str, ...],
        selector: str,
        now: Callable[[], int],
        significant: Callable[[T], object] = lambda _: None,
        observe: Callable[[T | None, T], None] = lambda _before, _obj: None,
        on_update: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        accepts: Callable[[T], bool] = lambda _: True,
    ) -> None:
        """`paths` are tried in turn. `on_update` is called after any response or failure.

        `on_change` is called when an object is added or removed, or its `significant` value changes. Objects for which
        `accepts` returns False are not kept. After the first list `observe` is called with the last version of each
        kept object, if there is one, and the new one; a list repeats those that have not changed.
        """
        self._accepts: Callable[[T], bool] = accepts
        self._api_server, self._paths, self._selector = api_server, paths, selector
        self._on_update, self._on_change, self._now = on_update, on_change, now
        self._significant: Callable[[T], object] = significant
        self._observe: Callable[[T | None, T], None] = observe
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._version, self._listed, self._requested_at = _ANY_VERSION, False, now()
        self.objects: dict[str, T] = {}
        """By uid."""
        self.synced = asyncio.Event()
        """Set after the first list."""
        self.unanswered_since: int | None = None
        self.error = ""
        """Why the API server does not answer; empty while it does."""
        self.refused = ""
        """The last object that could not be decoded, and why."""

    @property
    def live(self) -> bool:
        """Whether the objects are those of the API server, but for changes under way."""
        return self.synced.is_set() and self.unanswered_since is None

    async def run(self) -> None:
        """List and watch until cancelled."""
        backoff = Backoff(self._api_server.timeouts.first, self._api_server.timeouts.most)
        while True:
            try:
                async with self._api_server.client() as client:
                    await self._list_and_watch(client)
                backoff.reset()
            except (ApiError, httpx.HTTPError, httpx.InvalidURL, OSError, *UNREADABLE) as err:
                if self.unanswered_since is None:
                    backoff.reset()
                self._record_failure(err)
            await _pause(backoff.fail())

    def _record_failure(self, err: Exception) -> None:
        if isinstance(err, (ApiError, *UNREADABLE)):
            self._listed = False  # answered, but not in a way to continue from: list again
        if self.unanswered_since is None:
            self.unanswered_since = self._requested_at
        self.error = redact_secrets(f"{self._api_server.url}{self._paths[0]}: {str(err) or type(err).__name__}")
        self._on_update()

    def _record_answer(self) -> None:
        self.unanswered_since, self.error = None, ""

    async def _list_and_watch(self, client: httpx.AsyncClient) -> None:
        """List if there is nothing to continue from, then watch until the server no longer knows our version."""
        if not self._listed:
            await self._list(client)
        while await self._watch(client):
            await _pause(self._api_server.timeouts.first)
        self._listed = False

    async def _list(self, client: httpx.AsyncClient) -> None:
        listed = msgspec.json.decode(await self._get_list(client), type=ObjectList)
        objects = [obj for raw in listed.items or () if (obj := self._decode(raw)) is not None]
        before, self.objects = self.objects, {obj.metadata.uid: obj for obj in objects if self._accepts(obj)}
        if self.synced.is_set():
            for uid, obj in self.objects.items():
                self._observe(before.get(uid), obj)
        self._version, self._listed = listed.metadata.resource_version, True
        self._record_answer()
        self.synced.set()
        self._on_change()
        self._on_update()

    async def _get_list(self, client: httpx.AsyncClient) -> bytes:
        """Return the list's content. A path that is not found is replaced by the next one for good.

        A list that may be as old as the last version seen comes from the API server's memory. Only if it cannot have
        that version, as after etcd was restored, the newest list is requested, which reads all objects from etcd.
        """
        params = {"fieldSelector": self._selector, "resourceVersion": self._version}
        self._requested_at = self._now()
        response = await client.get(self._paths[0], params=params, headers=self._api_server.headers())
        if response.status_code == HTTPStatus.NOT_FOUND and len(self._paths) > 1:
            self._paths = self._paths[1:]
            return await self._get_list(client)
        if self._version != _NEWEST_VERSION and _lacks_version(response):
            self._version = _NEWEST_VERSION
            return await self._get_list(client)
        check_response(response)
        return response.content

    async def _watch(self, client: httpx.AsyncClient) -> bool:
        """Apply changes until the watch ends; return False if the server no longer knows our version."""
        params = {
            "fieldSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_RANDOM.randint(*_WATCH_SECONDS)),
        }
        timeouts = self._api_server.timeouts
        timeout = httpx.Timeout(timeouts.response, read=timeouts.watch_idle)
        self._requested_at, headers = self._now(), self._api_server.headers()
        async with client.stream("GET", self._paths[0], params=params, headers=headers, timeout=timeout) as response:
            if response.status_code == HTTPStatus.GONE:
                return False
            if response.status_code != HTTPStatus.OK:
                await response.aread()
            check_response(response)
            self._record_answer()
            self._on_update()
            return await self._read_events(response)

    async def _read_events(self, response: httpx.Response) -> bool:
        """Apply a watch's events. A broken stream is an ended watch: the next one shows whether the server is there."""
        try:
            async with aclosing(_read_lines(response.aiter_bytes())) as lines:
                async for line in lines:
                    if not self._apply_event(msgspec.json.decode(line, type=WatchEvent)):
                        return False
        except (httpx.TransportError, OSError) as err:  # a broken TLS stream is an SSLError, which httpx passes on
            log.debug("%s: the watch ended: %s", self._paths[0], str(err) or type(err).__name__)
        return True

    def _apply_event(self, event: WatchEvent) -> bool:
        """Apply one event; return False if our version is too old. Raises ApiError."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=ApiStatus)
            if status.code == HTTPStatus.GONE:
                return False
            raise ApiError(f"the watch ended with {status.code} {status.message}")
        obj = self._decode(event.object)
        if obj is not None:
            self._version = obj.metadata.resource_version or self._version
            if event.type != "BOOKMARK":
                self._apply(obj, present=event.type != "DELETED" and self._accepts(obj))
        return True

    def _apply(self, obj: T, *, present: bool) -> None:
        before = self.objects.pop(obj.metadata.uid, None)
        if present:
            self.objects[obj.metadata.uid] = obj
            self._observe(before, obj)
        elif before is None:
            return
        if before is None or not present or self._significant(before) != self._significant(obj):
            self._on_change()
        self._on_update()

    def _decode(self, raw: msgspec.Raw) -> T | None:
        try:
            return self._decoder.decode(raw)
        except UNREADABLE as err:
            self.refused = f"an object of {self._paths[0]} was refused: {err}"
            return None


class LoopThread:
    """Runs one coroutine on an event loop in a thread of its own; if it raises, it is run again after a second."""

    def __init__(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what `main` returns until `close` cancels it. The thread does not start yet."""
        self.loop = asyncio.new_event_loop()
        self._main, self._task = main, asyncio.Future[None](loop=self.loop)
        self._stop = threading.Event()
        self._worker = Worker("kubernetes", self._serve, stop=self._stop)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._worker.alive

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def faults(self) -> tuple[Fault, ...]:
        """Return a fault if the coroutine has failed since the last call."""
        return self._worker.faults("scheduler_failed")

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call the function on the loop, if the thread is running; callable from any thread."""
        if self.alive:
            self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel the coroutine and wait for the thread to end."""
        self._stop.set()
        self.call(self._cancel)
        self._worker.join(_JOIN_SECONDS)

    def _cancel(self) -> None:
        self._task.cancel()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._task = self.loop.create_task(self._main())
        try:
            self.loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            log.debug("kubelet and API server are no longer queried")
        finally:
            if self._stop.is_set():
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
                self.loop.run_until_complete(asyncio.sleep(0))  # closed connections are released in the next iteration
                self.loop.close()


def _lacks_version(response: httpx.Response) -> bool:
    """Whether the requested version is too old for the server, or newer than any that it knows."""
    code = response.status_code
    return code == HTTPStatus.GONE or (code == HTTPStatus.GATEWAY_TIMEOUT and _TOO_LARGE in response.text)


async def _pause(seconds: float) -> None:
    await asyncio.sleep(spread_pause(seconds))


def check_response(response: httpx.Response) -> None:
    """Raise ApiError with the server's message unless the response is 200."""
    code = response.status_code
    if code == HTTPStatus.OK:
        return
    try:
        message = msgspec.json.decode(response.content, type=ApiStatus).message
    except UNREADABLE:
        message = response.text
    advice = _ADVICE.get(code)
    raise ApiError(f"{code} {message[:500].strip()}" + (f": {advice}" if advice else ""))


async def _read_lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the complete lines of a stream; an incomplete last line is dropped."""
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*parts, end])
            parts, size = [], 0
            if line.strip():
                yield line
        parts.append(rest)
        size += len(rest)
        if size > _LINE_BYTES:
            raise ApiError(f"a line of more than {_LINE_BYTES >> 20} MiB")


NODE_OBJECTS = (("pods", "/api/v1/pods", "spec.nodeName"), ("nodes", "/api/v1/nodes", "metadata.name"))
"""What the scheduler lists of its node: a name, the path, and the field that selects the node."""


def try_api(api_server: ApiServer, node: str) -> dict[str, str]:
    """Return the error of listing pods and of listing nodes by kind, "" where it works."""
    return asyncio.run(_try_all(api_server, node))


async def _try_all(api_server: ApiServer, node: str) -> dict[str, str]:
    try:
        async with api_server.client() as client:
            return {
                name: await _try_kind(client, api_server, path, f"{field}={node}") for name, path, field in NODE_OBJECTS
            }
    except ApiError as err:
        return {"": str(err)}


async def _try_kind(client: httpx.AsyncClient, api_server: ApiServer, path: str, selector: str) -> str:
    try:
        params = {"fieldSelector": selector, "resourceVersion": "0", "limit": "1"}
        check_response(await client.get(path, params=params, headers=api_server.headers()))
    except (ApiError, httpx.HTTPError, httpx.InvalidURL, OSError) as err:
        return str(err) or type(err).__name__
    return ""


def api_url(settings: Settings, environ: Mapping[str, str]) -> str:
    """Return the API server's address; empty if it is not to be queried, or "auto" finds none."""
    if settings.api_url != "auto":
        return settings.api_url.rstrip("/")
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT") or "443"
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def find_api_server(settings: Settings, environ: Mapping[str, str], timeouts: ApiTimeouts) -> ApiServer | None:
    """Return the API server's access; None, which is logged, if it is not to be queried."""
    url = api_url(settings, environ)
    if url and (settings.api_url != "auto" or may_exist(Path(settings.token_file))):
        return ApiServer(url, settings.token_file, settings.ca_file, timeouts)
    log.info(
        "scheduler kubernetes: the API server is not asked (kubernetes.api_url): pods are known by namespace and name;"
        " their jobs, labels, users and ends in a terminal phase, and a cordon of the node, are not"
    )
    return None
