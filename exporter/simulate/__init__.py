"""A synthetic node or fleet that emits Observations from a physical model of its own.

Owns a model of boards (power, clocks, heat), of kernels and copies, and of jobs; it emits only what hardware
and a scheduler would say, and keeps the truth apart, for another file. Refuses to know how the rest of the
program judges: it imports `core.model` and nothing else, so that agreement between the two means something.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

from exporter.core.model import MS
from exporter.simulate.boards import BOARDS, Board
from exporter.simulate.lookalikes import STORIES
from exporter.simulate.plan import Truth
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.setting import Scenario, Setting
from exporter.simulate.simulation import Simulation, node_uuids, without
from exporter.simulate.twelve import TWELVE
from exporter.simulate.waterfalls import WATERFALLS
from exporter.simulate.work import FOREVER_MS

__all__ = [
    "BOARDS", "SCENARIOS", "STORIES", "TWELVE", "WATERFALLS", "Board", "Scenario", "Simulation", "Truth", "simulate",
    "without",
]  # fmt: skip

DEFAULT_WALL = 1_767_225_600 * 1_000_000_000
"""2026-01-01 00:00 UTC in Unix nanoseconds: a fixed day, so that the same seed gives the same bytes."""
_PREROLL_PERIOD_MS = 60_000
_MS_GRAIN = 1e-6
"""How far from a whole millisecond a figure in seconds may be: binary fractions are not exact."""

Row = TypeVar("Row")


def simulate(
    scenario: str,
    *,
    seed: int = 0,
    board: str = "H100-SXM5-80GB",
    period_seconds: float = 1.0,
    duration_seconds: float | None = None,
    preroll_seconds: float | None = None,
    gpus: int = 8,
    node: int = 0,
    stories: Mapping[str, Scenario] = SCENARIOS,
    start: int = 0,
    wall: int = DEFAULT_WALL,
) -> Simulation:
    """Set up one node's story; nothing is computed until its Observations are asked for.

    `start` is monotonic nanoseconds on a whole millisecond, `wall` Unix nanoseconds of the same moment.
    `duration_seconds` comes on top of `preroll_seconds` (both default to the scenario's own; the duration may be
    infinite). Nodes of one fleet share the seed and differ in `node`. `stories` is the table that `scenario` is a row
    of: SCENARIOS, STORIES, TWELVE or WATERFALLS. The same arguments give the same bytes.
    Raises ValueError for an unknown scenario or board, a time off the millisecond grid, or too few GPUs.
    """
    row = _row(scenario, stories, "scenario")
    if gpus < row.min_gpus:
        raise ValueError(f"scenario {scenario} needs at least {row.min_gpus} GPUs, not {gpus}")
    if start % MS:
        raise ValueError(f"start is {start} ns: it must lie on a whole millisecond")
    preroll = _whole_ms(row.preroll_seconds if preroll_seconds is None else preroll_seconds, "preroll_seconds")
    duration = _whole_ms(row.duration_seconds if duration_seconds is None else duration_seconds, "duration_seconds")
    period = _positive_ms(period_seconds, "period_seconds")
    setting = Setting(
        board=_row(board, BOARDS, "board"),
        gpus=gpus,
        node=node,
        preroll_ms=preroll,
        duration_ms=preroll + duration,
    )
    return Simulation(
        scenario=scenario,
        host=f"gpu-node-{node:02d}",
        board=setting.board,
        uuids=node_uuids(seed, node, gpus),
        plan=row.plan(setting),
        seed=seed,
        node=node,
        start=start,
        wall=wall,
        period_ms=period,
        preroll_ms=preroll,
        preroll_period_ms=max(_PREROLL_PERIOD_MS, period),
        duration_ms=setting.duration_ms,
    )


def _row(name: str, table: Mapping[str, Row], kind: str) -> Row:
    try:
        return table[name]
    except KeyError:
        raise ValueError(f"no {kind} is called {name!r}; there are {', '.join(table)}") from None


def _whole_ms(seconds: float, name: str) -> int:
    if seconds == math.inf:
        return FOREVER_MS
    ms = seconds * 1000
    if not ms >= 0 or abs(ms - round(ms)) > _MS_GRAIN:
        raise ValueError(f"{name} is {seconds}: it must be seconds in whole milliseconds, 0 or more")
    return round(ms)


def _positive_ms(seconds: float, name: str) -> int:
    ms = _whole_ms(seconds, name)
    if ms < 1:
        raise ValueError(f"{name} is {seconds}: it must be a millisecond or more")
    return ms
