"""A real training loop that crashes and goes on from its checkpoint, heard by a whole daemon; and its twin, silent.

PyTorch trains on the CPU and reports through the client to `gpu-efficiency serve`, whose driver is the stand-in: a GPU
that is busy 60 % of the time, 45 % of it with tensor work. Every figure is that of the loop's own stopwatches.
"""

import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter.training import client
from tests.e2e.running import Daemon, Page, daemon
from tests.nvml_stub.build import build
from tests.training.frameworks.running import HERE, PYTHON, bounds, missing
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
CRASHED = 17
JOB = "77"
PEAK = 3e10
"""FLOP/s of the board, by configuration: what the loop makes of it is near 30 %."""
TENSOR, WAIT = 0.45, 0.4
BOARD = "gpu * gr 60", "gpu * sm 55", "gpu * tensor 45", "gpu * dram 10", "gpu * sm_mhz 1830", "count 1"
EVERY = 0.5
LATE = 5.0
"""Seconds after which a report is missed: half as much again as the longest interval, and two; and a reading."""
CONFIG = f"""
[reports]
socket = "{{folder}}/report.sock"
[engines]
enabled = false
[mapping_dir]
path = "{{folder}}/jobs"
[specs."NVIDIA H100 80GB HBM3"]
peak_flops = {PEAK}
"""


class Node:
    """A node with one GPU, held by one job, and the driver's script."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "world.txt"
        (folder / "jobs").mkdir()
        (folder / "jobs" / "0").write_text(f"{JOB}\n")
        (folder / "config.toml").write_text(CONFIG.format(folder=folder))
        self.lists()

    def lists(self, *pids: int) -> None:
        """The driver lists these processes on the GPU, and no others."""
        draft = self.script.with_suffix(".draft")
        draft.write_text("\n".join((*BOARD, "gpu 0 idle", *(f"gpu 0 process {pid} 1000000" for pid in pids))) + "\n")
        draft.replace(self.script)

    @contextmanager
    def served(self) -> Iterator[Daemon]:
        words = (
            "serve", "--config", f"{self.folder}/config.toml", "--source", "nvml", "--scheduler", "mapping-dir",
            "--sampling.interval-seconds", "0.5",
        )  # fmt: skip
        env = {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{self.script}"}
        with daemon(self.folder, *words, **env) as served:
            yield served

    def train(self, served: Daemon, *words: object, status: int = 0) -> None:
        """Train as a job's process that is on the GPU before it says anything, to its end."""
        for source in (HERE / "transformer.py", Path(client.__file__)):
            shutil.copy(source, self.folder)
        go = self.folder / "go"
        go.unlink(missing_ok=True)
        wait = 'while [ ! -e "$0" ]; do sleep 0.05; done; exec "$@"'
        line = [PYTHON, self.folder / "transformer.py", self.folder, "--every", EVERY, *words]
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": JOB, "OMP_NUM_THREADS": "1"}
        env["GPU_EFFICIENCY_SOCKET"] = f"{self.folder}/report.sock"
        self.began = time.monotonic()
        with subprocess.Popen(["sh", "-c", wait, f"{go}", *map(str, line)], env=env, cwd=self.folder) as trainer:
            try:
                self.lists(trainer.pid)
                served.after(4)
                go.touch()
                assert trainer.wait(timeout=200) == status
            except BaseException:
                trainer.kill()  # else the block would wait for it
                raise
        self.lists()
        served.after(3)

    def truth(self, start: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"truth-{start}.json").read_text())
        return found


@pytest.fixture(name="node")
def _node(tmp_path: Path) -> Node:
    if reason := missing("torch"):
        pytest.skip(reason)
    return Node(tmp_path)


def told(page: Page, name: str, **labels: str) -> float:
    return float(page.total(f"job_{name}", job_id=JOB, **labels))


def booked(page: Page, leak: str) -> float:
    return float(page.total("job_seconds_total", job_id=JOB, leak=leak))


def test_what_a_real_loop_did_is_what_the_daemon_says(node: Node) -> None:
    with node.served() as served:
        wait_for((node.folder / "report.sock").exists, "the socket")
        node.train(served, status=CRASHED)
        crashed = served.page()
        node.train(served)
        page = served.page()
    first, second = node.truth(0), node.truth(1)
    heard = next(each for each in first["history"] if each["step"] == int(told(crashed, "step")))
    counts(page, heard, second)
    phases(page, first, second)
    paid = float(page.total("job_paid_seconds_total", job_id=JOB))
    ledger(page, first, second, paid, until_step=second["history"][0]["at"] - node.began)
    assert float(page.total("workload_messages_total", outcome="taken")) > 20
    refused = [
        labels for labels, count in page.rows("workload_messages_total") if count and labels["outcome"] != "taken"
    ]
    assert refused == []


def counts(page: Page, heard: dict[str, Any], second: dict[str, Any]) -> None:
    """Exact, but for what the crash took with it: what was done since the last message."""
    assert told(page, "steps_total") == heard["steps"] + second["steps"]
    assert told(page, "tokens_total") == heard["tokens"] + second["tokens"]
    assert told(page, "padding_tokens_total") == heard["padding"] + second["padding"]
    assert told(page, "model_flops_total") == pytest.approx(heard["flops"] + second["flops"])
    assert told(page, "checkpoints_total") == heard["checkpoints"] + second["checkpoints"]
    assert told(page, "restarts_total") == 1
    again = heard["step"] - second["resumed"]
    assert told(page, "rework_steps_total") == again
    assert told(page, "progress_ratio") == pytest.approx(1 - again / (heard["steps"] + second["steps"]))
    assert told(page, "step") == 60


def spent(first: dict[str, Any], second: dict[str, Any], which: int) -> dict[str, float]:
    """Seconds of both runs by phase: `which` of their least and most."""
    total: defaultdict[str, float] = defaultdict(float)
    for run in (first, second):
        for name, seconds in bounds(run).items():
            total[name] += seconds[which]
    return total


def phases(page: Page, first: dict[str, Any], second: dict[str, Any]) -> None:
    """The loop's stopwatches; a crash takes one interval, and messages come between two steps."""
    least, most = spent(first, second, 0), spent(first, second, 1)
    for name in ("data", "checkpoint", "restore", "evaluation", "startup"):
        seconds = told(page, "run_seconds_total", phase=name)
        assert 0.9 * least[name] - 0.3 < seconds < 1.1 * most[name] + 0.3, name
    steps = told(page, "run_seconds_total", phase="compute") + told(page, "run_seconds_total", phase="rework")
    assert 0.9 * least["compute"] - 2 * EVERY < steps < 1.1 * most["compute"] + 2 * EVERY
    done = [each["at"] for each in first["history"]]
    caught_up = next(each["at"] for each in second["history"] if each["step"] > len(done))
    assert told(page, "recovery_seconds_total") == pytest.approx(caught_up - done[-1], abs=4 * EVERY)
    since = told(page, "start_timestamp_seconds") - (time.time() - time.monotonic())
    elapsed = second["until"] - since
    good = told(page, "run_seconds_total", phase="compute")
    assert told(page, "goodput_ratio") == pytest.approx(good / elapsed, rel=0.05)


def ledger(page: Page, first: dict[str, Any], second: dict[str, Any], paid: float, *, until_step: float) -> None:
    """The GPU waited 40 % of the time: phases were booked on that as they were told, and tensor work as FLOPs.

    Of the tensor work in steps what the FLOPs account for is useful or rework, the rest recomputation, as far as a
    quarter goes, and padding. The stand-in works on while nothing is trained: while it saves, restores, or has ended
    and its next report is not late yet, that is held against the job, while it starts or evaluates it is not.
    """
    least, most = spent(first, second, 0), spent(first, second, 1)
    for leak, phase in (("data_stall", "data"), ("checkpoint", "checkpoint")):
        assert 0.85 * least[phase] - 0.5 < booked(page, leak) < 1.15 * most[phase] + 0.5, leak
    # What its new process waits before its first reported step is recovery, too, however long a busy machine takes.
    assert least["restore"] - 0.4 < booked(page, "failure_recovery") < until_step + 2 * EVERY + 2.0
    tensor = [booked(page, name) for name in ("useful", "rework", "recomputation", "padding")]
    assert sum(tensor) == pytest.approx(TENSOR * paid, rel=0.05)
    made = [each["flops"] for each in (first, second)]
    assert tensor[0] + tensor[1] > sum(made) / PEAK * 0.9
    again = told(page, "rework_steps_total") / second["steps"]
    real = 1 - second["padding"] / second["tokens"]
    assert tensor[1] == pytest.approx(again * second["flops"] * real / PEAK, rel=0.2)
    fewest = TENSOR * (least["compute"] + least["data"]) - sum(made) * real / PEAK
    beside = sum(most[phase] for phase in ("compute", "data", "checkpoint", "restore")) + 2 * LATE
    assert 0.9 * fewest < tensor[2] + tensor[3] < 1.1 * (TENSOR * beside - sum(made) * real / PEAK)


def test_a_loop_that_says_nothing_is_served_by_counters_alone(node: Node) -> None:
    with node.served() as served:
        node.folder.joinpath("report.sock").unlink()
        node.train(served, "--steps", 10, "--crash", 99)
        page = served.page()
    assert page.rows("job_steps_total") == []
    assert booked(page, "rework") == booked(page, "padding") == 0.0
    assert booked(page, "useful") == pytest.approx(TENSOR * float(page.total("job_paid_seconds_total")), rel=0.05)
