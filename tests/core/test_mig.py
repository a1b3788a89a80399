"""MIG: a board is one paid GPU throughout, whatever its layout.

Docstrings name a mutation with which the law was seen to fail.
"""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger, conserved
from exporter.core.model import JOULE, MS, PPM, Allocation, Device, Fault, Observation, Owner, Reading, State
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.core.test_laws import POLICY, halved, relaxed, run, signals, totals
from tests.worlds import RESTING, WORKING, S, cut, device, first, held, reading, seen

LAYOUTS = ((), (1,) * 7, (3, 3), (4, 3), (7,), (2, 2, 1), (1, 1))
"""Slices of seven: whole, full, a slice stranded, full, one instance, two slices left, five left."""
EVERY = sorted({part.uuid for layout in LAYOUTS for part in cut(*layout)})


@st.composite
def stories(draw: st.DrawFn, *, tidy: bool = False) -> list[Observation]:
    """A board with layout changes at any time, listed in any order, and readings of its parts that lead, lag or fail.

    `tidy`: no reading spans a layout change.
    """
    lag = draw(st.integers(0, 3_000)) * MS
    parts = draw(layouts())
    holds = tuple(
        Allocation(u, Owner(job_id=j), start=-1) for u in EVERY for j in draw(st.sampled_from(["", "a", "ab"]))
    )
    story = [Observation(0, 0, devices=parts, allocations=holds)]
    now, settled, read_until = 0, 0, dict.fromkeys(EVERY, 0)
    for _ in range(draw(st.integers(1, 7))):
        now += draw(st.integers(1, 4_000)) * MS
        known, parts = parts, draw(layouts()) if draw(st.booleans()) else parts
        readings = []
        if tidy and parts is not known:
            read_until = dict.fromkeys(EVERY, max(settled, *read_until.values()))
        for part in parts if tidy or draw(st.booleans()) else known:
            start = max(settled, read_until[part.uuid])
            start += draw(st.sampled_from([0, 0, 700])) * MS
            end = now - draw(st.sampled_from([0, 0, 1, 500])) * MS
            if draw(st.integers(0, 5)) and start < end:
                readings.append(Reading(part.uuid, start, end, **draw(signals())))
                read_until[part.uuid] = end
        settled = max(settled, now - lag)
        told = None if parts is known else parts
        story.append(Observation(now, now, readings=tuple(readings), devices=told, settled=settled))
    return story


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Device, ...]:
    """A board in one of its layouts, its parts in any order."""
    return tuple(draw(st.permutations(cut(*draw(st.sampled_from(LAYOUTS))))))


def ended(story: list[Observation]) -> list[Observation]:
    """The observations, and a final one that settles everything."""
    end = story[-1].at + S
    return [*story, Observation(end, end)]


@pytest.mark.untraced
@pytest.mark.slow
@relaxed
@given(stories())
def test_a_board_and_its_instances_are_one_paid_gpu_at_every_moment(story: list[Observation]) -> None:
    """Whenever the layout changes, the parts together are paid one GPU's time, to the nanosecond.

    Books may be ahead of the settled time, so all are extrapolated to one instant.
    Fails when `_repartition` omits books that lag, or begins new parts at their first reading.
    """
    ledger = Ledger(POLICY)
    for observation in ended(story):
        advance(ledger, observation)
        books = [(gpu.book, gpu.listed) for gpu in ledger.gpus.values()]
        ahead = sum((book.until // MS) * book.weight for book, listed in books if listed)
        assert sum(book.paid for book, _ in books) == ahead
        assert sum(book.weight for book, listed in books if listed) == PPM
        assert all(conserved(book) for book, _ in books)
    assert ledger.conservation_errors == 0
    assert sum(gpu.book.paid for gpu in ledger.gpus.values()) == ledger.at


@pytest.mark.untraced
@pytest.mark.slow
@relaxed
@given(stories())
def test_jobs_are_paid_what_their_instances_are(story: list[Observation]) -> None:
    """Per leak, allocated parts of a board equal the jobs' books, with one owner or two.

    Fails when `_split_among_owners` gives one owner the whole of a GPU where it holds a part.
    """
    holds = {h.uuid for h in story[0].allocations or ()}
    ledger = run(ended(story))
    by_leak = zip(*(gpu.book.parts for u, gpu in ledger.gpus.items() if u in holds), [0] * len(LEAK_NAMES), strict=True)
    jobs = zip(*(job.book.parts for job in ledger.jobs.values()), [0] * len(LEAK_NAMES), strict=True)
    assert [sum(column) for column in jobs] == [sum(column) for column in by_leak]
    assert all(sum(job.book.parts) == job.book.paid for job in ledger.jobs.values())


@pytest.mark.untraced
@pytest.mark.slow
@relaxed
@given(stories(tidy=True))
def test_cutting_the_readings_of_instances_changes_no_total(story: list[Observation]) -> None:
    """Splitting each reading in two gives the same books.

    Fails when `_repartition` places the edge at the settled time.
    """
    assert totals(run(ended(halved(story)))) == totals(run(ended(story)))


@relaxed
@given(signals(), st.integers(1, 7), st.integers(1, 3), st.integers(1, 2))
@example(WORKING | {"nvlink_rx_bytes_per_second": 60e9}, 3, 1, 2)
@example(WORKING | {"nvlink_rx_bytes_per_second": 60e9}, 7, 3, 2)
def test_a_part_of_a_gpu_loses_what_a_whole_one_would_in_proportion(
    made: dict[str, Any], slices: int, sharers: int, gpus: int
) -> None:
    """The same second on k of 7 slices, or of several owners: the same shares, to a few parts per million.

    Fails when `detect_exposed_communication` returns parts of a whole GPU where its span is a part of one.
    """

    def parts(board: Device, owners: str) -> list[float]:
        ledger = Ledger(POLICY)
        holds = [held(board.uuid, Owner(job_id=o), start=-1, gpus=gpus) for o in owners]
        advance(ledger, first([board], holds))
        advance(ledger, seen(1, Reading(board.uuid, 0, S, **made)))
        return [part / ledger.gpus[board.uuid].book.paid for part in ledger.gpus[board.uuid].book.parts]

    whole, share = device(), replace(device(), weight=slices * PPM // 7, parent="GPU-9")
    assert parts(share, "abc"[:sharers]) == pytest.approx(parts(whole, "a"), abs=2e-4)


def paid(ledger: Ledger) -> dict[str, float]:
    """GPU-seconds by device."""
    return {uuid: gpu.book.paid / S for uuid, gpu in ledger.gpus.items()}


def test_a_board_is_cut_in_mid_stream() -> None:
    """10 s whole, 10 s as 3 + 3 slices with the seventh left: 10 + 10/7, and 30/7 each."""
    ledger = run([
        first([device()]),
        seen(10, reading(0, 10)),
        seen(20, *(reading(10, 20, uuid=d.uuid) for d in cut(3, 3)), devices=cut(3, 3)),
    ])  # fmt: skip
    assert paid(ledger) == pytest.approx(
        {"GPU-0": 10 + 10 / 7, "MIG-GPU-0-0-3g": 30 / 7, "MIG-GPU-0-3-3g": 30 / 7}, abs=2e-5
    )
    assert not ledger.rejected
    assert not ledger.unobserved


def test_instances_that_come_while_the_board_was_read_ahead_begin_where_it_ended() -> None:
    """A source that settles 3 s late: the board is read to second 10 and repartitioned at 11, when 8 is settled."""
    ledger = run([
        first([device()]),
        seen(10, reading(0, 10), settled=7 * S),
        seen(11, devices=cut(7), settled=8 * S),
        seen(15, reading(11, 15, uuid="MIG-GPU-0-0-7g"), settled=15 * S),
    ])  # fmt: skip
    assert paid(ledger) == {"GPU-0": 10.0, "MIG-GPU-0-0-7g": 5.0}
    assert ledger.unobserved == {"gap": S}


def test_an_instance_that_lags_when_it_goes_is_paid_until_the_others_end() -> None:
    """Two halves of a board, one read to 10, the other to 8, are merged at 11: 2 s of it are unobserved."""
    left, right = cut(4, 3)[1:]
    ledger = run([
        first(cut(4, 3)),
        seen(10, reading(0, 10, uuid=left.uuid), reading(0, 8, uuid=right.uuid), settled=7 * S),
        seen(11, devices=[device()], settled=8 * S, faults=(Fault("stale", uuid="GPU-0"),)),
        seen(12, reading(10, 12)),
    ])  # fmt: skip
    books = {uuid: gpu.book for uuid, gpu in ledger.gpus.items()}
    assert books[right.uuid].parts[LEAK_NAMES.index("unobserved")] == 2 * S // MS * right.weight
    assert books[left.uuid].parts[LEAK_NAMES.index("unobserved")] == 0
    assert sum(book.paid for book in books.values()) == 12 * S
    assert ledger.gpus[right.uuid].reason == "stale"
    assert ledger.unobserved == {"stale": 2 * S // MS * right.weight}


def test_an_instance_that_comes_back_has_the_same_book_and_no_time_twice() -> None:
    """4 + 3 slices for 10 s, whole for 10, and 4 + 3 again for 5, without readings before second 23."""
    one = cut(4, 3)[1].uuid
    ledger = run([
        first(cut(4, 3)), seen(10), seen(20, devices=[device()]),
        seen(25, reading(23, 25, uuid=one), devices=cut(4, 3)),
    ])  # fmt: skip
    assert paid(ledger) == pytest.approx({"GPU-0": 10.0, one: 15 * 4 / 7, cut(4, 3)[2].uuid: 15 * 3 / 7}, abs=2e-5)
    assert conserved(ledger.gpus[one].book)
    assert ledger.gpus[one].book.parts[LEAK_NAMES.index("idle_allocation")] == 2 * S // MS * cut(4, 3)[1].weight


@pytest.mark.parametrize("backwards", [False, True])
def test_a_board_met_in_pieces_begins_at_one_instant(backwards: bool) -> None:
    """The first reading of one instance begins at second 3, settled at 5. All are paid from 3, in any order."""
    devices = cut(1, 1)[:: -1 if backwards else 1]
    ledger = run([Observation(5 * S, 0, devices=devices, readings=(reading(3, 5, uuid=cut(1, 1)[2].uuid),))])
    assert sum(paid(ledger).values()) == 2.0
    assert ledger.unobserved == {"gap": 2 * S // MS * (PPM - cut(1, 1)[2].weight)}


def test_a_board_that_was_away_is_not_paid_for_then_whatever_it_comes_back_as() -> None:
    """10 s whole, 20 s out of the inventory, back as instances, listed before it: 5 s of one GPU."""
    other = device("GPU-1", "1")
    ledger = run([
        first([device(), other]), seen(10), seen(10, devices=[other]), seen(30),
        seen(30, devices=[other, *reversed(cut(1, 2))]), seen(35),
    ])  # fmt: skip
    assert sum(paid(ledger).values()) == 35 + 15
    assert ledger.gpus["GPU-0"].book.since == 20 * S


def test_a_whole_family_that_comes_back_does_not_pay_what_it_has_paid() -> None:
    """It was read to second 10 though only 8 was settled, and is listed again, repartitioned, when 9 is settled."""
    ledger = run([
        first([device()]),
        seen(10, reading(0, 10), settled=8 * S),
        seen(10, devices=[], settled=8 * S),
        seen(11, devices=cut(7), settled=9 * S),
        seen(12),
    ])  # fmt: skip
    assert paid(ledger) == {"GPU-0": 10.0, "MIG-GPU-0-0-7g": 2.0}


def test_a_board_whose_parts_stay_as_they_are_is_not_touched() -> None:
    """An unchanged inventory does not repartition: readings may still begin before the end of another part's book."""
    left, right = cut(4, 3)[1:]
    ledger = run([
        first(cut(4, 3)),
        seen(10, reading(0, 10, uuid=left.uuid), settled=0),
        seen(11, reading(0, 10, uuid=right.uuid), devices=[replace(d, index="9") for d in cut(4, 3)], settled=0),
    ])  # fmt: skip
    assert not ledger.rejected
    assert not ledger.unobserved
    assert ledger.gpus[left.uuid].device.index == "9"


def test_a_part_that_claims_another_board_moves_there() -> None:
    """An inconsistent inventory is accepted without a crash or lost time."""
    one = cut(1)[1]
    ledger = run([first([*cut(1), device("GPU-1", "1")]), seen(10)])
    advance(
        ledger,
        seen(10, devices=[device(), replace(device("GPU-1"), weight=PPM - one.weight), replace(one, parent="GPU-1")]),
    )
    advance(ledger, seen(20))
    assert sum(paid(ledger).values()) == 40.0
    assert ledger.conservation_errors == 0


def test_what_is_left_of_a_board_is_free_or_stranded() -> None:
    """Unallocated either way; the reason tells whether a profile could use it."""
    for stranded, reason in ((False, "free"), (True, "stranded")):
        board, *parts = cut(3, 3)
        ledger = run([first([replace(board, stranded=stranded), *parts]), seen(10, reading(0, 10, RESTING))])
        gpu = ledger.gpus["GPU-0"]
        assert (gpu.state, gpu.reason) == (State.UNALLOCATED, reason)
        assert gpu.book.parts[LEAK_NAMES.index("idle_allocation")] == gpu.book.paid == 10 * S // MS * board.weight


def test_a_board_of_which_nothing_is_left_costs_nothing_and_is_still_seen() -> None:
    """Weight 0: no time, no ratio, but live power and temperature."""
    ledger = run([
        first(cut(4, 3)), seen(10, *(reading(0, 10, uuid=d.uuid, temperature_celsius=50.0) for d in cut(4, 3))),
    ])  # fmt: skip
    board = take_snapshot(ledger, DaemonMetadata()).gpus[0]
    assert (board.device.uuid, board.counters.now.paid, board.live) == ("GPU-0", 0, True)
    assert board.counters.short_ratio("engine", "paid") is None
    assert sum(board.counters.energy) == 0.0


def test_kernel_time_is_a_parts_own() -> None:
    """Four of seven slices at an engine of 0.95 for 70 s: 38 GPU-seconds with a kernel."""
    ledger = run([first(cut(4, 3)), seen(70, reading(0, 70, uuid=cut(4, 3)[1].uuid))])
    book = ledger.gpus[cut(4, 3)[1].uuid].book
    assert book.engine / S == pytest.approx(38.0, abs=1e-3)
    assert book.utilization_seen == pytest.approx(40.0, abs=1e-4)
    assert take_snapshot(ledger, DaemonMetadata()).gpus[1].counters.short_ratio("ofu", "tensor_seen") == pytest.approx(
        0.45
    )


@relaxed
@given(st.sampled_from(LAYOUTS), st.lists(st.floats(0, 1e6), min_size=1, max_size=4), st.integers(1, 3))
def test_a_boards_energy_is_spent_once(layout: tuple[int, ...], joules: list[float], sharers: int) -> None:
    """The source divides the board's energy among the parts; by leak they add up to all of it.

    Fails when `_energy_and_rates` takes a part's joules for those of a whole GPU.
    """
    parts = cut(*layout)
    ledger = Ledger(POLICY)
    advance(ledger, first(parts, [held(d.uuid, Owner(job_id=j), start=-1) for d in parts for j in "abc"[:sharers]]))
    for k, moved in enumerate(joules):
        rows = [reading(k, k + 1, uuid=d.uuid, energy_joules=moved * d.weight / PPM, power_watts=None) for d in parts]
        advance(ledger, seen(k + 1, *rows))
    spent = sum(sum(gpu.book.energy) for gpu in ledger.gpus.values())
    assert spent == sum(round(moved * d.weight / PPM * JOULE) for moved in joules for d in parts)
    assert sum(sum(job.book.energy) for job in ledger.jobs.values()) == spent


def test_power_is_the_boards_and_what_is_left_of_it_has_its_share() -> None:
    """No energy counter: 700 W for 10 s on a board of which one slice is left is 1 kJ for that slice."""
    board = cut(3, 3)[0]
    ledger = run([first(cut(3, 3)), seen(10, reading(0, 10, RESTING | {"power_watts": 700.0}))])
    assert sum(ledger.gpus[board.uuid].book.energy) == round(7_000_000 * board.weight / PPM)


def test_the_boards_trouble_is_the_reason_why_its_instances_are_not_seen() -> None:
    ledger = run([first([*cut(7), device("GPU-1", "1")]), seen(10, faults=(Fault("profiling_refused", uuid="GPU-0"),))])
    assert {u: g.reason for u, g in ledger.gpus.items()} == {
        "GPU-0": "profiling_refused", "MIG-GPU-0-0-7g": "profiling_refused", "GPU-1": "gap",
    }  # fmt: skip


def test_a_reading_of_an_instance_that_is_gone_is_nobodys() -> None:
    """Counted as rejected for the node, as an unlisted GPU has no series."""
    ledger = run([first(cut(7)), seen(10, devices=[device()]), seen(20, reading(10, 20, uuid="MIG-GPU-0-0-7g"))])
    assert ledger.refused == {"unknown_gpu": 1}
    assert not ledger.gpus["MIG-GPU-0-0-7g"].rejected


def test_what_is_left_of_a_board_is_nobodys_though_nobody_knows_who_holds_what() -> None:
    """The driver's utilization, which is that of the instances, does not mark its counters as zero-filled."""
    board, part = cut(4)
    rests = RESTING | {"gpu_utilization": 1.0, "processes": None}
    rows = (reading(200, 210, rests, board.uuid), reading(200, 210, RESTING | {"processes": None}, part.uuid))
    ledger = run([first((board, part)), seen(210, *rows, allocations_at=0)])
    states = {uuid: (gpu.state, gpu.reason) for uuid, gpu in ledger.gpus.items()}
    assert states[board.uuid] == (State.UNALLOCATED, "free")
    assert states[part.uuid] == (State.UNOBSERVED, "owner_unknown")


def test_a_fault_that_hides_no_gpu_is_not_why_time_was_not_seen() -> None:
    faults = (Fault("unknown_model", uuid="GPU-0"), Fault("processes_unseen"), Fault("stale", uuid="GPU-0"))
    ledger = run([first([device()]), seen(10, faults=faults)])
    assert dict(ledger.unobserved) == {"stale": 10 * S}
