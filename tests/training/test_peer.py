"""Identification of the peer process: real sockets of real processes, and fake /proc tables."""

import errno
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import SECOND
from exporter.procfs import start_ticks
from exporter.training.message import ReportRefusedError
from exporter.training.peer import (
    _SO_PEERPIDFD,
    Peer,
    PeerSearch,
    connected_peer,
    peer_with_pid,
    process_age,
    sender_pid,
)
from exporter.training.socket_owner import Address, SocketTable, _read_table

PROC = Path("/proc")
_CALLER = """
import os, socket, sys
line = socket.socket(getattr(socket, sys.argv[1]))
line.connect((sys.argv[2], int(sys.argv[3])))
children = []
if sys.argv[4:]:
    child = os.fork()
    if not child:
        os.read(0, 1)
        os._exit(0)
    children.append(child)
print(*children, flush=True)
sys.stdin.read()
"""


_CONNECTS = """
import socket, sys
socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])
"""


class Caller:
    """A process connected to a server of the test, optionally with a child that has inherited the connection."""

    def __init__(self, started: subprocess.Popen[str], server: socket.socket) -> None:
        self.pid = started.pid
        self.children = [int(pid) for pid in cast("IO[str]", started.stdout).readline().split()]
        self.line, address = server.accept()
        self.address = Address(*address[:2])


@pytest.fixture
def call() -> Iterator[Callable[..., tuple[Caller, Address]]]:
    with ExitStack() as stack:

        def call(family: str = "AF_INET", host: str = "127.0.0.1", *more: str) -> tuple[Caller, Address]:
            kind = socket.AF_INET if "." in host else socket.AF_INET6
            server = stack.enter_context(socket.create_server((host.removeprefix("::ffff:"), 0), family=kind))
            here = Address(*server.getsockname()[:2])
            command = [sys.executable, "-S", "-E", "-c", _CALLER, family, host, f"{here.port}", *more]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(lambda: process.communicate(timeout=20))
            caller = Caller(process, server)
            stack.enter_context(caller.line)
            return caller, here

        yield call


# Unix sockets.


def test_the_kernel_says_who_has_connected() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        assert connected_peer(here, PROC) == Peer(os.getpid(), start_ticks(PROC / str(os.getpid())) or 0)


class Kernel(socket.socket):
    """A connection whose SO_PEERPIDFD raises `failure`, as kernels before 6.5 do, or works."""

    failure = 0

    def getsockopt(self, level: int, option: int, *more: int) -> Any:
        if self.failure and option == _SO_PEERPIDFD:
            raise OSError(self.failure, "said the kernel")
        return super().getsockopt(level, option, *more)


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[tuple[Kernel, int]]:
    """A connection whose process has ended, and its pid, which has been reused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(f"{tmp_path / 's'}")
        server.listen()
        subprocess.run([sys.executable, "-S", "-E", "-c", _CONNECTS, f"{tmp_path / 's'}"], check=True)
        line = server.accept()[0]
    with Kernel(fileno=line.detach()) as line_of_gone:
        pid = struct.unpack("iII", line_of_gone.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        (tmp_path / f"{pid}").mkdir()
        (tmp_path / f"{pid}" / "stat").write_text(f"{pid} (x) S " + "0 " * 18 + "77 0 0")
        yield line_of_gone, pid


def test_whoever_has_a_pid_next_is_not_who_has_connected(tmp_path: Path, gone: tuple[Kernel, int]) -> None:
    line, pid = gone
    line.failure = errno.ESRCH
    with pytest.raises(ReportRefusedError, match=f"process {pid} has ended"):
        connected_peer(line, tmp_path)
    line.failure = errno.ENOPROTOOPT
    assert connected_peer(line, tmp_path) == Peer(pid, 77), "it cannot be told"
    line.failure = 0
    try:
        os.close(line.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as err:
        if err.errno == errno.ENOPROTOOPT:
            return
    with pytest.raises(ReportRefusedError, match=f"process {pid} has ended") as refused:
        connected_peer(line, tmp_path)
    assert refused.value.outcome == "not_visible"


def test_whoever_is_in_another_pid_namespace_is_told_what_to_do() -> None:
    """The kernel returns pid 0."""
    with pytest.raises(ReportRefusedError, match="hostPID: true") as refused:
        peer_with_pid(0, PROC)
    assert refused.value.outcome == "not_visible"


def test_whoever_is_not_in_proc_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(ReportRefusedError, match="process 5 is not in"):
        peer_with_pid(5, tmp_path)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text("5 (x")
    assert start_ticks(tmp_path / "5") is None


def test_a_name_may_look_like_anything(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_bytes(b"5 (a) S 1 (\xff) " + b"S " + b"0 " * 18 + b"77 0 0")
    assert peer_with_pid(5, tmp_path) == Peer(5, 77)


def test_a_process_s_age_is_since_its_start() -> None:
    began = time.monotonic_ns()
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", "input()"], stdin=subprocess.PIPE) as process:
        age = process_age(peer_with_pid(process.pid, PROC))
        assert -SECOND // 100 <= age <= time.monotonic_ns() - began + SECOND // 50


def test_who_sent_a_packet_comes_with_it() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        there.send(b"x")
        assert sender_pid(here.recvmsg(10, 100)[1]) == os.getpid()
    assert sender_pid([]) is None
    assert sender_pid([(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"\0" * 12)]) is None


# TCP.


@pytest.mark.parametrize(
    ("family", "host"),
    [("AF_INET", "127.0.0.1"), ("AF_INET", "127.0.0.9"), ("AF_INET6", "::1"), ("AF_INET6", "::ffff:127.0.0.1")],
)
def test_the_process_with_the_other_end_is_found(
    call: Callable[..., tuple[Caller, Address]], family: str, host: str
) -> None:
    caller, here = call(family, host)
    assert PeerSearch(here, PROC).find(caller.address).pid == caller.pid
    assert PeerSearch(here, PROC).find(caller.address, first=[os.getpid(), caller.pid]).pid == caller.pid


def test_of_several_that_have_it_the_oldest_speaks_or_one_that_a_gpu_lists(
    call: Callable[..., tuple[Caller, Address]],
) -> None:
    caller, here = call("AF_INET", "127.0.0.1", "fork")
    assert PeerSearch(here, PROC).find(caller.address).pid == caller.pid
    assert PeerSearch(here, PROC).find(caller.address, first=caller.children).pid == caller.children[0]


def test_a_connection_of_nobody_is_refused(call: Callable[..., tuple[Caller, Address]]) -> None:
    caller, here = call()
    for client, server in (
        (Address("127.0.0.1", 1), here),
        (Address("127.0.0.2", caller.address.port), here),
        (caller.address, Address(here.host, 1)),
    ):
        with pytest.raises(ReportRefusedError, match="no process of this host has port"):
            PeerSearch(server, PROC).find(client)


def hand_made(root: Path, line: str, table: str = "tcp") -> None:
    (root / "net").mkdir()
    (root / "net" / table).write_text(f"  sl  local_address rem_address ...\n{line}\n")


LINE = "   0: 0100007F:9C40 0100007F:4BC9 01 00000000:00000000 00:00000000 00000000  1001        0 4242 1 0000 20 4"
CLIENT, SERVER = Address("127.0.0.1", 40000), Address("127.0.0.1", 19401)


def process(root: Path, pid: int, *, uid: int, inode: int, ticks: int = 5) -> None:
    (root / str(pid) / "fd").mkdir(parents=True)
    (root / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (root / str(pid) / "fd" / "4").symlink_to("/dev/null")
    (root / str(pid) / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (root / str(pid) / "stat").write_text(f"{pid} (x) S {'0 ' * 18}{ticks} 0\n")


def test_the_kernel_s_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    hand_made(tmp_path, LINE)
    process(tmp_path, 10, uid=1002, inode=4243)
    process(tmp_path, 11, uid=1001, inode=4242)
    process(tmp_path, 12, uid=0, inode=4242, ticks=1)
    assert PeerSearch(SERVER, tmp_path).find(CLIENT) == Peer(11, 5), "of the user who has the socket, before others"
    assert PeerSearch(SERVER, tmp_path).find(CLIENT, first=[10, 12, 99]) == Peer(12, 1)


def test_a_connection_that_its_process_has_closed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """It remains in TIME_WAIT (06), without an inode."""
    hand_made(tmp_path, LINE.replace(" 01 ", " 06 ").replace(" 4242 ", " 0 "))
    with pytest.raises(ReportRefusedError, match="keep it open until the reply"):
        PeerSearch(SERVER, tmp_path).find(CLIENT)


def test_a_socket_whose_process_may_not_be_seen_is_refused_with_what_to_do(tmp_path: Path) -> None:
    hand_made(tmp_path, LINE)
    process(tmp_path, 10, uid=1001, inode=1)
    (tmp_path / "11").mkdir()
    with pytest.raises(ReportRefusedError, match="daemon must be root"):
        PeerSearch(SERVER, tmp_path).find(CLIENT)


def test_a_user_whose_connections_take_long_to_find_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search every ten seconds, of a second of processor time each: a user has two at once, then 0.2."""
    now, spent = [0.0], iter(range(1000))
    monkeypatch.setattr("exporter.training.peer.time.thread_time", lambda: next(spent))
    monkeypatch.setattr("exporter.training.peer.time.monotonic", lambda: now[0])
    hand_made(tmp_path, LINE)
    process(tmp_path, 11, uid=1001, inode=4242)
    search = PeerSearch(SERVER, tmp_path)

    def find() -> int:
        now[0] += 10.0  # a second of processor time of all users
        return search.find(CLIENT).pid

    assert [find(), find(), find()] == [11, 11, 11]
    with pytest.raises(ReportRefusedError, match="behind new connections of user 1001 took") as refused:
        find()
    assert refused.value.outcome == "too_many"
    (tmp_path / "net" / "tcp").write_text((tmp_path / "net" / "tcp").read_text().replace(" 1001 ", " 1002 "))
    assert find() == 11, "another user has a share of his own"
    (tmp_path / "net" / "tcp").write_text((tmp_path / "net" / "tcp").read_text().replace(" 1002 ", " 1001 "))
    now[0] += 50.0
    assert find() == 11, "and what is not used comes back"


def test_searches_of_all_users_together_are_limited_and_who_has_searched_least_comes_last_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search costs a second; all have two, and as much again for those with more than half of their own left."""
    spent = iter(range(1000))
    monkeypatch.setattr("exporter.training.peer.time.thread_time", lambda: next(spent))
    monkeypatch.setattr("exporter.training.peer.time.monotonic", lambda: 0.0)
    search, outcomes = PeerSearch(SERVER, tmp_path), list[str]()
    (tmp_path / "net").mkdir()
    for uid in (0, 1, 0, 2, 3):
        (tmp_path / "net" / "tcp").write_text("  sl\n" + LINE.replace(" 1001 ", f" {uid} ") + "\n")
        with pytest.raises(ReportRefusedError) as found:
            search.find(CLIENT)
        outcomes.append(found.value.outcome)
    assert outcomes == ["not_visible", "not_visible", "too_many", "not_visible", "too_many"]


def test_what_is_known_of_users_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.training.peer._MOST_USERS", 2)
    search = PeerSearch(SERVER, tmp_path)
    for uid in range(5):
        search._admit(uid)
    assert search._by_user.by_key.keys() == {3, 4}


@pytest.mark.parametrize(("family", "host"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")])
def test_the_kernel_answers_about_one_connection_what_its_table_has(
    call: Callable[..., tuple[Caller, Address]], family: str, host: str
) -> None:
    caller, here = call(family, host)
    table = SocketTable(here, PROC)
    owner = table.owner(caller.address)
    assert owner is not None
    assert owner == _read_table(caller.address, here, PROC)
    assert owner.uid == os.getuid()
    assert table.owner(Address(host, 1)) is None


def test_who_listens_on_the_port_of_a_closed_connection_is_not_its_owner() -> None:
    """The kernel answers with a listener where no connection matches: another job's could be taken for the sender."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = Address(*server.getsockname())
        table = SocketTable(here, PROC)
        with socket.create_connection(server.getsockname()) as client:
            near = Address(*client.getsockname())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.accept()[0].close()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((near.host, near.port))
            other.listen()
            assert table.owner(near) is None


def test_without_netlink_the_table_is_read(
    call: Callable[..., tuple[Caller, Address]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr("exporter.training.socket_owner._ask_kernel", refuse)
    caller, here = call("AF_INET", "127.0.0.1")
    assert PeerSearch(here, PROC).find(caller.address).pid == caller.pid


@given(st.text(st.characters(codec="utf-8"), max_size=200), st.sampled_from(["tcp", "tcp6"]))
def test_whatever_is_in_the_table_it_is_somebody_or_refused(text: str, table: str) -> None:
    with TemporaryDirectory() as folder:
        hand_made(Path(folder), text, table)
        with pytest.raises(ReportRefusedError):
            PeerSearch(SERVER, Path(folder)).find(CLIENT)
