"""What tests of several files are given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rigs import Rig


@pytest.hookimpl(tryfirst=True)  # before xdist looks for its groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End-to-end tests run in two processes: those of a file in one of them, and all that share a world."""
    for item in items:
        shared = "world" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("world" if shared else item.path.name))


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **more: Any) -> Rig:
        made.append(Rig(*args, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
