"""Which shares are bad, as expected or good: it depends on what the GPUs do, for decoding waits for memory.

Owns the bands of training and of serving, and how a figure is judged by that of its class.
"""

from collections.abc import Mapping
from types import MappingProxyType

from dashboards.parts import Query
from dashboards.words import BAD, EXPECTED, GOOD

Steps = tuple[tuple[float | None, str], ...]

TRAINING: Mapping[str, tuple[float, float]] = MappingProxyType({
    "gau": (0.65, 0.85), "ectr": (0.70, 0.90), "emfu": (0.30, 0.50), "product": (0.1365, 0.3825),
})  # fmt: skip
"""Where most training lies, after the documents this project started from; the product's are those of its three."""
SERVING: Mapping[str, tuple[float, float]] = MappingProxyType({"product": (0.03, 0.3)})
"""Of useful, where most servers lie; their three factors have no band."""
ANY = (SERVING["product"][0], TRAINING["product"][1])
"""Of useful, in a column whose rows are of any class: below it is bad for all, above it good for all."""
OF_SERVERS = 'workload_class="serving"'


def judged(band: tuple[float, float] | None, *, times: float = 1) -> Steps:
    """Below the band it is bad, within it as expected, above it good; without a band nothing is judged.

    `times`: what the figure is multiplied by, 100 where it is in percent.
    """
    if band is None:
        return ((None, EXPECTED),)
    low, high = band
    return (None, BAD), (times * low, EXPECTED), (times * high, GOOD)


def by_class(
    expr: str, which: str, servers: str, *, on: str = "", legend: str = "", times: float = 1
) -> tuple[Query, Query]:
    """One answer, judged by the band of its class: of the two queries one has it, and the other has nothing.

    `servers`: an expression that has a value, with the labels `on`, where servers are what is judged.
    """
    return (
        Query(f"({expr}) unless on ({on}) {servers}", legend, steps=judged(TRAINING[which], times=times)),
        Query(f"({expr}) and on ({on}) {servers}", legend, steps=judged(SERVING.get(which), times=times)),
    )


def most(servers: str, all_of_them: str) -> str:
    """For `by_class`: a value where servers have more than half of it all."""
    return f"({servers} > 0.5 * {all_of_them})"
