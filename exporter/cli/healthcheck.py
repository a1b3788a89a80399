"""Checks whether the daemon in the same container answers: `python -I -m exporter.cli.healthcheck`.

Exit status 0, or 1 and a line with the reason. Finds address, TLS and client certificates from the daemon's command
line, the environment and the configuration file. Uses the standard library only and does not load the configuration
proper: it runs twice a minute and must cost less than the daemon.
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

TIMEOUT_SECONDS = 4.0
"""Seconds; the Dockerfile allows 5 for all of it."""
INIT_CMDLINE = Path("/proc/1/cmdline")
"""The daemon's command line, unless it shares its process namespace with the node: then it is not looked at."""
_DEFAULTS = {"web": ":19400", "cluster": ":19401"}
_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  what is listened on, and where to ask
_TLS = re.compile(r"^[^#\n]*\btls_server_config\b", re.MULTILINE)
_CLIENT_CERTIFICATES = re.compile(r"^[^#\n]*\bclient_auth_type\b[^#\n]*\bRequire", re.MULTILINE)
_SERVER_HELLO = b"\x16"
"""The first byte of a handshake record (RFC 8446, 5.1); an alert's is 0x15."""


class Endpoint(NamedTuple):
    """Where and how the daemon serves."""

    host: str
    port: int
    tls: bool = False
    client_certificates: bool = False


def main() -> int:
    """Ask; the return value is the exit status."""
    try:
        check(find_endpoint(daemon_arguments(INIT_CMDLINE), os.environ))
    except (OSError, ValueError) as error:
        print(f"unhealthy: {error}")
        return 1
    return 0


def daemon_arguments(path: Path) -> list[str]:
    """The words of the container's first process if that is ours, if only through an init; else none."""
    try:
        arguments = path.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
    return arguments if any(Path(argument).name == "gpu-efficiency" for argument in arguments) else []


def find_endpoint(arguments: Sequence[str], environ: Mapping[str, str]) -> Endpoint:
    """Flags before environment before file, as for the daemon. Raises OSError or ValueError for what cannot be read."""
    flags = _flags(arguments)
    file = tomllib.loads(Path(flags["config"]).read_text(encoding="utf-8")) if "config" in flags else {}

    def setting(section: str, key: str) -> str:
        found = flags.get(f"{section}.{key}", environ.get(f"GPU_EFFICIENCY_{section}_{key}".upper()))
        return str(file.get(section, {}).get(key, "") if found is None else found)

    section = "cluster" if "cluster" in arguments else "web"
    host, _, port = (setting(section, "listen_address") or _DEFAULTS[section]).rpartition(":")
    host = host.strip("[]")
    web = setting("web", "config_file")
    text = Path(web).read_text(encoding="utf-8") if web else ""
    tls = bool(_TLS.search(text))
    return Endpoint(_WILDCARDS.get(host, host), int(port), tls, tls and bool(_CLIENT_CERTIFICATES.search(text)))


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """What `--name value` and `--name=value` say, by the name of the setting."""
    found: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--"):
            found[name.replace("-", "_")] = value if equals else "".join(arguments[index + 1 : index + 2])
    if "web.config.file" in found:  # the name that Prometheus' own exporters have for it
        found["web.config_file"] = found["web.config.file"]
    return found


def check(endpoint: Endpoint) -> None:
    """Return if it answers; raises OSError otherwise.

    Who demands a client certificate demands it of us, who have none: that the server begins a handshake must do.
    """
    with socket.create_connection((endpoint.host, endpoint.port), timeout=TIMEOUT_SECONDS) as connection:
        if endpoint.client_certificates:
            _check_handshake(connection)
        elif endpoint.tls:
            with _unverified_context().wrap_socket(connection) as wrapped:
                _check_healthz(wrapped)
        else:
            _check_healthz(connection)


def _check_healthz(connection: socket.socket) -> None:
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    with connection.makefile("rb") as response:
        status = response.readline(200)
    if not re.match(rb"HTTP/1\.\d 200\b", status):
        raise OSError(f"/healthz is answered with {status.decode(errors='replace').strip() or 'nothing'}")


def _check_handshake(connection: socket.socket) -> None:
    import ssl  # noqa: PLC0415  a hundredth of a second that most checks need not pay

    hello = ssl.MemoryBIO()
    client = _unverified_context().wrap_bio(ssl.MemoryBIO(), hello)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:  # it waits for the answer
        connection.sendall(hello.read())
    if connection.recv(1) != _SERVER_HELLO:
        raise OSError("the server does not begin a TLS handshake: are its certificate and key in order?")


def _unverified_context() -> "ssl.SSLContext":
    """Trusts whoever answers: it is on our own loopback, whatever name its certificate has, and is told no secret."""
    import ssl  # noqa: PLC0415

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":
    sys.exit(main())
