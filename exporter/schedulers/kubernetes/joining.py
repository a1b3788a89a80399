"""Who the pods are that hold devices: the kubelet's list joined with the API server's pods.

Owns what is remembered of a pod while the kubelet lists it: one that has had a name keeps it when the API server falls
silent. Refuses to take a pod off the kubelet's list, but for one in a terminal phase, which older kubelets list on
(kubernetes/kubernetes issues 119423, 132020).
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from msgspec import Struct

from exporter.core.model import SECOND, Owner
from exporter.schedulers.kubernetes.ids import is_gpu
from exporter.schedulers.kubernetes.objects import Pod
from exporter.schedulers.kubernetes.owners import owner_of, restarts_of, size_of
from exporter.schedulers.kubernetes.wire import Claimed, Devices, Held
from exporter.schedulers.rules import Rules

Name = tuple[str, str]
"""A pod's namespace and name."""


class Holder(Struct, frozen=True):
    """A pod that holds devices."""

    owner: Owner
    ids: tuple[str, ...]
    """Of device plugins."""
    claims: tuple[Claimed, ...] = ()
    started: int | None = None
    """When the kubelet took the pod in, which is when it gave it its devices; Unix nanoseconds."""
    restarts: int = 0
    pods: int = 0
    """That work together, at least."""
    world: int = 0
    """GPUs of them all, at least."""


class Joining:
    """The newest list and what is known of the pods on it."""

    def __init__(self, rules: Rules, resources: tuple[str, ...]) -> None:
        """`resources` are patterns of the names under which GPUs are given out."""
        self._rules, self._resources = rules, resources
        self._held: tuple[Held, ...] = ()
        self._known: dict[Name, Pod] = {}
        self._owners: dict[Name, tuple[Pod | None, Owner]] = {}
        self._ended: set[str] = set()
        """Uids of pods that ended and left the list: whoever has their name now is another pod."""

    def adopt(self, rules: Rules) -> None:
        """Judge by these from now on, and those who are known anew."""
        self._rules = rules
        self._owners = {name: (pod, owner_of(*name, pod, rules)) for name, (pod, _) in self._owners.items()}

    def holding(self, held: Iterable[Held]) -> tuple[Held, ...]:
        """Those of a list that hold GPUs, with nothing but those."""
        ours = (Held(h.namespace, h.name, self._gpus(h.devices), tuple(filter(is_gpu, h.claims))) for h in held)
        return tuple(each for each in ours if each.devices or each.claims)

    def counted(self, offered: Iterable[Devices]) -> dict[str, int]:
        """How many there are of each resource that is GPUs."""
        counts: dict[str, int] = {}
        for devices in self._gpus(offered):
            counts[devices.resource] = counts.get(devices.resource, 0) + len(devices.ids)
        return counts

    def strangers(self, holding: Iterable[Held], told: Mapping[Name, Pod]) -> set[Name]:
        """Holders that are new, and of which the API server has not told."""
        return {(h.namespace, h.name) for h in holding} - self._known.keys() - self._owners.keys() - told.keys()

    def missing(self, listed: Iterable[Held], told: Mapping[Name, Pod] | None) -> list[Name]:
        """Holders that are not on the list; without those that the API server, if it can be heard, says ended."""
        gone = {(h.namespace, h.name) for h in self._held} - {(h.namespace, h.name) for h in listed}
        pods = self._known if told is None else told
        return sorted(name for name in gone if not (pods[name].terminal if name in pods else told is not None))

    def take(self, holding: tuple[Held, ...], *, listed: Iterable[Held], silent: bool) -> None:
        """Take a new list; `silent`: the API server cannot say what became of the pods that left it."""
        names = {(each.namespace, each.name) for each in listed}
        if silent:
            self._ended |= {p.metadata.uid for name, p in self._known.items() if p.terminal and name not in names}
        self._held = holding
        self._known = {name: pod for name, pod in self._known.items() if name in names}
        self._owners = {name: known for name, known in self._owners.items() if name in names}

    def holders(self, told: Mapping[Name, Pod]) -> tuple[Holder, ...]:
        """Who holds devices now."""
        self._ended &= {pod.metadata.uid for pod in told.values()}
        self._known |= {name: pod for name, pod in told.items() if pod.metadata.uid not in self._ended}
        found = ((each, self._known.get((each.namespace, each.name))) for each in self._held)
        return tuple(self._holder(each, pod) for each, pod in found if pod is None or not pod.terminal)

    def jobs(self) -> dict[str, str]:
        """Job id by uid, of the pods that hold devices."""
        known = ((self._known.get(name), owner) for name, (_, owner) in self._owners.items())
        return {pod.metadata.uid: owner.job_id for pod, owner in known if pod is not None}

    def _gpus(self, devices: Iterable[Devices]) -> tuple[Devices, ...]:
        return tuple(d for d in devices if any(fnmatchcase(d.resource, name) for name in self._resources))

    def _holder(self, held: Held, pod: Pod | None) -> Holder:
        pods, world = size_of(pod)
        begun = pod.status.start_time if pod is not None else None
        return Holder(
            owner=self._owner((held.namespace, held.name), pod),
            ids=tuple(name for devices in held.devices for name in devices.ids),
            claims=held.claims,
            started=round(begun.timestamp()) * SECOND if begun is not None else None,
            restarts=restarts_of(pod),
            pods=pods,
            world=world,
        )

    def _owner(self, name: Name, pod: Pod | None) -> Owner:
        """Judged once for each version of the pod."""
        before = self._owners.get(name)
        if before is None or before[0] is not pod:
            before = self._owners[name] = (pod, owner_of(*name, pod, self._rules))
        return before[1]
