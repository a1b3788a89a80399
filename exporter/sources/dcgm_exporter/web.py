"""Getting the page: one URL, again and again.

Owns the connection, its bounds in time and size, and the words for each way it fails. Refuses to look at what it got.
"""

from time import monotonic
from typing import Protocol

import httpx

from exporter.sources import SourceError
from exporter.wording import without_secrets

LIMIT_BYTES = 8 << 20
"""Far above any real page: 8 GPUs, 60 fields and 10 pods each make about 2 MB."""


class Fetch(Protocol):
    """Gives the page's bytes, or raises SourceError."""

    def __call__(self) -> bytes:
        """Get the page as it is now."""
        ...

    def close(self) -> None:
        """Give back what it holds. Never raises."""
        ...


class HttpPage:
    """One URL, got again and again over one kept connection; bounded in time and size."""

    def __init__(self, url: str, *, timeout_seconds: float, limit_bytes: int = LIMIT_BYTES) -> None:
        self._url, self._timeout, self._limit = url, timeout_seconds, limit_bytes
        self._told = without_secrets(url)
        # No proxy from the environment: the exporter is on this node, a proxy would answer for another.
        self._client = httpx.Client(timeout=timeout_seconds, trust_env=False)

    def __call__(self) -> bytes:
        """Raise SourceError for anything but a whole page with status 200."""
        try:
            with self._client.stream("GET", self._url) as response:
                return self._body(response)
        except httpx.TimeoutException as error:
            raise self._late() from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = without_secrets(str(error)) or type(error).__name__
            raise SourceError(
                f"{self._told} could not be read ({said}): is dcgm-exporter running"
                " on this node and is this its address? Try `curl` on it, or set dcgm_exporter.url"
            ) from error

    def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise SourceError(
                f"{self._told} answered HTTP {response.status_code}, not 200: read the exporter's log, and"
                " check that dcgm_exporter.url is its metrics page (it ends in /metrics)"
            )
        body, deadline = bytearray(), monotonic() + self._timeout
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > self._limit:
                raise SourceError(
                    f"{self._told} is longer than {self._limit} bytes, no dcgm-exporter page is: set"
                    " dcgm_exporter.url to this node's own exporter, not to a federating Prometheus"
                )
            # httpx times each wait, not the whole: a page that drips would hold the reading thread for ever.
            if monotonic() > deadline:
                raise self._late()
        return bytes(body)

    def _late(self) -> SourceError:
        return SourceError(
            f"{self._told} gave no whole page within {self._timeout:g} s: the exporter hangs or the node is"
            " overloaded; restart dcgm-exporter, or raise dcgm_exporter.timeout_seconds"
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
