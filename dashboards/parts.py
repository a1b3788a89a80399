"""The parts a dashboard is made of, as values: what a panel shows and says, not how Grafana spells it.

Owns the shapes. Refuses JSON (`drawing`), queries' text (`series`) and colours (`words`).
"""

from collections.abc import Mapping

from msgspec import Struct


class Query(Struct, frozen=True):
    """What is asked of Prometheus."""

    expr: str
    legend: str = ""
    """How a series is called, with {{labels}}; empty: the labels themselves."""
    unit: str = ""
    """Grafana's, where it is not the panel's."""
    steps: tuple[tuple[float | None, str], ...] = ()
    """Colours of its values, where they are not the panel's."""


class Link(Struct, frozen=True):
    """Where a click leads."""

    title: str
    url: str


class Column(Struct, frozen=True, kw_only=True):
    """One column of a table: a label, or the value of the query with that letter."""

    of: str
    """Name of the label; or "A", "B", ... for the value of a query, in their order."""
    title: str
    unit: str = ""
    decimals: int | None = None
    link: Link | None = None
    width: int = 0
    """Pixels; 0: what is left."""
    words: Mapping[str, str] = {}
    """Colours of its values where these are words."""
    steps: tuple[tuple[float | None, str], ...] = ()
    """Colours behind its values from each figure on; the first figure is None. What is as expected has none."""
    texts: Mapping[str, str] = {}
    """What is written instead of a value."""
    ours: bool = False
    """Names of ours, such as idle_context: written with blanks, as a reader has them in prose."""
    bar: str = ""
    """Drawn as a bar of this colour within the cell, from 0 on."""
    empty: str = "-"
    """What stands in a cell without a value."""
    hidden: bool = False
    """Only there for links of other columns."""
    wrapped: bool = False
    """Text on as many lines as it needs."""


class Figure(Struct, frozen=True):
    """One number, or one for each series."""

    steps: tuple[tuple[float | None, str], ...] = ()
    named: bool = False
    """Whether each series' name stands beside its number."""
    line: bool = False
    """A line of text and number on a ground of that colour, for what is to be seen first."""


class Lines(Struct, frozen=True):
    """Curves over time."""

    stacked: bool = False
    colours: Mapping[str, str] = {}
    """Of series, by their name."""
    top: float | None = None
    bottom: float | None = 0.0
    band: tuple[float, float] | None = None
    """Two levels drawn across: the range that is expected."""
    table: bool = False
    """Whether the legend is a table with mean and last."""
    steps: bool = False
    """A value holds until the next: states, counts."""
    dashed: tuple[str, ...] = ()
    """Names of series that are drawn dashed: what the others are compared with."""
    axis: int = 0
    """Pixels kept for the values at the left, so that panels one above another share their time axis; 0: as needed."""
    legend: bool = True


class Bars(Struct, frozen=True):
    """One bar for each series, the longest first as asked."""

    colours: Mapping[str, str] = {}
    top: float | None = None


class Table(Struct, frozen=True):
    """Rows of what the queries have in common by their labels; columns in this order, all else is left out."""

    columns: tuple[Column, ...]
    sort: str = ""
    """`of` of the column to sort by, from the largest; empty: as asked."""
    rising: bool = False


class Timeline(Struct, frozen=True):
    """A stripe for each series, whose values are numbers of words: each word has its colour."""

    words: tuple[str, ...]
    """The word for 1, 2, ..."""
    colours: Mapping[str, str]


class Matrix(Struct, frozen=True):
    """One value for each pair of two labels; the darker the cell, the more."""

    row: str
    column: str
    names: Mapping[str, str] = {}
    """Of the rows: what is written instead of the label's value."""
    top: float | None = None


class Note(Struct, frozen=True):
    """Markdown."""

    text: str


Kind = Figure | Lines | Bars | Table | Timeline | Matrix | Note


class Panel(Struct, frozen=True, kw_only=True):
    """One panel. What it `shows`, what is `bad` and what to `do` are its description."""

    title: str
    kind: Kind
    shows: str
    bad: str
    do: str
    queries: tuple[Query, ...] = ()
    unit: str = ""
    """Grafana's; empty: that of the first series its first query names."""
    decimals: int | None = None
    width: int = 8
    """Of 24."""
    height: int = 8
    """Of 38 pixels each."""
    empty: str = "no data"
    """What stands there while there is nothing, and why there may be: never a zero."""
    fills: str = ""
    """The simulated story in which it has data, where a fleet without that trouble has none."""
    link: Link | None = None
    points: int = 0
    """Moments asked for at most, for a panel that reads many series; 0: one a pixel."""
    number: int = 0
    """Its id, above 1000, where a link leads to it; 0: by its place."""


class Row(Struct, frozen=True):
    """Panels below a heading."""

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


class Variable(Struct, frozen=True, kw_only=True):
    """What one chooses at the top: what its `query` finds, or what is typed in."""

    name: str
    label: str
    query: str = ""
    text: bool = False
    """Typed in."""
    default: str = ""
    """What is typed in at the start."""
    choices: Mapping[str, str] = {}
    """What can be chosen, where no query finds it: values and what a reader sees instead; the first at the start."""
    many: bool = False
    every: str = ""
    """What All stands for, as a regular expression; empty: there is no All."""
    each: bool = False
    """There is an All, and it stands for the values that were found, one by one."""
    hidden: bool = False
    says: str = ""


class Mark(Struct, frozen=True, kw_only=True):
    """What is marked on all curves of a board, and can be switched off at its top."""

    name: str
    expr: str
    colour: str
    title: str
    """With {{labels}}, and so `text`."""
    text: str = ""
    at_value: bool = False
    """The value is the moment, in milliseconds; else it is marked while the query has a sample."""
    shown: bool = True
    """Switched on at the start."""
    step: str = "60s"
    """Between two moments that are asked for."""


class Board(Struct, frozen=True, kw_only=True):
    """One dashboard. Its uid is `gpu-efficiency-` and its name; so is its file."""

    name: str
    title: str
    says: str
    """For whom it is and what it answers."""
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    marks: tuple[Mark, ...] = ()
    links: tuple[Link, ...] = ()
    """At the top, beside the other boards; each carries the time range and the variables along."""
    since: str = "now-24h"
    refresh: str = "1m"

    @property
    def uid(self) -> str:
        """What links lead to; never changes."""
        return f"gpu-efficiency-{self.name}"

    def panels(self) -> list[Panel]:
        """All of them, in order."""
        return [panel for row in self.rows for panel in row.panels]
