"""Tests the checks of the driver and of profiling rights with a fake /dev and /proc."""

from pathlib import Path
from typing import Any

import pytest

from exporter.checkup.base import FAIL, INFO, OK, WARN, CheckContext, Finding
from exporter.checkup.machine import check_devices, check_module, check_profiling, kernel_driver, restricted
from exporter.config import Config, HostSettings

ADMIN, PERFMON = 1 << 21, 1 << 38


@pytest.fixture(name="node")
def _node(tmp_path: Path) -> Path:
    for name in ("dev", "proc/self", "proc/driver/nvidia"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def here(node: Path, capabilities: int = 0, **config: Any) -> CheckContext:
    (node / "proc/self/status").write_text(f"Uid:\t1\t1\t1\t1\nCapEff:\t{capabilities:016x}\n")
    found = Config(host=HostSettings(proc=f"{node / 'proc'}"), **config)
    return CheckContext(config=found, environ={}, proc=node / "proc", dev=node / "dev", root=node)


def only(found: Any) -> Finding:
    (finding,) = found
    assert isinstance(finding, Finding)
    return finding


def version(node: Path, text: str) -> None:
    (node / "proc/driver/nvidia/version").write_text(text)


def params(node: Path, text: str) -> None:
    (node / "proc/driver/nvidia/params").write_text(text)


def test_no_device_matters_only_where_the_driver_itself_is_to_be_read(node: Path) -> None:
    assert only(check_devices(here(node), ())).verdict is INFO
    assert only(check_devices(here(node, source="dcgm-exporter"), ())).verdict is INFO
    assert only(check_devices(here(node, source="nvml"), ())).verdict is FAIL
    (node / "dev").rmdir()
    assert only(check_devices(here(node), ())).verdict is INFO


def test_devices_are_counted_without_the_driver_s_other_files(node: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (node / "dev" / name).touch()
    finding = only(check_devices(here(node), ()))
    assert finding.verdict is OK
    assert finding.message.startswith("2 GPUs in ")
    assert finding.message.endswith("nvidia2, nvidia10")


def test_a_device_without_its_control_file_is_closed(node: Path) -> None:
    (node / "dev/nvidia0").touch()
    finding = only(check_devices(here(node), ()))
    assert (finding.verdict, "nvidiactl" in finding.message) == (WARN, True)
    assert only(check_devices(here(node, source="nvml"), ())).verdict is FAIL


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n", "535.54.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build\n", "580.65.06"),
        ("something else\n", ""),
    ],
)
def test_the_kernel_module_s_version(node: Path, text: str, wanted: str) -> None:
    version(node, text)
    assert kernel_driver(here(node)) == wanted
    assert only(check_module(here(node), ())).verdict is (OK if wanted else INFO)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("ResmanDebugLevel: 1\nRmProfilingAdminOnly: 1\n", True), ("RmProfilingAdminOnly: 0\n", False), ("", None)],
)
def test_whom_the_driver_lets_profile(node: Path, text: str, wanted: bool | None) -> None:
    params(node, text)
    assert restricted(here(node)) is wanted


SEES = (Finding("telemetry", "nvml profiling", OK, ""),)
BLIND = (Finding("telemetry", "nvml profiling", INFO, ""), Finding("telemetry", "nvml", OK, ""))


@pytest.mark.parametrize(
    ("said", "capabilities", "before", "verdict"),
    [
        (("0", "535.1"), 0, BLIND, OK),
        (("1", "535.1"), 0, SEES, OK),
        (("1", "535.1"), 0, BLIND, WARN),
        (("1", "535.1"), ADMIN, BLIND, INFO),
        (("1", "564.1"), PERFMON, BLIND, WARN),
        (("1", "565.1"), PERFMON, BLIND, INFO),
        (("", "535.1"), 0, BLIND, INFO),
    ],
)
def test_the_restriction_matters_where_it_keeps_somebody_from_something(
    node: Path, said: tuple[str, str], capabilities: int, before: Any, verdict: str
) -> None:
    """`said`: value of RmProfilingAdminOnly, and the driver's version."""
    params(node, f"RmProfilingAdminOnly: {said[0]}\n" if said[0] else "")
    version(node, f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {said[1]}  Tue Jun\n")
    finding = only(check_profiling(here(node, capabilities), before))
    assert finding.verdict == verdict, finding
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in finding.do) == (verdict is WARN)


def test_programs_that_may_hold_the_counters_are_named(node: Path) -> None:
    for pid, name in (("7", "nv-hostengine"), ("8", "python3"), ("9", "ncu")):
        (node / "proc" / pid).mkdir()
        (node / "proc" / pid / "comm").write_text(f"{name}\n")
    _, holders = check_profiling(here(node), ())
    assert holders.message.endswith("DCGM's host engine (pid 7), Nsight Compute (pid 9)")
