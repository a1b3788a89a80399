"""Shows the progress of a long command on standard error.

On a terminal it redraws one line and clears it at the end; otherwise it writes a line every ten seconds or more.
Between two lines it costs one clock read per item. `--quiet` turns it off.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TextIO, TypeVar

from msgspec import Struct

from exporter.formatting import format_duration, shorten

Item = TypeVar("Item")
_DELAY_SECONDS = 1.0
"""Seconds before a terminal shows the first progress."""
_REDRAW_SECONDS = 0.25
"""Seconds between two updates on a terminal."""
_LINE_SECONDS = 10.0
"""Seconds before the first plain line and at least between two; later a twentieth of the elapsed time."""
_LINE_FRACTION = 20
_ESTIMATE_SECONDS = 3.0
"""Seconds after which the rate is used to estimate the remaining time."""
_DEFAULT_COLUMNS = 80
"""Width of a terminal whose size is unknown."""
_BAR_WIDTH, _MIN_BAR_WIDTH = 20, 5
"""Width of the bar in characters, and the width below which it is left out."""
_NAME_WIDTH = 30


class ProgressUnit(Struct, frozen=True):
    """How an amount and a rate of the counted unit are written."""

    amount: Callable[[float], str]
    rate: Callable[[float], str]
    """Takes units per second."""


def size(count: float) -> str:
    """Format bytes with decimal prefixes."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


BYTES = ProgressUnit(size, lambda rate: f"{size(rate)}/s")
TIME = ProgressUnit(format_duration, lambda rate: f"{rate:,.0f} times as fast")
"""Seconds of recorded or simulated time."""
WAITED = ProgressUnit(format_duration, lambda _: "")
"""Seconds of real time."""


def counted(noun: str) -> ProgressUnit:
    """Unit of things that are counted by that noun."""
    return ProgressUnit(lambda count: f"{count:,.0f} {noun}", lambda rate: f"{rate:,.1f} {noun}/s")


class ProgressBar:
    """Shows the progress of `what` towards `total`; None: without a share and remaining time.

    A context manager, so that the line is cleared after Ctrl-C too.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        *,
        unit: ProgressUnit = BYTES,
        quiet: bool = False,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._unit, self._now = shorten(what, _NAME_WIDTH), total, unit, now
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._began = now()
        self._next = float("inf") if quiet else self._began + (_DELAY_SECONDS if self._is_terminal else _LINE_SECONDS)
        self._width = 0

    def through(self, items: Iterable[Item], done: Callable[[], float]) -> Iterator[Item]:
        """Yield the items; `done` returns the progress, and is called only when a line is due."""
        now = self._now
        for item in items:
            if now() >= self._next:
                self._show(done())
            yield item

    def update(self, done: float, total: float | None = None) -> None:
        """Set the progress to `done`, and `total` if it has become known or has changed."""
        if total is not None:
            self._total = total
        if self._now() >= self._next:
            self._show(done)

    def _show(self, done: float) -> None:
        spent = self._now() - self._began
        interval = _REDRAW_SECONDS if self._is_terminal else max(_LINE_SECONDS, spent / _LINE_FRACTION)
        self._next = self._now() + interval
        self._write(self._drawing(done, spent) if self._is_terminal else self._line(done, spent))

    def _line(self, done: float, spent: float) -> str:
        return f"gpu-efficiency: {self._what}: {', '.join(self._figures(done, spent))}\n"

    def _drawing(self, done: float, spent: float) -> str:
        room = self._columns() - 1  # a line that fills the last column scrolls on some terminals
        share, figures = self._share(done), "  ".join(self._figures(done, spent))
        width = min(_BAR_WIDTH, room - len(self._what) - len(figures) - len("  []  "))
        bar = "" if share is None or width < _MIN_BAR_WIDTH else f"[{'#' * round(share * width):.<{width}}]  "
        line = f"{self._what}  {bar}{figures}"[:room]
        drawn, self._width = f"\r{line:{self._width}}", len(line)
        return drawn

    def _figures(self, done: float, spent: float) -> Iterator[str]:
        share, rate = self._share(done), done / spent if spent > 0 else 0.0
        yield self._unit.amount(done) if share is None else f"{100 * share:3.0f} %"
        if rate_text := self._unit.rate(rate):
            yield rate_text
        if share is None or self._total is None:
            yield f"{format_duration(round(spent))} so far"
        elif rate > 0 and spent >= _ESTIMATE_SECONDS:
            yield f"{format_duration(round((self._total - min(done, self._total)) / rate))} left"

    def _share(self, done: float) -> float | None:
        """The share that is done, at most 1: a file that is still written to may have grown beyond `total`."""
        return None if not self._total else min(1.0, done / self._total)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_COLUMNS
        except (OSError, ValueError):
            return _DEFAULT_COLUMNS

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # standard error was closed; the command goes on
            self._next = float("inf")

    def close(self) -> None:
        """Clear the line; show nothing more."""
        if self._width:
            self._write(f"\r{'':{self._width}}\r")
        self._width, self._next = 0, float("inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def progress_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flag of commands that show progress."""
    command.add_argument("--quiet", action="store_true", help="show no progress on standard error")
