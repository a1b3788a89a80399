"""The API server, asked as little as can be: for each kind of object a list, then one watch that is kept open.

Owns the requests: address, certificate, token, resource versions, and when to ask again. Refuses to write, and to list
what does not belong to this node.

Sources: Kubernetes' "API Concepts" (efficient detection of changes, bookmarks, 410 Gone) and "Accessing the API from a
Pod". A list asks for any version (`resourceVersion=0`), which servers have in their cache; only after a 410 for the
newest.
"""

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import httpx
import msgspec
from msgspec import Struct

from exporter.schedulers.kubernetes.objects import Event, Listed, Metadata, Status
from exporter.wording import without_secrets


class Thing(Protocol):
    """An object of the API, of which only some fields are read."""

    @property
    def metadata(self) -> Metadata:
        """Its name, uid and version."""
        ...


T = TypeVar("T", bound=Thing)
log = logging.getLogger(__name__)
_CHANCE = random.SystemRandom()
"""The kernel's: nodes that start together from one image must not wait alike."""
_WATCH_SECONDS = (300, 600)
"""How long a watch is asked to last, spread so that nodes do not all come back at once."""
_LINE_BYTES = 16 << 20
"""Far longer than any object: etcd takes 1.5 MiB."""
_OK, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _GONE = 200, 401, 403, 404, 410
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A server that vanished without a word is noticed within half a minute."""
_REFUSALS = {
    _UNAUTHORIZED: "the token is not accepted: is the service account's token mounted and current?",
    _FORBIDDEN: "the service account may not: grant it list and watch, as the Helm chart's ClusterRole does",
}


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What JSON may be: not as it should be, not UTF-8, or thousands of brackets deep."""


class ApiError(Exception):
    """The API server did not answer, or not with what was asked; the message says what to do."""


class Pace(Struct, frozen=True):
    """How patient the client is, in seconds."""

    first: float = 1.0
    """Before a second try, and between two watches."""
    most: float = 30.0
    """Before any try."""
    answer: float = 10.0
    """For a connection, or an answer to begin."""
    quiet: float = 90.0
    """A watch that says nothing for so long is asked anew; servers send a bookmark about every minute."""


class Access(Struct, frozen=True):
    """Where the API server is, and what it wants to see."""

    url: str
    token_file: str
    ca_file: str
    pace: Pace = Pace()

    def client(self) -> httpx.AsyncClient:
        """A client of its own, with the certificate as it is now; raises ApiError."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file if self.url.startswith("https:") else None)
        except OSError as err:
            raise ApiError(f"{self.ca_file} cannot be used as the API server's CA: {err}") from err
        transport = httpx.AsyncHTTPTransport(verify=context, socket_options=_KEEPALIVE)
        timeout = httpx.Timeout(self.pace.answer)
        return httpx.AsyncClient(base_url=self.url, transport=transport, timeout=timeout, trust_env=False)

    def headers(self) -> dict[str, str]:
        """The token as it is now, for it is replaced before it expires; raises ApiError."""
        try:
            token = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as err:
            raise ApiError(f"the service account's token {self.token_file} cannot be read: {err}") from err
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


class Store(Generic[T]):
    """The selected objects of one kind as the API server has them; all on one event loop."""

    def __init__(
        self,
        access: Access,
        kind: type[T],
        *,
        paths: tuple[str, ...],
        selector: str,
        matters: Callable[[T], object],
        news: Callable[[], None],
        moved: Callable[[], None],
        now: Callable[[], int],
        wanted: Callable[[T], bool] = lambda _: True,
    ) -> None:
        """`paths` are tried in turn; `news` is called after any word, `moved` if an object comes, goes or `matters`.

        What is not `wanted` is not kept.
        """
        self._wanted: Callable[[T], bool] = wanted
        self._access, self._paths, self._selector = access, paths, selector
        self._news, self._moved, self._now = news, moved, now
        self._matters: Callable[[T], object] = matters
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._version, self._asked = "", now()
        self.objects: dict[str, T] = {}
        """By uid."""
        self.synced = asyncio.Event()
        """A list has come."""
        self.unanswered_since: int | None = None
        self.trouble = ""
        """Why there is no answer, in words; empty while there is."""
        self.refused = ""
        """The last object that could not be read, and why."""

    @property
    def live(self) -> bool:
        """What is here is what the server has, but for what is on its way."""
        return self.synced.is_set() and self.unanswered_since is None

    async def run(self) -> None:
        """List and watch until cancelled."""
        failures, fresh = 0, "0"
        while True:
            try:
                async with self._access.client() as client:
                    await self._follow(client, fresh)
                failures, fresh = 0, ""
            except (ApiError, httpx.HTTPError, httpx.InvalidURL, OSError, *UNREADABLE) as err:
                failures = 0 if self.unanswered_since is None else failures + 1
                self._fail(err)
            await self._pause(failures)

    def _fail(self, err: Exception) -> None:
        if isinstance(err, (ApiError, *UNREADABLE)):
            self._version = ""  # an answer, but not one to go on from
        if self.unanswered_since is None:
            self.unanswered_since = self._asked
        self.trouble = without_secrets(f"{self._access.url}{self._paths[0]}: {str(err) or type(err).__name__}")
        self._news()

    async def _pause(self, failures: int) -> None:
        """Wait at random, longer with each failure: a server that comes up again is not met by all nodes at once."""
        pace = self._access.pace
        await asyncio.sleep(min(pace.most, pace.first * 2 ** min(failures, 10)) * _CHANCE.uniform(0.5, 1.0))

    def _answered(self) -> None:
        self.unanswered_since, self.trouble = None, ""

    async def _follow(self, client: httpx.AsyncClient, fresh: str) -> None:
        """List where nothing is known, then watch until the server no longer knows our version."""
        if not self._version:
            await self._list(client, fresh)
        while await self._watch(client):
            await self._pause(0)
        self._version = ""

    async def _list(self, client: httpx.AsyncClient, fresh: str) -> None:
        listed = msgspec.json.decode(await self._get(client, fresh), type=Listed)
        things = [thing for raw in listed.items or () if (thing := self._read(raw)) is not None]
        self.objects = {thing.metadata.uid: thing for thing in things if self._wanted(thing)}
        self._version = listed.metadata.resource_version
        self._answered()
        self.synced.set()
        self._moved()
        self._news()

    async def _get(self, client: httpx.AsyncClient, fresh: str) -> bytes:
        """Give the list's text; a path that is not there gives way to the next one for good."""
        params = {"fieldSelector": self._selector, "resourceVersion": fresh}
        self._asked = self._now()
        answer = await client.get(self._paths[0], params=params, headers=self._access.headers())
        if answer.status_code == _NOT_FOUND and len(self._paths) > 1:
            self._paths = self._paths[1:]
            return await self._get(client, fresh)
        judge(answer)
        return answer.content

    async def _watch(self, client: httpx.AsyncClient) -> bool:
        """Take in changes until the watch ends; False when the server no longer knows our version."""
        params = {
            "fieldSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_CHANCE.randint(*_WATCH_SECONDS)),
        }
        pace = self._access.pace
        timeout = httpx.Timeout(pace.answer, read=pace.quiet)
        self._asked, headers = self._now(), self._access.headers()
        async with client.stream("GET", self._paths[0], params=params, headers=headers, timeout=timeout) as answer:
            if answer.status_code == _GONE:
                return False
            if answer.status_code != _OK:
                await answer.aread()
            judge(answer)
            self._answered()
            self._news()
            return await self._take_in(answer)

    async def _take_in(self, answer: httpx.Response) -> bool:
        """A stream that breaks is a watch that ended: whether the server is there the next one tells."""
        try:
            async with aclosing(_lines(answer.aiter_bytes())) as lines:
                async for line in lines:
                    if not self._event(msgspec.json.decode(line, type=Event)):
                        return False
        except (httpx.TransportError, OSError) as err:  # TLS that breaks off is an SSLError, which httpx passes on
            log.debug("%s: the watch ended: %s", self._paths[0], str(err) or type(err).__name__)
        return True

    def _event(self, event: Event) -> bool:
        """Take in one change; False for the word that our version is too old. Raises ApiError."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            if status.code == _GONE:
                return False
            raise ApiError(f"the watch ended with {status.code} {status.message}")
        thing = self._read(event.object)
        if thing is not None:
            self._version = thing.metadata.resource_version or self._version
            if event.type != "BOOKMARK":
                self._keep(thing, there=event.type != "DELETED" and self._wanted(thing))
        return True

    def _keep(self, thing: T, *, there: bool) -> None:
        before = self.objects.pop(thing.metadata.uid, None)
        if there:
            self.objects[thing.metadata.uid] = thing
        elif before is None:
            return
        if before is None or not there or self._matters(before) != self._matters(thing):
            self._moved()
        self._news()

    def _read(self, raw: msgspec.Raw) -> T | None:
        try:
            return self._decoder.decode(raw)
        except UNREADABLE as err:
            self.refused = f"an object of {self._paths[0]} was refused: {err}"
            return None


def judge(answer: httpx.Response) -> None:
    """Raise ApiError for anything but a good answer, with the server's own words."""
    code = answer.status_code
    if code == _OK:
        return
    try:
        said = msgspec.json.decode(answer.content, type=Status).message
    except UNREADABLE:
        said = answer.text
    advice = _REFUSALS.get(code)
    raise ApiError(f"{code} {said[:500].strip()}" + (f": {advice}" if advice else ""))


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Whole lines, however the stream is cut; what follows the last one is the beginning of one that never came."""
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
