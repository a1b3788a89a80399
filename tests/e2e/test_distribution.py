"""Wheel, source distribution and Debian package: built from a clean copy of this tree, looked into, installed, started.

With the tools that the image is built with (`requirements-image.lock`) and pip as it is. Not here: an upload.
"""

import gzip
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from email import message_from_bytes
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml

from exporter import __version__
from exporter.cli import main
from release import build, deb
from tests.archives import unpack
from tests.e2e.running import ROOT, Page, environment, running
from tests.image import bare
from tests.image.contained import ENGINES_OWN, Process, ran, why_not
from tests.image.ours import wheels
from tests.nvml_stub.build import LIBRARY
from tests.nvml_stub.build import build as nvml
from tests.systemd.installed import CLUSTER, UNIT, WORLD, Node
from tests.systemd.machine import Machine, have, started
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
NAME = f"gpu_efficiency_exporter-{__version__}"
INFO, DATA = f"{NAME}.dist-info", f"{NAME}.data/data/share/gpu-efficiency"
MAN_PAGE = f"{NAME}.data/data/share/man/man1/gpu-efficiency.1"
EPOCH = 1_700_000_000
ANSIBLE, EXAMPLE = ROOT / ".venv/release", ROOT / "examples/ansible"
NAME_OF_LIST = f"{NAME}/gpu_efficiency_exporter.egg-info/SOURCES.txt"
"""It also names what setuptools itself added to the source distribution that it was made from."""
MADE_HERE = shutil.ignore_patterns(
    ".git", ".venv", ".cache", ".*_cache", ".hypothesis", ".coverage", "__pycache__", "*.egg-info", "build", "dist"
)
"""Names that git ignores, `.gitignore`; a folder called build in them is none of ours."""
AT_THE_TOP = {
    "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile", "LICENSE", "MANIFEST.in", "Makefile", "PKG-INFO", "README.md",
    "CODE_OF_CONDUCT.md", "GOVERNANCE.md", "SECURITY.md",
    "compose.yaml", "pyproject.toml", "requirements-image.lock", "requirements-runtime.lock",
    "requirements.bindings.lock", "requirements.fuzz.lock", "requirements.lock", "requirements.peers.lock",
    "requirements.release.lock", "requirements.site.lock",
    "requirements.training.lock", "setup.cfg", ".dockerignore",
    ".gitignore",
}  # fmt: skip
"""Files; setuptools adds PKG-INFO and setup.cfg."""


class Built(NamedTuple):
    """What is uploaded, and what the source distribution gives."""

    sdist: Path
    wheel: Path
    sdist_again: Path
    again: Path


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built here, and again from the unpacked source distribution: in another folder, with files of another age."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(ROOT, folder / "copy", ignore=MADE_HERE)
    for source, into in ((folder / "copy", folder / "direct"), (folder / "unpacked" / NAME, folder / "again")):
        into.mkdir()
        build.distributions(source, into, epoch=EPOCH)
        if into.name == "direct":
            unpack(into / f"{NAME}.tar.gz", folder / "unpacked")
    return Built(
        *sorted((folder / "direct").iterdir(), reverse=True), *sorted((folder / "again").iterdir(), reverse=True)
    )


def content(wheel: Path) -> dict[str, bytes]:
    """Every file in it; RECORD lists the others by hash and is pip's to check."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def of_sdist(file: Path) -> dict[str, bytes]:
    """Every file in it."""
    with tarfile.open(file) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def sources(*folders: str) -> Iterator[str]:
    """Every file of this tree below these folders that is not made here."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{path.relative_to(ROOT)}"


def test_the_names_are_those_of_this_release_for_any_machine(made: Built) -> None:
    assert made.sdist.name == f"{NAME}.tar.gz"
    assert made.wheel.name == made.again.name == f"{NAME}-py3-none-any.whl"


def test_the_wheel_has_the_package_its_data_and_licence_and_nothing_of_the_tests(made: Built) -> None:
    names = set(content(made.wheel))
    package = {name for name in names if name.startswith("exporter/")}
    assert package == set(sources("exporter"))
    assert {"exporter/py.typed", "exporter/data/gpu_specs.csv", "exporter/data/slurm-prolog.sh"} < package
    info = {name for name in names if name.startswith(f"{INFO}/")}
    assert info == {
        f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    }
    data = {name for name in names if name.startswith(f"{DATA}/")}
    assert names == package | info | data | {MAN_PAGE}
    assert content(made.wheel)[f"{INFO}/top_level.txt"] == b"exporter\n"
    assert content(made.wheel)[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_brings_what_bare_metal_needs(made: Built) -> None:
    files = {name.removeprefix(f"{DATA}/"): body for name, body in content(made.wheel).items() if name.startswith(DATA)}
    units = {f"systemd/{path.name}": path for path in (ROOT / "systemd").glob("*.service")}
    assert {"systemd/gpu-efficiency.service", "systemd/gpu-efficiency-cluster.service"} <= set(units)
    slurm = {f"slurm/slurm-{when}.sh": ROOT / f"exporter/data/slurm-{when}.sh" for when in ("prolog", "epilog")}
    for name, path in (units | slurm).items():
        assert files[name] == path.read_bytes(), name
    assert {name.partition("/")[0] for name in files} >= {"sysusers.d", "tmpfiles.d"}


def test_the_wheel_brings_the_man_page(made: Built) -> None:
    assert content(made.wheel)[MAN_PAGE] == (ROOT / "docs/gpu-efficiency.1").read_bytes()


def test_the_metadata_names_what_is_needed_and_shows_the_readme(made: Built) -> None:
    told = message_from_bytes(content(made.wheel)[f"{INFO}/METADATA"])
    assert (told["Name"], told["Version"]) == ("gpu-efficiency-exporter", __version__)
    assert (told["License-Expression"], told["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    needed = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split("<")[0].split(">")[0] for line in needed} == {
        "prometheus-client", "nvidia-ml-py", "fastapi", "uvicorn", "msgspec", "httpx", "PyYAML", "bcrypt", "h11",
        "Jinja2",
    }  # fmt: skip
    assert content(made.wheel)[f"{INFO}/entry_points.txt"] == (
        b"[console_scripts]\ngpu-efficiency = exporter.cli:main\n"
    )


def test_the_source_distribution_is_the_whole_repository_and_nothing_made_from_it(made: Built) -> None:
    with tarfile.open(made.sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    names = {member.name.removeprefix(f"{NAME}/") for member in members}
    assert {name for name in names if "/" not in name} == AT_THE_TOP
    folders = sorted(
        path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in MADE_HERE("", [path.name])
    )
    ours = {name for name in names if "/" in name and ".egg-info/" not in name}
    assert ours == set(sources(*folders))
    assert all(member.isfile() for member in members)
    assert {(member.mtime, member.mode, member.uid, member.uname) for member in members} == {
        (EPOCH, mode, 0, "") for mode in (0o644, 0o755)
    }


def test_the_source_distribution_gives_the_same_files_to_the_last_byte(made: Built) -> None:
    assert content(made.again) == content(made.wheel)
    assert made.again.read_bytes() == made.wheel.read_bytes()
    again, before = of_sdist(made.sdist_again), of_sdist(made.sdist)
    assert {name for name in before if again[name] != before[name]} <= {NAME_OF_LIST}


@pytest.fixture(name="python", scope="module")
def _python(made: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment in which the wheel and what it needs are installed."""
    folder = tmp_path_factory.mktemp("venv")
    python = folder / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", f"{python}", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-compile", "--no-index", "--find-links", f"{wheels()}"]
    subprocess.run([*pip, "--require-hashes", "-r", f"{ROOT / 'requirements-runtime.lock'}"], check=True, timeout=300)
    subprocess.run([*pip, f"{made.wheel}"], check=True, timeout=300)  # with its dependencies, which must be there
    return python


def test_it_installs_into_an_empty_environment_and_the_demo_answers(python: Path, tmp_path: Path) -> None:
    command = python.with_name("gpu-efficiency")
    env = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    said = subprocess.run([command, "--version"], capture_output=True, text=True, env=env, cwd=tmp_path, check=True)
    assert said.stdout == f"gpu-efficiency {__version__}\n"
    units = python.parents[1] / "share/gpu-efficiency/systemd/gpu-efficiency.service"
    assert units.read_bytes() == (ROOT / "systemd/gpu-efficiency.service").read_bytes()
    words = [f"{command}", "demo", "--web.listen-address", "127.0.0.1:0"]
    with running(words, tmp_path / "demo.log", env | {"PYTHONUNBUFFERED": "1"}) as demo:
        address = wait_for(lambda: demo.alive() and _address(demo.log()), "it serves")
        with httpx.Client(base_url=f"{address}", trust_env=False) as client:
            wait_for(lambda: client.get("/readyz").status_code == 200, "/readyz")
            assert len(Page(client.get("/metrics").text).keeps_the_law().states()) == 8
        assert demo.end() == 0


@pytest.fixture(name="published", scope="module")
def _published(made: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of an index that has this wheel and what it needs, for pipx and uv; nothing else is asked."""
    folder = tmp_path_factory.mktemp("home")
    (folder / made.wheel.name).symlink_to(made.wheel)
    env = {name: value for name, value in environment().items() if not name.startswith(("PYTHON", "PIPX_", "UV_"))}
    uv = {
        "OFFLINE": "1",
        "NO_CONFIG": "1",
        "NO_INDEX": "1",
        "FIND_LINKS": f"{wheels()},{folder}",
        "PYTHON": sys.executable,
    }
    return env | {f"UV_{name}": value for name, value in uv.items()} | {"HOME": f"{folder}"}


@pytest.fixture(name="node", scope="module")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a simulated node."""
    words = [sys.executable, "-m", "exporter", "demo", "--web.listen-address", "127.0.0.1:0"]
    with running(words, tmp_path_factory.mktemp("demo") / "log", environment()) as demo:
        address = wait_for(lambda: _address(demo.log()) if demo.alive() else "", "it serves").rstrip("/")
        wait_for(lambda: httpx.get(f"{address}/readyz", trust_env=False).is_success, "/readyz")
        yield address


def documented() -> list[str]:
    """Commands of the installation page that install nothing."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    return re.findall(r"^    ((?:pipx run|uvx) .*)$", page, re.MULTILINE)


@pytest.mark.parametrize("command", documented(), ids=lambda command: f"{command[:40]} ...")
def test_a_documented_command_asks_a_remote_node_without_installing(
    command: str, published: dict[str, str], node: str
) -> None:
    """Standard output is no terminal: `top` prints once."""
    jobs = httpx.get(f"{node}/api/v1/jobs", trust_env=False).json()["jobs"]
    job = jobs[0]["owner"]["job_id"]
    line = command.replace("VERSION", __version__).replace("http://NODE:19400", node).replace("JOB", job)
    program, *words = shlex.split(line)
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *words],
        cwd=published["HOME"], env=published, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert job in done.stdout


def test_commands_that_install_nothing_are_documented_for_the_wheel_and_for_the_name() -> None:
    forms = [(command.split()[0], ".whl" in command) for command in documented()]
    assert sorted(forms) == [("pipx", False), ("pipx", True), ("uvx", False), ("uvx", True)]


def _address(log: str) -> str:
    return next((word for word in log.split() if word.startswith("http://127.0.0.1:")), "")


# -- the Debian package: on a bare Debian, and under a real systemd --


@pytest.fixture(name="package", scope="module")
def _package(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why_not():
        pytest.skip(why_not())
    return deb.package(python, ROOT, tmp_path_factory.mktemp("package"), epoch=EPOCH)


def next_version(package: Path, folder: Path) -> Path:
    """The next release's package: another default configuration, and the libraries gone."""
    folder.mkdir()
    subprocess.run(["dpkg-deb", "--control", f"{package}", f"{folder}/DEBIAN"], check=True)
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", f"{package}"], stdout=subprocess.PIPE) as files:
        words = ["tar", "--extract", f"--exclude=./{deb.HOME}/lib", f"--directory={folder}"]
        subprocess.run(words, stdin=files.stdout, check=True)
    with (folder / deb.CONFIG).open("a") as config:
        config.write("# A new default.\n")
    control = folder / "DEBIAN/control"
    control.write_text(
        control.read_text().replace(f"\nVersion: {deb.debian_version(__version__)}\n", "\nVersion: 99\n")
    )
    built = package.with_name("next.deb")
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", f"{folder}", f"{built}"], check=True)
    return built


def playbook_shell(file: str) -> str:
    """What the playbook runs to install another build of the same version."""
    (play,) = yaml.safe_load((ROOT / "examples/ansible/nodes.yaml").read_text())
    (line,) = (task["ansible.builtin.shell"] for task in play["tasks"] if task["name"].startswith("Install it over"))
    return str(line).replace("/var/cache/{{ deb | basename }}", file)


class Bare:
    """A bare Debian in a folder; the packages are in its /mnt."""

    def __init__(self, folder: Path, packages: Path) -> None:
        folder.mkdir()
        self.root = folder / "root"
        self._image, self._folder, self._binds = bare.python(self.root), folder, {"/mnt": packages}

    def run(self, command: str) -> str:
        """Run a line of shell there as root; what it printed."""
        number = len(list(self._folder.iterdir()))
        words = ["sh", "-ec", command]
        env = self._image.env | {"DEBIAN_FRONTEND": "noninteractive"}
        process = Process(words, env, capabilities=ENGINES_OWN, writable=True, binds=self._binds)
        status, said = ran(self.root, process, self._folder / f"{number}")
        assert status == 0, said
        return said

    def files(self) -> set[str]:
        """Every path but those of what dpkg and the user's database remember."""
        found = subprocess.run(
            ["find", ".", "-printf", "%y %P\n"], cwd=self.root, capture_output=True, text=True, check=True
        )
        past = re.compile(
            r"\w (?:var/(?:lib/(?:dpkg|systemd)|log|cache)\b.*|run/adduser|etc/(?:passwd|group|g?shadow|sub[ug]id)-)"
        )
        return {line for line in found.stdout.splitlines() if not past.fullmatch(line)}

    def accounts(self) -> tuple[str, str]:
        passwd, group = ((self.root / f"etc/{name}").read_text() for name in ("passwd", "group"))
        return passwd, group


@pytest.mark.release
def test_the_package_installs_upgrades_and_goes_on_a_bare_debian(package: Path, tmp_path: Path) -> None:
    new = next_version(package, tmp_path / "next")
    node = Bare(tmp_path / "bare", package.parent)
    files, accounts = node.files(), node.accounts()

    said = node.run(f"dpkg --force-unsafe-io --install /mnt/{package.name}")
    assert "warning" not in said
    assert node.run("cd /; gpu-efficiency --version") == f"gpu-efficiency {__version__}\n"
    config = "/etc/gpu-efficiency/config.toml"
    user = "setpriv --reuid gpu-efficiency --regid gpu-efficiency --init-groups"
    assert "Traceback" not in node.run(f"{user} gpu-efficiency check-config --config {config}")
    _, name, _, gecos, home, _ = shlex.split(
        (ROOT / "systemd/sysusers.d/gpu-efficiency.conf").read_text(), comments=True
    )
    entry = next(line for line in node.accounts()[0].splitlines() if line.startswith(f"{name}:")).split(":")
    assert [entry[4].rstrip(","), *entry[5:]] == [gecos, home, "/usr/sbin/nologin"]
    assert node.run(f"stat -c '%a %U:%G' /etc/gpu-efficiency {config} /run/gpu-efficiency").splitlines() == [
        "750 root:gpu-efficiency", "640 root:gpu-efficiency", "1775 root:gpu-efficiency",
    ]  # fmt: skip
    for shell, file in deb.COMPLETIONS.items():
        with redirect_stdout(StringIO()) as written:
            main(["completion", shell])
        assert (node.root / file).read_text() == written.getvalue()
    page = node.root / "usr/share/man/man1/gpu-efficiency.1.gz"
    assert gzip.decompress(page.read_bytes()) == (ROOT / "docs/gpu-efficiency.1").read_bytes()
    units = node.root / "usr/lib/systemd/system"
    assert all((units / path.name).read_bytes() == path.read_bytes() for path in (ROOT / "systemd").glob("*.service"))
    assert node.run("dpkg --verify gpu-efficiency-exporter") == ""

    again = playbook_shell(f"/mnt/{package.name}")
    assert node.run(again) == ""
    unit, sums = units / UNIT, node.root / f"var/lib/dpkg/info/{deb.NAME}.md5sums"
    content = unit.read_bytes()
    unit.write_text("another build of the same version\n")
    sums.write_text(sums.read_text().replace(hashlib.md5(content, usedforsecurity=False).hexdigest(), "0" * 32))
    assert "Unpacking" in node.run(again)
    assert unit.read_bytes() == content

    node.run(f"echo '[log]' >> {config}; mkdir /var/lib/gpu-efficiency")
    mine = (node.root / deb.CONFIG).read_text()
    node.run(f"dpkg --force-unsafe-io --force-confold --install /mnt/{new.name}")
    assert (node.root / deb.CONFIG).read_text() == mine
    assert node.run(f"stat -c '%a %U:%G' {config}") == "640 root:gpu-efficiency\n"
    assert not (node.root / deb.HOME / "lib").exists()  # a file that nobody owns would have kept it

    node.run("dpkg --remove gpu-efficiency-exporter")
    assert not (node.root / deb.HOME).exists()
    assert (node.root / deb.CONFIG).read_text() == mine
    assert (node.root / "var/lib/gpu-efficiency").is_dir()
    node.run("dpkg --purge gpu-efficiency-exporter")
    assert files ^ node.files() <= {"d opt"}  # nobody's folder, which dpkg removes when it is empty
    assert node.accounts() == accounts


class Packaged(Node):
    """A machine with the package on it, instead of the wheel."""

    def __init__(self, machine: Machine, package: Path) -> None:
        self.machine = machine
        shutil.copy(package, machine.path("/srv/package.deb"))
        have(machine, nvml() / LIBRARY)
        self.world()
        self.drop_in("stand-in", f"[Service]\nEnvironment=NVML_STUB_SCRIPT={WORLD}\n")
        machine.path("/usr/sbin/policy-rc.d").unlink(missing_ok=True)  # a container's refusal to start services
        self.install()

    def install(self) -> None:
        self.machine.run("dpkg", "--force-unsafe-io", "--install", "/srv/package.deb")

    def upgrade(self) -> None:
        """Do what dpkg does after it has unpacked the next version."""
        script = f"/var/lib/dpkg/info/{deb.NAME}.postinst"
        self.machine.run(script, "configure", __version__, DPKG_MAINTSCRIPT_PACKAGE=deb.NAME)

    def enabled(self, unit: str = UNIT) -> bool:
        return self.machine.tried("systemctl", "is-enabled", unit).stdout == "enabled\n"


@pytest.mark.release
def test_the_package_starts_the_daemon_restarts_it_and_takes_it_away(package: Path, tmp_path: Path) -> None:
    with started(tmp_path) as machine:
        node = Packaged(machine, package)
        page = node.until(lambda page: page.total("seconds_total", leak="useful"), "useful time")
        assert page.by("source", "source_info") == {"nvml": 1}
        assert (node.enabled(), node.enabled(CLUSTER)) == (True, False)
        assert node.state(CLUSTER) == ("inactive", "dead")

        before = node.pid()
        machine.run("systemctl", "disable", UNIT)
        node.upgrade()
        paid = page.total("paid_seconds_total")
        node.until(lambda page: page.total("paid_seconds_total") >= paid, "its counters go on")
        assert node.pid() != before
        assert not node.enabled()

        machine.run("dpkg", "--remove", "gpu-efficiency-exporter")
        assert node.state() == ("inactive", "dead")
        assert machine.path("/var/lib/gpu-efficiency/history.db").exists()
        machine.run("dpkg", "--purge", "gpu-efficiency-exporter")
        assert machine.tried("id", "gpu-efficiency").returncode != 0
        drop_in = "/etc/systemd/system/gpu-efficiency.service.d"  # this test's own
        found = machine.run("find", "/etc", "/opt", "/run", "/var", "-xdev", "-name", "*gpu-efficiency*")
        assert found.split() == [drop_in]


class Played(Packaged):
    """A machine on which Ansible's playbook installs the package, over a connection to itself."""

    def install(self) -> None:
        (packages,) = ANSIBLE.glob("lib/python*/site-packages")
        shutil.copytree(packages, self.machine.path("/opt/ansible"))
        shutil.copytree(EXAMPLE, self.machine.path("/srv/ansible"))
        self.machine.run("systemctl", "start", "systemd-tmpfiles-setup.service")  # it empties /tmp, once
        self.machine.path("/srv/nodes").write_text("[gpu_nodes]\nlocalhost ansible_connection=local\n")
        self.play()

    def play(self) -> str:
        """Run the playbook; return what it printed."""
        words = ["sh", "-c", 'cd /; exec python3 -m ansible playbook "$@"', "sh"]
        words += ["--inventory", "/srv/nodes", "/srv/ansible/nodes.yaml"]
        words += ["--extra-vars", "deb=/srv/package.deb", "--extra-vars", "ansible_python_interpreter=/usr/bin/python3"]
        env = {"PYTHONPATH": "/opt/ansible", "HOME": "/root", "ANSIBLE_BECOME_METHOD": "su", "ANSIBLE_NOCOLOR": "1"}
        return self.machine.run(*words, **env)


@pytest.mark.release
def test_the_playbook_installs_configures_and_changes_nothing_the_second_time(package: Path, tmp_path: Path) -> None:
    if not (ANSIBLE / ".installed").exists():
        pytest.skip("needs Ansible")
    with started(tmp_path) as machine:
        node = Played(machine, package)
        page = node.until(lambda page: page.total("seconds_total", leak="useful"), "useful time")
        assert page.by("currency", "price_per_gpu_hour") == {"USD": 5.0}  # both of held
        assert machine.path(f"/{deb.CONFIG}").read_text() == (EXAMPLE / "config.toml").read_text()
        assert machine.run("stat", "-c", "%a %U:%G", f"/{deb.CONFIG}") == "640 root:gpu-efficiency\n"
        before = node.pid()
        recap = node.play()
        assert re.search(r"changed=0 +unreachable=0 +failed=0 ", recap), recap
        assert node.pid() == before
        # As after a run that stopped between writing the configuration and the restart.
        machine.run("touch", f"/{deb.CONFIG}")
        for changed in (1, 0):
            recap = node.play()
            assert re.search(rf"changed={changed} +unreachable=0 +failed=0 ", recap), recap
        assert node.pid() != before


@pytest.mark.release
def test_the_example_of_an_inventory_has_200_nodes_for_the_playbook() -> None:
    if not (ANSIBLE / ".installed").exists():
        pytest.skip("needs Ansible")
    words = f"{ANSIBLE}/bin/ansible-playbook", "--inventory", f"{EXAMPLE}/inventory.ini", f"{EXAMPLE}/nodes.yaml"
    done = subprocess.run([*words, "--list-hosts"], capture_output=True, text=True, check=True)
    assert "hosts (200):\n" in done.stdout
    assert "gpu200.example" in done.stdout
