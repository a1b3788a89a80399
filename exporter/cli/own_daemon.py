"""Finds the daemon of this node: its address, who listens there, and which users may be it."""

import os
from contextlib import suppress
from pathlib import Path

from exporter.cli import PROGRAM
from exporter.config import Config, split_address
from exporter.sockets import port_users


def daemon_endpoint(config: Config) -> tuple[str, int]:
    """Return host and port at which the daemon's API is reached from this node. Raises ConfigError."""
    host, port = split_address(config.web.page_address or config.web.listen_address)
    wildcard = host in ("", "0.0.0.0", "::")  # noqa: S104  such an address is reached on loopback
    return "127.0.0.1" if wildcard else host, port


def daemon_url(config: Config) -> str:
    """Return the URL of the daemon's API. Raises ConfigError."""
    host, port = daemon_endpoint(config)
    scheme = "https" if config.web.config_file else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def listening_users(config: Config) -> set[int]:
    """Return the uids of those who listen at the daemon's address. Raises OSError, ConfigError."""
    host, port = daemon_endpoint(config)
    return port_users(port, host=host)


def daemon_users(store: Path | None) -> set[int]:
    """Return whom the daemon may run as: root, the caller, the owner of its store, the user of the packaged unit."""
    import pwd  # noqa: PLC0415  not on Windows, where reports of remote nodes are made

    users = {0, os.geteuid()}
    if store is not None:
        with suppress(OSError):
            users.add(store.stat().st_uid)
    with suppress(KeyError):
        users.add(pwd.getpwnam(PROGRAM).pw_uid)
    return users
