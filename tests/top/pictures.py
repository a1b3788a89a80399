"""Draws docs/pictures/top-*.svg: the real command on a terminal, before a real daemon (python -m tests.top.pictures).

Owns what each picture shows, and how a terminal's screen becomes SVG. The node is simulated and its trace runs at many
times its pace, so that a minute of watching is hours of its story; nothing on the screen is drawn by hand.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from itertools import groupby
from pathlib import Path

import pyte
from msgspec import Struct
from pyte.screens import Char

from tests.e2e.running import ROOT, command, daemon, environment
from tests.top.terminal import ENTER, Terminal, terminal

FOLDER = ROOT / "docs" / "pictures"
SPEED = 240
"""Replay speed; the simulated hang occurs after three hours."""
_CELL, _LINE, _BASE = 8.0, 17.0, 12.5
_PAD, _TITLE = 14.0, 26.0
_COLOURS = {
    "default": "#d3d7de", "brightblack": "#868d99", "red": "#e5735a", "brightred": "#ff8272", "yellow": "#dfae3a",
    "brown": "#dfae3a", "magenta": "#b48ae0", "brightmagenta": "#d3a6f7", "brightblue": "#5ea8f2",
    "blue": "#5ea8f2", "green": "#4fbf93",
}  # fmt: skip
_GROUND, _FRAME, _CHOSEN = "#15171c", "#2b2f38", "#c9ced8"
_FONT = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13.2"'
_SHADES = {"█": 1.0, "▓": 0.75, "▒": 0.5, "░": 0.28}
_EIGHTHS = "▁▂▃▄▅▆▇"
_SHAPES = {*_SHADES, *_EIGHTHS}


class Picture(Struct, frozen=True):
    """A picture and what it shows."""

    name: str
    columns: int
    lines: int
    keys: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """Texts that must be on the screen."""
    last: tuple[str, ...] = ()
    """Keys pressed before the picture is taken."""


PICTURES = (
    Picture("top-80x24", 80, 24, ("j",) * 6, ("GPU 6",)),
    Picture("top-200x60", 200, 60, ("j",) * 6, ("GPU 6",)),
    Picture("top-job-80x24", 80, 24, ("j",) * 6, ("job 41010 on", "total"), (ENTER,)),
)


class Faint(pyte.Screen):
    """pyte knows no faint text: here it is grey. Subclassed, for pyte has no other way to add an attribute."""

    def select_graphic_rendition(self, *attrs: int) -> None:
        """As pyte, and 2 as well."""
        super().select_graphic_rendition(*(90 if attr == 2 else attr for attr in attrs))


def main() -> int:
    """Draw all pictures; returns the exit status 0."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, _node(Path(folder)) as url, ExitStack() as stack:
        words, env = command("top", "--url", url, "--interval", "0.5"), environment(LANG="C.UTF-8")
        shown = [
            stack.enter_context(terminal(words, env=env, kind=Faint, columns=one.columns, lines=one.lines))
            for one in PICTURES
        ]
        for picture, one in zip(PICTURES, shown, strict=True):
            _press(picture, one)
        _until_hung(shown)
        for picture, one in zip(PICTURES, shown, strict=True):
            for key in picture.last:
                one.press(key)
            one.shows(*picture.words)
            one.drain(0.5)
            (FOLDER / f"{picture.name}.svg").write_text(svg(one.screen), encoding="utf-8")
    return 0


def _until_hung(shown: list[Terminal]) -> None:
    """Wait until the simulation shows something. Reads all terminals, because a full buffer blocks them."""
    deadline = time.monotonic() + 120
    while "■ hung" not in shown[0].text:
        assert time.monotonic() < deadline, shown[0].text
        for one in shown:
            one.drain()


@contextmanager
def _node(folder: Path) -> Iterator[str]:
    """Run a daemon that replays a simulated node."""
    trace = folder / "trace.jsonl"
    subprocess.run(command("simulate", "demo", "-o", f"{trace}"), check=True, env=environment())
    with daemon(folder, "replay", f"{trace}", "--serve", "--speed", f"{SPEED}") as served:
        yield served.url


def _press(picture: Picture, shown: Terminal) -> None:
    shown.shows("GPU 0", "q quit")
    for key in picture.keys:
        shown.press(key)
        shown.drain(0.3)


def svg(screen: pyte.Screen) -> str:
    """Draw the screen in a frame. Bars and trends are drawn as shapes, so that they have no gaps in any font."""
    width, height = 2 * _PAD + screen.columns * _CELL, _TITLE + _PAD + screen.lines * _LINE
    rows = "".join(_row(screen, y) for y in range(screen.lines))
    dots = "".join(f'<circle cx="{18 + 16 * n}" cy="{_TITLE / 2}" r="4.5" fill="#4a505c"/>' for n in range(3))
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} shape-rendering="crispEdges" {_FONT}>\n'
        f"<title>gpu-efficiency top on a terminal of {screen.columns} x {screen.lines}</title>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{_GROUND}"/>\n'
        f'<path d="M0 {_TITLE}V8a8 8 0 0 1 8-8h{width - 16:g}a8 8 0 0 1 8 8V{_TITLE}z" fill="{_FRAME}"/>{dots}\n'
        f"{rows}</svg>\n"
    )


def _row(screen: pyte.Screen, y: int) -> str:
    cells = [screen.buffer[y][x] for x in range(screen.columns)]
    top, drawn, x = _TITLE + 4 + y * _LINE, "", 0
    for look, run in groupby(cells, key=_look):
        text = "".join(cell.data for cell in run)
        drawn += _run(text, look, x=_PAD + x * _CELL, top=top)
        x += len(text)
    return drawn + "\n" if drawn else ""


def _look(cell: Char) -> tuple[str, bool, bool, bool]:
    """Return colour, bold, inverted, and whether the cell is a shape."""
    return _COLOURS[cell.fg], cell.bold, cell.reverse, cell.data in _SHAPES


def _run(text: str, look: tuple[str, bool, bool, bool], *, x: float, top: float) -> str:
    """Group adjacent cells of the same style."""
    colour, bold, chosen, shape = look
    width = len(text) * _CELL
    ground = f'<rect x="{x:g}" y="{top:g}" width="{width:g}" height="{_LINE:g}" fill="{_CHOSEN}"/>' if chosen else ""
    colour = _GROUND if chosen else colour
    if shape:
        return ground + "".join(_shape(sign, len(list(run)), colour, x=x, top=top) for x, sign, run in _placed(text, x))
    if not text.strip():
        return ground
    weight = ' font-weight="bold"' if bold else ""
    lead = len(text) - len(text.lstrip())
    word = text.strip()
    return (
        f'{ground}<text x="{x + lead * _CELL:g}" y="{top + _BASE:g}" textLength="{len(word) * _CELL:g}" '
        f'fill="{colour}"{weight} xml:space="preserve">{escape(word)}</text>'
    )


def _placed(text: str, x: float) -> Iterator[tuple[float, str, list[str]]]:
    for sign, run in groupby(text):
        same = list(run)
        yield x, sign, same
        x += len(same) * _CELL


def _shape(sign: str, count: int, colour: str, *, x: float, top: float) -> str:
    """Draw part of a bar, or one column of a trend."""
    share = (_EIGHTHS.index(sign) + 1) / 8 if sign in _EIGHTHS else 1.0
    high = (_LINE - 3) * share
    opacity = f' fill-opacity="{_SHADES[sign]:g}"' if _SHADES.get(sign, 1.0) < 1 else ""
    place = f'x="{x:g}" y="{top + _LINE - 2 - high:g}" width="{count * _CELL:g}" height="{high:g}"'
    return f'<rect {place} fill="{colour}"{opacity}/>'


if __name__ == "__main__":
    sys.exit(main())
