"""Kubernetes: the kubelet says which pod holds which GPU, the API server who the pod is and if the node takes work.

Owns the way from their words to allocations: device ids to UUIDs, pods to jobs, beginnings and ends. Refuses to guess:
an id that cannot be told is nobody's, with a fault beside it. Without the API server a pod is its namespace and name,
and neither its job nor its labels nor the node's condition are known.

A GPU is held from when the kubelet takes the pod in, before images are pulled, until the kubelet lists the pod no more
or it is in a terminal phase; a pod being deleted holds on. Replicas (time slicing, MPS) of one GPU are several owners
of it, a pod with two of them is one.
"""

import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from exporter.clock import Clock, SystemClock
from exporter.config import Config
from exporter.config import Kubernetes as Settings
from exporter.core.model import MS, Allocation, Device, Fault, Owner, Reading
from exporter.schedulers import Member, SchedulerError, Word
from exporter.schedulers.kubernetes.api import Access, Pace
from exporter.schedulers.kubernetes.ids import Boards
from exporter.schedulers.kubernetes.joining import Holder, Joining
from exporter.schedulers.kubernetes.kubelet import Kubelet
from exporter.schedulers.kubernetes.watching import Patience, State, Watching
from exporter.schedulers.members import Facts, Members
from exporter.schedulers.rules import Rules

log = logging.getLogger(__name__)
_POD = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?=[./]|$)", re.MULTILINE)
"""A pod's uid in a cgroup path, by either of the kubelet's cgroup drivers: with "-" (cgroupfs) or "_" (systemd)."""
_WORKING = 0.01
Key = tuple[str, str]
"""UUID and job id."""


class KubernetesScheduler:
    """The `Scheduler` of a node of a cluster."""

    name = "kubernetes"

    def __init__(self, watching: Watching, *, clock: Clock, proc: str | Path = "/proc") -> None:
        self.node = watching.node
        self._watching, self._clock, self._proc = watching, clock, proc
        self._members = Members(self._job_of, proc=proc)
        self._devices: tuple[Device, ...] = ()
        self._boards = Boards(())
        self._seen: State | None = None
        self._found: list[tuple[Holder, list[str]]] = []
        self._unknown = ""
        self._told: dict[Key, Allocation] = {}
        self._told_at: int | None = None
        self._before: int | None = None
        """When the kubelet was asked for the list before the newest."""
        self._orphans: frozenset[str] = frozenset()

    def look(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> Word | None:
        """See `Scheduler.look`: what was said last, and by when."""
        if not self._watching.alive:
            raise SchedulerError("scheduler kubernetes: its thread has ended: please report what the log says of it")
        state = self._watching.state
        if state is None:
            if self._watching.trouble:
                raise SchedulerError(f"scheduler kubernetes: {self._watching.trouble}")
            return None
        changed = self._find(state, tuple(devices))
        allocations = self._allocations(state, now) if changed else tuple(self._told.values())
        self._wake(readings)
        return Word(
            allocations=allocations,
            at=state.at,
            condition=state.condition,
            members=self._members.look(readings) if state.jobs else {},
            faults=(*state.faults, *self._refused()),
            unanswered_since=state.unanswered_since,
        )

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`: by the pod in the cgroup, which nobody in a container can write."""
        return self._members.of(pids)

    def adopt(self, rules: Rules) -> None:
        """See `Scheduler.adopt`: the thread that keeps the pods judges them anew, at once."""
        self._watching.adopt(rules)

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._watching.close()

    @property
    def alive(self) -> bool:
        """Whether kubelet and API server are still asked."""
        return self._watching.alive

    def _job_of(self, facts: Facts) -> str:
        uids = _POD.findall(facts.cgroup.replace(r"\x2d", "-"))
        jobs = self._seen.jobs if self._seen is not None else {}
        return next((jobs[uid] for uid in (found.replace("_", "-") for found in reversed(uids)) if uid in jobs), "")

    def _find(self, state: State, devices: tuple[Device, ...]) -> bool:
        """Say which GPUs the holders have, where either has changed; False: neither has."""
        if state is self._seen and devices == self._devices:
            return False
        if devices != self._devices:
            self._devices, self._boards = devices, Boards(devices, proc=self._proc)
        found = [(one, *self._boards.of(one.ids, one.claims, state.slices)) for one in state.holders]
        self._found = [(holder, uuids) for holder, uuids, _ in found]
        unknown = (f"{one.owner.namespace}/{one.owner.pod} holds {what}" for one, _, said in found for what in said)
        self._seen, self._unknown = state, "; ".join(unknown)
        return True

    def _refused(self) -> Iterator[Fault]:
        if self._unknown:
            yield Fault("scheduler_refused", f"devices that are nobody's therefore: {self._unknown}")
        while self._watching.refusals:
            yield Fault("scheduler_refused", self._watching.refusals.popleft())

    def _allocations(self, state: State, now: int) -> tuple[Allocation, ...]:
        """All that are held, and once, with its end, each that no longer is."""
        if self._told_at is None or state.at > self._told_at:
            self._before, self._told_at = self._told_at, state.at
        held = self._held(now)
        gone = [self._ended(self._told[key], held, now) for key in self._told if key not in held]
        self._told = held
        return (*held.values(), *gone)

    def _held(self, now: int) -> dict[Key, Allocation]:
        held: dict[Key, Allocation] = {}
        owners, sizes = self._owners(), self._sizes()
        for holder, uuids in self._found:
            owner = owners[holder.owner.job_id]
            for uuid in uuids:
                key = uuid, owner.job_id
                one = Allocation(uuid, owner, self._start(key, holder, now), None, sizes[owner.job_id], holder.restarts)
                held[key] = _merged(held.get(key), one)
        return held

    def _owners(self) -> dict[str, Owner]:
        """By job, as its first pod on this node has it: a job is told in one way on all its GPUs."""
        owners: dict[str, Owner] = {}
        for owner in sorted((holder.owner for holder, _ in self._found), key=lambda owner: owner.pod):
            owners.setdefault(owner.job_id, owner)
        return owners

    def _sizes(self) -> dict[str, int]:
        """GPUs of each whole job: those it has here, or more where its pods say so."""
        here: dict[str, set[str]] = {}
        least: dict[str, int] = {}
        for holder, uuids in self._found:
            job = holder.owner.job_id
            here.setdefault(job, set()).update(uuids)
            least[job] = max(least.get(job, 1), holder.pods * len(uuids), holder.world)
        return {job: max(least[job], len(uuids)) for job, uuids in here.items()}

    def _start(self, key: Key, holder: Holder, now: int) -> int:
        """When the kubelet gave the pod its devices, but after it listed them without this one; once told, it stays."""
        if key in self._told:
            return self._told[key].start
        begun = now if holder.started is None else now - max(0, self._clock.wall() - holder.started)
        return max(begun, self._before if self._before is not None else begun) // MS * MS

    def _ended(self, told: Allocation, held: Mapping[Key, Allocation], now: int) -> Allocation:
        """The end is when it is noticed, or when the next owner of the GPU began: one after another is not sharing."""
        next_ones = [held[key].start for key in held if key[0] == told.uuid and key not in self._told]
        return structs.replace(told, end=max(told.start, min([now, *next_ones])))

    def _wake(self, readings: Iterable[Reading]) -> None:
        """Have the kubelet asked at once when a GPU begins to work that nobody holds."""
        owned = {uuid for uuid, _ in self._told}
        orphans = frozenset(r.uuid for r in readings if r.uuid not in owned and _works(r))
        if orphans - self._orphans:
            self._watching.wake()
        self._orphans = orphans


def open_kubernetes(
    config: Config,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Clock | None = None,
    patience: Patience | None = None,
    pace: Pace | None = None,
) -> KubernetesScheduler:
    """Open on this node's kubelet, which need not be there yet; raises SchedulerError where it cannot be asked."""
    settings, clock = config.kubernetes, clock or SystemClock()
    watching = Watching(
        Kubelet(settings.pod_resources_socket),
        access(settings, environ, pace or Pace()),
        node=settings.node_name or environ.get("NODE_NAME") or platform.node(),
        joining=Joining(Rules(config.workload, config.exemptions), settings.resources),
        clock=clock,
        patience=patience or Patience(refresh=settings.refresh_seconds),
    )
    return KubernetesScheduler(watching, clock=clock, proc=config.host.proc)


def access(settings: Settings, environ: Mapping[str, str], pace: Pace) -> Access | None:
    """Where the API server is; None where it is not to be asked, which is said once."""
    url, host = settings.api_url, environ.get("KUBERNETES_SERVICE_HOST", "")
    if url == "auto":
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        here = host and Path(settings.token_file).exists()
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        url = url if here else ""
    if url:
        return Access(url.rstrip("/"), settings.token_file, settings.ca_file, pace)
    log.info(
        "scheduler kubernetes: the API server is not asked (kubernetes.api_url): pods are known by namespace and name;"
        " their jobs, labels, users and ends in a terminal phase, and a cordon of the node, are not"
    )
    return None


def _merged(one: Allocation | None, other: Allocation) -> Allocation:
    """Two pods of one job on one GPU are one owner, since the first of them."""
    if one is None:
        return other
    return structs.replace(one, start=min(one.start, other.start), restarts=max(one.restarts, other.restarts))


def _works(reading: Reading) -> bool:
    return bool(reading.processes) or (reading.gr_engine_active or 0.0) > _WORKING
