"""Measures what slurmctld pays for its own metrics beside the RPCs of `gpu-efficiency cluster`.

`python -m tests.slurm.metrics_cost NODES`, as root, with the tree of Slurm 26.05 (`make slurm-trees`), prints the
processor time of slurmctld in a cluster with that many nodes of eight GPUs. Only one has a slurmd: the table is asked.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import httpx

from exporter.cluster.slurm import SINFO, SQUEUE
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import root_of

_ROUNDS, _ASKED = 5, 20
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGES = ("nodes", "partitions", "jobs")


def _processor_seconds(pid: int) -> float:
    """Return what all threads of the process have used, those that have ended too (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _cost(pid: int, ask: Callable[[], int]) -> tuple[float, int]:
    """Return slurmctld's processor seconds for one question, less what it uses while nobody asks, and the bytes."""
    size = ask()
    used, began = _processor_seconds(pid), time.monotonic()
    for _ in range(_ASKED):
        ask()
    took = time.monotonic() - began
    asked = _processor_seconds(pid) - used
    used = _processor_seconds(pid)
    time.sleep(took)
    return max(0.0, asked - (_processor_seconds(pid) - used)) / _ASKED, size


def _add_nodes(rig: SlurmRig, nodes: int) -> None:
    rig.stop_controller()
    with rig.conf.open("a") as file:
        file.write(f"NodeName=big[1-{nodes}] NodeAddr=127.0.0.1 Port=1 CPUs=64 Gres=gpu:h100:8 State=DOWN\n")
        file.write(f"PartitionName=big Nodes=big[1-{nodes}] State=UP\n")
    rig.start_controller()


def _questions(rig: SlurmRig, client: httpx.Client) -> dict[str, Callable[[], int]]:
    asked = {
        f"GET /metrics/{page}": lambda page=page: len(client.get(f"/metrics/{page}").raise_for_status().content)
        for page in _PAGES
    }
    return asked | {
        "sinfo (nodes and partitions)": lambda: len(rig.run("sinfo", *SINFO)),
        "squeue (no job)": lambda: len(rig.run("squeue", *SQUEUE)),
    }


def main(nodes: int) -> None:
    """Print a line for each question: the median of the rounds, their range, and the bytes of an answer."""
    settings = ("MetricsType=metrics/openmetrics", "SlurmdTimeout=0")
    with SlurmRig(Plan(nodes=1, root=root_of("26.05"), settings=settings)) as rig:
        _add_nodes(rig, nodes)
        pid = int((rig.directory / "state/slurmctld.pid").read_text())
        with httpx.Client(base_url=f"http://127.0.0.1:{rig.controller_port}", trust_env=False, timeout=60) as client:
            questions = _questions(rig, client)
            found = [{name: _cost(pid, ask) for name, ask in questions.items()} for _ in range(_ROUNDS)]
    for name in questions:
        costs = sorted(1000 * each[name][0] for each in found)
        sys.stdout.write(
            f"{name}: {median(costs):.1f} ms ({costs[0]:.1f} - {costs[-1]:.1f}), {found[0][name][1]:,} bytes printed\n"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
