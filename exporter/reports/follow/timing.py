"""When what was read at one look took place.

Owns the way from what lines say to messages that end at a moment. Time is spoken of once: what does not fit into the
time since a job's last word is put into it, with all its work.
"""

from msgspec import Struct, structs

from exporter.core.model import MS, SECOND
from exporter.reports.follow.progress import Told
from exporter.reports.message import Followed, Message
from exporter.workloads import Guest

SLACK = SECOND // 2
"""Clocks and file systems tell when a file was written to so well."""


class Heard(Struct):
    """What one look at a job's logs has brought, in order, and who said it."""

    told: list[tuple[Told, Guest]]
    end: int
    """When the last of its logs was written to."""


def followed(heard: Heard, until: int | None) -> list[Followed]:
    """The last message ended when the log was last written to, the others as much earlier as those after them lasted.

    `until` is when the job's last word ended; None: it has said nothing yet.
    """
    room = _room(heard, until)
    found: list[Followed] = []
    at = heard.end
    for told, guest in reversed(heard.told):
        found.append(Followed(guest.pid, guest.job_id, _fitted(told.message, room), at // MS * MS))
        at -= int(told.seconds * room * SECOND)
    return found[::-1]


def _room(heard: Heard, until: int | None) -> float:
    """How much of their time the messages can have had, 0-1; 1 where it is too much by rounding alone."""
    lasted = sum(told.seconds for told, _ in heard.told) * SECOND
    since = lasted if until is None else heard.end - until
    return since / lasted if 0 < since < lasted - SLACK else 1.0


def _fitted(message: Message, room: float) -> Message:
    """The same work in so much of the time."""
    if room >= 1.0:
        return message
    phases = {name: seconds * room for name, seconds in message.phases.items()}
    return structs.replace(message, seconds=message.seconds * room, phases=phases)
