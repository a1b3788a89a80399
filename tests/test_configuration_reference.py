"""Tests docs/configuration.md and the example file against the configuration."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import fields

from exporter import config
from exporter.cli.reference import markdown
from exporter.config import LIVE, Config, ConfigError, load
from exporter.core.policy import Policy
from exporter.registry import SOURCES
from tests.each import each

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "gpu-efficiency.toml"
ROW = re.compile(
    r"^\| `(\w+)` \| (.+?) \| (.+?) \| (`GPU_EFFICIENCY_\w+`|file only) \| (.*?) ?\| (.*?) ?\|$", re.MULTILINE
)


def sections() -> dict[str, list[tuple[str, ...]]]:
    """Heading -> rows of its table."""
    parts = re.split(r"^#{2,3} (.+)\n", PAGE, flags=re.MULTILINE)
    return {head: ROW.findall(body) for head, body in zip(parts[1::2], parts[2::2], strict=True)}


SECTIONS = sections()
VARIABLES = [
    (head.strip("[]"), key, kind, default, variable.strip("`"))
    for head, rows in SECTIONS.items()
    for key, kind, default, variable, _, _ in rows
    if variable != "file only"
]


def test_the_page_is_the_printed_one() -> None:
    """After a change of the configuration: make docs."""
    assert markdown() == PAGE


def test_every_key_of_every_struct_is_on_the_page() -> None:
    structs = [each for each in vars(config).values() if isinstance(each, type) and issubclass(each, Struct)]
    of_file = [each for each in structs if each.__module__ in {"exporter.config", "exporter.registry"}]
    assert len(of_file) > 20
    listed = {key for rows in SECTIONS.values() for key, *_ in rows}
    for struct in of_file:
        for field in fields(struct):
            assert field.name in listed or any(re.match(rf"\[+({field.name}|\w+\.{field.name})\b", h) for h in SECTIONS)
    assert {key for key, *_ in SECTIONS["[policy]"]} == set(Policy.__struct_fields__)


def test_every_key_says_what_it_means() -> None:
    assert [(head, key) for head, rows in SECTIONS.items() for key, *_, said in rows if not said] == []


def test_what_is_live_is_what_a_reload_takes() -> None:
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.MULTILINE)
    live = {re.sub(r'[\[\]]|\."NAME"', "", head) for head, body in zip(parts[1::2], parts[2::2], strict=True)
            if "*Live.*" in body}  # fmt: skip
    assert live == set(LIVE)


def _other(kind: str, default: str) -> tuple[str, Any]:
    """A valid value that is not the default, as text and as parsed."""
    was = None if default == "not set" else json.loads(default.strip("`"))
    if kind == "boolean":
        return str(not was).lower(), not was
    if kind.startswith("`"):
        word = next(json.loads(each.strip("` ")) for each in kind.split(",") if json.loads(each.strip("` ")) != was)
        return word, word
    if kind.startswith("list of: whole"):
        return "[7, 8]", (7, 8)
    if kind.startswith("list of: text"):
        return "[a, b/*]", ("a", "b/*")
    if "number" in kind:
        return _within(kind, was)
    address = "host:port" in default or was in (":19400", ":19401")
    other = "127.0.0.1:1" if address else "x:1"
    return other, other


def _within(kind: str, was: Any) -> tuple[str, Any]:
    bounds = {word: float(figure.replace(",", "")) for word, figure in re.findall(r"(above|from|to) (\S+)", kind)}
    top = bounds.get("to", 1e9)
    value = top if was != top else bounds.get("from", bounds.get("above", 0.0) + top / 2)
    return (f"{value:.0f}", int(value)) if kind.startswith("whole") else (f"{value!r}", value)


@each("section, key, kind, default, variable", VARIABLES)
def test_each_variable_sets_its_key_and_each_default_is_the_real_one(
    section: str, key: str, kind: str, default: str, variable: str
) -> None:
    known: dict[str, tuple[str, Any]] = {"currency": ("EUR", "EUR"), "collective_sm": ("0.5", 0.5)}
    known |= {key: ("http://x:1", "http://x:1")} if key.endswith(("url", "endpoint")) else {}
    text, value = known[key] if key in known else _other(kind, default)
    more = {"GPU_EFFICIENCY_PRIVACY_KEY_FILE": "x"} if key == "users" else {}
    path = () if section.startswith("Above") else (section,)
    assert json.dumps(_got(load(None, environ={}), *path, key)) == default.strip("`").replace("not set", "null")
    assert _got(load(None, environ={variable: text, **more}), *path, key) == value


def _got(found: Any, *path: str) -> Any:
    for name in path:
        found = getattr(found, name)
    return found


@each("section, key, kind, default, variable", VARIABLES)
def test_beyond_each_bound_it_is_refused(section: str, key: str, kind: str, default: str, variable: str) -> None:
    del section, default
    for word, figure in re.findall(r"(above|from|to) (\S+)", kind) if not kind.startswith("list") else ():
        bound = float(figure.replace(",", ""))
        wrong = {"above": bound, "from": bound - 1, "to": bound + 1 if bound < 1e15 else bound * 2}[word]
        text = f"{wrong:.0f}" if kind.startswith("whole") else repr(wrong)
        with pytest.raises(ConfigError, match=key):
            load(None, environ={variable: text})


def test_the_flags_are_real_ones() -> None:
    flags = {key: flag for rows in SECTIONS.values() for key, _, _, _, flag, _ in rows if flag}
    assert flags["listen_address"] == "`--cluster.listen-address (cluster)`"
    assert SECTIONS["[web]"][0][4] == "`--web.listen-address`"
    assert SECTIONS["Above all sections"][0][4] == "`--source`"
    assert flags["url"] if "url" in flags else SECTIONS["[dcgm_exporter]"][0][4] == "`--dcgm-exporter-url`"


def test_values_to_choose_from_stand_in_their_order() -> None:
    assert SECTIONS["Above all sections"][0][1] == ", ".join(f'`"{name}"`' for name in ("auto", *SOURCES))


def test_the_example_loads_and_sets_what_it_says() -> None:
    found = load(EXAMPLE, environ={})
    assert (found.scheduler, found.inventory.expected_gpus, found.host.pool) == ("slurm", 8, "reserved")
    assert [rule.team for rule in found.workload.rules] == ["language", ""]
    assert [row.per_gpu_hour for row in found.prices] == [2.5, 1.2]
    assert found.exemptions[0].expires == date(2027, 3, 1)
    assert found.policies()["NVIDIA L4"].spin_power_share == 0.15
    assert found.policies()["NVIDIA L4"].zombie_batch_seconds == 2700
    written = set(re.findall(r"^\[+(\w+)", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(LIVE) <= written <= set(Config.__struct_fields__)
