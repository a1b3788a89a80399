"""Drawings of a receipt, as SVG inside a page. Owns what is drawn of which; refuses figures that tables do not have."""

from exporter.receipt.drawing.job import job
from exporter.receipt.drawing.pair import pair
from exporter.receipt.drawing.sums import sums

__all__ = ["job", "pair", "sums"]
