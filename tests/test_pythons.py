"""Which interpreter `make test-pythons` takes, and that one which cannot be had is no success.

Shell scripts stand in for interpreters: they answer the probe only.
"""

from pathlib import Path

import pytest

from tests import pythons
from tests.pythons import UnavailableError, interpreter, main


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
