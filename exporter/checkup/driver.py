"""The NVIDIA driver: its device files, its kernel module, its library, its boards, and whom it lets profile.

Owns what /dev and /proc/driver/nvidia say. Refuses hardware counters: who reads them is asked by `telemetry`.

Sources: NVIDIA's driver README ("proc interface", "Device Nodes"); NVIDIA's page on ERR_NVGPUCTRPERM for whom
RmProfilingAdminOnly lets profile (CAP_SYS_ADMIN, and from driver 565 on CAP_PERFMON); the NVML API reference, whose
edition for R520 is the first to have GPM.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from exporter.checkup import FAIL, INFO, OK, WARN, Finding, Findings, Here, Verdict, named, said_and_do
from exporter.checkup.machine import Rights, rights
from exporter.config import Config
from exporter.sources import SourceError
from exporter.sources.nvml.describing import Described, DescribedBoard, describe_nvml
from exporter.specs import find_spec

DRIVER, PROFILING = "driver", "profiling"
_GPU = re.compile(r"nvidia\d+")
_KERNEL_VERSION = re.compile(r"(?:Kernel Module\D*|NVRM version:.*?)\b(\d{3,4}(?:\.\d+)+)")
_GPM_SINCE, _PERFMON_SINCE = 520, 565
_WITH_GPM = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")
"""Boards that have GPM: Hopper and later."""
_HOLDERS = {
    "ncu": "Nsight Compute", "nsys": "Nsight Systems", "nsys-launcher": "Nsight Systems",
    "nv-hostengine": "DCGM's host engine", "dcgm-exporter": "dcgm-exporter", "dcgmproftester": "DCGM's profiling test",
}  # fmt: skip
"""Programs that may hold a GPU's counters, by the name the kernel has for them (15 characters at most)."""
_OPEN_UP = (
    "`options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d and a reload of the driver, or run what"
    " reads the counters (DCGM's host engine, dcgm-exporter, or an embedded DCGM here) as root or with CAP_SYS_ADMIN"
)


def by_nvml(config: Config) -> bool:
    """Whether nothing but the driver's own library may be read."""
    return config.source == "nvml"


def look_at_devices(here: Here, _: Findings) -> Iterator[Finding]:
    """Device files, and whether this user may open them."""
    bad = FAIL if by_nvml(here.config) else INFO
    gpus = [path.name for path in _listed(here.dev) if _GPU.fullmatch(path.name)]
    if not gpus:
        said = f"there is no GPU in {here.dev}: no NVIDIA driver, or a container without its devices"
        do = "install the driver (`nvidia-smi` must work), or give the container the devices, without requesting"
        do += " nvidia.com/gpu: NVIDIA's container runtime and NVIDIA_VISIBLE_DEVICES=all"
        yield Finding(DRIVER, "devices", bad, said, do)
        return
    closed = [name for name in (*gpus, "nvidiactl") if not os.access(here.dev / name, os.R_OK | os.W_OK)]
    if closed:
        said = f"this user may not open {', '.join(closed)} in {here.dev}"
        do = "add the user to the group of these files, or see the driver's NVreg_DeviceFileMode"
        yield Finding(DRIVER, "devices", FAIL if by_nvml(here.config) else WARN, said, do)
        return
    yield Finding(DRIVER, "devices", OK, f"{len(gpus)} GPUs in {here.dev}: {', '.join(sorted(gpus, key=_number))}")


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _number(name: str) -> int:
    return int(name.removeprefix("nvidia"))


def kernel_driver(here: Here) -> str:
    """Version of the loaded module; empty: /proc does not tell of one."""
    try:
        text = (Path(here.config.host.proc) / "driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = _KERNEL_VERSION.search(text)
    return found[1] if found else ""


def look_at_module(here: Here, _: Findings) -> Iterator[Finding]:
    """The kernel's half of the driver."""
    version = kernel_driver(here)
    if version:
        yield Finding(DRIVER, "module", OK, f"the kernel module is loaded, version {version}")
    else:
        where = Path(here.config.host.proc) / "driver/nvidia/version"
        yield Finding(DRIVER, "module", INFO, f"{where} does not tell of a loaded module")


def look_at_library(here: Here, _: Findings) -> Iterator[Finding]:
    """libnvidia-ml, and what it says of each board."""
    try:
        told = describe_nvml()
    except SourceError as err:
        yield _without_library(here, str(err))
        return
    yield Finding(DRIVER, "library", OK, f"NVML answers: driver {told.driver}, {len(told.boards)} GPUs")
    yield from _boards(here, told)


def _without_library(here: Here, said: str) -> Finding:
    """Missing where there is no driver at all is no trouble, unless it is to be read."""
    there = any(_GPU.fullmatch(path.name) for path in _listed(here.dev)) or kernel_driver(here) != ""
    verdict: Verdict = FAIL if by_nvml(here.config) else WARN if there or "not found" not in said else INFO
    return Finding(DRIVER, "library", verdict, *said_and_do(said, "run `nvidia-smi`, then see `dmesg | grep -i nvrm`"))


def _boards(here: Here, told: Described) -> Iterator[Finding]:
    for board in told.boards:
        if board.trouble:
            said = f"GPU {board.index} does not answer: {board.trouble}"
            yield Finding(DRIVER, "board", WARN, said, "find its Xid in `dmesg`, then reset or drain it")
    well = [board for board in told.boards if not board.trouble]
    for name in sorted({board.name for board in well}):
        yield from _model(here, told.driver, [board for board in well if board.name == name])


def _model(here: Here, driver: str, boards: list[DescribedBoard]) -> Iterator[Finding]:
    name, gpm = boards[0].name, all(board.gpm for board in boards)
    mig = sum(bool(board.mig) for board in boards)
    more = f", MIG on {mig} of them" if mig else ""
    counters = "has GPM, counters without DCGM" if gpm else "has no GPM here: its counters need DCGM"
    yield Finding(DRIVER, "model", OK, f"{len(boards)} x {name}{more}; {counters}")
    if find_spec(name, overrides=here.config.overrides()) is None:
        said = f"{name!r} is not in the table of boards: its kernel time cannot be judged and is unresolved"
        do = f'give its figures under [specs."{name}"]: peak_flops, tensor_reference_clock_hz,'
        yield Finding(DRIVER, "known board", WARN, said, f"{do} memory_bandwidth_bytes_per_second")
    if not gpm and any(part in name for part in _WITH_GPM) and 0 < _major(driver) < _GPM_SINCE:
        said = f"driver {driver} is older than GPM, which this board could have"
        yield Finding(DRIVER, "driver age", WARN, said, f"a driver of branch {_GPM_SINCE} or later, or DCGM")
    if any(board.persistent is False for board in boards):
        said = "persistence mode is off: with nobody on the GPU the driver unloads, and each look wakes it"
        yield Finding(DRIVER, "persistence", INFO, said, "`systemctl enable --now nvidia-persistenced`")


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def restricted(here: Here) -> bool | None:
    """Whether the driver lets administrators alone profile; None: it does not tell."""
    try:
        text = (Path(here.config.host.proc) / "driver/nvidia/params").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", text, re.MULTILINE)
    return None if found is None else found[1] != "0"


def look_at_profiling(here: Here, before: Findings) -> Iterator[Finding]:
    """Whether the counters may be read, given what the sources have just shown."""
    seen = [finding.check for finding in named(before, *SEES) if finding.verdict is OK]
    yield _restriction(here, rights(here.proc), needless=bool(seen))
    holders = sorted(_holders(Path(here.config.host.proc)))
    if holders:
        said = f"programs that can hold a GPU's counters run here: {', '.join(holders)}"
        yield Finding(PROFILING, "holders", INFO, said)


SEES = ("dcgm profiling", "dcgm-exporter profiling", "nvml profiling")
"""Checks of a source's sight, told by `telemetry`."""


def _restriction(here: Here, mine: Rights, *, needless: bool) -> Finding:
    only = restricted(here)
    if only is None:
        return Finding(PROFILING, "restriction", INFO, "the driver does not tell whom it lets profile")
    if not only:
        return Finding(PROFILING, "restriction", OK, "the driver lets every user profile (RmProfilingAdminOnly: 0)")
    said = "the driver lets administrators alone profile (RmProfilingAdminOnly: 1)"
    enough = mine.has("SYS_ADMIN") or (mine.has("PERFMON") and _major(kernel_driver(here)) >= _PERFMON_SINCE)
    if needless:
        return Finding(PROFILING, "restriction", OK, f"{said}; what is read here is not kept from it")
    if enough:
        return Finding(PROFILING, "restriction", INFO, f"{said}, and this process may")
    return Finding(PROFILING, "restriction", WARN, f"{said}, which this process is not", _OPEN_UP)


def _holders(proc: Path) -> set[str]:
    found = set()
    for path in proc.glob("[0-9]*/comm"):
        try:
            name = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if name in _HOLDERS:
            found.add(f"{_HOLDERS[name]} (pid {path.parent.name})")
    return found
