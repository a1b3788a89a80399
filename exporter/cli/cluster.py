"""Command `cluster`: one instance for a whole cluster, beside its controller or anywhere its commands work."""

import argparse
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable

from exporter.cli.reloading import Reloading, heeding, watched
from exporter.cli.wiring import FAILED, config_file, configuration, guarding_of, read, say_who_may_look, web_config_file
from exporter.clock import SystemClock
from exporter.cluster.kubernetes import open_kubernetes
from exporter.cluster.metrics import page
from exporter.cluster.slurm import open_slurm
from exporter.cluster.watching import Source, Watch
from exporter.config import Config, ConfigError, split_address
from exporter.http import ListenError, run
from exporter.http.plain import create_plain_app

log = logging.getLogger("gpu-efficiency")
_JOIN_SECONDS = 2.0
_USED = ("cluster", "host", "kubernetes", "log", "slurm", "web", "workload")
"""Sections of the configuration that this command has a use for."""


def cluster(args: argparse.Namespace) -> int:
    """Ask the scheduler and serve what it says until told to stop."""
    config = configuration(args)
    reloads = Reloading(args.config, config, lambda: read(args), live=("log",), used=_USED)
    source = _open(config)
    try:
        with heeding(reloads), watched(reloads, lambda *_: None):
            return _serve(config, source)
    finally:
        source.close()


def _open(config: Config) -> Source:
    """Open the scheduler that is configured, or that is at home here."""
    chosen = config.cluster.scheduler
    if chosen == "auto":
        chosen = "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "slurm"
        if chosen == "slurm" and not _has_slurm(config):
            raise ConfigError(
                "cluster.scheduler: neither is this a pod nor is there Slurm's squeue on PATH or in slurm.bin_dir:"
                " run this where squeue works, or in the cluster, or set cluster.scheduler"
            )
    return {"slurm": open_slurm, "kubernetes": open_kubernetes}[chosen](config)


def _has_slurm(config: Config) -> bool:
    return shutil.which("squeue", path=config.slurm.bin_dir or None) is not None


def _serve(config: Config, source: Source) -> int:
    clock, stop = SystemClock(), threading.Event()
    cluster = config.cluster
    watch = Watch(source, clock, refresh_seconds=cluster.refresh_seconds, max_jobs=cluster.max_jobs)
    asker = threading.Thread(target=watch.run, args=(stop,), name="asker", daemon=True)
    app = create_plain_app(
        "gpu-efficiency cluster",
        page=lambda openmetrics: page(watch.view, now=clock.now(), openmetrics=openmetrics),
        problem=lambda: _problem(watch, clock.now),
    )
    host, port = split_address(cluster.listen_address)
    guarding, where = guarding_of(config), host or "localhost"

    def begin(bound: int) -> None:
        scheme = guarding.now.scheme
        log.info("serving %s://%s:%d/ and /metrics for the whole %s cluster", scheme, where, bound, source.name)
        say_who_may_look(config, guarding, host)
        asker.start()

    try:
        run(app, host=host, port=port, guarding=guarding, open_page=config.web.open_page, listening=begin)
    except ListenError as err:
        print(f"gpu-efficiency: {err}".replace("web.listen_address", "cluster.listen_address"), file=sys.stderr)
        return FAILED
    finally:
        stop.set()
        if asker.ident is not None:
            asker.join(timeout=_JOIN_SECONDS)
    return 0


def _problem(watch: Watch, now: Callable[[], int]) -> str:
    """Why the figures are not live; empty while queue and nodes are."""
    if watch.view.live("jobs", "nodes", now=now()):
        return ""
    return watch.trouble or "the first answers are awaited"


def arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `cluster`."""
    config_file(command)
    web_config_file(command)
    for flag, metavar, about in (
        ("cluster.listen-address", "HOST:PORT", "where to serve; default :19401"),
        ("cluster.scheduler", "NAME", "auto, slurm or kubernetes"),
        (
            "cluster.refresh-seconds",
            "S",
            "seconds between two looks, three calls to Slurm's controller each; default 60",
        ),
        ("log.format", "FORM", "text or json"),
        ("log.level", "LEVEL", "debug, info, warning or error"),
    ):
        command.add_argument(f"--{flag}", dest=flag.replace("-", "_"), metavar=metavar, help=about)
