"""Why this node takes no new work, in one word.

Owns the reading of a node's taints and conditions. Refuses taints that only some pods mind: an operator's own taint is
how GPU nodes are kept for GPU pods.

Sources: Kubernetes' "Taints and Tolerations" (the built-in taints) and "Node status"; the Cluster Autoscaler's FAQ for
the mark on a node about to be deleted.
"""

from exporter.schedulers.kubernetes.objects import Node

_TAINTS = {
    "node.kubernetes.io/out-of-service": "down",
    "node.cloudprovider.kubernetes.io/shutdown": "down",
    "ToBeDeletedByClusterAutoscaler": "draining",
    "node.kubernetes.io/unschedulable": "cordoned",
    "node.kubernetes.io/not-ready": "not_ready",
    "node.kubernetes.io/unreachable": "not_ready",
    "node.kubernetes.io/network-unavailable": "not_ready",
    "node.cloudprovider.kubernetes.io/uninitialized": "not_ready",
}
_ORDER = ("down", "draining", "cordoned", "not_ready")
"""What somebody decided comes before what happened to the node."""


def condition_of(node: Node | None) -> str:
    """One of CONDITIONS; empty for a node that takes work, and for one that nothing is known of."""
    if node is None:
        return ""
    found = {_TAINTS[taint.key] for taint in node.spec.taints or () if taint.key in _TAINTS}
    if node.spec.unschedulable:
        found.add("cordoned")
    if any(each.type == "Ready" and each.status != "True" for each in node.status.conditions or ()):
        found.add("not_ready")
    return next((word for word in _ORDER if word in found), "")
