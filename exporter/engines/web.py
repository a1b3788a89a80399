"""Asking for one page: bounded in time, in size, and in what it unpacks to.

Owns the request and the fixed vocabulary of what can go wrong. Refuses to read what it got, and to follow an address to
another: what a workload says of itself comes from itself.
"""

import asyncio
import zlib

import httpx

LIMIT_BYTES = 4 << 20
"""Unpacked. A vLLM page with 8 engines is about 0.5 MB."""
TROUBLES = (
    "refused", "timeout", "status", "redirect", "html", "not_an_engine", "too_large", "half_page", "encoding",
    "dialect", "malformed", "silent", "unreachable",
)  # fmt: skip
"""Kinds of failure: all there are."""
_REDIRECTS = range(300, 400)


class Trouble(Exception):  # noqa: N818  what went wrong is the engine's, not this program's
    """Why a page told nothing: its kind, what was seen, and what to do."""

    def __init__(self, kind: str, what: str, remedy: str) -> None:
        super().__init__(what)
        self.kind, self.what, self.remedy = kind, what, remedy


async def fetch(client: httpx.AsyncClient, url: str, *, seconds: float, limit: int = LIMIT_BYTES) -> str:
    """The page's text, whole. Raises Trouble for anything else."""
    try:
        # httpx times each wait, not the whole: an engine that drips its headers would hold a connection for ever.
        async with asyncio.timeout(seconds), client.stream("GET", url) as response:
            _refuse(response)
            body = await _body(response, limit)
    except (TimeoutError, httpx.TimeoutException):
        raise Trouble(
            "timeout", f"gave no whole page within {seconds:g} s", "see whether it hangs, or raise timeout_seconds"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        what = f"could not be read ({str(error) or type(error).__name__})"
        kind = "half_page" if isinstance(error, httpx.RemoteProtocolError) else "refused"
        raise Trouble(kind, what, "see whether it runs, and read its log") from error
    return _text(body)


def _refuse(response: httpx.Response) -> None:
    status = response.status_code
    if status in _REDIRECTS:
        raise Trouble("redirect", f"sends elsewhere (HTTP {status})", "give its real address in engines.endpoints")
    if status != httpx.codes.OK:
        raise Trouble(
            "status", f"answered HTTP {status}", "switch its metrics on, or give their address in engines.endpoints"
        )


async def _body(response: httpx.Response, limit: int) -> bytes:
    """Unpacked here, for a library would unpack a whole piece at once, whatever that is."""
    packing = response.headers.get("content-encoding", "identity").strip().lower()
    if packing not in ("identity", "gzip", ""):
        raise Trouble(
            "encoding", f"is packed as {packing[:20]!r}, and gzip was asked for", "look for a proxy before it"
        )
    unpack = zlib.decompressobj(wbits=31) if packing == "gzip" else None
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece if unpack is None else _unpacked(unpack, piece, limit + 1 - len(body))
        if len(body) > limit:
            raise Trouble("too_large", f"is longer than {limit} bytes", "look for another server behind its address")
    if unpack is not None and not unpack.eof:
        raise Trouble("half_page", "ends in the middle of its packing", "see whether it runs, and read its log")
    return bytes(body)


def _unpacked(unpack: "zlib._Decompress", piece: bytes, room: int) -> bytes:
    try:
        return unpack.decompress(piece, room)
    except zlib.error as error:
        raise Trouble("encoding", f"is not gzip, as it says ({error})", "look for a proxy before it") from error


def _text(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    if text.lstrip()[:1] == "<":
        raise Trouble("html", "is an HTML page, not metrics", "name the engine's metrics page in engines.endpoints")
    if text and not text.endswith("\n"):
        # The text format ends every line with a line feed: a number cut short would be another number.
        kind = "not_an_engine" if text.lstrip()[:1] in "{[" else "half_page"
        raise Trouble(kind, "does not end with a whole line", "see whether it is a metrics page, and read its log")
    return text
