"""Connections of the HTTP server for job reports: each user has a share, so that one's keep out no other's.

Above the total one is closed as soon as another is accepted. uvicorn's own limit closes none: it answers 503 to whoever
sends a request, and connections that send none take all descriptors of the daemon. While all places are taken, a user
whose new connections come too fast has them closed before anything is made of them: they would keep others' waiting.
"""

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any

from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol

from exporter.connections import Buckets, Deadline, overdue
from exporter.training.peer import Peer
from exporter.training.socket_owner import Address

IDLE_SECONDS = 75.0
"""Maximum time between two messages of a connection, and from its start to the first message."""
NEW_BURST, NEW_PER_SECOND = 64, 32.0
"""New connections of one user while all places are taken."""


class HttpConnection(H11Protocol):
    """A connection; the state of each of its requests has it as `connection`."""

    def __init__(self, pool: "ConnectionPool", *, app_state: dict[str, Any], **others: Any) -> None:
        """`pool` counts it while it is open."""
        super().__init__(app_state={**app_state, "connection": self}, **others)
        self._pool = pool
        self.deadline = Deadline(time.monotonic(), IDLE_SECONDS)
        """Restarted with each message."""
        self.uid: int | None = None
        """The client's user."""
        self.peer: Peer | None = None
        """The client's process; None until it is identified."""

    @property
    def is_open(self) -> bool:
        """Whether its client still waits."""
        return self in self._pool

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Count it; closes one if there are too many."""
        super().connection_made(transport)
        self._pool.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Do not count it any more."""
        self._pool.remove(self)
        super().connection_lost(exc)

    def heard(self, *, of_job: bool = False) -> None:
        """Count it as one that is not silent, and for good as one of a job if its process has one."""
        self.deadline.restart(time.monotonic(), IDLE_SECONDS)
        self._pool.heard(self, of_job=of_job)

    def hang_up(self) -> None:
        """Close it at once: a client that does not read its responses would keep one that is closed in order."""
        self._pool.remove(self)
        self.transport.abort()


class _Held(Struct, eq=False):
    """Connections of one user; each dictionary is a set in order of insertion."""

    others: dict[HttpConnection, None] = {}
    """Those whose process has no job, as far as is known; silent for longest first."""
    of_jobs: dict[HttpConnection, None] = {}
    """Those whose process has a job; first the one that is known for longest."""

    def badness(self) -> tuple[int, float]:
        """Order of those who lose one: who holds most, then whoever has one of no job that is silent for longest."""
        since = next(iter(self.others)).deadline.since if self.others else inf
        return len(self.others) + len(self.of_jobs), -since

    def worst(self) -> HttpConnection:
        return next(iter(self.others)) if self.others else next(reversed(self.of_jobs))


class ConnectionPool:
    """The open connections, at most `most`. Above that the user who holds most of them loses one.

    It is the one that has been silent for longest, of those whose process has no job; if all have one, the newest.
    """

    def __init__(self, most: int, user_of: Callable[[Address], int | None]) -> None:
        """`user_of` tells the user at a client's address; those whom it cannot tell count as one user."""
        self.most, self._user_of = most, user_of
        self._accepted: dict[Address, int | None] = {}
        """Users of connections that were accepted and are not counted yet."""
        self._new = Buckets[int](NEW_BURST, NEW_PER_SECOND)
        """Of each user."""
        self._open: dict[HttpConnection, Deadline] = {}
        self._by_user: dict[int | None, _Held] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: HttpConnection) -> bool:
        return connection in self._open

    def admits(self, client: Address) -> bool:
        """Whether to serve a connection that was just accepted; if so, `add` follows. Unknown users are not limited."""
        self._accepted[client] = user = self._user_of(client)
        if user is None or len(self) + len(self._accepted) <= self.most or self._new.of(user).take(time.monotonic()):
            return True
        del self._accepted[client]
        return False

    def add(self, connection: HttpConnection) -> None:
        """Count a new connection; closes one if there are too many."""
        # The address that it was accepted with: of one that was reset meanwhile the server knows none any more.
        connection.uid = self._accepted.pop(Address(*connection.transport.get_extra_info("peername")[:2]), None)
        self._by_user.setdefault(connection.uid, _Held()).others[connection] = None
        self._open[connection] = connection.deadline
        if len(self._open) > self.most:
            max(self._by_user.values(), key=_Held.badness).worst().hang_up()

    def heard(self, connection: HttpConnection, *, of_job: bool) -> None:
        """Order it anew after a message."""
        if connection in self._open and connection in (held := self._by_user[connection.uid]).others:
            del held.others[connection]
            (held.of_jobs if of_job else held.others)[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Do not count it any more, if it is counted."""
        if not self._open.pop(connection, None):
            return
        held = self._by_user[connection.uid]
        del (held.others if connection in held.others else held.of_jobs)[connection]
        if not (held.others or held.of_jobs):
            del self._by_user[connection.uid]

    def close_overdue(self, now: float) -> None:
        """Close those that have been silent for too long."""
        for connection in overdue(self._open, now):
            connection.hang_up()
