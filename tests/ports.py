"""Ports of the loopback for programs that cannot choose one themselves and report it."""

import secrets  # random is seeded by some tests: every worker would choose the same port
import socket
from contextlib import ExitStack

_BELOW_THE_SYSTEM_S = range(10_000, 32_000)
"""Linux gives connections ports from 32768 on: one of those may be taken between here and the program's start."""


def free_port() -> int:
    """Return a port on which nothing listens."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, ...]:
    """Return so many different ports on which nothing listens."""
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            port = secrets.choice(_BELOW_THE_SYSTEM_S)
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            ports.append(port)
        return tuple(ports)
