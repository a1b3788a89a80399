"""Fitting of pending jobs: worked examples and laws."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.cluster.analysis import allowed_nodes, fitting_jobs
from exporter.cluster.model import ClusterNode, Demand, NodeRequirements, PendingJob, Reservation

ALL = {"": frozenset(f"n{number}" for number in range(10))}


def job(*parts: Demand, name: str = "j", count: int = 1, priority: int = 0, reason: str = "resources") -> PendingJob:
    return PendingJob(name, "gpu", reason, parts, count=count, since=0.0, priority=priority)


def fits(
    *jobs: PendingJob, free: Mapping[str, int], usable: Mapping[str, frozenset[str]] | None = None
) -> dict[str, int]:
    found = fitting_jobs(jobs, {node: {"h100": count} for node, count in free.items()}, usable=usable or ALL)
    return {each.job_id: count for each, count in found}


def test_two_nodes_of_four_need_two_nodes_that_have_four() -> None:
    demand = Demand(8, 4, 2)
    assert fits(job(demand), free={"n1": 8, "n2": 3}) == {}
    assert fits(job(demand), free={"n1": 8, "n2": 4}) == {"j": 1}


def test_what_may_be_split_is_split() -> None:
    assert fits(job(Demand(10)), free={"n1": 4, "n2": 6}) == {"j": 1}
    assert fits(job(Demand(11)), free={"n1": 4, "n2": 6}) == {}
    assert fits(job(Demand(10, most_nodes=1)), free={"n1": 4, "n2": 6}) == {}
    assert fits(job(Demand(4, nodes=2)), free={"n1": 8}) == {}
    assert fits(job(Demand(4, nodes=2)), free={"n1": 8, "n2": 1}) == {"j": 1}


def test_each_node_that_is_asked_for_gets_its_part() -> None:
    """4 on two nodes are 3 + 1, not 4 + 0, where only one is free on the second."""
    two = job(Demand(4, nodes=2), name="two", priority=9)
    assert fits(two, job(Demand(1, 1), name="one", count=9), free={"n1": 8, "n2": 1}) == {"two": 1, "one": 5}
    here = PendingJob("here", "gpu", "resources", (Demand(1, 1, place="n2"),))
    found = fits(two, here, free={"n1": 8, "n2": 1}, usable=ALL | {"n2": frozenset({"n2"})})
    assert found == {"two": 1}


def test_priority_decides_and_a_job_too_big_does_not_block_the_next() -> None:
    big, small = job(Demand(8, 8), name="big", priority=9), job(Demand(2, 2), name="small", priority=1)
    also = job(Demand(2, 2), name="also", priority=5)
    assert fits(small, big, also, free={"n1": 3}) == {"also": 1}
    assert fits(small, big, also, free={"n1": 8, "n2": 2}) == {"big": 1, "also": 1}


def test_of_equal_priority_the_longest_waiting_goes_first() -> None:
    early = PendingJob("early", "gpu", "resources", (Demand(2, 2),), since=10.0)
    late = PendingJob("late", "gpu", "resources", (Demand(2, 2),), since=20.0)
    assert [each.job_id for each, _ in fitting_jobs([late, early], {"n1": {"h100": 2}}, usable=ALL)] == ["early"]


def test_small_jobs_leave_whole_nodes_whole() -> None:
    small, whole = job(Demand(2, 2), name="small", priority=9), job(Demand(8, 8), name="whole")
    assert fits(small, whole, free={"n1": 8, "n2": 3}) == {"small": 1, "whole": 1}


def test_tasks_of_an_array_fit_one_by_one() -> None:
    assert fits(job(Demand(3, 3), count=1000), free={"n1": 8, "n2": 4}) == {"j": 3}


def test_a_job_of_several_parts_fits_whole_or_not_at_all() -> None:
    both = job(Demand(3, 3), Demand(8, 8), name="both", priority=9)
    after, little = job(Demand(8, 8), name="after"), job(Demand(3, 3), name="little")
    assert fits(both, after, free={"n1": 8}) == {"after": 1}, "what was tried for the first is given back"
    assert fits(both, little, free={"n1": 8, "n2": 4}) == {"both": 1}


def test_types_count() -> None:
    free = {"n1": {"h100": 4, "a100": 4}}
    assert fitting_jobs([job(Demand(5, 5, type="h100"))], free, usable=ALL) == []
    assert len(fitting_jobs([job(Demand(8, 8)), job(Demand(1, 1))], free, usable=ALL)) == 1


@pytest.mark.parametrize("reason", ["held", "dependency", "begin_time", "gated", "impossible", "starting"])
def test_what_waits_for_something_else_does_not_fit(reason: str) -> None:
    assert fits(job(Demand(1, 1), reason=reason), free={"n1": 8}) == {}


def test_a_job_uses_only_nodes_that_it_may() -> None:
    far = PendingJob("j", "gpu", "resources", (Demand(1, 1, place="far"),))
    assert fits(far, free={"n1": 8}, usable={"far": frozenset({"n2"})}) == {}
    assert fits(far, free={"n2": 8}, usable={"far": frozenset({"n2"})}) == {"j": 1}
    assert fits(far, free={"n2": 8}, usable={}) == {}


def node(name: str, **more: object) -> ClusterNode:
    usual = {"state": "idle", "partitions": ("gpu",), "open_partitions": ("gpu",)}
    return ClusterNode(name, {"h100": 8}, **(usual | more))  # type: ignore[arg-type]


def names(
    place: NodeRequirements, *nodes: ClusterNode, reservations: tuple[Reservation, ...] = (), now: float = 50.0
) -> set[str]:
    return set(allowed_nodes({"x": place}, nodes, reservations=reservations, now=now)["x"])


def test_partition_features_and_names() -> None:
    one, two = node("n1", features=frozenset({"h100", "ib"})), node("n2", open_partitions=())
    assert names(NodeRequirements(("gpu",)), one, two) == {"n1"}
    assert names(NodeRequirements(("cpu", "gpu")), one) == {"n1"}
    assert names(NodeRequirements(features=frozenset({"ib"})), one, two) == {"n1"}
    assert names(NodeRequirements(choices=(frozenset({"eth", "ib"}),)), one, two) == {"n1"}
    assert names(NodeRequirements(required=frozenset({"n2"})), one, two) == {"n2"}
    assert names(NodeRequirements(excluded=frozenset({"n2"})), one, two) == {"n1"}
    assert names(NodeRequirements(known=False), one, two) == set()


def test_taints_must_be_tolerated() -> None:
    tainted = node("n1", taints=frozenset({"gpu=:NoSchedule"}))
    assert names(NodeRequirements(), tainted) == set()
    assert names(NodeRequirements(tolerated=frozenset({"gpu=:NoSchedule", "other"})), tainted) == {"n1"}


def test_a_reservation_is_its_jobs_alone() -> None:
    kept, other = node("n1", state="reserved"), node("n2")
    whole = Reservation("r", 0.0, 100.0, ("n1",))
    assert names(NodeRequirements(), kept, other, reservations=(whole,)) == {"n2"}
    assert names(NodeRequirements(reservation="r"), kept, other, reservations=(whole,)) == {"n1"}
    assert names(NodeRequirements(reservation="r"), kept, other, reservations=(whole,), now=200.0) == set(), (
        "it is over"
    )
    assert names(NodeRequirements(reservation="unheard"), kept, other, reservations=(whole,)) == set()


def test_a_node_reserved_in_part_is_still_open_to_all() -> None:
    part = Reservation("r", 0.0, 100.0, ("n1",), whole=False)
    assert names(NodeRequirements(), node("n1", state="reserved"), reservations=(part,)) == {"n1"}


@pytest.mark.parametrize("state", ["drained", "draining", "down", "maintenance", "cordoned", "not_ready", "unknown"])
def test_a_node_that_takes_no_work_has_nothing_free(state: str) -> None:
    assert node("n1", state=state).free == {}
    assert names(NodeRequirements(), node("n1", state=state)) == set()


def test_broken_gpus_are_not_free() -> None:
    assert node("n1", used={"h100": 5}, broken={"h100": 2}).free == {"h100": 1}


DEMANDS = st.builds(
    lambda each, nodes, split, most, kind: Demand(
        each * nodes, 0 if split else each, nodes, max(most, nodes) if most else 0, kind
    ),
    st.integers(1, 9),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from(["", "h100", "a100"]),
)
JOBS = st.lists(
    st.builds(
        PendingJob,
        st.integers().map(str),
        st.just("gpu"),
        st.sampled_from(["resources", "priority", "held", "limit"]),
        st.lists(DEMANDS, max_size=2).map(tuple),
        count=st.integers(1, 5),
        since=st.none() | st.floats(0, 1e9),
        priority=st.integers(0, 3),
    ),
    max_size=12,
)
FREE = st.dictionaries(
    st.sampled_from(sorted(ALL[""])),
    st.dictionaries(st.sampled_from(["h100", "a100"]), st.integers(1, 8), max_size=2),
    max_size=6,
)


@given(JOBS, FREE)
def test_never_more_than_wait_and_never_more_than_is_free(
    jobs: list[PendingJob], free: dict[str, dict[str, int]]
) -> None:
    before = {node: dict(kinds) for node, kinds in free.items()}
    found = fitting_jobs(jobs, free, usable=ALL)
    assert free == before, "what was handed in is not touched"
    assert all(0 < count <= each.count for each, count in found)
    taken = sum(each.gpus // each.count * count for each, count in found)
    assert taken <= sum(sum(kinds.values()) for kinds in free.values())
    for kind in ("h100", "a100"):
        wanted = sum(part.gpus * count for each, count in found for part in each.parts if part.type == kind)
        assert wanted <= sum(kinds.get(kind, 0) for kinds in free.values())
    assert not any(each.reason == "held" for each, _ in found)


@given(JOBS, FREE)
def test_more_room_never_leaves_the_first_out(jobs: list[PendingJob], free: dict[str, dict[str, int]]) -> None:
    """The packing is greedy, so only the job of the highest priority is sure to profit from an empty node."""
    ready = [each for each in jobs if each.parts and each.reason != "held"]
    if not ready:
        return
    first = min(ready, key=lambda each: (-each.priority, each.since or 0.0))
    more = free | {"n9": {"h100": 8, "a100": 8}}

    def room(space: dict[str, dict[str, int]]) -> bool:
        return any(each is first for each, _ in fitting_jobs(jobs, space, usable=ALL))

    assert not room({k: v for k, v in free.items() if k != "n9"}) or room(more)
