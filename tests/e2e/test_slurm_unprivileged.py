"""The daemon without any privilege on a node of a real Slurm: what docs/bare-metal.md says that it still knows."""

from pathlib import Path

import pytest

from tests.slurm.observer import REST, observed
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import ONE_OR_MORE, root_of
from tests.slurm.unprivileged import Unprivileged

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("version", ONE_OR_MORE)
def test_with_the_prologs_files_every_job_is_known_by_name(version: str, tmp_path: Path) -> None:
    with SlurmRig(Plan(nodes=1, mapping=True, root=root_of(version))) as rig:
        (node,) = rig.nodes
        nobody = Unprivileged(rig, "scontrol", "sinfo", "slurmd")
        with observed(rig, node, tmp_path, boards=REST, settings=nobody.settings(node), around=nobody) as observer:
            status = Path(f"/proc/{observer.served.program.process.pid}/status").read_text()
            assert "CapEff:\t0000000000000000" in status
            assert "CapBnd:\t0000000000000000" in status
            waiting, running = rig.allocate("--gpus=3"), rig.started("--gpus=2")
            given = {job: set(rig.given(job)) for job in (waiting, running)}
            observer.until(lambda held: held == given, f"who holds what: {given}")
            observer.watch(
                lambda page: {labels["job_id"] for labels, _ in page.rows("job_info", partition="gpu")} == set(given),
                "the controller's word of both",
            )
            assert {command.split()[0] for command in nobody.asked()} >= {"scontrol", "slurmd"}
            assert observer.page().total("faults_total") == 0
            rig.cancel(waiting, running)
            observer.until(lambda held: not held, "nobody holds a GPU")
