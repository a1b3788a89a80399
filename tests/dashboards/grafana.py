"""What Grafana asks of a Prometheus when somebody opens a board.

Owns Grafana's rules, as its Prometheus data source follows them: what a variable's values are and how they are written
into a query, how far apart a panel's points are, and what `$__interval`, `$__rate_interval` and `$__range` become.
Refuses to draw, and to transform what came back: a panel here is its queries and their answers. Of a repeated panel
it shows the first value.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tests.dashboards.past import seconds
from tests.dashboards.variables import Ask, Chosen, Json, Scope, Span, resolved, written

__all__ = ["Answer", "Found", "Panel", "Span", "asker", "opened", "timed"]

SCRAPE_SECONDS = 15.0
"""What Grafana takes for the scrape interval where the data source does not say."""
_MOST_POINTS = 11_000
_COLUMNS, _PADDING = 24, 32
"""Of a board's grid; pixels of a board that no panel has."""
_WEEK = 604_800.0
_STEPS = (
    (0.01, 0.001), (0.015, 0.01), (0.035, 0.02), (0.075, 0.05), (0.15, 0.1), (0.35, 0.2), (0.75, 0.5), (1.5, 1),
    (3.5, 2), (7.5, 5), (12.5, 10), (17.5, 15), (25, 20), (45, 30), (90, 60), (210, 120), (450, 300), (750, 600),
    (1050, 900), (1500, 1200), (2700, 1800), (5400, 3600), (9000, 7200), (16_200, 10_800), (32_400, 21_600),
    (86_400, 43_200), (_WEEK, 86_400), (3 * _WEEK, _WEEK), (6 * _WEEK, 2_592_000),
)  # fmt: skip
"""Below so many seconds, so many."""


class Found(Struct, frozen=True):
    """A series of an answer."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Answer(Struct, frozen=True, kw_only=True):
    """One query of a panel: what was sent, and what came back."""

    ref: str
    expr: str
    instant: bool
    step: float
    """Seconds; of a range."""
    took: float
    """Seconds."""
    series: tuple[Found, ...] = ()
    error: str = ""


class Panel(Struct, frozen=True, kw_only=True):
    """A panel as it was opened."""

    title: str
    kind: str
    number: int
    answers: tuple[Answer, ...]


def asker(client: httpx.Client) -> Ask:
    """Ask a real Prometheus; the client's base is its address."""

    def ask(path: str, params: Mapping[str, str]) -> Any:
        url, words = f"/api/v1/{path}", dict(params)
        answer = client.post(url, data=words) if path.startswith("query") else client.get(url, params=words)
        found = msgspec.json.decode(answer.content)
        if found["status"] != "success":
            raise ValueError(found["error"])
        return found["data"]

    return ask


def opened(
    board: Json, ask: Ask, span: Span, *, chosen: Mapping[str, Sequence[str]] | None = None, width: int = 1600
) -> list[Panel]:
    """Open a board: every panel with its queries answered, those of rows that are folded too."""
    scope = resolved(board, ask, span, chosen or {})
    return [_panel(panel, ask, span, scope=around, width=width) for panel, around in _panels(board, scope)]


def _panels(board: Json, scope: Scope) -> Iterator[tuple[Json, Scope]]:
    """Panels that ask something, each with the variables it sees."""
    around = scope
    for panel in board.get("panels", ()):
        if panel["type"] == "row":
            around = _first(panel, scope)
            inside = panel.get("panels", ())
        else:
            inside = (panel,)
        yield from ((each, _first(each, around)) for each in inside if any(_queries(each)))


def _first(panel: Json, scope: Scope) -> Scope:
    """What a repeated panel or row sees: its variable has one value."""
    name = panel.get("repeat")
    if not name or name not in scope:
        return scope
    one = replace(scope[name], values=scope[name].values[:1], instead=None)
    return {**scope, name: one}


def _queries(panel: Json) -> Iterator[Json]:
    return (target for target in panel.get("targets", ()) if target.get("expr", "").strip() and not target.get("hide"))


def _panel(panel: Json, ask: Ask, span: Span, *, scope: Scope, width: int) -> Panel:
    if panel.get("timeFrom"):
        span = Span(span.end - seconds(panel["timeFrom"]), span.end)
    pixels = (width - _PADDING) * panel.get("gridPos", {}).get("w", _COLUMNS) / _COLUMNS
    return Panel(
        title=written(panel.get("title", ""), scope, plain=True), kind=panel["type"], number=panel.get("id", 0),
        answers=tuple(_answer(t, panel, ask, span=span, scope=scope, pixels=pixels) for t in _queries(panel)),
    )  # fmt: skip


def _answer(target: Json, panel: Json, ask: Ask, *, span: Span, scope: Scope, pixels: float) -> Answer:
    step, scope = timed(target, panel, span, scope=scope, pixels=pixels)
    sent = written(target["expr"], scope)
    ref, instant, began = target.get("refId", ""), bool(target.get("instant")), time.perf_counter()
    series, error = (), ""  # type: tuple[Found, ...], str
    try:
        series = _asked(ask, sent, span, instant=instant, step=step)
    except ValueError as err:
        error = str(err)
    took = time.perf_counter() - began
    return Answer(ref=ref, expr=sent, instant=instant, step=step, took=took, series=series, error=error)


def _asked(ask: Ask, query: str, span: Span, *, instant: bool, step: float) -> tuple[Found, ...]:
    if instant:
        data = ask("query", {"query": query, "time": f"{span.end:.3f}"})
    else:
        start, end = (moment // step * step for moment in (span.start, span.end))
        data = ask("query_range", {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"})
    rows = [{"value": data["result"]}] if data["resultType"] == "scalar" else data["result"]
    return tuple(Found(row.get("metric", {}), _points(row)) for row in rows)


def _points(row: Json) -> tuple[tuple[float, float], ...]:
    return tuple((float(at), float(value)) for at, value in row.get("values") or [row["value"]])


def timed(target: Json, panel: Json, span: Span, *, scope: Scope, pixels: float) -> tuple[float, Scope]:
    """Seconds between a query's points, and the variables of time added to the others."""
    own = written(target.get("interval") or "", scope).lstrip("<>=")
    least = own or written(panel.get("interval") or "", scope).lstrip("<>=")
    most = panel.get("maxDataPoints") or max(int(pixels), 100)
    step = max(_rounded(span.length / most), seconds(least) if least else SCRAPE_SECONDS)
    step = max(step, _rounded(span.length / _MOST_POINTS)) * (target.get("intervalFactor") or 1)
    scrape = seconds(own) if own else SCRAPE_SECONDS
    rate = max(step + scrape, 4 * scrape)
    texts = {
        "__interval": _duration(step), "__interval_ms": f"{step * 1000:.0f}", "__rate_interval": _duration(rate),
        "__range": f"{span.length:.0f}s", "__range_s": f"{span.length:.0f}", "__range_ms": f"{span.length * 1000:.0f}",
        "__from": f"{span.start * 1000:.0f}", "__to": f"{span.end * 1000:.0f}",
    }  # fmt: skip
    return step, {**scope, **{name: Chosen(values=(text,)) for name, text in texts.items()}}


def _rounded(length: float) -> float:
    """The step that Grafana rounds to."""
    return next((step for below, step in _STEPS if length < below), 31_536_000.0)


def _duration(length: float) -> str:
    return f"{length:.0f}s" if length == int(length) else f"{length * 1000:.0f}ms"
