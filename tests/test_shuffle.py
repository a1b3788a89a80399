"""`pytest --shuffle SEED`: every test once, files whole, and the same order for the same seed."""

import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = ("tests/test_durations.py", "tests/test_each.py", "tests/test_urls.py")


def order(*options: str) -> list[str]:
    """Return the names of the tests of some files, in their order."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-pno:cacheprovider",
        *options,
        *FILES,
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_a_seed_is_another_order_of_the_same_tests_with_files_whole() -> None:
    usual, once, again, other = order(), order("--shuffle=1"), order("--shuffle=1"), order("--shuffle=2")
    assert once == again
    assert len({tuple(names) for names in (usual, once, other)}) == 3
    assert sorted(usual) == sorted(once) == sorted(other)
    files = [file for file, _ in groupby(once, key=lambda name: name.partition("::")[0])]
    assert sorted(files) == sorted(FILES)
