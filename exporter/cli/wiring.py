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
from typing import TYPE_CHECKING

from exporter import __version__
from exporter.agent import Agent, Settings
from exporter.clock import SystemClock
from exporter.config import Config, ConfigError, load, split_address
from exporter.core.model import Observation
from exporter.core.snapshot import Meta, Reload
from exporter.logs import set_up, tell_by
from exporter.schedulers import SCHEDULERS
from exporter.sources import SOURCES
from exporter.trace import TraceError
from exporter.wording import without_secrets

if TYPE_CHECKING:
    from exporter.core.statement import Statement
    from exporter.history import History
    from exporter.http.guarding import Guarding

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
        ("web.page-address", "HOST:PORT", "where alone the page and the JSON API are; default: where all is served"),
        ("sampling.interval-seconds", "S", "seconds between samples; default 1"),
        ("history.file", "FILE", "where this node's history is kept; default: see check-config; empty: nowhere"),
        ("log.format", "FORM", "text or json"),
        ("log.level", "LEVEL", "debug, info, warning or error"),
    ):
        command.add_argument(f"--{flag}", dest=flag.replace("-", "_"), metavar=metavar, help=about)
    web_config_file(command)
    command.add_argument(
        "--dcgm-exporter-url", dest="dcgm_exporter.url", metavar="URL", help="an existing dcgm-exporter"
    )


def config_file(command: argparse.ArgumentParser) -> None:
    """The flag that names the configuration."""
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML; see check-config")


def web_config_file(command: argparse.ArgumentParser) -> None:
    """The flag that names certificates and users, in both spellings that exporters have."""
    command.add_argument(
        "--web.config-file",
        "--web.config.file",
        dest="web.config_file",
        metavar="FILE",
        help="YAML of Prometheus' exporters: TLS, client certificates, users; docs/web.md",
    )


def configuration(args: argparse.Namespace, *, loopback: bool = False) -> Config:
    """Read the configuration that `args` asks for, and set up logging by it."""
    config = read(args, loopback=loopback)
    tell_by(without_secrets)
    set_up(form=config.log.format, level=config.log.level)
    return config


def read(args: argparse.Namespace, *, loopback: bool = False) -> Config:
    """The configuration that `args` asks for; `loopback`: an address without a host is this host's own."""
    given = {k: v for k, v in vars(args).items() if v is not None and (k in {"source", "scheduler"} or "." in k)}
    config = load(args.config, flags=given)
    open_ones = {
        f"web.{name}": "127.0.0.1" + address
        for name in ("listen_address", "page_address")
        if (address := getattr(config.web, name)).startswith(":")
    }
    return load(args.config, flags=given | open_ones) if loopback and open_ones else config


def guarding_of(config: Config) -> "Guarding":
    """What guards the web, as web.config_file says; raises ConfigError."""
    from exporter.http.guarding import Guarding  # noqa: PLC0415  only what serves pays for the web

    return Guarding(Path(config.web.config_file)) if config.web.config_file else Guarding()


def say_who_may_look(config: Config, guarding: "Guarding", host: str) -> None:
    """Tell at the start why a browser elsewhere will be refused, for its user will ask here."""
    from exporter.connections import is_loopback  # noqa: PLC0415  likewise

    if not (config.web.open_page or guarding.now.authenticates or is_loopback(host) or host == "localhost"):
        log.info("the page and the JSON API are served over the loopback only: no authentication; see docs/web.md")


def portrait(
    config: Config,
    *,
    source: str,
    simulated: bool = False,
    host: str = "",
    node: str = "",
    reload: Reload | None = None,
) -> Meta:
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
        reload=reload,
    )


def anew(config: Config, node: str, told: Reload) -> Settings:
    """What an agent takes of a configuration that was read again."""
    return Settings(terms=config.terms(node), policy=config.policy, by_model=config.policies(), reload=told)


def publish(
    agent: Agent,
    config: Config,
    observations: Callable[[threading.Event], Iterable[Observation]],
    *,
    max_age_seconds: float | None = None,
    history: "History | None" = None,
) -> int:
    """Sample in a thread, serve in this one, until told to stop. Nothing is sampled before the port is ours.

    `history` keeps what the agent tells, from before the first sample to after the last scrape.
    """
    from exporter.http import ListenError, create_app, run  # noqa: PLC0415  only what serves pays for the web

    stop = threading.Event()
    sampler = threading.Thread(target=lambda: agent.run(observations(stop)), name="sampler", daemon=True)
    web, guarding = config.web, guarding_of(config)
    host, port = split_address(web.listen_address)
    page = split_address(web.page_address, name="web.page_address") if web.page_address else None
    patience = max(10.0, 3 * config.sampling.interval_seconds) if max_age_seconds is None else max_age_seconds
    app = create_app(
        agent.latest, now=SystemClock().now, max_age_seconds=patience, why_not=agent.last_error, kept=history
    )

    def begin(bound: int, paged: int = 0) -> None:
        scheme = guarding.now.scheme
        log.info("serving %s://%s:%d/ and /metrics", scheme, host or "localhost", bound)
        if page is not None:
            log.info("serving the page and the JSON API at %s://%s:%d/", scheme, page[0] or "localhost", paged)
        say_who_may_look(config, guarding, host if page is None else page[0])
        if history is not None:
            history.begin(agent)
        sampler.start()

    try:
        run(
            app,
            host=host,
            port=port,
            page=page,
            guarding=guarding,
            open_page=web.open_page,
            listening=begin,
        )
    except ListenError as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return FAILED
    finally:
        stop.set()
        if sampler.ident is not None:
            sampler.join(timeout=2.0)
            if history is not None:
                history.end()
    return 0


def history_of(config: Config, node: str, *, ended: "Callable[[Statement], None]" = lambda _: None) -> "History | None":
    """What keeps this node's history, as the configuration says; None: nothing does."""
    from exporter.history import History, boot_id, place_of  # noqa: PLC0415  only what serves pays for SQLite

    path = place_of(config.history.file, os.environ)
    if path is None:
        log.info("no history is kept: a restart forgets counters and receipts; see docs/history.md")
        return None
    log.info("history is kept in %s", path)
    return History(path, config.history, node=node, boot=boot_id(), clock=SystemClock(), ended=ended)


def run_guarded(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; an error an operator can mend is one line and an exit status, not a traceback."""
    try:
        return command(args)
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as err:
        print(f"gpu-efficiency: {without_secrets(str(err))}", file=sys.stderr)
        return USAGE
    except (TraceError, OSError) as err:
        print(f"gpu-efficiency: {without_secrets(str(err))}", file=sys.stderr)
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
