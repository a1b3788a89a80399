"""What may take its time: questions to the controller and walks through /proc, on a thread of their own.

Owns the queue of questions, the pauses while nobody answers, and the thread. Refuses to keep a question about a job
that is gone, to ask twice what is being asked, and to make the reading thread wait: `settle` is bounded.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct

from exporter.core.model import SECOND, Fault
from exporter.schedulers.slurm.asking import Asker, GoneError
from exporter.schedulers.slurm.commands import SilentError
from exporter.schedulers.slurm.jobs import Job
from exporter.schedulers.slurm.parsing import NodeState
from exporter.schedulers.slurm.places import Places
from exporter.schedulers.slurm.tasks import Tasks

FIRST_PAUSE, LONGEST_PAUSE = 5 * SECOND, 60 * SECOND


class Local(Protocol):
    """What can be learnt on this node without asking anybody."""

    def look(self, jobs: Iterable[str]) -> dict[str, Tasks]:
        """See tasks.Node."""
        ...

    def listening(self) -> frozenset[str]:
        """See tasks.Node."""
        ...

    def places(self) -> Places:
        """Read Slurm's and the driver's lists of GPUs."""
        ...


class Answer(Struct, frozen=True):
    """What was learnt of one job; each part may be missing."""

    job_id: str
    run: int
    """As the question had it."""
    tasks: Tasks | None = None
    listening: frozenset[str] = frozenset()
    """Names of the sockets that were bound then; comes with `tasks`."""
    job: Job | None = None
    gone: bool = False
    refused: str = ""
    """Why the controller's answer is not believed."""


class News(Struct, frozen=True):
    """What came since the last time."""

    answers: tuple[Answer, ...] = ()
    node: NodeState | None = None
    places: Places | None = None
    faults: tuple[Fault, ...] = ()


class _Question(Struct):
    job_id: str
    run: int
    asked: int
    detail: bool = False
    silent: bool = False


class Controller:
    """The questions; `step` does one piece of work, the thread calls it as long as there is some."""

    def __init__(
        self, asker: Asker, local: Local, *, node: str, clock: Callable[[], int], threaded: bool = True
    ) -> None:
        """`clock` gives monotonic nanoseconds. Not `threaded`: the caller steps."""
        self._asker, self._local, self._node, self._clock = asker, local, node, clock
        self._changed = threading.Condition()
        self._looks: dict[str, int] = {}
        self._questions: dict[str, _Question] = {}
        self._node_asked: int | None = None
        self._places_wanted = False
        self._node_silent = self._stopped = self._busy = False
        self._answers: list[Answer] = []
        self._faults: list[Fault] = []
        self._node_state: NodeState | None = None
        self._places: Places | None = None
        self._silence = ""
        self._pause, self._try_at = FIRST_PAUSE, 0
        self._thread = threading.Thread(target=self._run, name="slurm", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # -- the reading thread's side: nothing here waits for anybody, `settle` for at most what it is given --

    @property
    def unanswered_since(self) -> int | None:
        """When the oldest question was asked that was put and has had no answer."""
        with self._changed:
            waiting = [question.asked for question in self._questions.values() if question.silent]
            if self._node_asked is not None and self._node_silent:
                waiting.append(self._node_asked)
            return min(waiting, default=None)

    @property
    def alive(self) -> bool:
        """Whether anything is still asked."""
        return self._thread is None or self._thread.is_alive()

    def ask(self, job_id: str, run: int, *, detail: bool = False) -> None:
        """Ask about a job: first the node, then the controller; `run` comes back with the answers."""
        with self._changed:
            self._looks[job_id] = run
            self._questions[job_id] = _Question(job_id, run, self._clock(), detail)
            self._changed.notify_all()

    def look(self, job_id: str, run: int) -> None:
        """Ask the node alone."""
        with self._changed:
            self._looks[job_id] = run
            self._changed.notify_all()

    def ask_node(self) -> None:
        """Ask for this node's state."""
        with self._changed:
            if self._node_asked is None:
                self._node_asked = self._clock()
                self._changed.notify_all()

    def ask_places(self) -> None:
        """Ask which GPU is which."""
        with self._changed:
            self._places_wanted = True
            self._changed.notify_all()

    def keep(self, jobs: Iterable[str]) -> None:
        """Drop what is asked about all others."""
        with self._changed:
            for asked in (self._looks, self._questions):
                for job_id in asked.keys() - set(jobs):
                    del asked[job_id]

    def settle(self, seconds: float) -> None:
        """Wait until all is answered, or the controller is silent, but no longer than this."""
        with self._changed:
            if self._thread is not None:
                self._changed.wait_for(self._settled, seconds)

    def take(self) -> News:
        """What has come."""
        with self._changed:
            silent = (Fault("controller_silent", self._silence),) if self._silence else ()
            news = News(tuple(self._answers), self._node_state, self._places, (*self._faults, *silent))
            self._answers, self._faults, self._node_state, self._places = [], [], None, None
            return news

    def close(self) -> None:
        """Stop, also in the middle of a question. Never raises."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._asker.close()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _settled(self) -> bool:
        silent = self._clock() < self._try_at
        return self._stopped or not (
            self._busy or self._looks or self._places_wanted or (self._questions and not silent)
        )

    # -- the thread's side --

    def _run(self) -> None:
        while not self._stopped:
            worked = self.step()
            with self._changed:
                self._changed.notify_all()
                if not worked and not self._stopped and not self._ready():
                    self._changed.wait(self._seconds())

    def _ready(self) -> bool:
        due = self._clock() >= self._try_at and (self._questions or self._node_asked is not None)
        return bool(self._looks or self._places_wanted or due)

    def _seconds(self) -> float | None:
        """How long there is nothing to do; None: until somebody asks."""
        if not self._questions and self._node_asked is None:
            return None
        return max(0.0, (self._try_at - self._clock()) / SECOND)

    def step(self) -> bool:
        """Do one piece of work, what is near before what is far; False: there was none."""
        with self._changed:
            looks, self._looks = self._looks, {}
            places, self._places_wanted = self._places_wanted, False
            due = self._clock() >= self._try_at and not (looks or places)
            question = next(iter(self._questions.values()), None) if due else None
            node = due and question is None and self._node_asked is not None
            self._busy = bool(looks or places or question or node)
        try:
            if places:
                self._read_places()
            if looks:
                self._look(looks)
            if question is not None:
                self._put(question)
            elif node:
                self._put_node()
        finally:
            with self._changed:
                self._busy = False
        return bool(looks or places or question or node)

    def _look(self, looks: dict[str, int]) -> None:
        found, listening = self._local.look(looks), self._local.listening()
        with self._changed:
            self._answers += [
                Answer(job_id, run, tasks=found.get(job_id, Tasks()), listening=listening)
                for job_id, run in looks.items()
            ]

    def _read_places(self) -> None:
        places = self._local.places()
        with self._changed:
            self._places = places

    def _put(self, question: _Question) -> None:
        try:
            answer = self._answer(question)
        except SilentError as err:
            question.silent = True
            self._fell_silent(err, question.asked)
            return
        self._heard()
        with self._changed:
            self._answers.append(answer)
            if self._questions.get(question.job_id) is question:
                del self._questions[question.job_id]

    def _answer(self, question: _Question) -> Answer:
        job_id, run = question.job_id, question.run
        try:
            job = self._asker.detail(job_id) if question.detail else None
            return Answer(job_id, run, job=job or self._asker.job(job_id))
        except GoneError:
            return Answer(job_id, run, gone=True)
        except ValueError as err:
            return Answer(job_id, run, refused=str(err))

    def _put_node(self) -> None:
        try:
            state = self._asker.node(self._node)
        except (SilentError, GoneError) as err:
            self._node_silent = True
            self._fell_silent(err, self._node_asked or self._clock())
            return
        except ValueError as err:
            self._tell(f"node state: {err}")
            state = None
        self._heard()
        with self._changed:
            self._node_state, self._node_asked, self._node_silent = state, None, False

    def _heard(self) -> None:
        self._pause, self._try_at, self._silence = FIRST_PAUSE, 0, ""

    def _fell_silent(self, err: Exception, since: int) -> None:
        now = self._clock()
        self._silence = (
            f"Slurm: {err} (asked {(now - since) // SECOND} s ago, again in {self._pause // SECOND} s). Until then what"
            " this node itself shows is told: names and accounts of new jobs are missing"
        )
        self._try_at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)

    def _tell(self, message: str) -> None:
        with self._changed:
            self._faults.append(Fault("scheduler_refused", f"Slurm: {message}"))
