"""What a node's GPUs, engines and training jobs say: the parsers that read it, each with good samples.

Owns the doors that this input comes in by. What is checked beside the law of `trying`: that good input is taken after
bad, that what was taken keeps the books whole, and that what was refused is counted.
"""

import socket
import weakref
from contextlib import suppress
from pathlib import Path

from prometheus_client import Histogram, Summary

from benchmarks.rig.page_of_dcgm import page as page_of_dcgm
from exporter.core.ledger import Ledger, conserved
from exporter.core.model import SECOND, Allocation, Device, Observation, Owner
from exporter.core.pipeline import advance
from exporter.engines.base import ScrapeFailure
from exporter.engines.page import MetricsPage
from exporter.engines.registry import read_metrics
from exporter.engines.replica import Replica, ReplicaPlacement
from exporter.host.pressure import JobMeter
from exporter.host.rdma import read_ports
from exporter.sources.base import SourceError
from exporter.sources.dcgm_exporter.source import DcgmExporterSource
from exporter.specs import find_spec
from exporter.training.client import Reporter
from exporter.training.inbox import Inbox
from exporter.training.message import ReportRefusedError
from exporter.training.peer import Peer
from exporter.training.receiver import to_report
from exporter.workloads import WorkloadProcess
from tests.engines.standins import DIALECTS, USUAL, StandIn
from tests.fuzz.folder import in_folder
from tests.fuzz.trying import Feed, Target, promise
from tests.sources.exporter_pages import gpu

_BOARD = Device("GPU-0", "0", "NVIDIA H100 80GB HBM3", find_spec("NVIDIA H100 80GB HBM3"))
_JOB = Owner("41", "slurm", user="ada")
_STEP = 30 * SECOND


class _Books:
    """A ledger that must add up whatever it is told."""

    def __init__(self) -> None:
        self.ledger, self.at = Ledger(), 0
        self.tell(devices=(_BOARD,), allocations=(Allocation("GPU-0", _JOB, 0),))

    def tell(self, **said: object) -> None:
        """Advance by one observation."""
        self.at += _STEP
        advance(self.ledger, Observation(self.at, self.at, **said))  # type: ignore[arg-type]
        promise(all(conserved(one.book) for one in self.ledger.gpus.values()), "the books do not add up")


# -- dcgm-exporter --


class _Exporter:
    """A `Fetch` that gives what it holds."""

    def __init__(self) -> None:
        self.page = b""

    def __call__(self) -> bytes:
        return self.page

    def close(self) -> None:
        """Nothing is held open."""


def _dcgm_samples() -> list[bytes]:
    parts = [
        gpu(
            0,
            {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.5", "DCGM_FI_DEV_FB_USED": "61000"},
            GPU_I_ID=f"{n}",
            GPU_I_PROFILE="3g.40gb",
        )
        for n in (1, 2)
    ]
    broken = gpu(
        0, {"DCGM_FI_DEV_XID_ERRORS": "79", "DCGM_EXP_XID_ERRORS_COUNT": "3"}, xid="79", window_size_in_ms="300000"
    )
    blank = gpu(1, {"DCGM_FI_DEV_POWER_USAGE": "9223372036854775794", "DCGM_FI_PROF_DRAM_ACTIVE": "N/A"})
    stock = (
        page_of_dcgm(1).replace(b"GPU-0d9a0000-0000-4000-8000-00000000000", b"GPU-").replace(b"gpu-node-00", b"node1")
    )
    return [stock, (gpu() + gpu(1)).encode(), "".join(parts).encode(), (gpu() + broken + blank).encode()]


def _dcgm() -> Feed:
    fetch, books = _Exporter(), _Books()
    source = DcgmExporterSource("http://node:9400/metrics", fetch=fetch)
    good = (gpu() + gpu(1)).encode()
    now = 0

    def read_at(page: bytes) -> None:
        nonlocal now
        now += _STEP
        fetch.page = page
        batch = source.read(now)
        books.at = now - _STEP
        books.tell(devices=batch.devices, readings=batch.readings, faults=batch.faults, health=batch.health)

    def feed(data: bytes) -> None:
        try:
            read_at(data)
        finally:
            read_at(good)
            read_at(good)
            read = {one.uuid for one in source.read(now + 1).readings}
            promise({"GPU-0", "GPU-1"} <= read, "a good page after a bad one gives no readings")

    read_at(good)
    return feed


# -- engines --


def _engine_samples() -> list[bytes]:
    pages: list[bytes] = []
    for dialect, metrics in DIALECTS.items():
        engine = StandIn(dialect)
        for name, (kind, wanted, _) in metrics.items():
            labels = {label: USUAL.get(label, "x") for label in wanted}
            if kind in (Histogram, Summary):
                engine.see(name, 0.3, 7.0, **labels)
            else:
                engine.say(name, 5.0, **labels)
        pages.append(engine.page())
    return pages


def _engines() -> Feed:
    replica, books = Replica({}), _Books()

    def feed(data: bytes) -> None:
        figures = read_metrics(MetricsPage(data.decode("utf-8", "replace")), "vllm serve --tensor-parallel-size 2")
        serving = replica.update(figures, books.at + SECOND, placement=ReplicaPlacement("41", ("GPU-0",)))
        books.tell(serving=(serving,))

    return feed


# -- reports --


def _message_samples() -> list[bytes]:
    return [
        (
            b'{"v":1,"at":5000000000,"seconds":10.5,"run":"a","rank":0,"world_size":8,"gpus":8,"step":100,"steps":10,'
            b'"tokens":1e6,"padding":1000,"model_flops":1e15,"hardware_flops":1.2e15,"dtype":"bf16","loss":2.5}'
        ),
        b'{"seconds":1,"tokens":4096,"model":{"parameters":7e9,"layers":32,"heads":32,"head_size":128,"sequence":4096}}',
        b'{"phase":"checkpoint","phases":{"checkpoint":2.5},"seconds":3,"checkpoints":1,"restart":true,"loss":"nan"}',
        b'{"pipeline":{"schedule":"1f1b","stages":4,"microbatches":8,"chunks":2},"parallel":{"tensor":8,"data":2}}',
        b'{"quality":{"name":"accuracy","value":0.5,"target":0.9},"step":7,"epoch":1.5,"recompute":"full"}',
    ]


def _reports() -> Feed:
    intake, books = Inbox(per_second=1e9, processes=10), _Books()
    sender = intake.sender(Peer(7, 1), begun=0)
    guest = WorkloadProcess(7, "41", ("GPU-0",), "0", "training")
    sender.process, sender.looked_up_at = guest, 0
    heard = 0

    def feed(data: bytes) -> None:
        nonlocal heard
        heard, before = heard + 1, sum(count for _, count in intake.counts())
        try:
            intake.receive(sender, data, pid=7, now=books.at)
        except ReportRefusedError as error:
            promise(sum(count for _, count in intake.counts()) == before + 1, "a refusal was not counted")
            promise(error.outcome, "a refusal without an outcome")
            raise
        for letter in intake.drain(10):
            books.tell(reports=(to_report(letter.message, guest, start=letter.start, end=letter.end),))

    return feed


def _answer_samples() -> list[bytes]:
    return [
        b'{"outcome":"malformed","reason":"`$.step` - expected int","field":"$.step"}',
        b'{"outcome":"too_many"}',
        b'{"outcome":"unknown_process","reason":"process 7 belongs to no job"}',
    ]


def _client(folder: Path) -> Feed:
    """What a workload hands to the client, and what a daemon answers it: neither may raise into the training."""
    now = 1
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{folder / 'socket'}")
    listening.listen(1)
    reporter = Reporter(socket=f"{folder / 'socket'}", http="", clock=lambda: now * 10**9)
    daemon, _ = listening.accept()
    daemon.settimeout(0)

    def feed(data: bytes) -> None:
        nonlocal now
        now += 10
        daemon.send(data[:4096] or b"{}")
        text = data.decode("utf-8", "replace")
        number = float(f"{(data or b'0')[0]}e{(data or b'0')[-1] * 3 - 380}")
        for value in (text, number, -number, int.from_bytes(data[:40]), float("nan"), None, data, [text], {text: 1}):
            reporter.step(tokens=value, loss=value)  # type: ignore[arg-type]
            reporter.note(loss=value)
            reporter.quality(text, value)
        promise(not reporter.closed, f"the client gave up: {reporter.error}")
        with suppress(BlockingIOError):
            while daemon.recv(1 << 16):
                pass

    for sock in (listening, daemon):
        weakref.finalize(feed, sock.close)
    weakref.finalize(feed, reporter.close)
    return feed


# -- the host --

_STAT = b"usage_usec 2500000\nnr_periods 90\nnr_throttled 20\nthrottled_usec 1500000\n"
_PSI = b"some avg10=0.72 avg60=0.54 avg300=1.04 total=16057337\nfull avg10=0.00 avg60=0.00 avg300=0.14 total=6248487\n"
_OWN = "system.slice/slurmstepd.scope/job_41"


def _host_samples() -> list[bytes]:
    paths = f"4:cpu,cpuacct:/slurm/uid_1/job_41\n0::/{_OWN}\n".encode()
    return [paths, _STAT, _PSI, b"200000 100000\n", b"400 Gb/sec (4X NDR)\n"]


def _host(folder: Path) -> Feed:
    """The bytes are in turn the text of each file, while the others are good."""
    proc, cgroup, port = folder / "proc/7", folder / "cgroup", folder / "class/infiniband/mlx5_0/ports/1"
    for each in (proc, cgroup / _OWN, port / "counters"):
        each.mkdir(parents=True)
    (cgroup / "cgroup.procs").touch()
    good = {
        proc / "cgroup": f"0::/{_OWN}\n".encode(),
        proc / "stat": b"7 (python) S 1 7 7 0 -1 0 0 0 0 0 5 5 0 0 20 0 1 0 9 0 0\n",
        cgroup / _OWN / "cpu.stat": _STAT,
        cgroup / _OWN / "cpu.max": b"200000 100000\n",
        cgroup / _OWN / "io.pressure": _PSI,
        port / "state": b"4: ACTIVE\n",
        port / "rate": b"400 Gb/sec (4X NDR)\n",
        port / "counters/port_xmit_data": b"250\n",
        port / "counters/port_rcv_data": b"250\n",
        port / "counters/port_xmit_wait": b"7\n",
    }
    meter, books = JobMeter(proc=folder / "proc", cgroup=cgroup), _Books()
    books.tell()

    def read() -> None:
        now = books.at
        books.tell(hosts=meter.measure({"41": [7]}, now), ports=read_ports(folder, now))

    def feed(data: bytes) -> None:
        for path, text in good.items():
            path.write_bytes(data)
            read()
            path.write_bytes(text)
        read()
        read()
        host = books.ledger.jobs["41"].host
        promise(host is not None and host.cpu_cores == 0.0, "good counters are not read after bad ones")

    for path, text in good.items():
        path.write_bytes(text)
    return feed


NODE: tuple[Target, ...] = (
    Target(
        name="dcgm-exporter's page",
        what="DCGM's metrics over HTTP, MIG and CUDA names",
        samples=_dcgm_samples,
        make=_dcgm,
        refuses=(SourceError,),
        modules=("exporter.sources.dcgm_exporter.source", "prometheus_client"),
    ),
    Target(
        name="engines' pages",
        what="vLLM, SGLang, Triton, TensorRT-LLM, TGI, Dynamo",
        samples=_engine_samples,
        make=_engines,
        refuses=(ScrapeFailure,),
        modules=("exporter.engines", "prometheus_client"),
    ),
    Target(
        name="workloads' reports",
        what="JSON from unix socket and HTTP",
        samples=_message_samples,
        make=_reports,
        refuses=(ReportRefusedError,),
        modules=("exporter.training",),
    ),
    Target(
        name="the host's counters",
        what="control groups, pressure and RDMA ports of a job and its node",
        samples=_host_samples,
        make=in_folder(_host),
        modules=("exporter.host",),
    ),
    Target(
        name="the reporting client",
        what="what a training script hands it, what a daemon answers",
        samples=_answer_samples,
        make=in_folder(_client),
        modules=("exporter.training.client",),
    ),
)
