"""Completes addresses that are given where a URL is expected: host:port is short for http://host:port."""

import re

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://|unix:", re.IGNORECASE)


def complete_url(address: str, *, scheme: str = "http") -> str:
    """Return the address with `scheme` before it, unless it is empty, has a scheme, or is a unix socket."""
    if not address or _SCHEME.match(address):
        return address
    return f"{scheme}://{address.removeprefix('//')}"
