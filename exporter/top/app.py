"""The live view on a terminal: the only module that knows Textual.

Owns colours, keys as the terminal gives them, and when to draw: when a node has answered, once a second for the ages,
and after a key; and of the screen only the lines that changed, for a slow line is slow. The mouse is left to the
terminal, so that text can be selected. Refuses all figures and words: `screen` has them.

Textual's App and Widget are subclassed because it has no other way.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace
from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.events import Event, Paste
from textual.events import Key as KeyPress
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from exporter.top.asked import Asked, pressed
from exporter.top.asking import Place
from exporter.top.drawn import Line
from exporter.top.rows import Kind
from exporter.top.screen import Screen, rows_of, screen
from exporter.top.seen import Seen, View, names
from exporter.top.signs import Signs
from exporter.top.trend import Trends
from exporter.top.watching import Watch

_PLAIN = {"strong": Style(bold=True), "soft": Style(dim=True), "bad": Style(bold=True)}
_COLOURED = {
    "strong": Style(bold=True),
    "soft": Style(dim=True),
    "bad": Style(color="bright_red", bold=True),
    "useful": Style(color="green"),
    "gau": Style(color="yellow"),
    "ectr": Style(color="magenta"),
    "emfu": Style(color="bright_blue"),
    "unresolved": Style(dim=True),
    "unobserved": Style(dim=True),
}
"""The sixteen colours of the terminal's own theme, in the order of the boards': whoever chose that can read them. Every
colour stands beside a word, a sign or a pattern of its own."""
_NONE, _BOLD, _CHOSEN = Style(), Style(bold=True), Style(reverse=True)
_BEAT_SECONDS, _TOGETHER_SECONDS = 1.0, 0.25
_KINDS: tuple[Kind, ...] = ("gpus", "jobs")


class Canvas(Widget):
    """Lines as they are given; only those that changed are sent to the terminal."""

    can_focus = True

    def __init__(self, *, coloured: bool) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._looks = _COLOURED if coloured else _PLAIN

    def show(self, lines: list[Line]) -> None:
        """Have these on the screen."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        changed = [place for place, (old, new) in enumerate(zip(before, lines, strict=True)) if old != new]
        if changed:
            self.refresh(*(Region(0, place, self.size.width, 1) for place in changed))

    def render_line(self, y: int) -> Strip:
        """Textual asks for one line."""
        width = self.size.width
        drawn = self._lines[y] if y < len(self._lines) else Line()
        looks = {"strong": _BOLD} if drawn.chosen else self._looks
        segments = [Segment(text, looks.get(look, _NONE)) for text, look in drawn.pieces]
        strip = Strip(segments).adjust_cell_length(width)
        return strip.apply_style(_CHOSEN) if drawn.chosen else strip


class Top(App[None]):
    """The program."""

    CSS = "Screen, Canvas { background: ansi_default; color: ansi_default; } Canvas { width: 100%; height: 100%; }"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, places: Sequence[Place], asked: Asked, *, signs: Signs, interval: float, coloured: bool) -> None:
        super().__init__(ansi_color=True)
        self._asked, self._signs = asked, signs
        self._watch = Watch(places, interval=interval, changed=self._answered)
        self._trends = Trends(time.monotonic(), 2 * interval)
        self._noted: dict[str, float] = {}
        self._held: View | None = None
        self._due = False
        self._canvas = Canvas(coloured=coloured)
        self._drawn: Screen | None = None

    def compose(self) -> ComposeResult:
        """All there is."""
        yield self._canvas

    def on_mount(self) -> None:
        """Begin."""
        self._canvas.focus()
        self.set_interval(_BEAT_SECONDS, self._beat)
        self._watch.start()

    def on_unmount(self) -> None:
        """Ask no more."""
        self._watch.stop()

    def on_resize(self) -> None:
        """Draw for the new size, when it is known everywhere."""
        self.call_after_refresh(self._draw)

    def on_paste(self, event: Paste) -> None:
        """Pasted into the filter; keys are never pasted."""
        if self._asked.typing:
            for sign in event.text.splitlines()[0] if event.text else "":
                self._press("", sign)

    async def on_event(self, event: Event) -> None:
        """Every key is ours, even those that Textual has a use for."""
        if isinstance(event, KeyPress) and event.key == "ctrl+z":
            self.action_suspend_process()
        elif isinstance(event, KeyPress):
            self._press(event.key, event.character)
        else:
            await super().on_event(event)

    def _press(self, key: str, sign: str | None) -> None:
        if self._drawn is None:
            return
        asked = replace(self._asked, chosen=self._drawn.chosen) if not self._asked.opened else self._asked
        self._asked = pressed(asked, key, self._drawn.before, sign=sign)
        if self._asked.quit:
            self.exit()
            return
        self._held = (self._held or self._view()) if self._asked.held else None
        opened = self._asked.opened
        self._watch.want(opened[2] if opened and opened[0] == "job" else "")
        self._draw()

    def _answered(self) -> None:
        """On a thread of a node's."""
        with suppress(RuntimeError):  # it is being closed
            self.call_from_thread(self._note)

    def _note(self) -> None:
        """Remember what is new for the trends."""
        seen = self._watch.seen
        fresh = [one for one in seen if one.live and self._noted.get(one.address) != one.at]
        self._noted |= {one.address: one.at for one in fresh}
        now = time.monotonic()
        view = self._of(tuple(fresh), now)
        for kind in _KINDS:
            for row in rows_of(Asked(), view, kind):
                self._trends.add(row.key, row.window.product if row.live else None, now)
        if not self._due:
            self._due = True
            self.set_timer(_TOGETHER_SECONDS, self._answers_are_in)

    def _answers_are_in(self) -> None:
        """Of the nodes that answer at about the same time."""
        self._due = False
        view = self._view()
        self._trends.keep(row.key for kind in _KINDS for row in rows_of(Asked(), view, kind))
        self._draw()

    def _view(self) -> View:
        return self._of(self._watch.seen, time.monotonic())

    def _of(self, seen: tuple[Seen, ...], now: float) -> View:
        self._trends.advance(now)
        shown = names(seen, self._signs)
        return View(nodes=seen, now=now, wall=time.time(), trends=self._trends, signs=self._signs, names=shown)

    def _beat(self) -> None:
        self._draw()

    def _draw(self) -> None:
        width, height = self.size
        self._drawn = screen(self._asked, self._held or self._view(), width=width, height=height)
        self._canvas.show(self._drawn.lines)


def _end_with(terminal: int) -> None:
    """End this process when its terminal hangs up, as where an ssh is cut and no shell is there to tell it.

    From a thread of its own, and by the kernel's hand: whoever reads or writes a dead terminal may wait for ever.
    """
    waiting = select.poll()
    waiting.register(terminal, 0)
    while not any(said & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, said in waiting.poll()):
        pass
    os.kill(os.getpid(), signal.SIGHUP)


def live(places: Sequence[Place], asked: Asked, *, signs: Signs, interval: float, coloured: bool) -> None:
    """Show it until it is left, or the terminal is gone."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, and whoever was started by it, would not hear of the end
    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), name="terminal", daemon=True).start()
    Top(places, asked, signs=signs, interval=interval, coloured=coloured).run(mouse=False)
