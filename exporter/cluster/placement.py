"""How far a running job is spread, against the fewest nodes, switches and NVLink domains it could have.

Owns the counting. Refuses to guess: a level of which any node of the job or of its partition is not known gives
nothing. The fewest is what the partition's hardware allows, were all of it free and up: GPUs of the same types, the
largest groups first.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct

from exporter.cluster.model import LEVELS, Node, Run


class Placement(Struct, frozen=True):
    """Of one job at one level."""

    job_id: str
    level: str
    """One of LEVELS."""
    spans: int
    fewest: int


class Spread(Struct, frozen=True):
    """Of all jobs that are told of."""

    placements: tuple[Placement, ...] = ()
    gpus: tuple[tuple[str, int], ...] = ()
    """Job id and its GPUs, for each job that is told of."""
    left_out: int = 0
    """Jobs of two GPUs or more beyond the bound, the smallest ones."""


def spread(runs: Iterable[Run], nodes: Sequence[Node], *, groups: Mapping[str, Mapping[str, str]], most: int) -> Spread:
    """Placement of running jobs of two GPUs or more, the `most` largest; `groups` by level, then node."""
    sizes = ((sum(run.gpus.values()), run) for run in runs if run.running)
    several = sorted(((gpus, run) for gpus, run in sizes if gpus > 1), key=lambda pair: (-pair[0], pair[1].job_id))
    atlas = _Atlas(nodes, groups)
    told = several[:most]
    return Spread(
        tuple(one for gpus, run in told for one in _of_job(run, gpus, atlas)),
        tuple((run.job_id, gpus) for gpus, run in told),
        len(several) - len(told),
    )


class _Atlas:
    """Groups of nodes by level, and what the nodes of a kind come to there."""

    def __init__(self, nodes: Sequence[Node], groups: Mapping[str, Mapping[str, str]]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._told = groups
        self._sums: dict[tuple[str, frozenset[str], str], tuple[int, ...] | None] = {}

    def group(self, level: str, name: str) -> str:
        """What the node belongs to; empty: not known."""
        if level == "node":
            return name
        node = self._nodes.get(name)
        return self._told.get(level, {}).get(name) or (node.groups.get(level, "") if node else "")

    def kinds(self, run: Run) -> frozenset[str]:
        """Types of GPU on the job's nodes; empty where a node is not known."""
        found = [self._nodes.get(name) for name in run.gpus]
        return frozenset(kind for node in found if node for kind in node.gpus) if all(found) else frozenset()

    def fewest(self, level: str, run: Run, gpus: int) -> int | None:
        """How few groups have so many GPUs; None: not known, or they do not."""
        sums = self._running_sums(level, run.partition, self.kinds(run))
        if sums is None or not sums or sums[-1] < gpus:
            return None
        return bisect_left(sums, gpus) + 1

    def _running_sums(self, level: str, partition: str, kinds: frozenset[str]) -> tuple[int, ...] | None:
        """GPUs of the largest group, of the two largest, and so on."""
        key = (level, kinds, partition)
        if key not in self._sums:
            self._sums[key] = self._add_up(level, partition, kinds)
        return self._sums[key]

    def _add_up(self, level: str, partition: str, kinds: frozenset[str]) -> tuple[int, ...] | None:
        sizes: dict[str, int] = {}
        for node in self._nodes.values():
            if (not node.partitions or partition in node.partitions) and not kinds.isdisjoint(node.gpus):
                group = self.group(level, node.name)
                if not group:
                    return None
                sizes[group] = sizes.get(group, 0) + sum(node.gpus[kind] for kind in kinds & node.gpus.keys())
        return tuple(accumulate(sorted(sizes.values(), reverse=True)))


def _of_job(run: Run, gpus: int, atlas: _Atlas) -> Iterable[Placement]:
    for level in LEVELS:
        groups = {atlas.group(level, name) for name in run.gpus}
        fewest = None if "" in groups else atlas.fewest(level, run, gpus)
        if fewest is not None:
            yield Placement(run.job_id, level, len(groups), fewest)
