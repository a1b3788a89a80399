"""Real processes that send reports over real sockets, and a receiver for them."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from exporter.clock import SystemClock
from exporter.config import Config, FollowSettings, HostSettings
from exporter.config import ReportsSettings as Settings
from exporter.core.model import TrainingReport
from exporter.training.receiver import open_receiver
from exporter.workloads import WorkloadListener, WorkloadProcess, WorkloadUpdate
from tests.waiting import PATIENCE, wait_for

_SPEAKER = """
import os, socket, sys
lines = {}
for command in sys.stdin:
    what, name, *rest = command.split()
    try:
        if what == "connect":
            lines[name] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            lines[name].settimeout(20)
            lines[name].connect(rest[0])
            said = "ok"
        elif what == "send":
            lines[name].send(bytes.fromhex(rest[0] if rest else ""))
            said = "ok"
        elif what == "flood":
            sent = 0
            lines[name].setblocking(False)
            try:
                while sent < int(rest[1]):
                    sent += lines[name].send(bytes.fromhex(rest[0])) > 0
            except BlockingIOError:
                pass
            lines[name].settimeout(20)
            said = str(sent)
        elif what == "child":
            if not (child := os.fork()):
                lines[name].send(bytes.fromhex(rest[0]))
                os._exit(0)
            os.waitpid(child, 0)
            said = str(child)
        elif what == "read":
            said = lines[name].recv(65536).decode() or "end"
        elif what == "hang-up":
            lines.pop(name).close()
            said = "ok"
    except OSError as err:
        said = type(err).__name__
    print(said, flush=True)
"""


class SenderProcess:
    """A separate process that executes commands from its standard input."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _SPEAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def connect(self, line: str = "a") -> str:
        return self._do("connect", line, f"{self.socket}")

    def send(self, raw: bytes | None = None, *, line: str = "a", **message: Any) -> str:
        return self._do("send", line, (json.dumps(message).encode() if raw is None else raw).hex())

    def flood(self, times: int, *, line: str = "a", **message: Any) -> int:
        """Send until the socket would block; returns the number of messages."""
        return int(self._do("flood", line, json.dumps(message).encode().hex(), f"{times}"))

    def send_from_child(self, *, line: str = "a", **message: Any) -> int:
        """Send it from a forked child, over the inherited connection."""
        return int(self._do("child", line, json.dumps(message).encode().hex()))

    def answer(self, line: str = "a") -> dict[str, str]:
        """Wait for the next reply and return it."""
        said: dict[str, str] = json.loads(self.read(line))
        return said

    def read(self, line: str = "a") -> str:
        return self._do("read", line)

    def disconnect(self, line: str = "a") -> str:
        return self._do("hang-up", line)

    def end(self) -> None:
        cast("IO[str]", self._process.stdin).close()
        self._process.wait(timeout=PATIENCE)
        cast("IO[str]", self._process.stdout).close()

    def _do(self, *words: str) -> str:
        stdin = cast("IO[str]", self._process.stdin)
        stdin.write(" ".join(words) + "\n")
        stdin.flush()
        return cast("IO[str]", self._process.stdout).readline().strip()


class ReceiverRig:
    """A receiver with a socket; `jobs` is the scheduler's list of processes by pid."""

    def __init__(
        self, socket: Path, *, http: str = "", follow: tuple[FollowSettings, ...] = (), **settings: Any
    ) -> None:
        self.socket, self.clock = socket, SystemClock()
        reports = Settings(f"{socket}", http, **settings)
        self.receiver: WorkloadListener = open_receiver(
            Config(reports=reports, follow=follow, host=HostSettings()), self.clock
        )
        self.jobs: dict[int, WorkloadProcess] = {}
        self.looked_up: list[int] = []
        self.reports: list[TrainingReport] = []
        self.update = WorkloadUpdate()

    def lookup(self, pids: Sequence[int]) -> dict[int, WorkloadProcess]:
        self.looked_up += pids
        return {pid: self.jobs[pid] for pid in pids if pid in self.jobs}

    def take(self, *processes: WorkloadProcess, later: float = 0.0) -> tuple[TrainingReport, ...]:
        """Poll once, `later` seconds from now; `processes` are on GPUs."""
        self.update = self.receiver.poll(self.clock.now() + int(later * 1e9), processes, self.lookup)
        self.reports += self.update.reports
        return self.update.reports

    def taken(self, number: int, *processes: WorkloadProcess) -> list[TrainingReport]:
        """Poll until there are so many reports since the start, and return them."""
        wait_for(lambda: self.take(*processes) is not None and len(self.reports) >= number, f"{number} reports")
        return self.reports

    def count(self, outcome: str) -> int:
        return dict(self.receiver.poll(self.clock.now(), (), self.lookup).counts)[outcome]


@contextmanager
def ticking(rig: ReceiverRig) -> Iterator[None]:
    """Poll the receiver on another thread, like the daemon, while this one waits for replies."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.05):
            rig.take()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
