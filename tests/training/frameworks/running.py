"""Starts training scripts as in an image: with the frameworks' interpreter and the client copied beside the script.

Installs nothing: `make` does, and if it could not, the tests are skipped.
"""

import os
import shutil
import subprocess
import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from exporter.training import client

PYTHON = Path(sysconfig.get_path("purelib")).parents[2] / "training/bin/python"
HERE = Path(__file__).parent
_ROUNDING = 0.002
"""Seconds."""


@cache
def missing(*modules: str) -> str:
    """Return why a script that needs these modules cannot run here, as a skip reason; empty if it can."""
    done = None
    if PYTHON.exists():
        imports = ["-c", "\n".join(f"import {name}" for name in modules)]
        done = subprocess.run([PYTHON, *imports], capture_output=True, check=False, timeout=120)
    there = done is not None and done.returncode == 0
    if there:
        return ""
    return f"needs the training environment with {', '.join(modules)}: `make .venv/training/.installed`"


def run(script: str, folder: Path, *arguments: object, socket: str, check: int = 0) -> str:
    """Run the script with a folder as its first argument, and return its output.

    AssertionError with its words for any exit status but `check`.
    """
    for source in (HERE / script, Path(client.__file__)):
        shutil.copy(source, folder)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GPU_EFFICIENCY_SOCKET": socket}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, folder / script, folder, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=240, env=environment, cwd=folder,
    )  # fmt: skip
    assert done.returncode == check, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def within(took: float, least: float, most: float) -> bool:
    """Whether reported seconds lie between two stopwatches; messages count whole milliseconds."""
    return least - _ROUNDING <= took <= most + _ROUNDING


def bounds(truth: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Least and most seconds of each phase, and of `all`, by the two stopwatches of transformer.py.

    The time in no other phase is compute. A run that crashed ended when it last wrote its file.
    """
    least, most = defaultdict(float, truth["least"]), defaultdict(float, truth["most"])
    least["startup"] = truth["started"] - truth["created"] - most["restore"]
    most["startup"] = truth["loaded"] - truth["began"] - least["restore"]
    shortest = truth.get("ended", truth["until"]) - truth["created"]
    longest = truth.get("closed", truth["until"]) - truth["began"]
    rest = shortest - sum(most.values()), longest - sum(least.values())
    return {name: (least[name], most[name]) for name in most} | {"compute": rest, "all": (shortest, longest)}
