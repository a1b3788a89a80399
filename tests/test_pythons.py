"""Which interpreter `make test-pythons` takes, what it leaves out, and that one which cannot be had is no success.

Shell scripts stand in for interpreters: they answer the probe only.
"""

import platform
from pathlib import Path

import pytest

from tests import pythons
from tests.check_skips import allowed
from tests.pythons import ROOT, Python, UnavailableError, interpreter, left_out, main, runs


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_first_on_the_path_that_starts_and_is_of_that_version_is_taken(tmp_path: Path) -> None:
    program(tmp_path / "shims/python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    program(tmp_path / "other/python3.12", "echo 3.1")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/python3.12").write_text("no program")
    right = program(tmp_path / "right/python3.12", "echo 3.12")
    path = ":".join(f"{tmp_path / name}" for name in ("shims", "other", "broken", "absent", "right"))
    assert interpreter("3.12", path=path, pyenv=tmp_path / "none") == f"{right}"


def test_then_pyenvs_and_else_the_reason_names_both_places(tmp_path: Path) -> None:
    taken = program(tmp_path / "pyenv/versions/3.13.0/bin/python3.13", "echo 3.13")
    path, pyenv = f"{tmp_path}", tmp_path / "pyenv"
    assert interpreter("3.13", path=path, pyenv=pyenv) == f"{taken}"
    with pytest.raises(UnavailableError, match=rf"no python3\.1 with venv on the PATH or in {pyenv}/versions"):
        interpreter("3.1", path=path, pyenv=pyenv)


def test_one_that_cannot_be_had_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pythons, "_PYENV", Path("/nonexistent"))
    assert main(["3.1", "--", "-m", "quick"]) == 1
    assert capsys.readouterr().out.startswith("== 3.1: not run: no python3.1 with venv on the PATH")


def test_failed_tests_fail_the_run_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = {"3.12": "failed: pytest's exit status is 1", "3.13": ""}
    monkeypatch.setattr(pythons, "outcome", lambda name, _words: problems[name])
    assert (main(["3.12", "3.13", "--"]), main(["3.13", "--"])) == (1, 0)
    assert "== 3.13: passed (0 s)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("enabled\ninterpreter /usr/bin/emulator\nflags: POF\n", True),
        ("enabled\ninterpreter /usr/bin/F\nflags: PO\n", False),
        ("disabled\ninterpreter /usr/bin/emulator\nflags: POF\n", False),
        (None, False),
    ],
    ids=["opened by the kernel", "looked up in each root", "disabled", "none"],
)
def test_another_processors_programs_run_where_the_kernel_holds_their_emulator(
    tmp_path: Path, entry: str | None, *, expected: bool
) -> None:
    if entry is not None:
        (tmp_path / "qemu-vax").write_text(entry)
    assert runs("vax", registered=tmp_path) is expected


def test_this_processors_own_programs_run_without_an_emulator(tmp_path: Path) -> None:
    assert runs(platform.machine(), registered=tmp_path)


def test_a_processor_that_nothing_here_runs_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pythons, "_BINFMT", tmp_path)
    monkeypatch.setattr(pythons, "_MACHINES", {"vax": "vax"})
    assert main(["debian13-vax", "debian13-pdp11", "--"]) == 1
    out = capsys.readouterr().out
    assert "== debian13-vax: not run: nothing here runs programs of vax in a chroot: apt-get install arch-test" in out
    assert "== debian13-pdp11: not run: nothing here runs programs of pdp11" in out


def test_only_where_a_processor_is_emulated_tests_are_left_out_and_each_exists() -> None:
    assert left_out(Python("python3", "3.13")) == []
    names = [word.removeprefix("--deselect=") for word in left_out(Python("python3", "3.13", machine="vax"))]
    assert names == list(allowed((ROOT / "tests/emulated.txt").read_text()))
    for file, _, test in (name.partition("::") for name in names):
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_a_new_tree_replaces_the_old_of_its_name_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[str] = []

    def build(folder: Path, *, packages: str, architecture: str) -> None:
        (folder / packages.partition(",")[0]).mkdir(parents=True)
        (folder / ".built").touch()
        built.append(architecture)

    monkeypatch.setattr(pythons, "FOLDER", tmp_path)
    monkeypatch.setattr(pythons, "build", build)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    for name in ("debian13-0123456789abcdef", "debian13-arm64-0123456789abcdef", "debian13-arm64"):
        (tmp_path / name).mkdir()
    tree = pythons._tree("debian13", "")
    assert (pythons._tree("debian13", ""), built) == (tree, [""])
    assert {path.name for path in tmp_path.iterdir()} == {
        tree.name, "debian13-arm64-0123456789abcdef", "debian13-arm64",
    }  # fmt: skip
