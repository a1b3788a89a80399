"""ReportReceiver: identification of senders, conversion of messages, logs, and listeners that cannot be opened."""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from exporter.clock import SystemClock
from exporter.config import Config, ConfigError
from exporter.config import ReportsSettings as Settings
from exporter.core.model import SECOND, Fault
from exporter.procfs import start_ticks
from exporter.training.inbox import Inbox
from exporter.training.message import LoggedMessage, Message
from exporter.training.peer import Peer
from exporter.training.receiver import LOOKUP_INTERVAL, MOST_LOOKUPS, ReportReceiver, open_receiver
from exporter.worker import Worker
from exporter.workloads import WorkloadProcess, WorkloadUpdate
from tests.training.senders import ReceiverRig, SenderProcess, ticking

OpenRig = Callable[..., ReceiverRig]
Start = Callable[[], SenderProcess]
NOW = 10_000 * SECOND
PROC = Path("/proc")
US = os.getpid()


class FakeListener:
    """A listener that a test can stop."""

    def __init__(self) -> None:
        self.worker = Worker("fake", lambda: None, stop=threading.Event())
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeFollower:
    """A log follower that returns the messages of the test."""

    def __init__(self) -> None:
        self.found: list[LoggedMessage] = []
        self.closed = False

    def poll(self, _processes: Sequence[WorkloadProcess]) -> tuple[LoggedMessage, ...]:
        found, self.found = tuple(self.found), []
        return found

    def faults(self) -> tuple[Fault, ...]:
        return ()

    def counts(self) -> Mapping[str, int]:
        return {"line_unknown": 2}

    def close(self) -> None:
        self.closed = True


class Harness:
    """A receiver without a socket: senders are this process, or processes in a fake /proc."""

    def __init__(self, proc: Path = PROC, followers: FakeFollower | None = None) -> None:
        self.inbox, self.listener = Inbox(per_second=1000.0, processes=1024), FakeListener()
        self.now, self.proc = NOW, proc
        self.receiver = ReportReceiver(self.inbox, [self.listener], proc=proc, followers=followers)
        self.jobs: dict[int, WorkloadProcess] = {}
        self.looked_up: list[tuple[int, ...]] = []
        self.answers: list[tuple[int, str]] = []

    def lookup(self, pids: Sequence[int]) -> dict[int, WorkloadProcess]:
        self.looked_up.append(tuple(pids))
        return {pid: self.jobs[pid] for pid in pids if pid in self.jobs}

    def send(self, raw: bytes, pid: int = US, *, ticks: int | None = None) -> None:
        start = start_ticks(self.proc / str(pid)) if ticks is None else ticks
        sender = self.inbox.sender(Peer(pid, start or 0), begun=self.now - 3600 * SECOND)
        self.inbox.receive(
            sender, raw, pid=pid, now=self.now, reply=lambda refused: self.answers.append((pid, refused.outcome))
        )

    def take(self, *processes: WorkloadProcess, after: float = 0.0) -> WorkloadUpdate:
        self.now += int(after * SECOND)
        return self.receiver.poll(self.now, processes, self.lookup)

    def steps(self, *processes: WorkloadProcess, after: float = 0.0) -> list[tuple[str, int | None]]:
        return [(report.job_id, report.step) for report in self.take(*processes, after=after).reports]


def pretend(proc: Path, pid: int, ticks: int = 1) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} (x) S {'0 ' * 18}{ticks} 0\n")


# Identification of senders.


def test_a_sender_s_job_is_asked_for_once_and_all_it_says_is_in_order() -> None:
    harness = Harness()
    harness.jobs[US] = WorkloadProcess(US, "7", rank="2")
    for step in range(3):
        harness.send(b'{"step": %d}' % step)
    assert harness.steps() == [("7", 0), ("7", 1), ("7", 2)]
    harness.send(b'{"step": 3}')
    assert harness.steps(after=100) == [("7", 3)]
    assert harness.looked_up == [(US,)]


def test_a_process_that_a_gpu_lists_is_not_asked_about() -> None:
    harness = Harness()
    harness.send(b"{}")
    (report,) = harness.take(WorkloadProcess(US, "7", ("GPU-0",), "1")).reports
    assert (report.job_id, report.uuids, report.rank) == ("7", ("GPU-0",), "1")
    assert harness.looked_up == []


def test_its_gpus_are_those_it_has_now_and_stay_when_it_leaves_them() -> None:
    harness = Harness()
    harness.jobs[US] = WorkloadProcess(US, "7")
    seen = []
    for processes in ((), (WorkloadProcess(US, "7", ("GPU-1",)),), (), (WorkloadProcess(US, "8", ("GPU-2",)),)):
        harness.send(b"{}")
        seen += [(report.job_id, report.uuids) for report in harness.take(*processes, after=1).reports]
    assert seen == [("7", ()), ("7", ("GPU-1",)), ("7", ("GPU-1",)), ("7", ("GPU-1",))], "it is its job's for good"


def test_one_that_is_nobody_s_is_answered_and_asked_about_again_after_a_while() -> None:
    harness = Harness()
    harness.send(b'{"step": 1}')
    assert harness.steps() == []
    assert harness.answers == [(US, "unknown_process")]
    harness.jobs[US] = WorkloadProcess(US, "7")
    for _ in range(9):
        assert harness.steps(after=1) == []
    assert harness.looked_up == [(US,)]
    assert harness.steps(after=1) == []
    harness.send(b'{"step": 2}')
    assert harness.steps(after=1) == [("7", 2)]
    assert harness.looked_up == [(US,), (US,)]
    assert LOOKUP_INTERVAL == 10 * SECOND


def test_one_that_is_nobody_s_and_says_nothing_more_is_not_asked_about_for_ever() -> None:
    harness = Harness()
    harness.send(b"{}")
    for _ in range(100):
        harness.take(after=10)
    assert len(harness.looked_up) <= 7
    harness.jobs[US] = WorkloadProcess(US, "7")
    with pytest.raises(Exception, match="belongs to no job"):
        harness.send(b"{}")
    harness.take(after=1)
    harness.send(b'{"step": 1}')
    assert harness.steps() == [("7", 1)]


def test_a_pid_that_is_somebody_else_s_by_now_is_not_believed(tmp_path: Path) -> None:
    pretend(tmp_path, 5, ticks=2)
    harness = Harness(tmp_path)
    harness.jobs[5] = WorkloadProcess(5, "7")
    harness.send(b'{"step": 1}', 5, ticks=1)
    harness.send(b'{"step": 2}', 5)
    assert harness.steps() == [("7", 2)]
    assert harness.steps(WorkloadProcess(5, "7"), after=1) == []
    assert harness.answers == [(5, "unknown_process")]


def test_many_that_come_at_once_are_asked_about_in_turns_and_none_is_lost(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    pids = range(1000, 1000 + 2 * MOST_LOOKUPS + 10)
    for pid in pids:
        pretend(tmp_path, pid)
        harness.jobs[pid] = WorkloadProcess(pid, f"{pid}")
        harness.send(b"{}", pid)
    turns = [len(harness.take(after=1).reports) for _ in range(4)]
    assert turns == [MOST_LOOKUPS, MOST_LOOKUPS, 10, 0]
    assert [len(pids) for pids in harness.looked_up] == [MOST_LOOKUPS, MOST_LOOKUPS, 10]


def test_strangers_do_not_keep_the_new_from_being_asked_about(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    for pid in range(1000, 1000 + 3 * MOST_LOOKUPS):
        pretend(tmp_path, pid)
        harness.send(b"{}", pid)
    for _ in range(3):
        harness.take(after=1)
    pretend(tmp_path, 9)
    harness.jobs[9] = WorkloadProcess(9, "7")
    harness.send(b'{"step": 1}', 9)
    assert harness.steps(after=20) == [("7", 1)]


def test_at_most_so_many_are_taken_at_a_time_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.training.receiver.MOST_TAKEN", 2)
    harness = Harness()
    harness.jobs[US] = WorkloadProcess(US, "7")
    for step in range(5):
        harness.send(b'{"step": %d}' % step)
    assert [harness.steps(after=1) for _ in range(3)] == [[("7", 0), ("7", 1)], [("7", 2), ("7", 3)], [("7", 4)]]


@pytest.mark.e2e
def test_what_a_scheduler_cannot_say_ends_nothing(open_rig: OpenRig, start_sender: Start) -> None:
    """The scheduler learns of the job after the process has connected."""
    rig = open_rig()
    one = start_sender()
    one.connect()
    one.send(step=1)
    with ticking(rig):
        assert "asked again" in one.answer()["error"]
    rig.jobs[one.pid] = WorkloadProcess(one.pid, "7")
    rig.take(later=11.0)
    one.send(step=2)
    assert [report.step for report in rig.taken(1)] == [2]


# FakeFollower.


def followed(at: float, *, pid: int = 5, job: str = "7", rank: int | None = None, **said: object) -> LoggedMessage:
    message = Message(rank=rank, **said)  # type: ignore[arg-type]  # fields given by each test
    return LoggedMessage(pid, job, message, NOW + int(at * SECOND))


def test_what_a_log_says_is_said_of_its_process() -> None:
    logs = FakeFollower()
    harness = Harness(followers=logs)
    logs.found = [followed(-1, step=1, seconds=1.0, tokens=5.0), followed(0, step=2, seconds=1.0, tokens=6.0)]
    reports = harness.take(WorkloadProcess(5, "7", ("GPU-0",), "3")).reports
    assert [(r.step, r.tokens, r.uuids, r.rank, r.start - NOW, r.end - NOW) for r in reports] == [
        (1, 5.0, ("GPU-0",), "3", -2 * SECOND, -SECOND),
        (2, 6.0, ("GPU-0",), "3", -SECOND, 0),
    ]
    assert harness.looked_up == []


def test_of_a_process_that_no_gpu_lists_only_the_job_is_known() -> None:
    logs = FakeFollower()
    harness = Harness(followers=logs)
    logs.found = [followed(0, step=1, rank=4)]
    (report,) = harness.take(WorkloadProcess(5, "8", ("GPU-0",), "3")).reports
    assert (report.job_id, report.uuids, report.rank, report.each) == ("7", (), "4", True)


def test_a_log_says_its_time_once_and_each_rank_s_lines_are_its_own() -> None:
    logs = FakeFollower()
    harness = Harness(followers=logs)
    logs.found = [
        followed(0, seconds=5.0, rank=0),
        followed(0, seconds=5.0, rank=0),
        followed(0, seconds=5.0, rank=1),
        followed(-4000, seconds=5.0, rank=2),
        followed(9, seconds=5.0, rank=2),
    ]
    update = harness.take()
    counts = dict(update.counts)
    assert [report.rank for report in update.reports] == ["0", "1"]
    assert (counts["replayed"], counts["old"], counts["future"]) == (1, 1, 1)


def test_the_log_of_a_job_that_speaks_for_itself_is_not_believed_beside_it() -> None:
    logs = FakeFollower()
    harness = Harness(followers=logs)
    harness.jobs[US] = WorkloadProcess(US, "7")
    harness.send(b"{}")
    harness.take()
    logs.found = [followed(0, step=1), followed(0, step=2, job="8")]
    update = harness.take()
    assert [report.job_id for report in update.reports] == ["8"]
    assert dict(update.counts)["reported"] == 1
    logs.found = [followed(601, step=3)]
    assert harness.steps(after=601) == [("7", 3)], "it has long been silent"


def test_counts_of_logs_stand_beside_those_of_messages() -> None:
    harness = Harness(followers=FakeFollower())
    harness.jobs[US] = WorkloadProcess(US, "7")
    harness.send(b"{}")
    counts = dict(harness.take().counts)
    assert (counts["line_unknown"], counts["taken"], counts["malformed"]) == (2, 1, 0)


# Opening and closing.


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., ReportReceiver]]:
    with ExitStack() as stack:

        def opened(name: str = "report.sock", http: str = "") -> ReportReceiver:
            settings = Settings(f"{folder / name}" if name else "", http)
            receiver = open_receiver(Config(reports=settings), SystemClock())
            stack.callback(receiver.close)
            assert isinstance(receiver, ReportReceiver)
            return receiver

        yield opened


def none(_pids: Sequence[int]) -> dict[int, WorkloadProcess]:
    return {}


def test_a_socket_that_cannot_be_made_is_one_warning_and_a_fault_that_stands(
    opened: Callable[..., ReportReceiver], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "file").touch()
    with caplog.at_level(logging.WARNING):
        receiver = opened("file/report.sock", "127.0.0.1:0")
    update = [receiver.poll(NOW, (), none) for _ in range(3)]
    assert len(caplog.records) == 1
    assert "set reports.socket" in caplog.text
    assert [[fault.kind for fault in each.faults] for each in update] == [["reports_failed"]] * 3
    assert len(receiver._listeners) == 1, "HTTP goes on"


def test_nothing_is_opened_where_nothing_is_to_be(opened: Callable[..., ReportReceiver], folder: Path) -> None:
    update = opened("").poll(NOW, (), none)
    assert (update.reports, update.faults, list(folder.iterdir())) == ((), (), [])


def test_a_port_that_is_taken_is_a_fault_that_names_it(opened: Callable[..., ReportReceiver]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        port = theirs.getsockname()[1]
        (fault,) = opened("", f"127.0.0.1:{port}").poll(NOW, (), none).faults
    assert f"port {port}: Address already in use" in fault.message


@pytest.mark.parametrize("http", ["0.0.0.0:1", ":19402", "10.0.0.1:19402", "example.org:80", "127.0.0.1", "[::]:1"])
def test_what_others_could_reach_is_refused_at_the_start(
    opened: Callable[..., ReportReceiver], folder: Path, http: str
) -> None:
    with pytest.raises(ConfigError, match=r"reports\.http: .* not host:port on loopback"):
        opened("report.sock", http)
    assert list(folder.iterdir()) == [], "and nothing has been opened"


def test_what_is_not_configured_is_not_imported() -> None:
    look = (
        "import sys; from exporter.config import *; from exporter.clock import SystemClock;"
        "from exporter.training.receiver import open_receiver;"
        "open_receiver(Config(reports=ReportsSettings('')), SystemClock()).close();"
        "print([name for name in sys.modules if name.startswith(('exporter.training.logs', 'uvicorn', 'starlette'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", look], text=True).strip() == "[]"


def test_a_thread_that_has_ended_is_a_fault() -> None:
    harness = Harness()
    assert harness.take().faults == ()
    harness.listener.worker.failures = 1
    assert ["began anew" in fault.message for fault in harness.take().faults] == [True]
    assert harness.take().faults == ()
    harness.listener.worker.start()
    harness.listener.worker.join(20.0)
    assert [fault.kind for fault in harness.take().faults] == ["reports_failed"]


def test_closing_closes_all(folder: Path) -> None:
    logs = FakeFollower()
    harness = Harness(followers=logs)
    harness.receiver.close()
    assert harness.listener.closed
    assert logs.closed
    receiver = open_receiver(Config(reports=Settings(f"{folder}/report.sock", "127.0.0.1:0")), SystemClock())
    receiver.close()
    receiver.close()
    assert list(folder.iterdir()) == []
