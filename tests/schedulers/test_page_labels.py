"""Tests the owners that a dcgm-exporter's page names, from its lines to allocations."""

from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from exporter.agent.sampler import Collector
from exporter.config import Config, WorkloadRule, WorkloadSettings
from exporter.core.model import SECOND, UNKNOWN_JOB, Allocation, Owner
from exporter.schedulers.base import Scheduler, SchedulerState
from exporter.schedulers.kubernetes.objects import owner_of
from exporter.schedulers.page_labels import PageOwners, open_page_owners
from exporter.schedulers.rules import Rules
from exporter.sources.base import ReadResult
from exporter.workloads import OwnerLabels
from tests.rigs import FakeScheduler, FakeSource, ladder
from tests.sources.exporter_pages import gpu, source
from tests.worlds import held

POD = {"pod": "train-0", "namespace": "ml", "container": "main"}


class Node:
    """A node whose page is read by the source, one page a second, and whose labels name its owners."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.owners, self._seconds = PageOwners(rules), count()

    def see(self, *lines: str) -> SchedulerState | None:
        result: ReadResult = source("".join(lines)).read(0)
        return self.owners.poll(next(self._seconds) * SECOND, result.devices, result.owner_labels)

    def held(self, *lines: str) -> list[Allocation]:
        state = self.see(*lines)
        assert state is not None
        return sorted(state.allocations, key=lambda each: (each.uuid, each.owner.job_id))


def jobs(allocations: list[Allocation]) -> list[tuple[str, str, int | None]]:
    return [(each.uuid, each.owner.job_id, each.end and each.end // SECOND) for each in allocations]


def test_a_pod_is_named_as_the_kubernetes_scheduler_names_it_and_marked() -> None:
    (held,) = Node().held(gpu(0, None, **POD))
    assert held.owner == replace(owner_of("ml", "train-0", None, Rules()), scheduler="dcgm-exporter")
    assert (held.uuid, held.start, held.end, held.gpus) == ("GPU-0", 0, None, 1)


@pytest.mark.parametrize(
    ("labels", "job"),
    [
        ({"pod_name": "old-0", "pod_namespace": "ml", "container_name": "main"}, "ml/pod/old-0"),
        ({"exported_pod": "mine-0", "exported_namespace": "ml", "pod": "dcgm-x", "namespace": "gpu"}, "ml/pod/mine-0"),
        ({"hpc_job": "4711"}, "4711"),
        ({"hpc_job": "4711 ada"}, "4711"),
        ({"hpc_job": "4711", **POD}, "4711"),
    ],
)
def test_each_release_and_each_mapping_names_its_owner(labels: dict[str, str], job: str) -> None:
    (held,) = Node().held(gpu(0, None, **labels))
    assert (held.owner.job_id, held.owner.scheduler, held.owner.user) == (job, "dcgm-exporter", "")


def test_the_exporters_own_pod_behind_a_prometheus_owns_nothing() -> None:
    own = {"job": "dcgm", "instance": "10.0.0.1:9400", "pod": "dcgm-x", "namespace": "gpu"}
    node = Node()
    assert node.see(gpu(0, None, **own)) is None
    theirs = gpu(1, None, **own, exported_pod="train-0", exported_namespace="ml")
    assert jobs(node.held(gpu(0, None, **own), theirs)) == [("GPU-1", "ml/pod/train-0", None)]


def test_pods_that_share_a_gpu_have_a_line_each_and_containers_of_one_pod_are_one_owner() -> None:
    sharing = (
        gpu(0, None, **POD),
        gpu(0, None, **{**POD, "container": "sidecar"}),
        gpu(0, None, **{**POD, "pod": "other-0"}),
    )
    held = Node().held(*sharing, gpu(1, None, **POD))
    assert [(each.uuid, each.owner.pod, each.gpus) for each in held] == [
        ("GPU-0", "other-0", 1),
        ("GPU-0", "train-0", 2),
        ("GPU-1", "train-0", 2),
    ]


def test_instances_have_their_own_owners_and_the_rest_of_the_board_has_none() -> None:
    first, second = ({"GPU_I_ID": name, "GPU_I_PROFILE": "3g.40gb"} for name in ("1", "2"))
    held = Node().held(
        gpu(0, None, **POD), gpu(0, None, **first, **POD), gpu(0, None, **second, **{**POD, "pod": "other-0"})
    )
    assert jobs(held) == [("GPU-0/1", "ml/pod/train-0", None), ("GPU-0/2", "ml/pod/other-0", None)]


def test_an_owner_holds_from_the_first_page_that_names_it_and_its_end_is_told_once() -> None:
    node = Node()
    free = gpu(1, pod=" ").replace('pod=" "', 'pod="",namespace=""')
    assert jobs(node.held(gpu(0, None, **POD), free)) == [("GPU-0", "ml/pod/train-0", None)]
    assert [each.start for each in node.held(gpu(0, None, **POD), free)] == [0]
    ending = node.held(gpu(0, None, **{**POD, "pod": "next-0"}), free)
    assert jobs(ending) == [("GPU-0", "ml/pod/next-0", None), ("GPU-0", "ml/pod/train-0", 2)]
    assert ending[0].start == 2 * SECOND
    # Empty labels, as old releases write them: the mapping is on, and nobody holds a GPU.
    assert jobs(node.held(free)) == [("GPU-0", "ml/pod/next-0", 3)]
    assert node.held(free) == []


def test_a_page_without_labels_tells_nothing_neither_before_nor_after_others() -> None:
    node = Node()
    assert node.see(gpu()) is None
    node.held(gpu(0, None, **POD), gpu(1))
    silent = node.held(gpu(), gpu(1))
    assert [each for each in jobs(silent) if each[2] is None] == [
        ("GPU-0", UNKNOWN_JOB, None),
        ("GPU-1", UNKNOWN_JOB, None),
    ]
    assert ("GPU-0", "ml/pod/train-0", 2) in jobs(silent)


def test_what_was_held_before_another_source_was_read_is_forgotten() -> None:
    node = Node()
    node.held(gpu(0, None, **POD))
    assert node.owners.poll(SECOND, (), None) is None
    assert [each.start for each in node.held(gpu(0, None, **POD))] == [SECOND]


def test_a_gpu_that_is_missing_is_held_by_nobody() -> None:
    first, named = gpu(0, None, **POD), gpu(1, None, **POD)
    src, owners = source(first + named, first, gpu()), PageOwners()
    found = []
    for second in range(3):
        result = src.read(second * SECOND)
        state = owners.poll(second * SECOND, result.devices, result.owner_labels)
        assert state is not None
        found.append({(each.uuid, each.owner.job_id) for each in state.allocations if each.end is None})
    pod = "ml/pod/train-0"
    assert found == [{("GPU-0", pod), ("GPU-1", pod)}, {("GPU-0", pod)}, {("GPU-0", UNKNOWN_JOB)}]


@pytest.mark.parametrize(
    "labels",
    [
        {"pod": "x" * 254, "namespace": "ml"},
        {"pod": "a\\nb", "namespace": "ml"},
        {"pod": "Train", "namespace": "ml"},
        {"pod": "train-0"},
        {"pod": "train-0", "namespace": "m" * 64},
        {"pod": "train-0", "namespace": "ml/x"},
        {"hpc_job": "j" * 129},
        {"hpc_job": "1 2 3"},
        {"hpc_job": "naïve"},
    ],
)
def test_what_names_no_pod_and_no_job_is_refused_and_the_gpu_is_held_by_the_unknown(labels: dict[str, str]) -> None:
    state = Node().see(gpu(0, None, **labels), gpu(1, None, **POD))
    assert state is not None
    assert {each.uuid: each.owner.job_id for each in state.allocations} == {
        "GPU-0": UNKNOWN_JOB,
        "GPU-1": "ml/pod/train-0",
    }
    assert [(fault.kind, fault.uuid) for fault in state.faults] == [("scheduler_refused", "GPU-0")]
    assert len(state.faults[0].message) < 200


def test_a_gpu_has_64_owners_at_most() -> None:
    state = Node().see(*(gpu(0, None, **{**POD, "pod": f"train-{number}"}) for number in range(70)))
    assert state is not None
    assert len(state.allocations) == 64
    assert [fault.kind for fault in state.faults] == ["scheduler_refused"]


def test_the_operators_rules_judge_and_new_ones_too() -> None:
    node = Node(rules("nlp"))
    assert [each.owner.team for each in node.held(gpu(0, None, **POD))] == ["nlp"]
    node.owners.update(rules("vision"))
    assert [each.owner.team for each in node.held(gpu(0, None, **POD))] == ["vision"]


def rules(team: str) -> Rules:
    return Rules(WorkloadSettings(rules=(WorkloadRule(team=team, namespace="ml", scheduler="dcgm-exporter"),)))


class Labelled(FakeSource):
    """A source whose page names the owner of the first GPU."""

    def read(self, now: int) -> ReadResult:
        return replace(super().read(now), owner_labels={"GPU-0": frozenset({OwnerLabels("ml", "train-0")})})


@pytest.mark.parametrize("read", [True, False])
def test_the_agent_takes_the_pages_owners_and_new_rules_or_the_schedulers(*, read: bool) -> None:
    scheduler = FakeScheduler(held("GPU-1", Owner("41")))
    collector = Collector(ladder(Labelled()), scheduler, page_owners=PageOwners() if read else None)
    try:
        collector.update(rules("nlp"))
        found = collector.collect_now(1000 * SECOND)
    finally:
        collector.close()
    assert found.allocations is not None
    (owned,) = found.allocations
    named = owned.uuid, owned.owner.job_id, owned.owner.team
    assert named == (("GPU-0", "ml/pod/train-0", "nlp") if read else ("GPU-1", "41", ""))
    assert found.allocations_at == 1000 * SECOND


@pytest.mark.parametrize(
    ("configured", "found", "read"),
    [
        ("auto", "processes", True),
        ("auto", "slurm", False),
        ("auto", "mapping-dir", False),
        ("processes", "processes", False),
    ],
)
def test_labels_are_read_only_where_auto_found_no_scheduler(configured: str, found: str, *, read: bool) -> None:
    scheduler = cast("Scheduler", SimpleNamespace(name=found))
    assert (open_page_owners(Config(scheduler=configured), scheduler) is not None) is read
