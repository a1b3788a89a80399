"""One page for a person at three in the morning: the node in a sentence, where the hour went, GPU by GPU, job by job.

Owns the order and the words of the node's page. Everything people may have named passes `words.text`.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from exporter.core.leaks import LEAKS
from exporter.core.statement import Event, Statement
from exporter.http.account import AccountOut, AccountsOut
from exporter.http.api import GpuOut, GpusOut, JobsOut, NodeOut, WindowOut
from exporter.http.appearance import MARKS
from exporter.http.cards import cards
from exporter.http.drawing import bar, worst
from exporter.http.fall import waterfall
from exporter.http.frame import alarm, document, simulated
from exporter.http.lives import jobs_of, whole
from exporter.http.receipts import event_list, job_body, receipt_list, unknown_job
from exporter.http.tables import account_table, job_table
from exporter.http.words import TIMES, brief, clock, duration, money, ratio, text

_HOUR = 3600
_WHOLE = 0.995
"""Coverage that rounds to 100 % needs no note."""
_LEAKS = tuple(leak.name for leak in LEAKS)
_JUMPS = (
    '<nav class="jump" aria-label="on this page"><a href="#gpus">GPUs</a> <a href="#jobs">jobs</a> '
    '<a href="#receipts">receipts</a> <a href="#events">events</a></nav>'
)
RECEIPTS_SHOWN = 20
EVENTS_SHOWN = 40


class Past(Struct, frozen=True, kw_only=True):
    """What the store says, as far as the page shows it."""

    kept: bool = False
    """False: there is no store."""
    statements: Sequence[Statement] = ()
    events: Sequence[Event] = ()
    trouble: str = ""
    """Why the store cannot be read; empty: it can."""


class View(Struct, frozen=True, kw_only=True):
    """What was last seen of the node, and what is kept of its past."""

    accounts: AccountsOut
    gpus: GpusOut
    jobs: JobsOut
    past: Past = Past()


def render(view: View | None, *, problem: str = "") -> str:
    """The whole page. `view` is None before anything was seen; `problem` says why it is not live."""
    if view is None:
        return document("this node", alarm("No data. ", problem), sampled_at=None, live=False, stale=True)
    node = view.gpus.node
    body = _body(view, problem=problem)
    live = not problem
    return document(node.host or "this node", body, sampled_at=node.sampled_at, live=live, stale=not live)


def render_job(job_id: str, lives: Sequence[Statement], *, now: float | None, kept: bool, problem: str = "") -> str:
    """A job's own page; without statements the one that says so. `now`: Unix seconds of the newest sample."""
    running = any(life.running for life in lives)
    stale = bool(problem) and running
    body = job_body(lives, now=now or whole(lives).end) if lives else unknown_job(job_id, kept=kept)
    banner = alarm("Not live. ", problem) if stale else ""
    return document(f"Job {job_id}", banner + body, sampled_at=now, live=running and not stale, stale=stale)


def _body(view: View, *, problem: str) -> str:
    gpus, past, was = view.gpus, view.past, "was " if problem else ""
    node, now = gpus.node, gpus.node.sampled_at
    asof = f"What follows is how things stood at {clock(now)}. "
    over = [lives for lives in jobs_of(past.statements) if not whole(lives).running][:RECEIPTS_SHOWN]
    return (
        (simulated() if node.simulated else "")
        + (alarm("Not live. " + asof, problem) if problem else "")
        + "<main>"
        + _header(node, _boards(gpus.gpus))
        + (_summary(view, was=was) if gpus.gpus else _no_gpus(node))
        + cards(gpus.gpus, was=was)
        + job_table(view.jobs.jobs)
        + receipt_list(over, now=now, kept=past.kept, trouble=past.trouble)
        + event_list(past.events, now=now, kept=past.kept and not past.trouble)
        + _footer(node)
        + "</main>"
    )


def _boards(gpus: Iterable[GpuOut]) -> int:
    """GPUs that are paid for: the instances of a board are part of it."""
    return sum(1 for gpu in gpus if not gpu.parent) or 1


def _header(node: NodeOut, gpus: int) -> str:
    facts = [
        f"source {text(node.source) or 'none'}",
        f"owners from {text(node.scheduler) or 'nobody'}",
        f'sampled <span class="ago">{brief(node.age_seconds)} ago, </span>{clock(node.sampled_at)}',
        f"every {node.interval_seconds:g} s" if node.interval_seconds else "",
    ]
    error = f'<p class="note">Last error: {text(node.last_error)}</p>' if node.last_error else ""
    count = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return (
        f"<header><h1><bdi>{text(node.host) or 'this node'}</bdi> <small>{count}</small></h1>"
        f'<p class="mute">{" · ".join(filter(None, facts))}</p>{error}{_JUMPS}</header>'
    )


def _no_gpus(node: NodeOut) -> str:
    return f'<p class="sentence">No GPU in the inventory of source {text(node.source) or "none"}.</p>'


def _summary(view: View, *, was: str) -> str:
    """The three layers multiplied out, beside what nvidia-smi would have said; what it costs; where it went."""
    account = view.accounts.last_hour
    hour = account.window
    span = hour.seconds / _boards(view.gpus.gpus)
    when = "hour" if span >= _HOUR - 60 else duration(span)
    return (
        f'<section class="summary" data-key="summary"><p class="sentence">Of what was paid in the last {when}, '
        f"<b>{ratio(hour, 'gau')}</b> was allocated and working {TIMES} "
        f"<b>{ratio(hour, 'ectr')}</b> computing {TIMES} <b>{ratio(hour, 'emfu')}</b> useful = "
        f'<b class="is">{ratio(hour, "product")}</b>. '
        f"nvidia-smi shows <b>{ratio(hour, 'driver_utilization')}</b>.</p>{_price(view.accounts)}"
        f"{bar(hour, height=22)}{worst(hour)}{_caveats(hour)}{_states(view.gpus.gpus, was=was)}</section>"
        f'<section data-key="fall"><h2>Where the last {when} went</h2>{waterfall(hour, account.money)}</section>'
        f"{account_table(view.accounts)}"
    )


def _price(accounts: AccountsOut) -> str:
    """What an hour of the last one lost: in GPUs, and in money where a price is known."""
    account = accounts.last_hour
    window = account.window
    if not window.seconds:
        return ""
    share = sum(window.leaks[name] for name in _LEAKS) / window.seconds
    lost = _lost_hourly(account, accounts)
    cost = f", <b>{money(lost)}</b> of {money(accounts.prices)} an hour" if lost else ""
    count = f"{accounts.gpus:.3g} GPU{'' if accounts.gpus == 1 else 's'}"
    return f'<p class="price">Lost: the work of <b>{share * accounts.gpus:.1f}</b> of {count}{cost}.</p>'


def _lost_hourly(account: AccountOut, accounts: AccountsOut) -> Mapping[str, float]:
    """By currency, at the pace of the window; empty where that is not known."""
    hours = account.window.seconds / _HOUR / accounts.gpus if accounts.gpus else 0.0
    sums = {currency: sum(spent[name] for name in _LEAKS) for currency, spent in (account.money or {}).items()}
    return {currency: amount / hours for currency, amount in sums.items()} if hours else {}


def _states(gpus: Iterable[GpuOut], *, was: str) -> str:
    """Which GPUs are in which state, the worst first."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        found.setdefault(gpu.state, []).append(text(gpu.index) or "?")
    items = "".join(
        f'<li class="{state}" data-key="{state}"><b><span aria-hidden="true">{mark}</span> {was}{state}</b> '
        f"GPU {', '.join(found[state])}</li>"
        for state, mark in MARKS.items()
        if state in found
    )
    return f'<ul class="states" aria-label="states">{items}</ul>'


def _caveats(hour: WindowOut) -> str:
    notes = []
    if hour.coverage is not None and hour.coverage < _WHOLE:
        notes.append(f"{ratio(hour, 'coverage')} of the paid time was seen; the percentages are of that.")
    if hour.leaks["unresolved"]:
        notes.append(
            f"{duration(hour.leaks['unresolved'])} of kernel time has no known worth; were it worth nothing, "
            f"the product would be {ratio(hour, 'floor')}."
        )
    return f'<p class="note">{" ".join(notes)}</p>' if notes else ""


def _footer(node: NodeOut) -> str:
    why = f"<p>Source {text(node.source_reason, limit=600)}.</p>" if node.source_reason else ""
    return (
        f"<footer>{why}<p>Without reports from the workload, useful is what the hardware can have done at best: "
        f"tensor activity {TIMES} clock. It is an upper bound of MFU.</p>"
        '<p><a href="/metrics">metrics</a> · as JSON: <a href="/api/v1/node">node</a>, '
        '<a href="/api/v1/gpus">GPUs</a>, '
        '<a href="/api/v1/jobs">jobs</a>, <a href="/api/v1/receipts">receipts</a>, <a href="/api/v1/events">events</a>'
        f' · <a href="/openapi.json">OpenAPI</a> · version {text(node.version)}</p></footer>'
    )
