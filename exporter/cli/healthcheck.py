"""What a container engine runs to learn whether the daemon beside it answers: `python -I -m exporter.cli.healthcheck`.

Owns one question and its answer: exit status 0, or 1 and a line that says why. Finds the address, TLS and client
certificates as the daemon's own command line, the environment and the configuration file name them. Refuses to load the
configuration proper: asked twice a minute, that would cost more than the daemon does. Standard library only.
"""

import os
import re
import socket
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ssl

PATIENCE = 4.0
"""Seconds; the Dockerfile allows 5 for all of it."""
FIRST = Path("/proc/1/cmdline")
"""The daemon's command line, unless it shares its process namespace with the node: then it is not looked at."""
_DEFAULTS = {"web": ":19400", "cluster": ":19401"}
_EVERY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  what is listened on, and where to ask
_TLS = re.compile(r"^[^#\n]*\btls_server_config\b", re.MULTILINE)
_CLIENTS = re.compile(r"^[^#\n]*\bclient_auth_type\b[^#\n]*\bRequire", re.MULTILINE)
_SERVER_HELLO = b"\x16"
"""The first byte of a handshake record (RFC 8446, 5.1); an alert's is 0x15."""


class Served(NamedTuple):
    """Where and how the daemon serves."""

    host: str
    port: int
    tls: bool = False
    client_certificates: bool = False


def main() -> int:
    """Ask; the return value is the exit status."""
    try:
        ask(served(first_words(FIRST), os.environ))
    except (OSError, ValueError) as error:
        print(f"unhealthy: {error}")
        return 1
    return 0


def first_words(path: Path) -> list[str]:
    """The words of the container's first process if that is ours, if only through an init; else none."""
    try:
        words = path.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
    return words if any(Path(word).name == "gpu-efficiency" for word in words) else []


def served(words: Sequence[str], environ: Mapping[str, str]) -> Served:
    """Flags before environment before file, as for the daemon. Raises OSError or ValueError for what cannot be read."""
    flags = _flags(words)
    file = tomllib.loads(Path(flags["config"]).read_text(encoding="utf-8")) if "config" in flags else {}

    def told(section: str, key: str) -> str:
        found = flags.get(f"{section}.{key}", environ.get(f"GPU_EFFICIENCY_{section}_{key}".upper()))
        return str(file.get(section, {}).get(key, "") if found is None else found)

    section = "cluster" if "cluster" in words else "web"
    host, _, port = (told(section, "listen_address") or _DEFAULTS[section]).rpartition(":")
    host = host.strip("[]")
    web = told("web", "config_file")
    text = Path(web).read_text(encoding="utf-8") if web else ""
    tls = bool(_TLS.search(text))
    return Served(_EVERY.get(host, host), int(port), tls, tls and bool(_CLIENTS.search(text)))


def _flags(words: Sequence[str]) -> dict[str, str]:
    """What `--name value` and `--name=value` say, by the name of the setting."""
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            found[name.replace("-", "_")] = value if equals else "".join(words[index + 1 : index + 2])
    if "web.config.file" in found:  # the name that Prometheus' own exporters have for it
        found["web.config_file"] = found["web.config.file"]
    return found


def ask(at: Served) -> None:
    """Return if it answers; raises OSError otherwise.

    Who demands a client certificate demands it of us, who have none: that the server begins a handshake must do.
    """
    with socket.create_connection((at.host, at.port), timeout=PATIENCE) as line:
        if at.client_certificates:
            _begins(line)
        elif at.tls:
            with _context().wrap_socket(line) as wrapped:
                _is_well(wrapped)
        else:
            _is_well(line)


def _is_well(line: socket.socket) -> None:
    line.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    with line.makefile("rb") as answer:
        status = answer.readline(200)
    if not re.match(rb"HTTP/1\.\d 200\b", status):
        raise OSError(f"/healthz is answered with {status.decode(errors='replace').strip() or 'nothing'}")


def _begins(line: socket.socket) -> None:
    import ssl  # noqa: PLC0415  a hundredth of a second that most checks need not pay

    hello = ssl.MemoryBIO()
    with_us = _context().wrap_bio(ssl.MemoryBIO(), hello)
    try:
        with_us.do_handshake()
    except ssl.SSLWantReadError:  # it waits for the answer
        line.sendall(hello.read())
    if line.recv(1) != _SERVER_HELLO:
        raise OSError("the server does not begin a TLS handshake: are its certificate and key in order?")


def _context() -> "ssl.SSLContext":
    """Trusts whoever answers: it is on our own loopback, whatever name its certificate has, and is told no secret."""
    import ssl  # noqa: PLC0415

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":
    sys.exit(main())
