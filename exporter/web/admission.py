"""Decides whose new connections are accepted and whose requests wait, so that a crowd leaves time for known scrapers.

A regular is an address that has been served for a minute; while it asks for no more than a scraper does, it has its own
allowance. All others are the crowd and share one, while there is a regular to leave time for. Those of the crowd that
have asked for little lately share a small allowance of their own before that. Has no sockets and no clock: the caller
passes the time.
"""

from msgspec import Struct

from exporter.connections import AddressBuckets, TokenBucket, client_network
from exporter.web.limits import ConnectionLimits

_REGULAR_SECONDS, _MOST_KNOWN = 60.0, 256
_FORGET_SECONDS = 3600.0
"""An address that was not served for so long, which no scraper is, makes room for another."""


class _Allowances(Struct, eq=False):
    """How many connections are accepted, or requests are handled, beside a regular."""

    modest: AddressBuckets
    """What each address may ask for before it is one of the crowd."""
    newcomers: TokenBucket
    crowd: TokenBucket


def _allowances(limits: ConnectionLimits) -> _Allowances:
    return _Allowances(
        AddressBuckets(limits.modest_burst, limits.modest_per_second),
        TokenBucket(limits.newcomers_burst, limits.newcomers_per_second),
        TokenBucket(limits.crowd_burst, limits.crowd_per_second),
    )


class Admission:
    """Knows the regulars, and what each address and the crowd have asked for lately."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """Begin without a regular."""
        self._new_connections = AddressBuckets(limits.new_burst, limits.new_per_second)
        self._requests = AddressBuckets(limits.requests_burst, limits.requests_per_second)
        self._connections_beside, self._requests_beside = _allowances(limits), _allowances(limits)
        self._served_since: dict[str, float] = {}
        """When what each address asked for was first answered; refusals and probes do not count."""
        self._served_at: dict[str, float] = {}
        """When it was last answered; the latest is last."""

    def admits(self, address: str, now: float) -> bool:
        """Return whether the address may open another connection at `now`, seconds of time.monotonic()."""
        if not self._new_connections.bucket_of(address).take(now):
            return False
        shared = self._shared(self._connections_beside, address, now)
        return shared is None or shared.take(now)

    def request_delay(self, address: str, now: float) -> float:
        """Return the seconds that a request of the address waits."""
        own, shared = self._requests.bucket_of(address).wait(now), self._shared(self._requests_beside, address, now)
        return own if shared is None else max(own, shared.wait(now))

    def note_served(self, address: str, now: float) -> None:
        """Note that a request of the address was answered.

        Of too many addresses, the one that was served longest ago is forgotten if that was long ago, else the new one:
        a flood from many addresses displaces no scraper.
        """
        network = client_network(address)
        self._served_since.setdefault(network, now)
        self._served_at.pop(network, None)
        self._served_at[network] = now
        if len(self._served_at) > _MOST_KNOWN:
            quiet = next(iter(self._served_at))
            gone = quiet if now - self._served_at[quiet] >= _FORGET_SECONDS else network
            del self._served_since[gone], self._served_at[gone]

    def is_regular(self, address: str, now: float) -> bool:
        """Return whether the address was served long ago and is remembered: a scraper keeps its place in a flood."""
        return now - self._served_since.get(client_network(address), now) >= _REGULAR_SECONDS

    def _shared(self, beside: _Allowances, address: str, now: float) -> TokenBucket | None:
        """Return the allowance that what the address asks for is taken from; None: its own is enough."""
        network, own = client_network(address), beside.modest.bucket_of(address)
        asked_little = own.available(now) >= own.burst / 2
        of_scraper = own.take(now) and self.is_regular(network, now)
        other = next((known for known in self._served_since if known != network), network)
        if of_scraper or other == network or not self.is_regular(other, now):
            return None
        return beside.newcomers if asked_little and beside.newcomers.available(now) >= 1 else beside.crowd
