"""Reads the web configuration file of Prometheus exporters (exporter-toolkit), validates it, builds the TLS context.

Rejects unknown keys and settings that would grant more access than intended. No message contains a secret, and no key
is written to disk. Imports PyYAML: import this module only if a file is configured.
"""

import os
import re
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from exporter.config import ConfigError

TlsVersion = Literal["TLS10", "TLS11", "TLS12", "TLS13"]
MUTUAL_TLS = "RequireAndVerifyClientCert"
CLIENT_AUTH_TYPES = ("NoClientCert", "VerifyClientCertIfGiven", MUTUAL_TLS)
_UNVERIFIED_TYPES = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_ALLOWED_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Headers that may be set, with their allowed values; empty: any value."""
_BCRYPT_HASH = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
_BCRYPT_COSTS = range(4, 17)
"""Allowed bcrypt costs: each step doubles the time, and 16 takes several seconds."""
_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


class TlsServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """tls_server_config."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = ""
    client_allowed_sans: tuple[str, ...] = ()
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "Tls(...)"


class HttpServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """http_server_config."""

    http2: bool = True
    """Accepted without effect: this server uses HTTP/1.1, which every HTTP/2 client supports."""
    headers: dict[str, str] = {}


class RateLimit(Struct, frozen=True, forbid_unknown_fields=True):
    """rate_limit."""

    interval: str | int = 0
    """Time per request as a Go duration (1s, 250ms) or a number of nanoseconds; 0: no limit."""
    burst: int = 0


class WebConfigFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
    http_server_config: HttpServerConfig = HttpServerConfig()
    basic_auth_users: dict[str, str] = {}
    """bcrypt hashes by user name."""
    rate_limit: RateLimit = RateLimit()

    def __repr__(self) -> str:
        return "WebFile(...)"


class LoadedWebConfig(Struct, frozen=True):
    """The parsed file and the content of the files that it names."""

    file: WebConfigFile
    cert: bytes = b""
    key: bytes = b""
    client_ca: bytes = b""
    digest: bytes = b""
    """SHA-256 over all files read, to detect a change of content."""

    def __repr__(self) -> str:
        return "Found(...)"


def load_web_config(path: Path) -> LoadedWebConfig:
    """Read the file and the certificates it names; raises ConfigError with the setting, the reason and the remedy."""
    raw = _read(path, f"{path}")
    try:
        file = parse_web_config(raw)
        tls = file.tls_server_config
        parts = (b"", b"", b"") if tls is None else _read_pems(tls, path.parent)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from None
    digest = sha256()
    for part in (raw, *parts):
        digest.update(sha256(part).digest())
    return LoadedWebConfig(file, *parts, digest.digest())


def parse_web_config(raw: bytes) -> WebConfigFile:
    """Parse and validate YAML; raises ConfigError without content of the file, which may be secret."""
    try:
        tree = _drop_nulls(yaml.load(raw.decode(), Loader=_UniqueKeyLoader))  # noqa: S506  a SafeLoader  # nosec B506
    except yaml.YAMLError as err:
        mark, problem = getattr(err, "problem_mark", None), getattr(err, "problem", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ConfigError(f"{where}not valid YAML: {problem or type(err).__name__}") from None
    except (UnicodeDecodeError, RecursionError):
        raise ConfigError("not valid YAML: not UTF-8, or too deep") from None
    try:
        file = msgspec.convert(tree or {}, WebConfigFile)
    except msgspec.ValidationError as err:
        raise ConfigError(f"{err}".replace("`$.", "`")) from None
    _check(file)
    return file


def parse_duration(interval: str | int) -> float:
    """Parse a Go duration, or nanoseconds as a number, into seconds; raises ConfigError."""
    if isinstance(interval, int):
        return interval * _DURATION_UNITS["ns"]
    found = [(float(number), unit) for number, unit in _DURATION_PART.findall(interval)]
    if interval != "0" and (not found or _DURATION_PART.sub("", interval)):
        raise ConfigError(f"rate_limit.interval: {interval!r} is no duration (examples: 1s, 250ms)")
    return sum(number * _DURATION_UNITS[unit] for number, unit in found)


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        advice = "let the exporter's own user read it" if isinstance(err, PermissionError) else "is the path right?"
        raise ConfigError(f"{name}: cannot be read: {err.strerror or err}: {advice}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, subclassed to reject duplicate keys, of which it would silently use the last.

    A scalar that looks like a date or a number and is none is an error of the file: PyYAML raises what Python does.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  PyYAML's
        """See yaml.SafeLoader; raises ConfigError for a scalar that is no value of its type."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            kind = node.tag.rpartition(":")[2]
            raise ConfigError(f"line {node.start_mark.line + 1}: not valid YAML: no {kind}; quote it") from None

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  PyYAML's
        """See yaml.SafeLoader; raises ConfigError for a duplicate key."""
        keys: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise ConfigError(f"line {key.start_mark.line + 1}: duplicate key {key.value[:40]!r}")
            keys.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[arg-type]  # it raises for other nodes


def _drop_nulls(tree: Any) -> Any:
    """Drop keys without a value, as exporter-toolkit does."""
    return (
        {key: _drop_nulls(value) for key, value in tree.items() if value is not None}
        if isinstance(tree, dict)
        else tree
    )


def _check(file: WebConfigFile) -> None:
    for name, value in file.http_server_config.headers.items():
        _check_header(name, value)
    for name, value in file.basic_auth_users.items():
        _check_user(name, value)
    if parse_duration(file.rate_limit.interval) and file.rate_limit.burst < 1:
        raise ConfigError("rate_limit.burst: must be 1 or more: with less every request would be refused")
    if file.tls_server_config is not None:
        _check_tls(file.tls_server_config)


def _check_header(name: str, value: str) -> None:
    where = f"http_server_config.headers.{name[:40]}"
    if name not in _ALLOWED_HEADERS:
        raise ConfigError(f"{where}: cannot be set; these can: {', '.join(_ALLOWED_HEADERS)}")
    if (_ALLOWED_HEADERS[name] and value not in _ALLOWED_HEADERS[name]) or not (
        value.isascii() and value.isprintable()
    ):
        raise ConfigError(
            f"{where}: not a value of it{': ' * bool(_ALLOWED_HEADERS[name])}{' or '.join(_ALLOWED_HEADERS[name])}"
        )


def _check_user(name: str, value: str) -> None:
    where, advice = f"basic_auth_users.{name[:40]}", "make one with `htpasswd -nBC 10 NAME`"
    found = _BCRYPT_HASH.fullmatch(value)
    if not name or ":" in name:
        raise ConfigError(f"{where}: a name cannot be empty or hold a colon")
    if found is None:
        raise ConfigError(f"{where}: not a hash of bcrypt: {advice}")
    if int(found[1]) not in _BCRYPT_COSTS:
        raise ConfigError(f"{where}: cost {found[1]} is not {_BCRYPT_COSTS[0]} to {_BCRYPT_COSTS[-1]}: {advice}")


def _check_tls(tls: TlsServerConfig) -> None:
    for part in ("cert", "key", "client_ca"):
        given = bool(getattr(tls, part)) + bool(getattr(tls, f"{part}_file"))
        if given > 1:
            raise ConfigError(f"tls_server_config: give {part} or {part}_file, not both")
        if not given and part != "client_ca":
            raise ConfigError(f"tls_server_config: {part}_file (or {part}) is missing: without it there is no TLS")
    _check_client_auth(tls)
    if tls.min_version > tls.max_version:
        raise ConfigError(f"tls_server_config: min_version {tls.min_version} is above max_version {tls.max_version}")


def _check_client_auth(tls: TlsServerConfig) -> None:
    kind, where = tls.client_auth_type or "NoClientCert", "tls_server_config.client_auth_type"
    if kind in _UNVERIFIED_TYPES:
        raise ConfigError(
            f"{where}: {kind} would accept unverified certificates, and Python's TLS verifies every certificate that it"
            f" requests: use {MUTUAL_TLS} or VerifyClientCertIfGiven, with client_ca_file"
        )
    if kind not in CLIENT_AUTH_TYPES:
        raise ConfigError(f"{where}: {kind[:40]!r} is none of {', '.join(CLIENT_AUTH_TYPES)}")
    has_ca = bool(tls.client_ca or tls.client_ca_file)
    if kind != "NoClientCert" and not has_ca:
        raise ConfigError(f"{where}: {kind} needs client_ca_file (or client_ca) to verify certificates")
    if kind == "NoClientCert" and has_ca:
        raise ConfigError(f"{where}: a client CA is set but no certificate is requested: set {MUTUAL_TLS}")
    if tls.client_allowed_sans and kind != MUTUAL_TLS:
        raise ConfigError(f"tls_server_config.client_allowed_sans: needs client_auth_type {MUTUAL_TLS}")


def _read_pems(tls: TlsServerConfig, folder: Path) -> tuple[bytes, bytes, bytes]:
    """Return certificate, key and client CA as bytes, inline or from their files."""
    cert, key, ca = (
        getattr(tls, part).encode()
        or (_read(folder / name, f"tls_server_config.{part}_file: {folder / name}") if name else b"")
        for part, name in (("cert", tls.cert_file), ("key", tls.key_file), ("client_ca", tls.client_ca_file))
    )
    return cert, key, ca


_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_TLS13_SUITES = {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"}
"""Cipher suites of TLS 1.3, which neither Go nor Python can restrict."""
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
_DEFAULT_SUITES = tuple(name for name in _SUITES.values() if not name.endswith("-SHA"))
"""Forward secrecy and authenticated encryption. Without a list, Debian's Python accepts suites that have neither."""
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_VERIFY_MODES = {MUTUAL_TLS: ssl.CERT_REQUIRED, "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL}


def create_ssl_context(loaded: LoadedWebConfig) -> tuple[ssl.SSLContext | None, str]:
    """Build the TLS context for new connections (None without TLS), and a note on settings applied differently.

    Raises ConfigError.
    """
    tls = loaded.file.tls_server_config
    if tls is None:
        return None, ""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _set_versions(context, tls)
    note = _set_curves(context, tls.curve_preferences)
    if not tls.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    _load_server_certificate(context, loaded.cert, loaded.key)
    if tls.client_auth_type in _VERIFY_MODES:
        _load_client_ca(context, loaded.client_ca)
    context.verify_mode = _VERIFY_MODES.get(tls.client_auth_type, ssl.CERT_NONE)
    return context, note


def certificate_names(certificate: dict[str, Any]) -> set[str]:
    """Return the subject alternative names of a client certificate in the form of ssl's getpeercert."""
    return {_alternative_name(kind, value) for kind, value in certificate.get("subjectAltName", ())}


def _alternative_name(kind: str, value: str) -> str:
    return f"{ip_address(value.strip())}" if kind == "IP Address" else value


def _set_versions(context: ssl.SSLContext, tls: TlsServerConfig) -> None:
    for suite in tls.cipher_suites:
        if suite not in _SUITES and suite not in _TLS13_SUITES:
            raise ConfigError(f"tls_server_config.cipher_suites: {suite[:60]!r} is none of {', '.join(_SUITES)}")
    chosen = [_SUITES[suite] for suite in tls.cipher_suites if suite in _SUITES]
    lowest = tls.min_version if chosen or not tls.cipher_suites else "TLS13"
    if lowest > tls.max_version:
        raise ConfigError("tls_server_config.cipher_suites: none of these is of the versions up to max_version")
    context.minimum_version, context.maximum_version = _VERSIONS[lowest], _VERSIONS[tls.max_version]
    context.set_ciphers(":".join(chosen or _DEFAULT_SUITES))


def _set_curves(context: ssl.SSLContext, curves: tuple[str, ...]) -> str:
    for curve in curves:
        if curve not in _CURVES:
            raise ConfigError(f"tls_server_config.curve_preferences: {curve[:40]!r} is none of {', '.join(_CURVES)}")
    if len(curves) == 1:
        context.set_ecdh_curve(_CURVES[curves[0]])
    if len(curves) > 1:
        return "curve_preferences: Python can set one curve, or leave it to OpenSSL; with several it is left to OpenSSL"
    return ""


def _load_server_certificate(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    where = "tls_server_config.cert_file and key_file"
    if b"-----BEGIN CERTIFICATE-----" not in cert:
        raise ConfigError("tls_server_config.cert_file: no certificate in PEM (-----BEGIN CERTIFICATE-----) in it")
    if b"PRIVATE KEY-----" not in key:
        raise ConfigError("tls_server_config.key_file: no private key in PEM (-----BEGIN PRIVATE KEY-----) in it")
    if b"ENCRYPTED" in key:
        raise ConfigError(
            "tls_server_config.key_file: the key has a passphrase, which a daemon cannot prompt for: remove it with "
            "`openssl pkey -in KEY -out NEW`"
        )
    with ExitStack() as stack:
        chain, private = (stack.enter_context(_memory_file(part)) for part in (cert, key))
        try:
            context.load_cert_chain(chain, private, password=str)  # empty, or OpenSSL would prompt on the terminal
        except (ssl.SSLError, ValueError) as err:
            raise ConfigError(f"{where}: {_explain_ssl_error(err)}") from None


def _explain_ssl_error(err: Exception) -> str:
    reason = getattr(err, "reason", "") or "unreadable"
    if reason == "KEY_VALUES_MISMATCH":
        return "the key does not match the certificate: replace both; the pair is read again every few seconds"
    return f"OpenSSL cannot use them ({reason.lower().replace('_', ' ')}): check them with `openssl x509` and `pkey`"


def _load_client_ca(context: ssl.SSLContext, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace") or "nothing")
    except (ssl.SSLError, ValueError) as err:
        reason = f"{getattr(err, 'reason', '') or 'no certificate in it'}".lower().replace("_", " ")
        raise ConfigError(f"tls_server_config.client_ca_file: not certificates in PEM ({reason})") from None


@contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """Yield a path to `content` in memory: Python passes OpenSSL only paths, and this is the content validated."""
    number = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(number, content)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)
