"""What Debian's Firefox makes of the page and of `report --html`: `python -m tests.e2e.firefox FOLDER`.

By hand: needs the package firefox-esr. It is spoken to by Marionette (firefox-source-docs.mozilla.org,
testing/marionette): JSON with its length before it, on loopback. Pictures are left in FOLDER, to be looked at.
"""

import base64
import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from exporter.report.html import render_html
from exporter.report.text import report_tables
from tests.e2e.running import environment, running
from tests.e2e.test_html_report import OVERLAPS
from tests.e2e.test_page import ASK, CONTRAST, JOB, PULSE, WIDER, node
from tests.ports import free_port
from tests.report import pages
from tests.waiting import wait_for

_WIDTHS = (1280, 390)
_OVERLAPS = OVERLAPS.replace("left - 1", "left - 2").replace("right + 1", "right + 2")
"""Firefox' boxes of words are a pixel wider at either end."""


class Firefox:
    """One window without a screen."""

    def __init__(self, port: int) -> None:
        self._socket = wait_for(lambda: _connected(port), "Firefox listens")
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._read()  # its greeting
        self.version: str = self.call("WebDriver:NewSession")["capabilities"]["browserVersion"]
        self.call("WebDriver:SetWindowRect", width=1500, height=1000)

    def call(self, name: str, **parameters: Any) -> Any:
        """Give a command; return its result. Raises AssertionError with what Firefox says against it."""
        self._number += 1
        message = json.dumps([0, self._number, name, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, number, error, result = self._read()
        assert (number, error) == (self._number, None), error
        return result["value"] if isinstance(result, dict) and set(result) == {"value"} else result

    def open(self, address: str, width: int, *, dark: bool = False) -> None:
        """Load a page so wide: a window has a least width, which a phone's page has not."""
        self.call("Marionette:SetContext", value="chrome")
        scheme = "Services.prefs.setIntPref('layout.css.prefers-color-scheme.content-override', arguments[0])"
        self.call("WebDriver:ExecuteScript", script=scheme, args=[0 if dark else 1])
        style = "gBrowser.selectedBrowser.style"
        narrow = f"{style}.minWidth = arguments[0]; {style}.maxWidth = arguments[0]"
        self.call("WebDriver:ExecuteScript", script=narrow, args=[f"{width}px"])
        self.call("Marionette:SetContext", value="content")
        self.call("WebDriver:Navigate", url=address)
        wait_for(lambda: self.value("innerWidth") == width, f"it is {width} pixels wide")

    def value(self, expression: str) -> Any:
        """Evaluate an expression on the page, outside of what its policy forbids."""
        return self.call("WebDriver:ExecuteScript", script=f"return {expression}", args=[])

    def picture(self, file: Path) -> None:
        """Write what the whole page looks like."""
        file.write_bytes(base64.b64decode(self.call("WebDriver:TakeScreenshot", full=True)))

    def _read(self) -> Any:
        length = b""
        while (byte := self._file.read(1)) != b":":
            assert byte, "Firefox has ended"
            length += byte
        return json.loads(self._file.read(int(length)))


def _connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port))
    except OSError:
        return None


@contextmanager
def firefox(folder: Path) -> Iterator[Firefox]:
    """Run one with a profile in `folder`, until the block ends."""
    port = free_port()
    (folder / "user.js").write_text(f'user_pref("marionette.port", {port});\n')
    words = ["firefox-esr", "--headless", "--marionette", "--remote-allow-system-access", "--profile", f"{folder}"]
    with running(words, folder / "firefox.log", environment(HOME=f"{folder}", MOZ_HEADLESS="1")):
        yield Firefox(port)


def look(window: Firefox, address: str, name: str, folder: Path) -> None:
    """Open a page at each width, in the light and in the dark: all can be read, and nothing reaches beyond the edge."""
    for width in _WIDTHS:
        for dark in (False, True):
            window.open(address, width, dark=dark)
            window.value(
                "document.querySelectorAll('.fall details, .gpu details').forEach((one) => { one.open = true })"
            )
            shape = window.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert shape[0] <= shape[1], (name, shape)
            assert window.value(re.sub(r"^\s+", "", WIDER)) == [], name
            seen, unreadable = window.value(re.sub(r"^\s+", "", CONTRAST))
            assert seen > 5, name
            assert unreadable == [], (name, unreadable)
            window.picture(folder / f"{name}-{width}{'-dark' * dark}.png")


def lives(window: Firefox, address: str) -> None:
    """The page's figures change without a reload, and nothing but its own script runs."""
    window.open(address, _WIDTHS[0])
    window.value("window.wrappedJSObject ? (window.wrappedJSObject.same = true) : (window.same = true)")
    before = window.value(PULSE)
    window.value("document.querySelector('.leak summary').click()")
    window.value(ASK)
    wait_for(lambda: window.value(PULSE) != before, "the page's figures are newer")
    assert window.value(PULSE).startswith("live, as of "), window.value(PULSE)
    assert window.value("document.querySelectorAll('.leak[open], .leak details[open]').length") == 1
    window.value("(() => { const s = document.createElement('script'); s.append('document.title = 1');"
                 " document.body.append(s) })()")  # fmt: skip
    assert window.value("document.title") != "1"


def main() -> int:
    """Return 0 if it does; pictures are in the folder named on the command line."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name, TemporaryDirectory() as profile, firefox(Path(profile)) as window:
        folder = Path(name)
        with node(folder, free_port()) as served:
            look(window, served.url, "page", out)
            look(window, f"{served.url}/jobs/{JOB}", "job", out)
            lives(window, served.url)
        found = pages.full()
        (folder / "report.html").write_text(render_html(found, list(report_tables(found))), encoding="utf-8")
        for width in _WIDTHS:
            window.open(f"file://{folder}/report.html", width)
            assert window.value(_OVERLAPS) == []
        look(window, f"file://{folder}/report.html", "report", out)
        sys.stdout.write(f"Firefox {window.version}: page, job and report at {_WIDTHS} pixels; pictures in {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
