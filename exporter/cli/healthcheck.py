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
"""The daemon's command line in a container; ignored if pid 1 is another program, as in the host's pid namespace."""
_DEFAULTS = {"web": ":19400", "cluster": ":19401"}
_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  listen address -> address to connect to
_TLS = re.compile(r"^[^#\n]*\btls_server_config\b", re.MULTILINE)
_CLIENT_CERTIFICATES = re.compile(r"^[^#\n]*\bclient_auth_type\b[^#\n]*\bRequire", re.MULTILINE)
_SERVER_HELLO = b"\x16"
"""The first byte of a handshake record (RFC 8446, 5.1); an alert's is 0x15."""


class Endpoint(NamedTuple):
    """Address and TLS settings of the daemon."""

    host: str
    port: int
    tls: bool = False
    client_certificates: bool = False


def main() -> int:
    """Check the daemon and return the exit status."""
    try:
        check(find_endpoint(daemon_arguments(INIT_CMDLINE), os.environ))
    except (OSError, ValueError) as error:
        print(f"unhealthy: {error}")
        return 1
    return 0


def daemon_arguments(path: Path) -> list[str]:
    """Arguments of the container's first process if it runs gpu-efficiency, directly or through an init; else none."""
    try:
        arguments = path.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
    return arguments if any(Path(argument).name == "gpu-efficiency" for argument in arguments) else []


def find_endpoint(arguments: Sequence[str], environ: Mapping[str, str]) -> Endpoint:
    """Find the endpoint in flags, else environment, else file. Raises OSError or ValueError if one is invalid."""
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
    """Values of `--name value` and `--name=value` by the dotted name of the setting."""
    found: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--"):
            found[name.replace("-", "_")] = value if equals else "".join(arguments[index + 1 : index + 2])
    if "web.config.file" in found:  # the spelling of Prometheus' own exporters
        found["web.config_file"] = found["web.config.file"]
    return found


def check(endpoint: Endpoint) -> None:
    """Return if the daemon answers; raises OSError otherwise.

    If it requires a client certificate, which this program does not have, the start of a TLS handshake is enough.
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
        raise OSError(f"/healthz answers {status.decode(errors='replace').strip() or 'nothing'}")


def _check_handshake(connection: socket.socket) -> None:
    import ssl  # noqa: PLC0415  takes 10 ms, and most checks do not need it

    hello = ssl.MemoryBIO()
    client = _unverified_context().wrap_bio(ssl.MemoryBIO(), hello)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:  # it waits for the server's reply
        connection.sendall(hello.read())
    if connection.recv(1) != _SERVER_HELLO:
        raise OSError("the server does not begin a TLS handshake: are its certificate and key in order?")


def _unverified_context() -> "ssl.SSLContext":
    """Accepts any certificate: the connection is to loopback, names do not match there, and no secret is sent."""
    import ssl  # noqa: PLC0415

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":
    sys.exit(main())
