"""What a scrape may leave out, how that is written as relabelling, and how much one scrape can then keep.

Owns the profiles; which series of single GPUs rules read is in `data/read_by_rules.csv`, made from `alerts/`.
"""

import math
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from exporter.cardinality.recordings import read_by_rules
from exporter.cardinality.series import OF_A_SCRAPE, Fleet, scraped
from exporter.core.catalog import METRICS, REASONS
from exporter.core.leaks import NAMES
from exporter.core.policy import Policy

PROFILES: Mapping[str, str] = {
    "full": "everything",
    "rules": "of single GPUs only what rules of alerts/ read",
    "jobs": "nothing of single GPUs",
    "nodes": "nothing of single GPUs and jobs",
}
"""Ways to drop detail at the scrape, each dropping more: name -> what is kept."""


def kept(metric: str, profile: str) -> float:
    """The share of a metric's series that a profile keeps."""
    labels = next((each.labels for each in METRICS if each.name == metric and each.scope != "node"), ())
    if profile == "full" or not {"uuid", "job_id"} & set(labels):
        return 1.0  # what a node counts without a GPU has an empty uuid, and stays
    if "uuid" not in labels:
        return float(profile != "nodes")
    if profile != "rules":
        return 0.0
    leaks = read_by_rules().get(metric)
    return 0.0 if leaks is None else (len(leaks) / len(NAMES) if leaks and "leak" in labels else 1.0)


def relabelling(profile: str) -> list[dict[str, object]]:
    """The profile as `metric_relabel_configs`."""
    if profile == "rules":
        return [*_unread()]
    gone = {"jobs": ("uuid",), "nodes": ("uuid", "job_id")}.get(profile, ())
    return [{"source_labels": [label], "regex": ".+", "action": "drop"} for label in gone]


def _unread() -> Iterator[dict[str, object]]:
    of_gpus = [metric for metric in METRICS if "uuid" in metric.labels]
    names = [m.name.removeprefix("gpu_efficiency_") for m in of_gpus if not kept(m.name, "rules")]
    yield {"source_labels": ["__name__"], "regex": f"gpu_efficiency_({'|'.join(names)})", "action": "drop"}
    for metric in of_gpus:
        if 0 < kept(metric.name, "rules") < 1:
            unread = [name for name in NAMES if name not in read_by_rules()[metric.name]]
            regex = f"{metric.name};({'|'.join(unread)})"
            yield {"source_labels": ["__name__", "leak"], "regex": regex, "action": "drop"}


def worst(fleet: Fleet, profile: str = "full") -> float:
    """Samples that one scrape can keep with such GPUs: a job of its own on each, all in trouble, for every reason."""
    jobs = fleet.devices * (fleet.sharers if fleet.shared else 1)
    ended = math.ceil(fleet.lingering / fleet.nodes)
    one = replace(
        fleet, nodes=1, jobs=jobs + ended, nodes_per_job=1.0, churn=0.0, trouble=jobs, spinning=fleet.devices, free=0,
        reporting=jobs if fleet.reporting else 0, serving=jobs if fleet.serving else 0,
        shared=fleet.devices if fleet.shared else 0, reasons=len(REASONS) + 1, node_accounts=Policy().max_accounts + 1,
    )  # fmt: skip
    return sum(count * kept(name, profile) for name, count in scraped(one).items()) - OF_A_SCRAPE
