"""The web configuration file of Prometheus' exporters: what may stand in it, read and checked.

Owns its names, defaults and paths, which are those of the exporter-toolkit. Refuses unknown keys, and what would leave
open what somebody meant to close. No message of it holds anything secret.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from exporter.config import ConfigError

Version = Literal["TLS10", "TLS11", "TLS12", "TLS13"]
MUTUAL = "RequireAndVerifyClientCert"
CLIENT_AUTH = ("NoClientCert", "VerifyClientCertIfGiven", MUTUAL)
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Headers that may be set, and their values where not all are allowed."""
_HASH = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
_COSTS = range(4, 17)
"""Of bcrypt: each step doubles the time; 16 takes some seconds already."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


class Tls(Struct, frozen=True, forbid_unknown_fields=True):
    """tls_server_config."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = ""
    client_allowed_sans: tuple[str, ...] = ()
    min_version: Version = "TLS12"
    max_version: Version = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "Tls(...)"


class Http(Struct, frozen=True, forbid_unknown_fields=True):
    """http_server_config."""

    http2: bool = True
    """Read and without effect: this server speaks HTTP/1.1, which every client of the other speaks too."""
    headers: dict[str, str] = {}


class RateLimit(Struct, frozen=True, forbid_unknown_fields=True):
    """rate_limit."""

    interval: str | int = 0
    """Between two requests, as Go writes it (1s, 250ms); a number is nanoseconds. 0: no limit."""
    burst: int = 0


class WebFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tls_server_config: Tls | None = None
    http_server_config: Http = Http()
    basic_auth_users: dict[str, str] = {}
    """Password hashes of bcrypt by name."""
    rate_limit: RateLimit = RateLimit()

    def __repr__(self) -> str:
        return "WebFile(...)"


class Found(Struct, frozen=True):
    """The file and what the files named in it hold."""

    file: WebFile
    cert: bytes = b""
    key: bytes = b""
    client_ca: bytes = b""
    digest: bytes = b""
    """Of all bytes that were read: a change of content, however it came about, is a change of this."""

    def __repr__(self) -> str:
        return "Found(...)"


def gather(path: Path) -> Found:
    """Read the file and the certificates it names; raises ConfigError with the place, the reason and the cure."""
    raw = _read(path, f"{path}")
    try:
        file = parse(raw)
        tls = file.tls_server_config
        parts = (b"", b"", b"") if tls is None else _pems(tls, path.parent)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from None
    digest = sha256()
    for part in (raw, *parts):
        digest.update(sha256(part).digest())
    return Found(file, *parts, digest.digest())


def parse(raw: bytes) -> WebFile:
    """Read YAML; raises ConfigError without the file's words, which may be secret."""
    try:
        text = raw.decode()
        _no_twins(yaml.compose(text, Loader=yaml.SafeLoader))
        tree = _set(yaml.safe_load(text))
    except yaml.YAMLError as err:
        mark, problem = getattr(err, "problem_mark", None), getattr(err, "problem", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ConfigError(f"{where}not valid YAML: {problem or type(err).__name__}") from None
    except (UnicodeDecodeError, RecursionError):
        raise ConfigError("not valid YAML: not UTF-8, or too deep") from None
    try:
        file = msgspec.convert(tree or {}, WebFile)
    except msgspec.ValidationError as err:
        raise ConfigError(f"{err}".replace("`$.", "`")) from None
    _check(file)
    return file


def seconds(interval: str | int) -> float:
    """Read a duration as Go writes it; raises ConfigError."""
    if isinstance(interval, int):
        return interval * _UNITS["ns"]
    found = [(float(number), unit) for number, unit in _PART.findall(interval)]
    if interval != "0" and (not found or _PART.sub("", interval)):
        raise ConfigError(f"rate_limit.interval: {interval!r} is no duration (examples: 1s, 250ms)")
    return sum(number * _UNITS[unit] for number, unit in found)


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        cure = "let the exporter's own user read it" if isinstance(err, PermissionError) else "is the path right?"
        raise ConfigError(f"{name}: cannot be read: {err.strerror or err}: {cure}") from None


def _no_twins(node: yaml.Node | None) -> None:
    """Refuse a key given twice: one of the two would be passed over in silence."""
    for mapping in _mappings(node):
        seen: set[str] = set()
        for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConfigError(f"line {key.start_mark.line + 1}: {key.value[:40]!r} is there twice")
            seen.add(key.value)


def _mappings(node: yaml.Node | None) -> Iterator[yaml.MappingNode]:
    waiting, met = [node], set[int]()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, yaml.MappingNode):
            yield one
            waiting.extend(part for pair in one.value for part in pair)
        elif isinstance(one, yaml.SequenceNode):
            waiting.extend(one.value)


def _set(tree: Any) -> Any:
    """Leave out keys without a value, as if they were not there: so the toolkit reads them."""
    return {key: _set(value) for key, value in tree.items() if value is not None} if isinstance(tree, dict) else tree


def _check(file: WebFile) -> None:
    for name, value in file.http_server_config.headers.items():
        _check_header(name, value)
    for name, value in file.basic_auth_users.items():
        _check_user(name, value)
    if seconds(file.rate_limit.interval) and file.rate_limit.burst < 1:
        raise ConfigError("rate_limit.burst: must be 1 or more: with less every request would be refused")
    if file.tls_server_config is not None:
        _check_tls(file.tls_server_config)


def _check_header(name: str, value: str) -> None:
    where = f"http_server_config.headers.{name[:40]}"
    if name not in _HEADERS:
        raise ConfigError(f"{where}: cannot be set; these can: {', '.join(_HEADERS)}")
    if (_HEADERS[name] and value not in _HEADERS[name]) or not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{where}: not a value of it{': ' * bool(_HEADERS[name])}{' or '.join(_HEADERS[name])}")


def _check_user(name: str, value: str) -> None:
    where, cure = f"basic_auth_users.{name[:40]}", "make one with `htpasswd -nBC 10 NAME`"
    found = _HASH.fullmatch(value)
    if not name or ":" in name:
        raise ConfigError(f"{where}: a name cannot be empty or hold a colon")
    if found is None:
        raise ConfigError(f"{where}: not a hash of bcrypt: {cure}")
    if int(found[1]) not in _COSTS:
        raise ConfigError(f"{where}: cost {found[1]} is not {_COSTS[0]} to {_COSTS[-1]}: {cure}")


def _check_tls(tls: Tls) -> None:
    for part in ("cert", "key", "client_ca"):
        given = bool(getattr(tls, part)) + bool(getattr(tls, f"{part}_file"))
        if given > 1:
            raise ConfigError(f"tls_server_config: give {part} or {part}_file, not both")
        if not given and part != "client_ca":
            raise ConfigError(f"tls_server_config: {part}_file (or {part}) is missing: without it there is no TLS")
    _check_client_auth(tls)
    if tls.min_version > tls.max_version:
        raise ConfigError(f"tls_server_config: min_version {tls.min_version} is above max_version {tls.max_version}")


def _check_client_auth(tls: Tls) -> None:
    kind, where = tls.client_auth_type or "NoClientCert", "tls_server_config.client_auth_type"
    if kind in _UNVERIFIED:
        raise ConfigError(
            f"{where}: {kind} would take certificates that nobody vouches for, and Python's TLS checks every one that"
            f" it asks for: use {MUTUAL} or VerifyClientCertIfGiven, with client_ca_file"
        )
    if kind not in CLIENT_AUTH:
        raise ConfigError(f"{where}: {kind[:40]!r} is none of {', '.join(CLIENT_AUTH)}")
    has_ca = bool(tls.client_ca or tls.client_ca_file)
    if kind != "NoClientCert" and not has_ca:
        raise ConfigError(f"{where}: {kind} needs client_ca_file (or client_ca): whose certificates are good?")
    if kind == "NoClientCert" and has_ca:
        raise ConfigError(f"{where}: a client CA is given and nobody is asked for a certificate: set {MUTUAL}")
    if tls.client_allowed_sans and kind != MUTUAL:
        raise ConfigError(f"tls_server_config.client_allowed_sans: needs client_auth_type {MUTUAL}")


def _pems(tls: Tls, folder: Path) -> tuple[bytes, bytes, bytes]:
    """Certificate, key and client CA as bytes, wherever they stand."""
    cert, key, ca = (
        getattr(tls, part).encode()
        or (_read(folder / name, f"tls_server_config.{part}_file: {folder / name}") if name else b"")
        for part, name in (("cert", tls.cert_file), ("key", tls.key_file), ("client_ca", tls.client_ca_file))
    )
    return cert, key, ca
