"""What ships beside the code says the same as the code: metric names, leaks, settings, pinned packages."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from exporter.config import DEFAULT_PORT, load

ROOT = Path(__file__).parents[1]


def groups() -> Iterator[list[dict[str, str]]]:
    for path in sorted((ROOT / "alerts").glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield group["rules"]


def test_a_group_records_a_series_before_it_reads_it() -> None:
    """Else the chain would mix two moments; a look back at what was recorded earlier is another matter."""
    for rules in groups():
        later = {rule["record"] for rule in rules if "record" in rule}
        for rule in rules:
            at_once = re.sub(r"[\w:]+(\{[^}]*\})?(\[[^]]*\]| offset \w+)", "", rule["expr"])
            assert not set(re.findall(r"\b[a-z_]+:[a-z_]+:?[a-z0-9_]*", at_once)) & later, rule
            later.discard(rule.get("record", ""))


def test_the_chart_and_the_image_use_settings_the_daemon_knows() -> None:
    chart = (ROOT / "helm/gpu-efficiency/templates/daemonset.yaml").read_text()
    image = (ROOT / "Dockerfile").read_text()
    names = set(re.findall(r"- name: (GPU_EFFICIENCY_\w+)", chart)) | set(re.findall(r"(GPU_EFFICIENCY_\w+)=", image))
    assert len(names) == 8
    values = {
        "GPU_EFFICIENCY_SOURCE": "dcgm-exporter",
        "GPU_EFFICIENCY_SCHEDULER": "kubernetes",
        "GPU_EFFICIENCY_ENGINES_ENABLED": "false",
    }
    environ = {name: values.get(name, f":{DEFAULT_PORT}") for name in names}
    config = load(None, environ=environ)
    assert (config.source, config.dcgm_exporter.url) == ("dcgm-exporter", f":{DEFAULT_PORT}")
    assert f"containerPort: {DEFAULT_PORT}" in chart
    assert f"EXPOSE {DEFAULT_PORT}" in image


def test_the_charts_schema_knows_its_values_and_no_others() -> None:
    chart = ROOT / "helm/gpu-efficiency"
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(values) | {"global"}
    for name in ("image", "kubernetes", "podMonitor", "workloads"):
        assert schema["properties"][name]["additionalProperties"] is False
        assert set(schema["properties"][name]["properties"]) == set(values[name])
    used = {
        path for file in (chart / "templates").iterdir() for path in re.findall(r"\.Values\.(\w+)", file.read_text())
    }
    assert used == set(values)


@pytest.mark.parametrize(("setting", "default"), [("source", "auto"), ("scheduler", "kubernetes")])
def test_the_chart_offers_what_the_daemon_has(setting: str, default: str) -> None:
    schema = json.loads((ROOT / "helm/gpu-efficiency/values.schema.json").read_text())
    offered = schema["properties"][setting]["enum"]
    assert default in offered
    variable = f"GPU_EFFICIENCY_{setting.upper()}"
    assert [getattr(load(None, environ={variable: name}), setting) for name in offered] == offered


def test_the_chart_mounts_the_kubelets_socket_where_the_daemon_looks_for_it() -> None:
    chart = (ROOT / "helm/gpu-efficiency/templates/daemonset.yaml").read_text()
    socket = Path(load(None, environ={}).kubernetes.pod_resources_socket)
    assert f"mountPath: {socket.parent}\n" in chart
    values = yaml.safe_load((ROOT / "helm/gpu-efficiency/values.yaml").read_text())
    assert values["kubernetes"]["podResourcesPath"] == str(socket.parent)


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
