"""Makes the TLS contexts of this program's HTTPS clients."""

import os
import ssl
from pathlib import Path


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts the certificates in a file, or the system's. Raises OSError (ssl.SSLError is one).

    The same on every Python: 3.13 began to set VERIFY_X509_STRICT, which refuses certificates without some extensions
    of RFC 5280, although their signatures and names are right. Those of older EKS clusters
    (tomplus/kubernetes_asyncio#349) and of `openssl req -x509` are such; Go, curl and Python 3.12 accept them.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def public_context() -> ssl.SSLContext:
    """Return such a context that trusts the system's certificates, and those that httpx brings: a system may have none.

    httpx alone trusts no private authority that an administrator added to the system. Where SSL_CERT_FILE or
    SSL_CERT_DIR is set, httpx loads that, and nothing else is trusted.
    """
    import httpx  # noqa: PLC0415  an HTTP client is 13 MiB, which a daemon may not need

    context = httpx.create_ssl_context()
    if not (os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")):
        context.load_default_certs()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def server_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that trusts the authorities in a file alone, or the public ones. Raises OSError.

    It takes tens of milliseconds: make one for all servers.
    """
    return public_context() if ca_file is None else client_context(f"{ca_file}")
