"""Upgrades and downgrades an installed daemon on one store, again and again, while jobs start and end.

`python -m tests.history.upgrades --old COMMIT` installs the wheels of an older and of the last commit into an
environment each, starts them in turn on the same store, and stops or kills each after some seconds. No counter that an
old and a new one share may ever go back, every job has one job record, and every second is booked once.
"""

import argparse
import random
import subprocess
import tarfile
import tempfile
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from release import build, installed
from tests.history.kills import judged
from tests.history.served import Node

ROOT = Path(__file__).resolve().parents[2]


class Came(NamedTuple):
    """Result of a run."""

    changes: int
    pages: int
    records: int
    down: float
    """GPU-seconds of downtime that the last daemon reports."""


def install(commit: str, folder: Path) -> Path:
    """Install the wheel of a commit into an environment of its own; return its command."""
    source, dist = folder / "source", folder / "dist"
    dist.mkdir(parents=True)
    packed = subprocess.run(["git", "-C", f"{ROOT}", "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        build.unpack(archive, source)
    build.distributions(source, dist, epoch=1_767_225_600)
    python = installed.environment(folder / "installed", source)
    installed.install_wheel(python, dist)
    return python.with_name("gpu-efficiency")


def changed(folder: Path, commands: list[Path], *, times: int, seed: int) -> Came:
    """Start the commands in turn, `times` in all, on one store; check what they export and what is left."""
    node, chance = Node(folder, seed=seed), random.Random(seed)  # noqa: S311
    down = 0.0
    with node.jobs.at_random():
        for command in islice(cycle(commands), times):
            with node.running(program=(f"{command}",)) as served:
                served.first()
                served.scraping(chance.uniform(1.0, 4.0))
                if chance.random() < 0.5:
                    served.kill()
                else:
                    assert served.program.end() == 0, served.program.log()
    with node.running() as served:
        page = served.first()
        served.scraping(1.0)
        down = float(page.total("unobserved_seconds_total", reason="exporter_down"))
        assert served.program.end() == 0, served.program.log()
    return Came(times, node.told.pages, judged(node), down)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", required=True, help="commit or tag to upgrade from")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = [install(args.old, folder / "old"), install("HEAD", folder / "new")]
        (folder / "node").mkdir()
        print(changed(folder / "node", commands, times=args.times, seed=args.seed))  # noqa: T201  its answer


if __name__ == "__main__":
    main()
