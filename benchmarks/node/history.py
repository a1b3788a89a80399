"""What the node's history costs: a checkpoint, a scrape that waits for it, a year of receipts (year.py), memory.

Owns these measurements, on the temporary folder's disk. A checkpoint is of eight GPUs shared by 64 jobs that all report
their training; a receipt is one of these jobs' with two hours of samples.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.figures import Row, own_garbage_only, row
from benchmarks.group import Group, Measured
from benchmarks.machine import ROOT
from benchmarks.node.year import a_year
from exporter.agent.agent import Agent
from exporter.clock import SystemClock
from exporter.config import HistorySettings as Settings
from exporter.core.checkpoint import dump_ledger
from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.core.model import SECOND, Allocation, Device, Observation, Owner, Parallel, TrainingReport
from exporter.core.snapshot import DaemonMetadata
from exporter.history.recorder import HistoryRecorder
from exporter.history.store import HistoryStore
from exporter.simulate.simulation import simulate

CHECKPOINT_BUDGET_MS, CHECKPOINT_BUDGET_KIB = 5.0, 64.0
JOBS = 64
_REPEATS = 40


def history(*, quick: bool = False) -> list[Row]:
    """Measure all of it; quick: a tenth of the receipts."""
    with tempfile.TemporaryDirectory() as folder, own_garbage_only():
        agent, statements = _node(Path(folder))
        return [
            *_checkpoints(agent, Path(folder), statements),
            *a_year(Path(folder) / "year.db", statements, quick=quick),
            _memory(),
        ]


def _told(seen: Observation, devices: Sequence[Device], *, first: bool) -> Observation:
    """A second of a node whose every GPU eight jobs share, and of which each reports."""
    owners = [_owner(n) for n in range(JOBS)]
    held = tuple(Allocation(devices[n % len(devices)].uuid, owner, seen.at) for n, owner in enumerate(owners))
    reports = tuple(_report(n, owner, seen) for n, owner in enumerate(owners))
    return replace(
        seen, devices=tuple(devices) if first else None, allocations=held if first else None, reports=reports
    )


def _owner(n: int) -> Owner:
    return Owner(
        job_id=f"{418_000 + n}", user=f"user-{n:03}", account=f"group-{n % 8}", partition="gpu", scheduler="slurm",
        name=f"train-language-model-{n:02}",
    )  # fmt: skip


def _report(n: int, owner: Owner, seen: Observation) -> TrainingReport:
    step = seen.at // SECOND
    return TrainingReport(
        job_id=owner.job_id, start=seen.at - SECOND, end=seen.at, model_flops=2.5e13 + n, rank="0", run=f"run-{n:03}",
        step=step, steps=1, tokens=65_536.0, samples=16.0, hardware_flops=3.1e13, dtype="bf16", loss=2.0 + 1 / step,
        phases=(("data", 20_000_000), ("communication", 15_000_000)), world_size=64,
        parallel=Parallel(tensor=2, pipeline=4, data=8),
    )  # fmt: skip


def _observations() -> Iterator[Observation]:
    simulation = simulate("healthy_training", duration_seconds=1300)
    story = list(simulation.observations)
    devices = next(seen.devices for seen in story if seen.devices)
    live = [seen for seen in story if seen.at > simulation.live_from]
    for number, seen in enumerate(live):
        yield _told(seen, devices, first=number == 0)


def _node(folder: Path) -> tuple[Agent, list[JobRecord]]:
    """An agent after twenty minutes, and what its jobs' receipts would be."""
    agent = Agent(meta=DaemonMetadata(source="nvml"))
    kept = _history(folder / "node.db", agent)
    for seen in _observations():
        agent.process(seen)
    statements = [one for one in kept.job_records(JobRecordQuery()) if one.running]
    kept.end()
    if len(statements) != JOBS or any(one.training is None for one in statements):
        raise RuntimeError(f"{len(statements)} jobs run on the node, of which {JOBS} were to report")
    return agent, statements


def _history(path: Path, agent: Agent) -> HistoryRecorder:
    kept = HistoryRecorder(path, Settings(checkpoint_seconds=3600.0), node="node", boot="boot", clock=SystemClock())
    kept.begin(agent)
    return kept


def _checkpoints(agent: Agent, folder: Path, statements: list[JobRecord]) -> list[Row]:
    about = f"{_REPEATS} x"
    with closing(HistoryStore(folder / "checkpoints.db")) as store:
        store.write(job_records=statements)
        frozen = [_timed(lambda: dump_ledger(agent.ledger))[0] for _ in range(_REPEATS)]
        tallies = msgspec.msgpack.encode({one.owner.job_id: (one.gpus, one.money, one.start) for one in statements})

        def save(*, durable: bool) -> Callable[[], None]:
            return lambda: store.write(
                state=[("ledger", dump_ledger(agent.ledger)), ("tallies", tallies)], durable=durable
            )

        kernel = [_timed(save(durable=False)) for _ in range(_REPEATS)]
        disk = [_timed(save(durable=True)) for _ in range(_REPEATS)]
    kib = [written / 1024 for _, written in kernel]
    return [
        row("history", f"The ledger as bytes, for which sampling waits (8 GPUs, {JOBS} jobs)", often=about,
            values=frozen, unit="ms", digits=2),
        row("history", "A checkpoint, written to the kernel: before every scrape", often=about,
            values=[ms for ms, _ in kernel], unit="ms", digits=2, budget=CHECKPOINT_BUDGET_MS),
        row("history", "Bytes written by it", often=about, values=kib, unit="KiB", budget=CHECKPOINT_BUDGET_KIB),
        row("history", "A checkpoint, synced to the disk: every minute", often=about,
            values=[ms for ms, _ in disk], unit="ms", digits=2),
        _cover(folder / "cover.db"),
    ]  # fmt: skip


def _cover(path: Path) -> Row:
    """What a scrape of that node waits for, thread to thread."""
    agent, waits = Agent(meta=DaemonMetadata(source="nvml")), []
    kept = _history(path, agent)
    for number, seen in enumerate(_observations()):
        agent.process(seen)
        newest = agent.latest()
        if number % 15 == 14 and newest is not None:
            began = time.perf_counter()
            kept.checkpointed_view(newest)
            waits.append((time.perf_counter() - began) * 1e3)
    kept.end()
    return row("history", "Added to a scrape of that node", often=f"{len(waits)} x", values=waits, unit="ms", digits=2)


def _timed(act: Callable[[], Any]) -> tuple[float, int]:
    """Milliseconds, and bytes given to write(2) and its kin meanwhile."""
    before, began = _written(), time.perf_counter()
    act()
    spent = time.perf_counter() - began
    return spent * 1e3, _written() - before


def _written() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(lines["wchar"])


def _memory() -> Row:
    """What the store's code, SQLite and an open file add to a daemon."""
    values = [_added() for _ in range(5)]
    return row("history", "Memory added by the store", often="5 x", values=values, unit="MiB")


_PROGRAM = """
import sys, tempfile
from pathlib import Path
import exporter.cli.serve, exporter.web.app, exporter.web.server
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
before = resident()
from exporter.history.store import HistoryStore
with tempfile.TemporaryDirectory() as folder:
    store = HistoryStore(Path(folder) / "history.db")
    store.write(state=[("ledger", bytes(60_000))])
    print(resident() - before)
    store.close()
"""


def _added() -> float:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


HISTORY = Group(
    name="history",
    title="The node's history",
    about=(
        "Wall time, on the disk of the temporary folder. The node has eight GPUs, each shared by eight jobs, and all "
        "64 report their training every second; what is written is the ledger with all of them, compressed, and what "
        "is remembered of each beside it. Bytes are those given to write(2) and its kin. The year's receipts are like "
        "those of these jobs, every other one with its training, all with 24 samples of made-up figures, which "
        "compress worse than real ones. A question is timed from opening the file to Python's objects; what sums need "
        "is without samples and training, but for jobs that ran over the end of a period of the trend. The command is "
        "a process of its own: Python's start, the question, sums of 250 users by the week, the answer as JSON."
    ),
    measures=(
        "exporter/agent",
        "exporter/cli/report.py",
        "exporter/cli/report.py",
        "exporter/core",
        "exporter/history",
        "exporter/report",
        "exporter/simulate",
    ),
    shortfalls={
        "Asked for what sums by the week of a year need: 50,000 receipts": "a third of it is SQLite's, the rest the "
        "decoding of 50,000 statements into Python's objects, of which a sum needs five figures each; the command as a "
        "whole keeps its budget. Next: those five in columns of their own, added up by SQLite",
    },
    run=lambda: Measured(rows=history()),
    quick=lambda: Measured(rows=history(quick=True)),
)
