"""TLS, client certificates and passwords: probes, mounts and Secrets follow the web configuration."""

import base64
import json
import re

import msgspec
import pytest
import yaml

from exporter.web.web_config import MUTUAL_TLS, WebConfigFile, parse_web_config
from tests.helm.rendering import (
    CHART,
    ENVIRONMENTS,
    IMAGE,
    container,
    environ,
    environment,
    manifests,
    of_kind,
    pod,
    the,
    values_of,
)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_probes_are_answered(name: str) -> None:
    """At the port and in the scheme of the daemon; by a mere connection where a certificate would be asked for."""
    found, values = environment(name), values_of(name)
    web = values.get("web", {})
    tls = bool(web.get("tls") or web.get("config", {}).get("tls_server_config"))
    demanded = web.get("clientCertificates") or name == "mtls-own"
    for manifest in of_kind(found, "DaemonSet", "Deployment"):
        one = manifest["spec"]["template"]["spec"]["containers"][0]
        (port,) = one["ports"]
        for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            if demanded:
                assert one[probe]["tcpSocket"] == {"port": port["name"]}
                assert "httpGet" not in one[probe]
            else:
                scheme = {"scheme": "HTTPS"} if tls else {}
                assert one[probe]["httpGet"] == {"path": path, "port": port["name"]} | scheme


def test_the_daemon_serves_the_paths_of_the_probes() -> None:
    served = "".join(path.read_text() for path in (CHART.parents[1] / "exporter" / "web").glob("*.py"))
    assert {"/healthz", "/readyz", "/metrics"} <= set(re.findall(r"\"(/\w+)\"", served))


def test_the_web_configuration_is_the_one_of_the_values() -> None:
    found, web = environment("tls-basic-auth"), values_of("tls-basic-auth")["web"]["config"]
    secret = the(found, "Secret")
    assert yaml.safe_load(secret["stringData"]["web.yaml"]) == web
    for kind in ("DaemonSet", "Deployment"):
        volumes = {v["name"]: v for v in pod(found, kind)["spec"]["volumes"]}
        mounts = {m["name"]: m["mountPath"] for m in container(found, kind)["volumeMounts"]}
        assert volumes["web"]["secret"]["secretName"] == secret["metadata"]["name"]
        assert environ(found, kind)["GPU_EFFICIENCY_WEB_CONFIG_FILE"] == f"{mounts['web']}/web.yaml"
        assert web["tls_server_config"]["cert_file"] == f"{mounts['tls']}/tls.crt"
        assert volumes["tls"]["secret"]["secretName"] == "gpu-efficiency-tls"


@pytest.mark.parametrize("name", ["tls-basic-auth", "mtls-own", "everything"])
def test_the_daemon_takes_the_web_configuration(name: str) -> None:
    """By its own reader; whether probes have a certificate is told by the same word for both."""
    read = parse_web_config(the(environment(name), "Secret")["stringData"]["web.yaml"].encode())
    assert read.tls_server_config is not None
    mutual = read.tls_server_config.client_auth_type == MUTUAL_TLS
    assert ("tcpSocket" in container(environment(name))["livenessProbe"]) is mutual


def test_numbers_of_the_web_configuration_stay_whole() -> None:
    given = {"rate_limit": {"interval": "100ms", "burst": 1000000}, "http_server_config": {"http2": False}}
    read = parse_web_config(
        the(manifests(IMAGE | {"web": {"config": given}}), "Secret")["stringData"]["web.yaml"].encode()
    )
    assert read.rate_limit.burst == 1000000


def test_the_schema_knows_the_sections_of_the_web_configuration() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["web"]["properties"]["config"]
    assert set(schema["properties"]) == {field.name for field in msgspec.structs.fields(WebConfigFile)}


def test_a_secret_of_the_operators_is_mounted_as_it_is() -> None:
    found = environment("mtls")
    assert of_kind(found, "Secret") == []
    volumes = {v["name"]: v for v in pod(found)["spec"]["volumes"]}
    assert volumes["web"]["secret"]["secretName"] == "web"
    assert environ(found)["GPU_EFFICIENCY_WEB_CONFIG_FILE"].endswith("/web/config.yml")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_no_secret_is_in_the_environment_or_in_a_configmap(name: str) -> None:
    for manifest in environment(name):
        if manifest["kind"] != "Secret":
            text = msgspec.json.encode(manifest).decode()
            assert "$2b$12$" not in text
            assert base64.b64encode(b"$2b$12$").decode().rstrip("=") not in text
