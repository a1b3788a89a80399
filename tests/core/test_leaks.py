"""Each leak's share of a second, calculated by hand from accounting section 4."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core import leaks
from exporter.core.evidence import evaluate
from exporter.core.leaks import (
    CLOCK,
    LAYERS,
    LEAK_NAMES,
    LEAKS,
    REPORTING,
    SLACK,
    TENSOR,
    UNRESOLVED,
    WAIT,
    Leak,
    Span,
    split_into_leaks,
)
from exporter.core.ledger import Ledger
from exporter.core.model import PPM, SECOND, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.timers import BEGINNING, NO_SIGNS, RESTARTED, SAVING, STARVED, STEADY
from exporter.core.workload import CHECKPOINT, DATA, MODEL, RESTORE, STARTUP, WorkloadCredit
from tests.worlds import H100, RESTING, SPINNING, WORKING, device, first, held, reading, seen

HOST_OVERHEAD = leaks.LEAK_NAMES.index("host_overhead")

POLICY = Policy()


def poured(
    signals: dict[str, Any],
    *,
    state: State = State.ACTIVE,
    gpus: int = 1,
    restarts: int = 0,
    signs: frozenset[str] = NO_SIGNS,
    credit: WorkloadCredit | None = None,
    peers_save: int = 0,
    **changes: Any,
) -> dict[str, float]:
    """One second of one owner: leak -> share."""
    board = device(**{k: changes.pop(k) for k in ("spec", "lacks") if k in changes})
    ev = evaluate(reading(0, 1, signals | changes), board, POLICY)
    pools = [ev.wait, ev.slack, ev.clock_loss, ev.ofu, ev.unresolved]
    span = Span(ev, state, POLICY, pools, PPM, gpus, restarts, signs, peers_save, ms=1000, credit=credit)
    return {LEAK_NAMES[index]: amount / PPM for index, amount in split_into_leaks(span)}


def test_the_table_is_complete_and_in_the_order_of_pouring() -> None:
    """Accounting section 4: 24 leaks, by name, and the three outcomes."""
    expected = (
        "unavailable idle_allocation hung failure_recovery startup checkpoint data_stall pipeline_bubble kv_cache_wait "
        "batching host_overhead unattributed_stall exposed_communication prefill_decode_interference memory_bound "
        "low_parallelism other_compute throttled rejected_speculation kv_cache_pressure recomputation padding rework "
        "oversized_allocation useful unresolved unobserved"
    )
    assert " ".join(LEAK_NAMES) == expected
    assert len(LEAKS) == 24
    assert {leak.layer for leak in LEAKS} == {"gau", "ectr", "emfu"} < set(LAYERS)


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_row_tells_a_person_what_to_do(leak: Leak) -> None:
    assert leak.description
    assert leak.watch
    assert leak.fix
    assert leak.team
    assert leak.detector is not None or leak.takes_all_in or leak.name == "oversized_allocation"
    assert (leak.signs == (REPORTING,)) == (leak.evidence in {"reported", "engine"})
    assert (leak.balance is not None) <= ("reported" in leak.evidence)
    assert all(WAIT <= pool <= UNRESOLVED for pool in leak.pools)
    assert all(pool != UNRESOLVED for pool in leak.pools), "what cannot be resolved is no leak's"


def test_what_to_do_first_about_idle_gpus_is_said_of_held_ones_and_of_free_ones() -> None:
    """One row books both, and who reads of a GPU that nobody holds cannot end a job."""
    (fix,) = (leak.fix for leak in LEAKS if leak.name == "idle_allocation")
    assert [part.partition(":")[0] for part in fix.split("; ")] == ["held", "free"]


@pytest.mark.parametrize(
    ("state", "leak"),
    [
        (State.UNAVAILABLE, "unavailable"),
        (State.UNALLOCATED, "idle_allocation"),
        (State.UNOWNED, "idle_allocation"),
        (State.HUNG, "hung"),
        (State.UNOBSERVED, "unobserved"),
    ],
)
def test_some_states_are_one_leak_whole(state: State, leak: str) -> None:
    assert poured(WORKING, state=state) == {leak: 1.0}


def test_a_busy_second_of_one_gpu() -> None:
    """g .95 s .8 t .45 d .4 c 1: wait .05; slack .5: empty SMs for .95 - .8; memory for the rest of its activity.

    The tensor cores need .35 * .45 of the DRAM activity; what is left is compared with .96 of the ceiling of .92, in
    the s / g of the time in which a warp is resident.
    """
    memory = (0.4 - 0.35 * 0.45) / (0.96 * 0.92) * 0.8 / 0.95
    empty = 0.95 - 0.8
    assert poured(WORKING) == pytest.approx(
        {
            "unattributed_stall": 0.05,
            "memory_bound": memory,
            "low_parallelism": empty,
            "other_compute": 0.5 - memory - empty,
            "useful": 0.45,
        },
        abs=3e-6,
    )


def test_a_copy_loop_is_memory_bound() -> None:
    shares = poured(WORKING, gr_engine_active=1.0, sm_active=1.0, tensor_active=0.0, dram_active=0.92)
    assert shares == {"memory_bound": 1.0}


def test_a_gemm_at_1200_mhz_loses_a_third_to_the_clock() -> None:
    shares = poured(
        WORKING, gr_engine_active=1.0, sm_active=1.0, tensor_active=0.9, dram_active=0.3, sm_clock_hz=1200e6
    )
    assert shares["throttled"] == pytest.approx(0.9 * (1 - 1200 / 1830), abs=2e-6)
    assert shares["useful"] == pytest.approx(0.9 * 1200 / 1830, abs=2e-6)


def test_a_zombie_loses_its_waiting_and_keeps_its_work() -> None:
    shares = poured(WORKING, state=State.ZOMBIE)
    assert shares["idle_allocation"] == pytest.approx(0.05)
    assert shares["useful"] == pytest.approx(0.45)
    assert "unattributed_stall" not in shares


def test_before_the_first_work_it_is_startup_and_after_a_restart_recovery() -> None:
    beginning = frozenset({BEGINNING})
    assert poured(RESTING, signs=beginning) == {"startup": 1.0}
    assert poured(RESTING, signs=beginning, restarts=1) == {"failure_recovery": 1.0}
    assert poured(RESTING, signs=beginning | {RESTARTED}) == {"failure_recovery": 1.0}
    assert poured(SPINNING, signs=beginning, gpus=2) == {"startup": 1.0}, "a rank that polls for one that loads"
    assert poured(RESTING, restarts=1) == {"unattributed_stall": 1.0}


def test_a_checkpoint_needs_its_sign() -> None:
    saving = frozenset({SAVING})
    assert poured(RESTING, signs=saving) == {"checkpoint": 1.0}
    assert poured(RESTING) == {"unattributed_stall": 1.0}
    assert poured(SPINNING, signs=saving, gpus=2) == {"checkpoint": 1.0}, "it waits for others that save"
    assert poured(SPINNING, gpus=2) == {"exposed_communication": 1.0}
    assert poured(SPINNING, peers_save=PPM, gpus=2) == {"checkpoint": 1.0}
    assert poured(RESTING, peers_save=PPM // 4) == {"checkpoint": 0.25, "unattributed_stall": 0.75}


def test_a_stall_for_want_of_data_needs_its_sign() -> None:
    assert poured(RESTING, signs=frozenset({STARVED})) == {"data_stall": 1.0}
    assert poured(SPINNING, signs=frozenset({STARVED}), gpus=2) == {"exposed_communication": 1.0}
    assert poured(RESTING, signs=frozenset({STEADY})) == {"unattributed_stall": 1.0}


@pytest.mark.parametrize(
    ("engine", "sm", "flat", "host"),
    [
        (0.6, 0.2, True, True),
        (0.6, 0.2, False, False),
        (0.6, 0.3, True, False),
        (0.29, 0.1, True, False),
        (0.995, 0.2, True, False),
        (0.95, 0.9, True, True),
        (0.89, 0.8, True, False),
    ],
)
def test_a_slow_host_shows_as_even_gaps_that_are_short_or_between_small_kernels(
    engine: float, sm: float, flat: bool, host: bool
) -> None:
    shares = poured(
        WORKING,
        gr_engine_active=engine,
        sm_active=sm,
        tensor_active=0.05,
        dram_active=0.02,
        signs=frozenset({STEADY} if flat else ()),
    )
    assert ("host_overhead" in shares) == host
    assert shares["host_overhead" if host else "unattributed_stall"] == pytest.approx(1 - engine)


@pytest.mark.parametrize(("sm", "seconds", "engines", "tensor", "host"), [
    (0.5, 12, (0.5, 0.5), 0.02, True),
    (0.7, 12, (0.5, 0.5), 0.02, False),
    (0.5, 5, (0.5, 0.5), 0.02, False),
    (0.5, 12, (0.31, 0.89), 0.02, False),
    (0.5, 12, (0.2, 0.2), 0.02, False),
    (0.5, 12, (0.5, 0.5), 0.0, False),
])  # fmt: skip
def test_steps_of_small_kernels_between_others_wait_for_their_launches(
    sm: float, seconds: int, engines: tuple[float, float], tensor: float, host: bool
) -> None:
    """In a minute some seconds have even gaps between kernels that leave SMs idle; in the others the GPU is busy.

    Kernels of a job without any tensor work, as a renderer's, wait for something else.
    """
    ledger, busy = Ledger(), WORKING | {"gr_engine_active": 1.0, "tensor_active": 20 * tensor}
    advance(ledger, first([device()], [held(gpus=2, start=-60.0)]))
    for at in range(1, 181):
        engine = engines[at % 2]
        small = {"gr_engine_active": engine, "sm_active": sm * engine, "tensor_active": tensor, "dram_active": 0.05}
        advance(ledger, seen(at, reading(at - 1, at, busy | (small if (at - 1) % 60 < seconds else {}))))
        if at == 120:
            before = ledger.gpus["GPU-0"].book.parts[HOST_OVERHEAD]
    spent = ledger.gpus["GPU-0"].book.parts[HOST_OVERHEAD] - before
    waited = sum(1 - engines[at % 2] for at in range(121, 121 + seconds))
    assert spent / SECOND == pytest.approx(waited if host else 0.0)


@pytest.mark.parametrize(
    ("engine", "sm", "step", "received", "host"),
    [
        (0.6, 0.2, 30, 1e8, False),
        (0.6, 0.3, 30, 1e8, False),
        (0.6, 0.2, 30, 1e7, True),
        (0.6, 0.2, 10, 1e8, True),
        (0.95, 0.9, 30, 1e7, True),
    ],
)
def test_the_means_of_several_steps_that_wait_for_input_look_as_even_as_those_of_launches(
    engine: float, sm: float, step: int, received: float, host: bool
) -> None:
    """A job without input has even readings only if its gaps are even, and nearly full ones leave only gaps."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(gpus=2, start=-60.0)]))
    signals = WORKING | {"gr_engine_active": engine, "sm_active": sm, "tensor_active": 0.1, "dram_active": 0.05}
    signals |= {"pcie_tx_bytes_per_second": 0.0, "pcie_rx_bytes_per_second": received}
    for at in range(step, 181, step):
        advance(ledger, seen(at, reading(at - step, at, signals)))
    assert (ledger.gpus["GPU-0"].book.parts[HOST_OVERHEAD] > 0) == host


@pytest.mark.parametrize(
    ("engine", "sm", "flat", "host"),
    [
        (0.6, 0.5, True, True),
        (0.6, 0.2, False, True),
        (0.6, 0.5, False, False),
        (0.29, 0.1, True, False),
    ],
)
@pytest.mark.parametrize("phase", [DATA, CHECKPOINT, RESTORE, STARTUP])
def test_what_gaps_are_left_in_the_steps_of_a_job_that_times_its_phases_are_launches(
    engine: float, sm: float, flat: bool, host: bool, phase: int
) -> None:
    """Even gaps, or gaps between kernels that fill few SMs."""
    signals: dict[str, Any] = {
        "gr_engine_active": engine, "sm_active": sm, "tensor_active": 0.05, "dram_active": 0.02,
    }  # fmt: skip
    signs = frozenset({REPORTING, *([STEADY] if flat else [])})
    credit = WorkloadCredit(known={phase})
    shares = poured(WORKING, signs=signs, credit=credit, **signals)
    assert shares["host_overhead" if host else "unattributed_stall"] == pytest.approx(1 - engine)
    told = poured(WORKING, signs=signs, credit=WorkloadCredit(known={MODEL}), **signals)
    assert ("host_overhead" in told) is (flat and sm < 0.5 * engine and engine > 0.3)


def test_beside_the_traffic_of_links_less_bandwidth_is_enough_to_limit_a_kernel() -> None:
    """100 GB/s each way are .06 of the bandwidth; a kernel that reaches .96 of the rest of the ceiling is limited."""
    link = 2 * 100e9 / 3350e9
    found = poured(
        WORKING, gr_engine_active=1.0, tensor_active=0.0, sm_active=1.0, fp32_active=0.0,
        dram_active=0.96 * 0.92 / 2 + link / 2, nvlink_tx_bytes_per_second=100e9, nvlink_rx_bytes_per_second=100e9,
    )  # fmt: skip
    assert found["memory_bound"] == pytest.approx((0.96 * 0.92 / 2 - link / 2) / (0.96 * 0.92 - link), abs=2e-6)
    assert found["memory_bound"] == pytest.approx(0.5, abs=2e-6)


def test_spinning_of_several_gpus_is_waiting_for_a_peer_and_of_one_is_not() -> None:
    assert poured(SPINNING, gpus=2) == {"exposed_communication": 1.0}
    assert "exposed_communication" not in poured(SPINNING, gpus=1)


COLLECTIVE: dict[str, Any] = {
    "gr_engine_active": 1.0, "sm_active": 0.2, "tensor_active": 0.0, "dram_active": 0.3,
    "nvlink_tx_bytes_per_second": 200e9, "nvlink_rx_bytes_per_second": 200e9,
}  # fmt: skip


def test_a_second_of_pure_communication() -> None:
    """DRAM .3 less the link's own 2 x 200 / 3350 = .18 is below .35: nothing but moving data."""
    assert poured(WORKING, gpus=2, **COLLECTIVE) == {"exposed_communication": 1.0}


OWN_DRAM = 0.3 - 2 * 200 / 3350
"""DRAM activity of COLLECTIVE beyond its link's own traffic."""


@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        ({"tensor_active": 0.15}, 200 / 450 / 0.75, 1 - OWN_DRAM / (0.96 * 0.92)),
        ({"dram_active": 0.6}, 200 / 450 / 0.75, 1 - (0.6 - 2 * 200 / 3350) / (0.96 * 0.92)),
        ({"tensor_active": 0.35, "sm_active": 0.4}, 200 / 450 / 0.75, 1 - 0.35 / 0.88),
        ({"sm_active": 0.6, "tensor_active": 0.15}, 200 / 450 / 0.75, (0.955 - 0.6) / (0.955 - 0.14)),
        (
            {"nvlink_tx_bytes_per_second": 30e9, "nvlink_rx_bytes_per_second": 30e9},
            30 / 450 / 0.75,
            1 - (0.3 - 2 * 30 / 3350) / (0.96 * 0.92),
        ),
    ],
)
def test_a_second_with_something_else_in_it_is_mixed(change: dict[str, Any], low: float, high: float) -> None:
    """At least link / .75, for it may overlap with computing; at most what tensor, DRAM or idle SMs leave.

    Of the range between the bounds a tenth is booked, for a job that is not known to have kernels that fill the SMs.
    """
    share = min(low, high) + 0.1 * max(0.0, high - low)
    assert poured(WORKING, gpus=2, **COLLECTIVE | change)["exposed_communication"] == pytest.approx(share, abs=2e-6)


@pytest.mark.parametrize(
    ("gone", "share"),
    [
        ("nvlink", 0.1 * (1 - 0.3 / (0.96 * 0.92))),
        ("sm_active", 1.0),
        ("dram_active", 0.592593 + 0.1 * ((0.955 - 0.2) / (0.955 - 0.14) - 0.592593)),
        ("tensor_active", 0.0),
        ("spec", 0.0),
    ],
)
def test_communication_is_estimated_from_what_is_left(gone: str, share: float) -> None:
    """Without the link's rate, by idle SMs alone; without DRAM activity, no work of its own bounds the estimate."""
    missing: dict[str, Any] = {
        "nvlink": {"nvlink_tx_bytes_per_second": None, "nvlink_rx_bytes_per_second": None},
        "spec": {"spec": None},
    }.get(gone, {gone: None})
    shares = poured(WORKING, gpus=2, **(COLLECTIVE | {"nvlink_tx_bytes_per_second": 60e9} | missing))
    assert shares.get("exposed_communication", 0.0) == pytest.approx(share, abs=2e-6)


def test_a_mixed_second_without_sm_activity_gives_communication_nothing() -> None:
    """Without SM activity, the number of idle SMs and so the share is unknown."""
    mixed = COLLECTIVE | {"dram_active": 0.6, "sm_active": None}
    assert "exposed_communication" not in poured(WORKING, gpus=2, **mixed)


def test_a_board_without_nvlink_talks_over_pcie() -> None:
    lacks = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
    over_pcie: dict[str, Any] = (
        COLLECTIVE | dict.fromkeys(lacks) | {"pcie_tx_bytes_per_second": 20e9, "pcie_rx_bytes_per_second": 20e9}
    )
    assert poured(WORKING, gpus=2, lacks=lacks, **over_pcie) == {"exposed_communication": 1.0}
    unseen: dict[str, Any] = over_pcie | {"pcie_tx_bytes_per_second": None, "pcie_rx_bytes_per_second": None}
    by_idle_sms = 0.1 * (1 - 0.3 / (0.96 * 0.92))
    shares = poured(WORKING, gpus=2, lacks=lacks, **unseen)
    assert shares["exposed_communication"] == pytest.approx(by_idle_sms, abs=2e-6)


def test_the_links_own_traffic_is_unknown_without_the_memorys_bandwidth() -> None:
    spec = replace(H100, memory_bandwidth_bytes_per_second=None)
    assert poured(WORKING, gpus=2, spec=spec, **(COLLECTIVE | {"dram_active": 0.36}))["exposed_communication"] < 1.0


@pytest.mark.parametrize(("gone", "residual"), [("dram_active", "memory_bound"), ("sm_active", "low_parallelism")])
def test_a_missing_fields_share_goes_to_the_residual(gone: str, residual: str) -> None:
    missing: dict[str, Any] = {gone: None}
    shares = poured(WORKING, **missing)
    assert residual not in shares
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["other_compute"] > poured(WORKING)["other_compute"]


def test_without_a_tensor_counter_nothing_is_called_waste() -> None:
    assert poured(WORKING, tensor_active=None) == {"unattributed_stall": 0.05, "unresolved": 0.95}


def test_a_leak_of_two_pools_drains_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubbles take waiting first, then slack: a waiting stage may run a polling kernel."""
    plan = ((-1, (WAIT, SLACK), ((7, lambda *_: 300_000),)), (SLACK, (SLACK,), ((16, leaks.take_remainder),)))
    monkeypatch.setitem(leaks._plans, (State.ACTIVE, NO_SIGNS), plan)
    assert poured(WORKING) == {"pipeline_bubble": 0.3, "other_compute": 0.25, "useful": 0.45}
    assert (WAIT, SLACK, CLOCK, TENSOR) == (0, 1, 2, 3)


def test_a_detector_asked_without_a_board_guesses_nothing() -> None:
    """Not reached by `split_into_leaks`: without a spec all kernel time is unresolved."""
    ev = evaluate(reading(0, 1, WORKING | COLLECTIVE), device(spec=None), POLICY)
    assert leaks.detect_exposed_communication(Span(ev, State.ACTIVE, POLICY, [0, PPM, 0, 0, 0], PPM, 2), PPM) == 0


def test_the_residual_detector_asks_for_all_there_is() -> None:
    ev = evaluate(reading(0, 1), device(), POLICY)
    assert leaks.take_remainder(Span(ev, State.ACTIVE, POLICY, [1, 2, 3, 4, 5], PPM), 7) == 7
