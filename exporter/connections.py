"""How long a connection may keep a server waiting, who leaves when there are too many, and how often one may try.

Owns the arithmetic, for every server of this daemon. Refuses sockets, clocks and loops: who calls brings the time.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeVar

from msgspec import Struct

One = TypeVar("One", bound=Hashable)
_V6_HOST = 64
"""Bits of an IPv6 address that one machine may choose as it likes."""


class Wait(Struct, eq=False):
    """What a connection is waited for, in seconds as time.monotonic gives them."""

    since: float
    """When it was made, or did its last whole thing."""
    allowed: float
    """How long the next may take."""

    def begin(self, now: float, allowed: float) -> None:
        """Wait for something else from now on."""
        self.since, self.allowed = now, allowed

    def spent(self, now: float) -> float:
        """Share of the allowed time that is gone; 1 and more: overdue."""
        return (now - self.since) / self.allowed


def overdue(waits: Mapping[One, Wait], now: float) -> list[One]:
    """Those that have used up their time."""
    return [one for one, wait in waits.items() if wait.spent(now) > 1]


def surplus(ones: Collection[One], most: int, *, worst: Callable[[One], float]) -> list[One]:
    """Those beyond `most`, the worst of all first."""
    return sorted(ones, key=worst, reverse=True)[: len(ones) - most] if len(ones) > most else []


class Bucket(Struct, eq=False):
    """So many at once, and so many a second."""

    burst: float
    per_second: float
    left: float = -1.0
    """Of the burst; below 0: all, for nobody has taken any."""
    at: float = 0.0

    def take(self, now: float) -> bool:
        """Take one if there is one."""
        kept = self.burst if self.left < 0 else min(self.burst, self.left + (now - self.at) * self.per_second)
        taken = kept >= 1
        self.left, self.at = kept - taken, now
        return taken

    def refund(self) -> None:
        """Give one back: it was not what is counted."""
        self.left += 1


class Buckets(Struct, eq=False):
    """A bucket for each address, for the latest `most` of them."""

    burst: float
    per_second: float
    most: int = 1024
    of: dict[str, Bucket] = {}

    def at(self, address: str) -> Bucket:
        """Give the address's own; the one not asked for longest is forgotten."""
        group = household(address)
        bucket = self.of.pop(group, None) or Bucket(self.burst, self.per_second)
        self.of[group] = bucket
        if len(self.of) > self.most:
            del self.of[next(iter(self.of))]
        return bucket


def household(address: str) -> str:
    """What counts as one sender: an IPv4 address, or the 64 bits of an IPv6 network that a host has to itself."""
    known = plain_address(address)
    if not isinstance(known, IPv6Address):
        return address if known is None else f"{known}"
    return f"{IPv6Address(int(known) >> _V6_HOST << _V6_HOST)}/{_V6_HOST}"


def is_loopback(address: str) -> bool:
    """True for an address of the loopback; what is no address is none of it."""
    known = plain_address(address)
    return known is not None and known.is_loopback


def plain_address(text: str) -> IPv4Address | IPv6Address | None:
    """Read an address; one of IPv4 in IPv6's clothes, as sockets for both give it, is of IPv4. None: no address."""
    try:
        known = ip_address(text)
    except ValueError:
        return None
    mapped = known.ipv4_mapped if isinstance(known, IPv6Address) else None
    return mapped or known
