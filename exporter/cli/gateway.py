"""Runs the command `gateway`: serves job records of many nodes on a unix socket, to each user those of his own jobs."""

import argparse
import logging
import pwd
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from exporter.cli.wiring import (
    ConfigReloader,
    config_file_argument,
    configure,
    fail,
    headers_of_file,
    on_sighup,
    prepare_to_serve,
    read_config,
    reload_in_background,
    setting_arguments,
    tls_context,
)
from exporter.config import Config, ConfigError
from exporter.core.job_record import JobRecordQuery
from exporter.report.nodes import fetch_records
from exporter.schedulers.privacy import UserMask, open_mask
from exporter.schedulers.slurm.accounting import nodes_of_jobs
from exporter.schedulers.slurm.client import Commands, SlurmUnavailableError
from exporter.training.unix_socket import ReportListenError, bind_socket
from exporter.urls import complete_url
from exporter.web.gateway import FoundRecords, GatewayError, Identity, create_gateway_app
from exporter.web.limits import ConnectionLimits
from exporter.web.security import WebConfigWatcher, WebListener
from exporter.web.server import run_listeners

log = logging.getLogger("gpu-efficiency")
_USED_SECTIONS = ("gateway", "log", "privacy", "slurm")
"""Sections of the configuration that this command uses."""
_NODE = "{node}"
"""Stands for a node's name in gateway.nodes."""
_MAX_BYTES = 16 << 20
"""Most that the nodes together may send for one request."""
_SACCT_SECONDS = 20.0
_LIMITS = ConnectionLimits(requests_per_address=32, answer_seconds=300)
"""The app refuses a user's third request, and the proxy is one address; nodes that are down take ten seconds each."""


def gateway(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    config = configure(args)
    reloader = ConfigReloader(args.config, config, lambda: read_config(args), live=("log",), used=_USED_SECTIONS)
    nodes, mask = _Nodes(config), _open_mask(config)
    settings = config.gateway
    identity = Identity(
        proxy_uid=_proxy_uid(settings.proxy_user), header=settings.user_header, exported=mask.user if mask else str
    )
    prepare_to_serve()
    try:
        with (
            on_sighup(reloader),
            reload_in_background(reloader, lambda *_: None),
            _listening(Path(settings.socket)) as sock,
        ):
            listener = WebListener(WebConfigWatcher(), open_page=True)
            app = create_gateway_app(nodes.fetch, identity)
            ready = partial(log.info, "serving each user the records of his own jobs at unix:%s", settings.socket)
            run_listeners(app, [(sock, listener)], _LIMITS, on_listening=ready)
    except ReportListenError as err:
        return fail(err)
    return 0


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Listen on the socket while the block runs; then remove it, unless another process has replaced it."""
    with bind_socket(path, socket.SOCK_STREAM, key="gateway.socket") as sock:
        inode = path.lstat().st_ino
        try:
            yield sock
        finally:
            with suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()


def _open_mask(config: Config) -> UserMask | None:
    if config.privacy.users == "drop":
        raise ConfigError('privacy.users: "drop": the nodes then have no users, so no job is known to be one\'s own')
    return open_mask(config.privacy)


def _proxy_uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid if user else None
    except KeyError:
        raise ConfigError(f"gateway.proxy_user: there is no user {user!r} here") from None


class _Nodes:
    """The nodes' daemons, and how to ask them."""

    def __init__(self, config: Config) -> None:
        """Raise ConfigError if they cannot be asked."""
        settings = config.gateway
        self._urls = tuple(complete_url(url) for url in settings.nodes)
        if not self._urls:
            raise ConfigError('gateway.nodes: names none; example: ["https://{node}:19400"]')
        self._settings, self._slurm = settings, config.slurm
        headers, _ = self._credentials()
        for url in self._urls:
            scheme = urlsplit(url).scheme
            if scheme not in ("http", "https"):
                raise ConfigError(f"gateway.nodes: {url!r} is not like http://node7:19400")
            if headers and scheme == "http":
                raise ConfigError(
                    f"gateway.nodes: {url!r} is not https: whoever listens there, such as a user's job while no daemon"
                    " runs, would get the credentials of gateway.header_file"
                )

    def _credentials(self) -> tuple[dict[str, str], ssl.SSLContext]:
        """Read the headers and the authority anew, which may be replaced at any time. Raises ConfigError."""
        settings = self._settings
        ca_file = Path(settings.ca_file) if settings.ca_file else None
        headers = headers_of_file(settings.header_file, key="gateway.header_file")
        return headers, tls_context(ca_file, key="gateway.ca_file")

    def fetch(self, wanted: JobRecordQuery, user: str) -> FoundRecords:
        """Return what the nodes have of the user's jobs. Raises GatewayError."""
        try:
            headers, verify = self._credentials()
            urls = self._urls_for(wanted, user)
            found = fetch_records(urls, wanted, headers=headers, verify=verify, max_bytes=_MAX_BYTES)
        except (ConfigError, SlurmUnavailableError) as err:
            # By the name that the nodes export: with hashed names, the log has no other.
            log.warning("a request of %s was not answered: %s", wanted.user, str(err).replace(user, wanted.user))
            raise GatewayError(str(err)) from err
        return FoundRecords(records=found.records, unanswered=found.unanswered, notes=found.notes, cut=found.cut)

    def _urls_for(self, wanted: JobRecordQuery, user: str) -> list[str]:
        if not any(_NODE in url for url in self._urls):
            return list(self._urls)
        # One at a time each: `Commands` runs one command.
        commands = Commands(bin_dir=self._slurm.bin_dir, conf=self._slurm.conf, timeout=_SACCT_SECONDS)
        names = nodes_of_jobs(commands, user, wanted)
        return [url.replace(_NODE, name) for url in self._urls for name in (names if _NODE in url else ("",))]


def gateway_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `gateway`."""
    config_file_argument(command)
    setting_arguments(command, ("gateway.socket", "FILE", "where to serve; default /run/gpu-efficiency/gateway.sock"))
