"""Looks up the peak rates of a GPU model in `exporter/data/gpu_specs.csv`, by model name or PCI device id.

An unknown model has no spec, hence no peak rate and no eMFU, until the operator configures one.
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
"""One direction of an x16 link by PCIe generation (PCI-SIG line rates, rounded as in vendors' data sheets)."""
_HBM3_CEILING, _OTHER_CEILING = 0.92, 0.80
"""Share of the peak memory bandwidth that a copy kernel reaches; estimates by memory generation."""
_HBM3_CAPABILITIES = ("9.", "10.")
"""CUDA compute capabilities with HBM3-class memory: Hopper and datacentre Blackwell (12.x is GDDR7)."""
_MIG_SLICES = {"8.0": 7, "9.0": 7, "10.0": 7, "10.3": 7}
"""Compute slices by CUDA compute capability (NVIDIA's MIG user guide); an A30, also 8.0, has four."""
_IN_RACKS, _RACK = ("GB200", "GB300"), 72
"""Models sold as racks whose GPUs share one NVLink domain (NVL72), and its number of GPUs."""
_NVIDIA = "10de"
_NO_OVERRIDES: Mapping[str, Spec] = MappingProxyType({})


class _Table(Struct, frozen=True):
    by_pci: dict[str, Spec]
    """Only ids that belong to exactly one row."""
    by_name: list[tuple[re.Pattern[str], Spec]]
    confidence: dict[str, str]


def find_spec(
    model_name: str, pci_device_id: str | None = None, *, overrides: Mapping[str, Spec] = _NO_OVERRIDES
) -> Spec | None:
    """Return the board's spec; None if the model is unknown.

    `model_name` is the driver's full name ("NVIDIA H100 80GB HBM3", nvmlDeviceGetName); `pci_device_id` is
    "2330", "0x2330" or NVML's "233010de" (nvmlPciInfo_t.pciDeviceId: device id, then vendor id). Tries `overrides` by
    model name, then a PCI id that is unique to one board, then a full match of the name.
    """
    if model_name in overrides:
        return overrides[model_name]
    table = _table()
    spec = table.by_pci.get(_device_id(pci_device_id)) if pci_device_id else None
    return spec or next((spec for pattern, spec in table.by_name if pattern.fullmatch(model_name)), None)


def confidence(name: str) -> str:
    """Return how well the table's figures for `Spec.name` are known: high, medium, low, or "" if not in the table.

    It does not apply to an operator's override, which may have the same name.
    """
    return _table().confidence.get(name, "")


def is_known(model: str) -> bool:
    """Return whether the table has a board of that name, the driver's or its own."""
    return bool(confidence(model)) or find_spec(model) is not None


def unknown_model(uuid: str, model: str) -> Fault:
    """Return the fault for a GPU without a spec; sources report it once per GPU, when it is first listed."""
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
    """Yield the ids of a cell such as "1db5;1db8(SXM3)"; text in parentheses is a comment."""
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
        power_limit_watts=_number(row["tdp_w"], scale=1.0),
        dram_ceiling=_HBM3_CEILING if hbm3 else _OTHER_CEILING,
        slices=4 if row["model"] == "A30" else _MIG_SLICES.get(row["compute_capability"], 0),
        memory_gb=_number(row["memory_gb"], scale=1.0),
    )


def _number(cell: str, *, scale: float) -> float | None:
    return float(cell) * scale if cell.strip() else None


def mig_instance_spec(spec: Spec, *, compute: float, memory: float) -> Spec:
    """Scale the board's peaks to a MIG instance, by its shares of SMs (`compute`) and memory bandwidth (`memory`)."""
    shares = {
        "peak_flops": compute,
        "peak_flops_tf32": compute,
        "peak_flops_fp8": compute,
        "peak_flops_fp4": compute,
        "memory_bandwidth_bytes_per_second": memory,
    }
    whole = ((field, share, getattr(spec, field)) for field, share in shares.items())
    return structs.replace(spec, **{field: value * share for field, share, value in whole if value is not None})
