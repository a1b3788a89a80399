"""`gpu-efficiency cluster` on a real Slurm: its page says what this test submitted, and the controller hardly notices.

Four nodes of eight GPUs on two switches, of each version of Slurm that is here.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from exporter.clock import SystemClock
from exporter.cluster.metrics import page
from exporter.cluster.slurm import SlurmCluster
from exporter.cluster.watcher import ClusterWatcher
from exporter.schedulers.slurm.client import Commands
from tests.e2e.running import Page, Program, command, environment, running
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import root_of
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
REFRESH = 60.0
_CALLS_OF_OURS = re.compile(r"REQUEST_(JOB_INFO|NODE_INFO|PARTITION_INFO|RESERVATION_INFO|TOPO_INFO|FED_INFO)\w*")
_WAITING = {"resources", "priority", "node_unavailable", "none"}
"""Which of these Slurm says of a job that waits for its turn depends on when it last looked at it."""


@pytest.fixture(scope="module", params=["22.05", "24.11", "26.05"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmRig]:
    with SlurmRig(Plan(nodes=4, root=root_of(request.param))) as rig:
        one, two, three, four = rig.nodes
        rig.stop_controller()
        with rig.conf.open("a") as file:
            file.write("TopologyPlugin=topology/tree\nPrivateData=jobs\n")
            file.write("PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n")
            file.write(f"PartitionName=late Nodes={one},{two} MaxTime=7-0 DefMemPerCPU=100 State=UP\n")
            urgent = "PriorityTier=10 PreemptMode=OFF MaxTime=7-0 DefMemPerCPU=100 State=UP"
            file.write(f"PartitionName=urgent Nodes={one},{two} {urgent}\n")
        leaves = f"SwitchName=leaf1 Nodes={one},{two}\nSwitchName=leaf2 Nodes={three},{four}\n"
        (rig.conf.parent / "topology.conf").write_text(leaves + "SwitchName=top Switches=leaf[1-2]\n")
        rig.start_controller()
        yield rig


@pytest.fixture
def rig(cluster: SlurmRig) -> Iterator[SlurmRig]:
    yield cluster
    for partition in ("late", "urgent", "gpu"):
        cluster.run("scancel", f"--partition={partition}", check=False)
    cluster.cancel_all()


class Seen:
    """A watch on the rig whose turns are taken by hand."""

    def __init__(self, rig: SlurmRig, run: Callable[..., str] | None = None) -> None:
        run = run or Commands(bin_dir=str(rig.commands(rig.nodes[0]))).output
        self._clock = SystemClock()
        self.watch = ClusterWatcher(
            SlurmCluster(run, refresh_seconds=REFRESH), self._clock, refresh_seconds=REFRESH, max_jobs=100
        )

    def turns(self, number: int = 2) -> Page:
        """So many looks at once; two ask for everything."""
        for _ in range(number):
            self.watch.turn()
            assert not self.watch.error
        return self.page()

    def page(self) -> Page:
        """What it says now."""
        return Page(page(self.watch.view, now=self._clock.now()).decode())


def by(page_: Page, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Values of one metric by some of its labels; parts that are 0 are left out."""
    rows = page_.rows(f"cluster_{name}")
    return {tuple(pairs[label] for label in labels): float(value) for pairs, value in rows if value}


def test_queue_nodes_and_placement_are_what_was_submitted(rig: SlurmRig) -> None:
    """Held back by memory, so that GPUs lie free while jobs wait for them."""
    one, two, three, four = rig.nodes
    whole = rig.started("--gpus-per-node=h100:4", "-N2", f"-w{one},{two}")
    split = rig.started("--gpus=6", "-N2", f"-w{two},{three}", "--gres-flags=disable-binding")
    hog = rig.started("--mem=60000", f"-w{four}", "--gres=gpu:1")
    rig.started(f"-w{one}")
    began = time.time()
    rig.submit("--mem=60000", f"-w{four}", "--gres=gpu:h100:5", "--nice=1")
    rig.submit("--mem=60000", f"-w{four}", "--gres=gpu:2", "--array=0-4", "--nice=2")
    rig.submit("--gpus=24", "-N3", "--nice=3")
    rig.submit("--hold", "--gres=gpu:8")
    rig.submit("--begin=now+3600", "--gres=gpu:3", "-plate")
    rig.submit(f"--dependency=afterok:{hog}", "--gres=gpu:2", "--array=1-3")
    rig.submit("--mem=60000", f"-w{four}")
    seen = Seen(rig)
    wait_for(lambda: by(seen.turns(), "queue_jobs", "reason").keys() >= {("held",), ("dependency",)}, "reasons")
    found = seen.turns()
    jobs, gpus = by(found, "queue_jobs", "partition", "reason"), by(found, "queue_gpus", "partition", "reason")
    waiting = {key: count for key, count in jobs.items() if key[1] in _WAITING}
    assert sum(waiting.values()) == 1 + 5 + 1, jobs
    assert sum(gpus[key] for key in waiting) == 5 + 10 + 24
    assert {key: jobs[key] for key in jobs.keys() - waiting.keys()} == {
        ("gpu", "held"): 1,
        ("late", "begin_time"): 1,
        ("gpu", "dependency"): 3,
    }
    assert {key: gpus[key] for key in gpus.keys() - waiting.keys()} == {
        ("gpu", "held"): 8,
        ("late", "begin_time"): 3,
        ("gpu", "dependency"): 6,
    }
    (wait,) = by(found, "queue_longest_wait_seconds", "partition").items()
    assert wait[0] == ("gpu",)
    assert 0 <= wait[1] <= time.time() - began + 2
    _check_fitting_and_nodes(rig, found)
    spans = by(found, "job_span", "job_id", "level")
    fewest = by(found, "job_span_fewest", "job_id", "level")
    assert by(found, "job_gpus", "job_id") == {(whole,): 8, (split,): 6}
    assert spans == {(whole, "node"): 2, (whole, "switch"): 1, (split, "node"): 2, (split, "switch"): 2}
    assert fewest == {(whole, "node"): 1, (whole, "switch"): 1, (split, "node"): 1, (split, "switch"): 1}


def _check_fitting_and_nodes(rig: SlurmRig, found: Page) -> None:
    """The fourth node has 7 free: 5 for the first job, 2 for one task of the array; 24 on three nodes are not free."""
    assert sum(by(found, "queue_fitting_jobs", "partition", "reason").values()) == 2
    assert sum(by(found, "queue_fitting_gpus", "partition", "reason").values()) == 7
    assert by(found, "node_expected_gpus", "node", "gpu_type") == {(node, "h100"): 8.0 for node in rig.nodes}
    given = by(found, "node_allocated_gpus", "node")
    one, _, _, four = rig.nodes
    assert given[one,] == 4
    assert given[four,] == 1
    assert sum(given.values()) == 8 + 6 + 1
    assert by(found, "partition_free_gpus", "partition")["gpu",] == 32 - 15


def test_three_calls_a_look_at_most(rig: SlurmRig) -> None:
    """By the controller's own count."""
    rig.started("--gres=gpu:2")
    seen = Seen(rig)
    looks = []
    for _ in range(6):
        rig.forget_rpcs()
        seen.turns(1)
        looks.append({name: count for name, count in rig.rpcs().items() if _CALLS_OF_OURS.match(name)})
    assert [sum(look.values()) for look in looks] == [3, 3, 3, 2, 3, 2]
    assert looks[0] == {"REQUEST_JOB_INFO": 1, "REQUEST_NODE_INFO": 1, "REQUEST_PARTITION_INFO": 1}
    assert looks[3] == {"REQUEST_JOB_INFO": 1, "REQUEST_RESERVATION_INFO": 1}


def test_reservations_and_node_states(rig: SlurmRig) -> None:
    one, two, *_ = rig.nodes
    start = int(time.time()) + 3600
    when = f"StartTime={time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(start))}"
    words = (when, "Duration=60", f"Nodes={two}", "Users=root", "Flags=MAINT")
    rig.run("scontrol", "create", "reservation", "ReservationName=upkeep", *words)
    rig.started("--gres=gpu:2", f"-w{one}")
    rig.drain(one)
    rig.drain(two)
    try:
        found = Seen(rig).turns()
    finally:
        rig.undrain(one)
        rig.undrain(two)
        rig.run("scontrol", "delete", "ReservationName=upkeep")
    assert by(found, "reservation_gpus", "reservation") == {("upkeep",): 8}
    assert by(found, "reservation_start_timestamp_seconds", "reservation") == {("upkeep",): start}
    assert by(found, "reservation_end_timestamp_seconds", "reservation") == {("upkeep",): start + 3600}
    states = [pairs["state"] for pairs, _ in sorted(found.rows("cluster_node_state"), key=lambda row: row[0]["node"])]
    assert states == ["draining", "drained", "idle", "idle"]
    assert by(found, "partition_free_gpus", "partition") == {("gpu",): 16}, "the others have drained nodes alone"


def _is_back(rig: SlurmRig, node: str) -> bool:
    """Resume the node as an operator does: its slurmd may have registered before it was set to DOWN."""
    if "down" not in rig.run("sinfo", "-h", "-n", node, "-o", "%T"):
        return True
    rig.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # refused if it has just come back
    return False


def test_a_requeue_by_hand_and_one_by_a_node_that_died(rig: SlurmRig) -> None:
    one, two, *_ = rig.nodes
    by_hand = rig.started("--gres=gpu:3", f"-w{one}")
    lost = rig.started("--gres=gpu:4", "-N2", f"-w{one},{two}")
    seen = Seen(rig)
    assert not by(seen.turns(), "interruptions_total", "cause")
    rig.requeue(by_hand)
    found = seen.turns(3)
    assert by(found, "interruptions_total", "partition", "cause", "outcome") == {("gpu", "unknown", "requeued"): 1}
    assert by(found, "interrupted_gpus_total", "cause") == {("unknown",): 3}
    pid = int((rig.directory / f"spool/slurmd-{two}.pid").read_text())
    os.kill(pid, 9)
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "slurmd has gone")
    rig.run("scontrol", "update", f"NodeName={two}", "State=DOWN", "Reason=lost")
    try:
        rig.wait(lost, "PENDING")
        for _ in range(3):  # its child that outlives it, in 24.11, brings the node back within seconds
            rig.run("scontrol", "update", f"NodeName={two}", "State=DOWN", "Reason=lost")
            found = seen.turns(1)
    finally:
        rig.start_node(two)
        wait_for(lambda: _is_back(rig, two), f"{two} is back")
    assert by(found, "interruptions_total", "cause") == {("unknown",): 1, ("node_failure",): 1}
    assert by(found, "interrupted_gpus_total", "cause") == {("unknown",): 3, ("node_failure",): 8}
    (event,) = by(found, "node_failure_timestamp_seconds", "node", "job_id", "partition")
    assert event == (two, lost, "gpu")


def test_a_requeue_by_preemption_names_who_took_the_place(rig: SlurmRig) -> None:
    one, two, *_ = rig.nodes
    victim = rig.started("--gres=gpu:4", "-N2", f"-w{one},{two}", "--time=60")
    seen = Seen(rig)
    assert not by(seen.turns(), "interruptions_total", "cause")
    began = _field(rig, victim, "StartTime")
    wait_for(lambda: time.time() > began + 2, "it has done something that can be lost")
    high = rig.wait(rig.submit("-purgent", "--gres=gpu:8", f"-w{two}", "--time=60"), "RUNNING")
    rig.wait(victim, "PENDING")
    wait_for(lambda: "COMPLETING" not in rig.run("squeue", "-h", "-o", "%T"), "nothing shows it any more")
    seconds = _field(rig, victim, "SubmitTime") - began
    found = seen.turns(3)
    assert by(found, "interruptions_total", "partition", "cause", "outcome") == {("gpu", "preempted", "requeued"): 1}
    assert by(found, "preemptions_total", "partition", "by_partition") == {("gpu", "urgent"): 1}
    assert by(found, "preempted_gpu_seconds_total", "by_partition") == {("urgent",): 8 * seconds}
    assert by(found, "interrupted_gpu_seconds_total", "cause") == {("preempted",): 8 * seconds}
    assert by(found, "preemption_cost_gpu_seconds", "job_id", "partition") == {(high, "urgent"): 8 * seconds}
    assert list(by(found, "preemption_timestamp_seconds", "job_id", "by_job_id")) == [(victim, high)]


def _field(rig: SlurmRig, job: str, name: str) -> float:
    """Return a time of a job, Unix seconds."""
    (said,) = re.findall(rf"\b{name}=(\S+)", rig.run("scontrol", "show", "job", job))
    return time.mktime(time.strptime(said, "%Y-%m-%dT%H:%M:%S"))


def test_jobs_that_are_hidden_from_this_user_are_no_empty_queue(rig: SlurmRig) -> None:
    rig.started("--gres=gpu:2")
    seen = Seen(rig, partial(rig.run, user="bin:bin"))
    seen.turns(1)
    seen.watch.turn()
    assert re.search("jobs: squeue lists no job, but 2 GPUs are allocated: with PrivateData=jobs", seen.watch.error)


def test_a_controller_that_is_down_and_comes_back(rig: SlurmRig) -> None:
    rig.submit("--gres=gpu:8", "--hold")
    seen = Seen(rig)
    seen.turns()
    rig.stop_controller()
    try:
        seen.watch.turn()
    finally:
        rig.start_controller()
    assert re.search("slurm controller|slurmctld", seen.watch.error)
    found = seen.page()
    assert float(found.total("cluster_failed_questions_total", kind="silent")) == 1, "and then asked no more"
    assert sum(by(found, "node_expected_gpus", "node").values()) == 32
    assert by(seen.turns(), "queue_gpus", "reason") == {("held",): 8}


def test_the_command_serves_it(rig: SlurmRig, tmp_path: Path) -> None:
    rig.started("--gres=gpu:2", "--job-name=a-secret-of-the-user's")
    rig.submit("--gres=gpu:8", "--hold")
    rig.forget_rpcs()
    config = tmp_path / "cluster.toml"
    config.write_text(f'[slurm]\nbin_dir = "{rig.commands(rig.nodes[0])}"\n[cluster]\nrefresh_seconds = 20\n')
    words = command("cluster", "--config", f"{config}", "--cluster.listen-address", "127.0.0.1:0")
    with running(words, tmp_path / "cluster.log", environment()) as program:
        port = wait_for(lambda: _port(program), "it says where it serves")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            wait_for(lambda: client.get("/readyz").status_code == 200, "it is ready")
            found = Page(client.get("/metrics").text)
            assert by(found, "queue_gpus", "partition", "reason") == {("gpu", "held"): 8}
            assert sum(by(found, "node_expected_gpus", "node").values()) == 32
            assert "secret" not in found.text
            calls = sum(count for name, count in rig.rpcs().items() if _CALLS_OF_OURS.match(name))
            assert calls == 3
        assert program.end() == 0
        assert "Traceback" not in program.log()


def _port(program: Program) -> int:
    found = program.alive() and re.search(r"serving http://\S+:(\d+)/", program.log())
    return int(found[1]) if found else 0


def test_no_scheduler_anywhere_is_said(tmp_path: Path) -> None:
    words = command("cluster", "--cluster.listen-address", "127.0.0.1:0")
    with running(words, tmp_path / "cluster.log", environment(PATH="/nowhere")) as program:
        assert program.gone() == 2
        assert "squeue" in program.log()
