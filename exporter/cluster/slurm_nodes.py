"""Slurm's nodes, reservations and switches, as sinfo and scontrol print them.

Owns the text. Refuses a line that cannot be read, by itself and counted. Sources: sinfo(1) "NODE STATE CODES",
scontrol(1) "show reservation" and "show topology", topology.conf(5); the shapes as printed by 22.05.8 and 24.11.5.
Only administrators write what these texts hold.
"""

import re
from collections.abc import Iterable, Mapping

from msgspec import structs

from exporter.cluster.model import NODE_STATES, Node, Nodes, Reservation, Reservations, Topology
from exporter.schedulers.slurm.gres import Gres, gpus_of, parse_gres, parse_tres
from exporter.schedulers.slurm.hostlist import expand_hostlist
from exporter.schedulers.slurm.parsing import condition, parse_time

_END = "\x1f"
"""After each field: no name or list holds it."""
_FIELDS = ("NodeList", "PartitionName", "Available", "Gres", "GresUsed", "StateComplete", "Features")
SINFO = ("--local", "-a", "-N", "-h", "-O", ",".join(f"{field}:{_END}" for field in _FIELDS))
"""Arguments of sinfo for `parse_nodes`: a line for each node in each partition."""
_PAIR = re.compile(r"(\w+)=(\S*)")
_NONE = frozenset({"", "(null)", "N/A"})


def parse_nodes(text: str) -> Nodes:
    """Each node that has GPUs, once. A node of no partition is not told of by sinfo."""
    found: dict[str, Node] = {}
    refused = 0
    for line in filter(None, text.split("\n")):
        try:
            node = _node(line)
        except ValueError:
            refused += 1
            continue
        if node.gpus:
            found[node.name] = _joined(found[node.name], node) if node.name in found else node
    return Nodes(tuple(found.values()), refused)


def _node(line: str) -> Node:
    name, partition, available, gres, used, state, features, rest = line.split(_END)
    if rest or not name:
        raise ValueError("not the fields that were asked for")
    partitions = (partition,) if partition else ()
    return Node(
        name,
        _by_type(parse_gres(gres)),
        _by_type(parse_gres(used)),
        state=_state(state),
        partitions=partitions,
        open_partitions=partitions if available == "up" else (),
        features=frozenset() if features in _NONE else frozenset(features.split(",")),
    )


def _joined(first: Node, other: Node) -> Node:
    return structs.replace(
        first,
        partitions=first.partitions + other.partitions,
        open_partitions=first.open_partitions + other.open_partitions,
    )


def _by_type(gres: Iterable[Gres]) -> dict[str, int]:
    """Sum over lines that gres.conf gives one type (one a socket, say)."""
    counts: dict[str, int] = {}
    for each in gres:
        if each.name == "gpu":
            counts[each.type] = counts.get(each.type, 0) + each.count
    return counts


def _state(word: str) -> str:
    """Say why it takes no work, else what it does: `mixed+planned`, `idle+drain`, `down*`."""
    base = re.split(r"[+*~#!%$@^-]", word.lower(), maxsplit=1)[0]
    base = {"completing": "mixed"}.get(base, base)
    found = condition([word]) or base
    return found if found in NODE_STATES else "unknown"


def parse_reservations(text: str) -> Reservations:
    """Read `scontrol -a -o show reservation`, with times in UTC."""
    found: list[Reservation] = []
    refused = 0
    for line in text.split("\n"):
        if not line.startswith("ReservationName="):
            refused += bool(line.strip()) and not line.startswith("No reservations")
            continue
        try:
            found.append(_reservation(dict(reversed(_PAIR.findall(line)))))
        except ValueError:
            refused += 1
    return Reservations(tuple(found), refused)


def _reservation(said: Mapping[str, str]) -> Reservation:
    """Whole nodes where no cores are named (measured: such a line has no CoreIDs)."""
    nodes, tres = said.get("Nodes", ""), said.get("TRES", "")
    return Reservation(
        said["ReservationName"],
        _seconds(said.get("StartTime", "Unknown")),
        _seconds(said.get("EndTime", "Unknown")),
        () if nodes in _NONE else expand_hostlist(nodes),
        whole="CoreIDs" not in said,
        gpus=gpus_of(parse_tres(tres)),
    )


def _seconds(text: str) -> float | None:
    moment = parse_time(text)
    return None if moment is None else float(moment)


def parse_topology(text: str) -> Topology:
    """Leaf switches and blocks of `scontrol show topology`, or of a topology.conf; of anything else, nothing.

    A switch that has switches below it is no leaf. A node in two leaves or two blocks (several topologies, 25.05) is
    in none: which one counts is not said.
    """
    groups: dict[str, dict[str, str]] = {"switch": {}, "nvlink_domain": {}}
    doubtful: set[tuple[str, str]] = set()
    refused = 0
    for line in text.split("\n"):
        said = {key.lower(): value for key, value in reversed(_PAIR.findall(line.partition("#")[0]))}
        level = "switch" if "switchname" in said else "nvlink_domain" if "blockname" in said else ""
        try:
            names = expand_hostlist(said.get("nodes", "")) if level else ()
        except ValueError:
            refused += 1
            continue
        if _is_leaf(said):
            for name in names:
                group = said["switchname" if level == "switch" else "blockname"]
                if groups[level].setdefault(name, group) != group:
                    doubtful.add((level, name))
    for level, name in doubtful:
        del groups[level][name]
    return Topology({level: names for level, names in groups.items() if names}, refused)


def _is_leaf(said: Mapping[str, str]) -> bool:
    return "nodes" in said and said.get("level", "0") == "0"
