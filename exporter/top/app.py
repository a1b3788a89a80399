"""Runs the live view in Textual: colours, keyboard events, redraws. The only module that imports Textual.

Textual's App and Widget are subclassed because it has no other interface. Redraws only the lines that changed.
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

from exporter.colours import LAYERS, STATES, TERMINAL
from exporter.top.client import NodePollers, NodeTarget
from exporter.top.columns import LOUD_STATES, ListKind
from exporter.top.screen import RenderedScreen, ViewState, handle_key, list_rows, render_screen
from exporter.top.view import Glyphs, PolledNode, StyledLine, TopView, Trends, node_names

_PLAIN_STYLES = {name: Style(bold=True) for name in ("strong", "bad", *LOUD_STATES)} | {"soft": Style(dim=True)}
_COLOUR_STYLES = (
    {name: Style(dim=True) for name in ("soft", *LAYERS, *STATES)}
    | {name: Style(color=colour, bold=name in LOUD_STATES) for name, colour in TERMINAL.items()}
    | {"strong": Style(bold=True), "bad": Style(color="bright_red", bold=True)}
)
"""The terminal's sixteen colours for layers and states, each used with a name, symbol or pattern of its own."""
_NO_STYLE, _BOLD, _SELECTED = Style(), Style(bold=True), Style(reverse=True)
_REDRAW_SECONDS, _BATCH_SECONDS = 1.0, 0.25
_LISTS: tuple[ListKind, ...] = ("gpus", "jobs")


class Canvas(Widget):
    """Draws styled lines; sends only changed lines to the terminal."""

    can_focus = True

    def __init__(self, *, coloured: bool) -> None:
        super().__init__()
        self._lines: list[StyledLine] = []
        self._style_table = _COLOUR_STYLES if coloured else _PLAIN_STYLES

    def show(self, lines: list[StyledLine]) -> None:
        """Show these lines."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        changed = [row for row, (old, new) in enumerate(zip(before, lines, strict=True)) if old != new]
        if changed:
            self.refresh(*(Region(0, row, self.size.width, 1) for row in changed))

    def render_line(self, y: int) -> Strip:
        """Render one line for Textual."""
        width = self.size.width
        line = self._lines[y] if y < len(self._lines) else StyledLine()
        styles = {"strong": _BOLD} if line.selected else self._style_table
        segments = [Segment(text, styles.get(style, _NO_STYLE)) for text, style in line.segments]
        strip = Strip(segments).adjust_cell_length(width)
        return strip.apply_style(_SELECTED) if line.selected else strip


class TopApp(App[None]):
    """The live view as a Textual application."""

    CSS = "Screen, Canvas { background: ansi_default; color: ansi_default; } Canvas { width: 100%; height: 100%; }"
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self, targets: Sequence[NodeTarget], state: ViewState, *, glyphs: Glyphs, interval: float, coloured: bool
    ) -> None:
        super().__init__(ansi_color=True)
        self._view_state, self._glyphs = state, glyphs
        self._pollers = NodePollers(targets, interval=interval, changed=self._answer_arrived)
        self._trends = Trends(time.monotonic(), 2 * interval)
        self._last_answered: dict[str, float] = {}
        self._frozen_view: TopView | None = None
        self._redraw_pending = False
        self._canvas = Canvas(coloured=coloured)
        self._drawn_screen: RenderedScreen | None = None

    def compose(self) -> ComposeResult:
        """Return the only widget."""
        yield self._canvas

    def on_mount(self) -> None:
        """Start polling and redrawing."""
        self._canvas.focus()
        self.set_interval(_REDRAW_SECONDS, self._draw)
        self._pollers.start()

    def on_unmount(self) -> None:
        """Stop polling."""
        self._pollers.stop()

    def on_resize(self) -> None:
        """Redraw at the new size, once Textual has applied it."""
        self.call_after_refresh(self._draw)

    def on_paste(self, event: Paste) -> None:
        """Add the first pasted line to the filter; pasted text never acts as keys."""
        if self._view_state.typing:
            for char in event.text.splitlines()[0] if event.text else "":
                self._press("", char)

    async def on_event(self, event: Event) -> None:
        """Handle all keys, including those that Textual would use itself."""
        if isinstance(event, KeyPress) and event.key == "ctrl+z":
            self.action_suspend_process()
        elif isinstance(event, KeyPress):
            self._press(event.key, event.character)
        else:
            await super().on_event(event)

    def _press(self, key: str, char: str | None) -> None:
        if self._drawn_screen is None:
            return
        state = (
            replace(self._view_state, chosen=self._drawn_screen.selected)
            if not self._view_state.opened
            else self._view_state
        )
        self._view_state = handle_key(state, key, self._drawn_screen.context, char=char)
        if self._view_state.quit:
            self.exit()
            return
        self._frozen_view = (self._frozen_view or self._current_view()) if self._view_state.held else None
        opened = self._view_state.opened
        self._pollers.request_receipts(opened[2] if opened and opened[0] == "job" else "")
        self._draw()

    def _answer_arrived(self) -> None:
        """Handle a poll; called on a node's polling thread."""
        with suppress(RuntimeError):  # the application is closing
            self.call_from_thread(self._record_trends)

    def _record_trends(self) -> None:
        """Add new values to the trends."""
        nodes = self._pollers.states
        fresh = [node for node in nodes if node.live and self._last_answered.get(node.address) != node.at]
        self._last_answered |= {node.address: node.at for node in fresh}
        now = time.monotonic()
        view = self._build_view(tuple(fresh), now)
        for kind in _LISTS:
            for row in list_rows(ViewState(), view, kind):
                self._trends.add(row.key, row.window.product if row.live else None, now)
        if not self._redraw_pending:
            self._redraw_pending = True
            self.set_timer(_BATCH_SECONDS, self._redraw_batch)

    def _redraw_batch(self) -> None:
        """Redraw once for nodes that respond at about the same time."""
        self._redraw_pending = False
        view = self._current_view()
        self._trends.retain(row.key for kind in _LISTS for row in list_rows(ViewState(), view, kind))
        self._draw()

    def _current_view(self) -> TopView:
        return self._build_view(self._pollers.states, time.monotonic())

    def _build_view(self, nodes: tuple[PolledNode, ...], now: float) -> TopView:
        self._trends.advance(now)
        labels = node_names(nodes, self._glyphs)
        return TopView(nodes=nodes, now=now, wall=time.time(), trends=self._trends, glyphs=self._glyphs, names=labels)

    def _draw(self) -> None:
        width, height = self.size
        self._drawn_screen = render_screen(
            self._view_state, self._frozen_view or self._current_view(), width=width, height=height
        )
        self._canvas.show(self._drawn_screen.lines)


def _exit_on_hangup(terminal: int) -> None:
    """End this process when its terminal hangs up, for example when an ssh connection breaks without a shell.

    Runs in its own thread and sends SIGHUP, because a read or write on a dead terminal may block forever.
    """
    poller = select.poll()
    poller.register(terminal, 0)
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poller.poll()):
        pass
    os.kill(os.getpid(), signal.SIGHUP)


def run_live(
    targets: Sequence[NodeTarget], state: ViewState, *, glyphs: Glyphs, interval: float, coloured: bool
) -> None:
    """Run the live view until the user quits or the terminal hangs up."""
    if hasattr(signal, "SIGHUP"):  # Windows itself ends the programs of a console that is closed
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup SIGHUP is ignored
        threading.Thread(target=_exit_on_hangup, args=(sys.stdin.fileno(),), name="terminal", daemon=True).start()
    TopApp(targets, state, glyphs=glyphs, interval=interval, coloured=coloured).run(mouse=False)
