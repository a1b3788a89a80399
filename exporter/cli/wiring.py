"""Holds what several commands share: configuration flags, loading and reloading, and an agent beside a web server.

Owns the composition of parts and the exit statuses. The file is reloaded on SIGHUP, or once its changed content has
stayed the same for one poll; a configuration that is not valid as a whole is refused, and the old one stays in use.
"""

import argparse
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from msgspec.structs import replace

from exporter import __version__
from exporter.agent.agent import Agent, AgentSettings
from exporter.clock import SystemClock
from exporter.config import (
    LIVE,
    Config,
    ConfigError,
    LogSettings,
    changed_settings,
    load,
    split_address,
    with_live_settings,
)
from exporter.core.model import Observation
from exporter.core.snapshot import DaemonMetadata, ReloadStatus
from exporter.logs import configure_logging, set_redaction
from exporter.redact import redact_secrets
from exporter.registry import SCHEDULERS, SOURCES
from exporter.trace import TraceError

if TYPE_CHECKING:
    from exporter.core.job_record import JobRecord
    from exporter.history.recorder import HistoryRecorder
    from exporter.web.security import WebConfigWatcher

log = logging.getLogger("gpu-efficiency")
FAILED, USAGE, NO_SOURCE = 1, 2, 3
"""Exit statuses."""


def fail(error: object) -> int:
    """Print why a command could not do what was asked; give its exit status."""
    print(f"gpu-efficiency: {error}", file=sys.stderr)
    return FAILED


def config_arguments(command: argparse.ArgumentParser) -> None:
    """Flags that override the configuration; their destinations are its dotted names."""
    config_file_argument(command)
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
    web_config_file_argument(command)
    command.add_argument(
        "--dcgm-exporter-url", dest="dcgm_exporter.url", metavar="URL", help="an existing dcgm-exporter"
    )


def config_file_argument(command: argparse.ArgumentParser) -> None:
    """The flag that names the configuration."""
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML; see check-config")


def web_config_file_argument(command: argparse.ArgumentParser) -> None:
    """The flag that names certificates and users, in both spellings that exporters have."""
    command.add_argument(
        "--web.config-file",
        "--web.config.file",
        dest="web.config_file",
        metavar="FILE",
        help="YAML of Prometheus' exporters: TLS, client certificates, users; docs/web.md",
    )


def configure(args: argparse.Namespace, *, loopback: bool = False) -> Config:
    """Read the configuration that `args` asks for, and set up logging by it."""
    config = read_config(args, loopback=loopback)
    set_redaction(redact_secrets)
    configure_logging(form=config.log.format, level=config.log.level)
    return config


def read_config(args: argparse.Namespace, *, loopback: bool = False) -> Config:
    """The configuration that `args` asks for; `loopback`: an address without a host is this host's own."""
    given = {k: v for k, v in vars(args).items() if v is not None and (k in {"source", "scheduler"} or "." in k)}
    config = load(args.config, flags=given)
    open_ones = {
        f"web.{name}": "127.0.0.1" + address
        for name in ("listen_address", "page_address")
        if (address := getattr(config.web, name)).startswith(":")
    }
    return load(args.config, flags=given | open_ones) if loopback and open_ones else config


def open_web_config(config: Config) -> "WebConfigWatcher":
    """What guards the web, as web.config_file says; raises ConfigError."""
    from exporter.web.security import WebConfigWatcher  # noqa: PLC0415  only what serves pays for the web

    return WebConfigWatcher(Path(config.web.config_file)) if config.web.config_file else WebConfigWatcher()


def log_page_access(config: Config, web_config: "WebConfigWatcher", host: str) -> None:
    """Tell at the start why a browser elsewhere will be refused, for its user will ask here."""
    from exporter.connections import is_loopback  # noqa: PLC0415  likewise

    if not (config.web.open_page or web_config.current.authenticates or is_loopback(host) or host == "localhost"):
        log.info("the page and the JSON API are served over the loopback only: no authentication; see docs/web.md")


def daemon_metadata(
    config: Config,
    *,
    source: str,
    simulated: bool = False,
    host: str = "",
    node: str = "",
    reload: ReloadStatus | None = None,
) -> DaemonMetadata:
    """What the daemon says of itself; `node` is the name its scheduler has for it."""
    return DaemonMetadata(
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


def live_settings(config: Config, node: str, reload: ReloadStatus) -> AgentSettings:
    """What an agent takes of a configuration that was read again."""
    return AgentSettings(terms=config.terms(node), policy=config.policy, by_model=config.policies(), reload=reload)


def publish(
    agent: Agent,
    config: Config,
    observations: Callable[[threading.Event], Iterable[Observation]],
    *,
    max_age_seconds: float | None = None,
    history: "HistoryRecorder | None" = None,
) -> int:
    """Sample in a thread, serve in this one, until told to stop. Nothing is sampled before the port is ours.

    `history` keeps what the agent tells, from before the first sample to after the last scrape.
    """
    from exporter.web.app import create_app  # noqa: PLC0415  only what serves pays for the web
    from exporter.web.server import WebListenError, run  # noqa: PLC0415  only what serves pays for the web

    stop = threading.Event()
    sampler = threading.Thread(target=lambda: agent.run(observations(stop)), name="sampler", daemon=True)
    web, web_config = config.web, open_web_config(config)
    host, port = split_address(web.listen_address)
    page = split_address(web.page_address, name="web.page_address") if web.page_address else None
    max_age = max(10.0, 3 * config.sampling.interval_seconds) if max_age_seconds is None else max_age_seconds
    app = create_app(
        agent.latest, now=SystemClock().now, max_age_seconds=max_age, why_not=agent.last_error, history=history
    )

    def begin(bound: int, paged: int = 0) -> None:
        scheme = web_config.current.scheme
        log.info("serving %s://%s:%d/ and /metrics", scheme, host or "localhost", bound)
        if page is not None:
            log.info("serving the page and the JSON API at %s://%s:%d/", scheme, page[0] or "localhost", paged)
        log_page_access(config, web_config, host if page is None else page[0])
        if history is not None:
            history.begin(agent)
        sampler.start()

    try:
        run(
            app,
            host=host,
            port=port,
            page=page,
            watcher=web_config,
            open_page=web.open_page,
            on_listening=begin,
        )
    except WebListenError as err:
        return fail(err)
    finally:
        stop.set()
        if sampler.ident is not None:
            sampler.join(timeout=2.0)
            if history is not None:
                history.end()
    return 0


def open_history(
    config: Config, node: str, *, ended: "Callable[[JobRecord], None]" = lambda _: None
) -> "HistoryRecorder | None":
    """What keeps this node's history, as the configuration says; None: nothing does."""
    from exporter.history.recorder import HistoryRecorder  # noqa: PLC0415  only what serves pays for SQLite
    from exporter.history.store import boot_id, store_path  # noqa: PLC0415  only what serves pays for SQLite

    path = store_path(config.history.file, os.environ)
    if path is None:
        log.info("no history is kept: a restart forgets counters and receipts; see docs/history.md")
        return None
    log.info("history is kept in %s", path)
    return HistoryRecorder(path, config.history, node=node, boot=boot_id(), clock=SystemClock(), ended=ended)


def run_guarded(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; an error an operator can mend is one line and an exit status, not a traceback."""
    try:
        return command(args)
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as err:
        print(f"gpu-efficiency: {redact_secrets(str(err))}", file=sys.stderr)
        return USAGE
    except (TraceError, OSError) as err:
        return fail(redact_secrets(str(err)))
    except KeyboardInterrupt:
        return 0


POLL_SECONDS = 2.0
"""Between two looks at the file: a few kilobytes, which the kernel has at hand."""
_MOST_NAMED = 20
"""Settings that one line of the log names."""
ApplyConfig = Callable[[Config, ReloadStatus], None]
"""Takes what holds from now on, and what became of the file; called on the thread that looks."""


class ConfigReloader:
    """The configuration's file, and what of it holds now."""

    def __init__(
        self,
        path: Path | None,
        config: Config,
        read_again: Callable[[], Config],
        *,
        live: tuple[str, ...] = LIVE,
        used: tuple[str, ...] = (),
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`config` is what `read_again` gave just now. `used`: sections that the command has a use for; empty: all."""
        self._path, self._read_again, self._wall = path, read_again, wall
        self._live, self._used = live, used or Config.__struct_fields__
        self._config, self._applied_content = config, _file_content(path)
        """What holds, and the file's content when it was last read."""
        self._last_content = self._applied_content
        self.status = ReloadStatus(at=wall())
        self._requests: SimpleQueue[None] = SimpleQueue()

    def request(self) -> None:
        """Have the file read now, changed or not: what SIGHUP does. May be called by a signal's handler."""
        self._requests.put(None)

    def run(self, apply: ApplyConfig, stop: threading.Event) -> None:
        """Look until `stop` is set."""
        while not stop.is_set():
            requested = self._wait()
            if not stop.is_set():
                self.poll(apply, requested=requested)

    def poll(self, apply: ApplyConfig, *, requested: bool = False) -> None:
        """Look once. What has changed is read and handed over, be it taken or refused; `asked`: read it in any case."""
        before, self._last_content = self._last_content, _file_content(self._path)
        if requested or (self._last_content != self._applied_content and self._last_content == before):
            self._applied_content = self._last_content
            self._reload()
            apply(self._config, self.status)

    def _wait(self) -> bool:
        """Wait for the next look; True: somebody asked for it."""
        try:
            self._requests.get(timeout=POLL_SECONDS)
        except Empty:
            return False
        while not self._requests.empty():
            self._requests.get()
        return True

    def _reload(self) -> None:
        if self._path is None:
            log.info("there is no file to read again: this was started without --config")
        try:
            loaded = self._read_again()
        except ConfigError as err:
            self.status = replace(self.status, refused=str(err))
            log.error("the configuration is refused, and the one before it holds: %s", err)  # noqa: TRY400  no bug of ours
            return
        before, self._config = self._config, with_live_settings(self._config, loaded, self._live)
        waiting = tuple(name for name in changed_settings(self._config, loaded) if name.partition(".")[0] in self._used)
        self.status = ReloadStatus(at=self._wall(), restart=waiting)
        log.info(
            "the configuration was read again: %s",
            _name_list(changed_settings(before, self._config)) or "nothing in it is new",
        )
        if waiting:
            log.warning("a restart is needed for what has changed in %s; until then the old holds", _name_list(waiting))


def open_reloader(args: argparse.Namespace, config: Config, *, loopback: bool = False) -> ConfigReloader:
    """The file that `args` names; `config` is what was just read from it."""
    return ConfigReloader(args.config, config, lambda: read_config(args, loopback=loopback))


@contextmanager
def on_sighup(reloader: ConfigReloader) -> Iterator[None]:
    """Take SIGHUP, which would end the process, as the wish that the file be read again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: reloader.request())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def reload_in_background(reloader: ConfigReloader, apply: ApplyConfig) -> Iterator[None]:
    """Look at the file meanwhile, in a thread of its own; what is said of the log holds at once."""
    set_last: LogSettings | None = None

    def apply_with_logging(config: Config, status: ReloadStatus) -> None:
        nonlocal set_last
        if config.log != set_last:  # while it is set up, a line of another thread goes its own way
            set_last = config.log
            configure_logging(form=config.log.format, level=config.log.level)
        apply(config, status)

    stop = threading.Event()
    threading.Thread(target=reloader.run, args=(apply_with_logging, stop), name="reloader", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
        reloader.request()


def _file_content(path: Path | None) -> bytes | None:
    """What the file says, through whatever links lead to it; None: it cannot be read."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _name_list(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
