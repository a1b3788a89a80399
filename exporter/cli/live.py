"""Commands on real hardware: serve, record."""

import argparse
import logging
import platform
import signal
import sys
import threading
import time

from exporter.agent import Agent, Hands, Observer
from exporter.cli.wiring import NO_SOURCE, at_least, configuration, configured, portrait, publish
from exporter.clock import SystemClock
from exporter.config import Config
from exporter.schedulers import open_scheduler
from exporter.sources import SOURCES, Source, SourceError, open_first
from exporter.trace import Header, TraceWriter

log = logging.getLogger("gpu-efficiency")


def _names(config: Config) -> tuple[str, ...]:
    return tuple(SOURCES) if config.source == "auto" else (config.source,)


def _first_source(config: Config) -> Source | None:
    """The first source that works here; if none does, says what was tried and what to do."""
    try:
        source = open_first(config, _names(config))
    except SourceError as err:
        print("gpu-efficiency: no usable source of GPU telemetry:", file=sys.stderr)
        for tried in str(err).splitlines():
            print(f"  tried {tried}", file=sys.stderr)
        print("  `gpu-efficiency demo` serves a simulated node instead.", file=sys.stderr)
        return None
    log.info("source %s: %s", source.name, ", ".join(sorted(source.signals)) or "signals not known yet")
    return source


def _observer(config: Config, source: Source) -> tuple[Hands, Observer]:
    """Hands that begin with the source already open, and open it again by its own name if it breaks."""
    first = iter([source])
    hands = Hands(
        lambda: next(first, None) or open_first(config, [source.name]), open_scheduler(config.scheduler, config)
    )
    timing = config.sampling
    return hands, Observer(
        hands, SystemClock(), interval=timing.interval_seconds, deadline=timing.deadline_seconds, name=source.name
    )


def serve(args: argparse.Namespace) -> int:
    """Watch this node and serve; exit status 3 where there is nothing to watch."""
    config = configuration(args)
    source = _first_source(config)
    if source is None:
        return NO_SOURCE
    hands, observer = _observer(config, source)
    agent = Agent(meta=portrait(config, source=source.name), policy=config.policy, observer=observer)
    try:
        return publish(agent, config, observer.observations)
    finally:
        hands.close()


def record(args: argparse.Namespace) -> int:
    """Write Observations to a trace until told to stop, or for a while."""
    config = configuration(args)
    source = _first_source(config)
    if source is None:
        return NO_SOURCE
    hands, observer = _observer(config, source)
    stop = _stop_after(args.duration)
    try:
        with TraceWriter(
            args.output, Header(host=platform.node(), created_wall=time.time_ns()), overwrite=args.force
        ) as trace:
            for observation in observer.observations(stop):
                trace.append(observation)
    finally:
        hands.close()
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
