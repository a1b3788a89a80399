"""Debian's Chromium without a window, spoken to through its debugging pipe: no port is open, no library is needed.

The protocol is one JSON object a message, each ended by a null byte, on file descriptors 3 and 4
(chromedevtools.github.io/devtools-protocol, --remote-debugging-pipe).
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

MISSING = "needs Chromium"
"""Why a test is skipped where Debian's package is not there."""
_PATIENCE = 60.0
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def installed() -> bool:
    """Whether there is one."""
    return shutil.which("chromium") is not None


class Browser:
    """One tab. What it complains of is kept."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.asked_for: list[str] = []
        """Every address that it wanted to load."""
        self._loaded: list[str] = []

    def attach(self) -> None:
        """To a new tab, listening for errors, violations of policies and requests."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def open(self, address: str, *, width: int = 1280, dark: bool = False) -> None:
        """Load a page and wait until this very load is done: the page before may have loaded itself anew meanwhile."""
        self.resize(width, dark=dark)
        self._loaded.clear()
        said = self.call("Page.navigate", url=address)
        assert "errorText" not in said, (address, said)
        while said["loaderId"] not in self._loaded:
            self._note(self._hear())

    def resize(self, width: int, *, dark: bool = False) -> None:
        """As wide as a desk's window, or a phone."""
        phone = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=844 if phone else 900,
                  deviceScaleFactor=1, mobile=phone)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])

    def value(self, expression: str) -> Any:
        """Of JavaScript, asked by the debugger: the page's own policy does not hold for it."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def picture(self) -> bytes:
        """All of the page, PNG."""
        said = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(said["data"])

    def paper(self) -> bytes:
        """As it is printed, PDF; of the size that the page asks for."""
        said = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        return base64.b64decode(said["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask, and take what happens meanwhile."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (heard := self._hear()).get("id") != self._number:
            self._note(heard)
        assert "error" not in heard, heard
        result: dict[str, Any] = heard["result"]
        return result

    def _hear(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser is gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, heard: Mapping[str, Any]) -> None:
        method, params = heard.get("method", ""), heard.get("params", _NOTHING)
        if method == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.append(params["loaderId"])
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Audits.issueAdded"):
            self.complaints.append(json.dumps(params))
        if method == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Its profile is in `folder`."""
    down, up = os.pipe(), os.pipe()
    os.set_inheritable(down[0], True)  # noqa: FBT003  the standard library's
    os.set_inheritable(up[1], True)  # noqa: FBT003
    command = [
        "/bin/bash", "-c", 'exec "$0" "$@" 3<&' + f"{down[0]} 4>&{up[1]}", "chromium", "--headless=new", "--no-sandbox",
        "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
        "--disable-component-update", "--disable-background-networking", "--force-color-profile=srgb",
        "--font-render-hinting=none", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, pass_fds=(down[0], up[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(down[0])
    os.close(up[1])
    try:
        tab = Browser(down[1], up[0])
        tab.attach()
        yield tab
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(down[1])
        os.close(up[0])
