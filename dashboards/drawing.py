"""A board -> the JSON that Grafana reads, through Grafana's own typed builders (the Foundation SDK).

Owns layout, variables and what every panel has; with `kinds` and `tables` everything that is spelled as Grafana wants
it: no other module knows it. The types of the SDK are what keeps the JSON right (mypy --strict), and its version is
that of the oldest Grafana that is meant: later ones migrate. Refuses to know queries' meaning.
"""

import json
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import (
    dashboard,
    prometheus,
    text,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as asked
from grafana_foundation_sdk.models import text as texts

from dashboards import words
from dashboards.kinds import Built, Property, bars, figure, legible, lines, timeline
from dashboards.parts import (
    Bars,
    Board,
    Figure,
    Lines,
    Link,
    Mark,
    Matrix,
    Note,
    Panel,
    Query,
    Row,
    Table,
    Timeline,
    Variable,
)
from dashboards.series import first_series
from dashboards.tables import matrix, rows

_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "gpu-efficiency"
_COLUMNS = 24
_GRAFANA = "11.6.0"
"""The oldest version that has all that the boards use."""
_TITLES = 1
"""Height of a row's heading."""


def draw(board: Board) -> str:
    """Give the text of the file."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.says)
        .tags([_TAG])
        .time(board.since, "now")
        .refresh(board.refresh)
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .links([_others(), *(_link(each).keep_time(True).include_vars(True) for each in board.links)])
        .variables([_datasource(), *(_variable(each) for each in board.variables)])
        .build()
    )
    built.panels = list(_rows(board.rows))
    made = json.loads(JSONEncoder().encode(built))
    made["annotations"] = {"list": [_OWN_MARKS, *map(_mark, board.marks)]}
    made["__requires"] = _needed(made["panels"])
    return _written(made)


def _needed(panels: list[Any]) -> list[dict[str, str]]:
    """What grafana.com and the import of Grafana compare with what is installed."""
    kinds = {panel["type"] for panel in panels} | {each["type"] for panel in panels for each in panel.get("panels", ())}
    needed = [("grafana", "grafana", _GRAFANA), ("datasource", "prometheus", "1.0.0")]
    needed += [("panel", kind, "") for kind in sorted(kinds - {"row"})]
    return [{"type": kind, "id": name, "name": name, "version": version} for kind, name, version in needed]


def _written(board: dict[str, Any]) -> str:
    """Give one line for each key and each panel.

    A diff shows which panel has changed, and a ConfigMap of it has room in the annotation of a client-side apply.
    """
    lines = [f'"{key}":{_line(value)}' for key, value in sorted(board.items()) if key != "panels"]
    panels = ",\n".join(map(_line, board["panels"]))
    return "{\n" + ",\n".join([*lines, f'"panels":[\n{panels}\n]']) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _others() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("GPU efficiency")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .as_dropdown(True)
        .keep_time(True)
        .include_vars(True)
    )


_OWN_MARKS = {
    "builtIn": 1, "datasource": {"type": "grafana", "uid": "-- Grafana --"}, "enable": True, "hide": True,
    "iconColor": words.EXPECTED, "name": "Annotations & Alerts", "type": "dashboard",
}  # fmt: skip
"""What people write on a board in Grafana itself."""


def _mark(mark: Mark) -> dict[str, Any]:
    """An annotation; the fields of Prometheus' data source are not among those of the SDK."""
    return {
        "name": mark.name, "enable": mark.shown, "iconColor": mark.colour, "expr": mark.expr, "step": mark.step,
        "datasource": {"type": _SOURCE.type_val, "uid": _SOURCE.uid}, "titleFormat": mark.title,
        "textFormat": mark.text, "useValueForTime": mark.at_value,
    }  # fmt: skip


# -- variables --


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def _variable(given: Variable) -> Any:
    made: Any = dashboard.TextBoxVariable(given.name).default_value(given.default) if given.text else _choice(given)
    made = made.label(given.label).description(given.says)
    return made.hide(model.VariableHide.HIDE_VARIABLE) if given.hidden else made


def _choice(given: Variable) -> Any:
    if not given.choices:
        return _looked_up(given)
    value, title = next(iter(given.choices.items()))
    first = model.VariableOption(text=title, value=value, selected=True)
    listed = ", ".join(f"{title} : {value}" for value, title in given.choices.items())
    return dashboard.CustomVariable(given.name).values(listed).current(first)


def _looked_up(given: Variable) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(given.name)
        .datasource(_SOURCE)
        .query(given.query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_CASE_INSENSITIVE_ASC)
        .multi(given.many)
        .include_all(bool(given.every) or given.each)
    )
    if given.every or given.each:
        made = made.current(model.VariableOption(text="All", value="$__all", selected=True))
    return made.all_value(given.every) if given.every else made


# -- where panels stand --


def _rows(rows: tuple[Row, ...]) -> Iterator[model.Panel | model.RowPanel]:
    top, number = 0, 0
    for row in rows:
        placed, height = _placed(row, top + _TITLES, number + 1)
        heading = model.RowPanel(
            collapsed=row.folded, title=row.title, id_val=number + 1, panels=placed if row.folded else [],
            grid_pos=model.GridPos(h=_TITLES, w=_COLUMNS, x=0, y=top),
        )  # fmt: skip
        yield heading
        if not row.folded:
            yield from placed
        top, number = top + _TITLES + height, number + 1 + len(placed)


def _placed(row: Row, top: int, first: int) -> tuple[list[model.Panel], int]:
    """Panels from left to right, a new line where the next does not fit; a line is as high as its highest."""
    placed, x, y, line = list[model.Panel](), 0, top, 0
    for number, panel in enumerate(row.panels, first + 1):
        if x + panel.width > _COLUMNS:
            x, y, line = 0, y + line, 0
        spot = model.GridPos(h=panel.height, w=panel.width, x=x, y=y)
        placed.append(_panel(panel).id(panel.number or number).grid_pos(spot).build())
        x, line = x + panel.width, max(line, panel.height)
    return placed, y + line - top


# -- panels --


def _panel(panel: Panel) -> Built:
    built = _kind(panel)
    if panel.link:
        built = built.data_links([_link(panel.link)])
    if panel.points:
        built = built.max_data_points(panel.points)
    if isinstance(panel.kind, Note):
        return built.title(panel.title)
    unit = panel.unit or words.unit_of(first_series(panel.queries[0].expr))
    built = (
        built.title(panel.title)
        .description(f"{panel.shows}\n\n**Bad:** {panel.bad}\n\n**Do:** {panel.do}")
        .datasource(_SOURCE)
        .targets(_targets(panel))
        .unit(unit)
        .no_value(panel.empty)
    )
    if any(query.legend == "{{reason}}" for query in panel.queries):
        in_words = {"regex": "/_/g", "renamePattern": " "}
        built = built.with_transformation(model.DataTransformerConfig(id_val="renameByRegex", options=in_words))
    for query, letter in zip(panel.queries, ascii_uppercase, strict=False):
        if own := [*_own(query, unit)]:
            built = built.override_by_query(letter, own)
    return built if panel.decimals is None else built.decimals(panel.decimals)


def _own(query: Query, unit: str) -> Iterator[Property]:
    """What figures of one query have of their own."""
    if query.unit and query.unit != unit:
        yield Property("unit", query.unit)
    if query.steps:
        steps = [{"value": value, "color": colour} for value, colour in legible(query.steps)]
        yield Property("thresholds", {"mode": "absolute", "steps": steps})


def _kind(panel: Panel) -> Built:
    built: Built
    match panel.kind:
        case Figure() as kind:
            built = figure(kind)
        case Lines() as kind:
            built = lines(kind, numbered=any("{{gpu}}" in query.legend for query in panel.queries))
        case Bars() as kind:
            built = bars(kind)
        case Table() as kind:
            built = rows(kind, len(panel.queries))
        case Timeline() as kind:
            built = timeline(kind)
        case Matrix() as kind:
            built = matrix(kind)
        case Note() as kind:
            built = text.Panel().mode(texts.TextMode.MARKDOWN).content(kind.text)
    return built


def _targets(panel: Panel) -> list[Any]:
    moment = isinstance(panel.kind, Bars | Table | Matrix | Figure)
    as_table = isinstance(panel.kind, Table | Matrix)
    return [
        _target(query, letter, moment=moment, as_table=as_table)
        for query, letter in zip(panel.queries, ascii_uppercase, strict=False)
    ]


def _target(query: Query, letter: str, *, moment: bool, as_table: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).ref_id(letter).legend_format(query.legend or "__auto")
    made = made.datasource(_SOURCE).editor_mode(asked.QueryEditorMode.CODE)
    made = made.instant() if moment else made.range()
    return made.format(asked.PromQueryFormat.TABLE if as_table else asked.PromQueryFormat.TIME_SERIES)


def _link(link: Link) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(link.title).url(link.url).type(model.DashboardLinkType.LINK)
