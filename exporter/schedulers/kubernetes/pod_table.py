"""The kubelet's newest list of pods with GPUs, joined with what the API server knows of them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from msgspec import Struct

from exporter.core.model import SECOND, Owner
from exporter.schedulers.kubernetes.kubelet import ClaimResource, ContainerDevices, PodResources, is_gpu, is_virtual
from exporter.schedulers.kubernetes.objects import (
    Pod,
    gpu_groups,
    is_independent,
    owner_of,
    reserves_gpu,
    restarts_of,
    size_of,
)
from exporter.schedulers.kubernetes.requests import gpus_of_pod
from exporter.schedulers.kubernetes.vgpu import Assigned, Assignments, is_allocating
from exporter.schedulers.rules import Rules

PodName = tuple[str, str]
"""A pod's namespace and name."""


class GpuPod(Struct, frozen=True):
    """A pod that holds GPUs."""

    owner: Owner
    device_ids: tuple[str, ...]
    """Ids from device plugins, without virtual ones whose GPU is known."""
    assigned: tuple[str, ...] = ()
    """GPUs by annotations of HAMi's or Volcano's scheduler."""
    problem: str = ""
    """What of such annotations is not believed, and why."""
    claims: tuple[ClaimResource, ...] = ()
    started: int | None = None
    """When the kubelet admitted the pod and allocated its devices; Unix nanoseconds."""
    restarts: int = 0
    pods: int = 0
    """Least number of pods that work together; 0: unknown."""
    world_size: int = 0
    """Least number of GPUs of all these pods; 0: unknown."""
    group: str = ""
    """The pod's uid if it works independently of the job's other pods."""


class PodTable:
    """The kubelet's newest list, and what is known of the pods on it."""

    def __init__(self, rules: Rules, resources: tuple[str, ...], *, exported: Iterable[str] = ()) -> None:
        """`resources` are patterns of the resource names of GPUs, `exported` keys of labels that owners keep."""
        self._rules, self._resources, self._exported = rules, resources, tuple(dict.fromkeys(exported))
        self._listed: tuple[PodResources, ...] = ()
        self._known: dict[PodName, Pod] = {}
        self._owners: dict[PodName, tuple[Pod | None, Owner]] = {}
        self._admitted: frozenset[PodName] = frozenset()
        """Pods on the list that had been allocated their devices before it."""
        self._assignments = Assignments(resources)
        self._ended: set[str] = set()
        """Uids of pods that ended and left the list: another pod may have their name now."""

    def update_rules(self, rules: Rules) -> None:
        """Replace the rules, also for known pods."""
        self._rules = rules
        self._owners = {name: (pod, self._read_owner(name, pod)) for name, (pod, _) in self._owners.items()}

    def with_gpus(self, held: Iterable[PodResources]) -> tuple[PodResources, ...]:
        """Return the pods of a list that hold GPUs, with their other devices removed."""
        ours = (
            PodResources(h.namespace, h.name, self._gpu_devices(h.devices), tuple(filter(is_gpu, h.claims)))
            for h in held
        )
        return tuple(each for each in ours if each.devices or each.claims)

    def count_devices(self, offered: Iterable[ContainerDevices]) -> Counter[str]:
        """Return the number of devices by GPU resource."""
        counts = Counter[str]()
        for devices in self._gpu_devices(offered):
            counts[devices.resource] += len(devices.ids)
        return counts

    def unknown_pods(self, holding: Iterable[PodResources], api_pods: Mapping[PodName, Pod]) -> set[PodName]:
        """Return the new pods on a list of which the API server has not reported all that matters yet."""
        new = {each.key for each in holding} - self._owners.keys()
        allocating = {name for name in new & api_pods.keys() if is_allocating(api_pods[name])}
        return new - self._known.keys() - api_pods.keys() | allocating

    def missing(self, listed: Iterable[PodResources], api_pods: Mapping[PodName, Pod] | None) -> list[PodName]:
        """Return known pods missing from the list, except those that the API server (if live) reports as ended."""
        gone = {each.key for each in self._listed} - {each.key for each in listed}
        pods = self._known if api_pods is None else api_pods
        return sorted(name for name in gone if not (pods[name].terminal if name in pods else api_pods is not None))

    def replace_list(
        self,
        holding: tuple[PodResources, ...],
        *,
        listed: Iterable[PodResources],
        admitted: Iterable[PodName],
        silent: bool,
    ) -> None:
        """Replace the list, before which the pods in `admitted` had been allocated their devices.

        `silent`: the API server does not report what became of pods that left the list.
        """
        names = {each.key for each in listed}
        self._admitted = frozenset(admitted) & names
        if silent:
            self._ended |= {p.metadata.uid for name, p in self._known.items() if p.terminal and name not in names}
        self._listed = holding
        self._known = {name: pod for name, pod in self._known.items() if name in names}
        self._assignments.keep({pod.metadata.uid for pod in self._known.values()})
        self._owners = {name: known for name, known in self._owners.items() if name in names}

    def gpu_pods(self, api_pods: Mapping[PodName, Pod]) -> tuple[GpuPod, ...]:
        """Return the pods that hold GPUs now."""
        self._ended &= {pod.metadata.uid for pod in api_pods.values()}
        self._known |= {name: pod for name, pod in api_pods.items() if pod.metadata.uid not in self._ended}
        return tuple(
            self._gpu_pod(name, pod, each)
            for each in self._listed
            for name, pod in self._users_of(each)
            if pod is None or not pod.terminal
        )

    def claimed(self) -> frozenset[tuple[str, str]]:
        """Return pool and name of the DRA devices that the pods on the list hold."""
        return frozenset((claim.pool, claim.device) for held in self._listed for claim in held.claims)

    def unlisted(self) -> dict[PodName, Counter[str]]:
        """Return the GPUs that pods hold and the kubelet does not list, by pod and resource.

        They are those of ordinary init containers beyond what the other containers have: reserved until the pod ends
        (kubernetes#71312), but on no list (kubernetes#126765).
        """
        listed = {each.key: each for each in self._listed}
        found = {name: self._unlisted_of(pod, listed.get(name)) for name, pod in self._known.items()}
        return {name: gpus for name, gpus in found.items() if gpus and name in self._admitted}

    def _unlisted_of(self, pod: Pod, listed: PodResources | None) -> Counter[str]:
        if pod.terminal or pod.status.start_time is None:
            return Counter()
        try:
            gpus = gpus_of_pod(pod, self._resources)
        except ValueError:  # a quantity that is no whole number, which no API server accepts
            return Counter()
        if listed is None:
            return gpus
        if listed.claims or any(is_virtual(name) for devices in listed.devices for name in devices.ids):
            return Counter()  # requested by a resource's name, and given by a DRA driver or by an annotation
        return gpus - self.count_devices(listed.devices)

    def jobs(self) -> dict[str, str]:
        """Return job ids by uid of the pods that hold GPUs."""
        known = ((self._known.get(name), owner) for name, (_, owner) in self._owners.items())
        return {pod.metadata.uid: owner.job_id for pod, owner in known if pod is not None}

    def _gpu_devices(self, devices: Iterable[ContainerDevices]) -> tuple[ContainerDevices, ...]:
        return tuple(d for d in devices if any(fnmatchcase(d.resource, name) for name in self._resources))

    def _users_of(self, held: PodResources) -> list[tuple[PodName, Pod | None]]:
        """Return the pod itself; the pods that share its GPU, if there are any and it only reserves it for them."""
        pod = self._known.get(held.key)
        if pod is None or not reserves_gpu(pod):
            return [(held.key, pod)]
        groups = gpu_groups(pod)
        others = ((name, other) for name, other in self._known.items() if not (other.terminal or reserves_gpu(other)))
        return [(name, other) for name, other in others if gpu_groups(other) & groups] or [(held.key, pod)]

    def _gpu_pod(self, name: PodName, pod: Pod | None, held: PodResources) -> GpuPod:
        pods, world_size = size_of(pod)
        begun = pod.status.start_time if pod is not None else None
        assigned = self._assignments.of(pod, held.devices) if pod is not None else Assigned()
        ids = (device for devices in held.devices for device in devices.ids)
        return GpuPod(
            owner=self._owner(name, pod),
            device_ids=tuple(device for device in ids if not (assigned.gpus and is_virtual(device))),
            assigned=assigned.gpus,
            problem=assigned.problem,
            claims=held.claims,
            started=round(begun.timestamp()) * SECOND if begun is not None else None,
            restarts=restarts_of(pod, held.containers if name == held.key else None),
            pods=pods,
            world_size=world_size,
            group=pod.metadata.uid if pod is not None and is_independent(pod) else "",
        )

    def _owner(self, name: PodName, pod: Pod | None) -> Owner:
        """Apply the rules once per version of the pod."""
        before = self._owners.get(name)
        if before is None or before[0] is not pod:
            before = self._owners[name] = (pod, self._read_owner(name, pod))
        return before[1]

    def _read_owner(self, name: PodName, pod: Pod | None) -> Owner:
        return owner_of(*name, pod, self._rules, exported=self._exported)
