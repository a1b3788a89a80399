"""Sums over many jobs, or a fleet: who held and lost how much, when, and what a change is worth.

Owns adding up what statements or a Prometheus tell, and the tables of it. Refuses single jobs, which are the receipt's.
"""

from exporter.receipt.sums.summary import Summary

__all__ = ["Summary"]
