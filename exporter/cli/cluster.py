"""Runs the command `cluster`: polls a whole cluster's scheduler and serves metrics about its queue and nodes."""

import argparse
import os
import shutil
import threading
from collections.abc import Callable

from exporter.cli.wiring import (
    JOIN_SECONDS,
    ConfigReloader,
    config_file_argument,
    configure,
    on_sighup,
    read_config,
    reload_in_background,
    serve_app,
    setting_arguments,
    web_config_file_argument,
)
from exporter.clock import SystemClock
from exporter.cluster.metrics import page
from exporter.cluster.watcher import ClusterSource, ClusterWatcher
from exporter.config import Config, ConfigError
from exporter.registry import SCHEDULERS, import_object
from exporter.web.metrics_app import create_metrics_app

_USED_SECTIONS = ("cluster", "host", "kubernetes", "log", "slurm", "web", "workload")
"""Sections of the configuration that this command uses."""


def cluster(args: argparse.Namespace) -> int:
    """Poll the scheduler and serve its metrics until stopped."""
    config = configure(args)
    reloader = ConfigReloader(args.config, config, lambda: read_config(args), live=("log",), used=_USED_SECTIONS)
    source = _open(config)
    try:
        with on_sighup(reloader), reload_in_background(reloader, lambda *_: None):
            return serve_cluster(config, source)
    finally:
        source.close()


def _open(config: Config) -> ClusterSource:
    """Open the configured scheduler, or the one that is available here."""
    chosen = config.cluster.scheduler
    if chosen == "auto":
        chosen = "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "slurm"
        if chosen == "slurm" and shutil.which("squeue", path=config.slurm.bin_dir or None) is None:
            raise ConfigError(
                "cluster.scheduler: neither is this a pod nor is there Slurm's squeue on PATH or in slurm.bin_dir:"
                " run this where squeue works, or in the cluster, or set cluster.scheduler"
            )
    source: ClusterSource = import_object(SCHEDULERS[chosen].cluster_opener)(config)
    return source


def serve_cluster(config: Config, source: ClusterSource, *, key: str = "cluster.listen_address") -> int:
    """Poll `source` and serve its metrics at the address that `key` names until stopped; return the exit status."""
    clock, stop = SystemClock(), threading.Event()
    cluster = config.cluster
    watch = ClusterWatcher(source, clock, refresh_seconds=cluster.refresh_seconds, max_jobs=cluster.max_jobs)
    poller = threading.Thread(target=watch.run, args=(stop,), name="poller", daemon=True)
    app = create_metrics_app(
        "gpu-efficiency cluster",
        page=lambda openmetrics: page(watch.view, now=clock.now(), openmetrics=openmetrics),
        problem=lambda: _stale_reason(watch, clock.now),
    )
    try:
        what = f" for the whole {source.name} cluster"
        return serve_app(app, config, poller.start, key=key, what=what)
    finally:
        stop.set()
        if poller.ident is not None:
            poller.join(timeout=JOIN_SECONDS)


def _stale_reason(watch: ClusterWatcher, now: Callable[[], int]) -> str:
    """Return why the data is stale; empty while queue and nodes are current."""
    if watch.view.live("jobs", "nodes", now=now()):
        return ""
    return watch.error or "the first answers are awaited"


def cluster_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `cluster`."""
    config_file_argument(command)
    web_config_file_argument(command)
    setting_arguments(
        command,
        ("cluster.listen-address", "HOST:PORT", "where to serve; default :19401"),
        ("cluster.scheduler", "NAME", "auto, slurm or kubernetes"),
        (
            "cluster.refresh-seconds",
            "TIME",
            "time between two polls, each of at most three requests to Slurm's controller; default 60s",
        ),
    )
