"""Figures are of a run, of a commit and of the code they name; a page that says less, or more, is refused.

The repository's own records are checked here, and made-up ones in a repository of their own.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from benchmarks import drawing, headlines, page, record, suite
from benchmarks.figures import row
from benchmarks.group import Curves, Group, Measured, Picture, Table
from benchmarks.machine import ROOT
from benchmarks.record import Record, RecordError, Stamp, changed, faults, made, sealed, stamped_anew, write

RECORDS = page.all_records()
STAMP = Stamp(commit="abc1234", day="2026-11-22", machine="A processor, 2 cores", took=12.345678)
NAMED = sorted(suite.GROUPS)


FRAME = {"exporter.clock", "exporter.config", "exporter.files", "exporter.logs", "exporter.registry"}
"""What stands around a measurement and is not measured: time, settings, words."""


# -- what this repository says of itself --


@pytest.mark.parametrize("name", NAMED)
def test_a_record_is_what_its_run_found(name: str) -> None:
    if not record.whole_history():
        pytest.skip("needs git's whole history")
    found = RECORDS.get(name)
    assert not list(faults(found) if found else ())


def test_the_page_and_the_readme_say_what_the_records_say() -> None:
    """So each mark of an older section is true: `make docs` writes them."""
    assert not list(page.outdated(RECORDS)), "run `make docs`"


def test_an_outdated_page_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make lint` ends there, so that nobody commits a change of measured code without its mark."""
    assert page.main(["--check"]) == 0
    old = tmp_path / "benchmarks.md"
    old.write_text(page.markdown({}), encoding="utf-8")
    monkeypatch.setattr(page, "PAGE", old)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    assert page.main(["--check"]) == 1
    assert "benchmarks.md is outdated: run `make docs`" in capsys.readouterr().err
    assert old.read_text(encoding="utf-8") == page.markdown({})


@pytest.mark.parametrize("name", NAMED)
def test_each_missed_budget_is_explained(name: str) -> None:
    group, found = suite.GROUPS[name], RECORDS.get(name)
    missed = [line.what for line in (found.rows if found else ()) if line.met is False]
    assert not [what for what in missed if not group.shortfalls.get(what)]
    assert not [what for what in group.shortfalls if found and what not in {line.what for line in found.rows}]


@pytest.mark.parametrize("name", NAMED)
def test_each_picture_is_of_its_record(name: str) -> None:
    group, found = suite.GROUPS[name], RECORDS.get(name)
    assert not [picture.name for picture in group.pictures if found and not drawing.current(picture, found)]


def test_no_record_and_no_picture_is_left_behind() -> None:
    assert {path.stem for path in record.RECORDS.glob("*.json")} <= set(suite.GROUPS)
    drawn = {drawing.file_of(picture) for group in suite.GROUPS.values() for picture in group.pictures}
    assert set(drawing.FOLDER.glob("bench-*.svg")) <= drawn


@pytest.mark.parametrize("name", NAMED)
def test_all_code_that_a_group_imports_is_named_as_measured(name: str) -> None:
    """Else it could change, and the section would still look fresh."""
    group = suite.GROUPS[name]
    paths = {imported.replace(".", "/") for imported in _exporters(group.run.__module__) - FRAME}
    named = tuple(path.removesuffix(".py") for path in group.measures)
    assert not [path for path in paths if not any(path == one or path.startswith(f"{one}/") for one in named)]
    assert all((ROOT / path).exists() for path in group.measures)


MEASURING = ("benchmarks.", "tests.fuzz.", "tests.lookalikes")
"""Modules that measure, and what they play."""


def _exporters(module: str) -> set[str]:
    """Modules of the exporter that a benchmark imports, by itself or through the modules beside it."""
    seen, todo, found = set[str](), [module], set[str]()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        imported = set(_imported(ROOT / f"{one.replace('.', '/')}.py"))
        found |= {name for name in imported if name.startswith("exporter.")}
        todo += [name for name in imported if name.startswith(MEASURING)]
    return found


def _imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, without those that only types need."""
    if not path.exists():
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if (ROOT / f"{whole.replace('.', '/')}.py").exists() else node.module


# -- made-up ones --


def dots(figure: object, curves: Curves) -> None:
    figure.subplots().plot(curves["x"], curves["y"])  # type: ignore[attr-defined]


LINE = row("dots", "A dot", often="once", values=[3.0], unit="mm", budget=2.0)
PICTURE = Picture(name="dots", words="Two dots", draw=dots)
GROUP = Group(
    name="dots", title="Dots", about="Two of them.", measures=("code",), pictures=(PICTURE,),
    run=lambda: Measured(rows=[LINE], curves={"x": [1, 2], "y": [3, 4]}),
    shortfalls={"A dot": "it is too far; nearer would be next"},
)  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with measured code, committed, and room for records."""
    for module, name in ((record, "ROOT"), (page, "ROOT")):
        monkeypatch.setattr(module, name, tmp_path)
    monkeypatch.setattr("benchmarks.machine.ROOT", tmp_path)
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(drawing, "FOLDER", tmp_path / "pictures")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("A = 1\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(where: Path, *words: str) -> str:
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=where, check=True, capture_output=True, text=True).stdout.strip()


def commit(where: Path) -> str:
    git(where, "add", "--all")
    git(where, "commit", "--quiet", "--message", "As it is")
    return git(where, "rev-parse", "--short", "HEAD")


def measured(where: Path, took: float = 12.345678) -> Record:
    stamp = replace(STAMP, commit=git(where, "rev-parse", "--short", "HEAD"), took=took)
    return made(GROUP, GROUP.run(), stamp)


def test_a_record_comes_back_as_it_was_written(world: Path) -> None:
    found = measured(world)
    write(found)
    assert record.read("dots") == found
    assert record.read("nobody") is None
    commit(world)
    assert not list(faults(found))
    assert not changed(GROUP, found)


def test_code_that_is_not_committed_makes_no_record(world: Path) -> None:
    (world / "code" / "b.py").write_text("B = 1\n")
    with pytest.raises(RecordError, match=r"code/b\.py is not committed"):
        measured(world)


def test_a_file_that_is_no_record_is_refused(world: Path) -> None:
    (world / "records").mkdir()
    (world / "records" / "dots.json").write_text('{"group": 7}')
    with pytest.raises(RecordError, match="Measure the group again"):
        record.read("dots")


@pytest.mark.parametrize("change", ["A = 2\n", None])
def test_changed_code_marks_its_section(world: Path, change: str | None) -> None:
    found = measured(world)
    assert page.OLDER not in page.section(GROUP, found)
    (world / "code" / "a.py").unlink() if change is None else (world / "code" / "a.py").write_text(change)
    assert changed(GROUP, found) == ["code"]
    assert f"{page.OLDER}: `code` changed since commit {found.stamp.commit}" in page.section(GROUP, found)


def test_a_new_file_and_a_wider_group_mark_it_too(world: Path) -> None:
    found = measured(world)
    (world / "code" / "__pycache__").mkdir()
    (world / "code" / "__pycache__" / "a.pyc").write_bytes(b"\0")
    assert not changed(GROUP, found)
    (world / "more.py").write_text("")
    assert changed(replace(GROUP, measures=("code", "more.py")), found) == ["more.py"]
    assert changed(replace(GROUP, measures=()), found) == ["code"]
    (world / "code" / "b.py").write_text("")
    assert changed(GROUP, found) == ["code"]


def test_a_figure_changed_by_hand_is_seen(world: Path) -> None:
    found = measured(world)
    better = replace(found, rows=[replace(found.rows[0], median="1.0 mm", met=True)])
    assert any("changed by hand" in fault for fault in faults(better))


def test_a_stamp_of_a_commit_whose_code_was_another_is_seen(world: Path) -> None:
    old = measured(world)
    (world / "code" / "a.py").write_text("A = 2\n")
    later = commit(world)
    new = replace(old, stamp=replace(old.stamp, commit=later))
    assert [fault for fault in faults(replace(new, seal=sealed(new))) if "was not like this at commit" in fault]


def test_a_record_that_is_stamped_anew_without_a_run_is_seen(world: Path) -> None:
    """With its digests and its seal made to fit: all that is left is that nothing was run."""
    old = measured(world)
    write(old)
    commit(world)
    (world / "code" / "a.py").write_text("A = 2\n")
    commit(world)
    again = measured(world)
    assert [fault for fault in faults(again) if "stamped" in fault]
    write(again)
    commit(world)
    assert [fault for fault in faults(again) if "stamped" in fault], "it stays a fault after it was committed"
    assert not list(stamped_anew([old, measured(world, took=12.5)]))
    assert not list(stamped_anew([old, old]))


def test_a_section_says_what_was_run_and_what_it_found(world: Path) -> None:
    found = replace(measured(world), tables=[Table(about="Side by side:", head=("a", "b"), rows=(("1|2", "3"),))])
    text = page.section(GROUP, found)
    assert "| A dot | once | 3.0 mm | 3.0 - 3.0 | <= 2 mm | NO |" in text
    assert "Side by side:\n\n| a | b |\n| --- | --- |\n| 1\\|2 | 3 |" in text
    assert "![Two dots](pictures/bench-dots.svg)" in text
    assert f"commit {found.stamp.commit}, A processor, 2 cores; it took 12 s." in text
    assert "Two of them.\n\nNo record yet: `python benchmarks/run.py dots --record`." in page.section(GROUP, None)


def test_a_picture_is_of_its_record_and_says_so(world: Path) -> None:
    found = measured(world)
    assert not drawing.current(PICTURE, found)
    assert drawing.draw(GROUP, found) == [world / "pictures" / "bench-dots.svg"]
    assert drawing.draw(GROUP, found) == [], "drawn once"
    text = (world / "pictures" / "bench-dots.svg").read_text(encoding="utf-8")
    ET.fromstring(text)  # noqa: S314 - our own
    assert drawing.stamp(found) in text
    assert drawing.drawn(PICTURE, found) == text.encode(), "the same record, the same bytes"
    assert not drawing.current(PICTURE, replace(found, seal="another"))


def test_the_readme_has_its_figures_between_its_marks() -> None:
    text = f"Hello\n\n{page.BEGIN}\nold\n{page.END}\n\nBye\n"
    assert page.in_readme(text, {}) == f"Hello\n\n{page.BEGIN}\n{page.END}\n\nBye\n"
    with pytest.raises(ValueError, match="lost its marks"):
        page.in_readme("Hello\n", {})


def test_a_headline_does_not_outlive_its_row(world: Path) -> None:
    with pytest.raises(KeyError):
        list(headlines.lines({"serve": measured(world)}, ""))


# -- the command --


def test_a_run_is_told_and_kept_only_on_request(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Measured:
        raise RuntimeError("nothing listens")

    quick = lambda: Measured(rows=[replace(LINE, what="In short")])  # noqa: E731
    groups = {"dots": replace(GROUP, quick=quick), "bad": replace(GROUP, name="bad", run=broken)}
    monkeypatch.setattr(suite, "GROUPS", groups)
    assert suite.main(["--quick", "dots"]) == 0
    said = capsys.readouterr()
    assert ("In short" in said.out, "A dot" in said.out) == (True, False)
    assert "BUDGET NOT MET: In short" in said.err
    assert suite.main(["dots"]) == 0
    assert record.read("dots") is None
    assert suite.main(["bad", "--record", "dots"]) == 1, "one fails, the other is measured"
    assert "bad: not measured: nothing listens" in capsys.readouterr().err
    kept = record.read("dots")
    assert kept is not None
    assert (kept.rows, kept.stamp.took > 0) == ([LINE], True)
    (world / "code" / "a.py").write_text("A = 2\n")
    assert suite.main(["--record", "dots"]) == 1
    assert "code/a.py is not committed" in capsys.readouterr().err


def test_what_is_no_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.main(["nothing"])
    assert "nothing is none of" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tables_need_no_matplotlib() -> None:
    """It takes a second to import, and a benchmark of memory should not carry it."""
    code = "import sys, benchmarks.suite, benchmarks.page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
