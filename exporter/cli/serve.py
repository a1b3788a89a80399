"""Runs the commands that read real hardware: `serve` and `record`.

Owns opening the scheduler, the source and the workload listeners, and writing short job reports to Kubernetes
if [receipts] enables it. Exit status 3 if no source of telemetry works.
"""

import argparse
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from exporter.agent.agent import Agent
from exporter.agent.inventory import Inventory, InventoryFile
from exporter.agent.pause import PauseFile
from exporter.agent.sampler import Collector, Sampler
from exporter.cli.progress import WAITED, ProgressBar, progress_arguments
from exporter.cli.wiring import (
    NO_SOURCE,
    ConfigReloader,
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
from exporter.clock import SystemClock
from exporter.config import Config
from exporter.core.job_record import JobRecord
from exporter.core.model import Fault
from exporter.core.snapshot import ReloadStatus
from exporter.logs import set_redaction
from exporter.nccl.investigator import LatestSnapshot, open_investigator
from exporter.redact import redact_secrets
from exporter.schedulers.base import Scheduler, SchedulerError, choose_scheduler
from exporter.schedulers.page_labels import open_page_owners
from exporter.schedulers.privacy import UserMask, open_mask
from exporter.schedulers.rules import Rules
from exporter.sources.selector import open_selector
from exporter.trace import TraceHeader, TraceWriter
from exporter.workloads import WorkloadListener

if TYPE_CHECKING:
    from exporter.schedulers.kubernetes.publisher import JobReportPublisher

log = logging.getLogger("gpu-efficiency")


@contextmanager
def job_report_writer(config: Config, node: str, mask: UserMask | None = None) -> Iterator[Callable[[JobRecord], None]]:
    """Return the function that publishes the record of each ended job, whose owner `mask` masked; it never blocks."""
    publisher = _open_publisher(config, node, mask)
    if publisher is None:
        yield lambda _: None
        return
    with closing(publisher):
        yield publisher.publish


def _open_publisher(config: Config, node: str, mask: UserMask | None) -> "JobReportPublisher | None":
    destination = config.receipts.kubernetes
    if destination == "none":
        return None
    from exporter.schedulers.kubernetes.api import ApiTimeouts, find_api_server  # noqa: PLC0415  only if configured
    from exporter.schedulers.kubernetes.publisher import JobReportPublisher, pod_of_owner  # noqa: PLC0415  only if configured

    server = find_api_server(config.kubernetes, os.environ, ApiTimeouts())
    if server is not None:
        pod_of = pod_of_owner if mask is None else mask.pod
        return JobReportPublisher(server, destination, node=node, render=short_report, pod_of=pod_of)
    log.warning("receipts.kubernetes = %r, but no API server: no job report is published", destination)
    return None


def short_report(record: JobRecord) -> str:
    """Render one record, which covers this node since the job's or the ledger's start, as one line of text."""
    from exporter.report.records import join_records  # noqa: PLC0415  imported once a job has ended
    from exporter.report.text import render_line  # noqa: PLC0415  imported once a job has ended

    return render_line(join_records([record], job_id=record.owner.job_id, at=record.end))


class SampledNode(Struct, frozen=True):
    """This node with its opened scheduler and source."""

    config: Config
    """The configuration, with the name of the chosen scheduler."""
    collector: Collector
    sampler: Sampler
    node: str
    """The node's name as the scheduler reports it."""
    mask: UserMask | None
    """Replaces user names in what the collector reads; None: they are kept."""
    latest: LatestSnapshot
    """What listeners read of the agent, once it is connected."""


def serve(args: argparse.Namespace) -> int:
    """Sample this node and serve its metrics; exit status 3 if no source works."""
    config = configure(args)
    reloader = open_reloader(args, config)
    with on_sighup(reloader):
        return _with_sampler(config, lambda sampled: _serve(sampled, reloader))


def record(args: argparse.Namespace) -> int:
    """Write observations to a trace until stopped or for `--duration`; exit status as `serve`."""
    return _with_sampler(configure(args), lambda sampled: _record(args, sampled.sampler))


def _with_sampler(config: Config, use: Callable[[SampledNode], int]) -> int:
    """Open a scheduler and a source and call `use` with them; if no source works, print what was tried."""
    clock, timing = SystemClock(), config.sampling
    mask = open_mask(config.privacy)
    if mask is not None:
        set_redaction(lambda text: mask.text(redact_secrets(text)))
    try:
        scheduler = choose_scheduler(config)
    except SchedulerError as err:
        return fail(redact_secrets(str(err)))
    file = InventoryFile(config.inventory.file) if config.inventory.file else None
    latest = LatestSnapshot()
    collector = open_collector(
        config, clock, scheduler, mask, inventory_file=file, listeners=_open_listeners(config, clock, latest)
    )
    config = structs.replace(config, scheduler=scheduler.name)
    try:
        first = collector.collect_now(clock.now())
        failures = [fault for fault in first.faults if fault.kind == "source_failed"]
        if failures:
            return _print_failures(failures)
        interval, deadline = timing.interval_seconds, timing.deadline_seconds
        sampler = Sampler(collector, clock, interval=interval, deadline=deadline, first=first)
        return use(SampledNode(config, collector, sampler, scheduler.node, mask, latest))
    finally:
        collector.close()


def open_collector(
    config: Config,
    clock: SystemClock,
    scheduler: Scheduler,
    mask: UserMask | None,
    *,
    inventory_file: InventoryFile | None = None,
    listeners: Sequence[WorkloadListener] = (),
) -> Collector:
    """Build a Collector with the source, pause file and inventory that `config` names."""
    return Collector(
        open_selector(config),
        scheduler,
        pause=PauseFile(config.sampling.pause_file, clock.wall) if config.sampling.pause_file else None,
        inventory=Inventory(inventory_file.load() if inventory_file else (), expected=config.inventory.expected_gpus),
        inventory_file=inventory_file,
        listeners=listeners,
        mask=mask,
        page_owners=open_page_owners(config, scheduler),
    )


def _open_listeners(config: Config, clock: SystemClock, latest: LatestSnapshot) -> list[WorkloadListener]:
    """Open the enabled listeners: reports, serving engines, the host, timed communication, jobs that may hang."""
    listeners: list[WorkloadListener] = []
    if config.reports.socket or config.reports.http or config.follow:
        from exporter.training.receiver import open_receiver  # noqa: PLC0415  imported only if enabled

        listeners.append(open_receiver(config, clock))
    if config.engines.enabled:
        from exporter.engines.scraper import open_engines  # noqa: PLC0415  imported only if enabled

        listeners.append(open_engines(config, clock))
    if config.host.counters:
        from exporter.host.listener import open_host  # noqa: PLC0415  imported only if enabled

        listeners.append(open_host(config, clock))
    if config.nccl.enabled:
        from exporter.nccl.listener import open_collectives  # noqa: PLC0415  imported only if enabled

        listeners.append(open_collectives(config, clock))
    if config.hangs.enabled:
        listeners.append(open_investigator(config, clock, latest))
    return listeners


def _print_failures(failures: list[Fault]) -> int:
    print("gpu-efficiency: no usable source of GPU telemetry:", file=sys.stderr)
    for tried in (line for fault in failures for line in fault.message.splitlines()):
        print(f"  tried {tried}", file=sys.stderr)
    print("  `gpu-efficiency demo` serves a simulated node instead.", file=sys.stderr)
    return NO_SOURCE


def _serve(sampled: SampledNode, reloader: ConfigReloader) -> int:
    config, sampler, node = sampled.config, sampled.sampler, sampled.node
    metadata = daemon_metadata(config, source=sampler.name, node=node, reload=reloader.status)
    agent = Agent(meta=metadata, policy=config.policy, by_model=config.policies(), sampler=sampler)
    sampled.latest.connect(agent.latest)

    def apply(config: Config, reload: ReloadStatus) -> None:
        sampled.collector.update(Rules(config.workload, config.exemptions))
        agent.update(live_settings(config, node, reload))

    name = node or platform.node()
    with reload_in_background(reloader, apply), job_report_writer(config, name, sampled.mask) as write_report:
        return publish(agent, config, sampler.observations, history=open_history(config, name, ended=write_report))


def _record(args: argparse.Namespace, sampler: Sampler) -> int:
    stop = _stop_after(args.duration)
    header = TraceHeader(host=platform.node(), created_wall=time.time_ns())
    quiet, began = (
        args.quiet or args.duration is None,
        time.monotonic(),
    )  # without a duration there is no progress to show
    with (
        TraceWriter(args.output, header, overwrite=args.force) as trace,
        ProgressBar(args.output, args.duration, unit=WAITED, quiet=quiet) as progress,
    ):
        for observation in sampler.observations(stop):
            trace.append(observation)
            progress.update(time.monotonic() - began)
    print(f"{trace.observations} observations in {args.output}", file=sys.stderr)
    return 0


def _stop_after(seconds: float | None) -> threading.Event:
    """Return an event that SIGINT, SIGTERM, or the end of `seconds` sets."""
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
    config_arguments(command)
    command.add_argument("output", metavar="TRACE", help="JSON lines; gzip if the name ends in .gz")
    command.add_argument(
        "--duration",
        type=duration_argument(),
        metavar="TIME",
        help="stop after that time, such as 1h30m; default: on Ctrl-C",
    )
    command.add_argument("--force", action="store_true", help="overwrite TRACE")
    progress_arguments(command)
