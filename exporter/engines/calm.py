"""How fast tokens come while no prefill is in the way: remembered of the last minutes.

Owns the memory and the estimate. Refuses to say what a prefill costs: that is the core's.
"""

from collections import deque
from statistics import quantiles

from exporter.core.model import SECOND

MEMORY = 600 * SECOND
"""How long an interval is remembered."""
PREFILL_SHARE = 0.01
"""Of the tokens computed, below which an interval is calm (E)."""
BATCH_SHARE = 0.25
"""By how much of now's batch another may differ: the time of a pass grows with the batch (E)."""
FEWEST = 3
"""Calm intervals, before they are taken for the rule."""


class Calm:
    """Calm intervals of one replica: (end, requests in the batch, mean seconds between tokens)."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float, float]] = deque()

    def hear(self, at: int, *, running: float | None, gap: float | None, prompt: float | None, made: float) -> None:
        """Take in an interval that ended `at`: `prompt` tokens computed, `made` tokens generated."""
        while self._seen and at - self._seen[0][0] > MEMORY:
            self._seen.popleft()
        if not running or gap is None or prompt is None or made <= 0:
            return
        if prompt < PREFILL_SHARE * (prompt + made):
            self._seen.append((at, running, gap))

    def gap(self, running: float | None) -> float | None:
        """The lower quartile of the mean seconds between tokens at about that batch; None until three were seen.

        The lower one, for what else slows an interval (a long context, a neighbour) is no prefill either.
        """
        if not running:
            return None
        near = [gap for _, batch, gap in self._seen if abs(batch - running) <= BATCH_SHARE * running]
        return quantiles(near, n=4, method="inclusive")[0] if len(near) >= FEWEST else None
