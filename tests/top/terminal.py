"""Runs a program on a pseudo-terminal, and interprets its output with pyte as xterm would.

Owns the process, its keys and its size. Refuses to judge what is on the screen. Used by the tests of `top` and by
what draws its pictures for the documents.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pyte

from tests.waiting import PATIENCE

ENTER, ESCAPE, TAB, UP, DOWN = "\r", "\x1b", "\t", "\x1b[A", "\x1b[B"


class Terminal:
    """A terminal screen and the program that draws on it."""

    def __init__(self, words: list[str], *, screen: pyte.Screen, env: Mapping[str, str]) -> None:
        self.screen, columns, lines = screen, screen.columns, screen.lines
        self._stream = pyte.ByteStream(self.screen)
        self.written = bytearray()
        """All bytes that the program wrote."""
        self.master, theirs = pty.openpty()
        self._set_size(columns, lines)
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env), start_new_session=True
        )
        os.close(theirs)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        """Resize the terminal."""
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)
        self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.master, keys.encode())

    def drain(self, seconds: float = 0.05) -> None:
        """Read what the program writes within this time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                return
            try:
                got = os.read(self.master, 65536)
            except OSError:  # the other end is closed
                return
            self.written += got
            self._stream.feed(got)

    @property
    def text(self) -> str:
        """The screen's content as text."""
        return "\n".join(self.screen.display)

    def until(self, true: Callable[[str], object], what: str) -> str:
        """Wait until the predicate holds for the screen's text, and return the text; not beyond the program's end."""
        deadline = time.monotonic() + PATIENCE
        ended = False
        while not true(self.text):
            assert not ended, f"{what}: not so when the program ended; the screen:\n{self.text}"
            assert time.monotonic() < deadline, f"{what}: not so after {PATIENCE:g} s; the screen:\n{self.text}"
            ended = self.process.poll() is not None  # before the rest of its output is read
            self.drain()
        return self.text

    def shows(self, *words: str) -> str:
        """Wait until the screen contains all of these texts."""
        return self.until(lambda text: all(word in text for word in words), f"it shows {words}")

    def hides(self, *words: str) -> str:
        """Wait until the screen contains none of these texts."""
        return self.until(lambda text: not any(word in text for word in words), f"it does not show {words}")

    def ended(self) -> int:
        """Wait for the program to end; returns its exit status."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it has not ended; the screen:\n{self.text}"
            self.drain()
        self.drain()
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal, as when a connection breaks."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self.master)
        os.close(nowhere)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@contextmanager
def terminal(
    words: list[str],
    *,
    columns: int = 80,
    lines: int = 24,
    env: Mapping[str, str],
    kind: type[pyte.Screen] = pyte.Screen,
) -> Iterator[Terminal]:
    """Run a program on a terminal while the block runs."""
    made = Terminal(words, screen=kind(columns, lines), env={"TERM": "xterm-256color", **env})
    try:
        yield made
    finally:
        made.close()
