"""Prepares `demo --drill`: the simulated trouble that makes one alert fire, and what its operator has to do.

Each drill gets a cluster label of its own in Prometheus: its figures then stay apart from those of real clusters.
"""

import argparse
import platform
import time
from collections.abc import Iterator, Sequence

from exporter.cli import PROGRAM
from exporter.cli.cluster import serve_cluster
from exporter.cluster.model import ClusterNode, Demand, Jobs, NodeRequirements, Nodes, PendingJob
from exporter.cluster.watcher import Question
from exporter.config import Config, ConfigError
from exporter.simulate.drills import DRILLS, Drill

LIST = "list"
"""Value of --drill that lists all."""
_GPUS, _NEXT_PORT = 8, 10
_PAST_SECONDS, _OWN_SECONDS, _PAST_STEP_SECONDS = 26 * 3600, 4 * 3600, 120
_MARK = "gpu_efficiency_simulated is 1"


def drill_arguments(command: argparse.ArgumentParser) -> None:
    """Flag of `demo`."""
    command.add_argument(
        "--drill",
        type=_whole_name,
        choices=(*sorted(DRILLS), LIST),
        metavar="ALERT",
        help="make this alert fire within minutes, to test the pager; list: what each drill does",
    )
    command.add_argument(
        "--past",
        action="store_true",
        help="with --drill: print what Prometheus must hold of the day before, as OpenMetrics for promtool, and exit",
    )


def _whole_name(name: str) -> str:
    """Complete an alert's name that is given without the prefix of all of ours."""
    return whole if (whole := f"GPUEfficiency{name}") in DRILLS else name


def drill_lines() -> Iterator[str]:
    """Yield a line for each alert: its drill."""
    for name, drill in sorted(DRILLS.items()):
        yield f"{name:39} {drill.minutes:2}m  {drill.about}"


def prepare_drill(args: argparse.Namespace) -> Drill:
    """Put the drill's scenario and settings into `args`, and return it; raises ConfigError for flags that clash."""
    if args.scenario != "demo" or args.preroll is not None:
        raise ConfigError("--drill sets the scenario and its time before the start: leave SCENARIO and --preroll out")
    drill = DRILLS[args.drill]
    if args.past and not drill.past:
        raise ConfigError(f"the drill {args.drill} needs no past: leave --past out")
    args.scenario, args.preroll = drill.scenario, float(drill.preroll_seconds)
    vars(args).update(drill.settings)
    return drill


def past_lines(name: str, drill: Drill, *, now: float) -> Iterator[str]:
    """Yield what Prometheus must hold of the day before `now`, Unix seconds, as OpenMetrics.

    The last hours are left out: Prometheus writes them itself, and takes no blocks for them.
    """
    for series, value in drill.past.items():
        for back in range(_PAST_SECONDS, _OWN_SECONDS, -_PAST_STEP_SECONDS):
            yield f'{series}{{cluster="drill-{name}"}} {value:g} {now - back:.0f}'
    yield "# EOF"


def announcement(name: str, drill: Drill, address: str, *, node: int = 0) -> str:
    """Say what will happen and what to do; `address` is web.listen_address, `node` the number of this node."""
    if node:
        return f"SIMULATED trouble: node {node} of the drill {name}; the first has printed what to do"
    host, _, port = address.rpartition(":")
    hosts = [f"{host}:{int(port) + _NEXT_PORT * number}" for number in range(drill.nodes)]
    return "\n".join(_announcement(name, drill, hosts))


def _target(address: str) -> str:
    """Return what Prometheus scrapes: this host's name instead of the address that stands for all of its own."""
    host, _, port = address.rpartition(":")
    return address if host.strip("[0.:]") else f"{platform.node()}:{port}"


def _announcement(name: str, drill: Drill, addresses: Sequence[str]) -> Iterator[str]:
    yield f"SIMULATED trouble, to test the pager: {name}"
    yield f"  what: {drill.about}."
    yield f"  when: the alert fires within {drill.minutes} min of Prometheus' first scrape (scrapes every 15 s)"
    if drill.companions:
        yield f"  also: {', '.join(drill.companions)}"
    for number, address in enumerate(addresses[1:], 1):
        line = f"demo --drill {name} --node {number} --web.listen-address {address}"
        yield f"  start the next node, too: {PROGRAM} {line}"
    if drill.past:
        yield "  before: the alert compares with the day before. Give one to a Prometheus of your own, as its user:"
        yield f"    {PROGRAM} demo --drill {name} --past > past.txt"
        yield "    promtool tsdb create-blocks-from openmetrics past.txt DATA  # DATA: its --storage.tsdb.path"
    yield "  add to Prometheus' scrape_configs, and reload it (on another host: --web.listen-address 0.0.0.0:19400):"
    quoted = ", ".join(f"'{_target(address)}'" for address in addresses)
    for number in range(drill.scrape_jobs):
        yield f"    - job_name: drill-{name}{f'-{number + 1}' if number else ''}"
        yield "      scrape_interval: 15s"
        yield "      static_configs:"
        yield f"        - targets: [{quoted}]"
        yield f"          labels: {{cluster: 'drill-{name}'}}"
    yield "  afterwards remove that again, before you stop this: a target that is left fires GPUEfficiencyExporterDown."
    mark = 'gpu_efficiency_cluster_build_info has scheduler="simulation"' if drill.cluster else _MARK
    yield f"  every series has that label cluster; {mark}."


class SimulatedScheduler:
    """A Slurm with a node without an exporter, and a job that waits though it would fit the node's free GPUs."""

    name = "simulation"

    @property
    def questions(self) -> Sequence[Question]:
        """See ClusterSource."""
        return Question("jobs", 1, 1, _jobs), Question("nodes", 1, 1, _nodes)

    def close(self) -> None:
        """See ClusterSource."""


def _jobs() -> Jobs:
    waiting = PendingJob(
        job_id="41001", partition="gpu", reason="other", parts=(Demand(gpus=4, place="gpu"),), since=time.time() - 3600
    )
    return Jobs(pending=(waiting,), places={"gpu": NodeRequirements(partitions=("gpu",))})


def _nodes() -> Nodes:
    node = ClusterNode(
        name="gpu-node-00",
        gpus={"h100": _GPUS},
        used={"h100": 2},
        state="mixed",
        partitions=("gpu",),
        open_partitions=("gpu",),
    )
    return Nodes(nodes=(node,))


def serve_simulated_cluster(config: Config) -> int:
    """Serve the metrics of a whole cluster, whose scheduler is simulated, until stopped."""
    return serve_cluster(config, SimulatedScheduler(), key="web.listen_address")
