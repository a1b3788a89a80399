"""Holds what several commands share: flags, loading and reloading the configuration, an agent with a web server.

Owns the composition of parts and the exit statuses. The file is reloaded on SIGHUP, or when its content has changed
and then stayed the same for one poll; an invalid configuration is rejected, and the old one stays in use.
"""

import argparse
import gc
import logging
import math
import os
import platform
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from exporter import __version__
from exporter.agent.agent import Agent, AgentSettings
from exporter.clock import SystemClock
from exporter.config import (
    LIVE,
    Config,
    ConfigError,
    LogSettings,
    OtlpSettings,
    changed_settings,
    load,
    split_address,
    with_live_settings,
    with_origin,
)
from exporter.core.model import Observation
from exporter.core.snapshot import DaemonMetadata, ReloadStatus
from exporter.durations import parse_duration
from exporter.logs import configure_logging, set_redaction
from exporter.redact import redact_secrets
from exporter.registry import SCHEDULERS, SOURCES
from exporter.tls import server_context
from exporter.trace import TraceError
from exporter.urls import complete_url
from exporter.worker import Worker

if TYPE_CHECKING:
    from fastapi import FastAPI

    from exporter.core.job_record import JobRecord
    from exporter.core.snapshot import Snapshot
    from exporter.history.recorder import HistoryRecorder
    from exporter.otlp.pusher import Pusher
    from exporter.web.app import LatestSnapshot
    from exporter.web.security import WebConfigWatcher

log = logging.getLogger("gpu-efficiency")
FAILED, USAGE, NO_SOURCE = 1, 2, 3
"""Exit statuses."""
JOIN_SECONDS = 2.0
"""Timeout for the end of a sampling or polling thread."""
_SWITCH_SECONDS = 0.0001
"""Time after which a computing thread must let another run, a fiftieth of Python's default: the web server waits for a
turn at each step of a handshake and a response while others parse what engines, logs and jobs send."""


def prepare_to_serve() -> None:
    """Let no thread keep the web server waiting for long: neither by computing nor by a garbage collection.

    A full collection stops all threads, for 50 to 100 ms while it looks at every module, too; those stay to the end.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def fail(error: object) -> int:
    """Print why a command failed, and return its exit status."""
    print(f"gpu-efficiency: {error}", file=sys.stderr)
    return FAILED


def config_arguments(command: argparse.ArgumentParser) -> None:
    """Add flags that override the configuration; their destinations are its dotted names."""
    config_file_argument(command)
    command.add_argument("--source", dest="source", metavar="NAME", help=f"auto, {', '.join(SOURCES)}")
    command.add_argument("--scheduler", dest="scheduler", metavar="NAME", help=f"auto, {', '.join(SCHEDULERS)}")
    setting_arguments(
        command,
        ("web.listen-address", "HOST:PORT", "where to serve; default :19400, 127.0.0.1:19400 for demo and replay"),
        ("web.page-address", "HOST:PORT", "address of the page and the JSON API; default: web.listen-address"),
        ("sampling.interval-seconds", "TIME", "time between samples; default 1s"),
        (
            "history.file",
            "FILE",
            "history store of this node; default: history.db in the state directory, if writable; empty: none",
        ),
    )
    web_config_file_argument(command)
    url_argument(command, "--dcgm-exporter-url", dest="dcgm_exporter.url", help="an existing dcgm-exporter")


def setting_arguments(command: argparse.ArgumentParser, *rows: tuple[str, str, str]) -> None:
    """Add flags for settings: dotted name with hyphens, metavar, help. Those of [log] follow."""
    of_log = (("log.format", "FORM", "text or json"), ("log.level", "LEVEL", "debug, info, warning or error"))
    for flag, metavar, about in (*rows, *of_log):
        kind = duration_argument() if metavar == "TIME" else str
        command.add_argument(f"--{flag}", dest=flag.replace("-", "_"), type=kind, metavar=metavar, help=about)


def url_argument(command: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """Add a flag that takes a URL, in which http:// can be omitted."""
    command.add_argument(*names, type=complete_url, metavar="URL", **options)


def config_file_argument(command: argparse.ArgumentParser) -> None:
    """Add the flag that names the configuration file."""
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration file: docs/configuration.md")


def web_config_file_argument(command: argparse.ArgumentParser) -> None:
    """Add the flag that names the web configuration file, in both spellings that Prometheus exporters have."""
    command.add_argument(
        "--web.config-file",
        "--web.config.file",
        dest="web.config_file",
        metavar="FILE",
        help="web configuration (YAML) of Prometheus exporters: TLS, client certificates, users; docs/security.md",
    )


def parse_headers(given: Iterable[str], *, key: str = "--header") -> dict[str, str]:
    """Parse header lines, given directly or as @FILE. Errors do not repeat a line: it may hold a password.

    `key` is the flag or setting that has them, for messages.
    """
    found: dict[str, str] = {}
    for text in given:
        for line in _header_lines(text, key):
            name, colon, value = line.partition(":")
            if not (colon and name.strip() and line.isascii() and line.isprintable()):
                where = text if text.startswith("@") else "what was given"
                raise ConfigError(f"{key}: {where} is not 'Name: value' (example: 'Authorization: Bearer ...')")
            found[name.strip()] = value.strip()
    return found


def headers_of_file(path: str, *, key: str) -> dict[str, str]:
    """Read the header lines of the file that the setting `key` names; empty: none. Raises ConfigError."""
    return parse_headers([f"@{path}"] if path else [], key=key)


def ca_file_argument(command: argparse.ArgumentParser, about: str) -> None:
    """Add --ca-file; `about`: whose certificates it is for."""
    command.add_argument(
        "--ca-file", type=Path, metavar="FILE", help=f"certificates (PEM) of the authority of {about} with https"
    )


def tls_context(ca_file: Path | None, *, key: str = "--ca-file") -> ssl.SSLContext:
    """Return what the servers' certificates are verified with; `key` names the file for messages."""
    try:
        return server_context(ca_file)
    except OSError as err:
        raise ConfigError(f"{key}: {ca_file}: no certificate can be read of it: {err.strerror or err}") from err


def _header_lines(text: str, key: str) -> list[str]:
    if not text.startswith("@"):
        return [text]
    try:
        content = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{key}: {text[1:]}: cannot be read: {getattr(err, 'strerror', None) or err}") from err
    return [line for line in content.splitlines() if line.strip()]


def duration_argument(least: float = 0, *, bare_seconds: bool = True, endless: bool = False) -> Callable[[str], float]:
    """Return an argument type: a duration of at least `least` seconds, in seconds; `endless` admits inf, too."""

    def duration(text: str) -> float:
        if endless and text == "inf":
            return math.inf
        try:
            seconds = parse_duration(text, bare_seconds=bare_seconds)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from err
        if seconds < least:
            raise argparse.ArgumentTypeError(f"{text!r} is less than {least:g}s")
        return seconds

    return duration


def timestamp_argument(argument: str) -> float:
    """Parse Unix seconds, or an ISO 8601 date and time, UTC by default."""
    try:
        return float(argument)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(argument)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{argument} is neither Unix seconds nor like 2026-01-31T12:00") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def at_least(least: float) -> Callable[[str], float]:
    """Return an argument type: a finite number of at least `least`."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least:g} or more")
        return value

    return number


def configure(args: argparse.Namespace, *, loopback: bool = False) -> Config:
    """Read the configuration that `args` names, and configure logging with it."""
    config = read_config(args, loopback=loopback)
    set_redaction(redact_secrets)
    configure_logging(form=config.log.format, level=config.log.level)
    return config


def read_config(args: argparse.Namespace, *, loopback: bool = False) -> Config:
    """Read the configuration that `args` names, and the file of carbon intensities.

    With `loopback`, an address without a host means 127.0.0.1.
    """
    given = _setting_flags(args)
    config = load(args.config, flags=given)
    open_ones = {
        f"web.{name}": "127.0.0.1" + address
        for name in ("listen_address", "page_address")
        if (address := getattr(config.web, name)).startswith(":")
    }
    config = load(args.config, flags=given | open_ones) if loopback and open_ones else config
    _ = config.energy.carbon  # a file that cannot be used is refused now: reloaders apply what they are given
    return config


def _setting_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the flags that override the configuration, by dotted key."""
    whole = {"source", "scheduler", "exemptions"}
    return {k: v for k, v in vars(args).items() if v is not None and (k in whole or "." in k)}


def open_web_config(config: Config) -> "WebConfigWatcher":
    """Load the file web.config_file, if any; raises ConfigError."""
    from exporter.web.security import WebConfigWatcher  # noqa: PLC0415  only servers import the web

    return WebConfigWatcher(Path(config.web.config_file)) if config.web.config_file else WebConfigWatcher()


def log_page_access(config: Config, web_config: "WebConfigWatcher", host: str) -> None:
    """Log at the start that browsers on other hosts will be rejected, if they will."""
    from exporter.connections import is_loopback  # noqa: PLC0415  only servers import it

    if not (config.web.open_page or web_config.current.authenticates or is_loopback(host) or host == "localhost"):
        log.info("the page and the JSON API are served over the loopback only: no authentication; see docs/security.md")


def daemon_metadata(
    config: Config,
    *,
    source: str,
    simulated: bool = False,
    host: str = "",
    node: str = "",
    reload: ReloadStatus | None = None,
) -> DaemonMetadata:
    """Return what the daemon exports about itself; `node` is this node's name in its scheduler."""
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
    """Return the settings of a reloaded configuration that an agent applies."""
    return AgentSettings(terms=config.terms(node), policy=config.policy, by_model=config.policies(), reload=reload)


def publish(
    agent: Agent,
    config: Config,
    observations: Callable[[threading.Event], Iterable[Observation]],
    *,
    max_age_seconds: float | None = None,
    history: "HistoryRecorder | None" = None,
) -> int:
    """Sample in a thread and serve in this one until stopped. Sampling starts once the port is bound.

    `history` records what the agent publishes, from before the first sample to after the last scrape.
    """
    from exporter.web.app import SnapshotProvider, create_app  # noqa: PLC0415  only servers import the web

    stop = threading.Event()
    sampler = threading.Thread(target=lambda: agent.run(observations(stop)), name="sampler", daemon=True)
    max_age = max(10.0, 3 * config.sampling.interval_seconds) if max_age_seconds is None else max_age_seconds
    now, why_not = SystemClock().now, agent.last_error
    app = create_app(agent.latest, now=now, max_age_seconds=max_age, why_not=why_not, history=history)
    provider = SnapshotProvider(latest=agent.latest, now=now, max_age_seconds=max_age, why_not=why_not)
    pusher = open_pusher(config.otlp, lambda: provider.poll_checkpointed(history))

    def begin() -> None:
        if history is not None:
            history.begin(agent)
        if pusher is not None:
            agent.set_pushes(pusher.counts)
            pusher.start()
        sampler.start()

    try:
        return serve_app(app, config, begin, page_address=config.web.page_address)
    finally:
        stop.set()
        if pusher is not None:
            pusher.close()
        if sampler.ident is not None:
            sampler.join(timeout=JOIN_SECONDS)
            if history is not None:
                history.end()


def open_pusher(settings: OtlpSettings, scraped: "Callable[[], LatestSnapshot]") -> "Pusher | None":
    """Open the thread that pushes what `scraped` returns; None if no endpoint is set. Raises ConfigError."""
    if not settings.endpoint:
        return None
    try:
        from exporter.otlp import pusher  # noqa: PLC0415  its libraries are an extra
    except ModuleNotFoundError as err:
        raise ConfigError(
            f"otlp.endpoint: the OpenTelemetry SDK is missing ({err}): pip install 'gpu-efficiency-exporter[otlp]'"
        ) from err

    def headers() -> dict[str, str]:
        return headers_of_file(settings.headers_file, key="otlp.headers_file")

    def snapshot() -> "Snapshot | None":
        latest = scraped()
        return None if latest.problem else latest.snapshot

    _check_receiver(settings, secret=bool(headers()))
    return pusher.open_pusher(settings, headers, snapshot)


def _check_receiver(settings: OtlpSettings, *, secret: bool) -> None:
    """Raise ConfigError if metrics cannot be pushed to the endpoint, or not safely."""
    from exporter.connections import is_loopback  # noqa: PLC0415  only servers import it

    url = urlsplit(settings.endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"otlp.endpoint: {settings.endpoint!r} is not like http://collector:4318/v1/metrics")
    if secret and url.scheme == "http" and url.hostname != "localhost" and not is_loopback(url.hostname):
        raise ConfigError(
            f"otlp.endpoint: {settings.endpoint!r} is not https: all on the way could read otlp.headers_file"
        )
    if settings.ca_file:
        tls_context(Path(settings.ca_file), key="otlp.ca_file")


def serve_app(
    app: "FastAPI",
    config: Config,
    begin: Callable[[], None],
    *,
    key: str = "web.listen_address",
    page_address: str = "",
    what: str = "",
) -> int:
    """Serve until stopped, and return the exit status; `begin` is called once the ports are bound.

    `key` names the setting of the address, `what` describes the metrics in the log.
    """
    from exporter.web.server import WebListenError, run  # noqa: PLC0415  only servers import the web

    web_config, (section, name) = open_web_config(config), key.split(".")
    host, port = split_address(getattr(getattr(config, section), name), name=key)
    page = split_address(page_address, name="web.page_address") if page_address else None

    def on_listening(bound: int, paged: int = 0) -> None:
        scheme = web_config.current.scheme
        log.info("serving %s://%s:%d/ and /metrics%s", scheme, host or "localhost", bound, what)
        if page is not None:
            log.info("serving the page and the JSON API at %s://%s:%d/", scheme, page[0] or "localhost", paged)
        log_page_access(config, web_config, host if page is None else page[0])
        begin()

    open_page = config.web.open_page
    prepare_to_serve()
    try:
        run(app, host=host, port=port, page=page, watcher=web_config, open_page=open_page, on_listening=on_listening)
    except WebListenError as err:
        return fail(f"{err}".replace("web.listen_address", key))
    return 0


def open_history(
    config: Config, node: str, *, ended: "Callable[[JobRecord], None]" = lambda _: None
) -> "HistoryRecorder | None":
    """Open the recorder of this node's history; None if the configuration has no store."""
    from exporter.history.recorder import HistoryRecorder  # noqa: PLC0415  only servers import SQLite
    from exporter.history.store import boot_id, store_path  # noqa: PLC0415  only servers import SQLite

    path = store_path(config.history.file, os.environ)
    if path is None:
        log.info("no history is kept: a restart loses counters and job reports; see docs/operations.md")
        return None
    log.info("history is kept in %s", path)
    return HistoryRecorder(path, config.history, node=node, boot=boot_id(), clock=SystemClock(), ended=ended)


def run_guarded(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; errors that an operator can fix become one line and an exit status, not a traceback."""
    try:
        return command(args)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as err:
        message = str(err)
        with suppress(ConfigError):  # the file may have changed since
            message = with_origin(message, getattr(args, "config", None), flags=_setting_flags(args))
        print(f"gpu-efficiency: {redact_secrets(message)}", file=sys.stderr)
        return USAGE
    except (TraceError, OSError) as err:
        return fail(redact_secrets(str(err)))
    except KeyboardInterrupt:
        return 0


POLL_SECONDS = 2.0
"""Seconds between two reads of the file, which is small and in the page cache."""
_MOST_NAMED = 20
"""Most settings that one line of the log names."""
ApplyConfig = Callable[[Config, ReloadStatus], None]
"""Takes the configuration in force and the result of the reload; called on the reloader's thread."""


class ConfigReloader:
    """Reloads the configuration file, and holds the configuration in force."""

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
        """`config` is what `read_again` has just returned. `used`: sections that the command uses; empty: all."""
        self._path, self._read_again, self._wall = path, read_again, wall
        self._live, self._used = live, used or Config.__struct_fields__
        self._config, self._applied_content = config, _file_content(path)
        """The configuration in force, and the file's content when it was last loaded."""
        self._last_content = self._applied_content
        self.status = ReloadStatus(at=wall())
        self._requests: SimpleQueue[None] = SimpleQueue()

    def request(self) -> None:
        """Reload the file now, changed or not, as SIGHUP does. May be called in a signal handler."""
        self._requests.put(None)

    def run(self, apply: ApplyConfig, stop: threading.Event) -> None:
        """Poll until `stop` is set."""
        while not stop.is_set():
            requested = self._wait()
            if not stop.is_set():
                self.poll(apply, requested=requested)

    def poll(self, apply: ApplyConfig, *, requested: bool = False) -> None:
        """Check the file once. If it has changed or `requested`, load it and call `apply`, also if it was rejected."""
        before, self._last_content = self._last_content, _file_content(self._path)
        if requested or (self._last_content != self._applied_content and self._last_content == before):
            self._applied_content = self._last_content
            self._reload()
            apply(self._config, self.status)

    def _wait(self) -> bool:
        """Wait for the next poll; return True if a reload was requested."""
        try:
            self._requests.get(timeout=POLL_SECONDS)
        except Empty:
            return False
        while not self._requests.empty():
            self._requests.get()
        return True

    def _reload(self) -> None:
        if self._path is None:
            log.info("no file to reload: this was started without --config")
        try:
            loaded = self._read_again()
        except ConfigError as err:
            self.status = replace(self.status, refused=str(err))
            log.error("the configuration is rejected, and the old one stays in use: %s", err)  # noqa: TRY400  not a bug
            return
        before, self._config = self._config, with_live_settings(self._config, loaded, self._live)
        waiting = tuple(name for name in changed_settings(self._config, loaded) if name.partition(".")[0] in self._used)
        self.status = ReloadStatus(at=self._wall(), restart=waiting)
        log.info(
            "the configuration was read again: %s",
            _name_list(changed_settings(before, self._config)) or "nothing in it is new",
        )
        if waiting:
            log.warning(
                "a restart is needed to apply changes of %s; until then the old values are used", _name_list(waiting)
            )


def open_reloader(args: argparse.Namespace, config: Config, *, loopback: bool = False) -> ConfigReloader:
    """Return the reloader of the file that `args` names; `config` was just read from it."""
    return ConfigReloader(args.config, config, lambda: read_config(args, loopback=loopback))


@contextmanager
def on_sighup(reloader: ConfigReloader) -> Iterator[None]:
    """Reload on SIGHUP, which would otherwise end the process; only in the main thread."""
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
    """Poll the file in a thread; changes of [log] are applied at once, others by `apply`."""
    set_last: LogSettings | None = None

    def apply_with_logging(config: Config, status: ReloadStatus) -> None:
        nonlocal set_last
        if config.log != set_last:  # only if needed: meanwhile lines of other threads bypass the handler
            set_last = config.log
            configure_logging(form=config.log.format, level=config.log.level)
        apply(config, status)

    stop = threading.Event()
    Worker("reloader", partial(reloader.run, apply_with_logging, stop), stop=stop).start()
    try:
        yield
    finally:
        stop.set()
        reloader.request()


def _file_content(path: Path | None) -> bytes | None:
    """Content of the file, with symbolic links followed; None if it cannot be read."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _name_list(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
