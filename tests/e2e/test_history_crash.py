"""The daemon's history when the power goes, and when the daemon is killed: nothing that was told is taken back.

Short forms of `python -m tests.history.cuts` and `python -m tests.history.kills`, which try thousands of moments.
"""

from pathlib import Path

import pytest

from tests.history.cuts import many
from tests.history.kills import killed

pytestmark = pytest.mark.e2e


def test_the_power_goes_at_any_write_and_no_more_is_lost_than_since_the_last_checkpoint() -> None:
    found = many(500, seed=3)
    assert found["as the last write left it"] > 20
    assert found["as an earlier write left it"] > 10, "no cut has hit a write that was not synced yet"


def test_killed_again_and_again_it_goes_on_and_every_job_has_one_receipt(tmp_path: Path) -> None:
    came = killed(tmp_path, times=4, seed=5, longest=2.0)
    assert came.pages > 4
    assert came.receipts >= came.jobs_told > 0
    assert came.down > 0
