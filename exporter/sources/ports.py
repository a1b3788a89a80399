"""Checks who listens on a port that nobody configured."""

import os
from pathlib import Path
from typing import Any

from exporter.sockets import port_users
from exporter.sources.base import SourceError


def is_chosen(config: Any, section: Any, key: str) -> bool:
    """Whether the operator chose a source or its address: `key` of `section`, its settings, is not the default."""
    return bool(config.source != "auto" or getattr(section, key) != getattr(type(section)(), key))


def require_trusted_port(port: int, *, remedy: str, proc: Path = Path("/proc/self")) -> None:
    """Raise SourceError with `remedy` if a process of another user than root and our own listens on the port.

    Any user of the node can listen on a free port and invent GPUs. An address that was configured is believed without
    this. `proc` is a process in our network namespace.
    """
    try:
        owners = port_users(port, proc=proc)
    except OSError as error:
        raise SourceError(f"who listens on port {port} cannot be read: {error}: {remedy}") from error
    strangers = sorted(owners - {0, os.geteuid()})
    if strangers:
        raise SourceError(f"port {port} belongs to user {strangers[0]}, who could invent GPUs: {remedy}")
