"""Fixtures for receivers and reporting processes; sockets are in a folder with a short path (107 bytes at most)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.training.senders import ReceiverRig, SenderProcess


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="r") as made:
        yield Path(made)


@pytest.fixture
def open_rig(folder: Path) -> Iterator[Callable[..., ReceiverRig]]:
    """Open a receiver with a socket."""
    with ExitStack() as stack:

        def open_rig(**settings: Any) -> ReceiverRig:
            rig = ReceiverRig(folder / "report.sock", **settings)
            stack.callback(rig.receiver.close)
            return rig

        yield open_rig


@pytest.fixture
def start_sender(folder: Path) -> Iterator[Callable[[], SenderProcess]]:
    """Start a process that sends reports."""
    with ExitStack() as stack:

        def start() -> SenderProcess:
            started = SenderProcess(folder / "report.sock")
            stack.callback(started.end)
            return started

        yield start
