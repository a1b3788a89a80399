"""Pods on a node without a kubelet: made through the API server, with the phases that a kubelet would report."""

import time
from typing import Any

from tests.kubernetes.cluster import NODE, instant
from tests.kubernetes.real.control_plane import ControlPlane, Json


def add_node(cluster: ControlPlane, name: str = NODE) -> None:
    """Create a node that is ready and takes pods."""
    cluster.create("/api/v1/nodes", {"metadata": {"name": name}})
    cluster.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}})


def pod_spec() -> Json:
    """Return the spec of a pod of this node."""
    return {
        "nodeName": NODE,
        "automountServiceAccountToken": False,
        "containers": [{"name": "main", "image": "registry/train:1", "command": ["python"], "args": ["train.py"]}],
    }


def pod_path(namespace: str, name: str = "") -> str:
    """Return the path of a pod, or of all pods of a namespace."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}".rstrip("/")


def add_pod(cluster: ControlPlane, namespace: str, name: str, **metadata: Any) -> Json:
    """Create a pod on this node and report it as running; return it."""
    cluster.create(pod_path(namespace), {"metadata": {"name": name} | metadata, "spec": pod_spec()})
    return report(cluster, namespace, name, "Running")


def report(cluster: ControlPlane, namespace: str, name: str, phase: str) -> Json:
    """Report a pod's phase, as its kubelet does."""
    status = {"phase": phase, "startTime": instant(time.time())}
    return cluster.patch(f"{pod_path(namespace, name)}/status", {"status": status})


def pods_of(cluster: ControlPlane, namespace: str) -> list[Json]:
    """Return the pods of a namespace that are not being deleted."""
    found: list[Json] = cluster.get(pod_path(namespace))["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
