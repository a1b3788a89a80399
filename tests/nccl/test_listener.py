"""The whole way: a real process's file, the thread that reads it, an Observation, the core's totals, the metrics."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.cli.serve import _open_listeners
from exporter.clock import Clock, SystemClock
from exporter.config import Config, load
from exporter.core.exposition import render
from exporter.core.model import MS, SECOND, CollectiveReport, Process
from exporter.core.snapshot import Snapshot
from exporter.history.job_tracker import JobTracker
from exporter.nccl import listener as module
from exporter.nccl.investigator import LatestSnapshot
from exporter.nccl.listener import CollectiveListener
from exporter.report.records import join_records
from exporter.report.text import render_text, report_tables
from exporter.schedulers.base import Member, SchedulerState
from exporter.web.api import jobs_out
from exporter.workloads import WorkloadProcess
from tests.clocks import JumpClock
from tests.nccl.conftest import StartProcess
from tests.nccl.plugins import US, JobProcess, collective
from tests.rigs import FakeScheduler, Rig
from tests.waiting import wait_for
from tests.worlds import JOB, WORKING, held


def tick_until(rig: Rig, found: Callable[[], bool]) -> None:
    """Tick until it is so; the file is read by a thread, for which no number of ticks is enough."""

    def ticked() -> bool:
        rig.tick()
        return found()

    until(ticked)


def until(found: Callable[[], bool]) -> None:
    wait_for(found, "it comes", step=0.002)


class RigClock:
    """The clock of a rig that is made later."""

    clock: Clock = JumpClock(start=1000 * SECOND)

    def now(self) -> int:
        return self.clock.now()

    def wall(self) -> int:
        return self.clock.wall()

    def wait(self, until: int, stop: threading.Event) -> None:
        self.clock.wait(until, stop)


@pytest.fixture(name="listener")
def _listener() -> Iterator[CollectiveListener]:
    listener = CollectiveListener(RigClock())
    yield listener
    listener.close()


@pytest.fixture(name="rank")
def _rank(start: StartProcess) -> JobProcess:
    return start()


@pytest.fixture(name="rig")
def _rig(rigs: Callable[..., Rig], listener: CollectiveListener, rank: JobProcess) -> Iterator[Rig]:
    """Two GPUs of job 41, whose rank 3 is the real process, on the first."""
    scheduler = FakeScheduler(*(held(uuid, JOB, start=1000.0, gpus=2) for uuid in ("GPU-0", "GPU-1")))
    scheduler.word = SchedulerState((), 0, members={rank.pid: Member("41", "3")})
    rig = rigs(scheduler, listeners=[listener], interval=1.0)
    rig.source.signals_of = {"GPU-0": WORKING | {"processes": (Process(rank.pid),)}}
    before, RigClock.clock = RigClock.clock, rig.clock
    plugins = listener._watcher._plugins
    tick_until(
        rig, lambda: rank.pid in plugins and plugins[rank.pid].searches > 0
    )  # it has no file yet: the next one is new
    yield rig
    RigClock.clock = before


def counts(rig: Rig) -> dict[str, int]:
    return dict(snapshot_of(rig).meta.messages)


def snapshot_of(rig: Rig) -> Snapshot:
    snapshot = rig.agent.latest()
    assert snapshot is not None
    return snapshot


def calls(rig: Rig) -> int:
    communication = rig.ledger.jobs["41"].communication
    return sum(use.calls for use in communication.uses.values()) if communication is not None else 0


def lines(rig: Rig, *seconds_ago: float, us: int = 250_000) -> list[bytes]:
    now = rig.clock.wall() // 1000
    return [collective(now - round(ago * US), us, kernel_stop=now - round(ago * US)) for ago in seconds_ago]


def test_what_a_plugin_writes_becomes_metrics_a_page_of_json_and_a_job_report(rig: Rig, rank: JobProcess) -> None:
    """Four collectives of a quarter of a second each, and one by which the others are known to be complete."""
    rank.write(*lines(rig, 4, 3, 2, 1))
    tick_until(rig, lambda: counts(rig).get("collective_events") == 4)
    rank.write(*lines(rig, -0.5))
    tick_until(rig, lambda: counts(rig).get("collective_events") == 5)
    tick_until(rig, lambda: calls(rig) == 5)
    job = rig.ledger.jobs["41"].communication
    assert 750 * MS <= job.busy <= 1250 * MS  # the last one counts when the one after it is known
    page = render(snapshot_of(rig)).decode()
    assert 'gpu_efficiency_job_collectives_total{job_id="41",collective="AllReduce"} 5' in page
    assert 'gpu_efficiency_job_collective_seconds_total{job_id="41",collective="AllReduce"} 1.25' in page
    rate = page.partition('job_collective_bus_bytes_per_second{job_id="41",collective="AllReduce"} ')[2]
    assert float(rate.partition("\n")[0]) == pytest.approx(485.119099e9)
    assert 'gpu_efficiency_job_communication_ratio{job_id="41",rank="3"}' in page
    assert 'gpu_efficiency_workload_messages_total{outcome="collective_events"} 5' in page
    (out,) = jobs_out(snapshot_of(rig), 0).jobs
    assert out.communication is not None
    assert out.communication.collectives["AllReduce"].bytes == 5 * (1 << 24)
    tracker = JobTracker(node="n1", ledger_id="a", sample_seconds=60.0)
    tracker.update(snapshot_of(rig))
    records = list(tracker.running_records(snapshot_of(rig)))
    text = render_text(report_tables(join_records(records, job_id="41", at=records[0].end)))
    assert "timed by NCCL Inspector: a collective executed in" in text
    assert "AllReduce" in text


def test_reported_communication_is_available_to_the_gpu_that_the_process_uses(rig: Rig, rank: JobProcess) -> None:
    rank.write(*lines(rig, 3, 2, 1, 0, us=500_000))
    tick_until(rig, lambda: "41" in rig.ledger.gpus["GPU-0"].credits)
    credit = rig.ledger.gpus["GPU-0"].credits["41"]
    now = rig.clock.now()
    assert credit.collective_share(now, now + SECOND) == 600_000  # 1.5 of the 2.5 s from the first to the last but one
    assert "41" not in rig.ledger.gpus["GPU-1"].credits


def test_a_full_queue_drops_the_oldest(listener: CollectiveListener, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [CollectiveReport("41", n, n + 1, 0) for n in range(module.MOST_PENDING + 5)]
    monkeypatch.setattr(listener._watcher, "poll", lambda *_, **__: found)
    listener.poll(0, (), lambda _: {})
    until(lambda: len(listener._pending) == module.MOST_PENDING)
    update = listener.poll(0, (), lambda _: {})
    assert update.collectives == tuple(found[5:])
    assert dict(update.counts) == {"collective_reports_dropped": 5}


def test_a_file_system_that_hangs_blocks_only_its_own_thread(
    listener: CollectiveListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, inside = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        inside.set()
        gate.wait(20.0)
        return []

    monkeypatch.setattr(listener._watcher, "poll", hang)
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.01)
    listener.poll(0, (WorkloadProcess(1, "41"),), lambda _: {})
    assert inside.wait(20.0)
    for _ in range(3):
        assert listener.poll(0, (), lambda _: {}).collectives == ()
    listener.close()
    gate.set()
    listener._worker.join(20.0)
    assert not listener._worker.alive


def test_the_daemon_opens_it_unless_it_is_switched_off(tmp_path: Path) -> None:
    off = tmp_path / "off.toml"
    others = '[reports]\nsocket = ""\n[engines]\nenabled = false\n[host]\ncounters = false\n[hangs]\nenabled = false\n'
    off.write_text(f"[nccl]\nenabled = false\n{others}")
    assert _open_listeners(load(off, environ={}), SystemClock(), LatestSnapshot()) == []
    off.write_text(others)
    (opened,) = _open_listeners(load(off, environ={}), SystemClock(), LatestSnapshot())
    assert isinstance(opened, CollectiveListener)
    opened.close()
    assert Config().nccl.enabled
