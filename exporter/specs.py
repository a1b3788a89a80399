"""Looks up the peak rates of a GPU model, by the driver's name or the PCI device id.

Owns the reading of `exporter/data/gpu_specs.csv`. Refuses to guess: an unknown board has no spec, hence no peak and no
eMFU, until the operator configures one.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from msgspec import Struct, structs

from exporter.core.model import Fault, Spec

_PCIE_BYTES_PER_SECOND = {"3": 16e9, "4": 32e9, "5": 64e9, "6": 128e9}
"""One direction of a x16 link by generation, raw (PCI-SIG line rates, rounded as vendors print them)."""
_HBM3_CEILING, _OTHER_CEILING = 0.92, 0.80
"""The share of the memory bandwidth that a copy kernel reaches: estimates, one per memory generation."""
_HBM3_CAPABILITIES = ("9.", "10.")
"""CUDA compute capabilities with HBM3-class memory: Hopper and datacentre Blackwell (12.x is GDDR7)."""
_MIG_SLICES = {"8.0": 7, "9.0": 7, "10.0": 7, "10.3": 7}
"""Compute slices by CUDA compute capability (NVIDIA's MIG user guide); an A30, 8.0 as well, has four."""
_IN_RACKS, _RACK = ("GB200", "GB300"), 72
"""Boards that are sold as racks whose GPUs one NVLink domain joins (NVL72), and how many those are."""
_NVIDIA = "10de"
_NO_OVERRIDES: Mapping[str, Spec] = MappingProxyType({})


class _Table(Struct, frozen=True):
    by_pci: dict[str, Spec]
    """Only ids that mean one row."""
    by_name: list[tuple[re.Pattern[str], Spec]]
    confidence: dict[str, str]


def find_spec(
    model_name: str, pci_device_id: str | None = None, *, overrides: Mapping[str, Spec] = _NO_OVERRIDES
) -> Spec | None:
    """Return the board's spec; None when the model is unknown.

    `model_name` is the driver's full name ("NVIDIA H100 80GB HBM3", nvmlDeviceGetName); `pci_device_id` is
    "2330", "0x2330" or NVML's "233010de" (nvmlPciInfo_t.pciDeviceId: device above vendor). An override, keyed
    by the driver's name, wins; then an id that one board alone has; then the name, matched in full.
    """
    if model_name in overrides:
        return overrides[model_name]
    table = _table()
    spec = table.by_pci.get(_device_id(pci_device_id)) if pci_device_id else None
    return spec or next((spec for pattern, spec in table.by_name if pattern.fullmatch(model_name)), None)


def confidence(name: str) -> str:
    """How well the table's figures for the board of that `Spec.name` are known: high, medium or low; "" if not there.

    An override keeps the table's name: of what the operator wrote this says nothing.
    """
    return _table().confidence.get(name, "")


def unknown_model(uuid: str, model: str) -> Fault:
    """Say that a GPU has no spec, and what to do; a source says it once a GPU, when it first meets it."""
    return Fault(
        "unknown_model",
        f"GPU {uuid} is a model without known peaks ({model!r}): its kernel time cannot be judged and is booked"
        f' unresolved. Give its figures in the configuration, under [specs."{model}"]: peak_flops (dense 16-bit tensor'
        " FLOP/s), tensor_reference_clock_hz, memory_bandwidth_bytes_per_second",
        uuid,
    )


def _device_id(text: str) -> str:
    digits = text.lower().removeprefix("0x")
    return digits.removesuffix(_NVIDIA).zfill(4) if len(digits) > len(_NVIDIA) else digits.zfill(4)


@cache
def _table() -> _Table:
    file = resources.files("exporter") / "data" / "gpu_specs.csv"
    rows = [(row, _spec(row)) for row in csv.DictReader(file.read_text("utf-8").splitlines())]
    ids = [(identifier, spec) for row, spec in rows for identifier in _ids(row["pci_device_id"])]
    seen = [identifier for identifier, _ in ids]
    return _Table(
        by_pci={identifier: spec for identifier, spec in ids if seen.count(identifier) == 1},
        by_name=[(re.compile(row["nvml_name_patterns"]), spec) for row, spec in rows],
        confidence={spec.name: row["confidence"] for row, spec in rows},
    )


def _ids(cell: str) -> Iterator[str]:
    """Give the ids of a cell such as "1db5;1db8(SXM3)"; what stands in brackets is a note for people."""
    ids = (part.partition("(")[0].strip().lower() for part in cell.split(";"))
    return (identifier for identifier in ids if identifier)


def _spec(row: Mapping[str, str]) -> Spec:
    hbm3 = row["compute_capability"].startswith(_HBM3_CAPABILITIES)
    return Spec(
        name=row["model"],
        peak_flops=_number(row["bf16_fp16_tensor_tflops"], scale=1e12),
        peak_flops_tf32=_number(row["tf32_tensor_tflops"], scale=1e12),
        peak_flops_fp8=_number(row["fp8_tensor_tflops"], scale=1e12),
        peak_flops_fp4=_number(row["fp4_tensor_tflops"], scale=1e12),
        tensor_reference_clock_hz=_number(row["tensor_ref_clock_mhz"], scale=1e6),
        memory_bandwidth_bytes_per_second=_number(row["memory_bw_gbs"], scale=1e9),
        nvlink_bytes_per_second=_number(row["nvlink_gbs_bidir"], scale=1e9 / 2),
        nvlink_domain=_RACK if row["model"].startswith(_IN_RACKS) else 0,
        pcie_bytes_per_second=_PCIE_BYTES_PER_SECOND.get(row["pcie_gen"]),
        idle_context_watts=_number(row["idle_w_p0_awake_or_context"], scale=1.0),
        dram_ceiling=_HBM3_CEILING if hbm3 else _OTHER_CEILING,
        slices=4 if row["model"] == "A30" else _MIG_SLICES.get(row["compute_capability"], 0),
        memory_gb=_number(row["memory_gb"], scale=1.0),
    )


def _number(cell: str, *, scale: float) -> float | None:
    return float(cell) * scale if cell.strip() else None


def mig_instance_spec(spec: Spec, *, compute: float, memory: float) -> Spec:
    """What a MIG instance can do at best: its share of the SMs, and of the memory's bandwidth."""
    shares = {
        "peak_flops": compute,
        "peak_flops_tf32": compute,
        "peak_flops_fp8": compute,
        "peak_flops_fp4": compute,
        "memory_bandwidth_bytes_per_second": memory,
    }
    whole = ((field, share, getattr(spec, field)) for field, share in shares.items())
    return structs.replace(spec, **{field: value * share for field, share, value in whole if value is not None})
