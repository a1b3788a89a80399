"""Health metrics: exported values, device labels, and series that are absent without data."""

from typing import Any

import pytest

from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import Fault, Health
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.core.test_health import opened, told
from tests.worlds import cut, reading, seen


def text(ledger: Ledger) -> list[str]:
    return render(take_snapshot(ledger, DaemonMetadata())).decode().splitlines()


def series(ledger: Ledger, *names: str) -> list[str]:
    wanted = tuple(f"gpu_efficiency_{name}{{" for name in names)
    return [line.removeprefix("gpu_efficiency_") for line in text(ledger) if line.startswith(wanted)]


WELL = (
    "xid_errors_total", "last_xid", "recovery_action", "ecc_errors_total", "row_remap", "nvlink_errors_total",
    "memory_temperature_celsius", "temperature_margin_celsius", "clock_limited_seconds_total",
)  # fmt: skip


def test_what_no_source_ever_told_has_no_series() -> None:
    """Without a health reading there is no series, rather than 0 errors."""
    assert series(opened(), *WELL) == []


def test_what_was_told_is_shown_and_nothing_else() -> None:
    ledger = opened()
    health = Health(
        "GPU-0", (13,), recovery_action=2, ecc_corrected=5, row_remap_failed=False, row_remap_pending=True,
        nvlink_errors=0, memory_temperature_celsius=71.5,
    )  # fmt: skip
    advance(ledger, seen(20, reading(10, 20, clock_event_reasons=0x44), health=(health,)))
    assert series(ledger, *WELL) == [
        'memory_temperature_celsius{uuid="GPU-0",gpu="0"} 71.5',
        'clock_limited_seconds_total{uuid="GPU-0",gpu="0",reason="power"} 10.0',
        'clock_limited_seconds_total{uuid="GPU-0",gpu="0",reason="thermal"} 10.0',
        'clock_limited_seconds_total{uuid="GPU-0",gpu="0",reason="hardware"} 0.0',
        'clock_limited_seconds_total{uuid="GPU-0",gpu="0",reason="settings"} 0.0',
        'xid_errors_total{uuid="GPU-0",gpu="0"} 1',
        'last_xid{uuid="GPU-0",gpu="0"} 13',
        'recovery_action{uuid="GPU-0",gpu="0"} 2.0',
        'ecc_errors_total{uuid="GPU-0",gpu="0",type="corrected"} 5',
        'row_remap{uuid="GPU-0",gpu="0"} 1',
        'nvlink_errors_total{uuid="GPU-0",gpu="0"} 0.0',
    ]


@pytest.mark.parametrize(
    ("pending", "failed", "shown"),
    [(None, None, None), (False, None, 0), (None, False, 0), (True, False, 1), (True, True, 2), (None, True, 2)],
)
def test_a_row_remap_is_none_wanted_waiting_or_failed(
    pending: bool | None, failed: bool | None, shown: int | None
) -> None:
    ledger = opened()
    advance(ledger, seen(20, health=told(row_remap_pending=pending, row_remap_failed=failed)))
    assert series(ledger, "row_remap") == ([] if shown is None else [f'row_remap{{uuid="GPU-0",gpu="0"}} {shown}'])


def test_a_temperature_of_the_past_is_not_served_as_the_presents_but_counts_are() -> None:
    """The board stopped responding at 20: counters stay, the temperature disappears."""
    ledger = opened()
    counts: dict[str, Any] = {"ecc_uncorrected": 1, "nvlink_errors": 3, "recovery_action": 2}
    health = told(13, **counts, memory_temperature_celsius=70.0, temperature_margin_celsius=12.0)
    advance(ledger, seen(20, reading(10, 20), health=health))
    assert len(series(ledger, "memory_temperature_celsius", "temperature_margin_celsius")) == 2
    advance(ledger, seen(30, faults=(Fault("gpu_lost", uuid="GPU-0"),)))
    assert series(ledger, "memory_temperature_celsius", "temperature_margin_celsius") == []
    kept = series(ledger, "ecc_errors_total", "xid_errors_total", "last_xid", "nvlink_errors_total", "recovery_action")
    assert [line.split()[-1] for line in kept] == ["1", "13", "2.0", "1", "3.0"]


def test_instances_have_no_health_series_and_name_their_board() -> None:
    ledger = opened()
    parts = cut(4, 3)
    rows = [reading(10, 20, uuid=d.uuid, clock_event_reasons=4) for d in parts]
    advance(ledger, seen(20, *rows, devices=parts, health=told(13, ecc_corrected=0, power_smoothing=True)))
    shown = series(ledger, *WELL)
    assert len(shown) == 7
    assert all('uuid="GPU-0"' in line for line in shown)
    info = [line.split('spec="H100",')[1] for line in series(ledger, "gpu_info")]
    assert info == [
        'profile="",parent="",power_smoothing="yes"} 1',
        'profile="4g",parent="GPU-0",power_smoothing=""} 1',
        'profile="3g",parent="GPU-0",power_smoothing=""} 1',
    ]


@pytest.mark.parametrize(("smooths", "said"), [(None, ""), (True, "yes"), (False, "no")])
def test_power_smoothing_is_told_where_it_is_known(smooths: bool | None, said: str) -> None:
    ledger = opened()
    advance(ledger, seen(20, health=told(power_smoothing=smooths)))
    assert f'power_smoothing="{said}"' in series(ledger, "gpu_info")[0]
