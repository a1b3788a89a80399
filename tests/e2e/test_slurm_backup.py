"""A second slurmctld takes over from a real Slurm's first one, and the daemon and `cluster` query that instead."""

import os
import signal
from pathlib import Path

import pytest

from exporter.clock import SystemClock
from exporter.cluster.slurm import SlurmCluster
from exporter.cluster.watcher import ClusterWatcher
from exporter.schedulers.slurm.client import Commands
from tests.slurm.observer import REST, Observer, observed
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import ONE_OR_MORE, root_of
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
SETTINGS = {"SLURM_NODE_STATE_SECONDS": "1", "SLURM_TIMEOUT_SECONDS": "2"}


@pytest.mark.parametrize("version", ONE_OR_MORE)
def test_when_the_first_controller_is_killed_the_second_is_queried_until_it_is_back(
    version: str, tmp_path: Path
) -> None:
    with SlurmRig(Plan(nodes=1, backup="standby", root=root_of(version))) as rig:
        cluster = SlurmCluster(Commands(bin_dir=f"{rig.commands(rig.nodes[0])}").output, refresh_seconds=60.0)
        watch = ClusterWatcher(cluster, SystemClock(), refresh_seconds=60.0, max_jobs=100)
        with observed(rig, rig.nodes[0], tmp_path, boards=REST, settings=SETTINGS) as observer:
            held: dict[str, set[str]] = {}
            _next(rig, observer, watch, held, account="physics")
            _save(rig, *held)
            os.kill(int((rig.directory / "state/slurmctld.pid").read_text()), signal.SIGKILL)
            observer.watch(lambda page: page.total("scheduler_unanswered_seconds"), "nobody answers")
            assert observer.held() == held
            observer.watch(lambda page: not page.total("scheduler_unanswered_seconds"), "the second one answers")
            _next(rig, observer, watch, held, account="chemistry")
            rig.start_controller()
            wait_for(lambda: "DOWN" not in rig.run("scontrol", "ping", check=False), "the first one is back")
            _next(rig, observer, watch, held, account="biology")
            rig.cancel(*held)
            observer.until(lambda found: not found, "nobody has a GPU")


def _next(rig: SlurmRig, observer: Observer, watch: ClusterWatcher, held: dict[str, set[str]], *, account: str) -> None:
    """One more job gets a GPU, and the daemon and `cluster` know it from the controller.

    Before the node has registered with a new slurmctld, that starts jobs without their GPUs, and when such a one has
    ended it may count the node's GPUs wrongly: so none is started before.
    """
    wait_for(lambda: "SlurmdStartTime=None" not in rig.run("scontrol", "show", "node"), "the node has registered")
    job = rig.started("--gres=gpu:1", f"--account={account}")
    held[job] = set(rig.given(job))
    assert held[job]
    observer.until(lambda found: found == held, f"{job} has {held[job]}")
    assert observer.job(job)["account"] == account

    def counted() -> bool:
        watch.turn()
        return not watch.error and [each.used for each in watch.view.nodes] == [{"h100": len(held)}]

    wait_for(counted, "cluster counts it")


def _save(rig: SlurmRig, job: str) -> None:
    """Wait until slurmctld has saved that the job runs, some seconds later: what it has not saved is lost."""
    rig.run("scontrol", "update", f"JobId={job}", "Comment=it-runs")
    saved = rig.directory / "state/job_state"
    wait_for(lambda: b"it-runs" in saved.read_bytes(), "its state is saved")
