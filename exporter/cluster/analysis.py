"""Computes which pending jobs would fit, and how far jobs are spread.

Fitting considers GPUs alone, not CPUs, memory or limits. Placement is left out for a level that is not known of all
nodes involved.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct

from exporter.cluster.model import (
    BLOCKED,
    LEVELS,
    ClusterJob,
    ClusterNode,
    Demand,
    NodeRequirements,
    PendingJob,
    Reservation,
)

FreeGpus = dict[str, dict[str, int]]
"""Counts by node, then by type."""
TakenGpus = list[tuple[str, str, int]]
"""Node, type, count."""


def fitting_jobs(
    pending: Iterable[PendingJob], free: Mapping[str, Mapping[str, int]], *, usable: Mapping[str, frozenset[str]]
) -> list[tuple[PendingJob, int]]:
    """Return the jobs of which something fits, with the number of fitting tasks; `usable` is nodes by place."""
    left: FreeGpus = {node: dict(kinds) for node, kinds in free.items() if kinds}
    hopeless: set[tuple[Demand, ...]] = set()
    found: list[tuple[PendingJob, int]] = []
    ready = (job for job in pending if job.parts and job.reason not in BLOCKED)
    for job in sorted(ready, key=lambda job: (-job.priority, job.since or 0.0)):
        # Free GPUs only shrink: what did not fit once never will.
        if job.parts in hopeless:
            continue
        count = _fitting_tasks(job, left, usable)
        if count < job.count:
            hopeless.add(job.parts)
        if count:
            found.append((job, count))
    return found


def allowed_nodes(
    places: Mapping[str, NodeRequirements],
    nodes: Sequence[ClusterNode],
    *,
    reservations: Sequence[Reservation],
    now: float,
) -> dict[str, frozenset[str]]:
    """Return the usable nodes by place. A reservation's nodes are its jobs' alone while it is active."""
    active = [reservation for reservation in reservations if _active(reservation, now)]
    kept = {each.name: frozenset(each.nodes) for each in active}
    shared = frozenset(name for each in active if not each.whole for name in each.nodes)
    # A node of which only some cores are reserved is reported as reserved all the same (measured, 22.05).
    shared -= {name for each in active if each.whole for name in each.nodes}
    usable = [node for node in nodes if node.free]
    return {
        key: frozenset(node.name for node in usable if _may_use(place, node, kept, shared=shared))
        for key, place in places.items()
    }


def _active(reservation: Reservation, now: float) -> bool:
    start, end = reservation.start, reservation.end
    return start is not None and end is not None and start <= now < end


def _may_use(
    place: NodeRequirements, node: ClusterNode, kept: Mapping[str, frozenset[str]], *, shared: frozenset[str]
) -> bool:
    if not place.known or (place.reservation and node.name not in kept.get(place.reservation, ())):
        return False
    if node.state == "reserved" and not place.reservation and node.name not in shared:
        return False
    return (
        (not place.partitions or not set(place.partitions).isdisjoint(node.open_partitions))
        and place.features <= node.features
        and all(not choice.isdisjoint(node.features) for choice in place.choices)
        and node.taints <= place.tolerated
        and (not place.required or node.name in place.required)
        and node.name not in place.excluded
    )


def _fitting_tasks(job: PendingJob, left: FreeGpus, usable: Mapping[str, frozenset[str]]) -> int:
    """Return how many of the job's tasks fit, and remove their GPUs from `left`."""
    count = 0
    while count < job.count and _allocate(job.parts, left, usable):
        count += 1
    return count


def _allocate(parts: tuple[Demand, ...], left: FreeGpus, usable: Mapping[str, frozenset[str]]) -> bool:
    """Remove the GPUs of all parts from `left`; if one part does not fit, restore them and return False."""
    done: TakenGpus = []
    for part in parts:
        taken = _choose_nodes(part, left, usable.get(part.place, frozenset()))
        if taken is None:
            for node, kind, count in done:
                left[node][kind] += count
            return False
        for node, kind, count in taken:
            left[node][kind] -= count
        done += taken
    return True


def _choose_nodes(part: Demand, left: FreeGpus, nodes: frozenset[str]) -> TakenGpus | None:
    """Return the GPUs chosen for one part; None if it does not fit."""
    counts = ((_free_of_type(left[name], part.type), name) for name in left if name in nodes)
    offers = sorted(offer for offer in counts if offer[0])
    shares = _equal_shares(part, offers) if part.per_node else _any_shares(part, offers)
    if shares is None:
        return None
    return [one for name, count in shares for one in _split_by_type(left[name], name, part.type, count=count)]


def _free_of_type(kinds: Mapping[str, int], wanted: str) -> int:
    return kinds.get(wanted, 0) if wanted else sum(kinds.values())


def _equal_shares(part: Demand, offers: list[tuple[int, str]]) -> list[tuple[str, int]] | None:
    """Return equal shares, from the nodes with the fewest free GPUs that suffice."""
    enough = [name for count, name in offers if count >= part.per_node][: part.nodes]
    return [(name, part.per_node) for name in enough] if len(enough) == part.nodes else None


def _any_shares(part: Demand, offers: list[tuple[int, str]]) -> list[tuple[str, int]] | None:
    """Return any split: the tightest single node that has all, else the fewest nodes, the emptiest first."""
    if part.nodes == 1:
        whole = next((name for count, name in offers if count >= part.gpus), None)
        if whole is not None:
            return [(whole, part.gpus)]
    shares: list[tuple[str, int]] = []
    missing = part.gpus
    for count, name in reversed(offers[-part.most_nodes :] if part.most_nodes else offers):
        others = max(0, part.nodes - len(shares) - 1)
        share = min(count, max(0, missing - others))
        shares.append((name, share))
        missing -= share
        if not missing and len(shares) >= part.nodes:
            return shares
    return None


def _split_by_type(kinds: Mapping[str, int], name: str, wanted: str, *, count: int) -> TakenGpus:
    """Split a node's share over its GPU types, if any type will do."""
    taken: TakenGpus = []
    for kind in (wanted,) if wanted else sorted(kinds):
        share = min(count, kinds.get(kind, 0))
        if share:
            taken.append((name, kind, share))
            count -= share
    return taken


class Placement(Struct, frozen=True):
    """Placement of one job at one level."""

    job_id: str
    level: str
    """One of LEVELS."""
    spans: int
    fewest: int


class Spread(Struct, frozen=True):
    """Placement of all exported jobs."""

    placements: tuple[Placement, ...] = ()
    gpus: tuple[tuple[str, int], ...] = ()
    """Job id and GPUs of each exported job."""
    left_out: int = 0
    """Jobs of two GPUs or more beyond `most`: the smallest."""


def spread(
    runs: Iterable[ClusterJob], nodes: Sequence[ClusterNode], *, groups: Mapping[str, Mapping[str, str]], most: int
) -> Spread:
    """Return the placement of the `most` largest running jobs of two GPUs or more; `groups`: level, then node."""
    sizes = ((sum(run.gpus.values()), run) for run in runs if run.running)
    several = sorted(((gpus, run) for gpus, run in sizes if gpus > 1), key=lambda pair: (-pair[0], pair[1].job_id))
    topology = _TopologyIndex(nodes, groups)
    reported = several[:most]
    return Spread(
        tuple(one for gpus, run in reported for one in _placements(run, gpus, topology)),
        tuple((run.job_id, gpus) for gpus, run in reported),
        len(several) - len(reported),
    )


class _TopologyIndex:
    """Groups of nodes by level, and the GPUs of the largest groups."""

    def __init__(self, nodes: Sequence[ClusterNode], groups: Mapping[str, Mapping[str, str]]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._groups = groups
        self._sums: dict[tuple[str, frozenset[str], str], tuple[int, ...] | None] = {}

    def group(self, level: str, name: str) -> str:
        """Return the node's group at that level; "" if unknown."""
        if level == "node":
            return name
        node = self._nodes.get(name)
        return self._groups.get(level, {}).get(name) or (node.groups.get(level, "") if node else "")

    def kinds(self, run: ClusterJob) -> frozenset[str]:
        """Return the types of GPU on the job's nodes; empty if one of the nodes is unknown."""
        found = [self._nodes.get(name) for name in run.gpus]
        return frozenset(kind for node in found if node for kind in node.gpus) if all(found) else frozenset()

    def fewest(self, level: str, run: ClusterJob, gpus: int) -> int | None:
        """Return the fewest groups that have so many GPUs; None if unknown or if there are too few."""
        sums = self._running_sums(level, run.partition, self.kinds(run))
        if sums is None or not sums or sums[-1] < gpus:
            return None
        return bisect_left(sums, gpus) + 1

    def _running_sums(self, level: str, partition: str, kinds: frozenset[str]) -> tuple[int, ...] | None:
        """Return the GPUs of the largest group, of the two largest, and so on; None if a group is unknown."""
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


def _placements(run: ClusterJob, gpus: int, topology: _TopologyIndex) -> Iterable[Placement]:
    for level in LEVELS:
        groups = {topology.group(level, name) for name in run.gpus}
        fewest = None if "" in groups else topology.fewest(level, run, gpus)
        if fewest is not None:
            yield Placement(run.job_id, level, len(groups), fewest)
