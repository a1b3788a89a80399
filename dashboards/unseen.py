"""Which nodes have GPUs that nobody sees: silent ones, those without an exporter, and those whose daemon sees none.

Owns how they are found, for Fleet, which names them, and Quality, which lists the silent ones. Refuses reasons by GPU.
"""

from dashboards.parts import Column, Panel, Query, Table
from dashboards.series import TO_NODE, at, hours, shown_hours

SILENT_COST = "node:gpu_efficiency_cost_remembered:per_hour"
OWNED = "node:gpu_efficiency_owned:gpus"
_LEAK_TIME, _LEAK_COST = "node_leak:gpu_efficiency_seconds:rate5m", "node_leak:gpu_efficiency_cost:per_hour"
_UNSEEN = 'leak="unobserved"'
_HEARD = at("node:gpu_efficiency_gpus")
_SILENT, _NEVER, _BLIND = "silent", "no exporter", "sees no GPU"
_WHY = {_SILENT: "daemon silent", _NEVER: "no exporter heard", _BLIND: "daemon sees no GPU"}
_DO_FIRST = {
    _SILENT: "is the node up? then the daemon's log",
    _NEVER: "install it; compare the node's name with the scheduler's",
    _BLIND: "the daemon's log: driver, nv-hostengine, permissions",
}
_LEAST = 0.05
"""GPUs of a node; a reading that came late is no trouble."""


def silent(name: str, by: str = "cluster, node") -> str:
    """A series of nodes, of those that report nothing now."""
    return f"max by ({by}) ({at(name)} unless on (cluster, node) {_HEARD})"


def _by_node(expr: str, by: str = "cluster, node") -> str:
    """What is by instance, by the node's name."""
    return f"sum by ({by}) ({expr} * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info')})"


def _why(expr: str, why: str) -> str:
    return f'label_replace({expr}, "why", "{why}", "", "")'


_OWNED = silent(OWNED)
SILENT_SINCE = f"({silent('node:gpu_efficiency_heard:timestamp_seconds')} > 0)"
"""When each silent node was last heard. The rules leave a 0 of nodes that were removed."""
_BLIND_GPUS = f"({_by_node(at(_LEAK_TIME, _UNSEEN))} > {_LEAST})"
_GPUS = (
    f"{_why(f'({_OWNED} and on (cluster, node) {SILENT_SINCE})', _SILENT)}"
    f" or on (cluster, node) {_why(_OWNED, _NEVER)}"
    f" or on (cluster, node) {_why(_BLIND_GPUS, _BLIND)}"
)
_SILENT_FOR = f"(clamp_max((time() - {SILENT_SINCE}) / 3600, {shown_hours()}) or 0 * {_OWNED} + {shown_hours()})"
"""Hours, at most those shown, which are taken for nodes that were never heard."""
_UNSEEN_HOURS = hours(_LEAK_TIME, _UNSEEN, by="cluster, instance")
UNSEEN_NODES = Panel(
    title="GPUs not seen now, by node",
    kind=Table(
        (
            Column(of="node", title="Node", link=TO_NODE, width=150),
            Column(of="why", title="Why", texts=_WHY, width=140),
            Column(of="A", title="GPUs", unit="none", decimals=1, width=65),
            Column(of="B", title="For", unit="s", decimals=1, width=80),
            Column(of="C", title="GPU-hours", unit="none", decimals=1, width=90),
            Column(of="D", title="An hour", unit="short", decimals=2, width=80, empty="no price"),
            Column(of="currency", title="In", width=48),
            Column(of="do", title="Do first", texts=_DO_FIRST),
        ),
        sort="A",
    ),
    shows="GPUs that are owned and not seen: daemons that are silent (heard within a"
    " day), nodes that the scheduler has GPUs on and no exporter was heard of, and daemons that report and see no GPU."
    " For how long, within the time shown how many GPU-hours, and what they cost an hour: a price is known of nodes"
    " that were heard.",
    bad="a row that nobody repairs: its GPUs may hang or rest, and no figure above has them",
    do="what its last column says; reasons are on the board Exporter and data quality",
    queries=(
        Query(f'label_replace({_GPUS}, "do", "$1", "why", "(.*)")'),
        Query(f"time() - {SILENT_SINCE}"),
        Query(
            f"{_OWNED} * {_SILENT_FOR}"
            f" or on (cluster, node) ({_by_node(_UNSEEN_HOURS)} and on (cluster, node) {_BLIND_GPUS})"
        ),
        Query(
            f"{silent(SILENT_COST, 'cluster, node, currency')} or on (cluster, node)"
            f" ({_by_node(at(_LEAK_COST, _UNSEEN), 'cluster, node, currency')} and on (cluster, node) {_BLIND_GPUS})"
        ),
    ),
    unit="none",
    width=20,
    height=5,
    empty="all GPUs that are owned are seen",
)
