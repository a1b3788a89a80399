"""Those who have a right to be served: a scraper like Prometheus, and two jobs that report."""

import gzip
import json
import os
import socket
import ssl
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection, RemoteDisconnected
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.fuzz.redteam.attacks.impostors import pretend
from tests.fuzz.redteam.books import Books, of_job
from tests.fuzz.redteam.tally import Tally, outcome, reason
from tests.fuzz.redteam.target import BY_HTTP, HONEST, JOBS, Job, Target, enter

ADDRESS = "127.77.0.1"
"""Of the honest scraper: no attacker has it."""
_TIMEOUT = 10.0
"""Prometheus' own scrape timeout."""
EVERY = 2.0
"""Seconds between two honest reports, as the client sends them."""


class Scrape(Struct):
    """One scrape, and what the machine did meanwhile, in seconds."""

    at: float
    seconds: float
    fresh: bool
    lost: str = ""
    again: bool = False
    """The kept connection had been closed, and the scrape was sent again over another, as Prometheus does."""
    late: float = 0.0
    """How much later than planned it began: the scraper itself had no processor."""
    daemon_ran: float = 0.0
    daemon_waited: float = 0.0
    """For a processor: its threads for each other, or for other processes on the same core."""
    scraper_waited: float = 0.0
    wrong: list[str] = []
    steps: dict[str, float] = {}
    """Step of each job that has one."""
    forged: list[str] = []
    resident: int = 0
    compared: int = 0
    sums: int = 0


class Scraper:
    """Scrapes once a second, over a fresh connection every second time."""

    def __init__(self, target: Target, until: float, notes: Path) -> None:
        self._target, self._until, self._notes = target, until, notes
        self._books = Books()
        self._tls = ssl.create_default_context(cafile=str(target.folder / "tls.crt"))
        self._kept: HTTPSConnection | None = None

    def __call__(self, tally: Tally) -> None:
        due, number = time.monotonic(), 0
        with self._notes.open("wb", buffering=0) as notes:
            while time.monotonic() < self._until:
                tally.attempt()
                scrape = self._scrape(fresh=number % 2 == 1, due=due)
                notes.write(msgspec.json.encode(scrape) + b"\n")
                number += 1
                due = max(due + 1, time.monotonic())
                time.sleep(max(due - time.monotonic(), 0))

    def _scrape(self, *, fresh: bool, due: float) -> Scrape:
        before, own, start = schedule(self._target.pid), _own_wait(), time.monotonic()
        scrape = Scrape(start, 0.0, fresh, late=start - due)
        page = b""
        try:
            page = self._fresh() if fresh else self._over_kept(scrape)
        except (OSError, HTTPException) as error:
            scrape.lost = outcome(error)
            self._drop()
        except _NotServedError as error:
            scrape.lost = str(error)
        scrape.seconds = time.monotonic() - start
        after = schedule(self._target.pid)
        # A thread that ended meanwhile takes its seconds with it.
        scrape.daemon_ran, scrape.daemon_waited = max(after[0] - before[0], 0.0), max(after[1] - before[1], 0.0)
        scrape.scraper_waited = _own_wait() - own
        scrape.resident = _resident(self._target.pid)
        if not scrape.lost:
            self._read(scrape, gzip.decompress(page).decode())
        return scrape

    def _read(self, scrape: Scrape, page: str) -> None:
        scrape.wrong = self._books.check(page)[:5]
        scrape.compared, scrape.sums = self._books.compared, self._books.sums
        for job in JOBS:
            for _, value in of_job(page, "job_step", job.id):
                scrape.steps[str(job.id)] = float(value)
        for job in (HONEST, BY_HTTP):
            for named, _ in of_job(page, "job_run_info", job.id):
                if named["run"] != run_of(job):
                    scrape.forged.append(f"run {named['run']!r} of job {job.id}")

    def _fresh(self) -> bytes:
        connection = self._open()
        try:
            return self._get(connection)
        finally:
            connection.close()

    def _over_kept(self, scrape: Scrape) -> bytes:
        if self._kept is None:
            self._kept = self._open()
        try:
            return self._get(self._kept)
        except (RemoteDisconnected, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._drop()
            scrape.again = True
            self._kept = self._open()
            return self._get(self._kept)

    def _open(self) -> HTTPSConnection:
        target = self._target
        return HTTPSConnection(
            "127.0.0.1", target.port, timeout=_TIMEOUT, source_address=(ADDRESS, 0), context=self._tls
        )

    def _get(self, connection: HTTPSConnection) -> bytes:
        headers = {"Authorization": self._target.authorization(), "Accept-Encoding": "gzip"}
        connection.request("GET", "/metrics", headers=headers)
        with connection.getresponse() as response:
            page = response.read()
            if response.status != 200:
                raise _NotServedError(f"status {response.status}")
            return page

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


class _NotServedError(Exception):
    """The daemon answered, but not with the page."""


def schedule(pid: int) -> tuple[float, float]:
    """Return the seconds for which the threads of a process ran, and waited for a processor: proc(5), schedstat."""
    ran = waited = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            numbers = (task / "schedstat").read_text(encoding="ascii").split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    except OSError:
        return 0.0, 0.0
    return ran / 1e9, waited / 1e9


def _own_wait() -> float:
    return schedule(os.getpid())[1]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def run_of(job: Job) -> str:
    return f"honest-{job.id}"


def step_at(began: float, now: float) -> int:
    """Return the step that an honest job has reached, so that a reader knows when the step that it sees was sent."""
    return int((now - began) / EVERY)


class Reporter:
    """An honest job: reports a step every two seconds."""

    def __init__(self, target: Target, job: Job, *, began: float, counted: float, until: float) -> None:
        self._target, self._job, self._began, self._until = target, job, began, until
        self._counted = counted
        """Reports before that, of a job that is not known yet, are not booked."""
        self._line: socket.socket | None = None

    def __call__(self, tally: Tally) -> None:
        pretend({"SLURM_JOB_ID": str(self._job.id)})  # as slurmstepd sets it; it counts where there are no groups
        send: Callable[[bytes], str] = self._over_http if self._job == BY_HTTP else self._over_socket
        last, ended = step_at(self._began, time.monotonic()), time.monotonic_ns()
        while time.monotonic() < self._until:
            due = self._began + (last + 1) * EVERY
            time.sleep(max(due - time.monotonic(), 0))
            step, now = step_at(self._began, time.monotonic()), time.monotonic_ns()
            if step <= last:
                continue
            came = send(self._report(step, step - last, now, (now - ended) / 1e9))
            if time.monotonic() > self._counted:
                tally.attempt()
                tally.came(came)
            if came == "taken":
                last, ended = step, now
            else:
                time.sleep(0.5)

    def _report(self, step: int, steps: int, at: int, seconds: float) -> bytes:
        figures = {"v": 1, "at": at, "seconds": round(seconds, 6), "run": run_of(self._job), "world_size": 1}
        return json.dumps({**figures, "step": step, "steps": steps, "tokens": 4096 * steps, "loss": 2.5}).encode()

    def _over_socket(self, text: bytes) -> str:
        try:
            if self._line is None:
                self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._line.setblocking(False)  # noqa: FBT003
                self._line.connect(str(self._target.socket))
            if refusal := _refusal(self._line):
                return refusal
            self._line.send(text)
        except BlockingIOError:
            return "the socket was full"
        except OSError as error:
            return self._dropped(outcome(error))
        return "taken"

    def _dropped(self, why: str) -> str:
        if self._line is not None:
            self._line.close()
            self._line = None
        return why

    def _over_http(self, text: bytes) -> str:
        connection = HTTPConnection("127.0.0.1", self._target.door, timeout=5)
        try:
            connection.request("POST", "/v1/report", body=text)
            with connection.getresponse() as response:
                body = response.read()
                return "taken" if response.status == 204 else f"{response.status} {reason(body)}"
        except (OSError, HTTPException) as error:
            return outcome(error)
        finally:
            connection.close()


def _refusal(line: socket.socket) -> str:
    """Return why an earlier message was refused, if one was; raises OSError where the daemon closed the connection."""
    try:
        answer = line.recv(4096)
    except BlockingIOError:
        return ""
    if not answer:
        raise ConnectionResetError
    return reason(answer)


def start_as_slurm(job: Job, target: Target) -> Callable[[], None]:
    """Return what slurmstepd does for a process of the job."""
    return lambda: enter(job, target.cgroups)
