"""Figures, curves, bars and stripes, as Grafana's builders of them: their look and nothing of their queries.

Owns the options of these panels and what they have in common with tables. Refuses what every panel has (`drawing`).
"""

from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.builders import bargauge, dashboard, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

from dashboards import words
from dashboards.bands import Steps
from dashboards.parts import Bars, Figure, Lines, Timeline

Property = model.DynamicConfigValue
Built = Any
"""A builder of one kind of panel: they share their methods and no type."""


def _steps(steps: Steps) -> dashboard.ThresholdsConfig:
    found = [model.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)


def _by_thresholds() -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)


def _fixed(colour: str) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color(colour)


def _reduced() -> shared.ReduceDataOptions:
    return shared.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _coloured(built: Built, colours: Mapping[str, str]) -> Built:
    for name, colour in colours.items():
        shown = words.LEAK_NAMES.get(name, name)
        renamed = [Property("displayName", shown)] if shown != name else []
        built = built.override_by_name(name, [Property("color", fixed_to(colour)), *renamed])
    return built


def _of_nothing(colour: str) -> model.SpecialValueMap:
    """Else what stands where there is no number wears the colour of the lowest one."""
    result = model.ValueMappingResult(color=colour, index=0)
    options = model.DashboardSpecialValueMapOptions(match=model.SpecialValueMatch.NULL_AND_NAN, result=result)
    return model.SpecialValueMap(options=options)


_LINE = shared.VizTextDisplayOptions().title_size(14).value_size(16)
"""Else the longest of several lines would make all of them too small to be read."""


def legible(steps: Steps) -> Steps:
    """The same with colours in which large figures can be read."""
    return tuple((value, words.on_both(colour)) for value, colour in steps)


def figure(kind: Figure) -> stat.Panel:
    """One number or several, large; no value is grey, and on a line without colour."""
    steps = kind.steps or ((None, words.EXPECTED),)
    grounds = tuple((value, words.under_text(colour)) for value, colour in steps)
    built = stat.Panel()
    if kind.line:
        built = built.orientation(common.VizOrientation.HORIZONTAL).text(_LINE)
    return (
        built.thresholds(_steps(grounds if kind.line else legible(steps)))
        .color_scheme(_by_thresholds())
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID if kind.line else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME if kind.named else common.BigValueTextMode.VALUE)
        .wide_layout(kind.line or not kind.named)
        .mappings([_of_nothing("transparent" if kind.line else words.on_both(words.UNKNOWN))])
        .reduce_options(_reduced())
    )


def lines(kind: Lines, *, numbered: bool) -> Built:
    """Curves; `numbered`: they are called after GPUs."""
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
    own = {**words.LEAKS, **words.STATES}
    colours = {
        name: colour if kind.stacked or name in own else words.on_both(colour) for name, colour in kind.colours.items()
    }
    return _dashed(_coloured(built, colours), kind.dashed, stacked=kind.stacked)


def _numbered(built: Built) -> Built:
    """Curves that are called after a GPU's index: the first eight can be told apart with any colour vision."""
    for index, colour in enumerate(words.EIGHT):
        built = built.override_by_regexp(f"/(^| )GPU {index}(,|$)/", [Property("color", fixed_to(colour))])
    return built


def fixed_to(colour: str) -> dict[str, str]:
    """How Grafana spells one colour in an override."""
    return {"mode": "fixed", "fixedColor": colour}


def _band(built: timeseries.Panel, band: tuple[float, float]) -> timeseries.Panel:
    low, high = band
    steps = ((None, "transparent"), (low, words.GOOD), (high, "transparent"))
    style = shared.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED_AND_AREA)
    return built.thresholds(_steps(steps)).thresholds_style(style)


def _dashed(built: Built, names: tuple[str, ...], *, stacked: bool) -> Built:
    """What the others are compared with, in front of a stack and no part of it."""
    dashes = [Property("custom.lineStyle", {"fill": "dash", "dash": [6, 6]})]
    if stacked:
        plain = {"stacking": {"mode": "none"}, "fillOpacity": 0, "lineWidth": 1}
        dashes += [Property(f"custom.{name}", value) for name, value in plain.items()]
    for name in names:
        built = built.override_by_name(name, dashes)
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


def bars(kind: Bars) -> Built:
    """A bar for each series, from the left."""
    built = (
        bargauge.Panel()
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .value_mode(common.BarGaugeValueMode.TEXT)
        .name_placement(common.BarGaugeNamePlacement.LEFT)
        .show_unfilled(False)
        .reduce_options(_reduced())
        .color_scheme(_fixed(words.UNKNOWN))
        .text(shared.VizTextDisplayOptions().title_size(13).value_size(16))
        .max_viz_height(_BAR)
        .min(0)
    )
    built = built.max(kind.top) if kind.top is not None else built
    return _coloured(built, kind.colours)


def timeline(kind: Timeline) -> Built:
    """A stripe for each series, coloured by its words."""
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
