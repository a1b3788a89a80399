"""Nodes' daemons, asked for their statements, all at once. Owns the asking, and the words for who gave no answer.

Refuses to follow a redirection, and to believe an answer that is no statement. One that is silent costs its own part
of a receipt and nothing else.
"""

import ssl
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.statement import Statement, Wanted
from exporter.wording import without_secrets

TIMEOUT_SECONDS = 10.0
_AT_ONCE = 16
_MOST_BYTES = 64 << 20
_MOST_ASKED = 5000
"""In one answer: the API gives no more."""
_SHORTEST = 60.0
"""Seconds of a time that is not cut any further."""
_DENIED = (401, 403)
_ABSENT = 404
_OK = 200


class NodesError(Exception):
    """Nobody can be asked like this; the message says why."""


class Answer(Struct, frozen=True, kw_only=True):
    """What nodes said."""

    statements: tuple[Statement, ...]
    silent: tuple[str, ...]
    """Who gave no answer that could be used, and why: a sentence each."""
    notes: tuple[str, ...] = ()
    """What is to be known of those that did."""


class _Page(Struct, frozen=True):
    """GET /api/v1/receipts."""

    receipts: tuple[Statement, ...]
    at: float = 0.0
    kept: bool = True
    cut: bool = False


class _Silence(Exception):  # noqa: N818  no error of the program's: it is told
    """Why one node says nothing, in a sentence."""


def ask_nodes(
    urls: Sequence[str], wanted: Wanted, *, headers: Mapping[str, str] | None = None, ca_file: Path | None = None
) -> Answer:
    """Statements of all nodes that answer. Raises NodesError where the authority's file is of no use."""
    with (
        httpx.Client(timeout=TIMEOUT_SECONDS, headers=dict(headers or {}), verify=_trust(ca_file)) as client,
        ThreadPoolExecutor(max_workers=_AT_ONCE) as pool,
    ):
        found = list(pool.map(lambda url: _node(client, url.rstrip("/"), wanted), dict.fromkeys(urls)))
    return Answer(
        statements=_once(each for answer in found for each in answer.statements if wanted.has(each)),
        silent=tuple(line for answer in found for line in answer.silent),
        notes=tuple(line for answer in found for line in answer.notes),
    )


def query(wanted: Wanted) -> dict[str, str]:
    """As the API's parameters; what picks all is left out."""
    names = ("job_id", "user", "account", "namespace")
    words = {name: value for name in names if (value := getattr(wanted, name))}
    times = {name: repr(value) for name in ("since", "until") if isfinite(value := getattr(wanted, name)) and value > 0}
    return words | times | {"limit": str(min(wanted.limit, _MOST_ASKED))}


def _once(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    """Two times that touch tell of the same job."""
    return tuple({(each.node, each.life, each.owner.job_id, each.start): each for each in statements}.values())


def _trust(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as err:
        raise NodesError(f"--ca-file {ca_file}: no certificate can be read of it: {err}") from err


# -- one node --


def _node(client: httpx.Client, url: str, wanted: Wanted) -> Answer:
    try:
        pages = _pages(client, url, wanted)
    except _Silence as why:
        return Answer(statements=(), silent=(str(why),))
    name, notes = without_secrets(url), []
    if not all(page.kept for page in pages):
        notes.append(f"{name} keeps no history: it tells only of jobs since its daemon began")
    if any(page.cut for page in pages):
        notes.append(f"{name} has more than it tells at once: ask for less with --since")
    return Answer(statements=tuple(each for page in pages for each in page.receipts), silent=(), notes=tuple(notes))


def _pages(client: httpx.Client, url: str, wanted: Wanted) -> list[_Page]:
    """Where there is more than one answer holds, halves of the time are asked for."""
    page = _ask(client, url, query(wanted))
    until = wanted.until if isfinite(wanted.until) else page.at
    more = page.cut or len(page.receipts) >= _MOST_ASKED
    if not more or until - wanted.since < _SHORTEST:
        return [page]
    middle = wanted.since + (until - wanted.since) / 2
    halves = (replace(wanted, until=middle), replace(wanted, since=middle))
    return [page for half in halves for page in _pages(client, url, half)]


def _ask(client: httpx.Client, url: str, params: Mapping[str, str]) -> _Page:
    """One question; raises _Silence."""
    name = without_secrets(url)
    content = bytearray()
    try:
        with client.stream("GET", f"{url}/api/v1/receipts", params=dict(params)) as response:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > _MOST_BYTES:
                    raise _Silence(f"{name} answered with more than {_MOST_BYTES >> 20} MiB: is it a daemon of ours?")
    except httpx.TimeoutException as err:
        raise _Silence(f"{name} gave no answer within {TIMEOUT_SECONDS:g} s") from err
    except (httpx.HTTPError, httpx.InvalidURL) as err:
        said = without_secrets(str(err)) or type(err).__name__
        raise _Silence(f"{name} cannot be reached ({said})") from err
    return _read(name, response.status_code, bytes(content))


def _read(name: str, status: int, content: bytes) -> _Page:
    if status in _DENIED:
        raise _Silence(
            f"{name} answered HTTP {status}: it tells who is known to it (--header), or asks from its own host"
            " (docs/web.md)"
        )
    if status == _ABSENT:
        raise _Silence(f"{name} answered HTTP 404: it has no receipts; is it a daemon of ours, and new enough?")
    if status != _OK:
        raise _Silence(f"{name} answered HTTP {status}")
    try:
        return msgspec.json.decode(content, type=_Page)
    except msgspec.MsgspecError as err:
        raise _Silence(f"{name} answered with what is no list of receipts ({err}): is it a daemon of ours?") from err
