"""Queries the HTTP API of Prometheus for `preview` and `report`, with an error message for each way to fail."""

import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx
import msgspec
from msgspec import Struct, field

from exporter.redact import redact_secrets
from exporter.tls import public_context

_HTTP_DENIED = (401, 403)
_HTTP_TOO_MUCH = (413, 422, 503)
_HTTP_SERVER_ERROR = 500
MAX_WARNINGS = 3
_HARMLESS_WARNING = "PromQL info"
"""Prometheus 2 has its remarks on a query's style among the warnings, Prometheus 3 in a list of their own."""
TIMEOUT_SECONDS = 120.0
"""Seconds; Prometheus' own limit for one query."""


class PrometheusError(Exception):
    """A query failed; the message has the address, the reason and what to do."""


class PrometheusSeries(Struct, frozen=True):
    """One series of a result: a range query has `values`, an instant query `value`."""

    metric: dict[str, str]
    values: tuple[tuple[float, str], ...] = ()
    value: tuple[float, str] = (0.0, "0")


class _QueryData(Struct, frozen=True):
    result: list[PrometheusSeries] = []


class _QueryResponse(Struct, frozen=True):
    status: str
    data: _QueryData | None = None
    error: str = ""
    warnings: tuple[str, ...] = ()
    partial: bool = field(name="isPartial", default=False)
    """VictoriaMetrics: some of its storage did not answer. Thanos has a warning instead."""


class PrometheusClient:
    """Queries one server; a context manager, which closes the connection."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, verify: ssl.SSLContext | None = None
    ) -> None:
        """`verify`: of the server's certificate; None: by the public authorities."""
        self._url = url.rstrip("/")
        self._shown_url = redact_secrets(self._url)
        self._client = httpx.Client(
            timeout=TIMEOUT_SECONDS, headers=dict(headers or {}), verify=verify or public_context()
        )
        self._warnings: dict[str, None] = {}
        self._decode = msgspec.json.Decoder(_QueryResponse).decode

    def instant_query(self, query: str, at: float) -> list[PrometheusSeries]:
        """The value of each series at `at` (Unix seconds); raises PrometheusError."""
        return self._request("query", {"query": query, "time": repr(at)})

    def range_query(self, query: str, start: float, end: float, step: float) -> list[PrometheusSeries]:
        """The values of each series from `start` to `end`, both inclusive; raises PrometheusError."""
        return self._request(
            "query_range", {"query": query, "start": repr(start), "end": repr(end), "step": repr(step)}
        )

    def _request(self, kind: str, form: dict[str, Any]) -> list[PrometheusSeries]:
        try:
            response = self._client.post(f"{self._url}/api/v1/{kind}", data=form)
        except httpx.TimeoutException as err:
            raise PrometheusError(
                f"{self._shown_url} gave no answer within {TIMEOUT_SECONDS:g} s: ask for less with --since, --step or"
                " --match"
            ) from err
        except (httpx.HTTPError, httpx.InvalidURL) as err:
            reason = redact_secrets(str(err)) or type(err).__name__
            raise PrometheusError(
                f"{self._shown_url} cannot be reached ({reason}): is this Prometheus' address, as its page has it in a"
                " browser?"
            ) from err
        return self._parse_response(response)

    def _parse_response(self, response: httpx.Response) -> list[PrometheusSeries]:
        status = response.status_code
        if status in _HTTP_DENIED:
            raise PrometheusError(
                f"{self._shown_url} answered HTTP {status}: it requires authentication; give --header 'Authorization:"
                " ...', or --header @FILE with that line in it"
            )
        try:
            answer = self._decode(response.content)
        except msgspec.MsgspecError as err:
            hint = (
                "it is overloaded or broken: read its log" if status >= _HTTP_SERVER_ERROR else "is the path complete?"
            )
            raise PrometheusError(
                f"{self._shown_url} answered HTTP {status} and not as Prometheus does: {hint}"
            ) from err
        if answer.status != "success" or answer.data is None:
            less = ": ask for less with --since, --step or --match" if status in _HTTP_TOO_MUCH else ""
            raise PrometheusError(f"{self._shown_url} refused a query: {_one_line(answer.error)}{less}")
        self._warnings |= dict.fromkeys(
            _one_line(text) for text in answer.warnings if not text.startswith(_HARMLESS_WARNING)
        )
        if answer.partial:
            self._warnings["some of its storage did not answer (isPartial)"] = None
        return answer.data.result

    @property
    def remarks(self) -> Iterator[str]:
        """A sentence for each warning in the answers so far, the first few of them: data may be missing."""
        for number, text in enumerate(self._warnings):
            if number == MAX_WARNINGS:
                yield f"{self._shown_url} gave {len(self._warnings) - number} more warnings"
                return
            yield f"{self._shown_url} warned, so figures may be too low: {text}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
