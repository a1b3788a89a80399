"""What failed in a job, how often, and what it cost. Owns which leak pays for which failure: each for one alone.

Time in which a GPU hung, was down, or did again what had been done is in the books under a leak of its own. A critical
error has none: what followed of it is a hang, a restart or a GPU that is down.
"""

from collections.abc import Iterable, Iterator, Mapping

from exporter.receipt.figures import Figures
from exporter.receipt.model import Failure, Part

_ROWS = (
    ("hung", "happened", "hung"), ("zombie", "happened", "idle_allocation"), ("xid", "happened", ""),
    ("unavailable", "happened", "unavailable"), ("restart", "restarts", "failure_recovery"),
    ("rework", "rework_steps", "rework"),
)  # fmt: skip
"""Kind, the series that counts it, the leak that has its cost."""


def failures(figures: Figures, waterfall: Iterable[Part]) -> tuple[Failure, ...]:
    """Those that happened, or cost something, the dearest first."""
    parts = {part.name: part for part in waterfall}
    found = _found(figures, parts)
    return tuple(sorted(found, key=lambda each: -(each.gpu_hours or 0.0)))


def _found(figures: Figures, parts: Mapping[str, Part]) -> Iterator[Failure]:
    free = 0.0 if any(part.money is not None for part in parts.values()) else None
    for kind, series, leak in _ROWS:
        times = _times(figures, kind, series)
        part = parts.get(leak)
        if kind == "zombie" and not times:  # a job may rest, or wait for requests, without being one
            continue
        if times or part is not None:
            yield Failure(
                kind=kind,
                times=times,
                leak=leak,
                gpu_hours=part.gpu_hours if part else 0.0 if leak else None,
                money=part.money if part else free if leak else None,
            )


def _times(figures: Figures, kind: str, series: str) -> float | None:
    """Of GPUs: all of them together; of the whole job: of the node that has counted most."""
    if series == "happened":
        return figures.rows.sum(series, kind=kind)
    return figures.rows.most(series) if series else None
