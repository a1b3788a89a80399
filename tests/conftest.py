"""What tests of several files are given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rigs import Rig


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **more: Any) -> Rig:
        made.append(Rig(*args, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
