"""A board -> the JSON that Grafana reads, through Grafana's own typed builders (the Foundation SDK).

Owns layout, overrides, transformations and everything that is spelled as Grafana wants it: no other module knows it.
The types of the SDK are what keeps the JSON right (mypy --strict), and its version is that of the oldest Grafana
that is meant: later ones migrate. Refuses to know queries' meaning.
"""

from collections.abc import Iterator, Mapping
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.builders import (
    common as shared,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as asked
from grafana_foundation_sdk.models import text as texts

from dashboards import words
from dashboards.parts import (
    Bars,
    Board,
    Column,
    Figure,
    Lines,
    Link,
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

_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "gpu-efficiency"
_COLUMNS = 24
_CELL = 58
"""Pixels: 24 hours and the day side by side."""
_TITLES = 1
"""Height of a row's heading."""
Property = model.DynamicConfigValue
Built = Any
"""A builder of one kind of panel: they share their methods and no type."""


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
        .link(_others())
        .variables([_datasource(), *(_variable(each) for each in board.variables)])
        .build()
    )
    built.panels = list(_rows(board.rows))
    return JSONEncoder(sort_keys=True, indent=1).encode(built) + "\n"


def _others() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("GPU efficiency")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .as_dropdown(True)
        .keep_time(True)
        .include_vars(True)
    )


# -- variables --


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def _variable(given: Variable) -> Any:
    if given.text:
        made: Any = dashboard.TextBoxVariable(given.name).default_value(given.default)
    elif given.values:
        made = (
            dashboard.CustomVariable(given.name)
            .values(model_string(",".join(given.values)))
            .current(_option(given.default))
        )
    else:
        made = _looked_up(given)
    made = made.label(given.label).description(given.says)
    return made.hide(model.VariableHide.HIDE_VARIABLE) if given.hidden else made


def model_string(words_: str) -> str:
    """A union of string and object in the SDK: here always the string."""
    return words_


def _option(value: str) -> model.VariableOption:
    return model.VariableOption(text=value, value=value, selected=True)


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
    if panel.repeat:
        built = built.repeat(panel.repeat).repeat_direction("h").max_per_row(4)
    if panel.offset:
        built = built.time_shift(panel.offset)
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
    return built if panel.decimals is None else built.decimals(panel.decimals)


def _kind(panel: Panel) -> Built:
    built: Built
    match panel.kind:
        case Figure() as kind:
            built = _figure(kind)
        case Lines() as kind:
            built = _lines(kind, numbered=any("{{gpu}}" in query.legend for query in panel.queries))
        case Bars() as kind:
            built = _bars(kind)
        case Table() as kind:
            built = _table(kind, len(panel.queries))
        case Timeline() as kind:
            built = _timeline(kind)
        case Matrix() as kind:
            built = _matrix(kind)
        case Note() as kind:
            built = text.Panel().mode(texts.TextMode.MARKDOWN).content(kind.text)
    return built


def _targets(panel: Panel) -> list[Any]:
    moment = isinstance(panel.kind, Bars | Table | Matrix) or (isinstance(panel.kind, Figure) and not panel.kind.curve)
    as_table = isinstance(panel.kind, Table | Matrix)
    return [
        _target(query, letter, moment=moment or query.now, as_table=as_table)
        for query, letter in zip(panel.queries, ascii_uppercase, strict=False)
    ]


def _target(query: Query, letter: str, *, moment: bool, as_table: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).ref_id(letter).legend_format(query.legend or "__auto")
    made = made.datasource(_SOURCE).editor_mode(asked.QueryEditorMode.CODE)
    made = made.instant() if moment else made.range()
    return made.format(asked.PromQueryFormat.TABLE if as_table else asked.PromQueryFormat.TIME_SERIES)


def _steps(steps: tuple[tuple[float | None, str], ...]) -> dashboard.ThresholdsConfig:
    found = [model.Threshold(value=value, color=colour) for value, colour in steps or ((None, words.EXPECTED),)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)


def _by_thresholds() -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)


def _fixed(colour: str) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color(colour)


def _reduced() -> shared.ReduceDataOptions:
    return shared.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _link(link: Link) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(link.title).url(link.url).type(model.DashboardLinkType.LINK)


def _coloured(built: Built, colours: Mapping[str, str]) -> Built:
    for name, colour in colours.items():
        built = built.override_by_name(name, [Property("color", _fixed_to(colour))])
    return built


_NOTHING_IS_GREY = model.SpecialValueMap(
    options=model.DashboardSpecialValueMapOptions(
        match=model.SpecialValueMatch.NULL_AND_NAN, result=model.ValueMappingResult(color=words.UNKNOWN, index=0)
    )
)
"""Else what stands where there is no number wears the colour of the lowest one."""


def _figure(kind: Figure) -> stat.Panel:
    return (
        stat.Panel()
        .thresholds(_steps(kind.steps))
        .color_scheme(_by_thresholds())
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA if kind.curve else common.BigValueGraphMode.NONE)
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME if kind.named else common.BigValueTextMode.VALUE)
        .wide_layout(not kind.named)
        .mappings([_NOTHING_IS_GREY])
        .reduce_options(_reduced())
    )


def _lines(kind: Lines, *, numbered: bool) -> Built:
    built = timeseries.Panel().show_points(common.VisibilityMode.NEVER).line_width(1).span_nulls(False)
    built = built.tooltip(
        shared.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    built = built.legend(_legend(table_=kind.table, shown=kind.legend)).fill_opacity(75 if kind.stacked else 0)
    if kind.stacked:
        built = built.line_width(0).stacking(shared.StackingConfig().mode(common.StackingMode.NORMAL))
    if kind.steps:
        built = built.line_interpolation(common.LineInterpolation.STEP_AFTER)
    if kind.top is not None:
        built = built.max(kind.top)
    if kind.bottom is not None:
        built = built.min(kind.bottom)
    if kind.band:
        built = _band(built, kind.band)
    if kind.axis:
        built = built.axis_width(kind.axis)
    built = _numbered(built) if numbered else built
    return _dashed(_coloured(built, kind.colours), kind.dashed)


def _numbered(built: Built) -> Built:
    """Curves that are called after a GPU's index: the first eight can be told apart with any colour vision."""
    for index, colour in enumerate(words.EIGHT):
        built = built.override_by_regexp(f"/(^GPU |: ){index}( |$)/", [Property("color", _fixed_to(colour))])
    return built


def _fixed_to(colour: str) -> dict[str, str]:
    return {"mode": "fixed", "fixedColor": colour}


def _band(built: timeseries.Panel, band: tuple[float, float]) -> timeseries.Panel:
    low, high = band
    steps = ((None, "transparent"), (low, words.GOOD), (high, "transparent"))
    style = shared.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED_AND_AREA)
    return built.thresholds(_steps(steps)).thresholds_style(style)


def _dashed(built: Built, names: tuple[str, ...]) -> Built:
    for name in names:
        built = built.override_by_name(name, [Property("custom.lineStyle", {"fill": "dash", "dash": [6, 6]})])
    return built


def _legend(*, table_: bool, shown: bool = True) -> shared.VizLegendOptions:
    made = shared.VizLegendOptions().show_legend(shown).placement(common.LegendPlacement.BOTTOM)
    if table_:
        return (
            made.display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.RIGHT)
            .calcs(["mean", "last"])
        )
    return made.display_mode(common.LegendDisplayMode.LIST).calcs([])


_BAR = 32
"""Pixels of a bar at most: two bars are no thicker than ten."""


def _bars(kind: Bars) -> Built:
    built = (
        bargauge.Panel()
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .value_mode(common.BarGaugeValueMode.TEXT)
        .name_placement(common.BarGaugeNamePlacement.LEFT)
        .show_unfilled(False)
        .reduce_options(_reduced())
        .color_scheme(_fixed(kind.colour or words.UNKNOWN))
        .text(shared.VizTextDisplayOptions().title_size(13).value_size(16))
        .max_viz_height(_BAR)
        .min(0)
    )
    built = built.max(kind.top) if kind.top is not None else built
    return _coloured(built, kind.colours)


def _timeline(kind: Timeline) -> Built:
    options = {
        f"{number}": model.ValueMappingResult(text=word, color=kind.colours[word], index=number)
        for number, word in enumerate(kind.words, 1)
    }
    return (
        statetimeline.Panel()
        .mappings([model.ValueMap(options=options)])
        .color_scheme(_fixed(words.UNKNOWN))
        .show_value(common.VisibilityMode.NEVER)
        .merge_values(True)
        .row_height(0.9)
        .fill_opacity(90)
        .line_width(0)
        .legend(_legend(table_=False))
    )


# -- tables --


def _table(kind: Table, queries: int) -> Built:
    built = table.Panel().show_header(True).cell_height(common.TableCellHeight.SM)
    names = [_name(column.of, queries) for column in kind.columns]
    for transformation in _arranged(names, queries):
        built = built.with_transformation(transformation)
    for column, name in zip(kind.columns, names, strict=True):
        built = built.override_by_name(name, list(_cells(column)))
    if kind.sort:
        by = shared.TableSortByFieldState().display_name(_title_of(kind)).desc(not kind.rising)
        built = built.sort_by([by])
    return built


def _title_of(kind: Table) -> str:
    return next(column.title for column in kind.columns if column.of == kind.sort)


def _name(of: str, queries: int) -> str:
    """What the field is called in Grafana's frames."""
    if of not in ascii_uppercase:
        return of
    return "Value" if queries == 1 else f"Value #{of}"


def _arranged(names: list[str], queries: int) -> Iterator[model.DataTransformerConfig]:
    if queries > 1:
        yield model.DataTransformerConfig(id_val="merge", options={})
    order = {name: number for number, name in enumerate(names)}
    yield model.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": names}})
    yield model.DataTransformerConfig(
        id_val="organize", options={"excludeByName": {}, "indexByName": order, "renameByName": {}}
    )


def _cells(column: Column) -> Iterator[Property]:
    yield Property("displayName", column.title)
    yield Property("noValue", column.empty)
    # A label that looks like a number is none: without a unit of its own Grafana would write job 45000 as 45 K.
    yield Property("unit", column.unit or "string")
    if column.decimals is not None:
        yield Property("decimals", column.decimals)
    if column.width:
        yield Property("custom.width", column.width)
    if column.link:
        yield Property("links", [{"title": column.link.title, "url": column.link.url}])
    if column.wrap:
        yield Property("custom.cellOptions", {"type": "auto", "wrapText": True})
    yield from _cell_colours(column)


def _cell_colours(column: Column) -> Iterator[Property]:
    mappings = {value: {"text": said} for value, said in column.texts.items()}
    for value, colour in column.words.items():
        mappings.setdefault(value, {})["color"] = colour
    if mappings:
        yield Property("mappings", [{"type": "value", "options": mappings}])
    if column.steps:
        steps = [{"value": value, "color": colour} for value, colour in column.steps]
        yield Property("thresholds", {"mode": "absolute", "steps": steps})
        yield Property("color", {"mode": "thresholds"})
    if column.bar:
        yield Property("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"})
        yield Property("color", _fixed_to(column.bar))
        yield Property("min", 0)
        yield Property("fieldMinMax", True)  # its longest bar is its own largest value, not that of all columns
    elif column.words:
        yield Property("custom.cellOptions", {"type": "color-background", "mode": "basic"})
        yield Property("color", {"mode": "fixed", "fixedColor": "transparent"})  # of what is not known: never green
    elif column.steps:
        yield Property("custom.cellOptions", {"type": "color-text"})


def _matrix(kind: Matrix) -> Built:
    built = (
        table.Panel()
        .cell_height(common.TableCellHeight.SM)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.CONTINUOUS_BL_PU))
        .cell_options(common.TableColoredBackgroundCellOptions(mode=common.TableCellBackgroundDisplayMode.BASIC))
        .width(_CELL)
        .min(0)
    )
    corner = f"{kind.row}\\{kind.column}"
    grid = {"rowField": kind.row, "columnField": kind.column, "valueField": "Value", "emptyValue": "null"}
    for what, options in (
        ("sortBy", {"sort": [{"field": kind.column}]}),
        ("groupingToMatrix", grid),
        ("sortBy", {"sort": [{"field": corner}]}),
    ):
        built = built.with_transformation(model.DataTransformerConfig(id_val=what, options=options))
    names = {value: {"text": said} for value, said in kind.names.items()}
    heading = {
        "unit": "string", "displayName": kind.row, "custom.cellOptions": {"type": "auto"},
        "mappings": [{"type": "value", "options": names}],
    }  # fmt: skip
    built = built.override_by_name(corner, [Property(what, value) for what, value in heading.items()])
    return built if kind.top is None else built.max(kind.top)
