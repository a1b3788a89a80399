"""The thread that asks kubelet and API server, and what they said last.

Owns one event loop, and when the kubelet is asked again. Refuses to make the reading thread wait: that takes the
newest `State`, whole.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct

from exporter.clock import Clock
from exporter.core.model import Fault
from exporter.schedulers.kubernetes.api import Access, Store
from exporter.schedulers.kubernetes.ids import Slices, offers
from exporter.schedulers.kubernetes.joining import Holder, Joining, Name
from exporter.schedulers.kubernetes.kubelet import Kubelet, KubeletError
from exporter.schedulers.kubernetes.node import condition_of
from exporter.schedulers.kubernetes.objects import Node, Pod, ResourceSlice
from exporter.schedulers.kubernetes.wire import Held
from exporter.schedulers.rules import Rules

T = TypeVar("T", Pod, Node, ResourceSlice)
log = logging.getLogger(__name__)
_SLICES = tuple(f"/apis/resource.k8s.io/{version}/resourceslices" for version in ("v1", "v1beta2", "v1beta1"))
_JOIN_SECONDS = 5.0


class Patience(Struct, frozen=True):
    """How long is waited for what, in seconds."""

    refresh: float = 10.0
    """Between two lists of the kubelet's, where nothing calls for one sooner."""
    sync: float = 5.0
    """At the start, for the API server: a job that is told before it answers is told under two names."""
    grace: float = 2.0
    """For the API server's word on a pod that the kubelet names for the first time."""
    settle: float = 0.2
    """After a change, for others that come with it."""
    retry: float = 1.0
    """After the kubelet did not answer."""
    publish: float = 0.05
    """After word from the API server, for more of it."""
    doubt: float = 20.0
    """After another kubelet was met, for it to list the pods that there were: one that starts knows none at first."""


class State(Struct, frozen=True):
    """All that was last said, joined."""

    at: int
    """When the kubelet was asked for its list; monotonic nanoseconds."""
    holders: tuple[Holder, ...]
    slices: Slices
    jobs: Mapping[str, str]
    """Job id by pod uid."""
    condition: str = ""
    faults: tuple[Fault, ...] = ()
    unanswered_since: int | None = None


class Watching:
    """A thread of its own from construction to `close`."""

    def __init__(
        self,
        kubelet: Kubelet,
        access: Access | None,
        *,
        node: str,
        joining: Joining,
        clock: Clock,
        patience: Patience,
    ) -> None:
        """Without `access` the API server is not asked."""
        self._kubelet, self._access, self.node = kubelet, access, node
        self._joining, self._clock, self._patience = joining, clock, patience
        self._at: int | None = None
        self._met, self._doubt_until = 0, 0.0
        self._wake, self._news, self._due = asyncio.Event(), asyncio.Event(), False
        self.state: State | None = None
        """The newest; None until the kubelet has answered."""
        self.trouble = ""
        """Why the kubelet does not answer; empty while it does."""
        self.refusals: deque[str] = deque(maxlen=100)
        """Objects that could not be read; whoever tells of them takes them out."""
        self._pods = self._store(Pod, ("/api/v1/pods",), "spec.nodeName", matters=_course)
        self._nodes = self._store(Node, ("/api/v1/nodes",), "metadata.name")
        self._slices: Store[ResourceSlice] | None = None
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, name="kubernetes", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether anybody is still asking."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Have the kubelet asked now; from any thread."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._wake.set)

    def adopt(self, rules: Rules) -> None:
        """Have all pods judged by these, without asking anybody; from any thread."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._judge, rules)

    def close(self) -> None:
        """End the thread."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(timeout=_JOIN_SECONDS)

    # -- all that follows is done on the thread --

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            log.debug("kubelet and API server are no longer asked")
        finally:
            self._kubelet.close()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(asyncio.sleep(0))  # connections just closed are let go in the next round
            self._loop.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            for store in self._stores():
                self._group.create_task(store.run())
            await self._synced()
            while True:
                self._wake.clear()
                answered = await self._refresh()
                await self._rest(self._patience.refresh if answered else self._patience.retry)

    async def _synced(self) -> None:
        deadline = self._loop.time() + self._patience.sync
        for store in self._stores():
            await _set(store.synced, deadline - self._loop.time())

    async def _rest(self, seconds: float) -> None:
        if await _set(self._wake, seconds):
            await asyncio.sleep(self._patience.settle)

    async def _refresh(self) -> bool:
        """Ask the kubelet once; False when it did not answer."""
        asked = self._clock.now()
        try:
            listed = await self._kubelet.held()
        except KubeletError as err:
            self.trouble = str(err)
            self._publish()
            return False
        holding = self._joining.holding(listed)
        await self._introduced(holding)
        if missing := self._missing(listed):
            self.trouble = f"the kubelet has just started and does not list {', '.join(map('/'.join, missing))} yet"
            self._publish()
            return False
        if self._at is None:
            await self._offered()
        self._joining.take(holding, listed=listed, silent=self._pods is None or not self._pods.live)
        self._at, self.trouble = asked, ""
        self._publish()
        return True

    async def _offered(self) -> None:
        """Say once what the kubelet has to give: with none, GPUs lie idle because no pod can have one."""
        try:
            counts = self._joining.counted(await self._kubelet.allocatable())
        except KubeletError as err:
            log.debug("what the kubelet offers is not known: %s", err)
            return
        if counts:
            log.info("the kubelet offers %s", ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
        else:
            log.warning(
                "the kubelet offers no GPU to pods: is the device plugin running? A DRA driver's are not told here;"
                " kubernetes.resources says which resources are GPUs"
            )

    def _missing(self, listed: tuple[Held, ...]) -> list[Name]:
        """Pods that a kubelet just met does not list though nobody says that they ended."""
        if self._kubelet.connections != self._met:
            self._met = self._kubelet.connections
            self._doubt_until = self._loop.time() + (self._patience.doubt if self._at is not None else 0.0)
        if self._loop.time() >= self._doubt_until:
            return []
        told = self._told() if self._pods is not None and self._pods.live else None
        return self._joining.missing(listed, told)

    async def _introduced(self, holding: tuple[Held, ...]) -> None:
        """Wait a little for the API server's word on who is new, so that nobody is told under two names."""
        if self._slices is None and any(each.claims for each in holding):
            # Most nodes have no claims, and need no right to list slices.
            self._slices = self._store(ResourceSlice, _SLICES, "spec.nodeName")
            for store in self._stores()[2:]:
                self._group.create_task(store.run())
        deadline = self._loop.time() + self._patience.grace
        while self._awaited(holding) and (left := deadline - self._loop.time()) > 0:
            self._news.clear()
            await _set(self._news, left)

    def _awaited(self, holding: tuple[Held, ...]) -> bool:
        if self._slices is not None and not self._slices.synced.is_set() and not self._slices.trouble:
            return True
        return self._pods is not None and self._pods.live and bool(self._joining.strangers(holding, self._told()))

    def _store(
        self, kind: type[T], paths: tuple[str, ...], field: str, *, matters: Callable[[T], object] = lambda _: None
    ) -> Store[T] | None:
        if self._access is None:
            return None
        return Store(
            self._access,
            kind,
            paths=paths,
            selector=f"{field}={self.node}",
            matters=matters,
            news=self._hear,
            moved=self._wake.set,
            now=self._clock.now,
        )

    def _stores(self) -> list[Store[Pod] | Store[Node] | Store[ResourceSlice]]:
        return [store for store in (self._pods, self._nodes, self._slices) if store is not None]

    def _hear(self) -> None:
        self._news.set()
        if not self._due:
            self._due = True
            self._loop.call_later(self._patience.publish, self._publish)

    def _judge(self, rules: Rules) -> None:
        self._joining.adopt(rules)
        self._publish()

    def _told(self) -> dict[Name, Pod]:
        pods = self._pods.objects.values() if self._pods is not None else ()
        return {(pod.metadata.namespace, pod.metadata.name): pod for pod in pods}

    def _publish(self) -> None:
        """Join what is known into a new State; nothing before the kubelet's first list."""
        self._due = False
        for store in self._stores():
            self.refusals.extend([store.refused] if store.refused else [])
            store.refused = ""
        if self._at is None:
            return
        silent = [store.unanswered_since for store in self._stores() if store.unanswered_since is not None]
        holders = self._joining.holders(self._told())
        self.state = State(
            at=self._at,
            holders=holders,
            slices=offers(tuple(self._slices.objects.values())) if self._slices is not None else {},
            jobs=self._joining.jobs(),
            condition=condition_of(next(iter(self._nodes.objects.values()), None) if self._nodes is not None else None),
            faults=tuple(self._faults()),
            unanswered_since=min(silent, default=None),
        )

    def _faults(self) -> Iterator[Fault]:
        """What stands in the way now."""
        if self.trouble:
            yield Fault("scheduler_failed", self.trouble)
        silent = "; ".join(store.trouble for store in self._stores() if store.trouble)
        if silent:
            yield Fault("controller_silent", f"{silent}; the kubelet still says which pod holds which GPU")
        if self._nodes is not None and self._nodes.live and not self._nodes.objects:
            yield Fault(
                "scheduler_refused",
                f"the API server knows no node {self.node!r}: set kubernetes.node_name, or NODE_NAME from the pod's"
                " spec.nodeName",
            )


async def _set(event: asyncio.Event, seconds: float) -> bool:
    """Whether it is set within that time. Python 3.11's `wait_for` may forget that it was cancelled; this does not."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _course(pod: Pod) -> object:
    """What of a pod changes when it comes to hold devices, or to hold them no more."""
    return pod.status.phase, pod.status.start_time, pod.metadata.deletion_timestamp
