"""A page as stock dcgm-exporter serves it, on 127.0.0.1, with new figures once an interval.

Owns the making of the page and its server; the names are those of the fields, the figures are made up.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COLLECT_SECONDS = 30
"""dcgm-exporter's default interval between collections."""
GPUS = 8
_FIGURES = (
    # What dcgm-exporter's default-counters.csv turns on: name, type, a busy H100's value, what it gains in a second.
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", 1755, 0),
    ("DCGM_FI_DEV_MEM_CLOCK", "gauge", 2619, 0),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", 55, 0),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", 60, 0),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", 612.5, 0),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", 9e9, 612_500),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", 0, 0),
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", 98, 0),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", 40, 0),
    ("DCGM_FI_DEV_ENC_UTIL", "gauge", 0, 0),
    ("DCGM_FI_DEV_DEC_UTIL", "gauge", 0, 0),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", 0, 0),
    ("DCGM_FI_DEV_FB_FREE", "gauge", 20_000, 0),
    ("DCGM_FI_DEV_FB_USED", "gauge", 61_000, 0),
    ("DCGM_FI_DEV_FB_RESERVED", "gauge", 559, 0),
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", 0, 3_000),
    ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "gauge", 0, 0),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", 0, 0),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter", 0, 0),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", 0, 0),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", 0.95, 0),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", 0.45, 0),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", 0.41, 0),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "counter", 1e8, 0),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "counter", 2e8, 0),
)


@lru_cache(maxsize=2)
def page(collection: int) -> bytes:
    """Write the page of one collection; every busy signal differs a little from the one before."""
    lines: list[str] = []
    for name, kind, value, gain in _FIGURES:
        lines += [f"# HELP {name} as the driver says", f"# TYPE {name} {kind}"]
        sway = 1 + 0.01 * (collection % 3) if isinstance(value, float) else 1
        now = value * sway + gain * COLLECT_SECONDS * collection
        lines += [f"{name}{{{_labels(gpu)}}} {now:f}" for gpu in range(GPUS)]
    return ("\n".join(lines) + "\n").encode()


def _labels(gpu: int) -> str:
    pairs = {
        "gpu": gpu,
        "UUID": f"GPU-0d9a0000-0000-4000-8000-{gpu:012d}",
        "pci_bus_id": f"00000000:{0x18 + gpu:02X}:00.0",
        "device": f"nvidia{gpu}",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "gpu-node-00",
        "DCGM_FI_DRIVER_VERSION": "580.105.08",
    }
    return ",".join(f'{name}="{value}"' for name, value in pairs.items())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the acknowledgement of its headers

    def do_GET(self) -> None:
        """Answer any path with the page as of the last collection."""
        body = page(int(time.monotonic()) // COLLECT_SECONDS)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


@contextmanager
def served() -> Iterator[str]:
    """Serve the page from a thread of this process; gives its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
