"""Runs the commands that need no GPU: `demo`, `simulate` and `replay`."""

import argparse
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from exporter import __version__
from exporter.agent.agent import Agent, paced, when_due
from exporter.cli.drill import (
    LIST,
    announcement,
    drill_arguments,
    drill_lines,
    past_lines,
    prepare_drill,
    serve_simulated_cluster,
)
from exporter.cli.progress import TIME, ProgressBar, progress_arguments
from exporter.cli.scratch import scratch_folder
from exporter.cli.wiring import (
    FAILED,
    at_least,
    config_arguments,
    configure,
    daemon_metadata,
    duration_argument,
    fail,
    live_settings,
    on_sighup,
    open_history,
    open_reloader,
    publish,
    reload_in_background,
)
from exporter.clock import Clock, SystemClock
from exporter.config import Config, ConfigError
from exporter.core.exposition import render
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Allocation, Observation, Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, ReloadStatus, Snapshot, layers, sum_by_leak, take_snapshot
from exporter.schedulers.privacy import open_mask
from exporter.schedulers.rules import Rules
from exporter.simulate.drills import DRILL_SCENARIOS, DRILLS, Drill
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.plan import Scenario
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from exporter.trace import TraceHeader, TraceReader, TraceWriter, read_trace, shift_observation


def demo(args: argparse.Namespace) -> int:
    """Serve a simulated node: hours of its scenario at once, then live; with --drill, one that makes an alert fire."""
    if args.drill is not None:
        return _drill(args)
    if args.past:
        raise ConfigError("--past belongs to a drill: name one with --drill (--drill list: all)")
    return _serve_node(args, configure(args, loopback=True))


def _drill(args: argparse.Namespace) -> int:
    if args.drill == LIST:
        print("\n".join(drill_lines()))
        return 0
    drill = prepare_drill(args)
    if args.past:
        print("\n".join(past_lines(args.drill, drill, now=time.time())))
        return 0
    config = configure(args, loopback=True)
    print(announcement(args.drill, drill, config.web.listen_address, node=args.node), flush=True)
    return serve_simulated_cluster(config) if drill.cluster else _serve_node(args, config, drill)


def _serve_node(args: argparse.Namespace, config: Config, drill: Drill | None = None) -> int:
    """Serve the simulated node that `args` describe, in the trouble of `drill`."""
    simulation = demo_simulation(args, SystemClock())
    owner_rules = _OwnerRules(config)
    reloader = open_reloader(args, config, loopback=True)
    metadata = daemon_metadata(
        config, source="simulation", simulated=True, host=simulation.host, node=simulation.host, reload=reloader.status
    )
    agent = Agent(meta=metadata, policy=config.policy, by_model=config.policies())
    agent.ledger.conservation_errors += drill is not None and not drill.books
    print("SIMULATED node: none of these figures come from hardware.", file=sys.stderr)

    def apply(config: Config, reload: ReloadStatus) -> None:
        owner_rules.rules = Rules(config.workload, config.exemptions)
        agent.update(live_settings(config, simulation.host, reload))

    with on_sighup(reloader), reload_in_background(reloader, apply), scratch_folder() as folder:
        observations = owner_rules.apply(simulation.observations)
        # Never in the store of a real node.
        own = structs.replace(config.history, file=_store_path(folder, writable=drill is None or drill.history))
        recorder = open_history(structs.replace(config, history=own), simulation.host)
        return publish(agent, config, lambda stop: when_due(observations, SystemClock(), stop), history=recorder)


def _store_path(folder: str, *, writable: bool) -> str:
    """Return the store's path; one that cannot be written, not even by root, lies below a file."""
    if writable:
        return f"{folder}/history.db" if folder else ""
    return f"{Path(__file__)}/history.db"


def demo_simulation(args: argparse.Namespace, clock: Clock) -> Simulation:
    """Return the simulated node of `demo`: its pre-roll ends now, and it continues without an end."""
    settings = {"seed": args.seed, "board": args.board, "node": args.node, "preroll_seconds": args.preroll}
    if args.drill is not None:
        settings |= {"gpus": DRILLS[args.drill].gpus, "stories": DRILL_SCENARIOS}
    probe = _simulation(args.scenario, **settings)
    before = probe.live_from - probe.start
    start, wall = clock.now() - before, clock.wall() - before
    return _simulation(args.scenario, **settings, duration_seconds=math.inf, start=start, wall=wall)


_SCENARIOS = {**SCENARIOS, **LEAK_SCENARIOS, **WATERFALL_SCENARIOS}


def _simulation(scenario: str, *, stories: Mapping[str, Scenario] = _SCENARIOS, **wanted: Any) -> Simulation:
    try:
        return simulate(scenario, stories=stories, **wanted)
    except ValueError as err:
        raise ConfigError(str(err)) from err


class _OwnerRules:
    """Applies the operator's rules (team, limits) and privacy.users to the owners of simulated allocations."""

    def __init__(self, config: Config) -> None:
        self.rules, self._mask = Rules(config.workload, config.exemptions), open_mask(config.privacy)
        """Any thread may replace the rules; current allocations are then sent again with them."""

    def apply(self, observations: Iterable[Observation]) -> Iterator[Observation]:
        applied, held = self.rules, tuple[Allocation, ...]()
        for observation in observations:
            rules, allocations = self.rules, observation.allocations
            if allocations is not None or rules is not applied:
                applied, held = rules, held if allocations is None else allocations
                allocations = tuple(replace(each, owner=self._masked(rules.apply(each.owner))) for each in held)
            yield replace(observation, allocations=allocations)

    def _masked(self, owner: Owner) -> Owner:
        return owner if self._mask is None else self._mask.owner(owner)


def write_simulation(args: argparse.Namespace) -> int:
    """Write a scenario's trace, and optionally its ground truth to another file."""
    if args.scenario is None:
        for name, scenario in _SCENARIOS.items():
            print(f"{name:24} {scenario.description}")
        return 0
    simulation = _simulation(
        args.scenario,
        seed=args.seed,
        board=args.board,
        gpus=args.gpus,
        node=args.node,
        period_seconds=args.period,
        duration_seconds=args.duration,
    )
    header = TraceHeader(
        host=simulation.host, simulated=True, created_wall=simulation.wall, note=f"{args.scenario}, seed {args.seed}"
    )
    total = None if args.duration == math.inf else simulation.duration_ms / 1000
    with (
        TraceWriter(args.output, header, flush_every=0, overwrite=args.force) as trace,
        ProgressBar(args.output, total, unit=TIME, quiet=args.quiet) as progress,
    ):
        for observation in simulation.observations:
            trace.append(observation)
            progress.update((observation.at - simulation.start) / SECOND)
    if args.truth is not None:
        simulation.write_truth(args.truth)
    print(f"{trace.observations} observations in {args.output}", file=sys.stderr)
    return 0


def replay_trace(args: argparse.Namespace) -> int:
    """Run a trace through the ledger; print a summary, or serve it in real time and then its last state."""
    config = configure(args, loopback=True)
    with read_trace(args.trace) as trace:
        host = trace.header.host
        meta = DaemonMetadata(version=__version__, source="replay", simulated=True, host=host, terms=config.terms(host))
        if args.serve:
            agent = Agent(meta=meta, policy=config.policy, by_model=config.policies())
            return publish(agent, config, lambda stop: _from_now(trace, stop, args.speed), max_age_seconds=math.inf)
        ledger = Ledger(config.policy, config.policies())
        with ProgressBar(args.trace, trace.size, quiet=args.quiet) as progress:
            for observation in progress.through(trace, lambda: trace.bytes_read):
                advance(ledger, observation)
        if ledger.at is None:
            return fail(f"{args.trace} holds no observation")
        _print_replay(args, take_snapshot(ledger, meta), trace)
    return FAILED if ledger.conservation_errors else 0


def _from_now(trace: TraceReader, stop: threading.Event, speed: float) -> Iterator[Observation]:
    """Shift a recording so that it begins now, because ages and dates on the page use this host's clocks."""
    clock, offset, wall = SystemClock(), None, 0
    for observation in paced(trace, clock, stop, speed=speed):
        if offset is None:
            offset, wall = clock.now() - observation.at, clock.wall() - observation.wall
        yield shift_observation(observation, offset, wall=wall)


def _print_replay(args: argparse.Namespace, snapshot: Snapshot, trace: TraceReader) -> None:
    if args.metrics:
        sys.stdout.buffer.write(render(snapshot))
    else:
        _print_summary(snapshot)
    if trace.truncated:
        print(f"gpu-efficiency: {trace.truncated}", file=sys.stderr)


def _print_summary(snapshot: Snapshot) -> None:
    """Print the node's waterfall, and each GPU's layers."""
    totals = sum_by_leak(gpu.counters.now.parts for gpu in snapshot.gpus)
    paid = sum(totals)
    print(f"{len(snapshot.gpus)} GPUs, {paid / SECOND / 3600:.2f} GPU-hours paid; {_layer_text(totals)}")
    for name, part in sorted(zip(LEAK_NAMES, totals, strict=True), key=lambda row: -row[1]):
        if part:
            print(f"  {name:28} {part / SECOND / 3600:10.3f} h {100 * part / paid:6.1f} %")
    for gpu in snapshot.gpus:
        owners = ",".join(owner.job_id for owner in gpu.owners) or "-"
        where = f"gpu {gpu.device.index:>2} {gpu.state.value:12} {gpu.reason:16} {owners:20}"
        print(where, _layer_text(gpu.counters.now.parts))
    print(f"conservation errors: {snapshot.conservation_errors}")


def _layer_text(parts: Iterable[int]) -> str:
    found = layers(parts)
    shares = [("GAU", found.gau), ("ECTR", found.ectr), ("eMFU", found.emfu), ("product", found.product)]
    return "  ".join(f"{name} {'   -' if share is None else f'{100 * share:.1f} %'}" for name, share in shares)


def demo_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `demo`."""
    config_arguments(command)
    command.add_argument("scenario", nargs="?", default="demo", help="`gpu-efficiency simulate` lists them")
    drill_arguments(command)
    command.add_argument("--seed", type=int, default=0, help=_SEED_HELP)
    command.add_argument("--board", default="H100-SXM5-80GB", help=_BOARD_HELP)
    command.add_argument("--node", type=int, default=0, help=_NODE_HELP)
    command.add_argument(
        "--preroll",
        type=duration_argument(),
        metavar="TIME",
        help="time of the scenario before the start, such as 3h; default: the scenario's",
    )


_NODE_HELP = "number of the node in a fleet; each has its own GPUs and jobs"
_SEED_HELP = "seed of the random numbers; 0. The same seed gives the same trace"
_BOARD_HELP = "GPU model, as in the built-in table of specifications; H100-SXM5-80GB"


def simulate_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `simulate`."""
    command.add_argument("scenario", nargs="?", help="without one, the scenarios are listed")
    command.add_argument("-o", "--output", default="trace.jsonl", metavar="TRACE", help="file to write; trace.jsonl")
    command.add_argument("--truth", metavar="FILE", help="write the ground truth to it")
    command.add_argument("--seed", type=int, default=0, help=_SEED_HELP)
    command.add_argument("--board", default="H100-SXM5-80GB", help=_BOARD_HELP)
    command.add_argument("--gpus", type=int, default=8, help="number of GPUs; 8")
    command.add_argument("--node", type=int, default=0, help=_NODE_HELP)
    command.add_argument(
        "--period", type=duration_argument(), default=1.0, metavar="TIME", help="time between readings; 1s"
    )
    command.add_argument(
        "--duration",
        type=duration_argument(endless=True),
        metavar="TIME",
        help="length of the trace, such as 1h30m; default: the scenario's; inf: until Ctrl-C",
    )
    command.add_argument("--force", action="store_true", help="overwrite TRACE")
    progress_arguments(command)


def replay_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `replay`."""
    config_arguments(command)
    command.add_argument("trace", metavar="TRACE", help="recording of `record`, or a trace of `simulate`")
    command.add_argument("--metrics", action="store_true", help="print the exposition instead of a summary")
    command.add_argument("--serve", action="store_true", help="serve it in real time")
    command.add_argument("--speed", type=at_least(1), default=1.0, help="with --serve: factor of real time, 1 or more")
    progress_arguments(command)
