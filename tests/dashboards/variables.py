"""A board's variables: what their values are, and how Grafana writes them into a query.

Owns the order in which they are looked up, the choice among their values, and quoting: a variable of which several
can be chosen is a regular expression. Refuses types and queries that no board here has.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

Json = dict[str, Any]
Ask = Callable[[str, Mapping[str, str]], Any]
"""Path below /api/v1/ and parameters -> `data` of the answer; raises ValueError with Prometheus' words."""
ALL = "$__all"
_REFERENCE = re.compile(r"\$\{(\w+)(?::(\w+))?\}|\$(\w+)|\[\[(\w+)(?::(\w+))?\]\]")


class Span(Struct, frozen=True):
    """A range of time, in Unix seconds."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """Seconds."""
        return self.end - self.start


class Chosen(Struct, frozen=True, kw_only=True):
    """A variable with what is chosen of it."""

    values: tuple[str, ...]
    several: bool = False
    """Whether it may have more than one: then a query takes it as a regular expression."""
    instead: str | None = None
    """What is written for All, where the board says so."""


Scope = Mapping[str, Chosen]


def resolved(board: Json, ask: Ask, span: Span, chosen: Mapping[str, Sequence[str]]) -> Scope:
    """Every variable's values: as chosen, else as the board has them, else the first there is."""
    scope: dict[str, Chosen] = {
        "__range": Chosen(values=(f"{span.length:.0f}s",)),
        "__range_s": Chosen(values=(f"{span.length:.0f}",)),
    }
    for variable in _in_order(board.get("templating", {}).get("list", ())):
        scope[variable["name"]] = _chosen(variable, _options(variable, ask, span, scope), chosen.get(variable["name"]))
    return scope


def _in_order(variables: Sequence[Json]) -> Iterator[Json]:
    """Those that others are written with come first."""
    left = list(variables)
    while left:
        ready = next((v for v in left if not any(_mentions(v, other) for other in left if other is not v)), None)
        if ready is None:
            raise ValueError(f"variables read one another in a ring: {', '.join(v['name'] for v in left)}")
        left.remove(ready)
        yield ready


def _mentions(variable: Json, other: Json) -> bool:
    names = {
        name
        for found in _REFERENCE.finditer(_text(variable) + str(variable.get("regex") or ""))
        for name in found.groups()
    }
    return other["name"] in names


def _text(variable: Json) -> str:
    query = variable.get("query") or ""
    return str(query.get("query") or "") if isinstance(query, dict) else str(query)


def _options(variable: Json, ask: Ask, span: Span, scope: Scope) -> list[str]:
    kind, text = variable["type"], _text(variable)
    if kind == "query":
        found = _looked_up(written(text, scope), ask, span)
        return _sorted(_extracted(found, variable.get("regex") or ""), variable.get("sort") or 0)
    if kind == "custom":
        return [part.strip().rpartition(" : ")[2] for part in text.split(",")]
    if kind == "datasource":
        return ["prometheus"]
    if kind in {"textbox", "constant"}:
        return [str((variable.get("current") or {}).get("value") or text)]
    raise ValueError(f"variable {variable['name']} is of a type not known here: {kind}")


def _looked_up(text: str, ask: Ask, span: Span) -> list[str]:
    times = {"start": f"{span.start:.3f}", "end": f"{span.end:.3f}"}
    if found := re.fullmatch(r"label_values\((?:(.+),)?\s*(\w+)\s*\)", text, re.DOTALL):
        match = {"match[]": found[1].strip()} if found[1] else {}
        return list(ask(f"label/{found[2]}/values", times | match))
    if found := re.fullmatch(r"query_result\((.+)\)", text, re.DOTALL):
        return [_line(row) for row in ask("query", {"query": found[1], "time": f"{span.end:.3f}"})["result"]]
    raise ValueError(f"no variable's query: {text!r}")


def _line(row: Json) -> str:
    """A series as Grafana shows it to a variable's regular expression."""
    labels = dict(row["metric"])
    name = labels.pop("__name__", "")
    at, value = row["value"]
    pairs = ",".join(f'{label}="{said}"' for label, said in labels.items())
    return f"{name}{{{pairs}}} {value} {float(at) * 1000:.0f}"


def _extracted(values: list[str], pattern: str) -> list[str]:
    """What a regular expression between slashes leaves: its group, each once."""
    if pattern:
        found = [re.search(pattern.strip("/"), value) for value in values]
        values = [(m.groupdict().get("value") or (m[1] if m.re.groups else m[0])) for m in found if m]
    return list(dict.fromkeys(values))


def _sorted(values: list[str], how: int) -> list[str]:
    """0: as they came; odd: upwards, even: downwards."""
    return sorted(values, key=str.casefold, reverse=how % 2 == 0) if how else values


def _chosen(variable: Json, options: list[str], asked: Sequence[str] | None) -> Chosen:
    current = (variable.get("current") or {}).get("value")
    wanted = list(asked) if asked is not None else [current] if isinstance(current, str) else list(current or ())
    many = bool(variable.get("multi") or variable.get("includeAll"))
    if variable["type"] == "textbox" and asked:
        return Chosen(values=tuple(asked))
    kept = [value for value in wanted if value in options or (asked is not None and value != ALL)]
    if variable.get("includeAll") and (ALL in wanted or not kept):
        return Chosen(values=tuple(options), several=many, instead=variable.get("allValue") or None)
    return Chosen(values=tuple(kept or options[:1]), several=many)


def written(text: str, scope: Scope, *, plain: bool = False) -> str:
    """A text with its variables in it; `plain`: for people, else for a query."""

    def value(found: re.Match[str]) -> str:
        name, form = found[1] or found[3] or found[4], found[2] or found[5] or ("text" if plain else "")
        return _formatted(scope[name], form) if name in scope else found[0]

    return _REFERENCE.sub(value, text)


def _formatted(chosen: Chosen, form: str) -> str:
    separators = {"text": " + ", "pipe": "|", "csv": ",", "raw": ","}
    if chosen.instead is not None and form != "text":
        return chosen.instead
    if form in separators:
        return separators[form].join(chosen.values)
    if form == "regex":
        return _together([_as_regex(value) for value in chosen.values])
    if chosen.several:
        return _together([_in_string(_as_regex(value)) for value in chosen.values])
    return _in_string(",".join(chosen.values))


def _together(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"({'|'.join(values)})"


def _as_regex(value: str) -> str:
    return re.sub(r"[\\^$*+?.()|\[\]{}]", lambda found: "\\" + found[0], value)


def _in_string(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
