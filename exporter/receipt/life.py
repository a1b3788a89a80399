"""From when to when a job ran, and where. Owns finding that out; refuses to add up anything.

A daemon keeps a job's series for some minutes after its end, with counters that stand still: the end is the first
sample that has the last value. Where the last sample still grew, nobody has told the end.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from msgspec import Struct

from exporter.receipt.asking import LOOKBACK_SECONDS, SCRAPED_SECONDS, Asking, Place, ReceiptError, Track, span

DAY = 86400.0
_LOOKS = (600.0, 6 * 3600.0, 2 * DAY, 14 * DAY)
"""How far back a job is looked for, first to last: a short look is cheap."""
_PIECES = 1000
_TAIL_SECONDS = 900.0
"""More than a daemon keeps a job that has ended."""
_SAME_RUN_SECONDS = 60.0
"""Stays closer than this are one run."""


class Stay(Struct, frozen=True, kw_only=True):
    """A job's time at one daemon. Unix seconds."""

    place: Place
    start: float
    end: float
    """When its paid seconds grew last."""
    heard: float
    """The last sample."""
    interval: float
    """Between two samples."""

    @property
    def told(self) -> bool:
        """The daemon has seen its end."""
        return self.heard > self.end


class Life(Struct, frozen=True, kw_only=True):
    """A job's time, over all its nodes."""

    start: float
    end: float
    running: bool
    stays: tuple[Stay, ...]
    earlier: float | None = None
    """End of another run under the same id, before this one."""

    @property
    def begin(self) -> float:
        """Where to ask from: a little before, as clocks differ."""
        return self.start - _SAME_RUN_SECONDS

    @property
    def heard(self) -> float:
        """Where to ask to."""
        return max(stay.heard for stay in self.stays)


def find(asking: Asking, at: float, *, since: float) -> Life:
    """The job's last run that began before `at`, looked for `since` seconds back. Raises ReceiptError."""
    starts = _starts(asking, at, since)
    clusters = sorted({place[0] for place in starts})
    if len(clusters) > 1:
        raise ReceiptError(
            f"job {asking.job_id} is there in several clusters ({', '.join(clusters)}): pick one with --match"
            f" 'cluster=\"{clusters[0]}\"'"
        )
    stays = sorted(_stays(asking, starts, at), key=lambda stay: -stay.heard)
    if not stays:
        raise ReceiptError(f"job {asking.job_id} has a start and no time: its daemon is too old to be asked, update it")
    return _joined(stays, at)


def _joined(stays: list[Stay], at: float) -> Life:
    """The newest stay and those that touch it; the rest is an earlier run."""
    start, own = stays[0].start, list[Stay]()
    for stay in stays:
        if stay.heard >= start - _SAME_RUN_SECONDS:
            own.append(stay)
            start = min(start, stay.start)
    others = [stay.end for stay in stays if stay not in own]
    running = any(not stay.told and at - stay.heard <= LOOKBACK_SECONDS for stay in own)
    end = max(stay.end for stay in own)
    return Life(start=start, end=end, running=running, stays=tuple(own), earlier=max(others, default=None))


def _starts(asking: Asking, at: float, since: float) -> dict[Place, float]:
    """When the job was given its first GPU, by daemon. Looks further back until it is there, then to its start."""
    for back in (*(look for look in _LOOKS if look < since), since):
        found = _within(asking, at, back)
        if found:
            whole = min(since, at - min(found.values()) + _SAME_RUN_SECONDS)
            return _within(asking, at, whole) if whole > back else found
    raise ReceiptError(_missing(asking, at, since))


def _within(asking: Asking, at: float, back: float) -> dict[Place, float]:
    """Piece by piece, for a Prometheus keeps no more samples in mind than those of one piece."""
    step = span(0, max(60.0, back / _PIECES))
    piece = f"last_over_time({asking.series('start_timestamp_seconds')}[{step}])"
    rows = asking.now(f"{piece} or last_over_time({piece}[{span(0, back)}:{step}])", at)
    return {row.place: row.value for row in rows if row.value <= at}


def _missing(asking: Asking, at: float, since: float) -> str:
    known = asking.now(f"count(last_over_time({asking.anyone('gpu_efficiency_build_info')}[1h]))", at)
    if known:
        return (
            f"no job {asking.job_id} is stored there in the {since / DAY:g} days before: is the id as"
            " gpu_efficiency_job_info has it (Kubernetes: namespace/pod)? Try --since, --at or --match"
        )
    return (
        "nothing of gpu-efficiency is stored there in the hour before: does that Prometheus scrape the daemons? Try"
        " --at with a time at which it did, or another --match"
    )


def _stays(asking: Asking, starts: dict[Place, float], at: float) -> Iterator[Stay]:
    """One for each daemon whose paid seconds are stored."""
    back = at - min(starts.values()) + _SAME_RUN_SECONDS
    step = max(SCRAPED_SECONDS, back / _PIECES)
    for moment, places in _last_seen(asking, at, back, step).items():
        tail = _TAIL_SECONDS + step
        for track in _tracks(asking, places, min(moment, at), tail, back):
            yield _stay(track, starts[track.place])


def _last_seen(asking: Asking, at: float, back: float, step: float) -> dict[float, set[Place]]:
    """About when each daemon told of the job last: by the moment after it, to one step."""
    inner = f"timestamp(last_over_time({asking.series('paid_seconds_total')}[{span(0, step)}]))"
    query = f"max by (cluster, instance) (max_over_time({inner}[{span(0, back + 2 * step)}:{span(0, step)}]))"
    found: dict[float, set[Place]] = defaultdict(set)
    for row in asking.now(query, at + step):
        found[row.value].add(row.place)
    return found


def _tracks(asking: Asking, places: set[Place], moment: float, tail: float, back: float) -> Iterator[Track]:
    """The last samples of some daemons, from before they stood still."""
    left = places
    while left:
        tracks = asking.raw(asking.series("paid_seconds_total"), moment - tail, moment, series=len(left))
        for track in tracks:
            if track.place in left and (track.points[0][1] != track.points[-1][1] or tail >= back):
                left = left - {track.place}
                yield track
        if tail >= back:
            return
        tail *= 4


def _stay(track: Track, start: float) -> Stay:
    times = [at for at, _ in track.points]
    gaps = [b - a for a, b in pairwise(times)]
    interval = median(gaps or [SCRAPED_SECONDS])
    return Stay(place=track.place, start=start, end=_grown(track), heard=times[-1], interval=interval)


def _grown(track: Track) -> float:
    """The first sample that has the last value."""
    end, last = track.points[-1]
    for at, value in reversed(track.points):
        if value != last:
            break
        end = at
    return end
