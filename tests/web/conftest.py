"""Shares one certificate authority among the tests, because generating keys is slow."""

import pytest

from tests.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("authority"))
    for name in ("server", "other"):
        made.issue(name)
    return made
