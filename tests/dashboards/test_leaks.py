"""Panels of leaks come out of the tables of leaks; a click finds its panel; and what nobody tells of is no zero."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from dashboards import words
from dashboards.build import FOLDER, boards
from dashboards.leak_table import table
from dashboards.leaks import note, rows
from dashboards.losses import INFERENCE, TRAINING, Side, choice, losses
from dashboards.parts import Table
from dashboards.watching import parted
from exporter.core.leak_guide import LEAK_GUIDE
from tests.alerts.packs import files
from tests.dashboards.grafana import Answer, asker, opened
from tests.dashboards.stories import Story
from tests.dashboards.world import World, world

SIDES = pytest.mark.parametrize("side", [TRAINING, INFERENCE], ids=lambda side: side.name)
NEW = replace(LEAK_GUIDE[8], number=99, name="cosmic rays", needs="a window", rows=("hung",))


def texts(side: Side, label: str) -> Mapping[str, str]:
    """What the table writes for the values of a label."""
    kind = table(side, width=24, height=9).kind
    assert isinstance(kind, Table)
    return next(column.texts for column in kind.columns if column.of == label)


@SIDES
def test_who_in_the_table_chooses_a_leak_for_the_panel_that_names_jobs(side: Side) -> None:
    board = json.loads((FOLDER / f"gpu-efficiency-{side.name}.json").read_text())
    titles = {panel["id"]: panel["title"] for panel in board["panels"]}
    kind = table(side, width=24, height=9).kind
    assert isinstance(kind, Table)
    (link,) = (column.link for column in kind.columns if column.of == "who")
    assert link
    _, _, number = link.url.partition("&var-leak=${__value.raw:percentencode}&viewPanel=panel-")
    assert "that lose most" in titles[int(number)]
    (leak,) = (each for each in board["templating"]["list"] if each["name"] == "leak")
    assert [each.rpartition(" : ")[2] for each in leak["query"].split(", ")] == [*texts(side, "who")]


def notes(side: Side) -> Mapping[str, str]:
    """What the note of the chosen leak writes, by its part and the leak's rows."""
    kind = note(side).kind
    assert isinstance(kind, Table)
    return next(column.texts for column in kind.columns if column.of == "said")


@SIDES
def test_every_loss_of_a_side_has_its_line_and_its_note(side: Side) -> None:
    for loss in losses(side):
        assert loss.key in texts(side, "loss")
        assert notes(side)[f"Do first:{'|'.join(loss.rows)}"] == words.prose(loss.fix)


@SIDES
def test_a_chosen_leak_fills_all_its_panels(side: Side) -> None:
    shown, folded = rows(side)
    assert (shown.folded, folded.folded) == (False, True)
    asked = [query.expr for panel in (*shown.panels, *folded.panels) for query in panel.queries]
    assert all("$leak" in expr or "${leak:raw}" in expr for expr in asked)
    for loss in losses(side):
        mine = [expr for expr in asked if f'"chosen", "{"|".join(loss.rows)}"' in expr]
        for series in loss.series:
            assert any(parted(series)[0].split(":")[1] in expr for expr in mine), (loss.name, series)


def test_a_leak_that_is_new_has_its_panels_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboards.losses.LEAK_GUIDE", (*LEAK_GUIDE, NEW))
    assert texts(INFERENCE, "loss")["99"] == "99 cosmic rays"
    assert texts(INFERENCE, "needs")["99"] == "engine: a window"
    assert notes(INFERENCE)["Seen by:hung"] == "engine: a window"
    asked = [query.expr for row in rows(INFERENCE) for panel in row.panels for query in panel.queries]
    assert any("gpu_efficiency_preemptions" in expr and '"hung"' in expr for expr in asked)
    assert "hung" in choice(INFERENCE).choices
    assert "hung" not in choice(TRAINING).choices


def test_shares_that_are_watched_are_recorded_across_jobs() -> None:
    watched = {name.split('"')[1] for seed in LEAK_GUIDE for name in seed.series if name.startswith("job_leak:")}
    (rule,) = (
        rule for rule in files()["recording-jobs.yaml"] if rule["record"].startswith("job_leak:gpu_efficiency_share")
    )
    assert re.findall(r'leak=~"([^"]+)"', rule["expr"]) == ["|".join(sorted(watched, key=rule["expr"].index))]
    (spread,) = (rule for rule in files()["recording-leaks.yaml"] if rule["record"].startswith("class_leak_spread:"))
    assert spread["expr"].count(rule["record"]) == 3
    assert "leak=" not in spread["expr"]


def test_the_two_boards_ask_for_few_things_before_a_row_is_opened() -> None:
    for board in boards():
        if board.name in {"training", "inference"}:
            assert sum(len(row.panels) for row in board.rows if not row.folded) <= 16


@pytest.fixture(name="silent", scope="module")
def _silent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The table of servers whose engines nobody hears: its answers by letter."""
    told = (Story(cluster="memory_bound_decode", scenario="memory_bound_decode", gpus=4),)
    folder: Path = tmp_path_factory.mktemp("silent")
    with world(folder, told=told) as made, httpx.Client(base_url=made.past.url, trust_env=False, timeout=60) as client:
        return answers(made, client)


def answers(made: World, client: httpx.Client) -> dict[str, Answer]:
    """Of the table, by letter."""
    board = json.loads((FOLDER / "gpu-efficiency-inference.json").read_text())
    panels = opened(board, asker(client), made.last(60), chosen={"cluster": ["memory_bound_decode"]})
    found = next(panel for panel in panels if panel.title == table(INFERENCE, width=24, height=9).title)
    return {answer.ref: answer for answer in found.answers}


def of(answer: Answer, key: str) -> float:
    """Its value of a loss; not a number where it has none."""
    return next((found.points[-1][1] for found in answer.series if found.labels["loss"] == key), math.nan)


@pytest.mark.e2e
def test_what_no_engine_tells_of_is_empty_and_not_zero(silent: dict[str, Answer]) -> None:
    assert {key: of(silent["A"], key) for key in ("02", "03")} == {"02": 0.0, "03": 0.0}
    assert of(silent["A"], "01") > 50
    assert all(math.isnan(of(silent["A"], key)) for key in ("09", "10", "11", "12"))


@pytest.mark.e2e
def test_how_much_is_heard_is_said_of_every_loss(silent: dict[str, Answer]) -> None:
    heard = {loss.key: of(silent["E"], loss.key) for loss in losses(INFERENCE)}
    assert {key: heard[key] for key in ("01", "04", "09", "12")} == {"01": 1.0, "04": 1.0, "09": 0.0, "12": 0.0}
    assert not any(map(math.isnan, heard.values()))
