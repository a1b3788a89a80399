"""Explains a rejected configuration: the line in the file, the nearest known key, the allowed values.

Imported only when a configuration is rejected.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Struct, structs

KeyPath = tuple[str | int, ...]
"""Keys and indices from the top of the configuration: ("workload", "rules", 1, "team")."""
_LEADING_KEY = re.compile(r'(\w+(?:\.\w+|\[\d+\]|\."[^"]*")*): ')
"""The key at the start of a message of exporter.config: workload.rules[1].team, specs."NVIDIA L4"."""
_TRAILING_KEY = re.compile(r" - at `\$(.*)`$")
"""The key at the end of a message of msgspec, below the leading one if there is one."""
_UNKNOWN_KEY = re.compile(r"unknown field `(.*?)`")
_PART = re.compile(r'\."([^"]*)"|\.?(\w+)|\[(\d+)\]')
_SHORTEST_BEGINNING = 3
"""Fewest letters of a key's beginning that suggest it."""
_SIMILARITY = 0.7
"""Least similarity, 0 to 1, of a suggested key: `colour` and `cluster` have 0.6."""
_MOST_LISTED = 15
"""Most keys that a message lists."""
_BOUND_REASONS: Mapping[tuple[str, str], str] = {
    ("sampling.interval_seconds", ">="): "the hardware counters are updated every 100 ms, and profiling values read"
    " more often are invalid on Hopper (NVIDIA/DCGM#310)",
}
"""Why a bound is what it is, by key and comparison, where an operator may want to ignore it."""
_PATTERN_REASONS: Mapping[str, str] = {
    "currency": "a code such as USD, or another name in letters; a symbol such as $ stands for several currencies",
}
"""What is allowed where a pattern decides, by key."""
_MOST_LINES = 2000
"""Most lines of one value that are parsed to find its end."""


def explain(message: str, config: type[Struct], *, text: str = "", variables: Sequence[str] = ()) -> str:
    """Add to a message the line of `text` and what is allowed.

    `variables`: the environment variable with the error, then all known ones.
    """
    path, unknown = mentioned_key(message)
    if not unknown:
        allowed = ", ".join(str(each) or '""' for each in choices_at(config, path))
        more = f"; allowed are {allowed}" if allowed and "enum" in message else _reason(path, message)
    elif variables:
        more = _nearest(variables[0], variables[1:])
    else:
        more = _nearest(unknown, known_keys(config, path))
    line, _ = locate(text, (*path, unknown) if unknown else path)
    return f"{f'line {line}: ' if line else ''}{message}{more}"


def _reason(path: KeyPath, message: str) -> str:
    if "matching regex" in message:
        return f": {_PATTERN_REASONS[str(path[-1])]}"
    dotted = ".".join(map(str, path))
    reasons = (why for (key, sign), why in _BOUND_REASONS.items() if key == dotted and f" {sign} " in message)
    return "".join(f": {why}" for why in reasons)


def mentioned_key(message: str) -> tuple[KeyPath, str]:
    """Return the path of the key that a message names, and the unknown key in it, if that is the error."""
    leading, trailing, unknown = (
        _LEADING_KEY.match(message),
        _TRAILING_KEY.search(message),
        _UNKNOWN_KEY.search(message),
    )
    path = (leading[1] if leading else "") + (trailing[1] if trailing else "")
    parts = tuple(int(index) if index else quoted or plain for quoted, plain, index in _PART.findall(path))
    return parts, unknown[1] if unknown else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    begun = [key for key in known if key.startswith(name) and len(name) >= _SHORTEST_BEGINNING]
    near = begun or get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
    if near:
        return f"; did you mean {near[0]}?"
    if len(known) <= _MOST_LISTED:
        return f"; known are {', '.join(known)}" if known else ""
    return "; `gpu-efficiency check-config` prints the known keys"


# -- what is known at a path --


def known_keys(config: type[Struct], path: KeyPath) -> tuple[str, ...]:
    """Return the keys of the table at `path`; empty if any key is allowed, or there is no such table."""
    struct = _hint_at(config, path)
    return struct.__struct_fields__ if _is_struct(struct) else ()


def choices_at(config: type[Struct], path: KeyPath) -> tuple[Any, ...]:
    """Return the allowed values of the key at `path`, in their order; empty if it is no choice."""
    hint = _hint_at(config, path)
    return get_args(hint) if get_origin(hint) is Literal else ()


def has_key(config: type[Struct], path: KeyPath) -> bool:
    """Return whether there is such a key."""
    return bool(path) and _hint_at(config, path) is not None


def _hint_at(config: type[Struct], path: KeyPath) -> Any:
    hint: Any = config
    for part in ("policy", *path[2:]) if path[:1] == ("policy_by_model",) and len(path) > 1 else path:
        hint = _plain(_child(hint, part))
    return hint


def _child(hint: Any, part: str | int) -> Any:
    """Return the type of a key or an item; None if there is none."""
    if _is_struct(hint):
        return next((field.type for field in structs.fields(hint) if field.name == part), None)
    wanted = {int: tuple, str: dict}[type(part)]
    arguments = get_args(hint) if get_origin(hint) is wanted else (None,)
    return arguments[0 if wanted is tuple else -1]


def _plain(hint: Any) -> Any:
    """Return the type without bounds and without None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(each for each in get_args(hint) if each is not NoneType))
    return hint


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)


# -- lines of a TOML document --


def locate(text: str, path: KeyPath) -> tuple[int, int]:
    """Return the line of the deepest part of `path` in a valid TOML document, and its depth; zeros if none is there.

    `text` has the line ends of `Path.read_text`.
    """
    best = (0, 0)
    for line, header, values in _statements(text):
        depth = _shared_depth(path, header, values)
        if depth > best[1]:
            best = (line, depth)
    return best


def _shared_depth(path: KeyPath, header: KeyPath, values: Mapping[str, Any]) -> int:
    """Return how many parts of `path` a statement defines."""
    value: Any = values
    for depth, part in enumerate(path):
        if depth < len(header):
            if header[depth] != part:
                return depth
        elif not _has(value, part):
            return depth
        else:
            value = value[part]
    return len(path)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and part < len(value)
    return isinstance(value, dict) and part in value


def _statements(text: str) -> Iterator[tuple[int, KeyPath, Mapping[str, Any]]]:
    """Yield each statement of a valid document: its first line, its table's path, and the values it defines.

    A statement ends with the first line up to which it is valid TOML by itself.
    """
    header: KeyPath = ()
    items: dict[KeyPath, int] = {}
    for line, statement, values in _chunks(text):
        if statement.lstrip().startswith("["):
            header = _header_path(values, items)
            yield line, header, {}
        elif values:
            yield line, header, values


def _chunks(text: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    chunk: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        chunk.append(line)
        may_end = len(chunk) == 1 or any(end in line for end in ("]", '"""', "'''"))
        values = _parse("\n".join(chunk)) if may_end else None
        if values is not None:
            yield number - len(chunk) + 1, chunk[0], values
            chunk = []
        elif len(chunk) > _MOST_LINES:
            return


def _parse(statement: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(statement)
    except (ValueError, RecursionError):
        return None


def _header_path(values: Any, items: dict[KeyPath, int]) -> KeyPath:
    """Return the path of `[a.b]` or `[[a.b]]`; `items` has the last index of each list of tables so far."""
    path: KeyPath = ()
    while values:
        ((key, values),) = values.items()
        path = (*path, key)
        if isinstance(values, list):
            items[path] = items.get(path, -1) + 1
            values = values[0]
        if path in items:
            path = (*path, items[path])
    return path
