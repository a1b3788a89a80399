"""What a year of receipts costs: room, questions, and sums of all of them as the command makes them.

Owns the made-up year, like the receipts that it is given, and these measurements. Its samples are made-up figures,
which compress worse than real ones.
"""

import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from benchmarks.figures import Row, row
from benchmarks.machine import ROOT
from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample
from exporter.core.model import SECOND
from exporter.history.store import HistoryStore, open_read_only
from exporter.report.usage import split_periods

QUERY_BUDGET_MS, STORE_BUDGET_MIB = 200.0, 200.0
COMMAND_BUDGET_S, COMMAND_BUDGET_MIB = 3.0, 200.0
RECEIPTS = 50_000
_YEAR = 365 * 86_400
_SAMPLES = 24
_DOLLARS = 2.5
"""Of an hour of what a job held."""
_MEASURED = """
import sys
from exporter.cli import main
status = main()
with open("/proc/self/status") as told:  # what getrusage gives is of the program before exec, too
    print(next(int(line.split()[1]) for line in told if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(status)
"""
_REPORT = (sys.executable, "-c", _MEASURED)


def a_year(path: Path, statements: list[JobRecord], *, quick: bool = False) -> list[Row]:
    """All rows of it; quick: of a tenth of the receipts."""
    count = RECEIPTS // 10 if quick else RECEIPTS
    chance, now, often = random.Random(1), time.time(), f"9 x, of {count:,} receipts"  # noqa: S311  a made-up year
    with closing(HistoryStore(path)) as store:
        for first in range(0, count, 1000):
            store.write(job_records=[_of_the_year(chance, n, statements, now) for n in range(first, first + 1000)])
        size = store.bytes / (1 << 20)
        rows = [row("history", "Store with a year of receipts of a busy node", often=f"{count:,} receipts",
                    values=[size], unit="MiB", budget=STORE_BUDGET_MIB,
                    spread=f"{size * 2**20 / count:,.0f} B each")]  # fmt: skip
    for what, wanted in (
        ("one job", JobRecordQuery(job_id=f"{count // 2}")),
        ("one user, a year", JobRecordQuery(user="user-042", limit=count)),
        ("one account, the latest 1,000", JobRecordQuery(account="group-3")),
    ):
        rows.append(_question(what, often, [_asked(path, wanted) for _ in range(9)]))
    for what, days, every in (("the last week", 7, "day"), ("a year", 365, "week")):
        asked = [_summed(path, now - days * 86_400, now, every) for _ in range(9)]
        rows.append(_question(f"what sums by the {every} of {what} need", often, asked))
    rows += _reported(path, now, 2 if quick else 7)
    with closing(HistoryStore(path)) as store:
        began = time.perf_counter()
        store.trim(now=now, keep_seconds=_YEAR - 7 * 86_400, most_bytes=1 << 40)
        spent = [(time.perf_counter() - began) * 1e3]
    return [*rows, row("history", "A week of them forgotten", often="once", values=spent, unit="ms", spread="-")]


def _of_the_year(chance: random.Random, n: int, statements: list[JobRecord], now: float) -> JobRecord:
    """A receipt like one of these, of somebody at some time of the last year."""
    one = statements[chance.randrange(len(statements))]
    start = now - chance.uniform(0, _YEAR)
    length = chance.uniform(600, 14_000)
    scale = length * SECOND / max(1, one.paid)
    parts = {leak: round(part * scale * chance.uniform(0.5, 1.5)) for leak, part in one.parts.items()}
    samples = tuple(
        JobSample(start + length * k / _SAMPLES, *(chance.uniform(0, length) for _ in range(6)))
        for k in range(1, _SAMPLES + 1)
    )
    who = chance.randrange(250)
    owner = replace(one.owner, job_id=f"{n}", user=f"user-{who:03}", account=f"group-{who % 20}")
    return replace(
        one, owner=owner, start=start, end=start + length, parts=parts, paid=sum(parts.values()), samples=samples,
        running=False, training=one.training if n % 2 else None, money={"USD": length / 3600 * _DOLLARS},
        energy={leak: joules * chance.uniform(0.5, 1.5) for leak, joules in one.energy.items()},
    )  # fmt: skip


def _question(what: str, often: str, found: list[tuple[float, int]]) -> Row:
    return row("history", f"Asked for {what}: {found[0][1]:,} receipts", often=often,
               values=[ms for ms, _ in found], unit="ms", budget=QUERY_BUDGET_MS)  # fmt: skip


def _asked(path: Path, wanted: JobRecordQuery) -> tuple[float, int]:
    """Milliseconds from opening the store to what is wanted, and how many these are."""
    began = time.perf_counter()
    with closing(open_read_only(path)) as store:
        found = len(store.job_records(wanted))
    return (time.perf_counter() - began) * 1e3, found


def _summed(path: Path, since: float, until: float, every: str) -> tuple[float, int]:
    """The same of what sums ask for, as they do: one after the other, with samples of who ran over a period's end."""
    cuts = [since, *(period.end for period in split_periods(since, until, every=every))]
    began = time.perf_counter()
    with closing(open_read_only(path)) as store:
        found = sum(1 for _ in store.summaries(JobRecordQuery(since=since, until=until), cuts))
    return (time.perf_counter() - began) * 1e3, found


def _reported(path: Path, now: float, repeats: int) -> list[Row]:
    """The whole command, as a process of its own: its wall time, and the most memory it had."""
    often = f"{repeats} x, of `report --all --since 365d --store FILE --json`"
    spent = [_command(path, now) for _ in range(repeats)]
    return [
        row("history", "Sums of the year by the command, from its start to its end", often=often,
            values=[seconds for seconds, _ in spent], unit="s", digits=2, budget=COMMAND_BUDGET_S),
        row("history", "Memory of that command", often=often, values=[mib for _, mib in spent], unit="MiB",
            budget=COMMAND_BUDGET_MIB),
    ]  # fmt: skip


def _command(path: Path, now: float) -> tuple[float, float]:
    """Seconds and MiB."""
    words = [
        *_REPORT,
        "report",
        "--all",
        "--since",
        "365d",
        "--at",
        f"{now}",
        "--store",
        str(path),
        "--json",
        "--quiet",
    ]
    began = time.perf_counter()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return time.perf_counter() - began, int(done.stderr.split()[-1]) / 1024
