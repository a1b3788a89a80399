"""What guards the server now: certificates, users, headers and limits of a web configuration file, and its changes.

Owns reading the file again when what is in it, or in the certificates it names, has changed. Refuses to let a bad
file open anything: the old one stays in force, and the reason is told once.
"""

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from exporter.config import ConfigError
from exporter.connections import Bucket

if TYPE_CHECKING:
    from ssl import SSLContext

    from exporter.http.passwords import Passwords
    from exporter.http.webfile import Found

log = logging.getLogger(__name__)
LOOK_SECONDS = 3.0
"""Between two looks at the files: some kilobytes each, as few as that can be."""


class Guard(Struct, frozen=True, eq=False):
    """One version of the file, ready for use; without a file nothing is asked of anybody."""

    context: "SSLContext | None" = None
    """TLS for new connections; None: without."""
    passwords: "Passwords | None" = None
    mutual: bool = False
    """Nobody gets through the handshake without a certificate of the client CA."""
    names: frozenset[str] = frozenset()
    """Of which the client's certificate must have one; none: any."""
    headers: tuple[tuple[str, str], ...] = ()
    pace: Bucket | None = None
    note: str = ""
    """What is done otherwise than the file says."""

    @property
    def scheme(self) -> str:
        """Of the address."""
        return "https" if self.context else "http"

    @property
    def authenticates(self) -> bool:
        """Whoever gets an answer has been asked who they are."""
        return self.mutual or self.passwords is not None


class Guarding:
    """The guard that is in force, and the file it comes from."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file; raises ConfigError."""
        self.path = path
        self.now = Guard()
        self.problem = ""
        """Why the file as it is now is not in force; empty while it is."""
        self.reloads = 0
        self._digest = b""
        if path is not None:
            self._take(_gathered(path))

    def look(self) -> None:
        """Take the file anew if it has changed; a bad one is told of once and changes nothing."""
        if self.path is None:
            return
        try:
            found = _gathered(self.path)
            if found.digest != self._digest:
                self._take(found)
                self.reloads += 1
                log.info("%s: taken anew, for new connections", self.path)
            self.problem = ""
        except ConfigError as err:
            if f"{err}" != self.problem:
                log.error("web configuration not taken, the one before stays in force: %s", err)  # noqa: TRY400  for operators
            self.problem = f"{err}"

    def watch(self, stop: threading.Event) -> None:
        """Look every few seconds until told to stop; returns at once where there is no file."""
        while self.path is not None and not stop.wait(LOOK_SECONDS):
            self.look()

    def _take(self, found: "Found") -> None:
        try:
            self.now = guard_of(found)
        except ConfigError as err:
            raise ConfigError(f"{self.path}: {err}") from None
        self._digest = found.digest
        if self.now.note:
            log.warning("%s: %s", self.path, self.now.note)


def guard_of(found: "Found") -> Guard:
    """Make the guard that a file asks for; raises ConfigError."""
    from exporter.http.passwords import Passwords  # noqa: PLC0415  who has no file needs none of this
    from exporter.http.tls import context_of  # noqa: PLC0415
    from exporter.http.webfile import MUTUAL, seconds  # noqa: PLC0415

    file, tls = found.file, found.file.tls_server_config
    context, note = context_of(found)
    interval = seconds(file.rate_limit.interval)
    return Guard(
        context=context,
        passwords=Passwords(file.basic_auth_users) if file.basic_auth_users else None,
        mutual=tls is not None and tls.client_auth_type == MUTUAL,
        names=frozenset(tls.client_allowed_sans if tls else ()),
        headers=tuple(file.http_server_config.headers.items()),
        pace=Bucket(file.rate_limit.burst, 1 / interval) if interval else None,
        note=note,
    )


def _gathered(path: Path) -> "Found":
    from exporter.http.webfile import gather  # noqa: PLC0415  likewise

    return gather(path)
