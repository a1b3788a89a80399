"""How a daemon begins on what another has left: it counts on, or from where the other's books end.

Owns the order in which the agent and the file are told, so that the file never says what is not so.
"""

import logging
from typing import NamedTuple

import msgspec

from exporter.agent import Agent
from exporter.core.checkpoint import CheckpointError
from exporter.history.file import UNREADABLE, HistoryError
from exporter.history.remembering import Memory
from exporter.history.resuming import About, Anew, GoOn, Moment, closing, decided, left_in
from exporter.history.store import Store

log = logging.getLogger(__name__)


class Begun(NamedTuple):
    """What came of it."""

    memory: Memory
    at: int | None = None
    """The moment of the checkpoint that is gone on from; None: it is begun anew."""
    closed: Anew | None = None
    """What of other books is to be written."""


def begun(store: Store, agent: Agent, memory: Memory, moment: Moment, *, young: int) -> Begun:
    """Let the agent go on from what the store holds, or begin anew; `memory` is a new life's. Raises HistoryError."""
    try:
        left = left_in(store)
        if left is None:
            return Begun(memory)
        way = decided(left, moment, node=memory.node, young=young)
        if isinstance(way, GoOn):
            return _gone_on(store, agent, memory, moment, way)
    except CheckpointError as err:
        log.error("%s: its last checkpoint is of no use, and counting begins anew: %s", store.path, err)  # noqa: TRY400  no bug of ours
        return Begun(memory)
    return _anew(agent, memory, moment, way)


def _gone_on(store: Store, agent: Agent, new: Memory, moment: Moment, way: GoOn) -> Begun:
    left, memory = way.left, Memory(node=new.node, life=way.left.about.life, sample_seconds=new.sample_seconds)
    try:
        memory.thaw(left.tallies, left.courses)
        agent.go_on(left.frozen, now=moment.now, why=way.why)
    except (CheckpointError, *UNREADABLE):
        return _anew(agent, new, moment, closing(left, moment, node=new.node))
    try:
        store.write(state=[told_of(left.about.life, left.about.boot)], durable=False)  # from here on it may be outrun
    except HistoryError:  # what cannot be told so must not be gone on from
        agent.begin_anew(closing(left, moment, node=new.node).edges, now=moment.now, why=way.why)
        raise
    log.info("%s; counting goes on", way.why)
    return Begun(memory, way.at)


def _anew(agent: Agent, memory: Memory, moment: Moment, way: Anew) -> Begun:
    agent.begin_anew(way.edges, now=moment.now, why=way.why)
    log.info("%s; its books are closed, and counting begins anew", way.why)
    return Begun(memory, closed=way)


def begin_beside(store: Store, agent: Agent, moment: Moment, *, node: str) -> None:
    """Of a store that can be read, but not written: count at least from where its books end. Raises HistoryError."""
    way = stranger_in(store, Memory(node=node, life=""), moment)
    if way is not None:
        agent.begin_anew(way.edges, now=moment.now, why=way.why)


def stranger_in(store: Store, memory: Memory, moment: Moment) -> Anew | None:
    """Books of another life that the store holds: they are to be closed before they are written over."""
    try:
        left = left_in(store)
        return None if left is None or left.about.life == memory.life else closing(left, moment, node=memory.node)
    except CheckpointError as err:
        log.error("%s: its last checkpoint is of no use: %s", store.path, err)  # noqa: TRY400  likewise
        return None


def told_of(life: str, boot: str, *, clean: bool = False, outrun: bool = False) -> tuple[str, bytes]:
    """A checkpoint's word on itself, as the store takes it."""
    return "about", msgspec.msgpack.encode(About(life, boot, clean, outrun))
