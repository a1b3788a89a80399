"""How many series the recording rules of `alerts/` make of a fleet's.

Owns the arithmetic over the labels of each rule's result, which `data/recorded.csv` has: `alerts/build_recorded.py`
writes it from the rules. Refuses to read a rule, and figures of its own.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from msgspec import Struct

from exporter.cardinality.series import SPEAKING, Fleet, further_states, population
from exporter.core.catalog import UNHELD
from exporter.core.leaks import LAYERS, NAMES
from exporter.core.policy import Policy


class Recorded(Struct, frozen=True):
    """A recording rule, as `alerts/build_recorded.py` describes it."""

    record: str
    interval: float
    labels: frozenset[str]
    scope: str
    leaks: int
    words: int
    sparse: bool
    rare: bool
    window: float


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = (files("exporter") / "data" / name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


@cache
def recordings() -> tuple[Recorded, ...]:
    """Every rule that records."""
    return tuple(
        Recorded(
            row["record"], float(row["interval"]), frozenset(row["labels"].split()), row["from"], int(row["leaks"]),
            int(row["words"]), row["sparse"] == "1", row["rare"] == "1", float(row["window"]),
        )
        for row in _rows("recorded.csv")
    )  # fmt: skip


@cache
def read_by_rules() -> Mapping[str, frozenset[str]]:
    """The daemon's series that some rule reads -> the leaks asked for; none: whatever leak."""
    return {row["metric"]: frozenset(row["leaks"].split()) for row in _rows("read_by_rules.csv")}


def recorded(fleet: Fleet, rule: Recorded, *, calm: bool = False) -> float:
    """Series of one rule: at most; or, if `calm`, without what there is only in trouble."""
    if (calm and rule.rare) or not _any(rule.scope, fleet):
        return 0.0
    each = _by_leak(rule, fleet) * rule.words * (3 if "spread" in rule.labels else 1)
    # Of a job's GPUs; requests of a server have states too, and these are words.
    mixed = not calm and {"job_id", "state"} <= rule.labels and rule.words == 1
    return _things(rule, fleet) * each + (further_states(fleet, fleet.jobs) if mixed else 0.0)


def _any(scope: str, fleet: Fleet) -> bool:
    return scope in {"cluster", "gpu", "job"} or population(scope, fleet) > 0


def _things(rule: Recorded, fleet: Fleet) -> float:
    """Jobs, nodes, or both, or owners: what the labels name."""
    labels = rule.labels
    if "gpu" in labels:
        return fleet.nodes * fleet.devices + fleet.shared * (fleet.sharers - 1)
    if "job_id" in labels:
        return _jobs(rule, fleet) * (fleet.nodes_per_job if "instance" in labels else 1)
    if labels & {"instance", "node"}:
        return fleet.nodes * (fleet.models_per_node if "model" in labels else 1)
    return _of_the_site(labels, fleet)


def _jobs(rule: Recorded, fleet: Fleet) -> float:
    """Of those that have ended, the ones it still tells of."""
    told = {
        "reporting job": fleet.reporting, "rank": fleet.reporting, "serving job": fleet.serving,
        SPEAKING: fleet.reporting + fleet.serving, "job in trouble": fleet.trouble,
    }  # fmt: skip
    running = told.get(rule.scope, fleet.jobs)
    ended = fleet.churn / 86_400 * (rule.window + Policy().job_linger_seconds)
    return running + ended * running / max(1, fleet.jobs)


def _of_the_site(labels: frozenset[str], fleet: Fleet) -> float:
    each = {
        "model": fleet.models, "exemption": fleet.exemptions, "workload_class": len(_CLASSES),
    }  # fmt: skip
    owned, used = bool(labels & {"team", "account", "workload_namespace"}), "user" in labels
    people = (1, fleet.users, fleet.owners, fleet.pairs)[2 * owned + used]
    return math.prod((people, *(count for label, count in each.items() if label in labels)))


_CLASSES = ("batch", "interactive", "serving")


def _by_leak(rule: Recorded, fleet: Fleet) -> int:
    """A leak is of one layer; what took nothing has no sample."""
    lost = fleet.leaks if fleet.leaks and rule.sparse else len(NAMES)
    if "leak" in rule.labels:
        return min(lost, rule.leaks) + (len(UNHELD) if "held" in rule.labels else 0)
    if "layer" in rule.labels:
        return min(lost, len(LAYERS))
    return 2 if "held" in rule.labels else 1
