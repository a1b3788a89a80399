"""Kubernetes' Pod Security Standards, as far as a pod template can break them.

Owns the checks of the levels "baseline" and "restricted"; a level is met when nothing is said. Refuses policies of
others (OpenShift, Kyverno). Source: kubernetes.io, "Pod Security Standards".
"""

from collections.abc import Iterator
from typing import Any

_BASELINE_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
_SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def baseline(spec: dict[str, Any]) -> list[str]:
    """What in a pod's spec the level "baseline" forbids."""
    return [*_of_the_pod(spec), *(broken for one in _containers(spec) for broken in _of_a_container(one))]


def restricted(spec: dict[str, Any]) -> list[str]:
    """What in a pod's spec the level "restricted" forbids, "baseline" included."""
    return [*baseline(spec), *_volumes(spec), *(broken for one in _containers(spec) for broken in _strict(spec, one))]


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _of_the_pod(spec: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in ("hostPID", "hostNetwork", "hostIPC") if spec.get(name))
    yield from (f"hostPath {v['hostPath']['path']}" for v in spec.get("volumes", ()) if "hostPath" in v)
    if spec.get("securityContext", {}).get("seLinuxOptions", {}).get("type", "") not in _SELINUX_TYPES:
        yield "seLinuxOptions"


def _of_a_container(one: dict[str, Any]) -> Iterator[str]:
    context = one.get("securityContext", {})
    if context.get("privileged"):
        yield "privileged"
    added = set(context.get("capabilities", {}).get("add", ())) - _BASELINE_CAPABILITIES
    yield from (f"capability {name}" for name in sorted(added))
    if context.get("seccompProfile", {}).get("type") == "Unconfined":
        yield "seccomp Unconfined"
    yield from (f"hostPort {port['hostPort']}" for port in one.get("ports", ()) if port.get("hostPort"))


def _volumes(spec: dict[str, Any]) -> Iterator[str]:
    for volume in spec.get("volumes", ()):
        if not set(volume) - {"name"} <= _RESTRICTED_VOLUMES:
            yield f"volume {volume['name']}"


def _strict(spec: dict[str, Any], one: dict[str, Any]) -> Iterator[str]:
    """What is said of a container wins over what is said of its pod."""
    context = spec.get("securityContext", {}) | one.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
        yield "seccomp"
    if "ALL" not in context.get("capabilities", {}).get("drop", ()):
        yield "capabilities not dropped"
    yield from (f"capability {n}" for n in context.get("capabilities", {}).get("add", ()) if n != "NET_BIND_SERVICE")
