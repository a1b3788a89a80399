"""Checks files, folders, addresses and the history store that the daemon uses, without writing or keeping any of them.

Sources: SQLite, "Write-Ahead Logging" (all users of a file share memory, so it works on local file systems only);
proc(5) on mountinfo.
"""

import errno
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from exporter.checkup.base import (
    FAIL,
    INFO,
    OK,
    WARN,
    CheckContext,
    Finding,
    Findings,
    Verdict,
    read_text,
    split_advice,
)
from exporter.config import split_address
from exporter.files import may_exist
from exporter.formatting import format_duration

FILES, PORTS = "files", "ports"
_WORLD_ACCESS = stat.S_IROTH | stat.S_IWOTH
_SECONDS = 1.0
_PAGE_CHARACTERS = 4 << 20
_VERSION = re.compile(r'^gpu_efficiency_build_info\{[^}]*version="([^"]*)"', re.MULTILINE)
_AGE = re.compile(r"^gpu_efficiency_reading_age_seconds\{[^}]*\} ([0-9.e+-]+)", re.MULTILINE)


def check_folders(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check that the socket, the inventory file and the pause file can be used."""
    config = context.config
    if config.reports.socket:
        yield _can_create("reports socket", Path(config.reports.socket), "reports.socket")
    if config.inventory.file:
        yield _can_create("inventory file", Path(config.inventory.file), "inventory.file")
    if config.sampling.pause_file:
        yield _pause_file(Path(config.sampling.pause_file))


def _can_create(check: str, path: Path, key: str) -> Finding:
    """Whether the file can be created, in its folder or below the nearest existing one."""
    if check == "reports socket" and _answers(path):
        return Finding(FILES, check, OK, f"{path}: a daemon listens there")
    folder = next((place for place in path.parents if may_exist(place)), Path("/"))
    if not os.access(folder, os.W_OK | os.X_OK):
        message = f"{path} cannot be created: this user may not write in {folder}"
        do = f"run as root, have systemd's RuntimeDirectory= or StateDirectory= create it, or set {key}"
        return Finding(FILES, check, FAIL, message, do)
    if path.exists() and check != "reports socket" and not os.access(path, os.R_OK):
        return Finding(FILES, check, FAIL, f"{path} exists and cannot be read", f"look at its owner, or set {key}")
    if path.exists() and check == "reports socket" and not stat.S_ISSOCK(path.stat().st_mode):
        return Finding(FILES, check, FAIL, f"{path} exists and is no socket", f"move it away, or set {key}")
    made = "exists" if path.parent == folder else f"will be created below {folder}"
    return Finding(FILES, check, OK, f"{path} can be created: its folder {made}")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def _pause_file(path: Path) -> Finding:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Finding(FILES, "pause file", OK, f"{path}: no pause is requested")
    except OSError as err:
        message = f"{path} cannot be read: {err.strerror or err}"
        return Finding(FILES, "pause file", WARN, message, "set sampling.pause_file to a path that this user may read")
    return Finding(FILES, "pause file", OK, f"{path} exists and can be read")


def check_secrets(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check that files with secrets are readable for this user, and not for every user."""
    config = context.config
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
        message = f"{key}: {path} cannot be read: {err.strerror or err}"
        return Finding(FILES, key, FAIL, message, "let the daemon's user read it, and nobody else: mode 0400")
    if mode & _WORLD_ACCESS:
        message = f"{key}: every user can read or write {path}"
        return Finding(FILES, key, WARN, message, f"`chmod 0400 {path}`, and use a new secret if others could log in")
    return Finding(FILES, key, OK, f"{key}: {path} can be read, and not by every user")


def check_web_config(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Load the web configuration, with its certificates and users."""
    web = context.config.web
    if not web.config_file:
        open_page = web.open_page and "the page is open to everyone who can reach it"
        message = f"no web.config_file: plain HTTP; {open_page or 'beyond loopback only /metrics and probes'}"
        yield Finding(PORTS, "web config", INFO if open_page else OK, message)
        return
    trouble = context.web_config_error(Path(web.config_file))
    if trouble:
        message, do = split_advice(trouble, "correct it: exporter-toolkit's web configuration, see docs/security.md")
        yield Finding(PORTS, "web config", FAIL, message, do)
    else:
        yield Finding(PORTS, "web config", OK, f"{web.config_file} can be used")


def check_ports(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check each listen address: free, used by a daemon of this program, or used by another program."""
    config = context.config
    for key, address in (
        ("web.listen_address", config.web.listen_address),
        ("web.page_address", config.web.page_address),
        ("reports.http", config.reports.http),
    ):
        if address:
            host, port = split_address(address, name=key)
            yield _port(context, key, host, port)


_BIND_ERRORS = {
    errno.EADDRINUSE: "address in use: another program has this port: find it with `ss -ltnp` and stop it",
    errno.EACCES: "permission denied: ports below 1024 need CAP_NET_BIND_SERVICE",
    errno.EADDRNOTAVAIL: "no such address on this machine: look at `ip address`",
}


def listen_error(host: str, port: int) -> str:
    """Return why the daemon cannot listen there, or "". Binds the address and releases it."""
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
        return _BIND_ERRORS.get(err.errno or 0, f"{err.strerror or err}: correct the address")
    return ""


def _port(context: CheckContext, key: str, host: str, port: int) -> Finding:
    where = f"{host or '*'}:{port}"
    trouble = context.listen_error(host, port)
    if not trouble:
        return Finding(PORTS, key, OK, f"{where} is free" if port else "any free port")
    if "in use" in trouble:
        page = fetch_page(host or "127.0.0.1", port)
        if page is not None:
            return _running_daemon(key, where, page)
        if _requires_client_certificate(context):
            message = f"{where} is in use by a program that requires a client certificate, as the daemon does"
            return Finding(PORTS, key, INFO, message, "see whether it is the daemon: `ss -ltnp`")
    message, do = split_advice(trouble)
    instead = f"set {key} to another address"
    return Finding(PORTS, key, FAIL, f"{where}: {message}", f"{do}, or {instead}" if do else instead)


def _requires_client_certificate(context: CheckContext) -> bool:
    """Whether a daemon with this configuration requires a client certificate."""
    return "RequireAndVerifyClientCert" in read_text(Path(context.config.web.config_file))


def _running_daemon(key: str, where: str, page: str) -> Finding:
    version, ages = _VERSION.search(page), [float(age) for age in _AGE.findall(page)]
    named = f", version {version[1]}" if version else ", which requires authentication"
    newest = f", newest sample {min(ages):.1f} s old" if ages else ""
    if version and not ages:
        newest = ", which has no GPU's reading now"
    return Finding(PORTS, key, OK, f"{where}: this daemon is running there{named}{newest}")


def fetch_page(host: str, port: int, path: str = "/metrics") -> str | None:
    """Fetch the metrics of a daemon at that address; "" if it requires authentication; None if none answers.

    Tries http, then https without verification: it is this machine, and no secret is sent.
    """
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    for scheme in ("http", "https"):
        status, body = _http_get(f"{scheme}://{authority}{path}")
        if status == 200 and "gpu_efficiency_" in body:  # noqa: PLR2004  OK
            return body
        if status in (401, 503) and _healthy(f"{scheme}://{authority}/healthz"):
            return ""
    return None


def _healthy(url: str) -> bool:
    return _http_get(url) == (200, "ok\n")


def _http_get(url: str) -> tuple[int, str]:
    """Status and body; (0, "") for no answer."""
    try:
        # The server is on this machine, and no secret is sent to it.
        response = httpx.get(url, timeout=_SECONDS, verify=False, trust_env=False)  # nosec B501  # noqa: S501
    except (httpx.HTTPError, httpx.InvalidURL):
        return 0, ""
    return response.status_code, response.text[:_PAGE_CHARACTERS]


_MEBI = 1 << 20
_SQLITE_HEADER = b"SQLite format 3\x00"
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "virtiofs"}
)
"""Besides all FUSE file systems."""
_EPHEMERAL_FILE_SYSTEMS = {
    "tmpfs": "is lost at the next boot, or with the pod",
    "ramfs": "is lost at the next boot",
    "overlay": "is lost with the container",
}


def check_store(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check the store's folder, its file system, its free space, and the store itself if it exists."""
    path = context.store
    if path is None:
        yield _no_store(context.config.history.file)
        return
    folder = next((place for place in path.parents if may_exist(place)), Path("/"))
    yield _can_write_store(path, folder)
    if not os.access(folder, os.X_OK):  # nothing in it can be seen
        return
    yield _store_file_system(context, path, folder)
    yield _store_size(context, path, folder)
    if path.exists():
        yield _last_write(path)


def _no_store(file: str) -> Finding:
    if file != "auto":
        return _store_finding(INFO, "no history is kept: history.file is empty")
    message = (
        "no history is kept: no STATE_DIRECTORY of systemd, and this user may not write in /var/lib/gpu-efficiency"
    )
    do = "have systemd's StateDirectory=gpu-efficiency create it, or set history.file; a restart loses everything else"
    return _store_finding(WARN, message, do)


def _can_write_store(path: Path, folder: Path) -> Finding:
    """Whether this user, who should be the daemon's, can write the store."""
    if not os.access(folder, os.W_OK | os.X_OK):
        message = f"{path} cannot be written: this user may not write in {folder}"
        return _store_finding(
            FAIL, message, "have systemd's StateDirectory= create it, correct its owner, or set history.file"
        )
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        do = "look at its owner: it belongs to the user that the daemon has run as before"
        return _store_finding(FAIL, f"{path} exists and this user may not read and write it", do)
    return _store_finding(OK, f"{path} can be written")


def _store_file_system(context: CheckContext, path: Path, folder: Path) -> Finding:
    kind = file_system(context.proc / "self/mountinfo", folder)
    if kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
        message = f"{path} is on {kind}: SQLite's log needs memory that is shared by all who use the file"
        return _store_finding(WARN, message, "keep it on a disk of this node: set history.file", check="store's disk")
    if kind in _EPHEMERAL_FILE_SYSTEMS:
        message = f"{path} is on {kind}: its content {_EPHEMERAL_FILE_SYSTEMS[kind]}"
        return _store_finding(WARN, message, "keep it on a disk of this node: set history.file", check="store's disk")
    return _store_finding(
        OK, f"{path} is on {kind or 'a file system that the kernel does not name'}", check="store's disk"
    )


def _store_size(context: CheckContext, path: Path, folder: Path) -> Finding:
    """Whether the disk has room for the store's size limit."""
    about = os.statvfs(folder)
    free, most = about.f_bavail * about.f_frsize / _MEBI, context.config.history.max_mebibytes
    size = sum(file.stat().st_size for file in _store_files(path)) / _MEBI
    message = f"{size:.0f} MiB, {most:.0f} at most (history.max_mebibytes); {free:.0f} MiB are free"
    if free < most - size:
        do = "free space, or lower history.max_mebibytes: on a full disk nothing more is stored, and sampling goes on"
        return _store_finding(WARN, message, do, check="store's size")
    return _store_finding(OK, message, check="store's size")


def _last_write(path: Path) -> Finding:
    try:
        with path.open("rb") as file:
            head = file.read(len(_SQLITE_HEADER))
    except OSError as err:
        return _store_finding(FAIL, f"{path} cannot be read: {err.strerror or err}", check="checkpoint")
    if head not in (b"", _SQLITE_HEADER):
        do = "move it away: the daemon then creates a new one"
        return _store_finding(FAIL, f"{path} exists and is no store", do, check="checkpoint")
    age = max(0.0, time.time() - max(file.stat().st_mtime for file in _store_files(path)))
    return _store_finding(OK, f"last written {format_duration(age)} ago", check="checkpoint")


def _store_files(path: Path) -> list[Path]:
    """The store and its write-ahead log, if they exist."""
    return [file for file in (path, path.with_name(f"{path.name}-wal")) if file.exists()]


def file_system(mounts: Path, folder: Path) -> str:
    """Type of the file system of the folder; empty: unknown."""
    found, longest = "", -1
    whole = folder.resolve()
    for line in read_text(mounts).splitlines():
        mount_point, kind = _mount(line)
        if kind and len(mount_point.parts) >= longest and whole.is_relative_to(mount_point):
            found, longest = kind, len(mount_point.parts)  # of two mounts on one path the later one is visible
    return found


def _mount(line: str) -> tuple[Path, str]:
    """Mount point and type in a line of mountinfo, in which spaces are octal escapes."""
    fields, _, rest = line.partition(" - ")
    columns = fields.split(" ")
    if len(columns) < 5 or not rest:  # noqa: PLR2004  the fifth is the mount point
        return Path("/"), ""
    mount_point = columns[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
    return Path(mount_point), rest.split(" ", 1)[0]


def _store_finding(verdict: Verdict, message: str, do: str = "", *, check: str = "store") -> Finding:
    return Finding(FILES, check, verdict, message, do)
