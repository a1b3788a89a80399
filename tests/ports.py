"""Ports of the loopback for programs that cannot choose one themselves and report it."""

import secrets  # random is seeded by some tests: every worker would choose the same port
import socket

_BELOW_THE_SYSTEM_S = range(10_000, 32_000)
"""Linux gives connections ports from 32768 on: one of those may be taken between here and the program's start."""


def free_port() -> int:
    """Return a port on which nothing listens."""
    while True:
        port = secrets.choice(_BELOW_THE_SYSTEM_S)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
