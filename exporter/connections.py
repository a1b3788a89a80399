"""Computes connection time limits, which connections to close when there are too many, and rate limits per client.

Used by every server of this daemon. Refuses sockets, clocks and event loops: the caller passes the time.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeVar

from msgspec import Struct

One = TypeVar("One", bound=Hashable)
_V6_HOST = 64
"""Bits of an IPv6 address that one machine may choose as it likes."""


class Deadline(Struct, eq=False):
    """What a connection is waited for, in seconds as time.monotonic gives them."""

    since: float
    """When it was made, or did its last whole thing."""
    allowed: float
    """How long the next may take."""

    def restart(self, now: float, allowed: float) -> None:
        """Wait for something else from now on."""
        self.since, self.allowed = now, allowed

    def used_share(self, now: float) -> float:
        """Share of the allowed time that is gone; 1 and more: overdue."""
        return (now - self.since) / self.allowed


def overdue(deadlines: Mapping[One, Deadline], now: float) -> list[One]:
    """Those that have used up their time."""
    return [one for one, deadline in deadlines.items() if deadline.used_share(now) > 1]


def surplus(ones: Collection[One], most: int, *, worst: Callable[[One], float]) -> list[One]:
    """Those beyond `most`, the worst of all first."""
    return sorted(ones, key=worst, reverse=True)[: len(ones) - most] if len(ones) > most else []


class TokenBucket(Struct, eq=False):
    """So many at once, and so many a second."""

    burst: float
    per_second: float
    tokens: float = -1.0
    """Of the burst; below 0: all, for nobody has taken any."""
    updated_at: float = 0.0

    def take(self, now: float) -> bool:
        """Take one if there is one."""
        available = (
            self.burst if self.tokens < 0 else min(self.burst, self.tokens + (now - self.updated_at) * self.per_second)
        )
        taken = available >= 1
        self.tokens, self.updated_at = available - taken, now
        return taken

    def refund(self) -> None:
        """Give one back: it was not what is counted."""
        self.tokens += 1


class AddressBuckets(Struct, eq=False):
    """A bucket for each address, for the latest `most` of them."""

    burst: float
    per_second: float
    most: int = 1024
    by_address: dict[str, TokenBucket] = {}

    def bucket_of(self, address: str) -> TokenBucket:
        """Give the address's own; the one not asked for longest is forgotten."""
        group = client_network(address)
        bucket = self.by_address.pop(group, None) or TokenBucket(self.burst, self.per_second)
        self.by_address[group] = bucket
        if len(self.by_address) > self.most:
            del self.by_address[next(iter(self.by_address))]
        return bucket


def client_network(address: str) -> str:
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
