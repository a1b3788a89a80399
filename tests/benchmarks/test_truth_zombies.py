"""The benchmark of zombie rules on recorded serving series, on made-up ones whose figures are known."""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import suite
from benchmarks.truth import zombies as subject
from benchmarks.truth.zombies import COLUMNS, recording, score, series, table, zombies
from exporter.core.model import SECOND

HOUR = 3600.0
STEP = 300.0


def put(folder: Path, name: str, pods: dict[str, list[tuple[float, float]]]) -> None:
    """A file of the recorded form; lines without a number are left out when it is read."""
    folder.mkdir(exist_ok=True)
    lines = [f"{at},{percent},{pod}" for pod, samples in pods.items() for at, percent in samples]
    text = "\n".join(
        [",".join(COLUMNS), *lines, "soon,3,pod", "5,NULL,pod", "7,250,pod", "nan,1,pod", "9,1,NULL", "9,1"]
    )
    (folder / name).write_text(text + "\n", encoding="utf-8")


def pod(*parts: tuple[float, float]) -> list[tuple[float, float]]:
    """Parts of (hours, percent), a sample every five minutes."""
    found, now = [], 1000.0
    for hours, percent in parts:
        for _ in range(round(hours * HOUR / STEP)):
            found.append((now, percent))
            now += STEP
    return found


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "serving-series"
    monkeypatch.setattr(subject, "SERIES", folder)
    return folder


def test_each_rule_is_right_about_the_dead_and_wrong_about_those_who_come_back(folder: Path) -> None:
    """Dead after an hour; silent for three hours; silent for six; and one that polls a little."""
    put(folder, "a.csv", {"dead": pod((1, 50), (9, 0)), "lunch": pod((1, 50), (3, 0), (6, 50))})
    put(folder, "b.csv", {"night": pod((1, 50), (6, 0), (3, 50)), "poll": pod((1, 50), (9, 5)), "one": [(1.0, 0.0)]})
    measured = zombies()
    (found,) = measured.tables
    assert [row[1:6] for row in found.rows] == [
        ("3", "1", "2", "0", "0.333"),
        ("3", "1", "2", "0", "0.333"),
        ("2", "1", "1", "0", "0.500"),
        ("2", "1", "1", "0", "0.500"),
    ]
    assert [row[-1] for row in found.rows] == ["2/3", "2/3", "1/2", "1/2"]
    assert measured.rows[2].median == "precision 0.500"
    assert [row.what for row in measured.rows][2:] == ["zombie of class serving, 300 min", "engine at 0 for 300 min"]


def test_hours_are_those_after_the_threshold(folder: Path) -> None:
    put(folder, "a.csv", {"dead": pod((1, 50), (9, 0)), "night": pod((1, 50), (6, 0), (3, 50))})
    scores = score(series(folder))
    serving, plain = scores.rows[2:]
    # From the sixth hour to the last sample, and the last three hours at half the engine.
    for row in (serving, plain):
        assert row.gpu_hours_freed == pytest.approx(4, abs=0.1)
        assert row.gpu_hours_wrongly_freed == pytest.approx(4, abs=0.1)
        assert row.gpu_hours_work_lost == pytest.approx(1.5, abs=0.1)
    assert scores.gpu_hours == pytest.approx(20, abs=0.3)
    assert table(scores).rows[2][0] == "zombie of class serving, 300 min"


def test_a_gap_between_samples_was_not_observed() -> None:
    samples = [*pod((1, 50)), *((at + 2 * HOUR, 50.0) for at, _ in pod((1, 0)))]
    told = [reading for each in recording("p", samples, "serving") for reading in each.readings]
    gaps = [(after.start - before.end) / SECOND for before, after in pairwise(told)]
    assert [gap for gap in gaps if gap] == [HOUR]


def test_of_several_gpus_of_a_pod_the_busiest_counts(folder: Path) -> None:
    put(folder, "a.csv", {"pod": [(1.0, 0.0), (1.0, 30.0), (2.0, 5.0), (2.0, 0.0)]})
    assert series(folder) == {"pod": [(1.0, 30.0), (2.0, 5.0)]}


def test_without_series_it_says_so_and_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["zombies"]) == 1
    assert "zombies: not measured: no recorded series: put CSV files" in capsys.readouterr().err
    folder.mkdir()
    (folder / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RuntimeError, match=r"x\.csv lacks one of the columns timestamp_anon"):
        zombies(quick=True)


def test_a_run_of_all_groups_leaves_it_out_where_its_series_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(subject.ZOMBIES, needs=tmp_path / "absent")
    monkeypatch.setattr(suite, "GROUPS", {"zombies": absent})
    assert suite.main([]) == 0
    assert "zombies: left out: its recorded input is not here" in capsys.readouterr().err
