"""This node, as the controller's thread asks it: its processes, and which GPU is which.

Owns putting both together. Refuses to take an index for anything where slurmd has a list without it.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from exporter.schedulers.slurm.commands import SilentError
from exporter.schedulers.slurm.places import Places, parse_slots, read_instances, read_uuids
from exporter.schedulers.slurm.tasks import Node, Tasks

log = logging.getLogger(__name__)


class LocalNode:
    """The `Local` of a real node."""

    def __init__(self, node: Node, *, proc: Path, slots: Callable[[], str]) -> None:
        """`slots` gives what `slurmd -G` prints, or raises SilentError."""
        self._node, self._proc, self._slots = node, proc, slots
        self.look: Callable[[Iterable[str]], dict[str, Tasks]] = node.look
        self.listening: Callable[[], frozenset[str]] = node.listening

    def places(self) -> Places:
        """See controller.Local; says in the log what is taken for granted."""
        uuids, instances = read_uuids(self._proc), read_instances(self._proc)
        if not uuids:
            log.info("slurm: no %s/driver/nvidia: /dev/nvidiaN is taken for the driver's GPU N", self._proc)
        try:
            return Places(parse_slots(self._slots()), uuids, instances)
        except SilentError as err:
            log.warning("slurm: gres index N is taken for /dev/nvidiaN, for slurmd's list cannot be had: %s", err)
            return Places(None, uuids, instances)
        except ValueError as err:
            log.warning("slurm: %s: whoever has a GPU by its index cannot be told", err)
            return Places({}, uuids, instances)
