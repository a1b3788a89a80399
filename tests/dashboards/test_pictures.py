"""The pictures in the documents: one of each board, not too heavy for a reader, and a tool that says what it needs."""

import json
import struct
from pathlib import Path

import pytest

from dashboards.build import FOLDER, boards
from dashboards.pictures import LARGEST, PICTURES, TARGET, WIDTH, Picture, main

DOCUMENT = TARGET.parent / "dashboards.md"
ALL_LARGEST = 3_000_000
"""Bytes of all pictures together."""
each = pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.board)


def test_every_board_has_its_picture_and_no_picture_is_left_over() -> None:
    names = [board.name for board in boards()]
    assert sorted(picture.board for picture in PICTURES) == sorted(names)
    assert sorted(path.stem for path in TARGET.iterdir()) == sorted(names)
    assert sum(path.stat().st_size for path in TARGET.iterdir()) <= ALL_LARGEST


@each
def test_a_picture_is_as_wide_as_meant_and_light_enough(picture: Picture) -> None:
    data = (TARGET / f"{picture.board}.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">I", data[16:20]) == (WIDTH,)
    assert len(data) <= LARGEST


@each
def test_a_board_has_what_it_is_opened_with(picture: Picture) -> None:
    board = json.loads((FOLDER / f"gpu-efficiency-{picture.board}.json").read_text())
    assert set(picture.chosen) <= {variable["name"] for variable in board["templating"]["list"]}
    assert picture.unfolded in {"", *(panel["title"] for panel in board["panels"] if panel.get("collapsed"))}


@each
def test_the_document_shows_it(picture: Picture) -> None:
    assert f"(dashboards/{picture.board}.png)" in DOCUMENT.read_text()


def test_without_its_tools_it_says_what_is_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--preview", f"{tmp_path / 'preview'}"]) == 2
    told = capsys.readouterr()
    assert f"make pictures needs {tmp_path / 'preview'}" in told.err
    assert not told.out
