"""One job's statements of this node made one: its lives added up, and its course over time.

Owns the sums. Refuses what other nodes say of the job: that is for `gpu-efficiency report`, which can ask them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct, structs

from exporter.core.leaks import LAYER_OF, NAMES
from exporter.core.model import SECOND
from exporter.core.statement import Sample, Statement
from exporter.http.api import WindowOut

_SUMMED = ("paid", "engine", "flops", "tensor_seen", "reported", "reportable", "unneeded")
_LAYER = dict(zip(NAMES, LAYER_OF, strict=True))
_NONE = Sample(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
BANDS = ("useful", "emfu", "ectr", "gau", "unobserved")
"""What a moment's GPUs did, from the best to the unknown; the middle three are the losses of each layer."""


class Stretch(Struct, frozen=True):
    """Between two samples: Unix seconds, and GPU-seconds in the order of BANDS."""

    start: float
    end: float
    bands: tuple[float, ...]


def jobs_of(statements: Iterable[Statement]) -> list[list[Statement]]:
    """The same by job, in the order in which the jobs come first; of each job the oldest life first."""
    found: dict[str, list[Statement]] = {}
    for statement in statements:
        found.setdefault(statement.owner.job_id, []).append(statement)
    return [sorted(lives, key=lambda life: life.start) for lives in found.values()]


def whole(lives: Sequence[Statement]) -> Statement:
    """The node's part of one job: what counts is added, what holds is the latest life's. At least one life."""
    last = max(lives, key=lambda life: (life.running, life.end))
    if len(lives) == 1:
        return last
    return structs.replace(
        last,
        start=min(life.start for life in lives),
        end=max(life.end for life in lives),
        running=any(life.running for life in lives),
        **{name: sum(getattr(life, name) for life in lives) for name in _SUMMED},
        **{name: _added(getattr(life, name) for life in lives) for name in ("parts", "energy", "money", "happened")},
        gpus={uuid: index for life in lives for uuid, index in life.gpus.items()},
        models=tuple(sorted({model for life in lives for model in life.models})),
        whole_gpus=max(life.whole_gpus for life in lives),
        first_work=lives[0].first_work,
        training=next((life.training for life in reversed(lives) if life.training is not None), None),
        service=next((life.service for life in reversed(lives) if life.service is not None), None),
    )


def _added(amounts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    sums: Counter[str] = Counter()
    for amount in amounts:
        sums.update(amount)
    return dict(sums)


def window_of_job(job: Statement) -> WindowOut:
    """The whole of a job as a window, for all that draws windows."""
    told = job.layers
    return WindowOut(
        seconds=job.paid / SECOND,
        gau=told.gau,
        ectr=told.ectr,
        emfu=told.emfu,
        product=told.product,
        floor=told.floor,
        coverage=told.coverage,
        driver_utilization=None,
        leaks={name: job.parts.get(name, 0) / SECOND for name in NAMES},
    )


def course(lives: Iterable[Statement]) -> list[Stretch]:
    """The job's course on this node, life after life; where no daemon ran there is a gap."""
    found: list[Stretch] = []
    for life in sorted(lives, key=lambda life: life.start):
        points = [structs.replace(_NONE, at=life.start), *life.samples, _end_of(life)]
        found += [
            _stretch(before, after)
            for before, after in pairwise(points)
            if after.at > before.at and after.paid > before.paid
        ]
    return found


def _end_of(life: Statement) -> Sample:
    """Its books at its end, as a sample."""
    by_layer = Counter[str]()
    for name, part in life.parts.items():
        by_layer[_LAYER[name]] += part
    seen = life.paid - by_layer["unobserved"]
    occupied = seen - by_layer["gau"]
    return Sample(
        at=life.end,
        paid=life.paid / SECOND,
        seen=seen / SECOND,
        occupied=occupied / SECOND,
        computing=(occupied - by_layer["ectr"]) / SECOND,
        useful=by_layer["useful"] / SECOND,
        joules=sum(life.energy.values()),
    )


def _stretch(before: Sample, after: Sample) -> Stretch:
    """Rounding may take a counter a little back: nothing is less than nothing."""
    paid, seen, occupied, computing, useful = (
        max(0.0, getattr(after, name) - getattr(before, name))
        for name in ("paid", "seen", "occupied", "computing", "useful")
    )
    bands = (useful, computing - useful, occupied - computing, seen - occupied, paid - seen)
    return Stretch(before.at, after.at, tuple(max(0.0, band) for band in bands))


def thinned(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """At most so many, neighbours added up."""
    step = -(-len(stretches) // most) or 1
    groups = [stretches[at : at + step] for at in range(0, len(stretches), step)]
    return [
        Stretch(group[0].start, group[-1].end, tuple(map(sum, zip(*(one.bands for one in group), strict=True))))
        for group in groups
    ]
