"""Tests at which addresses an engine is scraped, and whose options count, with a /proc of made-up processes."""

import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from exporter.config import EngineEndpoint, EngineSettings
from exporter.engines.discovery import DiscoveredEngines, EngineDiscovery
from exporter.workloads import WorkloadProcess

HOST, POD = "net:[1]", "net:[2]"
SERVER = "/usr/bin/python3 /usr/bin/vllm serve m"


class Proc:
    """A folder like /proc. The daemon is process 5, in the host's network namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process(5, "gpu-efficiency", addresses=("192.0.2.7",))

    def process(
        self,
        pid: int,
        command: str,
        *,
        parent: int = 1,
        network: str = HOST,
        listens: Sequence[tuple[str, int]] = (),
        addresses: Sequence[str] = ("192.0.2.7",),
    ) -> None:
        """Add one that listens on these addresses and ports, in a namespace with these addresses."""
        folder = self.folder / str(pid)
        for name in ("net", "ns", "fd"):
            (folder / name).mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (python3) S {parent} 0 0")
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        (folder / "ns" / "net").symlink_to(network)
        for number, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
            rows = [
                f"0: {_hexadecimal(address, family)}:{port:04X} 0:0 0A 0:0 0:0 0 0 0 {pid}{port} 1"
                for address, port in listens
                if (":" in address) == (number == 6)
            ]
            (folder / "net" / ("tcp" if number == 4 else "tcp6")).write_text("\n".join(["header", *rows, ""]))
        for _, port in listens:
            (folder / "fd" / str(port)).symlink_to(f"socket:[{pid}{port}]")
        local = [f"     |-- {address}\n        /32 host LOCAL\n" for address in addresses if ":" not in address]
        (folder / "net" / "fib_trie").write_text("Local:\n" + "".join(local))
        six = [socket.inet_pton(socket.AF_INET6, address).hex() for address in addresses if ":" in address]
        (folder / "net" / "if_inet6").write_text("".join(f"{address} 02 40 00 80 eth0\n" for address in six))

    def find(self, *pids: int, endpoints: Sequence[str] = (), job: str = "j", of: str = "j") -> DiscoveredEngines:
        """Discover the engines of `job`, whose processes are `pids`; the operator's addresses are of job `of`."""
        settings = EngineSettings(ports=(80, 8000), endpoints=tuple(EngineEndpoint(url, of) for url in endpoints))
        processes = [WorkloadProcess(pid, job, (f"GPU-{pid}",), workload_class="serving") for pid in pids]
        processes.append(WorkloadProcess(5, of, ("GPU-5",)))
        discovery = EngineDiscovery(settings, proc=self.folder, own=self.folder / "5")
        discovery.relatives(processes)
        return discovery.discover(processes, {})


def _hexadecimal(address: str, family: int) -> str:
    packed = socket.inet_pton(family, address)
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def bases(found: DiscoveredEngines) -> list[str]:
    return [endpoint.base for endpoint in found.endpoints]


ANY = [("0.0.0.0", 8000)]  # noqa: S104  of made-up processes


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/metrics", "http://localhost:8000/metrics", "http://[::1]:8000/metrics",
        "http://user:pw@127.0.0.1:8000/metrics", "http://127.0.1.1:8000/metrics", "http://192.0.2.7:8000/metrics",
        "http://[::ffff:192.0.2.7]:8000/metrics", "http://0.0.0.0:8000/metrics", "http://node7.example:8000/metrics",
    ],
)  # fmt: skip
def test_a_server_is_scraped_once_however_the_operator_spells_its_address(proc: Proc, url: str) -> None:
    proc.process(10, SERVER, listens=ANY)
    assert bases(proc.find(10, endpoints=[url])) == [url]


@pytest.mark.parametrize("url", ["http://127.0.0.1/metrics", "http://127.0.0.1:80/metrics", "http://localhost"])
def test_the_port_that_http_implies_is_the_same(proc: Proc, url: str) -> None:
    proc.process(10, SERVER, listens=[("127.0.0.1", 80)])
    assert bases(proc.find(10, endpoints=[url])) == [url]


@pytest.mark.parametrize(
    ("url", "of"),
    [
        ("http://192.0.2.8:8000/metrics", "j"),
        ("http://127.0.0.1:8001/metrics", "j"),
        ("https://127.0.0.1/metrics", "j"),
        ("http://node7:8000/metrics", "another"),
        ("http://192.0.2.7:8000/metrics", "another"),
    ],
)
def test_another_server_than_the_operators_is_scraped_beside_it(proc: Proc, url: str, of: str) -> None:
    proc.process(10, SERVER, listens=ANY)
    assert bases(proc.find(10, endpoints=[url], of=of)) == [url, "http://127.0.0.1:8000"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/metrics", "http://[::1]:8000/metrics"])
def test_what_is_the_very_same_address_is_of_the_operators_job(proc: Proc, url: str) -> None:
    proc.process(10, SERVER, listens=ANY)
    assert bases(proc.find(10, endpoints=[url], of="another")) == [url]


@pytest.mark.parametrize(
    "url", ["http://10.244.3.7:8000/metrics", "http://10.0.1.5:8000", "http://svc.ns:8000/metrics"]
)
def test_a_pod_is_scraped_once_too(proc: Proc, url: str) -> None:
    proc.process(10, SERVER, network=POD, listens=ANY, addresses=("10.0.1.5", "10.244.3.7"))
    found = bases(proc.find(10, endpoints=[url]))
    assert found == [url]


A, B = "http://10.0.1.5:8000", "http://10.0.1.6:8000"
ONE, TWO = "http://replica-0.svc:8000/metrics", "http://replica-1.svc:8000/metrics"


@pytest.mark.parametrize(
    ("urls", "beside"),
    [
        ([ONE], [A, B]),
        (["http://127.0.0.1:8000/metrics"], [A, B]),
        (["http://192.0.2.7:8000/metrics"], [A, B]),
        ([ONE, TWO], []),
        ([f"{A}/metrics"], [B]),
        ([f"{A}/metrics", ONE], []),
        (["http://10.244.3.6:8000/metrics"], [A]),
    ],
)
def test_one_name_does_not_hide_the_other_replicas_of_its_job(proc: Proc, urls: list[str], beside: list[str]) -> None:
    """Which replica a name leads to is not known: all are scraped unless there are as many names as replicas."""
    proc.process(10, SERVER, network=POD, listens=ANY, addresses=("10.0.1.5",))
    proc.process(11, SERVER, network="net:[3]", listens=[("10.0.1.6", 8000)], addresses=("10.0.1.6", "10.244.3.6"))
    assert bases(proc.find(10, 11, endpoints=urls)) == [*urls, *beside]


def test_the_address_of_one_server_leads_to_no_other_of_its_job(proc: Proc) -> None:
    proc.process(10, SERVER, listens=ANY)
    proc.process(11, SERVER, network=POD, listens=ANY, addresses=("10.0.1.5",))
    url = "http://192.0.2.7:8000/metrics"
    assert bases(proc.find(10, 11, endpoints=[url])) == [url, A]


def test_a_pod_with_several_interfaces_is_asked_at_each(proc: Proc) -> None:
    """One of them may be for RDMA alone; the kernel lists addresses by number."""
    proc.process(10, SERVER, network=POD, listens=ANY, addresses=("10.0.1.5", "10.244.3.7", "fd00::7"))
    assert bases(proc.find(10)) == ["http://10.0.1.5:8000", "http://10.244.3.7:8000"]


def test_one_that_gives_itself_many_addresses_is_asked_at_few(proc: Proc) -> None:
    proc.process(10, SERVER, network=POD, listens=ANY, addresses=[f"10.0.1.{n}" for n in range(1, 200)])
    assert len(bases(proc.find(10))) == 16


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        (HOST, ["http://127.0.0.1:8000", "http://[::1]:8000"]),
        (POD, ["http://10.244.3.7:8000", "http://[fd00::7]:8000"]),
    ],
)
def test_a_socket_of_ipv6_may_serve_no_ipv4(proc: Proc, network: str, wanted: list[str]) -> None:
    proc.process(10, SERVER, network=network, listens=[("::", 8000)], addresses=("10.244.3.7", "fd00::7"))
    assert bases(proc.find(10)) == wanted


LLMAPI = "trtllm-serve m"
SCRIPT = "bash -c set -e\nvllm serve A --max-num-seqs 64 -tp 1 &\nvllm serve B --max-num-seqs 256 -tp 4 -dp 8 &\nwait"


@pytest.mark.parametrize(
    ("own", "ancestor", "gpus"),
    [
        (f"{SERVER} -tp 1", SCRIPT, 1),
        (f"{SERVER} -tp 4 -dp 2", SCRIPT, 8),
        (SERVER, SCRIPT, 1),
        (f"{SERVER} -tp 2", "bash -c vllm serve m -tp 4", 2),
        ("VLLM::APIServer", "bash -c vllm serve m -tp 4", 4),
        ("python3 -m dynamo.vllm -tp 2", "srun python3 -m dynamo.vllm -tp 4 -dp 2", 4),
        ("python3 -m sglang.launch_server --tp 2", SCRIPT, 2),
        (LLMAPI, f"mpirun -n 8 trtllm-llmapi-launch {LLMAPI} --tp_size 8", 8),
        (LLMAPI, f"srun trtllm-llmapi-launch /usr/bin/{LLMAPI} --tp_size 8", 8),
        (LLMAPI, f"trtllm-llmapi-launch python3 /usr/bin/{LLMAPI} --tp_size 8", 8),
        (LLMAPI, f"bash -c trtllm-llmapi-launch {LLMAPI} --tp_size 8 &\n{LLMAPI} --tp_size 4", 1),
        (SERVER, "bash -c echo starting vllm serve; exec vllm serve m -tp 4", 4),
        (SERVER, "bash -c echo starting vllm serve m\nexec vllm serve m -tp 4", 4),
        (SERVER, "bash -c echo starting\nvllm serve A -tp 4 &\nvllm serve B -tp 8", 1),
    ],
)
def test_the_options_of_a_server_are_not_those_of_another_that_the_same_script_starts(
    proc: Proc, own: str, ancestor: str, gpus: int
) -> None:
    proc.process(9, ancestor)
    proc.process(10, own, parent=9, listens=[("127.0.0.1", 8000)])
    (endpoint,) = proc.find(10).endpoints
    assert endpoint.placement.shared == gpus
