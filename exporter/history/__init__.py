"""Keeps what this node has measured on its own disk, so that a job's record does not depend on a reachable Prometheus.

One SQLite file holds ledger checkpoints, records of jobs that have ended, events and closed books. A failure here is
counted and logged; it never holds up sampling.
"""
