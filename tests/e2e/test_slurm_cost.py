"""What the daemons cost a real Slurm: its controller's own count of remote calls, and the commands they start."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.slurm.sites import Site, site
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
JOBS = 16
READS = ("_INFO", "_INFO_SINGLE")
"""How the names of the calls that ask for something end."""


@pytest.fixture(name="here", scope="module", params=["22.05", "24.11", "26.05"])
def _here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(request.param, tmp_path_factory.mktemp("site")) as made:
        yield made


def questions(here: Site) -> dict[str, int]:
    """Calls that ask for something; of sdiag's own nothing is said."""
    return {k: v for k, v in here.rig.rpcs().items() if k.endswith(READS) and not k.startswith("REQUEST_STATS")}


def asked(here: Site) -> list[str]:
    return [line for node in here.rig.nodes for line in here.rig.asked(node)]


def test_at_most_one_question_for_each_change_of_a_job_on_a_node(here: Site) -> None:
    rig = here.rig
    for observer in here.observers:
        observer.served.after(1)
    rig.forget_rpcs()
    # Each ends at a time of its own, when its daemon has asked for it: of one that ended before nothing may be asked.
    # Nothing here asks the controller anything: it counts the daemons alone.
    script = f"until [ -e {rig.inside.seen(rig.directory)}/out/end.$SLURM_JOB_ID ]; do sleep 0.1; done"
    jobs = [rig.submit(f"--nodelist={rig.nodes[n % 2]}", "--gpus=1", script=script) for n in range(JOBS)]
    for n, job in enumerate(jobs):
        here.observers[n % 2].job(job)
        (rig.directory / f"out/end.{job}").touch()
        wait_for(partial(rig.ended, job, rig.nodes[n % 2]), f"job {job} has ended")
    for observer in here.observers:
        observer.until(lambda held: not held, "nothing is held")
    billed = [observer.page().by("job_id", "job_paid_seconds_total") for observer in here.observers]
    assert [set(jobs[node::2]) for node in range(2)] == [set(each) for each in billed]
    found = questions(here)
    assert found["REQUEST_JOB_INFO_SINGLE"] >= JOBS
    assert sum(found.values()) <= 2 * JOBS, found


def test_while_no_job_changes_nothing_is_asked_and_no_command_is_started(here: Site) -> None:
    rig = here.rig
    job = rig.started("--nodes=2", "--gpus-per-node=8", script="srun sleep 1000")
    for node in range(2):
        here.holds(job, node)
    wait_for(lambda: all(o.job(job)["user"] for o in here.observers), "all is known")
    for observer in here.observers:
        observer.served.after(2)
    rig.forget_rpcs()
    before = asked(here)
    for observer in here.observers:
        observer.served.after(6)
    assert asked(here) == before
    assert questions(here) == {}
    rig.cancel_all()
