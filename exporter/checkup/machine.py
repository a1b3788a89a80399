"""Checks the machine: versions, this process's rights, the clock, the NVIDIA driver, its boards and profiling limits.

Sources: proc(5), capabilities(7), adjtimex(2); NVIDIA's driver README ("proc interface", "Device Nodes");
NVIDIA's page on ERR_NVGPUCTRPERM (CAP_SYS_ADMIN, from driver 565 on CAP_PERFMON); the NVML API reference (GPM: R520).
"""

import ctypes
import errno
import os
import platform
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from exporter import __version__
from exporter.checkup.base import (
    INFO,
    OK,
    WARN,
    CheckContext,
    Finding,
    Findings,
    failed,
    findings_of,
    read_text,
    split_advice,
)
from exporter.core.model import SECOND
from exporter.files import may_exist
from exporter.registry import SOURCES
from exporter.sources.base import SourceError
from exporter.sources.nvml.source import BoardDescription, DriverDescription, describe_nvml
from exporter.specs import find_spec

PROGRAM, USER, CLOCK = "program", "user", "clock"
CAPABILITIES = {
    1: "DAC_OVERRIDE", 2: "DAC_READ_SEARCH", 10: "NET_BIND_SERVICE", 19: "SYS_PTRACE", 21: "SYS_ADMIN", 38: "PERFMON",
}  # fmt: skip
"""Capabilities that affect this daemon, by bit number."""
_ALL_CAPABILITIES = 40
"""With so many bits or more it is described as all capabilities: root has 41."""
_SECCOMP = {"0": "no seccomp", "1": "strict seccomp", "2": "a seccomp filter"}
SERVICE_USER = "gpu-efficiency"
"""User of the packaged systemd unit."""


class Rights(Struct, frozen=True):
    """User, capabilities and restrictions of this process."""

    uid: int = 0
    capabilities: int = 0
    """Bit mask of the effective set."""
    seccomp: str = "0"
    no_new_privileges: bool = False

    def has(self, *names: str) -> bool:
        """Whether any of these capabilities is effective."""
        return any(self.capabilities >> bit & 1 for bit, name in CAPABILITIES.items() if name in names)

    @property
    def description(self) -> str:
        """Describe the capabilities."""
        if self.capabilities.bit_count() >= _ALL_CAPABILITIES:
            return "all capabilities"
        held = [name for bit, name in CAPABILITIES.items() if self.capabilities >> bit & 1]
        if not self.capabilities:
            return "no capability"
        return f"{self.capabilities.bit_count()} capabilities ({', '.join(held) or 'none that matters here'})"


def rights(proc: Path) -> Rights:
    """Read the rights of this process from `proc`; raises OSError."""
    lines = (proc / "self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    return Rights(
        uid=int(status["Uid"][1]),
        capabilities=int(status["CapEff"][0], 16),
        seccomp=status.get("Seccomp", ["0"])[0],
        no_new_privileges=status.get("NoNewPrivs") == ["1"],
    )


def check_program(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Report versions, operating system, container and cgroup version."""
    packages = ("nvidia-ml-py", "msgspec", "httpx", "fastapi", "uvicorn", "grpcio")
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    message = f"gpu-efficiency {__version__}, Python {platform.python_version()}; {versions}"
    yield Finding(PROGRAM, "versions", OK, message)
    machine = f"{_system_name(context)}, Linux {platform.release()}, {platform.machine()}"
    yield Finding(PROGRAM, "machine", OK, f"{context.host}: {machine}, {_container_text(context)}")
    cgroup = Path(context.config.host.cgroup)
    unified = may_exist(cgroup / "cgroup.controllers")
    message = f"{cgroup} is {'cgroup v2' if unified else 'cgroup v1, or none: both are understood'}"
    yield Finding(PROGRAM, "cgroup", OK if unified else INFO, message)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _system_name(context: CheckContext) -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', read_text(context.etc / "os-release"), re.MULTILINE)
    return found[1] if found else "an unknown system"


def _container_text(context: CheckContext) -> str:
    if context.environ.get("KUBERNETES_SERVICE_HOST"):
        return "in a pod"
    markers = (context.root / ".dockerenv", context.root / "run/.containerenv")
    return "in a container" if any(may_exist(marker) for marker in markers) else "not in a known container"


def check_user(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Report the rights of this user, and whether the daemon runs as another one."""
    mine = rights(context.proc)
    who = "root" if mine.uid == 0 else f"uid {mine.uid}"
    more = (
        _SECCOMP.get(mine.seccomp, "seccomp"),
        "no new privileges" if mine.no_new_privileges else "",
        "a read-only root" if os.statvfs(context.root).f_flag & os.ST_RDONLY else "a writable root",
    )
    yield Finding(USER, "rights", OK, f"{who}, with {mine.description}; {', '.join(part for part in more if part)}")
    service = _service_uid(context)
    if service is not None and service != mine.uid:
        message = f"the daemon's own user is {SERVICE_USER} (uid {service}); the findings below are of {who}"
        do = f"check as the daemon: `runuser -u {SERVICE_USER} -- gpu-efficiency install-check`"
        yield Finding(USER, "same user", INFO, message, do)


def _service_uid(context: CheckContext) -> int | None:
    lines = read_text(context.etc / "passwd").splitlines()
    found = next((line.split(":") for line in lines if line.startswith(f"{SERVICE_USER}:")), ())
    return int(found[2]) if len(found) > 2 and found[2].isdecimal() else None  # noqa: PLR2004  name:password:uid


class Timex(ctypes.Structure):
    """The first fields of struct timex (adjtimex(2)), and space for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


_UNSYNCHRONISED = 0x0040
"""STA_UNSYNC; adjtimex then returns TIME_ERROR too."""
_TIME_ERROR = 5


def kernel_clock(timex: Timex) -> int:
    """Call adjtimex(2) with `modes` 0, which only reads; return its result. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    state = int(library.adjtimex(ctypes.byref(timex)))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return state


def check_clock(
    _context: CheckContext, _before: Findings, read_clock: Callable[[Timex], int] = kernel_clock
) -> Iterator[Finding]:
    """Whether the kernel's clock is synchronised; traces, DCGM's timestamps and the alert on skew depend on it."""
    timex = Timex()
    try:
        state = read_clock(timex)
    except OSError as err:
        blocked = err.errno in (errno.EPERM, errno.ENOSYS)
        message = f"the kernel cannot be queried ({err.strerror}{': seccomp forbids it' if blocked else ''})"
        yield Finding(CLOCK, "synchronised", INFO, message, "look on the host: `timedatectl`")
        return
    if state == _TIME_ERROR or timex.status & _UNSYNCHRONISED:
        message = "the kernel reports the clock as unsynchronised"
        do = "run chrony or systemd-timesyncd on the host (`timedatectl`), or times of nodes cannot be compared"
        yield Finding(CLOCK, "synchronised", WARN, message, do)
        return
    message = f"synchronised, wrong by {timex.maxerror * 1000 / SECOND:.3f} s at most"
    yield Finding(CLOCK, "synchronised", OK, message)


DRIVER, PROFILING = "driver", "profiling"
_GPU = re.compile(r"nvidia\d+")
_KERNEL_VERSION = re.compile(r"(?:Kernel Module\D*|NVRM version:.*?)\b(\d{3,4}(?:\.\d+)+)")
_GPM_SINCE, _PERFMON_SINCE = 520, 565
_WITH_GPM = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")
"""Boards that have GPM: Hopper and later."""
_PROFILERS = {
    "ncu": "Nsight Compute", "nsys": "Nsight Systems", "nsys-launcher": "Nsight Systems",
    "nv-hostengine": "DCGM's host engine", "dcgm-exporter": "dcgm-exporter", "dcgmproftester": "DCGM's profiling test",
}  # fmt: skip
"""Programs that may use a GPU's counters, by process name (15 characters at most)."""
_RESTRICTION_ADVICE = (
    "`options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d and a reload of the driver, or run what"
    " reads the counters (DCGM's host engine, dcgm-exporter, or an embedded DCGM here) as root or with CAP_SYS_ADMIN"
)


def check_devices(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check that device files exist, and that this user may open them."""
    needed = context.config.source == "nvml"
    gpus = [path.name for path in _listed(context.dev) if _GPU.fullmatch(path.name)]
    if not gpus:
        message = f"there is no GPU in {context.dev}: no NVIDIA driver, or a container without its devices"
        do = "install the driver (`nvidia-smi` must work), or give the container the devices, without requesting"
        do += " nvidia.com/gpu: NVIDIA's container runtime and NVIDIA_VISIBLE_DEVICES=all"
        yield failed(DRIVER, "devices", message, do, needed=needed, absent=True)
        return
    closed = [name for name in (*gpus, "nvidiactl") if not os.access(context.dev / name, os.R_OK | os.W_OK)]
    if closed:
        message = f"this user may not open {', '.join(closed)} in {context.dev}"
        do = "add the user to the group of these files, or see the driver's NVreg_DeviceFileMode"
        yield failed(DRIVER, "devices", message, do, needed=needed)
        return
    yield Finding(DRIVER, "devices", OK, f"{len(gpus)} GPUs in {context.dev}: {', '.join(sorted(gpus, key=_number))}")


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _number(name: str) -> int:
    return int(name.removeprefix("nvidia"))


def kernel_driver(context: CheckContext) -> str:
    """Version of the loaded kernel module; empty: /proc has none."""
    found = _KERNEL_VERSION.search(read_text(Path(context.config.host.proc) / "driver/nvidia/version"))
    return found[1] if found else ""


def check_module(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check that the kernel module of the driver is loaded."""
    version = kernel_driver(context)
    if version:
        yield Finding(DRIVER, "module", OK, f"the kernel module is loaded, version {version}")
    else:
        where = Path(context.config.host.proc) / "driver/nvidia/version"
        yield Finding(DRIVER, "module", INFO, f"{where} does not report a loaded module")


def check_library(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check libnvidia-ml, and what it reports for each board."""
    try:
        nvml = describe_nvml()
    except SourceError as err:
        yield _without_library(context, str(err))
        return
    yield Finding(DRIVER, "library", OK, f"NVML answers: driver {nvml.driver}, {len(nvml.boards)} GPUs")
    yield from _boards(context, nvml)


def _without_library(context: CheckContext, error: str) -> Finding:
    """INFO if there is no driver at all and NVML is not the configured source."""
    has_driver = any(_GPU.fullmatch(path.name) for path in _listed(context.dev)) or kernel_driver(context) != ""
    message, do = split_advice(error, "run `nvidia-smi`, then see `dmesg | grep -i nvrm`")
    absent = not has_driver and "not found" in error
    return failed(DRIVER, "library", message, do, needed=context.config.source == "nvml", absent=absent)


def _boards(context: CheckContext, nvml: DriverDescription) -> Iterator[Finding]:
    for board in nvml.boards:
        if board.error:
            message = f"GPU {board.index} does not answer: {board.error}"
            yield Finding(DRIVER, "board", WARN, message, "find its Xid in `dmesg`, then reset or drain it")
    well = [board for board in nvml.boards if not board.error]
    for name in sorted({board.name for board in well}):
        yield from _model(context, nvml.driver, [board for board in well if board.name == name])


def _model(context: CheckContext, driver: str, boards: list[BoardDescription]) -> Iterator[Finding]:
    name, gpm = boards[0].name, all(board.gpm for board in boards)
    mig = sum(bool(board.mig) for board in boards)
    more = f", MIG on {mig} of them" if mig else ""
    counters = "has GPM, counters without DCGM" if gpm else "has no GPM here: its counters need DCGM"
    yield Finding(DRIVER, "model", OK, f"{len(boards)} x {name}{more}; {counters}")
    if find_spec(name, overrides=context.config.overrides()) is None:
        message = f"{name!r} is not in the table of boards: its kernel time cannot be judged and is unresolved"
        do = f'give its figures under [specs."{name}"]: peak_flops, tensor_reference_clock_hz,'
        yield Finding(DRIVER, "known board", WARN, message, f"{do} memory_bandwidth_bytes_per_second")
    if not gpm and any(part in name for part in _WITH_GPM) and 0 < _major(driver) < _GPM_SINCE:
        message = f"driver {driver} is older than GPM, which this board could have"
        yield Finding(DRIVER, "driver age", WARN, message, f"a driver of branch {_GPM_SINCE} or later, or DCGM")
    if any(board.persistence_mode is False for board in boards):
        message = "persistence mode is off: without a process on the GPU the driver unloads, and each read wakes it"
        yield Finding(DRIVER, "persistence", INFO, message, "`systemctl enable --now nvidia-persistenced`")


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def restricted(context: CheckContext) -> bool | None:
    """Whether the driver allows profiling for administrators only; None: unknown."""
    text = read_text(Path(context.config.host.proc) / "driver/nvidia/params")
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", text, re.MULTILINE)
    return None if found is None else found[1] != "0"


def check_profiling(context: CheckContext, before: Findings) -> Iterator[Finding]:
    """Report whether the driver allows profiling, given the sources' findings, and which programs may use counters."""
    profiled = [
        finding.check for finding in findings_of(before, *map(profiling_check, SOURCES)) if finding.verdict is OK
    ]
    yield _restriction(context, rights(context.proc), needless=bool(profiled))
    holders = sorted(_running_profilers(Path(context.config.host.proc)))
    if holders:
        message = f"programs that may use a GPU's counters run here: {', '.join(holders)}"
        yield Finding(PROFILING, "holders", INFO, message)


def profiling_check(source: str) -> str:
    """Name of the finding on whether that source reads the profiling counters."""
    return f"{source} profiling"


def _restriction(context: CheckContext, mine: Rights, *, needless: bool) -> Finding:
    only = restricted(context)
    if only is None:
        return Finding(PROFILING, "restriction", INFO, "the driver does not report who may profile")
    if not only:
        return Finding(
            PROFILING, "restriction", OK, "the driver allows every user to profile (RmProfilingAdminOnly: 0)"
        )
    message = "the driver allows profiling for administrators only (RmProfilingAdminOnly: 1)"
    enough = mine.has("SYS_ADMIN") or (mine.has("PERFMON") and _major(kernel_driver(context)) >= _PERFMON_SINCE)
    if needless:
        return Finding(PROFILING, "restriction", OK, f"{message}; what is read here is not affected")
    if enough:
        return Finding(PROFILING, "restriction", INFO, f"{message}, and this process is one")
    return Finding(PROFILING, "restriction", WARN, f"{message}, which this process is not", _RESTRICTION_ADVICE)


def _running_profilers(proc: Path) -> set[str]:
    found = set()
    for path in proc.glob("[0-9]*/comm"):
        name = read_text(path).strip()
        if name in _PROFILERS:
            found.add(f"{_PROFILERS[name]} (pid {path.parent.name})")
    return found
