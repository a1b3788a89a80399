"""Models the GPUs and MIG instances that DCGM lists: identity, weights, health, watched fields and intervals."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import NEVER, PPM, Device, Fault, Spec
from exporter.sources.base import NO_ACTIVITY, NVLINK_SIGNALS, instance_device, mig_weights
from exporter.sources.cycles import CycleCounters
from exporter.sources.dcgm.client import DcgmClient, DcgmRefusal, DcgmSample, EntityId, GpuInstance
from exporter.sources.dcgm.intervals import MeasuredInterval, SampleSeries
from exporter.sources.dcgm_fields import (
    CYCLES,
    GAUGES,
    HEALTH,
    INSTANCE,
    RATES,
    RATIOS,
    STATIC,
    VISIBLE,
    Field,
)
from exporter.specs import find_spec, mig_instance_spec, unknown_model

UnitSpan = tuple[int, int, MeasuredInterval | None]
"""Monotonic nanoseconds [start, end), and the values measured over that time; None: there are only gauges."""


class DcgmUnit:
    """A board or an instance: a device with its DCGM entity, its sample series, and the end of its last reading."""

    def __init__(self, device: Device, entity: EntityId) -> None:
        self.device, self.entity = device, entity
        self.series: SampleSeries | None = None
        self.cycles: CycleCounters[int] | None = None
        self.latest: dict[int, DcgmSample] = {}
        self.newest = 0
        """Newest time stamp of the latest values, microseconds."""
        self._ended_at, self._contiguous = NEVER, False
        """End of the last reading, monotonic nanoseconds, and whether the next reading begins there."""
        self._gauged_at: int | None = None
        self._counter: tuple[int, float] | None = None

    def reset(self, since: int) -> None:
        """Drop all baselines, and values stamped before `since`, microseconds of the engine's clock."""
        self._contiguous, self._counter = False, None
        self.latest = {}
        if self.series is not None:
            self.series.reset(since)
        if self.cycles is not None:
            self.cycles.reset()

    def number(self, field: int) -> float | int | None:
        """Return the latest value of a field; None if it is not a number."""
        sample = self.latest.get(field)
        return sample.value if sample is not None and isinstance(sample.value, (int, float)) else None

    @property
    def has_no_values(self) -> bool:
        """True if none of its fields has a numeric value."""
        return not any(isinstance(sample.value, (int, float)) for sample in self.latest.values())

    @property
    def profiled(self) -> bool:
        """True if profiling values are expected."""
        return self.series is not None and bool(self.series.fields)

    def spans(
        self, intervals: Iterable[MeasuredInterval], host: Callable[[int], int], *, slack: int, floor: int
    ) -> Iterator[UnitSpan]:
        """Yield the intervals in monotonic time (`host` converts), each from the end of the last, never before `floor`.

        Of an interval longer than `slack` only the last part counts. All times are nanoseconds.
        """
        for interval in intervals:
            end = host(interval.end)
            earliest = self._ended_at if self._contiguous else max(host(interval.start), self._ended_at)
            start = max(earliest, end - slack, floor)
            if end > start:
                self._ended_at, self._contiguous = end, True
                yield start, end, interval

    def since_last(self, now: int, *, slack: int, floor: int) -> list[UnitSpan]:
        """Return the time since the last read, for a unit without profiling; empty if no gauge has a new value."""
        newest = max((sample.stamp for sample in self.latest.values()), default=0)
        if newest <= self.newest:
            return []
        before, self._gauged_at, self.newest = self._gauged_at, now, newest
        start = now if before is None else max(before, self._ended_at, now - slack, floor)
        if start >= now:
            return []
        self._ended_at, self._contiguous = now, False
        return [(start, now, None)]

    def energies(self, counter: tuple[int, float] | None, durations: Sequence[int]) -> list[float | None]:
        """Return this unit's share of the board's energy over each duration (ns), in joules.

        `counter` is the time stamp (microseconds) and value (joules) of the board's energy counter. Uses the mean power
        between its last two values, because readings rarely cover exactly the time between them.
        """
        if not durations:
            return []
        before, self._counter = self._counter, counter
        if before is None or counter is None or counter[1] < before[1] or counter[0] <= before[0]:
            return [None] * len(durations)
        rate = (counter[1] - before[1]) / (counter[0] - before[0]) / 1000 * self.device.weight / PPM
        return [rate * duration for duration in durations]


class DcgmInventory(Struct):
    """The GPUs, static fields and MIG instances that the host engine lists."""

    gpus: list[int]
    static: dict[int, dict[str, Any]]
    instances: dict[int, list[GpuInstance]]

    def layout(self, gpu: int) -> tuple[Any, ...] | None:
        """Return what must not change for the watches of a board to stay valid; None: unknown."""
        mig = self.static[gpu].get("mig")
        instances = ((i.entity, i.instance_id, i.slices) for i in self.instances.get(gpu, ()))
        return None if mig is None else (mig, *instances)


class DcgmBoard:
    """A GPU of the host engine, with its MIG instances."""

    def __init__(self, gpu: int, layout: tuple[Any, ...] | None, units: list[DcgmUnit], faults: list[Fault]) -> None:
        self.gpu, self.layout, self.units, self.faults = gpu, layout, units, faults
        self.group: Any = None
        self.watched: list[Any] = []
        self.ratios: Any = None
        self.refused = ""
        """Why there is no profiling, as a message; empty if there is."""
        self.permanently_refused = False
        """True if retrying cannot help."""
        self.recovery_action = 0
        self._xid_stamp: int | None = None

    @property
    def whole(self) -> DcgmUnit:
        """The unit of the board itself."""
        return self.units[0]

    @property
    def partitioned(self) -> bool:
        """True if it is in MIG mode and has instances."""
        return len(self.units) > 1 or self.whole.device.weight != PPM

    @property
    def condition(self) -> str:
        """Condition of the board, and thereby of its instances."""
        return self.whole.device.condition

    def set_condition(self, condition: str) -> None:
        """Set the condition of the board and its instances; empty: none."""
        for unit in self.units:
            unit.device = replace(unit.device, condition=condition)

    def new_xids(self, field: int) -> tuple[int, ...]:
        """Return the Xid since the last call, if any: `field` keeps the last one for ever, with its time."""
        sample = self.whole.latest.get(field)
        if sample is None or not isinstance(sample.value, int) or sample.value <= 0:
            self._xid_stamp = self._xid_stamp or 0
            return ()
        before, self._xid_stamp = self._xid_stamp, sample.stamp
        return (sample.value,) if before is not None and sample.stamp > before else ()

    def carry_over(self, previous: "DcgmBoard") -> None:
        """Copy from `previous` the state that does not depend on the MIG layout."""
        self._xid_stamp, self.recovery_action = previous._xid_stamp, previous.recovery_action  # noqa: SLF001


def read_inventory(client: DcgmClient) -> DcgmInventory:
    """Read the GPUs, their static fields and their instances."""
    gpus = client.gpus()
    numbers = {field.field_id(client.fields): field.name for field in STATIC}
    field_ids = [number for number in numbers if number is not None]
    static: dict[int, dict[str, Any]] = {gpu: {} for gpu in gpus}
    for sample in client.latest([(client.gpu, gpu) for gpu in gpus], field_ids, live=True) if gpus else ():
        if isinstance(sample.value, (int, str)):
            static[sample.entity[1]][numbers[sample.field]] = sample.value
    instances: dict[int, list[GpuInstance]] = {}
    if any(facts.get("mig") == 1 for facts in static.values()):
        for instance in sorted(client.instances(), key=lambda instance: instance.instance_id):
            instances.setdefault(instance.gpu, []).append(instance)
    return DcgmInventory(gpus, static, instances)


def make_board(client: DcgmClient, gpu: int, inventory: DcgmInventory, *, overrides: Mapping[str, Spec]) -> DcgmBoard:
    """Make a board with its device and those of its instances, with their weights."""
    facts = inventory.static[gpu]
    model, pci = str(facts.get("model", "")), facts.get("pci")
    spec = find_spec(model, f"{pci:08x}" if isinstance(pci, int) else None, overrides=overrides)
    uuid = str(facts.get("uuid") or f"unknown-{gpu}")
    whole = Device(
        uuid=uuid,
        index=str(facts.get("index", gpu)),
        model=model,
        spec=spec,
        lacks=() if spec is None or spec.nvlink_bytes_per_second else NVLINK_SIGNALS,
    )
    faults = [unknown_model(uuid, model)] if spec is None and model else []
    units = [DcgmUnit(whole, (client.gpu, gpu))]
    if facts.get("mig") == 1:
        units = _mig_units(client, gpu, whole, inventory.instances.get(gpu, ()), int(facts.get("slices") or 0))
    return DcgmBoard(gpu, inventory.layout(gpu), units, faults)


def _mig_units(
    client: DcgmClient, gpu: int, whole: Device, listed: Iterable[GpuInstance], slices: int
) -> list[DcgmUnit]:
    instances = [instance for instance in listed if instance.compute_instances]
    counts = [instance.slices for instance in instances]
    weights = mig_weights(counts, max(slices, sum(counts), 1))
    parts = [
        DcgmUnit(_instance_device(client, whole, instance, weight, max(slices, 1)), instance.entity)
        for instance, weight in zip(instances, weights, strict=True)
    ]
    return [DcgmUnit(replace(whole, weight=PPM - sum(weights)), (client.gpu, gpu)), *parts]


def _instance_device(client: DcgmClient, whole: Device, instance: GpuInstance, weight: int, slices: int) -> Device:
    share = instance.slices / slices
    return instance_device(
        whole,
        instance.instance_id,
        uuid=_mig_uuid(client, whole, instance),
        profile=_profile(client, instance),
        weight=weight,
        spec=None if whole.spec is None else mig_instance_spec(whole.spec, compute=share, memory=share),
    )


def _profile(client: DcgmClient, instance: GpuInstance) -> str:
    """Return the MIG profile, which DCGM reports as the instance's name; else one made of its number of slices."""
    name = _static_text(client, instance.entity, STATIC[0]).rpartition(" ")[2]
    return name if "g." in name else f"{instance.slices}g"


def _mig_uuid(client: DcgmClient, whole: Device, instance: GpuInstance) -> str:
    """Return the MIG device's own UUID if the instance is a single device; else the board's UUID / instance id."""
    name = _static_text(client, instance.compute_instances[0], VISIBLE) if len(instance.compute_instances) == 1 else ""
    return name if name.startswith("MIG-") else f"{whole.uuid}/{instance.instance_id}"


def _static_text(client: DcgmClient, entity: EntityId, field: Field) -> str:
    """Return a static text field of an entity; empty if it has none."""
    number = field.field_id(client.fields)
    if number is not None:
        with suppress(DcgmRefusal):
            (sample,) = client.latest([entity], [number], live=True)
            return sample.value if isinstance(sample.value, str) else ""
    return ""


_UTILIZATIONS = ("gpu_utilization", "encoder_utilization", "decoder_utilization")
UNPARTITIONED = {**dict.fromkeys((*(field.name for field in RATES), *_UTILIZATIONS)), **NO_ACTIVITY}
"""Fields of a board's unpartitioned part: no activity, and no rates, which belong to its instances."""
KEEP_SECONDS = 90.0
"""How long the engine keeps values: longer than its longest blocking call (60 s)."""
HEALTH_PERIOD_US = 10_000_000
_PRIORITY = ("tensor_active", "gr_engine_active", "sm_active", "dram_active")
"""Fields to watch first if not all counters can be read at once."""
_OPTIONAL = frozenset({"int_active", "c2c_tx_bytes_per_second", "c2c_rx_bytes_per_second"})
"""Fields that are watched only if the engine lists them for the board: one that it cannot read makes it refuse all."""
REFUSAL_REASONS = {
    "profiling_not_supported": "this board has no profiling counters that DCGM can read",
    "module_not_loaded": "DCGM's profiling module is not loaded: see `dcgmi modules -l`; on DCGM 4 install the package"
    " datacenter-gpu-manager-4-proprietary",
    "requires_root": "the host engine does not run as root",
    "no_permission": "the driver restricts profiling to administrators: run the host engine as root, or load the driver"
    " with NVreg_RestrictProfilingToAdminUsers=0",
    "profiling_library_error": "another program holds the counters (Nsight, CUPTI, a second host engine), or the"
    " profiler broke: end it, or restart nvidia-dcgm",
    "in_use": "another program holds the counters: end it",
    "gpu_not_supported": "DCGM does not support this board",
    "gpu_is_lost": "the driver does not reach this GPU",
    "profiling_multi_pass": "another client watches counters that cannot be read together with ours",  # nosec B105
}
"""Cause and remedy by the kind of a DcgmRefusal of the profiling fields."""


class SupportedFields:
    """The fields that this host engine supports, by id, and the field groups created on it, each once.

    The engine may be older than the bindings, and a single unknown field makes the creation of a whole group fail.
    """

    def __init__(self, client: DcgmClient) -> None:
        self._client = client
        self._groups: dict[tuple[int, ...], Any] = {}
        tables = [self._numbered(table) for table in (RATIOS, CYCLES, RATES, GAUGES, HEALTH)]
        known = set(client.supported([number for table in tables for number in table]))
        self.ratios, self.cycles, self.rates, self.gauges_by_id, self.health = (
            {number: field for number, field in table.items() if number in known} for table in tables
        )
        shown = {**self.rates, **self.gauges_by_id}
        self._latest = shown
        self._instance = {number: field for number, field in shown.items() if field.name in INSTANCE}
        self.xid = next((number for number, field in self.gauges_by_id.items() if field.name == "xid"), -1)
        self._energy = next((number for number, field in self.gauges_by_id.items() if field.name == "energy"), -1)

    def _numbered(self, table: Iterable[Field]) -> dict[int, Field]:
        numbered = ((field.field_id(self._client.fields), field) for field in table)
        return {number: field for number, field in numbered if number is not None}

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that are set from the latest values."""
        return frozenset(field.name for field in self._latest.values()) - {"energy", "xid"}

    def group(self, ids: Sequence[int]) -> Any:
        """Return the engine's group of these fields; create it if needed."""
        key = tuple(ids)
        if key not in self._groups:
            self._groups[key] = self._client.field_group(key)
        return self._groups[key]

    def latest_queries(self, boards: Iterable[DcgmBoard]) -> list[tuple[list[EntityId], list[int]]]:
        """Return (entities, fields) of the requests for latest values: one for boards, one for instances."""
        units = [unit for board in boards for unit in board.units]
        boards_only = [unit.entity for unit in units if not unit.device.parent]
        instances = [unit.entity for unit in units if unit.device.parent]
        queries = [(boards_only, list(self._latest)), (instances, list(self._instance))]
        return [(entities, ids) for entities, ids in queries if entities]

    def gauges(self, unit: DcgmUnit) -> dict[str, Any]:
        """Return the fields of `Reading` from a unit's latest values, without energy and Xid."""
        found: dict[str, Any] = {}
        for number, field in (self._instance if unit.device.parent else self._latest).items():
            value = unit.number(number)
            if value is not None and number not in (self.xid, self._energy):
                # Field 203 is a percentage as an integer, but a ratio as a double.
                plain = field.name == "gpu_utilization" and isinstance(value, float)
                found[field.name] = value if plain else value * field.scale
        if "clock_event_reasons" in found:
            found["clock_event_reasons"] = int(found["clock_event_reasons"])
        return found

    def energy(self, unit: DcgmUnit) -> tuple[int, float] | None:
        """Return the energy counter's time stamp (microseconds) and value (joules); None without one."""
        value = unit.number(self._energy)
        return (
            None if value is None else (unit.latest[self._energy].stamp, value * self.gauges_by_id[self._energy].scale)
        )

    def named(self, values: dict[int, float]) -> dict[str, float]:
        """Return the ratios by the names of `Reading`'s fields."""
        return {self.ratios[number].name: value for number, value in values.items() if number in self.ratios}


def watch_board(client: DcgmClient, fields: SupportedFields, board: DcgmBoard, *, period: int, since: int) -> None:
    """Watch a board and its instances; sets `board.refused` if the engine refuses, to be retried.

    A board that is lost, or not supported by DCGM, cannot be added to a group: nothing of it is watched.
    """
    gauges, health = fields.group(list(fields.gauges_by_id)), fields.group(list(fields.health))
    try:
        board.group = client.group(unit.entity for unit in board.units)
        for ids, every in ((gauges, period), (health, max(period, HEALTH_PERIOD_US))):
            client.watch(board.group, ids, period=every, keep_seconds=KEEP_SECONDS)
            board.watched.append(ids)
    except DcgmRefusal as refusal:
        board.refused = _reason(refusal)
        client.unwatch(board.group, board.watched)
        board.group = None
        return
    watch_profiling(client, fields, board, period=period, since=since)


def watch_profiling(client: DcgmClient, fields: SupportedFields, board: DcgmBoard, *, period: int, since: int) -> None:
    """Watch the profiling fields that are not watched yet, or set `board.refused` to the reason."""
    chosen = _one_pass(fields, _metric_groups(client, board.gpu))
    ratios = [number for number in chosen if number in fields.ratios or number in fields.cycles]
    rates = [number for number in chosen if number in fields.rates]
    try:
        for ids in filter(None, (ratios, rates)):
            group = fields.group(ids)
            if group in board.watched:
                continue
            client.watch(board.group, group, period=period, keep_seconds=KEEP_SECONDS)
            board.watched.append(group)
            if ids is ratios:
                board.ratios = group
                _start_series(fields, board, ratios, period=period, since=since)
    except DcgmRefusal as refusal:
        board.refused = _reason(refusal)
        board.permanently_refused = refusal.kind in ("profiling_not_supported", "not_supported", "gpu_not_supported")
        return
    board.refused = "" if ratios else REFUSAL_REASONS["profiling_not_supported"]


def _start_series(fields: SupportedFields, board: DcgmBoard, ratios: Sequence[int], *, period: int, since: int) -> None:
    """Start the series of each instance, or of the board if it has none."""
    for unit in board.units:
        if unit is not board.whole or not board.partitioned:
            counters = fields.cycles.keys() & set(ratios)
            unit.series = SampleSeries(ratios, period=period, since=since, counters=counters)
            unit.cycles = _cycle_counters(fields, ratios)


def _reason(refusal: DcgmRefusal) -> str:
    return f"{REFUSAL_REASONS.get(refusal.kind, refusal.kind)} ({refusal})"


def _metric_groups(client: DcgmClient, gpu: int) -> list[tuple[int, int, list[int]]]:
    try:
        return client.metric_groups(gpu)
    except DcgmRefusal:
        return []  # the watch itself reports the refusal


def _one_pass(fields: SupportedFields, groups: list[tuple[int, int, list[int]]]) -> list[int]:
    """Return the profiling fields to watch: of mutually exclusive groups, only the one with the most important field.

    Boards before Hopper multiplex groups with the same major id: if watched together, a group reports zeros or
    extrapolated values while another is read.
    """
    wanted = {**fields.ratios, **fields.rates, **fields.cycles}
    priorities = {name: place for place, name in enumerate(_PRIORITY)}
    ordered = sorted(wanted, key=lambda number: priorities.get(wanted[number].name, len(_PRIORITY)))
    if not groups:
        return [number for number in wanted if number not in fields.cycles and wanted[number].name not in _OPTIONAL]
    chosen_groups: dict[int, int] = {}
    for number in ordered:
        groups_with_field = [(major, minor) for major, minor, members in groups if number in members]
        if groups_with_field and not any(chosen_groups.get(major) == minor for major, minor in groups_with_field):
            free = [(major, minor) for major, minor in groups_with_field if major not in chosen_groups]
            chosen_groups.update(free[:1])
    readable = {number for major, minor, members in groups if chosen_groups.get(major) == minor for number in members}
    return [number for number in wanted if number in readable]


def _cycle_counters(fields: SupportedFields, ratios: Sequence[int]) -> CycleCounters[int] | None:
    by_name = {fields.ratios[number].name: number for number in ratios if number in fields.ratios}
    counters = {fields.cycles[number].name: number for number in ratios if number in fields.cycles}
    elapsed = counters.pop("elapsed", None)
    pairs = {number: by_name[name] for name, number in counters.items() if name in by_name}
    return None if elapsed is None or not pairs else CycleCounters(elapsed, pairs)
