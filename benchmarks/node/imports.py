"""Where a daemon's memory and its time to start go: one interpreter, one import after another.

Owns that measurement. What a module costs depends on what was there before it, so the order is the daemon's own.
"""

import json
import subprocess
import sys

from benchmarks.figures import Row, row
from benchmarks.group import Group, Measured
from benchmarks.machine import ROOT

_STEPS = (
    ("the interpreter", ""),
    ("exporter.cli (arguments)", "exporter.cli"),
    ("msgspec", "msgspec"),
    ("exporter.cli.serve (core, loop, trace)", "exporter.cli.serve"),
    ("pynvml", "pynvml"),
    ("prometheus_client", "prometheus_client"),
    ("pydantic", "pydantic"),
    ("fastapi", "fastapi"),
    ("uvicorn", "uvicorn"),
    ("exporter.web", "exporter.web.server"),
)
_REPEATS = 5
_PROGRAM = """
import sys, time
from importlib import import_module
steps = []
for name in sys.argv[1:]:
    began = time.perf_counter()
    if name:
        import_module(name)
    spent = time.perf_counter() - began
    with open("/proc/self/status") as status:
        pages = next(line for line in status if line.startswith("VmRSS"))
    steps.append((int(pages.split()[1]) / 1024, spent * 1e3))
import json
print(json.dumps(steps))
"""


def imports() -> list[Row]:
    """Give for each step the resident memory it adds, and how long it takes from compiled files."""
    runs = [_run() for _ in range(_REPEATS)]
    return [line for index in range(len(_STEPS)) for line in [_step(index, runs)]] + [_all(runs)]


def _run() -> list[tuple[float, float]]:
    names = [name for _, name in _STEPS]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *names], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return [(mebibytes, milliseconds) for mebibytes, milliseconds in json.loads(done.stdout)]


def _step(index: int, runs: list[list[tuple[float, float]]]) -> Row:
    added = [run[index][0] - (run[index - 1][0] if index else 0.0) for run in runs]
    slowest = sorted(run[index][1] for run in runs)
    label, _ = _STEPS[index]
    spread = f"{min(added):.1f} - {max(added):.1f}"
    if index:
        spread += f"; {slowest[_REPEATS // 2]:.0f} ms to import"
    return row("imports", f"Memory added by {label}", often=f"{_REPEATS} x", values=added, unit="MiB", spread=spread)


def _all(runs: list[list[tuple[float, float]]]) -> Row:
    ends = [run[-1][0] for run in runs]
    return row("imports", "Memory with all of `serve` imported", often=f"{_REPEATS} x", values=ends, unit="MiB")


IMPORTS = Group(
    name="imports",
    title="Where the memory goes",
    about=(
        "Resident memory (VmRSS) and time that each import adds, in the order in which `serve` meets them; what a "
        "module shares with an earlier one is counted there. Compiled files exist."
    ),
    measures=(
        "exporter/agent",
        "exporter/cli",
        "exporter/core",
        "exporter/web",
        "exporter/schedulers",
        "exporter/sources",
    ),
    run=lambda: Measured(rows=imports()),
)
