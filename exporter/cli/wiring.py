"""What several commands share: flags, configuration, and an agent beside a web server."""

import argparse
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from exporter import __version__
from exporter.agent import Agent
from exporter.clock import SystemClock
from exporter.config import Config, ConfigError, load, split_address
from exporter.core.model import Observation
from exporter.core.snapshot import Meta
from exporter.logs import set_up
from exporter.schedulers import SCHEDULERS
from exporter.sources import SOURCES
from exporter.trace import TraceError

log = logging.getLogger("gpu-efficiency")
FAILED, USAGE, NO_SOURCE = 1, 2, 3
"""Exit statuses."""


def configured(command: argparse.ArgumentParser) -> None:
    """Flags that override the configuration; their destinations are its dotted names."""
    config_file(command)
    command.add_argument("--source", dest="source", metavar="NAME", help=f"auto, {', '.join(SOURCES)}")
    command.add_argument("--scheduler", dest="scheduler", metavar="NAME", help=f"auto, {', '.join(SCHEDULERS)}")
    for flag, metavar, about in (
        ("web.listen-address", "HOST:PORT", "where to serve; default :19400, 127.0.0.1:19400 for demo and replay"),
        ("sampling.interval-seconds", "S", "seconds between samples; default 1"),
        ("log.format", "FORM", "text or json"),
        ("log.level", "LEVEL", "debug, info, warning or error"),
    ):
        command.add_argument(f"--{flag}", dest=flag.replace("-", "_"), metavar=metavar, help=about)
    command.add_argument(
        "--dcgm-exporter-url", dest="dcgm_exporter.url", metavar="URL", help="an existing dcgm-exporter"
    )


def config_file(command: argparse.ArgumentParser) -> None:
    """The flag that names the configuration."""
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML; see check-config")


def configuration(args: argparse.Namespace, *, loopback: bool = False) -> Config:
    """Read the configuration that `args` asks for, and set up logging by it."""
    given = {k: v for k, v in vars(args).items() if v is not None and (k in {"source", "scheduler"} or "." in k)}
    config = load(args.config, flags=given)
    set_up(form=config.log.format, level=config.log.level)
    if loopback and config.web.listen_address.startswith(":"):
        given["web.listen_address"] = "127.0.0.1" + config.web.listen_address
        config = load(args.config, flags=given)
    return config


def portrait(config: Config, *, source: str, simulated: bool = False, host: str = "", node: str = "") -> Meta:
    """What the daemon says of itself; `node` is the name its scheduler has for it."""
    return Meta(
        terms=config.terms(node),
        version=__version__,
        source=source,
        scheduler="simulation" if simulated else config.scheduler,
        simulated=simulated,
        host=host or platform.node(),
        started=time.time(),
        interval=config.sampling.interval_seconds,
    )


def publish(
    agent: Agent,
    config: Config,
    observations: Callable[[threading.Event], Iterable[Observation]],
    *,
    max_age_seconds: float | None = None,
) -> int:
    """Sample in a thread, serve in this one, until told to stop. Nothing is sampled before the port is ours."""
    from exporter.http import ListenError, create_app, run  # noqa: PLC0415  only what serves pays for the web

    stop = threading.Event()
    sampler = threading.Thread(target=lambda: agent.run(observations(stop)), name="sampler", daemon=True)
    host, port = split_address(config.web.listen_address)
    patience = max(10.0, 3 * config.sampling.interval_seconds) if max_age_seconds is None else max_age_seconds
    app = create_app(agent.latest, now=SystemClock().now, max_age_seconds=patience, why_not=agent.last_error)

    def begin(bound: int) -> None:
        log.info("serving http://%s:%d/ and /metrics", host or "localhost", bound)
        sampler.start()

    try:
        run(app, host=host, port=port, listening=begin)
    except ListenError as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return FAILED
    finally:
        stop.set()
        if sampler.ident is not None:
            sampler.join(timeout=2.0)
    return 0


def run_guarded(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; an error an operator can mend is one line and an exit status, not a traceback."""
    try:
        return command(args)
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return USAGE
    except (TraceError, OSError) as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 0


def at_least(least: float) -> Callable[[str], float]:
    """A flag's type: a finite number, `least` or more."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least:g} or more")
        return value

    return number
