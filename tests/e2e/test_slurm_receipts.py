"""Receipts of real Slurm jobs, written by the shipped epilog from the store of a running daemon.

They are in the jobs' folders, and in their accounting records, which a real slurmdbd keeps.
"""

import pwd
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.running import command
from tests.ordinary import hidden
from tests.report.commands import run
from tests.slurm.observer import REST, Observer, observed
from tests.slurm.plan import USER, Plan
from tests.slurm.receipts import install
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import ONE_OR_MORE, root_of
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
in_all_versions = pytest.mark.parametrize("cluster", ["22.05", "24.11", "26.05"], indirect=True, scope="module")
in_one_version = pytest.mark.parametrize("cluster", ONE_OR_MORE, indirect=True, scope="module")


class Cluster:
    """Two nodes with a daemon each, the epilog on both, and a folder for jobs."""

    def __init__(self, rig: SlurmRig, observers: list[Observer], stores: Path) -> None:
        self.rig, self.observers, self.stores = rig, observers, stores
        self.folder = rig.directory / "out"
        """Everybody may write there."""

    def job(self, *options: str, script: str = "sleep 2") -> str:
        return self.rig.submit("--gpus-per-node=2", self.chdir, *options, script=script)

    @property
    def chdir(self) -> str:
        """The option that makes a job's folder this one."""
        return f"--chdir={self.rig.inside.seen(self.folder)}"

    def held(self, *options: str, script: str) -> str:
        """A job of the first node that its daemon knows."""
        job = self.job(f"--nodelist={self.rig.nodes[0]}", *options, script=script)
        self.until_held(job)
        return job

    def until_held(self, job: str) -> None:
        self.observers[0].until(lambda held: job in held, f"the daemon knows job {job}")

    def command(self, job: str) -> tuple[int, str]:
        """Status and output of `gpu-efficiency report` about all nodes' stores."""
        words = [word for store in sorted(self.stores.glob("*.db")) for word in ("--store", f"{store}")]
        done = subprocess.run(command("report", job, *words), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def file(self, job: str) -> Path:
        return self.folder / f"slurm-{job}.gpu-efficiency.txt"

    def receipt(self, job: str) -> str:
        """What it says, once it is there."""
        wait_for(self.file(job).exists, f"the receipt of job {job} is there")
        return self.file(job).read_text()

    def recorded(self, job: str, field: str = "AdminComment") -> str:
        """What the job's record has in that field, as its user sees it."""
        return self.rig.run("sacct", "-X", "-n", "-P", "-j", job, f"--format={field}", user=USER).strip()

    def line(self, job: str) -> str:
        """The receipt in its accounting record, once it is there; 22.05 writes it in lower case."""
        return wait_for(lambda: self.recorded(job), f"the record of job {job} has its receipt").lower()


@pytest.fixture(name="cluster", scope="module")
def _cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("daemons")
    with ExitStack() as stack:
        rig = stack.enter_context(SlurmRig(Plan(mapping=True, accounting=True, root=root_of(request.param))))
        install(rig, "file comment admin_comment", stores=folder, more="wait=6")
        observers = []
        for node in rig.nodes:
            settings = {"SLURM_MAPPING_DIR": f"{rig.mapping(node)}", "HISTORY_FILE": f"{folder}/{node}.db"}
            settings["HISTORY_CHECKPOINT_SECONDS"] = "1"
            observers.append(stack.enter_context(observed(rig, node, folder / node, boards=REST, settings=settings)))
            (folder / f"{node}.address").write_text(observers[-1].served.url.removeprefix("http://"))
        yield Cluster(rig, observers, folder)


@in_all_versions
def test_the_user_finds_it_in_the_jobs_folder_and_the_node_takes_the_next_job(cluster: Cluster) -> None:
    job = cluster.job()
    said = cluster.receipt(job)
    assert said.startswith(f"GPU efficiency of job {job} of {USER}: ")
    assert " ended" in said.splitlines()[0], "the daemon has seen its end"
    about, user = cluster.file(job).stat(), pwd.getpwnam(USER)
    assert (about.st_uid, about.st_gid, about.st_mode & 0o777) == (user.pw_uid, user.pw_gid, 0o600)
    assert cluster.line(job).startswith(f"gpu-efficiency: job {job}: ")
    assert cluster.recorded(job, "Comment") == cluster.recorded(job), "the other comment has it too"
    assert "drain" not in cluster.rig.run("sinfo", "-h", "-o", "%t")


@in_one_version
def test_the_command_that_a_receipt_names_works_for_its_reader(cluster: Cluster) -> None:
    job = cluster.job()
    last = cluster.receipt(job).splitlines()[-1]
    where, command = last.split(": ", 1)
    assert where == f"  all of it, on node {cluster.rig.nodes[0]}"
    program, *words = shlex.split(command)
    assert (program, words[:2]) == ("gpu-efficiency", ["report", job])
    for line in (shlex.join(words[1:]), job):
        run(line)  # imports what it needs, perhaps from a folder that root alone may read
        with hidden(cluster.stores):
            status, out, err = run(line)
        assert (status, "Traceback" in out + err) == (0 if line != job else 1, False)
    assert "name a source with" in err, "no daemon at the usual address of this machine"


@in_one_version
def test_of_two_nodes_the_first_writes_its_part(cluster: Cluster) -> None:
    job = cluster.job("--nodes=2")
    said = cluster.receipt(job)
    part = f"This is the part of node {cluster.rig.nodes[0]}, one of 2; each of the others shows its own:"
    assert said.endswith(f"{part} gpu-efficiency report {job}\n")
    assert cluster.line(job).endswith(f" (part of node {cluster.rig.nodes[0]}, one of 2)")
    wait_for(lambda: cluster.rig.ended(job, cluster.rig.nodes[1]), "the other epilog has ended too")


@in_all_versions
def test_each_task_of_an_array_has_its_own_under_the_name_that_squeue_shows(cluster: Cluster) -> None:
    """The last task ends last: its own id is that of the array, and so of all tasks' records."""
    array = cluster.job("--array=1-2", script="srun sleep $((3 * SLURM_ARRAY_TASK_ID))")
    names = ("squeue", "-h", "-r", "-j", array, "-t", "RUNNING", "-o", "%i")
    both = wait_for(lambda: tasks if len(tasks := cluster.rig.run(*names).split()) == 2 else None, "both run")
    assert set(both) == {f"{array}_1", f"{array}_2"}
    cluster.line(f"{array}_2")
    for name in both:
        _has_its_own(cluster, name)
    assert f"{array} is also the id of the whole array: this report is of {array}_2 alone" in cluster.command(array)[1]


@in_all_versions
def test_each_component_of_a_heterogeneous_job_has_its_own(cluster: Cluster) -> None:
    options = [(cluster.chdir, f"--nodelist={node}", "--gpus-per-node=1") for node in cluster.rig.nodes]
    leader = cluster.rig.submit_het(*options, script="srun --het-group=0,1 sleep 3")
    names = ("squeue", "-h", "-j", leader, "-t", "RUNNING", "-o", "%i")
    both = wait_for(lambda: parts if len(parts := cluster.rig.run(*names).split()) == 2 else None, "both run")
    assert set(both) == {f"{leader}+0", f"{leader}+1"}
    for name in both:
        _has_its_own(cluster, name)


def _has_its_own(cluster: Cluster, name: str) -> None:
    """Its receipts are there, and the command finds it, each of its steps and no other job by the name in sacct."""
    assert cluster.receipt(name).startswith(f"GPU efficiency of job {name} of {USER}: ")
    assert cluster.line(name).startswith(f"gpu-efficiency: job {name}: ")
    listed = cluster.rig.run("sacct", "-n", "-P", "-j", name, "--format=JobID", user=USER).split()
    assert {name, f"{name}.0"} <= set(listed), "the step of its srun is listed"
    for asked in listed:
        status, out = cluster.command(asked)
        assert (status, out.startswith(f'Job {name} "wrap" of {USER}')) == (0, True), out
    status, out = cluster.command(f"{name}7")
    assert (status, "no source has a record of job" in out) == (1, True), out


@in_one_version
def test_the_users_own_comment_stays_and_he_cannot_change_the_other(cluster: Cluster) -> None:
    own = "mine: Ünter\n4711|4711|theirs"
    job = cluster.job(f"--comment={own}")
    said = cluster.line(job)
    assert cluster.recorded(job, "Comment") == own
    change = ("sacctmgr", "-i", "modify", "job", "where", f"jobid={job}", "set", "AdminComment=100 % useful")
    cluster.rig.run(*change, user=USER, check=False)
    assert cluster.line(job) == said


@in_one_version
def test_a_run_that_is_requeued_is_replaced_by_the_next(cluster: Cluster) -> None:
    job = cluster.held(script="sleep 1000")
    cluster.rig.requeue(job)
    cluster.receipt(job)
    before = cluster.file(job).stat().st_ino
    cluster.rig.release(job)
    cluster.until_held(job)
    cluster.rig.cancel(job)
    wait_for(lambda: cluster.file(job).stat().st_ino != before, "another file is in its place")
    assert cluster.file(job).stat().st_uid == pwd.getpwnam(USER).pw_uid
    assert cluster.line(job).startswith(f"gpu-efficiency: job {job}: ")


@in_one_version
def test_when_the_daemon_is_down_there_is_none_and_the_node_goes_on(cluster: Cluster) -> None:
    """Last: it takes the daemon away."""
    job = cluster.held(script="sleep 1000")
    assert cluster.observers[0].served.program.end() == 0
    cluster.rig.cancel(job)
    log = cluster.rig.directory / "log/receipts.log"
    wait_for(lambda: f"job {job}" in log.read_text(), "it is given up")
    assert not cluster.file(job).exists()
    wait_for(lambda: cluster.rig.run("sinfo", "-h", "-o", "%t").split() == ["idle"], "both nodes are idle")
