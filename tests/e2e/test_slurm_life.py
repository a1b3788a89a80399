"""What becomes of jobs and nodes of a real Slurm, as the daemon tells it: steps, suspend, requeue, drain, silence."""

import socket
from collections.abc import Iterator
from decimal import Decimal

import pytest

from tests.slurm.observer import INTERVAL, REST
from tests.slurm.sites import ONE_OR_MORE, Site, site
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
SETTINGS = {"SLURM_NODE_STATE_SECONDS": "1", "SLURM_TIMEOUT_SECONDS": "2"}
FREE = ("unallocated", "free")
SITES = ("22.05", "24.11", "26.05")


on_both = pytest.mark.parametrize("site", SITES, indirect=True, scope="module")
on_one = pytest.mark.parametrize("site", ONE_OR_MORE, indirect=True, scope="module")


@pytest.fixture(name="site", scope="module")
def _site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with site(request.param, folder, SETTINGS) as made:
        yield made


@pytest.fixture(name="here")
def _here(site: Site) -> Iterator[Site]:
    """A site without a job, and with boards at rest: a busy one without an owner would be called leaked in a minute."""
    for observer in site.observers:
        observer.boards(*REST)
    yield site
    site.rig.cancel_all()


def first(here: Site) -> str:
    """The option that keeps a job on the first node, for its daemon is looked at."""
    return f"--nodelist={here.rig.nodes[0]}"


def stays(here: Site, job: str, given: set[str], *, ticks: int = 4, node: int = 0) -> None:
    """For so many ticks the job holds just that."""
    observer = here.observers[node]
    for _ in range(ticks):
        assert observer.held(observer.served.after(1)) == {job: given}


@on_one
def test_a_suspended_job_still_holds_its_gpus(here: Site) -> None:
    job = here.rig.started(first(here), "--gpus=2")
    given = here.holds(job)
    here.rig.suspend(job)
    stays(here, job, given)
    here.rig.resume(job)
    stays(here, job, given, ticks=1)


@on_both
def test_a_requeued_job_leaves_its_gpus_and_begins_anew_as_a_restart(here: Site) -> None:
    rig, observer = here.rig, here.observers[0]
    job = rig.started(first(here), "--gpus=2")
    here.holds(job)
    rig.requeue(job)
    left = observer.until(lambda held: not held, "nothing is held")
    assert left.total("seconds_total", leak="failure_recovery") == 0
    rig.release(job)
    here.holds(job)
    lost = observer.watch(lambda page: page.total("seconds_total", leak="failure_recovery"), "a restart's time")
    assert lost.total("job_seconds_total", leak="failure_recovery", job_id=job) > 0


@on_one
def test_steps_come_and_go_and_the_job_keeps_all_its_gpus(here: Site) -> None:
    script = "while sleep 0.1; do srun --gpus=1 --ntasks=1 sleep 0.2; done"
    job = here.rig.started(first(here), "--gpus=3", "--ntasks=2", script=script)
    given = here.holds(job)
    assert len(given) == 3
    stays(here, job, given, ticks=6)


@on_both
def test_a_gpu_without_a_process_is_held_and_stalled(here: Site) -> None:
    here.observers[0].served.after(2)  # a reading of the job would else begin while the boards still worked
    job = here.rig.started(first(here), "--gpus=2")
    given = here.holds(job)
    page = here.observers[0].served.after(2)
    states = page.states()
    assert {states[index] for index in given} == {("stalled", "no_process")}
    assert {states[index] for index in states.keys() - given} == {FREE}
    wait = page.by("layer", "job_seconds_total", job_id=job)
    assert wait["ectr"] == page.total("job_paid_seconds_total", job_id=job) > 0


@on_both
def test_a_drained_node_offers_nothing_but_whoever_holds_a_gpu_keeps_it(here: Site) -> None:
    rig, observer = here.rig, here.observers[0]
    job = rig.started(first(here), "--gpus=2")
    given = here.holds(job)
    rig.drain(rig.nodes[0])
    free = set(observer.page().states()) - given
    drained = observer.watch(
        lambda page: {page.states()[index] for index in free} == {("unavailable", "draining")}, "its free GPUs are told"
    )
    assert {drained.states()[index] for index in given} == {("stalled", "no_process")}
    rig.cancel(job)
    observer.watch(lambda page: set(page.states().values()) == {("unavailable", "drained")}, "all are drained")
    rig.undrain(rig.nodes[0])
    back = observer.watch(lambda page: set(page.states().values()) == {FREE}, "they are free again")
    assert back.total("seconds_total", leak="unavailable") > 0
    assert set(here.observers[1].page().states().values()) == {FREE}


@on_one
def test_without_a_controller_who_holds_what_is_known_on_and_the_silence_is_told(here: Site) -> None:
    rig, observer = here.rig, here.observers[0]
    job = rig.started(first(here), "--gpus=2", "--account=physics")
    given = here.holds(job)
    rig.stop_controller()
    try:
        before = observer.watch(lambda page: page.total("scheduler_unanswered_seconds"), "the silence is told")
        stays(here, job, given)
        during = observer.page()
        assert during.total("scheduler_unanswered_seconds") > before.total("scheduler_unanswered_seconds")
        assert during.total("faults_total", kind="controller_silent") > 0
        assert during.total("seconds_total", leak="unobserved") == before.total("seconds_total", leak="unobserved")
        assert observer.job(job)["account"] == "physics"
    finally:
        rig.start_controller()
    observer.watch(lambda page: page.total("scheduler_unanswered_seconds") == 0, "the controller answers")
    other = rig.started(first(here), "--gpus=1", "--account=chemistry")
    here.holds(other)
    wait_for(lambda: observer.job(other)["account"] == "chemistry", "the new job's account is known")


@on_one
def test_a_job_that_leaves_a_dead_socket_behind_is_not_held_for_long(here: Site) -> None:
    rig, node = here.rig, here.rig.nodes[0]
    job = rig.started(first(here), "--gpus=2")
    here.holds(job)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{rig.spool(node)}/{node}_{job}.4294967292")
    here.observers[0].served.after(2)
    rig.cancel(job)
    wait_for(lambda: rig.ended(job), "its epilog has run")
    ticks = here.observers[0].ticks()
    page = here.observers[0].until(lambda held: not held, "nothing is held")
    assert (page.total("ticks_total") - ticks) * Decimal(INTERVAL) <= 10


@on_one
def test_an_allocation_between_two_steps_is_not_lost_though_nothing_of_it_is_on_the_node(here: Site) -> None:
    """The last of its site: without an extern step or a mapping, its end is learnt only when it is next asked about."""
    rig, node = here.rig, here.rig.nodes[1]
    job = rig.allocate(f"--nodelist={node}", "--gpus=2")
    rig.begin("srun", f"--jobid={job}", "--gpus=2", "sleep", "1000")
    given = here.holds(job, node=1)
    rig.cancel(f"{job}.0")
    wait_for(lambda: not list(rig.spool(node).glob(f"*_{job}.*")), "nothing of the job is on the node")
    stays(here, job, given, ticks=8, node=1)
