"""Whatever environment it is made for: lint is silent, every object is what its API takes, names and ports meet."""

import json
import re
from functools import cache
from itertools import cycle, pairwise
from typing import Any

import pytest
import yaml
from helm_python.chart import lint
from jsonschema_rs import Draft202012Validator, ValidationError

from tests.helm.custom_resources import SPECS, schema_of
from tests.helm.rendering import (
    CHART,
    ENVIRONMENTS,
    NAMESPACE,
    VALUES,
    Manifest,
    chart,
    environment,
    manifests,
    of_kind,
    texts,
    the,
    values_of,
)
from tests.kubernetes import schemas

VERSIONS = [f"1.{minor}" for minor in range(27, 35)]
INFO = 1


def test_there_are_environments_enough() -> None:
    assert len(VALUES) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), list(zip(ENVIRONMENTS, cycle((VERSIONS[0], VERSIONS[-1])))))
def test_lint_finds_nothing(name: str, version: str) -> None:
    """Above information: that there is no icon is said in the chart."""
    said = lint(CHART, values_of(name), strict=True, kube_version=f"v{version}.0")
    assert said["errors"] == []
    assert [m for m in said["messages"] if m["severity"] > INFO] == []
    assert said["total_charts_linted"] == 1


def test_lint_would_find_something() -> None:
    said = lint(CHART, {"image": {"repository": "r"}, "sauce": "nvml"}, strict=True)
    assert any("sauce" in m["error"] for m in said["messages"] if m["severity"] > INFO) or said["errors"]


@cache
def distinct() -> dict[str, str]:
    """Every object of Kubernetes' own kinds that any environment gives, once, as JSON -> where it was seen first.

    Texts of ConfigMaps are left out: they are no business of a schema.
    """
    found: dict[str, str] = {}
    for name in ENVIRONMENTS:
        for manifest in environment(name):
            if (manifest["apiVersion"], manifest["kind"]) not in SPECS:
                short = manifest | ({"data": dict.fromkeys(manifest["data"], "")} if "data" in manifest else {})
                found.setdefault(json.dumps(short, sort_keys=True), f"{name}: {manifest['kind']}")
    return found


def test_no_environment_is_without_an_exporter() -> None:
    assert [len(of_kind(environment(name), "DaemonSet")) for name in ENVIRONMENTS] == [1] * len(ENVIRONMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_kubernetes_takes(version: str) -> None:
    for text, seen in distinct().items():
        try:
            schemas.validate(json.loads(text), version, strict=True)
        except schemas.ValidationError as err:
            pytest.fail(f"{seen}: {err}")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_custom_resource_has_known_fields_only(name: str) -> None:
    for manifest in environment(name):
        if (manifest["apiVersion"], manifest["kind"]) in SPECS:
            Draft202012Validator(schema_of(manifest)).validate(manifest)


def test_every_custom_resource_is_rendered_somewhere() -> None:
    rendered = {(m["apiVersion"], m["kind"]) for name in ENVIRONMENTS for m in environment(name)}
    assert set(SPECS) <= rendered


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule", "GrafanaDashboard"])
def test_the_schemas_of_custom_resources_refuse_an_unknown_field(kind: str) -> None:
    manifest = json.loads(json.dumps(of_kind(environment("everything"), kind)[0]))
    manifest["spec"]["honourLabels"] = True
    with pytest.raises(ValidationError, match="honourLabels"):
        Draft202012Validator(schema_of(manifest)).validate(manifest)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_object_has_its_name_once_and_a_namespace(name: str) -> None:
    names = [
        (m["apiVersion"], m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in environment(name)
    ]
    assert len(set(names)) == len(names)
    bare = {m["kind"] for m in environment(name) if "namespace" not in m["metadata"]}
    assert bare <= {"ClusterRole", "ClusterRoleBinding"}
    wanted = values_of(name).get("namespaceOverride", NAMESPACE)
    assert {m["metadata"].get("namespace") for m in of_kind(environment(name), "DaemonSet", "Service")} == {wanted}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_text_has_no_trailing_blanks(name: str) -> None:
    """They are where an empty part was indented."""
    for path, text in texts(values_of(name)).items():
        lines = text.splitlines()
        if path not in {"config.yaml", "NOTES.txt"}:
            assert [line for line in lines if line != line.rstrip()] == [], path
        assert not any(a.strip() == b.strip() == "" for a, b in pairwise(lines[1:-1])) or path == "NOTES.txt", path


def _labels_of_pods(found: tuple[Manifest, ...]) -> dict[str, dict[str, str]]:
    return {m["kind"]: m["spec"]["template"]["metadata"]["labels"] for m in of_kind(found, "DaemonSet", "Deployment")}


def _selected(selector: dict[str, str], pods: dict[str, dict[str, str]]) -> list[str]:
    return [kind for kind, labels in pods.items() if selector.items() <= labels.items()]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_selectors_meet_their_own_pods_and_no_others(name: str) -> None:
    found = environment(name)
    pods = _labels_of_pods(found)
    for manifest in of_kind(found, "DaemonSet", "Deployment"):
        assert _selected(manifest["spec"]["selector"]["matchLabels"], pods) == [manifest["kind"]]
    for manifest in found:
        wanted = "Deployment" if manifest["metadata"]["name"].endswith("-cluster") else "DaemonSet"
        selector: Any = None
        if manifest["kind"] == "Service":
            selector = manifest["spec"]["selector"]
        elif manifest["kind"] in {"PodMonitor", "ServiceMonitor"}:
            selector = manifest["spec"]["selector"]["matchLabels"]
        elif manifest["kind"] == "NetworkPolicy":
            selector = manifest["spec"]["podSelector"]["matchLabels"]
        if selector is not None:
            assert _selected(selector, pods) == [wanted], manifest["metadata"]["name"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_service_monitor_finds_its_service(name: str) -> None:
    found = environment(name)
    for monitor in of_kind(found, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [s for s in of_kind(found, "Service") if wanted <= s["metadata"]["labels"].items()]
        assert len(services) == 1
        assert {e["port"] for e in monitor["spec"]["endpoints"]} <= {p["name"] for p in services[0]["spec"]["ports"]}
        away = monitor["metadata"]["namespace"] != services[0]["metadata"]["namespace"]
        told = monitor["spec"].get("namespaceSelector", {}).get("matchNames", [])
        assert told == ([services[0]["metadata"]["namespace"]] if away else [])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_ports_have_the_names_that_others_call_them_by(name: str) -> None:
    found = environment(name)
    pods = {m["kind"]: m["spec"]["template"]["spec"] for m in of_kind(found, "DaemonSet", "Deployment")}
    for manifest in of_kind(found, "Service", "PodMonitor", "NetworkPolicy"):
        spec = pods["Deployment" if manifest["metadata"]["name"].endswith("-cluster") else "DaemonSet"]
        (port,) = spec["containers"][0]["ports"]
        told = {
            "Service": lambda s: [p["targetPort"] for p in s["ports"]],
            "PodMonitor": lambda s: [e["port"] for e in s["podMetricsEndpoints"]],
            "NetworkPolicy": lambda s: [p["port"] for p in s["ingress"][0]["ports"]],
        }[manifest["kind"]](manifest["spec"])
        assert told == [port["name"]]
        if manifest["kind"] == "Service":
            assert [p["port"] for p in manifest["spec"]["ports"]] == [port["containerPort"]]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_is_mounted_is_a_volume_and_what_is_a_volume_is_mounted(name: str) -> None:
    for manifest in of_kind(environment(name), "DaemonSet", "Deployment"):
        spec = manifest["spec"]["template"]["spec"]
        mounts = spec["containers"][0].get("volumeMounts", [])
        assert sorted(m["name"] for m in mounts) == sorted(v["name"] for v in spec.get("volumes", []))
        assert len({m["mountPath"] for m in mounts}) == len(mounts)
        assert not any("subPath" in m for m in mounts), "a subPath does not change with its ConfigMap"


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_service_account_that_is_named_is_made_or_said_to_be_there(name: str) -> None:
    found = environment(name)
    made = {m["metadata"]["name"] for m in of_kind(found, "ServiceAccount")}
    for manifest in of_kind(found, "DaemonSet", "Deployment"):
        account = manifest["spec"]["template"]["spec"]["serviceAccountName"]
        assert account in made or values_of(name).get("serviceAccount", {}).get("create") is False
    for binding in of_kind(found, "ClusterRoleBinding"):
        roles = {m["metadata"]["name"] for m in of_kind(found, "ClusterRole")}
        assert binding["roleRef"]["name"] in roles
        assert {s["name"] for s in binding["subjects"]} <= made


def test_the_chart_says_what_it_is() -> None:
    about = chart().metadata
    assert about["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    said = {name.removeprefix("artifacthub.io/"): text for name, text in about["annotations"].items()}
    assert set(said) == {"alternativeName", "category", "changes", "license", "prerelease"}, "all that need no address"
    assert about["name"] in said["alternativeName"], "as Artifact Hub wants it"
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert {change["kind"] for change in yaml.safe_load(said["changes"])} <= kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a" * 53, "gpu-efficiency", "r"])
def test_names_fit_whatever_the_release_is_called(name: str) -> None:
    """63 letters for a Service and for a label's value; endings are kept, or two objects would have one name."""
    found = manifests(values_of("everything") | {"nameOverride": "a-name-of-some-length-for-the-chart"}, name=name)
    names = [(m["kind"], m["metadata"]["name"]) for m in found]
    assert len(set(names)) == len(names)
    for manifest in found:
        if manifest["kind"] not in {"ClusterRole", "ClusterRoleBinding"}:
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"])
        assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values())
    assert ("Deployment", the(found, "Deployment")["metadata"]["name"]) in names
    assert the(found, "Deployment")["metadata"]["name"].endswith("-cluster")
