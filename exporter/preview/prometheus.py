"""Prometheus, asked over its HTTP interface. Owns the asking and the words for each way it fails; refuses to judge."""

from collections.abc import Mapping
from typing import Any, Self

import httpx
import msgspec
from msgspec import Struct

from exporter.wording import without_secrets

_DENIED = (401, 403)
_TOO_MUCH = (413, 422, 503)
_SERVER_ERROR = 500
TIMEOUT_SECONDS = 120.0
"""Prometheus' own limit for one query."""


class PrometheusError(Exception):
    """No answer that could be used; the message names the address, what is wrong and what to do."""


class Series(Struct, frozen=True):
    """One series of an answer: of a range its `values`, of an instant its `value`."""

    metric: dict[str, str]
    values: tuple[tuple[float, str], ...] = ()
    value: tuple[float, str] = (0.0, "0")


class _Data(Struct, frozen=True):
    result: list[Series] = []


class _Answer(Struct, frozen=True):
    status: str
    data: _Data | None = None
    error: str = ""


class Prometheus:
    """Asks one server; also a context manager, which closes the connection."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url.rstrip("/")
        self._told = without_secrets(self._url)
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, headers=dict(headers or {}))
        self._decode = msgspec.json.Decoder(_Answer).decode

    def now(self, query: str, at: float) -> list[Series]:
        """The value of each series at a moment; raises PrometheusError."""
        return self._ask("query", {"query": query, "time": repr(at)})

    def over(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """The values of each series from `start` to `end`, both included; raises PrometheusError."""
        return self._ask("query_range", {"query": query, "start": repr(start), "end": repr(end), "step": repr(step)})

    def _ask(self, kind: str, form: dict[str, Any]) -> list[Series]:
        try:
            response = self._client.post(f"{self._url}/api/v1/{kind}", data=form)
        except httpx.TimeoutException as err:
            raise PrometheusError(
                f"{self._told} gave no answer within {TIMEOUT_SECONDS:g} s: ask for less with --since, --step or"
                " --match"
            ) from err
        except (httpx.HTTPError, httpx.InvalidURL) as err:
            said = without_secrets(str(err)) or type(err).__name__
            raise PrometheusError(
                f"{self._told} cannot be reached ({said}): is this Prometheus' address, as its page has it in a"
                " browser?"
            ) from err
        return self._result(response)

    def _result(self, response: httpx.Response) -> list[Series]:
        status = response.status_code
        if status in _DENIED:
            raise PrometheusError(
                f"{self._told} answered HTTP {status}: it wants to know who asks; give it --header 'Authorization:"
                " ...', or --header @FILE with that line in it"
            )
        try:
            answer = self._decode(response.content)
        except msgspec.MsgspecError as err:
            hint = "it is overloaded or broken: read its log" if status >= _SERVER_ERROR else "is the path complete?"
            raise PrometheusError(f"{self._told} answered HTTP {status} and not as Prometheus does: {hint}") from err
        if answer.status != "success" or answer.data is None:
            less = ": ask for less with --since, --step or --match" if status in _TOO_MUCH else ""
            raise PrometheusError(f"{self._told} refused a query: {_one_line(answer.error)}{less}")
        return answer.data.result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _one_line(words: str) -> str:
    return " ".join(words.split())[:300]
