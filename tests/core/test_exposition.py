"""The small writer of ours against prometheus_client's parsers, which know nothing of it."""

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, cast

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

from exporter.core.catalog import METRICS, Metric
from exporter.core.exposition import MAX_LABEL, render
from exporter.core.leaks import NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import Fault, Owner, Process
from exporter.core.pipeline import advance
from exporter.core.snapshot import Meta, Snapshot, take_snapshot
from tests.worlds import RESTING, SPINNING, WORKING, device, first, held, reading, seen

HOSTILE = 'a"b\\c\nd{e}=é,\t' + "x" * 10


def busy_node() -> Snapshot:
    """Four GPUs, three jobs of people with strange names, one GPU lost, a source that complains."""
    names = (HOSTILE, "plain", "")
    gpus = [device(f"GPU-{i}", str(i), condition="lost" if i == 3 else "") for i in range(4)]
    holds = [held(f"GPU-{i}", Owner(job_id=f"j{i}", user=names[i], name=HOSTILE)) for i in range(3)]
    ledger = Ledger()
    advance(ledger, first(gpus, holds))
    for k in range(40):
        rows = [reading(k * 10, k * 10 + 10, s, f"GPU-{i}") for i, s in enumerate((WORKING, RESTING, SPINNING))]
        advance(ledger, seen(k * 10 + 10, *rows, faults=(Fault("made-up"), Fault("gpu_lost", uuid="GPU-3"))))
    meta = Meta(version="9", source="s", scheduler="t", simulated=True, errors=(("core", 0), ("record", 2)))
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


def test_the_text_format_says_what_the_catalogue_says() -> None:
    snapshot = busy_node()
    assert samples(text_families(render(snapshot).decode())) == expected(snapshot)


def test_openmetrics_says_the_same() -> None:
    snapshot = busy_node()
    body = render(snapshot, openmetrics=True).decode() + "# EOF\n"
    assert samples(openmetrics_families(body)) == expected(snapshot)


def test_types_and_help_arrive() -> None:
    snapshot = busy_node()
    families = {family.name: family for family in text_families(render(snapshot).decode())}
    for metric in METRICS:
        family = families.get(metric.name) or families.get(metric.name.removesuffix("_total"))
        if family is None:
            assert not list(metric.read(snapshot)), metric.name
            continue
        assert (family.type, family.documentation) == (metric.type, metric.help)


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_every_gpus_parts_add_up_in_the_scrape_itself(is_openmetrics: bool) -> None:
    """As decimals, with ==: floats are for readers, the law is in the digits."""
    parts: dict[str, Decimal] = {}
    paid: dict[str, Decimal] = {}
    for line in render(busy_node(), openmetrics=is_openmetrics).decode().splitlines():
        if line.startswith(("gpu_efficiency_seconds_total{", "gpu_efficiency_paid_seconds_total{")):
            uuid = line.split('uuid="')[1].split('"')[0]
            into = parts if line.startswith("gpu_efficiency_seconds_total{") else paid
            into[uuid] = into.get(uuid, Decimal(0)) + Decimal(line.rsplit(" ", 1)[1])
    assert parts == paid
    assert len(paid) == 4


def test_every_leak_is_there_from_the_start() -> None:
    ledger = Ledger()
    advance(ledger, first([device()]))
    body = render(take_snapshot(ledger, Meta())).decode()
    assert all(f'leak="{name}"' in body for name in NAMES)


def test_an_old_value_is_never_served_as_live() -> None:
    snapshot = busy_node()
    fresh = samples(text_families(render(snapshot).decode()))
    assert ("gpu_efficiency_power_watts", (("gpu", "0"), ("uuid", "GPU-0"))) in fresh
    gpus = tuple(replace(gpu, live=False) for gpu in snapshot.gpus)
    stale = samples(text_families(render(replace(snapshot, gpus=gpus)).decode()))
    assert not any(name == "gpu_efficiency_power_watts" for name, _ in stale)


def test_a_wild_figure_is_not_served() -> None:
    ledger = Ledger()
    advance(ledger, first([device()]))
    advance(ledger, seen(1, reading(0, 1, power_watts=float("nan"), temperature_celsius=-5.0)))
    body = render(take_snapshot(ledger, Meta())).decode()
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
    info = next(line for line in render(take_snapshot(ledger, Meta())).decode().splitlines() if "job_info{" in line)
    assert "n" * (MAX_LABEL - 1) + "…" in info
    assert len(info) < 600


def test_a_metric_with_nothing_to_say_is_silent() -> None:
    silent = Metric("gpu_efficiency_nothing", "gauge", "Nothing.", lambda _: [])
    assert render(busy_node(), metrics=[silent]) == b""


def test_an_empty_node_is_a_valid_page() -> None:
    body = render(take_snapshot(Ledger(), Meta())).decode()
    assert "gpu_efficiency_build_info" in body
    assert "node_gau_ratio" not in body
    assert Process(1).pid == 1
