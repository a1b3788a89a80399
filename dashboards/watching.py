"""What to watch of a leak: what a series is called, and how it is drawn for a fleet of many jobs.

Owns titles and curves. Refuses choosing series: that is the table of leaks.
"""

from msgspec.structs import replace

from dashboards import words
from dashboards.losses import Side
from dashboards.parts import Query
from dashboards.series import at, latest, recorded

SLOWEST = "p99 of the slowest"
SPREAD = {
    SLOWEST: words.QUIET,
    "p99": words.BAD,
    "p95": words.WATCH,
    "p90": words.WATCH,
    "p50": words.EXPECTED,
    "p10": words.UNKNOWN,
}
MIDDLE, WORST = "cluster:gpu_efficiency_latency_middle:seconds", "cluster:gpu_efficiency_latency_slowest:seconds"
_TITLES = {
    "arithmetic intensity": "FLOPs per byte",
    "dram active": "DRAM in use",
    "ofu": "Of tensor peak (OFU)",
    "memory used": "GPU memory in use",
    "fitting slice": "Would fit, of a GPU",
    "cost idle": "Idle, an hour",
    "hfu mfu gap": "HFU less MFU",
    "kv cache": "KV cache in use",
    "latency ttft": "Time to first token",
    "latency itl p99": "Between tokens",
    "latency queue": "In the queue",
    "preemptions": "Preemptions a second",
    "recomputed tokens": "Tokens computed twice a second",
    "straggler": "Others wait more",
    "advice seconds speculative_decoding": "GPUs that drafts may help",
    "time to detect hung": "Time to detect a hang",
    "unavailable": "Unavailable GPUs, by reason",
    "first work": "From allocation to first work",
    "goodput": "Goodput (ledger)",
    "reported goodput": "Goodput (job)",
    "progress": "New steps",
}
"""What a series is called in few words; else by its name."""


_LEGENDS = {f"cluster_{word}": f"{{{{{word}}}}} {{{{cluster}}}}" for word in ("state", "reason")}


def title_of(series: str) -> str:
    """What it is called on a panel."""
    name, where = parted(series)
    middle = name.split(":")[1].removeprefix("gpu_efficiency_").replace("_", " ")
    if middle == "share":
        return "Share of a job's time" if name.startswith("job") else "Share of the fleet's time"
    said = " ".join([middle, *(pair.split('"')[1] for pair in where)])
    return _TITLES.get(said, said.capitalize())


def parted(series: str) -> tuple[str, tuple[str, ...]]:
    """A series' name, and what selects by labels."""
    name, _, where = series.rstrip("}").partition("{")
    return name, tuple(pair for pair in where.split(",") if pair)


def selected(series: str, *more: str) -> str:
    """It, of the chosen clusters."""
    name, where = parted(series)
    return at(name, *where, *more)


def curves(series: str, side: Side) -> tuple[Query, ...]:
    """Its curves, each with its title: of each cluster, or how jobs are spread as rules have recorded it."""
    title = title_of(series)
    return tuple(replace(query, legend=f"{title}: {query.legend}") for query in _drawn(series, side))


def _drawn(series: str, side: Side) -> tuple[Query, ...]:
    """Thousands of curves are too many: of ranks the five highest, of jobs their spread or their sum."""
    name, where = parted(series)
    level, rest = name.split(":", 1)
    if level.startswith("cluster"):
        return (Query(selected(series), legend=_LEGENDS.get(level, "{{cluster}}")),)
    if level == "job_rank":
        return (Query(f"topk(5, {selected(series)})", legend="{{job_id}} rank {{rank}}"),)
    whole = f"{level.replace('job', 'cluster', 1)}:{rest}"
    if recorded(whole) and not recorded(_of_class(level, rest)):
        legend = "{{currency}}" if "cost" in rest else "all jobs"
        by = " by (currency) " if "cost" in rest else ""
        return (Query(f"sum{by}({at(whole, *where)})", legend=legend),)
    return latency(*where) if "latency" in name else spread(series, side)


def _of_class(level: str, rest: str) -> str:
    return f"{level.replace('job', 'class', 1)}_spread:{rest}"


def spread(series: str, side: Side) -> tuple[Query, ...]:
    """How jobs are spread; of several clusters the highest. What only one side's jobs have is recorded of all."""
    name, where = parted(series)
    level, rest = name.split(":", 1)
    of_class = _of_class(level, rest)
    asked = latest(of_class, side.alike, *where) if recorded(of_class) else latest(f"cluster_spread:{rest}", *where)
    return (Query(f"max by (spread) ({asked})", legend="{{spread}}"),)


def latency(kind: str, *which: str) -> tuple[Query, ...]:
    """Percentiles of the server in the middle, for a mean of percentiles is none; and the p99 of the slowest."""
    return (
        Query(f"max by (percentile) ({at(MIDDLE, kind, *which)})", legend="{{percentile}}"),
        Query(f"max({at(WORST, kind)})", legend=SLOWEST),
    )
