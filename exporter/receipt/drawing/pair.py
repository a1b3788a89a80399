"""What is drawn of two jobs: where the time of each went, and by how much every leak differs."""

from collections.abc import Iterator, Sequence

from exporter.receipt.comparing import Comparison, Difference
from exporter.receipt.drawing.bars import Bar, Piece, bars
from exporter.receipt.drawing.canvas import plain
from exporter.receipt.drawing.steps import ORDER, kind_of
from exporter.receipt.model import Receipt
from exporter.wording import percent

SHOWN = 12
_KEYS = {
    "useful": "useful", "unresolved": "not resolved", "emfu": "lost model FLOPs (eMFU)",
    "ectr": "lost computing time (ECTR)", "gau": "lost to allocation (GAU)", "unobserved": "not seen",
}  # fmt: skip


def pair(found: Comparison) -> list[str]:
    """Both in one, then the differences."""
    return [_both((found.first, found.second)), _differences(found.differences)]


def _both(receipts: Sequence[Receipt]) -> str:
    rows = [
        Bar(name=f"job {each.who.job_id}", said=percent(each.layers.product), pieces=tuple(shares(each)), loud=True)
        for each in receipts
    ]
    used = {kind for row in rows for _, _, kind in row.pieces}
    keys = [(kind, words) for kind, words in _KEYS.items() if kind in used]
    said = "; ".join(f"{row.name}: {_worded(row.pieces)}" for row in rows)
    return bars("both", "Where the time of each went", said, rows, keys=keys, half=False)


def shares(receipt: Receipt) -> Iterator[Piece]:
    """Of its time by what it counts as: useful first, then the losses, the model's first."""
    whole = sum(part.gpu_hours for part in receipt.parts)
    start = 0.0
    for kind in reversed(ORDER):
        hours = sum(part.gpu_hours for part in receipt.parts if kind_of(part) == kind)
        if hours > 0:
            yield start, min(start + hours / whole, 1.0), kind
            start += hours / whole


def _worded(pieces: Sequence[Piece]) -> str:
    return ", ".join(f"{_KEYS[kind]} {percent(end - start)}" for start, end, kind in pieces)


def _differences(found: Sequence[Difference]) -> str:
    most = max((abs(each.grown) for each in found), default=0.0)
    if not most > 0:
        return ""
    rows = [_difference(each, most) for each in found[:SHOWN] if each.grown]
    said = ", ".join(f"{row.name} {row.said} points ({row.note})" for row in rows)
    return bars("differences", "Share of time in the second job against the first, in points", said, rows, half=False)


def _difference(each: Difference, most: float) -> Bar:
    """Zero is in the middle: to the right there is more of it in the second."""
    reach = 0.5 + 0.5 * each.grown / most
    kind = each.layer if each.layer in ORDER else "gau"
    return Bar(
        name=plain(each.name), said=f"{100 * each.grown:+.1f}", pieces=((min(0.5, reach), max(0.5, reach), kind),),
        note=f"{percent(each.first)} to {percent(each.second)}", ticks=(0.5,),
    )  # fmt: skip
