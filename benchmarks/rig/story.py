"""The hour before now on a node of eight GPUs held by eight jobs: what a snapshot and a scrape look back on.

Owns which story it is, and its length.
"""

from exporter.core.model import SECOND
from exporter.simulate.simulation import Simulation, simulate

SCENARIO = "large_gemm"
HISTORY_SECONDS = 3660
"""An hour and a minute: every window that a scrape looks back on is full."""


def history(end: int) -> Simulation:
    """Tell the last hour before `end` (monotonic nanoseconds), in steps of ten seconds."""
    start = end - HISTORY_SECONDS * SECOND
    return simulate(SCENARIO, period_seconds=10, duration_seconds=HISTORY_SECONDS, start=start)
