"""What the page says of jobs that are over, and a job's own page: its receipt as this node knows it.

Owns the words. Refuses the other nodes of a job: where it ran on more, the page says so and names the command that asks
them all.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from urllib.parse import quote

from exporter.core.leaks import NAMES
from exporter.core.model import SECOND
from exporter.core.progress import ProgressView
from exporter.core.served import ServiceView
from exporter.core.statement import Event, Statement
from exporter.http.drawing import bar, timeline
from exporter.http.fall import Costs, remedies, waterfall
from exporter.http.frame import simulated
from exporter.http.lives import course, thinned, whole, window_of_job
from exporter.http.tables import heads, table
from exporter.http.words import (
    TIMES,
    duration,
    energy,
    hours,
    job_path,
    moment,
    money,
    percent,
    plain,
    ratio,
    text,
)

_POINTS = 240
"""Of a course; a screen shows no more."""
_DAY = 86400
_EVENTS_AT_ONCE = 8
_KINDS = {"hung": "hung", "zombie": "became a zombie", "xid": "told a critical error (Xid)"}


def receipt_list(jobs: Iterable[Sequence[Statement]], *, now: float, kept: bool, trouble: str) -> str:
    """Jobs that are over, the latest first; a click opens one."""
    rows = "".join(_row(whole(lives), now=now) for lives in jobs)
    note = ""
    if trouble:
        note = f'<p class="note">The store cannot be read now: {text(trouble, limit=300)}.</p>'
    elif not kept:
        note = '<p class="note">Nothing is kept here: jobs are forgotten a while after their end ([history] file).</p>'
    elif not rows:
        note = '<p class="note">No job has ended here yet.</p>'
    listed = f'<div class="receipts">{rows}</div>' if rows else ""
    return f'<section id="receipts"><h2>Receipts of jobs that are over</h2>{listed}{note}</section>'


def _row(job: Statement, *, now: float) -> str:
    window, path, owner = window_of_job(job), job_path(job.owner.job_id), job.owner
    name = f" <small><bdi>{text(owner.name)}</bdi></small>" if owner.name else ""
    who = text(owner.user or owner.namespace or owner.account)
    spent = f"{money(job.money)}, " if job.money else ""
    return (
        f'<details class="receipt" data-key="job-{text(owner.job_id)}"><summary>'
        f'<span class="name"><b><bdi>{text(owner.job_id)}</bdi></b>{name}</span>'
        f'<span class="who"><bdi>{who}</bdi></span>'
        f'<span class="when">{_ran(job, now=now)}</span>{bar(window, height=10)}'
        f'<span class="n">{ratio(window, "product")} useful</span>'
        f'<span class="n cost">{spent}{hours(window.seconds)} GPU-hours</span></summary>'
        f'<div class="inside" data-from="{path}"><a href="{path}">The receipt of {text(owner.job_id)}</a></div>'
        "</details>"
    )


def _ran(job: Statement, *, now: float) -> str:
    """When, and for how long."""
    if job.running:
        return f"runs since {moment(job.start, now=now)}"
    return f"ended {moment(job.end, now=now)} after {duration(job.end - job.start)}"


def job_body(lives: Sequence[Statement], *, now: float) -> str:
    """A job's own page."""
    job = whole(lives)
    owner = job.owner
    name = f" <small><bdi>{text(owner.name)}</bdi></small>" if owner.name else ""
    return (
        (simulated() if job.simulated else "")
        + '<main><nav><a href="/">← this node</a></nav>'
        + f"<header><h1>Job <bdi>{text(owner.job_id)}</bdi>{name}</h1>"
        + f'<p class="mute">{" · ".join(_about(job, now=now))}</p></header>'
        + _receipt(job, lives, now=now)
        + "</main>"
    )


def unknown_job(job_id: str, *, kept: bool) -> str:
    """The page of a job that this node does not know."""
    why = "or is older than what is kept" if kept else "or ended a while ago, and nothing is kept here"
    return (
        '<main><nav><a href="/">← this node</a></nav><header><h1>No such job here</h1></header>'
        f'<p class="sentence">Job <bdi>{text(job_id)}</bdi> has held no GPU of this node, {why}.</p></main>'
    )


def _about(job: Statement, *, now: float) -> list[str]:
    owner = job.owner
    told = [
        ("user", owner.user), ("account", owner.account), ("partition", owner.partition),
        ("namespace", owner.namespace), ("team", owner.team), ("on", job.node),
    ]  # fmt: skip
    return [_ran(job, now=now), *(f"{word} <bdi>{text(value)}</bdi>" for word, value in told if value)]


def _receipt(job: Statement, lives: Sequence[Statement], *, now: float) -> str:
    window, costs, asked = window_of_job(job), costs_of(job), quote(job.owner.job_id, safe="")
    return (
        f'<article id="receipt">{_sentence(job)}{bar(window, height=22)}{_facts(job)}{_elsewhere(job)}'
        f"{_section('What to do first', remedies(window, costs))}"
        f"{_section('Where the time went', waterfall(window, costs))}"
        f"{_section('Over time', _course(lives, now=now))}"
        f"{_section('Its own word', _own_word(job))}{_section('Ranks', _ranks(job.training))}"
        f'<p class="note"><a class="own" href="{job_path(job.owner.job_id)}">as a page of its own</a> '
        f'<a href="/api/v1/receipts?job_id={asked}">as JSON</a></p></article>'
    )


def _section(title: str, body: str) -> str:
    return f'<section data-key="{title.replace(" ", "-")}"><h2>{title}</h2>{body}</section>' if body else ""


def _sentence(job: Statement) -> str:
    window, spent = window_of_job(job), money(job.money)
    paid = f"{hours(window.seconds)} GPU-hours" + (f" ({spent})" if spent else "")
    return (
        f'<p class="sentence">Of {paid} paid here, <b>{ratio(window, "gau")}</b> was allocated and working {TIMES} '
        f"<b>{ratio(window, 'ectr')}</b> computing {TIMES} <b>{ratio(window, 'emfu')}</b> useful = "
        f'<b class="is">{ratio(window, "product")}</b>.</p>'
    )


def _facts(job: Statement) -> str:
    joules, useful = sum(job.energy.values()), job.energy.get("useful", 0.0)
    happened = [f"{times} {TIMES} {_KINDS.get(kind, plain(kind))}" for kind, times in job.happened.items() if times]
    facts = [
        ("GPUs", f"{len(job.gpus)} here ({text(', '.join(sorted(job.gpus.values())))})" if job.gpus else ""),
        ("board", text(", ".join(job.models))),
        ("energy", f"{energy(joules)}, {percent(useful / joules)} of it useful" if joules else ""),
        ("first work", "" if job.first_work is None else f"after {duration(job.first_work)}"),
        ("seen", percent(job.layers.coverage) if job.layers.coverage not in (None, 1.0) else ""),
        ("a GPU of it", ", ".join(happened)),
        ("would have fitted in", text(job.fitting)),
    ]
    shown = "".join(f"<div><dt>{term}</dt><dd>{told}</dd></div>" for term, told in facts if told)
    return f'<dl class="facts">{shown}</dl>'


def _elsewhere(job: Statement) -> str:
    """Where this node is not all of the job."""
    if job.owner.nodes <= 1:
        return ""
    return (
        f'<p class="note">This is one node\'s part of a job of {job.owner.nodes} nodes; '
        f"<code>gpu-efficiency report {text(job.owner.job_id)}</code> joins them.</p>"
    )


def costs_of(job: Statement) -> Costs:
    """Its money by currency and leak, by time: a job's GPUs cost the same."""
    if not job.paid:
        return {}
    return {
        currency: {name: amount * job.parts.get(name, 0) / job.paid for name in NAMES}
        for currency, amount in job.money.items()
    }


def _course(lives: Sequence[Statement], *, now: float) -> str:
    """Two points make no course."""
    stretches = thinned(course(lives), _POINTS)
    return timeline(stretches, now=now) if len(stretches) > 1 else ""


def _own_word(job: Statement) -> str:
    facts = [*_training(job.training), *_serving(job.service)]
    shown = "".join(f"<div><dt>{term}</dt><dd>{told}</dd></div>" for term, told in facts if told)
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def _training(told: ProgressView | None) -> list[tuple[str, str]]:
    if told is None:
        return []
    phases = [f"{plain(name)} {duration(spent / SECOND)}" for name, spent in told.phases if spent]
    return [
        ("run", text(told.run)),
        ("step", "" if told.step is None else f"{told.step:,}"),
        ("steps made here", f"{told.steps:,}" if told.steps else ""),
        ("of them again", f"{told.rework_steps:,}" if told.rework_steps else ""),
        ("goodput", "" if told.goodput is None else percent(told.goodput)),
        ("tokens", f"{told.tokens:,.0f}" if told.tokens else ""),
        ("checkpoints", f"{told.checkpoints:,}" if told.checkpoints else ""),
        ("restarts", f"{told.restarts:,}, {duration(told.recovery / SECOND)} to recover" if told.restarts else ""),
        ("loss", "" if told.loss is None else f"{told.loss:.4g}"),
        ("quality", "" if told.quality is None else f"{text(told.quality[0])} {told.quality[1]:.4g}"),
        ("its time", ", ".join(phases)),
    ]


def _serving(said: ServiceView | None) -> list[tuple[str, str]]:
    if said is None:
        return []
    return [
        ("engine", text(said.engine)),
        ("tokens", ", ".join(f"{count:,.0f} {plain(kind)}" for kind, count in said.tokens if count)),
        ("preemptions", f"{said.preemptions:,.0f}" if said.preemptions else ""),
        ("latest batch", "" if said.fill is None else f"{percent(said.fill)} full"),
        ("KV cache", "" if said.kv_use is None else percent(said.kv_use)),
    ]


def _ranks(told: ProgressView | None) -> str:
    """The slowest first: it is the one that the others wait for."""
    if told is None or not told.ranks:
        return ""
    rows = "".join(
        f'<tr data-key="rank-{text(rank)}"><th scope="row">{text(rank)}</th><td class="n">{1000 * whole_step:,.0f}</td>'
        f'<td class="n">{1000 * busy:,.0f}</td></tr>'
        for rank, whole_step, busy in sorted(told.ranks, key=lambda row: -row[2])
    )
    return table("Ranks", heads(("rank", False), ("a step, ms", True), ("at work in it, ms", True)), rows)


def event_list(events: Sequence[Event], *, now: float, kept: bool) -> str:
    """What happened on the node, the latest first; the older ones behind a click."""
    if not events:
        return "" if not kept else '<section id="events"><h2>Events</h2><p class="note">None yet.</p></section>'
    groups = [list(group) for _, group in groupby(events, lambda one: (one.at, one.kind, one.job_id, one.text))]
    latest, older = groups[:_EVENTS_AT_ONCE], groups[_EVENTS_AT_ONCE:]
    more = f"<details><summary>{len(older)} before</summary>{_events(older, now=now)}</details>" if older else ""
    return f'<section id="events"><h2>Events</h2>{_events(latest, now=now)}{more}</section>'


def _events(groups: Iterable[Sequence[Event]], *, now: float) -> str:
    return f'<ol class="events">{"".join(_event(group, now=now) for group in groups)}</ol>'


def _event(group: Sequence[Event], *, now: float) -> str:
    """What several GPUs told at once, told once."""
    event, gpus = group[0], [text(one.gpu) for one in group if one.gpu]
    jobs = " ".join(
        f'<a href="{job_path(name)}"><bdi>{text(name)}</bdi></a>' for name in filter(None, event.job_id.split(","))
    )
    where = f"GPU {', '.join(sorted(gpus))}" if gpus else ""
    kind = "" if event.kind.endswith("_over") else f"<b>{plain(event.kind)}</b> "
    words = text(event.text, limit=300) if " " in event.text else plain(event.text or event.kind)
    return (
        f'<li data-key="{event.at:.3f}-{text(event.kind)}-{text(event.uuid)}">{moment(event.at, now=now)} '
        f"{kind}<span>{where} {jobs}</span> <span>{words}</span></li>"
    )
