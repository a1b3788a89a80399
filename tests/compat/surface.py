"""The stable public surface, one part a line: `python -m tests.compat.surface` records it in `stable.txt`.

A line is a kind, a name, and what else must stay. A recorded line that the surface no longer has is kept, behind "- ",
so that a part cannot go unseen by being recorded anew: `test_surface` demands an entry of CHANGELOG.md for it.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from exporter import trace
from exporter.cli import reference
from exporter.cli.command_line import describe_commands
from exporter.cluster.metrics import METRICS as OF_CLUSTER
from exporter.config import Config
from exporter.core import checkpoint
from exporter.core.metrics import METRICS
from exporter.history import store
from exporter.stability import EXPERIMENTAL_COMMANDS, EXPERIMENTAL_SECTIONS, experimental
from exporter.training.message import Message
from exporter.web import app

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("stable.txt")
GONE = "- "


def surface() -> list[str]:
    """Every stable part as it is now, sorted."""
    parts = [*_metrics(), *_commands(), *_settings("", Config), *_json(), *_files()]
    assert len(set(parts)) == len(parts), "two parts of one name"
    return sorted(parts)


def recorded() -> tuple[list[str], list[str]]:
    """Parts that were recorded: those that were there at last, and those that had gone before."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    gone = [line.removeprefix(GONE) for line in lines if line.startswith(GONE)]
    return [line for line in lines if not line.startswith(GONE)], gone


def lines_to_record(now: list[str], before: list[str], gone: list[str]) -> list[str]:
    """Lines of the file: parts that have gone first, then those that are there."""
    lost = sorted({*gone, *before} - set(now))
    return [*(f"{GONE}{line}" for line in lost), *now]


def words_of(line: str) -> frozenset[str]:
    """Words that an entry of CHANGELOG.md about this part has: its whole name, and which of its choices."""
    kind, name, *rest = line.split(" ")
    return frozenset(re.findall(r"--[\w.-]+|[\w-]+", " ".join([name, *(rest if kind == "choice" else [])])))


def _metrics() -> Iterator[str]:
    for metric in (*METRICS, *OF_CLUSTER):
        if not experimental(metric.name):
            yield f"metric {metric.name} {metric.type} {','.join(metric.labels)}".rstrip()


def _commands() -> Iterator[str]:
    for command in describe_commands():
        if command.name in EXPERIMENTAL_COMMANDS:
            continue
        yield f"command {command.name}"
        for argument in command.arguments:
            # An operand's name is text for people; its choices are not.
            names = argument.flags or ("OPERAND",)
            for name in names:
                yield from [f"flag {command.name}:{name} {len(argument.values)} values"] if argument.flags else []
                yield from (f"choice {command.name}:{name} {choice}" for choice in argument.choices)


def _settings(above: str, section: type[Struct]) -> Iterator[str]:
    for field in fields(section):
        path = f"{above}{field.name}"
        if path in EXPERIMENTAL_SECTIONS:
            continue
        struct, form = reference._struct_of(field.type)
        if struct is None:
            yield f"setting {path} {reference._type(field.type)}"
        else:
            yield f"setting {path} {form.format(field.name)}"
            yield from _settings(f"{path}.", struct)


def _json() -> Iterator[str]:
    for file in sorted((ROOT / "docs").glob("*.schema.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        yield from _fields(file.name.partition(".")[0], schema["$defs"])
    yield from _fields("api", msgspec.json.schema_components(app._SCHEMAS)[1])
    yield from _fields("message", msgspec.json.schema_components((Message,))[1])


def _fields(where: str, components: dict[str, Any]) -> Iterator[str]:
    for name, component in components.items():
        for field, schema in component.get("properties", {}).items():
            yield f"json {where}.{name}.{field} {_shape(schema)}"


def _shape(schema: Any) -> str:  # noqa: PLR0911  one case a line
    """The type of a JSON value; names of objects and bounds are left out."""
    match schema:
        case {"anyOf": kinds}:
            return "|".join(sorted({_shape(kind) for kind in kinds}))
        case {"type": "array", "prefixItems": kinds}:
            return f"[{', '.join(map(_shape, kinds))}]"
        case {"type": "array", "items": kind}:
            return f"[{_shape(kind)}]"
        case {"type": "object", "additionalProperties": dict(kind)}:
            return f"map of {_shape(kind)}"
        case {"type": str(kind)}:
            return kind
        case {"$ref": _}:
            return "object"
        case {"enum": values} | {"const": values}:
            return json.dumps(values)
        case _:
            return "any"


def _files() -> Iterator[str]:
    for number, migration in enumerate(store._MIGRATIONS, start=1):
        yield f"file store-{number} {hashlib.sha256(' '.join(migration.split()).encode()).hexdigest()[:16]}"
    yield f"file checkpoint {checkpoint._FORMAT}"
    yield from (f"file trace-{number} {trace.FORMAT}" for number in trace.KNOWN_VERSIONS)


def main() -> None:
    """Record the surface."""
    before = recorded() if FILE.exists() else ([], [])
    FILE.write_text("\n".join(lines_to_record(surface(), *before)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
