"""Models the GPUs and MIG instances that DCGM lists: identity, weights, health, watched fields and intervals."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import NEVER, PPM, Device, Fault, Spec
from exporter.sources.base import NO_ACTIVITY, NVLINK_SIGNALS, UNKNOWN_PREFIX, instance_device, mig_weights
from exporter.sources.cycles import CycleCounters
from exporter.sources.dcgm.client import DcgmClient, DcgmRefusal, DcgmSample, EntityId, GpuInstance
from exporter.sources.dcgm.intervals import Cadence, MeasuredInterval, SampleSeries
from exporter.sources.dcgm_fields import RATES, STATIC, UUID, VISIBLE, Field
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
        self._previous: dict[int, DcgmSample] = {}
        """The value of each field before its latest one."""
        self.newest = 0
        """Newest time stamp of the latest values, microseconds."""
        self._ended_at, self._contiguous = NEVER, False
        """End of the last reading, monotonic nanoseconds, and whether the next reading begins there."""
        self._gauged_at: int | None = None
        self._counter: tuple[int, float] | None = None

    def reset(self, since: int) -> None:
        """Drop all baselines, and values stamped before `since`, microseconds of the engine's clock."""
        self._contiguous, self._counter = False, None
        self.latest, self._previous = {}, {}
        if self.series is not None:
            self.series.reset(since)
        if self.cycles is not None:
            self.cycles.reset()

    def add_latest(self, sample: DcgmSample) -> None:
        """Take the latest value of a field, which may be known already."""
        before = self.latest.get(sample.field)
        if before is not None and before.stamp < sample.stamp:
            self._previous[sample.field] = before
        self.latest[sample.field] = sample

    def number(self, field: int, *, until: int | None = None) -> float | int | None:
        """Return the latest value of a field, or the one before if that is stamped after `until`; None: no number."""
        sample = self.latest.get(field)
        if sample is not None and until is not None and sample.stamp > until:
            sample = self._previous.get(field, sample)
        return sample.value if sample is not None and isinstance(sample.value, (int, float)) else None

    @property
    def has_no_values(self) -> bool:
        """True if none of its fields has a numeric value."""
        return not any(isinstance(sample.value, (int, float)) for sample in self.latest.values())

    @property
    def has_activity(self) -> bool:
        """True if one of its profiling fields has a numeric value."""
        return self.series is not None and any(self.number(field) is not None for field in self.series.fields)

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

    def remember(self, board: "DcgmBoard") -> None:
        """Fill in what cannot be read of a GPU now and was read before, if it is still the same one."""
        known, facts = board.whole.device, self.static[board.gpu]
        if facts.get("uuid") in (None, known.uuid) and not board.has_placeholder:
            before = {"uuid": known.uuid, "model": known.model, "index": known.index}
            self.static[board.gpu] = before | facts

    def layout(self, gpu: int) -> tuple[Any, ...] | None:
        """Return what must not change for the watches of a board to stay valid; None: unknown.

        A GPU that is unbound and bound again renumbers all of them, and another one may take its number.
        """
        facts = self.static[gpu]
        identity = facts.get("mig"), facts.get("uuid"), facts.get("index")
        instances = ((i.entity, i.instance_id, i.slices) for i in self.instances.get(gpu, ()))
        return None if None in identity else (*identity, *instances)


_TWICE_REPORTED = (79, 119, 120)
"""Xids that the engine takes from the driver's events and from the kernel's log."""
_SAME_EVENT_US = 5_000_000


class DcgmBoard:
    """A GPU of the host engine, with its MIG instances."""

    def __init__(self, gpu: int, layout: tuple[Any, ...] | None, units: list[DcgmUnit], faults: list[Fault]) -> None:
        self.gpu, self.layout, self.units, self.faults = gpu, layout, units, faults
        self.whole_group: Any = None
        """The engine's group of the board alone; None: it could not be watched."""
        self.parts_group: Any = None
        """The engine's group of its instances; None: it has none."""
        self.watched: list[tuple[Any, Any]] = []
        """(group, field group) of each watch."""
        self.profiling_fields: set[int] = set()
        """Those that are watched."""
        self.ratios: Any = None
        """The field group of those whose values are joined into intervals."""
        self.cadence: Cadence | None = None
        self.blank_since: dict[int, int] = {}
        self.given_up: dict[int, int] = {}
        """Profiling fields that this board's driver does not have, or that were refused beside others, and when to ask
        for them again, monotonic nanoseconds."""
        self.silent_since: int | None = None
        """Since when no value that sets the pace has come, monotonic nanoseconds; None: they come."""
        self.logged_refusals: set[int] = set()
        """Profiling fields that were refused beside others, which the log has named."""
        self.refused = ""
        """Why its activity is not measured, as a message; empty if it is."""
        self.permanently_refused = False
        """True if retrying cannot help."""
        self.recovery_action = 0
        self._xid_stamp: int | None = None
        self._kernel_xids: dict[int, int] = {}

    @property
    def whole(self) -> DcgmUnit:
        """The unit of the board itself."""
        return self.units[0]

    @property
    def partitioned(self) -> bool:
        """True if it is in MIG mode and has instances."""
        return len(self.units) > 1 or self.whole.device.weight != PPM

    @property
    def has_placeholder(self) -> bool:
        """True if the GPU's UUID could not be read."""
        return self.whole.device.uuid.startswith(UNKNOWN_PREFIX)

    @property
    def has_no_values(self) -> bool:
        """True if neither the board nor any instance has a numeric value."""
        return all(unit.has_no_values for unit in self.units)

    def note_silence(self, now: int) -> None:
        """Note whether what is measured has a value, at `now` in monotonic nanoseconds."""
        units = [unit for unit in self.measured_units if unit.profiled]
        heard = any(unit.has_activity for unit in units) if units else not self.has_no_values
        self.silent_since = None if heard else now if self.silent_since is None else self.silent_since

    def is_silent(self, now: int, limit: int) -> bool:
        """Return whether there has been no value for at least `limit` nanoseconds."""
        return self.silent_since is not None and now - self.silent_since >= limit

    @property
    def measured_units(self) -> list[DcgmUnit]:
        """The units whose activity is measured: the instances, or the board if it has none."""
        return self.units[1:] if self.partitioned else self.units

    @property
    def measured_group(self) -> Any:
        """The engine's group of the measured units."""
        return self.parts_group if self.partitioned else self.whole_group

    @property
    def condition(self) -> str:
        """Condition of the board, and thereby of its instances."""
        return self.whole.device.condition

    def set_condition(self, condition: str) -> None:
        """Set the condition of the board and its instances; empty: none."""
        for unit in self.units:
            unit.device = replace(unit.device, condition=condition)

    def new_xids(self, field: int, since: Callable[["DcgmBoard", int], Iterable[DcgmSample]]) -> tuple[int, ...]:
        """Return the Xids since the last call: the latest value of `field` keeps the last one for ever, with its time.

        `since` returns all of them from a time stamp on. An Xid that both NVML and the kernel's log report counts once.
        """
        sample = self.whole.latest.get(field)
        if sample is None or not isinstance(sample.value, int) or sample.value <= 0:
            self._xid_stamp = self._xid_stamp or 0
            return ()
        before, self._xid_stamp = self._xid_stamp, sample.stamp
        if before is None or sample.stamp <= before:
            return ()
        events = [event for event in since(self, before + 1) if event.stamp > before] or [sample]
        self._xid_stamp = max(event.stamp for event in events)
        return tuple(
            event.value
            for event in events
            if isinstance(event.value, int) and event.value > 0 and not self._is_repeated(event.value, event.stamp)
        )

    def _is_repeated(self, xid: int, stamp: int) -> bool:
        if xid not in _TWICE_REPORTED:
            return False
        before = self._kernel_xids.get(xid)
        self._kernel_xids[xid] = stamp
        return before is not None and stamp - before < _SAME_EVENT_US

    def carry_over(self, previous: "DcgmBoard") -> None:
        """Copy from `previous` the state that does not depend on the MIG layout."""
        self._xid_stamp, self._kernel_xids = previous._xid_stamp, previous._kernel_xids  # noqa: SLF001
        self.recovery_action, self.given_up = previous.recovery_action, previous.given_up
        self.logged_refusals = previous.logged_refusals


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
    """Make a board with its device and those of its instances, with their weights.

    A GPU whose identity cannot be read has a placeholder as its UUID.
    """
    facts = inventory.static[gpu]
    model, pci = str(facts.get("model", "")), facts.get("pci")
    spec = find_spec(model, f"{pci:08x}" if isinstance(pci, int) else None, overrides=overrides)
    uuid = str(facts.get("uuid") or f"{UNKNOWN_PREFIX}{gpu}")
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
    """Return the MIG device's own UUID if the instance is a single device; else the board's UUID / instance id.

    The UUID of its compute instance is the driver's. Engines that give none may have it as CUDA's name, in place of
    which DCGM 3.1 to 4.6 give MIG-<board>/<instance>/<compute instance>, by which no scheduler knows the device.
    """
    if len(instance.compute_instances) == 1:
        for field in (UUID, VISIBLE):
            name = _static_text(client, instance.compute_instances[0], field)
            if name.startswith("MIG-") and "/" not in name:
                return name
    return f"{whole.uuid}/{instance.instance_id}"


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
