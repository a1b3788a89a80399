"""Why a source was chosen, in one sentence: what was asked, what each said, and what the chosen one then showed.

Owns the words, and when they are told: once, as soon as the readings show on how many GPUs tensor activity is really
seen. Refuses to choose.
"""

import logging

from msgspec import Struct

from exporter.sources import Batch

log = logging.getLogger("exporter.sources.ladder")
PATIENCE = 5
"""Reads after which a GPU that has shown no tensor activity counts as one that does not: a profiler's first values of
several boards come in different cycles."""


class Choice(Struct, frozen=True):
    """Which source, and what became of the others."""

    name: str
    where: str = ""
    sees: bool = False
    """It announces tensor activity."""
    passed: tuple[str, ...] = ()
    """Opened, and not taken, for they announce none."""
    refused: tuple[tuple[str, str], ...] = ()
    """Name, and what it said."""
    unasked: tuple[str, ...] = ()
    alone: bool = False
    """The configuration names this one."""
    instead_of: str = ""
    """What was in use until now."""


class Sight:
    """A choice, and on how many GPUs it has shown tensor activity so far; logged once."""

    def __init__(self, choice: Choice) -> None:
        self._choice, self._told, self._reads = choice, not choice.name, 0
        self._boards: set[str] = set()
        self._seeing: set[str] = set()
        self.words = _sentence(choice, _promise(choice)) if choice.name else ""
        """The sentence as it stands; empty where nothing was chosen."""

    def see(self, batch: Batch, *, sees: bool) -> None:
        """Take in one read; `sees` is what the source announces now."""
        if self._told:
            return
        self._reads += 1
        self._boards = {device.uuid for device in batch.devices if not device.parent}
        self._seeing |= _seeing(batch) & self._boards
        if not sees or self._seeing >= self._boards or self._reads >= PATIENCE:
            self.words = _sentence(self._choice, self._shown(sees=sees))
            self.tell()

    def tell(self) -> None:
        """Log the sentence as it stands, unless it has been."""
        if not self._told:
            self._told = True
            log.info("source %s", self.words)

    def _shown(self, *, sees: bool) -> str:
        gpus = len(self._boards)
        if self._seeing:
            return f"sees tensor activity on {len(self._seeing)} of {gpus} GPUs"
        if sees:
            return f"should see tensor activity, but showed it on none of {gpus} GPUs in {self._reads} reads"
        return f"sees tensor activity on none of {gpus} GPUs, so that their kernel time stays unresolved"


def _seeing(batch: Batch) -> set[str]:
    """Boards with tensor activity: their own, or where there are MIG instances, one of those."""
    board_of = {device.uuid: device.parent for device in batch.devices if device.parent}
    cut = set(board_of.values())
    shown = {reading.uuid for reading in batch.readings if reading.tensor_active is not None}
    return {board_of.get(uuid, uuid) for uuid in shown if uuid not in cut}


def _promise(choice: Choice) -> str:
    return "announces tensor activity" if choice.sees else "announces no tensor activity"


def _sentence(choice: Choice, sight: str) -> str:
    where = f" ({choice.where})" if choice.where else ""
    refused = "; ".join(f"{name}: {_one_line(said)}" for name, said in choice.refused)
    others = (
        ("in place of", choice.instead_of),
        ("opened but without tensor activity:", ", ".join(choice.passed)),
        ("refused:", refused),
        ("not asked:", ", ".join(choice.unasked)),
        ("no other one is configured", " " if choice.alone else ""),
    )
    told = [f"{label} {what}".rstrip() for label, what in others if what]
    return f"{choice.name}{where}: {'; '.join([sight, *told])}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
