"""Tables and matrices: columns, cells, and the transformations that make rows of several queries.

Owns the names that fields have in Grafana's frames. Refuses what every panel has (`drawing`).
"""

from collections.abc import Iterator
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import dashboard, table
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

from dashboards import words
from dashboards.kinds import Built, Property, fixed_to
from dashboards.parts import Column, Matrix, Table

_CELL = 58
"""Pixels: 24 hours and the day side by side."""


def rows(kind: Table, queries: int) -> Built:
    """A table of what so many queries have in common."""
    tall = any(column.wrapped for column in kind.columns)
    height = common.TableCellHeight.MD if tall else common.TableCellHeight.SM
    built = table.Panel().show_header(True).cell_height(height)
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
    if column.hidden:
        yield Property("custom.hidden", True)
    if column.texts:
        yield Property("custom.align", "left")  # a word, though the value is a number
    if column.wrapped:
        yield Property("custom.cellOptions", {"type": "auto", "wrapText": True})  # up to Grafana 12.1
        yield Property("custom.wrapText", True)
    if column.link:
        yield Property("links", [{"title": column.link.title, "url": column.link.url}])
    yield from _cell_colours(column)


def _cell_colours(column: Column) -> Iterator[Property]:
    mappings = {value: {"text": said} for value, said in column.texts.items()}
    for value, colour in column.words.items():
        mappings.setdefault(value, {})["color"] = words.under_text(colour)
    found = [{"type": "value", "options": mappings}] if mappings else []
    if column.ours:
        found.append({"type": "regex", "options": {"pattern": "/_/g", "result": {"text": " "}}})
    if found:
        yield Property("mappings", found)
    if column.steps:
        steps = [{"value": value, "color": _ground(colour)} for value, colour in column.steps]
        yield Property("thresholds", {"mode": "absolute", "steps": steps})
        yield Property("color", {"mode": "thresholds"})
    if column.bar:
        yield Property("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"})
        yield Property("color", fixed_to(column.bar))
        yield Property("min", 0)
        yield Property("fieldMinMax", True)  # its longest bar is its own largest value, not that of all columns
    elif column.words or column.steps:
        yield Property("custom.cellOptions", {"type": "color-background", "mode": "basic"})
    if column.words and not column.bar:
        yield Property("color", {"mode": "fixed", "fixedColor": "transparent"})  # of what is not known: never green


def _ground(colour: str) -> str:
    """Behind a figure that is judged; what is as expected, nothing or not known stands out by nothing."""
    return "transparent" if colour in {words.EXPECTED, words.UNKNOWN, words.QUIET} else words.under_text(colour)


def matrix(kind: Matrix) -> Built:
    """A cell for each pair of two labels."""
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
