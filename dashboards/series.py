"""PromQL in pieces: series within what is chosen at the top, sums over the time shown, ratios, money, links.

Owns how a recorded series is asked for. Rules record every few minutes, and what took nothing has no sample: so time is
summed, never averaged, ratios are quotients of such sums, and an hour is as many samples as its group records in one.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml
from msgspec.structs import replace

from dashboards.parts import Link, Variable

ALERTS = Path(__file__).parents[1] / "alerts"
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DEFAULT_SECONDS = 60
"""Between evaluations of a group that says nothing else: Prometheus' own default."""
CHOSEN = 'cluster=~"$cluster"'
HOURS_A_MONTH = 730
"""A twelfth of a year."""
PARTS: Mapping[str, tuple[str, str]] = {
    "gau": ("occupied", "observed"),
    "ectr": ("computing", "occupied"),
    "emfu": ("useful", "resolved"),
    "coverage": ("observed", "paid"),
    "kernel_utilization": ("kernel", "paid"),
    "floor": ("useful", "observed"),
}
"""What each ratio divides by what."""


@cache
def _recorded() -> dict[str, int]:
    """Name of each recorded series -> seconds between two of its samples."""
    return dict(_every())


def recorded(name: str) -> bool:
    """Whether a rule records it."""
    return name in _recorded()


def _every() -> Iterator[tuple[str, int]]:
    for path in sorted(ALERTS.glob("recording*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            said = group.get("interval")
            seconds = int(said[:-1]) * _SECONDS[said[-1]] if said else _DEFAULT_SECONDS
            yield from ((rule["record"], seconds) for rule in group["rules"])


def at(name: str, *where: str) -> str:
    """The series of the chosen clusters, with further conditions."""
    chosen = ",".join((CHOSEN, *where))
    return f"{name}{{{chosen}}}"


def latest(name: str, *where: str) -> str:
    """The last sample of what is recorded too seldom for `at`, which finds none that is older than five minutes."""
    return f"last_over_time({at(name, *where)}[{_recorded()[name] // 60 + 1}m])"


def over(name: str, *where: str, time: str = "$__range") -> str:
    """The sum of its samples over the time shown, or over another `time`, such as "1d offset 7d".

    Divide it by another such sum of the same group of rules. For a curve `time` is empty, or an offset alone: each of
    its points is what was recorded last, for `$__rate_interval` may be shorter than rules are apart.
    """
    length, _, ago = time.partition("offset ")
    behind = f" offset {ago}" if ago else ""
    if not length:
        return f"{at(name, *where)}{behind}"
    return f"sum_over_time({at(name, *where)}[{length.strip()}]{behind})"


def total(name: str, *where: str, by: str = "", time: str = "$__range") -> str:
    """The same, summed over all series, or by those labels."""
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}({over(name, *where, time=time)})"


def hours(name: str, *where: str, by: str = "", time: str = "$__range") -> str:
    """The integral over the time shown, in hours: GPU-hours of a number of GPUs, money of money an hour."""
    return f"{total(name, *where, by=by, time=time)} * {_recorded()[name] / 3600:g}"


def a_month(name: str, *where: str, by: str = "") -> str:
    """Money a month at the mean rate of the time shown, in which what took nothing has no sample."""
    return f"{hours(name, *where, by=by)} / {shown_hours()} * {HOURS_A_MONTH}"


def shown_hours() -> str:
    """Hours of the time shown in which anything was recorded, as a scalar."""
    paid = part("cluster", "paid")
    return f"(scalar(max(count_over_time({at(paid)}[$__range]))) * {_recorded()[paid] / 3600:g})"


def part(level: str, which: str) -> str:
    """Name of a part of the time: paid, observed, occupied, computing, resolved, useful, kernel."""
    return f"{level}:gpu_efficiency_{which}_seconds:rate5m"


def ratio(level: str, which: str, *where: str, by: str = "", time: str = "$__range") -> str:
    """One of PARTS over the time shown; nothing where its denominator is zero. `level`: cluster, node, job, ..."""
    above, below = PARTS[which]
    return (
        f"{total(part(level, above), *where, by=by, time=time)}"
        f" / ({total(part(level, below), *where, by=by, time=time)} > 0)"
    )


def product(level: str, *where: str, by: str = "", time: str = "$__range") -> str:
    """GAU x ECTR x eMFU over the time shown; 0 where nothing computed."""
    match = f" on ({by}) " if by else " "
    three = f" *{match}".join(ratio(level, which, *where, by=by, time=time) for which in ("gau", "ectr", "emfu"))
    return f"{three} or {ratio(level, 'floor', *where, by=by, time=time)}"


_LAYERS: Mapping[str, str] = {
    "paid": "",
    "observed": 'layer!="unobserved"',
    "occupied": 'layer!~"unobserved|gau"',
    "computing": 'layer!~"unobserved|gau|ectr"',
    "resolved": 'layer=~"emfu|useful"',
    "useful": 'layer="useful"',
}


def of_layers(level: str, which: str, *where: str, by: str = "", time: str = "$__range", nothing: str = "") -> str:
    """The same of an owner (team, account, namespace), whose parts are recorded by layer alone.

    `nothing`: an expression of the same labels that is cheaper to read than the layers, where it took none.
    """
    name, (above, below) = f"{level}_layer:gpu_efficiency_seconds:rate5m", PARTS[which]
    under = total(name, *filter(None, (_LAYERS[below], *where)), by=by, time=time)
    over_it = total(name, *filter(None, (_LAYERS[above], *where)), by=by, time=time)
    return f"({over_it} or 0 * {nothing or under}) / ({under} > 0)"


def in_words(label: str, expr: str) -> str:
    """The leak's name once more under another label: its cell says in words what belongs to the name."""
    return f'label_replace({expr}, "{label}", "$1", "leak", "(.*)")'


# -- what is chosen at the top --

CLUSTER = Variable(
    name="cluster", label="Cluster", query="label_values(cluster:gpu_efficiency_owned:gpus, cluster)", many=True,
    every=".*", says="A label that scrapes or a federation add; a fleet without it is one cluster.",
)  # fmt: skip
ITS_CLUSTER = replace(
    CLUSTER,
    query='label_values({__name__=~"gpu_efficiency_node_info|cluster:gpu_efficiency_owned:gpus"}, cluster)',
)
"""The same on boards that need no recording rules; a federation may have nothing else."""
NODE = Variable(
    name="node", label="Node", query='label_values(gpu_efficiency_node_info{cluster=~"$cluster"}, node)',
    says="As its scheduler calls it.",
)  # fmt: skip
INSTANCE = Variable(
    name="instance", label="Instance", hidden=True, many=True, each=True,
    query='label_values(gpu_efficiency_node_info{cluster=~"$cluster", node=~"$node"}, instance)',
)  # fmt: skip
GPU = Variable(
    name="gpu", label="GPU", query='label_values(gpu_efficiency_gpu_info{instance=~"$instance"}, gpu)', many=True,
    every=".*", says="Index on the node; of a MIG instance board:instance.",
)  # fmt: skip
JOB = Variable(name="job_id", label="Job", text=True, says="Its number, or namespace/kind/name on Kubernetes.")
JOB_INSTANCES = Variable(
    name="job_instances", label="Nodes of the job", hidden=True, many=True, each=True,
    query='label_values(gpu_efficiency_job_paid_seconds_total{cluster=~"$cluster", job_id="$job_id"}, instance)',
)  # fmt: skip
TEAM = Variable(
    name="team", label="Team", many=True, every=".*",
    query='label_values(team_layer:gpu_efficiency_seconds:rate5m{cluster=~"$cluster"}, team)',
)  # fmt: skip
ACCOUNT = Variable(
    name="account", label="Account", many=True, every=".*",
    query='label_values(account_layer:gpu_efficiency_seconds:rate5m{cluster=~"$cluster"}, account)',
)  # fmt: skip
NAMESPACE = Variable(
    name="namespace", label="Namespace", many=True, every=".*",
    query='label_values(namespace_layer:gpu_efficiency_seconds:rate5m{cluster=~"$cluster"}, workload_namespace)',
)  # fmt: skip

THIS_NODE = 'instance=~"$instance"'
THIS_JOB = 'job_id="$job_id"'
ITS_NODES = 'instance=~"$job_instances"'


# -- where a click leads --


def to(board: str, title: str, **variables: str) -> Link:
    """Another board with the time and the choices of this one; `variables` are set to what was clicked on."""
    chosen = "".join(f"&var-{name}={value}" for name, value in variables.items())
    return Link(
        title,
        f"/d/gpu-efficiency-{board}?${{__url_time_range}}&${{datasource:queryparam}}&${{cluster:queryparam}}{chosen}",
    )


IN_TROUBLE_SINCE = (
    f"({at('job:gpu_efficiency_spin_since:timestamp_seconds')}"
    f" or {at('job:gpu_efficiency_last_work:timestamp_seconds')})"
)
"""When a job began to spin, or worked last."""


def culprits(*where: str, nodes: str = "") -> str:
    """GPUs that do not spin in a job with hung ones, with node and rank: asked of the GPUs' own series, as alerts do.

    The hang pages as soon as it is known: a record of these would be minutes behind it.

    `where`: of which jobs; `nodes`: on which instances, if that is known.
    """
    there = (nodes,) if nodes else ()
    rests = at("gpu_efficiency_state", *there, 'state=~"stalled|zombie|unavailable"')
    named = at("gpu_efficiency_state", *there, 'state="hung"', 'reason="culprit"')
    hangs = at("job_state:gpu_efficiency_gpus", 'state="hung"')
    return (
        "max by (cluster, job_id, node, gpu, rank) ("
        f"({at('gpu_efficiency_allocation_info', *where)} and on (cluster, job_id) ({hangs} > 0)"
        f" and on (cluster, instance, uuid) ({rests} or {named}))"
        f" * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info')})"
    )


CLICKED = "${__value.raw:percentencode}"
"""The value of the cell that was clicked on: a name may have a &, # or +."""


def field(name: str) -> str:
    """The value of another column in the row that was clicked on."""
    return f"${{__data.fields.{name}:percentencode}}"


TO_JOB = to("job", "The job's board", job_id=CLICKED)
TO_NODE = to("node", "The node's board", node=CLICKED)


def first_series(expr: str) -> str:
    """The first of our series that an expression names; empty: none."""
    found = re.search(r"[a-z_]*:?gpu_efficiency_\w+(?::\w+)?", expr)
    return found[0] if found else ""
