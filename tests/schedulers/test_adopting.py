"""New rules apply to jobs that hold a GPU, without a new allocation and without a query."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from exporter.config import Exemption, WorkloadRule, WorkloadSettings
from exporter.core.model import SECOND, Allocation, Process, Reading
from exporter.schedulers.kubernetes.scheduler import WatchIntervals
from exporter.schedulers.processes import ProcessesScheduler
from exporter.schedulers.rules import Rules
from tests.kubernetes.cluster import Node, gpu_uuid, node, pod_object
from tests.schedulers import slurm_rig
from tests.schedulers.test_mapping_dir import Rig as Mapping
from tests.schedulers.test_processes import Proc, gpu

NEW = Rules(
    WorkloadSettings((WorkloadRule("interactive", team="hep", zombie_seconds=60.0, user="alice|user1001"),)),
    [Exemption("x", "because", date(2999, 1, 1), user="alice|user1001")],
)
SLOW = WatchIntervals(refresh=3600, sync=5, grace=1, settle=0, retry=0.05, publish=0.01, restart_grace=1)


def verdict(held: Allocation) -> tuple[str, str, float | None, str]:
    owner = held.owner
    return owner.team, owner.workload_class, owner.zombie_seconds, owner.exemption


BEFORE, AFTER = ("", "batch", None, ""), ("hep", "interactive", 60.0, "x")


def told(rig: slurm_rig.Rig) -> tuple[Allocation, ...]:
    state = rig.tick()
    assert state is not None
    return state.allocations


def test_slurm_s_jobs_without_another_question(tmp_path: Path) -> None:
    rig = slurm_rig.Rig(tmp_path)
    rig.socket("7")
    rig.answers.jobs["7"] = slurm_rig.job("7", 0, 1)
    first = told(rig)
    asked = list(rig.answers.asked)
    rig.scheduler.update(NEW)
    again = told(rig)
    assert [verdict(one) for one in first] == [BEFORE] * 2
    assert [verdict(one) for one in again] == [AFTER] * 2
    assert [(one.uuid, one.start, one.end) for one in again] == [(one.uuid, one.start, one.end) for one in first]
    assert rig.answers.asked == asked


def test_a_mapping_directory_s_jobs(tmp_path: Path) -> None:
    rig = Mapping(tmp_path)
    rig.write("0", "111\n")
    process = rig.process(10, environ="SLURM_JOB_ID=111")
    reading = Reading("GPU-a", 0, SECOND, processes=(process,))
    rig.look(reading)
    (first,) = rig.look(reading).allocations
    assert rig.scheduler is not None
    rig.scheduler.update(NEW)
    (again,) = rig.look(reading).allocations
    assert (verdict(first), verdict(again)) == (BEFORE, AFTER)
    assert (again.start, again.end) == (first.start, None)


def test_people_s_own_processes_by_what_they_said_at_first(tmp_path: Path) -> None:
    """Also to processes that /proc does not show; a later process of the allocation is not used."""
    proc = Proc(tmp_path)
    asked = ProcessesScheduler(proc=tmp_path, user_of=lambda _: "alice", suspended=lambda: 0)
    shown = proc.add(10, started=5.0)
    hidden = Process(99, name="/bin/hidden")
    state = asked.poll(100 * SECOND, (), [gpu(0, shown, hidden)])
    assert state is not None
    first = {one.owner.job_id: one for one in state.allocations}
    asked.update(NEW)
    state = asked.poll(101 * SECOND, (), [gpu(0, shown, hidden, at=101 * SECOND)])
    assert state is not None
    again = {one.owner.job_id: one for one in state.allocations}
    assert verdict(first["alice/train.service"]) == BEFORE
    assert verdict(again["alice/train.service"]) == AFTER
    asked.update(Rules(WorkloadSettings((WorkloadRule(team="everybody", name=".*"),))))
    state = asked.poll(101 * SECOND, (), [gpu(0, shown, hidden, at=101 * SECOND)])
    assert state is not None
    teams = {one.owner.job_id: one.owner.team for one in state.allocations}
    assert teams == {"alice/train.service": "everybody", "unknown/hidden": ""}  # no rule applies to hidden processes
    assert {job: one.start for job, one in again.items()} == {job: one.start for job, one in first.items()}
    state = asked.poll(102 * SECOND, (), [gpu(0, at=102 * SECOND)])
    assert state is not None
    assert {one.end for one in state.allocations} == {102 * SECOND}
    assert not asked._identities  # nothing is kept of ended allocations
    asked.update(Rules())  # no allocation is left
    later = proc.add(11, started=5.0, command="jupyter lab")
    state = asked.poll(103 * SECOND, (), [gpu(0, later, at=103 * SECOND)])
    assert state is not None
    assert verdict(state.allocations[0])[:2] == ("", "interactive")


@pytest.fixture(name="here")
def _here() -> Iterator[Node]:
    with node() as made:
        yield made


def lists(here: Node) -> list[str]:
    """The lists asked of the API server; the watch that follows the first of them may begin at any time."""
    return [path for path, asked in here.api.requests if "watch" not in asked]


@pytest.mark.slow
def test_pods_without_another_list(here: Node) -> None:
    """Neither kubelet nor API server are queried again: the rules are applied to what they last reported."""
    here.api.has(pod_object("train-0", labels={"hub.jupyter.org/username": "alice"}))
    here.kubelet.gives("train-0", gpu_uuid(0), gpu_uuid(1))
    scheduler = here.opens(SLOW)
    first = here.until(lambda state: len(state.allocations) == 2, "both GPUs")
    asked = here.kubelet.lists, lists(here)
    scheduler.update(NEW)
    again = here.until(lambda state: verdict(state.allocations[0]) == AFTER, "the new verdict")
    assert [verdict(one)[0] for one in first.allocations] == [""] * 2
    assert [verdict(one) for one in again.allocations] == [AFTER] * 2
    assert [(one.uuid, one.start, one.end) for one in again.allocations] == [
        (one.uuid, one.start, one.end) for one in first.allocations
    ]
    assert (here.kubelet.lists, lists(here)) == asked


def test_pods_at_once_where_nothing_else_calls_for_it() -> None:
    """Without an API server the next list would come an hour later."""
    with node(with_api=False) as alone:
        alone.kubelet.gives("train-0", gpu_uuid(0))
        scheduler = alone.opens(SLOW)
        alone.held((0, "ml/pod/train-0"))
        scheduler.update(Rules(WorkloadSettings((WorkloadRule(team="hep", namespace="ml"),))))
        alone.until(lambda state: verdict(state.allocations[0])[0] == "hep", "the new verdict")
        assert alone.kubelet.lists == 1
