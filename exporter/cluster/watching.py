"""The loop: asks what is due, a few questions a turn, and keeps the newest view.

Owns when what is asked, what failed, and the thread. A turn has as many calls as the scheduler may be asked for in
one; what was asked longest ago goes first, the rest waits for the next turn. A question that failed is asked again
when it is due, but an hourly one after two turns; after one without an answer the rest of its turn is left out.
Refuses to ask more because something failed: a controller in trouble is not met with more questions.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct, structs

from exporter.clock import Clock
from exporter.cluster.interruptions import Interruptions
from exporter.cluster.model import Jobs, Nodes, Reservations, Topology
from exporter.cluster.view import (
    MOST_NODES,
    MOST_RESERVATIONS,
    Told,
    View,
    fitting_of,
    queue_of,
    spread_of,
)
from exporter.core.model import SECOND

log = logging.getLogger(__name__)
CALLS_PER_TURN = 3
_SOON = 2
"""Turns after which a rare question that failed is asked again."""
Answer = Jobs | Nodes | Reservations | Topology


class SilentError(Exception):
    """The scheduler gave no answer; the message says what was tried and what to do."""


class Question(Struct, frozen=True):
    """One thing to ask for."""

    name: str
    """jobs, nodes, reservations or topology."""
    every: int
    """Turns between two."""
    calls: int
    """What it costs the scheduler."""
    ask: Callable[[], Any]
    """Gives an Answer; raises SilentError, and ValueError for an answer that cannot be read."""


class Source(Protocol):
    """A scheduler, as far as this command asks it."""

    name: str

    @property
    def questions(self) -> Sequence[Question]:
        """What to ask, the most wanted first."""
        ...

    def close(self) -> None:
        """Give up what is under way. Never raises."""
        ...


class Watch:
    """Asks turn by turn; `view` is the newest, swapped as one reference."""

    def __init__(self, source: Source, clock: Clock, *, refresh_seconds: float, max_jobs: int) -> None:
        """`max_jobs` bounds the jobs whose placement is told."""
        self._source, self._clock = source, clock
        self._turn, self._most = round(refresh_seconds * SECOND), max_jobs
        self._told = {q.name: Told(q.name, q.every * self._turn) for q in source.questions}
        self._last: dict[str, int] = {}
        """Turn in which each was asked last."""
        self._next: dict[str, int] = {}
        """Turn in which each is due."""
        self._turns, self._silent = 0, False
        self._known: dict[str, Any] = {}
        self._interruptions = Interruptions()
        self.view = View(scheduler=source.name, told=tuple(self._told.values()))
        self.trouble = "nothing has been asked yet"
        """Why something is not known, in words; empty while all is."""

    def run(self, stop: threading.Event) -> None:
        """Take turns until `stop` is set."""
        due = self._clock.now()
        while not stop.is_set():
            self.turn()
            due = max(due + self._turn, self._clock.now())
            self._clock.wait(due, stop)

    def turn(self) -> None:
        """Ask what is due, and make the next view."""
        calls, failures = CALLS_PER_TURN, []
        for question in self._due():
            if question.calls <= calls:
                calls -= question.calls
                failures += self._put(question)
                if self._silent:
                    break
        self.trouble = "; ".join(failures)
        self._turns += 1
        self.view = self._look()

    def _due(self) -> list[Question]:
        """Questions of this turn; those asked longest ago first, and of these as the source has them."""
        due = (q for q in self._source.questions if self._next.get(q.name, 0) <= self._turns)
        return sorted(due, key=lambda q: self._last.get(q.name, -1))

    def _put(self, question: Question) -> list[str]:
        told = self._told[question.name]
        told = structs.replace(told, asked=told.asked + 1)
        self._silent = False
        self._last[question.name] = self._turns
        self._next[question.name] = self._turns + question.every
        try:
            answer: Answer = question.ask()
        except (SilentError, ValueError) as err:
            self._next[question.name] = self._turns + min(question.every, _SOON)
            self._silent = isinstance(err, SilentError)
            kind = "silent" if self._silent else "unreadable"
            self._told[question.name] = structs.replace(
                told, failed={**told.failed, kind: told.failed.get(kind, 0) + 1}
            )
            log.warning("%s: %s", question.name, err)
            return [f"{question.name}: {err}"]
        refused = 0 if isinstance(answer, Topology) and not answer.refused else answer.refused
        if refused:
            log.warning("%s: %d entries could not be read and are left out", question.name, refused)
        self._told[question.name] = structs.replace(told, at=self._clock.now(), refused=told.refused + refused)
        self._take(answer)
        return []

    def _take(self, answer: Answer) -> None:
        self._known[type(answer).__name__] = answer
        wall = self._clock.wall() / SECOND
        if isinstance(answer, Jobs):
            self._interruptions.look_at_jobs(answer.runs, at=wall)
        elif isinstance(answer, Nodes):
            self._interruptions.look_at_nodes(answer.nodes)

    def _look(self) -> View:
        """Put together what is known; what is too old is left out by who reads the view."""
        wall = self._clock.wall() / SECOND
        jobs: Jobs = self._known.get("Jobs", Jobs())
        nodes: Nodes = self._known.get("Nodes", Nodes())
        reservations: Reservations = self._known.get("Reservations", Reservations())
        queue = queue_of(jobs.pending, now=wall)
        counted = self._interruptions
        return View(
            scheduler=self._source.name,
            told=tuple(self._told.values()),
            queue=queue,
            fitting=fitting_of(jobs, nodes, reservations=reservations, queue=queue, now=wall),
            nodes=nodes.nodes[:MOST_NODES],
            nodes_left_out=max(0, len(nodes.nodes) - MOST_NODES),
            reservations=reservations.reservations[:MOST_RESERVATIONS],
            spread=spread_of(jobs, nodes, topology=self._known.get("Topology", Topology()), most=self._most),
            interrupted_jobs=dict(counted.jobs),
            interrupted_gpus=dict(counted.gpus),
            failures=tuple(counted.failures),
        )
