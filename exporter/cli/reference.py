"""Writes docs/configuration.md from the structs of the configuration: `python -m exporter.cli.reference` (make docs).

Every key, type, bound, default and explanation comes from the structs of exporter.config, exporter.registry and the
policy.
"""

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec import inspect as types
from msgspec.structs import FieldInfo, fields

from exporter.cli import cluster, gateway, wiring
from exporter.config import LIVE, PREFIX, Config
from exporter.core.policy import Policy
from exporter.stability import EXPERIMENTAL_SECTIONS

_HEAD = f"""# Configuration

Written by `make docs` from the structs in `exporter/config.py`, `exporter/registry.py` and `exporter/core/policy.py`.

    gpu-efficiency check-config --config FILE     # reads it as the daemon does, prints the result, rejects errors

One TOML file, named by `--config`; all keys are optional. In order of increasing precedence: defaults, the file, environment variables, flags. An unknown key or
a wrong type is an error that names the key's path. An [example](../examples/gpu-efficiency.toml); access to what is served: [security.md](security.md).

- **Environment**: `{PREFIX}` and the key's path in capitals, `_` for `.`: `{PREFIX}WEB_LISTEN_ADDRESS` is `web.listen_address`. A list of words or numbers is
  `[a, b]`. Keys marked "file only" have no variable.
- **Flags** are those of `serve`, `demo`, `replay` and, where marked, of `cluster` or `gateway`.
- **Reload**: sections marked *live* take effect on SIGHUP or when the file changes, without losing a second of the ledger. The others need a restart, and the log says so.
"""  # noqa: E501  a paragraph of the page is a line
_COLUMNS = "| key | type | default | environment | flag | meaning |\n|---|---|---|---|---|---|"


def markdown() -> str:
    """Return the page."""
    own = [field for field in fields(Config) if not _is_section(field) and field.name in {"source", "scheduler"}]
    parts = [_HEAD, "## Above all sections\n", _table(own, "", _docstrings(Config))]
    for field in fields(Config):
        if field not in own:
            parts += ["", *_section(field)]
    return "\n".join(parts) + "\n"


def _section(field: FieldInfo) -> Iterator[str]:
    """Heading and tables of a section, including nested lists and tables."""
    live = "*Live.*" if field.name in LIVE else "Needs a restart."
    if field.name in EXPERIMENTAL_SECTIONS:
        live = f"*Experimental.* {live}"
    struct, form = _struct_of(field.type)
    yield f"## {form.format(field.name)}\n"
    if field.name == "policy":
        table = _table(fields(Policy), "policy", _docstrings(Policy))
        yield f"Thresholds; each has its reason, E marks an engineering estimate. {live}\n\n{table}"
        return
    note = _docstrings(Config).get(field.name, "")
    about = _about(struct) if struct is not None else ""
    yield " ".join(filter(None, (about, note, live))) + "\n"
    if struct is not None:
        inline = [each for each in fields(struct) if _nested(each.type) is None]
        path = field.name if _is_section(field) else None
        yield _table(inline, path, _docstrings(struct))
        for each in fields(struct):
            yield from _nested_tables(each, field.name, struct)


def _nested_tables(field: FieldInfo, above: str, section: type[Struct]) -> Iterator[str]:
    """A list or table of structs within a section."""
    struct = _nested(field.type)
    if struct is not None:
        _, form = _struct_of(field.type)
        yield f"\n### {form.format(f'{above}.{field.name}')}\n"
        note = _docstrings(section).get(field.name, "")
        yield f"{_about(struct)} {note}".strip() + "\n"
        yield _table(fields(struct), None, _docstrings(struct))


def _table(rows: Iterable[FieldInfo], path: str | None, docs: Mapping[str, str]) -> str:
    """`path` empty: keys outside sections; None: keys of lists and named tables, which can only be set in a file."""
    return "\n".join((_COLUMNS, *(_row(field, path, docs.get(field.name, "")) for field in rows)))


def _row(field: FieldInfo, path: str | None, meaning: str) -> str:
    cells = [f"`{field.name}`", _type(field.type), _default(field), "file only", "", meaning]
    if path is not None:
        dotted = f"{path}.{field.name}".lstrip(".")
        cells[3] = f"`{PREFIX}{dotted.upper().replace('.', '_')}`"
        cells[4] = ", ".join(f"`{name}`" for name in _flags().get(dotted, ()))
    return "| " + " | ".join(cells) + " |"


# -- what a field is --


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.type, type) and issubclass(field.type, Struct)


def _struct_of(hint: Any) -> tuple[type[Struct] | None, str]:
    """The struct of a section's keys, and the format of its heading in TOML."""
    match types.type_info(hint):
        case types.StructType(cls=struct):
            return struct, "[{}]"
        case types.VarTupleType(item_type=types.StructType(cls=struct)):
            return struct, "[[{}]]"
        case types.DictType(value_type=types.StructType(cls=struct)):
            return struct, '[{}."NAME"]'
        case _:
            return None, '[{}."NAME"]'


def _nested(hint: Any) -> type[Struct] | None:
    return None if isinstance(types.type_info(hint), types.StructType) else _struct_of(hint)[0]


def _about(struct: type[Struct]) -> str:
    """The struct's docstring without the section's own name."""
    text = " ".join(inspect.getdoc(struct).split()) if inspect.getdoc(struct) else ""  # type: ignore[union-attr]
    _, _, rest = text.partition("]: ")
    return rest[:1].upper() + rest[1:] if rest else text.partition("]. ")[2].strip()


def _type(hint: Any) -> str:
    """Describe a type; choices are in the order of the source."""
    info = types.type_info(hint)
    while isinstance(info, types.Metadata):
        info = info.type
    chosen = get_args(get_args(hint)[0] if get_origin(hint) is Annotated else hint)
    names: dict[type, Callable[[], str]] = {
        types.LiteralType: lambda: ", ".join(f"`{json.dumps(value)}`" for value in chosen),
        types.VarTupleType: lambda: f"list of: {_type(chosen[0])}",
        types.UnionType: lambda: ", or ".join(_type(each) for each in chosen if each is not NoneType),
        types.IntType: lambda: _number("whole number", info),
        types.FloatType: lambda: _number("number", info),
        types.StrType: lambda: "text, not empty" if getattr(info, "min_length", None) else "text",
        types.BoolType: lambda: "boolean",
        types.DateType: lambda: "date",
    }
    return names.get(type(info), lambda: "table")()


_LONG = 10**6


def _number(name: str, info: Any) -> str:
    bounds = (("above", info.gt), ("from", info.ge), ("below", info.lt), ("to", info.le))
    return " ".join((name, *(f"{relation} {_bound_text(bound)}" for relation, bound in bounds if bound is not None)))


def _bound_text(value: float) -> str:
    text = f"{int(value):,}" if value == int(value) and value < _LONG else f"{value:g}"
    return text.replace("e+0", "e").replace("e+", "e")


def _default(field: FieldInfo) -> str:
    """The default in TOML."""
    if field.default is NODEFAULT and field.default_factory is NODEFAULT:
        return "**must be given**"
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if value is None:
        return "not set"
    return f"`{json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}`"


# -- meaning and flags of a field --


@cache
def _docstrings(struct: type[Struct]) -> Mapping[str, str]:
    """Attribute -> its docstring in the source of the class."""
    module = ast.parse(inspect.getsource(sys.modules[struct.__module__]))
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == struct.__name__]
    return {name: text for node in classes for name, text in _attribute_texts(node)}


def _attribute_texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for here, after in zip(node.body, node.body[1:], strict=False):
        match here, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split()).replace("|", "\\|")


def _flags() -> dict[str, tuple[str, ...]]:
    """Dotted key -> flags that set it."""
    found: dict[str, tuple[str, ...]] = {}
    commands = (
        (wiring.config_arguments, ""),
        (cluster.cluster_arguments, " (cluster)"),
        (gateway.gateway_arguments, " (gateway)"),
    )
    for add, suffix in commands:
        parser = argparse.ArgumentParser(add_help=False)
        add(parser)
        for action in parser._actions:  # noqa: SLF001  argparse has no public list of them
            if action.dest not in found:
                found[action.dest] = tuple(f"{name}{suffix}" for name in action.option_strings)
    return found


if __name__ == "__main__":
    sys.stdout.write(markdown())
