"""Comparison of two answers of RAS, on jobs with tensor, pipeline and data parallelism."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from exporter.nccl.comparison import Comparison, Culprit, compare
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


def compared(
    first: RasAnswer, second: RasAnswer, *, spinning: Iterable[int] = (), resting: Iterable[int] = ()
) -> Comparison:
    waiting, outside = [process(rank) for rank in spinning], [process(rank) for rank in resting]
    return compare(first, second, processes=[process(0)], spinning=waiting, resting=outside)


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
    changed = {"t2": {4: 101}, "world": {3: 99}}
    found = culprit(compared(answer(changed, lost=[5]), answer(changed, lost=[5])))
    assert found == Culprit(process(5), rank="5", nvml_device=5, collective="AllReduce", sequence=100)
    assert compared(answer(changed, lost=[5]), answer(changed, lost=[5])).proven


def test_a_missing_rank_proves_nothing_where_the_others_wait_for_one_that_rests() -> None:
    """Rank 7 has ended and left its communicators behind; all wait for rank 0, which does something else."""
    still = answer({name: {0: 99} for name in ("world", "d0", "t0")}, lost=[7])
    waits = compared(still, still, resting=[0])
    assert culprit(waits).process == process(0)
    assert not waits.proven
    assert compared(still, still, spinning=[0]).proven, "it waits, too"
    assert compared(still, still).proven, "whether its GPU rests is not known"


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
