"""One page for a person at three in the morning: the node in a sentence, where the hour went, GPU by GPU, job by job.

Owns the words. No script, nothing fetched from elsewhere; everything people may have named passes `words.text`. A zero,
a thing not seen and a thing the hardware cannot say look different, and none of the last two looks well.
"""

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape

from exporter.http.api import GpuOut, GpusOut, JobsOut, NodeOut, OwnerOut, WindowOut
from exporter.http.appearance import HATCHES, MARKS, STYLE
from exporter.http.drawing import bar, worst
from exporter.http.tables import job_table, leak_table
from exporter.http.words import TIMES, brief, clock, complaints, duration, iso, plain, ratio, text

REFRESH_SECONDS = 5
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HOUR = 3600
_WHOLE = 0.995
"""Coverage that rounds to 100 % needs no note."""


def render(view: tuple[GpusOut, JobsOut] | None, *, problem: str = "") -> str:
    """The whole page. `view` is what was last seen, None before anything was; `problem` says why it is not live."""
    title = "GPU efficiency" if view is None else f"{view[0].node.host or 'this node'} · GPU efficiency"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body>{HATCHES}"
        + (_alarm("No data. ", problem) if view is None else _body(*view, problem=problem))
        + "</body></html>"
    )


def _body(gpus: GpusOut, jobs: JobsOut, *, problem: str) -> str:
    node, was = gpus.node, "was " if problem else ""
    asof = f"What follows is how things stood at {clock(node.sampled_at)}. "
    return (
        (_simulated() if node.simulated else "")
        + (_alarm("Not live. " + asof, problem) if problem else "")
        + f"<main{' class=stale' if problem else ''}>"
        + _header(node, _boards(gpus.gpus))
        + (_summary(gpus, was=was) if gpus.gpus else _no_gpus(node))
        + "".join(["<h2>GPUs</h2><div class=gpus>", *(_card(gpu, was=was) for gpu in gpus.gpus), "</div>"])
        + job_table(jobs.jobs)
        + leak_table(node.last_hour)
        + _footer(node)
        + "</main>"
    )


def _boards(gpus: Iterable[GpuOut]) -> int:
    """GPUs that are paid for: the instances of a board are part of it."""
    return sum(1 for gpu in gpus if not gpu.parent) or 1


def _simulated() -> str:
    return (
        '<p class="banner simulated" role="status"><b>SIMULATED</b> · made by a model or a replay. '
        "Nothing here was measured on this machine.</p>"
    )


def _alarm(what: str, why: str) -> str:
    return f'<p class="banner alarm" role="alert">{what}{escape(why[:1].upper() + why[1:])}</p>'


def _header(node: NodeOut, gpus: int) -> str:
    facts = [
        f"source {text(node.source) or 'none'}",
        f"owners from {text(node.scheduler) or 'nobody'}",
        f"sampled {brief(node.age_seconds)} ago, {clock(node.sampled_at)}",
        f"every {node.interval_seconds:g} s" if node.interval_seconds else "",
    ]
    error = f'<p class="note">Last error: {text(node.last_error)}</p>' if node.last_error else ""
    count = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return (
        f"<header><h1><bdi>{text(node.host) or 'this node'}</bdi> <small>{count}</small></h1>"
        f'<p class="mute">{" · ".join(filter(None, facts))}</p>{error}</header>'
    )


def _no_gpus(node: NodeOut) -> str:
    return f'<p class="sentence">No GPU in the inventory of source {text(node.source) or "none"}.</p>'


def _summary(view: GpusOut, *, was: str) -> str:
    """The three layers multiplied out, beside what nvidia-smi would have said; then what the GPUs are doing now."""
    hour = view.node.last_hour
    span = hour.seconds / _boards(view.gpus)
    when = "hour" if span >= _HOUR - 60 else duration(span)
    return (
        f'<section class="summary"><p class="sentence">Of what was paid in the last {when}, '
        f"<b>{ratio(hour, 'gau')}</b> was allocated and working {TIMES} "
        f"<b>{ratio(hour, 'ectr')}</b> computing {TIMES} <b>{ratio(hour, 'emfu')}</b> useful = "
        f'<b class="is">{ratio(hour, "product")}</b>. '
        f"nvidia-smi shows <b>{ratio(hour, 'driver_utilization')}</b>.</p>"
        f"{bar(hour, height=22)}{worst(hour)}{_caveats(hour)}{_states(view.gpus, was=was)}</section>"
    )


def _states(gpus: Iterable[GpuOut], *, was: str) -> str:
    """Which GPUs are in which state, the worst first."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        found.setdefault(gpu.state, []).append(text(gpu.index) or "?")
    items = "".join(
        f'<li class="{state}"><b><span aria-hidden="true">{mark}</span> {was}{state}</b> '
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


def _card(gpu: GpuOut, *, was: str) -> str:
    return (
        f'<article class="gpu {gpu.state}"><div class="top"><h3>GPU {text(gpu.index) or "?"} '
        f'<small title="{text(gpu.uuid)}">{_what(gpu)}</small></h3>{_state(gpu, was=was)}</div>'
        f"{bar(gpu.last_hour, height=16)}{_equation(gpu)}{worst(gpu.last_hour)}{_facts(gpu)}</article>"
    )


def _what(gpu: GpuOut) -> str:
    model = text(gpu.model) or "unknown model"
    if gpu.parent:
        return f"MIG {text(gpu.profile)} of {model}"
    return model if gpu.share == 1 else f"{model}, {100 * gpu.share:.0f} % not partitioned"


def _state(gpu: GpuOut, *, was: str) -> str:
    suspect = ' <span class="suspect">hang suspected</span>' if gpu.hang_suspected and gpu.state != "hung" else ""
    since = f'<time datetime="{iso(gpu.since)}">{duration(gpu.state_seconds)}</time>'
    return (
        f'<p class="state"><b><span aria-hidden="true">{MARKS[gpu.state]}</span> {was}{gpu.state}</b>'
        f" for {since}: {plain(gpu.reason)}{suspect}</p>"
    )


def _equation(gpu: GpuOut) -> str:
    hour = gpu.last_hour
    return (
        f'<p class="equation"><span>{ratio(hour, "gau")} allocated {TIMES} {ratio(hour, "ectr")} computing {TIMES} '
        f"{ratio(hour, 'emfu')} useful = <b>{ratio(hour, 'product')}</b></span>"
        f'<span class="mute tight">nvidia-smi {ratio(hour, "driver_utilization")}</span></p>'
    )


def _facts(gpu: GpuOut) -> str:
    used, whole = gpu.memory_used_bytes, gpu.memory_total_bytes
    of = f" of {whole / 2**30:.0f}" if whole is not None else ""
    limit = f" of {gpu.power_limit_watts:.0f}" if gpu.power_limit_watts is not None else ""
    watts, celsius = gpu.power_watts, gpu.temperature_celsius
    facts = [
        ("held by", _owners(gpu.owners)),
        ("power", _value(gpu, "power_watts", None if watts is None else f"{watts:.0f}{limit} W")),
        ("temperature", _value(gpu, "temperature_celsius", None if celsius is None else f"{celsius:.0f} °C")),
        ("memory", _value(gpu, "memory_used_bytes", None if used is None else f"{used / 2**30:.1f}{of} GiB")),
        ("data", _age(gpu)),
        *(("health", told) for told in filter(None, [complaints(gpu.health)])),
    ]
    return f'<dl class="facts">{"".join(f"<div><dt>{term}</dt><dd>{told}</dd></div>" for term, told in facts)}</dl>'


def _value(gpu: GpuOut, signal: str, shown: str | None) -> str:
    if shown is not None:
        return shown
    if not gpu.live:
        return '<span class="none">no data</span>'
    return f'<span class="unsupported">{"unsupported" if signal in gpu.unsupported else "not reported"}</span>'


def _age(gpu: GpuOut) -> str:
    if gpu.age_seconds is None:
        return '<span class="none">none yet</span>'
    return "live" if gpu.live else f'<span class="none">{duration(gpu.age_seconds)} old</span>'


def _owners(owners: Iterable[OwnerOut]) -> str:
    return ", ".join(_owner(owner) for owner in owners) or '<span class="mute">nobody</span>'


def _footer(node: NodeOut) -> str:
    why = f"<p>Source {text(node.source_reason, limit=600)}.</p>" if node.source_reason else ""
    return (
        f"<footer>{why}<p>Without reports from the workload, useful is what the hardware can have done at best: "
        f"tensor activity {TIMES} clock. It is an upper bound of MFU.</p>"
        '<p><a href="/metrics">metrics</a> · <a href="/api/v1/gpus">GPUs</a> and <a href="/api/v1/jobs">jobs</a> as '
        f'JSON · <a href="/openapi.json">OpenAPI</a> · version {text(node.version)}</p></footer>'
    )


def _owner(owner: OwnerOut) -> str:
    who = owner.user or owner.namespace
    return f"<bdi>{text(owner.job_id)}</bdi>" + (f' <bdi class="mute">{text(who)}</bdi>' if who else "")
