"""Which fields a board is watched for, and what the latest values come to.

Owns the fields of this DCGM version and the choice of what one pass of an older board's counters can give. Refuses
time.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from exporter.sources.dcgm.boards import Board
from exporter.sources.dcgm.engine import Engine, Entity, Refusal
from exporter.sources.dcgm.fields import CYCLES, GAUGES, HEALTH, INSTANCE, RATES, RATIOS, Field
from exporter.sources.dcgm.series import Cycles, Series
from exporter.sources.dcgm.units import Unit

KEEP_SECONDS = 90.0
"""For how long the engine keeps values: longer than its own longest blocking call (60 s)."""
HEALTH_PERIOD_US = 10_000_000
_WORTH = ("tensor_active", "gr_engine_active", "sm_active", "dram_active")
"""What to have first where the counters cannot all be had at once."""
WORDS = {
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
"""What a refusal of the profiling fields means and what to do."""


class Fields:
    """The fields this DCGM has, by id; and the groups of fields made on one engine, each made once.

    The engine may be older than the bindings: one field it does not know spoils the whole group it is put into.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: dict[tuple[int, ...], Any] = {}
        tables = [self._numbered(table) for table in (RATIOS, CYCLES, RATES, GAUGES, HEALTH)]
        known = set(engine.known([number for table in tables for number in table]))
        self.ratios, self.cycles, self.rates, self.gauge, self.well = (
            {number: field for number, field in table.items() if number in known} for table in tables
        )
        shown = {**self.rates, **self.gauge}
        self._shown = shown
        self._instance = {number: field for number, field in shown.items() if field.name in INSTANCE}
        self.xid = next((number for number, field in self.gauge.items() if field.name == "xid"), -1)
        self._energy = next((number for number, field in self.gauge.items() if field.name == "energy"), -1)

    def _numbered(self, table: Iterable[Field]) -> dict[int, Field]:
        numbered = ((field.number(self._engine.fields), field) for field in table)
        return {number: field for number, field in numbered if number is not None}

    @property
    def shown(self) -> frozenset[str]:
        """Fields of `Reading` that the latest values give."""
        return frozenset(field.name for field in self._shown.values()) - {"energy", "xid"}

    def group(self, ids: Sequence[int]) -> Any:
        """The engine's group of these fields."""
        key = tuple(ids)
        if key not in self._made:
            self._made[key] = self._engine.field_group(key)
        return self._made[key]

    def questions(self, boards: Iterable[Board]) -> list[tuple[list[Entity], list[int]]]:
        """(entities, fields) of which the latest values are wanted: one question for boards, one for instances."""
        units = [unit for board in boards for unit in board.units]
        wholes = [unit.entity for unit in units if not unit.device.parent]
        parts = [unit.entity for unit in units if unit.device.parent]
        asked = [(wholes, list(self._shown)), (parts, list(self._instance))]
        return [(entities, ids) for entities, ids in asked if entities]

    def gauges(self, unit: Unit) -> dict[str, Any]:
        """Fields of `Reading` from the latest values of one unit, energy and Xid apart."""
        found: dict[str, Any] = {}
        for number, field in (self._instance if unit.device.parent else self._shown).items():
            value = unit.number(number)
            if value is not None and number not in (self.xid, self._energy):
                # Field 203 is an integer percentage, but a ratio where DCGM gives it as a double.
                plain = field.name == "gpu_utilization" and isinstance(value, float)
                found[field.name] = value if plain else value * field.scale
        if "clock_event_reasons" in found:
            found["clock_event_reasons"] = int(found["clock_event_reasons"])
        return found

    def energy(self, unit: Unit) -> tuple[int, float] | None:
        """The board's energy counter: its stamp, microseconds, and joules."""
        value = unit.number(self._energy)
        return None if value is None else (unit.latest[self._energy].at, value * self.gauge[self._energy].scale)

    def named(self, values: dict[int, float]) -> dict[str, float]:
        """Ratios by the names of `Reading`."""
        return {self.ratios[number].name: value for number, value in values.items() if number in self.ratios}


def watched(engine: Engine, fields: Fields, board: Board, *, period: int, since: int) -> None:
    """Have a board and its instances watched; what is refused is remembered in `board.refused`, and tried again.

    A board that is lost, or that DCGM does not support, can be in no group: nothing of it is watched.
    """
    gauges, health = fields.group(list(fields.gauge)), fields.group(list(fields.well))
    try:
        board.group = engine.group(unit.entity for unit in board.units)
        for ids, every in ((gauges, period), (health, max(period, HEALTH_PERIOD_US))):
            engine.watch(board.group, ids, period=every, keep_seconds=KEEP_SECONDS)
            board.watched.append(ids)
    except Refusal as refusal:
        board.refused = _words(refusal)
        engine.unwatch(board.group, board.watched)
        board.group = None
        return
    profile(engine, fields, board, period=period, since=since)


def profile(engine: Engine, fields: Fields, board: Board, *, period: int, since: int) -> None:
    """Have the profiling fields watched that are not yet, or say in `board.refused` why not."""
    chosen = _one_pass(fields, _metric_groups(engine, board.gpu))
    ratios = [number for number in chosen if number in fields.ratios or number in fields.cycles]
    rates = [number for number in chosen if number in fields.rates]
    try:
        for ids in filter(None, (ratios, rates)):
            group = fields.group(ids)
            if group in board.watched:
                continue
            engine.watch(board.group, group, period=period, keep_seconds=KEEP_SECONDS)
            board.watched.append(group)
            if ids is ratios:
                board.ratios = group
                _begin(fields, board, ratios, period=period, since=since)
    except Refusal as refusal:
        board.refused = _words(refusal)
        board.hopeless = refusal.kind in ("profiling_not_supported", "not_supported", "gpu_not_supported")
        return
    board.refused = "" if ratios else WORDS["profiling_not_supported"]


def _begin(fields: Fields, board: Board, ratios: Sequence[int], *, period: int, since: int) -> None:
    """What is cut into instances has no values of its own."""
    for unit in board.units:
        if unit is not board.whole or not board.cut:
            counters = fields.cycles.keys() & set(ratios)
            unit.begin(Series(ratios, period=period, since=since, counters=counters), _cycles(fields, ratios))


def _words(refusal: Refusal) -> str:
    return f"{WORDS.get(refusal.kind, refusal.kind)} ({refusal})"


def _metric_groups(engine: Engine, gpu: int) -> list[tuple[int, int, list[int]]]:
    try:
        return engine.metric_groups(gpu)
    except Refusal:
        return []  # the watch itself will tell


def _one_pass(fields: Fields, groups: list[tuple[int, int, list[int]]]) -> list[int]:
    """The profiling fields to watch: all, or of groups that exclude each other the one with the most worthy field.

    Boards before Hopper read some counters in turns (groups of one major id): watched together, each shows zeros while
    another is read, or an extrapolation.
    """
    wanted = {**fields.ratios, **fields.rates, **fields.cycles}
    ordered = sorted(wanted, key=lambda number: _worth(wanted[number].name))
    if not groups:
        return [number for number in wanted if number not in fields.cycles]
    taken: dict[int, int] = {}
    for number in ordered:
        homes = [(major, minor) for major, minor, members in groups if number in members]
        if homes and not any(taken.get(major) == minor for major, minor in homes):
            free = [(major, minor) for major, minor in homes if major not in taken]
            taken.update(free[:1])
    open_ = {number for major, minor, members in groups if taken.get(major) == minor for number in members}
    return [number for number in wanted if number in open_]


def _worth(name: str) -> int:
    return _WORTH.index(name) if name in _WORTH else len(_WORTH)


def _cycles(fields: Fields, ratios: Sequence[int]) -> Cycles | None:
    by_name = {fields.ratios[number].name: number for number in ratios if number in fields.ratios}
    counters = {fields.cycles[number].name: number for number in ratios if number in fields.cycles}
    elapsed = counters.pop("elapsed", None)
    pairs = {number: by_name[name] for name, number in counters.items() if name in by_name}
    return None if elapsed is None or not pairs else Cycles(elapsed, pairs)
