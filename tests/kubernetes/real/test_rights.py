"""What the chart's service accounts may do on a real API server, and which Pod Security level admits its pods."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from exporter.schedulers.kubernetes.api import ApiServer, try_api
from tests.helm.pod_security import baseline, restricted
from tests.helm.rendering import ENVIRONMENTS, IMAGE, RELEASE, environment, manifests, of_kind
from tests.kubernetes.real.control_plane import ControlPlane

pytestmark = pytest.mark.kubernetes
NAMESPACE = "rights"
REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


class Account:
    """A service account with a token of its own."""

    def __init__(self, cluster: ControlPlane, name: str) -> None:
        self.cluster = cluster
        self.token = cluster.token(NAMESPACE, name)

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> httpx.Response:
        """Send a request as this account."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        return self.cluster.client.request(method, path, headers=headers, json=body)

    def rules(self) -> set[tuple[str, str, str]]:
        """Return group, resource and verb of all that it may do, as the server knows it."""
        answer = self.ask("POST", REVIEW, {"spec": {"namespace": NAMESPACE}})
        assert answer.status_code == 201, answer.text
        rules = answer.json()["status"]["resourceRules"]
        return {
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }


@pytest.fixture(scope="module", name="here")
def _here(cluster: ControlPlane) -> Iterator[ControlPlane]:
    cluster.create_namespace(NAMESPACE)
    yield cluster
    cluster.delete(f"/api/v1/namespaces/{NAMESPACE}")


@pytest.fixture(name="release")
def _release(here: ControlPlane, chart: str, request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """The chart, installed with the values of the test's parameter."""
    words = ("--namespace", NAMESPACE, "--set", "image.repository=registry.example/gpu-efficiency")
    settings = [word for key, value in request.param.items() for word in ("--set", f"{key}={value}")]
    done = here.helm("install", RELEASE, chart, *words, *settings)
    assert done.returncode == 0, done.stderr
    yield here
    done = here.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
    assert done.returncode == 0, done.stderr


READS = {
    (group, resource, verb)
    for group, resource in (("", "pods"), ("", "nodes"), ("resource.k8s.io", "resourceslices"))
    for verb in ("list", "watch")
}
CLUSTER = {("", resource, verb) for resource in ("pods", "nodes") for verb in ("list", "watch")}
KUEUE = {("kueue.x-k8s.io", resource, verb) for resource in ("workloads", "localqueues") for verb in ("list", "watch")}


@pytest.mark.parametrize(
    ("release", "account", "granted"),
    [
        ({}, RELEASE, READS),
        ({"receipts.kubernetes": "event"}, RELEASE, READS | {("", "events", "create")}),
        ({"receipts.kubernetes": "annotation"}, RELEASE, READS | {("", "pods", "patch")}),
        ({"kubernetes.api": "false"}, RELEASE, set()),
        ({"cluster.enabled": "true"}, f"{RELEASE}-cluster", CLUSTER),
        ({"cluster.enabled": "true", "cluster.kueue": "true"}, f"{RELEASE}-cluster", CLUSTER | KUEUE),
    ],
    indirect=["release"],
    ids=["default", "event", "annotation", "no-api", "cluster", "kueue"],
)
def test_an_account_may_do_what_its_role_has_and_nothing_else(
    release: ControlPlane, account: str, granted: set[tuple[str, str, str]]
) -> None:
    everybodys = Account(release, "default").rules()
    assert Account(release, account).rules() - everybodys == granted


REFUSED = {
    "secrets": ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
    "a secret": ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/any"),
    "config maps": ("GET", "/api/v1/configmaps"),
    "one pod": ("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/any"),
    "a new pod": ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods"),
    "the end of a pod": ("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/any"),
    "a change of a pod": ("PATCH", f"/api/v1/namespaces/{NAMESPACE}/pods/any"),
    "logs": ("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/any/log"),
    "a shell": ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/any/exec?command=sh"),
    "a node's kubelet": ("GET", "/api/v1/nodes/any/proxy/pods"),
    "a change of a node": ("PATCH", "/api/v1/nodes/any"),
    "an event": ("POST", f"/api/v1/namespaces/{NAMESPACE}/events"),
    "a token": ("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default/token"),
    "a role": ("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"),
}


@pytest.mark.parametrize("release", [{}], indirect=True)
def test_other_requests_are_refused(release: ControlPlane) -> None:
    account = Account(release, RELEASE)
    merge = "application/merge-patch+json"
    answers = {
        what: account.ask(method, path, {}, merge if method == "PATCH" else "application/json").status_code
        for what, (method, path) in REFUSED.items()
    }
    assert answers == dict.fromkeys(REFUSED, 403)


@pytest.mark.parametrize("release", [{}, {"kubernetes.api": "false"}], indirect=True, ids=["default", "no-api"])
def test_install_check_reports_what_the_account_may(
    release: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    token = tmp_path / "token"
    token.write_text(release.token(NAMESPACE, RELEASE))
    errors = try_api(ApiServer(release.url, f"{token}", f"{release.ca}"), "gpu-1")
    if request.node.callspec.id == "default":
        assert errors == {"pods": "", "nodes": ""}
    else:
        assert all(error.startswith("403 ") and "grant it list and watch" in error for error in errors.values())


def test_a_token_that_is_not_the_servers_is_refused(here: ControlPlane, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(here.token(NAMESPACE, "default")[:-8] + "AAAAAAAA")
    errors = try_api(ApiServer(here.url, f"{token}", f"{here.ca}"), "gpu-1")
    assert all(error.startswith("401 ") for error in errors.values())


# -- Pod Security --


def refusal(cluster: ControlPlane, namespace: str, template: Mapping[str, Any]) -> str:
    """Return why the server refuses a pod of this template; "" if it would take it."""
    pod = {
        "metadata": {"name": "one", "labels": template["metadata"].get("labels", {})},
        "spec": {key: value for key, value in template["spec"].items() if key not in _ELSEWHERE},
    }
    answer = cluster.client.post(f"/api/v1/namespaces/{namespace}/pods", json=pod, params={"dryRun": "All"})
    if answer.status_code == 403:
        message: str = answer.json()["message"]
        assert "violates PodSecurity" in message, message
        return message
    assert answer.status_code == 201, answer.text
    return ""


_ELSEWHERE = {"serviceAccountName", "priorityClassName", "runtimeClassName"}
"""References to objects that are not in this cluster."""


@pytest.fixture(scope="module", name="levels")
def _levels(here: ControlPlane) -> Iterator[dict[str, str]]:
    """A namespace for each level."""
    names = {level: f"level-{level}" for level in ("privileged", "baseline", "restricted")}
    for level, name in names.items():
        here.create_namespace(name, **{"pod-security.kubernetes.io/enforce": level})
    yield names
    for name in names.values():
        here.delete(f"/api/v1/namespaces/{name}")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_pod_security_is_what_our_own_checks_have(here: ControlPlane, levels: dict[str, str], name: str) -> None:
    for workload in of_kind(environment(name), "DaemonSet", "Deployment"):
        template = workload["spec"]["template"]
        assert not refusal(here, levels["privileged"], template)
        for level, ours in (("baseline", baseline), ("restricted", restricted)):
            theirs = refusal(here, levels[level], template)
            assert bool(theirs) == bool(ours(template["spec"])), f"{level}: {theirs or 'taken'}"


README: dict[str, tuple[dict[str, Any], str]] = {
    "scheduler: kubernetes": ({}, "privileged"),
    "without the API server": ({"kubernetes": {"api": False}}, "privileged"),
    "scheduler: processes": ({"scheduler": "processes", "kubernetes": {"hostProcesses": True}}, "privileged"),
    "processes, no pause": ({"scheduler": "processes", "pausePath": ""}, "restricted"),
}


@pytest.mark.parametrize("row", README)
def test_the_readmes_table_of_rights_is_true(here: ControlPlane, levels: dict[str, str], row: str) -> None:
    """The strictest level that admits the exporter's pod."""
    values, strictest = README[row]
    (daemon_set,) = of_kind(manifests(IMAGE | values), "DaemonSet")
    template = daemon_set["spec"]["template"]
    admitted = [level for level, name in levels.items() if not refusal(here, name, template)]
    assert admitted[-1] == strictest
