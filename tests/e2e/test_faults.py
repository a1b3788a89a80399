"""The benchmark of faults on a whole daemon, in short: its driver goes, it is killed, and its pages keep the law."""

import pytest

from tests.fuzz.day import Day, Met
from tests.fuzz.endurance import measured
from tests.fuzz.live import FAULTS, lived
from tests.fuzz.unwell import GPUS

pytestmark = pytest.mark.e2e


def test_a_daemon_whose_driver_goes_and_that_is_killed_has_every_second_once() -> None:
    wanted = ("the driver is gone", "kill -9, started again")
    found = lived(tuple(fault for fault in FAULTS if fault.what in wanted)[:2], scale=0.4)
    assert found.broken == []
    assert abs(found.lost) <= GPUS
    assert [met.what for met in found.met] == list(wanted)
    assert all(met.unobserved > 0 for met in found.met)
    assert "exporter_down" in found.met[1].reasons
    rows = measured(Day(met=[Met("the source hangs", 0.0, 1.0, recovered=1.0)], ticks=1, hours=1.0), found).rows
    assert all(row.met is not False for row in rows)
