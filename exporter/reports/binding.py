"""Making the unix socket: its folder, its mode, and what may lie in its place.

Refuses to take away what is no socket, or a socket on which somebody answers.
"""

import errno
import os
import resource
import socket
import stat
from pathlib import Path

_BACKLOG = 1024


class ListenError(Exception):
    """The socket cannot be made; the message says where, why, and what to do."""


def listen(path: Path) -> socket.socket:
    """Make the socket, and its folder, for everybody to write to; one that nobody listens on is replaced.

    Raises ListenError.
    """
    try:
        _folder(path.parent)
        _clear(path)
        return _bound(path)
    except OSError as err:
        why = err.strerror or err
        raise ListenError(f"{path}: {why}: run as root, or set reports.socket to a path that can be made") from err


def _folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        folder.chmod(0o755)


def _bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # connections inherit it
        sock.settimeout(0.0)
        sock.bind(os.fspath(path))
        _open_to_all(path)
        sock.listen(_BACKLOG)
    except (OSError, ListenError):
        sock.close()
        raise
    return sock


def _open_to_all(path: Path) -> None:
    """Change the mode of the socket that was made, and of nothing that somebody has put in its place since."""
    name = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        made = os.fstat(name)
        if not stat.S_ISSOCK(made.st_mode) or made.st_uid != os.geteuid() or made.st_nlink > 1:
            raise ListenError(f"{path}: somebody else can write to its folder: set reports.socket to another path")
        Path(f"/proc/self/fd/{name}").chmod(0o666)
    finally:
        os.close(name)


def _clear(path: Path) -> None:
    """Take away what a daemon has left that is no more."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ListenError(f"{path}: is there and is no socket: move it away, or set reports.socket to another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(0.0)
        answer = probe.connect_ex(os.fspath(path))
    if answer != errno.ECONNREFUSED:
        raise ListenError(
            f"{path}: somebody listens there ({os.strerror(answer) if answer else 'it answers'}): stop the second"
            " daemon, or set reports.socket to another path"
        )
    path.unlink()


def room(most: int) -> int:
    """Let the process have as many descriptors as it may, and give how many of them connections may take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * most + 1024
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return most if soft == resource.RLIM_INFINITY else soft // 2
