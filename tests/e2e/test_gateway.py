"""A login node: users ask the shipped gateway for reports, which asks a served daemon as its configuration says.

The user directory is a stand-in; uids, sockets, daemon and command are real. A gateway that asks a real sacct is in
tests/e2e/test_slurm_accounting.py.
"""

import os
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import bcrypt
import httpx
import pytest

from exporter.web.security import WebConfigWatcher
from tests.certificates import Authority
from tests.e2e.login_node import report, serving
from tests.e2e.running import Daemon, Program, command, daemon, environment, running
from tests.waiting import PATIENCE, wait_for
from tests.web.serving import served

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")]
ADA, BARBARA = 54321, 54322
_WITH_USERS = f"""
import pwd, sys
from types import SimpleNamespace
names = {{{ADA}: "ada", {BARBARA}: "barbara", 0: "root"}}
pwd.getpwuid = lambda uid: SimpleNamespace(pw_name=names[uid])
from exporter.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(name="node", scope="module")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("node"), "demo") as served:
        yield served


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    """A folder that all users may search: pytest's own are closed to others."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def job_of(node: Daemon, user: str) -> str:
    jobs = node.get("/api/v1/jobs").json()["jobs"]
    return next(str(each["owner"]["job_id"]) for each in jobs if each["owner"]["user"] == user)


@contextmanager
def gateway(folder: Path, *lines: str) -> Iterator[Path]:
    """The command `gateway` with those lines in [gateway] and after it; yields its socket."""
    with gateway_process(folder, *lines):
        yield folder / "gateway.sock"


@contextmanager
def gateway_process(folder: Path, *lines: str) -> Iterator[Program]:
    path = folder / "gateway.sock"
    (folder / "config.toml").write_text("\n".join((f'[gateway]\nsocket = "{path}"', *lines)))
    words = [sys.executable, "-c", _WITH_USERS, "gateway", "--config", f"{folder}/config.toml"]
    with serving(words, folder / "log", path) as program:
        yield program


def test_the_command_of_a_summary_works_on_a_login_node(node: Daemon, folder: Path) -> None:
    """By itself, and for the user's own job alone: another's and none are the same."""
    own, other = job_of(node, "ada"), job_of(node, "barbara")
    with gateway(folder, f'nodes = ["{node.url}"]') as path:
        done = report(ADA, path, own)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Job {own} ")
        assert " of ada" in done.stdout.partition("\n")[0]
        assert report(BARBARA, path, other).returncode == 0
        refused, absent = report(ADA, path, other), report(ADA, path, "4711")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.replace(other, "JOB") == absent.stderr.replace("4711", "JOB")
        assert "tells each user of his own jobs alone" in refused.stderr
        assert report(0, path, own).returncode == 1, "root is a user like the others"


def test_a_user_who_may_not_read_the_hosts_own_store_asks_the_gateway(node: Daemon, folder: Path) -> None:
    """The package's daemon made it, on a login node that has its unit too."""
    (folder / "own").mkdir(mode=0o700)
    with gateway(folder, f'nodes = ["{node.url}"]') as path:
        done = report(ADA, path, job_of(node, "ada"), store=f"{folder}/own/history.db")
        assert done.returncode == 0, done.stderr


def test_totals_are_of_the_users_own_jobs_and_say_so(node: Daemon, folder: Path) -> None:
    with gateway(folder, f'nodes = ["{node.url}"]') as path:
        done = report(ADA, path, "--all", "--by", "user", "--json")
        assert done.returncode == 0, done.stderr
        assert '"barbara"' not in done.stdout
        assert "tells each user of his own jobs alone" in done.stdout


def test_the_sites_proxy_names_the_user(node: Daemon, folder: Path) -> None:
    """The proxy is who runs the tests."""
    with gateway(folder, f'nodes = ["{node.url}"]', 'proxy_user = "root"', 'user_header = "X-Site-User"') as path:
        with httpx.Client(transport=httpx.HTTPTransport(uds=f"{path}"), timeout=PATIENCE) as proxy:
            found = proxy.get("http://localhost/api/v1/receipts", headers={"X-Site-User": "barbara"}).json()
            assert {each["owner"]["user"] for each in found["receipts"]} == {"barbara"}
            assert proxy.get("http://localhost/api/v1/receipts").status_code == 403
        named = report(ADA, path, job_of(node, "barbara"), "--header", "X-Site-User: barbara")
        assert named.returncode == 1, "a header counts of nobody else"


def test_nodes_that_are_down_are_the_reason(folder: Path) -> None:
    with gateway(folder, 'nodes = ["127.0.0.1:1"]') as path:
        done = report(ADA, path, "4711")
        assert done.returncode == 1
        assert "answered HTTP 503: http://127.0.0.1:1 cannot be reached" in done.stderr


def test_a_new_password_and_authority_need_no_restart_and_sighup_reads_the_file(folder: Path) -> None:
    authority = Authority(folder)
    authority.issue("server")
    hashed = bcrypt.hashpw(b"new", bcrypt.gensalt(4)).decode()
    (folder / "web.yml").write_text(
        f"tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\nbasic_auth_users:\n  gateway: {hashed}\n"
    )
    header, config = folder / "header", folder / "config.toml"
    header.write_text(f"Authorization: Basic {b64encode(b'gateway:old').decode()}\n")
    with served(guarding=WebConfigWatcher(folder / "web.yml")) as site:
        node = f"https://127.0.0.1:{site.ports[0]}"
        lines = f'nodes = ["{node}"]', f'header_file = "{header}"', f'ca_file = "{authority.certificate}"'
        path = folder / "gateway.sock"
        with gateway_process(folder, *lines) as program:
            assert "HTTP 401" in report(ADA, path, "4711").stderr
            header.write_text(f"Authorization: Basic {b64encode(b'gateway:new').decode()}\n")
            assert "HTTP 401" not in report(ADA, path, "4711").stderr
            header.unlink()
            assert "gateway.header_file" in report(ADA, path, "4711").stderr
            config.write_text(config.read_text() + '\n[slurm]\nbin_dir = "/elsewhere"\n')
            program.process.send_signal(signal.SIGHUP)
            wait_for(lambda: "restart is needed to apply changes of slurm" in program.log(), "the file is read again")
            assert "gateway.header_file" in report(ADA, path, "4711").stderr, "it still serves"


def test_without_the_gateway_the_reason_is_that(folder: Path) -> None:
    path = folder / "gateway.sock"
    with running([sys.executable, "-c", f"import socket; socket.socket(1).bind({f'{path}'!r})"], folder / "log", {}):
        wait_for(path.is_socket, "what a gateway left behind that was killed")
    done = report(ADA, path, "4711")
    assert f"unix:{path} cannot be reached" in done.stderr


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((), "gateway.nodes: names none"),
        (('nodes = ["ftp://n1"]',), "'ftp://n1' is not like http://node7:19400"),
        (('nodes = ["n1:1"]', 'proxy_user = "nobody-here"'), "gateway.proxy_user: there is no user 'nobody-here'"),
        (('nodes = ["n1:1"]', '[privacy]\nusers = "drop"'), "no job is known to be one's own"),
        (('nodes = ["n1:1"]', 'header_file = "/nowhere"'), "gateway.header_file: /nowhere: cannot be read"),
        (('nodes = ["n1:1"]', 'ca_file = "/nowhere"'), "gateway.ca_file: /nowhere"),
        (('nodes = ["https://n1:1", "n2:1"]', 'header_file = "HEADER"'), "gateway.nodes: 'http://n2:1' is not https"),
    ],
)
def test_what_cannot_be_used_is_said_at_the_start(folder: Path, lines: tuple[str, ...], why: str) -> None:
    (folder / "HEADER").write_text("Authorization: Basic eA==\n")
    text = "\n".join((f'[gateway]\nsocket = "{folder}/gateway.sock"', *lines))
    (folder / "config.toml").write_text(text.replace("HEADER", f"{folder}/HEADER"))
    words = command("gateway", "--config", f"{folder}/config.toml")
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr
