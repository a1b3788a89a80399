"""Controls access: passwords, client certificates, the loopback rule, rate limits and response headers.

Reloads the web configuration when the file or a certificate changes; an invalid file leaves the previous one active.
Refuses methods other than GET and HEAD, to store a password, and to hash on the event loop.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import socket
import threading
import time
from base64 import b64decode
from binascii import Error as NotBase64
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
from msgspec import Struct
from starlette.responses import Response

from exporter.config import ConfigError
from exporter.connections import AddressBuckets, TokenBucket, client_network, is_loopback
from exporter.worker import give_way

Verdict = Literal["yes", "no", "later"]
_BCRYPT_MAX_BYTES = 72
"""Bytes of a password that bcrypt uses."""
_MAX_WAITING = 16
"""Maximum number of requests that wait for a password check; one hash is computed at a time."""
_FORGIVEN_SECONDS, _MOST_FAILED = 600.0, 4096
"""How long a wrong password is held against its address, and for how many addresses that is remembered."""
_SHARE = 0.1
"""Of a processor, on average, for wrong passwords of addresses that have failed lately; as much for those of others."""
_GUESSING_AT_ONCE, _FIRST_AT_ONCE = 2.0, 6.0
"""Processor seconds that these may take at once; more for others, as each address of an attack fails there once."""


class PasswordChecker:
    """Checks passwords of the users in one version of the file; a reload creates a new one with an empty cache."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Take bcrypt hashes by user name, already validated."""
        self._hashes = {name: password_hash.encode() for name, password_hash in users.items()}
        self._verified: dict[str, bytes] = {}
        self._salt = os.urandom(16)
        self._decoy = b"$2b$%02d$" % max(int(password_hash[4:6]) for password_hash in self._hashes.values()) + b"." * 53
        self._hash_lock, self._guess_turn = asyncio.Lock(), asyncio.Lock()
        """Only the guess whose turn it is waits for the lock, so that a first login waits for one guess at most."""
        self._waiting: Counter[bool] = Counter()
        """Requests that wait for a check, of addresses that have failed lately (True) and of others."""
        self._per_address = AddressBuckets(5, 0.5)
        self._overall = {True: TokenBucket(_GUESSING_AT_ONCE, _SHARE), False: TokenBucket(_FIRST_AT_ONCE, _SHARE)}
        """Processor seconds for addresses that have failed lately, and for others, whatever a hash costs."""
        self._failed_at: dict[str, float] = {}
        """When a check for an address last failed, the latest last."""

    async def verdict(self, header: str | None, address: str) -> Verdict:
        """Check a user's credentials; "later": not checked, after too many failures from `address` or in total."""
        parsed = parse_credentials(header)
        if parsed is None:
            return "no"
        name, password = parsed
        digest = self._digest(password)
        if self._is_verified(name, digest):
            return "yes"
        guesses = self.guesses(address)
        if self._waiting[guesses] >= _MAX_WAITING:
            return "later"
        self._waiting[guesses] += 1
        try:
            async with self._guess_turn if guesses else nullcontext(), self._hash_lock:
                if self._is_verified(name, digest):
                    return "yes"
                if guesses or not self.guesses(address):
                    return await self._check_hash(name, password, digest, address)
        finally:
            self._waiting[guesses] -= 1
        return await self.verdict(header, address)  # the address has failed meanwhile: this waits among the guesses

    def knows(self, header: str | None) -> bool:
        """Return whether these credentials were correct before; computes no hash."""
        parsed = parse_credentials(header)
        return parsed is not None and self._is_verified(parsed[0], self._digest(parsed[1]))

    async def _check_hash(self, name: str, password: bytes, digest: bytes, address: str) -> Verdict:
        now, bucket = time.monotonic(), self._per_address.bucket_of(address)
        overall = self._overall[self.guesses(address)]
        if overall.available(now) <= 0 or not bucket.take(now):
            return "later"
        matches, spent = await asyncio.get_running_loop().run_in_executor(
            _HASHING, _timed_match, password, self._hashes.get(name, self._decoy)
        )
        if not matches or name not in self._hashes:
            overall.spend(spent)
            self._note_failure(address, now)
            return "no"
        bucket.refund()
        self._verified[name] = digest
        return "yes"

    def guesses(self, address: str) -> bool:
        """Return whether a check for the address has failed lately."""
        return time.monotonic() - self._failed_at.get(client_network(address), -inf) < _FORGIVEN_SECONDS

    def _note_failure(self, address: str, now: float) -> None:
        self._failed_at.pop(client_network(address), None)
        self._failed_at[client_network(address)] = now
        if len(self._failed_at) > _MOST_FAILED:
            del self._failed_at[next(iter(self._failed_at))]

    def _is_verified(self, name: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._verified.get(name, b""), digest)

    def _digest(self, password: bytes) -> bytes:
        return hashlib.blake2b(password, key=self._salt).digest()


def parse_credentials(header: str | None) -> tuple[str, bytes] | None:
    """Parse a Basic Authorization header into name and password; None if it is not valid."""
    kind, _, coded = (header or "").strip().partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        name, colon, password = b64decode(coded.strip(), validate=True).partition(b":")
    except (NotBase64, ValueError):
        return None
    return (name.decode("utf-8", "replace"), password) if colon else None


_HASHING = ThreadPoolExecutor(1, thread_name_prefix="passwords", initializer=give_way)
"""Hashing takes some 50 ms, without the interpreter's lock, and would else take half the processor from a scrape."""


def _timed_match(password: bytes, password_hash: bytes) -> tuple[bool, float]:
    """Return whether the password matches, and the processor seconds that this took."""
    began = time.thread_time()
    return _matches(password, password_hash), time.thread_time() - began


def _matches(password: bytes, password_hash: bytes) -> bool:
    import bcrypt  # noqa: PLC0415  only if users are configured

    try:
        return bcrypt.checkpw(password[:_BCRYPT_MAX_BYTES], password_hash)
    except ValueError:  # the password contains a NUL byte
        return False


if TYPE_CHECKING:
    from ssl import SSLContext

    from exporter.web.web_config import LoadedWebConfig

log = logging.getLogger(__name__)
RELOAD_SECONDS = 3.0
"""Interval between two reads of the files, each a few kilobytes."""


class WebConfig(Struct, frozen=True, eq=False):
    """One version of the file, ready for use; the defaults, for no file, require no authentication."""

    ssl_context: "SSLContext | None" = None
    """TLS context for new connections; None: plain HTTP."""
    passwords: "PasswordChecker | None" = None
    mutual_tls: bool = False
    """True: the TLS handshake requires a certificate signed by the client CA."""
    client_names: frozenset[str] = frozenset()
    """Subject alternative names of which the client certificate must have one; empty: any certificate."""
    headers: tuple[tuple[str, str], ...] = ()
    rate_limit: TokenBucket | None = None
    note: str = ""
    """Settings of the file that are applied differently; empty if there are none."""

    @property
    def scheme(self) -> str:
        """URL scheme of the address."""
        return "https" if self.ssl_context else "http"

    @property
    def authenticates(self) -> bool:
        """Whether every client must authenticate."""
        return self.mutual_tls or self.passwords is not None


class WebConfigWatcher:
    """Loads the web configuration file, and again whenever it changes."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file; raises ConfigError."""
        self.path = path
        self.current = WebConfig()
        self.problem = ""
        """Why the present content of the file is not active; empty if it is."""
        self.reloads = 0
        self._digest = b""
        if path is not None:
            self._load(path)

    def reload_if_changed(self) -> None:
        """Reload the file if it has changed; an invalid one is logged once and changes nothing."""
        if self.path is None:
            return
        try:
            if self._load(self.path):
                self.reloads += 1
                log.info("%s: reloaded for new connections", self.path)
            self.problem = ""
        except ConfigError as err:
            if f"{err}" != self.problem:
                log.error("web configuration not reloaded, the previous one stays active: %s", err)  # noqa: TRY400  for operators
            self.problem = f"{err}"

    def watch(self, stop: threading.Event) -> None:
        """Check for changes every RELOAD_SECONDS until `stop` is set; returns at once if there is no file."""
        while self.path is not None and not stop.wait(RELOAD_SECONDS):
            self.reload_if_changed()

    def _load(self, path: Path) -> bool:
        """Load the file, and apply it if it has changed; returns whether it has. Raises ConfigError."""
        from exporter.web.web_config import load_web_config  # noqa: PLC0415  imports PyYAML: only if configured

        loaded = load_web_config(path)
        if loaded.digest == self._digest:
            return False
        try:
            self.current = build_web_config(loaded)
        except ConfigError as err:
            raise ConfigError(f"{path}: {err}") from None
        self._digest = loaded.digest
        if self.current.note:
            log.warning("%s: %s", path, self.current.note)
        return True


def build_web_config(loaded: "LoadedWebConfig") -> WebConfig:
    """Build the configuration from a loaded file; raises ConfigError."""
    from exporter.web.web_config import (  # noqa: PLC0415  imports PyYAML: only if a file is configured
        MUTUAL_TLS,
        create_ssl_context,
        parse_duration,
    )

    file, tls = loaded.file, loaded.file.tls_server_config
    ssl_context, note = create_ssl_context(loaded)
    interval = parse_duration(file.rate_limit.interval)
    return WebConfig(
        ssl_context=ssl_context,
        passwords=PasswordChecker(file.basic_auth_users) if file.basic_auth_users else None,
        mutual_tls=tls is not None and tls.client_auth_type == MUTUAL_TLS,
        client_names=frozenset(tls.client_allowed_sans if tls else ()),
        headers=tuple(file.http_server_config.headers.items()),
        rate_limit=TokenBucket(file.rate_limit.burst, 1 / interval) if interval else None,
        note=note,
    )


Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/metrics", "/healthz", "/readyz")
"""Paths served to every client, unless the file requires a password."""
_OK = 200
DEFAULT_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers added to every response that does not set them itself."""
_LOOPBACK_ONLY = (
    "served over the loopback only (`ssh -L 19400:localhost:19400 NODE`, `kubectl port-forward`), or to those who"
    " give a password or a client certificate (web.config_file), or to everybody with web.open_page = true;"
    " /metrics, /healthz and /readyz are served here"
)
_HOST_HEADER = (
    "over the loopback the Host header must be localhost, this host's own name or an address, so that no foreign page"
    " in a browser can read this one; ask for http://localhost, or set a password (web.config_file)"
)
_OTHER_ADDRESS = "served at web.page_address; /metrics, /healthz and /readyz are served here"


class WebListener(Struct, frozen=True):
    """What is served at one listening address."""

    watcher: WebConfigWatcher
    serves_pages: bool = True
    """False: the page and the JSON API are at another address."""
    open_page: bool = False
    own_names: frozenset[str] = frozenset()
    """Names of this host that the Host header may have over loopback, in lower case."""


class TrackedConnection(Protocol):
    """Interface of a connection as access control uses it."""

    web_config: WebConfig
    """The configuration under which it was accepted."""
    uid: int | None
    """The client's user, as the kernel reports it of a unix socket; None: TCP."""

    def request_started(self) -> None:
        """Note that a request has begun."""

    def response_sent(self) -> None:
        """Note that the app has written its whole response."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which a request is handled; entering it may wait for others of the client's address."""

    def note_served(self) -> None:
        """Note that the client may read what it asked for; a probe does not count, because everybody may."""

    def request_delay(self) -> float:
        """Return the seconds to wait before a request is handled, so that a crowd leaves time for known scrapers."""

    def refusal_delay(self) -> float:
        """Return the seconds to wait before a refusal is sent, which slows down repeated attempts."""


class AccessRefusal(Struct, frozen=True):
    """A response sent instead of the app's."""

    status: int
    reason: str
    headers: dict[str, str] = {}


def refusal_reason(listener: WebListener, *, local: str, peer: str, host: str | None, authenticated: bool) -> str:
    """Return why the page and the JSON API are not served to this connection; empty if they are.

    `local` and `peer` are its addresses, `host` its Host header. Both addresses must be loopback addresses, because
    with Linux' route_localnet a neighbouring host can send packets to ours (CVE-2020-8558).
    """
    if not listener.serves_pages:
        return _OTHER_ADDRESS
    if authenticated or listener.open_page:
        return ""
    if not (is_loopback(local) and is_loopback(peer)):
        return _LOOPBACK_ONLY
    return "" if host is not None and is_own_name_or_address(host, listener.own_names) else _HOST_HEADER


def own_host_names(hosts: Path = Path("/etc/hosts")) -> frozenset[str]:
    """Return this host's name, and the names that `hosts` gives beside it to a loopback address (Debian: 127.0.1.1).

    DNS is not asked: what it answers may be another's word. Other names of loopback addresses, such as those of a list
    of blocked sites, do not count.
    """
    own = socket.gethostname().lower()
    try:
        lines = hosts.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    except OSError:
        lines = []
    rows = (line.partition("#")[0].split() for line in lines)
    return frozenset({own}).union(*(row[1:] for row in rows if own in row[1:] and is_loopback(row[0])))


def is_own_name_or_address(host: str, own_names: Collection[str] = ()) -> bool:
    """Return whether a Host header is localhost, an own name or an IP address: DNS cannot rebind those.

    A port may follow.
    """
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
        return name.lower() == "localhost" or name.lower() in own_names
    return True


class AccessControl:
    """ASGI middleware that checks access before it calls the app."""

    def __init__(self, app: AsgiApp, listener: WebListener) -> None:
        """Protect `app` as `listener` is configured."""
        self._app, self._listener = app, listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        connection: TrackedConnection = scope["state"]["connection"]
        connection.request_started()
        try:
            if delay := connection.request_delay():
                await asyncio.sleep(delay)
            await self._respond(scope, receive, self._with_headers(send, connection), connection)
        finally:
            connection.response_sent()

    async def _respond(self, scope: Scope, receive: Receive, send: Send, connection: TrackedConnection) -> None:
        refusal, may_see_reasons = await self._check(scope, connection)
        if refusal is not None:
            await asyncio.sleep(connection.refusal_delay())
            await _refusal_response(refusal, scope["path"])(scope, receive, send)
        elif scope["path"] == "/readyz":
            await self._respond_ready(scope, receive, send, show_reasons=may_see_reasons)
        else:
            async with connection.turn():
                await self._app(scope, receive, send)
            if scope["path"] != "/healthz":
                connection.note_served()

    async def _check(self, scope: Scope, connection: TrackedConnection) -> tuple[AccessRefusal | None, bool]:
        """Return the refusal, if any, and whether the client may see the reasons of /readyz."""
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            return AccessRefusal(405, "only GET and HEAD are supported", {"Allow": "GET, HEAD"}), False
        if path == "/healthz":
            return None, False
        if path == "/readyz":
            return None, await self._may_see_reasons(scope)
        verdict = await self._verdict(scope)
        return _password_refusal(verdict) or self._rate_limited() or self._forbidden(scope, connection), True

    async def _may_see_reasons(self, scope: Scope) -> bool:
        """Return whether the client may see the reasons of /readyz; an address that guesses is not worth a hash."""
        passwords, header = self._listener.watcher.current.passwords, _header(scope, b"authorization")
        if passwords is None or passwords.knows(header):
            return True
        return not passwords.guesses(_address(scope, "client")) and await self._verdict(scope) == "yes"

    async def _verdict(self, scope: Scope) -> Verdict:
        passwords = self._listener.watcher.current.passwords
        if passwords is None:
            return "yes"
        return await passwords.verdict(_header(scope, b"authorization"), _address(scope, "client"))

    def _rate_limited(self) -> AccessRefusal | None:
        rate_limit = self._listener.watcher.current.rate_limit
        if rate_limit is None or rate_limit.take(time.monotonic()):
            return None
        return AccessRefusal(429, "too many requests (web.config_file, rate_limit)", {"Retry-After": "1"})

    def _forbidden(self, scope: Scope, connection: TrackedConnection) -> AccessRefusal | None:
        if scope["path"] in OPEN_PATHS:
            return None
        config = self._listener.watcher.current
        reason = refusal_reason(
            self._listener,
            local=_address(scope, "server"),
            peer=_address(scope, "client"),
            host=_header(scope, b"host"),
            authenticated=(config.mutual_tls and connection.web_config.mutual_tls) or config.passwords is not None,
        )
        return AccessRefusal(403, reason) if reason else None

    async def _respond_ready(self, scope: Scope, receive: Receive, send: Send, *, show_reasons: bool) -> None:
        """Respond to /readyz; the reasons, which may name jobs and files, only if `show_reasons`."""
        captured = _CapturedResponse()
        try:
            await self._app({**scope, "method": "GET"}, receive, captured.capture)
        finally:  # if the app fails, it has sent a 500 response before; the exception goes to the log
            body, problem = captured.body, self._listener.watcher.problem
            if not show_reasons:
                body = b"ok\n" if captured.status == _OK else b"not ready\n"
            elif problem:
                body += f"web.config_file: not reloaded, the previous one is active: {problem}\n".encode()
            await Response(body, captured.status, media_type="text/plain")(scope, receive, send)

    def _with_headers(self, send: Send, connection: TrackedConnection) -> Send:
        """Add headers to the response; close the connection after it if the TLS context has changed."""
        config = self._listener.watcher.current
        outdated = connection.web_config.ssl_context is not config.ssl_context

        async def add(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = merge_headers(message.get("headers", ()), config, close=outdated)
            await send(message)

        return add


def merge_headers(given: Any, config: WebConfig, *, close: bool = False) -> list[tuple[bytes, bytes]]:
    """Merge headers: the file's take precedence, then the `given` ones, then the defaults."""
    configured = {name.lower().encode(): value.encode() for name, value in config.headers}
    if close:
        configured[b"connection"] = b"close"
    kept = [(name.lower(), value) for name, value in given if name.lower() not in configured]
    present = {name for name, _ in kept} | set(configured)
    defaults = [(name.lower().encode(), value.encode()) for name, value in DEFAULT_HEADERS.items()]
    return [*kept, *(pair for pair in defaults if pair[0] not in present), *configured.items()]


class _CapturedResponse(Struct):
    """Collects a response instead of sending it."""

    status: int = 500
    body: bytes = b""

    async def capture(self, message: AsgiMessage) -> None:
        """Collect a message; the `send` of the app."""
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


def _password_refusal(verdict: Verdict) -> AccessRefusal | None:
    if verdict == "later":
        return AccessRefusal(429, "too many wrong passwords: wait a little", {"Retry-After": "5"})
    if verdict == "no":
        challenge = {"WWW-Authenticate": 'Basic realm="gpu-efficiency", charset="UTF-8"'}
        return AccessRefusal(
            401, "a user name and password are required (web.config_file, basic_auth_users)", challenge
        )
    return None


def _refusal_response(refusal: AccessRefusal, path: str) -> Response:
    if path.startswith("/api/") or path == "/openapi.json":
        body, kind = msgspec.json.encode({"detail": refusal.reason}), "application/json"
    else:
        body, kind = f"{refusal.reason}\n".encode(), "text/plain; charset=utf-8"
    return Response(body, refusal.status, {**refusal.headers, "Content-Type": kind})


def _header(scope: Scope, name: bytes) -> str | None:
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _address(scope: Scope, which: str) -> str:
    """Return the address of one end of the connection ("client" or "server"); empty if not known."""
    address = scope.get(which)
    return f"{address[0]}" if address else ""
