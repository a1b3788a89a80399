"""A node for `gpu-efficiency serve`: a dcgm-exporter's page and a directory of jobs, both written by hand.

Owns what the hardware and the prolog say at a moment. Refuses to know what is made of it.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.compat.checkouts import NOW, Checkout, Daemon

MODEL = "NVIDIA H100 80GB HBM3"
PERIOD = 10
"""Seconds between two samples: a machine that is busy must have answered by then."""
CONFIG = f"""\
source = "dcgm-exporter"
scheduler = "mapping-dir"
[sampling]
interval_seconds = {PERIOD}
pause_file = "pause"
[reports]
socket = ""
[engines]
enabled = false
[history]
file = "history.db"
[inventory]
file = "gpus.json"
[mapping_dir]
path = "jobs"
[host]
pool = "reserved"
proc = "proc"
[[prices]]
model = "{MODEL}"
per_gpu_hour = 2.5
[energy]
price_per_kwh = 0.12
grams_co2_per_kwh = 380
[[workload.rules]]
team = "language"
user = "ada"
"""
Figures = Mapping[str, float]
BUSY: Figures = {
    "PROF_GR_ENGINE_ACTIVE": 0.95, "PROF_SM_ACTIVE": 0.8, "PROF_SM_OCCUPANCY": 0.4, "PROF_PIPE_TENSOR_ACTIVE": 0.45,
    "PROF_DRAM_ACTIVE": 0.4, "PROF_PIPE_FP64_ACTIVE": 0.0, "PROF_PIPE_FP32_ACTIVE": 0.05, "PROF_PIPE_FP16_ACTIVE": 0.0,
    "PROF_PCIE_TX_BYTES": 1e8, "PROF_PCIE_RX_BYTES": 1e8, "PROF_NVLINK_TX_BYTES": 2e10, "PROF_NVLINK_RX_BYTES": 2e10,
    "DEV_GPU_UTIL": 100, "DEV_POWER_USAGE": 600, "DEV_ENFORCED_POWER_LIMIT": 700, "DEV_SM_CLOCK": 1830,
    "DEV_GPU_TEMP": 61, "DEV_MEMORY_TEMP": 70, "DEV_FB_USED": 70000, "DEV_FB_FREE": 10000, "DEV_FB_RESERVED": 500,
    "DEV_XID_ERRORS": 0, "DEV_CLOCKS_EVENT_REASONS": 0, "DEV_ECC_SBE_VOL_TOTAL": 0, "DEV_ECC_DBE_VOL_TOTAL": 0,
    "DEV_ROW_REMAP_PENDING": 0, "DEV_ROW_REMAP_FAILURE": 0,
}  # fmt: skip
_RESTING = dict.fromkeys([name for name in BUSY if name.startswith("PROF_")], 0.0)
IDLE: Figures = {**BUSY, **_RESTING, "DEV_GPU_UTIL": 0, "DEV_POWER_USAGE": 112, "DEV_FB_USED": 4000}
SPINNING: Figures = {
    **BUSY, **_RESTING, "PROF_GR_ENGINE_ACTIVE": 1.0, "PROF_SM_ACTIVE": 0.1, "DEV_POWER_USAGE": 130,
}  # fmt: skip
FREE: Figures = {**IDLE, "DEV_POWER_USAGE": 75, "DEV_FB_USED": 0}


class Boards:
    """A dcgm-exporter whose next page is set by hand."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = tuple(uuids)
        self._joules = dict.fromkeys(self._uuids, 5_000_000.0)
        self.text = ""

    def say(self, *figures: Figures, seconds: float = PERIOD) -> None:
        """One GPU after the other: what it has done for so many seconds."""
        lines = []
        for index, (uuid, own) in enumerate(zip(self._uuids, figures, strict=True)):
            self._joules[uuid] += own["DEV_POWER_USAGE"] * seconds
            labels = f'gpu="{index}",UUID="{uuid}",device="nvidia{index}",modelName="{MODEL}",Hostname="node1"'
            energy = {"DEV_TOTAL_ENERGY_CONSUMPTION": 1000 * self._joules[uuid]}
            lines += [f"DCGM_FI_{name}{{{labels}}} {value:.6f}\n" for name, value in (own | energy).items()]  # type: ignore[operator]
        self.text = "".join(lines)


@contextmanager
def exporter(boards: Boards) -> Iterator[str]:
    """Serve the page while the block lasts; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = boards.text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def lay_out(folder: Path, config: str = CONFIG) -> None:
    """The files that such a node has, without a job."""
    for name in ("jobs", "proc"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config, encoding="utf-8")


def give(folder: Path, at: float, **jobs: str) -> None:
    """Write who holds each GPU, by `gpuN`, as a prolog did at that moment after NOW; empty: nobody does."""
    for gpu, job in jobs.items():
        path = folder / "jobs" / gpu.removeprefix("gpu")
        path.write_text(f"{job}\n" if job else "", encoding="utf-8")
        os.utime(path, (NOW + at, NOW + at))


@contextmanager
def served(
    checkout: Checkout, folder: Path, url: str, *, wall: float = NOW, uptime: float, chance: int = 0
) -> Iterator[Daemon]:
    """`serve` on such a node; time goes on when it is moved."""
    words = ("serve", "--config", "config.toml", "--dcgm-exporter-url", url)
    with checkout.daemon(folder, *words, wall=wall, uptime=uptime, chance=chance, begun=True) as daemon:
        daemon.until_sampled(0)
        daemon.get("/metrics")  # what it says is on the disk then, and not a moment later
        yield daemon


def step(daemon: Daemon, number: int) -> None:
    """Let the daemon take its sample of `number` periods after its start."""
    daemon.move(number * PERIOD, number * PERIOD)
    daemon.until_sampled(number * PERIOD)
