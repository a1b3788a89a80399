"""Certificates that Python 3.13's defaults refuse are accepted by this program's clients on every Python."""

import ssl
from pathlib import Path

import pytest

from exporter.tls import client_context, public_context
from tests.certificates import Authority

STRICT = ssl.create_default_context


def strict(*, cafile: str) -> ssl.SSLContext:
    """Return the default context of Python 3.13."""
    context = STRICT(cafile=cafile)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def handshake(client: ssl.SSLContext, certificate: Path, key: Path, *, name: str = "localhost") -> None:
    """Connect the two ends in memory. Raises ssl.SSLError if the client refuses the certificate."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in tuple(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def test_a_certificate_without_the_extensions_of_rfc_5280_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("node")
    monkeypatch.setattr(ssl, "create_default_context", strict)
    with pytest.raises(ssl.SSLCertVerificationError, match="CA cert does not include key usage extension"):
        handshake(strict(cafile=f"{authority.certificate}"), certificate, key)
    handshake(client_context(f"{authority.certificate}"), certificate, key)


def test_an_authority_that_the_system_trusts_is_trusted_beside_those_of_httpx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    authority = Authority(tmp_path)
    certificate, key = authority.issue("node")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(public_context(), certificate, key)

    def load(context: ssl.SSLContext) -> None:
        """Stand in for the store of a system to which an administrator added the authority."""
        context.load_verify_locations(f"{authority.certificate}")

    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", load)
    context = public_context()
    handshake(context, certificate, key)
    assert len(context.get_ca_certs()) > 10, "those of httpx"


def test_certificates_that_the_environment_names_are_all_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, named = Authority(tmp_path), Authority(tmp_path, "other")
    monkeypatch.setenv("SSL_CERT_FILE", f"{named.certificate}")
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)

    def load(context: ssl.SSLContext) -> None:
        """Stand in for the store of a system to which an administrator added the authority."""
        context.load_verify_locations(f"{authority.certificate}")

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", load)
    assert len(public_context().get_ca_certs()) == 1


def test_another_authority_and_another_name_are_refused(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    certificate, key = authority.issue("node")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|unable to get local issuer"):
        handshake(client_context(f"{other.certificate}"), certificate, key)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client_context(f"{authority.certificate}"), certificate, key, name="other.example")
