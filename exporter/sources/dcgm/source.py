"""Reads every GPU through DCGM: profiling values over their intervals, the latest value of all other fields.

It refreshes the list of boards, drains their values and translates the host engine's wall clock to monotonic
time. It refuses to fill in: what DCGM did not report is None, never zero and never the last good value. A value
arrives late by up to one sampling period; `settled` of the read's result gives the time before which nothing more
will come.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from exporter.clock import Clock, SystemClock
from exporter.core.model import MS, NEVER, SECOND, Fault, Health, Reading, Spec
from exporter.sources.base import ReadResult, SourceError
from exporter.sources.dcgm.boards import (
    DcgmBoard,
    DcgmInventory,
    DcgmUnit,
    SupportedFields,
    health_of,
    make_board,
    read_inventory,
    unpartitioned_values,
    watch_board,
    watch_profiling,
)
from exporter.sources.dcgm.client import LOST_STATUSES, DcgmClient, DcgmRefusal, DcgmSample, connect, load_bindings
from exporter.sources.dcgm.intervals import MeasuredInterval

STEP_MS = 500
"""A wall clock that moves this much against the monotonic one was set, not disciplined."""
_ATTEMPTS = 3


class HostEngineClock:
    """Translates by the difference of the two clocks at the last `update`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = self._measure_offset()
        self._floor = 0
        """Stamps before it may be from before the wall clock was set back."""

    def update(self) -> int:
        """Measure the difference again; returns the milliseconds by which the wall clock was set, mostly 0."""
        before, self._offset_ms = self._offset_ms, self._measure_offset()
        moved = self._offset_ms - before
        if moved < -STEP_MS:
            self._floor = self.stamp() - moved * 1000
        return moved if abs(moved) > STEP_MS else 0

    def now(self) -> int:
        """Monotonic nanoseconds on whole milliseconds."""
        return self._clock.now()

    def stamp(self) -> int:
        """Now, as the engine stamps its values: microseconds since 1970."""
        return self._clock.wall() // 1000

    def valid_since(self, back: int = 0) -> int:
        """Stamp from which values can be believed to be of now, or of up to `back` microseconds ago.

        When the clock was set back, the engine samples nothing until it has passed its last stamps, and later values
        cannot be distinguished from earlier ones.
        """
        return max(self.stamp() - back, self._floor)

    def to_stamp(self, now: int) -> int:
        """A monotonic time as the engine would stamp it."""
        return (now // MS + self._offset_ms) * 1000

    def to_monotonic(self, stamp: int) -> int:
        """An engine's stamp as monotonic nanoseconds on whole milliseconds."""
        return (stamp // 1000 - self._offset_ms) * MS

    def _measure_offset(self) -> int:
        """Milliseconds by which the wall clock is ahead.

        A process that sleeps between the two calls measures less: the largest of a few is the best.
        """
        return max((self._clock.wall() - self._clock.now()) // MS for _ in range(_ATTEMPTS))


INVENTORY_INTERVAL = 10 * SECOND
"""GPUs, their MIG layout and their health: they change seldom, and a read costs a round trip to the driver."""
_UNAVAILABLE = ("lost", "missing")
_PAUSED: set[str] = set()
"""Addresses of the engines that this process has paused and not resumed: a pause outlives its connection."""


class DcgmSource:
    """A TelemetrySource over one connection, which it closes; made by `open_dcgm`.

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
        """How late a value may arrive, and how long an interval may be; nanoseconds."""
        self._fields = SupportedFields(client)
        self._boards: dict[int, DcgmBoard] = {}
        self._faults: list[Fault] = []
        self._refreshed_at = self._settled = NEVER
        self._needs_baseline = True
        self._refresh_boards()
        if not self._boards:
            raise SourceError(f"DCGM at {client.address} knows no GPU: try `dcgmi discovery -l` and `nvidia-smi -L`")

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that some board here can give."""
        profiled = any(board.ratios is not None for board in self._boards.values())
        ratios = {field.name for field in self._fields.ratios.values()} if profiled else set()
        return frozenset(ratios | self._fields.signals | {"energy_joules"})

    def read(self, now: int) -> ReadResult:
        """Read every GPU; see `TelemetrySource.read`. Raises SourceError when the connection is dead or closed."""
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
            # Nothing before this read counts, but the value that spans it is needed for the time after it.
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
        """Forget the baselines; see `TelemetrySource.resync`."""
        self._needs_baseline = True

    def pause(self) -> None:
        """Have the engine release the counters, for all its clients; see `TelemetrySource.pause`."""
        self._needs_baseline = True
        try:
            self._client.pause()
            _PAUSED.add(self._client.address)
        except (DcgmRefusal, SourceError) as error:
            self._faults.append(Fault("profiling_refused", f"profiling was not paused: {error}"))

    def close(self) -> None:
        """Disconnect, and leave no pause behind. Never raises."""
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
        """Match the GPUs that the engine lists with the known ones; watch those that are new or came back."""
        found = read_inventory(self._client)
        for gpu in sorted(self._boards.keys() | set(found.gpus)):
            known, listed = self._boards.get(gpu), gpu in found.gpus
            condition = self._condition(gpu, known, listed=listed)
            if listed and (known is None or self._is_changed(known, found.layout(gpu), condition)):
                known = self._boards[gpu] = self._new_board(gpu, found, known)
            self._maintain(self._boards[gpu], condition)

    def _is_changed(self, known: DcgmBoard, layout: tuple[Any, ...] | None, condition: str) -> bool:
        """Whether its watches must be made again: its MIG layout changed, it is back, or it could not be watched."""
        back = condition not in _UNAVAILABLE and (known.condition in _UNAVAILABLE or known.group is None)
        return back or layout not in (None, known.layout)

    def _new_board(self, gpu: int, found: DcgmInventory, known: DcgmBoard | None) -> DcgmBoard:
        """A new GPU, or one whose MIG layout changed while it was watched."""
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
        """Readings of one board or instance, with the latest gauges on each of them."""
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
            yield unit.reading(start, end, self._values(board, unit, interval), gauges, energy)

    def _values(self, board: DcgmBoard, unit: DcgmUnit, interval: MeasuredInterval | None) -> dict[str, Any]:
        if interval is None:
            return unpartitioned_values() if board.partitioned and unit is board.whole else {}
        if unit.cycles is not None:
            unit.cycles.correct(interval.values)
        return {"distrust": "blank"} if interval.blank else dict(self._fields.named(interval.values))

    def _drain_refused(self, board: DcgmBoard, refusal: DcgmRefusal) -> None:
        if refusal.kind == "gpu_is_lost":
            board.set_condition("lost")
        else:  # its MIG layout may have changed
            self._refreshed_at = NEVER
            self._fault(board.whole, "profiling_refused", f"gave no profiling values: {refusal}")

    # -- health and faults --

    def _health(self, *, whole: bool) -> Iterator[Health]:
        """The health of all boards when it is due, else of those with a new Xid."""
        present = [board for board in self._boards.values() if board.condition not in _UNAVAILABLE]
        xids = {board.gpu: board.new_xids(self._fields.xid) for board in present}
        requested = {board.whole.entity: board for board in present if whole or xids[board.gpu]}
        answers: dict[Any, dict[int, DcgmSample]] = {entity: {} for entity in requested}
        for sample in self._client.latest(list(requested), list(self._fields.health)) if requested else ():
            answers[sample.entity][sample.field] = sample
        numbers = {field.name: number for number, field in self._fields.health.items()}
        for entity, board in requested.items():
            temperature = self._fields.gauges(board.whole).get("temperature_celsius")
            yield health_of(board, numbers, answers[entity], xids=xids[board.gpu], temperature=temperature)

    def _add_standing_faults(self) -> None:
        """Add, at every read, faults for what keeps a board from being measured."""
        for board in self._boards.values():
            if board.condition in _UNAVAILABLE:
                what = f"is {board.condition}: find its Xid in dmesg, then reset or drain it"
                self._fault(board.whole, f"gpu_{board.condition}", what)
            elif board.refused:
                self._fault(board.whole, "profiling_refused", f"is not profiled: {board.refused}")
            for unit in board.units if board.condition not in _UNAVAILABLE else ():
                self._stale(unit)

    def _stale(self, unit: DcgmUnit) -> None:
        """Add a fault where no new value came for longer than one can be late."""
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
        """Values are stamped with the wall clock: when it is set, earlier values are of no use."""
        moved = self._clock.update()
        if moved:
            text = f"the wall clock was set by {moved / 1000:+.1f} s: DCGM's values before and after cannot be joined"
            until = f"; it gives no new ones for {-moved / 1000:.0f} s, unless the host engine is restarted"
            self._faults.append(Fault("clock_step", text + (until if moved < 0 else "")))
            self._reset(self._clock.valid_since())

    def _reset(self, since: int) -> None:
        """Drop all baselines; values count from stamp `since`, microseconds."""
        for board in self._boards.values():
            board.reset(since)


def open_dcgm(config: Any) -> DcgmSource:
    """Connect to what `config.dcgm` names. Raises SourceError with what was tried and what to do."""
    section = config.dcgm
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
