"""What cannot work is refused before anything is installed, with the place and the reason."""

import json
from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError

from exporter.registry import SCHEDULERS, SOURCES
from tests.helm.rendering import CHART, IMAGE, notes, texts

TLS = {"tls_server_config": {"cert_file": "/etc/gpu-efficiency/tls/tls.crt"}}
USERS = {"basic_auth_users": {"a": "$2b$12$x"}}
MUTUAL = {"tls_server_config": {"client_auth_type": "RequireAnyClientCert"}}
SCRAPED = {"enabled": True}
IN_PODS = [name for name, entry in SCHEDULERS.items() if entry.in_pods]


def _quoted(*names: str) -> str:
    return ", ".join(f"'{name}'" for name in names)


BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"sauce": "nvml"}, "additional properties 'sauce' not allowed"),
    ({"podMonitor": {"intervall": "1m"}}, "'/podMonitor': additional properties 'intervall'"),
    ({"dashboards": {"grafanaOperator": {"enable": True}}}, "'/dashboards/grafanaOperator': additional properties"),
    ({"web": {"config": {"tls_server": {}}}}, "'/web/config': additional properties 'tls_server'"),
    (
        {"rules": {"alerts": {"GPUEfficiencyGPUZombie": {"threshold": 3}}}},
        "'/rules/alerts/GPUEfficiencyGPUZombie': additional properties",
    ),
    ({"rules": {"alerts": {"GPUEfficiencyGPUZombie": {"for": "soon"}}}}, "'/rules/alerts/GPUEfficiencyGPUZombie/for'"),
    ({"source": "cuda"}, f"'/source': value must be one of {_quoted('auto', *SOURCES)}"),
    ({"scheduler": "slurm"}, f"'/scheduler': value must be one of {_quoted(*IN_PODS)}"),
    ({"dcgm": {"address": "nvidia-dcgm"}}, "'/dcgm/address'"),
    ({"dcgmExporterUrl": "localhost:9400"}, "'/dcgmExporterUrl'"),
    ({"port": 70000}, "'/port': maximum"),
    ({"port": "19400"}, "'/port': got string, want integer"),
    ({"kubernetes": {"api": "yes"}}, "'/kubernetes/api': got string, want boolean"),
    ({"pausePath": "run"}, "'/pausePath'"),
    ({"history": {"volume": "pvc"}}, "'/history/volume': value must be one of 'auto', 'hostPath', 'emptyDir', 'none'"),
    ({"history": {"path": "/"}}, "'/history/path'"),
    ({"history": {"sizeLimit": "much"}}, "'/history/sizeLimit'"),
    ({"receipts": {"kubernetes": "both"}}, "'/receipts/kubernetes'"),
    ({"updateStrategy": {"type": "Recreate"}}, "'/updateStrategy/type'"),
    ({"podMonitor": {"interval": "15"}}, "'/podMonitor/interval'"),
    ({"podMonitor": {"basicAuth": {"username": {"name": "a", "key": "b"}}}}, "'/podMonitor/basicAuth'"),
    ({"serviceMonitor": {"tlsConfig": {"caFile": "/a"}}}, "'/serviceMonitor/tlsConfig'"),
    ({"extraEnv": [{"nam": "a"}]}, "'/extraEnv/0': missing property 'name'"),
    ({"extraEnv": {"A": "b"}}, "'/extraEnv': got object, want array"),
    ({"config": []}, "'/config': got array, want object"),
    ({"image": {"repository": "a", "digest": "sha256:1"}}, "'/image/digest'"),
    ({"image": {"repository": "a", "pullPolicy": "Sometimes"}}, "'/image/pullPolicy'"),
    ({"networkPolicy": {"egress": {"apiServerCidrs": ["10.0.0.1"]}}}, "'/networkPolicy/egress/apiServerCidrs/0'"),
    ({"namespaceOverride": "Upper"}, "'/namespaceOverride'"),
    ({"livenessProbe": {"periodSeconds": 0}}, "'/livenessProbe/periodSeconds'"),
]

BY_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"image": {"repository": ""}}, "image.repository is empty and no image is published"),
    ({"source": "dcgm"}, "needs dcgm.address: nvidia-dcgm.gpu-operator.svc:5555"),
    ({"source": "dcgm-exporter"}, "needs dcgmExporterUrl, the same node's"),
    ({"dcgm": {"sysAdmin": True}}, "dcgm.sysAdmin is for an embedded engine only"),
    ({"source": "dcgm", "dcgm": {"address": "a:5555", "sysAdmin": True}}, "dcgm.sysAdmin is for an embedded engine"),
    ({"source": "nvml", "dcgm": {"address": "embedded", "sysAdmin": True}}, "dcgm.sysAdmin is for an embedded engine"),
    ({"serviceAccount": {"name": "default"}}, "set serviceAccount.create: false to use it"),
    ({"config": {"source": "nvml"}}, "config.source is set by the chart itself: set source instead"),
    ({"config": {"web": {"listen_address": ":1"}}}, "config.web.listen_address is set by the chart itself: set port"),
    ({"config": {"web": {"config_file": "/a"}}}, "set web.config or web.existingSecret instead"),
    ({"config": {"engines": {"enabled": True}}}, "set workloads.engines instead"),
    ({"config": {"history": {"file": "/a"}}}, "set history.volume instead"),
    ({"config": {"receipts": {"kubernetes": "event"}}}, "set receipts.kubernetes instead"),
    ({"receipts": {"kubernetes": "event"}, "kubernetes": {"api": False}}, "event needs scheduler: kubernetes and"),
    (
        {"receipts": {"kubernetes": "annotation"}, "scheduler": "processes", "pausePath": ""},
        "the API server is told, and nobody else",
    ),
    ({"config": {"kubernetes": {"node_name": "a"}}}, "set nothing, the pod's own node is taken instead"),
    ({"config": {"privacy": {"users": "hash"}}}, "needs privacy.existingSecret"),
    ({"web": {"config": TLS, "existingSecret": "a"}}, "are two web configurations: give one"),
    ({"web": {"tls": True}}, "tell what is in web.existingSecret, and there is none"),
    ({"web": {"existingSecret": "a", "clientCertificates": True}}, "web.clientCertificates needs web.tls"),
    ({"web": {"tlsSecret": "a"}}, "web.tlsSecret alone does nothing"),
    ({"web": {"tlsSecret": "a", "config": USERS}}, "web.tlsSecret is mounted and nothing reads it"),
    ({"podMonitor": SCRAPED, "serviceMonitor": SCRAPED}, "every figure would be there twice; enable one"),
    ({"serviceMonitor": SCRAPED, "service": {"enabled": False}}, "serviceMonitor.enabled needs service.enabled"),
    ({"podMonitor": SCRAPED, "web": {"config": USERS}}, "asks for a password and podMonitor.basicAuth has none"),
    ({"serviceMonitor": SCRAPED, "web": {"config": TLS}}, "serviceMonitor.tlsConfig says nothing of whom to trust"),
    ({"podMonitor": SCRAPED, "web": {"config": MUTUAL}}, "podMonitor.tlsConfig has none: give cert and keySecret"),
    (
        {"podMonitor": SCRAPED | {"namespace": "elsewhere"}, "web": {"config": TLS, "tlsSecret": "a"}},
        "podMonitor.tlsConfig says nothing of whom to trust",
    ),
    (
        {"podMonitor": SCRAPED | {"scheme": "http"}, "web": {"config": TLS, "tlsSecret": "a"}},
        "podMonitor.scheme: http, and the exporter speaks TLS",
    ),
    ({"cluster": {"enabled": True}, "kubernetes": {"api": False}}, "cluster.enabled needs scheduler: kubernetes"),
    ({"updateStrategy": {"rollingUpdate": {"maxSurge": "10%"}}}, "figures, which are counted twice"),
    ({"updateStrategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}, "set maxUnavailable instead"),
    ({"networkPolicy": {"enabled": True}, "hostNetwork": True}, "a NetworkPolicy does not hold for pods on the host"),
    ({"dashboards": {"enabled": True, "sidecar": {"enabled": False}}}, "nobody would read the ConfigMaps"),
    (
        {"dashboards": {"enabled": True, "exclude": ["fleet"]}},
        "there is no dashboard fleet; there are gpu-efficiency-c",
    ),
    (
        {"rules": {"enabled": True, "alerts": {"GPUZombi": {}}}},
        "there is no such alert; there are GPUEfficiencyConservationBroken,",
    ),
    ({"rules": {"enabled": True, "groups": {"days": {}}}}, "there is no such group; there are gpu-efficiency,"),
    (
        {"rules": {"enabled": True, "groups": {"gpu-efficiency": {"interval": "2m"}}}},
        "rules.groups.gpu-efficiency.interval: money and GPU-hours on the boards would be wrong",
    ),
    ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "resources.limits: nvidia.com/gpu would take a GPU away"),
    ({"cluster": {"resources": {"requests": {"nvidia.com/mig-1g.5gb": 1}}}}, "cluster.resources.requests: nvidia.com"),
    ({"podLabels": {"app.kubernetes.io/name": "a"}}, "podLabels: the chart sets app.kubernetes.io/name itself"),
    ({"commonLabels": {"a": "b"}, "rules": {"labels": {"a": "c"}}}, "rules.labels: commonLabels has a already"),
]


@pytest.mark.parametrize(("values", "said"), BY_SCHEMA + BY_WORDS, ids=lambda v: v if isinstance(v, str) else "")
def test_it_is_refused_with_the_place_and_the_reason(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError) as refusal:
        texts(IMAGE | values)
    assert said in str(refusal.value)


def _walk(schema: dict[str, Any], values: dict[str, Any], path: str) -> list[str]:
    """Paths at which values.yaml and its schema know different keys."""
    told = schema.get("properties", {})
    wrong = [f"{path}.{key}" for key in set(values) - set(told)] if schema.get("additionalProperties") is False else []
    for key, value in values.items():
        inner = _resolved(told.get(key, {}))
        wrong += _walk(inner, value, f"{path}.{key}") if isinstance(value, dict) and "properties" in inner else []
        if isinstance(value, dict) and value and inner.get("additionalProperties") is False:
            wrong += [f"{path}.{key}.{missing}" for missing in set(inner["properties"]) - set(value) - OPTIONAL]
    return wrong


OPTIONAL = {"claims", "maxSurge"}
"""Known to the schema, and not said in values.yaml: absent unless given."""


def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return found


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        found: Any = _schema()
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        schema = found
    return schema


@pytest.mark.parametrize("surge", [0, "0", "0%"])
def test_no_surge_is_what_kubernetes_does_by_default(surge: int | str) -> None:
    assert texts(IMAGE | {"updateStrategy": {"rollingUpdate": {"maxSurge": surge}}})
    deleting = {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {"maxSurge": 1}}}
    assert "maxSurge" not in texts(IMAGE | deleting)["daemonset.yaml"], "and OnDelete does not surge"


def test_the_schema_and_the_values_know_the_same_keys() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert _walk(_schema(), values, "") == []
    assert set(_schema()["properties"]) == set(values)


FREE = {"global", "config", "podSecurityContext", "securityContext", "tls_server_config", "http_server_config"}
FREE |= {"rate_limit", "nodeAffinity", "podAffinity", "podAntiAffinity", "valueFrom"}
"""Maps whose keys others define: the daemon, Kubernetes, Prometheus' exporters."""


def _open_maps(schema: Any, name: str = "") -> list[str]:
    """Maps that let any key through."""
    if isinstance(schema, list):
        return [found for one in schema for found in _open_maps(one, name)]
    if not isinstance(schema, dict):
        return []
    free = schema.get("type") == "object" and "additionalProperties" not in schema
    inner = [
        found
        for key, one in schema.items()
        for found in (
            [f for sub, deep in one.items() for f in _open_maps(deep, sub)]
            if key in {"properties", "definitions"}
            else _open_maps(one, name)
        )
    ]
    return [*([name] if free else []), *inner]


def test_no_map_takes_any_key_but_those_that_others_define() -> None:
    """`objects`, `claims` and `extraManifests` are lists of Kubernetes' own things."""
    assert set(_open_maps(_schema())) == FREE | {"objects", "claims", "extraManifests"}


@pytest.mark.parametrize(
    ("values", "said", "not_said"),
    [
        ({}, ["Nothing scrapes it yet", "source is auto", "port-forwards only", "privileged", "No prices"], []),
        ({"podMonitor": {"enabled": True, "labels": {"a": "b"}}}, [], ["Nothing scrapes it yet"]),
        ({"source": "nvml"}, [], ["source is auto"]),
        ({"dcgm": {"address": "a:5555"}}, ["takes the next source", "NVIDIA's bindings"], ["source is auto"]),
        ({"source": "dcgm", "dcgm": {"address": "a:5555"}}, ["reports it and ends"], ["no SYS_ADMIN"]),
        ({"source": "dcgm", "dcgm": {"address": "embedded"}}, ["has no SYS_ADMIN"], []),
        ({"source": "dcgm", "dcgm": {"address": "embedded", "sysAdmin": True}}, [], ["no SYS_ADMIN"]),
        ({"scheduler": "processes", "pausePath": ""}, ["does not see the node"], ["privileged", "cluster.enabled"]),
        ({"scheduler": "processes", "kubernetes": {"hostProcesses": True}}, ["privileged"], ["as root", "not see the"]),
        ({"workloads": {"engines": True}}, ["do nothing without kubernetes.hostProcesses"], []),
        ({"web": {"config": USERS}}, [], ["port-forwards only"]),
        ({"web": {"config": MUTUAL}}, ["asks for a client certificate", "https://localhost:19400/"], []),
        ({"config": {"web": {"open_page": True}}}, ["open to whoever can reach"], ["port-forwards only"]),
        ({"config": {"prices": [{"per_gpu_hour": 1}]}}, [], ["No prices"]),
        ({"rules": {"enabled": True}, "dashboards": {"enabled": True}}, [], ["No recording rules", "No dashboards"]),
        ({"port": 29400}, ["http://localhost:29400/", "port-forward daemonset/gpu-efficiency 29400"], ["19400"]),
        ({"nodeSelector": None}, ["One exporter on each node.\n"], ["that carries"]),
        (
            {"web": {"existingSecret": "s"}, "podMonitor": {"enabled": True}},
            ["Does s ask for a password?"],
            ["port-forwards only"],
        ),
        ({"service": {"enabled": False}}, ["Nothing scrapes it yet"], ["headless service"]),
    ],
)  # fmt: skip
def test_notes_tell_the_next_step(values: dict[str, Any], said: list[str], not_said: list[str]) -> None:
    told = notes(IMAGE | values)
    assert [text for text in said if text not in told] == []
    assert [text for text in not_said if text in told] == []


def test_every_value_has_a_type() -> None:
    def untyped(schema: dict[str, Any], path: str) -> list[str]:
        found = [] if {"type", "enum", "$ref"} & set(schema) else [path]
        return found + [
            bad for key, one in schema.get("properties", {}).items() for bad in untyped(one, f"{path}.{key}")
        ]

    whole = _schema()
    assert untyped(whole, "") == []
    assert [bad for name, one in whole["definitions"].items() for bad in untyped(one, name)] == []
