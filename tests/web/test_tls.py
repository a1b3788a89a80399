"""Tests TLS as configured, on a real server with Python's client; curl and openssl are in tests/e2e."""

import logging
import shutil
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from exporter.config import ConfigError
from exporter.tls import client_context
from exporter.web.security import WebConfigWatcher
from exporter.web.web_config import certificate_names, create_ssl_context, load_web_config
from tests.certificates import Authority, openssl
from tests.web.serving import served, until_cut

Setting = tuple[Path, Authority]


@pytest.fixture
def folder(tmp_path: Path, authority: Authority) -> Path:
    """Copy the authority's files, so that a test may change them."""
    shutil.copytree(authority.certificate.parent, tmp_path / "pki")
    return tmp_path / "pki"


def config(folder: Path, *lines: str, cert: str = "server.crt", key: str = "server.key", more: str = "") -> Path:
    head = ["tls_server_config:", f"  cert_file: {cert}", f"  key_file: {key}", *(f"  {line}" for line in lines)]
    (folder / "web.yml").write_text("\n".join([*head, more]) + "\n")
    return folder / "web.yml"


def trusting(folder: Path, client: str = "") -> ssl.SSLContext:
    context = client_context(f"{folder / 'ca.pem'}")
    if client:
        context.load_cert_chain(folder / f"{client}.crt", folder / f"{client}.key")
    return context


def got(folder: Path, path: Path, *, client: str = "", context: ssl.SSLContext | None = None) -> httpx.Response:
    """Request once from a server with this web configuration."""
    with (
        served(guarding=WebConfigWatcher(path)) as site,
        site.client(verify=context or trusting(folder, client)) as asking,
    ):
        return asking.get("/")


MUTUAL = ("client_auth_type: RequireAndVerifyClientCert", "client_ca_file: ca.pem")


def test_it_is_served_under_tls(folder: Path) -> None:
    answer = got(folder, config(folder))
    assert answer.status_code == 200
    assert (answer.url.scheme, answer.http_version) == ("https", "HTTP/1.1")


def test_keys_may_stand_in_the_file_itself(folder: Path) -> None:
    inline = {name: (folder / f"server.{end}").read_text() for name, end in (("cert", "crt"), ("key", "key"))}
    text = "".join(
        f"  {name}: |\n" + "".join(f"    {row}\n" for row in pem.splitlines()) for name, pem in inline.items()
    )
    (folder / "web.yml").write_text(f"tls_server_config:\n{text}")
    assert got(folder, folder / "web.yml").status_code == 200


@pytest.mark.parametrize(("lowest", "highest", "fine"), [
    ("TLS12", "TLS13", (True, True)), ("TLS13", "TLS13", (False, True)), ("TLS12", "TLS12", (True, False)),
])  # fmt: skip
def test_versions_are_kept_to(folder: Path, lowest: str, highest: str, fine: tuple[bool, bool]) -> None:
    guarding = WebConfigWatcher(config(folder, f"min_version: {lowest}", f"max_version: {highest}"))
    with served(guarding=guarding) as site:
        for version, wanted in zip((ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3), fine, strict=True):
            context = trusting(folder)
            context.minimum_version = context.maximum_version = version
            with site.client(verify=context) as client:
                if wanted:
                    assert client.get("/healthz").status_code == 200
                else:
                    with pytest.raises(httpx.ConnectError):
                        client.get("/healthz")


def test_without_a_word_old_versions_are_refused(folder: Path) -> None:
    context, note = create_ssl_context(load_web_config(config(folder)))
    assert context is not None
    assert (context.minimum_version, note) == (ssl.TLSVersion.TLSv1_2, "")


def test_without_a_list_every_suite_has_forward_secrecy_and_authenticated_encryption(folder: Path) -> None:
    """Debian builds Python with OpenSSL's own list, which has others."""
    context, _ = create_ssl_context(load_web_config(config(folder)))
    assert context is not None
    named = {one["name"] for one in context.get_ciphers() if one["protocol"] != "TLSv1.3"}
    assert named == {
        f"ECDHE-{key}-{cipher}"
        for key in ("ECDSA", "RSA")
        for cipher in ("AES128-GCM-SHA256", "AES256-GCM-SHA384", "CHACHA20-POLY1305")
    }


def test_suites_curves_and_whose_order_counts(folder: Path) -> None:
    suite = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"
    path = config(
        folder, f"cipher_suites: [{suite}]", "curve_preferences: [CurveP384]", "prefer_server_cipher_suites: false"
    )
    context, note = create_ssl_context(load_web_config(path))
    assert context is not None
    assert [one["name"] for one in context.get_ciphers() if one["protocol"] != "TLSv1.3"] == [
        "ECDHE-ECDSA-CHACHA20-POLY1305"
    ]
    assert (note, context.options & ssl.OP_CIPHER_SERVER_PREFERENCE) == ("", 0)
    only_13 = create_ssl_context(load_web_config(config(folder, "cipher_suites: [TLS_AES_128_GCM_SHA256]")))[0]
    assert only_13 is not None
    assert only_13.minimum_version == ssl.TLSVersion.TLSv1_3
    several = create_ssl_context(load_web_config(config(folder, "curve_preferences: [X25519, CurveP256]")))
    assert "curve_preferences" in several[1]
    assert several[0] is not None
    assert several[0].options & ssl.OP_CIPHER_SERVER_PREFERENCE


def test_a_note_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        WebConfigWatcher(config(folder, "curve_preferences: [X25519, CurveP256]"))
    assert "left to OpenSSL" in caplog.text


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]"], ["RC4", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"]),
        (["cipher_suites: [TLS_AES_128_GCM_SHA256]", "max_version: TLS12"], ["cipher_suites", "max_version"]),
        (["curve_preferences: [brainpool]"], ["brainpool", "X25519"]),
    ],
)
def test_names_openssl_lacks_are_refused(folder: Path, lines: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        WebConfigWatcher(config(folder, *lines))
    assert all(word in f"{refused.value}" for word in words), refused.value


def test_bad_certificates_and_keys_are_told_apart(folder: Path) -> None:
    openssl(
        "pkey", "-in", f"{folder / 'server.key'}", "-aes256", "-passout", "pass:x", "-out", f"{folder / 'locked.key'}"
    )
    (folder / "broken.crt").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (folder / "empty").write_text("")
    for made, words in (
        ({"key": "other.key"}, "the key does not match the certificate"),
        ({"key": "locked.key"}, "passphrase"),
        ({"key": "server.crt"}, "key_file: no private key"),
        ({"cert": "server.key"}, "cert_file: no certificate"),
        ({"cert": "empty"}, "cert_file: no certificate"),
        ({"cert": "broken.crt"}, "OpenSSL cannot use them"),
    ):
        with pytest.raises(ConfigError, match=words):
            WebConfigWatcher(config(folder, **made))
    for ca in ("empty", "broken.crt", "server.key"):
        with pytest.raises(ConfigError, match=r"client_ca_file: not certificates"):
            WebConfigWatcher(config(folder, "client_auth_type: RequireAndVerifyClientCert", f"client_ca_file: {ca}"))


def test_without_a_certificate_nobody_gets_in_and_with_one_the_page_is_theirs(folder: Path, tmp_path: Path) -> None:
    path = config(folder, *MUTUAL)
    stranger = Authority(tmp_path, "stranger")
    stranger.issue("client")
    foreign = trusting(folder)
    foreign.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
    with served(guarding=WebConfigWatcher(path)) as site:
        for context in (trusting(folder), foreign):
            with site.client(verify=context) as client, pytest.raises(httpx.TransportError):
                client.get("/healthz")
        with site.client(verify=trusting(folder, "other")) as client:
            assert client.get("/", headers={"Host": "node-7"}).status_code == 200


def test_a_certificate_that_may_be_given_is_no_authentication(folder: Path) -> None:
    path = config(folder, "client_auth_type: VerifyClientCertIfGiven", "client_ca_file: ca.pem")
    with served(guarding=WebConfigWatcher(path)) as site:
        for client in ("", "other"):
            with site.client(verify=trusting(folder, client)) as asking:
                assert asking.get("/healthz").status_code == 200
                assert asking.get("/", headers={"Host": "node-7"}).status_code == 403


@pytest.mark.slow
@pytest.mark.parametrize(("names", "fine"), [
    ("DNS:prometheus,DNS:x", True), ("URI:spiffe://a/prometheus", True), ("IP:10.0.0.9", True), ("IP:fd00::1", True),
    ("email:ada@example.org", True), ("DNS:else", False), ("DNS:prometheus.evil", False),
])  # fmt: skip
def test_only_certificates_with_an_allowed_name(folder: Path, names: str, *, fine: bool) -> None:
    cert, key = Authority(folder, "ca").issue("client", names)
    allowed = "client_allowed_sans: [prometheus, spiffe://a/prometheus, 10.0.0.9, 'fd00::1', ada@example.org]"
    context = trusting(folder)
    context.load_cert_chain(cert, key)
    Authority(folder, "server-ca").issue("server")
    context.load_verify_locations(folder / "server-ca.pem")
    path = config(folder, *MUTUAL, allowed)
    if fine:
        assert got(folder, path, context=context).status_code == 200
    else:
        with pytest.raises(httpx.TransportError):
            got(folder, path, context=context)


def test_names_of_a_certificate_as_python_tells_them() -> None:
    told: dict[str, Any] = {
        "subjectAltName": (("DNS", "a"), ("IP Address", "FD00:0:0:0:0:0:0:1\n"), ("IP Address", "10.0.0.1"))
    }
    assert certificate_names(told) == {"a", "fd00::1", "10.0.0.1"}
    assert certificate_names({}) == set()


def serial(site_client: httpx.Client) -> str:
    with site_client.stream("GET", "/healthz") as answer:
        peer = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        return str(peer["serialNumber"])


def test_a_new_certificate_is_taken_for_new_connections_and_old_ones_end(folder: Path) -> None:
    guarding = WebConfigWatcher(config(folder))
    with served(guarding=guarding) as site, site.client(verify=trusting(folder)) as kept:
        before = serial(kept)
        for end in ("crt", "key"):
            shutil.copy(folder / f"other.{end}", folder / f"server.{end}")
        guarding.reload_if_changed()
        assert guarding.reloads == 1
        answer = kept.get("/healthz")
        assert (answer.status_code, answer.headers.get("connection")) in {(200, "close"), (200, None)}
        assert serial(kept) != before
        with site.client(verify=trusting(folder)) as new:
            assert serial(new) != before


def test_a_connection_under_an_old_certificate_ends_with_its_next_answer(folder: Path) -> None:
    guarding = WebConfigWatcher(config(folder))
    with (
        served(guarding=guarding) as site,
        site.line() as plain,
        trusting(folder).wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall(b"GET /healthz HTTP/1.1\r\n")
        for end in ("crt", "key"):
            shutil.copy(folder / f"other.{end}", folder / f"server.{end}")
        guarding.reload_if_changed()
        line.sendall(b"Host: localhost\r\n\r\n")
        assert b"connection: close" in until_cut(line)


def test_a_connection_at_rest_under_an_old_certificate_is_ended(folder: Path) -> None:
    guarding = WebConfigWatcher(config(folder))
    with served(guarding=guarding) as site, site.line() as plain:
        line = trusting(folder).wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=True)
        with line:
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            got = b""
            while not got.endswith(b"ok\n"):
                got += line.recv(4096)
            config(folder, "min_version: TLS13")
            guarding.reload_if_changed()
            assert until_cut(line) == b""


def test_who_is_connected_is_not_let_in_by_certificates_that_are_asked_for_later(folder: Path) -> None:
    guarding = WebConfigWatcher(config(folder))
    with served(guarding=guarding) as site, site.client(verify=trusting(folder)) as kept:
        assert kept.get("/", headers={"Host": "node-7"}).status_code == 403
        config(folder, *MUTUAL)
        guarding.reload_if_changed()
        assert guarding.current.mutual_tls
        try:
            status = kept.get("/", headers={"Host": "node-7"}).status_code
        except httpx.TransportError:
            status = 0  # idle, and closed already
        assert status in {0, 403}


def test_a_bad_new_file_changes_nothing_and_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    guarding = WebConfigWatcher(config(folder))
    was = guarding.current
    shutil.copy(folder / "other.key", folder / "server.key")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            guarding.reload_if_changed()
    assert (guarding.current, guarding.reloads, len(caplog.records)) == (was, 0, 1)
    assert "the key does not match the certificate" in caplog.text
    assert "the key does not match" in guarding.problem
    shutil.copy(folder / "other.crt", folder / "server.crt")
    guarding.reload_if_changed()
    assert (guarding.current is not was, guarding.reloads, guarding.problem) == (True, 1, "")
    (folder / "web.yml").unlink()
    guarding.reload_if_changed()
    assert "cannot be read" in guarding.problem


def test_a_secret_volume_s_swap_is_a_change(folder: Path) -> None:
    """Certificates are replaced as Kubernetes does it, by replacing a symlink to a directory."""
    for name in ("..1", "..2"):
        (folder / name).mkdir()
    for end in ("crt", "key"):
        shutil.copy(folder / f"server.{end}", folder / "..1" / f"tls.{end}")
        shutil.copy(folder / f"other.{end}", folder / "..2" / f"tls.{end}")
        (folder / f"tls.{end}").symlink_to(f"..data/tls.{end}")
    (folder / "..data").symlink_to("..1")
    guarding = WebConfigWatcher(config(folder, cert="tls.crt", key="tls.key"))
    guarding.reload_if_changed()
    assert guarding.reloads == 0
    (folder / "new").symlink_to("..2")
    (folder / "new").rename(folder / "..data")
    guarding.reload_if_changed()
    assert (guarding.reloads, guarding.problem) == (1, "")
