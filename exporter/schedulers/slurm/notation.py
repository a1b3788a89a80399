"""Parses Slurm's compact notations: hostlists (`gpu[01-03,07]`), generic resources (GRES) and TRES strings.

Expansion is bounded, because a short text can name a million nodes; anything malformed raises ValueError. GRES indices
are positions in the node's list of gres.conf, not device minors. Sources: scontrol(1) `show hostnames`; Slurm's
gres.html and tres.html; output recorded from 22.05.8 and 24.11.5.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec import Struct

MOST_NAMES = 65_536
"""Most names returned; the same as Slurm's limit of nodes in a cluster (MAX_SLURM_NODES)."""
_BRACKETS = 8
"""Most brackets in one name; Slurm accepts no more than two or three."""
_MOST_NAME_CHARS = 255
"""Longest name without its numbers; hosts and paths in /dev are shorter."""
_NAME = re.compile(r"[^\s\[\],]*")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand_hostlist(text: str, *, most: int = MOST_NAMES) -> tuple[str, ...]:
    """Return the names in order; none for an empty text. Raises ValueError if malformed or beyond `most` names."""
    names: list[str] = []
    for part in _split(text, "[]") if text else ():
        for name in _expand_part(part, most):
            if len(names) >= most:
                raise ValueError(f"hostlist gives more than {most} names: {text[:80]!r}")
            names.append(name)
    return tuple(names)


def expand_numbers(text: str, *, most: int = MOST_NAMES) -> tuple[str, ...]:
    """Expand `01-03,07`, keeping leading zeros. Raises ValueError."""
    return tuple(_expand_ranges(text, most))


def _split(text: str, brackets: str) -> Iterator[str]:
    """Split at commas outside the two `brackets`; raises ValueError if these do not match."""
    depth = start = 0
    for place, char in enumerate(text):
        depth += (char == brackets[0]) - (char == brackets[1])
        if depth not in (0, 1):
            raise ValueError(f"brackets do not match: {text[:80]!r}")
        if char == "," and not depth:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ValueError(f"brackets do not match: {text[:80]!r}")
    yield text[start:]


def _expand_part(part: str, most: int) -> Iterator[str]:
    """Expand the first bracket of one part and, for each of its numbers, the rest."""
    head, bracket, rest = part.partition("[")
    if not _NAME.fullmatch(head) or not part or len(head) > _MOST_NAME_CHARS or part.count("[") > _BRACKETS:
        raise ValueError(f"hostlist: no name: {part[:80]!r}")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    # One more than the limit is enough: three brackets of a thousand numbers each would exhaust the memory first.
    tails = list(islice(_expand_part(tail, most), most + 1)) if tail else [""]
    for number in _expand_ranges(inside, most):
        yield from (head + number + after for after in tails)


def _expand_ranges(text: str, most: int) -> Iterator[str]:
    given = 0
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match or not part.isascii():
            raise ValueError(f"no list of numbers: {text[:80]!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (given := given + last - first + 1) > most:
            raise ValueError(f"a range that falls or is too long: {text[:80]!r}")
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))


GPU_GRES = ("gpu", "shard", "mps")
"""Resources that are a GPU or a part of one; their indices refer to the same list."""
SHARED_GRES = frozenset({"shard", "mps"})
MOST_INDICES = 1024
"""Slurm's limit is far below; a node has 16 GPUs, or 7 instances of each."""

_GRES_NAME = r"[A-Za-z_][\w-]*"
_ENTRY = re.compile(
    rf"({_GRES_NAME})"
    r"((?::(?:[^:()=,]+|\(null\)))*?)(?::(\d{1,15}(?:\.\d{1,9})?[KMGTP]?))?(?:\((\w+:)?([^()]*)\))?"
)
_NO_TYPE = "(null)"
"""How 21.08 to 25.11 write the type of untyped GPUs that are bound to cores, in GresUsed."""
_USED = re.compile(r"(\d{1,15}|-)/\d{1,15}")
_SUFFIX = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
_COUNT = re.compile(r"(\d{1,15})(\.\d{1,9})?([KMGTP]?)")


class Gres(Struct, frozen=True):
    """An amount of one resource on one node."""

    name: str
    type: str = ""
    """With its dots, as in gres.conf: "h100", "a100_1g.10gb"; empty: untyped."""
    count: int = 0
    indices: tuple[int, ...] = ()
    """Empty: none, or unknown."""


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Parse what a node has or has allocated: `gpu:h100:3(IDX:2-4),shard:2(IDX:0)`, `gpu:8(S:0-1)`. Raises ValueError.

    Newer versions write shards as used/size of each GPU in turn: `shard:2(0/4,0/4,2/4,0/4)` is index 2. In 26.05 a GPU
    that is allocated as a whole has `-/4`: no part of it is used.
    """
    if text in {"", "(null)", "N/A"}:
        return ()
    return tuple(_parse_allocated(part) for part in _split(text, "()"))


def parse_requested_gres(text: str) -> tuple[Gres, ...]:
    """Parse what is requested: `gres:gpu:h100:3` (to 22.05), `gres/gpu:3` or `cpu=1,gres/gpu=1`. Raises ValueError.

    Other TRES are skipped. Without a number the count is one (sbatch(1), --gres).
    """
    if text in {"", "(null)", "N/A"}:
        return ()
    parts = (part for part in text.split(",") if part.startswith(("gres:", "gres/")))
    return tuple(_parse_requested(part[len("gres:") :]) for part in parts)


def parse_tres(text: str) -> dict[str, int]:
    """Parse `cpu=4,mem=8G,gres/gpu=2`; sizes with a unit become bytes. Raises ValueError."""
    if text in {"", "(null)", "N/A"}:
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"no TRES: {text[:80]!r}")
    return {name: parse_count(number) for name, _, number in pairs}


def tres_gpus(tres: dict[str, int]) -> int | None:
    """Return the GPUs in a TRES string; None if it lists none (AccountingStorageTRES lacks them)."""
    typed = [count for name, count in tres.items() if name.startswith("gres/gpu:")]
    return tres.get("gres/gpu", sum(typed) if typed else None)


def count_gpus(requested: Iterable[Gres]) -> int:
    """Return the number of whole GPUs (or MIG instances)."""
    return sum(each.count for each in requested if each.name == "gpu")


def gpus_by_type(gres: Iterable[Gres]) -> dict[str, int]:
    """Return whole GPUs by type, summed over entries of the same type (gres.conf may have a line per socket)."""
    counts = Counter[str]()
    for each in gres:
        if each.name == "gpu":
            counts[each.type] += each.count
    return counts


def _parse_allocated(part: str) -> Gres:
    match = _ENTRY.fullmatch(part)
    if not match or not part.isascii():
        raise ValueError(f"no generic resource: {part[:80]!r}")
    name, types, count, label, inside = match.groups()
    indices = _indices(label, inside or "")
    return Gres(name, _type(types[1:]), parse_count(count) if count else len(indices), indices)


def _type(text: str) -> str:
    return "" if text == _NO_TYPE else text


def _indices(label: str | None, inside: str) -> tuple[int, ...]:
    if label == "IDX:" and inside not in {"", "N/A"}:
        return tuple(map(int, expand_numbers(inside, most=MOST_INDICES)))
    if label is not None or not inside:
        return ()
    used = [_USED.fullmatch(each) for each in inside.split(",")]
    if not all(used) or len(used) > MOST_INDICES:
        raise ValueError(f"no list of used/size: {inside[:80]!r}")
    return tuple(place for place, each in enumerate(used) if each and each[1].strip("0-"))


def _parse_requested(text: str) -> Gres:
    name, equals, number = text.rpartition("=")
    if equals:
        return Gres(name.partition(":")[0], _type(name.partition(":")[2]), parse_count(number))
    name, _, rest = text.partition(":")
    head, _, last = rest.rpartition(":")
    if not re.fullmatch(_GRES_NAME, name) or not name.isascii():
        raise ValueError(f"no generic resource: {text[:80]!r}")
    return Gres(name, _type(head), parse_count(last)) if _COUNT.fullmatch(last) else Gres(name, _type(rest), 1)


def parse_count(text: str) -> int:
    """Parse `4`, `1K`, `8G` or `1.50G` (scontrol shortens numbers). Raises ValueError."""
    match = _COUNT.fullmatch(text)
    if not match or not text.isascii():
        raise ValueError(f"no count: {text[:80]!r}")
    whole, fraction, suffix = match.groups()
    unit = _SUFFIX[suffix]
    return int(whole) * unit + int(unit * float(fraction or 0))
