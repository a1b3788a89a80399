"""The whole screen: exactly as many lines as there are, none wider than there is room.

Owns what stands where, and what gives way when there is little room: first the lines about the chosen row, then the
node's, never the list and the keys.
"""

from collections.abc import Sequence

from msgspec import Struct

from exporter.top import columns, detail
from exporter.top.asked import KEYS, Asked, Before
from exporter.top.drawn import Line, Piece, apart, fitted, line
from exporter.top.head import head, title
from exporter.top.rows import SORTS, Key, Kind, Row, gpu_rows, job_rows, listed
from exporter.top.seen import View
from exporter.top.signs import cut
from exporter.top.words import WINDOWS, brief

LEAST_WIDTH, LEAST_HEIGHT = 24, 5
_LEAST_LIST, _LEAST_GIST, _MOST_GIST = 4, 3, 14
_AIRY = 24
"""Lines from which on there is a blank one below the head."""


class Screen(Struct, frozen=True):
    """What is shown, and what a key has to know of it."""

    lines: list[Line]
    before: Before
    chosen: Key | None
    """The row the keys act on: the first where the one chosen before is gone."""


def rows_of(asked: Asked, view: View, kind: Kind | None = None) -> list[Row]:
    """All rows of a list, unsorted."""
    return (gpu_rows if (kind or asked.kind) == "gpus" else job_rows)(view, asked.window)


def screen(asked: Asked, view: View, *, width: int, height: int) -> Screen:
    """Draw it."""
    rows = listed(rows_of(asked, view), asked.kind, sort=asked.sort, reverse=asked.reverse, text=asked.text)
    keys = [row.key for row in rows]
    chosen = asked.chosen if asked.chosen in keys else keys[0] if keys else None
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        small = cut(f"too small: {width}x{height}", width, view.signs)
        return Screen(_filled([line(small)], height), Before(rows=keys, page=1), chosen)
    if asked.help or asked.opened:
        return _over(asked, view, keys, width=width, height=height)
    return _list(asked, view, rows, chosen=chosen, width=width, height=height)


def _filled(lines: Sequence[Line], height: int) -> list[Line]:
    return [*lines[:height], *[line()] * (height - len(lines))]


def _list(asked: Asked, view: View, rows: list[Row], *, chosen: Key | None, width: int, height: int) -> Screen:
    keys = [row.key for row in rows]
    top = _head(asked, view, width, min(height - 2 - _LEAST_LIST, max(5, height // 4)))
    top += [line()] if height >= _AIRY else []
    room = height - len(top) - 3
    shown = min(max(1, len(rows)), room)
    at = keys.index(chosen) if chosen is not None else 0
    first = min(max(0, at - shown // 2), max(0, len(rows) - shown))
    body = [_tabs(asked, view, rows, first=first, shown=shown, width=width)]
    body += _rows(asked.kind, asked, view, rows, at=at, first=first, shown=shown, width=width)
    below = _below(asked, view, rows[at] if rows else None, width=width, room=room - shown)
    lines = _filled([*top, *body, *below], height - 1)
    before = Before(rows=keys, page=shown, job_of=lambda key: _job_of(key, view))
    return Screen([*lines, _keys(asked, width)], before, chosen)


def _head(asked: Asked, view: View, width: int, most: int) -> list[Line]:
    return head(view, asked.window, width, height=most) if most > 0 else []


def _rows(
    kind: Kind, asked: Asked, view: View, rows: list[Row], *, at: int, first: int, shown: int, width: int
) -> list[Line]:
    """Heads and rows. The columns are those of all rows: they do not move while one scrolls."""
    found = columns.table(rows, kind, view, width=width)
    scale = view.trends.top(row.key for row in rows)
    sort, reverse = (asked.sort, asked.reverse) if kind == asked.kind else (0, False)
    lines = [columns.heads(found, kind, view, sort=sort, reverse=reverse, top=scale)]
    if not rows:
        lines.append(line(("  " + _empty(asked, view), "soft")))
    for place, row in enumerate(rows[first : first + shown], first):
        lines.append(columns.drawn(row, found, view, top=scale, is_chosen=place == at))
    return [fitted(one, width, view.signs) for one in lines]


def _empty(asked: Asked, view: View) -> str:
    if asked.text:
        return "no row has these words; Esc shows all again"
    if not any(seen.gpus for seen in view.nodes):
        return "nothing yet"
    return "no GPU" if asked.kind == "gpus" else "no job holds a GPU, or did lately"


def _tabs(asked: Asked, view: View, rows: list[Row], *, first: int, shown: int, width: int) -> Line:
    """Which list it is, how sorted and filtered."""
    left: list[Piece | str] = [" "]
    for kind, name in (("gpus", "GPUs"), ("jobs", "jobs")):
        left.append((f"[{name}]" if kind == asked.kind else f" {name} ", "strong" if kind == asked.kind else "soft"))
    order = f"{SORTS[asked.kind][asked.sort][0]}{', turned around' if asked.reverse else ''}"
    left.append((f"   last {WINDOWS[asked.window]}, by {order}", "soft"))
    if asked.text or asked.typing:
        cursor = "_" if asked.typing else ""
        left += ["  filter: ", (f"{view.signs.name(asked.text)}{cursor}", "strong")]
        left.append((f"  {len(rows)} of {len(rows_of(asked, view))}", "soft"))
    held = [("HELD: Space lets go  ", "bad")] if asked.held else []
    seen = f"{first + 1}-{first + shown} of {len(rows)} " if shown < len(rows) else ""
    return apart(left, [*held, (seen, "soft")], width, view.signs)


def _below(asked: Asked, view: View, row: Row | None, *, width: int, room: int) -> list[Line]:
    """What there is room for: the chosen row in a few lines, and the jobs below GPUs."""
    lines: list[Line] = []
    if row is not None and room > _LEAST_GIST:
        lines = [line(), *detail.gist(row, view, asked.window, width)[: min(_MOST_GIST, room - 1)]]
    if asked.kind == "gpus":
        lines += _jobs(asked, view, width=width, room=room - len(lines))
    if not view.many and view.nodes[0].node:
        told = detail.leaks(getattr(view.nodes[0].node, asked.window), view.signs, width, full=False)
        if told and room - len(lines) >= len(told) + 2:
            lines += [line(), line(("  where the node's time went", "soft")), *told]
    return [fitted(one, width, view.signs) for one in lines]


def _jobs(asked: Asked, view: View, *, width: int, room: int) -> list[Line]:
    """As many as there is room for, those that lose most first."""
    jobs = listed(job_rows(view, asked.window), "jobs", text=asked.text)
    shown = min(len(jobs), room - 3)
    if not jobs or shown < min(len(jobs), _LEAST_LIST):
        return []
    rows = _rows("jobs", asked, view, jobs, at=-1, first=0, shown=shown, width=width)
    return [line(), line((f"  jobs, by {SORTS['jobs'][0][0]}", "soft")), *rows]


def _job_of(key: Key, view: View) -> Key | None:
    """The job that has this GPU; of several the first."""
    for seen in view.nodes:
        for gpu in seen.gpus.gpus if seen.gpus and seen.address == key[1] and key[0] == "gpu" else []:
            known = {job.owner.job_id for job in seen.jobs.jobs} if seen.jobs else set()
            if gpu.uuid == key[2] and gpu.owners and gpu.owners[0].job_id in known:
                return "job", key[1], gpu.owners[0].job_id
    return None


def _over(asked: Asked, view: View, keys: list[Key], *, width: int, height: int) -> Screen:
    """Help, or a page of one row, in place of the list."""
    body = _help(view, width) if asked.help else _page(asked, view, width)
    room = height - 2
    first = min(asked.first, max(0, len(body) - room))
    more = f"lines {first + 1}-{min(len(body), first + room)} of {len(body)}  " if len(body) > room else ""
    address = asked.opened[1] if asked.opened else ""
    place = next((place for place, seen in enumerate(view.nodes) if seen.address == address), 0)
    about = "help" if asked.help else view.names[place]
    top = title(view.nodes[place], about, f"{'HELD  ' if asked.held else ''}{more}", view, width=width)
    lines = _filled([top, *body[first : first + room]], height - 1)
    before = Before(rows=keys, page=room, lines=len(body))
    return Screen([*lines, _keys(asked, width)], before, asked.chosen)


def _page(asked: Asked, view: View, width: int) -> list[Line]:
    rows = rows_of(asked, view, "jobs" if asked.opened and asked.opened[0] == "job" else "gpus")
    row = next((row for row in rows if row.key == asked.opened), None)
    if row is None:
        return [line(), line(("  it is gone: the node tells nothing of it any more; Esc leads back", "soft"))]
    return [line(), *detail.page(row, view, asked.window, width)]


def _help(view: View, width: int) -> list[Line]:
    written = max(len(name) for _, _, name, _, _ in KEYS)
    lines = [line()]
    lines += [line((f"  {name:<{written}}  ", "strong"), about) for _, _, name, _, about in KEYS]
    lines += [line(), *(line("  " + words) for words in _MEANING)]
    marks = "   ".join(f"{mark} {state}" for state, mark in view.signs.marks.items())
    fills = "   ".join(f"{3 * fill} {name}" for name, fill in view.signs.fills.items())
    lines += [line(), line(f"  {marks}"), line(f"  {fills}")]
    lines += [line(), line((f"  watched for {brief(max(0.0, view.now - view.trends.start))}", "soft"))]
    return [fitted(one, width, view.signs) for one in lines]


_MEANING = (
    "GAU allocated and working / paid; ECTR computing / allocated;",
    "eMFU useful / peak while computing; GOT their product: what you got for",
    "what you paid. SMI: the utilisation nvidia-smi shows. All in percent.",
    "- nothing to divide by; ? not seen, or the board cannot say",
    "The trend is GOT of 5 minutes over the time watched, all rows on one scale.",
)


def _keys(asked: Asked, width: int) -> Line:
    """The last line: what can be pressed here."""
    if asked.typing:
        said = [("type words", ""), ("Enter", "keep"), ("Esc", "all rows"), ("Ctrl-U", "clear")]
    elif asked.help or asked.opened:
        said = [("Esc", "back"), ("Up Down", "scroll"), ("w", "{window}"), ("?", "help"), ("q", "back")]
    else:
        said = [(name, word) for _, _, name, word, _ in KEYS if word]
    window = next(words for name, words in WINDOWS.items() if name != asked.window)
    kind = "jobs" if asked.kind == "gpus" else "GPUs"
    pieces, taken = list[Piece](), 0
    for name, word in said:
        shown = f" {word.format(window=window, kind=kind)}  "
        taken += 1 + len(name) + len(shown)
        if taken <= width:
            pieces += [(" ", ""), (name, "strong"), (shown, "soft")]
    return line(*pieces)
