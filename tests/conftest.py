"""What tests of several files are given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.rigs import Rig

settings.register_profile("no deadline", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("no deadline")


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **more: Any) -> Rig:
        made.append(Rig(*args, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
