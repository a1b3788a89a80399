"""What tests of several files are given."""

import gc
import random
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.rigs import Rig

# No deadline: how long an example takes depends on the load of the machine. `make test` takes the same examples each
# time, so that no change is blamed for an older mistake; `make check` draws new ones, so that mistakes are found.
settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
settings.load_profile("dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for another order of tests."""
    parser.addoption("--shuffle", metavar="SEED", help="shuffle the files, and the tests in each; a seed, an order")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Print the seed, which repeats the order."""
    seed = config.getoption("shuffle")
    return None if seed is None else f"order of tests: --shuffle {seed}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests; files stay whole, for their tests share servers and simulated fleets."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    seed, whole = config.getoption("shuffle"), list(files.values())
    items[:] = _alternated(whole) if seed is None else _shuffled(whole, random.Random(seed))  # noqa: S311  no secret


def _alternated(files: list[list[pytest.Item]]) -> list[pytest.Item]:
    """Take files with servers and files without in turn: the first mostly wait, and a long one must not be the last."""
    waiting = [file for file in files if any(item.get_closest_marker("e2e") for item in file)]
    working = [file for file in files if file not in waiting]
    none: list[pytest.Item] = []
    return [item for two in zip_longest(waiting, working, fillvalue=none) for file in two for item in file]


def _shuffled(files: list[list[pytest.Item]], dice: random.Random) -> list[pytest.Item]:
    dice.shuffle(files)
    return [item for file in files for item in dice.sample(file, len(file))]


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was collected: it lives as long as the tests, and is most of what there is."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _nodes_forgotten() -> None:
    """Forget what the pages of an address have shown: the system may give its port to another test's exporter."""
    if (source := sys.modules.get("exporter.sources.dcgm_exporter.source")) is not None:
        source._NODES.clear()


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **more: Any) -> Rig:
        made.append(Rig(*args, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
