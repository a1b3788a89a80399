"""TLS as a web configuration file asks for it, in the words of Python's ssl.

Owns how Go's names for versions, suites and curves become OpenSSL's, and what is said where there is no such thing.
Refuses to write a key anywhere: certificates go to OpenSSL through memory.
"""

import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from typing import Any

from exporter.config import ConfigError
from exporter.http.webfile import MUTUAL, Found, Tls

_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_TLS13 = {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"}
"""Suites of TLS 1.3, which neither Go nor Python lets one choose among."""
_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_CLIENTS = {MUTUAL: ssl.CERT_REQUIRED, "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL}


def context_of(found: Found) -> tuple[ssl.SSLContext | None, str]:
    """Make the context for new connections, None without TLS, and a note of what is done otherwise than it says.

    Raises ConfigError.
    """
    tls = found.file.tls_server_config
    if tls is None:
        return None, ""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _choose_versions(context, tls)
    note = _choose_curves(context, tls.curve_preferences)
    if not tls.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    _load_own(context, found.cert, found.key)
    if tls.client_auth_type in _CLIENTS:
        _load_ca(context, found.client_ca)
    context.verify_mode = _CLIENTS.get(tls.client_auth_type, ssl.CERT_NONE)
    return context, note


def names_in(certificate: dict[str, Any]) -> set[str]:
    """Give the alternative names of a client's certificate, as ssl's getpeercert tells them."""
    return {_name(kind, value) for kind, value in certificate.get("subjectAltName", ())}


def _name(kind: str, value: str) -> str:
    return f"{ip_address(value.strip())}" if kind == "IP Address" else value


def _choose_versions(context: ssl.SSLContext, tls: Tls) -> None:
    for suite in tls.cipher_suites:
        if suite not in _SUITES and suite not in _TLS13:
            raise ConfigError(f"tls_server_config.cipher_suites: {suite[:60]!r} is none of {', '.join(_SUITES)}")
    chosen = [_SUITES[suite] for suite in tls.cipher_suites if suite in _SUITES]
    lowest = tls.min_version if chosen or not tls.cipher_suites else "TLS13"
    if lowest > tls.max_version:
        raise ConfigError("tls_server_config.cipher_suites: none of these is of the versions up to max_version")
    context.minimum_version, context.maximum_version = _VERSIONS[lowest], _VERSIONS[tls.max_version]
    if chosen:
        context.set_ciphers(":".join(chosen))


def _choose_curves(context: ssl.SSLContext, curves: tuple[str, ...]) -> str:
    for curve in curves:
        if curve not in _CURVES:
            raise ConfigError(f"tls_server_config.curve_preferences: {curve[:40]!r} is none of {', '.join(_CURVES)}")
    if len(curves) == 1:
        context.set_ecdh_curve(_CURVES[curves[0]])
    if len(curves) > 1:
        return "curve_preferences: Python can set one curve, or leave it to OpenSSL; with several it is left to OpenSSL"
    return ""


def _load_own(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    where = "tls_server_config.cert_file and key_file"
    if b"-----BEGIN CERTIFICATE-----" not in cert:
        raise ConfigError("tls_server_config.cert_file: no certificate in PEM (-----BEGIN CERTIFICATE-----) in it")
    if b"PRIVATE KEY-----" not in key:
        raise ConfigError("tls_server_config.key_file: no private key in PEM (-----BEGIN PRIVATE KEY-----) in it")
    if b"ENCRYPTED" in key:
        raise ConfigError(
            "tls_server_config.key_file: the key has a passphrase, and there is nobody to ask for it: "
            "`openssl pkey -in KEY -out NEW` takes it off"
        )
    with ExitStack() as stack:
        chain, private = (stack.enter_context(_in_memory(part)) for part in (cert, key))
        try:
            context.load_cert_chain(chain, private, password=str)  # an empty one, or OpenSSL would ask the terminal
        except (ssl.SSLError, ValueError) as err:
            raise ConfigError(f"{where}: {_why(err)}") from None


def _why(err: Exception) -> str:
    reason = getattr(err, "reason", "") or "unreadable"
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's: write both anew, the pair is looked at again every few seconds"
    return f"OpenSSL cannot use them ({reason.lower().replace('_', ' ')}): look at them with `openssl x509` and `pkey`"


def _load_ca(context: ssl.SSLContext, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace") or "nothing")
    except (ssl.SSLError, ValueError) as err:
        reason = f"{getattr(err, 'reason', '') or 'no certificate in it'}".lower().replace("_", " ")
        raise ConfigError(f"tls_server_config.client_ca_file: not certificates in PEM ({reason})") from None


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Give a path that holds the bytes: Python hands OpenSSL paths only, and what was looked at is what is used."""
    number = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(number, content)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)
