"""Least privilege: what each mode may have, what it asks the API server, and that it asks for no more."""

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exporter.cluster.kueue import LOCAL_QUEUES, WORKLOADS
from exporter.config import load
from tests.helm.pod_security import baseline, restricted
from tests.helm.rendering import (
    ENVIRONMENTS,
    IMAGE,
    ROOT,
    container,
    environ,
    environment,
    manifests,
    of_kind,
    pod,
    the,
    values_of,
)

SOCKET, PAUSE = "hostPath /var/lib/kubelet/pod-resources", "hostPath /run/gpu-efficiency"
STORE = "hostPath /var/lib/gpu-efficiency"
READ = ("list", "watch")


class Mode(NamedTuple):
    """What an environment is allowed beyond Pod Security's "baseline", and as whom it runs."""

    user: int
    beyond_baseline: frozenset[str]
    capabilities: tuple[str, ...] = ()
    token: bool = True
    gpus: bool = True
    """false: the NVIDIA runtime is told to give none."""


KUBELET = frozenset({SOCKET, PAUSE, STORE})
ALLOWED = {
    "default": Mode(0, KUBELET),
    "gpu-operator": Mode(0, KUBELET, gpus=False),
    "dcgm-exporter": Mode(0, KUBELET, gpus=False),
    "gke": Mode(0, KUBELET | {"hostNetwork"}, gpus=False),
    "eks": Mode(0, KUBELET),
    "aks": Mode(0, KUBELET),
    "bare": Mode(0, frozenset({"hostPath /data/kubelet/pod-resources", PAUSE, STORE})),
    "hardened": Mode(65532, frozenset(), token=False),
    "tls-basic-auth": Mode(0, KUBELET),
    "mtls": Mode(0, KUBELET),
    "mtls-own": Mode(0, KUBELET),
    "embedded": Mode(0, KUBELET | {"capability SYS_ADMIN"}, ("SYS_ADMIN",)),
    "embedded-unprivileged": Mode(65532, frozenset({"hostPID"}), token=False),
    "processes": Mode(65532, frozenset({"hostPID", PAUSE}), token=False),
    "workloads": Mode(
        0,
        KUBELET | {"hostPID", "capability SYS_PTRACE", "hostPath /run/gpu-efficiency-reports"},
        ("SYS_PTRACE",),
    ),
    "node-store": Mode(65532, frozenset({"hostPath /srv/gpu-efficiency"}), token=False, gpus=True),
    "kubelet-only": Mode(0, KUBELET, token=False),
    "host-network": Mode(0, KUBELET | {"hostNetwork"}),
    "grafana-operator": Mode(0, KUBELET),
    "openshift": Mode(0, KUBELET | {"seLinuxOptions"}, gpus=False),
    "everything": Mode(
        0,
        KUBELET | {"hostPID", "capability SYS_PTRACE", "capability SYS_ADMIN", "hostPath /run/reports"},
        ("SYS_PTRACE", "SYS_ADMIN"),
    ),
}


def test_every_environment_has_its_row() -> None:
    assert set(ALLOWED) == set(ENVIRONMENTS)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_exporter_has_what_its_mode_needs_and_no_more(name: str) -> None:
    found, mode = environment(name), ALLOWED[name]
    spec, one = pod(found)["spec"], container(found)
    assert set(baseline(spec)) == mode.beyond_baseline
    assert spec["securityContext"]["runAsUser"] == mode.user
    assert one["securityContext"]["capabilities"].get("add", []) == list(mode.capabilities)
    assert spec["automountServiceAccountToken"] is mode.token
    assert (environ(found).get("NVIDIA_VISIBLE_DEVICES") != "void") is mode.gpus


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_holds_for_every_mode(name: str) -> None:
    """Read-only root, seccomp, no capability that was not named, no way up; root only by its number."""
    for manifest in of_kind(environment(name), "DaemonSet", "Deployment"):
        spec = manifest["spec"]["template"]["spec"]
        context = spec["containers"][0]["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in context
        assert ("allowPrivilegeEscalation" in context) != ("SYS_ADMIN" in context["capabilities"].get("add", []))
        assert context.get("allowPrivilegeEscalation", False) is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"].get("runAsNonRoot", False) is (spec["securityContext"]["runAsUser"] != 0)
        assert spec["securityContext"]["runAsGroup"] == spec["securityContext"]["runAsUser"]
        assert spec["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_bundle_for_a_bug_report_can_be_written(name: str) -> None:
    """The root is read-only: docs/install-check.md writes the archive to /tmp, with temporary files."""
    found = environment(name)
    assert [m for m in container(found)["volumeMounts"] if m["mountPath"] == "/tmp"] == [TMP]  # noqa: S108
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}} in pod(found)["spec"]["volumes"]


TMP = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108


def test_a_volume_of_the_users_own_at_tmp_is_the_only_one_there() -> None:
    own = {"name": "scratch", "mountPath": "/tmp/"}  # noqa: S108
    found = manifests(IMAGE | {"extraVolumes": [{"name": "scratch", "emptyDir": {}}], "extraVolumeMounts": [own]})
    assert own in container(found)["volumeMounts"]
    assert TMP not in container(found)["volumeMounts"]
    assert "tmp" not in {volume["name"] for volume in pod(found)["spec"]["volumes"]}


ELSEWHERE = {"source": "dcgm", "dcgm": {"address": "a:5555"}}


@pytest.mark.parametrize(
    ("values", "given"),
    [
        (ELSEWHERE, False),
        (ELSEWHERE | {"kubernetes": {"hostProcesses": True}}, True),
        (ELSEWHERE | {"scheduler": "processes"}, True),
        ({"source": "dcgm-exporter", "dcgmExporterUrl": "http://a"}, False),
        ({"source": "dcgm-exporter", "dcgmExporterUrl": "http://a", "kubernetes": {"hostProcesses": True}}, True),
        ({"source": "dcgm", "dcgm": {"address": "embedded"}}, True),
        ({"source": "nvml"}, True),
        ({"source": "auto", "dcgm": {"address": "a:5555"}}, True),
    ],
)
def test_gpus_are_in_the_container_where_it_measures_or_lists_processes(values: dict[str, Any], given: bool) -> None:
    """The driver's list of processes is nobody else's to give: not DCGM's, and not dcgm-exporter's."""
    assert (environ(manifests(IMAGE | values)).get("NVIDIA_VISIBLE_DEVICES") != "void") is given


@pytest.mark.parametrize("name", ["default", "everything", "eks"])
def test_no_gpu_is_asked_for(name: str) -> None:
    for manifest in of_kind(environment(name), "DaemonSet", "Deployment"):
        for one in manifest["spec"]["template"]["spec"]["containers"]:
            asked = one.get("resources", {})
            assert not any("nvidia" in what for part in asked.values() for what in part)


def test_the_hardened_rendering_is_restricted() -> None:
    found = environment("hardened")
    assert restricted(pod(found)["spec"]) == []
    assert of_kind(found, "ClusterRole", "ClusterRoleBinding") == []


def test_the_cluster_is_restricted_wherever_it_runs() -> None:
    names = [name for name in ENVIRONMENTS if of_kind(environment(name), "Deployment")]
    assert len(names) >= 3
    for name in names:
        assert restricted(pod(environment(name), "Deployment")["spec"]) == []


def test_the_default_is_root_for_the_kubelets_socket_alone() -> None:
    spec = pod(environment("default"))["spec"]
    assert set(restricted(spec)) == KUBELET | {
        "volume pause",
        "volume pod-resources",
        "volume history",
        "runAsNonRoot",
        "runAsUser 0",
    }


def test_the_checker_sees_what_it_is_for() -> None:
    worst: dict[str, Any] = {
        "hostIPC": True,
        "containers": [
            {
                "name": "c",
                "securityContext": {"privileged": True, "seccompProfile": {"type": "Unconfined"}},
                "ports": [{"containerPort": 1, "hostPort": 1}],
            }
        ],
    }
    assert baseline(worst) == ["hostIPC", "privileged", "seccomp Unconfined", "hostPort 1"]
    assert {"allowPrivilegeEscalation", "runAsNonRoot", "seccomp", "capabilities not dropped"} <= set(restricted(worst))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_folder_of_the_node_is_mounted_read_only(name: str) -> None:
    """But where jobs find the socket that the exporter makes, the store's, and what the operator mounts himself."""
    found = environment(name)
    folders = {v["name"] for v in pod(found)["spec"].get("volumes", []) if "hostPath" in v}
    writable = {m["name"] for m in container(found).get("volumeMounts", []) if not m.get("readOnly")}
    assert folders & writable <= {"reports", "state", "history"}


def test_secrets_are_for_their_reader_alone() -> None:
    for name, kind, mode in (("hardened", "DaemonSet", 0o440), ("mtls", "DaemonSet", 0o400)):
        spec = pod(environment(name), kind)["spec"]
        assert {v["secret"]["defaultMode"] for v in spec["volumes"] if "secret" in v} == {mode}
        assert ("fsGroup" in spec["securityContext"]) == (mode == 0o440)
    cluster = pod(environment("tls-basic-auth"), "Deployment")["spec"]
    assert cluster["securityContext"]["fsGroup"] == cluster["securityContext"]["runAsGroup"]
    assert [v["secret"]["defaultMode"] for v in cluster["volumes"] if "secret" in v] == [0o440] * 3


def test_contexts_of_the_values_replace_the_charts_own_key_by_key() -> None:
    given = {
        "podSecurityContext": {"runAsUser": "", "seccompProfile": {"type": "Localhost", "localhostProfile": "p"}},
        "securityContext": {"privileged": True, "allowPrivilegeEscalation": None},
    }
    found = manifests(IMAGE | given)
    assert pod(found)["spec"]["securityContext"] == {
        "runAsGroup": 0,
        "seccompProfile": {"type": "Localhost", "localhostProfile": "p"},
    }
    context = container(found)["securityContext"]
    assert context["privileged"] is True
    assert "allowPrivilegeEscalation" not in context
    assert context["readOnlyRootFilesystem"] is True


def _rules(found: tuple[dict[str, Any], ...], ending: str = "") -> set[tuple[str, str, str]]:
    """API group, resource and verb, one by one."""
    return {
        (group, resource, verb)
        for rule in the(found, "ClusterRole", ending)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _asked(folder: str) -> set[tuple[str, str, str]]:
    """The same of the paths that the code names: each is listed and watched (exporter.schedulers.kubernetes.api)."""
    strings = [
        text
        for file in sorted((ROOT / folder).glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(text := node.value, str)
    ]
    found = [re.fullmatch(r"/api/v1/(\w+)", s) for s in strings]
    core = {("", hit[1]) for hit in found if hit}
    parts = re.findall(r"/apis/([a-z0-9]+(?:\.[a-z0-9]+)+)/", " ".join(strings))
    named = {(group, match[1]) for group in parts for s in strings if (match := re.fullmatch(r"/(resource\w+)", s))}
    return {(group, resource, verb) for group, resource in core | named for verb in READ}


def test_the_role_of_a_node_is_what_its_code_asks() -> None:
    assert _rules(environment("default")) == _asked("exporter/schedulers/kubernetes")


def test_the_role_of_the_cluster_is_what_its_code_asks() -> None:
    assert _rules(environment("eks"), "-cluster") == _asked("exporter/cluster")


def test_kueue_is_asked_and_allowed_only_where_it_is_switched_on() -> None:
    on, off = (tuple(manifests(IMAGE | {"cluster": {"enabled": True, "kueue": kueue}})) for kueue in (True, False))
    asked = {("kueue.x-k8s.io", path.rpartition("/")[2], verb) for path in (*WORKLOADS, *LOCAL_QUEUES) for verb in READ}
    assert _rules(on, "-cluster") == _rules(off, "-cluster") | asked
    assert _rules(off, "-cluster") == _rules(environment("eks"), "-cluster")
    assert [environ(found, "Deployment").get("GPU_EFFICIENCY_CLUSTER_KUEUE") for found in (on, off)] == ["true", None]


def test_the_client_only_gets() -> None:
    """So list and watch are all the verbs there are."""
    client = (ROOT / "exporter/schedulers/kubernetes/api.py").read_text()
    assert set(re.findall(r"client\.(\w+)\(", client)) == {"get", "stream"}
    assert re.findall(r"client\.stream\(\"(\w+)\"", client) == ["GET"]


@pytest.mark.parametrize("name", ["kubelet-only", "processes", "hardened"])
def test_who_asks_no_api_server_has_no_role(name: str) -> None:
    assert of_kind(environment(name), "ClusterRole", "ClusterRoleBinding") == []
    assert environ(environment(name)).get("GPU_EFFICIENCY_KUBERNETES_API_URL", "") == ""


def test_further_rules_have_a_role_even_without_the_api() -> None:
    rule = {"apiGroups": ["a.b"], "resources": ["c"], "verbs": ["use"]}
    found = manifests(IMAGE | {"scheduler": "processes", "rbac": {"extraRules": [rule]}})
    assert the(found, "ClusterRole")["rules"] == [rule]
    assert the(found, "ClusterRoleBinding")["subjects"][0]["name"] == the(found, "ServiceAccount")["metadata"]["name"]
    assert _rules(environment("openshift")) > _rules(environment("default"))


def test_a_role_of_two_releases_of_one_name_is_two() -> None:
    roles = [m["metadata"]["name"] for m in of_kind(environment("default"), "ClusterRole")]
    assert roles == ["gpus:gpu-efficiency"]


def test_the_kubelets_socket_is_mounted_where_the_daemon_looks_for_it() -> None:
    socket = Path(load(None, environ={}).kubernetes.pod_resources_socket)
    (mount,) = [m for m in container(environment("bare"))["volumeMounts"] if m["name"] == "pod-resources"]
    assert mount["mountPath"] == str(socket.parent)


def test_the_pause_file_is_where_the_daemon_looks_for_it() -> None:
    folder = Path(load(None, environ={}).sampling.pause_file).parent
    (mount,) = [m for m in container(environment("default"))["volumeMounts"] if m["name"] == "pause"]
    assert mount["mountPath"] == str(folder)


def test_values_name_what_hardened_leaves_out() -> None:
    """The example is what docs point at: it must stay one of the files."""
    assert values_of("hardened")["scheduler"] == "processes"
