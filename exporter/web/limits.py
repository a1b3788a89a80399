"""Declares limits and timeouts of the web server's connections; docs/security.md has the table."""

from msgspec import Struct


class ConnectionLimits(Struct, frozen=True):
    """Limits and timeouts of connections."""

    connections: int = 128
    """Maximum in total; a node has a handful of clients."""
    per_address: int = 32
    new_burst: float = 100
    """New connections of an address at once; a TLS handshake costs about a millisecond of CPU time."""
    new_per_second: float = 10
    """Sustained rate of new connections of an address."""
    requests_burst: float = 100
    requests_per_second: float = 20
    """Requests of an address before each waits, once others are connected, too: a scraper sends one in seconds."""
    modest_burst: float = 5
    modest_per_second: float = 1
    """New connections of an address that is served regularly, and requests of it, before it is one of the crowd: a
    scraper needs no more."""
    newcomers_burst: float = 5
    newcomers_per_second: float = 5
    """Of the crowd described below, new connections and requests of addresses that have asked for little lately: a
    first login, or a new scraper, does not wait behind those who ask as fast as they can."""
    crowd_burst: float = 10
    crowd_per_second: float = 15
    """New connections of the crowd, which is all addresses that are not served regularly and all that ask for more than
    a scraper, while another is served regularly; and their requests, of which those above wait. Their handshakes and
    responses leave time for a scraper's."""
    handshakes: int = 32
    """Maximum of TLS handshakes in progress; for each asyncio holds a buffer of 256 KiB."""
    handshakes_per_address: int = 8
    handshake_seconds: float = 10
    tls_shutdown_seconds: float = 1
    """Time for TLS close_notify; the connection is closed without it afterwards."""
    request_seconds: float = 10
    """Time from the first byte of a request, or from the start of the connection, to the end of the request."""
    requests_per_address: int = 2
    """Maximum of an address's requests that are handled at once; others of the address wait."""
    answer_seconds: float = 30
    """Time until the client has read the whole response."""
    idle_seconds: float = 75
    """Time between two requests: longer than the usual scrape interval of a minute."""
    refusals_burst: float = 100
    refusals_per_second: float = 10
    """Refused requests of an address (no password, not served) before each is delayed by `refusal_seconds`."""
    refusal_seconds: float = 1
    header_bytes: int = 16 * 1024
    request_bytes: int = 64 * 1024
    """Maximum bytes received for one request; a body is read and ignored."""
    unsent_bytes: int = 32 * 1024 * 1024
    """Maximum of response bytes that clients have not read yet, over all connections."""
