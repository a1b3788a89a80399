"""What is drawn of one job below its waterfall: the three layers, its nodes, its ranks, its quality.

Owns which figures a drawing has and the words it says. Refuses how rows and curves look.
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite
from statistics import median

from exporter.receipt.drawing.bars import Bar, Piece, bars
from exporter.receipt.drawing.canvas import TIMES, plain, side_by_side
from exporter.receipt.drawing.course import course
from exporter.receipt.drawing.curves import quality
from exporter.receipt.drawing.steps import whole_of
from exporter.receipt.drawing.waterfall import waterfall
from exporter.receipt.model import Layers, Node, Rank, Receipt
from exporter.wording import amount, percent

SHOWN, _BINS = 10, 60
"""Nodes and ranks that have a bar of their own; and steps in which all are counted."""
_LAYERS = (("gau", "GAU: held and working"), ("ectr", f"{TIMES} ECTR: computing"), ("emfu", f"{TIMES} eMFU: useful"))


def job(receipt: Receipt) -> list[str]:
    """In the order of a receipt."""
    truth, seconds = receipt.truth, receipt.when.seconds
    half = [
        partial(layers, receipt.layers), partial(course, receipt), partial(nodes, receipt.nodes),
        partial(ranks, receipt.ranks),
        *(partial(quality, each, seconds, n) for n, each in enumerate(truth.qualities if truth else ())),
    ]  # fmt: skip
    return [waterfall(whole_of(receipt)), *side_by_side(half)]


def layers(found: Layers, *, half: bool) -> str:
    """Each bar is a share of the one above it, so that the last is their product."""
    if found.gau is None or found.product is None:
        return ""
    rows, left = [Bar(name="paid time that was seen", said=percent(1.0), pieces=((0, 1, "paid"),))], 1.0
    for name, words in _LAYERS:
        share = getattr(found, name)
        after = left * min(share or 0.0, 1.0)
        lost = (after, left, name)
        rows.append(Bar(name=words, said=percent(share), pieces=((0, after, "kept"), lost)))
        left = after
    rows.append(_product(found, found.product))
    said = ", ".join(f"{row.name} {row.said}" for row in rows)
    return bars("layers", "Three layers, multiplied", said, rows, half=half)


def _product(found: Layers, product: float) -> Bar:
    floor = product if found.floor is None else min(found.floor, product)
    pieces: tuple[Piece, ...] = ((0, floor, "useful"), (floor, product, "unresolved"))
    note = "" if percent(floor) == percent(product) else f"at least {percent(floor)}: the rest of it is not resolved"
    return Bar(name="= useful", said=percent(product), pieces=pieces, note=note, loud=True)


def nodes(found: Sequence[Node], *, half: bool) -> str:
    """The worst first; nothing of a single one."""
    if len(found) == 1:
        return ""
    products = [node.product for node in found if node.product is not None]
    rows = [_node(node) for node in found[:SHOWN]]
    if len(found) > SHOWN and products:
        rows.append(_spread(f"all {len(found)} nodes", products, 1.0, percent(median(products))))
    said = ", ".join(f"{row.name} {row.said} ({row.note})" for row in rows)
    return bars("nodes", "Useful share of each node", said, rows, half=half)


def _node(node: Node) -> Bar:
    worst = f"most lost to {plain(node.worst)}, {percent(node.worst_share)}" if node.worst else "nothing lost"
    pieces = ((0.0, min(node.product or 0.0, 1.0), "useful"),)
    return Bar(name=node.name, said=percent(node.product), pieces=pieces, note=worst)


def _spread(name: str, values: Sequence[float], most: float, middle: str) -> Bar:
    """How many have how much, and the median."""
    counts = [0] * _BINS
    for value in values:
        counts[min(int(value / most * _BINS), _BINS - 1)] += 1
    hills = tuple(count / max(counts) for count in counts)
    ticks = (min(median(values) / most, 1.0),)
    return Bar(name=name, said=middle, hills=hills, ticks=ticks, note="how many have how much; the median", loud=True)


def ranks(found: Sequence[Rank], *, half: bool) -> str:
    """How long each is busy in a step: the slowest first, and the median of all as a mark."""
    found = [rank for rank in found if isfinite(rank.busy_seconds)]
    if len(found) < 2 or not (most := max(rank.busy_seconds for rank in found)) > 0:  # noqa: PLR2004  a spread
        return ""
    middle = median(rank.busy_seconds for rank in found)
    rows = [
        Bar(
            name=f"rank {rank.rank} on {rank.node}", said=f"{amount(rank.busy_seconds)} s",
            pieces=((0, rank.busy_seconds / most, "busy"),), ticks=(middle / most,),
            note=f"{rank.of_median:.2f} of the median",
        )
        for rank in found[:SHOWN]
    ]  # fmt: skip
    if len(found) > SHOWN:
        values = [rank.busy_seconds for rank in found]
        rows.append(_spread(f"all {len(found)} ranks", values, most, f"{amount(middle)} s"))
    said = ", ".join(f"{row.name} {row.said}" for row in rows)
    return bars("ranks", "Busy time a step of the slowest ranks", said, rows, half=half)
