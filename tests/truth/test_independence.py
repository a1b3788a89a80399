"""The generator knows nothing of what it judges, and works from the command line."""

import ast
import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def imported(path: Path) -> set[str]:
    """Return the top-level packages and modules that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return names


def test_nothing_of_the_exporter_is_imported() -> None:
    for path in FOLDER.glob("*.py"):
        for name in imported(path):
            if name.startswith("tests"):
                assert name == "tests.truth" or name.startswith("tests.truth."), path
            else:
                assert name.split(".")[0] in sys.stdlib_module_names | {"pytest"}, (path, name)


def test_the_command_line_writes_trace_and_truth(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "tests.truth"]
    listed = subprocess.run([*run, "list"], cwd=FOLDER.parents[1], check=True, capture_output=True, text=True)
    assert "random_training_job\n" in listed.stdout
    trace, truth = tmp_path / "trace.jsonl", tmp_path / "truth.json"
    command = [*run, "write", "hang_all_poll", "--seed", "3", "--seconds", "600", "--reading", "10"]
    subprocess.run([*command, "-o", trace, "--truth", truth], cwd=FOLDER.parents[1], check=True)
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["format"] == "gpu-efficiency-trace"
    assert lines[0]["simulated"]
    assert len(lines) == 2 + 60
    answer = json.loads(truth.read_text(encoding="utf-8"))
    assert answer["hang"]["onset"] < 600
    for uuid, causes in answer["causes"].items():
        assert abs(sum(causes.values()) - 600) < 1e-6
        assert abs(sum(answer["layers"][uuid].values()) - 600) < 1e-6
