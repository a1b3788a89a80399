"""A job whose NCCL plugin times its communication, by /etc/nccl.conf or its environment, read by a whole daemon."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.running import Daemon, Page, daemon
from tests.nccl.plugins import US, JobProcess, collective, microseconds
from tests.nvml_stub.build import build

pytestmark = pytest.mark.e2e
JOB = "77"
BOARD = "gpu * gr 90", "gpu * sm 80", "gpu * tensor 50", "gpu * sm_mhz 1830", "count 2", "gpu * idle"
CONFIG = """
[reports]
socket = ""
[engines]
enabled = false
[mapping_dir]
path = "{folder}/jobs"
"""
SHARE = 0.4


@contextmanager
def training(folder: Path) -> Iterator[JobProcess]:
    """A rank that communicates 40 % of the time: a line each quarter of a second, as its plugin would write it."""
    dumps = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": f"{folder}/dump"}
    environ = dumps | {"SLURM_JOB_ID": JOB, "RANK": "6"}
    process, stop = JobProcess(f"{folder}/dump/node-pid%p.log", environ), threading.Event()

    def work() -> None:
        while not stop.wait(0.25):
            now = microseconds(time.time_ns())
            process.write(collective(now, 0.25 * SHARE * US, kernel_stop=now))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield process
    finally:
        stop.set()
        thread.join()
        process.close()


@contextmanager
def served(folder: Path, pid: int) -> Iterator[Daemon]:
    (folder / "jobs").mkdir()
    for gpu in "01":
        (folder / "jobs" / gpu).write_text(f"{JOB}\n")
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    (folder / "world.txt").write_text("\n".join((*BOARD, f"gpu 0 process {pid} 1000000")) + "\n")
    words = ("serve", "--config", f"{folder}/config.toml", "--source", "nvml", "--scheduler", "mapping-dir")
    stub = {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{folder}/world.txt"}
    with daemon(folder, *words, **stub) as running:
        yield running


def calls(page: Page) -> float:
    return float(page.total("job_collectives_total", job_id=JOB))


def test_communication_is_timed_without_a_change_to_the_job(tmp_path: Path) -> None:
    with training(tmp_path) as process, served(tmp_path, process.pid) as watched:
        page = watched.until(lambda p: calls(p) >= 20, "twenty collectives")
        seconds = float(page.total("job_collective_seconds_total", job_id=JOB))
        assert seconds / calls(page) == pytest.approx(0.1)
        (rank,) = page.rows("job_communication_ratio", job_id=JOB)
        assert 0.2 < float(page.total("job_communication_ratio", job_id=JOB)) <= SHARE + 0.05, rank
        assert float(page.total("workload_messages_total", outcome="collective_files")) == 1
        checked = subprocess.run(
            [sys.executable, "-m", "exporter", "nccl", "--check"], capture_output=True, text=True, check=False
        ).stdout
        own = checked.partition(f"process {process.pid} ")[2].partition("\nprocess ")[0]
        assert f"file node-pid{process.pid}.log" in own
        assert "last collective AllReduce" in own
        assert "problem" not in own
