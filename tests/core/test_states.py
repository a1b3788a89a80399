"""Each state begins and ends at the exact millisecond."""

from collections.abc import Iterable
from typing import Any

import pytest

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import UNKNOWN_JOB, Allocation, Observation, Owner, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.worlds import JOB, RESTING, SOMEBODY, SPINNING, WORKING, S, device, first, held, reading, seen

Signals = dict[str, Any]


def story(phases: Iterable[tuple[float, Signals]], *, owner: Owner | None = JOB, step: float = 10.0) -> Ledger:
    """One GPU through phases of (seconds, signals), in readings of `step` seconds."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=owner)] if owner else []))
    now = 0.0
    for length, signals in phases:
        end = now + length
        while now < end:
            stop = min(end, now + step)
            advance(ledger, seen(stop, reading(now, stop, signals)))
            now = stop
    return ledger


def lost(ledger: Ledger, leak: str, uuid: str = "GPU-0") -> float:
    """Seconds of one leak."""
    return ledger.gpus[uuid].book.parts[LEAK_NAMES.index(leak)] / S


def state(ledger: Ledger, uuid: str = "GPU-0") -> tuple[State, str, float]:
    gpu = ledger.gpus[uuid]
    return gpu.state, gpu.reason, gpu.since / S


def test_a_spin_hangs_after_exactly_600_seconds() -> None:
    ledger = story([(60, WORKING), (1000, SPINNING)], step=7.0)
    assert state(ledger) == (State.HUNG, "spinning", 660.0)
    assert lost(ledger, "hung") == 400.0


def test_a_hang_outlives_unobserved_time() -> None:
    """Ten seconds of work end it after that time as before it, and no fewer."""
    blind = [(60, WORKING), (1000, SPINNING), (700, SPINNING | {"distrust": "stale"})]
    states = [state(story([*blind, (worked, WORKING)], step=1.0))[0] for worked in (9, 11)]
    assert states == [State.HUNG, State.ACTIVE]


def test_suspicion_comes_after_120_seconds_and_is_shown() -> None:
    early, later = (story([(60, WORKING), (spun, SPINNING)]) for spun in (119, 120))
    assert [take_snapshot(led, DaemonMetadata()).gpus[0].hang_suspected for led in (early, later)] == [False, True]


def test_missing_evidence_never_becomes_more_than_suspicion() -> None:
    ledger = story([(5000, SPINNING | {"dram_active": None})])
    assert lost(ledger, "hung") == 0
    assert take_snapshot(ledger, DaemonMetadata()).gpus[0].hang_suspected


def test_suspicion_without_evidence_brings_a_hang_no_nearer_than_the_suspicion() -> None:
    """A thousand seconds without DRAM activity count as the 120 of a suspicion: 480 of the 600 are left."""
    blind = [(60, WORKING), (1000, SPINNING | {"dram_active": None})]
    assert state(story([*blind, (470, SPINNING)]))[0] is State.ACTIVE
    assert state(story([*blind, (490, SPINNING)])) == (State.HUNG, "spinning", 1540.0)


def test_one_stray_reading_delays_a_hang_by_its_share() -> None:
    """One idle second delays a hang by 19 seconds, as 95 % of the time must be spinning."""
    ledger = story([(60, WORKING), (100, SPINNING), (1, RESTING), (700, SPINNING)], step=1.0)
    assert state(ledger) == (State.HUNG, "spinning", 60 + 600 + 1 + 19.0)


def test_real_work_starts_the_count_anew() -> None:
    ledger = story([(60, WORKING), (450, SPINNING), (2, WORKING), (599, SPINNING)], step=1.0)
    assert state(ledger)[0] is State.ACTIVE
    assert lost(ledger, "hung") == 0


def test_time_that_nobody_saw_takes_from_a_spin_what_as_much_spinning_gave() -> None:
    """Of 300 s of spinning 200 s of blindness leave 100 s: after 400 s more 100 s are still missing."""
    blind = [(60, WORKING), (300, SPINNING), (200, SPINNING | {"distrust": "stale"})]
    assert state(story([*blind, (400, SPINNING)]))[0] is State.ACTIVE
    assert state(story([*blind, (520, SPINNING)]))[::2] == (State.HUNG, 60 + 300 + 200 + 500.0)


def test_a_hang_survives_a_hiccup_and_ends_after_ten_seconds_of_work() -> None:
    """It spins from 60 s on, is hung from 660 s, works at 760 s for 5 s, and from 860 s on for good."""
    ledger = story([(60, WORKING), (700, SPINNING), (5, WORKING), (95, SPINNING), (60, WORKING)], step=1.0)
    assert lost(ledger, "hung") == 210.0
    assert state(ledger) == (State.ACTIVE, "computing", 870.0)


def test_the_resting_sibling_of_a_hung_job_is_its_culprit() -> None:
    """After a minute of work one rank rests and the other spins: a hang after half an hour.

    Of the minute, start-up takes the waiting of the first 10.527 s, in which 10 s of work are done.
    """
    ledger = Ledger()
    gpus = [device("GPU-0", "0"), device("GPU-1", "1"), device("GPU-2", "2")]
    other = Owner(job_id="other", zombie_seconds=7200.0)
    advance(ledger, first(gpus, [held("GPU-0", gpus=2), held("GPU-1", gpus=2), held("GPU-2", other)]))
    for k in range(35):
        kinds = (SPINNING, RESTING, RESTING) if k else (WORKING, WORKING, WORKING)
        rows = [reading(k * 60, k * 60 + 60, s, g.uuid) for g, s in zip(gpus, kinds, strict=True)]
        advance(ledger, seen(k * 60 + 60, *rows))
    assert state(ledger, "GPU-0") == (State.HUNG, "spinning", 1860.0)
    assert state(ledger, "GPU-1") == (State.HUNG, "culprit", 1860.0)
    assert state(ledger, "GPU-2")[0] is State.STALLED
    assert lost(ledger, "hung", "GPU-1") == 240.0
    assert lost(ledger, "unattributed_stall", "GPU-1") == pytest.approx(1800 + 0.05 * (60 - 10.527))


@pytest.mark.parametrize("sibling", [RESTING, WORKING])
def test_an_independent_replica_hangs_by_itself_whatever_the_others_do(sibling: Signals) -> None:
    """It is alone with its GPU, so ten minutes of spinning are a hang, and no other replica is its culprit."""
    ledger = Ledger()
    server = Owner(job_id="web", zombie_seconds=7200.0)
    replicas = [held(f"GPU-{n}", server, group=f"{n}") for n in range(2)]
    advance(ledger, first([device("GPU-0", "0"), device("GPU-1", "1")], replicas))
    for k in range(35):
        kinds = (SPINNING, sibling) if k else (WORKING, WORKING)
        rows = [reading(k * 60, k * 60 + 60, s, f"GPU-{n}") for n, s in enumerate(kinds)]
        advance(ledger, seen(k * 60 + 60, *rows))
    assert state(ledger, "GPU-0") == (State.HUNG, "spinning", 660.0)
    assert lost(ledger, "hung", "GPU-1") == 0.0


def test_the_gpus_of_one_replica_wait_for_each_other() -> None:
    """As those of a whole job do; the third GPU, of another replica, rests all the time."""
    ledger = Ledger()
    server = Owner(job_id="web", zombie_seconds=7200.0)
    replicas = [held(f"GPU-{n}", server, gpus=2 - n // 2, group="ab"[n // 2]) for n in range(3)]
    advance(ledger, first([device(f"GPU-{n}", f"{n}") for n in range(3)], replicas))
    for k in range(35):
        kinds = (SPINNING, RESTING, RESTING) if k else (WORKING, WORKING, WORKING)
        rows = [reading(k * 60, k * 60 + 60, s, f"GPU-{n}") for n, s in enumerate(kinds)]
        advance(ledger, seen(k * 60 + 60, *rows))
    assert state(ledger, "GPU-0") == (State.HUNG, "spinning", 1860.0)
    assert state(ledger, "GPU-1") == (State.HUNG, "culprit", 1860.0)
    assert state(ledger, "GPU-2")[0] is State.STALLED


@pytest.mark.parametrize(("kind", "minutes"), [("batch", 30), ("interactive", 120), ("serving", 300), ("novel", 30)])
def test_a_zombie_rises_when_its_class_says(kind: str, minutes: int) -> None:
    ledger = story([(minutes * 60 + 600, RESTING)], owner=Owner(job_id="z", workload_class=kind), step=60.0)
    assert state(ledger) == (State.ZOMBIE, "idle_context", minutes * 60.0)
    assert lost(ledger, "idle_allocation") == 600.0


@pytest.mark.parametrize(
    ("processes", "reason"), [((), "no_process"), (SOMEBODY, "idle_context"), (None, "processes_unseen")]
)
def test_how_deep_a_zombie_lies(processes: object, reason: str) -> None:
    assert state(story([(1900, RESTING | {"processes": processes})]))[:2] == (State.ZOMBIE, reason)


@pytest.mark.untraced
def test_a_keeper_that_computes_one_second_in_29_minutes_is_still_a_zombie() -> None:
    ledger = story([(1739, RESTING), (1, WORKING)] * 8, step=1.0)
    assert state(ledger)[0] is State.ZOMBIE


@pytest.mark.untraced
def test_two_percent_of_work_is_no_zombie() -> None:
    ledger = story([(98, RESTING), (2, WORKING)] * 60, step=1.0)
    assert state(ledger)[0] is State.ACTIVE
    assert lost(ledger, "idle_allocation") == 0


def test_a_zombie_that_works_is_poured_and_leaves_within_seconds() -> None:
    """At 95 % activity a second of work takes back 189 of the 1,800 s of idleness: it ends after 9.524 s."""
    ledger = story([(1800, RESTING), (600, RESTING), (60, WORKING)], step=1.0)
    assert state(ledger)[0] is State.ACTIVE
    assert state(ledger)[2] == 2409.524
    assert lost(ledger, "useful") == pytest.approx(60 * 0.45)


def test_nobodys_gpu_that_computes_is_unowned_after_a_minute() -> None:
    ledger = story([(30, RESTING), (100, WORKING)], owner=None)
    assert state(ledger) == (State.UNOWNED, "leaked_process", 90.0)
    assert lost(ledger, "idle_allocation") == 130.0
    back = story([(200, WORKING), (20, RESTING), (59, WORKING)], owner=None)
    assert state(back)[0] is State.UNALLOCATED


def test_nobodys_gpu_where_the_driver_lists_no_process_is_free() -> None:
    assert state(story([(200, WORKING | {"processes": ()})], owner=None))[0] is State.UNALLOCATED


def test_a_job_without_kernels_is_stalled_and_with_them_active() -> None:
    assert state(story([(20, WORKING), (20, RESTING)]))[:2] == (State.STALLED, "idle_context")
    assert state(story([(20, RESTING), (20, WORKING)]))[:2] == (State.ACTIVE, "computing")


@pytest.mark.parametrize("condition", ["lost", "missing", "xid", "recovery"])
def test_a_broken_gpu_is_unavailable_whoever_holds_it(condition: str) -> None:
    ledger = story([(10, WORKING)])
    broken = device(condition=condition)
    advance(ledger, Observation(20 * S, 20 * S, devices=(broken,), readings=(reading(10, 20),)))
    assert state(ledger) == (State.UNAVAILABLE, condition, 10.0)


def test_on_a_draining_node_a_held_gpu_is_judged_as_any_and_a_free_one_is_unavailable() -> None:
    """On a draining node, idle time of a job stays the job's, and a zombie is reported because it blocks the repair."""
    drained = device(condition="drained")
    ledger = Ledger()
    advance(ledger, first([drained], [held(end=40 * S)]))
    advance(ledger, seen(10, reading(0, 10)))
    assert state(ledger)[0] is State.ACTIVE
    advance(ledger, seen(20, reading(10, 20, RESTING)))
    assert state(ledger)[:2] == (State.STALLED, "idle_context")
    advance(ledger, seen(30))
    assert state(ledger)[:2] == (State.UNOBSERVED, "gap")
    advance(ledger, seen(50, reading(30, 50, RESTING | {"processes": ()})))
    assert state(ledger) == (State.UNAVAILABLE, "drained", 40.0)
    advance(ledger, seen(60))
    assert state(ledger)[:2] == (State.UNAVAILABLE, "drained"), "nobody can hold it, seen or not"


def test_what_nobody_saw_is_unobserved_with_its_reason() -> None:
    ledger = story([(10, WORKING)])
    advance(ledger, seen(20, reading(10, 20, distrust="stale")))
    assert state(ledger) == (State.UNOBSERVED, "stale", 10.0)
    advance(ledger, seen(30))
    assert state(ledger)[:2] == (State.UNOBSERVED, "gap")
    assert ledger.unobserved == {"stale": 10 * S, "gap": 10 * S}


def test_old_ownership_is_unknown_not_nobody() -> None:
    """After 90 s without the scheduler, a GPU in use has an unknown owner; an idle one is unobserved."""
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    advance(ledger, seen(200, reading(0, 200), allocations_at=0))
    assert ledger.gpus["GPU-0"].holders[0].owner.job_id == "unknown"
    assert ledger.jobs["41"].book.paid == 90 * S
    assert ledger.jobs["unknown"].book.paid == 110 * S
    advance(ledger, seen(300, reading(200, 300, RESTING | {"processes": None}), allocations_at=0))
    assert state(ledger)[:2] == (State.UNOBSERVED, "owner_unknown")


def test_a_spin_is_forgotten_while_nobody_looks() -> None:
    ledger = story([(250, SPINNING)])
    advance(ledger, seen(500))
    advance(ledger, seen(700, reading(500, 700, SPINNING)))
    assert lost(ledger, "hung") == 0


def test_a_new_owner_begins_anew() -> None:
    ledger = story([(1700, RESTING)])
    new = Allocation("GPU-0", Owner(job_id="42"), start=1700 * S)
    advance(ledger, seen(3400, reading(1700, 3400, RESTING), allocations=(new,)))
    assert state(ledger)[0] is State.STALLED


def test_an_owner_told_again_is_not_a_new_one() -> None:
    """The same job with updated attributes keeps its credits."""
    ledger = story([(1700, RESTING)])
    again = held(owner=Owner(job_id=JOB.job_id, name="renamed"))
    advance(ledger, seen(3400, reading(1700, 3400, RESTING), allocations=(again,)))
    assert state(ledger) == (State.ZOMBIE, "idle_context", 1800.0)


def minutes(*phases: tuple[float, Signals]) -> dict[str, float]:
    """Two minutes of a repeated pattern of one job: seconds by leak in the second minute."""
    ledger = story([(1, WORKING), *phases * 60], step=1.0)
    before = story([(1, WORKING), *phases * 30], step=1.0)
    parts = zip(LEAK_NAMES, ledger.gpus["GPU-0"].book.parts, before.gpus["GPU-0"].book.parts, strict=True)
    return {name: (after - earlier) / S for name, after, earlier in parts if after > earlier}


BURST = WORKING | {"pcie_rx_bytes_per_second": 4e8}
STEADY = {"pcie_rx_bytes_per_second": 4e8}


def test_waiting_while_images_arrive_is_a_data_stall() -> None:
    """Alternately 2 s idle and 2 s of work, with a batch arriving with each work phase, or a steady stream."""
    assert "data_stall" in minutes((2, RESTING), (2, BURST))
    assert "data_stall" in minutes((2, RESTING | STEADY), (2, WORKING | STEADY))


def test_how_much_must_arrive_is_the_mean_of_a_minute_beyond_what_is_sent() -> None:
    """Half of the time 40 MB/s more than is sent are 20 MB/s; WORKING sends 100 MB/s."""
    arrives, sends = {"pcie_rx_bytes_per_second": 1.4e8}, {"pcie_rx_bytes_per_second": 4e8}
    assert "data_stall" in minutes((2, RESTING), (2, WORKING | arrives))
    assert "data_stall" not in minutes((2, RESTING), (2, WORKING | {"pcie_rx_bytes_per_second": 1.39e8}))
    assert "data_stall" not in minutes((2, RESTING), (2, WORKING | sends | {"pcie_tx_bytes_per_second": 4e8}))


def test_traffic_that_goes_both_ways_is_no_input() -> None:
    """Peers over PCIe exchange gigabytes, which the two counters measure with an error of some percent."""
    exchange = WORKING | {"pcie_rx_bytes_per_second": 1.05e10, "pcie_tx_bytes_per_second": 1e10}
    assert "data_stall" not in minutes((2, RESTING), (2, exchange))
    assert "data_stall" in minutes((2, RESTING), (2, exchange | {"pcie_rx_bytes_per_second": 1.2e10}))


def test_weights_that_arrive_before_the_first_work_are_no_input() -> None:
    """They would call the waiting of the minute after it a wait for data."""
    weights = RESTING | {"pcie_rx_bytes_per_second": 6e9}
    loaded = story([(20, weights), *[(2, WORKING), (2, RESTING)] * 20], step=1.0)
    assert loaded.gpus["GPU-0"].book.parts[LEAK_NAMES.index("data_stall")] == 0
    read = story([(20, WORKING), (20, weights), *[(2, WORKING), (2, RESTING)] * 20], step=1.0)
    assert read.gpus["GPU-0"].book.parts[LEAK_NAMES.index("data_stall")] > 0


@pytest.mark.untraced
def test_a_job_with_small_kernels_or_hardly_any_does_not_wait_for_images() -> None:
    """SM activity of half the engine's 0.95 is needed, and 3 % of a minute: 1.9 s, or 0.95 * 2 s."""
    assert "data_stall" not in minutes((2, RESTING), (2, BURST | {"sm_active": 0.47, "tensor_active": 0.4}))
    assert "data_stall" in minutes((2, RESTING), (2, BURST | {"sm_active": 0.48, "tensor_active": 0.4}))
    rare = BURST | {"pcie_rx_bytes_per_second": 4e9}
    assert "data_stall" in minutes((58, RESTING), (2, rare))
    assert "data_stall" not in minutes((59, RESTING), (1, rare))


def test_half_a_minute_that_nobody_saw_gives_no_verdict() -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    for k in range(0, 28, 2):
        advance(ledger, seen(k + 2, reading(k, k + 1, BURST), reading(k + 1, k + 2, RESTING)))
    advance(ledger, seen(60))
    advance(ledger, seen(62, reading(60, 62, RESTING)))
    assert lost(ledger, "data_stall") == 0
    assert lost(ledger, "unattributed_stall") > 0


def _polled(rate: float) -> Signals:
    return SPINNING | {"pcie_rx_bytes_per_second": rate}


def test_polling_of_host_memory_is_a_spin_while_it_stays_the_same() -> None:
    """The range starts with the spin's first reading, and tolerates a factor of 2.5."""
    ledger = story([(30, WORKING), (700, _polled(3e7))], step=1.0)
    assert state(ledger) == (State.HUNG, "spinning", 630.0)
    assert lost(story([(30, WORKING), *[(1, _polled(4e7)), (1, _polled(1e8))] * 310], step=1.0), "hung") == 20.0
    assert lost(story([(30, WORKING), *[(1, _polled(4e7)), (1, _polled(1.01e8))] * 310], step=1.0), "hung") == 0
    sent = SPINNING | {"pcie_rx_bytes_per_second": None, "pcie_tx_bytes_per_second": 3e7}
    assert state(story([(30, WORKING), (601, sent)]))[0] is State.HUNG


@pytest.mark.parametrize(("rate", "kind"), [(0.99e9, State.HUNG), (1e9, State.STALLED)])
def test_a_rank_that_writes_its_checkpoint_is_nobody_s_culprit(rate: float, kind: State) -> None:
    ledger = Ledger()
    gpus = [device("GPU-0", "0"), device("GPU-1", "1")]
    advance(ledger, first(gpus, [held(g.uuid, gpus=2) for g in gpus]))
    advance(ledger, seen(60, reading(0, 60), reading(0, 60, uuid="GPU-1")))
    saves = RESTING | {"pcie_tx_bytes_per_second": rate}
    advance(ledger, seen(2000, reading(60, 2000, SPINNING), reading(60, 2000, saves, "GPU-1")))
    assert state(ledger) == (State.HUNG, "spinning", 1860.0)
    assert state(ledger, "GPU-1")[0] is kind


def test_thresholds_of_less_than_a_millisecond_are_one() -> None:
    """A threshold of 0 is raised to a millisecond; it would be met again and again at the same instant."""
    tiny: dict[str, Any] = dict.fromkeys(
        ("hang_seconds", "hang_peer_seconds", "hang_suspect_seconds", "wake_seconds", "zombie_batch_seconds",
         "zombie_worked_seconds", "startup_work_seconds", "unowned_seconds", "allocation_stale_seconds"), 1e-4,
    )  # fmt: skip
    for signals in (RESTING, SPINNING, WORKING):
        ledger = Ledger(Policy(**tiny))
        advance(ledger, first([device(), device("GPU-1", "1")], [held()]))
        advance(ledger, seen(2, reading(0, 2, signals), reading(0, 2, WORKING, "GPU-1")))
        assert ledger.gpus["GPU-0"].book.paid == 2 * S


def test_what_an_unknown_job_may_hold_is_its_while_it_works_and_nobody_s_to_tell_while_it_rests() -> None:
    """A scheduler that knows a job but not its GPUs: neither unallocated nor held."""
    unknown = Owner(UNKNOWN_JOB)
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=unknown)]))
    advance(ledger, seen(10, reading(0, 10)))
    assert state(ledger)[0] is State.ACTIVE
    advance(ledger, seen(20, reading(10, 20, RESTING)))
    assert state(ledger)[0] is State.STALLED, "with a process on it, it is somebody's"
    advance(ledger, seen(30, reading(20, 30, RESTING | {"processes": ()})))
    assert state(ledger)[:2] == (State.UNOBSERVED, "owner_unknown")
    both = (held(owner=unknown), held())
    advance(ledger, seen(40, reading(30, 40, RESTING | {"processes": ()}), allocations=both))
    assert state(ledger)[0] is State.STALLED, "somebody known holds it too"
