"""The jobs of this node, kept in step with their traces and with what is learnt of them.

Owns when a job has begun anew, when it has ended, and when anybody is asked about it. Refuses to believe that a job
is there because its socket is: a node that lost power keeps the sockets of jobs long gone.
"""

from collections.abc import Iterable, Iterator, Mapping

from exporter.core.model import SECOND
from exporter.schedulers.slurm.controller import Answer, Controller
from exporter.schedulers.slurm.holding import ASK_AGAIN, ASK_SELDOM, MOST_LOOKS, Basis, Entry
from exporter.schedulers.slurm.hostlist import expand_hostlist
from exporter.schedulers.slurm.traces import Trace

MOST_JOBS = 10_000
"""On one node; Slurm's own tables would not hold more."""
CHECK_EVERY, CHECK_AFTER_STEP = 60 * SECOND, 5 * SECOND


class Entries:
    """The jobs, by id."""

    def __init__(self, controller: Controller, node: str) -> None:
        self._controller, self._node = controller, node
        self._by_job: dict[str, Entry] = {}
        self._runs = 0
        self._checked_at = 0
        self._listened = False
        """A socket of ours was once seen bound: that list is of the right network namespace."""
        self.left = False
        """A job that had a GPU has ended since this was last set to False."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_job.values())

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._by_job

    def user(self, job_id: str) -> str:
        """Whose job it is, as the controller or else its processes say; empty: not known."""
        entry = self._by_job.get(job_id)
        said = (entry.job, entry.tasks) if entry is not None else ()
        return next((one.user for one in said if one is not None and one.user), "")

    def follow(self, traces: Mapping[str, Trace], now: int) -> bool:
        """Bring in what is here now; True where a job is new."""
        new = False
        for job_id, trace in traces.items():
            entry = self._by_job.get(job_id)
            if entry is None or _anew(entry, trace):
                new = self._begin(job_id, trace, now) or new
            elif entry.trace != trace or entry.absent is not None:
                self._changed(entry, trace, now)
        for entry in [entry for job_id, entry in self._by_job.items() if job_id not in traces]:
            self._missing(entry, now)
        self._controller.keep(self._by_job.keys())
        return new

    def take(self, answers: tuple[Answer, ...], *, now: int, wall: int) -> None:
        """Take in what was learnt of them; what is about an earlier run is dropped."""
        for answer in answers:
            entry = self._by_job.get(answer.job_id)
            if entry is not None and entry.run == answer.run:
                entry.take(answer, node=self._node, now=now, wall=wall)
                self._judge(entry, answer, now)

    def pursue(self, now: int) -> None:
        """Look again for the GPUs of those that have some, then ask at any price, once."""
        self._check(now)
        for entry in self._by_job.values():
            if not entry.looking or entry.absent is not None or now < entry.look_at:
                continue
            entry.looks += 1
            entry.look_at = now + (SECOND if entry.looks <= MOST_LOOKS else ASK_AGAIN)
            if entry.looks > MOST_LOOKS and entry.job is not None and not entry.detailed:
                entry.detailed = True
                self._controller.ask(entry.job_id, entry.run, detail=True)
            else:
                self._controller.look(entry.job_id, entry.run)

    def ask(self, entry: Entry, now: int) -> None:
        """Ask about a job again, if it is time: each time that is twice as far."""
        if entry.asked or now < entry.ask_at or not entry.job_id.isdigit():
            return
        entry.asked, entry.ask_at = True, now + entry.pause
        entry.pause = min(2 * entry.pause, ASK_SELDOM)
        self._controller.ask(entry.job_id, entry.run)

    def contest(self, contested: Iterable[Entry], now: int) -> None:
        """Ask about jobs whose GPU another seems to have too, at once when that is new; not the latest."""
        runs = {entry.run: entry for entry in contested}
        for entry in [runs[run] for run in sorted(runs)[:-1]]:
            if entry.rivals != runs.keys():
                entry.rivals, entry.ask_at, entry.pause = frozenset(runs), now, ASK_AGAIN
            self.ask(entry, now)

    def _begin(self, job_id: str, trace: Trace, now: int) -> bool:
        if len(self._by_job) >= MOST_JOBS and job_id not in self._by_job:
            return False
        self._end(job_id)
        self._runs += 1
        entry = self._by_job[job_id] = Entry(job_id, self._runs, trace, now=now)
        entry.map(trace.files)
        if not job_id.isdigit():
            return False
        entry.asked, entry.look_at = True, now + SECOND
        self._controller.ask(job_id, entry.run)
        return True

    def _changed(self, entry: Entry, trace: Trace, now: int) -> None:
        """A step came or went, or the job's first trace after a time without."""
        came = entry.absent is not None or entry.trace.sockets.isdisjoint(trace.sockets)
        if not entry.trace.sockets <= trace.sockets:
            # Slurm 24.11 at times may not remove an extern step's socket ("Unable to unlink domain socket").
            self._checked_at = min(self._checked_at, now - CHECK_EVERY + CHECK_AFTER_STEP)
        entry.trace, entry.absent, entry.stale = trace, None, False
        entry.whole = entry.whole or bool(trace.whole or trace.files)
        entry.map(trace.files)
        if entry.looking:
            entry.looks, entry.look_at = 0, now
        if came and entry.heard is not None and now - entry.heard >= ASK_AGAIN:
            entry.ask_at, entry.pause = now, ASK_AGAIN
            self.ask(entry, now)

    def _missing(self, entry: Entry, now: int) -> None:
        """Nothing of it is left here: it has ended, or is an allocation between two steps."""
        if entry.whole or not entry.indices:
            self._end(entry.job_id)
            return
        if entry.absent is None:
            entry.absent, entry.ask_at, entry.pause = now, now, ASK_AGAIN
        self.ask(entry, now)

    def _check(self, now: int) -> None:
        """Now and then, see whether those that have sockets are alive: a slurmstepd that was killed leaves its own."""
        if now - self._checked_at >= CHECK_EVERY:
            self._checked_at = now
            for entry in self._by_job.values():
                if entry.trace.sockets and entry.indices:
                    self._controller.look(entry.job_id, entry.run)

    def _judge(self, entry: Entry, answer: Answer, now: int) -> None:
        if entry.absent is not None:
            if (answer.job is not None or answer.gone) and (entry.ending or not self._here(entry)):
                self._end(entry.job_id)
            return
        if answer.tasks is not None:
            names = {name for name, _, _ in entry.trace.sockets}
            bound = not names.isdisjoint(answer.listening)
            self._listened = self._listened or bound
            entry.bound = bound or bool(answer.tasks.processes)
        entry.stale = entry.ending and not entry.bound
        if not entry.bound and self._listened and not entry.stale:
            self.ask(entry, now)

    def _here(self, entry: Entry) -> bool:
        hosts = entry.job.hosts if entry.job else ""
        try:
            return not hosts or self._node in expand_hostlist(hosts)
        except ValueError:
            return True

    def _end(self, job_id: str) -> None:
        entry = self._by_job.pop(job_id, None)
        self.left = self.left or (entry is not None and entry.basis > Basis.NONE)


def _anew(entry: Entry, trace: Trace) -> bool:
    """Whether these are another run's: the step that lasts as long as the job is another one."""
    return bool(entry.trace.whole and trace.whole) and entry.trace.whole.isdisjoint(trace.whole)
