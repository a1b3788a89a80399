"""The Dockerfile's words, the build context, and the small interpreter that tests/e2e/test_image.py runs them with.

Its steps are run there; what a builder would refuse, or an operator would be surprised by, is looked for here.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter import __version__
from exporter.config import DEFAULT_PORT, load
from tests.image.build import Builder, Image
from tests.image.contained import Process, specification
from tests.image.context import context, copied
from tests.image.dockerfile import DockerfileError, Stage, instructions, stages

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "--failure-threshold", "style", "-"],
        input=TEXT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# -- ours --


def stage(name: str, **given: str) -> Stage:
    return next(each for each in stages(TEXT, given)[1] if each.name == name)


def test_bases_are_arguments_that_a_release_gives_by_digest() -> None:
    before, found = stages(TEXT, {"PYTHON_IMAGE": "python@sha256:1", "DCGM_IMAGE": "dcgm@sha256:2"})
    assert {each.base for each in found} == {"python@sha256:1", "scratch", "dcgm@sha256:2", "dcgm-0"}
    assert before["WITH_DCGM"] == "0"
    default, _ = stages(TEXT, {})
    assert all(re.fullmatch(r"\S+:[\w.-]+", default[name]) for name in ("PYTHON_IMAGE", "DCGM_IMAGE"))


def test_dcgm_is_added_by_one_argument() -> None:
    assert stage("dcgm").base == "dcgm-0"
    assert stage("dcgm", WITH_DCGM="1").base == "dcgm-1"
    assert stage("dcgm-0").base == "scratch"


def test_the_build_stage_installs_from_locks_with_hashes_and_wheels_alone() -> None:
    locks = set()
    for each in stage("build").instructions:
        for command in re.findall(r"install [^&]*", each.rest) if each.name == "RUN" else ():
            if "-r " in command:
                assert "--require-hashes --only-binary :all:" in command
                locks.add(command.split("-r ")[1].strip())
            else:
                assert "--no-index" in command
                assert "--no-deps" in command
    assert locks == {"requirements-image.lock", "requirements-runtime.lock"}


def test_the_version_is_this_one_and_the_port_the_daemons() -> None:
    last = stages(TEXT, {})[1][-1]
    told = {(each.name, each.rest) for each in last.instructions}
    assert {("ARG", f"VERSION={__version__}"), ("EXPOSE", f"{DEFAULT_PORT}"), ("USER", "65532:65532")} <= told
    (health,) = [each for each in last.instructions if each.name == "HEALTHCHECK"]
    assert int(health.flags["timeout"].rstrip("s")) > 4, "the check's own patience, exporter/cli/healthcheck.py"
    module = json.loads(health.rest.removeprefix("CMD "))[-1]
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_both_locks_the_image_is_made_with_pin_what_development_pins() -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"^\S+==\S+", (ROOT / name).read_text(), re.MULTILINE))

    assert pins("requirements-image.lock") < pins("requirements.lock")
    assert {line.partition("==")[0] for line in pins("requirements-image.lock")} >= {
        "build",
        "setuptools",
        "cyclonedx-bom",
    }


def test_the_context_is_what_the_steps_copy_and_no_more() -> None:
    found = set(context(ROOT))
    wanted = {"LICENSE", "README.md", "pyproject.toml", "requirements-image.lock", "requirements-runtime.lock"}
    assert {path for path in found if "/" not in path} == wanted
    assert {path.partition("/")[0] for path in found - wanted} == {"exporter"}
    assert not [path for path in found if "__pycache__" in path]
    assert {"exporter/py.typed", "exporter/core/ledger.py"} < found


def test_the_guide_names_every_argument_with_its_default_and_no_other() -> None:
    guide = (ROOT / "docs/image.md").read_text()
    given = set(re.findall(r"--build-arg (\w+)=", guide))
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \| ([^|]+) \|", guide, re.MULTILINE)
    listed = {name: default for names, default in rows for name in re.findall(r"\w+", names)}
    declared = dict(re.findall(r"^ARG (\w+)=?(.*)$", TEXT, re.MULTILINE)[::-1])
    assert given < set(listed) == set(declared)
    for name in ("PYTHON_IMAGE", "DCGM_IMAGE", "WITH_DCGM"):
        assert listed[name] == f"`{declared[name]}`"


def test_the_guide_s_settings_are_the_daemons() -> None:
    guide = (ROOT / "docs/image.md").read_text()
    values = {"OPEN_PAGE": "true", "LISTEN_ADDRESS": ":1", "CONFIG_FILE": "/web.yaml"}
    names = set(re.findall(r"GPU_EFFICIENCY_WEB_(\w+)", guide))
    assert names == set(values)
    web = load(None, environ={f"GPU_EFFICIENCY_WEB_{name}": values[name] for name in names}).web
    assert (web.open_page, web.listen_address, web.config_file) == (True, ":1", "/web.yaml")


# -- the grammar --


def test_continued_lines_are_one_and_comments_none() -> None:
    (found,) = instructions("# a comment\n\nRUN a \\\n# within\n && b \\\n && c\n")
    assert (found.line, found.name, re.sub(r"\s+", " ", found.rest)) == (3, "RUN", "a && b && c")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ADD x /", "Dockerfile:1: ADD: these tests do not know"),
        ("\nSHELL x", "Dockerfile:2: SHELL: these tests do not know"),
        ("run x", "run: these tests do not know"),
        ("RUN a \\", "the last line goes on"),
        ("RUN a", "before any FROM"),
        ("FROM a as b", "is not FROM image"),
        ("ARG P=a\nFROM --platform=a a", "is not FROM image"),
        ("FROM ${WHO}", "is not declared"),
        ("FROM ${A:-b}", "not a plain variable"),
    ],
)
def test_what_it_does_not_know_is_refused_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(DockerfileError, match=re.escape(complaint)):
        stages(text, {})


# -- what instructions do --


def small(root: Path) -> Image:
    """An image with one file and a setting."""
    (root / "etc").mkdir(parents=True)
    (root / "etc/of-the-base").touch()
    return Image(root, env={"PATH": "/bin"}, command=["sh"])


@pytest.fixture(name="build")
def _build(tmp_path: Path) -> Callable[..., Image]:
    (tmp_path / "context/code/deep").mkdir(parents=True)
    (tmp_path / "context/code/deep/a").write_text("a")
    (tmp_path / "context/b").write_text("b")
    (tmp_path / "work").mkdir()
    builder = Builder(tmp_path / "work", context=tmp_path / "context", wheels=tmp_path, bases={"small": small})
    return builder.build


def test_folders_are_copied_by_content_and_files_by_name(build: Callable[..., Image]) -> None:
    image = build("FROM small\nWORKDIR /src\nCOPY b ./\nCOPY code ./code\nCOPY b code /both/\nCOPY b /as/c")
    files = {f"{path.relative_to(image.root)}" for path in image.root.rglob("*") if path.is_file()}
    assert files == {"etc/of-the-base", "src/b", "src/code/deep/a", "both/b", "both/deep/a", "as/c"}


def test_stages_are_built_when_they_are_needed_and_only_then(build: Callable[..., Image]) -> None:
    text = (
        "ARG WHICH=0\nFROM small AS unused\nCOPY gone /\nFROM scratch AS from-0\nWORKDIR /dcgm\nFROM small AS from-1\n"
        "COPY b /dcgm/\nFROM from-${WHICH} AS chosen\nFROM small\nCOPY --from=chosen /dcgm/ /"
    )
    assert not (build(text).root / "b").exists()
    assert (build(text, WHICH="1").root / "b").read_text() == "b"


def test_variables_come_from_arguments_settings_and_what_is_given(build: Callable[..., Image]) -> None:
    text = 'ARG P=1\nFROM small\nARG P\nARG Q=x$P\nARG R\nENV PATH=/new:$PATH A=1 B=${Q}\nLABEL a="${B} b"\nUSER 5:6'
    image = build(text)
    assert image.env == {"PATH": "/new:/bin", "A": "1", "B": "x1"}
    assert (image.labels, image.user) == ({"a": "x1 b"}, "5:6")
    assert build(text, P="2", R="3").env["B"] == "x2"


def test_an_entrypoint_forgets_the_commands_before_it(build: Callable[..., Image]) -> None:
    image = build('FROM small\nENTRYPOINT ["a"]\nSTOPSIGNAL SIGINT\nHEALTHCHECK --timeout=5s CMD ["h"]\nEXPOSE 1 2')
    assert (image.entrypoint, image.command, image.healthcheck) == (["a"], [], ["h"])
    assert (image.stop_signal, image.ports) == ("SIGINT", ["1", "2"])
    assert build('FROM small\nENTRYPOINT ["a"]\nCMD ["b"]').command == ["b"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("COPY gone /", "gone is not in the context"),
        ("COPY --chown=1:1 b /", "no flag but --from"),
        ("CMD serve", "would need a shell"),
        ("ENTRYPOINT gpu-efficiency", "would need a shell"),
        ("HEALTHCHECK NONE", "is not HEALTHCHECK"),
        ("USER nobody", "is not number:number"),
        ("USER 65532", "is not number:number"),
        ("ENV A", "is not name=value"),
        ("ENV A=$B", "not declared"),
        ("FROM elsewhere", "neither a stage nor an image at hand"),
    ],
)
def test_what_no_engine_could_do_for_us_is_refused(build: Callable[..., Image], line: str, complaint: str) -> None:
    with pytest.raises(DockerfileError, match=re.escape(complaint)):
        build(f"FROM small\n{line}")


# -- the context --


def test_the_last_pattern_that_matches_decides(tmp_path: Path) -> None:
    names = ("a/x.py", "a/__pycache__/x.pyc", "b/x.py", "c", "d/e/f")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".dockerignore").write_text("# all but\n*\n!a\n!c\n!d\n**/__pycache__\nd/*/f\n")
    assert list(context(tmp_path)) == ["a/x.py", "c"]
    copy = copied(tmp_path, tmp_path / "a/copy")
    assert sorted(path.name for path in copy.rglob("*") if path.is_file()) == ["c", "x.py"]


def test_a_pattern_it_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("[ab]\n")
    with pytest.raises(ValueError, match=r"know \* and"):
        list(context(tmp_path))


# -- the container --


def test_a_container_has_no_more_than_it_is_given() -> None:
    told = specification(Path("/root"), Process(["a"], {}, user=(65532, 65532)))
    assert told["root"]["readonly"]
    assert told["process"]["noNewPrivileges"]
    assert set(map(tuple, told["process"]["capabilities"].values())) == {()}
    assert {kind["type"] for kind in told["linux"]["namespaces"]} == {"mount", "pid", "ipc", "uts", "network"}
    writable = [mount["destination"] for mount in told["mounts"] if "ro" not in mount["options"]]
    assert writable == ["/proc", "/dev", "/dev/pts", "/dev/shm"]  # noqa: S108  paths of a container
