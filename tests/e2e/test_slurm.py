"""The whole daemon on a real Slurm: the right GPUs for the right job, on two nodes, in both versions and trackings."""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from operator import eq
from pathlib import Path

import pytest
from msgspec import Struct

from exporter.schedulers.procfs import SLUID
from exporter.schedulers.slurm.parsing import parse_job_json
from tests.e2e.running import Page
from tests.slurm.plan import USER
from tests.slurm.processes import task
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import Site, site
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
SITES = ("22.05", "22.05 with device cgroups", "24.11 with device cgroups", "26.05 with SLUIDs")
HOUR = 3600
SPOOF = "train\n   UserId=root(0) GroupId=root(0) MCS_label=N/A\n   Priority=1 Nice=0 Account=board QOS=high"


class Crowd(Struct):
    """Jobs that run at the same time, by their numbers."""

    batch: str
    array: str
    last: str
    """The array's other task: Slurm gives it a number of its own."""
    wide: str
    """On both nodes."""
    bare: str
    """A bare srun."""
    tasks: str
    spoof: str

    def on(self, node: int) -> set[str]:
        """Those that have GPUs on a node."""
        return {self.batch, self.array, self.last, self.wide} if node == 0 else set(self.rest)

    @property
    def rest(self) -> tuple[str, ...]:
        return self.wide, self.bare, self.tasks, self.spoof


@pytest.fixture(name="here", scope="module", params=SITES)
def _here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(request.param, tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest.fixture(name="crowd", scope="module")
def _crowd(here: Site) -> Iterator[Crowd]:
    """On the second node the wide job has other indices than on the first, and so other GPUs."""
    rig = here.rig
    first, second = (f"--nodelist={node}" for node in rig.nodes)
    bare = rig.srun(second, "--gpus=1")
    batch = rig.submit(first, "--gpus=3", "--account=physics", "--time=2:00:00", "--job-name=fusion")
    array = rig.submit(first, "--gpus=1", "--array=5,7")
    wide = rig.submit("--nodes=2", "--gpus-per-node=2", script="srun sleep 1000")
    tasks = rig.submit(second, "--ntasks=2", "--gpus-per-task=1", script="srun sleep 1000")
    spoof = rig.submit(second, "--gpus=1", f"--job-name={SPOOF}", f"--comment={SPOOF}")
    for job in (batch, wide, tasks, spoof):
        rig.wait(job, "RUNNING")
    listed = wait_for(lambda: _tasks(here, array), "both tasks of the array run")
    last = next(job for job in listed if job != array)
    yield Crowd(batch, array, last, wide, bare, tasks, spoof)
    rig.cancel_all()


def _tasks(here: Site, array: str) -> list[str]:
    """Numbers of an array's tasks, once two run."""
    jobs = here.rig.run("squeue", "-h", "-t", "RUNNING", "-j", array, "-o", "%A").split()
    return jobs if len(jobs) == 2 else []


def test_each_job_has_the_gpus_that_slurmd_gave_it_and_no_other_job_has_any(here: Site, crowd: Crowd) -> None:
    for node, observer in enumerate(here.observers):
        truth = {job: here.given(job, node) for job in crowd.on(node)}
        assert all(truth.values())
        page = observer.until(partial(eq, truth), f"as given: {truth}")
        held = {index for gpus in truth.values() for index in gpus}
        assert {state for index, state in page.states().items() if index in held} == {("active", "computing")}
        assert {state for index, state in page.states().items() if index not in held} == {("unallocated", "free")}
    assert here.given(crowd.wide, 0) != here.given(crowd.wide, 1)


def test_who_a_job_is_comes_from_the_controller(here: Site, crowd: Crowd) -> None:
    here.holds(crowd.batch)
    here.observers[0].watch(lambda page: page.rows("job_info", job_id=crowd.batch, partition="gpu"), "its partition")
    said = here.observers[0].job(crowd.batch)
    known = {"name": "fusion", "user": USER, "account": "physics", "partition": "gpu", "kind": "batch"}
    assert said.items() >= known.items()
    assert said["workload_class"] == "batch"
    assert said["scheduler"] == "slurm"
    page = here.observers[0].page()
    assert page.by("job_id", "job_time_limit_seconds")[crowd.batch] == 2 * HOUR
    assert page.total("job_state_gpus", job_id=crowd.batch, state="active") == 3
    assert page.by("node", "node_info") == {here.rig.nodes[0]: 1}


def test_the_tasks_of_an_array_are_jobs_of_their_own_and_name_it(here: Site, crowd: Crowd) -> None:
    for job in (crowd.array, crowd.last):
        here.holds(job)
        said = here.observers[0].job(job)
        assert (said["array_id"], said["kind"], said["het_job_offset"]) == (crowd.array, "array", "")
    tasks = {job: here.observers[0].job(job)["array_task_id"] for job in (crowd.array, crowd.last)}
    shown = here.rig.run("squeue", "-h", "-r", "-j", crowd.array, "-t", "RUNNING", "-o", "%A %i").split("\n")
    assert {f"{job} {crowd.array}_{task}" for job, task in tasks.items()} == {line for line in shown if line}
    listed = here.observers[0].served.client.get("/api/v1/jobs").json()["jobs"]
    names = {one["owner"]["job_id"]: one["owner"]["display_id"] for one in listed}
    assert {job: names[job] for job in tasks} == {job: f"{crowd.array}_{task}" for job, task in tasks.items()}
    assert names[crowd.batch] == crowd.batch


def test_a_bare_srun_is_interactive(here: Site, crowd: Crowd) -> None:
    here.holds(crowd.bare, node=1)
    said = here.observers[1].job(crowd.bare)
    assert (said["user"], said["kind"], said["workload_class"]) == (USER, "interactive", "interactive")


def test_no_name_or_comment_of_a_job_makes_it_another_users_or_accounts(here: Site, crowd: Crowd) -> None:
    here.holds(crowd.spoof, node=1)
    said = here.observers[1].job(crowd.spoof)
    assert (said["user"], said["account"], said["qos"]) == (USER, "", "")


def test_which_rank_of_the_job_is_on_which_gpu(here: Site, crowd: Crowd) -> None:
    for rank, observer in enumerate(here.observers):
        gpus = here.holds(crowd.wide, node=rank)
        pid = wait_for(partial(task, here.rig.nodes[rank], crowd.wide, rank), "the job's task on the node")
        observer.boards(*(line for gpu in gpus for line in (f"gpu {gpu} idle", f"gpu {gpu} process {pid}")))
        told = partial(ranks_are, dict.fromkeys(gpus, f"{rank}"), crowd.wide)
        observer.watch(told, f"rank {rank} is on {gpus}")


def ranks_are(wanted: dict[str, str], job: str, page: Page) -> bool:
    return wanted == {labels["gpu"]: labels["rank"] for labels, _ in page.rows("allocation_info", job_id=job)}


def test_the_seconds_of_a_job_are_those_of_its_gpus(here: Site, crowd: Crowd) -> None:
    here.holds(crowd.batch)
    before = here.observers[0].page()
    after = here.observers[0].served.after(3)
    grown = [page.total("job_paid_seconds_total", job_id=crowd.batch) for page in (before, after)]
    board = [page.total("paid_seconds_total", gpu=next(iter(here.given(crowd.batch)))) for page in (before, after)]
    assert grown[1] - grown[0] == 3 * (board[1] - board[0]) > 0


def test_when_jobs_end_their_gpus_are_free_within_three_ticks(here: Site, crowd: Crowd) -> None:
    rig = here.rig
    rig.cancel(*crowd.on(0), *crowd.on(1))
    for node, observer in enumerate(here.observers):
        wait_for(partial(ended, rig, crowd.on(node), rig.nodes[node]), "their epilogs have run")
        ticks = observer.ticks()
        page = observer.until(lambda held: not held, "nothing is held")
        assert page.total("ticks_total") - ticks <= 3
        assert set(page.states().values()) == {("unallocated", "free")}


def ended(rig: SlurmRig, jobs: Iterable[str], node: str) -> bool:
    return all(rig.ended(job, node) for job in jobs)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("26.05 with SLUIDs", r"/{sluid}/step_(0|batch)/"),
        ("26.05 with job ids", r"/job_{job}/step_(0|batch)/"),
        ("26.05 in a slice", r"::/research\.slice/[^/]+/{sluid}/step_(0|batch)/"),
    ],
)
def test_a_process_belongs_to_its_job_however_26_05_names_the_jobs_group(name: str, group: str, tmp_path: Path) -> None:
    """With CgroupJobIdPaths=yes in cgroup.conf(5) it is the job id again; CgroupSlice names another slice.

    By default it is the SLUID, which slurmctld tells the daemon, and slurmd the scripts around the job.
    """
    with site(name, tmp_path) as here:
        node = here.rig.nodes[0]
        job = here.rig.started(f"--nodelist={node}", "--gpus=1", script="srun sleep 1000")
        (gpu,) = here.holds(job)
        pid = wait_for(partial(task, node, job, 0), "the job's task on the node")
        (told,) = parse_job_json(here.rig.run("scontrol", "show", "job", job, "--json"))
        assert re.fullmatch(SLUID, told.sluid)
        assert re.search(group.format(job=job, sluid=told.sluid), Path(f"/proc/{pid}/cgroup").read_text())
        here.observers[0].boards(f"gpu {gpu} idle", f"gpu {gpu} process {pid}")
        here.observers[0].watch(partial(ranks_are, {gpu: "0"}, job), f"rank 0 is on {gpu}")
        here.rig.cancel(job)
        here.observers[0].until(lambda held: not held, "nothing is held")
        assert here.rig.sluids(job) == [told.sluid] * 2
