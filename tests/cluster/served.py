"""Pods and nodes as an API server has them, and that server, for the tests of `gpu-efficiency cluster`."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from exporter.clock import SystemClock
from exporter.cluster.kubernetes import KubernetesCluster
from exporter.cluster.metrics import page
from exporter.cluster.watcher import ClusterWatcher
from exporter.registry import KubernetesSettings
from exporter.schedulers.kubernetes.api import ApiServer as Access
from exporter.schedulers.kubernetes.api import ApiTimeouts
from tests.e2e.running import Page
from tests.kubernetes import api, schemas
from tests.kubernetes.api import VERSION, ApiServer, Json
from tests.kubernetes.cluster import uid_of

GPU, WHOLE = KubernetesSettings().resources, "nvidia.com/gpu"
PACE = ApiTimeouts(first=0.05, most=0.2, response=1.0, watch_idle=5.0)
MADE, LATER = "2026-01-02T03:04:05Z", "2026-01-02T03:14:05Z"
NOW = datetime(2026, 1, 2, 3, 14, 5, tzinfo=UTC).timestamp()
"""LATER."""


def pod(name: str, gpus: int = 0, *, node: str = "", phase: str = "", resource: str = WHOLE, **spec: Any) -> Json:
    """Return a valid pod that requests so many GPUs; without `node` it is pending and unschedulable."""
    asked = {"limits": {resource: f"{gpus}"}} if gpus else {}
    scheduled = {"type": "PodScheduled", "status": "True" if node else "False"}
    if not node:
        scheduled["reason"] = "SchedulingGated" if "schedulingGates" in spec else "Unschedulable"
    thing = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ml", "uid": uid_of(name), "creationTimestamp": MADE},
        "spec": {"containers": [{"name": "main", "image": "train:1", "resources": asked}]} | spec,
        "status": {"phase": phase or ("Running" if node else "Pending"), "conditions": [scheduled]},
    }
    if node:
        thing["spec"]["nodeName"] = node  # type: ignore[index]
    schemas.validate(thing, VERSION, strict=False)
    return thing


def node(name: str, gpus: int = 8, *, offered: int | None = None, ready: str = "True", **more: Any) -> Json:
    labels = more.pop("labels", {})
    resources = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": f"{gpus}"}
    thing = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": uid_of(f"node {name}"), "labels": labels},
        "spec": more,
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "capacity": resources,
            "allocatable": resources | {"nvidia.com/gpu": f"{gpus if offered is None else offered}"},
        },
    }
    schemas.validate(thing, VERSION, strict=False)
    return thing


def kept_by(name: str) -> list[Json]:
    return [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid_of(name), "controller": True}]


def of_job(thing: Json, name: str) -> Json:
    thing["metadata"]["ownerReferences"] = kept_by(name)
    return thing


def _refusal(server: ApiServer, token: str, path: str, asked: dict[str, str]) -> tuple[int, str] | None:
    if token != f"Bearer {server.token}":
        return 401, "Unauthorized"
    if path in server.missing:
        return 404, "the server could not find the requested resource"
    if path in server.forbidden:
        return 403, f"cannot list {path}"
    return (410, "too old resource version") if "watch" in asked and server.expired(asked) else None


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """An API server that answers about the whole cluster."""
    monkeypatch.setattr(api, "_refusal", _refusal)
    made = ApiServer(folder)
    (folder / "token").write_text(made.token)
    yield made
    made.stop()


@contextmanager
def watching(server: ApiServer, folder: Path, *, kueue: bool = False) -> Iterator[KubernetesCluster]:
    """What the command asks that server."""
    access = Access(server.url, f"{folder / 'token'}", f"{server.ca}", PACE)
    made = KubernetesCluster(access, resources=GPU, now=SystemClock().now, kueue=kueue)
    yield made
    ended(made)


def ended(source: Any) -> None:
    """Close it, and collect its garbage here and now; see `tests.kubernetes.cluster.closed`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        source.close()
        gc.collect()


class Looks:
    """A watcher of the server whose turns the test calls."""

    def __init__(self, source: KubernetesCluster) -> None:
        self._clock = SystemClock()
        self.watch = ClusterWatcher(source, self._clock, refresh_seconds=60, max_jobs=10)

    def page(self) -> Page:
        self.watch.turn()
        return Page(page(self.watch.view, now=self._clock.now()).decode())

    def total(self, name: str, **labels: str) -> float:
        return float(self.page().total(f"cluster_{name}", **labels))
