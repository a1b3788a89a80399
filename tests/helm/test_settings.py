"""What the values say reaches the daemon: its file loads, its environment is known, its probes and pages are there."""

import json
import tomllib
from datetime import date
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
import yaml

from exporter import config as settings
from exporter.config import DEFAULT_PORT, Config, ConfigError, load
from tests.helm.rendering import (
    CHART,
    ENVIRONMENTS,
    IMAGE,
    RELEASE,
    Manifest,
    container,
    environ,
    environment,
    manifests,
    of_kind,
    pod,
    the,
    values_of,
)

PLACES = {"NODE_IP": "10.0.0.7", "GPU_EFFICIENCY_KUBERNETES_NODE_NAME": "gpu-7"}
"""What the downward API gives."""


def started(found: tuple[Manifest, ...] | list[Manifest], folder: Path, *, kind: str = "DaemonSet") -> Config:
    """The configuration that the container would have: its file, its environment with $(NODE_IP) put in."""
    named = {name: PLACES.get(name, value) for name, value in environ(found, kind).items()}
    said = {name: str(value).replace("$(NODE_IP)", PLACES["NODE_IP"]) for name, value in named.items()}
    args, path = container(found, kind)["args"], None
    if "--config" in args:
        path = folder / "config.toml"
        path.write_text(the(found, "ConfigMap", "-config")["data"]["config.toml"])
    return load(path, environ=said)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_daemon_takes_what_the_chart_gives(name: str, tmp_path: Path) -> None:
    found, values = environment(name), values_of(name)
    config = started(found, tmp_path)
    assert config.source == values.get("source", "auto")
    assert config.scheduler == values.get("scheduler", "kubernetes")
    assert config.web.listen_address == f":{values.get('port', DEFAULT_PORT)}"
    assert config.engines.enabled is values.get("workloads", {}).get("engines", False)
    assert config.dcgm.address == values.get("dcgm", {}).get("address", config.dcgm.address).replace(
        "$(NODE_IP)", "10.0.0.7"
    )
    for kind in [m["kind"] for m in of_kind(found, "Deployment")]:
        assert started(found, tmp_path, kind=kind).cluster.scheduler == "kubernetes"


def test_a_node_address_is_put_into_addresses(tmp_path: Path) -> None:
    assert started(environment("dcgm-exporter"), tmp_path).dcgm_exporter.url == "http://10.0.0.7:9400/metrics"
    names = [one["name"] for one in container(environment("dcgm-exporter"))["env"]]
    url = names.index("GPU_EFFICIENCY_DCGM_EXPORTER_URL")
    assert names.index("NODE_IP") < url, "Kubernetes expands what came before"


def test_the_address_of_a_node_with_ipv6_alone_is_in_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the comments show it: without them, neither of the two shows where the address ends."""
    monkeypatch.setitem(PLACES, "NODE_IP", "fd00::7")
    page, engine = "http://[$(NODE_IP)]:9400/metrics", "[$(NODE_IP)]:5555"
    comments = (CHART / "values.yaml").read_text()
    assert page in comments
    assert engine in comments
    found = manifests(IMAGE | {"source": "dcgm-exporter", "dcgmExporterUrl": page, "dcgm": {"address": engine}})
    config = started(found, tmp_path)
    url = httpx.URL(config.dcgm_exporter.url)
    assert (url.host, url.port, url.path) == ("fd00::7", 9400, "/metrics")
    assert config.dcgm.address == "[fd00::7]:5555", "which tests/sources/test_dcgm_examined.py connects to"


def test_the_file_means_what_the_values_say(tmp_path: Path) -> None:
    """Whole numbers among them, which Helm reads as fractions; a date, which it reads as text."""
    config = started(environment("everything"), tmp_path)
    assert config.inventory.expected_gpus == 8
    assert (config.policy.hang_seconds, config.policy.zombie_duty) == (600, 0.02)
    assert (config.policy.fatal_xids, config.policy.max_jobs) == ((48, 79), 100)
    assert config.policies()["NVIDIA L4"].hang_seconds == 900
    assert config.policies()["NVIDIA L4"].spin_power_share == 0.15
    assert (config.specs["NVIDIA H100 PCIe"].peak_flops, config.specs["NVIDIA H100 PCIe"].nvlink_domain) == (756e12, 2)
    assert [(p.per_gpu_hour, p.pool, p.valid_from) for p in config.prices] == [
        (2, "reserved", None),
        (2.5, "", date(2026, 10, 1)),
    ]
    assert config.exemptions[0].expires == date(2027, 3, 1)
    assert [rule.team for rule in config.workload.rules] == ["nlp", ""]
    assert config.workload.rules[1].zombie_seconds == 3600
    assert (config.privacy.users, config.privacy.key_file) == ("hash", "/etc/gpu-efficiency/privacy/privacy.key")
    assert config.web.config_file == "/etc/gpu-efficiency/web/web.yaml"
    assert config.sampling.interval_seconds == 2


@pytest.mark.parametrize(
    "given",
    [
        {"engines": {"ports": []}},
        {"engines": {"ports": [80]}},
        {"policy": {"clamp_excess": 0.5}},
        {"policy": {"clamp_excess": 0}},
        {"specs": {"B": {"peak_flops": 1e18}}},
        {"prices": [{"per_gpu_hour": 3, "model": 'a "b" \\ c'}]},
        {"policy_by_model": {"NVIDIA L4": {"fatal_xids": [1]}}},
        {"log": {"format": "json"}, "follow": [{"path": "/a/{job_id}"}]},
    ],
    ids="-".join,
)
def test_toml_keeps_every_kind_of_value(given: dict[str, Any], tmp_path: Path) -> None:
    found = manifests(IMAGE | {"config": given})
    read = tomllib.loads(the(found, "ConfigMap", "-config")["data"]["config.toml"])
    assert json.dumps(read, sort_keys=True) == json.dumps(given, sort_keys=True), "3 is not 3.0"
    started(found, tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"polcy": {}}, "polcy"),
        ({"policy": {"hang_secs": 1}}, "hang_secs"),
        ({"inventory": {"expected_gpus": 8.5}}, "expected_gpus"),
        ({"prices": [{"per_gpu_hour": "2"}]}, "per_gpu_hour"),
        ({"exemptions": [{"id": "a", "reason": "b", "expires": "soon", "user": "c"}]}, "expires"),
    ],
)
def test_what_the_daemon_does_not_know_it_refuses_by_name(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The chart lets config through; so the message is the daemon's own, in the log of a pod that does not start."""
    with pytest.raises(ConfigError, match=said):
        started(manifests(IMAGE | {"config": given}), tmp_path)


def test_the_chart_offers_what_the_daemon_has() -> None:
    offered = json.loads((CHART / "values.schema.json").read_text())["properties"]
    fields = {field.name: get_args(field.type) for field in msgspec.structs.fields(Config)}
    assert set(offered["source"]["enum"]) == set(fields["source"])
    assert set(offered["scheduler"]["enum"]) < set(fields["scheduler"])


def test_without_config_there_is_no_file() -> None:
    found = environment("default")
    assert of_kind(found, "ConfigMap") == []
    assert container(found)["args"] == ["serve"]


def _checksum(config: dict[str, Any], kind: str = "DaemonSet") -> str:
    found = manifests(IMAGE | {"config": {"log": {"level": "info"}} | config, "cluster": {"enabled": True}})
    return str(pod(found, kind)["metadata"]["annotations"]["checksum/config"])


SECTIONS: dict[str, dict[str, Any]] = {
    "workload": {"rules": [{"team": "a"}]},
    "exemptions": {},
    "prices": {},
    "energy": {"price_per_kwh": 1},
    "budget": {"idle_per_hour": 1},
    "policy": {"hang_seconds": 1},
    "policy_by_model": {"a": {"hang_seconds": 1}},
    "log": {"level": "debug"},
    "web": {"open_page": True},
    "privacy": {"users": "drop"},
    "sampling": {"interval_seconds": 2},
    "inventory": {"expected_gpus": 1},
    "dcgm": {"library": "/a"},
    "dcgm_exporter": {"hostname": "a"},
    "host": {"pool": "a"},
    "slurm": {"bin_dir": "/a"},
    "kubernetes": {"refresh_seconds": 5},
    "mapping_dir": {"path": "/a"},
    "cluster": {"refresh_seconds": 30},
    "reports": {"http": "127.0.0.1:1"},
    "follow": {},
    "engines": {"interval_seconds": 2},
    "hangs": {"enabled": False},
    "nccl": {"enabled": False},
    "history": {"keep_days": 30},
    "gateway": {"socket": "/a"},
    "otlp": {"endpoint": "http://a:4318/v1/metrics"},
    "receipts": {},
    "specs": {"a": {"peak_flops": 1e12}},
}
LISTS: dict[str, list[dict[str, Any]]] = {
    "exemptions": [{"id": "a", "reason": "b", "expires": "2027-01-01", "user": "c"}],
    "prices": [{"per_gpu_hour": 1}],
    "follow": [{"path": "/a"}],
}


@pytest.mark.slow
def test_only_what_the_daemon_does_not_take_up_restarts_it() -> None:
    """The list of the chart is the daemon's own: exporter.config.LIVE."""
    sections = {f.name for f in msgspec.structs.fields(Config)} - {"source", "scheduler"}
    assert sections == set(SECTIONS)
    plain = _checksum({})
    restarting = {name for name, given in SECTIONS.items() if _checksum({name: LISTS.get(name, given)}) != plain}
    assert sections - restarting == set(settings.LIVE)


@pytest.mark.slow
def test_the_cluster_restarts_for_what_it_reads() -> None:
    plain = _checksum({}, "Deployment")
    restarting = {n for n, given in SECTIONS.items() if _checksum({n: LISTS.get(n, given)}, "Deployment") != plain}
    assert restarting == {"cluster", "kubernetes", "log", "privacy", "web", "workload"}


def test_the_host_network_keeps_the_clusters_names() -> None:
    spec = pod(environment("host-network"))["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert container(environment("host-network"))["ports"] == [{"name": "metrics", "containerPort": 29400}]


def test_what_the_operator_adds_is_there() -> None:
    found = environment("everything")
    template, cluster = pod(found), pod(found, "Deployment")
    assert template["metadata"]["annotations"]["example.com/a"] == "b"
    assert template["metadata"]["labels"]["example.com/c"] == "d"
    assert cluster["metadata"]["annotations"]["example.com/a"] == "b"
    assert cluster["metadata"]["labels"]["example.com/c"] == "d"
    assert [c["name"] for c in template["spec"]["containers"]] == ["exporter", "beside"]
    assert container(found)["args"][-2:] == container(found, "Deployment")["args"][-2:] == ["--log.level", "debug"]
    assert template["spec"]["priorityClassName"] == "system-node-critical"
    assert cluster["spec"]["priorityClassName"] == "high"
    assert template["spec"]["imagePullSecrets"] == cluster["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert template["spec"]["terminationGracePeriodSeconds"] == 20
    assert "nodeAffinity" in template["spec"]["affinity"]
    assert container(found)["livenessProbe"]["failureThreshold"] == 5
    assert the(found, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 2, "maxSurge": 0}
    assert the(environment("bare"), "DaemonSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert all(m["metadata"]["labels"]["team"] == "infra" for m in found)
    assert the(found, "ServiceAccount", "e")["metadata"]["annotations"] == {"example.com/role": "reader"}
    assert {m["metadata"]["annotations"]["example.com/a"] for m in of_kind(found, "Service")} == {"b"}


def test_where_it_runs() -> None:
    """null takes a default away."""
    assert pod(environment("default"))["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod(environment("gke"))["spec"]["nodeSelector"] == {"cloud.google.com/gke-gpu": "true"}
    assert "nodeSelector" not in pod(environment("bare"))["spec"]
    assert pod(environment("eks"))["spec"]["runtimeClassName"] == "nvidia"
    cluster = pod(environment("eks"), "Deployment")["spec"]
    assert not {"nodeSelector", "tolerations", "runtimeClassName"} & set(cluster)
    assert pod(environment("default"))["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod(environment("aks"))["spec"]["tolerations"] == values_of("aks")["tolerations"]


def test_the_image_is_named_by_digest_before_tag_before_the_charts_version() -> None:
    assert container(environment("gpu-operator"))["image"].split("@")[1].startswith("sha256:0123")
    assert container(environment("gke"))["image"].endswith(":0.1.0")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(environment("default"))["image"].endswith(f":{version}")


@pytest.mark.parametrize(
    ("repository", "pulled"),
    [
        ("registry.example/team/gpu-efficiency", "mirror.example:5000/team/gpu-efficiency"),
        ("localhost/gpu-efficiency", "mirror.example:5000/gpu-efficiency"),
        ("team/gpu-efficiency", "mirror.example:5000/team/gpu-efficiency"),
    ],
)
def test_a_mirror_takes_the_place_of_the_registry(repository: str, pulled: str) -> None:
    values = {"image": {"repository": repository, "tag": "1"}, "global": {"imageRegistry": "mirror.example:5000"}}
    (daemonset,) = of_kind(manifests(values), "DaemonSet")
    assert {c["image"] for c in daemonset["spec"]["template"]["spec"]["containers"]} == {f"{pulled}:1"}


def test_the_exporter_displaces_no_job_unless_it_is_asked_to() -> None:
    """GKE refuses system-node-critical elsewhere than in kube-system, and a pod of it preempts training jobs."""
    for name in ("default", "gke", "eks", "aks"):
        assert "priorityClassName" not in pod(environment(name))["spec"]
    own: dict[str, Any] = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    own |= {"metadata": {"name": "gpu-efficiency"}, "value": 1_000_000, "preemptionPolicy": "Never"}
    found = manifests(IMAGE | {"priorityClassName": "gpu-efficiency", "extraManifests": [own]})
    assert pod(found)["spec"]["priorityClassName"] == "gpu-efficiency"
    (made,) = of_kind(found, "PriorityClass")
    assert (made["value"], made["preemptionPolicy"]) == (1_000_000, "Never")


def test_old_revisions_are_kept_as_asked_and_objects_of_ones_own_are_rendered() -> None:
    own = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-own"}}
    found = manifests(IMAGE | {"revisionHistoryLimit": 3, "extraManifests": [own, own | {"kind": "ConfigMap"}]})
    (daemonset,) = of_kind(found, "DaemonSet")
    assert daemonset["spec"]["revisionHistoryLimit"] == 3
    assert [each["metadata"]["name"] for each in of_kind(found, "Secret")] == [f"{RELEASE}-own"]
    assert f"{RELEASE}-own" in [each["metadata"]["name"] for each in of_kind(found, "ConfigMap")]


def test_the_cluster_is_one_and_never_two() -> None:
    """Two would count every interruption twice."""
    spec = the(environment("eks"), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_services_are_headless() -> None:
    """Each node has its own figures: an address that stands for all of them would mix them."""
    assert {m["spec"]["clusterIP"] for n in ENVIRONMENTS for m in of_kind(environment(n), "Service")} == {"None"}


def test_each_has_the_service_account_of_its_own_role() -> None:
    found = environment("eks")
    for kind, ending in (("DaemonSet", "efficiency"), ("Deployment", "-cluster")):
        binding = the(found, "ClusterRoleBinding", ending)
        assert [s["name"] for s in binding["subjects"]] == [pod(found, kind)["spec"]["serviceAccountName"]]
        assert binding["roleRef"]["name"] == the(found, "ClusterRole", ending)["metadata"]["name"]
