"""Control groups v2, which the unit's sandbox makes read-only: slurmd still lists this node's GPUs to the daemon."""

from pathlib import Path

import pytest

from tests.slurm.sites import site

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["22.05 with groups v2", "24.11 with groups v2", "26.05 with SLUIDs"])
def test_a_job_has_its_gpus_where_slurmd_may_not_make_a_control_group(name: str, tmp_path: Path) -> None:
    """slurmd has no capability and cannot write there, see `Inside.confined`; its order is not the driver's."""
    with site(name, tmp_path) as here:
        node = here.rig.nodes[0]
        job = here.rig.started(f"--nodelist={node}", "--gpus=3")
        here.holds(job)
        assert any(line.startswith("slurmd") for line in here.rig.asked(node))
        page = here.observers[0].page()
        assert page.total("faults_total", kind="scheduler_refused") == 0
        here.rig.cancel(job)
        here.observers[0].until(lambda held: not held, "nothing is held")
