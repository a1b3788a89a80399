"""The chart by the real helm on a real API server: install, upgrade, rollback and uninstall of each values file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.rendering import ENVIRONMENTS, NAMESPACE, RELEASE, environment
from tests.kubernetes.real.control_plane import ControlPlane, Json
from tests.kubernetes.real.objects import Found, everything, kinds
from tests.waiting import wait_for

pytestmark = pytest.mark.kubernetes
VALUES = Path(__file__).parents[2] / "helm" / "values"
FIXTURES = Path(__file__).parents[2] / "helm" / "fixtures"
MADE_BY_CONTROLLERS = {"ControllerRevision", "Endpoints", "EndpointSlice", "Pod", "ReplicaSet", "PodMetrics"}
OTHER_NAMESPACES = ("monitoring", "observability")
"""Where some of the values files put objects."""


@pytest.fixture(scope="module", name="here")
def _here(cluster: ControlPlane) -> Iterator[ControlPlane]:
    """The cluster with the namespaces and one node with the GPU operator's label."""
    for name in (NAMESPACE, *OTHER_NAMESPACES):
        cluster.create_namespace(name, **{"pod-security.kubernetes.io/enforce": "privileged"})
    labels = {"nvidia.com/gpu.present": "true", "kubernetes.io/os": "linux"}
    cluster.create("/api/v1/nodes", {"metadata": {"name": "gpu-1", "labels": labels}})
    cluster.patch("/api/v1/nodes/gpu-1", {"spec": {"taints": None}})
    yield cluster
    cluster.delete("/api/v1/nodes/gpu-1")
    for name in (NAMESPACE, *OTHER_NAMESPACES):
        cluster.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(autouse=True)
def _uninstalled(here: ControlPlane) -> Iterator[None]:
    """A test that fails leaves its release to no other."""
    yield
    here.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found")


def helm(cluster: ControlPlane, *words: str) -> str:
    """Run helm, which must succeed and warn of nothing."""
    done = cluster.helm(*words, "--namespace", NAMESPACE)
    assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}"
    assert not done.stderr.strip(), f"helm {' '.join(words)} warns: {done.stderr}"
    return done.stdout


def exporter(cluster: ControlPlane) -> Json:
    """Return the release's DaemonSet, the only one of the cluster."""
    (found,) = cluster.get("/apis/apps/v1/daemonsets")["items"]
    daemon_set: Json = found
    return daemon_set


def labels(cluster: ControlPlane) -> Any:
    return exporter(cluster)["spec"]["template"]["metadata"]["labels"]


def installed(before: set[Found], after: set[Found]) -> set[tuple[str, str]]:
    """Return kind and name of what has come, without helm's own record and what controllers make of it."""
    return {
        (each.kind, each.name)
        for each in after - before
        if each.kind not in MADE_BY_CONTROLLERS and not each.name.startswith("sh.helm.release.v1.")
    }


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_server_takes_each_manifest_and_warns_of_none(here: ControlPlane, name: str) -> None:
    """Server-side apply with unknown and doubled fields refused."""
    known = kinds(here)
    query = {"fieldManager": "test", "dryRun": "All", "fieldValidation": "Strict"}
    headers = {"Content-Type": "application/apply-patch+yaml"}
    for manifest in environment(name):
        about, kind = manifest["metadata"], known[manifest["kind"]]._replace(version=manifest["apiVersion"])
        path = f"{kind.path(about.get('namespace', ''))}/{about['name']}"
        answer = here.client.patch(path, content=yaml.safe_dump(manifest), params=query, headers=headers)
        assert answer.status_code in (200, 201), f"{path}: {answer.text}"
        assert "Warning" not in answer.headers, f"{path}: {answer.headers['Warning']}"


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_release_comes_changes_goes_back_and_leaves_nothing(here: ControlPlane, chart: str, name: str) -> None:
    before = everything(here)
    values = ("--values", f"{VALUES / name}.yaml")
    helm(here, "install", RELEASE, chart, *values)
    assert installed(before, everything(here)) == {
        (each["kind"], each["metadata"]["name"]) for each in environment(name)
    }
    was = labels(here)
    helm(here, "upgrade", RELEASE, chart, *values, "--set", "podLabels.round=two")
    assert labels(here) == was | {"round": "two"}
    helm(here, "rollback", RELEASE)
    assert labels(here) == was
    history = yaml.safe_load(helm(here, "history", RELEASE, "--output", "yaml"))
    assert [each["status"] for each in history] == ["superseded", "superseded", "deployed"]
    helm(here, "uninstall", RELEASE)
    wait_for(lambda: everything(here) == before, "nothing is left of the release")


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_a_release_of_an_older_chart_is_upgraded_and_rolled_back(
    here: ControlPlane, chart: str, version: str, tmp_path: Path
) -> None:
    before = everything(here)
    values = ("--set", "image.repository=registry.example/gpu-efficiency")
    helm(here, "install", RELEASE, here.package(FIXTURES / f"gpu-efficiency-{version}", tmp_path), *values)
    old = exporter(here)
    helm(here, "upgrade", RELEASE, chart, "--reuse-values")
    new = exporter(here)
    assert new["metadata"]["uid"] == old["metadata"]["uid"], "the DaemonSet was changed, not made anew"
    assert new["metadata"]["generation"] > old["metadata"]["generation"]
    helm(here, "rollback", RELEASE)
    assert exporter(here)["spec"]["template"] == old["spec"]["template"]
    helm(here, "uninstall", RELEASE)
    wait_for(lambda: everything(here) == before, "nothing is left of the release")


def test_the_daemon_set_has_a_pod_on_the_node_that_has_gpus(here: ControlPlane, chart: str) -> None:
    helm(here, "install", RELEASE, chart, "--values", f"{VALUES / 'default.yaml'}")
    status = wait_for(
        lambda: status if (status := exporter(here)["status"]).get("desiredNumberScheduled") else None,
        "the controller counts the node",
    )
    assert status["desiredNumberScheduled"] == 1
    (pod,) = wait_for(lambda: here.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"], "its pod")
    assert pod["spec"]["serviceAccountName"] == RELEASE
    (token,) = (each for each in pod["spec"]["volumes"] if "projected" in each)
    assert token["name"] in {each["name"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
    helm(here, "uninstall", RELEASE)
    wait_for(lambda: not here.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"], "the pod goes with the release")
