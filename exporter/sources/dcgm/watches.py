"""Chooses the DCGM fields to watch of each board and instance, and watches them on the host engine."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from exporter.core.model import SECOND
from exporter.sources.cycles import CycleCounters
from exporter.sources.dcgm.boards import DcgmBoard, DcgmUnit
from exporter.sources.dcgm.client import DcgmClient, DcgmRefusal, EntityId
from exporter.sources.dcgm.intervals import Cadence, SampleSeries
from exporter.sources.dcgm_fields import CYCLES, GAUGES, HEALTH, INSTANCE, RATES, RATIOS, Field

log = logging.getLogger(__name__)
KEEP_SECONDS = 90.0
"""How long the engine keeps values: longer than its longest blocking call (60 s)."""
HEALTH_PERIOD_US = 10_000_000
_PRIORITY = ("tensor_active", "gr_engine_active", "sm_active", "dram_active")
"""Fields to watch first if not all counters can be read at once."""
_PROBE = "temperature_celsius"
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
        self._latest = {**self.rates, **self.gauges_by_id}
        self._instance = {number: field for number, field in self._latest.items() if field.name in INSTANCE}
        self.health_probe = next((n for n, field in self.gauges_by_id.items() if field.name == _PROBE), None)
        """A field whose reading asks the driver."""
        self.xid = next((number for number, field in self.gauges_by_id.items() if field.name == "xid"), -1)
        self._utilization = next((n for n, field in self.gauges_by_id.items() if field.name == "gpu_utilization"), -1)
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

    def latest_queries(self, boards: Iterable[DcgmBoard]) -> dict[tuple[int, ...], list[EntityId]]:
        """Return the entities to ask for their latest values, by the fields to ask them for: those watched of each.

        The engine answers a question for a field that nobody watches with a line in its own log.
        """
        queries: dict[tuple[int, ...], list[EntityId]] = {}
        for board in boards:
            for unit in board.units:
                queries.setdefault(self._asked(board, unit), []).append(unit.entity)
        return {ids: entities for ids, entities in queries.items() if ids}

    def _asked(self, board: DcgmBoard, unit: DcgmUnit) -> tuple[int, ...]:
        shown = self._instance if unit.device.parent else self._latest
        rates = board.profiling_fields & self.rates.keys() if unit in board.measured_units else set[int]()
        plain = [number for number in shown if number in self.gauges_by_id or number in rates]
        return (*plain, *(unit.series.watched if unit.series is not None else ()))

    def name(self, number: int) -> str:
        """Return the name of a profiling field."""
        return {**self.ratios, **self.cycles, **self.rates}[number].name

    def is_link(self, number: int) -> bool:
        """Return whether a profiling field exists of whole boards only."""
        return number in self.rates and self.rates[number].name not in INSTANCE

    def instance_gauges(self) -> list[int]:
        """Return the gauges that exist of a MIG instance."""
        return [number for number in self._instance if number in self.gauges_by_id]

    def gauges(self, unit: DcgmUnit) -> dict[str, Any]:
        """Return the fields of `Reading` from a unit's latest values, without energy and Xid."""
        found: dict[str, Any] = {}
        for number, field in (self._instance if unit.device.parent else self._latest).items():
            value = unit.number(number)
            if value is not None and number not in (self.xid, self._energy, self._utilization):
                found[field.name] = value * field.scale
        found |= self.utilization(unit)
        if "clock_event_reasons" in found:
            found["clock_event_reasons"] = int(found["clock_event_reasons"])
        return found

    def utilization(self, unit: DcgmUnit, *, until: int | None = None) -> dict[str, float]:
        """Return the driver's utilization as of `until`, a stamp, as a field of `Reading`; empty without one.

        A later one may describe work that began after a reading's end, whose counters then seem to be at zero.
        """
        value = unit.number(self._utilization, until=until)
        if value is None or unit.device.parent:
            return {}
        # Field 203 is a percentage as an integer, but a ratio as a double.
        scale = 1.0 if isinstance(value, float) else self.gauges_by_id[self._utilization].scale
        return {"gpu_utilization": value * scale}

    def energy(self, unit: DcgmUnit) -> tuple[int, float] | None:
        """Return the energy counter's time stamp (microseconds) and value (joules); None without one."""
        value = unit.number(self._energy)
        return (
            None if value is None else (unit.latest[self._energy].stamp, value * self.gauges_by_id[self._energy].scale)
        )

    def named(self, values: dict[int, float]) -> dict[str, float]:
        """Return the ratios by the names of `Reading`'s fields."""
        return {self.ratios[number].name: value for number, value in values.items() if number in self.ratios}


class WatchTimes(NamedTuple):
    """The times of a watch that begins now."""

    period: int
    """Microseconds between two samples."""
    since: int
    """Time stamp of the first value that counts, microseconds of the engine's clock."""
    now: int
    """Monotonic nanoseconds."""


def watch_board(client: DcgmClient, fields: SupportedFields, board: DcgmBoard, times: WatchTimes) -> None:
    """Watch a board and its instances; sets `board.refused` if the engine refuses, to be retried.

    A board that is lost, or not supported by DCGM, cannot be added to a group: nothing of it is watched.
    """
    parts = [unit.entity for unit in board.units[1:]]
    try:
        board.whole_group = client.group([board.whole.entity])
        board.parts_group = client.group(parts) if parts else None
        _watch(client, board, board.whole_group, fields.group(list(fields.gauges_by_id)), times.period)
        _watch(client, board, board.whole_group, fields.group(list(fields.health)), max(times.period, HEALTH_PERIOD_US))
        if parts:
            _watch(client, board, board.parts_group, fields.group(fields.instance_gauges()), times.period)
    except DcgmRefusal as refusal:
        board.refused = _reason(refusal)
        unwatch_board(client, board)
        return
    watch_profiling(client, fields, board, times)


def unwatch_board(client: DcgmClient, board: DcgmBoard) -> None:
    """End all watches of a board, and drop its groups. Never raises for a living connection."""
    for group, field_group in board.watched:
        client.unwatch(group, field_group)
    for group in (board.whole_group, board.parts_group):
        if group is not None:
            client.drop_group(group)
    board.whole_group = board.parts_group = None
    board.watched = []


def _watch(client: DcgmClient, board: DcgmBoard, group: Any, field_group: Any, period: int) -> None:
    client.watch(group, field_group, period=period, keep_seconds=KEEP_SECONDS)
    if (group, field_group) not in board.watched:
        board.watched.append((group, field_group))


REFUSED_AGAIN_AFTER = 600 * SECOND
"""Until fields are asked for again that were refused beside others: each try interrupts those before Hopper."""
_PERMANENT = ("profiling_not_supported", "not_supported", "gpu_not_supported")


def watch_profiling(client: DcgmClient, fields: SupportedFields, board: DcgmBoard, times: WatchTimes) -> None:
    """Watch all profiling fields of a board that can be read together; sets `board.refused` if its activity is refused.

    They are watched at once, and again with each change of one of them: on boards before Hopper the engine ends the
    sampling of all profiling fields of a group when one of them is unwatched, or a watch is refused
    (DcgmHostEngineHandler::UnwatchFieldGroup of NVIDIA/DCGM). Those that are refused beside the activity are given up
    for a while. Links of a partitioned board are not watched: it is not known which instance transferred the bytes.
    """
    readable = _one_pass(fields, _metric_groups(client, board.gpu))
    shown = [number for number in readable if not (board.partitioned and fields.is_link(number))]
    ids = [number for number in shown if number not in board.given_up]
    before, board.profiling_fields = sorted(board.profiling_fields), set()
    if ended := [number for number in before if number not in ids]:
        client.unwatch(board.measured_group, fields.group(ended))
    refusal: DcgmRefusal | None = None
    for attempt in _attempts(fields, ids, before):
        try:
            _watch(client, board, board.measured_group, fields.group(attempt), times.period)
        except DcgmRefusal as error:
            refusal = error
            continue
        board.profiling_fields.update(attempt)
        break
    measured = bool(_of_series(fields, board.profiling_fields))
    why = REFUSAL_REASONS["profiling_not_supported"] if refusal is None else _reason(refusal)
    board.refused = "" if measured else why
    board.permanently_refused = not measured and refusal is not None and refusal.kind in _PERMANENT
    if measured and refusal is not None:
        _give_up(fields, board, [number for number in ids if number not in board.profiling_fields], why, times)
    _update_series(fields, board, _of_series(fields, readable), times)


def _give_up(fields: SupportedFields, board: DcgmBoard, refused: Sequence[int], why: str, times: WatchTimes) -> None:
    """Ask for these fields again later. Logged once for each field: the activity is measured, so it is no fault."""
    board.given_up |= dict.fromkeys(refused, times.now + REFUSED_AGAIN_AFTER)
    new = [number for number in refused if number not in board.logged_refusals]
    board.logged_refusals.update(new)
    if new:
        names, device = ", ".join(fields.name(number) for number in new), board.whole.device
        log.warning("DCGM: GPU %s (%s) does not give %s: %s", device.index, device.uuid, names, why)


def _attempts(fields: SupportedFields, ids: Sequence[int], before: Sequence[int]) -> list[list[int]]:
    """Return what to watch of `ids` until it is not refused: all, those watched before, those without the links."""
    attempts = (list(ids), [number for number in ids if number in before], _of_series(fields, ids))
    return [each for place, each in enumerate(attempts) if each and each not in attempts[:place]]


def _of_series(fields: SupportedFields, ids: Iterable[int]) -> list[int]:
    """Return the fields whose values are joined into intervals."""
    return [number for number in ids if number in fields.ratios or number in fields.cycles]


def _update_series(fields: SupportedFields, board: DcgmBoard, ids: Sequence[int], times: WatchTimes) -> None:
    """Have the series of each instance, or of the board if it has none, expect the fields that are watched."""
    watched = _of_series(fields, sorted(board.profiling_fields))
    board.ratios = fields.group(watched) if watched else None
    for unit in board.measured_units:
        if not watched:
            unit.series = unit.cycles = None
        elif unit.series is None:
            unit.series = SampleSeries(
                ids, period=times.period, since=times.since, counters=fields.cycles.keys() & set(ids)
            )
            unit.cycles = _cycle_counters(fields, ids)
        if unit.series is not None:
            unit.series.leave(board.given_up)
    board.cadence = board.cadence or Cadence(times.period)


GIVE_UP_AFTER = 60 * SECOND
"""A field that is blank for so long, on a board of which others have values, is one that its driver does not have: the
engine never says so, and writes a line into its log for each sample of it."""
ASK_AGAIN_AFTER = 3600 * SECOND


def review_blank_fields(client: DcgmClient, fields: SupportedFields, board: DcgmBoard, times: WatchTimes) -> None:
    """End the watch of profiling fields that stay blank, and begin that of those given up when it is time."""
    numbers = {field for unit in board.units for field in board.profiling_fields if unit.number(field) is not None}
    if not numbers:
        board.blank_since.clear()
        return
    for field in board.profiling_fields - numbers:
        board.blank_since.setdefault(field, times.now)
    for field in numbers:
        board.blank_since.pop(field, None)
    blank = [field for field, since in board.blank_since.items() if times.now - since >= GIVE_UP_AFTER]
    retried = [field for field, at in board.given_up.items() if times.now >= at]
    if not blank and not retried:
        return
    for field in blank:
        board.given_up[field] = times.now + ASK_AGAIN_AFTER
        del board.blank_since[field]
    for field in retried:
        del board.given_up[field]
    watch_profiling(client, fields, board, times)


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
