"""Identifies the process at the other end of a connection from the kernel's data, never from what the process claims.

Reads peer credentials of unix sockets (unix(7)), and finds the process of a loopback TCP connection: first the
socket's inode, from the kernel, then the process that has it open.
Pids are the host's if the daemon shares the host's pid namespace; otherwise the kernel reports 0 for processes outside
it (pid_namespaces(7)), and they cannot be identified.
"""

import errno
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from msgspec import Struct

from exporter.connections import Buckets, TokenBucket
from exporter.core.model import SECOND
from exporter.procfs import read_bytes, start_ticks
from exporter.sockets import CREDENTIALS, peer_credentials
from exporter.training.message import ReportRefusedError
from exporter.training.socket_owner import Address, SocketOwner, SocketTable

CREDENTIALS_SPACE = socket.CMSG_LEN(CREDENTIALS.size)
"""Size of the ancillary data: one sender's credentials, no file descriptors."""
_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)
"""Socket option that returns a pidfd of the peer; Linux 6.5, include/uapi/asm-generic/socket.h."""
_NAMESPACE = (
    "your process cannot be seen from the daemon's pid namespace: run the daemon in the host's"
    " (hostPID: true in a pod, --pid=host in a container)"
)
_UID = re.compile(rb"^Uid:\s+(\d+)", re.MULTILINE)
_MOST_PROCESSES = 65_536
_MOST_DESCRIPTORS = 262_144
"""Limits of the search for one connection's process: one or two seconds, on a thread that blocks nothing else."""
_SECONDS_AT_ONCE, _SHARE_OF_USER, _SHARE_OF_ALL = 2.0, 0.02, 0.1
"""Processor time of searches: at once, and as a share of a processor on average, for one user and for all."""
_MOST_USERS = 1024
_HERTZ = os.sysconf("SC_CLK_TCK")


class Peer(Struct, frozen=True):
    """A process, distinguished by its start time from later processes with the same pid."""

    pid: int
    ticks: int
    """Start of the process, in clock ticks since boot."""


def connected_peer(sock: socket.socket, proc: Path) -> Peer:
    """Return the process that connected the unix socket; raises ReportRefusedError if it cannot be identified."""
    peer = peer_with_pid(peer_credentials(sock)[0], proc)
    if _has_ended(sock):
        raise ReportRefusedError("not_visible", f"process {peer.pid} has ended: its pid may have been reused")
    return peer


def _has_ended(sock: socket.socket) -> bool:
    """Whether the process that connected has ended and released its pid; False on kernels before 6.5."""
    try:
        handle = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as err:
        return err.errno != errno.ENOPROTOOPT
    try:
        signal.pidfd_send_signal(handle, 0)
    except OSError as err:  # EPERM: the process exists and belongs to another user
        return err.errno == errno.ESRCH
    finally:
        os.close(handle)
    return False


def peer_with_pid(pid: int, proc: Path) -> Peer:
    """Return the process that has the pid now; raises ReportRefusedError if there is none."""
    if pid <= 0:
        raise ReportRefusedError("not_visible", _NAMESPACE)
    ticks = start_ticks(proc / str(pid))
    if ticks is None:
        raise ReportRefusedError("not_visible", f"process {pid} is not in the daemon's {proc}: has it ended?")
    return Peer(pid, ticks)


def sender_pid(ancillary: Iterable[tuple[int, int, bytes]]) -> int | None:
    """Return the pid of a packet's sender from its SCM_CREDENTIALS (unix(7)); None without credentials."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= CREDENTIALS.size:
            return int(CREDENTIALS.unpack_from(data)[0])
    return None


def process_age(peer: Peer) -> int:
    """Nanoseconds since the process started, including suspended time; at most one clock tick too long."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - peer.ticks * SECOND // _HERTZ


class PeerSearch:
    """Finds the processes behind loopback connections to one listening socket, within limits of processor time.

    Each user has a share, so that no other's are refused; all together have one, too. While that is used up, a user
    who has hardly used his own is still served, at most as much again.
    """

    def __init__(self, server: Address, proc: Path) -> None:
        """`server` listens already."""
        self._proc, self._table = proc, SocketTable(server, proc)
        self._all = TokenBucket(_SECONDS_AT_ONCE, _SHARE_OF_ALL)
        self._by_user = Buckets[int](_SECONDS_AT_ONCE, _SHARE_OF_USER, _MOST_USERS)

    def find(self, client: Address, first: Iterable[int] = ()) -> Peer:
        """Return the process that holds the client's end of the connection; pids in `first` are searched first.

        If several processes hold it, as after a fork, the oldest is returned, with preference for `first`. Slow: do not
        call it on a thread that must not block. Raises ReportRefusedError if the process cannot be identified.
        """
        began, charged = time.thread_time(), [self._all]
        try:
            owner = self._table.owner(client)
            if owner is None:
                raise ReportRefusedError(
                    "not_visible", f"no process of this host has port {client.port}: use the unix socket"
                )
            charged.append(self._admit(owner.uid))
            return self._find(client, owner, first)
        finally:
            spent = time.thread_time() - began
            for bucket in charged:
                bucket.spend(spent)

    def _admit(self, uid: int) -> TokenBucket:
        """Return the user's share. Raises ReportRefusedError if it is used up, or that of all users."""
        bucket = self._by_user.of(uid)
        own, of_all = bucket.available(time.monotonic()), self._all.available(time.monotonic())
        fresh = own > _SECONDS_AT_ONCE / 2
        if own <= 0 or of_all <= (-_SECONDS_AT_ONCE if fresh else 0):
            raise ReportRefusedError(
                "too_many",
                f"finding the processes behind new connections of {f'user {uid}' if own <= 0 else 'all users'} took too"
                " much processor time: keep a connection open for all reports, or use the unix socket",
            )
        return bucket

    def _find(self, client: Address, owner: SocketOwner, first: Iterable[int]) -> Peer:
        if not owner.inode:
            raise ReportRefusedError(
                "not_visible",
                "the connection was closed before its process was identified: keep it open until the reply",
            )
        target, scan = f"socket:[{owner.inode}]", _DescriptorScan()
        likely = [pid for pid in first if scan.holds(self._proc, pid, target)]
        holders = likely or next(_holders(self._proc, owner.uid, target, scan), [])
        peers = [Peer(pid, ticks) for pid in holders if (ticks := start_ticks(self._proc / str(pid))) is not None]
        if not peers:
            raise ReportRefusedError(
                "not_visible",
                f"the process that has port {client.port} cannot be found: the daemon must be root, in the host's pid"
                " namespace; or use the unix socket",
            )
        return min(peers, key=lambda peer: (peer.ticks, peer.pid))


class _DescriptorScan:
    """Limits the number of descriptors that are read to find one connection's process."""

    def __init__(self) -> None:
        self._left = _MOST_DESCRIPTORS

    def holds(self, proc: Path, pid: int, target: str) -> bool:
        """Whether the process has a descriptor that links to `target`; False once the budget is used up."""
        folder = proc / str(pid) / "fd"
        if self._left < 0:
            return False
        try:
            with os.scandir(folder) as entries:
                return any(self._links_to(entry.path, target) for entry in entries)
        except OSError:
            return False

    def _links_to(self, path: str, target: str) -> bool:
        self._left -= 1
        try:
            return self._left >= 0 and os.readlink(path) == target  # noqa: PTH115  a third of the time
        except OSError:
            return False


def _holders(proc: Path, uid: int, target: str, scan: _DescriptorScan) -> Iterator[list[int]]:
    """Processes that hold the socket: first those of the socket's user, then the rest."""
    pids = [int(entry.name) for entry in islice(proc.iterdir(), _MOST_PROCESSES) if entry.name.isdigit()]
    owners = {pid: _uid(proc, pid) for pid in pids}
    same_user = [pid for pid in pids if owners[pid] == uid]
    others = (pid for pid in pids if owners[pid] != uid)
    for group in (same_user, others):
        if found := [pid for pid in group if scan.holds(proc, pid, target)]:
            yield found


def _uid(proc: Path, pid: int) -> int | None:
    try:
        found = _UID.search(read_bytes(proc / str(pid) / "status", 4096))
    except OSError:
        return None
    return int(found[1]) if found else None
