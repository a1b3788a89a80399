"""Kubernetes as a source: one list and watch of all pods, one of all nodes; the questions read what these brought.

Owns the thread with the two watches, and what pods and nodes mean for queue, expected GPUs and placement. Refuses to
poll. Pods count one by one, for only some schedulers start them as one; their job is told as on a node. Needs get,
list and watch on pods and nodes of the cluster.

Sources: Kubernetes' "Assigning Pods to Nodes", "Taints and Tolerations", "Pod disruption conditions"; the labels of
NVIDIA's GPU feature discovery and of NVIDIA's Topograph.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from exporter.clock import SystemClock
from exporter.cluster.kubernetes_objects import Node as NodeObject
from exporter.cluster.kubernetes_objects import Pod, gpus_of
from exporter.cluster.kubernetes_reading import Disruptions, read_nodes, read_pods
from exporter.cluster.model import Jobs, Nodes
from exporter.cluster.watching import Question, SilentError
from exporter.config import ConfigError
from exporter.schedulers.kubernetes.api import Access, Pace, Store
from exporter.schedulers.rules import Rules

_PODS, _NODES = "/api/v1/pods", "/api/v1/nodes"
_LIVING = "status.phase!=Succeeded,status.phase!=Failed"
_PATIENCE_SECONDS = 15.0
"""For the first lists, and for the thread with the watches to hand over what it has."""
_MOMENT_SECONDS = 0.05
T = TypeVar("T")


class KubernetesCluster:
    """The `Source` of a Kubernetes cluster; a thread of its own from construction to `close`."""

    name = "kubernetes"

    def __init__(self, access: Access, *, rules: Rules, resources: tuple[str, ...], now: Callable[[], int]) -> None:
        """`resources` are the names of GPUs, with * for any text; `now` gives monotonic nanoseconds."""
        self._rules, self._resources = rules, resources
        self._disruptions = Disruptions()
        self._pods = Store(
            access, Pod, paths=(_PODS,), selector=_LIVING, matters=self._disruptions.see, news=_nothing,
            moved=_nothing, now=now, wanted=self._asks_for_gpus,
        )  # fmt: skip
        self._nodes = Store(
            access, NodeObject, paths=(_NODES,), selector="", matters=_nothing, news=_nothing, moved=_nothing, now=now
        )
        self.questions = (Question("jobs", 1, 1, self._jobs), Question("nodes", 1, 1, self._look_at_nodes))
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, name="kubernetes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(timeout=2.0)

    def _asks_for_gpus(self, pod: Pod) -> bool:
        """Most pods of a cluster do not; one whose request cannot be read is kept, to be told of."""
        try:
            return bool(gpus_of(pod, self._resources))
        except ValueError:
            return True

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _run(self) -> None:
        await asyncio.gather(self._pods.run(), self._nodes.run())

    def _jobs(self) -> Jobs:
        pods, nodes = self._told(self._pods), self._told(self._nodes)
        thrown = self._on_loop(_told(self._disruptions))
        return read_pods(pods, nodes, resources=self._resources, rules=self._rules, disruptions=thrown)

    def _look_at_nodes(self) -> Nodes:
        return read_nodes(self._told(self._nodes), self._told(self._pods), resources=self._resources)

    def _told(self, store: Store[Any]) -> tuple[Any, ...]:
        """All objects as they are now; raises SilentError when the API server does not answer."""
        return self._on_loop(_snapshot(store))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it where the watches run: a dictionary must not grow while it is copied."""
        if not self._thread.is_alive():
            work.close()
            raise SilentError("the watch of the API server has ended: read the log and restart this program")
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result(timeout=2 * _PATIENCE_SECONDS)
        except TimeoutError as err:
            done.cancel()
            raise SilentError("the thread that watches the API server is too busy to answer") from err


async def _snapshot(store: Store[Any]) -> tuple[Any, ...]:
    """Wait for the first list, but not for a server that is known not to give it."""
    waited = 0.0
    while not (store.synced.is_set() or store.trouble or waited > _PATIENCE_SECONDS):
        await asyncio.sleep(_MOMENT_SECONDS)
        waited += _MOMENT_SECONDS
    if not store.live:
        raise SilentError(store.trouble or "the API server has not answered yet")
    return tuple(store.objects.values())


async def _told(disruptions: Disruptions) -> tuple[tuple[Pod, str], ...]:
    return disruptions.told()


def _nothing(*_: object) -> None:
    return None


def open_kubernetes(config: Any, *, environ: Mapping[str, str] = os.environ, pace: Pace | None = None) -> Any:
    """Open with the API server of `config.kubernetes`; raises ConfigError where there is none."""
    settings = config.kubernetes
    url, host, port = (
        settings.api_url,
        environ.get("KUBERNETES_SERVICE_HOST", ""),
        environ.get("KUBERNETES_SERVICE_PORT"),
    )
    if url == "auto":
        url = f"https://{f'[{host}]' if ':' in host else host}:{port or 443}" if host else ""
    if not url:
        raise ConfigError(
            "kubernetes.api_url: no API server: run this in a pod with a service account, or name its address"
        )
    access = Access(url.rstrip("/"), settings.token_file, settings.ca_file, pace or Pace())
    rules = Rules(config.workload)
    return KubernetesCluster(access, rules=rules, resources=settings.resources, now=SystemClock().now)
