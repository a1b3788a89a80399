"""Receives training reports from the socket, HTTP and logs, and attributes each to the job of the process that sent it.

Owns the lookup of a sender's job, and the conversion of its messages to `Report`s. Refuses reports for another job:
only the scheduler decides which job a process belongs to.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

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
    loss_value,
    model_flops,
)
from exporter.training.unix_socket import ReportListenError, SocketListener
from exporter.workloads import ProcessLookup, WorkloadListener, WorkloadProcess, WorkloadUpdate

log = logging.getLogger(__name__)
LOOKUP_INTERVAL = 10 * SECOND
"""From one question whose a process is to the next, while it is nobody's: a scheduler may learn of a job late."""
SENDER_EXPIRY = 60 * SECOND
"""One that hangs up and says nothing for so long is not asked about."""
MOST_LOOKUPS = 128
"""At a time; each is a few files of /proc."""
MOST_TAKEN = 4096
"""Messages at a time."""
LOG_IGNORED_AFTER_REPORT = 600 * SECOND
"""For so long after a report of a job, its log is not believed beside it: the same would be said twice."""
_MOST_LOGS = 4096


class ReportListener(Protocol):
    """Where messages come in."""

    @property
    def alive(self) -> bool:
        """Whether anybody is heard."""
        ...

    def close(self) -> None:
        """Let nobody in any more. Never raises."""
        ...


class LogFollower(Protocol):
    """Logs that are followed."""

    def poll(self, now: int, processes: Sequence[WorkloadProcess]) -> tuple[LoggedMessage, ...]:
        """What was found since the last time, oldest first."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Lines and files by kind, since the start."""
        ...

    def close(self) -> None:
        """Let go of the logs. Never raises."""
        ...


class ReportReceiver:
    """The `Listener` to training jobs."""

    def __init__(
        self,
        inbox: Inbox,
        listeners: Sequence[ReportListener] = (),
        *,
        proc: Path,
        followers: LogFollower | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """`doors` put what they hear into `intake`; `faults` stand as long as the desk."""
        self._inbox, self._listeners, self._proc = inbox, listeners, proc
        self._followers, self._faults = followers, tuple(faults)
        self._reported_at: dict[str, int] = {}
        """When each job last reported by itself."""
        self._logged_until: dict[tuple[int, str, int | None], int] = {}
        """How far each log has spoken, by its process, job and rank."""

    def poll(self, now: int, processes: Sequence[WorkloadProcess], lookup: ProcessLookup) -> WorkloadUpdate:
        """See `Listener.take`."""
        by_pid = {process.pid: process for process in processes}
        self._inbox.likely_pids = tuple(by_pid)
        self._identify_senders(now, by_pid, lookup)
        sent = [self._report(queued, by_pid, now) for queued in self._inbox.drain(MOST_TAKEN)]
        logged = [self._logged_report(found, by_pid, now) for found in self._poll_logs(now, processes)]
        reports = tuple(report for report in (*sent, *logged) if report is not None)
        if reports:
            self._inbox.count("taken", len(reports))
        return WorkloadUpdate(reports, faults=(*self._faults, *self._dead_listeners()), counts=self._counts())

    def close(self) -> None:
        """See `Listener.close`."""
        for listener in self._listeners:
            listener.close()
        if self._followers is not None:
            self._followers.close()

    def _dead_listeners(self) -> list[Fault]:
        dead = [listener for listener in self._listeners if not listener.alive]
        return [Fault("reports_failed", "a thread that heard reports has ended: please report this")] if dead else []

    def _counts(self) -> tuple[tuple[str, int], ...]:
        if self._followers is None:
            return self._inbox.counts()
        counts = Counter(dict(self._inbox.counts()))
        counts.update(self._followers.counts())
        return tuple(counts.items())

    # Whose a sender is.

    def _identify_senders(self, now: int, by_pid: Mapping[int, WorkloadProcess], lookup: ProcessLookup) -> None:
        """Find out whose they are of whom that is not known, the earliest first."""
        senders = self._inbox.unidentified_senders()
        if not senders:
            return
        found = {one.peer.pid: by_pid[one.peer.pid] for one in senders if one.peer.pid in by_pid}
        due = [one for one in senders if one.peer.pid not in found and _lookup_due(one, now)]
        due = sorted(due, key=lambda one: one.looked_up_at)[:MOST_LOOKUPS]
        if due:
            found |= lookup([one.peer.pid for one in due])
        for one in (*due, *(one for one in senders if one.peer.pid in found)):
            self._identify(one, found.get(one.peer.pid), now)
        self._inbox.mark_identified([one for one in senders if one.process is not None])

    def _identify(self, sender: Sender, process: WorkloadProcess | None, now: int) -> None:
        """What was said is said of whoever has the pid now."""
        if process is not None and start_ticks(self._proc / str(sender.peer.pid)) == sender.peer.ticks:
            sender.process = process
        sender.looked_up_at = now

    # What they say.

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
            process = queued.sender.process = current  # it has come to a GPU, or to another
        return to_report(queued.message, process, start=queued.start, end=queued.end)

    def _poll_logs(self, now: int, processes: Sequence[WorkloadProcess]) -> Sequence[LoggedMessage]:
        if self._followers is None:
            return ()
        self._reported_at = {job: at for job, at in self._reported_at.items() if now - at < LOG_IGNORED_AFTER_REPORT}
        return self._followers.poll(now, processes)

    def _logged_report(
        self, found: LoggedMessage, by_pid: Mapping[int, WorkloadProcess], now: int
    ) -> TrainingReport | None:
        """As what a process says itself, but there is nobody to answer."""
        try:
            start, end = self._logged_interval(found, now)
        except ReportRefusedError as err:
            self._inbox.count(err.outcome)
            return None
        process = by_pid.get(found.pid)
        process = (
            process
            if process is not None and process.job_id == found.job_id
            else WorkloadProcess(found.pid, found.job_id)
        )
        return to_report(found.message, process, start=start, end=end, each=True)

    def _logged_interval(self, found: LoggedMessage, now: int) -> tuple[int, int]:
        if found.job_id in self._reported_at:
            raise ReportRefusedError("reported", "the job reports by itself")
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
    """Whether to ask whose it is: it is new, or still speaks and may by now be somebody's."""
    return now - sender.looked_up_at >= LOOKUP_INTERVAL and (
        sender.is_pending or sender.connections > 0 or now - sender.last_message_at < SENDER_EXPIRY
    )


def open_receiver(config: Config, clock: Clock) -> WorkloadListener:
    """Listen as `config` says. What cannot be opened is a warning and a fault that stands; nothing else is lost.

    Raises ConfigError where reports.http is not on loopback.
    """
    settings, proc = config.reports, Path(config.host.proc)
    inbox = Inbox(per_second=settings.per_second, processes=settings.processes)
    listeners: list[ReportListener] = []
    faults: list[Fault] = []
    if settings.http:
        from exporter.training.http_server import HttpListener, parse_loopback_address  # noqa: PLC0415  few need a second server

        parse_loopback_address(settings.http)
    if settings.socket:
        _open_listener(
            lambda: SocketListener(settings.socket, inbox, clock=clock, proc=proc, most=settings.processes),
            listeners,
            faults,
        )
    if settings.http:
        _open_listener(lambda: HttpListener(settings.http, inbox, clock=clock, proc=proc), listeners, faults)
    return ReportReceiver(inbox, listeners, proc=proc, followers=_open_followers(config, clock), faults=faults)


def _open_listener(
    open_one: Callable[[], ReportListener], listeners: list[ReportListener], faults: list[Fault]
) -> None:
    try:
        listeners.append(open_one())
    except ReportListenError as err:
        log.warning("reports: %s; jobs cannot report there, all else goes on", err)
        faults.append(Fault("reports_failed", str(err)))


def _open_followers(config: Config, clock: Clock) -> LogFollower | None:
    if not config.follow:
        return None
    from exporter.training.logs.watcher import open_log_follower  # noqa: PLC0415  few follow logs

    followers: LogFollower = open_log_follower(config, clock)
    return followers


def to_report(
    message: Message, process: WorkloadProcess, *, start: int, end: int, each: bool = False
) -> TrainingReport:
    """Give the message in the core's words, as what its process, which is `guest`, says of [start, end)."""
    quality, degrees = message.quality, message.parallel
    return TrainingReport(
        job_id=process.job_id,
        start=start,
        end=end,
        model_flops=model_flops(message),
        gpus=message.gpus or message.world_size or 1,
        each=each,
        uuids=process.uuids,
        rank=process.rank if message.rank is None else str(message.rank),
        run=message.run,
        step=message.step,
        steps=message.steps,
        highest_step=message.highest_step,
        epoch=message.epoch,
        tokens=message.tokens,
        padding=message.padding,
        samples=message.samples,
        hardware_flops=message.hardware_flops,
        dtype=message.dtype,
        recompute=message.recompute,
        phase=message.phase,
        phases=_phases(message, end - start) if message.phases else (),
        bubble=bubble_share(message.pipeline),
        checkpoints=message.checkpoints,
        restart=message.restart,
        loss=loss_value(message),
        quality=quality.value if quality else None,
        quality_name=quality.name if quality else "",
        quality_target=quality.target if quality else None,
        quality_falls=quality.falls if quality else False,
        parallel=Parallel(degrees.tensor, degrees.pipeline, degrees.data, degrees.context, degrees.expert)
        if degrees
        else None,
        world_size=message.world_size or 0,
    )


def _phases(message: Message, length: int) -> tuple[tuple[str, int], ...]:
    """Nanoseconds by phase, together not more than the interval, which may have been cut."""
    reported = {phase: int(seconds * SECOND) for phase, seconds in message.phases.items()}
    total = sum(reported.values())
    if total > length:
        reported = {phase: spent * length // total for phase, spent in reported.items()}
    return tuple(reported.items())
