"""What DCGM lists: boards and their MIG instances, as devices; and what is remembered of a board between surveys.

Owns identity, shares and health. Refuses to ask for readings.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import PPM, Device, Fault, Health, Spec
from exporter.sources import shares
from exporter.sources.dcgm.engine import Engine, Entity, Instance, Refusal, Sample
from exporter.sources.dcgm.fields import RATES, STATIC, VISIBLE, Field
from exporter.sources.dcgm.units import Unit
from exporter.specs import find_spec, sliced, unknown_model

NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
_NOTHING_RUNS = dict.fromkeys(("gr_engine_active", "sm_active", "tensor_active", "dram_active"), 0.0)


class Found(Struct):
    """One look at all that the engine lists."""

    gpus: list[int]
    static: dict[int, dict[str, Any]]
    instances: dict[int, list[Instance]]

    def layout(self, gpu: int) -> tuple[Any, ...] | None:
        """What must stay the same for a board to be the one that is watched; None: it does not say."""
        mig = self.static[gpu].get("mig")
        return None if mig is None else (mig, *((i.entity, i.number, i.slices) for i in self.instances.get(gpu, ())))


class Board:
    """One GPU of the engine's: itself, and the instances it is cut into."""

    def __init__(self, gpu: int, layout: tuple[Any, ...] | None, units: list[Unit], doubts: list[Fault]) -> None:
        self.gpu, self.layout, self.units, self.doubts = gpu, layout, units, doubts
        self.group: Any = None
        self.watched: list[Any] = []
        self.ratios: Any = None
        self.refused = ""
        """Why profiling is not to be had, in words; empty when it is."""
        self.hopeless = False
        """The refusal is final."""
        self.recovery = 0
        self._xid_at: int | None = None

    @property
    def whole(self) -> Unit:
        """The board itself."""
        return self.units[0]

    @property
    def cut(self) -> bool:
        """It is in MIG mode and has instances."""
        return len(self.units) > 1 or self.whole.device.weight != PPM

    @property
    def condition(self) -> str:
        """Of the board, and so of its instances."""
        return self.whole.device.condition

    def condemn(self, condition: str) -> None:
        """Give the board and its instances a condition, or take it from them."""
        for unit in self.units:
            unit.device = replace(unit.device, condition=condition)

    def forget(self, wall: int) -> None:
        """Drop the baselines of all units."""
        for unit in self.units:
            unit.forget(wall)

    def xids(self, field: int) -> tuple[int, ...]:
        """The error told since the last time: the field keeps the last one for ever, with the time it happened."""
        sample = self.whole.latest.get(field)
        if sample is None or not isinstance(sample.value, int) or sample.value <= 0:
            self._xid_at = self._xid_at or 0
            return ()
        before, self._xid_at = self._xid_at, sample.at
        return (sample.value,) if before is not None and sample.at > before else ()

    def carry(self, known: "Board") -> None:
        """Keep what outlives a new layout."""
        self._xid_at, self.recovery = known._xid_at, known.recovery  # noqa: SLF001


def survey(engine: Engine) -> Found:
    """Ask for everything that has an identity."""
    gpus = engine.gpus()
    numbers = {field.number(engine.fields): field.name for field in STATIC}
    asked = [number for number in numbers if number is not None]
    static: dict[int, dict[str, Any]] = {gpu: {} for gpu in gpus}
    for sample in engine.latest([(engine.gpu, gpu) for gpu in gpus], asked, live=True) if gpus else ():
        if isinstance(sample.value, (int, str)):
            static[sample.entity[1]][numbers[sample.field]] = sample.value
    instances: dict[int, list[Instance]] = {}
    if any(facts.get("mig") == 1 for facts in static.values()):
        for instance in sorted(engine.instances(), key=lambda instance: instance.number):
            instances.setdefault(instance.gpu, []).append(instance)
    return Found(gpus, static, instances)


def meet(engine: Engine, gpu: int, found: Found, *, overrides: Mapping[str, Spec]) -> Board:
    """A board as it is met: its device and those of its instances, with their shares of it."""
    facts = found.static[gpu]
    model, pci = str(facts.get("model", "")), facts.get("pci")
    spec = find_spec(model, f"{pci:08x}" if isinstance(pci, int) else None, overrides=overrides)
    uuid = str(facts.get("uuid") or f"unknown-{gpu}")
    whole = Device(
        uuid=uuid,
        index=str(facts.get("index", gpu)),
        model=model,
        spec=spec,
        lacks=() if spec is None or spec.nvlink_bytes_per_second else NVLINK,
    )
    cut = [instance for instance in found.instances.get(gpu, ()) if instance.computes] if facts.get("mig") == 1 else []
    doubts = [unknown_model(uuid, model)] if spec is None and model else []
    units = _units(engine, gpu, whole, cut, int(facts.get("slices") or 0), mig=facts.get("mig") == 1)
    return Board(gpu, found.layout(gpu), units, doubts)


def _units(engine: Engine, gpu: int, whole: Device, cut: list[Instance], slices: int, *, mig: bool) -> list[Unit]:
    if not mig:
        return [Unit(whole, (engine.gpu, gpu))]
    counts = [instance.slices for instance in cut]
    weights = shares(counts, max(slices, sum(counts), 1))
    parts = [
        Unit(_part(engine, whole, instance, weight, max(slices, 1)), instance.entity)
        for instance, weight in zip(cut, weights, strict=True)
    ]
    return [Unit(replace(whole, weight=PPM - sum(weights)), (engine.gpu, gpu)), *parts]


def _part(engine: Engine, whole: Device, instance: Instance, weight: int, slices: int) -> Device:
    share = instance.slices / slices
    return Device(
        uuid=_mig_uuid(engine, whole, instance),
        index=f"{whole.index}:{instance.number}",
        model=whole.model,
        spec=None if whole.spec is None else sliced(whole.spec, compute=share, memory=share),
        lacks=NVLINK,
        weight=weight,
        parent=whole.uuid,
        profile=_profile(engine, instance),
    )


def _profile(engine: Engine, instance: Instance) -> str:
    """The profile as NVIDIA writes it, which DCGM gives as the name of the instance; else its slices alone."""
    name = _text(engine, instance.entity, STATIC[0]).rpartition(" ")[2]
    return name if "g." in name else f"{instance.slices}g"


def _mig_uuid(engine: Engine, whole: Device, instance: Instance) -> str:
    """The MIG device's own UUID where the instance is one device; else the board's and the instance's number."""
    name = _text(engine, instance.computes[0], VISIBLE) if len(instance.computes) == 1 else ""
    return name if name.startswith("MIG-") else f"{whole.uuid}/{instance.number}"


def _text(engine: Engine, entity: Entity, field: Field) -> str:
    """A static text of an entity; empty where there is none."""
    number = field.number(engine.fields)
    if number is not None:
        with suppress(Refusal):
            (sample,) = engine.latest([entity], [number], live=True)
            return sample.value if isinstance(sample.value, str) else ""
    return ""


def health_of(
    board: Board,
    numbers: Mapping[str, int],
    values: Mapping[int, Sample],
    *,
    xids: tuple[int, ...],
    temperature: float | None,
) -> Health:
    """A board's Health from the latest values; what is blank is None."""

    def told(name: str) -> int | float | None:
        sample = values.get(numbers.get(name, -1))
        return sample.value if sample is not None and isinstance(sample.value, (int, float)) else None

    margin, slowdown = told("temperature_margin_celsius"), told("slowdown")
    if margin is None and slowdown is not None and temperature is not None:
        margin = slowdown - temperature
    links = [told(f"nvlink_{kind}") for kind in ("crc_flit", "crc_data", "replay", "recovery")]
    seen = [int(count) for count in links if count is not None]
    board.recovery = int(told("recovery_action") or 0)
    return Health(
        uuid=board.whole.device.uuid,
        xids=xids,
        recovery_action=_whole(told("recovery_action")),
        ecc_corrected=_whole(told("ecc_corrected")),
        ecc_uncorrected=_whole(told("ecc_uncorrected")),
        row_remap_pending=_flag(told("row_remap_pending")),
        row_remap_failed=_flag(told("row_remap_failed")),
        nvlink_errors=sum(seen) if seen else None,
        memory_temperature_celsius=told("memory_temperature_celsius") or None,
        temperature_margin_celsius=margin,
        power_smoothing=_flag(told("power_smoothing")),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _flag(value: float | None) -> bool | None:
    return None if value is None else bool(value)


def nothing_runs() -> dict[str, Any]:
    """What is not partitioned runs nothing: no kernel can be started on it. Rates of the board are its instances'."""
    return {**dict.fromkeys(field.name for field in RATES), "gpu_utilization": None, **_NOTHING_RUNS}
