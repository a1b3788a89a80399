"""Tests the discovery of engines with real listening processes, in this network namespace and in another."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import Struct

from exporter.clock import SystemClock
from exporter.config import Config, ConfigError, EngineEndpoint, EngineSettings
from exporter.core.model import ServingReport
from exporter.engines.discovery import (
    DiscoveredEngines,
    EngineDiscovery,
    command_line,
    read_process_tree,
)
from exporter.engines.scraper import EngineScraper, open_engines
from exporter.sockets import ListeningSocket, addresses, listeners, reachable_hosts
from exporter.workloads import WorkloadProcess, WorkloadUpdate
from tests.engines.standins import StandIn
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

T = TypeVar("T")
SERVER = Path(__file__).parent / "server.py"
WORDS = ("vllm serve", "m", "--max-num-seqs", "8")


class Running(Struct, frozen=True):
    """A started server: its port, the child that stands for the GPU process, and its process."""

    port: int
    child: int
    pid: int


@contextmanager
def started(
    page: Path, *words: str, bind: str = "127.0.0.1", port: int = 0, before: Sequence[str] = ()
) -> Iterator[Running]:
    argv = [*before, sys.executable, str(SERVER), bind, str(port), str(page), *words]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Running(*map(int, process.stdout.readline().split()))
        finally:
            process.communicate()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    engine = StandIn("vllm 0.18")
    engine.say("vllm:num_requests_running", 3)
    path = tmp_path / "page.prom"
    path.write_bytes(engine.page())
    return path


def found(
    engines: EngineSettings, guests: Sequence[WorkloadProcess], mine: Sequence[int], *, job: str = "j"
) -> DiscoveredEngines:
    finder = EngineDiscovery(engines)
    relatives = finder.relatives(guests)
    return finder.discover(guests, {pid: WorkloadProcess(pid, job) for pid in relatives if pid in mine})


def guest(pid: int, job: str = "j", uuid: str = "GPU-1", kind: str = "batch") -> WorkloadProcess:
    return WorkloadProcess(pid, job, (uuid,), workload_class=kind)


def test_the_server_is_the_parent_of_the_process_on_the_gpu(page: Path) -> None:
    with started(page, *WORDS, "-tp", "4") as one:
        said = found(EngineSettings(ports=(1, one.port)), [guest(one.child)], [one.pid, one.child])
    (target,) = said.endpoints
    assert target.base == f"http://127.0.0.1:{one.port}"
    assert (target.pid, target.paths) == (one.pid, ("/metrics",))
    assert "vllm serve m --max-num-seqs 8" in target.command_lines
    assert (target.placement.job_id, target.placement.uuids, target.placement.gpus, target.placement.shared) == (
        "j",
        (),
        4,
        4,
    )


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (("-dp", "16"), 32),
        (("--data-parallel-size", "16", "--data-parallel-rank", "3"), 2),
        (("--data-parallel-size=16", "--data_parallel_rank=0"), 2),
        (("-dp", "16", "-dpl", "1", "-dpe"), 2),
        (("-dp", "16", "--data-parallel-size-local", "8", "--data-parallel-hybrid-lb"), 16),
        (("-dp", "16", "-dpl", "8", "-dpr", "8"), 16),
        (("-dp", "16", "--data-parallel-size-local", "8", "--no-data-parallel-hybrid-lb"), 32),
    ],
)
def test_gpus_of_a_vllm_are_those_of_the_engines_on_its_page(page: Path, words: tuple[str, ...], gpus: int) -> None:
    with started(page, *WORDS, "-tp", "2", *words) as one:
        said = found(EngineSettings(ports=(one.port,)), [guest(one.child)], [one.pid, one.child])
    assert [target.placement.shared for target in said.endpoints] == [gpus]


def test_only_listed_ports_of_the_same_job_are_tried(page: Path) -> None:
    with started(page, *WORDS) as one:
        others = found(EngineSettings(ports=(one.port,)), [guest(one.child)], [one.child])
        unlisted = found(EngineSettings(ports=(1,)), [guest(one.child)], [one.pid, one.child])
        theirs = found(EngineSettings(ports=(one.port,)), [guest(one.child)], [one.pid], job="another")
    assert [said.endpoints for said in (others, unlisted, theirs)] == [()] * 3
    assert others.not_listening == (("j", "vllm"),)


def test_who_serves_is_told_by_class_or_by_command_line(page: Path) -> None:
    with started(page, "train.py") as one:
        engines = EngineSettings(ports=(one.port,))
        assert EngineDiscovery(engines).relatives([guest(one.child)]) == ()
        assert found(engines, [guest(one.child)], [one.pid]) == DiscoveredEngines()
        (target,) = found(engines, [guest(one.child, kind="serving")], [one.pid]).endpoints
        assert target.paths == ("/metrics", "/prometheus/metrics")


def test_two_replicas_of_one_job_keep_their_gpus(page: Path) -> None:
    with started(page, *WORDS) as one, started(page, *WORDS) as two:
        guests = [guest(one.child, uuid="GPU-1"), guest(two.child, uuid="GPU-2")]
        said = found(EngineSettings(ports=(two.port, one.port)), guests, [one.pid, one.child, two.pid, two.child])
    assert [(t.pid, t.placement.uuids, t.placement.shared) for t in said.endpoints] == [
        (two.pid, ("GPU-2",), 1),
        (one.pid, ("GPU-1",), 1),
    ]


def test_a_process_that_is_gone_is_nobody() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert found(EngineSettings(), [guest(process.pid, kind="serving")], [process.pid]) == DiscoveredEngines()
    assert EngineDiscovery(EngineSettings(), proc="/nowhere").relatives([guest(1, kind="serving")]) == ()


def test_the_operators_addresses() -> None:
    engines = EngineSettings(endpoints=(EngineEndpoint("http://10.0.0.7:9000/prom", "slurm-4.*"),))
    guests = [guest(os.getpid(), "slurm-41"), guest(os.getpid(), "slurm-42"), guest(os.getpid(), "other")]
    (target,) = EngineDiscovery(engines).discover(guests, {}).endpoints
    assert (target.base, target.placement.job_id, target.paths, target.pid) == (
        "http://10.0.0.7:9000/prom",
        "slurm-41",
        ("",),
        0,
    )
    assert EngineDiscovery(engines).discover(guests[2:], {}).endpoints == ()


def test_one_found_by_itself_gives_way_to_the_operators_address(page: Path) -> None:
    with started(page, *WORDS) as one:
        engines = EngineSettings(
            ports=(one.port,), endpoints=(EngineEndpoint(f"http://127.0.0.1:{one.port}/metrics", "j"),)
        )
        (target,) = found(engines, [guest(one.child)], [one.pid, one.child]).endpoints
    assert target.pid == 0


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        (EngineEndpoint("ftp://10.0.0.7:8000", "x"), r"endpoints\[0\]\.url: 'ftp://10.0.0.7:8000' is no address"),
        (EngineEndpoint("http://10.0.0.7:99999", "x"), r"endpoints\[0\]\.url: 'http://10.0.0.7:99999' is no address"),
        (EngineEndpoint("http://[::1:8000", "x"), r"endpoints\[0\]\.url: 'http://\[::1:8000' is no address"),
        (EngineEndpoint("http://10.0.0.7", "("), r"endpoints\[0\]\.job_id: '\(' is no regular expression"),
    ],
)
def test_endpoints_that_cannot_be_used(endpoint: EngineEndpoint, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_engines(Config(engines=EngineSettings(endpoints=(endpoint,))), SystemClock())


def listener_of(server: socket.socket) -> ListeningSocket:
    """By its inode: the kernel may give the same port to another test's socket of the other family."""
    (one,) = [one for one in listeners(Path("/proc/self")) if one.inode == os.fstat(server.fileno()).st_ino]
    return one


@pytest.mark.parametrize(
    ("address", "urls"),
    [
        ("127.0.0.1", ("127.0.0.1",)),
        ("0.0.0.0", ("127.0.0.1",)),  # noqa: S104  for as long as this test looks at it
        ("::1", ("[::1]",)),
        ("::", ("127.0.0.1", "[::1]")),
    ],
)
def test_real_sockets_as_the_kernel_lists_them(address: str, urls: tuple[str, ...]) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::") as server:
        one = listener_of(server)
        assert (one.address, one.port) == (address, server.getsockname()[1])
        assert reachable_hosts(one, Path("/proc/self"), here=True) == urls


@pytest.mark.parametrize("address", ["169.254.169.254", "198.51.100.7", "2001:db8::7"])
def test_an_address_that_is_somebody_elses_is_not_asked(address: str) -> None:
    """Any process may listen on a foreign address with IP_FREEBIND (15; IPV6_FREEBIND is 78); it must be ignored."""
    six = ":" in address
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(*((socket.IPPROTO_IPV6, 78, 1) if six else (socket.IPPROTO_IP, 15, 1)))
        server.bind((address, 0))
        server.listen()
        one = listener_of(server)
        assert one.address == address
        assert [reachable_hosts(one, Path("/proc/self"), here=here) for here in (True, False)] == [(), ()]


def test_relatives_are_bounded_and_init_is_not_among_them() -> None:
    family = read_process_tree(Path("/proc"))
    around = family.relatives([os.getpid()])
    assert os.getpid() in around
    assert 1 not in around
    assert len(around) <= 512
    assert "python" in command_line(Path("/proc"), os.getpid())
    assert command_line(Path("/proc"), 1 << 30) == ""


@contextmanager
def _network() -> Iterator[str]:
    """Create a network namespace connected to this one; yield its address and its name."""
    name, mine, theirs = f"gee{os.getpid()}", f"ge{os.getpid() % 100000}a", f"ge{os.getpid() % 100000}b"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", mine, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", "198.18.77.1/30", "dev", mine)
        ip("link", "set", mine, "up")
        ip("-n", name, "addr", "add", "198.18.77.2/30", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        subprocess.run(["ip", "link", "del", mine], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def network() -> Iterator[str]:
    with ExitStack() as stack:
        try:
            name = stack.enter_context(_network())
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs a network namespace of its own")
        yield name


def test_in_another_network_namespace_the_address_is_the_pods(page: Path, network: str) -> None:
    before = ("nsenter", f"--net=/run/netns/{network}")
    with started(page, *WORDS, bind="0.0.0.0", port=18999, before=before) as one:  # noqa: S104  of a namespace of its own
        folder = Path(f"/proc/{one.child}")
        assert addresses(folder)[0] == "198.18.77.2"
        assert not any(address.startswith("127.") for address in addresses(folder))
        (target,) = found(EngineSettings(ports=(18999,)), [guest(one.child)], [one.pid, one.child]).endpoints
        assert target.base == "http://198.18.77.2:18999"
        (said,) = polled(EngineSettings(ports=(18999,)), one)
    assert (said.job_id, said.running, said.slots) == ("j", 3, 8)


def test_the_loopback_of_another_network_cannot_be_asked(page: Path, network: str) -> None:
    before = ("nsenter", f"--net=/run/netns/{network}")
    with started(page, *WORDS, port=18998, before=before) as one:
        engines = EngineSettings(ports=(18998,))
        said = found(engines, [guest(one.child)], [one.pid, one.child])
        assert (said.endpoints, said.unreachable, said.not_listening) == ((), (("j", 18998),), ())
        poller = EngineScraper(Config(engines=engines), SystemClock())
        try:
            faults = until(lambda: take(poller, one).faults)
            assert "listens on port 18998 of its own loopback only" in faults[0].message
            assert dict(take(poller, one).counts)["engine_unreachable"] == 1
        finally:
            poller.close()


def test_from_processes_to_figures(page: Path) -> None:
    with started(page, *WORDS) as one:
        (said,) = polled(EngineSettings(ports=(one.port,)), one)
    assert (said.engine, said.running, said.slots, said.start) == ("vllm", 3, 8, said.end)


def polled(engines: EngineSettings, one: Running) -> tuple[ServingReport, ...]:
    poller = EngineScraper(Config(engines=engines), SystemClock())
    try:
        return until(lambda: take(poller, one).serving)
    finally:
        poller.close()


def take(poller: EngineScraper, one: Running) -> WorkloadUpdate:
    mine = {one.pid, one.child}
    return poller.poll(
        0, [guest(one.child)], lambda pids: {pid: WorkloadProcess(pid, "j") for pid in pids if pid in mine}
    )


def until(look: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
    return wait_for(look, "something comes")
