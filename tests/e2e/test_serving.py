"""A serving engine's stand-in found by a whole daemon: by its process on the GPU, its command line and its port.

The driver's stand-in says that the GPU waits 40 % of the time; the engine says why.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.running import Daemon, Page, daemon
from tests.engines.standins import StandIn
from tests.nvml_stub.build import build
from tests.ports import free_port

pytestmark = pytest.mark.e2e
JOB = "77"
BOARD = "gpu * gr 60", "gpu * sm 55", "gpu * tensor 30", "gpu * dram 40", "gpu * sm_mhz 1830", "count 1", "gpu 0 idle"
CONFIG = """
[reports]
socket = ""
[engines]
interval_seconds = 1
ports = [{port}]
[mapping_dir]
path = "{folder}/jobs"
"""


class Node:
    """A node with one GPU on which an engine runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.engine = StandIn("vllm 0.18")
        (folder / "jobs").mkdir()
        (folder / "jobs" / "0").write_text(f"{JOB}\n")
        (folder / "config.toml").write_text(CONFIG.format(port=self.port, folder=folder))

    def says(self, *, running: float, waiting: float, kv: float, generated: float = 0.0) -> None:
        """From now on."""
        self.engine.say("vllm:num_requests_running", running)
        self.engine.say("vllm:num_requests_waiting", waiting)
        self.engine.say("vllm:kv_cache_usage_perc", kv)
        self.engine.say("vllm:generation_tokens_total", generated)
        self.engine.say("vllm:prompt_tokens_total", 0.0)
        self.engine.see("vllm:time_to_first_token_seconds", 0.25, 0.25)
        draft = self.folder / "page.draft"
        draft.write_bytes(self.engine.page())
        draft.replace(self.folder / "page")

    @contextmanager
    def served(self) -> Iterator[Daemon]:
        """The engine, with its child on the GPU, and the daemon."""
        server = Path(__file__).parents[1] / "engines" / "server.py"
        line = [
            sys.executable,
            server,
            "127.0.0.1",
            self.port,
            self.folder / "page",
            "vllm serve",
            "--max-num-seqs",
            "8",
        ]
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": JOB}
        with subprocess.Popen(
            list(map(str, line)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        ) as engine:
            assert engine.stdout is not None
            try:
                child = engine.stdout.readline().split()[1]
                (self.folder / "world.txt").write_text("\n".join((*BOARD, f"gpu 0 process {child} 1000000")) + "\n")
                words = ("serve", "--config", f"{self.folder}/config.toml", "--source", "nvml")
                stub = {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{self.folder}/world.txt"}
                with daemon(self.folder, *words, "--scheduler", "mapping-dir", **stub) as served:
                    yield served
            finally:
                engine.communicate()


def lost(page: Page, leak: str) -> float:
    return float(page.total("job_seconds_total", job_id=JOB, leak=leak))


def told(page: Page, name: str, **labels: str) -> float | None:
    rows = page.rows(f"job_{name}", job_id=JOB, **labels)
    return float(rows[0][1]) if rows else None


def test_an_engine_says_why_its_gpu_waits(tmp_path: Path) -> None:
    """A full cache, then half of eight slots empty while requests queue, then nobody; each by at least a second."""
    node = Node(tmp_path)
    node.says(running=8, waiting=3, kv=0.97)
    with node.served() as served:
        page = served.until(lambda p: lost(p, "kv_cache_wait") > 0.4, "waits for the KV cache")
        assert told(page, "kv_cache_ratio") == 0.97
        assert told(page, "requests", state="waiting") == 3.0
        assert told(page, "batch_fill_ratio") == 1.0
        assert [labels["engine"] for labels, _ in page.rows("job_engine_info", job_id=JOB)] == ["vllm"]
        assert lost(page, "batching") == 0.0
        node.says(running=4, waiting=3, kv=0.5, generated=100)
        page = served.until(lambda p: lost(p, "batching") > 0.4, "empty slots")
        assert told(page, "batch_fill_ratio") == 0.5
        assert 0.1 < (told(page, "latency_seconds", kind="ttft", percentile="p99") or 0.0) < 1.0
        node.says(running=0, waiting=0, kv=0.0)
        page = served.until(lambda p: lost(p, "idle_allocation") > 0.4, "idle")
        assert float(page.total("job_engine_tokens_total", job_id=JOB, kind="generated")) == 100.0
        assert float(page.total("workload_messages_total", outcome="engine_page")) >= 3


def test_an_engine_that_is_gone_leaves_counters_alone_and_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.says(running=8, waiting=3, kv=0.97)
    with node.served() as served:
        served.until(lambda p: lost(p, "kv_cache_wait") > 0.4, "waits for the KV cache")
        (tmp_path / "page").write_text("<html>a login page</html>")
        served.until(lambda p: p.total("faults_total", kind="engine_failed") > 0, "the fault")
        before = lost(served.after(12), "kv_cache_wait")  # a second between polls: eight more of them are believed
        later = served.after(3)
        assert lost(later, "kv_cache_wait") == before
        assert "engine_failed" in served.program.log()
        assert float(later.total("faults_total", kind="engine_failed")) > 0
