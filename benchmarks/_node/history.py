"""What the node's history costs: a checkpoint, a scrape that waits for it, a year of receipts, memory.

Owns these measurements, on the temporary folder's disk. A checkpoint is of eight GPUs shared by 64 jobs that all report
their training; a receipt is one of these jobs' with two hours of samples.
"""

import random
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
from benchmarks.machine import ROOT
from exporter.agent import Agent
from exporter.clock import SystemClock
from exporter.config import History as Settings
from exporter.core.checkpoint import freeze
from exporter.core.model import SECOND, Allocation, Device, Observation, Owner, Parallel, Report
from exporter.core.snapshot import Meta
from exporter.core.statement import Sample, Statement, Wanted
from exporter.history import History, Store, read_store
from exporter.simulate import simulate

CHECKPOINT_BUDGET_MS, CHECKPOINT_BUDGET_KIB = 5.0, 64.0
QUERY_BUDGET_MS, STORE_BUDGET_MIB = 200.0, 200.0
RECEIPTS, JOBS = 50_000, 64
_YEAR = 365 * 86_400
_SAMPLES = 24
_REPEATS = 40


def history(*, quick: bool = False) -> list[Row]:
    """Measure all of it; quick: a tenth of the receipts."""
    with tempfile.TemporaryDirectory() as folder, own_garbage_only():
        agent, statements = _node(Path(folder))
        return [
            *_checkpoints(agent, Path(folder), statements),
            *_year(Path(folder) / "year.db", statements, RECEIPTS // 10 if quick else RECEIPTS),
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


def _report(n: int, owner: Owner, seen: Observation) -> Report:
    step = seen.at // SECOND
    return Report(
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


def _node(folder: Path) -> tuple[Agent, list[Statement]]:
    """An agent after twenty minutes, and what its jobs' receipts would be."""
    agent = Agent(meta=Meta(source="nvml"))
    kept = _history(folder / "node.db", agent)
    for seen in _observations():
        agent.take_in(seen)
    statements = [one for one in kept.statements(Wanted()) if one.running]
    kept.end()
    if len(statements) != JOBS or any(one.training is None for one in statements):
        raise RuntimeError(f"{len(statements)} jobs run on the node, of which {JOBS} were to report")
    return agent, statements


def _history(path: Path, agent: Agent) -> History:
    kept = History(path, Settings(checkpoint_seconds=3600.0), node="node", boot="boot", clock=SystemClock())
    kept.begin(agent)
    return kept


def _checkpoints(agent: Agent, folder: Path, statements: list[Statement]) -> list[Row]:
    about = f"{_REPEATS} x"
    with closing(Store(folder / "checkpoints.db")) as store:
        store.write(statements=statements)
        frozen = [_timed(lambda: freeze(agent.ledger))[0] for _ in range(_REPEATS)]
        tallies = msgspec.msgpack.encode({one.owner.job_id: (one.gpus, one.money, one.start) for one in statements})

        def save(*, durable: bool) -> Callable[[], None]:
            return lambda: store.write(state=[("ledger", freeze(agent.ledger)), ("tallies", tallies)], durable=durable)

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
    agent, waits = Agent(meta=Meta(source="nvml")), []
    kept = _history(path, agent)
    for number, seen in enumerate(_observations()):
        agent.take_in(seen)
        newest = agent.latest()
        if number % 15 == 14 and newest is not None:
            began = time.perf_counter()
            kept.cover(newest)
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


def _year(path: Path, statements: list[Statement], count: int) -> list[Row]:
    chance, now, often = random.Random(1), time.time(), f"9 x, of {count:,} receipts"  # noqa: S311  a made-up year
    with closing(Store(path)) as store:
        for first in range(0, count, 1000):
            store.write(statements=[_of_the_year(chance, n, statements, now) for n in range(first, first + 1000)])
        size = store.bytes / (1 << 20)
        rows = [row("history", "Store with a year of receipts of a busy node", often=f"{count:,} receipts",
                    values=[size], unit="MiB", budget=STORE_BUDGET_MIB,
                    spread=f"{size * 2**20 / count:,.0f} B each")]  # fmt: skip
    for what, wanted, brief in (
        ("one job", Wanted(job_id=f"{count // 2}"), False),
        ("one user, a year", Wanted(user="user-042", limit=count), False),
        ("one account, the latest 1,000", Wanted(account="group-3"), False),
        ("all of the last week, in short", Wanted(since=now - 7 * 86_400, limit=count), True),
        ("all of a year, in short", Wanted(limit=count), True),
    ):
        found = [_asked(path, wanted, brief=brief) for _ in range(9)]
        rows.append(row("history", f"Asked for {what}: {found[0][1]:,} receipts", often=often,
                        values=[ms for ms, _ in found], unit="ms", budget=QUERY_BUDGET_MS))  # fmt: skip
    with closing(Store(path)) as store:
        spent, _ = _timed(lambda: store.trim(before=now - _YEAR + 7 * 86_400, most_bytes=1 << 40))
    return [*rows, row("history", "A week of them forgotten", often="once", values=[spent], unit="ms", spread="-")]


def _of_the_year(chance: random.Random, n: int, statements: list[Statement], now: float) -> Statement:
    """A receipt like one of these, of somebody at some time of the last year."""
    one = statements[chance.randrange(len(statements))]
    start = now - chance.uniform(0, _YEAR)
    length = chance.uniform(600, 14_000)
    scale = length * SECOND / max(1, one.paid)
    parts = {leak: round(part * scale * chance.uniform(0.5, 1.5)) for leak, part in one.parts.items()}
    samples = tuple(
        Sample(start + length * k / _SAMPLES, *(chance.uniform(0, length) for _ in range(6)))
        for k in range(1, _SAMPLES + 1)
    )
    who = chance.randrange(250)
    owner = replace(one.owner, job_id=f"{n}", user=f"user-{who:03}", account=f"group-{who % 20}")
    return replace(
        one, owner=owner, start=start, end=start + length, parts=parts, paid=sum(parts.values()), samples=samples,
        running=False, training=one.training if n % 2 else None,
        energy={leak: joules * chance.uniform(0.5, 1.5) for leak, joules in one.energy.items()},
    )  # fmt: skip


def _asked(path: Path, wanted: Wanted, *, brief: bool) -> tuple[float, int]:
    """Milliseconds from opening the store to what is wanted, and how many these are."""
    began = time.perf_counter()
    with closing(read_store(path)) as store:
        found = len(store.statements(wanted, brief=brief))
    return (time.perf_counter() - began) * 1e3, found


def _memory() -> Row:
    """What the store's code, SQLite and an open file add to a daemon."""
    values = [_added() for _ in range(5)]
    return row("history", "Memory added by the store", often="5 x", values=values, unit="MiB")


_PROGRAM = """
import sys, tempfile
from pathlib import Path
import exporter.cli.live, exporter.http
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
before = resident()
from exporter.history import Store
with tempfile.TemporaryDirectory() as folder:
    store = Store(Path(folder) / "history.db")
    store.write(state=[("ledger", bytes(60_000))])
    print(resident() - before)
    store.close()
"""


def _added() -> float:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)
