"""Every row of mutants.toml fits the present tree, and every part of the project has one."""

import ast
from collections import Counter
from functools import cache

from tests.mutants.rows import ROOT, Mutant, mutants

ROWS = mutants()
PARTS = {"alerts", "benchmarks", "dashboards", "examples", "exporter", "helm", "systemd", "tests"}


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(test: str) -> bool:
    path, _, function = test.partition("::")
    return not (ROOT / path).is_file() or (bool(function) and function not in functions(path))


def stale(row: Mutant) -> str:
    if not (ROOT / row.file).is_file():
        return f"{row.name}: there is no {row.file}"
    try:
        row.changed((ROOT / row.file).read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{row.name}: {error}"
    return ""


def test_every_row_changes_one_place_of_its_file() -> None:
    assert [found for found in map(stale, ROWS) if found] == []
    assert [row.name for row in ROWS if row.old == row.new] == []


def test_names_are_unique() -> None:
    assert [name for name, times in Counter(row.name for row in ROWS).items() if times > 1] == []


def test_every_row_names_tests_that_exist() -> None:
    assert [row.name for row in ROWS if not row.tests] == []
    assert [(row.name, test) for row in ROWS for test in row.tests if missing(test)] == []


def test_every_part_of_the_project_has_a_row() -> None:
    assert {row.file.partition("/")[0] for row in ROWS} >= PARTS
    packages = {path.parent.name for path in (ROOT / "exporter").glob("*/__init__.py")}
    assert packages - {row.file.split("/")[1] for row in ROWS if row.file.startswith("exporter/")} == set()


def test_there_are_at_least_seventy_rows() -> None:
    assert len(ROWS) >= 70
