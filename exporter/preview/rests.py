"""Rests of GPUs, from samples of when each last worked.

A *rest* is the time in which a GPU has the same holders and the same moment of last work. Owns the telling apart of
work, a new holder and a daemon that started anew; refuses to ask for samples, and to know thresholds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

GRACE = 90.0
"""Seconds after its start in which a daemon may name a moment of last work that is only its first look."""
Gpu = tuple[str, str]
"""Cluster and UUID."""
Sample = tuple[float, frozenset[str], float]
"""When, who holds it, and when it last worked."""


class Rest(Struct):
    """A GPU that has not worked since `work`."""

    jobs: frozenset[str]
    work: float
    said: float
    """What its series says; differs from `work` after a restart of the daemon, which does not know better."""
    first: float
    """When it was first seen so."""
    last: float
    """When it was last seen so."""


Judge = Callable[[Gpu, Rest, float | None], None]
"""Is told of each rest that is over, and when its job worked again; None: it was not seen to."""


class Rests:
    """The rest that each GPU is in, fed with samples in the order of time, GPU by GPU."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.shortest = 0.0
        """Seconds; shorter rests are not told of, for there is one between any two samples of work."""
        self._now: dict[Gpu, Rest] = {}
        self.held: dict[Gpu, float] = defaultdict(float)
        """Seconds between samples of the same holders, but for gaps."""

    def feed(self, gpu: Gpu, samples: Iterable[Sample], *, starts: Iterable[float] = (), step: float) -> None:
        """Take in what came of one GPU; `starts`: when daemons that watch it started."""
        starts, held = tuple(starts), 0.0
        rest = self._now.get(gpu)
        for at, jobs, work in samples:
            if rest is None or jobs != rest.jobs:
                self._over(gpu, rest, None)
                rest = Rest(jobs, work, work, at, at)
                continue
            held += min(at - rest.last, 2 * step)
            if work > rest.said and not _restarted(rest, work, starts):
                worked = max(rest.last, min(work, at))
                self._over(gpu, rest, worked)
                rest = Rest(jobs, work, work, at, at)
            else:
                rest.said, rest.last = work, at
        self.held[gpu] += held
        if rest is not None:
            self._now[gpu] = rest

    def _over(self, gpu: Gpu, rest: Rest | None, worked: float | None) -> None:
        if rest is not None and rest.last - rest.work >= self.shortest:
            self._judge(gpu, rest, worked)

    def end(self) -> None:
        """There are no more samples."""
        for gpu, rest in self._now.items():
            self._over(gpu, rest, None)
        self._now.clear()


def _restarted(rest: Rest, work: float, starts: tuple[float, ...]) -> bool:
    """The daemon started since, and what it says is the moment of its first look."""
    return any(rest.last < start and work <= start + GRACE for start in starts)


def merged(series: Iterable[tuple[str, Iterable[tuple[float, str]]]]) -> Iterator[Sample]:
    """Samples of one GPU from those of each job that holds it, in the order of time."""
    series = list(series)
    if len(series) == 1:
        ((job, values),) = series
        alone = frozenset({job})
        yield from ((at, alone, float(value)) for at, value in values)
        return
    samples = sorted((at, job, float(value)) for job, values in series for at, value in values)
    for at, together in groupby(samples, key=itemgetter(0)):
        rows = list(together)
        yield at, frozenset(job for _, job, _ in rows), max(work for _, _, work in rows)
