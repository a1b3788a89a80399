"""DCGM through NVIDIA's own Python bindings: every value the host engine takes, over the interval it describes.

Owns the rhythm: survey, drain, latest values, and the translation of the engine's clock to the host's. What lies on
the other side is `engine`'s, what a board is `boards`', which value belongs to which time `series`'. Refuses to fill
in: what the engine did not say is None, never zero and never the last good value.

The engine samples each field at the shortest period any of its clients asked for and keeps the values, shared by all.
The few ratios are drained, one question a board, so that nothing between two reads is lost or counted twice; of all
other fields the latest value is enough. A value arrives late by up to one period: `Batch.settled` says so.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from exporter.clock import Clock, SystemClock
from exporter.core.model import MS, NEVER, SECOND, Fault, Health, Reading, Spec
from exporter.sources import Batch, SourceError
from exporter.sources.dcgm.bindings import connect, load
from exporter.sources.dcgm.boards import Board, Found, health_of, meet, nothing_runs, survey
from exporter.sources.dcgm.clocks import Clocks
from exporter.sources.dcgm.engine import LOST, Engine, Refusal, Sample
from exporter.sources.dcgm.series import Interval
from exporter.sources.dcgm.units import Unit
from exporter.sources.dcgm.watching import Fields, profile, watched

SURVEY_EVERY = 10 * SECOND
"""GPUs, their MIG layout and their health: they change seldom, and asking costs a round trip to the driver."""
_AWAY = ("lost", "missing")
_PAUSED: set[str] = set()
"""Addresses of the engines that this process has paused and not resumed: a pause outlives its connection."""


class DcgmSource:
    """`Source` over one connection, which it closes; made by `open_dcgm`. `period_seconds` is what it has watched."""

    name = "dcgm"

    def __init__(
        self,
        engine: Engine,
        *,
        period_seconds: float,
        overrides: Mapping[str, Spec] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._engine, self._overrides, self._clocks = engine, overrides or {}, Clocks(clock or SystemClock())
        self._period = round(period_seconds * 1_000_000)
        self._slack = 3 * round(period_seconds * 1000) * MS + SECOND
        """How long a value may be on its way, and how far one may reach back."""
        self._fields = Fields(engine)
        self._boards: dict[int, Board] = {}
        self._faults: list[Fault] = []
        self._surveyed = self._settled = NEVER
        self._afresh = True
        self._survey()
        if not self._boards:
            raise SourceError(f"DCGM at {engine.address} knows no GPU: try `dcgmi discovery -l` and `nvidia-smi -L`")

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that some board here can give."""
        profiled = any(board.ratios is not None for board in self._boards.values())
        ratios = {field.name for field in self._fields.ratios.values()} if profiled else set()
        return frozenset(ratios | self._fields.shown | {"energy_joules"})

    def read(self, now: int) -> Batch:
        """Read every GPU; see `Source.read`. Raises SourceError when the connection is dead or closed."""
        try:
            return self._read(now)
        except Refusal as refusal:
            raise SourceError(str(refusal)) from refusal

    def _read(self, now: int) -> Batch:
        self._take_back_the_counters()
        self._watch_the_clock()
        due = now - self._surveyed >= SURVEY_EVERY
        if due or any(board.condition in _AWAY for board in self._boards.values()):
            self._survey()
        self._surveyed = now if due else self._surveyed
        if self._afresh:  # what lies before this read is nobody's, but the value that spans it still tells of after
            self._forget(self._clocks.since(2 * self._period))
            self._afresh, self._settled = False, max(self._settled, now)
        readings = tuple(self._readings(now))
        health = tuple(self._health(whole=due))
        self._doubts()
        faults, self._faults = tuple(self._faults), []
        self._settled = max(self._settled, now - self._slack)
        devices = tuple(unit.device for board in self._boards.values() for unit in board.units)
        return Batch(devices, readings, faults, health, self._settled)

    def resync(self) -> None:
        """Forget the baselines; see `Source.resync`."""
        self._afresh = True

    def pause(self) -> None:
        """Have the engine let go of the counters, for all its clients; see `Source.pause`."""
        self._afresh = True
        try:
            self._engine.pause()
            _PAUSED.add(self._engine.address)
        except (Refusal, SourceError) as error:
            self._faults.append(Fault("profiling_refused", f"profiling was not paused: {error}"))

    def close(self) -> None:
        """Disconnect, and leave no pause behind. Never raises."""
        with suppress(SourceError):
            self._take_back_the_counters()
        self._engine.close()

    def _take_back_the_counters(self) -> None:
        if self._engine.address not in _PAUSED:
            return
        try:
            self._engine.resume()
        except Refusal as refusal:
            self._faults.append(Fault("profiling_refused", f"profiling was not resumed: {refusal}"))
        _PAUSED.discard(self._engine.address)

    # -- the inventory --

    def _survey(self) -> None:
        """Match what the engine lists with what is remembered; watch what is new, mend what came back."""
        found = survey(self._engine)
        for gpu in sorted(self._boards.keys() | set(found.gpus)):
            known, listed = self._boards.get(gpu), gpu in found.gpus
            condition = self._condition(gpu, known, listed=listed)
            if listed and (known is None or self._is_another(known, found.layout(gpu), condition)):
                known = self._boards[gpu] = self._introduced(gpu, found, known)
            self._look_after(self._boards[gpu], condition)

    def _is_another(self, known: Board, layout: tuple[Any, ...] | None, condition: str) -> bool:
        """It has been cut anew, or it is back, or it could not be watched: its watches are made again."""
        back = condition not in _AWAY and (known.condition in _AWAY or known.group is None)
        return back or layout not in (None, known.layout)

    def _introduced(self, gpu: int, found: Found, known: Board | None) -> Board:
        """A new GPU, or one whose MIG layout changed while it was watched."""
        board = meet(self._engine, gpu, found, overrides=self._overrides)
        self._faults += board.doubts if known is None else ()
        if known is not None:
            self._engine.unwatch(known.group, known.watched)
            board.carry(known)
        watched(self._engine, self._fields, board, period=self._period, since=self._clocks.since())
        return board

    def _look_after(self, board: Board, condition: str) -> None:
        if condition != board.condition:
            board.condemn(condition)
        if board.group is not None and board.refused and not board.hopeless and condition not in _AWAY:
            profile(self._engine, self._fields, board, period=self._period, since=self._clocks.since())

    def _condition(self, gpu: int, board: Board | None, *, listed: bool) -> str:
        if not listed:
            return "missing"
        try:
            lost = self._engine.status(gpu) in LOST
        except Refusal as refusal:
            lost = refusal.kind == "gpu_is_lost"
        return "lost" if lost else ("recovery" if board is not None and board.recovery else "")

    # -- the readings --

    def _readings(self, now: int) -> Iterator[Reading]:
        self._latest([board for board in self._boards.values() if board.condition not in _AWAY])
        until = min(self._clocks.stamp(), self._clocks.stamped(now))
        for board in self._boards.values():
            if board.condition not in _AWAY and board.whole.silent:
                self._look_after(board, self._condition(board.gpu, board, listed=True))
            if board.condition in _AWAY:
                continue
            try:
                self._drain(board)
            except Refusal as refusal:
                self._not_drained(board, refusal)
                continue
            for unit in board.units:
                yield from self._unit(board, unit, now, until)

    def _latest(self, boards: list[Board]) -> None:
        by_entity = {unit.entity: unit for board in boards for unit in board.units}
        for entities, fields in self._fields.questions(boards):
            for sample in self._engine.latest(entities, fields):
                by_entity[sample.entity].latest[sample.field] = sample

    def _drain(self, board: Board) -> None:
        wanted = {unit.entity: unit.series for unit in board.units if unit.series is not None}
        if not wanted:
            return
        since = min(series.since for series in wanted.values())
        for sample in self._engine.drain(board.group, board.ratios, since):
            if sample.entity in wanted:
                wanted[sample.entity].add(sample.field, sample.at, sample.value)

    def _unit(self, board: Board, unit: Unit, now: int, until: int) -> Iterator[Reading]:
        """Readings of one board or instance, with the latest gauges on each of them."""
        if unit.series is not None and unit.profiled:
            intervals = unit.series.take(unit.series.ripe(until))
            spans = list(unit.spans(intervals, self._clocks.host, slack=self._slack, floor=self._settled))
        else:
            spans = unit.since_last(now, slack=self._slack, floor=self._settled)
        gauges = self._fields.gauges(unit)
        if unit is not board.whole:
            gauges |= {key: value for key, value in self._fields.gauges(board.whole).items() if key == "sm_clock_hz"}
        joules = unit.energies(self._fields.energy(board.whole), [end - start for start, end, _ in spans])
        for (start, end, interval), energy in zip(spans, joules, strict=True):
            yield unit.reading(start, end, self._values(board, unit, interval), gauges, energy)

    def _values(self, board: Board, unit: Unit, interval: Interval | None) -> dict[str, Any]:
        if interval is None:
            return nothing_runs() if board.cut and unit is board.whole else {}
        if unit.cycles is not None:
            unit.cycles.correct(interval.values)
        return {"distrust": "blank"} if interval.blank else dict(self._fields.named(interval.values))

    def _not_drained(self, board: Board, refusal: Refusal) -> None:
        if refusal.kind == "gpu_is_lost":
            board.condemn("lost")
        else:  # it may have been cut anew
            self._surveyed = NEVER
            self._fault(board.whole, "profiling_refused", f"gave no profiling values: {refusal}")

    # -- health and doubts --

    def _health(self, *, whole: bool) -> Iterator[Health]:
        """All of it when it is due, and between times of a board that told an error."""
        present = [board for board in self._boards.values() if board.condition not in _AWAY]
        told = {board.gpu: board.xids(self._fields.xid) for board in present}
        asked = {board.whole.entity: board for board in present if whole or told[board.gpu]}
        answers: dict[Any, dict[int, Sample]] = {entity: {} for entity in asked}
        for sample in self._engine.latest(list(asked), list(self._fields.well)) if asked else ():
            answers[sample.entity][sample.field] = sample
        numbers = {field.name: number for number, field in self._fields.well.items()}
        for entity, board in asked.items():
            temperature = self._fields.gauges(board.whole).get("temperature_celsius")
            yield health_of(board, numbers, answers[entity], xids=told[board.gpu], temperature=temperature)

    def _doubts(self) -> None:
        """Tell at every read what still keeps a board from being seen."""
        for board in self._boards.values():
            if board.condition in _AWAY:
                what = f"is {board.condition}: find its Xid in dmesg, then reset or drain it"
                self._fault(board.whole, f"gpu_{board.condition}", what)
            elif board.refused:
                self._fault(board.whole, "profiling_refused", f"is not profiled: {board.refused}")
            for unit in board.units if board.condition not in _AWAY else ():
                self._stale(unit)

    def _stale(self, unit: Unit) -> None:
        """It has had no new value for longer than one can be on its way."""
        newest = unit.series.newest if unit.series is not None and unit.profiled else unit.newest
        silent = self._clocks.now() - self._clocks.host(newest)
        if newest and silent > self._slack:
            what = f"has had no new value for {silent // SECOND} s: does the host engine hang?"
            self._fault(unit, "stale", what)

    def _fault(self, unit: Unit, kind: str, what: str) -> None:
        device = unit.device
        self._faults.append(Fault(kind, f"DCGM: GPU {device.index} ({device.uuid}) {what}", device.uuid))

    # -- time --

    def _watch_the_clock(self) -> None:
        """Values are stamped with the wall clock: when that is set, what was stamped before is of no use."""
        moved = self._clocks.follow()
        if moved:
            text = f"the wall clock was set by {moved / 1000:+.1f} s: DCGM's values before and after cannot be joined"
            until = f"; it gives no new ones for {-moved / 1000:.0f} s, unless the host engine is restarted"
            self._faults.append(Fault("clock_step", text + (until if moved < 0 else "")))
            self._forget(self._clocks.since())

    def _forget(self, since: int) -> None:
        """Begin anew, with values stamped `since`, microseconds."""
        for board in self._boards.values():
            board.forget(since)


def open_dcgm(config: Any) -> DcgmSource:
    """Connect to what `config.dcgm` names. Raises SourceError with what was tried and what to do."""
    section = config.dcgm
    bindings = load(section.bindings, section.library)
    handle = connect(bindings, section.address, timeout_seconds=section.connect_timeout_seconds)
    engine = Engine(bindings, handle, address=section.address)
    try:
        return DcgmSource(engine, period_seconds=config.sampling.interval_seconds, overrides=config.overrides())
    except Refusal as refusal:
        engine.close()
        raise SourceError(str(refusal)) from refusal
    except SourceError:
        engine.close()
        raise
