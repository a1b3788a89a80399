"""The server as others meet it: curl, openssl, Prometheus, schemathesis, and clients that mean harm."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import httpx
import pytest
import yaml
from msgspec import Struct

from tests.certificates import Authority
from tests.e2e.running import Program, command, environment, running
from tests.fuzz import soak
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.e2e
WORD = "correct horse"
ADA = f"ada:{WORD}"
_SERVING = re.compile(r"serving (https?)://\S+:(\d+)/ and /metrics")
_PAGED = re.compile(r"the JSON API at (https?)://\S+:(\d+)/")


class Node(Struct, frozen=True):
    """A demo that serves, its files, and the authority that its clients trust."""

    folder: Path
    program: Program
    port: int
    scheme: str
    page_port: int = 0

    def curl(self, path: str, *words: str, port: int = 0) -> tuple[int, str]:
        """Exit status, and status and body of the answer, of the real curl."""
        url = f"{self.scheme}://localhost:{port or self.port}{path}"
        trust = ("--cacert", f"{self.folder / 'ca.pem'}") if self.scheme == "https" else ()
        asked = ["curl", "-sS", "--noproxy", "*", "--max-time", "20", *trust, "-w", "\n%{http_code}", *words, url]
        got = subprocess.run(asked, capture_output=True, text=True, check=False)
        return got.returncode, got.stdout + got.stderr

    def status(self, path: str, *words: str, port: int = 0) -> int:
        """The answer's, 0 where there was none."""
        code, said = self.curl(path, *words, port=port)
        return 0 if code else int(said.splitlines()[-1])

    def hello(self, *words: str) -> str:
        """What `openssl s_client` says of a handshake."""
        asked = [
            "openssl",
            "s_client",
            "-connect",
            f"127.0.0.1:{self.port}",
            "-CAfile",
            f"{self.folder / 'ca.pem'}",
            *words,
        ]
        done = subprocess.run(asked, input=b"", capture_output=True, timeout=60, check=False)
        return (done.stdout + done.stderr).decode(errors="replace")


@contextmanager
def node(folder: Path, config: str = "", *words: str, listen: str = "127.0.0.1:0") -> Iterator[Node]:
    """A demo with that web configuration, listening; the folder has an authority, a server's key and a client's."""
    flags = ["--web.listen-address", listen, *words]
    if config:
        authority = Authority(folder)
        for name in ("server", "client", "new"):
            authority.issue(name)
        (folder / "web.yml").write_text(config)
        flags += ["--web.config.file", f"{folder / 'web.yml'}"]
    with running(command("demo", "--preroll", "60", *flags), folder / "demo.log", environment()) as program:
        found = wait_for(lambda: _SERVING.search(program.log()) if program.alive() else None, "it says where it serves")
        paged = _PAGED.search(program.log())
        yield Node(folder, program, int(found[2]), found[1], int(paged[2]) if paged else 0)
        assert program.end() == 0
        assert "Traceback" not in program.log()
        assert WORD not in program.log()


def users(cost: int = 4) -> str:
    return f"basic_auth_users:\n  ada: {bcrypt.hashpw(WORD.encode(), bcrypt.gensalt(cost)).decode()}\n"


TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MUTUAL = f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"


def ready(served: Node, *words: str) -> None:
    wait_for(lambda: served.status("/readyz", *words) == 200, "it is ready")


def test_tls_and_a_password_for_curl_and_openssl_and_a_new_certificate(tmp_path: Path) -> None:
    with node(tmp_path, TLS + users()) as served:
        ready(served)
        assert served.status("/metrics") == 401
        assert served.status("/metrics", "-u", "ada:wrong") == 401
        assert served.status("/", "-u", ADA) == 200
        code, page = served.curl("/metrics", "-u", ADA, "--compressed")
        assert (code, "gpu_efficiency_info" in page or "gpu_efficiency_state" in page) == (0, True)
        assert served.status("/api/v1/gpus", "-u", ADA, "--tlsv1.3") == 200
        assert "Verification: OK" in served.hello("-tls1_2")
        for old in ("-tls1_1", "-tls1"):  # openssl itself would not try them above security level 0
            said = served.hello(old, "-cipher", "DEFAULT@SECLEVEL=0")
            assert "Cipher is (NONE)" in said
            assert "unexpected eof" in said, "hung up on: asyncio sends no alert"
        before = _fingerprint(served)
        for end in ("crt", "key"):
            shutil.copy(tmp_path / f"new.{end}", tmp_path / f"server.{end}")
        wait_for(lambda: _fingerprint(served) != before, "the new certificate is served")
        (tmp_path / "server.key").write_text("gone wrong")
        wait_for(lambda: "not reloaded" in served.program.log(), "the bad key is reported")
        assert served.status("/metrics", "-u", ADA) == 200
        assert (
            "server.key" in served.curl("/readyz", "-u", ADA)[1] or "key_file" in served.curl("/readyz", "-u", ADA)[1]
        )
        assert "key_file" not in served.curl("/readyz")[1]


def _fingerprint(served: Node) -> str:
    shown = served.hello("-showcerts").partition("-----BEGIN CERTIFICATE-----")[2]
    return shown.partition("-----END CERTIFICATE-----")[0]


def test_only_with_a_certificate_and_prometheus_has_one(tmp_path: Path) -> None:
    with node(tmp_path, MUTUAL + users()) as served:
        mine = ("--cert", f"{tmp_path / 'client.crt'}", "--key", f"{tmp_path / 'client.key'}")
        ready(served, *mine)
        assert served.status("/healthz") == 0
        assert served.status("/metrics", *mine) == 401
        assert served.status("/metrics", *mine, "-u", ADA) == 200
        assert "unexpected eof" in served.hello("-tls1_2")
        assert "Verification: OK" in served.hello("-tls1_2", *(word.replace("--", "-") for word in mine))
        with prometheus(tmp_path, served) as up:
            wait_for(lambda: up() >= 3, "Prometheus has scraped three times")


@contextmanager
def prometheus(folder: Path, served: Node) -> Iterator["Asked"]:
    """The real one, which scrapes once a second with a certificate and a password."""
    job = {
        "job_name": "node",
        "scheme": "https",
        "tls_config": {"ca_file": "ca.pem", "cert_file": "client.crt", "key_file": "client.key"},
        "basic_auth": {"username": "ada", "password": WORD},
        "static_configs": [{"targets": [f"127.0.0.1:{served.port}"]}],
    }
    paced = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": paced, "scrape_configs": [job]}))
    port = free_port()
    words = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]  # fmt: skip
    with (
        running(words, folder / "prometheus.log", environment()) as program,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as client,
    ):
        yield Asked(client)
        assert program.end() == 0


class Asked:
    """How often the target was scraped, from the server's own store."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def __call__(self) -> float:
        query = {"query": "sum(sum_over_time(up[5m]))"}
        try:
            found = self._client.get("/api/v1/query", params=query).json()["data"]["result"]
        except (httpx.TransportError, KeyError, ValueError):
            return 0
        return float(found[0]["value"][1]) if found else 0


def test_over_the_network_only_what_is_meant_for_all(tmp_path: Path) -> None:
    """All of 127/8 is the loopback, so the machine's own address is asked; where it has none else, that is left out."""
    with node(tmp_path, "", "--web.page-address", "127.0.0.1:0", listen="0.0.0.0:0") as served:
        ready(served)
        assert served.status("/metrics") == 200
        assert [served.status(path) for path in ("/", "/api/v1/gpus", "/openapi.json")] == [403] * 3
        assert [served.status(path, port=served.page_port) for path in ("/", "/metrics", "/api/v1/gpus")] == [200] * 3
        assert served.status("/", "-H", "Host: evil.example", port=served.page_port) == 403
        assert served.status("/metrics", "-X", "DELETE") == 405
    with node(tmp_path, listen="0.0.0.0:0") as served:
        assert "served over the loopback only" in served.program.log()
        ready(served)
        assert served.status("/") == 200
        for address in _own_addresses():
            away = ("--connect-to", f"localhost:{served.port}:{address}:{served.port}")
            assert [served.status(path, *away) for path in ("/", "/api/v1/jobs", "/metrics")] == [403, 403, 200]
            assert "ssh -L" in served.curl("/", *away)[1]


def _own_addresses() -> list[str]:
    said = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout
    return [one for one in said.split() if "." in one and not one.startswith("127.")][:1]


def test_what_is_wrong_with_the_file_is_said_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: gone.crt, key_file: gone.key}")
    for words in (("check-config",), ("demo", "--web.listen-address", "127.0.0.1:0")):
        asked = command(*words, "--web.config-file", f"{tmp_path / 'web.yml'}")
        got = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert got.returncode == 2
        assert re.search(
            r"web\.yml: tls_server_config\.cert_file: \S+gone\.crt: cannot be read: No such file", got.stderr
        )
        assert "Traceback" not in got.stderr


def test_the_interface_is_what_its_description_says(tmp_path: Path) -> None:
    """Schemathesis: every operation, its own checks, against the running server."""
    with node(tmp_path, users()) as served:
        ready(served)
        words = [
            f"{Path(sys.executable).parent / 'schemathesis'}", "run", f"http://127.0.0.1:{served.port}/openapi.json",
            "--auth", ADA, "--max-examples", "6", "--phases", "examples,coverage,fuzzing", "--seed", "7",
            "--generation-database", "none",
        ]  # fmt: skip
        env = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": f"{tmp_path / 'hypothesis'}", "NO_PROXY": "*"}
        got = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False, env=env)
        assert got.returncode == 0, got.stdout[-6000:] + got.stderr[-2000:]
        assert re.search(r"Operations:\s+5 selected / 5 total", got.stdout), got.stdout[-3000:]


def test_fifty_hostile_connections_disturb_neither_sampling_nor_scrapes() -> None:
    """Fifteen seconds of what `python -m tests.fuzz.soak` does for an hour."""
    for seconds in (15, 90):  # on a busy machine an attacker may not come to its first answer
        found = soak.soak(seconds)
        assert found.undisturbed, soak.told(found)
        if "hammer got an answer" in found.attackers and "guesser got 401" in found.attackers:
            break
    assert len(found.times) >= 10
    assert found.files < 250
    assert re.search(r"hammer got an answer: [1-9]", found.attackers), found.attackers
    assert re.search(r"guesser got 401: [1-9]", found.attackers), found.attackers
    assert max(found.memory) < found.memory[0] + 120
