"""What ships beside the code says the same as the code: metric names, leaks, settings, pinned packages."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from exporter.config import DEFAULT_PORT, load
from tests.alerts import packs

ROOT = Path(__file__).parents[1]


def groups() -> Iterator[list[dict[str, str]]]:
    yield from (group["rules"] for found in packs.groups().values() for group in found)


def test_a_group_records_a_series_before_it_reads_it() -> None:
    """Else the chain would mix two moments; what was recorded earlier, or by the rule itself, is another matter."""
    for rules in groups():
        later = {rule["record"] for rule in rules if "record" in rule}
        for rule in rules:
            later.discard(rule.get("record", ""))
            at_once = re.sub(r"[\w:]+(\{[^}]*\})?(\[[^]]*\]| offset \w+)", "", rule["expr"])
            assert not set(re.findall(r"\b[a-z_]+:[a-z_]+:?[a-z0-9_]*", at_once)) & later, rule


def test_the_image_uses_settings_the_daemon_knows() -> None:
    """The chart's are in tests/helm."""
    image = (ROOT / "Dockerfile").read_text()
    names = set(re.findall(r"(GPU_EFFICIENCY_\w+)=", image))
    config = load(None, environ=dict.fromkeys(names, f":{DEFAULT_PORT}"))
    assert config.web.listen_address == f":{DEFAULT_PORT}"
    assert f"EXPOSE {DEFAULT_PORT}" in image


def test_the_locks_pin_every_dependency_with_hashes_and_name_no_index() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for lock, wanted in (
        ("requirements-runtime.lock", project["dependencies"]),
        ("requirements.lock", project["dependencies"] + project["optional-dependencies"]["dev"]),
    ):
        text = (ROOT / lock).read_text()
        pinned = set(re.findall(r"^([a-z0-9._-]+)==\S+ \\\n    --hash=sha256:", text, re.MULTILINE))
        assert {re.split(r"[\[<>=~! ]", name)[0].lower() for name in wanted} <= pinned
        assert len(pinned) == len(re.findall(r"^\S+==", text, re.MULTILINE))
        assert "://" not in text


def test_the_image_pins_what_development_pins() -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"^\S+==\S+", (ROOT / name).read_text(), re.MULTILINE))

    assert pins("requirements-runtime.lock") < pins("requirements.lock")
