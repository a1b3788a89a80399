"""Grafana's rules, worked out by hand: what a query becomes before it is sent, and what is asked of the data source.

Steps and rate intervals are those of Grafana 11 (`rangeutil` of @grafana/data and its Prometheus data source).
"""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.dashboards.grafana import Answer, opened
from tests.dashboards.variables import Chosen, Span, resolved, written

HOUR = Span(1_000_000.0, 1_003_600.0)
NO_SERIES: dict[str, Any] = {"resultType": "vector", "result": []}


class Asked:
    """A Prometheus that answers by path, and remembers what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.heard: list[tuple[str, dict[str, str]]] = []

    def __call__(self, path: str, params: Mapping[str, str]) -> Any:
        self.heard.append((path, dict(params)))
        found = self.answers.get(path.replace("/", "_"), NO_SERIES)
        if isinstance(found, ValueError):
            raise found
        return found


def board(*panels: dict[str, Any], variables: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"templating": {"list": list(variables)}, "panels": list(panels)}


def panel(expr: str, *, width: int = 24, **more: Any) -> dict[str, Any]:
    target = {"refId": "A", "expr": expr} | more.pop("target", {})
    return {"type": "timeseries", "title": "p", "gridPos": {"w": width}, "targets": [target]} | more


def query(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "query", "query": {"query": text, "refId": name}} | more


def sent(expr: str, *, span: Span = HOUR, **more: Any) -> Answer:
    """The one query of a board of one panel."""
    ((answer,),) = (shown.answers for shown in opened(board(panel(expr, **more)), Asked(), span))
    return answer


@pytest.mark.parametrize(
    ("seconds", "more", "step"),
    [
        # 1,568 pixels for an hour are 2.3 s each, which is 2 s; but nothing is finer than the scrapes.
        (3600, {}, 15.0),
        # 6 h: 13.8 s, to 15. 7 d: 385.7 s, to 300. A third of the board, of 522 pixels: 1,158 s, to 1,200.
        (21_600, {}, 15.0),
        (604_800, {}, 300.0),
        (604_800, {"width": 8}, 1200.0),
        (604_800, {"maxDataPoints": 100}, 7200.0),
        # A panel says how fine it may be, and a query has the last word.
        (3600, {"interval": "2m"}, 120.0),
        (3600, {"interval": "2m", "target": {"interval": "4m"}}, 240.0),
        (3600, {"interval": ">1m"}, 60.0),
        (3600, {"interval": "1s"}, 2.0),
        # A panel is never asked for fewer than 100 points, nor any query for more than 11,000.
        (36_000, {"width": 1}, 300.0),
        (21_600, {"interval": "1s", "maxDataPoints": 50_000}, 2.0),
        (3600, {"target": {"intervalFactor": 2}}, 30.0),
        # On either side of an edge: 205 s are two minutes, 215 are five; 74,000 half a day, 87,000 a day.
        (20_500, {"maxDataPoints": 100}, 120.0),
        (21_500, {"maxDataPoints": 100}, 300.0),
        (7_400_000, {"maxDataPoints": 100}, 43_200.0),
        (8_700_000, {"maxDataPoints": 100}, 86_400.0),
    ],
)
def test_how_far_apart_points_are(seconds: float, more: dict[str, Any], step: float) -> None:
    span = Span(1_000_000.0, 1_000_000.0 + seconds)
    assert sent("up", span=span, **more).step == step
    assert sent("rate(a[$__interval])", span=span, **more).expr == f"rate(a[{step:.0f}s])"


@pytest.mark.parametrize(
    ("more", "interval"),
    [
        ({}, "60s"),  # four scrapes of 15 s
        ({"interval": "2m"}, "135s"),  # a step and a scrape
        ({"target": {"interval": "1m"}}, "240s"),  # four of what the query says scrapes are apart
    ],
)
def test_a_rate_looks_back_over_four_scrapes_or_a_step_and_one(more: dict[str, Any], interval: str) -> None:
    assert sent("rate(a[$__rate_interval])", **more).expr == f"rate(a[{interval}])"


def test_the_range_is_that_of_the_board_or_the_panel() -> None:
    expr = "a[$__range] $__range_s ${__range_ms} $__from $__to"
    assert sent(expr).expr == "a[3600s] 3600 3600000 1000000000 1003600000"
    assert sent("a[$__range]", timeFrom="7d").expr == "a[604800s]"


def test_a_range_query_begins_and_ends_on_its_steps_and_an_instant_one_at_the_end() -> None:
    ask, span = Asked(), Span(1_000_003.0, 1_003_603.0)
    opened(board(panel("a", interval="1m"), panel("b", target={"instant": True})), ask, span)
    assert ask.heard == [
        ("query_range", {"query": "a", "start": "999960.000", "end": "1003560.000", "step": "60"}),
        ("query", {"query": "b", "time": "1003603.000"}),
    ]


@pytest.mark.parametrize(
    ("text", "chosen", "expected"),
    [
        ('{a="$x"}', Chosen(values=("n1",)), '{a="n1"}'),
        ('{a="$x"}', Chosen(values=('say "hi" \\',)), '{a="say \\"hi\\" \\\\"}'),
        ('{a=~"$x"}', Chosen(values=("n1",), several=True), '{a=~"n1"}'),
        ('{a=~"$x"}', Chosen(values=("n1", "n.2"), several=True), '{a=~"(n1|n\\\\.2)"}'),
        ('{a=~"$x"}', Chosen(values=("n1", "n2"), several=True, instead=".*"), '{a=~".*"}'),
        ('{a=~"${x:regex}"}', Chosen(values=("a.b",)), '{a=~"a\\.b"}'),
        ("${x:pipe} ${x:csv} [[x:raw]]", Chosen(values=("a", "b"), several=True), "a|b a,b a,b"),
        ("$xy ${y} $__other", Chosen(values=("a",)), "$xy ${y} $__other"),
    ],
)
def test_a_value_is_written_so_that_prometheus_reads_it(text: str, chosen: Chosen, expected: str) -> None:
    assert written(text, {"x": chosen}) == expected


def test_a_title_has_all_values_in_words() -> None:
    several = Chosen(values=("a", "b"), several=True, instead=".*")
    assert written("Jobs of $x", {"x": several}, plain=True) == "Jobs of a + b"


CLUSTER = query("cluster", "label_values(up, cluster)", multi=True, includeAll=True, allValue=".*",
                current={"value": ["$__all"]})  # fmt: skip
NODE = query("node", 'label_values(info{cluster=~"$cluster"}, node)')
HIDDEN = query("instance", 'query_result(info{node="$node"})', regex='/instance="([^"]+)"/', hide=2, multi=True,
               includeAll=True)  # fmt: skip


def test_what_reads_another_variable_waits_for_it() -> None:
    rows = [{"metric": {"__name__": "info", "instance": name}, "value": [1, "1"]} for name in ("h:1", "h:2", "h:1")]
    ask = Asked(
        label_cluster_values=["a", "b"], label_node_values=["n1", "n2"], query={"resultType": "vector", "result": rows}
    )
    scope = resolved(board(variables=(HIDDEN, NODE, CLUSTER)), ask, HOUR, {"node": ["n2"]})
    times = {"start": "1000000.000", "end": "1003600.000"}
    assert ask.heard == [
        ("label/cluster/values", times | {"match[]": "up"}),
        ("label/node/values", times | {"match[]": 'info{cluster=~".*"}'}),
        ("query", {"query": 'info{node="n2"}', "time": "1003600.000"}),
    ]
    assert scope["instance"].values == ("h:1", "h:2")
    assert written("$cluster $node $instance", scope) == ".* n2 (h:1|h:2)"


@pytest.mark.parametrize(
    ("variable", "asked", "expected"),
    [
        (CLUSTER, None, ".*"),
        (CLUSTER, ["b"], "b"),
        (CLUSTER, ["a", "b"], "(a|b)"),
        (CLUSTER | {"allValue": None}, ["$__all"], "(a|b)"),
        (CLUSTER | {"current": {"value": ["gone"]}, "includeAll": False}, None, "a"),
        (CLUSTER, ["not listed"], "not listed"),
        (CLUSTER | {"sort": 2, "includeAll": False, "current": {}}, None, "b"),
        ({"type": "custom", "query": "five : 5m, 1h"}, None, "5m"),
        ({"type": "custom", "query": "five : 5m, 1h", "current": {"value": "1h"}}, None, "1h"),
        ({"type": "textbox", "query": "42"}, None, "42"),
        ({"type": "textbox", "query": "", "current": {"value": "43"}}, None, "43"),
        ({"type": "textbox", "query": "42"}, ["a/b"], "a/b"),
        ({"type": "constant", "query": "USD"}, None, "USD"),
        ({"type": "datasource", "query": "prometheus"}, None, "prometheus"),
    ],
)
def test_what_is_chosen(variable: dict[str, Any], asked: list[str] | None, expected: str) -> None:
    ask = Asked(label_cluster_values=["a", "b"])
    chosen = {} if asked is None else {"v": asked}
    scope = resolved(board(variables=(variable | {"name": "v"},)), ask, HOUR, chosen)
    assert written("$v", scope) == expected


def test_a_ring_of_variables_and_a_type_nobody_has_are_refused() -> None:
    ring = (query("a", "label_values(x{b='$b'}, a)"), query("b", "label_values(x{a='$a'}, b)"))
    with pytest.raises(ValueError, match="ring: a, b"):
        resolved(board(variables=ring), Asked(), HOUR, {})
    with pytest.raises(ValueError, match="adhoc"):
        resolved(board(variables=({"name": "v", "type": "adhoc"},)), Asked(), HOUR, {})


def test_folded_rows_are_opened_and_repeated_panels_shown_for_their_first_value() -> None:
    row = {"type": "row", "title": "r", "panels": [panel('b{c=~"$cluster"}'), panel("hidden", target={"hide": True})]}
    each = panel('a{c=~"$cluster"}', repeat="cluster", title="of $cluster")
    text = {"type": "text", "title": "words"}
    ask = Asked(label_cluster_values=["x", "y"])
    shown = opened(board(each, text, row, variables=(CLUSTER,)), ask, HOUR)
    assert [(p.title, [a.expr for a in p.answers]) for p in shown] == [("of x", ['a{c=~"x"}']), ("p", ['b{c=~".*"}'])]


def test_a_repeated_row_is_its_panels_first_value() -> None:
    row = {"type": "row", "title": "r", "repeat": "cluster", "panels": []}
    ask = Asked(label_cluster_values=["x", "y"])
    (shown,) = opened(board(row, panel('a{c=~"$cluster"}'), variables=(CLUSTER,)), ask, HOUR)
    assert shown.answers[0].expr == 'a{c=~"x"}'


def test_answers_come_with_labels_and_points_and_errors_with_their_words() -> None:
    rows = [{"metric": {"a": "1"}, "values": [[10, "1.5"], [25, "NaN"]]}]
    ask = Asked(query_range={"resultType": "matrix", "result": rows}, query=ValueError("many-to-many matching"))
    fine, wrong = opened(board(panel("a"), panel("b", target={"instant": True})), ask, HOUR)
    ((series,), answer) = (fine.answers[0].series, wrong.answers[0])
    assert (series.labels, series.points[0], str(series.points[1][1])) == ({"a": "1"}, (10.0, 1.5), "nan")
    assert (answer.series, answer.error) == ((), "many-to-many matching")


def test_a_number_alone_is_a_series_without_labels() -> None:
    ask = Asked(query={"resultType": "scalar", "result": [10, "7"]})
    (shown,) = opened(board(panel("7", target={"instant": True})), ask, HOUR)
    assert [(dict(s.labels), s.points) for s in shown.answers[0].series] == [({}, ((10.0, 7.0),))]
