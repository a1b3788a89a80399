"""Reads all GPUs through DCGM: profiling values over their intervals, and the latest value of all other fields.

Refreshes the list of boards, drains their values and converts the host engine's wall-clock stamps to monotonic time.
What DCGM did not report is None, never zero or the last good value. A value arrives up to one sampling period late;
`settled` of the read's result is the time before which no more values will arrive.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from statistics import median
from typing import Any

from exporter.clock import Clock, SystemClock
from exporter.core.model import MS, NEVER, SECOND, Fault, Health, Reading, Spec
from exporter.sources.base import ReadResult, SourceError, recovery_condition
from exporter.sources.dcgm.boards import (
    UNPARTITIONED,
    DcgmBoard,
    DcgmInventory,
    DcgmUnit,
    make_board,
    read_inventory,
)
from exporter.sources.dcgm.client import DETACHED_STATUS, LOST_STATUSES, DcgmClient, DcgmRefusal, DcgmSample
from exporter.sources.dcgm.connection import connect, load_bindings
from exporter.sources.dcgm.intervals import SAME_CYCLE_US, MeasuredInterval, SampleSeries
from exporter.sources.dcgm.watches import (
    SupportedFields,
    WatchTimes,
    review_blank_fields,
    unwatch_board,
    watch_board,
    watch_profiling,
)
from exporter.sources.dcgm_fields import health_of
from exporter.sources.ports import is_chosen, require_trusted_port

log = logging.getLogger(__name__)
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
_FEW_BOARDS = 2
_SLOW_SECONDS, _SLOWER = 0.2, 5
"""A call that takes at least so long, and so many times as long as the median, is that of a sick GPU."""
_SILENT_PERIODS = 3
"""Periods without a value after which a board is reported, and the host engine given up if all boards are silent."""
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
        self._culprit: str | None = None
        """Why values are late, found once for as long as they are; empty: unknown."""
        self._refreshed_at = self._settled = NEVER
        self._silence = _SILENT_PERIODS * max(round(period_seconds * 1000) * MS, SECOND)
        self._needs_baseline = True
        self._refresh_boards()
        if not self._boards:
            raise SourceError(f"DCGM at {client.address} lists no GPU: try `dcgmi discovery -l` and `nvidia-smi -L`")
        if all(board.has_placeholder for board in self._boards.values()):
            raise SourceError(self._blind_engine("names none of them"))

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
        self._note_silence(now)
        if due:
            self._review_blank_fields()
        self._add_standing_faults(now)
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
            # At once: the next read, and with it every fault, comes when the pause has ended.
            unneeded = isinstance(error, DcgmRefusal) and error.kind == "not_supported"
            why = (
                "; these boards read their counters without it, and a profiler can run beside this" if unneeded else ""
            )
            log.warning("profiling was not paused: %s%s", error, why)
            if not unneeded:
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
        self._forget_renumbered(found)
        for gpu in sorted(self._boards.keys() | set(found.gpus)):
            known, listed = self._boards.get(gpu), gpu in found.gpus
            condition = self._condition(gpu, known, listed=listed)
            if listed and (known is None or self._is_changed(known, found.layout(gpu), condition)):
                known = self._boards[gpu] = self._new_board(gpu, found, known)
            self._maintain(self._boards[gpu], condition)

    def _is_changed(self, known: DcgmBoard, layout: tuple[Any, ...] | None, condition: str) -> bool:
        """Return whether it must be watched again: its MIG layout changed, it came back, or it could not be watched."""
        back = condition not in _UNAVAILABLE and (known.condition in _UNAVAILABLE or known.whole_group is None)
        return back or layout not in (None, known.layout)

    def _forget_renumbered(self, found: DcgmInventory) -> None:
        """Forget a board that the engine lists under another number, after its GPU was unbound and bound again."""
        listed = {facts.get("uuid") for facts in found.static.values()}
        for gpu in [gpu for gpu in self._boards if gpu not in found.gpus]:
            if self._boards[gpu].whole.device.uuid in listed:
                unwatch_board(self._client, self._boards.pop(gpu))

    def _new_board(self, gpu: int, found: DcgmInventory, known: DcgmBoard | None) -> DcgmBoard:
        """Make and watch a board: a new GPU, or one whose watches must be renewed."""
        if known is not None:
            found.remember(known)
            unwatch_board(self._client, known)
        board = make_board(self._client, gpu, found, overrides=self._overrides)
        if known is None or known.whole.device.uuid != board.whole.device.uuid:
            self._faults += board.faults
        else:
            board.carry_over(known)
        watch_board(self._client, self._fields, board, self._times())
        return board

    def _maintain(self, board: DcgmBoard, condition: str) -> None:
        if condition != board.condition:
            board.set_condition(condition)
        wanting = board.refused and board.ratios is None and not board.permanently_refused
        if wanting and board.whole_group is not None and condition not in _UNAVAILABLE:
            watch_profiling(self._client, self._fields, board, self._times())

    def _times(self) -> WatchTimes:
        return WatchTimes(self._period, self._clock.valid_since(), self._clock.now())

    def _condition(self, gpu: int, board: DcgmBoard | None, *, listed: bool) -> str:
        if not listed:
            return "missing"
        try:
            status = self._client.status(gpu)
            if status == DETACHED_STATUS:
                return "missing"
            lost = status in LOST_STATUSES
        except DcgmRefusal as refusal:
            lost = refusal.kind == "gpu_is_lost"
        return "lost" if lost else recovery_condition(board.recovery_action if board is not None else 0)

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
                self._add_values(board, now)
            except DcgmRefusal as refusal:
                self._drain_refused(board, refusal)
                continue
            for unit in board.units:
                yield from self._unit(board, unit, now, until)

    def _latest(self, boards: list[DcgmBoard]) -> None:
        by_entity = {unit.entity: unit for board in boards for unit in board.units}
        for fields, entities in self._fields.latest_queries(boards).items():
            for sample in self._client.latest(entities, fields):
                by_entity[sample.entity].add_latest(sample)

    def _add_values(self, board: DcgmBoard, now: int) -> None:
        """Add the new values of a board to its series: the latest ones, if they are the only ones, else all.

        All of them cost a round trip for each field of each entity, the latest ones one for all boards together.
        """
        wanted = {unit.entity: unit.series for unit in board.units if unit.series is not None}
        if not wanted or board.cadence is None:
            return
        known = [
            (series, sample)
            for unit in board.units
            if (series := unit.series) is not None
            for field in series.watched
            if (sample := unit.latest.get(field)) is not None and sample.stamp
        ]
        unknown = wanted.keys() - {sample.entity for _, sample in known}
        if unknown or board.cadence.needs_all(now) or not all(starmap(_is_next, known)):
            known = [
                (wanted[sample.entity], sample) for sample in self._drain(board, wanted) if sample.entity in wanted
            ]
            if board.cadence.needs_all(now):
                board.cadence.add_read((((sample.entity, sample.field), sample.stamp) for _, sample in known), now)
        for series, sample in known:
            series.add(sample.field, sample.stamp, sample.value)

    def _drain(self, board: DcgmBoard, wanted: Mapping[Any, SampleSeries]) -> list[DcgmSample]:
        since = min(series.since for series in wanted.values())
        return self._client.drain(board.measured_group, board.ratios, since)

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
            values = {**gauges, **self._utilization(unit, interval), **self._values(board, unit, interval)}
            yield Reading(unit.device.uuid, start, end, energy_joules=energy, **values)

    def _utilization(self, unit: DcgmUnit, interval: MeasuredInterval | None) -> dict[str, float]:
        if interval is None:
            return {}
        tolerance = min(SAME_CYCLE_US, (interval.end - interval.start) // 2)
        return self._fields.utilization(unit, until=interval.end + tolerance)

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
        xids = {board.gpu: board.new_xids(self._fields.xid, self._xids_since) for board in present}
        requested = {board.whole.entity: board for board in present if whole or xids[board.gpu]}
        values = {entity: self._fields.gauges(board.whole) for entity, board in requested.items()}
        for sample in self._client.latest(list(requested), list(self._fields.health)) if requested else ():
            if isinstance(sample.value, (int, float)):
                values[sample.entity][self._fields.health[sample.field].name] = sample.value
        for entity, board in requested.items():
            health = health_of(board.whole.device.uuid, values[entity], xids[board.gpu])
            board.recovery_action = health.recovery_action or 0
            yield health

    def _xids_since(self, board: DcgmBoard, stamp: int) -> list[DcgmSample]:
        try:
            events = self._client.drain(board.whole_group, self._fields.group([self._fields.xid]), stamp)
        except DcgmRefusal:
            return []
        return [event for event in events if event.entity == board.whole.entity]

    def _note_silence(self, now: int) -> None:
        """Note since when boards give no value. Raises SourceError if all have been silent for too long."""
        boards = [board for board in self._boards.values() if board.whole_group is not None]
        present = [board for board in boards if board.condition not in _UNAVAILABLE]
        for board in present:
            board.note_silence(now)
        if present and all(board.has_no_values and board.is_silent(now, self._silence) for board in present):
            raise SourceError(self._blind_engine(f"has had no value of any for {self._silence // SECOND} s"))

    def _blind_engine(self, what: str) -> str:
        gpus = len(self._boards)
        return (
            f"the host engine at {self._client.address} lists {gpus} GPU{'' if gpus == 1 else 's'} and {what}: after a"
            " fatal Xid (119 and others) it makes no more calls to the driver until it is restarted. Look for the Xid"
            " with `dmesg | grep Xid`, reset or drain that GPU, then `systemctl restart nvidia-dcgm`"
        )

    def _review_blank_fields(self) -> None:
        for board in self._boards.values():
            if board.condition not in _UNAVAILABLE and board.whole_group is not None:
                review_blank_fields(self._client, self._fields, board, self._times())

    def _add_standing_faults(self, now: int) -> None:
        """Add the faults of boards that cannot be measured, at every read."""
        for board in self._boards.values():
            if board.condition == "missing":
                what = "is not listed any more: it was detached or unbound, or fell off the bus (see dmesg)"
                self._fault(board.whole, "gpu_missing", what)
            elif board.condition in _UNAVAILABLE:
                what = f"is {board.condition}: find its Xid in dmesg, then reset or drain it"
                self._fault(board.whole, f"gpu_{board.condition}", what)
            elif board.refused:
                self._fault(board.whole, "profiling_refused", f"is not profiled: {board.refused}")
            elif board.is_silent(now, self._silence):
                what = (
                    "gives no values, though others do: its driver calls fail; look for its Xid in dmesg"
                    if board.has_no_values
                    else "gives no profiling values: another client paused them (`dcgmi profile --resume`), or reading"
                    " its counters fails (journalctl -u nvidia-dcgm)"
                )
                self._fault(board.whole, "blank", what)
        self._add_stale_faults()

    def _stale(self, unit: DcgmUnit) -> int:
        """Return the nanoseconds since the newest value, if that is longer than a value can be late; else 0."""
        newest = unit.series.newest if unit.series is not None and unit.profiled else unit.newest
        silence = self._clock.now() - self._clock.to_monotonic(newest)
        return silence if newest and silence > self._slack else 0

    def _add_stale_faults(self) -> None:
        boards = [board for board in self._boards.values() if board.condition not in _UNAVAILABLE]
        stale = {unit: silence for board in boards for unit in board.units if (silence := self._stale(unit))}
        if not stale:
            self._culprit = None
        elif self._culprit is None:
            self._culprit = self._slow_board(boards)
        for unit, silence in stale.items():
            why = self._culprit or "does the host engine hang?"
            self._fault(unit, "stale", f"has had no new value for {silence // SECOND} s: {why}")

    def _slow_board(self, boards: Sequence[DcgmBoard]) -> str:
        """Return which board holds up the engine's only loop, by asking the driver of each; empty if none does."""
        field = self._fields.health_probe
        if len(boards) < _FEW_BOARDS or field is None:
            return ""
        seconds = {}
        for board in boards:
            began = time.perf_counter()
            with suppress(DcgmRefusal):
                self._client.latest([board.whole.entity], [field], live=True)
            seconds[board] = time.perf_counter() - began
        slowest = max(boards, key=seconds.__getitem__)
        if seconds[slowest] < max(_SLOW_SECONDS, _SLOWER * median(seconds.values())):
            return ""
        device = slowest.whole.device
        return (
            f"GPU {device.index} ({device.uuid}) takes {seconds[slowest]:.1f} s to answer the driver and holds up the"
            " engine's only loop: drain and reset it"
        )

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


def _is_next(series: SampleSeries, sample: DcgmSample) -> bool:
    """Return whether no value was sampled between the last one of the series and this one, if it is newer."""
    return series.is_known(sample.field, sample.stamp) or series.follows(sample.field, sample.stamp)


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
