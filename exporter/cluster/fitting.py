"""Which pending jobs would fit the GPUs that are free right now.

Owns the packing: in order of priority, each job whole or not at all, on nodes that it may use and that take work.
Refuses to be the scheduler: CPUs, memory, limits and how long a job runs are not weighed, so that GPUs which lie free
although somebody waits for GPUs are seen.
"""

from collections.abc import Iterable, Mapping, Sequence

from exporter.cluster.model import BLOCKED, Demand, Node, Pending, Place, Reservation

Free = dict[str, dict[str, int]]
"""By node, then by type."""
Taken = list[tuple[str, str, int]]
"""Node, type, GPUs."""


def fitting(
    pending: Iterable[Pending], free: Mapping[str, Mapping[str, int]], *, usable: Mapping[str, frozenset[str]]
) -> list[tuple[Pending, int]]:
    """Each job of which something fits, and how many of its tasks do; `usable` is nodes by `Demand.place`."""
    left: Free = {node: dict(kinds) for node, kinds in free.items() if kinds}
    hopeless: set[tuple[Demand, ...]] = set()
    found: list[tuple[Pending, int]] = []
    ready = (job for job in pending if job.parts and job.reason not in BLOCKED)
    for job in sorted(ready, key=lambda job: (-job.priority, job.since or 0.0)):
        # What is left only shrinks: what did not fit once never will.
        if job.parts in hopeless:
            continue
        count = _tasks(job, left, usable)
        if count < job.count:
            hopeless.add(job.parts)
        if count:
            found.append((job, count))
    return found


def allowed(
    places: Mapping[str, Place], nodes: Sequence[Node], *, reservations: Sequence[Reservation], now: float
) -> dict[str, frozenset[str]]:
    """Nodes by place. A reservation's nodes are its jobs' alone, while it lasts."""
    active = [reservation for reservation in reservations if _active(reservation, now)]
    kept = {each.name: frozenset(each.nodes) for each in active}
    shared = frozenset(name for each in active if not each.whole for name in each.nodes)
    # A node of which only some cores are reserved is said to be reserved all the same (measured, 22.05).
    shared -= {name for each in active if each.whole for name in each.nodes}
    usable = [node for node in nodes if node.free]
    return {
        key: frozenset(node.name for node in usable if _may_use(place, node, kept, shared=shared))
        for key, place in places.items()
    }


def _active(reservation: Reservation, now: float) -> bool:
    start, end = reservation.start, reservation.end
    return start is not None and end is not None and start <= now < end


def _may_use(place: Place, node: Node, kept: Mapping[str, frozenset[str]], *, shared: frozenset[str]) -> bool:
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


def _tasks(job: Pending, left: Free, usable: Mapping[str, frozenset[str]]) -> int:
    """How many of the job's tasks fit; takes what they need from `left`."""
    count = 0
    while count < job.count and _take(job.parts, left, usable):
        count += 1
    return count


def _take(parts: tuple[Demand, ...], left: Free, usable: Mapping[str, frozenset[str]]) -> bool:
    """All parts or none."""
    done: Taken = []
    for part in parts:
        taken = _pick(part, left, usable.get(part.place, frozenset()))
        if taken is None:
            for node, kind, count in done:
                kinds = left.setdefault(node, {})
                kinds[kind] = kinds.get(kind, 0) + count
            return False
        for node, kind, count in taken:
            _deduct(left, node, kind, count=count)
        done += taken
    return True


def _deduct(left: Free, node: str, kind: str, *, count: int) -> None:
    kinds = left[node]
    kinds[kind] -= count
    if not kinds[kind]:
        del kinds[kind]
    if not kinds:
        del left[node]


def _pick(part: Demand, left: Free, nodes: frozenset[str]) -> Taken | None:
    """Where one part goes; None: nowhere."""
    counts = ((_has(left[name], part.type), name) for name in left if name in nodes)
    offers = sorted(offer for offer in counts if offer[0])
    shares = _even(part, offers) if part.per_node else _any(part, offers)
    if shares is None:
        return None
    return [one for name, count in shares for one in _kinds(left[name], name, part.type, count=count)]


def _has(kinds: Mapping[str, int], wanted: str) -> int:
    return kinds.get(wanted, 0) if wanted else sum(kinds.values())


def _even(part: Demand, offers: list[tuple[int, str]]) -> list[tuple[str, int]] | None:
    """The same on each node, from the nodes that have the least to spare."""
    enough = [name for count, name in offers if count >= part.per_node][: part.nodes]
    return [(name, part.per_node) for name in enough] if len(enough) == part.nodes else None


def _any(part: Demand, offers: list[tuple[int, str]]) -> list[tuple[str, int]] | None:
    """Any split: the tightest single node that has all, else the fewest nodes, the emptiest first."""
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


def _kinds(kinds: Mapping[str, int], name: str, wanted: str, *, count: int) -> Taken:
    """Split a node's share over its types, where any will do."""
    taken: Taken = []
    for kind in (wanted,) if wanted else sorted(kinds):
        share = min(count, kinds.get(kind, 0))
        if share:
            taken.append((name, kind, share))
            count -= share
    return taken
