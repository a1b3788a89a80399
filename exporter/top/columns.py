"""The columns of the two lists, and which of them a width has room for.

Owns what a cell says. Columns drop out by rank as the width shrinks, the least needed first; the rest of the room
goes to those whose words are cut. So nothing ever overlaps, and the first two are always there.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from exporter.top.drawn import Line, Piece, joined, line
from exporter.top.rows import SORTS, Kind, Row
from exporter.top.seen import View
from exporter.top.signs import cells, cut, middle, padded
from exporter.top.trend import spark
from exporter.top.words import LAYER, brief, gibibytes, plain, ranges, ratio, share
from exporter.top.workload import own_word

GAP, MARGIN = 1, 2
"""Columns after each cell, and of the cursor before the first."""
LUXURY = 9
"""Columns of this rank and above come only when no word of those before them is cut, and their own are not."""
BAD = frozenset({"unavailable", "hung"})
_LOOKS = {"unowned": "gau", "zombie": "gau", "unallocated": "gau", "stalled": "ectr", "unobserved": "soft"}


class Cell(Struct, frozen=True):
    """What a row says in a column."""

    text: str
    look: str = ""


class Column(Struct, frozen=True, kw_only=True):
    """One column. `rank`: the lower, the longer it stays; columns of one rank come and go together."""

    name: str
    head: str
    rank: int
    least: int
    """Columns below which it is left out."""
    most: int
    """What it is given at most; it takes no more than its words need."""
    says: Callable[[Row, View], Cell]
    right: bool = False
    ends: bool = False
    """Cut in the middle: its words differ at their ends."""
    trend: bool = False
    """Drawn to the width it gets."""


def state(row: Row, view: View) -> Cell:
    """A sign and a word; what is not the present says so."""
    signs = view.signs
    if row.suspect and row.live:
        return Cell(f"{signs.suspect} hung?{_of(row)}", "bad")
    word, look = row.state, "bad" if row.state in BAD else _LOOKS.get(row.state, "")
    if not row.live:
        return Cell(f"{signs.marks['unobserved']} was {signs.name(word)}", "soft")
    mark = " " if word == "ended" else signs.marks.get(word, signs.other)
    return Cell(f"{mark} {signs.name(word)}{_of(row)}", "soft" if word == "ended" else look)


def _of(row: Row) -> str:
    """Of a job's GPUs those in this state, where they are not all."""
    alike, count = row.states.count(row.state), len(row.states)
    return f" {alike}/{count}" if count > 1 and alike < count and not row.suspect else ""


def _figure(row: Row, name: str, look: str = "") -> Cell:
    return Cell(ratio(row.window, name), look if row.live else "soft")


def _leak(row: Row, view: View, place: int) -> Cell:
    parts = row.window.parts()
    if len(parts) <= place:
        return Cell("")
    name, part = parts[place]
    layer = LAYER.get(name, "")
    look = layer if layer in ("gau", "ectr", "emfu") else "soft"
    return Cell(f"{share(part):>3} {view.signs.name(plain(name))}", look if row.live else "soft")


def _word(text: str, view: View, look: str = "") -> Cell:
    return Cell(view.signs.name(text), look)


def _user(row: Row, view: View) -> Cell:
    others = len({owner.job_id for owner in row.owners}) - 1
    return _word(row.owner.who + (f" +{others}" if others > 0 else ""), view)


def _power(row: Row, _: View) -> Cell:
    watts = row.gpu.power_watts if row.gpu and row.live else None
    return Cell("" if watts is None else f"{watts:.0f}")


def _memory(row: Row, _: View) -> Cell:
    gpu = row.gpu
    return Cell(gibibytes(gpu.memory_used_bytes, gpu.memory_total_bytes) if gpu and row.live else "")


def _celsius(row: Row, _: View) -> Cell:
    celsius = row.gpu.temperature_celsius if row.gpu and row.live else None
    return Cell("" if celsius is None else f"{celsius:.0f}")


def _model(row: Row, view: View) -> Cell:
    if row.gpu is None:
        return Cell("")
    profile, model = row.gpu.profile, row.gpu.model.removeprefix("NVIDIA ")
    return _word(f"MIG {profile}" if profile else model, view)


def _index(row: Row, view: View) -> Cell:
    gpu = row.gpu
    return _word((gpu.index or gpu.uuid) if gpu else "", view)


def _energy(row: Row, _: View) -> Cell:
    return Cell(f"{row.job.energy_joules / 3.6e6:.1f}" if row.job else "")


_NODE = Column(
    name="node", head="NODE", rank=2, least=8, most=24, says=lambda r, _: Cell(r.node, "" if r.live else "soft"),
    ends=True,
)  # fmt: skip
_LAYERS = (
    Column(name="gau", head="GAU", rank=3, least=3, most=3, says=lambda r, _: _figure(r, "gau"), right=True),
    Column(name="ectr", head="ECTR", rank=3, least=4, most=4, says=lambda r, _: _figure(r, "ectr"), right=True),
    Column(name="emfu", head="eMFU", rank=3, least=4, most=4, says=lambda r, _: _figure(r, "emfu"), right=True),
    Column(
        name="got", head="GOT", rank=1, least=3, most=3, says=lambda r, _: _figure(r, "product", "strong"), right=True
    ),
)
_TREND = Column(name="trend", head="", rank=7, least=6, most=40, says=lambda *_: Cell(""), trend=True)
_SMI = Column(
    name="smi", head="SMI", rank=9, least=3, most=3, says=lambda r, _: _figure(r, "driver_utilization", "soft"),
    right=True,
)  # fmt: skip
_SECOND = Column(name="leak2", head="  % NEXT LEAK", rank=12, least=18, most=31, says=lambda r, v: _leak(r, v, 1))
COLUMNS: dict[Kind, tuple[Column, ...]] = {
    "gpus": (
        _NODE,
        Column(name="gpu", head="GPU", rank=0, least=3, most=8, says=_index, right=True, ends=True),
        Column(name="state", head="STATE", rank=0, least=13, most=17, says=state),
        Column(name="since", head="SINCE", rank=6, least=5, most=5, says=lambda r, _: Cell(brief(r.since)), right=True),
        *_LAYERS,
        _TREND,
        _SMI,
        Column(name="leak", head="  % BIGGEST LEAK", rank=5, least=12, most=31, says=lambda r, v: _leak(r, v, 0)),
        _SECOND,
        Column(name="user", head="USER", rank=4, least=6, most=16, says=_user, ends=True),
        Column(
            name="job", head="JOB", rank=10, least=6, most=24, says=lambda r, v: _word(r.owner.job_id, v), ends=True
        ),
        Column(name="name", head="NAME", rank=13, least=6, most=24, says=lambda r, v: _word(r.owner.name, v)),
        Column(name="power", head="W", rank=8, least=3, most=4, says=_power, right=True),
        Column(name="memory", head="GiB", rank=11, least=5, most=7, says=_memory, right=True),
        Column(name="celsius", head="°C", rank=14, least=3, most=3, says=_celsius, right=True),
        Column(
            name="reason", head="WHY", rank=15, least=8, most=24,
            says=lambda r, v: _word(plain(r.gpu.reason) if r.gpu else "", v, "soft"),
        ),
        Column(name="model", head="MODEL", rank=16, least=10, most=22, says=_model),
    ),
    "jobs": (
        _NODE,
        Column(name="job", head="JOB", rank=0, least=8, most=28, says=lambda r, v: _word(r.owner.job_id, v), ends=True),
        Column(name="user", head="USER", rank=4, least=5, most=16, says=_user, ends=True),
        Column(
            name="gpus", head="GPUS", rank=3, least=4, most=12,
            says=lambda r, v: _word(ranges(r.job.gpus) if r.job else "", v), ends=True,
        ),
        Column(name="state", head="STATE", rank=0, least=11, most=17, says=state),
        Column(name="since", head="SINCE", rank=6, least=5, most=5, says=lambda r, _: Cell(brief(r.since)), right=True),
        *_LAYERS,
        _TREND,
        _SMI,
        Column(name="leak", head="  % BIGGEST LEAK", rank=5, least=12, most=31, says=lambda r, v: _leak(r, v, 0)),
        _SECOND,
        Column(name="name", head="NAME", rank=8, least=6, most=24, says=lambda r, v: _word(r.owner.name, v)),
        Column(
            name="word", head="ITS OWN WORD", rank=10, least=14, most=60,
            says=lambda r, v: _word(own_word(r.job) if r.job else "", v),
        ),
        Column(
            name="account", head="ACCOUNT", rank=13, least=7, most=16, says=lambda r, v: _word(r.owner.account, v),
            ends=True,
        ),
        Column(name="energy", head="kWh", rank=14, least=4, most=7, says=_energy, right=True),
    ),
}  # fmt: skip
"""Of each list, from left to right."""


class Table(Struct, frozen=True):
    """A list's columns with their widths."""

    columns: tuple[tuple[Column, int], ...]


def chosen(columns: Sequence[Column], width: int, needs: dict[str, int]) -> list[tuple[Column, int]]:
    """Those that there is room for, from left to right, and how wide each is. `needs`: what a column's words take."""
    room, kept = width - MARGIN, list[Column]()
    for rank in sorted({column.rank for column in columns}):
        group = [column for column in columns if column.rank == rank and needs.get(column.name, 0)]
        size = _least if rank < LUXURY else _wanted
        if rank and sum(size(column, needs) + GAP for column in (*kept, *group)) > room:
            break
        kept += group
    found = [(column, _least(column, needs)) for column in columns if column in kept]
    return _widened(found, needs, max(0, room - sum(width + GAP for _, width in found)))


def _wanted(column: Column, needs: dict[str, int]) -> int:
    return column.least if column.trend else min(column.most, needs[column.name])


def _least(column: Column, needs: dict[str, int]) -> int:
    return column.least if column.trend else min(column.least, max(needs[column.name], cells(column.head)))


def _widened(found: list[tuple[Column, int]], needs: dict[str, int], room: int) -> list[tuple[Column, int]]:
    """Give the room that is left to those whose words are cut, in turns; the trend takes what nobody needs."""
    widths = {column.name: width for column, width in found}
    cut_ones = [column for column, _ in found if not column.trend]
    while room and (cut_ones := [column for column in cut_ones if widths[column.name] < _wanted(column, needs)]):
        for column in cut_ones[:room]:
            widths[column.name] += 1
        room -= len(cut_ones[:room])
    for column in (column for column, _ in found if column.trend):
        widths[column.name] += min(room, column.most - widths[column.name])
    return [(column, widths[column.name]) for column, _ in found]


def table(rows: Sequence[Row], kind: Kind, view: View, *, width: int) -> Table:
    """The columns for these rows: what none of them has a word for is left out."""
    columns = [column for column in COLUMNS[kind] if view.many or column.name != "node"]
    needs = {column.name: _need(column, rows, view) for column in columns}
    return Table(tuple(chosen(columns, width, needs)))


def _need(column: Column, rows: Sequence[Row], view: View) -> int:
    if column.trend:
        return column.most
    widest = max((cells(column.says(row, view).text) for row in rows), default=0)
    return max(widest, cells(column.head)) if widest or column.rank < 2 else 0  # noqa: PLR2004  the always shown


def heads(found: Table, kind: Kind, view: View, *, sort: int | None, reverse: bool, top: float) -> Line:
    """The line of names; that of the column by which it is sorted has an arrow, before it where figures are."""
    signs = view.signs
    marked = "" if sort is None else SORTS[kind][sort][1]
    pieces, gap = list[Piece](), MARGIN
    for column, width in found.columns:
        name = _trend_head(view, width, top) if column.trend else signs.name(column.head)
        arrow = (signs.up if reverse else signs.down) if column.name == marked else ""
        if column.right:
            text = padded(arrow + name, gap + width, right=True)
        else:
            text = " " * gap + padded(cut(name, width - len(arrow), signs) + arrow, width)
        pieces.append((text, "strong" if arrow else "soft"))
        gap = GAP
    return line(*pieces)


def _trend_head(view: View, width: int, top: float) -> str:
    """What a trend shows, its scale and its length, in as many words as there is room for."""
    trends = view.trends
    ago, scale = brief(max(0.0, view.now - trends.start)), f"0-{100 * top:.0f}%"
    candidates = (f"GOT, {scale}, over the last {ago}", f"GOT {scale}, {ago}", f"{scale} {ago}", scale)
    return next((words for words in candidates if len(words) <= width), scale)


def drawn(row: Row, found: Table, view: View, *, top: float, is_chosen: bool = False) -> Line:
    """One row."""
    pieces: list[Piece] = [(padded(view.signs.cursor if is_chosen else "", MARGIN), "strong")]
    for column, width in found.columns:
        cell = _trend(row, view, width, top) if column.trend else column.says(row, view)
        text = (middle if column.ends else cut)(cell.text, width, view.signs)
        pieces.append((padded(text, width, right=column.right) + " " * GAP, cell.look))
    return line(*joined(pieces), chosen=is_chosen)


def _trend(row: Row, view: View, width: int, top: float) -> Cell:
    shown = spark(view.trends.points(row.key, width), top, view.signs)
    return Cell(padded(shown, width, right=True), "useful" if row.live else "soft")
