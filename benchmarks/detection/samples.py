"""What recordings of real boards and jobs say to the detectors, and how little that is: none holds a hang seen by DCGM.

Owns the reading of `../shared/samples`, which are read in place and not part of this repository. A capture is one
moment: it is played as if it lasted a quarter of an hour, held by a batch job.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from benchmarks.detection.play import played
from benchmarks.detection.rules import Watch
from benchmarks.figures import Row
from benchmarks.machine import ROOT
from exporter.core.model import SECOND, Allocation, Device, Observation, Owner, Process, Reading
from exporter.core.snapshot import GpuView, Snapshot
from exporter.specs import find_spec

SAMPLES = Path(ROOT) / "../shared/samples"
_PERIOD, _LASTS = 10, 900
_SMI = re.compile(r"^nvidia_smi_(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)
_DCGM = re.compile(r'^(DCGM_FI_\w+)\{gpu="0".*modelName="([^"]+)".*\} (\S+)$', re.MULTILINE)
_MOMENT = re.compile(r"^\[([^\]]+)\].*\[#(\w+)\] \[(BEGIN|END)\]", re.MULTILINE)


class Shown(NamedTuple):
    """What one capture makes of a GPU: where it ends, whether a hang was suspected, which rules of thumb held."""

    state: str
    reason: str
    suspected: bool
    thumbs: tuple[int, ...]


def smi(name: str, model: str) -> tuple[Device, Reading]:
    """One capture of nvidia_gpu_exporter: what `nvidia-smi -q` says, and no profiling field."""
    text = (SAMPLES / "smi-captures" / f"linux-x86_64__{name}.metrics").read_text(encoding="utf-8")
    said = {key: float(value) for key, value in _SMI.findall(text)}
    running = tuple(Process(int(pid)) for pid in sorted(set(re.findall(r'compute_app_info\{pid="(\d+)"', text))))
    return Device("GPU-0", model=model, spec=find_spec(model)), Reading(
        "GPU-0", 0, SECOND,
        gpu_utilization=said.get("utilization_gpu_ratio"),
        power_watts=said["power_draw_watts"],
        enforced_power_limit_watts=said["enforced_power_limit_watts"],
        temperature_celsius=said["temperature_gpu"],
        sm_clock_hz=said["clocks_current_sm_clock_hz"],
        memory_used_bytes=said["memory_used_bytes"],
        processes=running,
    )  # fmt: skip


def dcgm(name: str) -> tuple[Device, Reading]:
    """The first GPU of a dcgm-exporter page; it tells no processes and no power limit."""
    found = _DCGM.findall((SAMPLES / "dcgm-exporter" / f"{name}.prom").read_text(encoding="utf-8"))
    said = {field: float(value) for field, _, value in found}
    model = found[0][1]
    return Device("GPU-0", model=model, spec=find_spec(model)), Reading(
        "GPU-0", 0, SECOND,
        gr_engine_active=said["DCGM_FI_PROF_GR_ENGINE_ACTIVE"],
        tensor_active=said["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"],
        dram_active=said["DCGM_FI_PROF_DRAM_ACTIVE"],
        gpu_utilization=said["DCGM_FI_DEV_GPU_UTIL"] / 100,
        power_watts=said["DCGM_FI_DEV_POWER_USAGE"],
        sm_clock_hz=said["DCGM_FI_DEV_SM_CLOCK"] * 1e6,
    )  # fmt: skip


def shown(device: Device, reading: Reading) -> Shown:
    """Play one moment as if it lasted."""
    watch, last = Watch(), list[GpuView]()

    def look(views: list[Snapshot]) -> None:
        watch.look(views)
        last[:] = [views[0].gpus[0]]

    found = played([list(_lasting(device, reading))], look=look)
    thumbs = tuple(index for index, fired in enumerate(watch.fired) if fired)
    return Shown(last[0].state.value, last[0].reason, bool(found.suspected), thumbs)


def _lasting(device: Device, reading: Reading) -> Iterator[Observation]:
    held = (Allocation(device.uuid, Owner("1"), 0, gpus=1),)
    yield Observation(0, 0, devices=(device,), allocations=held)
    for end in range(_PERIOD, _LASTS + 1, _PERIOD):
        spans = replace(reading, start=(end - _PERIOD) * SECOND, end=end * SECOND)
        yield Observation(end * SECOND, end * SECOND, readings=(spans,))


def phases() -> dict[str, list[float]]:
    """Seconds that steps and saves of a real training run took (xpu_timer's log)."""
    begun: dict[str, datetime] = {}
    lasted: dict[str, list[float]] = {}
    text = (SAMPLES / "xpu_timer/atorch_training_events.log").read_text(encoding="utf-8")
    for moment, kind, edge in _MOMENT.findall(text):
        at = datetime.fromisoformat(moment)
        if edge == "BEGIN":
            begun[kind] = at
        else:
            lasted.setdefault(kind, []).append((at - begun[kind]).total_seconds())
    return lasted


def hang_lines() -> set[str]:
    """Names of the metrics in which xpu_timer's hung page differs from its healthy one."""
    hung, normal = (
        set((SAMPLES / f"xpu_timer/{name}.prom").read_text(encoding="utf-8").splitlines())
        for name in ("hang_all", "normal")
    )
    return {line.split("{")[0] for line in hung ^ normal}


def busy_and_cool(cluster: str, *, utilisation: float = 98.0, watts: float = 120.0) -> tuple[float, float]:
    """Least and most share of a cluster's samples that are both this busy and this cool: Acme gives marginals only."""
    idle, cool = (
        _share_below(cluster, "gpu_util_pct", utilisation - 0.01),
        _share_below(cluster, "gpu_power_watts", watts),
    )
    return max(0.0, cool - idle), min(1 - idle, cool)


def _share_below(cluster: str, metric: str, limit: float) -> float:
    with (SAMPLES / "acme/dcgm_cdf.csv").open(encoding="utf-8", newline="") as file:
        points = [r for r in csv.DictReader(file) if (r["cluster"], r["metric"]) == (cluster, metric)]
    return max((float(r["cdf_percent"]) for r in points if float(r["value"]) <= limit), default=0.0) / 100


Capture = Callable[[], tuple[Device, Reading]]
H100 = "NVIDIA H100 80GB HBM3"
CAPTURES: tuple[tuple[str, Capture], ...] = (
    ("H100 idle (nvidia-smi)", lambda: smi("nvidia-h100-80gb-hbm3__590.48.01__idle", H100)),
    ("H100 under gpu_burn (nvidia-smi)", lambda: smi("nvidia-h100-80gb-hbm3__590.48.01__load", H100)),
    ("H100 in MIG mode under gpu_burn (nvidia-smi)", lambda: smi("nvidia-h100-mig__590.48.01__load", H100)),
    ("H200 in MIG mode under gpu_burn (nvidia-smi)", lambda: smi("nvidia-h200-mig__590.48.01__load", "NVIDIA H200")),
    ("L4 idle (dcgm-exporter)", lambda: dcgm("l4-x2-idle-kops")),
    ("L40S idle (dcgm-exporter)", lambda: dcgm("l40s-idle-upcloud")),
    ("T4 idle (dcgm-exporter)", lambda: dcgm("t4-idle-rafay")),
)


def samples() -> list[Row]:
    """One row a recording; one that says so where there are none."""
    if not SAMPLES.exists():
        return [_row("Real recordings", "-", "not here: they are read from ../shared/samples, beside this repository")]
    return [*_captures(), *_others()]


def _captures() -> Iterable[Row]:
    for name, capture in CAPTURES:
        said = shown(*capture())
        suspect = "a hang is suspected" if said.suspected else "no hang suspected"
        yield _row(f"Recorded: {name}, as if held for 15 min", f"{said.state} ({said.reason})", suspect)


def _others() -> Iterable[Row]:
    lasted = phases()
    yield _row(
        "Recorded: a training run's log (xpu_timer)",
        f"first step {lasted['step'][0] / 60:.1f} min",
        f"saves of {', '.join(f'{s:.0f} s' for s in lasted['save'])}: the look-alikes' lengths are not made up",
    )
    yield _row(
        "Recorded: every rank hung, and healthy (xpu_timer)",
        "no GPU counter in either",
        f"they differ in {', '.join(sorted(hang_lines()))} alone: nothing for our rules to see",
    )
    for cluster in ("seren", "kalos"):
        least, most = busy_and_cool(cluster)
        yield _row(
            f"Recorded: Acme {cluster.title()} (A100), utilisation >= 98 % and power <= 30 % of 400 W",
            f"{least:.0%} - {most:.0%} of all samples",
            "bounds from its marginals: the first rule of thumb's condition is an everyday one there",
        )


def _row(what: str, median: str, spread: str) -> Row:
    return Row(group="detection", what=what, often="once", median=median, spread=spread)
