"""What a storm of jobs costs a real Prometheus, and what a rolling restart of all exporters does to its counters.

Owns the order of events and the comparison of Prometheus' samples with what the daemons booked. Needs Debian's package
prometheus.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from benchmarks.figures import Row, row
from benchmarks.fleet.questions import QUESTIONS, answer
from benchmarks.fleet.server import Server, Size, prometheus, settled
from benchmarks.fleet.unrest import AT_ONCE
from benchmarks.group import Group, Measured
from benchmarks.rig.client import Client
from benchmarks.rig.daemon import memory, running

_JOBS = next(question.raw for question in QUESTIONS if "jobs" in question.asks)
_HEAD, _CREATED = "prometheus_tsdb_head_series", "prometheus_tsdb_head_series_created_total"


class Plan(Struct, frozen=True):
    """How large and how long; scrapes."""

    nodes: int = 125
    scrape: int = 5
    calm: int = 6
    storm: int = 12


QUICK = Plan(nodes=4, scrape=1, calm=3, storm=2)


class Moment(Struct, frozen=True):
    """What Prometheus is like."""

    series: float
    created: float
    mebibytes: float
    milliseconds: float
    samples: int


def measured(plan: Plan | None = None) -> Measured:
    """Calm, storm, calm again, then all exporters are restarted a few at a time."""
    plan = plan or Plan()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        fleet = stack.enter_context(running(["-m", "benchmarks.fleet.unrest", f"{plan.nodes}"]))
        size = Size(nodes=plan.nodes, scrape=plan.scrape, rules=False)
        server = stack.enter_context(prometheus(folder, fleet.port, size))
        wait = plan.scrape
        settled(server, plan.nodes + 1)
        time.sleep(plan.calm * wait)
        before = _moment(server)
        _order(fleet.port, "storm")
        time.sleep(plan.storm * wait)
        after = _moment(server)
        _order(fleet.port, "calm")
        time.sleep(2 * wait)
        told = [*storm_rows(plan, before, after), *_restart(server, fleet.port, plan)]
    return Measured(rows=told)


def _moment(server: Server) -> Moment:
    found = answer(server, _JOBS)
    mebibytes = memory(server.pid).now
    return Moment(server.own(_HEAD), server.own(_CREATED), mebibytes, found.milliseconds, found.samples)


def _order(port: int, path: str) -> Any:
    with Client(port) as client:
        return client.get(f"/{path}")[1]


def _restart(server: Server, port: int, plan: Plan) -> list[Row]:
    created = server.own(_CREATED)
    _order(port, "restart")
    time.sleep((AT_ONCE + 3) * plan.scrape)
    _order(port, "hold")
    time.sleep(3 * plan.scrape)
    settled(server, plan.nodes + 1)
    created = server.own(_CREATED) - created
    truth = json.loads(_order(port, "truth"))["data"]
    query = 'gpu_efficiency_node_seconds_total{layer="useful"}[15m]'
    found = server.ask(f"query?query={quote(query)}")["result"]
    return restart_rows(plan, created, truth, samples_of(found))


def samples_of(found: Iterable[Mapping[str, Any]]) -> dict[str, list[list[tuple[float, float]]]]:
    """Node -> its series' samples, moment and value."""
    nodes: dict[str, list[list[tuple[float, float]]]] = {}
    for one in found:
        samples = [(float(at), float(value)) for at, value in one["values"]]
        nodes.setdefault(one["metric"]["instance"], []).append(samples)
    return nodes


# -- arithmetic --


def increased(samples: Sequence[tuple[float, float]]) -> float:
    """What `increase` makes of them before it extrapolates: a counter that falls has begun at nought."""
    return sum(now - before if now >= before else now for (_, before), (_, now) in pairwise(samples))


def gap(samples: Sequence[tuple[float, float]]) -> float:
    """The longest time between two of them."""
    return max((later - earlier for (earlier, _), (later, _) in pairwise(samples)), default=0.0)


def missed(truth: float, series: Iterable[Sequence[tuple[float, float]]]) -> float:
    """What daemons booked and Prometheus has not, in percent."""
    return 100 * (truth - sum(map(increased, series))) / truth


def storm_rows(plan: Plan, before: Moment, after: Moment) -> list[Row]:
    """Rows of what new jobs at every scrape cost."""
    often, gpus = f"once, {plan.storm} scrapes", 8 * plan.nodes

    def once(what: str, value: float, unit: str, digits: int = 0) -> Row:
        return row("storm", what, often=often, values=[value], unit=unit, digits=digits, spread="-")

    created = after.created - before.created
    return [
        once(f"Series in the head before, {gpus:,} GPUs", before.series, "series"),
        once("Series in the head after a storm", after.series, "series"),
        once("Series created by a node whose jobs are new", created / (plan.nodes * plan.storm), "series a scrape"),
        once("Memory before", before.mebibytes, "MiB"),
        once("Memory after", after.mebibytes, "MiB"),
        once("Memory for a series created", 1024 * (after.mebibytes - before.mebibytes) / created, "KiB", 1),
        once("Ten jobs that lose most, of raw series, before", before.milliseconds, "ms", 1),
        once("Ten jobs that lose most, of raw series, after", after.milliseconds, "ms", 1),
    ]


def restart_rows(
    plan: Plan, created: float, truth: Mapping[str, float], nodes: Mapping[str, list[list[tuple[float, float]]]]
) -> list[Row]:
    """Rows of what a rolling restart does; even nodes keep a history."""
    often = f"once, {plan.nodes} nodes"
    kept, begun = ([s for name, each in nodes.items() if int(name[-5:]) % 2 == odd for s in each] for odd in (0, 1))

    def once(what: str, value: float, unit: str, digits: int, budget: float | None = None) -> Row:
        values = [value + 0.0 if abs(value) >= 0.5 * 10**-digits else 0.0]
        return row("storm", what, often=often, values=values, unit=unit, digits=digits, spread="-", budget=budget)

    lost = (truth["begun_anew"] - sum(map(increased, begun))) / max(1, plan.nodes // 2)
    longest = max(gap(samples) for samples in (*kept, *begun))
    return [
        once("Restart: series created", created, "series", 0),
        once(f"Restart: longest gap in a series, scrape every {plan.scrape} s", longest, "s", 1),
        once("Restart, with a history: useful time lost to Prometheus", missed(truth["kept"], kept), "%", 3, 0),
        once("Restart, without one: useful time lost to Prometheus", lost, "GPU-seconds a node", 1),
    ]


STORM = Group(
    name="storm",
    title="A storm of jobs, and a rolling restart",
    about=(
        "A real Prometheus without rules scrapes 125 simulated nodes of eight GPUs every 5 seconds, a page of which is "
        "a minute of theirs. A storm: for twelve scrapes every node has other jobs at each. Then all exporters are "
        "restarted, an eighth of them at each scrape: each fails one scrape, and has booked a minute that was never "
        "asked for. Every second one keeps a history and goes on where it was, the others begin at nought. Lost is "
        "what the daemons booked as useful since they were first scraped and Prometheus' samples do not hold, by the "
        "rule that `increase` has for counters that fall; `increase` itself also extrapolates to the edges of its "
        "range, restart or none, which is not in the figure."
    ),
    measures=("exporter/core", "exporter/cluster", "exporter/simulate"),
    run=measured,
    quick=lambda: measured(QUICK),
)
