"""`gpu-efficiency backfill` with the real promtool, Prometheus and VictoriaMetrics: they answer what the ledger says.

The recordings are of simulated nodes whose headers say that they are not: no machine with GPUs is at hand, and what
`backfill` does with a model's figures is refused (`tests/test_backfill.py`). Nothing waits for a clock.
"""

import gzip
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from io import FileIO
from itertools import takewhile
from pathlib import Path

import httpx
import pyte
import pytest
from msgspec import Struct
from msgspec.structs import replace

from exporter.cli.backfill import DAEMON_METRICS
from exporter.core.exposition import render
from exporter.core.job_record import JobRecord, JobSample, build_job_record, job_sample
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Allocation, Device, Observation
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.history.store import HistoryStore
from exporter.simulate.simulation import simulate
from exporter.trace import TraceHeader, TraceWriter
from tests.dashboards.past import Past
from tests.e2e.databases import started, victoria
from tests.e2e.running import Labels, Page, command, environment
from tests.report.commands import run as report
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.e2e
BEGIN = 1_767_225_600
"""2026-01-01 00:00 UTC, where the simulation begins."""
ROOT = Path(__file__).parents[2]
OF_US = {"gpu_efficiency_build_info", "gpu_efficiency_source_info"}
NAME = {("__name__", "gpu_efficiency_seconds_total")}
SCRAPE = {("instance", "n1:19400"), ("job", "gpu-efficiency"), ("cluster", "alps")}


class Played(Struct):
    """A recording, and what the ledger says of it in the end."""

    trace: Path
    end: Snapshot
    first: int
    last: int
    samples: dict[str, list[JobSample]]
    """Of each job, every five minutes."""

    @property
    def page(self) -> Page:
        return Page(render(self.end).decode())


def recorded(path: Path, host: str, *, node: int = 0, hours: tuple[float, float] = (0.0, 2.5)) -> Played:
    """Some hours of a simulated node's story, as its recorder would have written them."""
    story = simulate("demo", node=node, board="H100-SXM5-80GB", period_seconds=5.0).observations
    ledger, told, samples = Ledger(), list[Observation](), dict[str, list[JobSample]]()
    devices: tuple[Device, ...] | None = None
    held: tuple[Allocation, ...] | None = None
    for seen in takewhile(lambda one: one.at <= hours[1] * 3600 * SECOND, story):
        devices, held = seen.devices or devices, held if seen.allocations is None else seen.allocations
        if seen.at >= hours[0] * 3600 * SECOND:
            told.append(seen if told else replace(seen, devices=devices, allocations=held, readings=()))
    with TraceWriter(path, TraceHeader(host=host)) as trace:
        for observation in told:
            trace.append(observation)
            advance(ledger, observation)
            if observation.wall // SECOND % 300 == 0:
                for job in take_snapshot(ledger, DaemonMetadata()).jobs:
                    samples.setdefault(job.owner.job_id, []).append(job_sample(job, observation.wall))
    ends = [-(-observation.wall // SECOND) for observation in (told[0], told[-1])]
    return Played(path, take_snapshot(ledger, DaemonMetadata(host=host)), ends[0], ends[1], samples)


def backfill(folder: Path, *words: str) -> str:
    """Run the command there; what it says on standard error."""
    done = subprocess.run(command("backfill", *words), cwd=folder, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    return done.stderr.decode()


def make_blocks(folder: Path, told: str) -> None:
    """Run the command line that it printed."""
    (line,) = [line.partition("make blocks: ")[2] for line in told.splitlines() if "make blocks: " in line]
    shell(folder, line)


def shell(folder: Path, line: str) -> None:
    done = subprocess.run(["sh", "-ec", line], cwd=folder, env=environment(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@contextmanager
def stored(blocks: Path) -> Iterator[Past]:
    """A Prometheus that has these blocks and nothing else."""
    kept = f"--storage.tsdb.path={blocks}", "--storage.tsdb.retention.time=100y"
    with started(blocks.parent / "prometheus", {"scrape_configs": []}, *kept) as client:
        yield Past(f"{client.base_url}", client)


def counters(page: Page) -> dict[str, dict[Labels, Decimal]]:
    """Values of the counters on a page, by name and labels."""
    found: dict[str, dict[Labels, Decimal]] = {}
    for (name, labels), value in page.samples.items():
        if name.endswith("_total") and name not in DAEMON_METRICS:
            found.setdefault(name, {})[without_empty(labels)] = value
    return found


def without_empty(labels: Iterable[tuple[str, str]]) -> Labels:
    """A label without a value is none, to Prometheus."""
    return frozenset((name, value) for name, value in labels if value)


def grown(past: Past, name: str, played: Played) -> dict[Labels, float]:
    """What a counter grew by in the time of the recording, without the labels of the scrape."""
    answer = past.ask(f"increase({name}[{played.last - played.first}s])", played.last)
    return {frozenset(set(labels.items()) - SCRAPE): value for labels, value in answer}


def test_increase_over_all_of_it_is_what_the_ledger_came_to_to_the_last_digit(tmp_path: Path) -> None:
    played = recorded(tmp_path / "a.jsonl.gz", "n1")
    told = backfill(tmp_path, "a.jsonl.gz", "--folder", "history", "--label", "cluster=alps")
    assert sorted(path.name for path in (tmp_path / "history").iterdir()) == ["20260101T0000Z.om", "20260101T0200Z.om"]
    make_blocks(tmp_path, told)
    assert len(list((tmp_path / "blocks").iterdir())) == 2  # one for each file: the bounds are promtool's own
    expected = counters(played.page)
    assert len(expected) > 30
    with stored(tmp_path / "blocks") as past:
        for name, values in expected.items():
            assert grown(past, name, played) == {labels: float(value) for labels, value in values.items()}, name
        last = past.ask('{__name__=~"gpu_efficiency_.+"}', played.last)
        assert {(labels.pop("__name__"), frozenset(set(labels.items()) - SCRAPE)) for labels, _ in last} >= {
            (name, without_empty(labels)) for name, labels in played.page.samples if name not in DAEMON_METRICS | OF_US
        }
        assert past.ask("gpu_efficiency_simulated", played.last)[0][1] == 0
        reports_are_the_ledger_s(past, played)


def reports_are_the_ledger_s(past: Past, played: Played) -> None:
    """Each job's receipt, asked for in Prometheus, has the GPU-hours of the ledger."""
    for job in played.end.jobs:
        status, out, err = report(f"--prometheus {past.url} --at {played.last + 1} --json --quiet '{job.owner.job_id}'")
        assert (status, err) == (0, ""), err
        found = json.loads(out)
        parts = {part["name"]: part["gpu_hours"] for part in found["parts"]}
        book = job.counters.now
        assert parts == {
            name: pytest.approx(part / SECOND / 3600, rel=1e-12)
            for name, part in zip(LEAK_NAMES, book.parts, strict=True)
            if part
        }
        assert found["gpu_hours"] == pytest.approx(book.paid / SECOND / 3600, rel=1e-12)
        assert found["energy_kwh"] == pytest.approx(sum(job.counters.energy) / 3.6e9, rel=1e-12)
        assert [node["name"] for node in found["nodes"]] == ["n1"]


def test_two_nodes_and_two_lives_of_a_daemon_are_one_document(tmp_path: Path) -> None:
    """Of n1 half an hour is missing between two recordings: nothing is said of it, and what was counted adds up."""
    early = recorded(tmp_path / "early.jsonl", "n1", hours=(0.0, 0.75))
    late = recorded(tmp_path / "late.jsonl", "n1", hours=(1.25, 2.0))
    other = recorded(tmp_path / "other.jsonl", "n2", node=1, hours=(0.0, 2.0))
    told = backfill(tmp_path, "late.jsonl", "other.jsonl", "early.jsonl", "-o", "history.om", "--step", "30s")
    make_blocks(tmp_path, told)
    with stored(tmp_path / "blocks") as past:
        query = f"sum by (instance) (increase(gpu_efficiency_paid_seconds_total[{late.last - early.first}s]))"
        assert {labels["instance"]: value for labels, value in past.ask(query, late.last)} == {
            "n1:19400": float(early.page.total("paid_seconds_total") + late.page.total("paid_seconds_total")),
            "n2:19400": float(other.page.total("paid_seconds_total")),
        }
        silent = past.ask("count by (instance) (gpu_efficiency_state)", BEGIN + 3600)
        assert [labels["instance"] for labels, _ in silent] == ["n2:19400"]


@pytest.mark.skipif(shutil.which("victoria-metrics") is None, reason="needs VictoriaMetrics")
def test_victoriametrics_takes_the_same_file(tmp_path: Path) -> None:
    """As in docs/operations.md; its increase() of a counter begins before the first sample and does not extrapolate."""
    played = recorded(tmp_path / "a.jsonl", "n1", hours=(0.0, 0.5))
    backfill(tmp_path, "a.jsonl", "-o", "history.om")
    with victoria(tmp_path) as client:
        line = documented("curl").replace("http://victoria:8428", str(client.base_url).rstrip("/"))
        shell(tmp_path, line)
        client.get("/internal/force_flush").raise_for_status()
        expected = counters(played.page)["gpu_efficiency_seconds_total"]
        wait_for(lambda: asked_there(client, played) == expected, "all is readable")


def asked_there(client: httpx.Client, played: Played) -> dict[Labels, Decimal]:
    answer = client.get("/api/v1/query", params={"query": "gpu_efficiency_seconds_total", "time": str(played.last)})
    rows = answer.raise_for_status().json()["data"]["result"]
    return {frozenset(set(row["metric"].items()) - SCRAPE - NAME): Decimal(row["value"][1]) for row in rows}


def test_a_store_s_jobs_are_there_as_they_ended(tmp_path: Path) -> None:
    """Two lives of a daemon: what the first had counted is added."""
    early = recorded(tmp_path / "early.jsonl", "n1", hours=(0.0, 1.0))
    late = recorded(tmp_path / "late.jsonl", "n1", hours=(1.0, 2.5))
    lives = [statements(early, "a"), statements(late, "b")]
    with closing(HistoryStore(tmp_path / "history.db")) as store:
        store.write(job_records=[each for life in lives for each in life])
    make_blocks(tmp_path, backfill(tmp_path, "--store", "history.db", "--folder", "history"))
    with stored(tmp_path / "blocks") as past:
        jobs = {each.owner.job_id for life in lives for each in life}
        assert len(jobs) > 2
        for job in sorted(jobs):
            mine = [each for life in lives for each in life if each.owner.job_id == job]
            status, out, err = report(f"--prometheus {past.url} --at {late.last + 60} --json --quiet '{job}'")
            assert (status, err) == (0, "")
            found = json.loads(out)
            total = sum(each.paid for each in mine) / SECOND / 3600
            assert found["seen_gpu_hours"] == pytest.approx(total, rel=1e-9)
            told = {part["name"]: part["gpu_hours"] for part in found["parts"] if part["name"] != "unobserved"}
            assert told == {
                name: pytest.approx(sum(each.parts.get(name, 0) for each in mine) / SECOND / 3600, rel=1e-9)
                for name in {name for each in mine for name in each.parts} - {"unobserved"}
            }
            assert found["energy_kwh"] == pytest.approx(
                sum(sum(each.energy.values()) for each in mine) / 3.6e6, rel=1e-9
            )


def statements(played: Played, life: str) -> list[JobRecord]:
    """Of each job, with a sample each five minutes, as History keeps them."""
    return [
        build_job_record(
            job, node="n1", life=life, until=played.end.wall / SECOND, money={}, gpus={}, models=(), whole_gpus=1.0,
            happened={}, samples=tuple(played.samples.get(job.owner.job_id, ())), simulated=False,
        )
        for job in played.end.jobs
    ]  # fmt: skip


def test_the_commands_of_the_document_are_those_it_prints(tmp_path: Path) -> None:
    recorded(tmp_path / "node1.jsonl", "n1", hours=(0.0, 0.25))
    for line in (documented("gpu-efficiency backfill node"), documented("for file")):
        shell(tmp_path, line.replace("gpu-efficiency", f"{sys.executable} -m exporter"))
    assert len(list((tmp_path / "blocks").iterdir())) == 1


def documented(begin: str) -> str:
    """The command of docs/operations.md that begins so."""
    lines = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").splitlines()
    return next(line.strip() for line in lines if line.startswith(f"    {begin}"))


def test_ctrl_c_leaves_a_clean_line_and_no_half_file(tmp_path: Path) -> None:
    """On a terminal of its own; what was drawn is wiped out before the shell writes there again."""
    names = [f"n{number}.jsonl.gz" for number in range(4)]  # takes much longer than the first progress line
    first = gzip.decompress(recorded(tmp_path / names[0], "n0", hours=(0.0, 4.0)).trace.read_bytes())
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(gzip.compress(first.replace(b'"n0"', b'"n%d"' % number, 1), compresslevel=1))
    assert interrupted(tmp_path, *names)[0].rstrip() == "done"
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def interrupted(tmp_path: Path, *names: str) -> list[str]:
    """Lines of a terminal on which a backfill got a SIGINT once it had drawn, after the next output."""
    screen, drawn = pyte.Screen(80, 24), pyte.Stream()
    drawn.attach(screen)
    master, slave = pty.openpty()
    words = command("backfill", *names, "-o", "history.om", "--step", "1s")
    with os.fdopen(master, "rb", buffering=0) as seen, os.fdopen(slave, "wb") as terminal:
        # A shell starts what it puts into the background with this signal ignored, and so would be all that it starts.
        words = ["env", "--default-signal=INT", *words]
        program = subprocess.Popen(words, cwd=tmp_path, env=environment(TERM="xterm"), stderr=terminal)
        try:
            wait_for(lambda: "%" in drawn_on(screen, drawn, seen)[0], "it says how far it is")
            program.send_signal(signal.SIGINT)
            program.wait(PATIENCE)
        finally:
            program.kill()
            program.wait()
        terminal.write(b"done")
        terminal.flush()
        wait_for(lambda: any("done" in row for row in drawn_on(screen, drawn, seen)), "the terminal took it")
    return list(screen.display)


def drawn_on(screen: pyte.Screen, stream: pyte.Stream, seen: FileIO) -> list[str]:
    """The terminal's lines, with what has come by now."""
    if select.select([seen], [], [], 0.1)[0]:
        stream.feed(seen.read(4096).decode())
    return list(screen.display)
