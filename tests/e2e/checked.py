"""A node for `install-check` to look at: made of real processes and stand-ins, and the run of the command there.

Owns how each part of it is made. Refuses to judge what the command says of it.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.dcgm_stub.bindings import missing, unpack
from tests.dcgm_stub.build import build as build_dcgm
from tests.e2e.running import command, environment
from tests.kubernetes.cluster import NODE, gpu_uuid
from tests.kubernetes.cluster import node as node_of_kubernetes
from tests.nvml_stub.build import LIBRARY
from tests.nvml_stub.build import build as build_nvml
from tests.waiting import PATIENCE

PACE = ("--sampling.interval-seconds", "0.1")
UUIDS = tuple(f"GPU-00000000-0000-0000-0000-{number:012}" for number in range(2))
_AS_NOBODY = """
import contextlib, io, os, sys
from exporter.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(sys.argv[1:])
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sys.exit(main(sys.argv[1:]))
"""
"""Once as root, which loads all that is used, for the interpreter's tree may be closed to others; then as nobody."""


class Told:
    """What one run said."""

    def __init__(self, status: int, report: dict[str, Any]) -> None:
        self.status, self.report = status, report

    def found(self, check: str) -> dict[str, str]:
        found = [each for each in self.report["findings"] if each["check"] == check]
        assert found, f"no finding called {check}: {sorted(each['check'] for each in self.report['findings'])}"
        found.sort(key=lambda each: ("ok", "info", "warn", "fail").index(each["verdict"]))
        return dict(found[-1])


class Node:
    """A folder in which a node is set up, and the run of the command there."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.env: dict[str, str] = {"KUBERNETES_API_URL": "", "WEB_LISTEN_ADDRESS": "127.0.0.1:0"}
        self.more: dict[str, str] = {}
        self.kubelet: Any = None
        nowhere = folder / "nowhere"
        self.env |= {
            "KUBERNETES_POD_RESOURCES_SOCKET": f"{nowhere}/kubelet.sock",
            "MAPPING_DIR_PATH": f"{nowhere}/jobs",
            "REPORTS_SOCKET": f"{folder}/report.sock",
            "SAMPLING_PAUSE_FILE": f"{folder}/pause",
            "DCGM_EXPORTER_URL": "http://127.0.0.1:1/metrics",
        }

    def driver(self, *lines: str) -> None:
        """A stand-in of NVML, in a folder that everybody can read."""
        folder = self.folder / "nvml"
        folder.mkdir()
        shutil.copy(build_nvml() / LIBRARY, folder)
        (folder / "world.txt").write_text("".join(f"{line}\n" for line in lines))
        self.more |= {"LD_LIBRARY_PATH": f"{folder}", "NVML_STUB_SCRIPT": f"{folder / 'world.txt'}"}

    def engine(self, *lines: str, library: bool = True) -> None:
        """A stand-in of libdcgm under NVIDIA's bindings."""
        if reason := missing():
            pytest.skip(reason)
        bindings = unpack(self.folder / "bindings", library=build_dcgm() if library else None)
        script = self.folder / "engine.txt"
        script.write_text("".join(f"{line}\n" for line in (f"listen {self.folder / 'engine'}", *lines)))
        self.more |= {"DCGM_BINDINGS": f"{bindings}", "DCGM_STUB_SCRIPT": f"{script}"}
        self.env["DCGM_ADDRESS"] = f"unix:{self.folder / 'engine'}"

    def page(self, text: str, *, status: int = 200, seconds: float = 0.0) -> None:
        """Something that answers as dcgm-exporter, or as it should not."""
        port = self.stack.enter_context(answering(text.encode(), status, seconds))
        self.env["DCGM_EXPORTER_URL"] = f"http://127.0.0.1:{port}/metrics"

    def proc(self, *, restricted: bool = False) -> None:
        """The driver's part of another /proc, as a container has the host's."""
        nvidia = self.folder / "proc/driver/nvidia"
        for number, uuid in enumerate(UUIDS):
            board = nvidia / f"gpus/0000:{number:02x}:00.0"
            board.mkdir(parents=True)
            (board / "information").write_text(f"GPU UUID: \t {uuid}\nDevice Minor: \t {number}\n")
        (nvidia / "params").write_text(f"RmProfilingAdminOnly: {restricted:d}\n")
        (nvidia / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\n")
        self.env["HOST_PROC"] = f"{self.folder / 'proc'}"

    @property
    def environ(self) -> dict[str, str]:
        ours = {f"GPU_EFFICIENCY_{name}": value for name, value in self.env.items()}
        return environment(**ours, **self.more)

    def checked(self, *words: str, nobody: bool = False) -> Told:
        line = ("install-check", "--json", *PACE, *words)
        start = [sys.executable, "-c", _AS_NOBODY, *line] if nobody else command(*line)
        done = subprocess.run(
            start, env=self.environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
            cwd=self.folder,
        )  # fmt: skip
        assert done.stdout, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return Told(done.returncode, json.loads(done.stdout))


@contextmanager
def answering(body: bytes, status: int, seconds: float) -> Iterator[int]:
    """A small HTTP server's port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep still: the test speaks."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kubelet_of(node: Node) -> Any:
    k8s = node.stack.enter_context(node_of_kubernetes())
    k8s.folder.chmod(0o755)
    k8s.kubelet.gives("train-0", gpu_uuid(0), gpu_uuid(1))
    k8s.kubelet.socket.chmod(0o600)
    node.env |= {
        "KUBERNETES_POD_RESOURCES_SOCKET": f"{k8s.kubelet.socket}", "KUBERNETES_NODE_NAME": NODE,
        "KUBERNETES_API_URL": k8s.api.url, "KUBERNETES_CA_FILE": f"{k8s.api.ca}",
        "KUBERNETES_TOKEN_FILE": f"{k8s.token}",
    }  # fmt: skip
    return k8s
