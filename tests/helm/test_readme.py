"""The chart's README is what its values say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import values_from_yaml

from helm.build_readme import README, TEMPLATE, readme, rows
from tests.helm.rendering import CHART, ENVIRONMENTS, IMAGE, ROOT, manifests
from tests.helm.test_settings import started


def test_the_readme_is_what_values_yaml_says() -> None:
    assert README.read_text() == readme(), "run: python -m helm.build_readme"


def _leaves(values: Any, path: str, told: set[str]) -> list[str]:
    if path in told:
        return [path]
    assert isinstance(values, dict), path
    return [leaf for key, value in values.items() for leaf in _leaves(value, f"{path}.{key}".strip("."), told)]


def test_every_value_has_its_row_and_its_default() -> None:
    text = (CHART / "values.yaml").read_text()
    table = {row.path: row for row in rows(text)}
    values = yaml.safe_load(text)
    leaves = _leaves(values, "", {path for path, row in table.items() if row.default})
    assert leaves == [path for path, row in table.items() if row.default]
    assert json.loads(table["tolerations"].default)[0]["key"] == "nvidia.com/gpu"
    assert table["updateStrategy.rollingUpdate.maxUnavailable"].default == '"10%"'
    assert table["web"].default == ""


def test_a_value_without_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values.yaml: b.c has no comment"):
        rows("# One.\na: 1\nb:\n  # Two.\n  d: 2\n  c: 3\n")
    with pytest.raises(ValueError, match=r"values.yaml: e has no comment"):
        rows("# One.\na: 1\n\ne: 3\n")


def test_a_comment_is_its_own_keys() -> None:
    found = rows("# One,\n# and more.\na: 1\n# Two.\nb:\n  # Three | four.\n  c: [1]\n# Five.\nd:\n  x: 1\n  y: 2\n")
    assert [(row.path, row.default, row.about) for row in found] == [
        ("a", "1", "One, and more."),
        ("b", "", "Two."),
        ("b.c", "[1]", "Three | four."),
        ("d", '{"x": 1, "y": 2}', "Five."),
    ]


def test_the_readme_points_at_environments_that_are_there() -> None:
    assert "tests/helm/values/" in readme()
    assert {"gpu-operator", "dcgm-exporter", "eks", "aks", "gke", "embedded", "openshift"} <= set(ENVIRONMENTS)


def _examples() -> list[tuple[str, str]]:
    """YAML that a reader would copy: of the chart's README, and of the documents where it is values of this chart."""
    found = [
        ("README" if path == TEMPLATE else path.name, block)
        for path in (TEMPLATE, *sorted((ROOT / "docs").glob("*.md")))
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    ]
    keys = set(yaml.safe_load((CHART / "values.yaml").read_text()))
    return [(name, block) for name, block in found if _is_map(block) and set(values_from_yaml(block)) <= keys]


def _is_map(block: str) -> bool:
    """One document that is a map; others show rules, scrape jobs, objects."""
    try:
        return isinstance(yaml.safe_load(block), dict)
    except yaml.YAMLError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), _examples(), ids=[name for name, _ in _examples()])
def test_what_a_reader_would_copy_is_taken(name: str, text: str, tmp_path: Path) -> None:
    found = manifests(IMAGE | values_from_yaml(text))
    assert started(found, tmp_path), name


def test_there_are_examples() -> None:
    assert [name for name, _ in _examples()].count("README") >= 3
