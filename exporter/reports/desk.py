"""The listener to training jobs: what they say by socket, by HTTP or in their logs, as Reports of their jobs.

Owns finding out whose a sender is, and the Reports. Refuses to let anybody speak for another job: only what a
scheduler says of a process makes it a job's.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from exporter.clock import Clock
from exporter.config import Config
from exporter.core.model import NEVER, SECOND, Fault, Report
from exporter.reports.binding import ListenError
from exporter.reports.identity import started
from exporter.reports.intake import Intake, Letter, Sender, nobodys
from exporter.reports.listening import Listening
from exporter.reports.message import Followed
from exporter.reports.outcomes import OUTCOMES, RefusedError
from exporter.reports.placing import placed, report_of
from exporter.workloads import Guest, Heard, Listener, Whose

log = logging.getLogger(__name__)
__all__ = ["OUTCOMES", "Desk", "open_reports"]
ASK_AGAIN = 10 * SECOND
"""From one question whose a process is to the next, while it is nobody's: a scheduler may learn of a job late."""
FORGOTTEN = 60 * SECOND
"""One that hangs up and says nothing for so long is not asked about."""
MOST_ASKED = 128
"""At a time; each is a few files of /proc."""
MOST_TAKEN = 4096
"""Messages at a time."""
SPEAKS_FOR_ITSELF = 600 * SECOND
"""For so long after a report of a job, its log is not believed beside it: the same would be said twice."""
_MOST_LOGS = 4096


class Door(Protocol):
    """Where messages come in."""

    @property
    def alive(self) -> bool:
        """Whether anybody is heard."""
        ...

    def close(self) -> None:
        """Let nobody in any more. Never raises."""
        ...


class Followers(Protocol):
    """Logs that are followed."""

    def take(self, now: int, guests: Sequence[Guest]) -> tuple[Followed, ...]:
        """What was found since the last time, oldest first."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Lines and files by kind, since the start."""
        ...

    def close(self) -> None:
        """Let go of the logs. Never raises."""
        ...


class Desk:
    """The `Listener` to training jobs."""

    def __init__(
        self,
        intake: Intake,
        doors: Sequence[Door] = (),
        *,
        proc: Path,
        followers: Followers | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """`doors` put what they hear into `intake`; `faults` stand as long as the desk."""
        self._intake, self._doors, self._proc = intake, doors, proc
        self._followers, self._faults = followers, tuple(faults)
        self._spoke: dict[str, int] = {}
        """When each job last reported by itself."""
        self._logged: dict[tuple[int, str, int | None], int] = {}
        """How far each log has spoken, by its process, job and rank."""

    def take(self, now: int, guests: Sequence[Guest], whose: Whose) -> Heard:
        """See `Listener.take`."""
        listed = {guest.pid: guest for guest in guests}
        self._intake.suspects = tuple(listed)
        self._meet(now, listed, whose)
        told = [self._told(letter, listed, now) for letter in self._intake.letters(MOST_TAKEN)]
        read = [self._read(found, listed, now) for found in self._followed(now, guests)]
        reports = tuple(report for report in (*told, *read) if report is not None)
        if reports:
            self._intake.count("taken", len(reports))
        return Heard(reports, faults=(*self._faults, *self._dead()), counts=self._counts())

    def close(self) -> None:
        """See `Listener.close`."""
        for door in self._doors:
            door.close()
        if self._followers is not None:
            self._followers.close()

    def _dead(self) -> list[Fault]:
        dead = [door for door in self._doors if not door.alive]
        return [Fault("reports_failed", "a thread that heard reports has ended: please report this")] if dead else []

    def _counts(self) -> tuple[tuple[str, int], ...]:
        if self._followers is None:
            return self._intake.counts()
        counts = Counter(dict(self._intake.counts()))
        counts.update(self._followers.counts())
        return tuple(counts.items())

    # Whose a sender is.

    def _meet(self, now: int, listed: Mapping[int, Guest], whose: Whose) -> None:
        """Find out whose they are of whom that is not known, the earliest first."""
        strangers = self._intake.strangers()
        if not strangers:
            return
        found = {one.peer.pid: listed[one.peer.pid] for one in strangers if one.peer.pid in listed}
        due = [one for one in strangers if one.peer.pid not in found and _due(one, now)]
        due = sorted(due, key=lambda one: one.asked)[:MOST_ASKED]
        if due:
            found |= whose([one.peer.pid for one in due])
        for one in (*due, *(one for one in strangers if one.peer.pid in found)):
            self._introduce(one, found.get(one.peer.pid), now)
        self._intake.met([one for one in strangers if one.guest is not None])

    def _introduce(self, sender: Sender, guest: Guest | None, now: int) -> None:
        """What was said is said of whoever has the pid now."""
        if guest is not None and started(sender.peer.pid, self._proc) == sender.peer.ticks:
            sender.guest = guest
        sender.asked = now

    # What they say.

    def _told(self, letter: Letter, listed: Mapping[int, Guest], now: int) -> Report | None:
        guest = letter.sender.guest
        if guest is None:
            refused = nobodys(letter.sender)
            self._intake.count(refused.outcome)
            if letter.back is not None:
                letter.back(refused)
            return None
        if self._followers is not None:
            self._spoke[guest.job_id] = now
        seen = listed.get(guest.pid)
        if seen is not None and seen.job_id == guest.job_id:
            guest = letter.sender.guest = seen  # it has come to a GPU, or to another
        return report_of(letter.message, guest, start=letter.start, end=letter.end)

    def _followed(self, now: int, guests: Sequence[Guest]) -> Sequence[Followed]:
        if self._followers is None:
            return ()
        self._spoke = {job: at for job, at in self._spoke.items() if now - at < SPEAKS_FOR_ITSELF}
        return self._followers.take(now, guests)

    def _read(self, found: Followed, listed: Mapping[int, Guest], now: int) -> Report | None:
        """As what a process says itself, but there is nobody to answer."""
        try:
            start, end = self._placed(found, now)
        except RefusedError as err:
            self._intake.count(err.outcome)
            return None
        guest = listed.get(found.pid)
        guest = guest if guest is not None and guest.job_id == found.job_id else Guest(found.pid, found.job_id)
        return report_of(found.message, guest, start=start, end=end, each=True)

    def _placed(self, found: Followed, now: int) -> tuple[int, int]:
        if found.job_id in self._spoke:
            raise RefusedError("reported", "the job reports by itself")
        message, log_of = found.message, (found.pid, found.job_id, found.message.rank)
        at = found.at if message.at is None else message.at
        start, end = placed(message, at=at, arrived=now, until=self._logged.get(log_of, NEVER))
        if message.seconds:
            self._remember(log_of, end)
        return start, end

    def _remember(self, log_of: tuple[int, str, int | None], end: int) -> None:
        self._logged.pop(log_of, None)
        self._logged[log_of] = end
        if len(self._logged) > _MOST_LOGS:
            del self._logged[next(iter(self._logged))]


def _due(sender: Sender, now: int) -> bool:
    """Whether to ask whose it is: it is new, or still speaks and may by now be somebody's."""
    return now - sender.asked >= ASK_AGAIN and (
        sender.unmet or sender.connections > 0 or now - sender.heard < FORGOTTEN
    )


def open_reports(config: Config, clock: Clock) -> Listener:
    """Listen as `config` says. What cannot be opened is a warning and a fault that stands; nothing else is lost.

    Raises ConfigError where reports.http is not on loopback.
    """
    settings, proc = config.reports, Path(config.host.proc)
    intake = Intake(per_second=settings.per_second, processes=settings.processes)
    doors: list[Door] = []
    faults: list[Fault] = []
    if settings.http:
        from exporter.reports.web import Web, loopback  # noqa: PLC0415  few need a second server

        loopback(settings.http)
    if settings.socket:
        _open(
            lambda: Listening(settings.socket, intake, clock=clock, proc=proc, most=settings.processes), doors, faults
        )
    if settings.http:
        _open(lambda: Web(settings.http, intake, clock=clock, proc=proc), doors, faults)
    return Desk(intake, doors, proc=proc, followers=_followers(config, clock), faults=faults)


def _open(door: Callable[[], Door], doors: list[Door], faults: list[Fault]) -> None:
    try:
        doors.append(door())
    except ListenError as err:
        log.warning("reports: %s; jobs cannot report there, all else goes on", err)
        faults.append(Fault("reports_failed", str(err)))


def _followers(config: Config, clock: Clock) -> Followers | None:
    if not config.follow:
        return None
    from exporter.reports.follow import open_followers  # noqa: PLC0415  few follow logs

    followers: Followers = open_followers(config, clock)
    return followers
