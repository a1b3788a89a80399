"""What each scenario's `/metrics` must say, byte for byte: which story, where the file lies, how to tell a difference.

Owns the size of these stories. Refuses to write: `write_goldens.py` does, when a person says so.
"""

from difflib import unified_diff
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from exporter.core.exposition import render
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.simulate.simulation import simulate
from tests.scenarios.stage import fed

FOLDER = Path(__file__).parents[1] / "golden"
SEED = 7
_SHOWN = 40
"""Lines of a difference that are printed."""


class Golden(NamedTuple):
    """The size of one golden story: few GPUs, for the file is read by people."""

    gpus: int
    period: float
    duration: float | None = None
    """None: the scenario's own."""


GOLDENS: dict[str, Golden] = {
    "carpenter": Golden(1, 60),
    "copy_loop": Golden(1, 10),
    "deadlock": Golden(2, 10, 1500),
    "demo": Golden(8, 60, 420),
    "fleet": Golden(2, 30, 900),
    "healthy_training": Golden(1, 10, 1900),
    "idle_context": Golden(1, 60),
    "idle_poller": Golden(1, 30, 1800),
    "input_starved_training": Golden(1, 1, 600),
    "large_gemm": Golden(1, 10),
    "leaked_process": Golden(2, 10, 900),
    "long_first_step": Golden(1, 30, 1500),
    "lost_gpu": Golden(2, 10, 1300),
    "memory_bound_decode": Golden(1, 10, 900),
    "nic_hang": Golden(2, 10, 1020),
    "rank0_checkpoint": Golden(2, 10, 720),
    "rank0_evaluation": Golden(2, 10, 1500),
    "serving_lull": Golden(1, 60, 15300),
    "spin_kernel": Golden(1, 10),
    "straggler": Golden(2, 10, 900),
    "telemetry_outage": Golden(1, 10, 1200),
    "throttled": Golden(1, 10, 1500),
    "zombie_notebook": Golden(1, 60),
}


def path(scenario: str) -> Path:
    """Where the golden text lies."""
    return FOLDER / scenario / "metrics.prom"


def picture(scenario: str) -> Snapshot:
    """The node as it stands when the story is over; `Meta()` keeps version, host and wall time of the daemon out."""
    size = GOLDENS[scenario]
    simulation = simulate(
        scenario, seed=SEED, gpus=size.gpus, period_seconds=size.period, duration_seconds=size.duration
    )
    ledger, _ = fed(simulation.observations)
    return take_snapshot(ledger, DaemonMetadata(simulated=True))


def text(scenario: str) -> bytes:
    """The story's `/metrics` in the text format."""
    return render(picture(scenario))


def difference(scenario: str, found: bytes) -> str:
    """Say what differs from the golden text and how to accept it; empty if nothing does."""
    file = path(scenario)
    golden = file.read_bytes() if file.exists() else b""
    if found == golden:
        return ""
    lines = unified_diff(golden.decode().splitlines(), found.decode().splitlines(), "golden", "now", n=0, lineterm="")
    shown = "\n".join(islice(lines, _SHOWN))
    return (
        f"/metrics of {scenario} is not what {file.name} in tests/golden/{scenario} says:\n{shown}\n"
        f"(the first {_SHOWN} lines at most). If the change is meant, rewrite it and read the difference in git:\n"
        f"    .venv/bin/python -m tests.scenarios.write_goldens {scenario}"
    )
