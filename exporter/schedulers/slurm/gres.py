"""Generic resources as Slurm writes them: what was asked for, what was given, by which index.

Owns the three spellings: `gpu:h100:3(IDX:2-4,7)` (given, scontrol's GRES= and JSON's gres_detail), `gres:gpu:3` or
`gres/gpu:h100:3` (asked, TresPerNode and its like), `cpu=4,gres/gpu=2` (TRES strings). Refuses to guess: ValueError
for what is none of them. Indices are Slurm's for the node: places in the list of gres.conf, not device minors.
Source: Slurm's gres.html and tres.html; the shapes as printed by 22.05.8 and 24.11.5 (tests/schedulers/recorded).
"""

import re

from msgspec import Struct

from exporter.schedulers.slurm.hostlist import expand_numbers

ON_GPUS = ("gpu", "shard", "mps")
"""Names of resources that are a GPU or a part of one; their indices count the same list."""
SHARED = frozenset({"shard", "mps"})
MOST_INDICES = 1024
"""Slurm's limit is far below; a node has 16 GPUs, or 7 instances of each."""

_ENTRY = re.compile(r"([A-Za-z_][\w-]*)((?::[^:()=,]+)*?)(?::(\d{1,15}))?(?:\((\w+:)?([^()]*)\))?")
_USED = re.compile(r"(\d{1,15})/\d{1,15}")
_SUFFIX = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
_COUNT = re.compile(r"(\d{1,15})(\.\d{1,9})?([KMGTP]?)")


class Gres(Struct, frozen=True):
    """So much of one resource on one node."""

    name: str
    type: str = ""
    """With its dots, as gres.conf has it: "h100", "a100_1g.10gb"; empty: untyped."""
    count: int = 0
    indices: tuple[int, ...] = ()
    """Empty: none, or not said."""


def parse_gres(text: str) -> tuple[Gres, ...]:
    """What was given on one node, `gpu:h100:3(IDX:2-4,7),shard:2(IDX:0)`; of "" and "(null)", nothing.

    Newer versions write shards as used/size of each GPU in turn, `shard:2(0/4,0/4,2/4,0/4)`: index 2.
    """
    if text in {"", "(null)", "N/A"}:
        return ()
    return tuple(_given(part) for part in _parts(text))


def parse_asked(text: str) -> tuple[Gres, ...]:
    """What was asked for, `gres:gpu:h100:3` (to 22.05), `gres/gpu:3` or `cpu=1,gres/gpu=1`; other TRES are left out.

    Without a number one is meant (sbatch(1), --gres).
    """
    if text in {"", "(null)", "N/A"}:
        return ()
    parts = (part for part in text.split(",") if part.startswith(("gres:", "gres/")))
    return tuple(_asked(part[len("gres:") :]) for part in parts)


def parse_tres(text: str) -> dict[str, int]:
    """`cpu=4,mem=8G,gres/gpu=2` as numbers, memory in bytes where it has a unit. Raises ValueError."""
    if text in {"", "(null)", "N/A"}:
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"no TRES: {text[:80]!r}")
    return {name: parse_count(number) for name, _, number in pairs}


def gpus_of(tres: dict[str, int]) -> int | None:
    """GPUs in a TRES string; None where it does not speak of them (AccountingStorageTRES lacks them)."""
    typed = [count for name, count in tres.items() if name.startswith("gres/gpu:")]
    return tres.get("gres/gpu", sum(typed) if typed else None)


def gpu_count(asked: tuple[Gres, ...]) -> int:
    """Whole GPUs (or MIG instances) among them."""
    return sum(each.count for each in asked if each.name == "gpu")


def _parts(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _given(part: str) -> Gres:
    match = _ENTRY.fullmatch(part)
    if not match or not part.isascii():
        raise ValueError(f"no generic resource: {part[:80]!r}")
    name, types, count, label, inside = match.groups()
    indices = _indices(label, inside or "")
    return Gres(name, types[1:], int(count) if count else len(indices), indices)


def _indices(label: str | None, inside: str) -> tuple[int, ...]:
    if label == "IDX:" and inside not in {"", "N/A"}:
        return tuple(map(int, expand_numbers(inside, most=MOST_INDICES)))
    if label is not None or not inside:
        return ()
    used = [_USED.fullmatch(each) for each in inside.split(",")]
    if not all(used) or len(used) > MOST_INDICES:
        raise ValueError(f"no list of used/size: {inside[:80]!r}")
    return tuple(place for place, each in enumerate(used) if each and int(each[1]))


def _asked(text: str) -> Gres:
    name, equals, number = text.rpartition("=")
    if equals:
        return Gres(name.partition(":")[0], name.partition(":")[2], parse_count(number))
    name, _, rest = text.partition(":")
    head, _, last = rest.rpartition(":")
    if not name.isidentifier():
        raise ValueError(f"no generic resource: {text[:80]!r}")
    return Gres(name, head, parse_count(last)) if _COUNT.fullmatch(last) else Gres(name, rest, 1)


def parse_count(text: str) -> int:
    """Read `4`, `1K`, `8G` or `1.50G` (scontrol shortens numbers); raises ValueError."""
    match = _COUNT.fullmatch(text)
    if not match or not text.isascii():
        raise ValueError(f"no count: {text[:80]!r}")
    whole, fraction, suffix = match.groups()
    unit = _SUFFIX[suffix]
    return int(whole) * unit + int(unit * float(fraction or 0))
