"""What state a GPU is in: RULES, ordered, the first that gives a reason wins, and the last always does.

Owns the judgement of one piece of time. Refuses memory, which is `track`'s, and leaks.
"""

from collections.abc import Callable

from exporter.core.evidence import YES, Evidence
from exporter.core.model import State
from exporter.core.track import Piece

_HARD = frozenset({"lost", "missing", "xid", "recovery", "reset_required"})
"""Conditions under which a GPU cannot work; any other ("drained") only keeps new work away: who holds it, holds it."""


Rule = Callable[[Evidence, Piece], str]
"""Returns the reason the state holds, or "" when it does not."""


def _unavailable(ev: Evidence, piece: Piece) -> str:
    condition = ev.condition
    if condition in _HARD:
        return condition
    return "" if piece.holders else condition


def _unobserved(ev: Evidence, piece: Piece) -> str:
    return ev.distrust or ("" if piece.owner_known else "owner_unknown")


def _unowned(_: Evidence, piece: Piece) -> str:
    return "leaked_process" if not piece.holders and piece.leaked else ""


def _unallocated(ev: Evidence, piece: Piece) -> str:
    return "" if piece.holders else ("stranded" if ev.device.stranded else "free")


def _hung(_: Evidence, piece: Piece) -> str:
    if piece.hung:
        return "spinning"
    return "culprit" if piece.culprit else ""


def _zombie(ev: Evidence, piece: Piece) -> str:
    if not piece.zombie:
        return ""
    return "idle_spin" if _polls(ev, piece) else _depth(ev)


def _stalled(ev: Evidence, _: Piece) -> str:
    return "" if ev.runs else _depth(ev)


def _depth(ev: Evidence) -> str:
    """How far down an idle GPU is: a context that rests, or nobody home."""
    processes = ev.reading.processes
    if processes is None:
        return "processes_unseen"
    return "idle_context" if processes else "no_process"


def _polls(ev: Evidence, piece: Piece) -> bool:
    """A server's kernel that waits for requests: nothing says that any are there."""
    return ev.spin == YES and all(held.owner.workload_class == "serving" for held in piece.holders)


def _active(ev: Evidence, piece: Piece) -> str:
    return "idle_spin" if ev.spin == YES and _polls(ev, piece) else "computing"


RULES: tuple[tuple[State, Rule], ...] = (
    (State.UNAVAILABLE, _unavailable),
    (State.UNOBSERVED, _unobserved),
    (State.UNOWNED, _unowned),
    (State.UNALLOCATED, _unallocated),
    (State.HUNG, _hung),
    (State.ZOMBIE, _zombie),
    (State.STALLED, _stalled),
    (State.ACTIVE, _active),
)
"""In this order; the first that gives a reason wins, and the last always does."""


def classify(ev: Evidence, piece: Piece) -> tuple[State, str]:
    """The one state of a piece of time, with the reason in one word."""
    if ev.runs and piece.holders and not (piece.hung or piece.zombie or piece.culprit or ev.distrust or ev.condition):
        return State.ACTIVE, _active(ev, piece)  # as most pieces are: no other rule could hold
    for state, rule in RULES:
        reason = rule(ev, piece)
        if reason:
            return state, reason
    raise AssertionError("the last rule always holds")
