"""Fetches JobRecords from the HTTP API of many daemons in parallel, or of a gateway, without following redirects.

A daemon that does not answer is listed with the reason; a report then lacks only its part. An address that begins with
`unix:` is the path of a socket, at which a gateway answers for many nodes.
"""

import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf, isfinite

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.http_body import ACCEPTED, BodyError, read_body
from exporter.redact import redact_secrets
from exporter.report.text import printable
from exporter.report.usage import latest_records
from exporter.tls import public_context

TIMEOUT_SECONDS = 10.0
UNIX = "unix:"
GATEWAY_SECONDS = 120.0
"""How long a gateway may take, which asks many nodes."""
_ANSWER_SECONDS = 30.0
"""How long the whole answer of one node may take, however evenly it comes."""
_DETAIL_CHARS = 500
_MAX_PARALLEL = 16
_MAX_BYTES = 64 << 20
_MAX_RECORDS = 5000
"""Limit of the API for one response."""
_MIN_SPLIT_SECONDS = 60.0
"""Shortest time range, in seconds, that is split into halves."""
_HTTP_DENIED = (401, 403)
_HTTP_NOT_FOUND = 404
_HTTP_OK = 200


class NodeRecords(Struct, frozen=True, kw_only=True):
    """Job records of several nodes."""

    records: tuple[JobRecord, ...]
    unanswered: tuple[str, ...]
    """One sentence for each node without a usable response, with the reason."""
    notes: tuple[str, ...] = ()
    """Remarks on nodes that answered."""
    cut: bool = False
    """Whether some records are missing because there were too many for one response."""


class _RecordsResponse(Struct, frozen=True):
    """Response of GET /api/v1/receipts."""

    receipts: tuple[JobRecord, ...]
    at: float = 0.0
    kept: bool = True
    cut: bool = False
    notes: tuple[str, ...] = ()
    """A gateway's, on its nodes."""


class _Problem(Struct, frozen=True):
    """Response with an error."""

    detail: str


class _Budget:
    """Bytes that the nodes may still send, all together; several threads take from it."""

    def __init__(self, limit: float) -> None:
        self.limit = self._left = limit
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Raise _TooMuch if no more so many are left."""
        with self._lock:
            self._left -= count
            if self._left < 0:
                raise _TooMuch


class _TooMuch(Exception):  # noqa: N818  as below
    """The nodes have sent more than all of them may."""


class _NoAnswer(Exception):  # noqa: N818  not an error of the program: it is listed in the result
    """The reason, in a sentence, why a node has no usable response."""


def fetch_records(
    urls: Sequence[str],
    wanted: JobRecordQuery,
    *,
    headers: Mapping[str, str] | None = None,
    verify: ssl.SSLContext | None = None,
    max_bytes: float = inf,
) -> NodeRecords:
    """Return the records of all nodes that answer. `verify`: of their certificates; None: by the public authorities.

    With `max_bytes`, which all nodes together may send, each is asked once, and the result may be `cut`.
    """
    budget = _Budget(max_bytes)
    with (
        httpx.Client(
            timeout=TIMEOUT_SECONDS,
            headers=ACCEPTED | dict(headers or {}),
            verify=verify or public_context(),
        ) as client,
        ThreadPoolExecutor(max_workers=_MAX_PARALLEL) as pool,
    ):
        answers = list(pool.map(lambda url: _fetch_node(client, url.rstrip("/"), wanted, budget), dict.fromkeys(urls)))
    return NodeRecords(
        records=latest_records(record for answer in answers for record in answer.records if wanted.matches(record)),
        unanswered=tuple(sentence for answer in answers for sentence in answer.unanswered),
        notes=tuple(sentence for answer in answers for sentence in answer.notes),
        cut=any(answer.cut for answer in answers),
    )


def query_parameters(wanted: JobRecordQuery) -> dict[str, str]:
    """Return the query parameters of the API, without those that match all."""
    names = ("job_id", "array_id", "user", "account", "namespace")
    filters = {name: value for name in names if (value := getattr(wanted, name))}
    times = {name: repr(value) for name in ("since", "until") if isfinite(value := getattr(wanted, name)) and value > 0}
    return filters | times | {"limit": str(min(wanted.limit, _MAX_RECORDS))}


# -- one node --


def _fetch_node(client: httpx.Client, url: str, wanted: JobRecordQuery, budget: _Budget) -> NodeRecords:
    try:
        with _client_of(url, client) as own:
            pages = _fetch_pages(own, url, wanted, budget)
    except _NoAnswer as error:
        return NodeRecords(records=(), unanswered=(str(error),))
    except _TooMuch:
        return NodeRecords(records=(), unanswered=(), cut=True)
    name, notes = redact_secrets(url), [note for page in pages for note in page.notes]
    if not all(page.kept for page in pages):
        notes.append(f"{name} keeps no history: it tells only of jobs since its daemon began")
    if any(page.cut for page in pages):
        notes.append(f"{name} has more than it tells at once: ask for less with --since")
    return NodeRecords(
        records=tuple(record for page in pages for record in page.receipts),
        unanswered=(),
        notes=tuple(dict.fromkeys(notes)),
        cut=any(page.cut for page in pages),
    )


@contextmanager
def _client_of(url: str, client: httpx.Client) -> Iterator[httpx.Client]:
    """Yield the client for this address: that of all nodes, or one of its own for a socket."""
    if not url.startswith(UNIX):
        yield client
        return
    transport = httpx.HTTPTransport(uds=url.removeprefix(UNIX).removeprefix("//"))
    with httpx.Client(transport=transport, timeout=GATEWAY_SECONDS, headers=client.headers) as own:
        yield own


def _fetch_pages(client: httpx.Client, url: str, wanted: JobRecordQuery, budget: _Budget) -> list[_RecordsResponse]:
    """Return all pages; splits the time range into halves while a response is truncated, if there is no budget."""
    page = _request(client, url, query_parameters(wanted), budget)
    if isfinite(budget.limit) or wanted.job_id:  # a part of a job's time has as many records as the whole
        return [page]
    until = wanted.until if isfinite(wanted.until) else page.at
    incomplete = page.cut or len(page.receipts) >= _MAX_RECORDS
    if not incomplete or until - wanted.since < _MIN_SPLIT_SECONDS:
        return [page]
    middle = wanted.since + (until - wanted.since) / 2
    halves = (replace(wanted, until=middle), replace(wanted, since=middle))
    return [page for half in halves for page in _fetch_pages(client, url, half, budget)]


def _request(client: httpx.Client, url: str, params: Mapping[str, str], budget: _Budget) -> _RecordsResponse:
    """Send one request. Raises _NoAnswer, _TooMuch."""
    name = redact_secrets(url)
    host, seconds = ("http://localhost", GATEWAY_SECONDS) if url.startswith(UNIX) else (url, _ANSWER_SECONDS)
    deadline = time.monotonic() + seconds
    try:
        with client.stream("GET", f"{host}/api/v1/receipts", params=dict(params)) as response:
            content = read_body(response, limit=_MAX_BYTES, deadline=deadline, count=budget.take)
    except BodyError as err:
        if err.kind == "timeout":
            raise _NoAnswer(f"{name} gave no whole answer within {seconds:g} s") from err
        raise _NoAnswer(f"{name}: its answer {err}: is it a daemon of ours?") from err
    except httpx.TimeoutException as err:
        waited = GATEWAY_SECONDS if url.startswith(UNIX) else TIMEOUT_SECONDS
        raise _NoAnswer(f"{name} gave no answer within {waited:g} s") from err
    except (httpx.HTTPError, httpx.InvalidURL) as err:
        reason = redact_secrets(str(err)) or type(err).__name__
        raise _NoAnswer(f"{name} cannot be reached ({reason})") from err
    return _parse_response(name, response.status_code, content)


def _parse_response(name: str, status: int, content: bytes) -> _RecordsResponse:
    if status in _HTTP_DENIED and not name.startswith(UNIX):
        raise _NoAnswer(
            f"{name} answered HTTP {status}: it tells who is known to it (--header), or asks from its own host"
            " (docs/security.md)"
        )
    if status == _HTTP_NOT_FOUND:
        raise _NoAnswer(f"{name} answered HTTP 404: it has no receipts; is it a daemon of ours, and new enough?")
    if status != _HTTP_OK:
        raise _NoAnswer(f"{name} answered HTTP {status}{_detail(content)}")
    try:
        return msgspec.json.decode(content, type=_RecordsResponse)
    except msgspec.MsgspecError as err:
        raise _NoAnswer(f"{name} answered with what is no list of receipts ({err}): is it a daemon of ours?") from err


def _detail(content: bytes) -> str:
    """Return the reason in the response, as the end of a sentence; empty if there is none."""
    try:
        return f": {printable(msgspec.json.decode(content, type=_Problem).detail)[:_DETAIL_CHARS]}"
    except msgspec.MsgspecError:
        return ""
