"""Scraping, rules, dashboards and the network: what Prometheus and Grafana get is what the project's own files say."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart, package
from helm_python.errors import HelmError

from tests.alerts import packs
from tests.helm.rendering import (
    CHART,
    ENVIRONMENTS,
    IMAGE,
    ROOT,
    Manifest,
    chart,
    container,
    environ,
    environment,
    manifests,
    of_kind,
    texts,
    the,
    values_of,
)

ALERTS = sorted((ROOT / "alerts").glob("*.yaml"))
BOARDS = sorted((ROOT / "dashboards").glob("*.json"))
MIB = 1 << 20
LEAST_MARGIN = 0.35
"""Of the release's Secret left free with everything on; measured: 45 %."""


def _endpoints(found: tuple[Manifest, ...] | list[Manifest]) -> dict[str, dict[str, Any]]:
    """Port's name -> endpoint, of monitors of either kind."""
    specs = [m["spec"] for m in of_kind(found, "PodMonitor", "ServiceMonitor")]
    return {e["port"]: e for s in specs for e in s.get("podMetricsEndpoints", s.get("endpoints"))}


@pytest.mark.slow
def test_a_target_is_named_after_its_node_and_scraped_as_it_speaks() -> None:
    monitored = [name for name in ENVIRONMENTS if of_kind(environment(name), "PodMonitor", "ServiceMonitor")]
    assert len(monitored) > 2
    for name in monitored:
        _check_targets(name)


def _check_targets(name: str) -> None:
    found, endpoints = environment(name), _endpoints(environment(name))
    assert endpoints["metrics"]["relabelings"][0] == {
        "sourceLabels": ["__meta_kubernetes_pod_node_name"],
        "targetLabel": "instance",
    }
    # Not the pod's address: the rules would take it for another scheduler's after each upgrade.
    for deployment in of_kind(found, "Deployment"):
        name = deployment["metadata"]["name"]
        assert endpoints["cluster"]["relabelings"][0] == {"targetLabel": "instance", "replacement": name}
    probes = [container(found)[p] for p in ("livenessProbe", "readinessProbe")]
    tls = "GPU_EFFICIENCY_WEB_CONFIG_FILE" in environ(found)
    for endpoint in endpoints.values():
        assert endpoint["path"] == "/metrics"
        assert endpoint["honorLabels"] is False
        assert endpoint["scheme"] == ("https" if tls else "http")
        assert ("tlsConfig" in endpoint) is tls
        assert tls is any("tcpSocket" in p or p["httpGet"].get("scheme") == "HTTPS" for p in probes)
    assert ("cluster" in endpoints) is bool(of_kind(found, "Deployment"))


def test_no_label_of_ours_is_one_of_prometheus_own() -> None:
    """So honorLabels: false renames nothing."""
    used = set(re.findall(r"\b([a-z_]+)=\"", (ROOT / "tests/golden/demo/metrics.prom").read_text()))
    assert len(used) >= 5
    assert not used & {"job", "instance", "namespace", "pod", "container", "service", "endpoint"}


def test_a_certificate_of_the_charts_is_trusted_for_the_services_name() -> None:
    for name in ("tls-basic-auth", "everything", "hardened"):
        secret = values_of(name)["web"]["tlsSecret"]
        for endpoint in _endpoints(environment(name)).values():
            assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": secret, "key": "ca.crt"}}
            service = the(environment(name), "Service", "gpu-efficiency" if name != "everything" else "-ge")["metadata"]
            assert endpoint["tlsConfig"]["serverName"] == f"{service['name']}.{service['namespace']}.svc"


def test_who_names_whom_to_trust_is_believed() -> None:
    given = values_of("mtls-own")
    told = given["podMonitor"]["tlsConfig"]
    assert _endpoints(environment("mtls-own"))["metrics"]["tlsConfig"] == told | {
        "ca": {"secret": {"name": "gpu-efficiency-tls", "key": "ca.crt"}}
    }
    given["podMonitor"]["tlsConfig"] = told | {"insecureSkipVerify": True}
    assert "ca" not in _endpoints(manifests(given))["metrics"]["tlsConfig"]
    ours = {"configMap": {"name": "company-ca", "key": "ca.pem"}}
    given["podMonitor"]["tlsConfig"] = told | {"ca": ours}
    assert _endpoints(manifests(given))["metrics"]["tlsConfig"]["ca"] == ours


def test_limits_and_relabelings_are_passed_on() -> None:
    found, given = environment("everything"), values_of("everything")["podMonitor"]
    for monitor in of_kind(found, "PodMonitor"):
        assert (monitor["spec"]["sampleLimit"], monitor["spec"]["labelLimit"]) == (20000, 40)
    for endpoint in _endpoints(found).values():
        assert (endpoint["interval"], endpoint["scrapeTimeout"]) == ("15s", "10s")
        assert endpoint["basicAuth"] == given["basicAuth"]
        assert endpoint["metricRelabelings"] == given["metricRelabelings"]
        assert endpoint["relabelings"][-1] == given["relabelings"][0]
        assert len(endpoint["relabelings"]) == 2
    assert not {"sampleLimit", "labelLimit"} & set(the(environment("gke"), "PodMonitor")["spec"])


def _rules(found: tuple[Manifest, ...] | list[Manifest]) -> dict[str, Any]:
    """Name of each file -> its groups, as in alerts/."""
    return {m["metadata"]["name"]: m["spec"]["groups"] for m in of_kind(found, "PrometheusRule")}


def test_rules_are_those_of_the_project() -> None:
    """But for anything overridden, word for word."""
    rendered = _rules(environment("gpu-operator"))
    assert rendered == {f"gpu-efficiency-{p.stem}": list(packs.groups()[p.name]) for p in ALERTS}


@pytest.mark.slow
def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    with_rules = [name for name in ENVIRONMENTS if of_kind(environment(name), "PrometheusRule")]
    assert len(with_rules) >= 2
    texts = {
        yaml.dump(m["spec"], Dumper=yaml.CSafeDumper)
        for name in with_rules
        for m in of_kind(environment(name), "PrometheusRule")
    }
    files = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for file, text in zip(files, sorted(texts), strict=True):
        file.write_text(text)
    assert len(files) >= 10
    checked = subprocess.run(["promtool", "check", "rules", *files], check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _alerts(found: tuple[Manifest, ...] | list[Manifest]) -> dict[str, dict[str, Any]]:
    return {r["alert"]: r for groups in _rules(found).values() for g in groups for r in g["rules"] if "alert" in r}


def _with_rules(**rules: Any) -> list[Manifest]:
    return manifests(IMAGE | {"rules": {"enabled": True} | rules})


def test_every_alert_can_be_overridden_and_nothing_else_changes() -> None:
    before = _alerts(environment("gpu-operator"))
    own = {
        "for": "7m", "keepFiringFor": "8m", "severity": "info", "expr": "vector(1)",
        "labels": {"routed": "x"}, "annotations": {"note": "y"},
    }  # fmt: skip
    after = _alerts(_with_rules(alerts=dict.fromkeys(before, own)))
    for name, rule in before.items():
        assert after[name] == rule | {
            "for": "7m", "keep_firing_for": "8m", "expr": "vector(1)",
            "labels": rule["labels"] | {"severity": "info", "routed": "x"},
            "annotations": rule["annotations"] | {"note": "y"},
        }, name  # fmt: skip


def test_an_override_of_one_alert_is_of_that_one_alone() -> None:
    before, after = (
        _alerts(environment("gpu-operator")),
        _alerts(_with_rules(alerts={"GPUEfficiencyGPULost": {"for": "9m"}})),
    )
    assert {name for name in before if before[name] != after[name]} == {"GPUEfficiencyGPULost"}
    assert after["GPUEfficiencyGPULost"]["for"] == "9m"


def test_an_alert_and_a_group_can_be_left_out() -> None:
    found = environment("everything")
    assert set(_alerts(environment("gpu-operator"))) - set(_alerts(found)) == {"GPUEfficiencyGPUZombie"}
    groups = {g["name"]: g for groups in _rules(found).values() for g in groups}
    assert "gpu-efficiency-owners" not in groups
    assert groups["gpu-efficiency-gpu-alerts"]["interval"] == "1m"
    every = {name: {"enabled": False} for name in _alerts(environment("gpu-operator"))}
    left = _rules(_with_rules(alerts=every))
    assert "gpu-efficiency-gpus" not in left, "a group, and an object, without a rule is not made"
    assert [r for groups in left.values() for g in groups for r in g["rules"] if "alert" in r] == []


def test_labels_of_all_alerts_yield_to_those_of_one() -> None:
    rules = {
        "alertLabels": {"env": "prod", "team": "sre"},
        "alerts": {"GPUEfficiencyGPULost": {"labels": {"team": "hardware"}}},
    }
    after = _alerts(_with_rules(**rules))
    assert {a["labels"]["env"] for a in after.values()} == {"prod"}
    assert {n for n, a in after.items() if a["labels"]["team"] != "sre"} == {"GPUEfficiencyGPULost"}
    assert after["GPUEfficiencyGPULost"]["labels"]["team"] == "hardware"


def test_links_of_alerts_lead_to_your_own_pages() -> None:
    before, after = _alerts(environment("gpu-operator")), _alerts(environment("grafana-operator"))
    for name, rule in after.items():
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example/runbooks/{name}.md"
        assert (ROOT / before[name]["annotations"]["runbook_url"]).is_file()
        path = before[name]["annotations"]["dashboard_url"]
        assert re.match(r"(\{\{ if [^}]+\}\})?/d/gpu-efficiency-", path)
        assert rule["annotations"]["dashboard_url"] == f"https://grafana.example{path}"
    own = {"annotations": {"runbook_url": "https://x.example/1"}}
    kept = _alerts(_with_rules(runbookBaseUrl="https://wiki.example/", alerts={"GPUEfficiencyGPULost": own}))
    assert kept["GPUEfficiencyGPULost"]["annotations"]["runbook_url"] == "https://x.example/1"
    assert (
        kept["GPUEfficiencyGPUZombie"]["annotations"]["runbook_url"] == "https://wiki.example/GPUEfficiencyGPUZombie.md"
    )


def _boards(found: tuple[Manifest, ...] | list[Manifest]) -> dict[str, Any]:
    maps = [m for m in of_kind(found, "ConfigMap") if "-dashboard-" in m["metadata"]["name"]]
    return {key: json.loads(text) for m in maps for key, text in m["data"].items()}


def test_dashboards_are_those_of_the_project() -> None:
    assert _boards(environment("gpu-operator")) == {p.name: json.loads(p.read_text()) for p in BOARDS}
    left_out = {p.name for p in BOARDS} - set(_boards(environment("grafana-operator")))
    assert left_out == {"gpu-efficiency-chargeback.json"}


def test_a_board_is_one_configmap_that_the_sidecar_finds() -> None:
    maps = of_kind(environment("gpu-operator"), "ConfigMap")
    assert len(maps) == len(BOARDS)
    for one in maps:
        assert len(one["data"]) == 1
        assert len(json.dumps(one).encode()) < MIB / 2
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "GPU"}
        assert one["metadata"]["namespace"] == "monitoring"


def test_the_grafana_operator_finds_the_configmap_of_each_board() -> None:
    found = environment("grafana-operator")
    maps = {m["metadata"]["name"]: m for m in of_kind(found, "ConfigMap")}
    objects = of_kind(found, "GrafanaDashboard")
    assert len(objects) == len(maps) == len(BOARDS) - 1
    for one in objects:
        ref, target = one["spec"]["configMapRef"], maps[one["spec"]["configMapRef"]["name"]]
        assert list(target["data"]) == [ref["key"]]
        assert target["metadata"]["namespace"] == one["metadata"]["namespace"] == "observability"
        assert "grafana_dashboard" not in target["metadata"]["labels"]
        assert one["spec"]["instanceSelector"] == {"matchLabels": {"dashboards": "grafana"}}
        assert (one["spec"]["folder"], one["spec"]["resyncPeriod"]) == ("GPU", "10m")
        assert one["spec"]["allowCrossNamespaceImport"] is True


@pytest.mark.parametrize(("key", "kind"), [("podMonitor", "PodMonitor"), ("serviceMonitor", "ServiceMonitor")])
def test_labels_of_pods_get_into_their_series(key: str, kind: str) -> None:
    found = manifests(IMAGE | {key: {"enabled": True, "podTargetLabels": ["team"]}})
    assert [each["spec"]["podTargetLabels"] for each in of_kind(found, kind)] == [["team"]]
    assert all(
        "podTargetLabels" not in each["spec"] for each in of_kind(manifests(IMAGE | {key: {"enabled": True}}), kind)
    )


def test_the_chart_links_every_file_of_rules_and_boards() -> None:
    """Links, so that there is one copy; Helm follows them."""
    for folder, files in (("alerts", ALERTS), ("dashboards", BOARDS)):
        links = sorted((CHART / "files" / folder).iterdir())
        assert [link.name for link in links] == [f.name for f in files]
        assert all(link.is_symlink() and not link.readlink().is_absolute() for link in links)
        assert [link.resolve() for link in links] == files


@pytest.mark.parametrize("left", ["nothing", "the link's text"])
@pytest.mark.parametrize("lost", ["alerts", "dashboards", "defaults.yaml"])
def test_a_copy_that_lost_its_links_is_refused_and_not_without_rules(lost: str, left: str, tmp_path: Path) -> None:
    """As tools that skip links leave it, and Git where core.symlinks is false."""
    copy = tmp_path / "gpu-efficiency"
    shutil.copytree(CHART, copy)
    found = copy / "files" / lost
    for file in [found] if found.is_file() else list(found.iterdir()):
        target = (CHART / file.relative_to(copy)).readlink()
        file.unlink()
        if left != "nothing":
            file.write_text(f"{target}")
    values = IMAGE | {"rules": {"enabled": True}, "dashboards": {"enabled": True}}
    with Chart.load(copy) as broken, pytest.raises(HelmError, match=f"files/{lost}.* lacks them"):
        manifests(values, of=broken)


def test_a_package_holds_the_files_themselves_and_nothing_else(tmp_path: Path) -> None:
    """Whoever installs from it has no alerts/ beside him."""
    archive = package(CHART, destination=tmp_path)
    with tarfile.open(archive) as tar:
        names = {m.name.removeprefix("gpu-efficiency/") for m in tar if m.isfile()}
        assert not any(m.issym() or m.islnk() for m in tar)
    here = {p.relative_to(CHART).as_posix() for p in CHART.rglob("*") if p.is_file()}
    assert names == here - {".helmignore"} or names == here
    with Chart.load(archive) as packed:
        assert texts(values_of("everything"), of=packed) == texts(values_of("everything"))


def _release(values: dict[str, Any]) -> bytes:
    """What Helm stores of a release: its JSON, gzipped, as base64 (pkg/storage/driver/util.go of Helm)."""

    def files(those: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"name": f["name"], "data": base64.b64encode(f["data"].encode()).decode()} for f in those]

    held = chart()
    release = {
        "name": "gpu-efficiency",
        "info": {"status": "deployed", "notes": texts(values)["NOTES.txt"]},
        "chart": {
            "metadata": held.metadata,
            "templates": files(held.templates),
            "values": held.values,
            "schema": base64.b64encode(json.dumps(held.schema).encode()).decode(),
            "files": files(held.files),
        },
        "config": values,
        "manifest": "\n---\n".join(texts(values).values()),
        "version": 1,
        "namespace": "gpus",
    }
    return base64.b64encode(gzip.compress(json.dumps(release).encode(), 9))


@pytest.mark.slow
def test_a_release_with_everything_fits_its_secret() -> None:
    """One MiB is what the API server takes; most of this is the files, which every release holds."""
    size = len(_release(values_of("everything")))
    assert MIB / 10 < size < MIB * (1 - LEAST_MARGIN)
