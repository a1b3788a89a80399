"""The rig itself: it works, two of them do not interfere, and nothing is left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.plan import Plan
from tests.slurm.processes import processes
from tests.slurm.rig import SlurmRig
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture(name="rig", scope="module")
def _rig() -> Iterator[SlurmRig]:
    with SlurmRig() as rig:
        yield rig


def test_a_job_has_what_it_asked_for_and_the_prolog_says_which(rig: SlurmRig) -> None:
    job = rig.started("--gpus=3", "--account=physics")
    assert len(set(rig.given(job))) == 3
    assert not rig.ended(job)
    said = rig.run("scontrol", "show", "job", job)
    assert "UserId=games" in said
    assert "Account=physics" in said
    rig.cancel(job)
    rig.wait(job, "CANCELLED")
    wait_for(lambda: rig.ended(job), "the epilog has run")


def test_its_own_questions_are_counted(rig: SlurmRig) -> None:
    job = rig.started("--gpus=1")
    rig.forget_rpcs()
    for _ in range(3):
        rig.run("scontrol", "--local", "show", "job", job)
    assert rig.rpcs()["REQUEST_JOB_INFO_SINGLE"] == 3
    rig.cancel(job)


def test_another_cluster_beside_it_leaves_nothing_behind_and_harms_nobody(rig: SlurmRig) -> None:
    mine = rig.started("--gpus=1")
    with SlurmRig(Plan(nodes=1)) as other:
        job = other.started("--gpus=8")
        other.srun("--gres=none")
        # An orphan that no scancel reaches: it must not outlive the cluster.
        other.submit("--gres=none", script="setsid sleep 1000 & sleep 1")
        assert other.state(job) == "RUNNING"
        assert processes(other.directory, other.nodes)
        other.stop_controller()
    assert not other.directory.exists()
    assert processes(other.directory, other.nodes) == []
    assert rig.state(mine) == "RUNNING"
    rig.cancel(mine)


def test_with_control_groups_a_job_is_kept_from_other_gpus_and_no_group_is_left() -> None:
    with SlurmRig(Plan(nodes=1, cgroups=True, prolog_flags="Contain")) as rig:
        job = rig.started("--gpus=1", script=f"( : <{rig.directory}/dev/nvidia7 ) 2>&1; exec sleep 1000")
        wait_for(lambda: "not permitted" in _said(rig, job), "the job is refused a GPU that it has not been given")
        node = rig.nodes[0]
        assert list(Path("/sys/fs/cgroup").glob(f"devices/slurm_{node}/uid_*/job_{job}"))
    assert not list(Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"))


def _said(rig: SlurmRig, job: str) -> str:
    return "".join(file.read_text() for file in (rig.directory / "out").glob(f"{job}_*"))
