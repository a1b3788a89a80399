"""The GPUs that a pod requests, whether it is there or a template. Source: Kubernetes' "Init Containers"."""

from collections import Counter
from fnmatch import fnmatchcase

from exporter.schedulers.kubernetes.objects import C, ContainerRequest, PodObject


def gpus_in(quantities: dict[str, str | int] | None, patterns: tuple[str, ...]) -> dict[str, int]:
    """Return the GPUs by resource name; extended resources are whole numbers. Raises ValueError."""
    found = {name: value for name, value in (quantities or {}).items() if any(fnmatchcase(name, p) for p in patterns)}
    return {name: count for name, count in ((name, int(value)) for name, value in found.items()) if count > 0}


def gpus_of_pod(pod: PodObject[C], patterns: tuple[str, ...]) -> Counter[str]:
    """Return the GPUs reserved for a pod: those of all parallel containers, or of one init container if more.

    Source: Kubernetes' "Init Containers", resource sharing within containers. Raises ValueError.
    """
    init = pod.spec.init_containers or ()
    together = [*(pod.spec.containers or ()), *(each for each in init if each.restart_policy == "Always")]
    counts = Counter[str]()
    for container in together:
        counts += Counter(requested_gpus(container, patterns))
    for container in init:
        counts |= Counter(requested_gpus(container, patterns))  # the larger count of each
    return counts


def requested_gpus(container: ContainerRequest, patterns: tuple[str, ...]) -> dict[str, int]:
    """Return the container's GPUs; a request equals its limit, and either may be omitted. Raises ValueError."""
    return gpus_in(container.resources.limits, patterns) | gpus_in(container.resources.requests, patterns)
