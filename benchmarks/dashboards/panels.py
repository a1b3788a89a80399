"""How long each panel of each board takes to be answered, as Grafana would ask.

Owns the opening of boards and the stopwatch. A panel's time is that of all its queries one after the other, until
their answers are read; Grafana sends them together. Refuses to start a server.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from msgspec import Struct

from benchmarks.dashboards.fleet import BIGGEST
from benchmarks.fleet.site import host
from benchmarks.machine import ROOT
from benchmarks.rig.daemon import cpu_seconds
from tests.dashboards.grafana import Panel, asker, opened
from tests.dashboards.past import seconds
from tests.dashboards.variables import Span

LIMIT_MS = 1000.0
RUNS = 3
"""Beside the first one."""
FOLDER = ROOT / "dashboards"
CHOSEN = {"job_id": [BIGGEST], "node": [host(0)]}
"""The job on most GPUs, and one of its nodes."""
_WEEK = 7 * 86_400.0
_BY_WEEK = ("fleet", "chargeback")


class Timed(Struct, frozen=True, kw_only=True):
    """One panel of one board over one length of time."""

    board: str
    hours: float
    title: str
    first: float
    """Milliseconds of the first time, when what it reads may lie on the disk."""
    again: tuple[float, ...]
    cpu: float
    """Milliseconds of processor time that the server took for it, the last time."""
    samples: int
    """That Prometheus read for it, each as often as it was needed."""
    series: int
    """Of its answers."""
    errors: tuple[str, ...] = ()
    expr: str = ""
    """Its slowest query as sent."""

    @property
    def median(self) -> float:
        """Milliseconds of the later times."""
        return median(self.again)


def boards(folder: Path = FOLDER) -> list[Mapping[str, Any]]:
    """All that are there."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gpu-efficiency-*.json"))]


def timed(url: str, end: float, *, pid: int, runs: int = RUNS, only: Sequence[str] = ()) -> list[Timed]:
    """Open every board at its own length of time, some over a week too."""
    with httpx.Client(base_url=url, trust_env=False, timeout=300) as client:
        return [
            panel
            for board in boards()
            if not only or _named(board) in only
            for length in _lengths(board)
            for panel in _opened(board, _Counting(client, pid), Span(end - length, end), runs)
        ]


def _named(board: Mapping[str, Any]) -> str:
    return str(board["uid"]).removeprefix("gpu-efficiency-")


def _lengths(board: Mapping[str, Any]) -> Iterator[float]:
    own = seconds(board["time"]["from"].removeprefix("now-"))
    yield own
    if _named(board) in _BY_WEEK and own != _WEEK:
        yield _WEEK


def _opened(board: Mapping[str, Any], counting: "_Counting", span: Span, runs: int) -> Iterator[Timed]:
    looks = [opened(dict(board), counting, span, chosen=CHOSEN) for _ in range(1 + runs)]
    for panels in zip(*looks, strict=True):
        yield _timed(_named(board), span, panels, counting)


def _timed(board: str, span: Span, looks: Sequence[Panel], counted: "_Counting") -> Timed:
    first, *again = (1000 * sum(answer.took for answer in panel.answers) for panel in looks)
    answers = looks[-1].answers
    return Timed(
        board=board, hours=span.length / 3600, title=looks[0].title, first=first, again=tuple(again),
        cpu=1000 * sum(counted.cpu.get(answer.expr, 0.0) for answer in answers),
        samples=sum(counted.samples.get(answer.expr, 0) for answer in answers),
        series=sum(len(answer.series) for answer in answers),
        errors=tuple(answer.error for answer in answers if answer.error),
        expr=max(answers, key=lambda answer: answer.took).expr,
    )  # fmt: skip


class _Counting:
    """Asks, and keeps how many samples each query read and how much processor time it took."""

    def __init__(self, client: httpx.Client, pid: int) -> None:
        self._ask, self._pid = asker(client), pid
        self.samples: dict[str, int] = {}
        self.cpu: dict[str, float] = {}

    def __call__(self, path: str, params: Mapping[str, str]) -> Any:
        if not path.startswith("query"):
            return self._ask(path, params)
        before = cpu_seconds(self._pid)
        found = self._ask(path, {**params, "stats": "all"})
        self.cpu[params["query"]] = cpu_seconds(self._pid) - before
        self.samples[params["query"]] = found["stats"]["samples"]["totalQueryableSamples"]
        return found
