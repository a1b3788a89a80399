"""Joins what nodes know of a hang of one job that lasts, whichever source it was read from."""

from collections.abc import Mapping

from exporter.core.hangs import Hang, describe_hang, hang_advice, names_rank
from exporter.report.model import NodeHang, OngoingHang


def ongoing_hang(
    hangs: Mapping[str, Hang], gpus: Mapping[str, float], *, end: float, several_nodes: bool
) -> OngoingHang | None:
    """Return the hang of a job with these on its nodes, and so many GPUs hung on each, at its end; None if none."""
    if not hangs:
        return None
    node, first = min(hangs.items(), key=lambda item: (not names_rank(item[1]), item[1].since, item[0]))
    since = min(hang.since for hang in hangs.values())
    return OngoingHang(
        since=since,
        seconds=max(0.0, end - since),
        nodes=tuple(
            NodeHang(node=name, gpus=gpus[name], text=describe_hang(hang)) for name, hang in sorted(hangs.items())
        ),
        do=hang_advice(first, node=node if several_nodes else ""),
        gpu_hours=sum(hang.seconds for hang in hangs.values()) / 3600,
        unconfirmed_gpu_hours=sum(hang.unconfirmed_seconds for hang in hangs.values()) / 3600,
    )
