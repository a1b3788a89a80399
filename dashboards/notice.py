"""What every board says first: whether its figures are of hardware and of one thing, and if what it reads is there.

Owns the panel at the top of all boards. Refuses what boards say of GPUs.
"""

from msgspec.structs import replace

from dashboards import words
from dashboards.parts import Board, Figure, Panel, Query
from dashboards.series import THIS_JOB, THIS_NODE, at

_RAW, _RECORDED = at("gpu_efficiency_simulated"), at("cluster:gpu_efficiency_simulated:nodes")
_MISSING = "no recording rules: load alerts/*.yaml"
_WITHOUT = {
    "node": "All panels of this board but one work without rules.",
    "job": "Without rules its curves, what it reports, who waits for whom and the list of jobs stay empty.",
}
_ELSEWHERE = "The board Node, most of Job and the last row of Fleet work without rules."
_NOTICE = Panel(
    title="What these figures are of",
    kind=Figure(steps=((None, words.WATCH),), named=True, line=True),
    shows="Whether any node that is scraped is simulated, whether exporters are heard, whether the recording rules that"
    " boards read are loaded, and whether a board of one node or job adds up several of the same name. What this panel"
    " names explains empty panels below.",
    bad="any line in orange",
    do="take simulated nodes out of the scrape, or give them a cluster label of their own; load all files of alerts/"
    " (how: docs/alerts.md); choose one cluster",
    queries=(
        Query(f"sum({_RECORDED} or on (cluster) sum by (cluster) ({_RAW})) > 0", legend="SIMULATED nodes: no hardware"),
        Query(f"count({_RAW}) unless on () sum({_RECORDED})", legend=_MISSING),
    ),
    unit="none",
    decimals=0,
    width=24,
    height=3,
    empty="hardware; recording rules are loaded, or no exporter is heard",
)


def _clusters(of: str, legend: str) -> Query:
    return Query(f"count(count by (cluster) ({of})) > 1", legend=f"clusters with this {legend}: choose one")


_MIXED = {
    "node": _clusters(at("gpu_efficiency_node_info", THIS_NODE), "node"),
    "job": _clusters(at("gpu_efficiency_job_paid_seconds_total", THIS_JOB), "job"),
}
"""Boards of one thing, which work on what exporters export alone: what they say where it is several of one name."""


def with_notice(board: Board) -> Board:
    """The board with the notice on top of the first row that is open: in a folded one nobody would see it."""
    mixed = filter(None, [_MIXED.get(board.name)])
    shows = f"{_NOTICE.shows} {_WITHOUT.get(board.name, _ELSEWHERE)}"
    notice = replace(_NOTICE, queries=(*_NOTICE.queries, *mixed), shows=shows)
    first = next(row for row in board.rows if not row.folded)
    return replace(
        board, rows=tuple(replace(row, panels=(notice, *row.panels)) if row is first else row for row in board.rows)
    )
