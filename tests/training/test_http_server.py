"""Reports over HTTP on loopback, from separate processes that are identified by their end of the connection."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, cast

import pytest

from exporter.training import http_server as module
from exporter.training.http_connections import NEW_BURST, ConnectionPool
from exporter.training.http_server import HttpListener, parse_loopback_address
from exporter.training.receiver import ReportReceiver
from exporter.training.socket_owner import Address
from exporter.workloads import WorkloadProcess
from tests.training.senders import ReceiverRig, ticking
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
OpenRig = Callable[..., ReceiverRig]
_CALLER = """
import http.client, json, sys
line = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
for raw in sys.stdin:
    line.request("POST", "/v1/report", raw.strip())
    answer = line.getresponse()
    print(json.dumps([answer.status, answer.read().decode()]), flush=True)
    if sys.argv[2:]:
        line.close()
"""


_SILENT = """
import os, resource, select, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
os.setuid(65534)
lines, ends = {}, select.poll()
said = False
while not select.select([sys.stdin], [], [], 0)[0]:
    if len(lines) < 4000:
        line = socket.socket()
        line.connect(("127.0.0.1", int(sys.argv[1])))
        lines[line.fileno()] = line
        ends.register(line, select.POLLIN)
        if len(lines) == 2000 and not said:
            said = True
            print("has opened 2000", flush=True)
        continue
    for number, _ in ends.poll(50):  # those that the server has closed make room for others; he gives up none himself
        ends.unregister(number)
        lines.pop(number).close()
"""


class Caller:
    """A separate process that posts messages over one connection, or over a new one each."""

    def __init__(self, port: int, *options: str) -> None:
        command = [sys.executable, "-c", _CALLER, f"{port}", *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def post(self, **message: Any) -> tuple[int, str]:
        stdin, stdout = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()
        status, body = json.loads(stdout.readline())
        return status, body

    def end(self) -> None:
        self._process.communicate(timeout=20)


def listener(rig: ReceiverRig) -> HttpListener:
    assert isinstance(rig.receiver, ReportReceiver)
    (found,) = (listener for listener in rig.receiver._listeners if isinstance(listener, HttpListener))
    return found


@contextmanager
def silent(port: int) -> Iterator[subprocess.Popen[str]]:
    """Have another user open connections as fast as he can, and say nothing, until his standard input ends."""
    command = [sys.executable, "-S", "-E", "-c", _SILENT, f"{port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        try:
            yield flood
        finally:
            flood.kill()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def caller() -> Iterator[Callable[..., Caller]]:
    with ExitStack() as stack:

        def start(rig: ReceiverRig, *options: str) -> Caller:
            one = Caller(listener(rig).port, *options)
            stack.callback(one.end)
            return one

        yield start


@pytest.fixture
def rig(open_rig: OpenRig) -> ReceiverRig:
    return open_rig(http="127.0.0.1:0")


def post(rig: ReceiverRig, raw: bytes, path: str = "/v1/report") -> tuple[int, str]:
    """Post from this process."""
    with closing(HTTPConnection("127.0.0.1", listener(rig).port, timeout=20)) as line:
        line.request("POST", path, raw)
        answer = line.getresponse()
        return answer.status, answer.read().decode()


def test_what_is_posted_is_taken_as_from_the_socket(rig: ReceiverRig, caller: Callable[[ReceiverRig], Caller]) -> None:
    one, other = caller(rig), caller(rig)
    rig.jobs = {one.pid: WorkloadProcess(one.pid, "7", rank="1"), other.pid: WorkloadProcess(other.pid, "8", rank="2")}
    with ticking(rig):
        assert [one.post(step=step) for step in (1, 2)] == [(204, "")] * 2
        assert other.post(step=3) == (204, "")
        wait_for(lambda: len(rig.reports) == 3, "all are taken")
    assert {(report.job_id, report.step, report.rank) for report in rig.reports} == {
        ("7", 1, "1"), ("7", 2, "1"), ("8", 3, "2"),
    }  # fmt: skip


def test_one_of_no_job_waits_for_the_word_and_is_refused(
    rig: ReceiverRig, caller: Callable[[ReceiverRig], Caller]
) -> None:
    one = caller(rig)
    with ticking(rig):
        answers = [one.post(step=1), one.post(step=2)]
    assert [status for status, _ in answers] == [403, 403]
    assert all(f"process {one.pid} belongs to no job" in body for _, body in answers)
    assert (rig.reports, rig.count("unknown_process")) == ([], 2)


def test_what_is_wrong_is_answered_with_the_reason(rig: ReceiverRig, caller: Callable[[ReceiverRig], Caller]) -> None:
    one = caller(rig)
    assert one.post(step="a")[0] == 400
    assert json.loads(one.post(step="a")[1])["field"] == "$.step"
    assert one.post(run="x" * 9000)[0] == 413
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    with ticking(rig):
        assert one.post(at=rig.clock.now(), seconds=0.01, tokens=1)[0] == 204
        assert one.post(at=rig.clock.now() + 10**9 * 7200)[0] == 400
    counts = {name: rig.count(name) for name in ("malformed", "too_large", "future", "taken")}
    assert counts == {"malformed": 2, "too_large": 1, "future": 1, "taken": 1}


def test_one_that_is_too_fast_is_told_so(open_rig: OpenRig, caller: Callable[[ReceiverRig], Caller]) -> None:
    rig = open_rig(http="127.0.0.1:0", per_second=0.01)
    one = caller(rig)
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    with ticking(rig):
        assert [one.post()[0] for _ in range(7)] == [204] * 5 + [429] * 2


def test_a_process_is_one_by_socket_and_by_http(rig: ReceiverRig) -> None:
    rig.jobs[os.getpid()] = WorkloadProcess(os.getpid(), "7")
    at = rig.clock.now()
    said = json.dumps({"at": at, "seconds": 0.01, "tokens": 1}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(f"{rig.socket}")
        line.send(said)
        rig.taken(1)
    status, body = post(rig, said)
    assert (status, "has already reported" in body) == (400, True)


def test_one_that_cannot_be_told_is_refused(rig: ReceiverRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.training.socket_owner.SocketTable.owner", lambda *_: None)
    status, body = post(rig, b"{}")
    assert (status, "use the unix socket" in body) == (403, True)
    assert rig.count("not_visible") == 1


def test_there_is_nothing_else(rig: ReceiverRig) -> None:
    assert post(rig, b"{}", "/metrics")[0] == 404
    with closing(HTTPConnection("127.0.0.1", listener(rig).port, timeout=20)) as line:
        line.request("GET", "/v1/report")
        assert line.getresponse().status == 405


def test_a_body_that_does_not_come_is_not_waited_for(rig: ReceiverRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", listener(rig).port), timeout=20) as line:
        line.sendall(b"POST /v1/report HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert line.recv(4096).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("said", [b"", b"POST /v1/rep", b"POST /v1/report HTTP/1.1\r\nX: "])
def test_one_that_says_nothing_whole_is_hung_up_on(
    rig: ReceiverRig, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("exporter.training.http_connections.IDLE_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", listener(rig).port), timeout=20) as line:
        line.sendall(said)
        assert line.recv(4096) == b""


def test_one_that_is_too_fast_waits_for_its_answer(open_rig: OpenRig, caller: Callable[[ReceiverRig], Caller]) -> None:
    rig = open_rig(http="127.0.0.1:0", per_second=0.001)
    one = caller(rig)
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    with ticking(rig):
        assert [one.post()[0] for _ in range(5)] == [204] * 5
        begun = time.monotonic()
        assert [one.post()[0] for _ in range(4)] == [429] * 4
        assert time.monotonic() - begun > 1.9


def test_the_silent_are_hung_up_on_where_there_are_too_many(
    rig: ReceiverRig, caller: Callable[[ReceiverRig], Caller]
) -> None:
    """Whoever has reported stays, and of the others the one that has said nothing for longest goes first."""
    listener(rig)._pool.most = 3
    one = caller(rig)
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    with ExitStack() as stack, ticking(rig):
        lines = [
            stack.enter_context(socket.create_connection(("127.0.0.1", listener(rig).port), timeout=20))
            for _ in range(2)
        ]
        assert one.post()[0] == 204
        later = stack.enter_context(socket.create_connection(("127.0.0.1", listener(rig).port), timeout=20))
        assert lines[0].recv(1) == b""
        assert one.post(step=2)[0] == 204
        later.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            later.recv(1)


def test_those_of_no_job_leave_their_places_to_one_that_has_a_job(
    rig: ReceiverRig, caller: Callable[[ReceiverRig], Caller]
) -> None:
    """They are known as processes of no job, and one that is silent between two reports is still one of a job."""
    listener(rig)._pool.most = 3
    one, strangers = caller(rig), [caller(rig) for _ in range(3)]
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    with ticking(rig):
        assert one.post(step=1)[0] == 204
        assert [stranger.post(step=1)[0] for stranger in strangers] == [403] * 3
        assert one.post(step=2)[0] == 204


def test_while_all_places_are_taken_a_user_who_connects_too_fast_is_closed_unread() -> None:
    """Others, and whoever is unknown, are admitted meanwhile: they would wait behind thousands."""
    users: dict[int, int | None] = {}
    pool = ConnectionPool(2, lambda client: users[client.port])

    def admitted(user: int | None) -> bool:
        users[len(users)] = user
        return pool.admits(Address("127.0.0.1", len(users) - 1))

    assert all(admitted(7) for _ in range(2 + NEW_BURST))
    assert [admitted(7) for _ in range(200)].count(True) < 100
    assert admitted(8)
    assert all(admitted(None) for _ in range(200))


def test_connections_that_were_reset_before_they_are_counted_keep_no_place(rig: ReceiverRig) -> None:
    pool = listener(rig)._pool
    for _ in range(300):
        line = socket.create_connection(("127.0.0.1", listener(rig).port), timeout=20)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets it
        line.close()
    wait_for(lambda: not pool._accepted and not len(pool), "all are counted, and gone")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_silent_connections_of_one_user_have_no_report_of_another_refused(
    open_rig: OpenRig, caller: Callable[..., Caller]
) -> None:
    """However many he opens, and though each report comes over a new connection."""
    rig = open_rig(http="127.0.0.1:0", per_second=1000)
    pool, before, most, answers = listener(rig)._pool, descriptors(), 0, []
    with silent(listener(rig).port) as flood, ticking(rig):
        assert cast("IO[str]", flood.stdout).readline() == "has opened 2000\n"
        wait_for(lambda: len(pool) >= pool.most - 1, "he holds all places")
        one = caller(rig, "a new connection each")
        rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
        for step in range(18):
            answers.append(one.post(step=step))
            most = max(most, descriptors() - before)
    assert answers == [(204, "")] * 18
    assert most < 600, "those that are accepted and not counted yet have descriptors, too"


def test_a_server_that_fails_begins_anew(
    rig: ReceiverRig, monkeypatch: pytest.MonkeyPatch, caller: Callable[[ReceiverRig], Caller]
) -> None:
    monkeypatch.setattr("exporter.worker.AFTER_FAILURE_SECONDS", 0.01)
    server = listener(rig)

    def fails(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(HttpListener, "_close_overdue", None)
    server._server.config.callback_notify = fails  # type: ignore[assignment]
    wait_for(lambda: server.worker.failures >= 1, "it has failed")
    one = caller(rig)
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    monkeypatch.undo()
    with ticking(rig):
        wait_for(lambda: answered(one), "it answers again")
    assert server.worker.alive


def answered(one: Caller) -> bool:
    try:
        return one.post()[0] == 204
    except (OSError, ValueError):
        return False


def test_ipv6_s_loopback_is_one_too(open_rig: OpenRig) -> None:
    rig = open_rig(http="[::1]:0")
    rig.jobs[os.getpid()] = WorkloadProcess(os.getpid(), "7")
    with ticking(rig), closing(HTTPConnection("::1", listener(rig).port, timeout=20)) as line:
        line.request("POST", "/v1/report", b'{"step": 5}')
        assert line.getresponse().status == 204
        wait_for(lambda: [report.step for report in rig.reports] == [5], "it is taken")
    assert parse_loopback_address("localhost:80") == ("127.0.0.1", 80)
