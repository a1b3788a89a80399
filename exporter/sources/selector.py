"""Selects the first source that reports tensor activity, logs why, and retries with backoff if it fails.

Candidates are opened in the order of SOURCES; the first without tensor activity is the fallback while the rest are
tried. Only one source is read at a time. Any exception of a source is caught: a broken vendor library must not hide
the other sources. NVML is opened beside DCGM only if DCGM gives no profiling, so that NVML holds no counter that
DCGM needs.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from exporter.clock import Backoff
from exporter.config import Config
from exporter.core.model import NEVER, SECOND
from exporter.registry import SOURCES, section_of
from exporter.sources.base import (
    ReadResult,
    SourceError,
    TelemetrySource,
    open_source,
    with_processes,
)

log = logging.getLogger(__name__)
MAX_READS = 5
"""Reads after which a GPU without tensor activity is logged as not reporting it: the first profiling values of
several boards arrive in different cycles."""


class TensorCheck:
    """Counts the GPUs for which a selected source has reported tensor activity, and logs the selection once."""

    def __init__(self, source: str = "", *clauses: str, announces_tensor: bool = False) -> None:
        """`source` is its name and location, empty: none; `clauses` explain what happened to the other candidates."""
        self._source, self._clauses, self._logged, self._reads = source, clauses, not source, 0
        self._boards: set[str] = set()
        self._active_boards: set[str] = set()
        announced = f"announces {'' if announces_tensor else 'no '}tensor activity"
        self.text = self._explanation(announced) if source else ""
        """Explanation of the selection so far; empty if nothing was selected."""

    def add_read(self, result: ReadResult, *, announces_tensor: bool) -> None:
        """Add one read; `announces_tensor`: the source's signals include tensor activity now."""
        if self._logged:
            return
        self._reads += 1
        self._boards = {device.uuid for device in result.devices if not device.parent}
        self._active_boards |= _boards_with_tensor(result) & self._boards
        if not announces_tensor or self._active_boards >= self._boards or self._reads >= MAX_READS:
            self.text = self._explanation(self._observed(announces_tensor=announces_tensor))
            self.log_once()

    def log_once(self) -> None:
        """Log the explanation, unless it has been logged."""
        if not self._logged:
            self._logged = True
            log.info("source %s", self.text)

    def _explanation(self, observed: str) -> str:
        return f"{self._source}: {'; '.join([observed, *self._clauses])}"

    def _observed(self, *, announces_tensor: bool) -> str:
        gpus = len(self._boards)
        if self._active_boards:
            return f"sees tensor activity on {len(self._active_boards)} of {gpus} GPUs"
        if announces_tensor:
            return f"should see tensor activity, but showed it on none of {gpus} GPUs in {self._reads} reads"
        return f"sees tensor activity on none of {gpus} GPUs, so that their kernel time stays unresolved"


def _boards_with_tensor(result: ReadResult) -> set[str]:
    """Return the boards with tensor activity: their own, or that of any instance if they have MIG instances."""
    board_of = {device.uuid: device.parent for device in result.devices if device.parent}
    partitioned = set(board_of.values())
    active = {reading.uuid for reading in result.readings if reading.tensor_active is not None}
    return {board_of.get(uuid, uuid) for uuid in active if uuid not in partitioned}


_T = TypeVar("_T")
MAX_WAIT = 60 * SECOND
QUICK_TRIES = 30
"""Attempts that are a second apart, before the wait doubles: a host engine that restarts is back within seconds."""
SAME_SOURCE_TRIES = 7
"""Attempts to reopen the source that failed, before others are tried."""
JITTER = 0.2
"""Share by which a wait varies to either side: nodes that failed together must not retry together."""


class RetryTimer(Backoff[int]):
    """Decides when sources may be opened again: after a second at first, then the wait doubles up to MAX_WAIT."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """`chance` returns a random number in [0, 1)."""
        super().__init__(SECOND, MAX_WAIT)
        self._random, self._at, self._error = chance, NEVER, ""
        self._quick = 0
        """Failures since the last success whose wait was a second."""

    @property
    def tries(self) -> int:
        """Failures since the last success."""
        return self._quick + self.failures

    def reset(self) -> None:
        """Record a success."""
        super().reset()
        self._quick = 0

    def require_due(self, now: int) -> None:
        """Raise SourceError with the last error if it is too early for another try."""
        if now < self._at:
            raise SourceError(f"{self._error} (next try in {(self._at - now) / SECOND:.0f} s)")

    def add_failure(self, error: SourceError, now: int) -> None:
        """Count a failure and set the time of the next try."""
        wait = SECOND if self._quick < QUICK_TRIES else self.fail()
        self._quick = min(QUICK_TRIES, self._quick + 1)
        self._at = now + min(MAX_WAIT, round(wait * (1 - JITTER + 2 * JITTER * self._random())))
        self._error = str(error)


RECHECK_INTERVAL = 300 * SECOND
"""Between two rounds over better candidates. Each try opens and closes a connection, so they must be rare."""
MAX_RECHECK_INTERVAL = 12 * RECHECK_INTERVAL
"""Interval (an hour) for a better candidate that opens each time and then cannot be read."""


class RecheckTimer:
    """Decides when better candidates are tried: one round per interval, one candidate per call."""

    def __init__(self) -> None:
        self._at, self._interval, self._tried = NEVER, RECHECK_INTERVAL, 0

    def schedule(self, now: int) -> None:
        """Schedule the next round one interval from now."""
        self._at, self._tried = now + self._interval, 0

    def next_candidate(self, candidates: Sequence[int], now: int) -> int | None:
        """Return the candidate to try now; None: it is too early, or the round is over."""
        if now < self._at:
            return None
        if self._tried >= len(candidates):
            self.schedule(now)
            return None
        self._tried += 1
        return candidates[self._tried - 1]

    def add_result(self, *, worked: bool) -> None:
        """Record whether a better candidate could be read; if not, the interval doubles."""
        self._interval = RECHECK_INTERVAL if worked else min(MAX_RECHECK_INTERVAL, 2 * self._interval)


TENSOR_SIGNAL = "tensor_active"
"""The signal without which kernel time cannot be classified; a source that has it has the other profiling signals."""


class SourceSelector:
    """Opens and reads one of several candidate sources, in order of preference. Not thread-safe.

    `opener` opens a source by name; `where` returns its location for messages; `chance` returns a number in [0, 1).
    """

    def __init__(
        self,
        names: Sequence[str],
        opener: Callable[[str], TelemetrySource],
        *,
        where: Callable[[str], str] = lambda _: "",
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._names, self._opener, self._location = tuple(names), opener, where
        self._source: TelemetrySource | None = None
        self._current: int | None = None
        """Index of the source in use, or of the failed source that is tried again first; None: select anew."""
        self._check = TensorCheck()
        self._retry, self._recheck = RetryTimer(chance), RecheckTimer()
        self._unread = False
        """True if the source has just replaced another and was not read yet."""
        self._missed_pause: set[str] = set()
        """Candidates that could not be paused, because none was open, and were not opened since."""

    @property
    def name(self) -> str:
        """Name of the source in use; empty if there is none."""
        return "" if self._source is None or self._current is None else self._names[self._current]

    @property
    def reason(self) -> str:
        """One-sentence explanation of why this source was selected; of the last source while none is open."""
        return self._check.text

    def read(self, now: int) -> ReadResult:
        """Read the source, see `TelemetrySource.read`; select one first if none is open and the next try is due.

        Raises SourceError, also until the next try is due; the message contains the error of each source.
        """
        if self._source is None:
            return self._start(now)
        try:
            result = (_first_read if self._unread else _read)(self._source, now)
        except SourceError as err:
            unread = self._unread
            self._close_source()
            if unread:
                self._current = None
                self._recheck.add_result(worked=False)
                return self._start(now)
            self._retry.add_failure(err, now)
            raise
        if self._unread:
            self._unread = False
            self._recheck.add_result(worked=True)
        self._retry.reset()
        self._record(result)
        return result

    def try_better(self, now: int) -> None:
        """Try one candidate that may be better than the current source, if one is due, and switch to it if it is.

        Candidates before the current source may be better; if it has no tensor activity, those after it as well. Tries
        one candidate per call, because opening may block. Called between two reads: everything up to `now` was read,
        and a switch costs the time until the next read.
        """
        if self._source is None or self._current is None:
            return
        current, lacks_tensor = self._current, not _announces_tensor(self._source)
        candidates = [
            index for index in range(len(self._names)) if index < current or (lacks_tensor and index > current)
        ]
        index = self._recheck.next_candidate(candidates, now)
        if index is None:
            return
        try:
            source = self._open(self._names[index])
        except SourceError as err:
            log.debug("source %s still cannot be opened: %s", self._names[index], err)
            return
        if _announces_tensor(source) or (lacks_tensor and index < current):
            self._switch_to(source, index)
            self._recheck.schedule(now)
        else:
            source.close()

    def resync(self) -> None:
        """See `TelemetrySource.resync`."""
        if self._source is not None:
            self._source.resync()

    def pause(self) -> None:
        """See `TelemetrySource.pause`. If no source is open, each is paused as it is opened after the pause.

        A daemon that was killed during the pause may have left it paused, and the first read after `pause` resumes it.
        """
        if self._source is not None:
            self._source.pause()
            return
        self._missed_pause = set(self._names)
        log.warning(
            "no source is open as the pause begins: this daemon holds no hardware counters, and cannot pause DCGM for"
            " other clients (`dcgmi profile --pause` can)"
        )

    def close(self) -> None:
        """Close the open source, if any. Never raises."""
        self._close_source()

    # -- selecting --

    def _start(self, now: int) -> ReadResult:
        self._retry.require_due(now)
        try:
            if self._current is not None and 0 < self._retry.tries <= SAME_SOURCE_TRIES:
                result = self._reopen(self._current, now)
            else:
                result = self._select(now)
        except SourceError as err:
            self._retry.add_failure(err, now)
            raise
        self._record(result)
        return result

    def _reopen(self, candidate: int, now: int) -> ReadResult:
        name = self._names[candidate]
        try:
            self._source = self._open(name)
            return _first_read(self._source, now)
        except SourceError as err:
            self._close_source()
            raise SourceError(f"{name}: {err}") from err

    def _select(self, now: int) -> ReadResult:
        """Try the candidates in order; a candidate whose first read fails counts as one that cannot be opened."""
        self._current, failed = None, dict[str, str]()
        while True:
            source, name, check = self._best_candidate(failed)
            try:
                result = _first_read(source, now)
            except SourceError as err:
                source.close()
                failed[name] = str(err)
                continue
            self._source, self._current, self._check = source, self._names.index(name), check
            self._recheck.schedule(now)
            return result

    def _best_candidate(self, failed: dict[str, str]) -> tuple[TelemetrySource, str, TensorCheck]:
        """Return the first candidate with tensor activity, else the first that opens.

        Skips candidates in `failed`, and adds those that cannot be opened. Raises SourceError if none can.
        """
        best: TelemetrySource | None = None
        selected, without_tensor, untried = "", list[str](), tuple[str, ...]()
        for index, name in enumerate(self._names):
            if name in failed:
                continue
            try:
                source = self._open(name)
            except SourceError as err:
                failed[name] = str(err)
                continue
            if _announces_tensor(source):
                if best is not None:
                    best.close()
                best, selected, untried = source, name, self._names[index + 1 :]
                break
            without_tensor.append(name)
            if best is None:
                best, selected = source, name
            else:
                source.close()
        if best is None:
            raise SourceError("\n".join(f"{name}: {error}" for name, error in failed.items()))
        without_tensor = [name for name in without_tensor if name != selected]
        return best, selected, self._check_of(best, selected, *self._clauses(without_tensor, failed, untried))

    def _clauses(self, without_tensor: Sequence[str], failed: Mapping[str, str], untried: Sequence[str]) -> list[str]:
        """Return what happened to the candidates that were not selected, for the explanation."""
        refused = (f"{name}: {' '.join(failed[name].split()).rstrip('.')}" for name in self._names if name in failed)
        parts = (
            ("opened but without tensor activity:", ", ".join(without_tensor)),
            ("refused:", "; ".join(refused)),
            ("not asked:", ", ".join(untried)),
            ("no other one is configured", " " if len(self._names) == 1 else ""),
        )
        return [f"{label} {what}".rstrip() for label, what in parts if what]

    def _check_of(self, source: TelemetrySource, name: str, *clauses: str) -> TensorCheck:
        location = self._location(name)
        where = f"{name} ({location})" if location else name
        return TensorCheck(where, *clauses, announces_tensor=_announces_tensor(source))

    def _open(self, name: str) -> TelemetrySource:
        source = _as_source_error(partial(self._opener, name))
        if name in self._missed_pause:
            self._missed_pause.remove(name)
            source.pause()
        return source

    def _switch_to(self, source: TelemetrySource, candidate: int) -> None:
        replaces = self.name
        self._close_source()
        self._source, self._current, self._unread = source, candidate, True
        self._check = self._check_of(source, self.name, f"in place of {replaces}")

    def _record(self, result: ReadResult) -> None:
        if self._source is not None:
            self._check.add_read(result, announces_tensor=_announces_tensor(self._source))

    def _close_source(self) -> None:
        source, self._source, self._unread = self._source, None, False
        if source is not None:
            self._check.log_once()
            source.close()


def _announces_tensor(source: TelemetrySource) -> bool:
    return TENSOR_SIGNAL in source.signals


def _read(source: TelemetrySource, now: int) -> ReadResult:
    return _as_source_error(partial(source.read, now))


def _first_read(source: TelemetrySource, now: int) -> ReadResult:
    """Read for the first time. Raises SourceError if the read fails or lists no GPU."""
    try:
        result = _read(source, now)
    except SourceError as err:
        raise SourceError(f"opened, but the first read failed: {err}") from err
    if not result.devices:
        raise SourceError("opened, but lists no GPU: does `nvidia-smi -L`?")
    return result


def _as_source_error(call: Callable[[], _T]) -> _T:
    """Return the result of `call`; any exception becomes a SourceError."""
    try:
        return call()
    except SourceError:
        raise
    except Exception as err:
        log.warning("source failed with an unexpected error; please report this", exc_info=err)
        raise SourceError(f"{type(err).__name__}: {err}") from err


def open_selector(config: Config) -> SourceSelector:
    """Create the selector for `config.source`: one candidate, or all of them for "auto". Opens no source yet."""
    names = tuple(SOURCES) if config.source == "auto" else (config.source,)

    def where(name: str) -> str:
        return SOURCES[name].location(getattr(config, section_of(name), None))

    return SourceSelector(names, lambda name: with_processes(open_source(name, config)), where=where)
