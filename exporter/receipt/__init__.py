"""What one job cost, where its time went and what it said of itself, over all its nodes.

Owns what is asked of a Prometheus about a job, the receipt made of it, its comparison with another job's, and both as
text. It needs the daemons' own series only, no recording rule. Refuses to know how a Prometheus is reached.
"""

from exporter.receipt.asking import Asking, ReceiptError
from exporter.receipt.comparing import Comparison, compared
from exporter.receipt.issuing import issued
from exporter.receipt.joining import Asked, joined
from exporter.receipt.model import Receipt

__all__ = ["Asked", "Asking", "Comparison", "Receipt", "ReceiptError", "compared", "issued", "joined"]
