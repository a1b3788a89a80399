"""The health check: where it asks, and what it takes for an answer. With the daemon itself: tests/e2e/test_image.py."""

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.cli import healthcheck
from exporter.cli.healthcheck import Endpoint, check, daemon_arguments, find_endpoint, main

RUN = ["/opt/gpu-efficiency/bin/python", "/opt/gpu-efficiency/bin/gpu-efficiency"]
TLS = "tls_server_config:\n  cert_file: a\n"


def port(*words: str, **env: str) -> int:
    return find_endpoint([*RUN, *words], {f"GPU_EFFICIENCY_{name}": value for name, value in env.items()}).port


# -- where it asks --


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> str:
    (tmp_path / "own.toml").write_text('[web]\nlisten_address = ":4"\n[cluster]\nlisten_address = ":5"\n')
    return f"{tmp_path / 'own.toml'}"


def test_flags_come_before_the_environment_and_that_before_the_file(file: str) -> None:
    config = ("--config", file)
    assert port() == 19400
    assert port("serve", *config) == 4
    assert port("serve", *config, WEB_LISTEN_ADDRESS=":3") == 3
    assert port("serve", *config, "--web.listen-address", ":2", WEB_LISTEN_ADDRESS=":3") == 2
    assert port("serve", f"--config={file}", "--web.listen-address=:1") == 1


def test_a_cluster_s_daemon_listens_elsewhere(file: str) -> None:
    assert port("cluster") == 19401
    assert port("cluster", "--config", file) == 5
    assert port("cluster", "--cluster.listen-address", ":6", WEB_LISTEN_ADDRESS=":3") == 6


@pytest.mark.parametrize(
    ("address", "host"),
    [
        (":1", "127.0.0.1"),
        ("0.0.0.0:1", "127.0.0.1"),
        ("[::]:1", "::1"),
        ("10.0.0.7:1", "10.0.0.7"),
        ("[fd00::7]:1", "fd00::7"),
        ("localhost:1", "localhost"),
    ],
)
def test_it_asks_on_an_address_the_daemon_listens_on(address: str, host: str) -> None:
    assert find_endpoint([], {"GPU_EFFICIENCY_WEB_LISTEN_ADDRESS": address}) == Endpoint(host, 1)


@pytest.mark.parametrize(
    ("text", "tls", "certificates"),
    [
        ("basic_auth_users: {a: b}\n", False, False),
        ("# tls_server_config:\n", False, False),
        (TLS, True, False),
        ("{tls_server_config: {cert_file: a}}", True, False),
        (TLS + "  client_auth_type: NoClientCert\n", True, False),
        (TLS + "  client_auth_type: VerifyClientCertIfGiven\n", True, False),
        (TLS + "  # client_auth_type: RequireAnyClientCert\n", True, False),
        (TLS + "  client_auth_type: NoClientCert # RequireAnyClientCert\n", True, False),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", True, True),
        (TLS + "  client_auth_type: 'RequireAnyClientCert'\n", True, True),
    ],
)
def test_tls_and_client_certificates_are_read_from_the_web_configuration(
    text: str, tls: bool, certificates: bool, tmp_path: Path
) -> None:
    web = tmp_path / "web.yaml"
    web.write_text(text)
    wanted = Endpoint("127.0.0.1", 19400, tls, certificates)
    assert find_endpoint([], {"GPU_EFFICIENCY_WEB_CONFIG_FILE": f"{web}"}) == wanted
    for flag in ("--web.config-file", "--web.config.file"):
        assert find_endpoint([*RUN, "serve", flag, f"{web}"], {}) == wanted
        assert find_endpoint([*RUN, "cluster", f"{flag}={web}"], {})[2:] == wanted[2:]


def test_only_a_command_line_of_ours_is_believed(tmp_path: Path) -> None:
    line = tmp_path / "cmdline"
    line.write_bytes(b"/sbin/init\0--web.listen-address\0:1\0")
    assert daemon_arguments(line) == []
    line.write_bytes(b"/sbin/docker-init\0--\0gpu-efficiency\0serve\0--config\0x\0")
    assert daemon_arguments(line)[-2:] == ["--config", "x"]
    assert daemon_arguments(tmp_path / "gone") == []


# -- what is an answer --


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """One that does this with the one connection it accepts, and then closes it; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            line, _ = listening.accept()
            with line:
                line.settimeout(10)
                answer(line)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            thread.join()


def says(text: bytes, asked: list[bytes] | None = None) -> Callable[[socket.socket], None]:
    def answer(line: socket.socket) -> None:
        words = line.recv(4096)
        if asked is not None:
            asked.append(words)
        line.sendall(text)

    return answer


def test_it_asks_for_health_and_takes_200_for_well() -> None:
    asked: list[bytes] = []
    with server(says(b"HTTP/1.1 200 OK\r\n\r\nok\n", asked)) as number:
        check(Endpoint("127.0.0.1", number))
    assert asked[0].startswith(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "answers HTTP/1.1 503 Service Unavailable"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "answers HTTP/1.1 2000 OK"),
        (b"SSH-2.0-OpenSSH 200 \r\n", "answers SSH"),
        (b"", "answers nothing"),
    ],
)
def test_nothing_else_is_well(text: bytes, complaint: str) -> None:
    with server(says(text)) as number, pytest.raises(OSError, match=complaint):
        check(Endpoint("127.0.0.1", number))


@pytest.fixture(name="context", scope="module")
def _context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A server's, with a certificate for a name that nobody asks for."""
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run(
        [*words, "-subj", "/CN=other", "-keyout", "key", "-out", "crt"], cwd=folder, check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context


def test_behind_tls_it_asks_the_same_whatever_the_certificate_says(context: ssl.SSLContext) -> None:
    def answer(line: socket.socket) -> None:
        with context.wrap_socket(line, server_side=True) as wrapped:
            says(b"HTTP/1.1 200 OK\r\n\r\nok\n")(wrapped)

    with server(answer) as number:
        check(Endpoint("127.0.0.1", number, tls=True))


def test_who_wants_our_certificate_is_well_when_it_begins_a_handshake(context: ssl.SSLContext) -> None:
    def answer(line: socket.socket) -> None:
        with pytest.raises((ssl.SSLError, OSError)), context.wrap_socket(line, server_side=True):
            """The client has seen enough and is gone."""

    with server(answer) as number:
        check(Endpoint("127.0.0.1", number, tls=True, client_certificates=True))


@pytest.mark.parametrize("text", [b"HTTP/1.1 200 OK\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28", b""])
def test_who_wants_our_certificate_and_begins_none_is_not_well(text: bytes) -> None:
    with server(says(text)) as number, pytest.raises(OSError, match="does not begin a TLS handshake"):
        check(Endpoint("127.0.0.1", number, tls=True, client_certificates=True))


def test_the_answer_is_a_status_and_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(healthcheck, "INIT_CMDLINE", Path("/nowhere"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
    monkeypatch.setenv("GPU_EFFICIENCY_WEB_LISTEN_ADDRESS", f"127.0.0.1:{number}")
    assert main() == 1
    assert "Connection refused" in capsys.readouterr().out
    monkeypatch.setenv("GPU_EFFICIENCY_WEB_CONFIG_FILE", "/nowhere/web.yaml")
    assert main() == 1
    assert capsys.readouterr().out == "unhealthy: [Errno 2] No such file or directory: '/nowhere/web.yaml'\n"
    monkeypatch.delenv("GPU_EFFICIENCY_WEB_CONFIG_FILE")
    with server(says(b"HTTP/1.1 200 OK\r\n\r\nok\n")) as number:
        monkeypatch.setenv("GPU_EFFICIENCY_WEB_LISTEN_ADDRESS", f"127.0.0.1:{number}")
        assert main() == 0
    assert capsys.readouterr().out == ""
