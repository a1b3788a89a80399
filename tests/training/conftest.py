"""Fixtures for receivers and reporting processes; sockets are in a folder with a short path (107 bytes at most)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.training.speaking import Room, Speaker


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="r") as made:
        yield Path(made)


@pytest.fixture
def enter(folder: Path) -> Iterator[Callable[..., Room]]:
    """Open a receiver with a socket."""
    with ExitStack() as stack:

        def enter(**settings: Any) -> Room:
            room = Room(folder / "report.sock", **settings)
            stack.callback(room.desk.close)
            return room

        yield enter


@pytest.fixture
def speaker(folder: Path) -> Iterator[Callable[[], Speaker]]:
    """Start a process that sends reports."""
    with ExitStack() as stack:

        def start() -> Speaker:
            started = Speaker(folder / "report.sock")
            stack.callback(started.end)
            return started

        yield start
