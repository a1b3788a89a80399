"""Files, folders and addresses that the daemon uses beside the hardware.

Owns whether they can be read, written and listened on, by this user, without writing or keeping any of them. Refuses to
open a secret further than to see that it can be.
"""

import errno
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx

from exporter.checkup import FAIL, INFO, OK, WARN, Finding, Findings, Here, said_and_do
from exporter.config import split_address

FILES, PORTS = "files", "ports"
_EVERYBODY = stat.S_IROTH | stat.S_IWOTH
_SECONDS = 1.0
_PAGE_CHARACTERS = 4 << 20
_VERSION = re.compile(r'^gpu_efficiency_build_info\{[^}]*version="([^"]*)"', re.MULTILINE)
_AGE = re.compile(r"^gpu_efficiency_reading_age_seconds\{[^}]*\} ([0-9.e+-]+)", re.MULTILINE)


def look_at_folders(here: Here, _: Findings) -> Iterator[Finding]:
    """What is written."""
    config = here.config
    if config.reports.socket:
        yield _writable("reports socket", Path(config.reports.socket), "reports.socket")
    if config.inventory.file:
        yield _writable("inventory file", Path(config.inventory.file), "inventory.file")
    if config.sampling.pause_file:
        yield _looked_at(Path(config.sampling.pause_file))


def _writable(check: str, path: Path, key: str) -> Finding:
    """Whether the file can be made, in a folder that is there or in the nearest one that is."""
    if check == "reports socket" and _answers(path):
        return Finding(FILES, check, OK, f"{path}: a daemon listens there")
    folder = next((place for place in path.parents if place.exists()), Path("/"))
    if not os.access(folder, os.W_OK | os.X_OK):
        said = f"{path} cannot be made: this user may not write in {folder}"
        do = f"run as root, have systemd's RuntimeDirectory= or StateDirectory= make it, or set {key}"
        return Finding(FILES, check, FAIL, said, do)
    if path.exists() and check != "reports socket" and not os.access(path, os.R_OK):
        return Finding(FILES, check, FAIL, f"{path} is there and cannot be read", f"look at its owner, or set {key}")
    if path.exists() and check == "reports socket" and not stat.S_ISSOCK(path.stat().st_mode):
        return Finding(FILES, check, FAIL, f"{path} is there and is no socket", f"move it away, or set {key}")
    made = "is there" if path.parent == folder else f"will be made below {folder}"
    return Finding(FILES, check, OK, f"{path} can be made: its folder {made}")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def _looked_at(path: Path) -> Finding:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Finding(FILES, "pause file", OK, f"{path}: nobody has asked for a pause")
    except OSError as err:
        said = f"{path} cannot be looked at: {err.strerror or err}"
        return Finding(FILES, "pause file", WARN, said, "set sampling.pause_file to a path that this user may look at")
    return Finding(FILES, "pause file", OK, f"{path} is there and can be looked at")


def look_at_secrets(here: Here, _: Findings) -> Iterator[Finding]:
    """Files with a secret that the configuration names: readable for us, and for nobody else."""
    config = here.config
    for key, text in (
        ("privacy.key_file", config.privacy.key_file),
        ("slurm.restd_token_file", config.slurm.restd_token_file),
    ):
        if text:
            yield _secret(key, Path(text))


def _secret(key: str, path: Path) -> Finding:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except OSError as err:
        said = f"{key}: {path} cannot be read: {err.strerror or err}"
        return Finding(FILES, key, FAIL, said, "let the daemon's user read it, and nobody else: mode 0400")
    if mode & _EVERYBODY:
        said = f"{key}: every user can read or write {path}"
        return Finding(FILES, key, WARN, said, f"`chmod 0400 {path}`, and a new secret if others were there")
    return Finding(FILES, key, OK, f"{key}: {path} can be read, and not by everybody")


def look_at_web(here: Here, _: Findings) -> Iterator[Finding]:
    """The web configuration, whose certificates and users are tried by whoever will use it."""
    web = here.config.web
    if not web.config_file:
        open_page = web.open_page and "the page is open to whoever reaches it"
        said = f"no web.config_file: plain HTTP; {open_page or 'beyond loopback /metrics and probes alone'}"
        yield Finding(PORTS, "web config", INFO if open_page else OK, said)
        return
    trouble = here.web_config(Path(web.config_file))
    if trouble:
        said, do = said_and_do(trouble, "correct it: the exporter-toolkit's web configuration, see docs/web.md")
        yield Finding(PORTS, "web config", FAIL, said, do)
    else:
        yield Finding(PORTS, "web config", OK, f"{web.config_file} can be used")


def look_at_ports(here: Here, _: Findings) -> Iterator[Finding]:
    """Each address that is listened on: free, ours already, or somebody else's."""
    config = here.config
    for key, address in (
        ("web.listen_address", config.web.listen_address),
        ("web.page_address", config.web.page_address),
        ("reports.http", config.reports.http),
    ):
        if address:
            host, port = split_address(address, name=key)
            yield _port(here, key, host, port)


_CURES = {
    errno.EADDRINUSE: "address in use: another program has this port: find it with `ss -ltnp` and stop it",
    errno.EACCES: "permission denied: ports below 1024 need CAP_NET_BIND_SERVICE",
    errno.EADDRNOTAVAIL: "no such address on this machine: look at `ip address`",
}


def why_not_listen(host: str, port: int) -> str:
    """Why the daemon could not listen there; empty where it could. The address is taken, and given back unused."""
    family = socket.AF_INET if "." in host or not socket.has_dualstack_ipv6() else socket.AF_INET6
    try:
        if host and "." not in host and ":" not in host:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and not host:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind((host, port))
    except OSError as err:
        return _CURES.get(err.errno or 0, f"{err.strerror or err}: correct the address")
    return ""


def _port(here: Here, key: str, host: str, port: int) -> Finding:
    where = f"{host or '*'}:{port}"
    trouble = here.listens(host, port)
    if not trouble:
        return Finding(PORTS, key, OK, f"{where} is free" if port else "any free port")
    if "in use" in trouble:
        page = ask(host or "127.0.0.1", port)
        if page is not None:
            return _ours(key, where, page)
        if _mutual(here):
            said = f"{where} is in use, and whoever is there wants a client certificate, as the daemon does"
            return Finding(PORTS, key, INFO, said, "see whether it is the daemon: `ss -ltnp`")
    said, do = said_and_do(trouble)
    instead = f"set {key} to another address"
    return Finding(PORTS, key, FAIL, f"{where}: {said}", f"{do}, or {instead}" if do else instead)


def _mutual(here: Here) -> bool:
    """Whether a daemon with this configuration answers nobody without a certificate."""
    try:
        text = Path(here.config.web.config_file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "RequireAndVerifyClientCert" in text


def _ours(key: str, where: str, page: str) -> Finding:
    version, ages = _VERSION.search(page), [float(age) for age in _AGE.findall(page)]
    named = f", version {version[1]}" if version else ", which does not let us in"
    newest = f", newest sample {min(ages):.1f} s old" if ages else ""
    if version and not ages:
        newest = ", which shows no GPU's reading now"
    return Finding(PORTS, key, OK, f"{where}: this daemon is running there{named}{newest}")


def ask(host: str, port: int, path: str = "/metrics") -> str | None:
    """The page of a daemon of ours at that address; empty: it is guarded; None: nobody's, or somebody else's.

    By http, then https without asking who that is: it is this machine, and nothing secret is sent.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    for scheme in ("http", "https"):
        status, body = _got(f"{scheme}://{place}{path}")
        if status == 200 and "gpu_efficiency_" in body:  # noqa: PLR2004  OK
            return body
        if status in (401, 503) and _healthy(f"{scheme}://{place}/healthz"):
            return ""
    return None


def _healthy(url: str) -> bool:
    return _got(url) == (200, "ok\n")


def _got(url: str) -> tuple[int, str]:
    """Status and body; (0, "") for no answer."""
    try:
        # Whoever it is, it is on this machine, and is told nothing.
        answer = httpx.get(url, timeout=_SECONDS, verify=False, trust_env=False)  # nosec B501  # noqa: S501
    except (httpx.HTTPError, httpx.InvalidURL):
        return 0, ""
    return answer.status_code, answer.text[:_PAGE_CHARACTERS]
