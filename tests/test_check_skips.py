"""A skip nobody allowed fails the build, whichever way pytest words it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.check_skips import allowed, main, refused, skips

ALLOWED = "# a comment\n\nneeds a GPU | hardware\n"
ODD_TESTS = """
import pytest

def test_runs():
    assert True

@pytest.mark.skip(reason="needs a GPU: none here")
def test_hardware():
    assert False

def test_lazy():
    pytest.skip("flaky on Mondays")

@pytest.mark.xfail(reason="wrong since May")
def test_wrong():
    assert False
"""
ODD_MODULE = 'import pytest\n\npytest.skip("needs a friend", allow_module_level=True)\n'


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "test_odd.py").write_text(ODD_TESTS)
    (folder / "test_module.py").write_text(ODD_MODULE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "."],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder / "report.xml"


@pytest.mark.slow
def test_every_kind_of_skip_is_found_in_a_real_report(report: Path) -> None:
    found = {test.rpartition(".")[2]: reason for test, reason in skips(report.read_text())}
    assert set(found) == {"test_hardware", "test_lazy", "test_wrong", "test_module"}
    assert "needs a friend" in found["test_module"]


@pytest.mark.slow
def test_only_the_reasons_not_allowed_are_refused(report: Path) -> None:
    lines = refused(skips(report.read_text()), allowed(ALLOWED))
    assert len(lines) == 3
    assert not any("test_hardware" in line for line in lines)


def test_the_command_names_the_test_and_the_reason(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "allowed.txt"
    listed.write_text(ALLOWED)
    assert main([str(listed), str(report)]) == 1
    told = capsys.readouterr().err
    assert "test_lazy" in told
    assert "flaky on Mondays" in told


def test_allowed_skips_pass(report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "allowed.txt"
    listed.write_text(ALLOWED + "Mondays | known\nsince May | known\nneeds a friend | known\n")
    assert main([str(listed), str(report)]) == 0
    assert "4 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["needs a GPU", "| hardware", "needs a GPU |"])
def test_an_allowance_without_its_why_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="both halves"):
        allowed(line)


def test_a_report_without_tests_proves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, empty = tmp_path / "allowed.txt", tmp_path / "empty.xml"
    listed.write_text(ALLOWED)
    empty.write_text("<testsuites><testsuite/></testsuites>")
    assert main([str(listed), str(empty)]) == 2
    assert "no test" in capsys.readouterr().err


def test_the_projects_own_list_is_well_formed() -> None:
    text = (Path(__file__).parent / "allowed_skips.txt").read_text()
    assert {"needs a GPU", "needs ../shared"} <= set(allowed(text))
