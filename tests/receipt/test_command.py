"""The command's own errors: one line, what to do, and the status that the other commands have."""

from pathlib import Path

import pytest

from tests.receipt.commands import run

NOBODY = "--prometheus http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "status", "hint"),
    [
        (NOBODY, 2, "give a job's id, or --compare and two"),
        (f"7 --compare 7 8 {NOBODY}", 2, "and not both"),
        (f"7 --json --markdown {NOBODY}", 2, "--json or --markdown"),
        ("7", 2, "--prometheus"),
        (f"7 --at yesterday {NOBODY}", 2, "neither Unix seconds nor like 2026-01-31T12:00"),
        (f"7 --since soon {NOBODY}", 2, "--since"),
        (f"7 --header nonsense {NOBODY}", 2, "is not 'Name: value'"),
        (f"7 {NOBODY}", 1, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_errors(words: str, status: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found, out, err = run(words)
    assert (found, out) == (status, "")
    assert hint in err


def test_a_time_may_have_a_zone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "headers").write_text("X-Scope-OrgID: a\n")
    for at in ("2026-01-31", "2026-01-31T12:00+02:00", "1767225600"):
        assert run(f"7 --at {at} --header @{tmp_path}/headers {NOBODY}")[0] == 1
