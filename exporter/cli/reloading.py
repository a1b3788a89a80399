"""When the configuration is read again, and what of it a running daemon takes.

Owns a thread that looks at the file's content, SIGHUP, and the words that say what became of a change. A change counts
once the file has stayed the same for one look, for not everybody puts a whole one into its place; on SIGHUP at once.
Refuses to give on what was not checked whole, and to touch what samples: `adopt` only hands over.
"""

import argparse
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

from msgspec.structs import replace

from exporter.cli.wiring import read
from exporter.config import LIVE, Config, ConfigError, Log, adopted, changed
from exporter.core.snapshot import Reload
from exporter.logs import set_up

log = logging.getLogger("gpu-efficiency")
LOOK_SECONDS = 2.0
"""Between two looks at the file: a few kilobytes, which the kernel has at hand."""
_MOST_NAMED = 20
"""Settings that one line of the log names."""
Adopt = Callable[[Config, Reload], None]
"""Takes what holds from now on, and what became of the file; called on the thread that looks."""


class Reloading:
    """The configuration's file, and what of it holds now."""

    def __init__(
        self,
        path: Path | None,
        config: Config,
        read_again: Callable[[], Config],
        *,
        live: tuple[str, ...] = LIVE,
        used: tuple[str, ...] = (),
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`config` is what `read_again` gave just now. `used`: sections that the command has a use for; empty: all."""
        self._path, self._read_again, self._wall = path, read_again, wall
        self._live, self._used = live, used or Config.__struct_fields__
        self._held, self._read = config, _content(path)
        """What holds, and the file's content when it was last read."""
        self._seen = self._read
        self.told = Reload(at=wall())
        self._asked: SimpleQueue[None] = SimpleQueue()

    def ask(self) -> None:
        """Have the file read now, changed or not: what SIGHUP does. May be called by a signal's handler."""
        self._asked.put(None)

    def run(self, adopt: Adopt, stop: threading.Event) -> None:
        """Look until `stop` is set."""
        while not stop.is_set():
            asked = self._rest()
            if not stop.is_set():
                self.look(adopt, asked=asked)

    def look(self, adopt: Adopt, *, asked: bool = False) -> None:
        """Look once. What has changed is read and handed over, be it taken or refused; `asked`: read it in any case."""
        before, self._seen = self._seen, _content(self._path)
        if asked or (self._seen != self._read and self._seen == before):
            self._read = self._seen
            self._reload()
            adopt(self._held, self.told)

    def _rest(self) -> bool:
        """Wait for the next look; True: somebody asked for it."""
        try:
            self._asked.get(timeout=LOOK_SECONDS)
        except Empty:
            return False
        while not self._asked.empty():
            self._asked.get()
        return True

    def _reload(self) -> None:
        if self._path is None:
            log.info("there is no file to read again: this was started without --config")
        try:
            read = self._read_again()
        except ConfigError as err:
            self.told = replace(self.told, refused=str(err))
            log.error("the configuration is refused, and the one before it holds: %s", err)  # noqa: TRY400  no bug of ours
            return
        before, self._held = self._held, adopted(self._held, read, self._live)
        waiting = tuple(name for name in changed(self._held, read) if name.partition(".")[0] in self._used)
        self.told = Reload(at=self._wall(), restart=waiting)
        log.info("the configuration was read again: %s", _named(changed(before, self._held)) or "nothing in it is new")
        if waiting:
            log.warning("a restart is needed for what has changed in %s; until then the old holds", _named(waiting))


def reloading(args: argparse.Namespace, config: Config, *, loopback: bool = False) -> Reloading:
    """The file that `args` names; `config` is what was just read from it."""
    return Reloading(args.config, config, lambda: read(args, loopback=loopback))


@contextmanager
def heeding(reloads: Reloading) -> Iterator[None]:
    """Take SIGHUP, which would end the process, as the wish that the file be read again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: reloads.ask())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def watched(reloads: Reloading, adopt: Adopt) -> Iterator[None]:
    """Look at the file meanwhile, in a thread of its own; what is said of the log holds at once."""
    set_last: Log | None = None

    def take(config: Config, told: Reload) -> None:
        nonlocal set_last
        if config.log != set_last:  # while it is set up, a line of another thread goes its own way
            set_last = config.log
            set_up(form=config.log.format, level=config.log.level)
        adopt(config, told)

    stop = threading.Event()
    threading.Thread(target=reloads.run, args=(take, stop), name="reloader", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
        reloads.ask()


def _content(path: Path | None) -> bytes | None:
    """What the file says, through whatever links lead to it; None: it cannot be read."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
