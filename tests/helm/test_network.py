"""Who may talk to the pods, and with whom they may."""

from typing import Any

import pytest

from tests.helm.rendering import IMAGE, environment, manifests, the, values_of


def _policy(name: str, ending: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = the(environment(name), "NetworkPolicy", ending)["spec"]
    return spec


def _ports(rule: dict[str, Any]) -> set[int]:
    return {port["port"] for port in rule["ports"]}


@pytest.mark.slow
def test_the_network_lets_in_whom_you_name_and_out_to_whom_it_asks() -> None:
    spec = _policy("dcgm-exporter")
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    named = values_of("dcgm-exporter")["networkPolicy"]["ingress"]["from"]
    assert spec["ingress"] == [{"ports": [{"port": "metrics", "protocol": "TCP"}], "from": named}]
    assert [_ports(rule) for rule in spec["egress"]] == [{53}, {443, 6443}, {9400}]
    assert [port["protocol"] for port in spec["egress"][0]["ports"]] == ["UDP", "TCP"]
    assert [_ports(rule) for rule in _policy("hardened")["egress"]] == [{53}, {5555}]
    assert "from" not in _policy("hardened")["ingress"][0]
    engines = _policy("workloads")["egress"]
    assert [_ports(rule) for rule in engines] == [{53}, {443}, {8000, 9000}]
    assert engines[1]["to"] == [{"ipBlock": {"cidr": "10.96.0.1/32"}}]
    assert [_ports(rule) for rule in _policy("everything", "-cluster")["egress"][:2]] == [{53}, {443, 6443}]
    extra = values_of("everything")["networkPolicy"]
    assert _policy("everything", "-ge")["egress"][-1] == extra["egress"]["extra"][0]
    assert _policy("everything", "-ge")["ingress"][-1] == extra["ingress"]["extra"][0]


@pytest.mark.parametrize(
    ("given", "port"),
    [
        ({"source": "dcgm-exporter", "dcgmExporterUrl": "http://a/metrics"}, 80),
        ({"source": "dcgm-exporter", "dcgmExporterUrl": "https://a.b/metrics"}, 443),
        ({"source": "dcgm-exporter", "dcgmExporterUrl": "http://$(NODE_IP):9400"}, 9400),
        ({"source": "dcgm-exporter", "dcgmExporterUrl": "http://[$(NODE_IP)]:9400/metrics"}, 9400),
        ({"source": "dcgm", "dcgm": {"address": "$(NODE_IP):5556"}}, 5556),
        ({"source": "dcgm", "dcgm": {"address": "[$(NODE_IP)]:5556"}}, 5556),
        ({"source": "dcgm", "dcgm": {"address": "unix:/run/dcgm"}}, None),
        ({"source": "nvml", "dcgmExporterUrl": "http://a:1/"}, None),
    ],
)
def test_the_port_of_whoever_is_asked_is_let_out(given: dict[str, Any], port: int | None) -> None:
    found = manifests(IMAGE | given | {"networkPolicy": {"enabled": True}, "kubernetes": {"api": False}})
    rules = the(found, "NetworkPolicy")["spec"]["egress"]
    assert [_ports(rule) for rule in rules] == ([] if port is None else [{53}, {port}])


def test_egress_can_be_left_alone() -> None:
    found = manifests(IMAGE | {"networkPolicy": {"enabled": True, "egress": {"enabled": False}}})
    spec = the(found, "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert "egress" not in spec
