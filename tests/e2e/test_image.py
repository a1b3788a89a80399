"""The container image: the Dockerfile's own steps, and what comes out of them started by runc as an engine would.

With its own user, a root file system that cannot be written, no capability, no new privileges and no shell. Not here: a
registry, layers, the seccomp profile an engine brings, another processor than this machine's.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import pytest

from exporter import __version__
from tests.composed import COMPOSE
from tests.e2e.running import Page, site
from tests.image import ours
from tests.image.build import Image
from tests.image.contained import Container, Process, container, ran, why_not
from tests.image.ours import Ours, made
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.release, pytest.mark.skipif(bool(why_not()), reason=why_not())]
SETTINGS = "/mnt"
"""A folder that is in the image: runc would make another there, and the image is kept."""
OPEN = COMPOSE["x-node"]["environment"]
"""So that others than the container itself reach the demo, as compose.yaml has it."""
NO_SHELL = {f"/usr/bin/{name}": Path("/dev/null") for name in ("bash", "dash")}
PAGE = """# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3"} 97
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3"} 0.4
"""
WELL = (0, "")


@pytest.fixture(name="images", scope="module")
def _images() -> Ours:
    return made()


@pytest.fixture(name="image", scope="module")
def _image(images: Ours) -> Image:
    return images.plain


def started(image: Image, *words: str, binds: dict[str, Path] | None = None, host: bool = False, **env: str) -> Process:
    """What `docker run --read-only --cap-drop ALL --security-opt no-new-privileges` is; the shell is gone."""
    uid, _, gid = image.user.partition(":")
    words = words or tuple(image.command)
    return Process(
        [*image.entrypoint, *words],
        image.env | env,
        image.folder,
        (int(uid), int(gid)),
        binds=NO_SHELL | (binds or {}),
        host_network=host,
    )


@contextmanager
def running(
    image: Image, folder: Path, *words: str, binds: dict[str, Path] | None = None, host: bool = False, **env: str
) -> Iterator[Container]:
    """The image running; at the end its stop signal must end it with status 0, without a traceback."""
    process = started(image, *words, binds=binds, host=host, **env)
    with container(image.root, process, folder / "container") as alone:
        wait_for(lambda: alone.program.alive() and "serving http" in alone.program.log(), "it serves")
        yield alone
        alone.signal(image.stop_signal)
        assert alone.program.process.wait(PATIENCE) == 0
        assert "Traceback" not in alone.program.log()


def health(alone: Container, image: Image) -> tuple[int, str]:
    done = alone.does(*image.healthcheck)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.strip()


def scraped(alone: Container, address: str, *words: str) -> Page:
    """The metrics as curl has them from within its network, once it is ready."""
    inside = ["nsenter", "--target", f"{alone.pid()}", "--net", "curl", "--silent", "--show-error", "--fail", *words]

    def answers() -> subprocess.CompletedProcess[str] | None:
        done = subprocess.run([*inside, f"{address}/readyz"], capture_output=True, text=True, check=False)
        return done if done.returncode == 0 and alone.program.alive() else None

    wait_for(answers, "/readyz")
    done = subprocess.run([*inside, f"{address}/metrics"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Page(done.stdout).keeps_the_law()


# -- how it runs --


def test_it_says_its_version_without_a_shell(image: Image, tmp_path: Path) -> None:
    assert ran(image.root, started(image, "--version"), tmp_path / "version") == (0, f"gpu-efficiency {__version__}\n")
    shell = started(image)._replace(words=["/bin/sh", "-c", "true"])
    assert ran(image.root, shell, tmp_path / "shell")[0] != 0


def test_without_a_source_it_ends_with_status_3_and_says_what_to_do(image: Image, tmp_path: Path) -> None:
    status, said = ran(image.root, started(image), tmp_path / "serve")
    assert status == 3
    assert "NVIDIA_DRIVER_CAPABILITIES=utility" in said
    assert "Traceback" not in said


def test_the_demo_has_no_power_answers_is_well_and_ends_when_told(image: Image, tmp_path: Path) -> None:
    with running(image, tmp_path, "demo", **OPEN) as alone:
        told = Path(f"/proc/{alone.pid()}/status").read_text()
        assert re.search(r"^Uid:\s+65532\s+65532\s+65532\s+65532$", told, re.MULTILINE)
        assert set(re.findall(r"^Cap\w+:\s+(\w+)$", told, re.MULTILINE)) == {"0" * 16}
        assert "NoNewPrivs:\t1" in told
        assert len(scraped(alone, "http://127.0.0.1:19400").states()) == 8
        assert health(alone, image) == WELL
        assert "Read-only file system" in alone.does("python", "-c", "open('/opt/gpu-efficiency/x', 'w')").stderr

        os.kill(alone.pid(), signal.SIGSTOP)  # the kernel still accepts connections
        assert health(alone, image) == (1, "unhealthy: timed out")
        os.kill(alone.pid(), signal.SIGCONT)
        wait_for(lambda: health(alone, image) == WELL, "it is well again")


def test_nobody_listens_nobody_is_well(image: Image, tmp_path: Path) -> None:
    idle = started(image)._replace(words=["python", "-c", "import time; print('there', flush=True); time.sleep(600)"])
    with container(image.root, idle, tmp_path / "idle") as alone:
        wait_for(lambda: "there" in alone.program.log(), "it runs")
        assert health(alone, image) == (1, "unhealthy: [Errno 111] Connection refused")


def test_it_serves_beside_a_dcgm_exporter_on_the_nodes_network(image: Image, tmp_path: Path) -> None:
    port = free_port()
    with site(lambda: (PAGE.encode(), "text/plain; version=0.0.4")) as beside:
        words = ("serve", "--source", "dcgm-exporter", "--dcgm-exporter-url", f"http://127.0.0.1:{beside.port}/metrics")
        listen = f"--web.listen-address=127.0.0.1:{port}"
        with running(image, tmp_path, *words, listen, host=True) as alone:
            page = scraped(alone, f"http://127.0.0.1:{port}")
            assert page.by("source", "source_info") == {"dcgm-exporter": 1}
            assert health(alone, image) == WELL


GUARDS = {
    "password": "basic_auth_users: {prometheus: HASH}\n",
    "tls": "tls_server_config: {cert_file: tls.crt, key_file: tls.key}\nbasic_auth_users: {prometheus: HASH}\n",
    "clients": (
        "tls_server_config:\n  cert_file: tls.crt\n  key_file: tls.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: tls.crt\n"
    ),
    "clients, TLS 1.2": (
        "tls_server_config:\n  cert_file: tls.crt\n  key_file: tls.key\n  max_version: TLS12\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: tls.crt\n"
    ),
}


@pytest.fixture(name="certificate", scope="module")
def _certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one that everybody in these tests has, for both sides."""
    folder = tmp_path_factory.mktemp("certificate")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guarded_daemon_is_well(guard: str, image: Image, certificate: Path, tmp_path: Path) -> None:
    settings = shutil.copytree(certificate, tmp_path / "settings")
    password = bcrypt.hashpw(b"pass", bcrypt.gensalt(4)).decode()
    (settings / "web.yaml").write_text(GUARDS[guard].replace("HASH", f'"{password}"'))
    for path in (settings, *settings.iterdir()):
        path.chmod(0o555)  # pytest's folders are root's alone, and the image's user is not root
    env = {"GPU_EFFICIENCY_WEB_CONFIG_FILE": f"{SETTINGS}/web.yaml", **OPEN}
    with running(image, tmp_path, "demo", binds={SETTINGS: settings}, **env) as alone:
        assert health(alone, image) == WELL
        scheme = "http" if guard == "password" else "https"
        words = ("--cacert", f"{settings / 'tls.crt'}", "--user", "prometheus:pass")
        own = ("--cert", f"{settings / 'tls.crt'}", "--key", f"{settings / 'tls.key'}") if "clients" in guard else ()
        assert len(scraped(alone, f"{scheme}://127.0.0.1:19400", *words, *own).states()) == 8


# -- with DCGM --


@pytest.fixture(name="with_dcgm")
def _with_dcgm(images: Ours) -> Image:
    if images.with_dcgm is None:
        pytest.skip(ours.without_dcgm())
    return images.with_dcgm


def test_with_dcgm_it_watches_through_nvidia_s_own_bindings(with_dcgm: Image, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/world.txt").write_text(f"listen {SETTINGS}/engine\ncount 3\nengine up 0\n")
    with running(
        with_dcgm,
        tmp_path,
        *("serve", "--source", "dcgm"),
        binds={SETTINGS: tmp_path / "engine"},
        DCGM_STUB_SCRIPT=f"{SETTINGS}/world.txt",
        GPU_EFFICIENCY_DCGM_ADDRESS=f"unix:{SETTINGS}/engine",
    ) as alone:
        page = scraped(alone, "http://127.0.0.1:19400")
        assert page.by("source", "source_info") == {"dcgm": 1}
        assert len(page.states()) == 3
        assert health(alone, with_dcgm) == WELL
