"""A job that knows nothing of us: its log, which is its standard output, is followed by a whole daemon."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.running import Daemon, Page, daemon
from tests.nvml_stub.build import build
from tests.training.follow_logs import maxtext

pytestmark = pytest.mark.e2e
JOB = "77"
STEPS = 12
SECONDS = 0.5
BOARD = "gpu * gr 90", "gpu * sm 80", "gpu * tensor 50", "gpu * sm_mhz 1830", "count 2", "gpu * idle"
CONFIG = """
[reports]
socket = ""
[engines]
enabled = false
[[follow]]
[mapping_dir]
path = "{folder}/jobs"
"""
PROGRAM = """
import sys, time
sys.stdin.readline()
for line in open(sys.argv[1]):
    time.sleep(float(sys.argv[2]))
    print(line, end="", flush=True)
sys.stdin.readline()
"""


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Prints a MaxText log to a file, a line each half second, once it is told to; ends when it is told to."""
    lines = [maxtext(step, seconds=SECONDS) for step in range(1, STEPS + 1)]
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines))
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": JOB}
    words = [sys.executable, "-c", PROGRAM, str(folder / "lines"), str(SECONDS)]
    with (
        (folder / "slurm-77.out").open("w") as out,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, text=True, env=env) as program,
    ):
        try:
            yield program
        finally:
            program.communicate("\n\n")


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


def told(page: Page, name: str) -> float:
    return float(page.total(f"job_{name}", job_id=JOB))


def test_a_log_says_what_a_report_would(tmp_path: Path) -> None:
    """Its figures are a mean over the job's GPUs, so they are those of both that it has here."""
    with training(tmp_path) as program, served(tmp_path, program.pid) as watched:
        watched.after(4)
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
        page = watched.until(lambda p: told(p, "step") >= STEPS, "the last step")
        assert told(page, "steps_total") >= STEPS - 2  # the first may only tell where it stands
        steps = told(page, "steps_total")
        assert told(page, "reported_gpu_seconds_total") == pytest.approx(2 * steps * SECONDS, rel=0.25)
        per_gpu = told(page, "model_flops_total") / told(page, "reported_gpu_seconds_total")
        line = (tmp_path / "lines").read_text().splitlines()[0]
        assert per_gpu == pytest.approx(float(line.split("TFLOP/s/device: ")[1].split(",")[0]) * 1e12, rel=0.15)
        assert len(page.rows("job_reported_mfu_ratio", job_id=JOB)) == 1
        assert float(page.total("workload_messages_total", outcome="taken")) > 0
