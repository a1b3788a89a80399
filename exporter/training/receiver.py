"""Receives training reports from the socket, HTTP and logs, and attributes each to the job of the process that sent it.

Looks up the job of each sender and converts its messages to `TrainingReport`s. Only the scheduler decides which job a
process belongs to; a sender cannot report for another job.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import astuple

from exporter.clock import Clock
from exporter.config import Config
from exporter.core.model import NEVER, SECOND, Fault, Parallel, TrainingReport
from exporter.procfs import start_ticks
from exporter.training.inbox import Inbox, QueuedReport, Sender, resolve_interval, unidentified_error
from exporter.training.message import (
    LoggedMessage,
    Message,
    ReportRefusedError,
    bubble_share,
    hardware_flops,
    model_flops,
    model_flops_16bit,
)
from exporter.training.unix_socket import ReportListenError, SocketListener
from exporter.worker import Worker
from exporter.workloads import ProcessLookup, WorkloadListener, WorkloadProcess, WorkloadUpdate

log = logging.getLogger(__name__)
LOOKUP_INTERVAL = 10 * SECOND
"""Time between two lookups of an unidentified process: the scheduler may list its job late."""
SENDER_EXPIRY = 60 * SECOND
"""A disconnected sender that has sent nothing for this long is no longer looked up."""
MOST_LOOKUPS = 128
"""Maximum lookups per poll; each reads a few files of /proc."""
MOST_TAKEN = 4096
"""Maximum messages per poll."""
LOG_IGNORED_AFTER_REPORT = 600 * SECOND
"""A job's log is ignored for this long after a report of the job itself: its work would be counted twice."""
_MOST_LOGS = 4096
"""Logs for which the end of the last interval is kept."""


class ReportListener(Protocol):
    """A server that puts messages into the inbox, on a thread of its own."""

    @property
    def worker(self) -> Worker:
        """Its thread, which begins anew after a failure, without its connections."""
        ...

    def close(self) -> None:
        """Stop the server. Never raises."""
        ...


class LogFollower(Protocol):
    """Reads messages from the logs of jobs."""

    def poll(self, processes: Sequence[WorkloadProcess]) -> tuple[LoggedMessage, ...]:
        """Messages found since the last call, oldest first."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Number of lines, files and errors by kind, since the daemon started."""
        ...

    def faults(self) -> tuple[Fault, ...]:
        """Return a fault if following has failed since the last call."""
        ...

    def close(self) -> None:
        """Close all logs. Never raises."""
        ...


class ReportReceiver:
    """The `WorkloadListener` of training jobs."""

    def __init__(
        self,
        inbox: Inbox,
        listeners: Sequence[ReportListener] = (),
        *,
        proc: Path,
        followers: LogFollower | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """`listeners` put messages into `inbox`; `faults` are reported until the receiver is closed."""
        self._inbox, self._listeners, self._proc = inbox, listeners, proc
        self._followers, self._faults = followers, tuple(faults)
        self._reported_at: dict[str, int] = {}
        """Time of the last report that each job sent itself; kept only if logs are followed."""
        self._logged_until: dict[tuple[int, str, int | None], int] = {}
        """End of the last interval from each log, by process, job and rank."""

    def poll(self, now: int, processes: Sequence[WorkloadProcess], lookup: ProcessLookup) -> WorkloadUpdate:
        """See `WorkloadListener.poll`."""
        by_pid = {process.pid: process for process in processes}
        self._inbox.jobs = {process.pid: process.job_id for process in processes}
        self._identify_senders(now, by_pid, lookup)
        sent = [self._report(queued, by_pid, now) for queued in self._inbox.drain(MOST_TAKEN)]
        logged = [self._logged_report(found, by_pid, now) for found in self._poll_logs(now, processes)]
        reports = tuple(report for report in (*sent, *logged) if report is not None)
        if reports:
            self._inbox.count("taken", len(reports))
        return WorkloadUpdate(reports, faults=(*self._faults, *self._listener_faults()), counts=self._counts())

    def close(self) -> None:
        """See `WorkloadListener.close`."""
        for listener in self._listeners:
            listener.close()
        if self._followers is not None:
            self._followers.close()

    def _listener_faults(self) -> list[Fault]:
        followers = () if self._followers is None else self._followers.faults()
        return [*(fault for each in self._listeners for fault in each.worker.faults("reports_failed")), *followers]

    def _counts(self) -> tuple[tuple[str, int], ...]:
        log_counts = {} if self._followers is None else self._followers.counts()
        return (*self._inbox.counts(), *log_counts.items())

    # Identification of senders.

    def _identify_senders(self, now: int, by_pid: Mapping[int, WorkloadProcess], lookup: ProcessLookup) -> None:
        """Look up the jobs of unidentified senders, least recently looked up first."""
        senders = self._inbox.unidentified_senders()
        if not senders:
            return
        found = {sender.peer.pid: by_pid[sender.peer.pid] for sender in senders if sender.peer.pid in by_pid}
        due = [sender for sender in senders if sender.peer.pid not in found and _lookup_due(sender, now)]
        due = sorted(due, key=lambda sender: sender.looked_up_at)[:MOST_LOOKUPS]
        if due:
            found |= lookup([sender.peer.pid for sender in due])
        for sender in (*due, *(sender for sender in senders if sender.peer.pid in found)):
            self._identify(sender, found.get(sender.peer.pid), now)

    def _identify(self, sender: Sender, process: WorkloadProcess | None, now: int) -> None:
        """Set the sender's process if the pid has not been reused by another process since."""
        if process is not None and start_ticks(self._proc / str(sender.peer.pid)) == sender.peer.ticks:
            sender.process = process
        sender.looked_up_at = now

    # Conversion of messages.

    def _report(self, queued: QueuedReport, by_pid: Mapping[int, WorkloadProcess], now: int) -> TrainingReport | None:
        process = queued.sender.process
        if process is None:
            error = unidentified_error(queued.sender)
            self._inbox.count(error.outcome)
            if queued.reply is not None:
                queued.reply(error)
            return None
        if self._followers is not None:
            self._reported_at[process.job_id] = now
        current = by_pid.get(process.pid)
        if current is not None and current.job_id == process.job_id:
            process = queued.sender.process = current  # the process now uses a GPU, or another one
        return to_report(queued.message, process, start=queued.start, end=queued.end)

    def _poll_logs(self, now: int, processes: Sequence[WorkloadProcess]) -> Sequence[LoggedMessage]:
        if self._followers is None:
            return ()
        self._reported_at = {job: at for job, at in self._reported_at.items() if now - at < LOG_IGNORED_AFTER_REPORT}
        return self._followers.poll(processes)

    def _logged_report(
        self, found: LoggedMessage, by_pid: Mapping[int, WorkloadProcess], now: int
    ) -> TrainingReport | None:
        """Convert a message from a log; None if it is rejected."""
        try:
            start, end = self._logged_interval(found, now)
        except ReportRefusedError as err:
            self._inbox.count(err.outcome)
            return None
        process = by_pid.get(found.pid)
        if process is None or process.job_id != found.job_id:
            process = WorkloadProcess(found.pid, found.job_id)
        return to_report(found.message, process, start=start, end=end, each=True)

    def _logged_interval(self, found: LoggedMessage, now: int) -> tuple[int, int]:
        if found.job_id in self._reported_at:
            raise ReportRefusedError("reported", "the job sends reports itself")
        message, log_of = found.message, (found.pid, found.job_id, found.message.rank)
        at = found.at if message.at is None else message.at
        start, end = resolve_interval(message, at=at, arrived=now, until=self._logged_until.get(log_of, NEVER))
        if message.seconds:
            self._remember_interval(log_of, end)
        return start, end

    def _remember_interval(self, log_of: tuple[int, str, int | None], end: int) -> None:
        self._logged_until.pop(log_of, None)
        self._logged_until[log_of] = end
        if len(self._logged_until) > _MOST_LOGS:
            del self._logged_until[next(iter(self._logged_until))]


def _lookup_due(sender: Sender, now: int) -> bool:
    """Whether to look up the sender's job: it is new, or still active and its job may be listed by now."""
    return now - sender.looked_up_at >= LOOKUP_INTERVAL and (
        sender.is_pending or sender.connections > 0 or now - sender.last_message_at < SENDER_EXPIRY
    )


def open_receiver(config: Config, clock: Clock) -> WorkloadListener:
    """Open the listeners and log followers of `config`; one that fails is logged and becomes a lasting fault.

    Raises ConfigError if reports.http is not a loopback address.
    """
    settings, proc = config.reports, Path(config.host.proc)
    inbox = Inbox(per_second=settings.per_second, processes=settings.processes)
    openers: list[Callable[[], ReportListener]] = []
    if settings.socket:
        most = settings.processes
        openers.append(lambda: SocketListener(settings.socket, inbox, clock=clock, proc=proc, most=most))
    if settings.http:
        from exporter.training.http_server import HttpListener, parse_loopback_address  # noqa: PLC0415  seldom used

        parse_loopback_address(settings.http)  # raises ConfigError before any listener is opened
        openers.append(lambda: HttpListener(settings.http, inbox, clock=clock, proc=proc))
    listeners, faults = _open_listeners(openers)
    return ReportReceiver(inbox, listeners, proc=proc, followers=_open_followers(config, clock), faults=faults)


def _open_listeners(openers: Iterable[Callable[[], ReportListener]]) -> tuple[list[ReportListener], list[Fault]]:
    listeners: list[ReportListener] = []
    faults: list[Fault] = []
    for open_listener in openers:
        try:
            listeners.append(open_listener())
        except ReportListenError as err:
            log.warning("reports: %s; jobs cannot report there, all other functions continue", err)
            faults.append(Fault("reports_failed", str(err)))
    return listeners, faults


def _open_followers(config: Config, clock: Clock) -> LogFollower | None:
    if not config.follow:
        return None
    from exporter.training.logs.watcher import open_log_follower  # noqa: PLC0415  seldom used

    followers: LogFollower = open_log_follower(config, clock)
    return followers


_UNCHANGED = (
    "run", "step", "steps", "highest_step", "epoch", "tokens", "padding", "samples", "dtype", "recompute", "phase",
    "checkpoints", "restart",
)  # fmt: skip
"""Fields that a report has from its message without conversion."""


def to_report(
    message: Message, process: WorkloadProcess, *, start: int, end: int, each: bool = False
) -> TrainingReport:
    """Convert the message of `process` about [start, end) to a report; `each`: its figures are a mean per GPU."""
    quality = message.quality
    return TrainingReport(
        job_id=process.job_id,
        start=start,
        end=end,
        **{name: getattr(message, name) for name in _UNCHANGED},
        model_flops=model_flops(message),
        hardware_flops=hardware_flops(message),
        model_flops_16bit=model_flops_16bit(message),
        gpus=message.gpus or message.world_size or 1,
        each=each,
        uuids=process.uuids,
        rank=process.rank if message.rank is None else str(message.rank),
        phases=_phases(message, end - start) if message.phases else (),
        bubble=bubble_share(message.pipeline),
        loss=None if message.loss is None else float(message.loss),  # nan and infinity are text in a message
        quality=quality.value if quality else None,
        quality_name=quality.name if quality else "",
        quality_target=quality.target if quality else None,
        quality_falls=quality.falls if quality else False,
        parallel=Parallel(*astuple(message.parallel)) if message.parallel else None,
        world_size=message.world_size or 0,
    )


def _phases(message: Message, length: int) -> tuple[tuple[str, int], ...]:
    """Nanoseconds by phase, scaled down if their sum exceeds the interval, which may have been clipped."""
    reported = {phase: int(seconds * SECOND) for phase, seconds in message.phases.items()}
    total = sum(reported.values())
    if total > length:
        reported = {phase: spent * length // total for phase, spent in reported.items()}
    return tuple(reported.items())
