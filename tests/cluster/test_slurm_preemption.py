"""Preemption by PreemptMode=REQUEUE, as three versions of Slurm showed it: four answers of one scenario each.

Three nodes of eight GPUs; partitions gpu, normal and urgent, each of a higher PriorityTier. Job 4 (urgent) takes the
node of job 3 (normal), which later takes that of job 1 (gpu); job 2 is requeued by hand. No answer says why: squeue
had forgotten by then, and restarts are all that is left of it.
"""

from pathlib import Path

import msgspec
import pytest

from exporter.cluster.interruptions import Interruptions
from exporter.cluster.model import Jobs, Partition
from exporter.cluster.slurm import parse_jobs, parse_nodes

RECORDED = Path(__file__).parent / "recorded/preemption"
VERSIONS = ("slurm-22.05", "slurm-24.11", "slurm-26.05")
ANSWERS = ("1-running", "2-preempted", "3-cascade", "4-by-hand")


@pytest.fixture(params=VERSIONS, name="folder")
def _folder(request: pytest.FixtureRequest) -> Path:
    return RECORDED / str(request.param)


def jobs(folder: Path, name: str) -> Jobs:
    return parse_jobs((folder / f"{name}.json").read_bytes())


def run_seconds(folder: Path, job: int, before: str, after: str) -> int:
    """Return how long the job ran, from the fields themselves."""

    def number(name: str, field: str) -> int:
        answer = msgspec.json.decode((folder / f"{name}.json").read_bytes())
        (value,) = (each[field] for each in answer["jobs"] if each["job_id"] == job)
        return int(value["number"] if isinstance(value, dict) else value)

    return number(after, "submit_time") - number(before, "start_time")


def test_partitions_have_tiers_and_say_whether_their_jobs_give_way(folder: Path) -> None:
    assert parse_nodes((folder / "sinfo.txt").read_text()).partitions == {
        "gpu": Partition(1, preemptable=True),
        "normal": Partition(5, preemptable=True),
        "urgent": Partition(10, preemptable=False),
    }


def test_who_preempted_whom_and_what_it_cost(folder: Path) -> None:
    found, nodes = Interruptions(), parse_nodes((folder / "sinfo.txt").read_text())
    for minute, name in enumerate(ANSWERS):
        found.update_jobs(jobs(folder, name).runs, at=60.0 * minute)
        found.update_nodes(nodes)
    third = run_seconds(folder, 3, "1-running", "2-preempted")
    first = run_seconds(folder, 1, "1-running", "3-cascade")
    second = run_seconds(folder, 2, "1-running", "4-by-hand")
    assert [(each.job_id, each.by_job_id) for each in found.latest] == [("3", "4"), ("1", "3")]
    assert found.jobs == {
        ("normal", "preempted", "requeued"): 1,
        ("gpu", "preempted", "requeued"): 1,
        ("gpu", "unknown", "requeued"): 1,
    }
    assert found.gpu_seconds == {
        ("normal", "preempted", "requeued"): 6 * third,
        ("gpu", "preempted", "requeued"): 8 * first,
        ("gpu", "unknown", "requeued"): 4 * second,
    }
    assert found.preemptions == {("normal", "", "urgent", ""): 1, ("gpu", "", "normal", ""): 1}
    assert found.costs == {("4", "urgent"): 6 * third + 8 * first}
    assert min(first, second, third) > 0


def test_a_qos_that_preempts_another_of_the_same_partition() -> None:
    """PreemptType=preempt/qos with slurmdbd, 22.05.8: the partition shows the cluster's PreemptMode."""
    folder = RECORDED.with_name("preemption-by-qos") / "slurm-22.05"
    found, nodes = Interruptions(), parse_nodes((folder / "sinfo.txt").read_text())
    for minute, name in enumerate(ANSWERS[:2]):
        found.update_nodes(nodes)
        found.update_jobs(jobs(folder, name).runs, at=60.0 * minute)
    found.update_nodes(nodes)
    seconds = run_seconds(folder, 1, *ANSWERS[:2])
    assert found.preempted_gpu_seconds == {("gpu", "free", "gpu", "paid"): 8 * seconds}
    assert found.costs == {("2", "gpu"): 8 * seconds}
    assert seconds > 0


def _of(**more: object) -> Jobs:
    job: dict[str, object] = {"job_id": 1, "job_state": ["RUNNING"], "partition": "gpu", "nodes": "n1"}
    return parse_jobs(msgspec.json.encode({"jobs": [job | {"start_time": 100, "submit_time": 90} | more]}))


def test_a_run_its_grace_time_and_its_end() -> None:
    """Times as 22.05.8 and 24.11.5 reported them, counted from another zero."""
    (going,) = _of(qos="free").runs
    assert (going.started, going.left, going.in_grace, going.qos) == (100, 90, False, "free")
    (warned,) = _of(preempt_time=150, end_time=180).runs
    assert (warned.running, warned.in_grace, warned.cause, warned.left) == (True, True, "", 90)
    (leaving,) = _of(job_state=["PENDING", "COMPLETING"], preempt_time=150, start_time=151, restart_cnt=1).runs
    assert (leaving.started, leaving.left, leaving.cause) == (None, 150, "preempted")
    (waiting,) = _of(job_state=["PENDING"], nodes="", submit_time=155, start_time=275, restart_cnt=1).runs
    assert (waiting.started, waiting.left, waiting.cause) == (None, 155, "")
    (over,) = _of(job_state=["PREEMPTED"], preempt_time=150, end_time=180).runs
    assert (over.left, over.cause, over.ended) == (180, "preempted", True)


@pytest.mark.parametrize(
    ("mode", "preemptable"),
    [("REQUEUE", True), ("CANCEL", True), ("GANG,SUSPEND", True), ("OFF", False), ("GANG", False)],
)
def test_modes_of_preemption(mode: str, *, preemptable: bool) -> None:
    line = f"n1\x1fgpu\x1fup\x1fgpu:8\x1fgpu:0\x1fidle\x1f\x1f3\x1f{mode}\x1f"
    assert parse_nodes(line).partitions == {"gpu": Partition(3, preemptable=preemptable)}
