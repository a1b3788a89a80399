"""The smallest sufficient MIG slice: its inputs, when it is determined, and when it is withdrawn."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.exposition import render
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger, mig_slices
from exporter.core.model import Observation, Owner, Spec
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, JobView, take_snapshot
from exporter.specs import find_spec
from tests.core.test_exposition import lines
from tests.worlds import H100, JOB, WORKING, S, device, first, held, reading, seen

BOARD = replace(H100, slices=7, memory_gb=80.0)
SMALL: dict[str, Any] = WORKING | {
    "gr_engine_active": 1.0, "sm_active": 0.1, "tensor_active": 0.05, "dram_active": 0.1,
    "memory_used_bytes": 5e9, "memory_total_bytes": 80e9,
}  # fmt: skip


def ran(*phases: tuple[float, dict[str, Any]], owner: Owner = JOB, spec: Spec | None = BOARD, gpus: int = 1) -> JobView:
    """One job on one GPU through phases of (seconds, signals)."""
    ledger = Ledger()
    advance(ledger, first([device(spec=spec)], [held(owner=owner, gpus=gpus)]))
    now = 0.0
    for length, signals in phases:
        advance(ledger, seen(now + length, reading(now, now + length, signals)))
        now += length
    return take_snapshot(ledger, DaemonMetadata()).jobs[0]


@pytest.mark.parametrize(
    ("model", "profiles"),
    [
        ("NVIDIA H100 80GB HBM3", "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb"),
        ("NVIDIA A100-SXM4-40GB", "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb"),
        ("NVIDIA H200", "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb"),
        ("NVIDIA B200", "1g.23gb 1g.45gb 2g.45gb 3g.90gb 4g.90gb"),
        ("NVIDIA A30", "1g.6gb 2g.12gb"),
        ("NVIDIA L4", ""),
    ],
)
def test_profiles_are_named_as_nvidia_names_them(model: str, profiles: str) -> None:
    spec = find_spec(model)
    assert spec is not None
    assert [part.profile for part in mig_slices(spec)] == profiles.split()


def test_a_board_whose_memory_is_not_known_has_no_slices() -> None:
    assert mig_slices(replace(BOARD, memory_gb=None)) == ()


@pytest.mark.parametrize(
    ("changes", "profile"),
    [
        ({}, "1g.10gb"),
        ({"memory_used_bytes": 9.5e9}, "1g.10gb"),
        ({"memory_used_bytes": 9.6e9}, "1g.20gb"),
        ({"sm_active": 0.15}, "2g.20gb"),
        ({"sm_active": 0.3}, "3g.40gb"),
        ({"sm_active": 0.45}, "4g.40gb"),
        ({"sm_active": 0.58}, None),
        ({"sm_active": 0.15, "gr_engine_active": 0.5}, "3g.40gb"),
        ({"dram_active": 0.063, "gr_engine_active": 0.5}, "2g.20gb"),
        ({"dram_active": 0.126}, "1g.20gb"),
        ({"memory_used_bytes": 39e9}, None),
    ],
)
def test_a_slice_must_hold_the_sms_the_memory_and_its_bandwidth(changes: dict[str, Any], profile: str | None) -> None:
    found = ran((3600, SMALL | changes)).smallest_slice
    assert (found.profile if found else None) == profile


def test_it_is_known_after_an_hour_and_of_servers_after_a_day() -> None:
    server = replace(JOB, workload_class="serving")
    assert ran((3599, SMALL)).smallest_slice is None
    assert ran((3600, SMALL)).smallest_slice is not None
    assert ran((86399, SMALL), owner=server).smallest_slice is None
    assert ran((86400, SMALL), owner=server).smallest_slice is not None


def test_seconds_beyond_the_slice_count_from_when_it_is_known() -> None:
    """Six sevenths of the reading that completes the hour count; earlier readings do not."""
    view = ran((3000, SMALL), (600, SMALL), (700, SMALL))
    assert view.excess == pytest.approx(1300 * S * 6 / 7, rel=1e-5)
    assert ran((3000, SMALL)).excess is None


def test_a_peak_counts_for_ever_and_growth_is_seen_at_once() -> None:
    assert _profile(ran((60, SMALL | {"sm_active": 0.3}), (3600, SMALL))) == "3g.40gb"
    assert _profile(ran((3600, SMALL), (10, SMALL | {"memory_used_bytes": 19e9}))) == "1g.20gb"
    assert ran((3600, SMALL), (10, SMALL | {"sm_active": 0.9})).smallest_slice is None


def _profile(view: JobView) -> str:
    assert view.smallest_slice is not None
    return view.smallest_slice.profile


@pytest.mark.parametrize("missing", ["sm_active", "dram_active", "memory_used_bytes", "memory_total_bytes"])
def test_what_was_not_seen_may_have_been_needed(missing: str) -> None:
    """One reading without the field ends the advice; unobserved time does not."""
    assert ran((60, SMALL | {missing: None}), (3600, SMALL)).smallest_slice is None
    assert ran((3600, SMALL), (60, SMALL | {missing: None})).smallest_slice is None
    assert ran((60, SMALL | {missing: None, "distrust": "stale"}), (3600, SMALL)).smallest_slice is not None


def test_only_whole_gpus_that_one_job_of_one_gpu_has_for_itself() -> None:
    assert ran((3600, SMALL), gpus=2).smallest_slice is None
    assert ran((3600, SMALL), spec=None).smallest_slice is None
    ledger = Ledger()
    advance(ledger, first([device(spec=BOARD)], [held(), held(owner=Owner("42"))]))
    advance(ledger, seen(3600, reading(0, 3600, SMALL)))
    assert [view.smallest_slice for view in take_snapshot(ledger, DaemonMetadata()).jobs] == [None, None]


def test_replicas_are_measured_for_as_long_as_one_of_them_and_need_what_the_largest_needs() -> None:
    """Two servers on a GPU each: after half a day of both nothing is known, after a day the slice that fits either."""
    server, ledger = replace(JOB, workload_class="serving"), Ledger()
    replicas = [held(f"GPU-{n}", server, group=f"{n}") for n in range(2)]
    advance(ledger, first([device(f"GPU-{n}", f"{n}", spec=BOARD) for n in range(2)], replicas))
    small, larger = SMALL, SMALL | {"sm_active": 0.3}
    for now, end, profile in ((0, 43200, None), (43200, 86399, None), (86399, 86400, "3g.40gb")):
        rows = [reading(now, end, signals, f"GPU-{n}") for n, signals in enumerate((small, larger))]
        advance(ledger, seen(end, *rows))
        view = take_snapshot(ledger, DaemonMetadata()).jobs[0]
        assert (view.smallest_slice.profile if view.smallest_slice else None) == profile
    assert view.excess == pytest.approx(2 * S * 4 / 7, rel=1e-5)


@pytest.mark.parametrize(("group", "profile"), [("0", "1g.10gb"), ("", None)])
def test_replicas_are_also_measured_if_the_job_began_as_one_of_two_gpus(group: str, profile: str | None) -> None:
    """As an older version took them; a job that works together began with a demand that was not measured."""
    ledger = Ledger()
    advance(ledger, first([device(spec=BOARD)], [held(gpus=2)]))
    advance(ledger, seen(60, reading(0, 60, SMALL | {"sm_active": 0.9})))
    advance(ledger, seen(61, reading(60, 61, SMALL), allocations=(held(group=group),)))
    advance(ledger, seen(3700, reading(61, 3700, SMALL)))
    view = take_snapshot(ledger, DaemonMetadata()).jobs[0]
    assert (view.smallest_slice.profile if view.smallest_slice else None) == profile


def test_time_before_zero_counts() -> None:
    """A simulation that begins in the past, as the drills do, has such times."""
    ledger = Ledger()
    begin = Observation(-3600 * S, 0, devices=(device(spec=BOARD),), allocations=(held(start=-3600),))
    advance(ledger, begin)
    advance(ledger, seen(0, reading(-3600, 0, SMALL)))
    assert _profile(take_snapshot(ledger, DaemonMetadata()).jobs[0]) == "1g.10gb"


def test_replicas_of_two_gpus_do_not_count_beside_those_of_one() -> None:
    ledger = Ledger()
    replicas = [held("GPU-0", group="a"), held("GPU-1", group="b", gpus=2)]
    advance(ledger, first([device(f"GPU-{n}", f"{n}", spec=BOARD) for n in range(2)], replicas))
    rows = [reading(0, 3600, signals, f"GPU-{n}") for n, signals in enumerate((SMALL, SMALL | {"sm_active": 0.3}))]
    advance(ledger, seen(3600, *rows))
    assert _profile(take_snapshot(ledger, DaemonMetadata()).jobs[0]) == "1g.10gb"


def test_the_advice_is_told_with_its_profile() -> None:
    ledger = Ledger()
    advance(ledger, first([device(spec=BOARD)], [held()]))
    advance(ledger, seen(3600, reading(0, 3600, SMALL)))
    found = take_snapshot(ledger, DaemonMetadata())
    assert lines(found, "job_fitting_slice_ratio") == [
        'job_fitting_slice_ratio{job_id="41",profile="1g.10gb"} 0.142857'
    ]
    assert lines(found, "job_unneeded_seconds_total") == ['job_unneeded_seconds_total{job_id="41"} 3034.286220000']


def shares(*phases: tuple[float, dict[str, Any]], **more: Any) -> dict[str, float]:
    """Seconds of each leak in the last of the phases."""
    ledger = Ledger()
    advance(ledger, first([device(spec=BOARD)], [held(gpus=more.get("gpus", 1))]))
    now, before = 0.0, [0] * len(LEAK_NAMES)
    for length, signals in phases:
        before = list(ledger.gpus["GPU-0"].book.parts)
        advance(ledger, seen(now + length, reading(now, now + length, signals)))
        now += length
    after = ledger.gpus["GPU-0"].book.parts
    assert ledger.conservation_errors == 0
    return {name: (b - a) / S for name, a, b in zip(LEAK_NAMES, before, after, strict=True) if a != b}


def test_what_a_smaller_slice_would_not_have_lost_is_the_allocation_s() -> None:
    """A seventh would have sufficed: of the losses, 0.95 of the time, six sevenths move; useful work stays."""
    before, after = shares((3600, SMALL)), shares((3600, SMALL), (70, SMALL))
    assert "oversized_allocation" not in before
    assert after["oversized_allocation"] == pytest.approx(70 * 6 / 7, rel=1e-5)
    assert after["useful"] == pytest.approx(70 * 0.05)
    scale = (0.95 - 6 / 7) / 0.95
    for name in ("memory_bound", "low_parallelism"):
        assert after[name] == pytest.approx(before[name] / 3600 * 70 * scale, rel=1e-4)


def test_it_takes_no_more_than_was_lost() -> None:
    """Six sevenths were never needed in its first hour; then it works at 0.45, loses 0.55, and needs more."""
    found = shares((3600, SMALL), (10, SMALL | {"tensor_active": 0.1}))
    assert found["oversized_allocation"] == pytest.approx(10 * 6 / 7, rel=1e-5)
    assert found["useful"] == pytest.approx(1.0)
    working = shares((3600, SMALL), (10, WORKING))
    assert working["oversized_allocation"] == pytest.approx(5.5)
    assert working["useful"] == pytest.approx(4.5)


def test_where_nothing_is_lost_nothing_was_too_large() -> None:
    perfect = SMALL | {"gr_engine_active": 1.0, "sm_active": 1.0, "tensor_active": 1.0}
    assert shares((3600, SMALL), (10, perfect)) == {"useful": 10.0}


def test_a_job_on_several_gpus_and_one_that_has_just_begun_are_not_too_large() -> None:
    assert "oversized_allocation" not in shares((3600, SMALL), (70, SMALL), gpus=2)
    assert "oversized_allocation" not in shares((1800, SMALL), (70, SMALL))


def test_gau_is_told_without_it_too() -> None:
    ledger = Ledger()
    advance(ledger, first([device(spec=BOARD)], [held()]))
    advance(ledger, seen(3600, reading(0, 3600, SMALL)))
    advance(ledger, seen(4000, reading(3600, 4000, SMALL)))
    told = take_snapshot(ledger, DaemonMetadata())
    text = render(told).decode().splitlines()
    ratio = {line.split()[0]: float(line.split()[1]) for line in text if line.startswith("gpu_efficiency_node_gau")}
    assert ratio["gpu_efficiency_node_gau_held_ratio"] == 1.0
    assert ratio["gpu_efficiency_node_gau_ratio"] == pytest.approx(1 / 7, rel=1e-4)
