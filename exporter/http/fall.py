"""The waterfall: from what was paid down to what was useful, a row a loss, and in each row what to do about it.

Owns the order of the rows and their words. Every row opens without a script: it is a `<details>`.
"""

from collections.abc import Iterator, Mapping
from html import escape

from exporter.core.leaks import LAYER_OF, LEAKS, NAMES
from exporter.http.api import WindowOut
from exporter.http.appearance import COLOURS, LOWERS
from exporter.http.drawing import step, swatch
from exporter.http.words import hours, money, percent, plain

_LAYER = dict(zip(NAMES, LAYER_OF, strict=True))
_BY_NAME = {leak.name: leak for leak in LEAKS}
_TAKES = {leak.name: leak.takes for leak in LEAKS} | {
    "useful": "GPU-seconds at 100 % of peak that advanced a model",
    "unresolved": "kernel time of a board or a source that cannot say what it was worth",
    "unobserved": "no trustworthy telemetry",
}
_AFTER = {"unobserved": "seen", "gau": "allocated and working", "ectr": "computing"}
"""What is left when the losses of a layer are gone."""
Costs = Mapping[str, Mapping[str, float]]
"""Money by currency, then by leak."""


def waterfall(window: WindowOut, costs: Costs | None) -> str:
    """Rows of a window; without `costs` there is no column of money."""
    if not window.seconds:
        return '<p class="none">no time yet</p>'
    head = "".join(f"<span>{word}</span>" for word in ("share", "GPU-hours", *(("money",) if costs else ())))
    rows = "".join(_rows(window, costs or {}))
    return (
        f'<ol class="fall{" priced" if costs else ""}"><li class="head" aria-hidden="true"><span></span><span></span>'
        f"{head}</li>{rows}</ol>"
    )


def _rows(window: WindowOut, costs: Costs) -> Iterator[str]:
    gone = dict.fromkeys(NAMES, 0.0)
    yield _sum_row("paid", window, costs, gone)
    for layer in ("unobserved", "gau", "ectr", "unresolved", "emfu"):
        lost = sorted(((window.leaks[name], name) for name in NAMES if _LAYER[name] == layer), reverse=True)
        for seconds, name in lost:
            gone[name] = seconds
            if seconds > 0:
                yield _leak_row(name, _left(window, gone), window, costs)
        if layer in _AFTER and (layer != "unobserved" or lost[0][0] > 0):
            yield _sum_row(_AFTER[layer], window, costs, gone)
    yield _leak_row("useful", 0.0, window, costs)


def _left(window: WindowOut, gone: Mapping[str, float]) -> float:
    """Share of what was paid that is left. Rounding may take it a little below nothing."""
    return max(0.0, 1.0 - sum(gone.values()) / window.seconds)


def _sum_row(word: str, window: WindowOut, costs: Costs, gone: Mapping[str, float]) -> str:
    share = _left(window, gone)
    sums = {
        currency: sum(amount for name, amount in by_leak.items() if not gone[name])
        for currency, by_leak in costs.items()
    }
    return (
        f'<li class="sum" data-key="sum-{word.replace(" ", "-")}"><span class="name">{word}</span>'
        f"{step(0.0, share, 'currentColor')}{_figures(share, share * window.seconds, sums)}</li>"
    )


def _leak_row(name: str, begin: float, window: WindowOut, costs: Costs) -> str:
    seconds = window.leaks[name]
    share = seconds / window.seconds
    sums = {currency: by_leak[name] for currency, by_leak in costs.items()}
    leak = _BY_NAME.get(name)
    hint = f' title="{escape(leak.fix)}"' if leak is not None else ""
    return (
        f'<li class="{"is" if name == "useful" else "leak"}" data-key="leak-{name}"><details><summary{hint}>'
        f'<span class="name">{swatch(name)}{plain(name)}</span>{step(begin, share, COLOURS[name])}'
        f"{_figures(share, seconds, sums)}</summary>{_advice(name)}</details></li>"
    )


def _figures(share: float, seconds: float, sums: Mapping[str, float]) -> str:
    spent = f'<span class="n money">{money(sums)}</span>' if sums else ""
    return f'<span class="n">{percent(share)}</span><span class="n hours">{hours(seconds)}</span>{spent}'


def _advice(name: str) -> str:
    """What the loss is, what to do first, what to watch, and who can."""
    leak = _BY_NAME.get(name)
    if leak is None:
        return f'<p class="advice">{escape(_TAKES[name][:1].upper() + _TAKES[name][1:])}.</p>'
    lowers = f" It lowers <i>{LOWERS[leak.layer]}</i>." if leak.layer in LOWERS else ""
    return (
        f'<p class="advice">{escape(leak.takes[:1].upper() + leak.takes[1:])}.{lowers} '
        f"<b>First thing to do:</b> {escape(leak.fix)}. <b>Watch:</b> {escape(leak.watch)}. "
        f"<b>Who:</b> {escape(leak.team)}. <b>Evidence:</b> {escape(leak.evidence)}.</p>"
    )


def remedies(window: WindowOut, costs: Costs) -> str:
    """The three largest leaks, and what to do first about each."""
    named = sorted(((seconds, name) for name, seconds in window.leaks.items() if name in _BY_NAME), reverse=True)[:3]
    items = "".join(
        f"<li>{swatch(name)}<b>{plain(name)}</b> {percent(seconds / window.seconds)}, {hours(seconds)} GPU-hours"
        f"{_cost(costs, name)}: {escape(_BY_NAME[name].fix)}.</li>"
        for seconds, name in named
        if seconds > 0
    )
    return f'<ol class="remedies" aria-label="the largest losses and what to do">{items}</ol>' if items else ""


def _cost(costs: Costs, name: str) -> str:
    spent = money({currency: by_leak[name] for currency, by_leak in costs.items()})
    return f", {spent}" if spent else ""
