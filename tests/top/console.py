"""A driver for Textual without Unix' terminals: writes to standard error, reads lines of keys from standard input.

Stands in for the driver of Windows' console where `TEXTUAL_DRIVER` names it.
"""

import sys
import threading

from textual.drivers.headless_driver import HeadlessDriver
from textual.events import Key


class Console(HeadlessDriver):
    """Draws what the headless driver does not; its size is that of the terminal."""

    is_headless = False

    def write(self, data: str) -> None:
        """Write to the terminal."""
        sys.__stderr__.write(data)  # type: ignore[union-attr]

    def flush(self) -> None:
        """Write all of it."""
        sys.__stderr__.flush()  # type: ignore[union-attr]

    def start_application_mode(self) -> None:
        """Begin, and wait for keys in a thread."""
        super().start_application_mode()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.__stdin__:  # type: ignore[union-attr]
            for key in line.strip():
                self.process_message(Key(key, key))
