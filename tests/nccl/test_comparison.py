"""Comparison of two answers of RAS, on jobs with tensor, pipeline and data parallelism."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from exporter.nccl.comparison import Comparison, Culprit, compare, first_process
from exporter.nccl.ras import Process, RasAnswer, parse_answer
from tests.nccl.ras_server import communicator, document, missing_rank, rank_of

Counts = Mapping[str, Mapping[int, int]]
"""Communicator -> rank of the job -> AllReduce count."""
GROUPS = {"d0": (0, 2, 4, 6), "d1": (1, 3, 5, 7), "t0": (0, 1), "t1": (2, 3), "t2": (4, 5), "t3": (6, 7)}
"""Eight ranks: two data-parallel groups, four tensor-parallel ones."""


def process(rank: int) -> Process:
    return "10.0.0.1" if rank < 4 else "10.0.0.2", 1000 + rank, rank % 4


def member(job_rank: int, own: int, **counts: int) -> dict[str, Any]:
    host, pid, device = process(job_rank)
    return rank_of(own, host=host, pid=pid, device=device, **counts)


def answer(changes: Counts | None = None, *, lost: Iterable[int] = (), world: bool = True) -> RasAnswer:
    """The job with every count 100 except `changes`; `lost` ranks are unresponsive in all their communicators."""
    groups = GROUPS | ({"world": tuple(range(8))} if world else {})
    found = []
    for name, ranks in groups.items():
        own = (changes or {}).get(name, {})
        present = [member(r, i, AllReduce=own.get(r, 100)) for i, r in enumerate(ranks) if r not in set(lost)]
        absent = [
            missing_rank(i, host=process(r)[0], pid=process(r)[1]) | {"cuda_dev": r % 4}
            for i, r in enumerate(ranks) if r in set(lost)
        ]  # fmt: skip
        found.append(communicator(name, present, absent))
    return parse_answer(document(*found).encode())


def compared(first: RasAnswer, second: RasAnswer, **known: Iterable[int]) -> Comparison:
    """`known` are the arguments of `compare`, as ranks of the job."""
    named = {name: [process(rank) for rank in ranks] for name, ranks in known.items()}
    return compare(first, second, processes=[process(0)], **named)


def culprit(comparison: Comparison) -> Culprit:
    assert comparison.related
    assert not comparison.moving
    assert comparison.culprit is not None
    return comparison.culprit


@pytest.mark.parametrize("group", ["world", "t3", "d1"])
def test_any_count_that_moves_anywhere_in_the_job_acquits(group: str) -> None:
    """Rank 7 alone does something, in a communicator that the asking node has no part in."""
    assert compared(answer(), answer({group: {7: 101}})).moving


def test_a_communicator_that_is_new_is_movement() -> None:
    assert compared(answer(world=False), answer()).moving


def test_another_application_in_the_same_answer_neither_moves_nor_hangs_the_job() -> None:
    def other(count: int) -> dict[str, Any]:
        return communicator("ff", [rank_of(r, host="10.0.0.1", pid=9000 + r, AllReduce=count) for r in range(2)])

    def with_other(count: int) -> RasAnswer:
        extra = parse_answer(document(other(count)).encode())
        return RasAnswer((*answer({"t0": {1: 99}}).communicators, *extra.communicators))

    found = culprit(compared(with_other(1), with_other(2)))
    assert found.process == process(1)
    assert compare(with_other(1), with_other(2), processes=[("10.0.0.1", 9000, 0)]).moving


def test_a_missing_rank_is_the_culprit_whatever_the_counts() -> None:
    still = answer({"t2": {4: 101}, "world": {3: 99}}, lost=[5])
    found = culprit(compared(still, still, spinning=[3]))
    assert found == Culprit(process(5), rank="5", nvml_device=5, collective="AllReduce", sequence=100)
    assert compared(still, still, spinning=[3]).proven


def test_a_missing_rank_proves_nothing_where_the_others_wait_for_one_that_rests() -> None:
    """Rank 7 has ended and left its communicators behind; all wait for rank 0, which does something else."""
    still = answer({name: {0: 99} for name in ("world", "d0", "t0")}, lost=[7])
    waits = compared(still, still, resting=[0])
    assert culprit(waits).process == process(0)
    assert not waits.proven
    assert compared(still, still, spinning=[0]).proven, "it waits, too"
    elsewhere = compared(still, still, spinning=[4, 5, 6], long_dead=[7])
    assert culprit(elsewhere).process == process(0)
    assert not elsewhere.proven, "as another node sees it: whether rank 0 waits is not known"
    died = compared(still, still, spinning=[4, 5, 6])
    assert (culprit(died).process, died.proven) == (process(7), True), (
        "a rank that has just died has not ended long ago"
    )


def test_of_ranks_that_are_behind_one_that_rests_is_waited_for() -> None:
    """Rank 1 is behind as well, and nobody knows whether it waits."""
    still = answer({"t0": {1: 98}, "d0": {4: 99}}, lost=[7], world=False)
    assert culprit(compared(still, still)).process == process(7)
    waits = compared(still, still, resting=[4])
    assert (culprit(waits).process, waits.proven) == (process(4), False)


def test_a_missing_rank_proves_nothing_where_a_rank_rests_and_no_count_differs() -> None:
    """Stages of a pipeline wait in transfers, which are not counted, for rank 0, which does something else."""
    still = answer(lost=[7])
    assert compared(still, still).proven
    waits = compared(still, still, resting=[0])
    assert (culprit(waits).process, waits.proven) == (process(7), False)


def test_what_was_dead_before_the_spin_proves_nothing_alone() -> None:
    """RAS never forgets that it lost a process, which may train on over InfiniBand, and now save a checkpoint."""
    still = answer(lost=[0])
    alone = compared(still, still, long_dead=[0])
    assert (culprit(alone).process, alone.proven) == (process(0), False)
    waited_for = answer({"d1": {1: 99}}, lost=[0])
    assert compared(waited_for, waited_for, long_dead=[0], spinning=[1]).proven, "others wait for one that waits for it"
    both = answer(lost=[0, 5])
    assert culprit(compared(both, both, long_dead=[0])).process == process(5)
    assert compared(both, both, long_dead=[0]).proven


def test_the_job_s_rank_0_is_rank_0_everywhere() -> None:
    assert first_process(answer(lost=[0])) == {process(0)}
    assert first_process(answer(world=False)) == {process(0)}
    groups = [communicator(name, [member(r, i) for i, r in enumerate(ranks)]) for name, ranks in GROUPS.items()]
    two = parse_answer(document(*groups[2:]).encode())
    assert first_process(two) == set(), "of the tensor-parallel groups alone each has one"
    unknown = missing_rank(0) | {"pid": -1}
    assert first_process(parse_answer(document(communicator("a", [rank_of(1)], [unknown])).encode())) == set()


def test_a_rank_without_which_the_job_moved_is_not_waited_for() -> None:
    still = answer(lost=[7])
    assert compared(still, still, excused=[7]) == Comparison(related=True)
    assert culprit(compared(answer(lost=[5, 7]), answer(lost=[5, 7]), excused=[5])).process == process(7)


def test_a_rank_that_answers_again_is_not_missing() -> None:
    assert compared(answer(lost=[5]), answer()).culprit is None
    assert compared(answer(), answer(lost=[5])).culprit is None, "it may have ended just now"


def test_a_rank_that_has_left_a_communicator_is_not_missing() -> None:
    gone = communicator("e", [rank_of(0, AllReduce=1)], [missing_rank(1, unresponsive=False)])
    left = parse_answer(document(gone).encode())
    assert compare(left, left, processes=[("127.0.0.1", 1000, 0)]) == Comparison(related=True)


def test_the_culprit_is_waited_for_and_waits_for_nobody() -> None:
    """Rank 3 is stuck outside of NCCL: rank 2 waits for it, so that 0, 4 and 6 wait for 2, and 1, 5 and 7 for 3."""
    still = answer({"t1": {3: 99}, "d0": {2: 99}, "d1": {3: 99}}, world=False)
    found = culprit(compared(still, still))
    assert (found.process, found.collective, found.sequence) == (process(3), "AllReduce", 100)
    assert not compared(still, still).proven, "it may be at work, or wait for something else"
    assert found.rank == "", "no communicator has all ranks"


def test_of_several_that_wait_for_nobody_one_whose_gpu_spins_is_not_the_culprit() -> None:
    """Two pipeline stages: rank 0 receives from rank 1 (point-to-point is not counted), which is stuck."""
    groups = [
        communicator("s0", [member(0, 0, AllReduce=9), member(2, 1, AllReduce=10)]),
        communicator("s1", [member(1, 0, AllReduce=9), member(3, 1, AllReduce=10)]),
        communicator("p", [member(0, 0), member(1, 1)]),
    ]
    still = parse_answer(document(*groups).encode())
    assert culprit(compared(still, still)).process == process(0)
    assert culprit(compared(still, still, spinning=[0])).process == process(1)


def test_of_ranks_in_different_collectives_the_lonely_one_is_named() -> None:
    """Rank 2 gathers while all others reduce: each waits for the other."""
    ranks = [member(r, r, AllReduce=10 - (r == 2), AllGather=5 + (r == 2)) for r in range(4)]
    still = parse_answer(document(communicator("w", ranks)).encode())
    found = culprit(compared(still, still))
    assert (found.process, found.collective, found.sequence) == (process(2), "AllReduce", 10)
    assert compared(still, still).proven, "neither can ever join the other"


def test_ranks_in_different_collectives_prove_nothing_where_a_rank_is_behind_them_all() -> None:
    """Rank 0 runs ahead, and its ReduceScatter is counted once the host callback is called: when rank 2 has come."""
    counts = [(9, 6), (10, 5), (9, 5)]
    ranks = [member(r, r, ReduceScatter=first, AllReduce=then) for r, (first, then) in enumerate(counts)]
    late = parse_answer(document(communicator("w", ranks)).encode())
    waits = compared(late, late)
    assert (culprit(waits).process, waits.proven) == (process(2), False)
    two = parse_answer(document(communicator("w", ranks[:2])).encode())
    assert compared(two, two).proven, "each waits for the other"
    assert not compared(two, two, resting=[0]).proven, "it waits nowhere"


def test_ranks_of_pods_may_have_one_name() -> None:
    """With the host's network each is pid 1 and device 0 of the node."""
    pods = [rank_of(r, host=f"10.0.0.{1 + r // 2}", pid=1, device=0, AllReduce=7 - (r == 3)) for r in range(4)]
    pair = [rank_of(0, host="10.0.0.2", pid=1, device=0, AllReduce=3), rank_of(1, host="10.0.0.2", pid=1, device=0)]
    own = [("10.0.0.1", 1, 0)]
    world = parse_answer(document(communicator("w", pods)).encode())
    found = compare(world, world, processes=own).culprit
    assert found is not None
    assert (found.process, found.rank) == (("10.0.0.2", 1, 0), "3")
    groups = parse_answer(document(communicator("w", [each | {"collective_counts": {}} for each in pods]),
                                   communicator("p", pair)).encode())  # fmt: skip
    found = compare(groups, groups, processes=own).culprit
    assert found is not None
    assert (found.rank, found.sequence) == ("", 1), "which of them is rank 1 of the pair is not known"
    pair[1]["collective_counts"] = {"Broadcast": 1}
    mixed = parse_answer(document(communicator("w", pods), communicator("p", pair)).encode())
    assert not compare(mixed, mixed, processes=own).proven, "nor who of them waits"


def test_ranks_that_are_further_behind_one_another_are_in_one_sequence() -> None:
    """Each is at another place of the same program: the first may be at work, and the others wait for it."""
    ranks = [member(r, r, AllReduce=10 + (r > 1), AllGather=5 + (r > 2), Reduce=r) for r in range(4)]
    still = parse_answer(document(communicator("w", ranks)).encode())
    assert not compared(still, still).proven


def test_transfers_between_two_ranks_have_no_common_order() -> None:
    """Should RAS count them one day: stages of a pipeline send and receive different numbers."""
    ranks = [member(0, 0, AllReduce=9, Send=4), member(1, 1, AllReduce=10, Send=1)]
    still = parse_answer(document(communicator("w", ranks)).encode())
    assert not compared(still, still).proven


def test_of_equal_ranks_the_one_furthest_behind_is_named() -> None:
    still = answer({"world": {5: 98, 6: 97, 7: 98}})
    found = culprit(compared(still, still))
    assert (found.process, found.rank, found.sequence) == (process(6), "6", 98)


def test_nothing_is_known_if_no_count_differs() -> None:
    assert compared(answer(), answer()) == Comparison(related=True)


def test_answers_without_a_common_communicator_are_not_compared() -> None:
    elsewhere = parse_answer(document(communicator("ff", [rank_of(0, AllReduce=1)])).encode())
    assert compared(answer(), elsewhere) == Comparison(related=False)
    assert compared(elsewhere, answer()) == Comparison(related=False)
    assert compared(RasAnswer(()), RasAnswer(())) == Comparison(related=False)


def test_a_missing_rank_of_a_job_without_collectives_has_no_collective() -> None:
    still = parse_answer(document(communicator("a", [rank_of(0), rank_of(1)], [missing_rank(2)])).encode())
    found = compare(still, still, processes=[("127.0.0.1", 1000, 0)]).culprit
    assert found is not None
    assert (found.rank, found.collective, found.sequence) == ("2", "", None)
