"""The world that boards are opened on, made once for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.dashboards.expected.tables import CLUSTERS
from tests.dashboards.world import World, world


@pytest.fixture(name="world", scope="session")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world"), clusters=CLUSTERS) as made:
        yield made
