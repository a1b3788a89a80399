"""The unix socket with real processes that connect, forge, flood, never read, and disconnect."""

import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exporter.clock import SystemClock
from exporter.core.model import SECOND
from exporter.training.inbox import Inbox
from exporter.training.receiver import ReportReceiver
from exporter.training.unix_socket import ReportListenError, SocketListener, bind_socket, connection_limit
from exporter.workloads import WorkloadProcess
from tests.training.senders import ReceiverRig, SenderProcess, ticking
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.e2e
OpenRig = Callable[..., ReceiverRig]
Start = Callable[[], SenderProcess]


def connected(rig: ReceiverRig, start: Start) -> SenderProcess:
    """A connected process of job 7."""
    start_sender = start()
    rig.jobs[start_sender.pid] = WorkloadProcess(start_sender.pid, "7", ("GPU-0",), "3")
    assert start_sender.connect() == "ok"
    return start_sender


def test_what_is_said_arrives_and_silence_means_taken(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one = connected(rig, start_sender)
    one.send(step=1)
    one.send(step=2)
    assert [(report.job_id, report.step, report.rank) for report in rig.taken(2)] == [("7", 1, "3"), ("7", 2, "3")]
    assert rig.count("taken") == 2
    one.send(step=-1)
    assert one.answer()["field"] == "$.step", "the first answer there is"


@pytest.mark.parametrize(
    ("raw", "outcome", "reason"),
    [
        (b"", "malformed", "truncated"),
        (b"\xff\xfe", "malformed", "malformed"),
        (b'{"tokens": -5, "seconds": 1}', "malformed", ">= 0.0"),
        (b'{"tokens": 1e300, "seconds": 1}', "malformed", "<= "),
        (b'{"loss": NaN}', "malformed", "malformed"),
        (b'{"job_id": "8"}', "malformed", "unknown field `job_id`"),
        (b'{"pid": 1}', "malformed", "unknown field `pid`"),
        (b'{"run": "' + b"x" * 5000 + b'"}', "too_large", "4096"),
        (b'{"run": "' + b"x" * 100_000 + b'"}', "too_large", "4096"),
        (b'{"at": 4000000000000000000}', "future", "not Unix time"),
        (b'{"seconds": 80000, "tokens": 1}', "before_start", "before the process did"),
    ],
)
def test_what_is_wrong_is_answered_with_the_reason_and_counted(
    open_rig: OpenRig, start_sender: Start, raw: bytes, outcome: str, reason: str
) -> None:
    rig = open_rig()
    one = connected(rig, start_sender)
    one.send(raw)
    one.send(step=5)
    assert reason in one.answer()["error"]
    assert [report.step for report in rig.taken(1)] == [5], "nothing else is lost"
    assert rig.count(outcome) == 1


def test_a_replay_counts_once(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one = connected(rig, start_sender)
    at = rig.clock.now()
    for _ in range(3):
        one.send(at=at, seconds=0.01, tokens=100)
    one.disconnect()
    one.connect()
    one.send(at=at, seconds=0.01, tokens=100)
    assert "has already reported" in one.answer()["error"]
    assert [report.tokens for report in rig.taken(1)] == [100.0]
    wait_for(lambda: rig.count("replayed") == 3, "those before the end are refused too")
    assert (rig.count("taken"), rig.count("replayed")) == (1, 3)


def test_a_rank_is_the_process_s_own_word_and_its_gpus_are_not(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    connected(rig, start_sender).send(rank=99)
    (report,) = rig.taken(1)
    assert (report.rank, report.uuids) == ("99", ("GPU-0",))


def test_a_job_cannot_speak_for_another(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one, other = connected(rig, start_sender), start_sender()
    rig.jobs[other.pid] = WorkloadProcess(other.pid, "8", ("GPU-1",))
    other.connect()
    other.send(run="of job 7", rank=3, step=1)
    one.send(step=2)
    reports = {report.job_id: (report.step, report.uuids) for report in rig.taken(2)}
    assert reports == {"7": (2, ("GPU-0",)), "8": (1, ("GPU-1",))}


def test_a_child_that_inherits_the_connection_is_not_its_parent(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one = connected(rig, start_sender)
    one.send_from_child(step=1)
    one.send(step=2)
    assert f"process {one.pid} made this connection" in one.answer()["error"]
    assert [report.step for report in rig.taken(1)] == [2]
    assert rig.count("other_process") == 1


def test_a_process_of_no_job_is_told_so(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one = start_sender()
    one.connect()
    one.send(step=1)
    with ticking(rig):
        assert f"process {one.pid} belongs to no job" in one.answer()["error"]
        one.send(step=2)
        assert "belongs to no job" in one.answer()["error"]
    assert (rig.reports, rig.count("unknown_process")) == ([], 2)


def test_one_that_is_gone_before_anybody_looks_is_nobody_s(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one, other = connected(rig, start_sender), connected(rig, start_sender)
    one.send(step=1)
    one.end()
    other.send(step=2)
    assert [report.step for report in rig.taken(1)] == [2]
    assert rig.count("unknown_process") == 1


def test_what_was_said_before_the_end_is_heard(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one = connected(rig, start_sender)
    one.send(step=1)
    rig.taken(1)
    one.send(step=2)
    one.end()
    assert [report.step for report in rig.taken(2)] == [1, 2]


def test_one_that_comes_and_goes_is_heard_each_time(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(per_second=1000.0)
    one = connected(rig, start_sender)
    for step in range(3 * 8):
        one.send(step=step)
        rig.taken(step + 1)
        one.disconnect()
        wait_for(lambda: one.connect() == "ok", "it connects again")
    assert [report.step for report in rig.reports] == list(range(24))


def test_one_that_floods_is_left_unread_for_a_while(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(per_second=1.0)
    one = connected(rig, start_sender)
    (listener,) = rig.receiver._listeners  # type: ignore[attr-defined]  # a ReportReceiver's
    assert one.flood(100, step=1) > 40
    wait_for(lambda: listener._muted, "it is muted")
    wait_for(lambda: not listener._muted, "and no more after a while")


def test_a_flood_costs_nobody_else_anything(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(per_second=5.0)
    one, other = connected(rig, start_sender), connected(rig, start_sender)
    sent = one.flood(100_000, step=1)
    other.send(step=2)
    wait_for(lambda: rig.take() is not None and any(r.step == 2 for r in rig.reports), "the other is received")
    assert sent < 100_000, "its own buffer is full, and it is not waited for"
    assert rig.count("too_many") >= 20
    assert "more than 5 messages a second" in one.answer()["error"]


def test_one_that_never_reads_is_not_waited_for(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(per_second=1000.0)
    deaf, other = connected(rig, start_sender), connected(rig, start_sender)
    for _ in range(400):
        deaf.send(nonsense=1)
    wait_for(lambda: rig.count("malformed") == 400, "they are refused")
    other.send(step=2)
    assert [report.step for report in rig.taken(1)] == [2]


def test_a_connection_with_descriptors_in_it_leaves_none_here(open_rig: OpenRig) -> None:
    rig = open_rig()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(f"{rig.socket}")
        rig.jobs[os.getpid()] = WorkloadProcess(os.getpid(), "7")
        with Path("/dev/null").open() as null:
            for step in range(4):
                socket.send_fds(line, [b'{"step": %d}' % step], [null.fileno()] * 50)
        assert [report.step for report in rig.taken(4)] == [0, 1, 2, 3]
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_more_than_may_connect_are_told_so(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(processes=2)
    senders = [connected(rig, start_sender) for _ in range(3)]
    assert "2 connections are open, the maximum" in senders[2].answer()["error"]
    assert senders[2].read() == "end"
    assert rig.count("too_many_connections") == 1
    senders[0].disconnect()

    def again() -> bool:
        senders[2].connect("again")
        return senders[2].send(line="again", step=4) == "ok" and rig.take() is not None and bool(rig.reports)

    wait_for(again, "a connection is free again")


def test_those_who_are_nobody_s_give_their_place_to_others(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(processes=2)
    strangers = [start_sender() for _ in range(2)]
    for one in strangers:
        one.connect()
        one.send(step=1)
    with ticking(rig):
        for one in strangers:
            assert "belongs to no job" in one.answer()["error"]
        jobs = connected(rig, start_sender)
        jobs.send(step=2)
        wait_for(lambda: [report.step for report in rig.reports] == [2], "the report is received")
        assert [one.read() for one in strangers] == ["end", "end"]


def test_a_job_with_all_connections_gives_one_to_another_job_and_none_to_itself(
    open_rig: OpenRig, start_sender: Start
) -> None:
    rig = open_rig(processes=2)

    def rank(job: str) -> SenderProcess:
        """A process on a GPU, which connects after a tick in which the driver listed it."""
        process = start_sender()
        rig.jobs[process.pid] = WorkloadProcess(process.pid, job)
        rig.take(*rig.jobs.values())
        process.connect()
        process.send(step=int(job))
        return process

    first, second = rank("7"), rank("7")
    rig.taken(2, *rig.jobs.values())
    assert "the maximum" in rank("7").answer()["error"]
    rank("8")
    assert rig.taken(3, *rig.jobs.values())[2].job_id == "8"
    assert second.read() == "end", "the newest of the job that had two"
    assert "the maximum" in rank("9").answer()["error"], "no job has two"
    first.send(step=10)
    assert rig.taken(4, *rig.jobs.values())[3].step == 10


def test_an_event_of_a_connection_that_was_closed_in_the_same_round_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one of the listening socket, which may be muted then, as in a storm."""
    accepted: list[SocketListener] = []
    monkeypatch.setattr(SocketListener, "_accept", accepted.append)
    with socket.socket() as sock:
        listener = object.__new__(SocketListener)
        listener._connections, listener._muted, listener._wake, listener._listener = {}, [], -1, sock
        listener._epoll = cast("select.epoll", SimpleNamespace(poll=lambda *_, **__: [(99, select.EPOLLIN)]))
        assert listener._serve_round(0.0)
    assert accepted == []


def test_a_thread_that_fails_begins_anew_and_is_counted(
    open_rig: OpenRig, start_sender: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.worker.AFTER_FAILURE_SECONDS", 0.01)
    rig = open_rig()
    assert isinstance(rig.receiver, ReportReceiver)
    (listener,) = (each for each in rig.receiver._listeners if isinstance(each, SocketListener))
    one = connected(rig, start_sender)
    read = SocketListener._read

    def fails(*_: object) -> None:
        monkeypatch.setattr(SocketListener, "_read", read)
        raise ZeroDivisionError

    monkeypatch.setattr(SocketListener, "_read", fails)
    one.send(step=1)
    wait_for(lambda: listener.worker.failures == 1, "it has failed")
    other = connected(rig, start_sender)
    other.send(step=2)
    assert [report.step for report in rig.taken(1)] == [2]
    assert listener.worker.alive


def test_one_process_cannot_have_all_connections(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(processes=64)
    one, other = connected(rig, start_sender), connected(rig, start_sender)
    for number in range(7):
        one.connect(f"{number}")
    assert one.connect("more") == "ok"
    assert "8 connections already" in one.answer("more")["error"]
    other.send(step=1)
    rig.taken(1)


_MANY = """
import os, socket, sys, time
path, children, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
read, write = os.pipe()
for _ in range(children):
    if not os.fork():
        os.close(write)
        lines = []
        for _ in range(each):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.connect(path)
            lines.append(line)
        for line in lines:
            try:
                line.send(b'{"step": 1}')
            except OSError:
                pass
        os.read(read, 1)
        os._exit(0)
print("ok", flush=True)
sys.stdin.read()
os.close(write)
for _ in range(children):
    os.wait()
"""


def test_of_two_thousand_connections_as_many_are_heard_as_may_be(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig(processes=1024)
    command = [sys.executable, "-S", "-E", "-c", _MANY, f"{rig.socket}", "250", "8"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as many:

        def all_told() -> bool:
            update = rig.receiver.poll(
                rig.clock.now(), (), lambda pids: {pid: WorkloadProcess(pid, "7") for pid in pids}
            )
            counts = dict(update.counts)
            return (counts["taken"], counts["too_many_connections"]) == (1024, 976)

        wait_for(all_told, "2000 connections are answered")
        many.communicate(timeout=PATIENCE)
    one = connected(rig, start_sender)
    wait_for(lambda: one.connect("b") == "ok" and one.send(line="b", step=1) == "ok", "a free connection")
    wait_for(lambda: any(report.step == 1 for report in rig.take()), "a report is received after they have gone")


def test_a_daemon_that_starts_again_hears_those_that_connect_again(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    one = connected(rig, start_sender)
    one.send(step=1)
    rig.taken(1)
    rig.receiver.close()
    assert one.send(step=2) == "BrokenPipeError"
    assert one.connect() == "FileNotFoundError", "the socket is taken away"
    rig = open_rig()
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    assert one.connect() == "ok"
    one.send(step=3)
    assert [report.step for report in rig.taken(1)] == [3]


# The socket's path.


def test_the_socket_is_for_everybody_and_its_folder_is_made(folder: Path) -> None:
    path = folder / "a" / "b" / "report.sock"
    before = os.umask(0o077)
    try:
        with bind_socket(path) as made:
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
            assert made.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET
    finally:
        os.umask(before)


def test_a_socket_on_which_nobody_listens_is_replaced(folder: Path) -> None:
    path = folder / "report.sock"
    with bind_socket(path):
        pass
    assert path.exists()
    with bind_socket(path), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(f"{path}")


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_socket_on_which_somebody_listens_is_left_alone(folder: Path, kind: socket.SocketKind) -> None:
    path = folder / "report.sock"
    with socket.socket(socket.AF_UNIX, kind) as theirs:
        theirs.bind(f"{path}")
        theirs.listen(1)
        with pytest.raises(ReportListenError, match="in use by another process"):
            bind_socket(path)
        with socket.socket(socket.AF_UNIX, kind) as line:
            line.connect(f"{path}")


def test_what_is_no_socket_is_left_alone(folder: Path) -> None:
    path = folder / "report.sock"
    path.write_text("precious")
    with pytest.raises(ReportListenError, match="is no socket"):
        bind_socket(path)
    link = folder / "link.sock"
    link.symlink_to(path)
    with pytest.raises(ReportListenError, match="is no socket"):
        bind_socket(link)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("swap", ["link", "name"])
def test_what_is_put_in_the_socket_s_place_is_not_opened_to_all(
    folder: Path, swap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who can write to the folder replaces the socket right after its creation."""
    path, precious = folder / "report.sock", folder / "precious"
    precious.write_text("secret")
    precious.chmod(0o600)
    if swap == "name":
        precious.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.bind(f"{precious}")
        precious.chmod(0o600)
    real = os.open

    def late(name: Path, flags: int) -> int:
        path.unlink()
        if swap == "link":
            path.symlink_to(precious)
        else:
            path.hardlink_to(precious)
        return real(name, flags)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(ReportListenError, match="another user can write to its directory"):
        bind_socket(path)
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["x" * 200, "file/report.sock"])
def test_a_path_that_cannot_be_made_is_named_with_what_to_do(folder: Path, name: str) -> None:
    (folder / "file").touch()
    with pytest.raises(ReportListenError, match=r"reports\.socket"):
        bind_socket(folder / name)


def test_a_socket_that_is_somebody_else_s_by_now_is_not_taken_away(folder: Path) -> None:
    path = folder / "report.sock"
    inbox = Inbox(per_second=1.0, processes=1)
    first = SocketListener(path, inbox, clock=SystemClock(), proc=Path("/proc"), most=1)
    path.unlink()
    with bind_socket(path):
        first.close()
        assert path.exists()
    assert not first.worker.alive


def test_there_are_descriptors_for_as_many_as_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, tuple[int, int]] = {7: (1024, 4096)}
    monkeypatch.setattr("resource.RLIMIT_NOFILE", 7)
    monkeypatch.setattr("resource.getrlimit", limits.__getitem__)
    monkeypatch.setattr("resource.setrlimit", limits.__setitem__)
    assert connection_limit(1024) == 3072 // 2
    assert limits[7] == (3072, 4096)
    assert connection_limit(65_536) == 2048, "half of what the process may have at most"
    assert limits[7] == (4096, 4096)


def test_a_moment_is_that_of_the_clock_s_grid(open_rig: OpenRig, start_sender: Start) -> None:
    rig = open_rig()
    connected(rig, start_sender).send(seconds=0.01, tokens=3)
    (report,) = rig.taken(1)
    assert report.end % 1_000_000 == 0
    assert report.end - report.start == 10_000_000
    assert 0 <= rig.clock.now() - report.end < 20 * SECOND


def test_the_ten_lines_of_the_page_are_taken(open_rig: OpenRig) -> None:
    page = (Path(__file__).parents[2] / "docs/training-jobs.md").read_text(encoding="utf-8")
    (code,) = [block.split("```")[0] for block in page.split("```python\n")[1:] if "SOCK_SEQPACKET" in block]
    code = code.replace("/run/gpu-efficiency/report.sock", "{path}")
    rig = open_rig()
    rig.jobs[os.getpid()] = WorkloadProcess(os.getpid(), "7")
    names: dict[str, Any] = {}
    exec(code.replace("{path}", f"{rig.socket}").replace("0.4}", "0.0}"), names)  # noqa: S102  our own page
    with names["line"]:
        (report,) = rig.taken(1)
    assert (report.step, report.steps, report.gpus, report.model_flops) == (1200, 10, 64, 41_943_040 * 6 * 8.03e9)
