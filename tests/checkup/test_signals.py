"""What install-check says of a source that has tensor activity and lacks other profiling signals."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from exporter.checkup.base import OK, WARN, CheckContext
from exporter.checkup.telemetry import _tensor_findings
from exporter.config import Config
from exporter.sources.base import NVLINK_SIGNALS, ReadResult
from tests.worlds import device

ALL = frozenset({
    "tensor_active", "gr_engine_active", "sm_active", "dram_active", "fp64_active", "fp32_active", "fp16_active",
    "pcie_tx_bytes_per_second", "nvlink_tx_bytes_per_second",
})  # fmt: skip


def findings(signals: frozenset[str], *, lacks: tuple[str, ...] = ()) -> list[Any]:
    context = cast("CheckContext", SimpleNamespace(config=Config(source="dcgm-exporter")))
    source: Any = SimpleNamespace(signals=signals)
    return list(_tensor_findings(context, "dcgm-exporter", source, ReadResult((device(lacks=lacks),))))


def test_all_signals_are_said_to_be_there() -> None:
    (found,) = findings(ALL)
    assert found.verdict is OK
    assert found.message == (
        "gives tensor activity, engine activity, SM activity, DRAM activity, FP64 activity, FP32 activity, FP16"
        " activity, PCIe traffic, NVLink traffic"
    )


@pytest.mark.parametrize("signal", ["sm_active", "fp32_active", "nvlink_tx_bytes_per_second"])
def test_what_lacks_is_named(signal: str) -> None:
    first, second = findings(ALL - {signal})
    assert first.verdict is OK
    assert first.message.startswith("gives tensor activity, engine activity, ")
    assert ", but not " in first.message
    assert second.verdict is WARN
    assert second.message.endswith("not given, so that leaks are told apart less well")


def test_what_is_there_without_tensor_activity_is_named() -> None:
    (found,) = findings(frozenset({"gr_engine_active", "dram_active"}))
    assert found.message == (
        "gives no tensor activity, only engine activity, DRAM activity: kernel time stays unresolved"
    )
    (found,) = findings(frozenset())
    assert found.message == "gives no tensor activity: kernel time stays unresolved"


def test_a_link_that_no_board_has_does_not_lack() -> None:
    assert len(findings(ALL - {"nvlink_tx_bytes_per_second"}, lacks=NVLINK_SIGNALS)) == 1
