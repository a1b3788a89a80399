"""The `Scheduler` of a Kubernetes node: joins the kubelet's list of devices with the API server's pods.

A thread queries both and publishes a whole `KubernetesState`; the reading thread never waits. Without the API server a
pod is known by namespace and name only. A GPU is held from when the kubelet admits the pod until it no longer lists it
or the pod is in a terminal phase. A device id that cannot be resolved yields a fault, and free GPUs for which it may
stand have an unknown owner.
"""

import asyncio
import logging
import os
import platform
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, structs

from exporter.clock import Clock, SystemClock
from exporter.config import Config
from exporter.core.model import MS, UNKNOWN_JOB, Allocation, Device, Fault, Owner, Reading
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.schedulers.kubernetes.api import ApiServer, ApiTimeouts, Informer, LoopThread, find_api_server
from exporter.schedulers.kubernetes.kubelet import (
    DeviceResolver,
    DraDevices,
    Kubelet,
    KubeletError,
    PodResources,
    dra_devices,
)
from exporter.schedulers.kubernetes.objects import (
    KubernetesNode,
    Pod,
    ResourceSlice,
    node_condition,
)
from exporter.schedulers.kubernetes.pod_table import GpuPod, PodName, PodTable
from exporter.schedulers.procfs import JobMembers, ProcessInfo
from exporter.schedulers.rules import Rules

T = TypeVar("T", Pod, KubernetesNode, ResourceSlice)
log = logging.getLogger(__name__)
_SLICES = tuple(f"/apis/resource.k8s.io/{version}/resourceslices" for version in ("v1", "v1beta2", "v1beta1"))


class WatchIntervals(Struct, frozen=True):
    """Intervals and grace periods, in seconds."""

    refresh: float = 10.0
    """Between two queries of the kubelet, unless something requires an earlier one."""
    sync: float = 5.0
    """At startup, for the API server: a job reported before it answers would appear under two names."""
    grace: float = 2.0
    """For the API server's report of a pod that the kubelet lists for the first time."""
    settle: float = 0.2
    """After a change, for further changes that come with it."""
    retry: float = 1.0
    """After the kubelet did not answer."""
    publish: float = 0.05
    """After a change from the API server, for more of them."""
    restart_grace: float = 20.0
    """After a reconnect to the kubelet, for it to list the existing pods: one that has just started knows none."""


class KubernetesState(Struct, frozen=True):
    """The joined state of kubelet and API server."""

    at: int
    """When the kubelet was queried; monotonic nanoseconds."""
    gpu_pods: tuple[GpuPod, ...]
    dra_devices: DraDevices
    jobs: Mapping[str, str]
    """Job id by pod uid."""
    condition: str = ""
    faults: tuple[Fault, ...] = ()
    unanswered_since: int | None = None
    unlisted: frozenset[str] = frozenset()
    """Resource names of GPUs that pods hold and the kubelet does not list."""


class KubernetesWatcher:
    """Queries kubelet and API server on a separate thread, from construction until `thread.close`."""

    def __init__(
        self,
        kubelet: Kubelet,
        api_server: ApiServer | None,
        *,
        node: str,
        pod_table: PodTable,
        clock: Clock,
        intervals: WatchIntervals,
    ) -> None:
        """Without an `api_server` only the kubelet is queried."""
        self._kubelet, self._api_server, self.node = kubelet, api_server, node
        self._pod_table, self._clock, self._intervals = pod_table, clock, intervals
        self._at: int | None = None
        self._logged_unlisted: set[PodName] = set()
        self._seen_connections, self._grace_until = 0, 0.0
        self._wake, self._updated, self._publish_due = asyncio.Event(), asyncio.Event(), False
        self.state: KubernetesState | None = None
        """The newest state; None until the kubelet has answered."""
        self.error = ""
        """Why the kubelet does not answer; empty while it does."""
        self.refusals: deque[str] = deque(maxlen=100)
        """Objects that could not be decoded; the caller that reports them removes them."""
        self._pods = self._informer(Pod, ("/api/v1/pods",), "spec.nodeName", significant=_pod_lifecycle)
        self._nodes = self._informer(KubernetesNode, ("/api/v1/nodes",), "metadata.name")
        self._slices: Informer[ResourceSlice] | None = None
        self._dra_devices: DraDevices = {}
        """What slices offer, and what pods hold of what slices no longer offer."""
        self.thread = LoopThread(self._run)
        self._loop = self.thread.loop
        self.thread.start()

    def wake(self) -> None:
        """Query the kubelet now; callable from any thread."""
        self.thread.call(self._wake.set)

    def update_rules(self, rules: Rules) -> None:
        """Apply the rules to all pods without a query; callable from any thread."""
        self.thread.call(self._apply_rules, rules)

    # -- called on the thread --

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                for informer in self._informers():
                    self._group.create_task(informer.run())
                await self._synced()
                while True:
                    self._wake.clear()
                    answered = await self._refresh()
                    await self._sleep(self._intervals.refresh if answered else self._intervals.retry)
        except asyncio.CancelledError:  # not after a failure: then the client is used again
            self._kubelet.close()
            raise

    async def _synced(self) -> None:
        deadline = self._loop.time() + self._intervals.sync
        for informer in self._informers():
            await _wait_event(informer.synced, deadline - self._loop.time())

    async def _sleep(self, seconds: float) -> None:
        if await _wait_event(self._wake, seconds):
            await asyncio.sleep(self._intervals.settle)

    async def _refresh(self) -> bool:
        """Query the kubelet once; return False if it did not answer."""
        queried_at = self._clock.now()
        admitted = [name for name, pod in self._api_pods().items() if pod.status.start_time is not None]
        try:
            listed = await self._kubelet.list_pods()
        except KubeletError as err:
            self.error = str(err)
            self._publish()
            return False
        holding = self._pod_table.with_gpus(listed)
        await self._wait_for_new_pods(holding)
        if missing := self._missing(listed):
            self.error = f"the kubelet has just started and does not list {', '.join(map('/'.join, missing))} yet"
            self._publish()
            return False
        if self._at is None:
            await self._log_offered()
        silent = self._pods is None or not self._pods.live
        self._pod_table.replace_list(holding, listed=listed, admitted=admitted, silent=silent)
        self._at, self.error = queried_at, ""
        self._publish()
        return True

    async def _log_offered(self) -> None:
        """Log once what the kubelet offers: without any GPU resource no pod can be allocated one."""
        try:
            counts = self._pod_table.count_devices(await self._kubelet.allocatable())
        except KubeletError as err:
            log.debug("what the kubelet offers is not known: %s", err)
            return
        if counts:
            log.info("the kubelet offers %s", ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
        else:
            log.warning(
                "the kubelet offers no GPU to pods: is the device plugin running? A DRA driver's are not listed here;"
                " kubernetes.resources names the resources that are GPUs"
            )

    def _missing(self, listed: tuple[PodResources, ...]) -> list[PodName]:
        """Return the pods that a restarted kubelet does not list though nothing shows that they ended."""
        if self._kubelet.connections != self._seen_connections:
            self._seen_connections = self._kubelet.connections
            self._grace_until = self._loop.time() + (self._intervals.restart_grace if self._at is not None else 0.0)
        if self._loop.time() >= self._grace_until:
            return []
        api_pods = self._api_pods() if self._pods is not None and self._pods.live else None
        return self._pod_table.missing(listed, api_pods)

    async def _wait_for_new_pods(self, holding: tuple[PodResources, ...]) -> None:
        """Wait a little for the API server's report of new pods, so that none appears under two names."""
        if self._slices is None and any(each.claims for each in holding):
            # Most nodes have no claims, and need no permission to list slices.
            self._slices = self._informer(ResourceSlice, _SLICES, "spec.nodeName")
            for informer in self._informers()[2:]:
                self._group.create_task(informer.run())
        deadline = self._loop.time() + self._intervals.grace
        while self._is_waiting(holding) and (left := deadline - self._loop.time()) > 0:
            self._updated.clear()
            await _wait_event(self._updated, left)

    def _is_waiting(self, holding: tuple[PodResources, ...]) -> bool:
        if self._slices is not None and not self._slices.synced.is_set() and not self._slices.error:
            return True
        return (
            self._pods is not None and self._pods.live and bool(self._pod_table.unknown_pods(holding, self._api_pods()))
        )

    def _informer(
        self, kind: type[T], paths: tuple[str, ...], field: str, *, significant: Callable[[T], object] = lambda _: None
    ) -> Informer[T] | None:
        if self._api_server is None:
            return None
        return Informer(
            self._api_server,
            kind,
            paths=paths,
            selector=f"{field}={self.node}",
            significant=significant,
            on_update=self._on_update,
            on_change=self._wake.set,
            now=self._clock.now,
        )

    def _informers(self) -> list[Informer[Pod] | Informer[KubernetesNode] | Informer[ResourceSlice]]:
        return [informer for informer in (self._pods, self._nodes, self._slices) if informer is not None]

    def _on_update(self) -> None:
        self._updated.set()
        if not self._publish_due:
            self._publish_due = True
            self._loop.call_later(self._intervals.publish, self._publish)

    def _apply_rules(self, rules: Rules) -> None:
        self._pod_table.update_rules(rules)
        self._publish()

    def _api_pods(self) -> dict[PodName, Pod]:
        pods = self._pods.objects.values() if self._pods is not None else ()
        return {(pod.metadata.namespace, pod.metadata.name): pod for pod in pods}

    def _publish(self) -> None:
        """Join what is known into a new state; do nothing before the kubelet's first list."""
        self._publish_due = False
        for informer in self._informers():
            self.refusals.extend([informer.refused] if informer.refused else [])
            informer.refused = ""
        if self._at is None:
            return
        silent = [informer.unanswered_since for informer in self._informers() if informer.unanswered_since is not None]
        gpu_pods = self._pod_table.gpu_pods(self._api_pods())
        self._update_dra_devices()
        unlisted = self._pod_table.unlisted()
        self._log_unlisted(unlisted)
        self.state = KubernetesState(
            at=self._at,
            gpu_pods=gpu_pods,
            dra_devices=self._dra_devices,
            jobs=self._pod_table.jobs(),
            condition=node_condition(
                next(iter(self._nodes.objects.values()), None) if self._nodes is not None else None
            ),
            faults=tuple(self._faults()),
            unanswered_since=min(silent, default=None),
            unlisted=frozenset(resource for gpus in unlisted.values() for resource in gpus),
        )

    def _update_dra_devices(self) -> None:
        """Take what slices offer, and keep what pods hold.

        The kubelet deletes all slices when it starts, and those of a driver that is away for 30 s. NVIDIA's driver of
        2025 left out unhealthy devices.
        """
        claimed = self._pod_table.claimed()
        kept = {key: device for key, device in self._dra_devices.items() if key in claimed}
        offered = dra_devices(tuple(self._slices.objects.values())) if self._slices is not None else {}
        self._dra_devices = {**kept, **offered}

    def _log_unlisted(self, unlisted: Mapping[PodName, Counter[str]]) -> None:
        """Log once of each pod why GPUs that nobody is known to hold have an unknown owner."""
        for namespace, name in unlisted.keys() - self._logged_unlisted:
            count = ", ".join(f"{n} {resource}" for resource, n in sorted(unlisted[namespace, name].items()))
            log.info("pod %s/%s holds %s for init containers, which the kubelet does not list", namespace, name, count)
        self._logged_unlisted = set(unlisted)

    def _faults(self) -> Iterator[Fault]:
        """Yield the current faults."""
        if self.error:
            yield Fault("scheduler_failed", self.error)
        silent = "; ".join(informer.error for informer in self._informers() if informer.error)
        if silent:
            yield Fault("controller_silent", f"{silent}; the kubelet still reports which pod holds which GPU")
        if self._nodes is not None and self._nodes.live and not self._nodes.objects:
            yield Fault(
                "scheduler_refused",
                f"the API server knows no node {self.node!r}: set kubernetes.node_name, or NODE_NAME from the pod's"
                " spec.nodeName",
            )


async def _wait_event(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event is set in time. Python 3.11's `wait_for` may lose a cancellation; this does not."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _pod_lifecycle(pod: Pod) -> object:
    """Return the fields that change when a pod gains or releases devices."""
    return pod.status.phase, pod.status.start_time, pod.metadata.deletion_timestamp


_DELEGATED = re.compile(r"/user\.slice/|\.service/")
"""Groups of a login session or of a service, in which a user may create others of any name."""
_POD = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?=[./]|$)", re.MULTILINE)
"""A pod's uid in a cgroup path; the kubelet's cgroup drivers write it with "-" (cgroupfs) or "_" (systemd)."""
_BUSY_RATIO = 0.01
_UNKNOWN = Owner(UNKNOWN_JOB, "kubernetes", name="a pod of which it is not known which GPUs it has")
AllocationKey = tuple[str, str]
"""UUID and job id."""


def _pod_uids(cgroup: str) -> Iterator[str]:
    """Yield the uid of the outermost pod in each path of a text of /proc/PID/cgroup.

    The kubelet made that one's group; what lies below it, the pod may have named itself.
    """
    for line in cgroup.replace(r"\x2d", "-").splitlines():
        pod = _POD.search(line)
        if pod is not None and not _DELEGATED.search(line, 0, pod.start()):
            yield pod[1].replace("_", "-")


class KubernetesScheduler:
    """The `Scheduler` of a Kubernetes node."""

    name = "kubernetes"

    def __init__(self, watcher: KubernetesWatcher, *, clock: Clock, proc: str | Path = "/proc") -> None:
        self.node = watcher.node
        self._watcher, self._clock, self._proc = watcher, clock, proc
        self._members = JobMembers(self._job_of, proc=proc)
        self._devices: tuple[Device, ...] = ()
        self._resolver = DeviceResolver(())
        self._state: KubernetesState | None = None
        self._gpu_pods: list[tuple[GpuPod, tuple[str, ...]]] = []
        self._unresolved, self._disbelieved, self._candidates = "", "", frozenset[str]()
        self._reported: dict[AllocationKey, Allocation] = {}
        self._reported_at: int | None = None
        self._previous_at: int | None = None
        """When the kubelet was queried for the second newest list."""
        self._unallocated_busy: frozenset[str] = frozenset()

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """See `Scheduler.poll`: returns the newest state with its time."""
        if not self.alive:
            raise SchedulerError("scheduler kubernetes: its thread has ended: please report it with this daemon's log")
        state = self._watcher.state
        if state is None:
            if self._watcher.error:
                raise SchedulerError(f"scheduler kubernetes: {self._watcher.error}")
            return None
        changed = self._resolve_gpus(state, tuple(devices))
        allocations = self._allocations(state, now) if changed else tuple(self._reported.values())
        self._wake(readings)
        return SchedulerState(
            allocations=allocations,
            at=state.at,
            condition=state.condition,
            members=self._members.of_readings(readings) if state.jobs else {},
            faults=(*state.faults, *self._refused(), *self._watcher.thread.faults()),
            unanswered_since=state.unanswered_since,
        )

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`: by the pod in the cgroup, which a container cannot change."""
        return self._members.of_pids(pids)

    def update(self, rules: Rules) -> None:
        """See `Scheduler.update`: the watcher's thread applies them at once."""
        self._watcher.update_rules(rules)

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._watcher.thread.close()

    @property
    def alive(self) -> bool:
        """Whether kubelet and API server are still queried."""
        return self._watcher.thread.alive

    def _job_of(self, process: ProcessInfo) -> str:
        jobs = self._state.jobs if self._state is not None else {}
        return next((jobs[uid] for uid in _pod_uids(process.cgroup) if uid in jobs), "")

    def _resolve_gpus(self, state: KubernetesState, devices: tuple[Device, ...]) -> bool:
        """Resolve the pods' GPUs if the state or the devices have changed; return whether they have."""
        if state is self._state and devices == self._devices:
            return False
        if devices != self._devices:
            self._devices, self._resolver = devices, DeviceResolver(devices, proc=self._proc)
        pods, resolver = state.gpu_pods, self._resolver
        by_id = [(one, resolver.resolve(one.device_ids, one.claims, state.dra_devices)) for one in pods]
        listed = frozenset(uuid for _, resolved in by_id for uuid in resolved.uuids)
        found = [(one, resolved.joined(resolver.resolve_assigned(one.assigned, listed))) for one, resolved in by_id]
        self._gpu_pods = [(holder, resolved.uuids) for holder, resolved in found]
        unresolved = (
            f"{one.owner.namespace}/{one.owner.pod} holds {what}"
            for one, resolved in found
            for what in resolved.unknown
        )
        refused = (f"{one.owner.namespace}/{one.owner.pod}: {one.problem}" for one in pods if one.problem)
        self._state, self._unresolved, self._disbelieved = state, "; ".join(unresolved), "; ".join(refused)
        self._candidates = frozenset[str]().union(
            *(resolved.candidates for _, resolved in found), *map(self._resolver.offered_as, state.unlisted)
        )
        return True

    def _refused(self) -> Iterator[Fault]:
        if self._unresolved:
            yield Fault(
                "scheduler_refused", f"devices without an owner, because they cannot be resolved: {self._unresolved}"
            )
        if self._disbelieved:
            yield Fault("scheduler_refused", f"annotations of pods that are not believed: {self._disbelieved}")
        while self._watcher.refusals:
            yield Fault("scheduler_refused", self._watcher.refusals.popleft())

    def _allocations(self, state: KubernetesState, now: int) -> tuple[Allocation, ...]:
        """Return all current allocations, and once, with its `end`, each that has ended."""
        if self._reported_at is None or state.at > self._reported_at:
            self._previous_at, self._reported_at = self._reported_at, state.at
        held = self._held(now)
        gone = [self._ended(self._reported[key], held, now) for key in self._reported if key not in held]
        self._reported = held
        return (*held.values(), *gone)

    def _held(self, now: int) -> dict[AllocationKey, Allocation]:
        held: dict[AllocationKey, Allocation] = {}
        owners, sizes = self._owners(), self._sizes()
        for holder, uuids in self._gpu_pods:
            owner = owners[holder.owner.job_id]
            for uuid in uuids:
                key = uuid, owner.job_id
                one = Allocation(
                    uuid,
                    owner,
                    self._start(key, holder, now),
                    gpus=sizes[owner.job_id, holder.group],
                    restarts=holder.restarts,
                    group=holder.group,
                )
                held[key] = _merged(held.get(key), one)
        unpartitioned = {device.uuid for device in self._devices if device.unpartitioned}
        for uuid in self._candidates - unpartitioned - {uuid for uuid, _ in held}:
            key = uuid, UNKNOWN_JOB
            held[key] = self._reported.get(key) or Allocation(uuid, _UNKNOWN, now)
        return held

    def _owners(self) -> dict[str, Owner]:
        """Return one owner per job, that of its first pod on this node, for all its GPUs."""
        by_pod = sorted((holder.owner for holder, _ in self._gpu_pods), key=lambda owner: owner.pod, reverse=True)
        return {owner.job_id: owner for owner in by_pod}

    def _sizes(self) -> dict[tuple[str, str], int]:
        """Return the GPUs of each whole job, or of its independent pods: those here, or more if its pods show that."""
        here: dict[tuple[str, str], set[str]] = {}
        least: dict[tuple[str, str], int] = {}
        for holder, uuids in self._gpu_pods:
            group = holder.owner.job_id, holder.group
            here.setdefault(group, set()).update(uuids)
            least[group] = max(least.get(group, 1), holder.pods * len(uuids), holder.world_size)
        return {group: max(least[group], len(uuids)) for group, uuids in here.items()}

    def _start(self, key: AllocationKey, holder: GpuPod, now: int) -> int:
        """Return when the pod got its devices, not before the last list without it; kept once reported."""
        if key in self._reported:
            return self._reported[key].start
        begun = now if holder.started is None else now - max(0, self._clock.wall() - holder.started)
        return max(begun, self._previous_at if self._previous_at is not None else begun) // MS * MS

    def _ended(self, allocation: Allocation, held: Mapping[AllocationKey, Allocation], now: int) -> Allocation:
        """End it now, or when the GPU's next owner began: consecutive owners are not sharing."""
        next_ones = [held[key].start for key in held if key[0] == allocation.uuid and key not in self._reported]
        return structs.replace(allocation, end=max(allocation.start, min([now, *next_ones])))

    def _wake(self, readings: Collection[Reading]) -> None:
        """Query the kubelet at once when an unallocated GPU becomes busy; one that was not read is as it was."""
        owned = {uuid for uuid, job_id in self._reported if job_id != UNKNOWN_JOB}
        unread = self._unallocated_busy.difference(reading.uuid for reading in readings)
        unallocated_busy = unread.union(r.uuid for r in readings if _is_busy(r)) - owned
        if unallocated_busy - self._unallocated_busy:
            self._watcher.wake()
        self._unallocated_busy = unallocated_busy


def open_kubernetes(
    config: Config,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Clock | None = None,
    intervals: WatchIntervals | None = None,
    timeouts: ApiTimeouts | None = None,
) -> KubernetesScheduler:
    """Open with this node's kubelet, which may start later. Raises SchedulerError if grpcio is missing."""
    settings, clock = config.kubernetes, clock or SystemClock()
    watcher = KubernetesWatcher(
        Kubelet(settings.pod_resources_socket),
        find_api_server(settings, environ, timeouts or ApiTimeouts()),
        node=settings.node_name or environ.get("NODE_NAME") or platform.node(),
        pod_table=PodTable(Rules(config.workload, config.exemptions), settings.resources, exported=settings.pod_labels),
        clock=clock,
        intervals=intervals or WatchIntervals(refresh=settings.refresh_seconds),
    )
    return KubernetesScheduler(watcher, clock=clock, proc=config.host.proc)


def _merged(one: Allocation | None, other: Allocation) -> Allocation:
    """Merge two pods of one job on one GPU into one allocation, from the earlier start, in the larger group."""
    if one is None:
        return other
    larger = max(one, other, key=lambda each: each.gpus)
    return structs.replace(larger, start=min(one.start, other.start), restarts=max(one.restarts, other.restarts))


def _is_busy(reading: Reading) -> bool:
    return bool(reading.processes) or (reading.gr_engine_active or 0.0) > _BUSY_RATIO
