"""A week of a fleet as its rules would have recorded it, made up: days have a shape, teams have habits.

Owns the curves: who wants how many GPUs at which hour of the week, and where each team's time goes. What follows from
those is added up here as the rules of `alerts/` do, one sample at each of their intervals; nothing is below the level
of teams. Refuses raw series: a week of them would be millions of samples.
"""

from collections.abc import Iterator, Mapping
from math import cos, pi, sin
from typing import NamedTuple

from exporter.core.leaks import LAYER_OF, LEAK_NAMES
from tests.dashboards.past import Series, named, rules
from tests.dashboards.stories import PRICE

GPUS = 80
"""Of nodes with a daemon; one node more is owned, and down."""
OWNED = 88
BUDGET = 25.0
"""USD an hour that may be idle."""
_HOUR = 3600
_PER_KWH, _GRAMS = 0.12, 380.0
_LAYER = dict(zip(LEAK_NAMES, LAYER_OF, strict=True))
_WATTS = {"gau": 105.0, "ectr": 250.0, "emfu": 430.0, "useful": 590.0}
"""Of a GPU, by what its time comes to."""
Spent = Mapping[str, float]
"""GPUs by leak."""


class Payer(NamedTuple):
    """A team and its account: its part of what is held, and the parts of that which are lost."""

    team: str
    account: str
    part: float
    lost: Spent


PAYERS = (
    Payer("foundation", "language", 0.5, {
        "exposed_communication": 0.1, "checkpoint": 0.03, "memory_bound": 0.22, "other_compute": 0.1, "hung": 0.02,
    }),
    Payer("perception", "vision", 0.22, {
        "idle_allocation": 0.16, "data_stall": 0.24, "memory_bound": 0.1, "low_parallelism": 0.05,
    }),
    Payer("assistants", "", 0.18, {"idle_allocation": 0.12, "batching": 0.2, "memory_bound": 0.42}),
    Payer("science", "research", 0.1, {"idle_allocation": 0.1, "host_overhead": 0.18, "low_parallelism": 0.14}),
)  # fmt: skip


def wanted(at: float) -> float:
    """GPUs that somebody has or waits for: most in the afternoon (UTC), fewer at the weekend."""
    weekend = (at // 86_400 + 3) % 7 >= 5
    day = cos((at / _HOUR % 24 - 15) / 24 * 2 * pi)
    return GPUS * (0.82 + 0.24 * day - (0.3 if weekend else 0.0) + 0.02 * sin(at / 4700))


def held(at: float) -> float:
    """Of them, those that somebody has."""
    return min(wanted(at), GPUS - 2.0)


def spent(payer: Payer, at: float) -> dict[str, float]:
    """GPUs of a team by leak; its habits waver through the day."""
    gpus, waver = held(at) * payer.part, 1 + 0.15 * sin(at / 9000 + len(payer.team))
    lost = {leak: gpus * part * waver for leak, part in payer.lost.items()}
    return lost | {"useful": gpus - sum(lost.values())}


def fleet(at: float) -> dict[str, float]:
    """The same of all together, and what nobody has."""
    found = {"idle_allocation": GPUS - held(at)}
    for payer in PAYERS:
        for leak, gpus in spent(payer, at).items():
            found[leak] = found.get(leak, 0.0) + gpus
    return found


def week(cluster: str, *, start: float, end: float) -> Series:
    """Everything recorded from `start` up to `end`, which is not included."""
    every = {rule.name: round(rule.interval) for rule in rules()}
    series: Series = {}
    for step, tell in ((every["cluster:gpu_efficiency_owned:gpus"], _cluster), (every[_OWNER.format("team")], _owners)):
        for at in range(round(start), round(end), step):
            for name, labels, value in tell(at):
                series.setdefault(named(name, cluster=cluster, **labels), []).append((float(at), value))
    unknown = {dict(labels)["__name__"] for labels in series} - every.keys()
    if unknown:
        raise ValueError(f"no rule records {', '.join(sorted(unknown))}")
    return series


Sample = tuple[str, dict[str, str], float]
_OWNER = "{}_layer:gpu_efficiency_seconds:rate5m"


def _cluster(at: float) -> Iterator[Sample]:
    """Of the whole fleet."""
    found, usd = fleet(at), {"currency": "USD"}
    for leak, gpus in found.items():
        about = {"leak": leak, "layer": _LAYER[leak]}
        yield "cluster_leak:gpu_efficiency_seconds:rate5m", about, gpus
        yield "cluster_leak:gpu_efficiency_share:ratio_rate5m", about, gpus / GPUS
        yield "cluster_leak:gpu_efficiency_cost:per_hour", about | usd, gpus * PRICE
    yield from _parts(found)
    for name, gpus in (("owned", OWNED), ("heard", GPUS), ("held", held(at)), ("demand", wanted(at))):
        yield f"cluster:gpu_efficiency_{name}:gpus", {}, float(gpus)
    yield "cluster:gpu_efficiency_queued:gpus", {}, wanted(at) - held(at)
    free = {"leak": "idle_allocation", "layer": "gau"}
    yield "cluster_leak:gpu_efficiency_unheld_seconds:rate5m", free, GPUS - held(at)
    yield "cluster_leak:gpu_efficiency_cost_unheld:per_hour", free | usd, (GPUS - held(at)) * PRICE
    yield "cluster:gpu_efficiency_cost_paid:per_hour", usd, GPUS * PRICE
    yield "cluster:gpu_efficiency_cost_useful_gpu_hour:ratio", usd, GPUS * PRICE / found["useful"]
    yield "cluster:gpu_efficiency_idle_budget:per_hour", usd, BUDGET
    for layer, gpus in _layers(found).items():
        watts = gpus * _WATTS[layer]
        yield "cluster_layer:gpu_efficiency_power:watts", {"layer": layer}, watts
        yield "cluster_layer:gpu_efficiency_energy_cost:per_hour", {"layer": layer} | usd, watts / 1000 * _PER_KWH
        yield "cluster_layer:gpu_efficiency_co2:grams_per_hour", {"layer": layer}, watts / 1000 * _GRAMS


def _parts(found: Spent) -> Iterator[Sample]:
    """Paid time less what each layer takes of it, and the quotients."""
    layers = _layers(found)
    occupied = GPUS - layers["gau"]
    computing = occupied - layers["ectr"]
    useful = layers["useful"]
    parts = {
        "paid": GPUS, "observed": GPUS, "occupied": occupied, "computing": computing, "resolved": computing,
        "useful": useful, "kernel": computing + layers["ectr"] / 2,
    }  # fmt: skip
    for name, gpus in parts.items():
        yield f"cluster:gpu_efficiency_{name}_seconds:rate5m", {}, gpus
    for name, value in _ratios(layers).items():
        yield f"cluster:gpu_efficiency_{name}:ratio_rate5m", {}, value
    yield "cluster:gpu_efficiency_product_floor:ratio_rate5m", {}, useful / GPUS
    yield "cluster:gpu_efficiency_coverage:ratio_rate5m", {}, GPUS / OWNED
    yield "cluster:gpu_efficiency_kernel_utilization:ratio_rate5m", {}, parts["kernel"] / GPUS
    yield "cluster:gpu_efficiency_unoccupied:ratio_rate5m", {}, layers["gau"] / GPUS


def _owners(at: float) -> Iterator[Sample]:
    """Of teams and accounts."""
    for payer in PAYERS:
        found = spent(payer, at)
        yield from _bill(payer, found)
        for kind, name in (("team", payer.team), ("account", payer.account)):
            if name:
                for layer, gpus in _layers(found).items():
                    yield _OWNER.format(kind), {kind: name, "layer": layer}, gpus


def _bill(payer: Payer, found: Spent) -> Iterator[Sample]:
    """Of the owner itself: team and account together; the servers' has a namespace instead of an account."""
    paying = {"account": payer.account} if payer.account else {"workload_namespace": "inference"}
    whose = {"team": payer.team} | paying
    gpus, usd = sum(found.values()), {"currency": "USD"}
    yield "owner:gpu_efficiency_paid_seconds:rate5m", whose, gpus
    for layer, part in _layers(found).items():
        yield _OWNER.format("owner"), whose | {"layer": layer}, part
    costs = {"paid": gpus, "lost": gpus - found["useful"], "idle": found.get("idle_allocation", 0.0)}
    for what, part in costs.items():
        yield f"owner:gpu_efficiency_cost_{what}:per_hour", whose | usd, part * PRICE
    watts = sum(part * _WATTS[layer] for layer, part in _layers(found).items())
    yield "owner:gpu_efficiency_energy_cost:per_hour", whose | usd, watts / 1000 * _PER_KWH
    for leak, part in found.items():
        about = whose | {"leak": leak, "layer": _LAYER[leak]}
        yield "owner_leak:gpu_efficiency_seconds:rate5m", about, part
        yield "owner_leak:gpu_efficiency_cost:per_hour", about | usd, part * PRICE


def _layers(found: Spent) -> dict[str, float]:
    sums = dict.fromkeys(_WATTS, 0.0)
    for leak, gpus in found.items():
        sums[_LAYER[leak]] += gpus
    return sums


def _ratios(layers: Spent) -> dict[str, float]:
    paid = sum(layers.values())
    occupied = paid - layers["gau"]
    computing = occupied - layers["ectr"]
    found = {"gau": occupied / paid, "ectr": computing / occupied, "emfu": layers["useful"] / computing}
    return found | {"product": layers["useful"] / paid}
