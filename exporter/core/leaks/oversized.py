"""A job on one GPU that has never needed all of it.

It takes nothing from useful work: the smallest slice that would have held the job does that too. So of what the job
lost, whatever the cause, the part beyond the slice is the allocation's (E).
"""

from collections.abc import Container

from exporter.core.attribution import divided


def moved(taken: list[tuple[int, int]], surplus: int, *, to: int, sizable: Container[int]) -> list[tuple[int, int]]:
    """`taken` with at most `surplus` ppm moved to leak `to`, from each of the `sizable` leaks pro rata."""
    lost = [ppm if index in sizable else 0 for index, ppm in taken]
    whole = sum(lost)
    if not whole:
        return taken
    kept = divided(whole - min(surplus, whole), lost)
    rest = [
        (index, left if index in sizable else ppm)
        for (index, ppm), left in zip(taken, kept, strict=True)
        if index not in sizable or left
    ]
    return [*rest, (to, min(surplus, whole))]
