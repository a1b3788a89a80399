"""What files hold that others write, or that a disk may have damaged: configuration, recordings, the history, state.

Owns the doors that this input comes in by. Refuses to judge what a good file says.
"""

import gzip
import io
import os
from itertools import islice
from pathlib import Path

from benchmarks.machine import ROOT
from exporter.agent.inventory import InventoryFile
from exporter.agent.pause import PauseFile
from exporter.config import ConfigError, load
from exporter.core.ledger import Ledger, conserved
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.core.prices import price_at
from exporter.schedulers.rules import Rules
from exporter.simulate.simulation import simulate
from exporter.specs import find_spec
from exporter.trace import TraceError, TraceHeader, TraceWriter, read_trace
from exporter.web.web_config import parse_web_config as parse_web
from tests.fuzz.folder import in_folder
from tests.fuzz.trying import Feed, Target, promise

_EXAMPLE = ROOT / "examples" / "gpu-efficiency.toml"
_MORE = """
[specs."NVIDIA H900"]
peak_flops = 1e15
tensor_reference_clock_hz = 1830e6
memory_bandwidth_bytes_per_second = 3.35e12

[policy_by_model."NVIDIA H100 80GB HBM3"]
zombie_batch_seconds = 60

[[prices]]
model = "NVIDIA L4"
per_gpu_hour = 0.5
from = 2026-01-01

[[engines.endpoints]]
url = "http://127.0.0.1:8000/metrics"
"""
_WEB = b"""tls_server_config: &a
  cert_file: cert.pem
  key_file: key.pem
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  min_version: TLS12
  cipher_suites: [TLS_AES_128_GCM_SHA256]
http_server_config: {http2: false, headers: {X-Frame-Options: deny, Strict-Transport-Security: max-age=1}}
basic_auth_users:
  ada: $2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG
rate_limit: {interval: 1m30s, burst: 20}
"""
Told = list[bytes]


# -- configuration, with policies, prices and rules --


def _config_samples() -> Told:
    example = _EXAMPLE.read_bytes()
    return [
        example,
        example + _MORE.encode(),
        _MORE.encode(),
        b'scheduler = "processes"\n[sampling]\ninterval_seconds = 1.0\n',
    ]


def _config(folder: Path) -> Feed:
    def feed(data: bytes) -> None:
        (folder / "config.toml").write_bytes(data)
        config = load(folder / "config.toml", environ={})
        config.policies(), config.overrides(), Rules(config.workload, config.exemptions)
        price_at(config.terms("node").prices, model="NVIDIA L4", spec="L4", pool="", wall_ns=1_700_000_000 * SECOND)

    return feed


def _web() -> Feed:
    return parse_web


# -- recordings --


def trace(observations: int = 6) -> bytes:
    """A recording of a simulated node."""
    file = io.BytesIO()
    with TraceWriter(file, TraceHeader(host="node", simulated=True)) as writer:
        for one in islice(simulate("demo").observations, observations):
            writer.append(one)
    return file.getvalue()


def _replay(path: Path) -> None:
    """Whatever a recording says, the core must book it whole or refuse it by name."""
    ledger = Ledger()
    with read_trace(path) as found:
        for one in islice(found, 200):
            advance(ledger, one)
            promise(all(conserved(gpu.book) for gpu in ledger.gpus.values()), "the books do not add up")


def _recording(name: str) -> Feed:
    def make(folder: Path) -> Feed:
        def feed(data: bytes) -> None:
            (folder / name).write_bytes(data)
            _replay(folder / name)

        return feed

    return in_folder(make)()


# -- small files of state, and names --


def _pause(folder: Path) -> Feed:
    file, count = PauseFile(folder / "pause", lambda: 1_700_000_000 * SECOND), 0

    def feed(data: bytes) -> None:
        nonlocal count
        count += 1
        (folder / "pause").write_bytes(data)
        os.utime(folder / "pause", (1_700_000_000, 1_700_000_000 + count % 1000))
        promise("\n" not in file.poll(), "a reason of several lines")

    return feed


def _inventory(folder: Path) -> Feed:
    def feed(data: bytes) -> None:
        (folder / "inventory.json").write_bytes(data)
        InventoryFile(folder / "inventory.json").load()

    return feed


def _names() -> Feed:
    def feed(data: bytes) -> None:
        name, _, number = data.decode("utf-8", "replace").partition("|")
        find_spec(name, number)

    return feed


FILES: tuple[Target, ...] = (
    Target(
        name="configuration",
        what="TOML: policies, prices, rules, boards",
        refuses=(ConfigError,),
        samples=_config_samples,
        make=in_folder(_config),
        modules=("exporter.config", "exporter.schedulers.rules"),
    ),
    Target(
        name="web configuration",
        what="YAML: TLS, users, limits",
        refuses=(ConfigError,),
        samples=lambda: [_WEB],
        make=_web,
        modules=("exporter.web.web_config",),
    ),
    Target(
        name="recording",
        what="a trace, and the core that replays it",
        refuses=(TraceError,),
        samples=lambda: [trace(2), trace(6)],
        make=lambda: _recording("trace.jsonl"),
        modules=("exporter.trace", "exporter.core"),
    ),
    Target(
        name="packed recording",
        what="a trace in gzip",
        refuses=(TraceError,),
        samples=lambda: [gzip.compress(trace(6))],
        make=lambda: _recording("trace.jsonl.gz"),
        modules=("exporter.trace",),
    ),
    Target(
        name="pause file",
        what="JSON, or nothing",
        make=in_folder(_pause),
        modules=("exporter.agent.pause",),
        samples=lambda: [b'{"until": 1700000600.5, "reason": "ncu"}', b"", b"{}"],
    ),
    Target(
        name="inventory file",
        what="JSON: the boards seen last",
        make=in_folder(_inventory),
        samples=lambda: [b'[{"uuid":"GPU-0","index":"0","model":"NVIDIA L4","spec":"L4"},\n{"uuid":"GPU-1"}]\n'],
        modules=("exporter.agent.inventory",),
    ),
    Target(
        name="names of boards",
        what="the driver's names and PCI ids",
        make=_names,
        modules=("exporter.specs",),
        samples=lambda: [
            b"NVIDIA H100 80GB HBM3|233010de",
            b"NVIDIA A100-SXM4-40GB|0x20b0",
            b"Tesla T4|",
            b"NVIDIA L40S|26b9",
        ],
    ),
)
