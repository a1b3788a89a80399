"""The one source in use: which of several it is, why, and what happens when it dies.

Owns the order of asking, opening and reopening, the waits between, and the sentence that explains the choice. Refuses
to read two sources: what is read is one at a time. Beside the agent the only place that catches broadly, for a vendor's
library may raise anything when it is opened, and one broken rung must not hide those below it.

The first rung that gives tensor activity on any board wins, and those below it are not opened. One that opens
without is kept open, unread, while the lower ones are asked, and closed before the winner's first read. So NVML is
opened beside DCGM only where DCGM gives no profiling, and then holds no hardware counter that NVML could take away.
The other way round (NVML is in use, DCGM has come back) DCGM is opened beside NVML: that is safe, for where NVML reads
counters at all (GPM, Hopper and later) every client has samples of its own; and NVML is closed before DCGM is read.
"""

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TypeVar

from exporter.config import Config
from exporter.core.model import NEVER, SECOND
from exporter.sources import SOURCES, Batch, Source, SourceError, open_source
from exporter.sources.choice import Choice, Sight
from exporter.sources.processes import Listing, with_processes
from exporter.wording import without_secrets

log = logging.getLogger(__name__)
_T = TypeVar("_T")
LONGEST_WAIT = 60 * SECOND
SAME_RUNG = 3
"""Tries to open what has died, after 1, 2 and 4 s, before the others are asked: a host engine restarts in that time."""
JITTER = 0.2
"""A thousand nodes that lost the same thing at once must not come back for it at once."""
LOOK_EVERY = 300 * SECOND
"""Between two looks at the rungs above: each one opens a connection and closes it again, and a better source is worth
waiting five minutes for, not a reconnect a minute for ever."""
LONGEST_LOOK = 12 * LOOK_EVERY
"""An hour, where what is above opens each time and then cannot be read."""
PROFILING = "tensor_active"
"""The signal without which no kernel time can be judged; where it is, the other profiling signals are."""


class Ladder:
    """Sources by falling preference, one of them open. Not thread-safe, as a Source is not.

    `opener` opens a source by its name, `where` says in words where that one is, `chance` gives 0 to 1.
    """

    def __init__(
        self,
        names: Sequence[str],
        opener: Callable[[str], Source],
        *,
        where: Callable[[str], str] = lambda _: "",
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._names, self._opener, self._where, self._chance = tuple(names), opener, where, chance
        self._source: Source | None = None
        self._rung: int | None = None
        """Of the source in use, or of the one that died and is tried again; None: any will do."""
        self._sight = Sight(Choice(""))
        self._failures, self._retry_at, self._said = 0, NEVER, ""
        self._unread = False
        """The source has been opened in the other's place, but not yet read."""
        self._look_at, self._look_every, self._looked = NEVER, LOOK_EVERY, 0

    @property
    def name(self) -> str:
        """Of the source in use; empty while there is none."""
        return "" if self._source is None or self._rung is None else self._names[self._rung]

    @property
    def reason(self) -> str:
        """Why this source, in one sentence for people; the last one's while there is none."""
        return self._sight.words

    def read(self, now: int) -> Batch:
        """What the source gives, see `Source.read`; where none is open and it is time to, choose one and begin.

        Raises SourceError, also while it waits before the next try; the message says what was wrong with each.
        """
        if self._source is None:
            return self._begin(now)
        try:
            batch = (_first_batch if self._unread else _batch)(self._source, now)
        except SourceError as err:
            unread = self._unread
            self._let_go()
            if unread:
                self._rung, self._look_every = None, min(LONGEST_LOOK, 2 * self._look_every)
                return self._begin(now)
            self._failed(err, now)
            raise
        if self._unread:
            self._unread, self._look_every = False, LOOK_EVERY
        self._failures = 0
        self._took(batch)
        return batch

    def look_up(self, now: int) -> None:
        """When it is time to, ask one rung that may be better than this one, and change to it if it is.

        Worth asking are those above; of those below, where this one sees no tensor activity, one that does. One a call,
        for each may block. Called between two reads: all up to `now` was read, a change costs the time to the next.
        """
        if self._source is None or self._rung is None or now < self._look_at:
            return
        rung, blind = self._rung, not _sees(self._source)
        others = [place for place in range(len(self._names)) if place < rung or (blind and place > rung)]
        if self._looked >= len(others):
            self._look_again(now)
            return
        place, self._looked = others[self._looked], self._looked + 1
        try:
            source, sees = self._opened(self._names[place])
        except SourceError as err:
            log.debug("source %s still refuses: %s", self._names[place], err)
            return
        if sees or (blind and place < rung):
            self._change(source, place, sees=sees)
            self._look_again(now)
        else:
            source.close()

    def resync(self) -> None:
        """See `Source.resync`."""
        if self._source is not None:
            self._source.resync()

    def pause(self) -> None:
        """See `Source.pause`."""
        if self._source is not None:
            self._source.pause()

    def close(self) -> None:
        """Close what is open. Never raises."""
        self._let_go()

    # -- choosing --

    def _begin(self, now: int) -> Batch:
        if now < self._retry_at:
            raise SourceError(f"{self._said} (next try in {(self._retry_at - now) / SECOND:.0f} s)")
        try:
            if self._rung is not None and 0 < self._failures <= SAME_RUNG:
                batch = self._reopen(self._rung, now)
            else:
                batch = self._choose(now)
        except SourceError as err:
            self._failed(err, now)
            raise
        self._took(batch)
        return batch

    def _reopen(self, rung: int, now: int) -> Batch:
        name = self._names[rung]
        try:
            self._source, _ = self._opened(name)
            return _first_batch(self._source, now)
        except SourceError as err:
            self._let_go()
            raise SourceError(f"{name}: {err}") from err

    def _choose(self, now: int) -> Batch:
        """Ask the rungs in order; one that opens but whose first read fails is refused like one that does not open."""
        self._rung, refused = None, dict[str, str]()
        while True:
            source, choice = self._best(refused)
            try:
                batch = _first_batch(source, now)
            except SourceError as err:
                source.close()
                refused[choice.name] = str(err)
                continue
            self._source, self._rung = source, self._names.index(choice.name)
            self._sight = Sight(choice)
            self._look_again(now)
            return batch

    def _best(self, refused: dict[str, str]) -> tuple[Source, Choice]:
        """The first that sees, else the first that opens, of those not in `refused`, to which it adds."""
        kept: Source | None = None
        passed: list[str] = []
        for place, name in enumerate(self._names):
            if name in refused:
                continue
            try:
                source, sees = self._opened(name)
            except SourceError as err:
                refused[name] = str(err)
                continue
            if sees:
                if kept is not None:
                    kept.close()
                return source, self._choice(name, sees=True, passed=passed, refused=refused, unasked=place + 1)
            passed.append(name)
            if kept is None:
                kept = source
            else:
                source.close()
        if kept is None:
            raise SourceError("\n".join(f"{name}: {said}" for name, said in refused.items()))
        return kept, self._choice(passed[0], sees=False, passed=passed[1:], refused=refused)

    def _choice(
        self, name: str, *, sees: bool, passed: Sequence[str], refused: dict[str, str], unasked: int | None = None
    ) -> Choice:
        return Choice(
            name=name,
            where=self._where(name),
            sees=sees,
            passed=tuple(passed),
            refused=tuple((other, refused[other]) for other in self._names if other in refused),
            unasked=() if unasked is None else self._names[unasked:],
            alone=len(self._names) == 1,
        )

    def _opened(self, name: str) -> tuple[Source, bool]:
        source = _heard(partial(self._opener, name))
        return source, _sees(source)

    # -- losing --

    def _change(self, source: Source, rung: int, *, sees: bool) -> None:
        instead_of = self.name
        self._let_go()
        self._source, self._rung, self._unread = source, rung, True
        self._sight = Sight(Choice(self.name, self._where(self.name), sees=sees, instead_of=instead_of))

    def _look_again(self, now: int) -> None:
        self._look_at, self._looked = now + self._look_every, 0

    def _took(self, batch: Batch) -> None:
        if self._source is not None:
            self._sight.see(batch, sees=_sees(self._source))

    def _failed(self, err: SourceError, now: int) -> None:
        """Wait before the next try, twice as long each time."""
        self._failures += 1
        wait = min(LONGEST_WAIT, SECOND << min(self._failures - 1, 6))
        self._retry_at = now + min(LONGEST_WAIT, round(wait * (1 - JITTER + 2 * JITTER * self._chance())))
        self._said = str(err)

    def _let_go(self) -> None:
        source, self._source, self._unread = self._source, None, False
        if source is not None:
            self._sight.tell()
            source.close()


def _sees(source: Source) -> bool:
    return PROFILING in source.signals


def _batch(source: Source, now: int) -> Batch:
    return _heard(partial(source.read, now))


def _first_batch(source: Source, now: int) -> Batch:
    """The first read: a source that cannot be read, or lists no GPU, is not one that works."""
    try:
        batch = _batch(source, now)
    except SourceError as err:
        raise SourceError(f"opened, but the first read failed: {err}") from err
    if not batch.devices:
        raise SourceError("opened, but lists no GPU: does `nvidia-smi -L`?")
    return batch


def _heard(ask: Callable[[], _T]) -> _T:
    """What a source answers; whatever it raises as a SourceError."""
    try:
        return ask()
    except SourceError:
        raise
    except Exception as err:
        log.warning("source failed in a way it does not know; please report this", exc_info=err)
        raise SourceError(f"{type(err).__name__}: {err}") from err


_WHERE: dict[str, Callable[[Config], str]] = {
    "dcgm": lambda config: (
        "an engine of our own" if config.dcgm.address == "embedded" else f"host engine at {config.dcgm.address}"
    ),
    "dcgm-exporter": lambda config: without_secrets(config.dcgm_exporter.url),
    "nvml": lambda _: "the driver's own library",
}


def open_ladder(config: Config) -> Ladder:
    """The ladder that `config.source` asks for, with one rung unless it is auto. Opens nothing yet."""
    names = tuple(SOURCES) if config.source == "auto" else (config.source,)

    def where(name: str) -> str:
        return _WHERE[name](config) if name in _WHERE else ""

    return Ladder(names, lambda name: with_processes(open_source(name, config), open_process_list), where=where)


def open_process_list() -> Listing:
    """The driver's own list of processes; raises SourceError where there is no driver library."""
    listing: Listing = import_module("exporter.sources.nvml.listing").open_processes()
    return listing
