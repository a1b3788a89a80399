"""Slurm's way to write many names as one: `gpu[01-03,07],login1`.

Owns the expansion, bounded, for a short text can name a million nodes. Refuses what is not well formed (ValueError).
Source: Slurm's hostlist functions as described in scontrol(1), `show hostnames`.
"""

import re
from collections.abc import Iterator
from itertools import islice

MOST = 65_536
"""Names given at most; Slurm's own limit of nodes in a cluster (MAX_SLURM_NODES) is that."""
_BRACKETS = 8
"""In one name; Slurm itself takes no more than two or three."""
_LONGEST = 255
"""Characters of a name without its numbers: more than a host or a path of /dev has."""
_NAME = re.compile(r"[^\s\[\],]*")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand_hostlist(text: str, *, most: int = MOST) -> tuple[str, ...]:
    """Each name in order; of nothing, nothing. Raises ValueError where it is no hostlist or gives more than `most`."""
    names: list[str] = []
    for part in _parts(text) if text else ():
        for name in _expanded(part, most):
            if len(names) >= most:
                raise ValueError(f"hostlist gives more than {most} names: {text[:80]!r}")
            names.append(name)
    return tuple(names)


def expand_numbers(text: str, *, most: int = MOST) -> tuple[str, ...]:
    """Expand `01-03,07`, with its leading zeros, or raise ValueError."""
    return tuple(_numbers(text, most))


def _parts(text: str) -> Iterator[str]:
    """Split at commas outside brackets."""
    depth = start = 0
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"hostlist: brackets do not match: {text[:80]!r}")
        if char == "," and not depth:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ValueError(f"hostlist: brackets do not match: {text[:80]!r}")
    yield text[start:]


def _expanded(part: str, most: int) -> Iterator[str]:
    """Expand the first bracket of one part and, for each of its numbers, the rest."""
    head, bracket, rest = part.partition("[")
    if not _NAME.fullmatch(head) or not part or len(head) > _LONGEST or part.count("[") > _BRACKETS:
        raise ValueError(f"hostlist: no name: {part[:80]!r}")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    # One more than may be given says enough: three brackets of a thousand numbers each would fill the memory first.
    tails = list(islice(_expanded(tail, most), most + 1)) if tail else [""]
    for number in _numbers(inside, most):
        yield from (head + number + after for after in tails)


def _numbers(text: str, most: int) -> Iterator[str]:
    given = 0
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if not match or not piece.isascii():
            raise ValueError(f"no list of numbers: {text[:80]!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (given := given + last - first + 1) > most:
            raise ValueError(f"a range that falls or is too long: {text[:80]!r}")
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))
