"""What a GPU really did, as square waves whose share of busy time is known in closed form, and what is read of it.

Owns the waves and their exact integral, to the millisecond. Shares nothing with the simulation or the core.
"""

from msgspec import Struct


class Wave(Struct, frozen=True, kw_only=True):
    """Work that comes again and again: so many milliseconds busy at the beginning of each period."""

    name: str
    about: str
    period: int
    busy: int
    pause_every: int = 0
    """Every so many milliseconds the work stops (for a save), whatever its own beat."""
    pause: int = 0

    def before(self, at: int) -> int:
        """Busy milliseconds in [0, at): exact."""
        if not self.pause_every:
            return _square(at, self.period, self.busy)
        rounds, rest = divmod(at, self.pause_every)
        working = self.pause_every - self.pause
        a_round = _square(working, self.period, self.busy)
        return rounds * a_round + _square(min(rest, working), self.period, self.busy)

    def share(self, start: int, end: int) -> float:
        """Share of [start, end) in which it was busy."""
        return (self.before(end) - self.before(start)) / (end - start)


def _square(at: int, period: int, busy: int) -> int:
    rounds, rest = divmod(at, period)
    return rounds * busy + min(rest, busy)


WAVES = (
    Wave(name="even", about="60 % of every second", period=1_000, busy=600),
    Wave(name="decode bursts", about="2 s of every 9.7 s", period=9_700, busy=2_000),
    Wave(name="training with saves", about="1.1 of every 1.2 s, a save of 40 s every 10 min", period=1_200, busy=1_100,
         pause_every=600_000, pause=40_000),
    Wave(name="loader, 15 s", about="5 s of every 15 s: in step with a scrape", period=15_000, busy=5_000),
    Wave(name="loader, 30.1 s", about="10 s of every 30.1 s: nearly in step", period=30_100, busy=10_000),
    Wave(name="short jobs", about="a job of 12 s every 97 s", period=97_000, busy=12_000),
)  # fmt: skip
"""From what no method errs on to what sampling cannot see."""
