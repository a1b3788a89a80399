"""What the rules cost a real Prometheus that scrapes 1,000 and 10,000 simulated GPUs, and what they would at 100,000.

The budget is held against processor time: of the same server with its rules and without them, one after the other. What
it tells itself of a group's evaluation is wall time, and on a busy machine most of that is waiting.

Owns the order of the measurement. Needs Debian's package prometheus.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from benchmarks.fleet.past import remember
from benchmarks.fleet.pictures import BOUGHT, BY_SIZE
from benchmarks.fleet.questions import HEAD, asked, cells
from benchmarks.fleet.rows import Cost, rows, shares, sizes, table
from benchmarks.fleet.server import Evaluated, Server, Size, busy, check, prometheus
from benchmarks.group import Curves, Group, Measured, Table
from benchmarks.rig.daemon import memory, running

SIZES = (Size(nodes=125), Size())
QUICK = (Size(nodes=12, scrape=2, every=4, warm_up=12, looks=1, own_intervals=False, without=2),)


def measured(many: Sequence[Size] = SIZES) -> Measured:
    """Start a fleet and a server of each size, wait until windows are full, watch all at once, ask the largest."""
    with ExitStack() as stack:
        servers = [_started(stack, size) for size in many]
        time.sleep(max(size.warm_up for size in many))
        with ThreadPoolExecutor(len(many)) as pool:
            seen = list(pool.map(_watched, servers, many))
        answers = asked(servers[-1])
        with ThreadPoolExecutor(len(many)) as pool:
            costs = list(pool.map(_without, servers, many, seen))
    about = (
        f"Five questions of the boards, {costs[-1].gpus:,} GPUs, four minutes in 17 points: of recorded series, and of "
        "the raw ones as they would be without recording rules. Milliseconds are the server's own, median of three."
    )
    both = [table(costs), Table(about=about, head=HEAD, rows=tuple(cells(answers)))]
    curves: Curves = {
        "gpus": [cost.gpus for cost in costs],
        "rules": [cost.mean for cost in costs],
        "scraping": [100 * cost.without for cost in costs],
        "memory": [cost.mebibytes / 1024 for cost in costs],
        "questions": list(answers),
        "recorded": [one.milliseconds for one, _ in answers.values()],
        "raw": [other.milliseconds for _, other in answers.values()],
    }
    told = [line for cost in costs for line in (*shares(cost), *sizes(cost))]
    return Measured(rows=[*told, *rows(costs[-1].looks)], tables=both, curves=curves)


def _started(stack: ExitStack, size: Size) -> Server:
    folder = Path(stack.enter_context(TemporaryDirectory()))
    fleet = stack.enter_context(running(["-m", "benchmarks.fleet.site", f"{size.nodes}"]))
    return stack.enter_context(prometheus(folder, fleet.port, size, remember))


def _watched(server: Server, size: Size) -> Cost:
    """Watch it with its rules."""
    looks, spent = list[list[Evaluated]](), list[float]()
    appended, began = server.own(_APPENDED), time.monotonic()
    for _ in range(size.looks):
        spent.append(busy(server, size.every))
        looks.append(server.groups())
    samples = (server.own(_APPENDED) - appended) / (time.monotonic() - began)
    check(server, size.nodes + 1)
    return Cost(
        gpus=8 * size.nodes, scraped=server.value("sum(scrape_samples_scraped)"),
        recorded=server.own(_RECORDED), samples=samples, mebibytes=memory(server.pid).now,
        with_rules=spent, without=0.0, looks=looks,
    )  # fmt: skip


_APPENDED = "prometheus_tsdb_head_samples_appended_total"
_RECORDED = "prometheus_rule_group_last_evaluation_samples"


def _without(server: Server, size: Size, cost: Cost) -> Cost:
    """Watch the same server after its rules are taken away."""
    server.forget_rules()
    return replace(cost, without=busy(server, size.without))


RULES = Group(
    name="rules",
    title="Recording and alert rules",
    about=(
        "A real Prometheus, with all of `alerts/*.yaml`, scrapes 125 and another 1,250 simulated nodes of eight GPUs "
        "once a minute, both at once: pages of the daemon's own text, of twelve kinds of node, under other names each, "
        "whose counters move on; one node in ten is of kinds in which something hangs, is lost or leaks. The day that "
        "rules with long ranges read is written beforehand. The budget (100,000 GPUs in a quarter of the interval, on "
        "one core) is held against processor time: of the same server with its rules and then without them, so that "
        "scraping, and what else the machine does, is not in it. Times of groups and rules are what the server tells, "
        "wall time. Why it is linear: every rule over the daemons' series is one pass over them, a join finds its one "
        "partner by hash, and the series of a node do not depend on how many nodes there are. What is evaluated every "
        "ten or twenty minutes (stragglers, how jobs are spread, medians) is so every four here, so that the run sees "
        "it. Texts of the alerts that fire are in the figure: until commit 063e611 the simulated clocks ran an hour "
        "ahead, and the texts of 1,250 alerts on clocks were in it too."
    ),
    measures=("alerts", "exporter/core", "exporter/cluster", "exporter/simulate"),
    run=measured,
    quick=lambda: measured(QUICK),
    shortfalls={
        "CPU of all rules, 1,000 GPUs, share of a core": (
            "As the next row: what rules cost grows with the series they open, and a small fleet has as many a GPU."
        ),
        "CPU of all rules, 10,000 GPUs, share of a core": (
            "An evaluation costs what its selectors open: some 4 to 7 microseconds a series in Prometheus 2.42, "
            "whatever is done with it then. Most are opened every four minutes by the rates of jobs by leak and by the "
            "fleet's chain, and every ten by those of single GPUs that stragglers need; the group of deadlocks, every "
            "30 seconds, reads what few jobs have. Next: fewer series a job, for nine leaks in ten stand still."
        ),
        "- extrapolated to 100,000 GPUs": (
            "As the row above. One server is not the plan for 100,000 GPUs: docs/prometheus.md divides them into ten."
        ),
    },
    pictures=(BY_SIZE, BOUGHT),
)
