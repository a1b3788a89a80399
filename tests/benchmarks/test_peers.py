"""The comparison counts what it says, and measures what really serves; peers from the index are not needed for that."""

import pytest
from msgspec.structs import replace

from benchmarks.machine import ROOT
from benchmarks.node.peers import (
    BASELINE,
    OTHERS,
    OURS,
    QUICK,
    SIDE_BY_SIDE,
    Seen,
    curves,
    gpu_series,
    peers,
    rows,
    table,
)

PAGE = """# HELP gpu_power_watts x
gpu_power_watts{gpu="0"} 300.0
gpu_efficiency_state{uuid="GPU-1"} 1
gpu_efficiency_node_info{node="a"} 1
gpu_efficiency_job_gpus{job_id="gpu=1"} 1
gpu_clock_MHz{hostname="x",index="3"} 1
process_cpu_seconds_total 3
host_gpu_percent{host="gpu-node"} 1
python_info{version="3"} 1
"""
SEEN = Seen(
    peer=OURS, idle=[0.4, 0.5, 0.9], scraped=[1.0, 2.0, 1.5], resident=64.0, switches=20.0,
    times=[2.0] * 98 + [9.0, 9.0], series=712, size=89_000,
)  # fmt: skip


def test_series_of_gpus_are_counted_and_no_others() -> None:
    assert [line.split("{")[0] for line in gpu_series(PAGE)] == [
        "gpu_power_watts", "gpu_efficiency_state", "gpu_clock_MHz",
    ]  # fmt: skip


def test_a_line_has_medians_and_what_a_gpu_costs() -> None:
    other = replace(SEEN, peer=BASELINE, resident=26.0)
    line = table([SEEN, other]).rows[0]
    assert line[:8] == ("gpu-efficiency-exporter", "0.50 %", "1.50 %", "64 MiB", "20 /s", "2.0 / 9.0 ms", "89", "89 kB")
    ours, memory = rows([SEEN, other], QUICK)
    assert (ours.median, ours.spread, memory.median) == ("1.50 %", "1.00 - 2.00", "64.0 MiB")
    assert curves([SEEN, other])["resident memory, peak, MiB"] == [64.0, 26.0]


def test_the_versions_that_are_named_are_those_of_the_lock() -> None:
    lock = (ROOT / "requirements.peers.lock").read_text(encoding="utf-8")
    for peer in OTHERS:
        name, version = peer.name.split(",")[0].split()
        assert f"\n{name}=={version} " in lock


def test_a_peer_that_is_not_installed_is_named_with_what_to_do() -> None:
    gone = replace(BASELINE, name="nothing", words=("/nowhere/at/all",))
    with pytest.raises(RuntimeError, match=r"nothing not installed: make \.venv/peers"):
        peers((OURS, gone), QUICK)


@pytest.mark.benchmark
def test_a_program_that_serves_no_gpu_is_not_measured() -> None:
    silent = replace(BASELINE, name="silence", words=(*BASELINE.words[:1], "-c", "pass"))
    with pytest.raises(RuntimeError, match="silence serves nothing of a GPU"):
        peers((silent,), QUICK)


@pytest.mark.benchmark
def test_ours_and_forty_lines_are_measured_side_by_side() -> None:
    assert SIDE_BY_SIDE.quick is not None
    found = SIDE_BY_SIDE.quick()
    ours, least = found.tables[0].rows
    assert (ours[0], least[0]) == ("gpu-efficiency-exporter", "40 lines of prometheus_client")
    assert float(ours[6]) > 50 > float(least[6]) == 5
    assert all(float(line[3].split()[0]) > 10 for line in (ours, least))
