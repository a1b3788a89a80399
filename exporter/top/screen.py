"""Holds the state of the view, changes it on keys, and lays out the screen; renders it as text for --once.

If there is little room, the summary of the selected row is left out first, then the header; the list and the line of
keys always stay.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from exporter.formatting import short_duration
from exporter.top import columns, detail
from exporter.top.columns import SORTS, ListKind, ListRow, RowKey, filter_and_sort, gpu_rows, job_rows
from exporter.top.detail import hang_lines, header_lines, page_title
from exporter.top.view import (
    WINDOWS,
    StyledLine,
    StyledText,
    TopView,
    justify_line,
    loss_shares,
    styled_line,
    truncate_line,
)

MAX_FILTER = 60


class ViewState(Struct, frozen=True, kw_only=True):
    """What the user has chosen to see."""

    kind: ListKind = "gpus"
    window: str = "last_5_minutes"
    sorts: tuple[tuple[ListKind, int], ...] = (("gpus", 0), ("jobs", 0))
    reverse: bool = False
    text: str = ""
    """Filter: only rows that contain all of these words are shown."""
    typing: bool = False
    chosen: RowKey | None = None
    opened: RowKey | None = None
    help: bool = False
    first: int = 0
    """First visible line of the opened page."""
    held: bool = False
    """True: the screen is paused."""
    quit: bool = False

    @property
    def sort(self) -> int:
        """Index in SORTS of the current list's order."""
        return dict(self.sorts)[self.kind]


class ScreenContext(Struct, frozen=True, kw_only=True):
    """What was on the screen when the key was pressed."""

    rows: Sequence[RowKey]
    page: int
    """Number of rows or lines visible at once."""
    lines: int = 0
    """Number of lines of the opened page."""
    job_of: Callable[[RowKey], RowKey | None] = lambda _: None
    """Returns the job that holds the row's GPU."""


def _move(by: Callable[[ScreenContext], int]) -> Callable[[ViewState, ScreenContext], ViewState]:
    def moved(state: ViewState, context: ScreenContext) -> ViewState:
        if state.opened or state.help:
            last = max(0, context.lines - context.page)
            return replace(state, first=min(last, max(0, state.first + by(context))))
        if not context.rows:
            return state
        at = context.rows.index(state.chosen) if state.chosen in context.rows else 0
        return replace(state, chosen=context.rows[min(len(context.rows) - 1, max(0, at + by(context)))])

    return moved


def _open(state: ViewState, context: ScreenContext) -> ViewState:
    if state.opened or state.help or state.chosen not in context.rows or state.chosen is None:
        return state
    return replace(state, opened=context.job_of(state.chosen) or state.chosen, first=0)


def _open_gpu(state: ViewState, context: ScreenContext) -> ViewState:
    if state.opened or state.help or state.chosen not in context.rows:
        return state
    return replace(state, opened=state.chosen, first=0)


def _back(state: ViewState, _: ScreenContext) -> ViewState:
    """Close the help or the opened page; if there is none, clear the filter."""
    if state.help:
        return replace(state, help=False, first=0)
    if state.opened:
        return replace(state, opened=None, first=0)
    return replace(state, text="")


def _leave(state: ViewState, context: ScreenContext) -> ViewState:
    return _back(state, context) if state.help or state.opened else replace(state, quit=True)


def _switch_list(state: ViewState, _: ScreenContext) -> ViewState:
    kind: ListKind = "jobs" if state.kind == "gpus" else "gpus"
    return replace(state, kind=kind, opened=None, help=False, chosen=None, first=0, reverse=False)


def _next_window(state: ViewState, _: ScreenContext) -> ViewState:
    names = list(WINDOWS)
    return replace(state, window=names[(names.index(state.window) + 1) % len(names)])


def _next_sort(state: ViewState, _: ScreenContext) -> ViewState:
    sorts = dict(state.sorts)
    sorts[state.kind] = (state.sort + 1) % len(SORTS[state.kind])
    return replace(state, sorts=tuple(sorts.items()), reverse=False)


def _start_filter(state: ViewState, _: ScreenContext) -> ViewState:
    return replace(state, typing=True, opened=None, help=False, first=0)


def _page_step(context: ScreenContext) -> int:
    """Return one line less than is visible, so that one line stays for orientation."""
    return max(1, context.page - 1)


_TO_THE_END = 1 << 30
KEYS: tuple[tuple[tuple[str, ...], Callable[[ViewState, ScreenContext], ViewState], str, str, str], ...] = (
    (("enter",), _open, "Enter", "open", "open the selected row's job, or the GPU if it has no owner"),
    (("d",), _open_gpu, "d", "", "open the selected row itself: a GPU's hang indicators and health"),
    (("escape", "backspace"), _back, "Esc", "", "back; in a list: show all rows again"),
    (("tab", "shift+tab"), _switch_list, "Tab", "{kind}", "from GPUs to jobs and back"),
    (("w",), _next_window, "w", "{window}", "from the last 5 minutes to the last hour and back"),
    (("s",), _next_sort, "s", "sort", "sort by the next column; an arrow marks it"),
    (("r",), lambda a, _: replace(a, reverse=not a.reverse), "r", "", "reverse the order"),
    (("slash",), _start_filter, "/", "filter", "show only rows with all of these words: user, job, state, leak, node"),
    (("space",), lambda a, _: replace(a, held=not a.held), "Space", "", "pause or resume the screen"),
    (("up", "k"), _move(lambda _: -1), "Up k", "", "one row up"),
    (("down", "j"), _move(lambda _: 1), "Down j", "", "one row down"),
    (("pageup",), _move(lambda context: -_page_step(context)), "PgUp", "", "a screen up"),
    (("pagedown",), _move(_page_step), "PgDn", "", "a screen down"),
    (("home", "g"), _move(lambda _: -_TO_THE_END), "Home g", "", "to the first"),
    (("end", "G"), _move(lambda _: _TO_THE_END), "End G", "", "to the last"),
    (("question_mark", "h", "f1"), lambda a, _: replace(a, help=not a.help, first=0), "?", "help", "this help"),
    (("q",), _leave, "q", "quit", "close the opened page, then quit; Ctrl-C quits at once"),
)
"""Keys by Textual's names, action, displayed name, label in the last line, and text in the help."""
_ACTION_BY_KEY = {key: action for keys, action, *_ in KEYS for key in keys}


def handle_key(state: ViewState, key: str, context: ScreenContext, *, char: str | None = None) -> ViewState:
    """Return the state after a key. `char` is the character that it types, if any."""
    if key in ("ctrl+c", "ctrl+q"):
        return replace(state, quit=True)
    if state.typing:
        return _edit_filter(state, key, char, context)
    action = _ACTION_BY_KEY.get(key)
    return action(state, context) if action else state


def _edit_filter(state: ViewState, key: str, char: str | None, context: ScreenContext) -> ViewState:
    if key == "escape":
        return replace(state, typing=False, text="")
    if key == "enter":
        return replace(state, typing=False)
    if key == "backspace":
        return replace(state, text=state.text[:-1])
    if key == "ctrl+u":
        return replace(state, text="")
    if char and char.isprintable():
        return replace(state, text=(state.text + char)[:MAX_FILTER])
    return _ACTION_BY_KEY[key](state, context) if key in ("up", "down", "pageup", "pagedown") else state


MIN_WIDTH, MIN_HEIGHT = 24, 5
_MIN_LIST_LINES, _MIN_SUMMARY_LINES, _MAX_SUMMARY_LINES = 4, 3, 14
_HANG_SHARE = 6
"""A hang takes at most one line in so many of the list's screen, and at least two."""
_SPACED_HEIGHT = 24
"""Height from which on there is a blank line below the header."""


class RenderedScreen(Struct, frozen=True):
    """The lines of the screen, and the context for the next key."""

    lines: list[StyledLine]
    context: ScreenContext
    selected: RowKey | None
    """The row that keys act on: the first if the previously selected one is gone."""


def list_rows(state: ViewState, view: TopView, kind: ListKind | None = None) -> list[ListRow]:
    """Return all rows of a list, unsorted."""
    return (gpu_rows if (kind or state.kind) == "gpus" else job_rows)(view, state.window)


def render_screen(state: ViewState, view: TopView, *, width: int, height: int) -> RenderedScreen:
    """Render the screen."""
    rows = filter_and_sort(list_rows(state, view), state.kind, sort=state.sort, reverse=state.reverse, text=state.text)
    keys = [row.key for row in rows]
    selected = state.chosen if state.chosen in keys else keys[0] if keys else None
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        small = styled_line(f"too small: {width}x{height}")
        return RenderedScreen(_fit([small], view, width, height=height), ScreenContext(rows=keys, page=1), selected)
    if state.help or state.opened:
        return _overlay_screen(state, view, keys, width=width, height=height)
    return _list_screen(state, view, rows, selected=selected, width=width, height=height)


def _fit(lines: Sequence[StyledLine], view: TopView, width: int, *, height: int) -> list[StyledLine]:
    """Truncate all lines to `width`, and fill up to `height` lines."""
    shown = [truncate_line(line, width, view.glyphs) for line in lines[:height]]
    return shown + [styled_line()] * (height - len(shown))


def _list_screen(
    state: ViewState, view: TopView, rows: list[ListRow], *, selected: RowKey | None, width: int, height: int
) -> RenderedScreen:
    keys = [row.key for row in rows]
    most = min(height - 2 - _MIN_LIST_LINES, max(5, height // 4))
    room = min(height - 2 - _MIN_LIST_LINES - most, max(2, height // _HANG_SHARE))
    top = _header(state, view, width=width, height=most, hangs=room) if most > 0 else []
    top += [styled_line()] if height >= _SPACED_HEIGHT else []
    room = height - len(top) - 3
    shown = min(max(1, len(rows)), room)
    at = keys.index(selected) if selected is not None else 0
    first = min(max(0, at - shown // 2), max(0, len(rows) - shown))
    body = [_tab_line(state, view, rows, first=first, shown=shown, width=width)]
    body += _table_lines(state.kind, state, view, rows, at=at, first=first, shown=shown, width=width)
    below = _lines_below(state, view, rows[at] if rows else None, width=width, room=room - shown)
    lines = _fit([*top, *body, *below], view, width, height=height - 1)
    context = ScreenContext(rows=keys, page=shown, job_of=lambda key: _job_of(key, view))
    return RenderedScreen([*lines, _key_line(state, width)], context, selected)


def _header(state: ViewState, view: TopView, *, width: int, height: int, hangs: int) -> list[StyledLine]:
    """Build the header, with at most `hangs` more lines about what hangs below its first line."""
    first, *others = header_lines(view, state.window, width, height=height)
    return [first, *hang_lines(view, width)[: max(0, hangs)], *others]


def _table_lines(
    kind: ListKind, state: ViewState, view: TopView, rows: list[ListRow], *, at: int, first: int, shown: int, width: int
) -> list[StyledLine]:
    """Build headings and visible rows. The layout considers all rows, so that columns do not move while scrolling."""
    layout = columns.layout_columns(rows, kind, view, width=width)
    scale = view.trends.scale_of(row.key for row in rows)
    sort, reverse = (state.sort, state.reverse) if kind == state.kind else (0, False)
    lines = [columns.heading_line(layout, kind, view, sort=sort, reverse=reverse, top=scale)]
    if not rows:
        lines.append(styled_line(("  " + _empty_text(state, view), "soft")))
    for index, row in enumerate(rows[first : first + shown], first):
        lines.append(columns.row_line(row, layout, view, top=scale, is_selected=index == at))
    return lines


def _empty_text(state: ViewState, view: TopView) -> str:
    if state.text:
        return "no row has these words; Esc clears the filter"
    if not any(node.gpus for node in view.nodes):
        return "no data yet"
    return "no GPU" if state.kind == "gpus" else "no running or recently ended job"


def _tab_line(
    state: ViewState, view: TopView, rows: list[ListRow], *, first: int, shown: int, width: int
) -> StyledLine:
    """Build the line with the current list, its order and its filter."""
    left: list[StyledText | str] = [" "]
    for kind, name in (("gpus", "GPUs"), ("jobs", "jobs")):
        left.append((f"[{name}]" if kind == state.kind else f" {name} ", "strong" if kind == state.kind else "soft"))
    order = f"{SORTS[state.kind][state.sort][0]}{', reversed' if state.reverse else ''}"
    left.append((f"   last {WINDOWS[state.window]}, by {order}", "soft"))
    if state.text or state.typing:
        cursor = "_" if state.typing else ""
        left += ["  filter: ", (f"{view.glyphs.printable(state.text)}{cursor}", "strong")]
        left.append((f"  {len(rows)} of {len(list_rows(state, view))}", "soft"))
    held = [("PAUSED: Space resumes  ", "bad")] if state.held else []
    range_text = f"{first + 1}-{first + shown} of {len(rows)} " if shown < len(rows) else ""
    return justify_line(left, [*held, (range_text, "soft")], width, view.glyphs)


def _lines_below(state: ViewState, view: TopView, row: ListRow | None, *, width: int, room: int) -> list[StyledLine]:
    """Build what fits below the list: a summary of the selected row, jobs below GPUs, the node's leaks."""
    lines: list[StyledLine] = []
    if row is not None and room > _MIN_SUMMARY_LINES:
        lines = [
            styled_line(),
            *detail.row_summary(row, view, state.window, width)[: min(_MAX_SUMMARY_LINES, room - 1)],
        ]
    if state.kind == "gpus":
        lines += _job_table(state, view, width=width, room=room - len(lines))
    if not view.has_many_nodes and view.nodes[0].node:
        loss_lines = _node_losses(view, state, width)
        if loss_lines and room - len(lines) >= len(loss_lines) + 2:
            lines += [styled_line(), styled_line(("  where the node's time went", "soft")), *loss_lines]
    return lines


def _node_losses(view: TopView, state: ViewState, width: int) -> list[StyledLine]:
    usage = getattr(view.nodes[0].node, state.window)
    return detail.leak_lines(loss_shares(usage), usage, view.glyphs, width, full=False)


def _job_table(state: ViewState, view: TopView, *, width: int, room: int) -> list[StyledLine]:
    """Build a table of the jobs that fit, the largest loss first; empty if too few fit."""
    jobs = filter_and_sort(job_rows(view, state.window), "jobs", text=state.text)
    shown = min(len(jobs), room - 3)
    if not jobs or shown < min(len(jobs), _MIN_LIST_LINES):
        return []
    rows = _table_lines("jobs", state, view, jobs, at=-1, first=0, shown=shown, width=width)
    return [styled_line(), styled_line((f"  jobs, by {SORTS['jobs'][0][0]}", "soft")), *rows]


def _job_of(key: RowKey, view: TopView) -> RowKey | None:
    """Return the job that holds this GPU; the first if there are several."""
    for node in view.nodes:
        for gpu in node.gpus.gpus if node.gpus and node.address == key[1] and key[0] == "gpu" else []:
            known = {job.owner.job_id for job in node.jobs.jobs} if node.jobs else set()
            if gpu.uuid == key[2] and gpu.owners and gpu.owners[0].job_id in known:
                return "job", key[1], gpu.owners[0].job_id
    return None


def _overlay_screen(state: ViewState, view: TopView, keys: list[RowKey], *, width: int, height: int) -> RenderedScreen:
    """Render the help or the page of one row instead of the list."""
    body = _help_lines(view) if state.help else _row_page(state, view, width)
    room = height - 2
    first = min(state.first, max(0, len(body) - room))
    more = f"lines {first + 1}-{min(len(body), first + room)} of {len(body)}  " if len(body) > room else ""
    address = state.opened[1] if state.opened else ""
    index = next((index for index, node in enumerate(view.nodes) if node.address == address), 0)
    about = "help" if state.help else view.names[index]
    top = page_title(view.nodes[index], about, f"{'PAUSED  ' if state.held else ''}{more}", view, width=width)
    lines = _fit([top, *body[first : first + room]], view, width, height=height - 1)
    context = ScreenContext(rows=keys, page=room, lines=len(body))
    return RenderedScreen([*lines, _key_line(state, width)], context, state.chosen)


def _row_page(state: ViewState, view: TopView, width: int) -> list[StyledLine]:
    rows = list_rows(state, view, "jobs" if state.opened and state.opened[0] == "job" else "gpus")
    row = next((row for row in rows if row.key == state.opened), None)
    if row is None:
        return [
            styled_line(),
            styled_line(("  no longer reported by the node; Esc goes back", "soft")),
        ]
    return [styled_line(), *detail.row_page(row, view, state.window, width)]


def _help_lines(view: TopView) -> list[StyledLine]:
    written = max(len(name) for _, _, name, _, _ in KEYS)
    lines = [styled_line()]
    lines += [styled_line((f"  {name:<{written}}  ", "strong"), about) for _, _, name, _, about in KEYS]
    lines += [styled_line(), *(styled_line("  " + text) for text in _HELP_TEXT)]
    symbols = "   ".join(f"{symbol} {state}" for state, symbol in view.glyphs.states.items())
    fills = "   ".join(f"{3 * fill} {name}" for name, fill in view.glyphs.fills.items())
    running = f"  running for {short_duration(max(0.0, view.now - view.trends.start))}"
    return [
        *lines, styled_line(), styled_line(f"  {symbols}"), styled_line(f"  {fills}"), styled_line(),
        styled_line((running, "soft")),
    ]  # fmt: skip


_HELP_TEXT = (
    "GAU allocated and working / paid; ECTR computing / allocated;",
    "eMFU useful / peak while computing; USEFUL their product, the useful share",
    "of what was paid. SMI: utilization as nvidia-smi shows it. All in percent.",
    "- nothing to divide by; ? not observed, or not reported by the board",
    "The trend is USEFUL of 5 minutes since the start, all rows on one scale.",
)


def _key_line(state: ViewState, width: int) -> StyledLine:
    """Build the last line: the keys that can be pressed."""
    if state.typing:
        shortcuts = [("type words", ""), ("Enter", "keep"), ("Esc", "all rows"), ("Ctrl-U", "clear")]
    elif state.help or state.opened:
        shortcuts = [("Esc", "back"), ("Up Down", "scroll"), ("w", "{window}"), ("?", "help"), ("q", "back")]
    else:
        shortcuts = [(name, label) for _, _, name, label, _ in KEYS if label]
    window = next(text for name, text in WINDOWS.items() if name != state.window)
    kind = "jobs" if state.kind == "gpus" else "GPUs"
    segments, taken = list[StyledText](), 0
    for name, label in shortcuts:
        shown = f" {label.format(window=window, kind=kind)}  "
        taken += 1 + len(name) + len(shown)
        if taken <= width:
            segments += [(" ", ""), (name, "strong"), (shown, "soft")]
    return styled_line(*segments)


_ALL_LINES = 1 << 20


def render_text(view: TopView, state: ViewState, *, width: int) -> str:
    """Render the nodes, their GPUs and their jobs as text; without GPUs if the list is that of jobs."""
    lines = _header(state, view, width=width, height=_ALL_LINES, hangs=_ALL_LINES)
    kinds: tuple[ListKind, ...] = ("gpus", "jobs") if state.kind == "gpus" else ("jobs",)
    for kind in kinds:
        rows = filter_and_sort(list_rows(state, view, kind), kind, text=state.text)
        layout = columns.layout_columns(rows, kind, view, width=width)
        plain = [(column, size) for column, size in layout if not column.trend]
        if rows:
            lines += [StyledLine(), columns.heading_line(plain, kind, view, sort=None, reverse=False, top=1.0)]
            lines += [columns.row_line(row, plain, view, top=1.0) for row in rows]
    return "".join(f"{truncate_line(one, width, view.glyphs).text.rstrip()}\n" for one in lines)
