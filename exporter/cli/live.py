"""Commands on real hardware: serve, record."""

import argparse
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from exporter.agent import Agent
from exporter.agent.hands import Hands
from exporter.agent.inventory import Inventory, InventoryFile
from exporter.agent.observer import Observer
from exporter.agent.pause import PauseFile
from exporter.cli.placing import placing
from exporter.cli.progress import WAITED, Progress, progress_arguments
from exporter.cli.reloading import Reloading, heeding, reloading, watched
from exporter.cli.wiring import (
    FAILED,
    NO_SOURCE,
    anew,
    at_least,
    configuration,
    configured,
    history_of,
    portrait,
    publish,
)
from exporter.clock import SystemClock
from exporter.config import Config
from exporter.core.model import Fault
from exporter.core.snapshot import Reload
from exporter.logs import tell_by
from exporter.schedulers import Scheduler, SchedulerError
from exporter.schedulers.choice import choose
from exporter.schedulers.rules import Rules
from exporter.schedulers.telling import Mask, open_mask
from exporter.sources.ladder import open_ladder
from exporter.trace import Header, TraceWriter
from exporter.wording import without_secrets
from exporter.workloads import Listener


class Watched(Struct, frozen=True):
    """This node, as it is observed."""

    config: Config
    """With the scheduler that was found."""
    hands: Hands
    observer: Observer
    node: str
    """What the scheduler calls it."""


def serve(args: argparse.Namespace) -> int:
    """Watch this node and serve; exit status 3 where there is nothing to watch."""
    config = configuration(args)
    reloads = reloading(args, config)
    with heeding(reloads):
        return _watching(config, lambda here: _serve(here, reloads))


def record(args: argparse.Namespace) -> int:
    """Write Observations to a trace until told to stop, or for a while; exit status as `serve`."""
    return _watching(configuration(args), lambda here: _record(args, here.observer))


def _watching(config: Config, use: Callable[[Watched], int]) -> int:
    """Find a scheduler and a source and let `use` have what is observed; where none works, say what was tried."""
    clock, timing = SystemClock(), config.sampling
    mask = open_mask(config.privacy)
    if mask is not None:
        tell_by(lambda text: mask.text(without_secrets(text)))
    try:
        scheduler = choose(config)
    except SchedulerError as err:
        print(f"gpu-efficiency: {without_secrets(str(err))}", file=sys.stderr)
        return FAILED
    file = InventoryFile(config.inventory.file) if config.inventory.file else None
    hands = hands_over(config, clock, scheduler, mask, remembered=file, listeners=_listeners(config, clock))
    config = structs.replace(config, scheduler=scheduler.name)
    try:
        first = hands.first(clock.now())
        refusals = [fault for fault in first.faults if fault.kind == "source_failed"]
        if refusals:
            return _refused(refusals)
        interval, deadline = timing.interval_seconds, timing.deadline_seconds
        observer = Observer(hands, clock, interval=interval, deadline=deadline, first=first)
        return use(Watched(config, hands, observer, scheduler.node))
    finally:
        hands.close()


def hands_over(
    config: Config,
    clock: SystemClock,
    scheduler: Scheduler,
    mask: Mask | None,
    *,
    remembered: InventoryFile | None = None,
    listeners: Sequence[Listener] = (),
) -> Hands:
    """Hands over the sources that `config` names, and over what it says should be there."""
    return Hands(
        open_ladder(config),
        scheduler,
        pause=PauseFile(config.sampling.pause_file, clock.wall) if config.sampling.pause_file else None,
        inventory=Inventory(remembered.recall() if remembered else (), expected=config.inventory.expected_gpus),
        remembered=remembered,
        listeners=listeners,
        mask=mask,
    )


def _listeners(config: Config, clock: SystemClock) -> list[Listener]:
    """Those who hear what workloads say, as far as they are wanted."""
    wanted: list[Listener] = []
    if config.reports.socket or config.reports.http or config.follow:
        from exporter.reports.desk import open_reports  # noqa: PLC0415  who listens to nobody pays for nothing

        wanted.append(open_reports(config, clock))
    if config.engines.enabled:
        from exporter.engines.polling import open_engines  # noqa: PLC0415  likewise

        wanted.append(open_engines(config, clock))
    return wanted


def _refused(refusals: list[Fault]) -> int:
    print("gpu-efficiency: no usable source of GPU telemetry:", file=sys.stderr)
    for tried in (line for fault in refusals for line in fault.message.splitlines()):
        print(f"  tried {tried}", file=sys.stderr)
    print("  `gpu-efficiency demo` serves a simulated node instead.", file=sys.stderr)
    return NO_SOURCE


def _serve(here: Watched, reloads: Reloading) -> int:
    config, observer, node = here.config, here.observer, here.node
    meta = portrait(config, source=observer.name, node=node, reload=reloads.told)
    agent = Agent(meta=meta, policy=config.policy, by_model=config.policies(), observer=observer)

    def adopt(config: Config, told: Reload) -> None:
        here.hands.adopt(Rules(config.workload, config.exemptions))
        agent.adopt(anew(config, node, told))

    name = node or platform.node()
    with watched(reloads, adopt), placing(config, name) as place:
        return publish(agent, config, observer.observations, history=history_of(config, name, ended=place))


def _record(args: argparse.Namespace, observer: Observer) -> int:
    stop = _stop_after(args.duration)
    header = Header(host=platform.node(), created_wall=time.time_ns())
    quiet, began = args.quiet or args.duration is None, time.monotonic()  # what has no end is never some way on
    with (
        TraceWriter(args.output, header, overwrite=args.force) as trace,
        Progress(args.output, args.duration, unit=WAITED, quiet=quiet) as progress,
    ):
        for observation in observer.observations(stop):
            trace.append(observation)
            progress.tell(time.monotonic() - began)
    print(f"{trace.observations} observations in {args.output}", file=sys.stderr)
    return 0


def _stop_after(seconds: float | None) -> threading.Event:
    """An event that SIGINT and SIGTERM set, or time."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not set() itself: the main thread may be inside this event's own lock, waiting, when the signal comes.
        signal.signal(number, lambda *_: threading.Timer(0, stop.set).start())
    if seconds is not None:
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
    return stop


def record_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `record`."""
    configured(command)
    command.add_argument("output", metavar="TRACE", help="JSON lines; gzip if the name ends in .gz")
    command.add_argument(
        "--duration", type=at_least(0), metavar="S", help="stop after so many seconds; default: on Ctrl-C"
    )
    command.add_argument("--force", action="store_true", help="overwrite TRACE")
    progress_arguments(command)
