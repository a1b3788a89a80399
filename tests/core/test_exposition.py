"""The exposition writer against prometheus_client's parsers."""

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, cast

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

from exporter.core.exposition import MAX_LABEL_LENGTH, render
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.metrics import METRICS, SERIES_BUDGET, UNOBSERVED_REASONS, Metric, max_series_of_scope
from exporter.core.model import Fault, Health, Owner, Process
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from tests.worlds import JOB, RESTING, SPINNING, WORKING, cut, device, first, held, reading, seen

HOSTILE = 'a"b\\c\nd{e}=é,\t' + "x" * 10


HEALTH = Health(
    "GPU-0", recovery_action=0, ecc_corrected=0, ecc_uncorrected=0, row_remap_pending=False, row_remap_failed=False,
    nvlink_errors=0, memory_temperature_celsius=60.0, temperature_margin_celsius=30.0, power_smoothing=False,
)  # fmt: skip
GAUGES: dict[str, Any] = {
    "temperature_celsius": 50.0, "memory_used_bytes": 1e9, "energy_joules": 10.0, "clock_event_reasons": 0,
}  # fmt: skip


def cut_node() -> Snapshot:
    """A board with seven instances and all signals and errors; a removed instance; invalid values."""
    ledger = Ledger()
    parts = cut(1, 1, 1, 1, 1, 1, 1)
    advance(ledger, first(parts, [held(part.uuid, Owner(job_id="j")) for part in parts[1:4]]))
    for k in range(3):
        rows = [reading(k, k + 1, uuid=p.uuid, **GAUGES) for p in parts]
        wild = [reading(k, k + 1, uuid="GPU-9"), replace(rows[2], end=k + 9), replace(rows[3], start=k + 1, end=k)]
        advance(ledger, seen(k + 1, *rows[: 5 + k], *wild, health=(replace(HEALTH, xids=(13, 79)),)))
    advance(ledger, seen(4, devices=cut(3, 3)))
    return take_snapshot(ledger, DaemonMetadata())


def busy_node() -> Snapshot:
    """Four GPUs, three jobs with unusual names, one lost GPU, a source with faults."""
    names = (HOSTILE, "plain", "")
    gpus = [device(f"GPU-{i}", str(i), condition="lost" if i == 3 else "") for i in range(4)]
    holds = [held(f"GPU-{i}", Owner(job_id=f"j{i}", user=names[i], name=HOSTILE)) for i in range(3)]
    ledger = Ledger()
    advance(ledger, first(gpus, holds))
    for k in range(40):
        rows = [reading(k * 10, k * 10 + 10, s, f"GPU-{i}") for i, s in enumerate((WORKING, RESTING, SPINNING))]
        advance(ledger, seen(k * 10 + 10, *rows, faults=(Fault("made-up"), Fault("gpu_lost", uuid="GPU-3"))))
    meta = DaemonMetadata(version="9", source="s", scheduler="t", simulated=True, errors=(("core", 0), ("record", 2)))
    return take_snapshot(ledger, meta)


text_families = cast("Callable[[str], Iterable[Any]]", text)
openmetrics_families = cast("Callable[[str], Iterable[Any]]", openmetrics)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(families: Iterable[Any]) -> Samples:
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def expected(snapshot: Snapshot) -> Samples:
    return {
        (metric.name, tuple(sorted(zip(metric.labels, values, strict=True)))): float(value)
        for metric in METRICS
        for values, value in metric.read(snapshot)
    }


NODES = pytest.mark.parametrize("node", [busy_node, cut_node])


@NODES
def test_the_text_format_says_what_the_catalogue_says(node: Callable[[], Snapshot]) -> None:
    snapshot = node()
    assert samples(text_families(render(snapshot).decode())) == expected(snapshot)


@NODES
def test_openmetrics_says_the_same(node: Callable[[], Snapshot]) -> None:
    snapshot = node()
    body = render(snapshot, openmetrics=True).decode() + "# EOF\n"
    assert samples(openmetrics_families(body)) == expected(snapshot)


@NODES
def test_types_and_help_arrive(node: Callable[[], Snapshot]) -> None:
    snapshot = node()
    families = {family.name: family for family in text_families(render(snapshot).decode())}
    for metric in METRICS:
        family = families.get(metric.name) or families.get(metric.name.removesuffix("_total"))
        if family is None:
            assert not list(metric.read(snapshot)), metric.name
            continue
        assert (family.type, family.documentation) == (metric.type, metric.help)


@NODES
@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_every_gpus_parts_add_up_in_the_scrape_itself(is_openmetrics: bool, node: Callable[[], Snapshot]) -> None:
    """Sums compared as exact decimals with ==."""
    parts: dict[str, Decimal] = {}
    paid: dict[str, Decimal] = {}
    snapshot = node()
    for line in render(snapshot, openmetrics=is_openmetrics).decode().splitlines():
        if line.startswith(("gpu_efficiency_seconds_total{", "gpu_efficiency_paid_seconds_total{")):
            uuid = line.split('uuid="')[1].split('"')[0]
            into = parts if line.startswith("gpu_efficiency_seconds_total{") else paid
            into[uuid] = into.get(uuid, Decimal(0)) + Decimal(line.rsplit(" ", 1)[1])
    assert parts == paid
    assert len(paid) == len(snapshot.gpus)


def test_every_leak_is_there_from_the_start() -> None:
    ledger = Ledger()
    advance(ledger, first([device()]))
    body = render(take_snapshot(ledger, DaemonMetadata())).decode()
    assert all(f'leak="{name}"' in body for name in LEAK_NAMES)


def test_an_old_value_is_never_served_as_live() -> None:
    snapshot = busy_node()
    fresh = samples(text_families(render(snapshot).decode()))
    assert ("gpu_efficiency_power_watts", (("gpu", "0"), ("uuid", "GPU-0"))) in fresh
    gpus = tuple(replace(gpu, live=False) for gpu in snapshot.gpus)
    stale = samples(text_families(render(replace(snapshot, gpus=gpus)).decode()))
    assert not any(name == "gpu_efficiency_power_watts" for name, _ in stale)


def test_power_and_the_limit_it_is_to_be_compared_with() -> None:
    shown = [line for name in ("power_watts", "power_limit_watts") for line in lines(busy_node(), name)[:1]]
    assert shown == ['power_watts{uuid="GPU-0",gpu="0"} 600.0', 'power_limit_watts{uuid="GPU-0",gpu="0"} 700.0']


def test_a_wild_figure_is_not_served() -> None:
    ledger = Ledger()
    advance(ledger, first([device()]))
    advance(ledger, seen(1, reading(0, 1, power_watts=float("nan"), temperature_celsius=-5.0)))
    body = render(take_snapshot(ledger, DaemonMetadata())).decode()
    assert "power_watts{" not in body
    assert "nan" not in body.lower()


def test_unknown_reasons_cannot_add_series() -> None:
    body = render(busy_node()).decode()
    assert 'gpu_efficiency_faults_total{kind="other"} 40' in body
    assert "made-up" not in body


def test_a_name_without_end_is_cut() -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=Owner(job_id="j", name="n" * 5000))]))
    advance(ledger, seen(1, reading(0, 1)))
    info = next(
        line for line in render(take_snapshot(ledger, DaemonMetadata())).decode().splitlines() if "job_info{" in line
    )
    name = info.split(',name="')[1].split('"')[0]
    assert (len(name), name.rstrip("0123456789abcdef")) == (MAX_LABEL_LENGTH, "n" * (MAX_LABEL_LENGTH - 9) + "…")
    assert len(info) < 600


def test_a_metric_with_nothing_to_say_is_silent() -> None:
    silent = Metric("gpu_efficiency_nothing", "gauge", "Nothing.", lambda _: [])
    assert render(busy_node(), metrics=[silent]) == b""


def test_an_empty_node_is_a_valid_page() -> None:
    body = render(take_snapshot(Ledger(), DaemonMetadata())).decode()
    assert "gpu_efficiency_build_info" in body
    assert "node_gau_ratio" not in body
    assert Process(1).pid == 1


def lines(snapshot: Snapshot, name: str) -> list[str]:
    return [
        line.removeprefix("gpu_efficiency_")
        for line in render(snapshot).decode().splitlines()
        if line.startswith(f"gpu_efficiency_{name}{{")
    ]


def test_a_healthy_gpu_has_exactly_the_series_of_its_budget() -> None:
    """All signals present, with one error and one unobserved interval: within the series budget."""
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    advance(ledger, seen(1, faults=(Fault("paused"),)))
    advance(
        ledger, seen(400, reading(1, 400, **GAUGES), allocations_at=400 * 10**9, health=(replace(HEALTH, xids=(13,)),))
    )
    body = render(take_snapshot(ledger, DaemonMetadata())).decode().splitlines()
    own = [line for line in body if 'uuid="GPU-0"' in line]
    assert len(own) == max_series_of_scope("gpu") == SERIES_BUDGET["gpu"]


def test_a_reason_is_shown_once_it_has_occurred() -> None:
    """Rejections by GPU; those of no single GPU have empty GPU labels and are exported from the start."""
    ledger = Ledger()
    advance(ledger, first([device(), device("GPU-1", "1")]))
    nothing = take_snapshot(ledger, DaemonMetadata())
    assert lines(nothing, "unobserved_seconds_total") == []
    assert lines(nothing, "rejected_total") == [
        f'rejected_total{{uuid="",gpu="",reason="{reason}"}} 0'
        for reason in ("clock_step", "collectives", "host", "report", "serving", "unknown_gpu")
    ]
    wild = WORKING | {"dram_active": 1.04, "fp32_active": float("nan"), "tensor_active": 0.99}
    advance(ledger, seen(5, reading(1, 4, wild, "GPU-1"), reading(2, 3, uuid="GPU-1"), reading(0, 5, uuid="GPU-7")))
    advance(ledger, seen(3))
    after = take_snapshot(ledger, DaemonMetadata())
    assert lines(after, "unobserved_seconds_total") == [
        'unobserved_seconds_total{uuid="GPU-0",gpu="0",reason="gap"} 5.0',
        'unobserved_seconds_total{uuid="GPU-1",gpu="1",reason="gap"} 2.0',
    ]
    assert lines(after, "rejected_total") == [
        'rejected_total{uuid="",gpu="",reason="clock_step"} 1',
        'rejected_total{uuid="",gpu="",reason="collectives"} 0',
        'rejected_total{uuid="",gpu="",reason="host"} 0',
        'rejected_total{uuid="",gpu="",reason="report"} 0',
        'rejected_total{uuid="",gpu="",reason="serving"} 0',
        'rejected_total{uuid="",gpu="",reason="unknown_gpu"} 1',
        'rejected_total{uuid="GPU-1",gpu="1",reason="clamped"} 1.0',
        'rejected_total{uuid="GPU-1",gpu="1",reason="not_finite"} 1.0',
        'rejected_total{uuid="GPU-1",gpu="1",reason="order"} 1.0',
        'rejected_total{uuid="GPU-1",gpu="1",reason="overlap"} 1.0',
    ]


def test_a_reason_nobody_knows_is_another() -> None:
    """Unknown reasons share one series, and the seconds add up."""
    ledger = Ledger()
    advance(ledger, first([device()]))
    for k, word in enumerate(["wool", "steel", "paused", *(f"made-up-{n}" for n in range(50))]):
        advance(ledger, seen(k + 1, reading(k, k + 1, distrust=word)))
    assert lines(take_snapshot(ledger, DaemonMetadata()), "unobserved_seconds_total") == [
        'unobserved_seconds_total{uuid="GPU-0",gpu="0",reason="other"} 52.0',
        'unobserved_seconds_total{uuid="GPU-0",gpu="0",reason="paused"} 1.0',
    ]


def test_every_reason_of_the_core_s_own_has_a_series_of_its_own() -> None:
    """Every rejection reason of the core has a series of its own."""
    contradictions: list[dict[str, Any]] = [
        {"gr_engine_active": 0.5, "sm_active": 0.0, "tensor_active": 0.0},
        {"gr_engine_active": 0.0, "sm_active": 0.0, "tensor_active": 0.0, "gpu_utilization": 1.0},
        {"gr_engine_active": None, "gpu_utilization": None},
    ]
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    for k, wrong in enumerate(contradictions):
        advance(ledger, seen(k + 1, reading(k, k + 1, WORKING | wrong)))
    advance(ledger, seen(4))
    rest = RESTING | {"processes": None}
    advance(ledger, seen(5, reading(4, 5, rest), allocations_at=-100 * 10**9))
    snapshot = take_snapshot(ledger, DaemonMetadata())
    found = {line.split('reason="')[1].split('"')[0] for line in lines(snapshot, "unobserved_seconds_total")}
    assert found == {"multiplexed", "zero_filled", "no_engine_signal", "gap", "owner_unknown"}
    assert found <= UNOBSERVED_REASONS


def test_a_boards_parts_weigh_what_they_are_in_the_nodes_ratios() -> None:
    """A whole idle GPU, and one with four working and three idle slices: 4/14 of the time is occupied."""
    ledger = Ledger()
    parts = cut(4, 3, board="GPU-1")
    advance(ledger, first([device(), *parts], [held(parts[1].uuid)]))
    quiet = RESTING | {"processes": ()}
    rows = [reading(0, 10, quiet), reading(0, 10, uuid=parts[1].uuid), reading(0, 10, quiet, parts[2].uuid)]
    advance(ledger, seen(10, *rows))
    body = render(take_snapshot(ledger, DaemonMetadata())).decode()
    gau = float(body.split("\ngpu_efficiency_node_gau_ratio ")[1].split("\n")[0])
    assert gau == pytest.approx(4 / 14, abs=1e-6)
    assert "node_coverage_ratio 1.0" in body


def test_labels_of_a_job_s_pod_are_one_series_each() -> None:
    ledger = Ledger()
    labelled = replace(JOB, labels=(("app.kubernetes.io/part-of", "llama"), ("team", 'a"b')))
    advance(ledger, first([device(), device("GPU-1", "1")], [held(owner=labelled), held("GPU-1", Owner("42"))]))
    advance(ledger, seen(1, reading(0, 1), reading(0, 1, uuid="GPU-1")))
    assert lines(take_snapshot(ledger, DaemonMetadata()), "job_label_info") == [
        'job_label_info{job_id="41",key="app.kubernetes.io/part-of",value="llama"} 1',
        'job_label_info{job_id="41",key="team",value="a\\"b"} 1',
    ]
