"""Runs the command `cardinality`: estimates a fleet's series and samples, and the memory and disk that they need.

Owns the flags and the measured cost of a series and a sample (docs/prometheus.md); exporter.cardinality counts series.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping

import msgspec
from msgspec import Struct, structs

from exporter.cardinality import (
    MISSING_SIGNALS,
    PROFILES,
    FleetSize,
    kept_share,
    max_samples,
    recorded_series,
    recording_rules,
    relabel_configs,
    scraped_series,
)
from exporter.cli.wiring import at_least, duration_argument
from exporter.config import ConfigError
from exporter.core.exposition import MAX_LABEL_LENGTH
from exporter.core.metrics import METRICS

BYTES_OF_MEMORY = 8 * 2**30 / (955_000 + 236_000)
"""Bytes per series in the head, rules included: docs/prometheus.md sizes 8 GiB for that many and measured 5.7."""
BYTES_SCRAPED, BYTES_RECORDED = 1.95, 4.6
"""Bytes on disk per sample; docs/prometheus.md."""
USUAL_LEAKS = 5
"""Leaks in which a job or a node loses time at once: 3.7 per job and 5.0 per node on the eight nodes of the simulated
fleet and the demo (tests/e2e/test_prometheus_scale.py counts them)."""
_HEAD_HOURS = 3.0
"""Hours that an ended series stays in Prometheus' head at most: two hours of a block and half of the next."""
_HEADROOM = 1.2
_GROUPS: Mapping[str, str] = {
    "gpu": "single GPUs", "spinning GPU": "single GPUs", "shared GPU": "single GPUs",
    "GPU coding video": "single GPUs", "GPU with a chip-to-chip link": "single GPUs",
    "job": "jobs", "measured job": "jobs", "job in trouble": "jobs", "job on one GPU": "jobs",
    "job on several GPUs": "jobs", "job without tensor work": "jobs",
    "reporting job": "jobs that report", "rank": "jobs that report", "serving job": "servers",
    "communicating job": "timed communication", "communicating rank": "timed communication",
}  # fmt: skip
_NODES = "nodes"


class CardinalityEstimate(Struct, frozen=True, kw_only=True):
    """An estimate and its input. Series are the maximum of the whole fleet at one moment."""

    fleet: FleetSize
    profile: str
    interval: float
    series: dict[str, int]
    """Scraped series by group: single GPUs, jobs, ..."""
    scraped: int
    scraped_calm: int
    """Scraped series as long as nothing has gone wrong."""
    scraped_per_node: int
    recorded: int
    """Usual number of recorded series, with `fleet.leaks` (0: USUAL_LEAKS) leaks per job and node at once."""
    recorded_at_most: int
    new_series_per_day: int
    """Series of jobs that start in a day."""
    samples_per_second: float
    memory_bytes: int
    """Memory of Prometheus; estimated from our own measurement."""
    disk_bytes_per_day: int
    sample_limit: int
    """Limit for each target."""
    label_limit: int
    label_value_length_limit: int


def estimate(fleet: FleetSize, *, profile: str = "full", interval: float = 60.0) -> CardinalityEstimate:
    """Estimate series, samples, memory, disk and limits of a fleet."""
    found = {name: count * kept_share(name, profile) for name, count in scraped_series(fleet).items()}
    calm_total = sum(count * kept_share(name, profile) for name, count in scraped_series(fleet, calm=True).items())
    usual = structs.replace(fleet, leaks=fleet.leaks or USUAL_LEAKS)
    rules = {rule: recorded_series(usual, rule, calm=True) for rule in recording_rules()}
    total, recorded_total = sum(found.values()), sum(rules.values())
    new = _new_series(fleet, profile)
    samples_per_second = total / interval + sum(count / rule.interval for rule, count in rules.items())
    disk_bytes = (total / interval * BYTES_SCRAPED + (samples_per_second - total / interval) * BYTES_RECORDED) * 86_400
    return CardinalityEstimate(
        fleet=fleet,
        profile=profile,
        interval=interval,
        series=_grouped(found),
        scraped=math.ceil(total),
        scraped_calm=math.ceil(calm_total),
        scraped_per_node=math.ceil(total / fleet.nodes),
        recorded=math.ceil(recorded_total),
        recorded_at_most=math.ceil(sum(recorded_series(fleet, rule) for rule in recording_rules())),
        new_series_per_day=math.ceil(new),
        samples_per_second=round(samples_per_second, 1),
        memory_bytes=round((total + recorded_total + new * _HEAD_HOURS / 24) * BYTES_OF_MEMORY),
        disk_bytes_per_day=round(disk_bytes),
        sample_limit=math.ceil(max_samples(fleet, profile) * _HEADROOM / 100) * 100,
        label_limit=_label_limit(),
        label_value_length_limit=4 * MAX_LABEL_LENGTH,
    )


def _grouped(found: Mapping[str, float]) -> dict[str, int]:
    scopes = {metric.name: metric.scope for metric in METRICS}
    sums: dict[str, float] = {}
    for name, count in found.items():
        group = _GROUPS.get(scopes.get(name, ""), _NODES)
        sums[group] = sums.get(group, 0.0) + count
    return {group: math.ceil(count) for group, count in sums.items() if count}


def _new_series(fleet: FleetSize, profile: str) -> float:
    """New series per day: each new job has series on each of its nodes, and of the rules by job."""
    if not fleet.churn or not fleet.jobs:
        return 0.0
    running = structs.replace(fleet, churn=0.0)
    of_jobs = {metric.name for metric in METRICS if "job_id" in metric.labels}
    raw = sum(count * kept_share(name, profile) for name, count in scraped_series(running).items() if name in of_jobs)
    usual = structs.replace(running, leaks=fleet.leaks or USUAL_LEAKS)
    rules = sum(recorded_series(usual, rule, calm=True) for rule in recording_rules() if "job_id" in rule.labels)
    return (raw + rules) / fleet.jobs * fleet.churn


def _label_limit() -> int:
    """The most labels of any metric, and __name__, job, instance and 12 that a scrape configuration may add."""
    return max(len(metric.labels) for metric in METRICS) + 3 + 12


# -- the command --


def cardinality(args: argparse.Namespace) -> int:
    """Print the estimate, or the relabelling of a profile."""
    if args.relabel:
        sys.stdout.write(relabel_text(args.profile))
        return 0
    found = estimate(_fleet(args), profile=args.profile, interval=args.interval)
    tree = msgspec.to_builtins(found)
    sys.stdout.write(json.dumps(tree, indent=2) + "\n" if args.json else "\n".join(_text_lines(found)) + "\n")
    return 0


def relabel_text(profile: str) -> str:
    """Return YAML for a job of a scrape configuration."""
    rows = relabel_configs(profile)
    command = f"gpu-efficiency cardinality --profile {profile} --relabel"
    head = f"# Profile {profile}: {PROFILES[profile]}. Printed by {command}\n"
    return head + "metric_relabel_configs:" + ("".join(map(_relabel_rule, rows)) or " []") + "\n"


def _relabel_rule(row: Mapping[str, object]) -> str:
    sources = ", ".join(row["source_labels"])  # type: ignore[arg-type]
    return f"\n  - source_labels: [{sources}]\n    regex: {row['regex']}\n    action: {row['action']}"


def _fleet(args: argparse.Namespace) -> FleetSize:
    """Build the FleetSize of the flags, with defaults that depend on others; raises ConfigError if they contradict."""
    jobs = args.nodes if args.jobs is None else args.jobs
    owners = max(args.teams, args.accounts, args.namespaces)
    named = {name: value for name, value in vars(args).items() if name in FleetSize.__struct_fields__}
    derived = {
        "jobs": jobs, "measured": 0 if args.no_host_counters else jobs,
        "shared": args.shared_gpus, "free": args.free_gpus, "listening": not args.no_reports,
        "owners": owners, "node_accounts": min(owners, args.node_accounts),
        "pairs": max(owners, args.users, jobs if owners > 1 and args.users > 1 else 0),
    }  # fmt: skip
    fleet = FleetSize(**named | derived)
    for wrong, why in _contradictions(fleet):
        if wrong:
            raise ConfigError(f"cardinality: {why}")
    return fleet


def _contradictions(fleet: FleetSize) -> Iterator[tuple[bool, str]]:
    yield fleet.mig_boards > fleet.gpus, f"--mig-boards {fleet.mig_boards} of {fleet.gpus} GPUs a node"
    yield bool(fleet.mig_boards) != bool(fleet.mig_instances), "--mig-boards and --mig-instances go together"
    yield fleet.nodes_per_job > fleet.nodes, f"--nodes-per-job {fleet.nodes_per_job:g} of {fleet.nodes} nodes"
    for flag in ("reporting", "serving", "communicating", "trouble"):
        yield getattr(fleet, flag) > fleet.jobs, f"--{flag} {getattr(fleet, flag)} of {fleet.jobs} jobs"
    every = fleet.nodes * fleet.devices
    limited = {"spinning": fleet.spinning, "coding": fleet.coding, "chip-links": fleet.chip_links}
    for flag, count in (limited | {"shared-gpus": fleet.shared, "free-gpus": fleet.free}).items():
        yield count > every, f"--{flag} {count} of {every} GPUs and instances"


def _text_lines(found: CardinalityEstimate) -> Iterator[str]:
    fleet = found.fleet
    yield f"{fleet.nodes:,} nodes of {fleet.gpus} GPUs, {fleet.jobs:,} jobs; source {fleet.source}."
    yield f"Profile {found.profile}: {PROFILES[found.profile]}. Numbers are maxima, unless a line says otherwise:\n"
    for group, count in found.series.items():
        yield f"  scraped, of {group:20}{count:>14,}  {count / fleet.nodes:>9,.1f} a node"
    yield f"  scraped, all{'':>18}{found.scraped:>14,}  {found.scraped / fleet.nodes:>9,.1f} a node"
    yield f"    while nothing has gone wrong{'':>2}{found.scraped_calm:>14,}"
    yield (
        f"  recorded by alerts/*.yaml{'':>5}{found.recorded:>14,}"
        f"  usual: {fleet.leaks or USUAL_LEAKS} leaks for each job and node"
    )
    yield f"    at most{'':>23}{found.recorded_at_most:>14,}"
    if found.new_series_per_day:
        yield f"  new a day, of jobs that begin {found.new_series_per_day:>14,}"
    yield f"  samples a second{'':>14}{found.samples_per_second:>14,.0f}  scraped every {found.interval:g} s"
    yield "\nOne Prometheus, extrapolated from a measurement on one machine (docs/prometheus.md), (E):"
    yield f"  memory {found.memory_bytes / 2**20:,.0f} MiB, disk {found.disk_bytes_per_day / 1e6:,.0f} MB a day"
    if found.profile not in {"full", "rules"}:
        yield "  Rules that read what this profile drops record nothing: docs/prometheus.md says which."
    yield "\nLimits of a scrape, each a fifth above the maximum of such a node:"
    yield f"  sample_limit: {found.sample_limit}"
    yield f"  label_limit: {found.label_limit}"
    yield f"  label_value_length_limit: {found.label_value_length_limit}"


_NUMBERS = (
    ("nodes", 1, 1, "nodes with a daemon"),
    ("gpus", 8, 1, "boards per node"),
    ("mig-boards", 0, 0, "boards per node that are split into MIG instances"),
    ("mig-instances", 0, 0, "MIG instances per node, on all these boards together"),
    ("reporting", 0, 0, "jobs that report (docs/training-jobs.md)"),
    ("serving", 0, 0, "jobs whose serving engine is found (docs/engines.md)"),
    ("communicating", 0, 0, "jobs whose communication NCCL Inspector or CoMMA times (docs/training-jobs.md)"),
    ("trouble", 0, 0, "jobs that hang, have no process, an exemption or limits of their own"),
    ("spinning", 0, 0, "GPUs that spin at the same time"),
    ("coding", 0, 0, "GPUs that encode or decode video at the same time"),
    ("chip-links", 0, 0, "GPUs with a chip-to-chip link to a Grace CPU"),
    ("ports", 0, 0, "RDMA ports per node"),
    ("shared-gpus", 0, 0, "GPUs that several jobs share"),
    ("sharers", 2, 1, "jobs on each of those"),
    ("free-gpus", 0, 0, "unallocated GPUs; lowers the usual number only, not the maximum"),
    ("reasons", 1, 0, "different reasons for unobserved time of a GPU since its daemon's start"),
    ("models", 1, 1, "models of GPU in the fleet"),
    ("teams", 1, 1, "teams"),
    ("accounts", 1, 1, "accounts"),
    ("namespaces", 1, 1, "namespaces"),
    ("users", 1, 1, "users who run jobs at the same time"),
    (
        "node-accounts",
        4,
        1,
        "combinations of team, account and namespace that have used one node since its daemon's start",
    ),
    ("exemptions", 0, 0, "[[exemptions]]"),
    ("pod-labels", 0, 0, "labels of pods that are exported for each job (kubernetes.pod_labels)"),
    (
        "leaks",
        0,
        0,
        f"different leaks of one job at the same time; 0: {USUAL_LEAKS} for the usual number, all for the maximum",
    ),
)


def cardinality_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `cardinality`."""
    for name, default, least, about in _NUMBERS:
        command.add_argument(
            f"--{name}", type=_whole_number(least), default=default, metavar="N", help=f"{about}; {default}"
        )
    command.add_argument(
        "--jobs", type=_whole_number(0), metavar="N", help="jobs that run at the same time; default: one per node"
    )
    command.add_argument("--nodes-per-job", type=at_least(1), default=1.0, metavar="N", help="on average; 1")
    command.add_argument("--churn", type=at_least(0), default=0.0, metavar="N", help="jobs that end in a day; 0")
    command.add_argument("--source", choices=tuple(MISSING_SIGNALS), default="dcgm",
                         help="where telemetry comes from; dcgm. driver: NVML on boards before Hopper")  # fmt: skip
    command.add_argument("--no-reports", action="store_true", help="reports.socket is empty")
    command.add_argument("--no-host-counters", action="store_true", help="host.counters is false")
    command.add_argument(
        "--interval", type=duration_argument(1), default=60.0, metavar="TIME", help="time between two scrapes; 60s"
    )
    command.add_argument("--profile", choices=tuple(PROFILES), default="full", help="what the scrape keeps; full")
    command.add_argument("--relabel", action="store_true", help="print the profile as metric_relabel_configs")
    command.add_argument("--json", action="store_true", help="print JSON")


def _whole_number(least: int) -> Callable[[str], int]:
    """Return an argument type: a whole number of at least `least`."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least or len(text) > 9:  # noqa: PLR2004
            raise argparse.ArgumentTypeError(f"{text} is no whole number from {least} to 999,999,999")
        return int(text)

    return number
