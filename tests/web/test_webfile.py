"""Tests the web configuration file: what exporter-toolkit accepts, and errors with setting and remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from exporter.config import ConfigError
from exporter.web.security import WebConfigWatcher
from exporter.web.web_config import (
    LoadedWebConfig,
    TlsServerConfig,
    WebConfigFile,
    create_ssl_context,
    load_web_config,
    parse_duration,
    parse_web_config,
)
from tests.certificates import Authority

HASH = "$2b$04$VpkVsVErMqhMat/K2rzJb.j.ajGD7Wu8kn5WyRe/MKIU9DMXP5lEO"
WHOLE = f"""
tls_server_config:
  cert_file: server.crt
  key_file: keys/server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: /etc/ca.pem
  client_allowed_sans: [prometheus]
  min_version: TLS13
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: false
  curve_preferences: [X25519]
http_server_config:
  http2: false
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: sameorigin
    X-XSS-Protection: "0"
    X-Content-Type-Options: nosniff
    Content-Security-Policy: default-src 'none'
basic_auth_users:
  ada: {HASH}
  bob: $2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG
rate_limit: {{interval: 1m30s, burst: 20}}
"""


def test_every_key_of_the_toolkit_is_known() -> None:
    file = parse_web_config(WHOLE.encode())
    tls = file.tls_server_config
    assert tls is not None
    assert (tls.min_version, tls.client_allowed_sans, tls.prefer_server_cipher_suites) == (
        "TLS13",
        ("prometheus",),
        False,
    )
    assert (file.http_server_config.http2, len(file.http_server_config.headers)) == (False, 5)
    assert set(file.basic_auth_users) == {"ada", "bob"}
    assert (parse_duration(file.rate_limit.interval), file.rate_limit.burst) == (90.0, 20)
    assert HASH not in repr(file)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "basic_auth_users:\n", "tls_server_config:\nrate_limit: {interval: 0}\n"]
)
def test_what_is_left_empty_is_not_there(text: str) -> None:
    assert parse_web_config(text.encode()) == WebConfigFile()


@pytest.mark.parametrize(
    ("interval", "wanted"),
    [
        ("1s", 1),
        ("250ms", 0.25),
        ("1h2m3.5s", 3723.5),
        ("0", 0),
        (2_000_000_000, 2),
        ("1.5h", 5400),
        ("10us", 1e-5),
        (0, 0),
    ],
)
def test_durations_as_go_writes_them(interval: str | int, wanted: float) -> None:
    assert parse_duration(interval) == pytest.approx(wanted)


CERT = "cert_file: a, key_file: b"
IF_GIVEN = "client_auth_type: VerifyClientCertIfGiven, client_ca: x"
BAD = [
    ("tls_config: {}", ["unknown field `tls_config`"]),
    ("tls_server_config: {cert: x, certfile: y}", ["unknown field `certfile`", "tls_server_config"]),
    ("http_server_config: {http3: true}", ["http3", "http_server_config"]),
    ("basic_auth_users: [ada]", ["basic_auth_users", "array"]),
    ("basic_auth_users: {1: x}", ["basic_auth_users"]),
    ("- a", ["object"]),
    ("a: [", ["line 1", "YAML"]),
    ("a: !!python/object:os.system x", ["YAML"]),
    ("basic_auth_users:\n  a: 2026-13-45", ["line 2", "no timestamp", "quote"]),
    ("rate_limit:\n  burst: !!int s3cret", ["line 2", "no int"]),
    ("a: !!bool s3cret", ["line 1", "no bool"]),
    ("a: !!timestamp s3cret", ["line 1", "no timestamp"]),
    ("a: !!int ''", ["line 1", "no int"]),
    ("a: 0b_", ["line 1", "no int"]),
    ("basic_auth_users: {ada: secret}", ["basic_auth_users.ada", "bcrypt", "htpasswd"]),
    ("basic_auth_users: {ada: $2b$20$" + "a" * 53 + "}", ["basic_auth_users.ada", "cost 20"]),
    (f"basic_auth_users: {{'a:b': '{HASH}'}}", ["colon"]),
    (f"basic_auth_users: {{ada: '{HASH}', ada: '{HASH}'}}", ["line 1", "'ada'", "duplicate"]),
    ("rate_limit: {interval: 1s}", ["rate_limit.burst"]),
    ("rate_limit: {interval: soon, burst: 1}", ["rate_limit.interval", "soon"]),
    ("rate_limit: {interval: 1s2x, burst: 1}", ["rate_limit.interval"]),
    ("http_server_config: {headers: {Server: me}}", ["headers.Server", "Strict-Transport-Security"]),
    ("http_server_config: {headers: {X-Frame-Options: ALLOW}}", ["X-Frame-Options", "deny or sameorigin"]),
    ('http_server_config: {headers: {X-XSS-Protection: "0\\r\\nSet-Cookie: a"}}', ["X-XSS-Protection"]),
    ("tls_server_config: {min_version: TLS12}", ["cert_file"]),
    ("tls_server_config: {}", ["cert_file"]),
    ("tls_server_config: {cert_file: a}", ["key_file"]),
    (f"tls_server_config: {{{CERT}, cert: c}}", ["cert or cert_file"]),
    (f"tls_server_config: {{{CERT}, min_version: SSL30}}", ["min_version", "SSL30"]),
    (f"tls_server_config: {{{CERT}, min_version: TLS13, max_version: TLS12}}", ["above"]),
    (f"tls_server_config: {{{CERT}, client_auth_type: RequireAnyClientCert}}", ["RequireAny", "RequireAndVerify"]),
    (f"tls_server_config: {{{CERT}, client_auth_type: RequestClientCert}}", ["RequestClientCert"]),
    (f"tls_server_config: {{{CERT}, client_auth_type: Always}}", ["'Always'", "NoClientCert"]),
    (f"tls_server_config: {{{CERT}, client_auth_type: RequireAndVerifyClientCert}}", ["client_ca_file"]),
    (f"tls_server_config: {{{CERT}, client_ca_file: c}}", ["no certificate is requested"]),
    (f"tls_server_config: {{{CERT}, client_allowed_sans: [a]}}", ["client_allowed_sans"]),
    (f"tls_server_config: {{{CERT}, client_allowed_sans: [a], {IF_GIVEN}}}",
     ["client_allowed_sans"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_refused_with_its_place(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_web_config(text.encode())
    assert all(word in f"{refused.value}" for word in words), refused.value


@pytest.mark.slow
@pytest.mark.parametrize("raw", [b"\xff\xfe", b"[" * 20000])
def test_no_text_is_no_yaml(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="YAML"):
        parse_web_config(raw)


SECRET = "hunter2hunter2"  # noqa: S105  nobody's


@pytest.mark.parametrize(
    "text",
    [
        f"basic_auth_users: {{ada: {SECRET}}}",
        f"basic_auth_users:\n  ada: '{SECRET}\n",
        f"tls_server_config: {{cert: a, key: {SECRET}}}",
        f"tls_server_config:\n  key: [{SECRET}]\n",
        f"basic_auth_users: {{ada: [{SECRET}]}}",
        f"basic_auth_users: {{ada: !!int {SECRET}}}",
    ],
)
def test_a_secret_is_in_no_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        WebConfigWatcher(tmp_path / "web.yml")
    assert SECRET not in f"{refused.value}"
    assert "web.yml" in f"{refused.value}"
    assert refused.value.__cause__ is None
    assert SECRET not in repr(TlsServerConfig(key=SECRET)) + repr(WebConfigFile(TlsServerConfig(key=SECRET))) + repr(
        LoadedWebConfig(WebConfigFile(), key=SECRET.encode())
    )


def test_who_has_no_file_pays_for_none() -> None:
    asked = "import sys, exporter.web, exporter.cli.wiring; print({'yaml', 'bcrypt'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"


def test_paths_are_seen_from_the_file(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.issue("relative")
    (tmp_path / "tls").mkdir()
    for source, name in ((cert, "c.pem"), (key, "k.pem")):
        (tmp_path / "tls" / name).write_bytes(source.read_bytes())
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: tls/c.pem, key_file: tls/k.pem}")
    found = load_web_config(tmp_path / "web.yml")
    assert (found.cert, found.key) == (cert.read_bytes(), key.read_bytes())
    assert create_ssl_context(found)[0] is not None
    (tmp_path / "web.yml").write_text(f"tls_server_config: {{cert_file: {cert}, key_file: {key}}}")
    assert load_web_config(tmp_path / "web.yml").cert == found.cert
    assert load_web_config(tmp_path / "web.yml").digest != found.digest


def test_a_file_that_cannot_be_read_is_named_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"web\.yml: cannot be read: No such file"):
        load_web_config(tmp_path / "web.yml")
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: gone.crt, key_file: k.pem}")
    with pytest.raises(ConfigError, match=r"web\.yml: tls_server_config\.cert_file: .*gone\.crt: cannot be read"):
        load_web_config(tmp_path / "web.yml")
    (tmp_path / "gone.crt").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        load_web_config(tmp_path / "web.yml")
