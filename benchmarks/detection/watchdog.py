"""NCCL's watchdog, as PyTorch arms it: a collective that takes longer than ten minutes ends the job.

Owns that one rule. It sits in the program and knows what no sensor sees, so it is asked of the simulation's own record:
a rank that does nothing but wait for its peers. Ten minutes are PyTorch's default for NCCL since 2.2 (pull request
110947 of pytorch/pytorch); it was 30 minutes before, and still is where a launcher sets it. A program on one GPU has no
collectives.
"""

from collections.abc import Iterable, Iterator, Sequence

from exporter.core.model import MS, SECOND
from exporter.simulate.plan import GroundTruth
from exporter.simulate.simulation import Simulation

TIMEOUT = 600 * SECOND


def collective_timeouts(nodes: Sequence[Simulation]) -> dict[str, int]:
    """Nanoseconds from the story's beginning at which the watchdog would end a job, by job."""
    ranks = {(n, e.uuid) for n, node in enumerate(nodes) for e in node.truth if e.uuid and e.process}
    if len(ranks) < 2:
        return {}
    ended: dict[str, int] = {}
    for node in nodes:
        for job, at in _ended(node):
            ended[job] = min(at, ended.get(job, at))
    return ended


def _ended(node: Simulation) -> Iterator[tuple[str, int]]:
    for uuid in node.uuids:
        for job, since, until in stretches(
            [e for e in node.truth if e.uuid == uuid], node.start + node.duration_ms * MS
        ):
            if until - since >= TIMEOUT:
                yield job, since + TIMEOUT - node.start


def stretches(entries: Sequence[GroundTruth], end: int) -> Iterable[tuple[str, int, int]]:
    """Stretches in which one rank waits for its peers and does nothing else."""
    begun: GroundTruth | None = None
    for entry in entries:
        waits = entry.waiting_peer_share >= 1
        if begun is not None and (not waits or entry.job_id != begun.job_id):
            yield begun.job_id, begun.at, min(entry.at, end)
            begun = None
        if waits and begun is None:
            begun = entry
    if begun is not None:
        yield begun.job_id, begun.at, end
