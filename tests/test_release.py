"""What a release needs: one version everywhere, its notes, archives without the machine's traces, pinned workflows."""

import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter import __version__
from exporter.cli import build_parser
from exporter.config import Config
from release import build, commands, deb, installed, version
from tests.documents.ours import NAMES

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
EPOCH = 1_700_000_000


def test_every_place_has_the_version_that_the_package_declares() -> None:
    assert version.disagreements(ROOT, __version__) == []


def test_a_new_version_is_written_to_every_place_and_closes_the_section_of_the_change_log(tmp_path: Path) -> None:
    for name in (*version.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version.set_version(tmp_path, "7.8.9rc1", "2030-01-02")
    assert version.disagreements(tmp_path, "7.8.9rc1") == []
    assert len(version.disagreements(tmp_path, __version__)) == len(version.PLACES)
    log = (tmp_path / "CHANGELOG.md").read_text()
    assert log.startswith("# Changelog\n\n## Unreleased\n\n## 7.8.9rc1 - 2030-01-02\n\n")
    was = (ROOT / "CHANGELOG.md").read_text()
    assert version.notes(log, "7.8.9rc1") == version.notes(was, "Unreleased") != ""


def test_notes_are_of_one_version_alone() -> None:
    log = "# Changelog\n\n## Unreleased\n\n## 1.1.0 - 2030-01-02\n\nnew\n\n## 1.0.0 - 2029-01-02\n\nold\n"
    assert [version.notes(log, name) for name in ("1.1.0", "1.0.0", "1.1", "Unreleased")] == ["new\n", "old\n", "", ""]


def test_a_tag_of_another_version_and_a_word_that_is_no_version_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert version.main(["--tag", f"v{__version__}"]) == 0
    assert version.main(["--tag", "v99.0.0"]) == 1
    assert version.main(["v1"]) == 1
    said = capsys.readouterr().err
    assert f"the tag v99.0.0 is not v{__version__}" in said
    assert "v1 is no version" in said


def test_the_packaged_chart_renders_as_the_folder_and_has_no_link(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT / "helm", tmp_path / "copy/helm", copy_function=shutil.copy)
    (copy / "gpu-efficiency/values.yaml").chmod(0o640)
    for source, into in ((ROOT, tmp_path / "one"), (tmp_path / "copy", tmp_path / "two")):
        into.mkdir()
        build.chart(source, into, epoch=EPOCH)
    (packed,) = (tmp_path / "one").iterdir()
    with tarfile.open(packed) as archive:
        assert {(member.isfile(), member.mtime, member.mode, member.uid) for member in archive} == {
            (True, EPOCH, 0o644, 0)
        }
        assert "gpu-efficiency/files/alerts/jobs.yaml" in archive.getnames()
    installed.chart_renders(tmp_path / "one", ROOT)
    build.must_equal(tmp_path / "one", tmp_path / "two")


def test_a_build_that_differs_is_named(tmp_path: Path) -> None:
    for name, content in (("one", b"a"), ("two", b"b")):
        (tmp_path / name).mkdir()
        build.write_archive(tmp_path / name / "x.tgz", [("x", content, True), ("a", b"", False)], epoch=EPOCH)
        (tmp_path / name / "same").touch()
        build.write_sums(tmp_path / name)
    with pytest.raises(build.ReleaseError, match=r"differ: x\.tgz$"):
        build.must_equal(tmp_path / "one", tmp_path / "two")
    assert re.fullmatch(r"([0-9a-f]{64}  \S+\n){2}", (tmp_path / "one/SHA256SUMS").read_text())


def test_debian_sorts_what_comes_before_a_release_before_it() -> None:
    assert [deb.debian_version(each) for each in ("1.2.0", "1.2.0a1", "1.2.0rc1")] == ["1.2.0", "1.2.0~a1", "1.2.0~rc1"]


def test_the_playbook_installs_and_configures_what_the_package_has() -> None:
    """Its modules, and whatever it names of the package; Ansible itself runs it in tests/e2e/test_distribution.py."""
    (play,) = yaml.safe_load((ROOT / "examples/ansible/nodes.yaml").read_text())
    modules = {}
    for task in play["tasks"]:
        (module,) = (key for key in task if key.startswith("ansible.builtin."))
        assert set(task) - {module} <= {
            "name", "register", "until", "retries", "delay", "changed_when",
        }, task["name"]  # fmt: skip
        modules[task["name"]] = task[module]
    configured = modules["Configure the daemon"]
    assert configured["dest"] == f"/{deb.CONFIG}"
    _, *arguments = configured["validate"].split()
    assert f"{build_parser().parse_args(arguments).config}" == "%s"
    assert configured["group"] in (ROOT / "systemd/sysusers.d/gpu-efficiency.conf").read_text().split()
    (restart,) = (script for name, script in modules.items() if name.startswith("Restart the daemon"))
    (unit,) = set(re.findall(r"(?:systemctl restart|ExecMainStartTimestamp) ([\w-]+)", restart))
    assert f"{unit}.service" in {path.name for path in (ROOT / "systemd").iterdir()}
    assert f"find {configured['dest']} " in restart
    assert modules["Wait until it has read its GPUs"]["url"].endswith(f"{Config().web.listen_address}/readyz")


def test_every_command_is_run_from_the_wheel() -> None:
    run = {words[0] for words, _ in commands.RUNS} | {words[0] for words in commands.SERVERS} | {"demo"}
    assert run == NAMES
    for words in (*(words for words, _ in commands.RUNS), *commands.SERVERS):
        build_parser().parse_args(words)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(",".join(commands.EXTRAS).strip(",").split(",")) == set(extras) - {"dev", "image"}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("exit 4", "exit 4, not 0"),
        ("echo Traceback; exit 0", "Traceback"),
        ("test -t 0 || exit 5; stty -icanon; test $(head -c 1) = q && exit 6", "exit 6, not 0"),
    ],
)
def test_a_command_that_ends_otherwise_is_named(tmp_path: Path, script: str, error: str) -> None:
    command = tmp_path / "program"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    run = commands.shown if "test -t" in script else commands.ended
    with pytest.raises(build.ReleaseError, match=rf"(?s)program word: .*{error}"):
        run(command, ["word"], 0, tmp_path)


@pytest.mark.parametrize(
    ("script", "error"),
    [("exit 0", "exit 0"), ("trap 'exit 3' TERM; echo serves; while :; do sleep 0.1; done", "exit 3")],
)
def test_a_server_that_does_not_serve_or_does_not_end_well_is_named(tmp_path: Path, script: str, error: str) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with (
        pytest.raises(build.ReleaseError, match=rf"program word: {error}"),
        installed.serving([f"{program}", "word"], re.compile("serves")),
    ):
        pass


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, path in WORKFLOWS.items():
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {}, f"{name}: each job names its own"
        for job, described in workflow["jobs"].items():
            yield f"{name}: {job}", described


def test_every_action_is_pinned_by_commit_and_names_its_version() -> None:
    for name, path in WORKFLOWS.items():
        for line in re.findall(r"uses:.*", path.read_text()):
            assert re.fullmatch(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), f"{name}: {line}"


def test_every_job_has_a_limit_and_as_few_rights_as_it_needs() -> None:
    for name, job in jobs():
        assert job["timeout-minutes"] <= 60, name
        assert "contents" not in job["permissions"] or name == "release.yml: github" or (
            job["permissions"]["contents"] == "read"
        ), name  # fmt: skip
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts), name


def test_workflows_run_targets_and_programs_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [step["run"] for _, job in jobs() for step in job["steps"] if "run" in step]
    asked = {target for line in lines for target in re.findall(r"^make PYTHON=python ([a-z-]+)$", line, re.MULTILINE)}
    assert asked == {"lint", "workflows", "quick", "dist"} <= targets
    assert {name for line in lines for name in re.findall(r"-m release\.(\w+)", line)} == {"version"}


def images() -> list[str]:
    """What the Dockerfile builds on, and what compose.yaml runs beside it."""
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    others = {service["image"] for service in services if not service["image"].startswith("gpu-efficiency-exporter:")}
    return [*bases, *sorted(others)]


def test_the_page_says_how_each_image_is_pinned() -> None:
    page = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
    assert len(images()) == 5
    assert [image for image in images() if f"`{image}`" not in page] == []


def test_the_release_builds_on_the_dockerfiles_base_by_its_digest(tmp_path: Path) -> None:
    """The step runs with programs that only record how they are called."""
    (step,) = (step for _, job in jobs() for step in job["steps"] if step.get("id") == "push")
    digest = f"sha256:{'0' * 64}"
    stub = f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" >> {tmp_path}/calls\ncase "$*" in *imagetools*) echo {digest};; esac\n'
    for name in ("docker", "jq", "sudo"):
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)
    git = {"GITHUB_REPOSITORY": "Owner/Repository", "GITHUB_REF_NAME": "v1.2.3", "GITHUB_SHA": "0" * 40}
    env = git | {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_OUTPUT": f"{tmp_path}/output"}
    subprocess.run(
        ["bash", "-eo", "pipefail", "-c", f'git() {{ echo 1; }}; {step["run"]}'],
        cwd=ROOT, env=env | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True,
    )  # fmt: skip
    calls = (tmp_path / "calls").read_text().splitlines()
    base = images()[0]
    assert calls[calls.index("inspect") + 1] == base
    assert f"PYTHON_IMAGE={base.rpartition(':')[0]}@{digest}" in calls
    assert not {call for call in calls if call.startswith(("DCGM_IMAGE", "WITH_DCGM"))}
    assert 'base.name="${PYTHON_IMAGE}"' in (ROOT / "Dockerfile").read_text()


def test_nothing_is_published_before_everything_was_built_and_run() -> None:
    described = dict(jobs())
    assert described["release.yml: image"]["needs"] == described["release.yml: chart"]["needs"] == "build"
    assert set(described["release.yml: pypi"]["needs"]) == {"build", "image", "chart"}
    assert described["release.yml: pypi"]["environment"] == "pypi"
    assert yaml.safe_load(WORKFLOWS["release.yml"].read_text())[True] == {"push": {"tags": ["v*"]}}
