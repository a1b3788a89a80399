"""What waits for a disk: statements, events and closed books that are not written yet.

Owns how much may wait, and what of it a write took along. Refuses locks: who shares it holds one.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from exporter.core.statement import Event, Statement
from exporter.history.store import Closed

MOST = 10_000
"""Statements, and events; beyond it the oldest go."""


class Batch(NamedTuple):
    """What one write takes along."""

    statements: tuple[Statement, ...]
    events: tuple[Event, ...]
    closed: tuple[Closed, ...]


class Waiting:
    """Everything that is not on the disk yet."""

    def __init__(self) -> None:
        self.statements: dict[tuple[str, str, float], Statement] = {}
        self._events: deque[Event] = deque(maxlen=MOST)
        self._closed: dict[tuple[str, str], Closed] = {}

    def add(
        self, *, statements: Iterable[Statement] = (), events: Iterable[Event] = (), closed: Iterable[Closed] = ()
    ) -> None:
        """Keep them until they are written; a later statement of the same name takes the place of the one before."""
        self._events.extend(events)
        self._closed |= {(book.uuid, book.life): book for book in closed}
        for statement in statements:
            self.statements[name_of(statement)] = statement
        while len(self.statements) > MOST:
            del self.statements[next(iter(self.statements))]

    def events_since(self, at: float) -> list[Event]:
        """Those since that Unix time, the latest first."""
        return [event for event in reversed(self._events) if event.at >= at]

    def batch(self) -> Batch:
        """All of it, as it is now."""
        return Batch(tuple(self.statements.values()), tuple(self._events), tuple(self._closed.values()))

    def forget(self, written: Batch) -> None:
        """What was written waits no more; what came since goes on waiting."""
        for statement in written.statements:
            if self.statements.get(name_of(statement)) is statement:
                del self.statements[name_of(statement)]
        ours = {id(event) for event in written.events}
        while self._events and id(self._events[0]) in ours:
            self._events.popleft()
        for book in written.closed:
            self._closed.pop((book.uuid, book.life), None)


def name_of(statement: Statement) -> tuple[str, str, float]:
    """What no two statements of a node share, unless one takes the other's place."""
    return statement.owner.job_id, statement.life, statement.start
