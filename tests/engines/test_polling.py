"""Tests the scraper's thread against real servers that work or fail; the test advances the clock."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.config import Config, EngineEndpoint, EngineSettings
from exporter.core.model import MS, SECOND, ServingReport
from exporter.engines.base import FAILURE_KINDS, ScrapeFailure
from exporter.engines.discovery import DiscoveredEngines, EngineDiscovery, MetricsEndpoint
from exporter.engines.replica import Replica, ReplicaPlacement
from exporter.engines.scraper import (
    MAX_PAGES_OF_JOB,
    OUTCOMES,
    EngineScraper,
    ScrapeSchedule,
    open_engines,
)
from exporter.workloads import WorkloadProcess, WorkloadUpdate
from tests.clocks import JumpClock
from tests.engines.standins import Server, StandIn, served
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

HERE = WorkloadProcess(os.getpid(), "j", ("GPU-1",))


class Bench:
    """A scraper, its clock, and everything that it has returned."""

    def __init__(
        self,
        engines: EngineSettings,
        guests: Sequence[WorkloadProcess] = (HERE,),
        finder: EngineDiscovery | None = None,
    ) -> None:
        self.clock, self.guests = JumpClock(1_000 * SECOND), guests
        self.poller = EngineScraper(Config(engines=engines), self.clock, discovery=finder)
        self.serving: list[ServingReport] = []
        self.last = WorkloadUpdate()

    def take(self) -> WorkloadUpdate:
        before = time.monotonic()
        self.last = self.poller.poll(self.clock.now(), self.guests, lambda _: {})
        assert time.monotonic() - before < 5, "take blocks"
        self.serving += self.last.serving
        return self.last

    def jump(self, seconds: float) -> None:
        self.clock.wait(self.clock.now() + int(seconds * SECOND), threading.Event())

    def until(self, good: Callable[[], bool], *, step: float = 0.0) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.take() and not good():
            assert time.monotonic() < deadline, (self.last, self.serving)
            self.jump(step)
            time.sleep(0.02)

    def ticks(self, seconds: float = 1.0) -> None:
        """Wait in real time, for the thread to do what it must not."""
        time.sleep(seconds)
        self.take()

    @property
    def said(self) -> list[str]:
        """Return the messages of active engine faults."""
        assert all(fault.kind == "engine_failed" for fault in self.last.faults)
        return [fault.message for fault in self.last.faults]

    def count(self, outcome: str) -> int:
        return self.counts[f"engine_{outcome}"]

    @property
    def counts(self) -> Mapping[str, int]:
        return dict(self.last.counts)


Open = Callable[..., Bench]


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:

        def one(
            *urls: str, guests: Sequence[WorkloadProcess] = (HERE,), finder: EngineDiscovery | None = None, **more: Any
        ) -> Bench:
            fixed = tuple(EngineEndpoint(url, "j") for url in urls)
            settings = {"interval_seconds": 1, "timeout_seconds": 30, "ports": (), "endpoints": fixed, **more}
            bench = Bench(EngineSettings(**settings), guests, finder)
            stack.callback(bench.poller.close)
            return bench

        yield one


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:

        def one(
            dialect: str = "vllm 0.18", *, path: str = "/metrics", running: str = "vllm:num_requests_running"
        ) -> Server:
            engine = StandIn(dialect)
            engine.say(running, 4)
            return stack.enter_context(served(Server(engine, path=path)))

        yield one


Serve = Callable[..., Server]


def test_one_serving_an_interval_from_two_pages(opened: Open, serve: Serve) -> None:
    server = serve()
    bench = opened(f"{server.url}/metrics")
    bench.until(lambda: len(bench.serving) == 1)
    assert server.engine is not None
    server.engine.say("vllm:generation_tokens_total", 70)
    bench.ticks(0.6)
    assert len(bench.serving) == 1, "asked before it was due"
    bench.jump(1.1)
    bench.until(lambda: len(bench.serving) == 2)
    first, second = bench.serving
    assert first.start == first.end == second.start == 1_000 * SECOND
    assert second.end == 1_000 * SECOND + 1_100 * MS
    assert (first.generated_tokens, second.generated_tokens, second.running) == (None, 70, 4)
    assert bench.counts["engine_page"] == 2
    assert set(bench.counts) == set(OUTCOMES)
    assert bench.said == []
    assert server.most_at_once == 1


def test_a_packed_page_is_unpacked(opened: Open, serve: Serve) -> None:
    server = serve()
    server.manner = "gzip"
    bench = opened(f"{server.url}/metrics")
    bench.until(lambda: len(bench.serving) == 1)
    assert bench.serving[0].running == 4


@pytest.mark.parametrize(
    ("manner", "kind", "words"),
    [
        ("slow", "timeout", "gave no whole page within 1 s"),
        ("drip", "timeout", "gave no whole page within 1 s"),
        ("huge", "too_large", "is longer than 4194304 bytes"),
        ("bomb", "too_large", "is longer than 4194304 bytes"),
        ("lines", "too_large", "has more than 20000 lines"),
        ("html", "html", "is an HTML page"),
        ("json", "not_an_engine", "does not end with a whole line"),
        ("broken", "status", "answered HTTP 500"),
        ("redirect", "redirect", r"redirects \(HTTP 307\)"),
        ("half", "half_page", "could not be read"),
        ("cut", "half_page", "does not end with a whole line"),
        ("br", "encoding", "is encoded as 'br'"),
        ("newer", "dialect", "is a page of vllm with unknown metric names"),
        ("malformed", "malformed", "has 1 lines that are not metrics"),
        ("stranger", "not_an_engine", "has no metrics of a known engine"),
    ],
)
def test_an_engine_that_misbehaves_is_said_and_comes_back(
    opened: Open, serve: Serve, manner: str, kind: str, words: str
) -> None:
    server = serve()
    bench = opened(f"{server.url}/metrics", timeout_seconds=1 if kind == "timeout" else 30)
    bench.until(lambda: len(bench.serving) >= 1, step=0.2)  # a busy machine may be late within a second, too
    server.manner = manner
    bench.until(lambda: bench.count(kind) > 0, step=0.2)
    bench.until(lambda: bench.said != [])
    (message,) = bench.said
    assert f"of job j: {server.url}/metrics" in message
    assert "hardware counters alone" in message
    assert re.search(words, message), message
    had = len(bench.serving)
    server.manner = "good"
    server.release.set()
    bench.until(lambda: len(bench.serving) > had, step=0.2)
    bench.until(lambda: bench.said == [])
    assert server.most_at_once == 1
    assert {name for name, count in bench.counts.items() if count} == {"engine_page", f"engine_{kind}"}


def test_one_that_is_gone_is_asked_ever_more_rarely(opened: Open) -> None:
    engine = StandIn("vllm 0.18")
    engine.say("vllm:num_requests_running", 4)
    with served(Server(engine)) as server:
        bench = opened(f"{server.url}/metrics")
        bench.until(lambda: len(bench.serving) == 1)
    bench.jump(2)
    for tries in (1, 2, 3):
        bench.until(lambda tries=tries: bench.count("refused") == tries)  # type: ignore[misc]
        bench.jump(0.85 * 2**tries)
        bench.ticks(0.6)
        assert bench.count("refused") == tries, "asked again too early"
        bench.jump(0.3 * 2**tries)
    assert "could not be read" in bench.said[0]
    assert bench.counts["engine_page"] == 1


def test_a_slow_engine_holds_up_no_other(opened: Open, serve: Serve) -> None:
    slow, quick = serve(), serve()
    slow.manner = "slow"
    bench = opened(f"{slow.url}/metrics", f"{quick.url}/metrics")
    bench.until(lambda: len(bench.serving) == 1 and len(slow.asked) == 1)
    assert bench.count("timeout") == 0


def test_a_job_has_few_pages_in_work_at_once_and_another_job_does_not_wait(opened: Open, serve: Serve) -> None:
    """Else eight long pages of one job could take all the memory that the daemon has."""
    other, *slow = (serve() for _ in range(2 * MAX_PAGES_OF_JOB + 1))
    for server in slow:
        server.manner = "slow"
    fixed = [EngineEndpoint(f"{server.url}/metrics", "j") for server in slow]
    guests = (HERE, WorkloadProcess(1, "k", ("GPU-0",)))
    bench = opened(guests=guests, endpoints=(*fixed, EngineEndpoint(f"{other.url}/metrics", "k")))
    bench.until(lambda: len(bench.serving) == 1)
    bench.ticks()
    assert sum(len(server.asked) for server in slow) == MAX_PAGES_OF_JOB


def test_a_failure_keeps_nothing_of_the_page() -> None:
    """It is kept until the engine answers again, and the frames of its traceback refer to the page."""
    endpoint = MetricsEndpoint(base="http://127.0.0.1:1", paths=("/metrics",), placement=ReplicaPlacement("j"))
    schedule = ScrapeSchedule(endpoint, Replica({}, interval=SECOND), interval=SECOND, chance=lambda: 0.5)
    with pytest.raises(ScrapeFailure) as raised:
        _fails()
    schedule.failed(SECOND, raised.value)
    assert schedule.failure is raised.value
    assert (raised.value.__traceback__, raised.value.__cause__, raised.value.__context__) == (None, None, None)


@pytest.mark.parametrize(
    ("cost", "wait"),
    [(0, 1), (SECOND // 200, 1), (SECOND // 100, 2), (SECOND // 10, 20), (SECOND, 100), (9 * SECOND, 100)],
)
def test_a_page_that_takes_long_to_parse_is_read_less_often(cost: int, wait: int) -> None:
    endpoint = MetricsEndpoint(base="http://127.0.0.1:1", paths=("/metrics",), placement=ReplicaPlacement("j"))
    schedule = ScrapeSchedule(endpoint, Replica({}, interval=SECOND), interval=SECOND, chance=lambda: 0.5)
    schedule.cost = cost
    schedule.succeeded(7 * SECOND, frontend=False)
    assert schedule.due_at == (7 + wait) * SECOND


def test_the_time_that_a_page_takes_is_measured(opened: Open, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between two looks at the clock: the page is not asked for again within ninety."""
    server, spent = serve(), iter(range(0, 10**15, SECOND))
    monkeypatch.setattr("exporter.engines.scraper.time.thread_time_ns", lambda: next(spent))
    bench = opened(f"{server.url}/metrics")
    bench.until(lambda: len(bench.serving) == 1)
    bench.jump(80)
    bench.ticks()
    assert len(bench.serving) == 1
    bench.jump(40)
    bench.until(lambda: len(bench.serving) == 2)


def _fails() -> None:
    try:
        int("4 MiB")
    except ValueError as error:
        raise ScrapeFailure("malformed", "cannot be read", "look") from error


def test_an_engine_that_began_anew(opened: Open, serve: Serve) -> None:
    server = serve()
    assert server.engine is not None
    server.engine.say("vllm:generation_tokens_total", 70)
    bench = opened(f"{server.url}/metrics")
    bench.until(lambda: len(bench.serving) == 1)
    server.engine = StandIn("vllm 0.18")
    server.engine.say("vllm:num_requests_running", 1)
    server.engine.say("vllm:generation_tokens_total", 5)
    bench.jump(1.2)
    bench.until(lambda: len(bench.serving) == 2)
    server.engine.say("vllm:generation_tokens_total", 6)
    bench.jump(1.2)
    bench.until(lambda: len(bench.serving) == 3)
    assert [said.generated_tokens for said in bench.serving] == [None, None, 6]
    assert bench.counts["engine_restart"] == 1


def test_a_port_that_is_nobodys_of_ours_is_left_alone_for_minutes(opened: Open) -> None:
    with served(Server()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        bench = opened(guests=[WorkloadProcess(os.getpid(), "j", ("GPU-1",), workload_class="serving")], ports=(port,))
        bench.until(lambda: bench.count("status") == 1)
        assert server.asked == ["/metrics", "/prometheus/metrics"]
        bench.jump(260)
        bench.ticks()
        assert len(server.asked) == 2
        assert bench.said == []
        bench.jump(80)
        bench.until(lambda: len(server.asked) == 4)
        assert bench.serving == []


def test_the_other_path_is_found_once(opened: Open, serve: Serve) -> None:
    server = serve("trtllm-serve 1.2", path="/prometheus/metrics", running="trtllm_num_requests_running")
    port = int(server.url.rsplit(":", 1)[1])
    bench = opened(guests=[WorkloadProcess(os.getpid(), "j", ("GPU-1",), workload_class="serving")], ports=(port,))
    bench.until(lambda: len(bench.serving) == 1)
    bench.jump(1.2)
    bench.until(lambda: len(bench.serving) == 2)
    assert server.asked == ["/metrics", "/prometheus/metrics", "/prometheus/metrics"]
    assert bench.serving[0].engine == "trtllm"


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ports_that_answer_the_first_that_did_is_kept(first: int) -> None:
    """Both are asked before either answers; their reports must not cover the same time for longer than that."""
    scraper = EngineScraper(Config(engines=EngineSettings()), JumpClock(0))
    scraper._update_schedules(
        [
            MetricsEndpoint(f"http://127.0.0.1:{port}", ReplicaPlacement("j", ("GPU-1",)), ("/metrics",), pid=7)
            for port in (8000, 8001)
        ]
    )
    ports = list(scraper._schedules.values())
    ports[first].succeeded(1 * SECOND, frontend=False)
    ports[1 - first].succeeded(2 * SECOND, frontend=False)
    ports[first].succeeded(3 * SECOND, frontend=False)
    assert list(scraper._due(60 * SECOND)) == [ports[first]]
    ports[1 - first].succeeded(200 * SECOND, frontend=False)
    assert list(scraper._due(400 * SECOND)) == [ports[1 - first]]


def test_one_process_is_asked_on_one_port(opened: Open, serve: Serve) -> None:
    one, two = serve(), serve()
    ports = tuple(int(server.url.rsplit(":", 1)[1]) for server in (one, two))
    bench = opened(guests=[WorkloadProcess(os.getpid(), "j", ("GPU-1",), workload_class="serving")], ports=ports)
    bench.until(lambda: len(bench.serving) >= 1)
    for _ in range(3):
        had = len(bench.serving)
        bench.jump(1.2)
        bench.until(lambda had=had: len(bench.serving) > had)  # type: ignore[misc]
    assert min(len(one.asked), len(two.asked)) <= 1


def test_a_front_end_is_silent_where_its_worker_speaks(opened: Open, serve: Serve) -> None:
    front = serve("dynamo 1.0 front", running="dynamo_frontend_inflight_requests")
    alone = opened(f"{front.url}/metrics")
    alone.until(lambda: len(alone.serving) == 1)
    worker = serve()
    both = opened(f"{front.url}/metrics", f"{worker.url}/metrics")
    both.until(lambda: both.counts["engine_page"] == 2)
    both.jump(1.2)
    both.until(lambda: both.counts["engine_page"] == 4)
    assert [said.engine for said in both.serving if said.end > 1_000 * SECOND] == ["vllm"]


def test_two_replicas_are_two(opened: Open, serve: Serve) -> None:
    one, two = serve(), serve("sglang 0.4", running="sglang:num_running_reqs")
    bench = opened(f"{one.url}/metrics", f"{two.url}/metrics")
    bench.until(lambda: len(bench.serving) == 2)
    assert {said.engine for said in bench.serving} == {"vllm", "sglang"}


def test_an_engine_that_listens_nowhere_is_said_late(opened: Open) -> None:
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()", "vllm serve"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        bench = opened(guests=[WorkloadProcess(process.pid, "j", ("GPU-1",))])
        bench.until(lambda: bench.count("silent") == 1)
        assert bench.said == []
        bench.jump(601)
        bench.until(lambda: bench.said != [])
        message = "".join(bench.said)
        assert "runs vllm, none of whose processes listens on a port of engines.ports" in message
        bench.guests = ()
        bench.jump(31)
        bench.until(lambda: bench.said == [])
        process.communicate()


class Broken(EngineDiscovery):
    """Raises an unexpected error."""

    def discover(self, guests: Sequence[WorkloadProcess], members: Mapping[int, WorkloadProcess]) -> DiscoveredEngines:
        raise RuntimeError(f"{len(guests)} {len(members)}")


def test_a_thread_that_fails_is_a_fault(opened: Open) -> None:
    bench = opened(finder=Broken(EngineSettings()))
    bench.until(lambda: bench.said != [])
    message = "".join(bench.said)
    assert "thread engines failed and began anew (" in message
    assert "RuntimeError('1 0')" in message


class Odd(EngineDiscovery):
    """Returns, before a good endpoint, one that raises an unexpected error."""

    def discover(self, guests: Sequence[WorkloadProcess], members: Mapping[int, WorkloadProcess]) -> DiscoveredEngines:
        found = super().discover(guests, members)
        odd, good = found.endpoints
        return DiscoveredEngines((replace(odd, command_lines=None), good))


def test_what_one_page_does_to_us_keeps_nobody_else_from_being_asked(opened: Open, serve: Serve) -> None:
    odd, good = serve(), serve()
    fixed = tuple(EngineEndpoint(f"{server.url}/metrics", "j") for server in (odd, good))
    bench = opened(finder=Odd(EngineSettings(ports=(), endpoints=fixed)))
    bench.until(lambda: bench.count("malformed") == 1)
    for wanted in (1, 2):
        bench.until(lambda wanted=wanted: len(bench.serving) >= wanted, step=0.2)  # type: ignore[misc]
    assert "cannot be read (AttributeError(" in "".join(bench.said)


class Ports(EngineDiscovery):
    """Returns these endpoints of jobs that are here."""

    def __init__(self, *found: MetricsEndpoint) -> None:
        super().__init__(EngineSettings())
        self.found = found

    def discover(self, guests: Sequence[WorkloadProcess], members: Mapping[int, WorkloadProcess]) -> DiscoveredEngines:
        assert not members
        jobs = {guest.job_id for guest in guests}
        return DiscoveredEngines(tuple(each for each in self.found if each.placement.job_id in jobs))


def endpoint(server: Server, job: str, pid: int) -> MetricsEndpoint:
    return MetricsEndpoint(server.url, ReplicaPlacement(job), ("/metrics",), "vllm serve m", pid)


def test_who_listens_where_a_server_has_ended_is_not_taken_for_it(opened: Open, serve: Serve) -> None:
    """Job j keeps a process on its GPU; its server's port is now that of a server of job k."""
    server = serve()
    finder = Ports(endpoint(server, "j", 11))
    bench = opened(guests=(HERE, replace(HERE, job_id="k")), finder=finder)
    bench.until(lambda: len(bench.serving) == 1)
    finder.found = (endpoint(server, "k", 22),)
    bench.jump(31)
    bench.until(lambda: bench.serving[-1].job_id == "k")
    had = len(bench.serving)
    bench.until(lambda: len(bench.serving) >= had + 3, step=0.2)
    assert {said.job_id for said in bench.serving[had:]} == {"k"}


def test_servers_that_have_ended_leave_nothing_behind(opened: Open) -> None:
    """The pods of a deployment are one job here; each has its turn and an address of its own."""
    finder = Ports()
    bench = opened(finder=finder)
    for pid in range(2, 6):
        with served(Server(StandIn("vllm 0.18"))) as server:
            assert server.engine is not None
            server.engine.say("vllm:num_requests_running", 4)
            finder.found = (endpoint(server, "j", pid),)
            had = len(bench.serving)
            bench.jump(31)
            bench.until(lambda: len(bench.serving) >= had + 2, step=0.2)  # noqa: B023
    assert len(bench.poller._schedules) == 1
    finder.found = ()
    bench.until(lambda: not bench.poller._schedules and bench.said == [], step=1)


def test_a_page_that_comes_after_its_server_has_gone_is_nobodys(opened: Open, serve: Serve) -> None:
    old, new = serve(), serve()
    old.manner = "slow"
    finder = Ports(endpoint(old, "j", 11))
    bench = opened(guests=(HERE, replace(HERE, job_id="k")), finder=finder)
    bench.until(lambda: old.asked != [])
    finder.found = (endpoint(new, "k", 22),)
    bench.jump(31)
    bench.until(lambda: len(bench.serving) == 1)
    old.manner = "good"
    old.release.set()
    for wanted in (2, 3):
        bench.until(lambda wanted=wanted: len(bench.serving) >= wanted, step=0.2)  # type: ignore[misc]
    assert {said.job_id for said in bench.serving} == {"k"}


def test_switched_off_it_asks_nobody() -> None:
    listener = open_engines(Config(engines=EngineSettings(enabled=False)), JumpClock())
    assert listener.poll(0, [HERE], lambda _: {}) == WorkloadUpdate()
    listener.close()


def test_without_guests_there_is_no_thread(opened: Open) -> None:
    bench = opened(guests=[])
    before = {thread.name for thread in threading.enumerate()}
    assert bench.take() == bench.last
    assert bench.said == []
    assert {thread.name for thread in threading.enumerate()} == before


def test_every_kind_of_trouble_is_counted_from_the_start(opened: Open) -> None:
    counts = opened(guests=[]).take().counts
    assert set(counts) == {(f"engine_{kind}", 0) for kind in (*FAILURE_KINDS, "page", "restart")}


def test_an_address_of_the_operators_that_nobody_answers_on(opened: Open) -> None:
    bench = opened("http://127.0.0.1:9/metrics")
    bench.until(lambda: bench.said != [])
    assert "http://127.0.0.1:9/metrics could not be read" in bench.said[0]
