"""One line of a log, without what terminals, launchers and container runtimes put around it.

Owns colours, the names of ranks and the stamps of time before a line. Refuses to know what the line says.
"""

import calendar
import re

from msgspec import Struct

_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}\x07|[\x00-\x08\x0b-\x1f]")
"""Colours and cursor movements (ECMA-48), titles of terminals, and control characters but tabs."""
_BEFORE = re.compile(
    r"\s*(?:"
    r"\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) (?:stdout|stderr) [FP] "  # kubelet's files of containers (CRI)
    r"|\[(?P<mpi>\d{1,6},\d{1,6})\]<std(?:out|err)>:? ?"  # mpirun --tag-output
    r"|(?P<srun>\d{1,6}): "  # srun --label
    r"|\[(?P<elastic>[A-Za-z_-]{0,32}\d{1,6})\]: ?"  # torchrun: [rank0]: or [default0]:
    r")"
)
_MOST_BEFORE = 4
_STAMPED_CHARS = 160
"""A line's time is in its first characters."""
_YEAR_FIRST = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_YEAR_LAST = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)")


class Line(Struct, frozen=True):
    """A line of a log."""

    text: str
    """What the program wrote."""
    writer: str = ""
    """What a launcher calls the process that wrote it; empty: the line does not say."""
    stamp: float | None = None
    """Seconds by the line's own clock, of an unknown time zone: good for differences alone."""


def line_of(raw: bytes) -> Line:
    """Any bytes are a line."""
    whole = _CONTROL.sub("", raw.decode(errors="replace"))
    text, writer = whole, ""
    for _ in range(_MOST_BEFORE):
        found = _BEFORE.match(text)
        if found is None:
            break
        text = text[found.end() :]
        writer += next((f"{name}:{word} " for name, word in found.groupdict().items() if word), "")
    return Line(text, writer, _stamp(whole[:_STAMPED_CHARS]))


def _stamp(text: str) -> float | None:
    found = _YEAR_FIRST.search(text)
    if found:
        year, month, day, *clock, part = found.groups(default="0")
    else:
        found = _YEAR_LAST.search(text)
        if not found:
            return None
        month, day, year, *clock = found.groups()
        part = "0"
    try:
        whole = calendar.timegm((int(year), int(month), int(day), *map(int, clock)))
    except ValueError:
        return None
    return whole + float(f"0.{part}")
