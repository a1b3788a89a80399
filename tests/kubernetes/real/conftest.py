"""The control plane of `make test-kubernetes`: one a run, with the custom resource definitions that the chart needs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helm.custom_resources import SPECS
from tests.kubernetes.real.build import FOLDER, missing
from tests.kubernetes.real.control_plane import ControlPlane, Json, control_plane

CHART = Path(__file__).parents[3] / "helm" / "gpu-efficiency"
OPERATORS = ("podmonitors", "servicemonitors", "prometheusrules")
"""Definitions of the Prometheus Operator's own."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    reason = missing()
    assert not reason, reason
    with control_plane(tmp_path_factory.mktemp("kubernetes")) as made:
        for name in OPERATORS:
            made.apply_crd(yaml.safe_load((FOLDER / "crds" / f"monitoring.coreos.com_{name}.yaml").read_text()))
        made.apply_crd(_grafana_dashboard())
        yield made


@pytest.fixture(scope="session")
def chart(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The archive that helm makes of this tree's chart."""
    return cluster.package(CHART, tmp_path_factory.mktemp("chart"))


def _grafana_dashboard() -> Json:
    """Return a definition with the fields of our schema: the operator's own is in no Go module that can be had."""
    spec = _structural(SPECS["grafana.integreatly.org/v1beta1", "GrafanaDashboard"])
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "grafanadashboards.grafana.integreatly.org"},
        "spec": {
            "group": "grafana.integreatly.org",
            "names": {"kind": "GrafanaDashboard", "plural": "grafanadashboards"},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _structural(schema: Json) -> Json:
    """Return a schema without `additionalProperties: false`, which definitions may not have beside properties."""
    kept = {key: value for key, value in schema.items() if not (key == "additionalProperties" and value is False)}
    if "properties" in kept:
        kept["properties"] = {key: _structural(value) for key, value in kept["properties"].items()}
    if "items" in kept:
        kept["items"] = _structural(kept["items"])
        if kept["items"] == {"type": "object"}:
            kept["items"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return kept
