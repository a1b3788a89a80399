"""Finds who owns the client's end of a loopback TCP connection: its inode and its user, as the kernel reports them.

Asks the kernel about the one connection (sock_diag(7), inet_diag_req_v2 in linux/inet_diag.h), in a tenth of a
millisecond, so that the user is known before anything is searched. Where netlink is not available, reads
/proc/net/tcp (proc(5)), which takes longer the more connections there are.
"""

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, ip_address
from pathlib import Path

from msgspec import Struct

from exporter.procfs import read_bytes

_TABLE_BYTES = 16 * 1024 * 1024
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence, port id."""
_REQUEST = struct.Struct("=BBBBI")
"""struct inet_diag_req_v2 without the connection: family, protocol, extensions, padding, states."""
_CONNECTION = struct.Struct(">HH16s16s12s")
"""struct inet_diag_sockid: ports, addresses; interface 0 and no cookie."""
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_OWNER_AT = _HEADER.size + 4 + _CONNECTION.size + 12
"""Offset of the uid and, after it, the inode in an answer: after state and timers, connection and queues."""
_ANSWER_SECONDS = 1.0


class Address(Struct, frozen=True):
    """One end of a TCP connection."""

    host: str
    port: int


class SocketOwner(Struct, frozen=True):
    """Of one end of a connection. No inode: its process has closed it."""

    inode: int
    uid: int


class SocketTable:
    """The connections to one listening socket of this network namespace."""

    def __init__(self, server: Address, proc: Path) -> None:
        """`server` listens already: whether netlink is available is tried on it."""
        self._server, self._proc = server, proc
        self._netlink = False
        try:
            self._netlink = _ask_kernel(server, Address("::" if ":" in server.host else "0.0.0.0", 0)) is not None  # nosec B104  # noqa: S104  no peer
        except OSError:
            return

    def owner(self, client: Address) -> SocketOwner | None:
        """Return who owns the client's end; None: no such connection."""
        if self._netlink:
            try:
                return _ask_kernel(client, self._server)
            except OSError:
                return None
        return _read_table(client, self._server, self._proc)

    def user(self, client: Address) -> int | None:
        """Return the user of the client's end, in a tenth of a millisecond; None without netlink, or if it is closed.

        Of an end that its process has closed the kernel says that it is root's.
        """
        owner = self.owner(client) if self._netlink else None
        return owner.uid if owner and owner.inode else None


def _ask_kernel(near: Address, far: Address) -> SocketOwner | None:
    """Return the owner of the socket at `near` that is connected to `far`; None if there is none. Raises OSError."""
    family = socket.AF_INET6 if ":" in near.host else socket.AF_INET
    ends = [socket.inet_pton(family, end.host.partition("%")[0]) for end in (near, far)]
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    request += _CONNECTION.pack(near.port, far.port, *ends, _ANY)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as line:
        line.settimeout(_ANSWER_SECONDS)
        line.send(header + request)
        answer = line.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:  # an error: ENOENT if there is no such socket
        return None
    # Where no connection matches, the kernel answers with a socket that listens on the near port, of whomever.
    if struct.unpack_from(">HH", answer, _HEADER.size + 4) != (near.port, far.port):
        return None
    uid, inode = struct.unpack_from("=II", answer, _OWNER_AT)
    return SocketOwner(inode, uid)


def _read_table(client: Address, server: Address, proc: Path) -> SocketOwner | None:
    for table, ends in _table_forms(client, server):
        for line in _lines(proc / "net" / table):
            fields = line.split()
            if len(fields) > 9 and (fields[1], fields[2]) == ends:  # noqa: PLR2004  the inode is the tenth
                return SocketOwner(inode=int(fields[9]), uid=int(fields[7]))
    return None


def _table_forms(client: Address, server: Address) -> Iterator[tuple[str, tuple[bytes, bytes]]]:
    """Tables of /proc/net that may list the connection, with its two ends as written there.

    An IPv4 connection may belong to an IPv6 socket.
    """
    ends = [ip_address(end.host.partition("%")[0]) for end in (client, server)]
    prefix = b""
    if all(isinstance(end, IPv4Address) for end in ends):
        yield "tcp", (_hex(ends[0].packed, client.port), _hex(ends[1].packed, server.port))
        prefix = b"\0" * 10 + b"\xff\xff"  # an IPv4-mapped IPv6 address
    yield "tcp6", (_hex(prefix + ends[0].packed, client.port), _hex(prefix + ends[1].packed, server.port))


def _hex(packed: bytes, port: int) -> bytes:
    """Format an address as /proc/net/tcp does: 32-bit words in host byte order, then the port."""
    values = struct.unpack(f"={len(packed) // 4}I", packed)
    return ("".join(f"{value:08X}" for value in values) + f":{port:04X}").encode()


def _lines(path: Path) -> list[bytes]:
    try:
        return read_bytes(path, _TABLE_BYTES).splitlines()[1:]
    except OSError:
        return []
