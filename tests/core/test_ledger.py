"""The books of GPUs and jobs: posting, rejected input, and snapshots."""

import msgspec
import pytest

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger, conserved
from exporter.core.metrics import METRICS, SERIES_BUDGET, UNOBSERVED_REASONS, max_series_of_scope, seconds
from exporter.core.model import MS, SECOND, Allocation, Fault, Observation, Owner, Reading, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, layers, take_snapshot
from tests.worlds import JOB, RESTING, WORKING, S, device, first, held, reading, seen


def opened(*allocations: Allocation, policy: Policy | None = None) -> Ledger:
    ledger = Ledger(policy)
    advance(ledger, first([device(), device("GPU-1", "1")], allocations or (held(),)))
    return ledger


def part(ledger: Ledger, leak: str, uuid: str = "GPU-0") -> float:
    return ledger.gpus[uuid].book.parts[LEAK_NAMES.index(leak)] / S


def test_the_carpenter() -> None:
    """8 h paid, 2 unallocated, 2 stalled, 4 at g 1, t 0.4, c 1: 75 % x 67 % x 40 % = 20 %."""
    ledger = Ledger(Policy(zombie_batch_seconds=3 * 3600))
    advance(ledger, first([device()]))
    advance(ledger, seen(7200, reading(0, 7200, RESTING | {"processes": ()})))
    advance(ledger, seen(7201, allocations=(held(start=7200),)))
    work = WORKING | {"gr_engine_active": 1.0, "tensor_active": 0.4, "sm_active": 1.0}
    advance(ledger, Observation(7201 * S, 0))
    advance(ledger, seen(21601, reading(7201, 21601, work), allocations_at=21601 * S))
    advance(ledger, seen(28800, reading(21601, 28800, RESTING)))
    got = layers(ledger.gpus["GPU-0"].book.parts)
    assert got.gau == pytest.approx(0.75, abs=1e-4)
    assert got.ectr == pytest.approx(2 / 3, abs=1e-4)
    assert got.emfu == pytest.approx(0.4, abs=1e-4)
    assert got.product == pytest.approx(0.2, abs=1e-4)
    assert got.product == pytest.approx(got.floor)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, (None, None, None, None, None, None)),
        ({"unobserved": 5}, (None, None, None, None, None, 0.0)),
        ({"idle_allocation": 5}, (0.0, None, None, 0.0, 0.0, 1.0)),
        ({"unattributed_stall": 5}, (1.0, 0.0, None, 0.0, 0.0, 1.0)),
        ({"unresolved": 5}, (1.0, 1.0, None, None, 0.0, 1.0)),
        ({"unresolved": 6, "useful": 1, "throttled": 3}, (1.0, 1.0, 0.25, 0.25, 0.1, 1.0)),
        ({"useful": 3, "unobserved": 1}, (1.0, 1.0, 1.0, 1.0, 1.0, 0.75)),
    ],
)
def test_layers_of_what_there_is_and_silence_about_the_rest(
    parts: dict[str, int], expected: tuple[float | None, ...]
) -> None:
    got = layers(parts.get(name, 0) for name in LEAK_NAMES)
    assert (got.gau, got.ectr, got.emfu, got.product, got.floor, got.coverage) == expected


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([reading(5, 10)], "overlap"),
        ([reading(10, 20), reading(10, 20)], "overlap"),
        ([reading(15, 20), reading(10, 16)], "overlap"),
        ([reading(20, 20)], "bad_interval"),
        ([reading(20, 12)], "bad_interval"),
        ([msgspec.structs.replace(reading(10, 20), end=19 * S + 1)], "bad_interval"),
        ([msgspec.structs.replace(reading(10, 20), start=10 * S + 5)], "bad_interval"),
        ([reading(10, 21)], "future"),
        ([reading(10, 20, uuid="GPU-9")], "unknown_gpu"),
    ],
)
def test_a_malformed_reading_is_counted_and_costs_nobody_else(bad: list[Reading], reason: str) -> None:
    ledger = opened()
    advance(ledger, seen(10, reading(0, 10), reading(0, 10, uuid="GPU-1")))
    advance(ledger, seen(20, *bad, reading(10, 20, uuid="GPU-1")))
    assert ledger.rejected[reason] == 1
    assert part(ledger, "unobserved", "GPU-1") == 0
    assert all(conserved(gpu.book) and gpu.book.paid == 20 * S for gpu in ledger.gpus.values())


def test_a_clock_that_steps_back_moves_nothing() -> None:
    ledger = opened()
    advance(ledger, seen(10, reading(0, 10)))
    advance(ledger, seen(9, reading(8, 9)))
    assert ledger.rejected == {"clock_step": 1}
    assert ledger.gpus["GPU-0"].book.until == 10 * S


def test_readings_out_of_order_within_an_observation_are_put_in_order() -> None:
    ledger = opened()
    advance(ledger, seen(20, reading(10, 20), reading(0, 10)))
    assert not ledger.rejected
    assert part(ledger, "unobserved") == 0


def test_time_that_may_still_come_is_left_open() -> None:
    ledger = opened()
    advance(ledger, seen(10, settled=0))
    assert ledger.gpus["GPU-0"].book.paid == 0
    advance(ledger, seen(20, reading(0, 15), settled=15 * S + 7))
    assert part(ledger, "unobserved") == 0
    assert ledger.gpus["GPU-1"].book.until == 15 * S


def test_a_gap_carries_the_best_reason_there_is() -> None:
    ledger = opened()
    faults = (Fault("gpu_lost", uuid="GPU-1"), Fault("source_hung", uuid="GPU-0"))
    advance(ledger, seen(10, faults=faults))
    assert ledger.gpus["GPU-0"].reason == "source_hung"
    assert ledger.gpus["GPU-1"].reason == "gpu_lost"
    assert ledger.faults == {"gpu_lost": 1, "source_hung": 1}


def test_a_gpu_that_appears_is_paid_for_from_then_on_and_one_that_vanishes_for_ever() -> None:
    ledger = opened()
    late = device("GPU-2", "2")
    whole = (device(), device("GPU-1", "1", condition="missing"), late)
    advance(ledger, Observation(50 * S + 3, 0, devices=whole, readings=(reading(40, 50, uuid="GPU-2"),)))
    advance(ledger, seen(60))
    assert ledger.gpus["GPU-2"].book.paid == 20 * S
    assert ledger.gpus["GPU-1"].book.paid == 60 * S
    assert part(ledger, "unavailable", "GPU-1") == 60.0


def test_sharers_split_every_pool_and_the_gpu_is_paid_once() -> None:
    owners = [Owner(job_id=name) for name in "abc"]
    ledger = opened(*(held(owner=owner) for owner in owners))
    advance(ledger, seen(10, reading(0, 10)))
    books = [ledger.jobs[name].book for name in "abc"]
    assert [sum(book.parts) == book.paid for book in books] == [True] * 3
    assert sum(book.paid for book in books) == ledger.gpus["GPU-0"].book.paid == 10 * S
    useful = LEAK_NAMES.index("useful")
    assert [book.parts[useful] / S for book in books] == pytest.approx([1.5, 1.5, 1.5], abs=1e-4)
    assert sum(book.engine for book in books) == pytest.approx(ledger.gpus["GPU-0"].book.engine, abs=3)


def test_an_allocation_that_begins_and_ends_inside_a_reading_gets_its_part() -> None:
    ledger = opened(held(start=4.0, end=7 * S))
    advance(ledger, seen(10, reading(0, 10)))
    assert ledger.jobs["41"].book.paid == 3 * S
    assert part(ledger, "idle_allocation") == 7.0


def test_an_ended_job_lingers_and_is_then_forgotten() -> None:
    ledger = opened()
    advance(ledger, seen(10, reading(0, 10)))
    advance(ledger, seen(20, allocations=()))
    advance(ledger, seen(609, allocations_at=609 * S))
    assert "41" in ledger.jobs
    advance(ledger, seen(621, allocations_at=621 * S))
    assert "41" not in ledger.jobs


def test_a_storm_of_jobs_keeps_to_the_limit_but_never_drops_one_that_runs() -> None:
    ledger = opened(policy=Policy(max_jobs=5))
    for k in range(50):
        now = 10.0 * (k + 1)
        storm = held(owner=Owner(job_id=f"storm-{k}"), start=now - 10)
        advance(ledger, seen(now, reading(now - 10, now), allocations=(held("GPU-1"), storm)))
        assert len(ledger.jobs) <= 5
        assert {"41", f"storm-{k}"} <= ledger.jobs.keys()


def test_energy_goes_where_the_time_went() -> None:
    ledger = opened()
    advance(ledger, seen(10, reading(0, 10, energy_joules=1000.0)))
    spent = take_snapshot(ledger, DaemonMetadata()).gpus[0].counters.energy_by_layer()
    assert sum(spent.values()) == 1_000_000
    assert spent["useful"] == pytest.approx(450_000, abs=1)
    assert spent["ectr"] == pytest.approx(50_000, abs=1)


def test_energy_of_a_reading_is_divided_among_those_who_held_the_gpu_in_it() -> None:
    """One job for 4 of 10 s, then two others: 1000.001 J, of which a millijoule is left over."""
    owners = [Owner(job_id=name) for name in "abc"]
    ledger = opened(
        held(owner=owners[0], end=4 * SECOND), held(owner=owners[1], start=4), held(owner=owners[2], start=4)
    )
    advance(ledger, seen(10, reading(0, 10, energy_joules=1000.001)))
    spent = {name: sum(job.book.energy) for name, job in ledger.jobs.items()}
    assert spent == {"a": 400_000, "b": 300_000, "c": 300_001}
    assert sum(ledger.gpus["GPU-0"].book.energy) == 1_000_001


def test_windows_see_only_their_time() -> None:
    """Ten minutes of work, then six of rest: the last five minutes are all rest, the hour is not."""
    ledger = opened()
    for k in range(96):
        signals = WORKING if k < 60 else RESTING
        advance(ledger, seen(10 * k + 10, reading(10 * k, 10 * k + 10, signals)))
    counters = take_snapshot(ledger, DaemonMetadata()).gpus[0].counters
    assert counters.short_ratio("engine", "paid") == 0.0
    assert sum(counters.parts(counters.hour)) == 960 * S
    job = take_snapshot(ledger, DaemonMetadata()).jobs[0].counters
    assert job.percentiles((0.1, 0.9)) == (0.025, 0.025)
    assert job.short_ratio("ofu", "tensor_seen") == 0.0


def test_a_window_of_nothing_has_no_ratio() -> None:
    counters = take_snapshot(opened(), DaemonMetadata()).gpus[0].counters
    assert counters.short_ratio("engine", "paid") is None
    assert counters.percentiles((0.5,)) == ()


def test_an_hour_of_marks_is_all_that_is_kept() -> None:
    ledger = opened()
    for k in range(130):
        advance(ledger, seen(60 * k + 60, reading(60 * k, 60 * k + 60)))
    counters = take_snapshot(ledger, DaemonMetadata()).gpus[0].counters
    assert len(ledger.gpus["GPU-0"].book.samples) == 61
    assert sum(counters.parts(counters.hour)) == 3600 * S


def test_a_broken_sum_is_noticed() -> None:
    ledger = opened()
    ledger.gpus["GPU-0"].book.parts[0] += 1
    advance(ledger, seen(10, reading(0, 10)))
    assert ledger.conservation_errors == 1


def test_time_that_was_paid_twice_or_never_is_noticed_though_the_parts_add_up() -> None:
    """What is due depends on clock and weight alone."""
    for extra in (S, -S):
        ledger = opened()
        advance(ledger, seen(10, reading(0, 10)))
        book = ledger.gpus["GPU-0"].book
        book.parts[0] += extra
        book.paid += extra
        advance(ledger, seen(20, reading(10, 20)))
        assert ledger.conservation_errors == 1


def test_a_snapshot_is_not_moved_by_what_comes_after() -> None:
    ledger = opened()
    advance(ledger, seen(10, reading(0, 10)))
    before = take_snapshot(ledger, DaemonMetadata())
    paid, parts = before.gpus[0].counters.now.paid, before.gpus[0].counters.now.parts
    advance(ledger, seen(20, reading(10, 20)))
    assert (before.gpus[0].counters.now.paid, before.gpus[0].counters.now.parts) == (paid, parts)


def test_gpus_are_in_the_order_people_count_them() -> None:
    ledger = Ledger()
    advance(ledger, first([device("U-c", "10"), device("U-b", "9"), device("U-a", "MIG")]))
    assert [gpu.device.index for gpu in take_snapshot(ledger, DaemonMetadata()).gpus] == ["9", "10", "MIG"]


def test_a_job_holds_what_it_holds_now() -> None:
    ledger = opened(held(), held("GPU-1"))
    advance(ledger, seen(10, reading(0, 10, memory_used_bytes=3e9), reading(0, 10, uuid="GPU-1")))
    job = take_snapshot(ledger, DaemonMetadata()).jobs[0]
    assert (job.gpus, job.memory_used) == (("GPU-0", "GPU-1"), 3e9)
    advance(ledger, seen(20, allocations=()))
    job = take_snapshot(ledger, DaemonMetadata()).jobs[0]
    assert (job.gpus, job.memory_used) == ((), None)


def test_the_source_is_the_last_that_spoke() -> None:
    ledger = opened()
    advance(ledger, seen(10, source="nvml"))
    advance(ledger, seen(20))
    assert ledger.source == "nvml"


def test_a_second_is_written_exactly() -> None:
    assert [seconds(n) for n in (0, S, 1, 12_345 * MS, 10**18 + 1)] == [
        "0.0", "1.0", "0.000000001", "12.345000000", "1000000000.000000001",
    ]  # fmt: skip


def test_series_stay_within_their_budgets() -> None:
    """All later health, detector and policy series must fit too."""
    assert max_series_of_scope("gpu") <= SERIES_BUDGET["gpu"]
    assert max_series_of_scope("job") <= SERIES_BUDGET["job"]
    assert max_series_of_scope("node") + max_series_of_scope("model") <= SERIES_BUDGET["node"]
    rare = {"shared GPU", "spinning GPU", "job in trouble", "job on one GPU", "job on several GPUs", "exemption"}
    rare |= {"job without tensor work", "labelled job"}
    rare |= {"reporting job", "serving job", "rank", "measured job", "RDMA port"}
    rare |= {"GPU coding video", "GPU with a chip-to-chip link"}
    rare |= {"reporting job", "serving job", "rank", "communicating job", "communicating rank"}
    assert {metric.scope for metric in METRICS} == rare | {"gpu", "job", "account", "model", "node"}


def test_state_reasons_have_a_series_of_their_own() -> None:
    assert {"gap", "stale", "zero_filled", "no_engine_signal", "owner_unknown"} <= UNOBSERVED_REASONS
    assert JOB.workload_class == "batch"
    assert State("hung") is State.HUNG


def test_a_reading_that_begins_late_leaves_a_gap_before_it() -> None:
    ledger = opened()
    advance(ledger, seen(10, reading(4, 10)))
    assert part(ledger, "unobserved") == 4.0
    assert ledger.unobserved == {"gap": 14 * S}


def test_the_shortest_gap_is_unobserved_too() -> None:
    ledger = opened()
    advance(ledger, seen(1, reading(0, 1), reading(0, 1, uuid="GPU-1")))
    advance(ledger, seen(2, reading(1.001, 2), reading(1, 2, uuid="GPU-1")))
    assert ledger.unobserved == {"gap": S // 1000}
    assert ledger.conservation_errors == 0


def test_a_gpu_that_leaves_the_inventory_is_paid_for_no_more_and_may_come_back() -> None:
    """As a MIG instance when layouts change: 10 s in, 30 s out, 5 s in."""
    ledger = opened()
    both, one = (device(), device("GPU-1", "1")), (device(),)
    advance(ledger, seen(10, reading(0, 10, uuid="GPU-1")))
    advance(ledger, seen(10, devices=one))
    advance(ledger, seen(40, reading(10, 40, uuid="GPU-1")))
    assert ledger.rejected == {"unknown_gpu": 1}
    assert [gpu.device.uuid for gpu in take_snapshot(ledger, DaemonMetadata()).gpus] == ["GPU-0"]
    advance(ledger, seen(40, devices=both))
    advance(ledger, seen(45, reading(40, 45, uuid="GPU-1")))
    assert ledger.gpus["GPU-1"].book.paid == 15 * S
    assert conserved(ledger.gpus["GPU-1"].book)
    assert part(ledger, "unobserved", "GPU-1") == 0


def test_the_first_reading_of_a_slow_source_is_not_too_early() -> None:
    """The response to the request at second 0 arrived 4 ms later; the next reading begins at second 0 all the same."""
    ledger = Ledger()
    advance(ledger, Observation(4 * MS, 0, devices=(device(),), settled=0))
    advance(ledger, seen(1.004, reading(0, 1), settled=S))
    assert not ledger.rejected
    assert ledger.gpus["GPU-0"].book.paid == S


def test_the_drivers_word_counts_only_where_it_was_given() -> None:
    ledger = opened()
    advance(ledger, seen(20, reading(0, 10, gpu_utilization=0.6), reading(10, 20, gpu_utilization=None)))
    assert (
        take_snapshot(ledger, DaemonMetadata()).gpus[0].counters.short_ratio("utilization", "utilization_seen") == 0.6
    )


def test_a_board_without_a_tensor_counter_has_no_tensor_ratio_even_at_rest() -> None:
    ledger = opened()
    advance(ledger, seen(10, reading(0, 10, RESTING | {"tensor_active": None, "sm_active": None})))
    assert take_snapshot(ledger, DaemonMetadata()).gpus[0].counters.short_ratio("ofu", "tensor_seen") is None


@pytest.mark.parametrize(("start", "end"), [(2_345_000_001, None), (2_000_000_000, 7_000_000_999), (1, 999_999_999)])
def test_a_hold_off_the_millisecond_loses_nothing(start: int, end: int | None) -> None:
    """Schedulers round times; a third-party trace may not."""
    off = msgspec.structs.replace(held(), start=start, end=end)
    told = Ledger()
    advance(told, first([device()], [off]))
    for second in range(1, 11):
        advance(told, seen(second, reading(second - 1, second), allocations=(off,)))
    assert sum(told.gpus["GPU-0"].book.parts) == 10 * S
    assert told.conservation_errors == 0
