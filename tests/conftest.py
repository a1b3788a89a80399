"""What tests of several files are given."""

import gc
from collections.abc import Callable, Iterator
from itertools import groupby, zip_longest
from typing import Any

import pytest
from hypothesis import settings

from tests.rigs import Rig

# No deadline: how long an example takes depends on the load of the machine. `make test` takes the same examples each
# time, so that no change is blamed for an older mistake; `make check` draws new ones, so that mistakes are found.
settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True)
settings.load_profile("dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take files with servers and files without in turn: the first mostly wait, and a long one must not be the last."""
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    waiting = [file for file in files if any(item.get_closest_marker("e2e") for item in file)]
    working = [file for file in files if file not in waiting]
    none: list[pytest.Item] = []
    items[:] = [item for two in zip_longest(waiting, working, fillvalue=none) for file in two for item in file]


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was collected: it lives as long as the tests, and is most of what there is."""
    gc.freeze()


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **more: Any) -> Rig:
        made.append(Rig(*args, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
