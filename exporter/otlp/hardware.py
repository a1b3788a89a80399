"""Defines HARDWARE: what OpenTelemetry's semantic conventions for hardware name of a GPU, read from its view.

Names, units, kinds and attributes are those of version 1.44 of the conventions, whose status is "development":
https://opentelemetry.io/docs/specs/semconv/hardware/gpu/. Left out is what they name and no source has: `hw.gpu.io`
counts bytes, and sources report rates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct

from exporter.core.model import JOULE, State
from exporter.core.snapshot import GpuView, valid_value

Attributes = Mapping[str, str]
HardwareSample = tuple[Attributes, float]


class HardwareMetric(Struct, frozen=True, kw_only=True):
    """A metric of the conventions. `kind` is gauge, counter (only grows) or updowncounter."""

    name: str
    unit: str
    kind: str
    help: str
    read: Callable[[GpuView], Iterable[HardwareSample]]


def component(gpu: GpuView) -> dict[str, str]:
    """Return the attributes that name a GPU or MIG instance."""
    device = gpu.device
    named = {
        "hw.id": device.uuid,
        "hw.type": "gpu",
        "hw.name": f"GPU {device.index}" if device.index else "",
        "hw.model": device.model,
        "hw.vendor": "NVIDIA",
        "hw.parent": device.parent,
    }
    return {key: value for key, value in named.items() if value}


def _current(name: str, **attributes: str) -> Callable[[GpuView], Iterator[HardwareSample]]:
    """Read a field of the latest reading while it is current."""

    def read(gpu: GpuView) -> Iterator[HardwareSample]:
        value = valid_value(gpu.reading, name) if gpu.live else None
        if value is not None:
            yield component(gpu) | attributes, value

    return read


_TASKS = {"general": "gpu_utilization", "encoder": "encoder_utilization", "decoder": "decoder_utilization"}


def _utilization(gpu: GpuView) -> Iterator[HardwareSample]:
    for task, name in _TASKS.items():
        yield from _current(name, **{"hw.gpu.task": task})(gpu)


def _memory_utilization(gpu: GpuView) -> Iterator[HardwareSample]:
    used, total = (valid_value(gpu.reading, f"memory_{name}_bytes") for name in ("used", "total"))
    if gpu.live and used is not None and total:
        yield component(gpu), used / total


def _energy(gpu: GpuView) -> Iterator[HardwareSample]:
    yield component(gpu), sum(gpu.counters.energy) / JOULE


def _errors(gpu: GpuView) -> Iterator[HardwareSample]:
    health = gpu.health
    if health is None:
        return
    kinds = {
        "corrected": health.ecc_corrected,
        "uncorrected": health.ecc_uncorrected,
        "nvlink": health.nvlink_errors,
        "xid": gpu.xids,
    }
    for kind, count in kinds.items():
        if count is not None:
            yield component(gpu) | {"error.type": kind}, count


STATES = ("ok", "degraded", "predicted_failure", "failed")


def _status(gpu: GpuView) -> Iterator[HardwareSample]:
    """One of STATES is 1: a row that cannot be remapped announces a failure, and a requested recovery is degraded."""
    health, current = gpu.health, "ok"
    if gpu.state is State.UNAVAILABLE:
        current = "failed"
    elif health is not None and health.row_remap_failed:
        current = "predicted_failure"
    elif health is not None and (health.row_remap_pending or health.recovery_action):
        current = "degraded"
    for state in STATES:
        yield component(gpu) | {"hw.state": state}, int(state == current)


def _temperature(gpu: GpuView) -> Iterator[HardwareSample]:
    """Each sensor is a component of its own, whose parent is the GPU."""
    memory = None if gpu.health is None else gpu.health.memory_temperature_celsius
    for place, value in (("gpu", valid_value(gpu.reading, "temperature_celsius")), ("memory", memory)):
        if gpu.live and value is not None:
            sensor = {
                "hw.id": f"{gpu.device.uuid}/{place}",
                "hw.type": "temperature",
                "hw.parent": gpu.device.uuid,
                "hw.sensor_location": place,
            }
            yield sensor, value


HARDWARE: tuple[HardwareMetric, ...] = (
    HardwareMetric(
        name="hw.gpu.utilization", unit="1", kind="gauge", read=_utilization,
        help="Fraction of time in which the GPU, its video encoder or its decoder was busy, as the driver reports it."),
    HardwareMetric(
        name="hw.gpu.memory.limit", unit="By", kind="updowncounter", read=_current("memory_total_bytes"),
        help="Size of the device memory."),
    HardwareMetric(
        name="hw.gpu.memory.usage", unit="By", kind="updowncounter", read=_current("memory_used_bytes"),
        help="Device memory in use."),
    HardwareMetric(
        name="hw.gpu.memory.utilization", unit="1", kind="gauge", read=_memory_utilization,
        help="Fraction of the device memory that is in use."),
    HardwareMetric(
        name="hw.power", unit="W", kind="gauge", read=_current("power_watts"), help="Power draw of the board."),
    HardwareMetric(
        name="hw.energy", unit="J", kind="counter", read=_energy, help="Energy used by the GPU."),
    HardwareMetric(
        name="hw.errors", unit="{error}", kind="counter", read=_errors,
        help="Errors of the GPU: ECC errors (corrected, uncorrected), NVLink errors and Xid errors."),
    HardwareMetric(
        name="hw.status", unit="1", kind="updowncounter", read=_status,
        help="1 for the state of the GPU, 0 for the other states."),
    HardwareMetric(
        name="hw.temperature", unit="Cel", kind="gauge", read=_temperature,
        help="Temperature of the GPU and of its memory."),
)  # fmt: skip
