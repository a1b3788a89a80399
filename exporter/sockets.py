"""Reads the TCP sockets, network namespaces and addresses of processes from /proc (proc(5)); opens no connection.

Also reads who is at the other end of a unix socket. `folder` is /proc/PID, possibly below another root.
"""

import os
import re
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import islice
from pathlib import Path

from msgspec import Struct

_LISTEN = "0A"
"""TCP_LISTEN in the column `st`; the kernel lists listening sockets first."""
_COLUMNS = 10
"""Columns that are read; the eighth is the uid, the tenth the inode."""
_MOST_LISTENERS = 4096
_MOST_FILES = 65536
"""File descriptors of one process that are searched for sockets."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LOCAL = re.compile(r"\|-- (\d{1,3}(?:\.\d{1,3}){3})\n\s+/32 host LOCAL")
_GLOBAL_SCOPE = "00"
CREDENTIALS = struct.Struct("iII")
"""struct ucred (unix(7)): pid, uid, gid."""


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process that connected the unix socket, as the kernel noted them then."""
    pid, uid, gid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid, gid


class ListeningSocket(Struct, frozen=True):
    """A listening TCP socket."""

    address: str
    port: int
    inode: int
    uid: int = -1
    """User of the process that created it, as seen in the daemon's user namespace."""


def listeners(folder: Path) -> list[ListeningSocket]:
    """Return the listening TCP sockets in the network namespace of the process at `folder`. Raises OSError."""
    return [listening_socket for name in ("tcp", "tcp6") for listening_socket in _table(folder / "net" / name)]


def _table(path: Path) -> list[ListeningSocket]:
    try:
        file = path.open(encoding="ascii", errors="replace")
    except FileNotFoundError:  # tcp6, where there is no IPv6
        return []
    found: list[ListeningSocket] = []
    with file:
        for line in islice(file, 1, _MOST_LISTENERS):
            fields = line.split()
            if len(fields) < _COLUMNS or fields[3] != _LISTEN:
                break
            address, _, port = fields[1].rpartition(":")
            found.append(ListeningSocket(_decode_address(address), int(port, 16), int(fields[9]), int(fields[7])))
    return found


def port_users(port: int, *, host: str = "", proc: Path = Path("/proc/self")) -> set[int]:
    """Return the users of the processes that listen on the port, or of those that `host` reaches, if it is an address.

    `proc` is a process in the network namespace that is meant. Raises OSError.
    """
    reached = {_plain(host), *_ANYWHERE} if _is_address(host) else None
    return {
        each.uid
        for each in listeners(proc)
        if each.port == port and (reached is None or _plain(each.address) in reached)
    }


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104  bound by others, not by the daemon
_MOST_CONNECTIONS = 262_144


def connection_inode(folder: Path, *, local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return the inode of a TCP connection's end at `local`; 0: there is none, or no process has accepted it yet.

    Both ends are (address, port). An IPv4 connection may belong to an IPv6 socket. Raises OSError.
    """
    ports = (f":{local[1]:04X}", f":{remote[1]:04X}")
    ends = (_plain(local[0]), _plain(remote[0]))
    for name in ("tcp", "tcp6"):
        for fields in _rows(folder / "net" / name):
            if fields[1].endswith(ports[0]) and fields[2].endswith(ports[1]):
                found = tuple(_plain(_decode_address(end.rpartition(":")[0])) for end in fields[1:3])
                if found == ends:
                    return int(fields[9])
    return 0


def _rows(path: Path) -> Iterator[list[str]]:
    """Yield the columns of each row of a table."""
    try:
        file = path.open(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return
    with file:
        for line in islice(file, 1, _MOST_CONNECTIONS):
            fields = line.split()
            if len(fields) >= _COLUMNS:
                yield fields


def _plain(address: str) -> str:
    """Return the address without a scope, and an IPv4-mapped IPv6 address as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")


def _decode_address(text: str) -> str:
    """Decode an address of hexadecimal 32-bit groups in host byte order."""
    groups = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(groups)}I", *groups)
    return socket.inet_ntop(socket.AF_INET if len(groups) == 1 else socket.AF_INET6, packed)


def socket_inodes(folder: Path) -> set[int]:
    """Return the inodes of a process's sockets; empty if they cannot be read."""
    try:
        with os.scandir(folder / "fd") as entries:
            links = [_link(entry.path) for entry in islice(entries, _MOST_FILES)]
    except OSError:
        return set()
    return {int(match[1]) for link in links if (match := _SOCKET.fullmatch(link))}


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115  thousands of files: a Path each would cost more than the call
    except OSError:
        return ""


def network_namespace(folder: Path) -> str:
    """Return the network namespace of a process. Raises OSError."""
    return str((folder / "ns" / "net").readlink())


_MOST_ADDRESSES = 16
"""Addresses of a namespace that are tried: a workload may give itself any number."""


def reachable_hosts(listening_socket: ListeningSocket, folder: Path, *, here: bool) -> tuple[str, ...]:
    """Return the host parts of URLs that may lead to the socket; empty if the daemon cannot reach it.

    There are several if it listens on all addresses: a pod's second interface, as one of RDMA, may lead nowhere, and
    `::` may mean IPv6 alone (IPV6_V6ONLY, ipv6(7)), which asyncio sets.

    `here`: the daemon is in the same network namespace as the process at `folder`. Rejects addresses that the namespace
    does not have, because any process may bind a foreign address (IP_FREEBIND, ip(7)), and link-local ones: a workload
    could give its own namespace 169.254.169.254, at which clouds serve credentials.
    """
    loopback = listening_socket.address.startswith(("127.", "::ffff:127.")) or listening_socket.address == "::1"
    if loopback and not here:
        return ()
    if listening_socket.address in _ANYWHERE:
        hosts = ["127.0.0.1", "[::1]"] if here else addresses(folder)
        ipv6 = listening_socket.address == "::"
        return tuple(host for host in hosts if ipv6 or not host.startswith("["))[:_MOST_ADDRESSES]
    host = _bracketed(listening_socket.address.removeprefix("::ffff:"))
    return (host,) if loopback or host in addresses(folder) else ()


def addresses(folder: Path) -> list[str]:
    """Return the addresses of the process's network namespace, without loopback and link-local ones.

    IPv4 addresses come first, IPv6 addresses are in brackets.
    """
    found = dict.fromkeys(_LOCAL.findall(_read_text(folder / "net" / "fib_trie")))
    ipv6_rows = (line.split() for line in _read_text(folder / "net" / "if_inet6").splitlines())
    return [
        *(address for address in found if not address.startswith(("127.", "169.254."))),
        *(
            _bracketed(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
            for fields in ipv6_rows
            if len(fields) == 6 and fields[3] == _GLOBAL_SCOPE  # noqa: PLR2004  columns
        ),
    ]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
