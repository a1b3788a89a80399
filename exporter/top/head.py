"""The first lines: each node in an equation, as one bar, and what its money leaks through; or that it is not there.

Owns these lines. Several nodes have one line each.
"""

from exporter.top.answers import Gpus, Window
from exporter.top.drawn import Line, Piece, apart, fitted, line
from exporter.top.seen import Seen, View
from exporter.top.signs import Signs, cells, padded
from exporter.top.words import LAYER, clock, percent, plain, share

_ORDER = ("useful", "emfu", "ectr", "gau", "unresolved", "unobserved")
_NODE_BAR = 24


def title(seen: Seen, name: str, more: str, view: View, *, width: int) -> Line:
    """The first line above a page of one row."""
    return apart([(f" {name}", "strong")], [(more, "soft"), *_marks(seen, view)], width, view.signs)


def head(view: View, window: str, width: int, *, height: int) -> list[Line]:
    """Lines for the top of the screen, in at most so many."""
    if view.many:
        return _many(view, window, width, height)
    return _one(view.nodes[0], view, window, width)[: max(1, height)]


def _one(seen: Seen, view: View, window: str, width: int) -> list[Line]:
    signs, trouble = view.signs, seen.trouble(view.now)
    if seen.gpus is None:
        return [
            apart([(f" {view.names[0]}", "strong")], [(clock(view.wall) + " ", "soft")], width, signs),
            fitted(line((f" {signs.name(trouble) or 'asking for the first time ...'}", "bad" if trouble else "soft")),
                   width, signs),
        ]  # fmt: skip
    said: Window = getattr(seen.gpus.node, window)
    left: list[Piece | str] = [(f" {view.names[0]}", "strong"), f"  {_boards(seen.gpus, signs)}"]
    first = apart(left, _marks(seen, view), width, signs)
    equation = fitted(line((" ", ""), *_equation(said, signs), *_beside(said)), width, signs)
    drawn = line(" ", *bar(said, width - 2, signs))
    words = fitted(line(" ", *_lost(seen, window, signs)), width, signs)
    if trouble:
        return [first, fitted(line((f" {signs.name(trouble)}", "bad")), width, signs), equation, drawn, words]
    warned = seen.gpus.node.last_error
    more = [fitted(line((f" last error: {signs.name(warned)}", "bad")), width, signs)] if warned else []
    return [first, equation, drawn, words, *more]


def _marks(seen: Seen, view: View) -> list[Piece | str]:
    """What must not be overlooked, and the time."""
    simulated: list[Piece | str] = [("SIMULATED  ", "bad")] if seen.node and seen.node.simulated else []
    old: list[Piece | str] = [] if seen.live else [("OLD  ", "bad")]
    return [*simulated, *old, (clock(view.wall) + " ", "soft")]


def _boards(gpus: Gpus, signs: Signs) -> str:
    models = {gpu.model.removeprefix("NVIDIA ") for gpu in gpus.gpus}
    count = len(gpus.gpus)
    kind = f" {models.pop()}" if len(models) == 1 else ""
    return signs.name(f"{count} GPU{'s' if count != 1 else ''}{f' {signs.dot}{kind}' if kind else ''}")


def _equation(said: Window, signs: Signs) -> list[Piece]:
    return [
        (f"{percent(said, 'gau')} allocated", ""),
        (f" {signs.times} {percent(said, 'ectr')} computing", ""),
        (f" {signs.times} {percent(said, 'emfu')} useful = ", ""),
        (percent(said, "product"), "strong"),
    ]


def _beside(said: Window) -> list[Piece]:
    coverage = said.coverage
    unseen = coverage is not None and coverage < 1
    return [
        (f"   nvidia-smi {percent(said, 'driver_utilization')}", "soft"),
        (f"   {share(1 - (coverage or 0))} % not seen" if unseen else "", "bad"),
    ]


def _lost(seen: Seen, window: str, signs: Signs) -> list[Piece]:
    said: Window = getattr(seen.node, window)
    losses = said.losses()
    if not losses:
        return [("nothing leaks" if said.seconds else "no time yet", "soft")]
    named: list[Piece] = [(f"{share(said.lost())} % of the money leaks{_money(seen, window)}: ", "strong")]
    for place, (name, part) in enumerate(losses):
        comma = ", " if place else ""
        named += [(comma, ""), (f"{share(part)} % {signs.name(plain(name))}", LAYER.get(name, ""))]
    return named


def _money(seen: Seen, window: str) -> str:
    """What an hour costs and how much of that leaks, where prices are known."""
    lost = seen.accounts.lost(window) if seen.accounts else None
    return "" if lost is None else f", {lost[0]:,.2f} of {lost[1]:,.2f} {lost[2]} an hour"


def bar(said: Window, width: int, signs: Signs) -> list[Piece]:
    """Where the time went, useful work first; no column is left over."""
    sums = dict.fromkeys(_ORDER, 0.0)
    for name in said.leaks:
        sums[LAYER.get(name, "unresolved")] += said.share(name)
    whole = sum(sums.values())
    if not whole or width <= 0:
        return [(signs.rule * max(0, width), "soft")]
    pieces, upto, drawn = list[Piece](), 0.0, 0
    for layer, part in sums.items():
        upto += part
        end = round(width * upto / whole)
        pieces.append((signs.fills[layer] * (end - drawn), layer))
        drawn = end
    return pieces


def _many(view: View, window: str, width: int, height: int) -> list[Line]:
    signs, count = view.signs, sum(len(seen.gpus.gpus) for seen in view.nodes if seen.gpus)
    silent = sum(1 for seen in view.nodes if seen.problem)
    left: list[Piece | str] = [(f" {len(view.nodes)} nodes", "strong"), f"  {count} GPUs"]
    if silent:
        left.append((f"   {silent} NOT ANSWERING", "bad"))
    lines = [apart(left, [(clock(view.wall) + " ", "soft")], width, signs)]
    room = max(1, height - 1)
    shown = len(view.nodes) if len(view.nodes) <= room else room - 1
    ordered = sorted(range(len(view.nodes)), key=lambda place: not view.nodes[place].problem)
    widest = min(24, max(cells(name) for name in view.names))
    picked = sorted(ordered[:shown])
    lines += [_node(view.nodes[place], view, place, window=window, width=width, named=widest) for place in picked]
    if shown < len(view.nodes):
        lines.append(line((f" and {len(view.nodes) - shown} more nodes", "soft")))
    return lines


def _node(seen: Seen, view: View, place: int, *, window: str, width: int, named: int) -> Line:
    """One node in one line."""
    signs = view.signs
    name = padded(fitted(line(view.names[place]), named, signs).text, named)
    if seen.problem or seen.gpus is None:
        told = signs.name(seen.trouble(view.now)) or "asking for the first time ..."
        return fitted(line(f" {name}  ", (told, "bad" if seen.problem else "soft")), width, signs)
    said: Window = getattr(seen.gpus.node, window)
    times = f" {signs.times} "
    figures = times.join(f"{percent(said, layer):>5}" for layer in ("gau", "ectr", "emfu"))
    mark = ("SIMULATED  ", "bad") if seen.gpus.node.simulated else ("", "")
    room = width - named - len(figures) - len(mark[0]) - 15
    drawn = bar(said, min(_NODE_BAR, room), signs) if room > 8 else []  # noqa: PLR2004  too short to tell anything
    equation: list[Piece] = [(f"{figures} = ", ""), (f"{percent(said, 'product'):>5}  ", "strong")]
    return fitted(line(f" {name}  ", *equation, mark, *drawn, "  ", *_lost(seen, window, signs)), width, signs)
