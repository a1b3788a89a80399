"""Computes connection time limits, which connections to close when there are too many, and rate limits per client.

Used by every server of this daemon. Has no sockets and no clock: the caller passes the time.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import lru_cache
from heapq import nlargest
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import inf
from typing import Any, Generic, TypeVar

from msgspec import Struct

Key = TypeVar("Key", bound=Hashable)
_V6_HOST = 64
"""Bits of an IPv6 address that a host can choose freely."""


class Deadline(Struct, eq=False):
    """Time limit of a connection's next operation, in seconds of time.monotonic()."""

    since: float
    """Start of the connection, or end of its last operation."""
    allowed: float
    """Time allowed for the next operation."""

    def restart(self, now: float, allowed: float) -> None:
        """Start a new time limit now."""
        self.since, self.allowed = now, allowed

    def used_share(self, now: float) -> float:
        """Share of the allowed time that has passed; above 1: overdue."""
        return (now - self.since) / self.allowed


def overdue(deadlines: Mapping[Key, Deadline], now: float) -> list[Key]:
    """Connections past their deadline."""
    return [connection for connection, deadline in deadlines.items() if deadline.used_share(now) > 1]


def surplus(connections: Collection[Key], most: int, *, worst: Callable[[Key], Any]) -> list[Key]:
    """Connections to close when there are more than `most`: those with the highest `worst`, highest first."""
    excess = len(connections) - most
    return nlargest(excess, connections, key=worst) if excess > 0 else []  # ranking all of them takes time


class TokenBucket(Struct, eq=False):
    """A token bucket: limits a rate to `rate` tokens per unit of time on average, and to `burst` at once."""

    burst: float
    rate: float
    tokens: float = inf
    """Tokens left at `updated_at`, limited to `burst`; infinite: the bucket is new and full."""
    updated_at: float = 0.0

    def available(self, now: float) -> float:
        """Return the tokens that are left at `now`."""
        self.tokens, self.updated_at = min(self.burst, self.tokens + (now - self.updated_at) * self.rate), now
        return self.tokens

    def spend(self, tokens: float) -> None:
        """Take tokens that are available."""
        self.tokens -= tokens

    def wait(self, now: float) -> float:
        """Take a token, if none is left of those to come; return the time until it comes."""
        left = self.available(now) - 1
        self.spend(1)
        return max(0.0, -left) / self.rate

    def take(self, now: float) -> bool:
        """Take a token; returns False if none is left."""
        taken = self.available(now) >= 1
        self.spend(taken)
        return taken

    def refund(self) -> None:
        """Return a token that turned out not to count."""
        self.tokens += 1


class Buckets(Struct, Generic[Key], eq=False):
    """One token bucket per key, for the `most` most recently used keys."""

    burst: float
    rate: float
    most: int = 1024
    by_key: dict[Key, TokenBucket] = {}

    def of(self, key: Key) -> TokenBucket:
        """Return the key's bucket; evicts the least recently used one above the maximum."""
        bucket = self.by_key.pop(key, None) or TokenBucket(self.burst, self.rate)
        self.by_key[key] = bucket
        if len(self.by_key) > self.most:
            del self.by_key[next(iter(self.by_key))]
        return bucket


class AddressBuckets(Buckets[str]):
    """One token bucket per client address."""

    def bucket_of(self, address: str) -> TokenBucket:
        """Return the address's bucket; see `Buckets.of`."""
        return self.of(client_network(address))


@lru_cache(1024)
def client_network(address: str) -> str:
    """Key by which a client is rate-limited: its IPv4 address, or the /64 network of its IPv6 address."""
    known = plain_address(address)
    if not isinstance(known, IPv6Address):
        return address if known is None else f"{known}"
    return f"{IPv6Address(int(known) >> _V6_HOST << _V6_HOST)}/{_V6_HOST}"


def is_loopback(address: str) -> bool:
    """Whether the text is a loopback address; False if it is not an address."""
    known = plain_address(address)
    return known is not None and known.is_loopback


def plain_address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address; converts an IPv4-mapped IPv6 address to IPv4. None if the text is not an address."""
    try:
        known = ip_address(text)
    except ValueError:
        return None
    mapped = known.ipv4_mapped if isinstance(known, IPv6Address) else None
    return mapped or known
