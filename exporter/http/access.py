"""Who may see what: the rule, and the gate before the app that keeps it.

Owns passwords, refusals and the headers of every answer. Refuses methods that change something, and to tell those who
are kept out more than what to do about it.
"""

from asyncio import sleep
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import ip_address
from time import monotonic
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from starlette.responses import Response

from exporter.connections import is_loopback
from exporter.http.guarding import Guard, Guarding
from exporter.http.passwords import Verdict

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/metrics", "/healthz", "/readyz")
"""What whoever can connect may have, as far as the file asks no password of them."""
_OK = 200
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer that has none of its own."""
_CLOSED = (
    "served over the loopback only (`ssh -L 19400:localhost:19400 NODE`, `kubectl port-forward`), or to those who"
    " give a password or a client certificate (web.config_file), or to everybody with web.open_page = true;"
    " /metrics, /healthz and /readyz are served here"
)
_NAMED = (
    "over the loopback the Host header must be localhost or an address, so that no foreign page in a browser can read"
    " this one; ask for http://localhost, or set a password (web.config_file)"
)
_ELSEWHERE = "served at web.page_address; /metrics, /healthz and /readyz are served here"


class Door(Struct, frozen=True):
    """What one listening address is for."""

    guarding: Guarding
    pages: bool = True
    """False: the page and the JSON API are at another address."""
    open_page: bool = False


class Told(Protocol):
    """What the gate tells a connection, and what it knows of it."""

    guard: Guard
    """The one in force when it was made."""

    def asked(self) -> None:
        """Say that a request is under way."""

    def answered(self) -> None:
        """Say that it has its answer, as far as the app is concerned."""

    def penalty(self) -> float:
        """Seconds that a refusal waits before it is sent: who knocks without end knocks slower."""


class Refusal(Struct, frozen=True):
    """An answer instead of the app's."""

    status: int
    why: str
    headers: dict[str, str] = {}


def why_closed(door: Door, *, local: str, peer: str, host: str | None, authenticated: bool) -> str:
    """Say why the page and the JSON API are not for this connection; empty: they are.

    `local` and `peer` are its two addresses, `host` its Host header. Both ends must be on the loopback: with Linux'
    route_localnet a neighbour can send packets to ours (CVE-2020-8558).
    """
    if not door.pages:
        return _ELSEWHERE
    if authenticated or door.open_page:
        return ""
    if not (is_loopback(local) and is_loopback(peer)):
        return _CLOSED
    return "" if host is not None and names_no_name(host) else _NAMED


def names_no_name(host: str) -> bool:
    """True for localhost and for addresses, with a port or without: nobody else can have a name for those."""
    name, colon, port = host.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or host.endswith("]"):
        name = host
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    elif ":" in name:
        return False
    try:
        ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True


class Gate:
    """The app behind the rule."""

    def __init__(self, app: App, door: Door) -> None:
        """Guard `app` as `door` says."""
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        line: Told | None = scope.get("state", {}).get("line")
        if line is not None:
            line.asked()
        try:
            await self._answer(scope, receive, self._with_headers(send, line), line)
        finally:
            if line is not None:
                line.answered()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, line: Told | None) -> None:
        refusal, told = await self._judge(scope, line)
        if refusal is not None:
            await sleep(0 if line is None else line.penalty())
            await _answer_of(refusal, scope["path"])(scope, receive, send)
        elif scope["path"] == "/readyz":
            await self._ready(scope, receive, send, told=told)
        else:
            await self._app(scope, receive, send)

    async def _judge(self, scope: Scope, line: Told | None) -> tuple[Refusal | None, bool]:
        """Say what is answered instead of the app, if anything, and whether who asks may be told reasons."""
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            return Refusal(405, "nothing can be changed here", {"Allow": "GET, HEAD"}), False
        if path == "/healthz":
            return None, False
        verdict = await self._verdict(scope)
        if path == "/readyz":
            return None, verdict == "yes"
        return _refused_by(verdict) or self._too_fast() or self._closed(scope, line), True

    async def _verdict(self, scope: Scope) -> Verdict:
        passwords = self._door.guarding.now.passwords
        if passwords is None:
            return "yes"
        return await passwords.verdict(_header(scope, b"authorization"), _end(scope, "client"))

    def _too_fast(self) -> Refusal | None:
        pace = self._door.guarding.now.pace
        if pace is None or pace.take(monotonic()):
            return None
        return Refusal(429, "too many requests (web.config_file, rate_limit)", {"Retry-After": "1"})

    def _closed(self, scope: Scope, line: Told | None) -> Refusal | None:
        why = "" if scope["path"] in OPEN else self._why_closed(scope, line)
        return Refusal(403, why) if why else None

    def _why_closed(self, scope: Scope, line: Told | None) -> str:
        guard = self._door.guarding.now
        certified = guard.mutual and line is not None and line.guard.mutual
        return why_closed(
            self._door,
            local=_end(scope, "server"),
            peer=_end(scope, "client"),
            host=_header(scope, b"host"),
            authenticated=certified or guard.passwords is not None,
        )

    async def _ready(self, scope: Scope, receive: Receive, send: Send, *, told: bool) -> None:
        """Answer /readyz; the reasons, which may name jobs and files, only to those who are `told`."""
        heard = _Heard()
        try:
            await self._app({**scope, "method": "GET"}, receive, heard.hear)
        finally:  # where the app fails it has answered so, and what it raises is for the log
            body, problem = heard.body, self._door.guarding.problem
            if not told:
                body = b"ok\n" if heard.status == _OK else b"not ready\n"
            elif problem:
                body += f"web.config_file: not in force as it is now: {problem}\n".encode()
            await Response(body, heard.status, media_type="text/plain")(scope, receive, send)

    def _with_headers(self, send: Send, line: Told | None) -> Send:
        """Add what every answer has; a connection made under other certificates ends with this answer."""
        guard = self._door.guarding.now
        outdated = line is not None and line.guard.context is not guard.context

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _merged(message.get("headers", ()), guard, close=outdated)
            await send(message)

        return add


def _merged(given: Any, guard: Guard, *, close: bool) -> list[tuple[bytes, bytes]]:
    """The app's headers, ours where it has none, the file's before all."""
    set_here = {name.lower().encode(): value.encode() for name, value in guard.headers}
    if close:
        set_here[b"connection"] = b"close"
    kept = [(name.lower(), value) for name, value in given if name.lower() not in set_here]
    had = {name for name, _ in kept} | set(set_here)
    ours = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
    return [*kept, *(pair for pair in ours if pair[0] not in had), *set_here.items()]


def fixed_headers(guard: Guard) -> list[tuple[bytes, bytes]]:
    """Headers of an answer that no app has made."""
    return _merged((), guard, close=False)


class _Heard(Struct):
    """An answer that is kept instead of sent."""

    status: int = 500
    body: bytes = b""

    async def hear(self, message: Message) -> None:
        """As an app's `send`."""
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


def _refused_by(verdict: Verdict) -> Refusal | None:
    if verdict == "later":
        return Refusal(429, "too many wrong passwords: wait a little", {"Retry-After": "5"})
    if verdict == "no":
        ask = {"WWW-Authenticate": 'Basic realm="gpu-efficiency", charset="UTF-8"'}
        return Refusal(401, "a name and its password are needed (web.config_file, basic_auth_users)", ask)
    return None


def _answer_of(refusal: Refusal, path: str) -> Response:
    if path.startswith("/api/") or path == "/openapi.json":
        body, kind = msgspec.json.encode({"detail": refusal.why}), "application/json"
    else:
        body, kind = f"{refusal.why}\n".encode(), "text/plain; charset=utf-8"
    return Response(body, refusal.status, {**refusal.headers, "Content-Type": kind})


def _header(scope: Scope, name: bytes) -> str | None:
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _end(scope: Scope, which: str) -> str:
    """The address of one end of the connection; empty where it is not known."""
    end = scope.get(which)
    return f"{end[0]}" if end else ""
