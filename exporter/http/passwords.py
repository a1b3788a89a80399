"""Basic authentication: whose password is right, at what pace it may be guessed, and what is remembered of it.

Owns the verdict on an Authorization header. Refuses to keep a password, to compute a hash on the event loop, and to
answer faster for a name that nobody has.
"""

import asyncio
import hashlib
import hmac
import os
import time
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from typing import Literal

from exporter.connections import Bucket, Buckets

Verdict = Literal["yes", "no", "later"]
_MOST_BYTES = 72
"""Of a password that bcrypt looks at."""
_WAITING = 16
"""Requests that wait for a hash; it is computed for one at a time."""


class Passwords:
    """The users of one version of the file; the next version has another of these, which remembers nothing."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Take hashes by name, checked already."""
        self._users = {name: word.encode() for name, word in users.items()}
        self._good: dict[str, bytes] = {}
        self._salt = os.urandom(16)
        self._decoy = b"$2b$%02d$" % max(int(word[4:6]) for word in self._users.values()) + b"." * 53
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._each = Buckets(5, 0.5)
        self._all = Bucket(20, 4)

    async def verdict(self, header: str | None, address: str) -> Verdict:
        """Say whether it is a user's; "later": too many were wrong, of `address` or of all, so it was not looked at."""
        given = credentials(header)
        if given is None:
            return "no"
        name, word = given
        digest = self._digest(word)
        if self._known(name, digest):
            return "yes"
        if self._waiting >= _WAITING:
            return "later"
        self._waiting += 1
        try:
            async with self._turn:
                return "yes" if self._known(name, digest) else await self._looked_at(name, word, digest, address)
        finally:
            self._waiting -= 1

    async def _looked_at(self, name: str, word: bytes, digest: bytes, address: str) -> Verdict:
        now, own = time.monotonic(), self._each.at(address)
        if not own.take(now):
            return "later"
        if not self._all.take(now):
            own.refund()
            return "later"
        if not await asyncio.to_thread(_matches, word, self._users.get(name, self._decoy)) or name not in self._users:
            return "no"
        own.refund()
        self._all.refund()
        self._good[name] = digest
        return "yes"

    def _known(self, name: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._good.get(name, b""), digest)

    def _digest(self, word: bytes) -> bytes:
        return hashlib.blake2b(word, key=self._salt).digest()


def credentials(header: str | None) -> tuple[str, bytes] | None:
    """Name and password of a header; None where it has none."""
    kind, _, coded = (header or "").strip().partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        name, colon, word = b64decode(coded.strip(), validate=True).partition(b":")
    except (NotBase64, ValueError):
        return None
    return (name.decode("utf-8", "replace"), word) if colon else None


def _matches(word: bytes, known: bytes) -> bool:
    import bcrypt  # noqa: PLC0415  only where there are users

    try:
        return bcrypt.checkpw(word[:_MOST_BYTES], known)
    except ValueError:  # a zero byte in it
        return False
