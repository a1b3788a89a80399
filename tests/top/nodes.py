"""Builds node states for `top` from a simulated node, through the daemon's own JSON.

Owns the making of views. Everything is of monotonic time 0, and a second ago was the last answer.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import msgspec
from msgspec.structs import replace

from exporter.core.ledger import Ledger
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.simulate.simulation import simulate
from exporter.top.view import UNICODE, Glyphs, PolledNode, TopView, Trends, node_names
from exporter.web.api import AccountsOut, GpusOut, JobsOut, accounts_out, gpus_out, jobs_out

NOW, WALL = 1000.0, 1_767_225_600.0
ADDRESS = "http://gpu-node-00:19400"


def responses(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.MockTransport:
    """A transport whose responses are still to be read, as those of a network are."""

    def unread(request: httpx.Request) -> httpx.Response:
        made = answer(request)
        return httpx.Response(made.status_code, headers=made.headers, content=iter([made.content]))

    return httpx.MockTransport(unread)


@cache
def snapshot(seconds: int = 1500, *, node: int = 0, scenario: str = "demo") -> Snapshot:
    """Simulate a node for `seconds` and return its snapshot."""
    story = simulate(scenario, node=node, preroll_seconds=0, duration_seconds=float(seconds))
    ledger = Ledger()
    for observation in story.observations:
        advance(ledger, observation)
    meta = DaemonMetadata(version="9", source="simulation", simulated=True, host=story.host)
    return take_snapshot(ledger, meta)


def answers(taken: Snapshot) -> Any:
    """Return the responses of /api/v1/gpus, /api/v1/jobs and /api/v1/node as plain values that a test may change."""
    found = (gpus_out(taken, 0), jobs_out(taken, 0), accounts_out(taken, 0))
    return tuple(json.loads(msgspec.json.encode(one)) for one in found)


def seen(taken: Snapshot | None = None, *, address: str = ADDRESS, told: Any = None, **changes: Any) -> PolledNode:
    """Return a node that responded a second ago, with `told` instead of the snapshot's responses."""
    gpus, jobs, node = told or answers(taken or snapshot())
    made = PolledNode(
        address=address,
        gpus=msgspec.convert(gpus, GpusOut),
        jobs=msgspec.convert(jobs, JobsOut),
        accounts=msgspec.convert(node, AccountsOut),
        at=NOW - 1,
    )
    return replace(made, **changes)


def view(*nodes: PolledNode, signs: Glyphs = UNICODE, now: float = NOW, trends: Trends | None = None) -> TopView:
    """Return a view of the nodes; by default of the simulated one."""
    shown = nodes or (seen(),)
    watched = trends or Trends(now - 60, 4.0)
    return TopView(nodes=shown, now=now, wall=WALL, trends=watched, glyphs=signs, names=node_names(shown, signs))
