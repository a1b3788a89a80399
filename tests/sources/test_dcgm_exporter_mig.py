"""Tests the dcgm-exporter source on boards in MIG mode: weights add up to exactly one board."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.ledger import Ledger
from exporter.core.model import PPM, SECOND, Device, Observation, Reading, Spec
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.sources.base import ReadResult
from exporter.sources.dcgm_exporter.source import DcgmExporterSource
from tests.sources.exporter_pages import H100, Pages, gpu

A30 = "NVIDIA A30"
SPECS = {
    H100: Spec("H100-SXM5-80GB", peak_flops=700e12, memory_bandwidth_bytes_per_second=800e9),
    A30: Spec("A30", peak_flops=400e12, memory_bandwidth_bytes_per_second=800e9),
    "NVIDIA H200": Spec("H200-SXM", peak_flops=700e12, memory_bandwidth_bytes_per_second=800e9, memory_gb=141.0),
    "NVIDIA GH200 480GB": Spec(
        "GH200-96GB", peak_flops=700e12, memory_bandwidth_bytes_per_second=800e9, memory_gb=96.0
    ),
    "NVIDIA Future": Spec("Future", peak_flops=700e12, memory_bandwidth_bytes_per_second=800e9),
}
OWN = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.9",
    "DCGM_FI_PROF_SM_ACTIVE": "0.8",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.4",
    "DCGM_FI_PROF_DRAM_ACTIVE": "0.3",
    "DCGM_FI_DEV_FB_USED": "1000",
    "DCGM_FI_DEV_FB_FREE": "8000",
}
SHARED = {
    "DCGM_FI_DEV_POWER_USAGE": "350.5",
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": "700",
    "DCGM_FI_DEV_GPU_TEMP": "55",
    "DCGM_FI_DEV_SM_CLOCK": "1980",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "4",
    "DCGM_FI_DEV_GPU_UTIL": "98",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "5",
    "DCGM_FI_PROF_NVLINK_RX_BYTES": "6",
}


def board(*profiles: str, index: int = 0, model: str = H100, first: int = 1, **figures: str) -> str:
    """Return a board's page as of a default installation: all lines belong to instances, ids from `first`."""
    return "".join(
        gpu(index, {**OWN, **SHARED, **figures}, GPU_I_ID=str(n), GPU_I_PROFILE=profile, modelName=model)
        for n, profile in enumerate(profiles, first)
    )


def opened(*pages: str) -> DcgmExporterSource:
    return DcgmExporterSource("http://node1:9400/metrics", fetch=Pages(*pages), lookup=SPECS.get)


def devices(page: str) -> dict[str, Device]:
    return {device.uuid: device for device in opened(page).read(0).devices}


def readings(page: str) -> dict[str, Reading]:
    src = opened(page)
    src.read(0)
    return {r.uuid: r for r in src.read(10 * SECOND).readings}


def weights(page: str) -> list[int]:
    return [device.weight for device in devices(page).values()]


def test_instances_are_devices_beside_what_is_left_of_their_board() -> None:
    found = devices(board("3g.40gb", "1g.10gb+me"))
    assert list(found) == ["GPU-0", "GPU-0/1", "GPU-0/2"]
    rest, three, one = found.values()
    assert rest == Device("GPU-0", "0", H100, SPECS[H100], rest.lacks, weight=428572)
    assert (three.index, three.parent, three.profile, three.weight) == ("0:1", "GPU-0", "3g.40gb", 428571)
    assert (one.index, one.parent, one.profile, one.weight) == ("0:2", "GPU-0", "1g.10gb+me", 142857)
    assert {three.model, one.model} == {H100}
    assert three.lacks == one.lacks == ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")


def test_boards_and_instances_come_in_their_order_as_numbers() -> None:
    page = board("1g.10gb", "1g.10gb", index=10, first=9) + gpu(2) + board("7g.80gb", index=0)
    assert [d.index for d in opened(page).read(0).devices] == ["0", "0:1", "2", "10", "10:9", "10:10"]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (board(*["1g.10gb"] * 7), [0, 142857, 142857, 142857, 142857, 142857, 142857, 142858]),
        (board("7g.80gb"), [0, PPM]),
        (board("3g.40gb", "3g.40gb"), [142858, 428571, 428571]),
        (board("1c.3g.40gb"), [571429, 428571]),
        (board("2g.12gb", "1g.6gb", model=A30), [250000, 500000, 250000]),
        (board("1g.24gb", model="NVIDIA RTX PRO 6000 Blackwell Server Edition"), [750000, 250000]),
        (board("1g.24gb", model="NVIDIA RTX PRO 5000 Blackwell"), [500000, 500000]),
        (board("1g.10gb", DCGM_FI_DEV_MIG_MAX_SLICES="8"), [875000, 125000]),
    ],
)
def test_a_part_weighs_its_compute_slices(page: str, expected: list[int]) -> None:
    assert weights(page) == expected


@given(st.lists(st.integers(1, 7), min_size=1, max_size=7).filter(lambda sizes: sum(sizes) <= 7))
def test_all_parts_together_are_one_gpu_and_each_is_right_to_a_millionth(sizes: list[int]) -> None:
    rest, *parts = weights(board(*(f"{size}g.10gb" for size in sizes)))
    assert rest + sum(parts) == PPM
    assert all(abs(part - size * PPM / 7) < 1 for part, size in zip(parts, sizes, strict=True))


# Specs.


@pytest.mark.parametrize(
    ("page", "peak", "bandwidth"),
    [
        (board("3g.40gb"), 300e12, 400e9),
        (board("7g.80gb"), 700e12, 800e9),
        (board("1g.10gb"), 100e12, 100e9),
        (board("1g.20gb"), 100e12, 200e9),
        (board("2g.12gb", model=A30), 200e12, 400e9),
        (board("1g.18gb", model="NVIDIA H200"), 100e12, 100e9),
        (board("1g.35gb", model="NVIDIA H200"), 100e12, 200e9),
        # One slice may have one part of the memory or two: nobody says which.
        (board("1g.12gb", model="NVIDIA GH200 480GB"), 100e12, None),
        (board("1g.99gb", model="NVIDIA Future"), 100e12, None),
    ],
)
def test_a_part_s_peaks_are_its_share_of_the_board_s(page: str, peak: float, bandwidth: float | None) -> None:
    spec = devices(page)["GPU-0/1"].spec
    assert spec is not None
    assert spec.peak_flops == pytest.approx(peak)
    assert spec.memory_bandwidth_bytes_per_second == (bandwidth if bandwidth is None else pytest.approx(bandwidth))


def test_measured_memory_decides_where_both_are_shown() -> None:
    page = board("1g.12gb", model="NVIDIA GH200 480GB", DCGM_FI_DEV_FB_FREE="23000") + gpu(
        0, {"DCGM_FI_DEV_FB_TOTAL": "97871"}, modelName="NVIDIA GH200 480GB"
    )
    spec = devices(page)["GPU-0/1"].spec
    assert spec is not None
    assert spec.memory_bandwidth_bytes_per_second == pytest.approx(200e9)


def test_parts_of_an_unknown_board_have_no_spec_and_it_is_said_once_for_the_board() -> None:
    src = opened(board("3g.40gb", model="Never Heard Of"))
    first = src.read(0)
    assert [d.spec for d in first.devices] == [None, None]
    assert [(f.kind, f.uuid) for f in first.faults] == [("unknown_model", "GPU-0")]
    assert src.read(SECOND).faults == ()


# Readings.


def test_an_instance_has_its_own_figures_and_its_board_s_clock_alone() -> None:
    got = readings(board("3g.40gb"))["GPU-0/1"]
    assert got == Reading(
        "GPU-0/1",
        0,
        10 * SECOND,
        gr_engine_active=0.9,
        sm_active=0.8,
        tensor_active=0.4,
        dram_active=0.3,
        memory_used_bytes=1000.0 * 2**20,
        memory_total_bytes=9000.0 * 2**20,
        sm_clock_hz=1.98e9,
        energy_joules=got.energy_joules,
    )


def test_what_is_left_does_nothing_and_has_the_board_s_own_figures() -> None:
    got = readings(board("3g.40gb"))["GPU-0"]
    assert got == Reading(
        "GPU-0",
        0,
        10 * SECOND,
        gr_engine_active=0.0,
        sm_active=0.0,
        tensor_active=0.0,
        dram_active=0.0,
        power_watts=350.5,
        enforced_power_limit_watts=700.0,
        temperature_celsius=55.0,
        sm_clock_hz=1.98e9,
        clock_event_reasons=4,
        energy_joules=got.energy_joules,
    )


def test_only_what_parts_of_a_board_have_is_announced() -> None:
    src = opened(board("3g.40gb") + gpu(0, SHARED))
    src.probe()
    src.read(0)
    told = src.read(SECOND).readings
    assert src.signals == {f for r in told for f in r.__struct_fields__[3:-1] if getattr(r, f) is not None}
    assert not {"gpu_utilization", "pcie_tx_bytes_per_second", "nvlink_rx_bytes_per_second"} & src.signals


def test_activity_that_no_instance_shows_is_not_claimed_for_the_rest_either() -> None:
    src = opened(gpu(0, {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.5"}, GPU_I_ID="1", GPU_I_PROFILE="3g.40gb"))
    src.read(0)
    rest = src.read(SECOND).readings[0]
    assert (rest.gr_engine_active, rest.sm_active, rest.tensor_active, rest.dram_active) == (0.0, None, None, None)
    assert src.signals == {"gr_engine_active"}


def test_the_board_s_own_lines_win_over_what_its_instances_say_of_it_in_any_order() -> None:
    own = gpu(0, {"DCGM_FI_DEV_POWER_USAGE": "400", "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.7", "DCGM_FI_DEV_FB_USED": "7"})
    for page in (own + board("3g.40gb"), board("3g.40gb") + own):
        got = readings(page)
        assert (got["GPU-0"].power_watts, got["GPU-0"].temperature_celsius) == (400.0, 55.0)
        assert (got["GPU-0"].gr_engine_active, got["GPU-0"].memory_used_bytes) == (0.0, None)
        assert (got["GPU-0/1"].gr_engine_active, got["GPU-0/1"].power_watts) == (0.9, None)


def test_lines_for_each_pod_and_for_each_instance_are_one_measurement() -> None:
    one, other = (board("3g.40gb", "3g.40gb", DCGM_FI_DEV_POWER_USAGE=watts) for watts in ("350.5", "351"))
    src = opened(one + other)
    batch = src.read(0)
    assert batch.faults == ()
    assert len(batch.devices) == 3


def test_an_instance_that_contradicts_itself_is_told_of_its_board() -> None:
    page = board("3g.40gb") + board("3g.40gb", DCGM_FI_PROF_DRAM_ACTIVE="0.9")
    (fault,) = opened(page).read(0).faults
    assert (fault.kind, fault.uuid) == ("conflicting_series", "GPU-0")
    assert "DCGM_FI_PROF_DRAM_ACTIVE" in fault.message


def test_the_board_s_energy_is_shared_by_weight() -> None:
    src = opened(*(board("3g.40gb", "1g.10gb", DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION=str(mj)) for mj in (0, 21_000_000)))
    src.read(0)
    rest, three, one = (r.energy_joules for r in src.read(30 * SECOND).readings)
    assert (rest, three, one) == pytest.approx((21e3 * 0.428572, 21e3 * 0.428571, 21e3 * 0.142857))
    assert "energy_joules" in src.signals


def test_without_a_counter_the_energy_is_that_of_the_power_and_without_power_unknown() -> None:
    shares = [r.energy_joules for r in readings(board("3g.40gb")).values()]
    assert sum(filter(None, shares)) == pytest.approx(3505.0)
    blank = board("3g.40gb", DCGM_FI_DEV_POWER_USAGE="N/A")
    assert [r.energy_joules for r in readings(blank).values()] == [None, None]


# What is left of a board.


@pytest.mark.parametrize(
    ("free", "total", "stranded"), [("39000", "81559", True), ("30000", "81559", False), ("39000", "", False)]
)
def test_slices_without_memory_are_stranded_if_the_page_tells(free: str, total: str, *, stranded: bool) -> None:
    own = gpu(0, {"DCGM_FI_DEV_FB_TOTAL": total}) if total else ""
    page = board("3g.40gb", "3g.40gb", DCGM_FI_DEV_FB_FREE=free) + own
    assert [d.stranded for d in devices(page).values()] == [stranded, False, False]


def test_of_a_board_without_slices_left_nothing_is_stranded() -> None:
    page = board("7g.80gb", DCGM_FI_DEV_FB_FREE="80000") + gpu(0, {"DCGM_FI_DEV_FB_TOTAL": "81559"})
    assert [(d.weight, d.stranded) for d in devices(page).values()] == [(0, False), (PPM, False)]


# Changes while running.


def seen(batch: ReadResult) -> list[tuple[str, int]]:
    return [(r.uuid, r.start // SECOND) for r in batch.readings]


def test_a_new_partition_begins_anew_and_what_is_gone_is_gone() -> None:
    two, other = board("3g.40gb", "2g.20gb"), board("3g.40gb", "1g.10gb")
    src = opened(two + gpu(1), two + gpu(1), other + gpu(1), other + gpu(1))
    src.read(0)
    assert seen(src.read(10 * SECOND)) == [("GPU-0", 0), ("GPU-0/1", 0), ("GPU-0/2", 0), ("GPU-1", 0)]
    changed = src.read(20 * SECOND)
    assert [d.profile for d in changed.devices] == ["", "3g.40gb", "1g.10gb", ""]
    assert seen(changed) == [("GPU-1", 10)]
    assert changed.faults == ()
    assert seen(src.read(30 * SECOND)) == [("GPU-0", 20), ("GPU-0/1", 20), ("GPU-0/2", 20), ("GPU-1", 20)]


def test_an_instance_destroyed_is_dropped_and_mig_switched_off_is_a_whole_board() -> None:
    src = opened(board("3g.40gb", "2g.20gb"), board("3g.40gb"), gpu(0))
    src.read(0)
    fewer = src.read(10 * SECOND)
    assert [(d.uuid, d.weight, d.condition) for d in fewer.devices] == [
        ("GPU-0", 571429, ""),
        ("GPU-0/1", 428571, ""),
    ]
    whole = src.read(20 * SECOND)
    assert [(d.uuid, d.weight) for d in whole.devices] == [("GPU-0", PPM)]
    assert fewer.faults == whole.faults == ()
    assert fewer.readings == whole.readings == ()
    assert seen(src.read(30 * SECOND)) == [("GPU-0", 20)]


def test_with_a_board_its_instances_are_missing_and_come_back() -> None:
    mig, alone = board("3g.40gb") + gpu(1), gpu(1)
    src = opened(mig, mig, alone, mig, mig)
    src.read(0)
    src.read(10 * SECOND)
    gone = src.read(20 * SECOND)
    assert [(d.uuid, d.condition) for d in gone.devices] == [
        ("GPU-0", "missing"),
        ("GPU-0/1", "missing"),
        ("GPU-1", ""),
    ]
    assert [(f.kind, f.uuid) for f in gone.faults] == [("gpu_missing", "GPU-0")]
    back = src.read(30 * SECOND)
    assert {d.condition for d in back.devices} == {""}
    assert seen(back) == [("GPU-1", 20)]
    assert seen(src.read(40 * SECOND)) == [("GPU-0", 30), ("GPU-0/1", 30), ("GPU-1", 30)]


@pytest.mark.parametrize(
    "page",
    [
        board("4g.40gb", "4g.40gb"),
        board("3g.40gb", "profile of the future"),
        gpu(0, OWN, GPU_I_PROFILE="3g.40gb"),
        gpu(0, OWN, GPU_I_ID="3"),
        gpu(0, OWN, GPU_I_ID="three", GPU_I_PROFILE="3g.40gb"),
        gpu(0, OWN, GPU_I_ID="9" * 5000, GPU_I_PROFILE="3g.40gb"),
        board("3g.24gb", "2g.12gb", model=A30),
    ],
)
def test_instances_that_make_no_board_leave_it_whole_and_unobserved(page: str) -> None:
    src = opened(page + gpu(1))
    src.read(0)
    batch = src.read(10 * SECOND)
    assert [(d.uuid, d.weight, d.condition) for d in batch.devices] == [("GPU-0", PPM, ""), ("GPU-1", PPM, "")]
    assert seen(batch) == [("GPU-1", 0)]
    assert [(f.kind, f.uuid) for f in batch.faults] == [("mig_layout", "GPU-0")]
    assert "nvidia-smi mig -lgi" in batch.faults[0].message


def test_a_board_that_wants_recovery_takes_its_instances_with_it() -> None:
    found = devices(board("3g.40gb", DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION="1"))
    assert [d.condition for d in found.values()] == ["recovery", "recovery"]


# Doubt.


def test_a_blank_instance_is_doubted_alone() -> None:
    page = board("3g.40gb") + gpu(0, dict.fromkeys(OWN, "N/A"), GPU_I_ID="2", GPU_I_PROFILE="1g.10gb")
    assert [(r.uuid, r.distrust) for r in readings(page).values()] == [
        ("GPU-0", ""),
        ("GPU-0/1", ""),
        ("GPU-0/2", "blank"),
    ]


def test_a_board_whose_instances_all_say_nothing_is_doubted() -> None:
    blank = gpu(0, dict.fromkeys(OWN, "N/A"), GPU_I_ID="2", GPU_I_PROFILE="1g.10gb")
    assert [r.distrust for r in readings(blank + gpu(1)).values()] == ["blank", "blank", ""]


def test_a_page_that_stands_still_is_stale_for_every_part() -> None:
    # Only an instance is at work; its board's lines never change.
    src = opened(board("3g.40gb"))
    told = [{r.distrust for r in src.read(n * 10 * SECOND).readings} for n in range(12)]
    assert told[9:11] == [{""}, {"stale"}]


def test_what_is_left_needs_no_figures_of_the_board_to_be_believed() -> None:
    page = gpu(0, OWN, GPU_I_ID="1", GPU_I_PROFILE="3g.40gb")
    assert [(r.distrust, r.gr_engine_active) for r in readings(page).values()] == [("", 0.0), ("", 0.9)]


def test_instances_that_change_places_have_moved() -> None:
    def page(*values: str) -> str:
        figure = "DCGM_FI_PROF_DRAM_ACTIVE"
        return "".join(
            gpu(0, {figure: v}, GPU_I_ID=i, GPU_I_PROFILE="1g.10gb") for i, v in zip("12", values, strict=True)
        )

    src = opened(*[page("0.1", "0.2"), page("0.2", "0.1")] * 15)
    assert {r.distrust for n in range(30) for r in src.read(n * 10 * SECOND).readings} == {""}


def test_one_instance_that_moves_keeps_its_board_fresh() -> None:
    pages = [board("3g.40gb", DCGM_FI_PROF_DRAM_ACTIVE=f"0.{n}") for n in range(10, 40)]
    src = opened(*pages)
    assert {r.distrust for n in range(30) for r in src.read(n * 10 * SECOND).readings} == {""}


# Through the ledger.


def test_a_partitioned_board_is_paid_once_through_every_change() -> None:
    pages = [
        gpu(0),
        gpu(0),
        board("3g.40gb", "1g.10gb"),
        board("3g.40gb", "1g.10gb"),
        board("4g.40gb", "1g.10gb", "2g.20gb"),
        board("4g.40gb", "1g.10gb", "2g.20gb"),
        gpu(0),
        gpu(0),
    ]
    src, ledger = opened(*pages), Ledger(Policy())
    for n in range(len(pages)):
        now = n * 30 * SECOND
        batch = src.read(now)
        advance(ledger, Observation(now, now, batch.readings, devices=batch.devices, faults=batch.faults))
    assert ledger.conservation_errors == 0
    assert sum(one.book.paid for one in ledger.gpus.values()) == 210 * SECOND


def test_a_board_that_is_busier_than_its_instances_explain_has_more_of_them() -> None:
    """What is left of it would be booked as free while other instances work."""
    whole = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.996"}
    page = gpu(0, whole) + board("1g.10gb", DCGM_FI_PROF_GR_ENGINE_ACTIVE="0.05")
    src = opened(page)
    (fault,) = src.read(0).faults
    assert (fault.kind, fault.uuid) == ("mig_layout", "GPU-0")
    assert "activity of 99.6%, and the instances on the page explain 5.0% at most" in fault.message
    rest, instance = src.read(10 * SECOND).readings
    assert (rest.distrust, instance.distrust) == ("mig_layout", "")


@pytest.mark.parametrize(
    "instances",
    [
        board("1g.10gb", DCGM_FI_PROF_GR_ENGINE_ACTIVE="0.9"),
        board("1g.10gb", "2g.20gb", DCGM_FI_PROF_GR_ENGINE_ACTIVE="0.5"),
        board("1g.10gb", DCGM_FI_PROF_GR_ENGINE_ACTIVE="NaN"),
    ],
    ids=["one busy", "two half busy", "not known"],
)
def test_a_board_s_own_line_that_its_instances_explain_changes_nothing(instances: str) -> None:
    src = opened(gpu(0, {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.996"}) + instances)
    assert src.read(0).faults == ()
    assert src.read(10 * SECOND).readings[0].distrust == ""
