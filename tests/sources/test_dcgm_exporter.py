"""Tests the dcgm-exporter source on pages of all releases and on garbage; MIG, health and HTTP have their own files."""

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import PPM, SECOND, Device, Reading
from exporter.sources.base import SourceError
from exporter.sources.dcgm_exporter.source import DcgmExporterSource
from exporter.specs import find_spec
from tests.sources.conformance import LAWS, Law
from tests.sources.exporter_pages import BUSY, ENERGY, H100, L4, SPECS, Pages, gpu, kinds, reading, source

# What each generation calls a field, and its unit.


@pytest.mark.parametrize(
    ("line", "value", "field", "expected"),
    [
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0.5", "gr_engine_active", 0.5),
        ("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", "0.5", "gr_engine_active", 0.5),
        ("dcgm_fi_prof_gr_engine_active", "0.5", "gr_engine_active", 0.5),
        ("DCGM_FI_PROF_SM_ACTIVE", "0.5", "sm_active", 0.5),
        ("DCGM_FI_PROF_SM_UTIL_RATIO", "0.5", "sm_active", 0.5),
        ("DCGM_FI_PROF_SM_OCCUPANCY", "0.25", "sm_occupancy", 0.25),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "0.5", "tensor_active", 0.5),
        ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", "0.5", "tensor_active", 0.5),
        ("DCGM_FI_PROF_DRAM_ACTIVE", "0.5", "dram_active", 0.5),
        ("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "0.1", "fp64_active", 0.1),
        ("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "0.1", "fp32_active", 0.1),
        ("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "0.1", "fp16_active", 0.1),
        ("DCGM_FI_PROF_PIPE_INT_ACTIVE", "0.1", "int_active", 0.1),
        ("DCGM_FI_PROF_INT_UTIL_RATIO", "0.1", "int_active", 0.1),
        ("DCGM_FI_PROF_C2C_TX_ALL_BYTES", "9", "c2c_tx_bytes_per_second", 9.0),
        ("DCGM_FI_PROF_C2C_RX_ALL_BYTES", "10", "c2c_rx_bytes_per_second", 10.0),
        ("DCGM_FI_DEV_ENC_UTIL", "35", "encoder_utilization", 0.35),
        ("dcgm_enc_utilization", "35", "encoder_utilization", 0.35),
        ("DCGM_FI_DEV_DEC_UTIL", "70", "decoder_utilization", 0.7),
        ("dcgm_dec_utilization", "70", "decoder_utilization", 0.7),
        ("DCGM_FI_PROF_PCIE_TX_BYTES", "29285", "pcie_tx_bytes_per_second", 29285.0),
        ("DCGM_FI_PROF_PCIE_RX_BYTES", "30378", "pcie_rx_bytes_per_second", 30378.0),
        ("DCGM_FI_PROF_NVLINK_TX_BYTES", "7", "nvlink_tx_bytes_per_second", 7.0),
        ("DCGM_FI_PROF_NVLINK_RX_BYTES", "8", "nvlink_rx_bytes_per_second", 8.0),
        ("DCGM_FI_DEV_GPU_UTIL", "98", "gpu_utilization", 0.98),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", "0.98", "gpu_utilization", 0.98),
        ("dcgm_gpu_utilization", "98", "gpu_utilization", 0.98),
        ("DCGM_FI_DEV_POWER_USAGE", "14.512", "power_watts", 14.512),
        ("DCGM_FI_DEV_BOARD_POWER_WATTS", "14.512", "power_watts", 14.512),
        ("DCGM_FI_DEV_POWER_USAGE_INSTANT", "14.512", "power_watts", 14.512),
        ("dcgm_power_usage", "14.512", "power_watts", 14.512),
        ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "700", "enforced_power_limit_watts", 700.0),
        ("DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", "700", "enforced_power_limit_watts", 700.0),
        ("DCGM_FI_DEV_POWER_MGMT_LIMIT", "700", "enforced_power_limit_watts", 700.0),
        ("DCGM_FI_DEV_GPU_TEMP", "24", "temperature_celsius", 24.0),
        ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", "24", "temperature_celsius", 24.0),
        ("DCGM_FI_DEV_SM_CLOCK", "1980", "sm_clock_hz", 1.98e9),
        ("DCGM_FI_DEV_SM_CLOCK_HERTZ", "1980000000", "sm_clock_hz", 1.98e9),
        ("dcgm_sm_clock", "1980", "sm_clock_hz", 1.98e9),
        ("DCGM_FI_DEV_FB_USED", "2", "memory_used_bytes", 2.0 * 2**20),
        ("DCGM_FI_DEV_FB_USED_BYTES", "2097152", "memory_used_bytes", 2.0 * 2**20),
        ("dcgm_fb_used", "2", "memory_used_bytes", 2.0 * 2**20),
        ("DCGM_FI_DEV_FB_TOTAL", "4", "memory_total_bytes", 4.0 * 2**20),
        ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "36", "clock_event_reasons", 36),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "36", "clock_event_reasons", 36),
    ],
)
def test_each_name_of_each_generation_gives_its_field_in_base_units(
    line: str, value: str, field: str, expected: float
) -> None:
    got = getattr(reading({line: value}), field)
    assert got == pytest.approx(expected)
    assert type(got) is type(expected)


def test_the_field_that_says_more_is_preferred_whatever_the_order() -> None:
    both = {"DCGM_FI_DEV_POWER_MGMT_LIMIT": "700", "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": "500"}
    assert reading(both).enforced_power_limit_watts == 500.0
    assert reading(dict(reversed(both.items()))).enforced_power_limit_watts == 500.0


def test_a_counter_by_type_is_still_a_rate() -> None:
    typed = "# TYPE DCGM_FI_PROF_PCIE_TX_BYTES counter\n" + gpu(0, {"DCGM_FI_PROF_PCIE_TX_BYTES": "5e9"})
    src = source(typed)
    src.read(0)
    assert src.read(SECOND).readings[0].pcie_tx_bytes_per_second == 5e9


def test_tensor_parts_stand_in_for_the_whole_only_if_both_common_ones_are_there() -> None:
    hmma, imma, dfma = (f"DCGM_FI_PROF_PIPE_TENSOR_{kind}_ACTIVE" for kind in ("HMMA", "IMMA", "DFMA"))
    assert reading({hmma: "0.3", imma: "0.1"}).tensor_active == pytest.approx(0.4)
    assert reading({hmma: "0.3", imma: "0.1", dfma: "0.05"}).tensor_active == pytest.approx(0.45)
    assert reading({hmma: "0.3"}).tensor_active is None
    whole = reading({hmma: "0.3", imma: "0.1", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.35"})
    assert whole.tensor_active == 0.35


def test_total_memory_is_the_sum_of_its_parts_where_it_is_not_told() -> None:
    parts = {"DCGM_FI_DEV_FB_USED": "1000", "DCGM_FI_DEV_FB_FREE": "79000", "DCGM_FI_DEV_FB_RESERVED": "559"}
    assert reading(parts).memory_total_bytes == 80559 * 2**20
    assert reading({"DCGM_FI_DEV_FB_USED": "1000"}).memory_total_bytes is None


def test_nothing_is_invented_for_a_field_that_is_not_there() -> None:
    got = reading({"DCGM_FI_DEV_GPU_TEMP": "30"})
    absent = [f for f in Reading.__struct_fields__ if getattr(got, f) is None]
    assert {"gr_engine_active", "sm_active", "power_watts", "energy_joules", "processes"} <= set(absent)
    assert got.distrust == ""


# What is no measurement.


@pytest.mark.parametrize(
    "blank",
    [
        "140737488355328.0",
        "140737488355330.0",
        "140737488355331",
        "2147483632",
        "2147483635",
        "9223372036854775792",
        "9223372036854775794",
        "NaN",
        "+Inf",
        "-1",
        "N/A",
        "[N/A]",
        "ERROR - FAILED TO CONVERT TO STRING",
    ],
)
def test_blanks_and_sentinels_are_not_seen(blank: str) -> None:
    src = source(gpu(0, {**BUSY, "DCGM_FI_PROF_DRAM_ACTIVE": blank}))
    src.read(0)
    batch = src.read(SECOND)
    assert batch.readings[0].dram_active is None
    assert batch.readings[0].gr_engine_active == 0.95
    assert batch.faults == ()


def test_a_ratio_out_of_range_passes_for_the_core_to_judge() -> None:
    assert reading({"DCGM_FI_PROF_GR_ENGINE_ACTIVE": "1.7"}).gr_engine_active == 1.7


def test_a_gpu_with_nothing_but_blanks_is_there_and_says_so() -> None:
    page = gpu(0) + gpu(1, dict.fromkeys(BUSY, "N/A"))
    src = source(page)
    src.read(0)
    batch = src.read(SECOND)
    assert [(r.uuid, r.distrust) for r in batch.readings] == [("GPU-0", ""), ("GPU-1", "blank")]
    assert [d.condition for d in batch.devices] == ["", ""]


# Whose lines they are.


def test_devices_come_in_the_drivers_order_with_spec_and_lacks() -> None:
    page = gpu(10) + gpu(2, modelName=L4) + gpu(0, modelName="Never Heard Of")
    assert source(page).read(0).devices == (
        Device("GPU-0", "0", "Never Heard Of"),
        Device("GPU-2", "2", L4, SPECS[L4], ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")),
        Device("GPU-10", "10", H100, SPECS[H100]),
    )


@pytest.mark.parametrize("index", ["", "x", "9" * 5000])
def test_a_gpu_whose_index_is_none_comes_last(index: str) -> None:
    assert [d.uuid for d in source(gpu(0, gpu=index) + gpu(3)).read(0).devices] == ["GPU-3", "GPU-0"]


def test_a_model_without_figures_is_told_once_for_each_gpu_and_not_by_the_probe() -> None:
    src = source(gpu(0, modelName="Never Heard Of") + gpu(1) + gpu(2, modelName="Never Heard Of"))
    src.probe()
    assert [(f.kind, f.uuid) for f in src.read(0).faults] == [("unknown_model", "GPU-0"), ("unknown_model", "GPU-2")]
    src.resync()
    assert src.read(SECOND).faults == ()


@pytest.mark.parametrize(
    "model", [H100, "NVIDIA A100-SXM4-80GB", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"]
)
def test_a_model_whose_blanks_are_dashes_has_the_drivers_name(model: str) -> None:
    page = gpu(0, modelName=model.replace(" ", "-"))
    result = DcgmExporterSource("http://node1:9400/metrics", fetch=Pages(page)).read(0)
    assert [(d.model, d.spec) for d in result.devices] == [(model, find_spec(model))]
    assert result.devices[0].spec is not None
    assert result.faults == ()


@pytest.mark.parametrize("model", ["Never-Heard-Of", "-" * 5000, "NVIDIA H100-80GB-HBM3"])
def test_an_unknown_model_keeps_its_name(model: str) -> None:
    result = source(gpu(0, modelName=model)).read(0)
    assert [(d.model, d.spec) for d in result.devices] == [(model, None)]


def test_lower_case_labels_are_read_too() -> None:
    page = gpu(0, UUID="", uuid="GPU-a", Hostname="", hostname="node1")
    assert [d.uuid for d in source(page).read(0).devices] == ["GPU-a"]


def test_a_line_for_each_pod_is_one_measurement() -> None:
    page = "".join(gpu(0, pod=p, namespace="ml", container="main") for p in ("a", "b", "c"))
    src = source(page)
    src.read(0)
    batch = src.read(SECOND)
    assert [(r.gr_engine_active, r.power_watts) for r in batch.readings] == [(0.95, 512.25)]
    assert batch.faults == ()


@pytest.mark.parametrize("order", list(permutations(("", "idle-0", "busy-0"))))
def test_shares_of_pods_are_not_what_the_gpu_does(order: tuple[str, ...]) -> None:
    """Since NVIDIA/dcgm-exporter#594, --kubernetes-virtual-gpus gives each pod its share of two metrics as well."""
    values = {"": (98, 41000), "idle-0": (0, 500), "busy-0": (97, 40000)}
    page = "".join(
        gpu(0, {name: str(value)}, pod=pod, namespace=pod and "ml")
        for name, column in (("DCGM_FI_DEV_GPU_UTIL", 0), ("DCGM_FI_DEV_FB_USED", 1))
        for pod in order
        for value in [values[pod][column]]
    )
    src = source(page)
    src.read(0)
    batch = src.read(SECOND)
    assert [(r.gpu_utilization, r.memory_used_bytes) for r in batch.readings] == [(0.98, 41000 * 2**20)]
    assert batch.faults == ()
    assert batch.owner_labels is not None
    assert {label.pod for label in batch.owner_labels["GPU-0"]} == {"idle-0", "busy-0"}


def test_lines_that_contradict_each_other_are_told() -> None:
    page = gpu(0) + gpu(0, {**BUSY, "DCGM_FI_DEV_POWER_USAGE": "90"}, pod="b")
    src = source(page)
    src.read(0)
    batch = src.read(SECOND)
    assert kinds(batch.faults) == ["conflicting_series"]
    assert "DCGM_FI_DEV_POWER_USAGE" in batch.faults[0].message
    assert batch.readings[0].power_watts == 512.25


def test_several_hosts_are_refused_unless_one_is_chosen() -> None:
    page = gpu(0, Hostname="a") + gpu(1, Hostname="b")
    with pytest.raises(SourceError, match=r"2 hosts \(a, b\).*dcgm_exporter.url"):
        source(page).read(0)
    assert [d.uuid for d in source(page, hostname="b").read(0).devices] == ["GPU-1"]
    with pytest.raises(SourceError, match=r"no GPU of host 'c'.*a, b"):
        source(page, hostname="c").read(0)


def test_another_nodes_gpus_behind_the_same_address_are_refused() -> None:
    src = source(gpu(0, Hostname="a"), gpu(1, Hostname="b"), gpu(0, Hostname="a"))
    src.read(0)
    with pytest.raises(SourceError, match="load-balanced"):
        src.read(SECOND)
    assert [(r.uuid, r.start) for r in src.read(2 * SECOND).readings] == [("GPU-0", 0)]


def test_a_vanished_gpu_stays_in_the_inventory_and_its_return_claims_no_unseen_time() -> None:
    src = source(gpu(0) + gpu(1), gpu(0) + gpu(1), gpu(0), gpu(0) + gpu(1), gpu(0) + gpu(1))
    src.read(0)
    src.read(1 * SECOND)
    gone = src.read(2 * SECOND)
    assert [(d.uuid, d.condition) for d in gone.devices] == [("GPU-0", ""), ("GPU-1", "missing")]
    assert [(f.kind, f.uuid) for f in gone.faults] == [("gpu_missing", "GPU-1")]
    assert [r.uuid for r in gone.readings] == ["GPU-0"]
    back = src.read(3 * SECOND)
    assert [d.condition for d in back.devices] == ["", ""]
    assert [r.uuid for r in back.readings] == ["GPU-0"]
    assert [(r.uuid, r.start) for r in src.read(4 * SECOND).readings] == [
        ("GPU-0", 3 * SECOND),
        ("GPU-1", 3 * SECOND),
    ]


# Pages that leave out GPUs without a pod (--kubernetes-virtual-gpus of dcgm-exporter up to 4.8.1).


def of_pod(index: int, pod: str, **labels: str) -> str:
    return gpu(index, None, pod=pod, namespace="ml", container="main", **labels)


def xid(index: int, code: int, *, counted: bool = False) -> str:
    labels = f'gpu="{index}",UUID="GPU-{index}",Hostname="node1",pod="b",namespace="ml"'
    if counted:
        return f'DCGM_EXP_XID_ERRORS_TOTAL{{{labels},xid="{code}"}} 1\n'
    return f"DCGM_FI_DEV_XID_ERRORS{{{labels}}} {code}\n"


def test_a_gpu_whose_pod_has_ended_is_not_missing_on_a_page_of_pods_only() -> None:
    both, one = of_pod(0, "a") + of_pod(1, "b", vgpu="2"), of_pod(0, "a")
    src = source(both, one, both, both)
    src.read(0)
    freed = src.read(SECOND)
    assert [(d.uuid, d.condition) for d in freed.devices] == [("GPU-0", ""), ("GPU-1", "")]
    assert [(f.kind, f.uuid) for f in freed.faults] == [("blank", "GPU-1")]
    assert "--kubernetes-virtual-gpus" in freed.faults[0].message
    assert [r.uuid for r in freed.readings] == ["GPU-0"]
    assert [r.uuid for r in src.read(2 * SECOND).readings] == ["GPU-0"]
    assert [(r.uuid, r.start) for r in src.read(3 * SECOND).readings] == [
        ("GPU-0", 2 * SECOND),
        ("GPU-1", 2 * SECOND),
    ]


def test_a_gpu_shown_free_while_there_were_no_pods_is_not_missing_when_others_have_some() -> None:
    src = source(gpu(0) + gpu(1), of_pod(0, "a"))
    src.read(0)
    assert kinds(src.read(SECOND).faults) == ["blank"]


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ((of_pod(0, "a"), of_pod(0, "a") + of_pod(1, "b")), "one came with its first pod"),
        (
            (of_pod(0, "a") + of_pod(1, "b"), of_pod(0, "a"), of_pod(0, "a") + of_pod(1, "c")),
            "one came back with another",
        ),
        ((of_pod(0, "a", vgpu="0") + of_pod(1, "b"),), "one is shared"),
    ],
)
def test_a_gpu_that_goes_is_free_where_pages_left_out_others_without_a_pod(pages: tuple[str, ...], why: str) -> None:
    src = source(*pages, of_pod(0, "a"))
    results = [src.read(second * SECOND) for second in range(len(pages) + 1)]
    assert [d.condition for d in results[-1].devices] == ["", ""], why
    assert kinds(results[-1].faults) == ["blank"], why


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ((of_pod(0, "a") + of_pod(1, "b"), of_pod(0, "a")), "all GPUs of a full node have pods"),
        (
            (of_pod(0, "a") + of_pod(1, "b"), of_pod(0, "a"), of_pod(0, "a") + of_pod(1, "b"), of_pod(0, "a")),
            "it came back with the pod that it left with",
        ),
        (
            (of_pod(0, "a", vgpu="0") + of_pod(1, "b"), of_pod(0, "a") + of_pod(1, "b") + xid(1, 79), of_pod(0, "a")),
            "its last error is fatal",
        ),
        (
            (
                of_pod(0, "a", vgpu="0") + of_pod(1, "b") + xid(1, 48, counted=True) + xid(1, 79, counted=True),
                of_pod(0, "a"),
            ),
            "a fatal error was counted",
        ),
        ((of_pod(0, "a") + of_pod(1, "a"), of_pod(0, "a")), "its pod is still there"),
        ((of_pod(0, "a", vgpu="0") + of_pod(1, "a"), of_pod(0, "a")), "its pod stays, though free GPUs are left out"),
        ((of_pod(0, "a") + gpu(1), of_pod(0, "a") + of_pod(1, "b"), of_pod(0, "a")), "free GPUs have lines"),
        ((of_pod(0, "a") + of_pod(1, "b"), gpu(0)), "no GPU has a pod"),
        ((gpu(0) + gpu(1), gpu(0), of_pod(0, "a")), "it was missing before the first pod came"),
        ((gpu(0, hpc_job="7") + gpu(1, hpc_job="8"), gpu(0, hpc_job="7")), "a job's label is no pod's"),
    ],
)
def test_a_gpu_is_missing_where_a_page_of_pods_only_is_no_reason(pages: tuple[str, ...], why: str) -> None:
    src = source(*pages)
    results = [src.read(second * SECOND) for second in range(len(pages))]
    assert [d.condition for d in results[-1].devices] == ["", "missing"], why
    assert kinds(results[-1].faults) == ["gpu_missing"], why


def test_pods_may_move_to_other_gpus_of_the_same_host_but_not_of_another() -> None:
    src = source(of_pod(0, "a"), of_pod(1, "b"), of_pod(2, "c", Hostname="node2"))
    src.read(0)
    assert [d.uuid for d in src.read(SECOND).devices] == ["GPU-0", "GPU-1"]
    for second in (2, 3):  # however often the other node answers
        with pytest.raises(SourceError, match="load-balanced"):
            src.read(second * SECOND)
    unnamed = source(of_pod(0, "a", Hostname=""), of_pod(1, "b", Hostname=""))
    unnamed.read(0)
    with pytest.raises(SourceError, match="load-balanced"):
        unnamed.read(SECOND)


def test_a_page_without_any_gpu_names_the_option_that_empties_it() -> None:
    with pytest.raises(SourceError, match="--kubernetes-virtual-gpus"):
        source("go_goroutines 7\n").read(0)


# Which time a reading covers.


def test_the_first_read_is_a_baseline_and_later_ones_join_without_overlap() -> None:
    src = source(gpu(0))
    assert src.read(5 * SECOND).readings == ()
    spans = [(r.start, r.end) for at in (15, 20, 60) for r in src.read(at * SECOND).readings]
    assert spans == [(5 * SECOND, 15 * SECOND), (15 * SECOND, 20 * SECOND), (20 * SECOND, 60 * SECOND)]


def test_a_failed_scrape_is_bridged_up_to_the_gap_and_no_further() -> None:
    down = SourceError("down")
    src = source(gpu(0), down, gpu(0), down, gpu(0))
    src.read(0)
    with pytest.raises(SourceError, match="down"):
        src.read(60 * SECOND)
    assert [(r.start, r.end) for r in src.read(90 * SECOND).readings] == [(0, 90 * SECOND)]
    with pytest.raises(SourceError, match="down"):
        src.read(120 * SECOND)
    # 91 s: only the window the means describe, one collect interval, is claimed.
    assert [(r.start, r.end) for r in src.read(181 * SECOND).readings] == [(151 * SECOND, 181 * SECOND)]


def test_a_gap_shorter_than_a_collection_bounds_what_is_claimed() -> None:
    src = source(gpu(0), max_gap=10.0)
    src.read(0)
    assert [(r.start, r.end) for r in src.read(40 * SECOND).readings] == [(30 * SECOND, 40 * SECOND)]


def test_resync_gives_up_the_time_since_the_last_read() -> None:
    src = source(gpu(0))
    src.read(0)
    src.resync()
    assert src.read(10 * SECOND).readings == ()
    assert [r.start for r in src.read(20 * SECOND).readings] == [10 * SECOND]


def test_the_same_instant_twice_gives_no_empty_reading() -> None:
    src = source(gpu(0))
    src.read(SECOND)
    assert src.read(SECOND).readings == ()


# Energy.


def energies(*millijoules: int | None, step: int = 10) -> list[float | None]:
    pages = [gpu(0, {**BUSY, **({} if mj is None else {ENERGY: str(mj)})}) for mj in millijoules]
    src = source(*pages)
    told = [src.read(n * step * SECOND).readings for n in range(len(pages))]
    return [r.energy_joules for readings in told for r in readings]


def test_energy_is_what_the_counter_moved() -> None:
    assert energies(1_000_000, 22_000_000, 43_000_000, step=30) == [21_000.0, 21_000.0]


def test_a_counter_collected_more_rarely_than_read_is_spread_and_never_says_zero() -> None:
    # 700 W, collected every 30 s, read every 10 s.
    told = energies(*(21_000_000 * (n // 3) for n in range(91)))
    assert told[:2] == [None, None]
    known = [joules for joules in told if joules is not None]
    assert min(known) > 0
    assert sum(known) + known[-1] * 2 == pytest.approx(30 * 21_000.0, rel=0.02)
    assert sum(known[-3:]) == pytest.approx(21_000.0, rel=0.01)


def test_a_reset_or_absent_counter_gives_no_energy() -> None:
    assert energies(5_000_000, 2_000_000, 23_000_000, step=30) == [None, 21_000.0]
    assert energies(None, None) == [None]


def test_energy_of_time_not_claimed_is_not_told() -> None:
    pages = [gpu(0, {**BUSY, ENERGY: str(mj)}) for mj in (0, 140_000_000, 161_000_000)]
    src = source(*pages)
    told = [src.read(at * SECOND).readings for at in (0, 200, 230)]
    assert [(r.start, r.energy_joules) for readings in told for r in readings] == [
        (170 * SECOND, None),
        (200 * SECOND, 21_000.0),
    ]


# Freshness.


def stale_from(figures: dict[str, str], *, until: int = 2000, moving: str = "") -> int | None:
    """Return the second at which the reading of a page that never changes (except `moving`) is first distrusted."""
    pages = [gpu(0, figures | ({moving: str(n)} if moving else {})) for n in range(until // 10)]
    src = source(*pages)
    for n in range(until // 10):
        if any(r.distrust == "stale" for r in src.read(n * 10 * SECOND).readings):
            return n * 10
    return None


IDLE = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.000000", "DCGM_FI_DEV_GPU_UTIL": "0", "DCGM_FI_DEV_GPU_TEMP": "30"}


def test_a_page_that_stands_still_is_stale_after_three_collections() -> None:
    assert stale_from({**IDLE, ENERGY: "48287135"}) == 100
    assert stale_from(BUSY) == 100


def test_an_idle_gpu_without_energy_counter_gets_twenty_collections_or_for_ever() -> None:
    assert stale_from({**IDLE, "DCGM_FI_DEV_POWER_USAGE": "14.512"}) == 610
    assert stale_from(IDLE) is None


def test_anything_that_moves_keeps_it_fresh() -> None:
    assert stale_from({**IDLE, ENERGY: "0"}, moving=ENERGY) is None
    assert stale_from(BUSY, moving="DCGM_FI_DEV_SOME_NEW_FIELD") is None


def test_a_stale_gpu_is_trusted_again_once_it_moves() -> None:
    still, moved = gpu(0), gpu(0, {**BUSY, "DCGM_FI_DEV_POWER_USAGE": "500"})
    src = source(*[still] * 12, moved)
    told = [r.distrust for n in range(13) for r in src.read(n * 10 * SECOND).readings]
    assert told[-2:] == ["stale", ""]


def test_a_gpu_that_comes_back_with_its_old_figures_is_not_stale() -> None:
    src = source(gpu(0) + gpu(1), gpu(1), gpu(0) + gpu(1))
    told = [{r.uuid: r.distrust for r in src.read(at * SECOND).readings} for at in (0, 50, 95, 100)]
    assert told[-1] == {"GPU-0": "", "GPU-1": "stale"}


def test_one_frozen_gpu_does_not_spoil_its_sibling() -> None:
    pages = [gpu(0) + gpu(1, {**BUSY, ENERGY: str(n)}) for n in range(12)]
    src = source(*pages)
    told = [{r.uuid: r.distrust for r in src.read(n * 10 * SECOND).readings} for n in range(12)]
    assert told[-1] == {"GPU-0": "stale", "GPU-1": ""}


# Signals.


def test_signals_are_what_the_pages_showed_even_if_late() -> None:
    stock = {"DCGM_FI_DEV_GPU_UTIL": "3", ENERGY: "10"}
    src = source(gpu(0, stock), gpu(0, {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0"}))
    assert src.signals == frozenset()
    src.probe()
    assert src.signals == {"gpu_utilization", "energy_joules"}
    src.read(0)
    assert src.signals == {"gpu_utilization", "energy_joules", "tensor_active"}


# Pages that are none.


def test_a_broken_line_costs_only_itself() -> None:
    src = source(gpu(0) + 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-0" 30\n' + gpu(1))
    batch = src.read(0)
    assert [d.uuid for d in batch.devices] == ["GPU-0", "GPU-1"]
    assert kinds(batch.faults) == ["malformed_line"]
    assert "line 4" in batch.faults[0].message
    assert "DCGM_FI_DEV_GPU_TEMP" in batch.faults[0].message


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("", "shows no DCGM field"),
        ("\n<!DOCTYPE html><html>GPU Exporter</html>", "HTML page.*ends in /metrics"),
        ("go_goroutines 12\n", "shows no DCGM field.*dcgm-exporter's metrics page"),
        ("{{{{\n", "line 1 is not Prometheus"),
        ('node_load1{UUID="GPU-0"} 3\n', "shows no DCGM field of any GPU, but node_load1"),
        (
            gpu(0, UUID=""),
            "shows DCGM_FI_DEV_POWER_USAGE, .*without the label UUID, .*labels there: Hostname, gpu, modelName. Let",
        ),
        (gpu(0, dict.fromkeys("AB", "1"), UUID="") + gpu(0, dict.fromkeys(BUSY, "NaN")), "no value of a GPU that is a"),
        (
            gpu(0, {f"DCGM_FI_DEV_X{n}": "1" for n in range(6)}),
            "of its GPUs only DCGM_FI_DEV_X0, .*X3 and 2 more, which measures no activity",
        ),
        (gpu(0, {"DCGM_FI_DEV_XID_ERRORS": "0"}), "only DCGM_FI_DEV_XID_ERRORS, which measures no activity.*-f"),
    ],
)
def test_what_is_no_dcgm_page_is_an_error_that_names_the_place(page: str, words: str) -> None:
    with pytest.raises(SourceError, match=rf"(?s)http://node1:9400/metrics.*{words}"):
        source(page).read(0)


KINDS = {"malformed_line", "conflicting_series", "gpu_missing", "mig_layout", "unknown_model"}
LINE = st.builds(
    "{}{{gpu={},UUID={}{}}} {}".format,
    st.sampled_from(
        [
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
            "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_DEV_XID_ERRORS",
            "DCGM_EXP_XID_ERRORS_TOTAL",
            "DCGM_FI_DEV_MIG_MAX_SLICES",
            ENERGY,
            "dcgm_sm_clock",
            "x",
        ]
    ),
    st.sampled_from(['"0"', '"1"', "0", '"']),
    st.sampled_from(['"GPU-0"', '"GPU-1"', '"\\"', '""']),
    st.sampled_from(
        [
            "",
            ',xid="79"',
            ',xid="x"',
            f',xid="{"9" * 5000}",GPU_I_ID="{"9" * 5000}"',
            ',GPU_I_ID="1",GPU_I_PROFILE="1g.10gb"',
            ',GPU_I_ID="2",GPU_I_PROFILE="4g.40gb"',
            ',GPU_I_ID="-2",GPU_I_PROFILE="9999g.40gb"',
            ',GPU_I_PROFILE="\u0663g.\u0664gb"',
            ',GPU_I_ID="\u00b2"',
        ]
    ),
    st.one_of(st.floats().map(repr), st.integers().map(str), st.text(max_size=5)),
)
GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.text(alphabet='{}"=\\,#\n \x00\x0b_a0.eE+-/', max_size=200).map(str.encode),
    st.lists(LINE, max_size=8).map(lambda lines: "\n".join(lines).encode("utf-8", "replace")),
)


@given(st.lists(GARBAGE, min_size=1, max_size=4))
def test_garbage_raises_nothing_but_source_errors_and_gives_finite_figures_only(pages: list[bytes]) -> None:
    src = source(gpu(0), *pages, gpu(0))
    end = 0
    for n in range(len(pages) + 2):
        try:
            batch = src.read(n * 10 * SECOND)
        except SourceError:
            continue
        assert {fault.kind for fault in batch.faults} <= KINDS
        assert len(batch.faults) == len({(fault.kind, fault.uuid) for fault in batch.faults})
        for board in (device for device in batch.devices if not device.parent):
            parts = [d.weight for d in batch.devices if board.uuid in (d.uuid, d.parent)]
            assert sum(parts) == PPM
            assert min(parts) >= 0
        for r in batch.readings:
            assert r.start >= end - 1 or r.uuid != "GPU-0"
            figures = [v for f in Reading.__struct_fields__ if isinstance(v := getattr(r, f), float)]
            assert all(math.isfinite(v) and v >= 0 for v in figures)
            end = r.end if r.uuid == "GPU-0" else end
    assert "gr_engine_active" in src.signals


# The laws of every source.


INSTANCES = {"3": "3g.40gb", "11": "1g.10gb"}


class World:
    """A `Rig`: an exporter with two busy GPUs, optionally the second in MIG mode, which collects every 5 s."""

    lag = 0

    def __init__(self, *, mig: bool = False) -> None:
        self.now = 0
        self.mig = mig
        self.down: set[str] = set()
        self.hidden: set[str] = set()
        self.source = DcgmExporterSource("http://node1:9400/metrics", fetch=self, lookup=SPECS.get)

    def __call__(self) -> bytes:
        joules = 700 * (self.now // (5 * SECOND)) * 5
        pages = []
        for index in (0, 1):
            figures = {**BUSY, ENERGY: str(joules * 1000), "DCGM_FI_PROF_PCIE_TX_BYTES": "29285"}
            if f"GPU-{index}" in self.hidden:
                del figures["DCGM_FI_PROF_GR_ENGINE_ACTIVE"]
            if f"GPU-{index}" not in self.down:
                pages += self.lines(index, figures)
        return "".join(pages).encode()

    def lines(self, index: int, figures: dict[str, str]) -> list[str]:
        if index == 0 or not self.mig:
            return [gpu(index, figures)]
        return [gpu(index, figures, GPU_I_ID=i, GPU_I_PROFILE=profile) for i, profile in INSTANCES.items()]

    def run(self, until: int) -> None:
        self.now = until

    def fail(self, uuid: str) -> None:
        self.down.add(uuid)

    def mend(self, uuid: str) -> None:
        self.down.discard(uuid)

    def hide(self, uuid: str) -> str:
        self.hidden.add(uuid)
        return "gr_engine_active"

    def close(self) -> None:
        pass


@pytest.mark.parametrize("mig", [False, True], ids=["whole", "mig"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_source_keeps_the_law(law: Law, *, mig: bool) -> None:
    law(World(mig=mig))
