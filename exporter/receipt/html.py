"""A report as one page that needs nothing else: a sentence, the drawings, what to do first, then all the tables.

Owns the page. No script, nothing fetched: its own security policy allows one style sheet, by its hash. Whatever people
have named passes `canvas.safe`. Refuses to choose figures: tables come from `saying` and `summing`, whatever they hold.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256

from exporter.receipt.comparing import Comparison
from exporter.receipt.drawing import job, pair, sums
from exporter.receipt.drawing.canvas import TIMES, plain, safe
from exporter.receipt.drawing.steps import kind_of, losses, whole_of
from exporter.receipt.model import Layers, Part, Receipt
from exporter.receipt.saying import Row, Table
from exporter.receipt.style import HATCHES, STYLE
from exporter.receipt.sums.summary import Summary
from exporter.wording import NOTHING, amount, percent

CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'"
)
ADVICE = "What to do first"
"""The table that a job's page shows as cards."""
_BIGGEST = 3
_WHOLE = 0.995
"""Coverage that rounds to 100 % needs no word."""
_NUMBER = re.compile(r"[+\-]?\d.{0,19}")
"""With its unit."""
_TERMS = (
    ("GPU-hour", "one GPU, held for one hour, used or not"),
    ("GAU", "share of the time seen in which a GPU was held and working"),
    ("ECTR", "share of that in which it computed"),
    ("eMFU", "share of what it computed that was useful, measured against the most its tensor cores can do"),
    ("useful", f"GAU {TIMES} ECTR {TIMES} eMFU: what came of what was paid"),
    ("unresolved", "something ran, and what it was worth cannot be known: neither lost nor useful"),
    ("unobserved", "nobody saw it: it counts as paid, and in no ratio"),
    ("evidence", "measured by the hardware, reported by the job, told by its engine, or estimated"),
)


Found = Receipt | Comparison | Summary


def html(found: Found, tables: Sequence[Table]) -> str:
    """The whole file."""
    title = _title(found, tables)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{safe(title)}</title><style>{STYLE}</style></head><body>{HATCHES}"
        f"{_banner(found)}<main>"
        f"<header><h1><bdi>{safe(title)}</bdi></h1>{''.join(_header(found, tables))}</header>"
        f"{''.join(_body(found, tables))}{_footer()}</main></body></html>\n"
    )


def _banner(found: Found) -> str:
    of = (found.first, found.second) if isinstance(found, Comparison) else (found,)
    if not any(getattr(each, "simulated", False) for each in of):
        return ""
    return '<p class="banner">SIMULATED: made by a model. Nothing here was measured.</p>'


def _title(found: Found, tables: Sequence[Table]) -> str:
    if tables and _is_header(tables[0]):
        return tables[0].title
    match found:
        case Receipt():
            return f"Job {found.who.job_id}"
        case Comparison():
            return f"Job {found.first.who.job_id} and job {found.second.who.job_id}"
        case Summary():
            return f"GPU efficiency: {found.about}"


def _is_header(table: Table) -> bool:
    """It only says whose it is."""
    return bool(table.title and table.prose and not table.rows)


def _header(found: Found, tables: Sequence[Table]) -> Iterator[str]:
    yield f'<p class="headline">{_headline(found)}</p>'
    if tables and _is_header(tables[0]):
        facts = "".join(f"<li><bdi>{safe(line)}</bdi></li>" for line in tables[0].prose)
        yield f'<ul class="facts">{facts}</ul>'


def _body(found: Found, tables: Sequence[Table]) -> Iterator[str]:
    first, *others = _drawn(found)
    yield first
    if not isinstance(found, Comparison):
        yield _cards(found)
    grid = "".join(others)
    yield f'<div class="grid">{grid}</div>' if grid else ""
    for n, table in enumerate(tables):
        if not (n == 0 and _is_header(table)) and (isinstance(found, Comparison) or table.title != ADVICE):
            yield _section(table)


def _drawn(found: Found) -> list[str]:
    match found:
        case Receipt():
            return job(found)
        case Comparison():
            return pair(found)
        case Summary():
            return sums(found)


# -- one sentence --


def _headline(found: Found) -> str:
    match found:
        case Receipt():
            return _of_job(found)
        case Comparison():
            return _of_pair(found)
        case Summary():
            return _of_sum(found)


def _of_job(receipt: Receipt) -> str:
    size = [_many(len(receipt.nodes), "node"), _many(receipt.gpus, "GPU")]
    so_far = " so far" if receipt.when.running else ""
    share = _share(receipt.layers, receipt.coverage)
    return f"{_held(size, receipt.gpu_hours, receipt.money, receipt.currency)}{so_far}: {share} useful work."


def _of_sum(found: Summary) -> str:
    whole = found.whole
    size = [_many(whole.jobs, "job")]
    share = _share(whole.layers, whole.coverage)
    return f"{_held(size, whole.gpu_hours, whole.money, found.currency)}: {share} useful work."


def _held(size: Sequence[str], hours: float, money: float | None, currency: str) -> str:
    """Figures and their units stay in one line."""
    figures = [*size, f"{hours:,.2f} GPU-hours", *([] if money is None else [f"{money:,.2f} {currency}"])]
    return ", ".join(f'<span class="one">{safe(each)}</span>' for each in figures)


def _share(known: Layers, coverage: float | None) -> str:
    seen = " of what was seen" if coverage is not None and coverage < _WHOLE else ""
    return f"{_useful(known)}{seen} became"


def _many(count: float, what: str) -> str:
    return f"{amount(count)} {what}" + ("" if count == 1 else "s")


def _useful(known: Layers) -> str:
    if known.product is None:
        return "nobody knows how much"
    if known.floor is not None and percent(known.floor) != percent(known.product):
        return f"between {_loud(percent(known.floor))} and {_loud(percent(known.product))}"
    return _loud(percent(known.product))


def _loud(words: str) -> str:
    return f"<b>{words}</b>"


def _of_pair(found: Comparison) -> str:
    first, second = (f"job {safe(each.who.job_id)}" for each in (found.first, found.second))
    shares = _useful(found.first.layers), _useful(found.second.layers)
    said = f"Of <bdi>{first}</bdi> {shares[0]} became useful work, of <bdi>{second}</bdi> {shares[1]}"
    products = found.first.layers.product, found.second.layers.product
    if products[0] is None or products[1] is None:
        return f"{said}."
    grown = round(100 * (products[1] - products[0]), 1)
    return f"{said}: {abs(grown):.1f} points {'more' if grown > 0 else 'less'}." if grown else f"{said}: as much."


# -- what to do --


def _cards(found: Receipt | Summary) -> str:
    largest = sorted(losses(whole_of(found)), key=lambda part: -part.gpu_hours)[:_BIGGEST]
    if not largest:
        return f"<section><h2>{ADVICE}</h2><p>Nothing was lost.</p></section>" if found.parts else ""
    cards = "".join(_card(part, found.currency) for part in largest)
    return f'<section><h2>{ADVICE}</h2><ol class="leaks">{cards}</ol></section>'


def _card(part: Part, currency: str) -> str:
    much = [f"<b>{percent(part.share)}</b>", f"{part.gpu_hours:,.2f} GPU-hours"]
    much += [] if part.money is None else [f"{part.money:,.2f} {safe(currency)}"]
    known = (("team", part.team), ("watch", part.watch))
    facts = "".join(f"<dt>{word}</dt><dd>{safe(said)}</dd>" for word, said in known if said)
    return (
        f'<li class="leak {kind_of(part)}"><h3>{safe(plain(part.name))}</h3>'
        f'<p class="much">{", ".join(f"<span>{each}</span>" for each in much)}</p>'
        + (f'<p class="do">{safe(part.fix[:1].upper() + part.fix[1:])}</p>' if part.fix else "")
        + (f"<dl>{facts}</dl>" if facts else "")
        + "</li>"
    )


# -- tables --


def _section(table: Table) -> str:
    if not (table.rows or table.prose):
        return ""
    title = f"<h2>{safe(table.title)}</h2>" if table.title else ""
    return f"<section>{title}{_table(table) if table.rows else ''}{_prose(table.prose)}</section>"


def _table(table: Table) -> str:
    """A region of its own that scrolls where it must, so that the page does not."""
    name = safe(table.title or (table.head[0] if table.head else "") or "figures")
    numeric = _numeric(table.rows)
    head = "" if not table.head else f"<thead><tr>{''.join(_heads(table.head, numeric))}</tr></thead>"
    rows = "".join(f"<tr>{''.join(_cells(row, numeric))}</tr>" for row in table.rows)
    kind = "" if table.head else ' class="pairs"'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table{kind}>{head}'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _numeric(rows: Iterable[Row]) -> set[int]:
    """Columns after the first that have figures, and nothing else."""
    rows = tuple(rows)
    columns = range(1, max(len(row) for row in rows))
    return {n for n in columns if _all_figures([row[n] for row in rows if len(row) > n])}


def _all_figures(cells: Sequence[str]) -> bool:
    told = [cell for cell in cells if cell not in ("", NOTHING)]
    return bool(told) and all(_NUMBER.fullmatch(cell) for cell in told)


def _heads(cells: Row, numeric: set[int]) -> Iterator[str]:
    for n, cell in enumerate(cells):
        kind = ' class="n"' if n in numeric else ""
        yield f'<th scope="col"{kind}><bdi>{safe(cell)}</bdi></th>' if cell else f"<td{kind}></td>"


def _cells(cells: Row, numeric: set[int]) -> Iterator[str]:
    for n, cell in enumerate(cells):
        kind = ' class="n"' if n in numeric else ""
        yield f"<td{kind}><bdi>{safe(cell)}</bdi></td>" if n else f'<th scope="row"><bdi>{_broken(cell)}</bdi></th>'


def _broken(cell: str) -> str:
    """Where it may be broken: names of leaks are long, a phone is not wide."""
    return safe(cell).replace("_", "_<wbr>")


def _prose(lines: Sequence[str]) -> str:
    """Sentences; those that are set in belong to the one above."""
    if not lines:
        return ""
    items = (f"<li{' class=sub' if line[:1] == ' ' else ''}><bdi>{safe(line.strip())}</bdi></li>" for line in lines)
    return f'<ul class="prose">{"".join(items)}</ul>'


def _footer() -> str:
    terms = "".join(f"<dt>{term}</dt><dd>{words}</dd>" for term, words in _TERMS)
    return f"<footer><h2>How to read this</h2><dl>{terms}</dl><p>Written by gpu-efficiency report.</p></footer>"
