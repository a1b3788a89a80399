"""Placement of running jobs: worked examples and laws."""

from hypothesis import given
from hypothesis import strategies as st

from exporter.cluster.analysis import Spread, spread
from exporter.cluster.model import ClusterJob, ClusterNode

LEAVES = {"switch": {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}}


def node(name: str, gpus: int = 8, kind: str = "h100", **groups: str) -> ClusterNode:
    return ClusterNode(name, {kind: gpus}, partitions=("gpu",), groups=groups)


NODES = tuple(node(f"n{number}") for number in (1, 2, 3, 4))


def run(job_id: str = "1", **gpus: int) -> ClusterJob:
    return ClusterJob(job_id, "gpu", gpus, tuple(gpus), running=True)


def levels(found: Spread, job_id: str = "1") -> dict[str, tuple[int, int]]:
    return {each.level: (each.spans, each.fewest) for each in found.placements if each.job_id == job_id}


def test_sixteen_gpus_over_four_nodes_and_two_switches() -> None:
    """16 of 8 a node fill two nodes, and one switch has two."""
    found = spread([run(n1=4, n2=4, n3=4, n4=4)], NODES, groups=LEAVES, most=10)
    assert levels(found) == {"node": (4, 2), "switch": (2, 1)}


def test_as_tight_as_it_can_be() -> None:
    found = spread([run(n1=8, n2=8)], NODES, groups=LEAVES, most=10)
    assert levels(found) == {"node": (2, 2), "switch": (1, 1)}


def test_the_largest_nodes_set_the_fewest() -> None:
    nodes = (node("n1", 4), node("n2", 4), node("n3", 16))
    assert levels(spread([run(n1=4, n2=4)], nodes, groups={}, most=10)) == {"node": (2, 1)}


def test_nodes_of_another_type_or_partition_are_no_alternative() -> None:
    nodes = (
        node("n1", 4),
        node("n2", 4),
        node("n3", 16, "a100"),
        ClusterNode("n4", {"h100": 16}, partitions=("other",)),
    )
    assert levels(spread([run(n1=4, n2=4)], nodes, groups={}, most=10)) == {"node": (2, 2)}


def test_one_unknown_switch_and_switches_are_not_told() -> None:
    known = {"switch": {"n1": "s1", "n2": "s1", "n3": "s2"}}
    assert levels(spread([run(n1=4, n4=4)], NODES, groups=known, most=10)) == {"node": (2, 1)}
    assert levels(spread([run(n1=4, n2=4)], NODES, groups=known, most=10)) == {"node": (2, 1)}, "a better one may exist"


def test_a_node_outside_the_partition_without_a_switch() -> None:
    nodes = (*NODES, ClusterNode("n5", {"h100": 8}, partitions=("other",)))
    assert levels(spread([run(n1=4, n5=4)], nodes, groups=LEAVES, most=10)) == {"node": (2, 1)}


def test_nodes_of_another_type_need_no_switch() -> None:
    nodes = (*NODES, node("n5", 8, "a100"))
    assert levels(spread([run(n1=4, n2=4)], nodes, groups=LEAVES, most=10))["switch"] == (1, 1)


def test_a_node_that_nobody_knows() -> None:
    found = spread([run(n1=8, ghost=8)], NODES, groups=LEAVES, most=10)
    assert levels(found) == {}


def test_domains_and_zones_come_from_the_nodes_own_labels() -> None:
    nodes = (node("n1", nvlink_domain="d1", zone="a"), node("n2", nvlink_domain="d2", zone="a"))
    found = spread([run(n1=4, n2=4)], nodes, groups={}, most=10)
    assert levels(found) == {"node": (2, 1), "nvlink_domain": (2, 1), "zone": (1, 1)}


def test_the_largest_jobs_are_told_and_the_rest_counted() -> None:
    runs = [run("1", n1=2), run("2", n2=8), run("3", n3=4), run("4", n4=1)]
    found = spread(runs, NODES, groups={}, most=2)
    assert found.gpus == (("2", 8), ("3", 4))
    assert found.left_out == 1, "job 1; one GPU is nowhere else"


def test_a_job_that_leaves_is_not_told() -> None:
    leaving = ClusterJob("1", "gpu", {"n1": 8}, ("n1",), running=False)
    assert spread([leaving], NODES, groups={}, most=10) == Spread()


@given(st.dictionaries(st.sampled_from(["n1", "n2", "n3", "n4"]), st.integers(1, 8), min_size=1))
def test_never_fewer_than_the_fewest(gpus: dict[str, int]) -> None:
    found = spread([ClusterJob("1", "gpu", gpus, tuple(gpus), running=True)], NODES, groups=LEAVES, most=10)
    assert all(1 <= fewest <= spans for spans, fewest in levels(found).values())
    assert bool(found.placements) == (sum(gpus.values()) > 1)
