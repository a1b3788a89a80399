"""A node, asked over its JSON API. Owns the asking, its limits, and the words for each way it fails.

Refuses to follow redirects, which could carry a password elsewhere, and to read without an end.
"""

import re
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct

from exporter.connections import is_loopback
from exporter.top.answers import Accounts, Gpus, Jobs, Problem, Receipts
from exporter.wording import without_secrets

TIMEOUT_SECONDS = 5.0
"""For each step of one answer, and for the whole of it three times that."""
MAX_BYTES = 32 << 20
_DENIED = (401, 403)
_ABSENT, _UNAVAILABLE, _OK = 404, 503, 200
_MAX_WORDS = 300
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
"""Python's, before the words of the operating system."""
Answer = TypeVar("Answer")


class SilentError(Exception):
    """No answer that can be used; the message says why, and what to do."""


class AddressError(ValueError):
    """This cannot be the address of a node."""


class Place(Struct, frozen=True, kw_only=True):
    """Where a node is asked, and how."""

    url: str
    """Without a slash at the end; may hold a user and a password."""
    headers: dict[str, str] = {}
    ca_file: Path | None = None

    @property
    def address(self) -> str:
        """For people: without secrets."""
        return without_secrets(self.url)


def place_of(url: str, *, headers: Mapping[str, str], ca_file: Path | None) -> Place:
    """Read an address; without a scheme it is of http. Raises AddressError."""
    whole = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        known = httpx.URL(whole)
    except httpx.InvalidURL as err:
        raise AddressError(f"{without_secrets(url)} is no address of a node: {err}") from err
    readable = not any(sign.isspace() or not sign.isprintable() for sign in whole)
    if known.scheme not in ("http", "https") or not known.host or not readable:
        raise AddressError(f"{without_secrets(url)} is no address of a node (example: http://node17:19400)")
    return Place(url=whole, headers=dict(headers), ca_file=ca_file)


def trusting(ca_file: Path | None) -> ssl.SSLContext | bool:
    """The authorities by which nodes prove who they are. Raises OSError, AddressError."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except ssl.SSLError as err:
        raise AddressError(f"{ca_file} holds no certificates in PEM form ({err.reason or err})") from err


class Asking:
    """Asks one node, over a connection that is kept; also a context manager, which closes it."""

    def __init__(
        self, place: Place, *, timeout: float = TIMEOUT_SECONDS, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.place, self._timeout = place, timeout
        local = httpx.URL(place.url).host
        self._client = httpx.Client(
            headers={"Accept": "application/json", "User-Agent": "gpu-efficiency top", **place.headers},
            timeout=timeout,
            verify=trusting(place.ca_file),
            transport=transport,
            trust_env=not (local == "localhost" or is_loopback(local)),
        )
        self._absent = set[str]()

    def gpus(self) -> Gpus:
        """Raises SilentError."""
        return self._get("/api/v1/gpus", Gpus)

    def jobs(self) -> Jobs:
        """Raises SilentError."""
        return self._get("/api/v1/jobs", Jobs)

    def accounts(self) -> Accounts | None:
        """The node in money; None where the daemon is too old to tell. Raises SilentError."""
        return self._newer("/api/v1/node", "", Accounts)

    def receipts(self, job_id: str) -> Receipts | None:
        """What it knows of a job's whole time; None where the daemon is too old to tell. Raises SilentError."""
        return self._newer("/api/v1/receipts", f"?job_id={quote(job_id, safe='')}", Receipts)

    def _newer(self, path: str, query: str, shape: type[Answer]) -> Answer | None:
        """A path that older daemons do not have: it is not asked for a second time."""
        if path in self._absent:
            return None
        try:
            return self._get(path + query, shape)
        except _AbsentError:
            self._absent.add(path)
            return None

    def _get(self, path: str, shape: type[Answer]) -> Answer:
        try:
            status, body = self._read(f"{self.place.url}{path}")
        except httpx.TimeoutException as err:
            raise SilentError(f"no answer within {self._timeout:g} s") from err
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as err:
            raise SilentError(_unreached(err)) from err
        return _understood(status, body, shape)

    def _read(self, url: str) -> tuple[int, bytes]:
        """Status and body, within the limits of time and size."""
        deadline, body = time.monotonic() + 3 * self._timeout, bytearray()
        with self._client.stream("GET", url) as response:
            for part in response.iter_bytes():
                body += part
                if len(body) > MAX_BYTES:
                    raise SilentError(f"its answer is larger than {MAX_BYTES >> 20} MiB: is this a node's address?")
                if time.monotonic() > deadline:
                    raise SilentError(f"its answer was not complete after {3 * self._timeout:g} s")
            return response.status_code, bytes(body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


class _AbsentError(SilentError):
    """There is no such path."""


def _understood(status: int, body: bytes, shape: type[Answer]) -> Answer:
    if status == _OK:
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.MsgspecError as err:
            raise SilentError(f"it does not answer as this exporter does ({err}): is this its address?") from err
    raise _refusal(status, body)


def _refusal(status: int, body: bytes) -> SilentError:
    said = _detail(body)
    if status in _DENIED:
        return SilentError(
            f"it answers HTTP {status}{f' ({said})' if said else ''}: give it a name and password, --header"
            " 'Authorization: ...' or --header @FILE; see docs/web.md"
        )
    if status == _ABSENT:
        return _AbsentError("it answers HTTP 404: is this the address of an exporter's node, and complete?")
    if status == _UNAVAILABLE and said:
        return SilentError(said)
    return SilentError(f"it answers HTTP {status}{f': {said}' if said else ''}")


def _detail(body: bytes) -> str:
    try:
        said = msgspec.json.decode(body, type=Problem).detail
    except msgspec.MsgspecError:
        return ""
    return " ".join(said.split())[:_MAX_WORDS]


def _unreached(err: Exception) -> str:
    said = " ".join(without_secrets(str(err)).split())[:_MAX_WORDS] or type(err).__name__
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return f"{said}: name its authority with --ca-file"
    if isinstance(err, httpx.ConnectError):
        return f"{_NUMBER.sub('', said)}; does the exporter run there, and may it be reached from here?"
    return said
