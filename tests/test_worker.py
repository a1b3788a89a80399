"""No thread of the daemon ends silently: one that fails is logged, becomes a fault, and begins anew."""

import ast
import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter import worker as module
from exporter.clock import SystemClock
from exporter.config import Config, HangSettings
from exporter.core.model import Fault
from exporter.engines.discovery import EngineDiscovery
from exporter.engines.scraper import EngineScraper
from exporter.nccl.investigator import HangInvestigator
from exporter.nccl.listener import CollectiveListener
from exporter.schedulers.kubernetes.api import LoopThread
from exporter.training.logs.watcher import LogFollowerThread
from exporter.worker import Worker
from exporter.workloads import WorkloadListener, WorkloadProcess
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = (WorkloadProcess(1, "7"),)
GUARDED = {
    "exporter/agent/sampler.py": "Collector._guarded catches whatever a collection raises",
    "exporter/checkup/base.py": "one check of install-check; the caller waits for it and reports what it raised",
    "exporter/cli/cluster.py": "the poller: ClusterWatcher.run catches what a turn raises",
    "exporter/cli/wiring.py": "the sampler: Agent.run catches what an observation raises, and /readyz reports its end",
    "exporter/history/recorder.py": "HistoryRecorder._guard catches whatever a write raises",
    "exporter/host/listener.py": "PeriodicReader catches whatever a read raises, and reports one that does not return",
    "exporter/nccl/namespace.py": "opens one socket; the caller waits for it and raises what it raised",
    "exporter/schedulers/kubernetes/publisher.py": "_publish_one catches whatever a write raises",
    "exporter/sources/dcgm/connection.py": "one connection; the caller waits for it and raises what it raised",
    "exporter/top/app.py": "ends the terminal's program, no part of the daemon",
    "exporter/top/client.py": "polls for the terminal's program, no part of the daemon",
    "exporter/worker.py": "the worker itself",
}
"""Files that create a thread themselves, and why none of them ends silently. Any other uses a Worker."""


def until(holds: Callable[[], bool]) -> None:
    wait_for(holds, "it holds", step=0.002)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER_FAILURE_SECONDS", 0.0)


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Work:
    """Fails as often as it is told, then works until it is stopped."""

    def __init__(self, stop: threading.Event, *, fails: int) -> None:
        self.stop, self.fails, self.works = stop, fails, threading.Event()

    def __call__(self) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("odd")
        self.works.set()
        self.stop.wait()


def test_work_that_fails_begins_anew_and_is_a_fault_once(
    stop: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work(stop, fails=3)
    worker = Worker("sweeper", work, stop=stop)
    assert worker.faults("host_unread") == ()
    worker.start()
    worker.start()
    assert work.works.wait(30)
    assert worker.failures == 3
    (fault,) = worker.faults("host_unread")
    assert fault.kind == "host_unread"
    assert "thread sweeper failed and began anew (RuntimeError('odd'))" in fault.message
    assert worker.faults("host_unread") == ()
    assert [record.exc_info is not None for record in caplog.records] == [True], "logged once, with its traceback"
    stop.set()
    worker.join(30)
    assert not worker.alive
    assert worker.faults("host_unread") == (), "it was stopped"


def test_work_that_returns_although_nobody_stopped_it_is_a_fault(stop: threading.Event) -> None:
    worker = Worker("sweeper", lambda: None, stop=stop)
    worker.join(1.0)
    worker.start()
    until(lambda: not worker.alive)
    for _ in range(2):
        (fault,) = worker.faults("host_unread")
        assert "has ended" in fault.message


def test_what_it_computes_gives_way_to_scrapes_on_the_same_processor(stop: threading.Event) -> None:
    """What others send takes long to read; the thread that serves shares the processor with it."""
    priorities: list[int] = []
    worker = Worker(
        "sweeper",
        lambda: priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
        stop=stop,
    )
    worker.start()
    worker.join(30)
    assert priorities == [min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)]


def test_work_that_is_stopped_before_it_begins_still_releases_what_it_serves(stop: threading.Event) -> None:
    """A starved thread may begin when the daemon ends already; a server's socket would stay open."""
    released: list[bool] = []
    stop.set()
    worker = Worker("sweeper", lambda: released.append(stop.is_set()), stop=stop)
    worker.start()
    worker.join(30)
    assert released == [True]


def test_a_failure_while_it_stops_does_not_begin_anew(stop: threading.Event) -> None:
    def fails() -> None:
        stop.set()
        raise RuntimeError("late")

    worker = Worker("sweeper", fails, stop=stop)
    worker.start()
    worker.join(30)
    assert not worker.alive
    assert worker.failures == 1


def collectives(monkeypatch: pytest.MonkeyPatch, step: Callable[..., object]) -> WorkloadListener:
    listener = CollectiveListener(SystemClock())
    monkeypatch.setattr(listener._watcher, "poll", step)
    return listener


def engines(monkeypatch: pytest.MonkeyPatch, step: Callable[..., object]) -> WorkloadListener:
    scraper = EngineScraper(Config(), SystemClock())
    monkeypatch.setattr(EngineDiscovery, "relatives", step)
    return scraper


def hangs(_monkeypatch: pytest.MonkeyPatch, step: Callable[..., object]) -> WorkloadListener:
    return HangInvestigator(HangSettings(), SystemClock(), latest=step, proc=Path("/proc"))  # type: ignore[arg-type]


@pytest.mark.parametrize("opened", [collectives, engines, hangs])
def test_a_listener_that_fails_once_is_a_fault_and_listens_on(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[..., WorkloadListener]
) -> None:
    calls: list[int] = []

    def step(*_: object, **__: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("odd")
        return None if opened is hangs else ()

    listener = opened(monkeypatch, step)
    faults: list[Fault] = []

    def listens_on() -> bool:
        faults.extend(listener.poll(0, (*PROCESSES, WorkloadProcess(2, str(len(calls)))), lambda _: {}).faults)
        return len(calls) > 1 and bool(faults)

    try:
        until(listens_on)
    finally:
        listener.close()
    assert [("began anew" in fault.message, "odd" in fault.message) for fault in faults] == [(True, True)]


def test_followers_of_logs_that_fail_once_follow_on(monkeypatch: pytest.MonkeyPatch) -> None:
    followers, calls = LogFollowerThread((), SystemClock()), list[int]()

    def poll(*_: object, **__: object) -> tuple[()]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("odd")
        return ()

    monkeypatch.setattr(followers._watcher, "poll", poll)
    try:
        until(lambda: followers.poll(()) == () and len(calls) > 1)
        (fault,) = followers.faults()
        assert fault.kind == "reports_failed"
    finally:
        followers.close()


def test_a_watch_of_kubernetes_that_fails_is_begun_anew_and_closes() -> None:
    calls: list[int] = []

    async def watch() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("odd")
        await asyncio.Event().wait()

    thread = LoopThread(watch)
    thread.start()
    until(lambda: len(calls) > 1)
    (fault,) = thread.faults()
    assert fault.kind == "scheduler_failed"
    thread.close()
    assert not thread.alive
    assert thread.loop.is_closed()


def creates_threads(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(ast.unparse(call) in {"threading.Thread", "Thread"} for call in calls)


@pytest.mark.slow
def test_every_thread_is_a_worker_or_guarded_for_a_stated_reason() -> None:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "exporter").rglob("*.py") if creates_threads(path)}
    assert found == GUARDED.keys()
