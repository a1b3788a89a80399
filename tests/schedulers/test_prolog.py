"""The Slurm prolog and epilog in a real shell: the files they leave in the directory, and that they never fail."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from exporter.schedulers.mapping_dir import JobFiles
from tests.schedulers.mapping import read_mapping

DATA = Path(__file__).parents[2] / "exporter" / "data"
PROLOG, EPILOG = DATA / "slurm-prolog.sh", DATA / "slurm-epilog.sh"
SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]


class Node:
    """A node's directory, and jobs that start and end."""

    def __init__(self, root: Path) -> None:
        self.path, self.shell = root / "run" / "jobs", "sh"
        self.environ: dict[str, str] = {}

    def start(self, script: Path, job: str | None, gpus: str | None = None) -> subprocess.Popen[str]:
        environ = {"GPU_EFFICIENCY_JOBS_DIR": str(self.path), **self.environ}
        environ |= {} if job is None else {"SLURM_JOB_ID": job}
        environ |= {} if gpus is None else {"SLURM_JOB_GPUS": gpus}
        shell = shutil.which(self.shell)
        assert shell
        command = [shell, *(["sh"] if self.shell == "busybox" else []), str(script)]
        return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, script: Path, job: str | None, gpus: str | None = None) -> str:
        """Run it and return its output. It must always succeed: a failure drains the node."""
        child = self.start(script, job, gpus)
        said, complaints = child.communicate()
        assert (child.returncode, said) == (0, "")
        return complaints

    def prolog(self, job: str | None, gpus: str | None) -> str:
        return self.run(PROLOG, job, gpus)

    def epilog(self, job: str | None) -> str:
        return self.run(EPILOG, job)

    def jobs(self) -> dict[str, tuple[str, ...]]:
        return read_mapping(self.path)

    def names(self) -> set[str]:
        return {entry.name for entry in self.path.iterdir()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("shell", ["sh", *SHELLS])
def test_a_job_comes_and_goes(node: Node, shell: str) -> None:
    node.shell = shell
    assert node.prolog("12", "0,2,10") == ""
    assert node.jobs() == {"0": ("12",), "2": ("12",), "10": ("12",)}
    assert node.prolog("13", "2") == ""
    assert node.jobs() == {"0": ("12",), "2": ("12", "13"), "10": ("12",)}
    assert node.epilog("12") == ""
    assert node.jobs() == {"2": ("13",)}
    assert node.epilog("13") == ""
    assert node.names() == set(), "a file without jobs is taken away, and nothing else is left"


def test_the_files_are_as_dcgm_exporter_reads_them(node: Node) -> None:
    node.prolog("12", "0")
    node.prolog("13", "0")
    assert (node.path / "0").read_bytes() == b"12\n13\n"


def test_others_may_read_what_is_made(node: Node) -> None:
    before = os.umask(0o077)
    try:
        node.prolog("12", "0")
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in (node.path, node.path.parent)}
    assert (modes, (node.path / "0").stat().st_mode & 0o777) == ({0o755}, 0o644)


def test_twice_is_once(node: Node) -> None:
    for _ in range(2):
        node.prolog("12", "0,1")
    assert node.jobs() == {"0": ("12",), "1": ("12",)}
    for _ in range(2):
        assert node.epilog("12") == ""
    assert node.names() == set()


def test_a_job_is_told_from_one_whose_number_begins_alike(node: Node) -> None:
    for job in ("123", "12", "1"):
        node.prolog(job, "0")
    node.epilog("12")
    assert node.jobs() == {"0": ("123", "1")}


def test_a_file_of_somebody_else_s_making_is_kept_but_for_the_job(node: Node) -> None:
    node.path.mkdir(parents=True)
    (node.path / "0").write_text("11 alice\n\n12 bob\n13")
    (node.path / "1.7").write_text("12\n")
    (node.path / "README").write_text("12\n")
    (node.path / "5").mkdir()
    node.prolog("12", "0")
    assert (node.path / "0").read_text() == "11 alice\n13\n12\n"
    node.epilog("12")
    assert (node.path / "0").read_text() == "11 alice\n13\n"
    assert node.names() == {"0", "5", "README"}
    assert (node.path / "README").read_text() == "12\n"


def test_a_job_with_its_user_beside_it_goes_too(node: Node) -> None:
    node.path.mkdir(parents=True)
    (node.path / "0").write_text("12 bob")
    (node.path / "1").write_text("11 alice\n12 bob\n")
    node.epilog("12")
    assert node.jobs() == {"1": ("11",)}


def test_a_job_without_gpus_leaves_nothing(node: Node) -> None:
    assert node.prolog("12", None) == ""
    assert node.prolog("12", "") == ""
    assert node.epilog("12") == ""
    assert not node.path.exists()


def test_ranges_are_understood(node: Node) -> None:
    node.prolog("12", "0,4-6,1023")
    assert set(node.jobs()) == {"0", "4", "5", "6", "1023"}


@pytest.mark.parametrize(
    "gpus",
    ["x", "../7", "/etc/x", "-1", "1-", "0x1", "1024", "01", "1 2", "$(touch hacked)", "`id`", "*", "9" * 30, "MIG-1"],
)
def test_a_number_that_is_none_is_left_out_and_told(node: Node, gpus: str) -> None:
    complaints = node.prolog("12", f"0,{gpus},3")
    assert node.jobs() == {"0": ("12",), "3": ("12",)}
    assert node.names() == {"0", "3"}
    assert "job 12: SLURM_JOB_GPUS is no list of numbers below 1024, left out: " in complaints


@pytest.mark.parametrize("job", [None, "", "x", "12;id", "../12", "-1", "1 2", "1\n2", "$(id)", "*", "9" * 40])
def test_a_job_id_that_is_none_writes_nothing(node: Node, job: str | None) -> None:
    assert "SLURM_JOB_ID is no number" in node.prolog(job, "0")
    assert not node.path.exists()
    node.prolog("12", "0")
    assert "SLURM_JOB_ID is no number" in node.epilog(job)
    assert node.jobs() == {"0": ("12",)}


def test_a_hostile_environment_changes_nothing(node: Node, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("mv", "rm", "tr", "flock", "mkdir"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/hacked\n")
        (tmp_path / "bin" / name).chmod(0o755)
    node.environ = {"PATH": str(tmp_path / "bin"), "IFS": "0", "ENV": "/nonexistent", "LC_ALL": "tr_TR.UTF-8"}
    node.environ |= {"job": "99", "dir": "/nonexistent", "new": "/", "CDPATH": "/", "gpu": "7", "line": "x"}
    node.prolog("12", "0,1")
    assert node.jobs() == {"0": ("12",), "1": ("12",)}
    node.epilog("12")
    assert node.names() == set()
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("where", ["/proc/no/jobs", "/dev/null/jobs", "/dev/null"])
def test_a_directory_that_cannot_be_made_is_told_and_fails_nothing(node: Node, where: str) -> None:
    node.path = Path(where)
    assert "cannot make" in node.prolog("12", "0")
    assert node.epilog("12") == ""


def test_a_directory_that_cannot_be_written_is_told_and_fails_nothing(node: Node) -> None:
    node.path = Path("/proc/self")  # a directory where not even root makes files
    assert "job 12: cannot write /proc/self/0" in node.prolog("12", "0")
    node.epilog("12")


def test_a_file_that_cannot_be_replaced_is_told_and_the_others_are_written(node: Node) -> None:
    (node.path / "0" / "in the way").mkdir(parents=True)
    assert "cannot write" in node.prolog("12", "0,1")
    assert node.jobs()["1"] == ("12",)
    assert node.epilog("12") == ""
    assert node.jobs() == {}
    assert {entry.name for entry in (node.path / "0").iterdir()} == {"in the way"}


# Concurrency.


@pytest.fixture
def without_flock(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the scripts that find every command but flock."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("mkdir", "rmdir", "mv", "rm", "tr", "sleep", "sh", "logger"):
        if found := shutil.which(name):
            (commands / name).symlink_to(found)
    copies = tuple(tmp_path / script.name for script in (PROLOG, EPILOG))
    for script, copy in zip((PROLOG, EPILOG), copies, strict=True):
        text = script.read_text()
        assert text.count("PATH=/usr/sbin:/usr/bin:/sbin:/bin\n") == 1
        copy.write_text(text.replace("PATH=/usr/sbin:/usr/bin:/sbin:/bin\n", f"PATH={commands}\n"))
    return copies[0], copies[1]


def at_once(node: Node, prolog: Path, epilog: Path, *, jobs: int) -> None:
    """All jobs start on two GPUs at once, then the even ones end while others start; no file is lost."""
    first = [node.start(prolog, str(job), "0,1") for job in range(1, jobs + 1)]
    assert [child.wait() for child in first] == [0] * jobs
    everyone = {str(job) for job in range(1, jobs + 1)}
    assert {gpu: set(held) for gpu, held in node.jobs().items()} == {"0": everyone, "1": everyone}
    second = [node.start(epilog, str(job)) for job in range(2, jobs + 1, 2)]
    second += [node.start(prolog, str(job), "1,2") for job in range(1001, 1011)]
    assert [child.wait() for child in second] == [0] * len(second)
    odd = {str(job) for job in range(1, jobs + 1, 2)}
    late = {str(job) for job in range(1001, 1011)}
    assert {gpu: set(held) for gpu, held in node.jobs().items()} == {"0": odd, "1": odd | late, "2": late}
    assert node.names() == {"0", "1", "2"}
    for child in first + second:
        child.communicate()


@pytest.mark.slow
def test_fifty_at_once_lose_nobody(node: Node) -> None:
    assert shutil.which("flock"), "util-linux is needed for this test"
    at_once(node, PROLOG, EPILOG, jobs=50)


@pytest.mark.slow
def test_without_flock_some_at_once_lose_nobody(node: Node, without_flock: tuple[Path, Path]) -> None:
    at_once(node, *without_flock, jobs=12)


@pytest.mark.slow
def test_a_lock_left_behind_holds_nobody_for_good(node: Node, without_flock: tuple[Path, Path]) -> None:
    (node.path / ".lock").mkdir(parents=True)
    node.run(without_flock[0], "12", "0")
    assert node.jobs() == {"0": ("12",)}
    assert node.names() == {"0"}


def test_a_reader_never_sees_half_a_file(node: Node) -> None:
    node.prolog("1", "0")
    files, seen = JobFiles(node.path), set()
    children = [node.start(PROLOG, str(job), "0") for job in range(100001, 100021)]
    while any(child.poll() is None for child in children):
        seen |= set(files.read(1 << 62)["0"].jobs)
    seen |= set(files.read(1 << 62)["0"].jobs)
    for child in children:
        child.communicate()
    assert seen == {"1", *(str(job) for job in range(100001, 100021))}


# Promises of the script's text.


@pytest.mark.parametrize("script", [PROLOG, EPILOG])
def test_the_scripts_are_executable_and_say_how_to_install_them(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/bin/sh\n")
    assert os.access(script, os.X_OK)
    assert "always exits 0" in text
    assert "/run/gpu-efficiency/jobs" in text
