"""Boards in MIG mode: which part of a board each instance is, and what is left.

Owns shares, devices and figures of instances. Refuses to guess: a layout that does not add up has no devices of its
own. The page names instances by GPU_I_ID and GPU_I_PROFILE beside the board's UUID, and no free capacity: what it
does not show is taken to be free, so the exporter must show all instances of a board (its default, `-d f`, does).
"""

import re

from msgspec import structs

from exporter.core.model import PPM, Device, Spec
from exporter.sources import shares
from exporter.sources.dcgm_exporter.names import OF_A_BOARD, whole_number
from exporter.sources.dcgm_exporter.page import GpuLines, figures_of
from exporter.specs import sliced

NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
_MEMORY = re.compile(r"(?<![0-9])([0-9]{1,4})GB")
_PROFILE = re.compile(r"(?<![0-9])([0-9]{1,2})g\.([0-9]{1,4})gb")
_SLICES = 7
_FEWER_SLICES = (
    ("NVIDIA A30", 4),
    ("NVIDIA RTX PRO 6000 Blackwell", 4),
    ("NVIDIA RTX PRO 5000 Blackwell", 2),
    ("NVIDIA RTX PRO 4500 Blackwell", 2),
)
"""Compute slices by the beginning of the model's name, where they are not seven (MIG user guide, supported GPUs)."""
_MEMORY_SLICES = 8
_MEMORY_OF = {2: 2, 3: 4, 4: 4, 7: 8}
"""Memory slices of a profile by its compute slices, on boards with seven; one slice has one or two (same guide)."""
_SMALLEST = 1 / 8
"""Of a board's memory: no profile has less, so nothing can be made of less."""


def layout(gpu: GpuLines) -> tuple[tuple[str, str], ...]:
    """What distinguishes one partition of a board from another."""
    return tuple(sorted((instance, lines.profile) for instance, lines in gpu.instances.items()))


def devices_of(board: Device, gpu: GpuLines) -> tuple[Device, ...]:
    """The board with what no instance has, then its instances; nothing when the page's profiles do not add up.

    All weights together are exactly PPM.
    """
    whole = _slices_of_board(board.model, gpu)
    if None in map(whole_number, gpu.instances):
        return ()
    sizes = {instance: _slices(gpu.instances[instance].profile) for instance in sorted(gpu.instances, key=int)}
    if not all(sizes.values()) or sum(sizes.values()) > whole:
        return ()
    weights = shares(tuple(sizes.values()), whole)
    cut = (
        _instance(board, gpu, instance, weight=weight, slices=(size, whole))
        for (instance, size), weight in zip(sizes.items(), weights, strict=True)
    )
    left = PPM - sum(weights)
    return (structs.replace(board, weight=left, stranded=left > 0 and _out_of_memory(gpu)), *cut)


def rest_of(gpu: GpuLines) -> dict[str, float | int]:
    """Figures of the board for its rest: its own power and clocks, and no work, for no kernel can run there.

    Activity its instances do not show is left out: the exporter does not collect it.
    """
    idle = ("sm_active", "tensor_active", "dram_active")
    shown = set().union(*(figures_of(instance) for instance in gpu.instances.values()))
    own: dict[str, float | int] = {k: v for k, v in figures_of(gpu).items() if k in OF_A_BOARD}
    return own | {"gr_engine_active": 0.0} | {name: 0.0 for name in idle if name in shown}


def instance_of(gpu: GpuLines, instance: str) -> dict[str, float | int]:
    """Figures of an instance: its own, and the clock that it shares with its board."""
    clock = {"sm_clock_hz": gpu.figures["sm_clock_hz"]} if "sm_clock_hz" in gpu.figures else {}
    return figures_of(gpu.instances[instance]) | clock


def _instance(board: Device, gpu: GpuLines, instance: str, *, weight: int, slices: tuple[int, int]) -> Device:
    profile = gpu.instances[instance].profile
    return structs.replace(
        board,
        uuid=f"{board.uuid}/{instance}",
        index=f"{board.index}:{instance}",
        spec=None if board.spec is None else _spec(board, board.spec, gpu, instance, slices=slices),
        lacks=NVLINK,
        weight=weight,
        parent=board.uuid,
        profile=profile,
    )


def _spec(board: Device, whole: Spec, gpu: GpuLines, instance: str, *, slices: tuple[int, int]) -> Spec:
    memory = _memory_share(board.model, whole, gpu, gpu.instances[instance], slices=slices)
    part = sliced(whole, compute=slices[0] / slices[1], memory=memory or 1.0)
    return part if memory else structs.replace(part, memory_bandwidth_bytes_per_second=None)


def _memory_share(model: str, spec: Spec, gpu: GpuLines, lines: GpuLines, *, slices: tuple[int, int]) -> float | None:
    """Whole memory slices of the board's: as measured, else as the profile says; None when that is not enough."""
    own, all_slices = slices
    if all_slices != _SLICES:
        return own / all_slices
    part, whole = (figures_of(one).get("memory_total_bytes") for one in (lines, gpu))
    if part and whole:
        return min(max(round(part / whole * _MEMORY_SLICES), 1), _MEMORY_SLICES) / _MEMORY_SLICES
    if own in _MEMORY_OF:
        return _MEMORY_OF[own] / _MEMORY_SLICES
    named, profile = _MEMORY.search(model), _PROFILE.search(lines.profile)
    gigabytes = float(named[1]) if named else spec.memory_gb
    if profile is None or not gigabytes:
        return None
    return {1: 1 / 8, 2: 2 / 8}.get(round(float(profile[2]) / gigabytes * _MEMORY_SLICES))


def _slices_of_board(model: str, gpu: GpuLines) -> int:
    told = int(gpu.figures.get("mig_slices", 0))
    return told or next((slices for name, slices in _FEWER_SLICES if model.startswith(name)), _SLICES)


def _slices(profile: str) -> int:
    """Compute slices of a GPU instance: 3 of "3g.40gb", of "1c.3g.40gb" and of "3g.40gb+me"; 0 when it is none."""
    found = _PROFILE.search(profile)
    return int(found[1]) if found else 0


def _out_of_memory(gpu: GpuLines) -> bool:
    """Whether what is left is known to be too little for any profile; False when the page does not tell."""
    whole = figures_of(gpu).get("memory_total_bytes")
    parts = (figures_of(instance).get("memory_total_bytes", 0.0) for instance in gpu.instances.values())
    return whole is not None and whole - sum(parts) < whole * _SMALLEST
