"""What /proc says of a process's network: where it listens, and how that is reached from here.

Owns the formats of /proc/PID/net (proc(5)): tcp, tcp6, fib_trie, if_inet6, and of socket links under /proc/PID/fd.
Refuses to connect to anything.
"""

import os
import re
import socket
import struct
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from msgspec import Struct

_LISTEN = "0A"
"""State TCP_LISTEN, as the kernel writes it; listening sockets come first in the file."""
_MOST_LISTENERS = 4096
_MOST_FILES = 65536
"""Of one process, looked at in search of its sockets."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LOCAL = re.compile(r"\|-- (\d{1,3}(?:\.\d{1,3}){3})\n\s+/32 host LOCAL")
_GLOBAL_SCOPE = "00"


class Listening(Struct, frozen=True):
    """A listening TCP socket."""

    address: str
    port: int
    inode: int


def listeners(folder: Path) -> list[Listening]:
    """Sockets on which anybody listens in the network namespace of the process with this folder; raises OSError."""
    return [one for name in ("tcp", "tcp6") for one in _table(folder / "net" / name)]


def _table(path: Path) -> list[Listening]:
    try:
        file = path.open(encoding="ascii", errors="replace")
    except FileNotFoundError:  # tcp6, where there is no IPv6
        return []
    found: list[Listening] = []
    with file:
        for line in islice(file, 1, _MOST_LISTENERS):
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:  # noqa: PLR2004  inode is the tenth (proc(5))
                break
            address, _, port = fields[1].rpartition(":")
            found.append(Listening(_address(address), int(port, 16), int(fields[9])))
    return found


def _address(text: str) -> str:
    """Hexadecimal words in the byte order of the machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def sockets(folder: Path) -> set[int]:
    """Inodes of a process's sockets; empty where it may not be asked."""
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


def namespace(folder: Path) -> str:
    """Which network namespace a process is in; raises OSError where it may not be asked."""
    return str((folder / "ns" / "net").readlink())


def reachable(one: Listening, folder: Path, *, here: bool) -> str:
    """The host part of a URL that leads to the socket, empty where none does.

    `here`: the daemon is in the same network namespace as the process with this folder. An address that is none of
    the namespace's own leads to somebody else: anybody may bind it (IP_FREEBIND, ip(7)). One of link-local scope
    (169.254.169.254 tells a cloud's secrets) may be given to a namespace of one's own making.
    """
    loopback = one.address.startswith(("127.", "::ffff:127.")) or one.address == "::1"
    anywhere = one.address in ("0.0.0.0", "::")  # noqa: S104  what a workload has bound, not we
    if loopback and not here:
        return ""
    if anywhere:
        return "127.0.0.1" if here else next(iter(addresses(folder)), "")
    host = _bracketed(one.address.removeprefix("::ffff:"))
    return host if loopback or host in addresses(folder) else ""


def addresses(folder: Path) -> list[str]:
    """Of the network namespace of the process with this folder, without loopback and link-local ones.

    IPv4 first, IPv6 in brackets.
    """
    found = dict.fromkeys(_LOCAL.findall(_text(folder / "net" / "fib_trie")))
    six = (line.split() for line in _text(folder / "net" / "if_inet6").splitlines())
    return [
        *(address for address in found if not address.startswith(("127.", "169.254."))),
        *_sixes(fields for fields in six if len(fields) == 6 and fields[3] == _GLOBAL_SCOPE),  # noqa: PLR2004  columns
    ]


def _sixes(rows: Iterable[list[str]]) -> list[str]:
    return [_bracketed(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
