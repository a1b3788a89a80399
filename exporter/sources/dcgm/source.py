"""Reads all GPUs through DCGM: profiling values over their intervals, and the latest value of all other fields.

Refreshes the list of boards, drains their values and converts the host engine's wall-clock stamps to monotonic time.
What DCGM did not report is None, never zero or the last good value. A value arrives up to one sampling period late;
`settled` of the read's result is the time before which no more values will arrive.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from exporter.clock import Clock, SystemClock
from exporter.core.model import MS, NEVER, SECOND, Fault, Health, Reading, Spec
from exporter.sources.base import ReadResult, SourceError
from exporter.sources.dcgm.boards import (
    UNPARTITIONED,
    DcgmBoard,
    DcgmInventory,
    DcgmUnit,
    SupportedFields,
    make_board,
    read_inventory,
    watch_board,
    watch_profiling,
)
from exporter.sources.dcgm.client import LOST_STATUSES, DcgmClient, DcgmRefusal, connect, load_bindings
from exporter.sources.dcgm.intervals import MeasuredInterval
from exporter.sources.dcgm_fields import health_of
from exporter.sources.ports import is_chosen, require_trusted_port

STEP_MS = 500
"""If the wall clock moves by more than this against the monotonic clock, it was stepped, not slewed by NTP."""
_ATTEMPTS = 3


class HostEngineClock:
    """Converts between the engine's wall-clock stamps and monotonic time, by their difference at the last `update`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = self._measure_offset()
        self._floor = 0
        """Stamps below it may be from before the wall clock was set back."""

    def update(self) -> int:
        """Measure the difference again; return the milliseconds by which the wall clock was stepped, normally 0."""
        before, self._offset_ms = self._offset_ms, self._measure_offset()
        moved = self._offset_ms - before
        if moved < -STEP_MS:
            self._floor = self.stamp() - moved * 1000
        return moved if abs(moved) > STEP_MS else 0

    def now(self) -> int:
        """Return monotonic nanoseconds, rounded down to whole milliseconds."""
        return self._clock.now()

    def stamp(self) -> int:
        """Return the current time as the engine stamps values: Unix microseconds."""
        return self._clock.wall() // 1000

    def valid_since(self, back: int = 0) -> int:
        """Return the stamp from which values are recent: `back` microseconds ago, or later if the clock was set back.

        After the clock was set back, the engine samples nothing until its last stamp has passed, and until then values
        cannot be distinguished from older ones.
        """
        return max(self.stamp() - back, self._floor)

    def to_stamp(self, now: int) -> int:
        """Convert monotonic nanoseconds to an engine's stamp, microseconds."""
        return (now // MS + self._offset_ms) * 1000

    def to_monotonic(self, stamp: int) -> int:
        """Convert an engine's stamp to monotonic nanoseconds, rounded down to whole milliseconds."""
        return (stamp // 1000 - self._offset_ms) * MS

    def _measure_offset(self) -> int:
        """Return the milliseconds by which the wall clock is ahead of the monotonic clock.

        A delay between the two calls makes the result smaller, so the largest of a few attempts is the best.
        """
        return max((self._clock.wall() - self._clock.now()) // MS for _ in range(_ATTEMPTS))


INVENTORY_INTERVAL = 10 * SECOND
"""Interval for GPUs, MIG layout and health, which change rarely; a read costs a round trip to the driver."""
_UNAVAILABLE = ("lost", "missing")
_PAUSED: set[str] = set()
"""Addresses of engines that this process has paused and not resumed; a pause outlives its connection."""


class DcgmSource:
    """A TelemetrySource over one DCGM connection, which it closes; created by `open_dcgm`.

    `period_seconds` is the sampling period of its watches.
    """

    name = "dcgm"

    def __init__(
        self,
        client: DcgmClient,
        *,
        period_seconds: float,
        overrides: Mapping[str, Spec] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._client, self._overrides, self._clock = client, overrides or {}, HostEngineClock(clock or SystemClock())
        self._period = round(period_seconds * 1_000_000)
        self._slack = 3 * round(period_seconds * 1000) * MS + SECOND
        """Longest delay of a value and longest interval, nanoseconds."""
        self._fields = SupportedFields(client)
        self._boards: dict[int, DcgmBoard] = {}
        self._faults: list[Fault] = []
        self._refreshed_at = self._settled = NEVER
        self._needs_baseline = True
        self._refresh_boards()
        if not self._boards:
            raise SourceError(f"DCGM at {client.address} lists no GPU: try `dcgmi discovery -l` and `nvidia-smi -L`")

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that some board of this node can report."""
        profiled = any(board.ratios is not None for board in self._boards.values())
        ratios = {field.name for field in self._fields.ratios.values()} if profiled else set()
        return frozenset(ratios | self._fields.signals | {"energy_joules"})

    def read(self, now: int) -> ReadResult:
        """Read all GPUs; see `TelemetrySource.read`. Raises SourceError if the connection is dead or closed."""
        try:
            return self._read(now)
        except DcgmRefusal as refusal:
            raise SourceError(str(refusal)) from refusal

    def _read(self, now: int) -> ReadResult:
        self._resume_counters()
        self._check_clock()
        due = now - self._refreshed_at >= INVENTORY_INTERVAL
        if due or any(board.condition in _UNAVAILABLE for board in self._boards.values()):
            self._refresh_boards()
        self._refreshed_at = now if due else self._refreshed_at
        if self._needs_baseline:
            # Time before this read does not count, but the value that spans it is needed for the time after.
            self._reset(self._clock.valid_since(2 * self._period))
            self._needs_baseline, self._settled = False, max(self._settled, now)
        readings = tuple(self._readings(now))
        health = tuple(self._health(whole=due))
        self._add_standing_faults()
        faults, self._faults = tuple(self._faults), []
        self._settled = max(self._settled, now - self._slack)
        devices = tuple(unit.device for board in self._boards.values() for unit in board.units)
        return ReadResult(devices, readings, faults, health, self._settled)

    def resync(self) -> None:
        """Drop the baselines; see `TelemetrySource.resync`."""
        self._needs_baseline = True

    def pause(self) -> None:
        """Make the engine release the counters, for all its clients; see `TelemetrySource.pause`."""
        self._needs_baseline = True
        try:
            self._client.pause()
            _PAUSED.add(self._client.address)
        except (DcgmRefusal, SourceError) as error:
            self._faults.append(Fault("profiling_refused", f"profiling was not paused: {error}"))

    def close(self) -> None:
        """Resume profiling if it was paused, and disconnect. Never raises."""
        with suppress(SourceError):
            self._resume_counters()
        self._client.close()

    def _resume_counters(self) -> None:
        if self._client.address not in _PAUSED:
            return
        try:
            self._client.resume()
        except DcgmRefusal as refusal:
            self._faults.append(Fault("profiling_refused", f"profiling was not resumed: {refusal}"))
        _PAUSED.discard(self._client.address)

    # -- the inventory --

    def _refresh_boards(self) -> None:
        """Match the GPUs that the engine lists with the known ones; watch new ones and those that came back."""
        found = read_inventory(self._client)
        for gpu in sorted(self._boards.keys() | set(found.gpus)):
            known, listed = self._boards.get(gpu), gpu in found.gpus
            condition = self._condition(gpu, known, listed=listed)
            if listed and (known is None or self._is_changed(known, found.layout(gpu), condition)):
                known = self._boards[gpu] = self._new_board(gpu, found, known)
            self._maintain(self._boards[gpu], condition)

    def _is_changed(self, known: DcgmBoard, layout: tuple[Any, ...] | None, condition: str) -> bool:
        """Return whether it must be watched again: its MIG layout changed, it came back, or it could not be watched."""
        back = condition not in _UNAVAILABLE and (known.condition in _UNAVAILABLE or known.group is None)
        return back or layout not in (None, known.layout)

    def _new_board(self, gpu: int, found: DcgmInventory, known: DcgmBoard | None) -> DcgmBoard:
        """Make and watch a board: a new GPU, or one whose watches must be renewed."""
        board = make_board(self._client, gpu, found, overrides=self._overrides)
        self._faults += board.faults if known is None else ()
        if known is not None:
            self._client.unwatch(known.group, known.watched)
            board.carry_over(known)
        watch_board(self._client, self._fields, board, period=self._period, since=self._clock.valid_since())
        return board

    def _maintain(self, board: DcgmBoard, condition: str) -> None:
        if condition != board.condition:
            board.set_condition(condition)
        if (
            board.group is not None
            and board.refused
            and not board.permanently_refused
            and condition not in _UNAVAILABLE
        ):
            watch_profiling(self._client, self._fields, board, period=self._period, since=self._clock.valid_since())

    def _condition(self, gpu: int, board: DcgmBoard | None, *, listed: bool) -> str:
        if not listed:
            return "missing"
        try:
            lost = self._client.status(gpu) in LOST_STATUSES
        except DcgmRefusal as refusal:
            lost = refusal.kind == "gpu_is_lost"
        return "lost" if lost else ("recovery" if board is not None and board.recovery_action else "")

    # -- the readings --

    def _readings(self, now: int) -> Iterator[Reading]:
        self._latest([board for board in self._boards.values() if board.condition not in _UNAVAILABLE])
        until = min(self._clock.stamp(), self._clock.to_stamp(now))
        for board in self._boards.values():
            if board.condition not in _UNAVAILABLE and board.whole.has_no_values:
                self._maintain(board, self._condition(board.gpu, board, listed=True))
            if board.condition in _UNAVAILABLE:
                continue
            try:
                self._drain(board)
            except DcgmRefusal as refusal:
                self._drain_refused(board, refusal)
                continue
            for unit in board.units:
                yield from self._unit(board, unit, now, until)

    def _latest(self, boards: list[DcgmBoard]) -> None:
        by_entity = {unit.entity: unit for board in boards for unit in board.units}
        for entities, fields in self._fields.latest_queries(boards):
            for sample in self._client.latest(entities, fields):
                by_entity[sample.entity].latest[sample.field] = sample

    def _drain(self, board: DcgmBoard) -> None:
        wanted = {unit.entity: unit.series for unit in board.units if unit.series is not None}
        if not wanted:
            return
        since = min(series.since for series in wanted.values())
        for sample in self._client.drain(board.group, board.ratios, since):
            if sample.entity in wanted:
                wanted[sample.entity].add(sample.field, sample.stamp, sample.value)

    def _unit(self, board: DcgmBoard, unit: DcgmUnit, now: int, until: int) -> Iterator[Reading]:
        """Yield the readings of one board or instance; each has the latest gauges."""
        if unit.series is not None and unit.profiled:
            intervals = unit.series.intervals_until(unit.series.complete_until(until))
            spans = list(unit.spans(intervals, self._clock.to_monotonic, slack=self._slack, floor=self._settled))
        else:
            spans = unit.since_last(now, slack=self._slack, floor=self._settled)
        gauges = self._fields.gauges(unit)
        if unit is not board.whole:
            gauges |= {key: value for key, value in self._fields.gauges(board.whole).items() if key == "sm_clock_hz"}
        joules = unit.energies(self._fields.energy(board.whole), [end - start for start, end, _ in spans])
        for (start, end, interval), energy in zip(spans, joules, strict=True):
            values = {**gauges, **self._values(board, unit, interval)}
            yield Reading(unit.device.uuid, start, end, energy_joules=energy, **values)

    def _values(self, board: DcgmBoard, unit: DcgmUnit, interval: MeasuredInterval | None) -> dict[str, Any]:
        if interval is None:
            return UNPARTITIONED if board.partitioned and unit is board.whole else {}
        if unit.cycles is not None:
            unit.cycles.correct(interval.values)
        return {"distrust": "blank"} if interval.blank else self._fields.named(interval.values)

    def _drain_refused(self, board: DcgmBoard, refusal: DcgmRefusal) -> None:
        if refusal.kind == "gpu_is_lost":
            board.set_condition("lost")
        else:  # its MIG layout may have changed
            self._refreshed_at = NEVER
            self._fault(board.whole, "profiling_refused", f"returned no profiling values: {refusal}")

    # -- health and faults --

    def _health(self, *, whole: bool) -> Iterator[Health]:
        """Yield the health of all boards if `whole`, else of those with a new Xid."""
        present = [board for board in self._boards.values() if board.condition not in _UNAVAILABLE]
        xids = {board.gpu: board.new_xids(self._fields.xid) for board in present}
        requested = {board.whole.entity: board for board in present if whole or xids[board.gpu]}
        values = {entity: self._fields.gauges(board.whole) for entity, board in requested.items()}
        for sample in self._client.latest(list(requested), list(self._fields.health)) if requested else ():
            if isinstance(sample.value, (int, float)):
                values[sample.entity][self._fields.health[sample.field].name] = sample.value
        for entity, board in requested.items():
            health = health_of(board.whole.device.uuid, values[entity], xids[board.gpu])
            board.recovery_action = health.recovery_action or 0
            yield health

    def _add_standing_faults(self) -> None:
        """Add the faults of boards that cannot be measured, at every read."""
        for board in self._boards.values():
            if board.condition in _UNAVAILABLE:
                what = f"is {board.condition}: find its Xid in dmesg, then reset or drain it"
                self._fault(board.whole, f"gpu_{board.condition}", what)
            elif board.refused:
                self._fault(board.whole, "profiling_refused", f"is not profiled: {board.refused}")
            for unit in board.units if board.condition not in _UNAVAILABLE else ():
                self._stale(unit)

    def _stale(self, unit: DcgmUnit) -> None:
        """Add a fault if no new value has arrived for longer than a value can be late."""
        newest = unit.series.newest if unit.series is not None and unit.profiled else unit.newest
        silence = self._clock.now() - self._clock.to_monotonic(newest)
        if newest and silence > self._slack:
            what = f"has had no new value for {silence // SECOND} s: does the host engine hang?"
            self._fault(unit, "stale", what)

    def _fault(self, unit: DcgmUnit, kind: str, what: str) -> None:
        device = unit.device
        self._faults.append(Fault(kind, f"DCGM: GPU {device.index} ({device.uuid}) {what}", device.uuid))

    # -- time --

    def _check_clock(self) -> None:
        """Reset all baselines if the wall clock was stepped: values are stamped with it."""
        moved = self._clock.update()
        if moved:
            text = f"the wall clock was set by {moved / 1000:+.1f} s: DCGM's values before and after cannot be joined"
            until = f"; it gives no new ones for {-moved / 1000:.0f} s, unless the host engine is restarted"
            self._faults.append(Fault("clock_step", text + (until if moved < 0 else "")))
            self._reset(self._clock.valid_since())

    def _reset(self, since: int) -> None:
        """Drop all baselines and values stamped before `since`, microseconds."""
        for board in self._boards.values():
            for unit in board.units:
                unit.reset(since)


def open_dcgm(config: Any) -> DcgmSource:
    """Connect to the host engine configured in `config.dcgm`. Raises SourceError with what was tried and what to do."""
    section = config.dcgm
    if not is_chosen(config, section, "address"):
        require_trusted_port(
            int(section.address.rpartition(":")[2]), remedy='if that is your host engine, set source = "dcgm"'
        )
    bindings = load_bindings(section.bindings, section.library)
    handle = connect(bindings, section.address, timeout_seconds=section.connect_timeout_seconds)
    client = DcgmClient(bindings, handle, address=section.address)
    try:
        return DcgmSource(client, period_seconds=config.sampling.interval_seconds, overrides=config.overrides())
    except DcgmRefusal as refusal:
        client.close()
        raise SourceError(str(refusal)) from refusal
    except SourceError:
        client.close()
        raise
