"""What the reports of 512 ranks cost the daemon: real processes on a real socket, each with a message every 2 s.

Owns those processes. What is counted is processor time of the socket's thread and of the reading thread's `take`, the
kernel's part included; whose a process is, which is asked once a connection, is left to the schedulers' group.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast

from msgspec import Struct

from benchmarks.figures import Row, own_garbage_only, row
from benchmarks.group import Group, Measured
from exporter.clock import SystemClock
from exporter.training.inbox import Inbox
from exporter.training.receiver import ReportReceiver
from exporter.training.unix_socket import SocketListener
from exporter.workloads import WorkloadProcess

BUDGET = 1.0
"""Percent of a core."""
_PROC = Path("/proc")
_MESSAGE = {
    "v": 1, "run": "llama-3-8b", "rank": 317, "world_size": 512, "step": 10_000, "steps": 4,
    "tokens": 16_777_216.0, "model_flops": 8.1e17, "dtype": "bf16", "recompute": "selective", "phase": "compute",
    "phases": {"data": 0.03, "communication": 0.21, "checkpoint": 0.0}, "parallel": {"tensor": 8, "data": 64},
    "loss": 2.314, "epoch": 0.31,
}  # fmt: skip
"""Typical of a rank: about as long as the client's."""
_RANKS = """
import os, signal, socket, sys, time
path, ranks, every, text = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4].encode()
children = []
for rank in range(ranks):
    pid = os.fork()
    if not pid:
        parent = os.getppid()
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(path)
        time.sleep(every * rank / ranks)
        while os.getppid() == parent:
            line.send(text)
            time.sleep(every)
        os._exit(0)
    children.append(pid)
print(*children, flush=True)
sys.stdin.read()
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


class Size(Struct, frozen=True):
    """How much is measured; seconds."""

    ranks: int = 512
    every: float = 2.0
    warm_up: int = 4
    seconds: int = 20


QUICK = Size(ranks=16, every=0.5, warm_up=1, seconds=2)


class Look(Struct, frozen=True):
    """One second of the daemon's side."""

    wall: float
    listening: float
    """Seconds of the processor."""
    taking: float
    reports: int


def reports(*, quick: bool = False) -> list[Row]:
    """Let the ranks speak, and take once a second what they say."""
    size = QUICK if quick else Size()
    with TemporaryDirectory() as folder:
        socket = Path(folder) / "report.sock"
        intake, clock = Inbox(per_second=10.0, processes=1024), SystemClock()
        listening = SocketListener(socket, intake, clock=clock, proc=_PROC, most=1024)
        desk = ReportReceiver(intake, [listening], proc=_PROC)
        try:
            with _ranks(socket, size) as pids, own_garbage_only():
                guests = [WorkloadProcess(pid, "1", ("GPU-0",), f"{rank}") for rank, pid in enumerate(pids)]
                looks = list(_looks(desk, listening, guests, size))
        finally:
            desk.close()
    return rows(looks, size)


@contextmanager
def _ranks(socket: Path, size: Size) -> Iterator[list[int]]:
    """Start them; give their pids."""
    command = [sys.executable, "-S", "-E", "-c", _RANKS, f"{socket}", f"{size.ranks}", f"{size.every}"]
    with subprocess.Popen(
        [*command, json.dumps(_MESSAGE | {"seconds": size.every})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield [int(pid) for pid in cast("IO[str]", started.stdout).readline().split()]
        finally:
            cast("IO[str]", started.stdin).close()
            started.wait(timeout=30.0)


def _looks(
    desk: ReportReceiver, listening: SocketListener, guests: Sequence[WorkloadProcess], size: Size
) -> Iterator[Look]:
    known, clock = {guest.pid: guest for guest in guests}, SystemClock()
    for number in range(size.warm_up + size.seconds):
        began, before = time.monotonic(), listening.cpu_seconds
        time.sleep(1.0)
        spent = time.thread_time()
        heard = desk.poll(clock.now(), guests, lambda pids: {pid: known[pid] for pid in pids})
        taking = time.thread_time() - spent
        if number >= size.warm_up:
            yield Look(time.monotonic() - began, listening.cpu_seconds - before, taking, len(heard.reports))


def rows(looks: Sequence[Look], size: Size) -> list[Row]:
    """Rows of both threads' share of a core; raises RuntimeError where not all that was sent was heard."""
    heard, wall = sum(look.reports for look in looks), sum(look.wall for look in looks)
    expected = size.ranks / size.every * wall
    if not 0.8 * expected <= heard <= 1.2 * expected:
        raise RuntimeError(f"{heard} reports were taken, and about {expected:.0f} sent")
    often = f"{size.seconds} seconds of {heard / wall:.0f} messages each"
    shares = {
        "the socket's thread": [100 * look.listening / look.wall for look in looks],
        "the reading thread": [100 * look.taking / look.wall for look in looks],
    }
    both = [sum(pair) for pair in zip(*shares.values(), strict=True)]
    what = f"{size.ranks} ranks, a message every {size.every:g} s each: share of a core"
    parts = [
        row("reports", f"... of it {name}", often=often, values=values, unit="%", digits=2)
        for name, values in shares.items()
    ]
    return [
        row("reports", what, often=often, values=both, unit="%", digits=2, budget=BUDGET, judged=sum(both) / len(both)),
        *parts,
    ]


REPORTS = Group(
    name="reports",
    title="512 ranks that report",
    about=(
        "Real processes, each with a connection of its own and a typical message every two seconds: processor time "
        "of the socket's thread and of the reading thread's part, the kernel's included. Whose a process is, is asked "
        "once a connection and not in it."
    ),
    measures=("exporter/training", "exporter/workloads.py"),
    shortfalls={
        "512 ranks, a message every 2 s each: share of a core": "50 us a message, most of it a wake-up, a read and a "
        "decoding of its own for each of 512 sockets; 0.94 % on a faster machine. Next: a client that sends every 5 s "
        "where it has many siblings, for which a report leaves room",
    },
    run=lambda: Measured(rows=reports()),
    quick=lambda: Measured(rows=reports(quick=True)),
)


if __name__ == "__main__":
    for each in reports(quick="--quick" in sys.argv):
        print(f"{each.what:70} {each.median:>10} {each.spread:>16} {each.budget:>8}  {each.often}")
