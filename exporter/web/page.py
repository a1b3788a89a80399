"""Renders the page of the node and the page of a job with Jinja2, from the templates of this package.

A zero, a value that was not observed and a value that the hardware cannot report look different. The templates escape
every value; names that users chose are also truncated and made printable. Owns the Content-Security-Policy: a page
loads no other resource and runs only its own script. SVG attributes hold sizes and colours, because the policy forbids
inline styles.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup
from msgspec import Struct

from exporter import __version__, colours, formatting
from exporter.core.hangs import HUNG, Hang, describe_hang, hang_advice, hang_cost, list_pids
from exporter.core.job_record import JobRecord, NodeEvent
from exporter.core.leaks import LAYERS, LEAK_NAMES, LEAKS
from exporter.core.pipes import PIPE_NOTES
from exporter.core.prices import Terms
from exporter.formatting import HOUR, NO_BREAK_SPACE
from exporter.web.api import AccountsOut, GpuOut, GpusOut, JobOut, JobsOut, OwnerOut, WindowOut
from exporter.web.history_api import (
    UsageInterval,
    combine_records,
    downsample,
    job_timeline,
    job_window,
    records_by_job,
)
from exporter.web.spans import SpanOut
from exporter.web.summary import (
    LAYER_BY_LEAK,
    STATE_SYMBOLS,
    Missing,
    health_problems,
    ratio_or_missing,
    seconds_in_state,
    serving_summary,
    state_since,
    training_summary,
)

if TYPE_CHECKING:
    from jinja2 import Environment

REFRESH_SECONDS = 4
"""Seconds between two requests of an open page; without JavaScript the browser reloads it at the same interval."""
MAX_TEXT = 120
"""Maximum length of a name that a user chose, in characters."""
RECEIPTS_SHOWN, EVENTS_SHOWN = 20, 40
_RECENT_EVENTS = 8
"""Events that are shown without expanding the list."""
_NAMED_LOSSES = 3
_TIMELINE_POINTS = 240
"""Maximum number of intervals in a timeline, about what a screen can resolve."""

LEAK_COLOURS = {leak.name: leak.colour for leak in sorted(LEAKS, key=lambda leak: LAYERS.index(leak.layer))} | {
    "useful": colours.LAYERS["useful"],
    "unresolved": "url(#unresolved)",
    "unobserved": "url(#unobserved)",
}
"""Fill of each value of the label `leak`, ordered by layer, for the light and the dark theme, as on the dashboards. The
name is always shown beside the colour."""
_BAND_COLOURS = (
    ("useful", colours.LAYERS["useful"]),
    ("computing, not useful", colours.LAYERS["emfu"]),
    ("held, not computing", colours.LAYERS["ectr"]),
    ("not working", colours.LAYERS["gau"]),
    ("unobserved", "url(#unobserved)"),
)
"""Name and fill of the bands of a timeline, in the order of `UsageInterval.bands`."""
_LAYER_FACTORS = {"gau": "allocated", "ectr": "computing", "emfu": "useful"}
"""Factor of the page's equation that a loss of each layer lowers."""
_SUBTOTALS = {"unobserved": "seen", "gau": "allocated and working", "ectr": "computing"}
"""Name of the subtotal that is left after subtracting the losses of a layer."""
_LEAK_BY_NAME = {leak.name: leak for leak in LEAKS}
_DESCRIPTIONS = {
    "useful": "GPU-seconds at 100 % of peak that advanced a model",
    "unresolved": "kernel time whose usefulness this board or source cannot measure",
    "unobserved": "no trustworthy telemetry",
}
"""Descriptions of the outcomes that are no leaks."""
_EVENT_LABELS = {"hung": "hung", "zombie": "became a zombie", "xid": "reported a critical error (Xid)"}
CostsByLeak = Mapping[str, Mapping[str, float]]
"""Money by currency, then by leak."""

# -- values as text --

_duration = partial(formatting.duration, space=NO_BREAK_SPACE)
_percent = partial(formatting.whole_percent, space=NO_BREAK_SPACE)
_energy = partial(formatting.energy, space=NO_BREAK_SPACE)
_co2 = partial(formatting.co2, space=NO_BREAK_SPACE)
_MISSING = {
    Missing.NO_DATA: Markup('<span class="none">no data</span>'),
    Missing.NOT_REPORTED: Markup('<span class="unsupported">not reported</span>'),
    Missing.UNKNOWN: Markup('<span class="unsupported" title="{}">unknown</span>').format(Missing.UNKNOWN.value),
    Missing.UNDEFINED: Markup('<span class="mute" title="{}">&ndash;</span>').format(Missing.UNDEFINED.value),
}


def printable(value: str, limit: int = MAX_TEXT) -> str:
    """Truncate a name that a user or a program chose, and make it printable.

    Control and bidirectional characters become U+FFFD, so that no name can rearrange the line it is in.
    """
    shown = value if len(value) <= limit else value[: limit - 1] + "…"
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)


def _readable(name: str) -> str:
    return printable(formatting.readable_name(name))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ratio(window: WindowOut, name: str) -> str:
    value = ratio_or_missing(window, name)
    return _MISSING[value] if isinstance(value, Missing) else _percent(value)


def _money(amounts: Mapping[str, float]) -> str:
    return formatting.money({printable(currency): amount for currency, amount in amounts.items()}, space=NO_BREAK_SPACE)


def _describe_energy(joules: Mapping[str, float], money: Mapping[str, float], grams: float | None) -> str:
    """Describe energy by leak: its amount, price, useful share and CO2, as far as they are known; empty for none."""
    total, price = sum(joules.values()), _money(money)
    if not total:
        return ""
    facts = [
        f"{_energy(total)} for {price}" if price else _energy(total),
        f"{_percent(joules.get('useful', 0.0) / total)} useful",
        *([] if grams is None else [_co2(grams)]),
    ]
    return ", ".join(facts)


def _sum_money(costs: CostsByLeak | None, outcomes: Iterable[str]) -> dict[str, float]:
    return {currency: sum(spent[name] for name in outcomes) for currency, spent in (costs or {}).items()}


def job_path(job_id: str) -> str:
    """Return the path of the job's page. Slashes are quoted if a browser would resolve parts like `..`."""
    has_dot_segments = any(part in ("", ".", "..") for part in job_id.split("/"))
    return f"/jobs/{quote(job_id, safe='' if has_dot_segments else '/')}"


def _readings(gpu: GpuOut) -> list[tuple[str, str, str]]:
    """List (name, signal, value) of the newest reading; value is empty if there is none."""
    watts, celsius, used = gpu.power_watts, gpu.temperature_celsius, gpu.memory_used_bytes
    limit = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f}"
    whole = "" if gpu.memory_total_bytes is None else f" of {gpu.memory_total_bytes / 2**30:.0f}"
    return [
        ("power", "power_watts", "" if watts is None else f"{watts:.0f}{limit} W"),
        ("temperature", "temperature_celsius", "" if celsius is None else f"{celsius:.0f} °C"),
        ("memory", "memory_used_bytes", "" if used is None else f"{used / 2**30:.1f}{whole} GiB"),
    ]


def _workload_summary(job: JobOut) -> str:
    facts = training_summary(job.training, space=NO_BREAK_SPACE) + serving_summary(job.serving, space=NO_BREAK_SPACE)
    return ", ".join(facts)


# -- bars, waterfall, timeline --


_BAR_ORDER = ("useful", *(name for name in LEAK_NAMES if name != "useful"))


def _outcomes(window: WindowOut) -> list[tuple[str, float]]:
    """List (outcome, GPU-seconds) of all above 0: useful work first, then in the order of LEAK_NAMES."""
    return [(name, window.leaks[name]) for name in _BAR_ORDER if window.leaks[name] > 0]


def _losses(window: WindowOut) -> list[tuple[str, float]]:
    """List (outcome, GPU-seconds) except useful work, the largest first."""
    return sorted((pair for pair in _outcomes(window) if pair[0] != "useful"), key=lambda pair: -pair[1])


def _main_outcomes(window: WindowOut) -> list[tuple[str, float]]:
    return [("useful", window.leaks["useful"]), *_losses(window)[:_NAMED_LOSSES]]


def _bar_segments(window: WindowOut) -> list[tuple[str, str, str, str, str]]:
    """List (label, title, fill, x, width) of each segment of a stacked bar; x and width are percent, as text."""
    segments, x = list[tuple[str, str, str, str, str]](), 0.0
    for name, seconds in _outcomes(window):
        label, length, width = _readable(name), _duration(seconds), 100 * seconds / window.seconds
        segments.append((f"{label} {length}", f"{label}: {length}", LEAK_COLOURS[name], f"{x:.3f}", f"{width:.3f}"))
        x += width
    return segments


def _strip_parts(spans: Sequence[SpanOut], now: float) -> list[tuple[str, str, str, str]]:
    """List (title, fill, x, width) of the spans of the hour before `now`; x and width are percent, as text."""
    begin = now - HOUR
    shown = [(max(span.start, begin), span.end, span.outcome) for span in spans if span.end > begin]
    return [
        (
            f"{formatting.time_of_day(start)} to {formatting.time_of_day(end)}: {_readable(outcome)}",
            LEAK_COLOURS[outcome],
            f"{100 * (start - begin) / HOUR:.2f}",
            f"{100 * (end - start) / HOUR:.2f}",
        )
        for start, end, outcome in shown
    ]


class _WaterfallRow(Struct, frozen=True):
    """A loss, useful work, or (`subtotal`) what is left after the losses of a layer.

    `share` is the share of paid time; `x` and `width` are percent of it, as text.
    """

    name: str
    x: str
    width: str
    share: float
    seconds: float
    costs: Mapping[str, float]
    subtotal: bool = False


def _waterfall_rows(window: WindowOut, costs: CostsByLeak) -> Iterator[_WaterfallRow]:
    subtracted = dict.fromkeys(LEAK_NAMES, 0.0)
    yield _subtotal("paid", window, costs, subtracted)
    for layer in ("unobserved", "gau", "ectr", "unresolved", "emfu"):
        lost = sorted(((window.leaks[name], name) for name in LEAK_NAMES if LAYER_BY_LEAK[name] == layer), reverse=True)
        for seconds, name in lost:
            subtracted[name] = seconds
            if seconds > 0:
                yield _waterfall_row(name, window, costs, begin=_remaining_share(window, subtracted))
        if layer in _SUBTOTALS and (layer != "unobserved" or lost[0][0] > 0):
            yield _subtotal(_SUBTOTALS[layer], window, costs, subtracted)
    yield _waterfall_row("useful", window, costs)


def _remaining_share(window: WindowOut, subtracted: Mapping[str, float]) -> float:
    """Return the share of paid time that is left; rounding errors below 0 become 0."""
    return max(0.0, 1.0 - sum(subtracted.values()) / window.seconds)


def _subtotal(name: str, window: WindowOut, costs: CostsByLeak, subtracted: Mapping[str, float]) -> _WaterfallRow:
    share = _remaining_share(window, subtracted)
    sums = {
        currency: sum(amount for leak, amount in by_leak.items() if not subtracted[leak])
        for currency, by_leak in costs.items()
    }
    return _WaterfallRow(name, "0.000", f"{100 * share:.3f}", share, share * window.seconds, sums, subtotal=True)


def _waterfall_row(name: str, window: WindowOut, costs: CostsByLeak, *, begin: float = 0.0) -> _WaterfallRow:
    seconds = window.leaks[name]
    sums = {currency: by_leak[name] for currency, by_leak in costs.items()}
    share = seconds / window.seconds
    return _WaterfallRow(name, f"{100 * begin:.3f}", f"{100 * share:.3f}", share, seconds, sums)


def _largest_leaks(window: WindowOut, costs: CostsByLeak, *, hangs: bool) -> list[_WaterfallRow]:
    """Return the rows of the largest leaks, that of a hang that lasts first."""
    named = sorted(((seconds, name) for name, seconds in window.leaks.items() if name in _LEAK_BY_NAME), reverse=True)
    named.sort(key=lambda pair: not (hangs and pair[1] == HUNG))
    return [_waterfall_row(name, window, costs) for seconds, name in named[:_NAMED_LOSSES] if seconds > 0]


class _Timeline(Struct, frozen=True):
    """A job's usage of this node over time as stacked areas: (name, fill, SVG path) of each band."""

    start: float
    end: float
    bands: list[tuple[str, str, str]]
    description: str


def _timeline(records: Sequence[JobRecord]) -> _Timeline | None:
    """Build the timeline; None for fewer than two intervals."""
    intervals = downsample(job_timeline(records), _TIMELINE_POINTS)
    if len(intervals) < 2:  # noqa: PLR2004
        return None
    bands = [(label, fill, _band_path(intervals, index)) for index, (label, fill) in enumerate(_BAND_COLOURS)]
    return _Timeline(intervals[0].start, intervals[-1].end, bands, _describe_timeline(intervals))


def _band_path(intervals: Sequence[UsageInterval], index: int) -> str:
    """Return the SVG path of one band: a rectangle for each interval."""
    start = intervals[0].start
    scale = 1000 / (intervals[-1].end - start)
    path = []
    for interval in intervals:
        whole, below, part = sum(interval.bands), sum(interval.bands[:index]), interval.bands[index]
        if part > 0:
            x, width = (interval.start - start) * scale, (interval.end - interval.start) * scale
            top, height = 100 - 100 * (below + part) / whole, 100 * part / whole
            path.append(f"M{x:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z")
    return "".join(path)


def _describe_timeline(intervals: Sequence[UsageInterval]) -> str:
    """Describe the timeline as text: the useful share in each quarter."""
    quarter = max(1, len(intervals) // 4)
    groups = [intervals[at : at + quarter] for at in range(0, len(intervals), quarter)]
    shares = [sum(part.bands[0] for part in group) / sum(sum(part.bands) for part in group) for group in groups]
    return f"useful share of what was paid, from first to last: {', '.join(map(_percent, shares))}"


# -- templates --


def _read(name: str) -> str:
    return (files("exporter.web") / "templates" / name).read_text(encoding="utf-8")


def _read_template(name: str) -> str:
    """Read a template; line breaks beside a tag or an expression are removed, within text they become one space."""
    source = re.sub(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])", "", _read(name))
    return re.sub(r"\s*\n\s*", " ", source)


def _digest(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"


def _state_rules(ground: str) -> str:
    """Return the rules that give each state the shade of its colour that can be read on a card of this theme."""
    shades = {state: colours.shade(base, ground, colours.TEXT_CONTRAST) for state, base in colours.STATES.items()}
    return "".join(f".{state}{{--is:{shade}}}" for state, shade in shades.items())


LIGHT_CARD, DARK_CARD = "#FAF9F7", "#1C1B1A"
"""What is behind the names of states, the darker ground of the light theme and the lighter one of the dark theme."""
STYLE = "\n".join((
    _read("style.css"), _state_rules(LIGHT_CARD), f"@media (prefers-color-scheme:dark){{{_state_rules(DARK_CARD)}}}",
))  # fmt: skip
SCRIPT = _read("live.js")
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_VERSION = sha256(f"{__version__}{STYLE}{SCRIPT}".encode()).hexdigest()[:12]
"""An open page reloads when the daemon's version differs, because its policy would no longer match."""
_TEMPLATES = {name: _read_template(name) for name in ("base.html", "parts.html", "node.html", "job.html")}
_FILTERS: dict[str, Callable[..., Any]] = {
    "amount": "{:,.0f}".format,
    "age": partial(formatting.age, space=NO_BREAK_SPACE),
    "date_time": formatting.date_time,
    "duration": _duration,
    "gpu_hours": formatting.gpu_hours,
    "iso": formatting.iso,
    "job_path": job_path,
    "main_outcomes": _main_outcomes,
    "money": _money,
    "percent": _percent,
    "describe_hang": describe_hang,
    "hang_advice": hang_advice,
    "hang_cost": lambda hang: hang_cost(hang.seconds / HOUR, hang.unconfirmed_seconds / HOUR),
    "pids": list_pids,
    "printable": printable,
    "problems": health_problems,
    "ratio": _ratio,
    "readable": _readable,
    "readings": _readings,
    "seconds_in_state": seconds_in_state,
    "sentence": _sentence,
    "state_since": state_since,
    "time_of_day": formatting.time_of_day,
    "url_quote": partial(quote, safe=""),
}


@cache
def _constant(macro: str, leak: str) -> Markup:
    """Render a macro that depends only on the leak, once per process."""
    rendered: Markup = getattr(_environment().get_template("parts.html").module, macro)(leak)
    return rendered


_GLOBALS: dict[str, Any] = {
    "constant": _constant,
    "bar_segments": _bar_segments,
    "colours": LEAK_COLOURS,
    "descriptions": _DESCRIPTIONS,
    "every": REFRESH_SECONDS,
    "event_labels": _EVENT_LABELS,
    "events_shown": _RECENT_EVENTS,
    "layer_factors": _LAYER_FACTORS,
    "leaks": _LEAK_BY_NAME,
    "outcomes": LEAK_NAMES,
    "strip_parts": _strip_parts,
    "script": Markup(SCRIPT),  # noqa: S704  this package's own file  # nosec B704
    "sum_money": _sum_money,
    "style": Markup(STYLE),  # noqa: S704  this package's own file  # nosec B704
    "symbols": STATE_SYMBOLS,
    "useful_pipes": PIPE_NOTES,
    "version": _VERSION,
    "waterfall_rows": _waterfall_rows,
}


@cache
def _environment() -> "Environment":
    """Import Jinja2 and compile the templates for the first page: that takes 2 MiB, and most daemons serve none."""
    from jinja2 import DictLoader, Environment, StrictUndefined  # noqa: PLC0415  see above

    environment = Environment(
        loader=DictLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, auto_reload=False
    )
    environment.filters |= _FILTERS
    environment.globals |= _GLOBALS
    return environment


# -- the page of the node --


class PageHistory(Struct, frozen=True, kw_only=True):
    """Records and events of the store that the page shows."""

    kept: bool = False
    """False: there is no store."""
    records: Sequence[JobRecord] = ()
    events: Sequence[NodeEvent] = ()
    error: str = ""
    """Why the store cannot be read; empty if it can."""

    @property
    def shown_ids(self) -> dict[str, str]:
        """The id under which users know each job of the records, by job id."""
        return {record.owner.job_id: record.owner.display_id for record in self.records}


class PageData(Struct, frozen=True, kw_only=True):
    """API responses built from the newest snapshot, and records of the store."""

    accounts: AccountsOut
    gpus: GpusOut
    jobs: JobsOut
    history: PageHistory = PageHistory()


def render_node_page(data: PageData | None, *, problem: str = "") -> str:
    """Render the node's page. `data` is None before the first sample; `problem` is why it is not live."""
    template = _environment().get_template("node.html")
    common = {"problem": problem, "live": not problem and data is not None, "stale": bool(problem) or data is None}
    if data is None:
        return template.render(common, title="this node", sampled_at=None, node=None)
    node = data.gpus.node
    return template.render(
        common,
        title=node.node or "this node",
        sampled_at=node.sampled_at,
        now=node.sampled_at,
        node=node,
        was="was " if problem else "",
        gpus=data.gpus.gpus,
        urgent_first=sorted(data.gpus.gpus, key=_urgency),
        boards=_count_boards(data.gpus.gpus),
        models=sorted({gpu.model for gpu in data.gpus.gpus if gpu.model}),
        troubles=list(_troubles(data.gpus.gpus, data.jobs.jobs)),
        **_account_values(data),
        **_job_values(data.jobs.jobs),
        **_history_values(data.history),
    )


class Trouble(Struct, frozen=True, kw_only=True):
    """A job that hangs, or that holds GPUs without work; for a banner."""

    owner: OwnerOut
    since: float
    """Unix seconds: it began to spin, or worked last."""
    hang: Hang | None = None
    """None: a zombie."""
    gpus: Sequence[str] = ()
    """Indices of a zombie's GPUs."""


_URGENT = {state: number for number, state in enumerate(("hung", "unavailable", "unowned", "zombie"))}


def _urgency(gpu: GpuOut) -> int:
    """Sort GPUs that somebody has to care for before all others, which keep their order."""
    return _URGENT.get(gpu.state, len(_URGENT) + (not gpu.hang_suspected))


def _troubles(gpus: Iterable[GpuOut], jobs: Iterable[JobOut]) -> Iterator[Trouble]:
    """Hangs first, then zombies; of each the oldest first."""
    hangs = (Trouble(owner=job.owner, since=job.hang.since, hang=job.hang) for job in jobs if job.hang)
    yield from sorted(hangs, key=lambda trouble: trouble.since)
    zombies: dict[str, list[GpuOut]] = {}
    for gpu in (gpu for gpu in gpus if gpu.state == "zombie" and gpu.owners):
        zombies.setdefault(gpu.owners[0].job_id, []).append(gpu)
    yield from sorted(map(_zombie, zombies.values()), key=lambda trouble: trouble.since)


def _zombie(gpus: Sequence[GpuOut]) -> Trouble:
    since = min(gpu.last_work or gpu.since for gpu in gpus)
    return Trouble(owner=gpus[0].owners[0], since=since, gpus=[gpu.index for gpu in gpus])


def _count_boards(gpus: Iterable[GpuOut]) -> int:
    """Count boards; a MIG instance is part of its board."""
    return sum(1 for gpu in gpus if not gpu.parent) or 1


def _account_values(data: PageData) -> dict[str, Any]:
    """Return template values of the summary: the node's last hour and its losses."""
    accounts, hour = data.accounts, data.accounts.last_hour.window
    span = hour.seconds / _count_boards(data.gpus.gpus)
    share = sum(hour.leaks[name] for name in _LEAK_BY_NAME) / hour.seconds if hour.seconds else 0.0
    start, intensity = accounts.since_start, accounts.grams_co2_per_kwh or 0.0
    by_the_hour = accounts.grams_co2_per_kwh is not None and start.co2_grams is None
    energy_money = _sum_money(start.energy_money, LEAK_NAMES)
    return {
        "accounts": accounts,
        "energy": _describe_energy(start.energy_joules or {}, energy_money, start.co2_grams),
        "intensity": f"{_co2(intensity)} per{NO_BREAK_SPACE}kWh" if by_the_hour else "",
        "when": "hour" if span >= HOUR - 60 else _duration(span),
        "lost_gpus": share * accounts.gpus,
        "lost_hourly": _lost_hourly(accounts),
    }


def _lost_hourly(accounts: AccountsOut) -> Mapping[str, float]:
    """Return money lost per hour by currency, at the rate of the last hour; empty if not known."""
    account = accounts.last_hour
    hours = account.window.seconds / HOUR / accounts.gpus if accounts.gpus else 0.0
    lost = _sum_money(account.money, _LEAK_BY_NAME)
    return {currency: amount / hours for currency, amount in lost.items()} if hours else {}


def _job_values(jobs: Iterable[JobOut]) -> dict[str, Any]:
    """Return template values of the job table, the largest loss in the last hour first."""
    listed = sorted(jobs, key=lambda job: job.last_hour.leaks["useful"] - job.last_hour.seconds)
    rows = [(job, _workload_summary(job), _first_loss(job)) for job in listed]
    return {"jobs": rows, "has_summary": any(summary for _, summary, _ in rows)}


def _first_loss(job: JobOut) -> list[tuple[str, float]]:
    """Return (leak, GPU-seconds) of the largest loss of the last hour; of a job that hangs, all of the hang so far."""
    return [(HUNG, job.hang.seconds)] if job.hang else _losses(job.last_hour)[:1]


def _history_values(history: PageHistory) -> dict[str, Any]:
    """Return template values of ended jobs and of events, both latest first."""
    jobs = (combine_records(records) for records in records_by_job(history.records))
    ended = [(job, job_window(job)) for job in jobs if not job.running][:RECEIPTS_SHOWN]
    groups = groupby(history.events, lambda event: (event.at, event.kind, event.job_id, event.text))
    return {"history": history, "ended": ended, "events": [_event_row(list(group)) for _, group in groups]}


def _event_row(group: Sequence[NodeEvent]) -> tuple[NodeEvent, str, str]:
    """Return (first event, GPUs, text) of an event that several GPUs reported at once."""
    event = group[0]
    gpus = ", ".join(sorted(printable(member.gpu) for member in group if member.gpu))
    text = printable(event.text, limit=300) if " " in event.text else _readable(event.text or event.kind)
    return event, f"GPU {gpus}" if gpus else "", text


# -- the page of a job --


_NO_TERMS = Terms()


def render_job_page(
    job_id: str,
    records: Sequence[JobRecord],
    *,
    now: float | None,
    kept: bool,
    terms: Terms = _NO_TERMS,
    problem: str = "",
) -> str:
    """Render a job's page, or one that says there are no records. `now`: Unix seconds of the newest sample."""
    running = any(record.running for record in records)
    stale = bool(problem) and running
    values = _record_values(records, terms, now=now) if records else {"job": None, "job_id": job_id, "kept": kept}
    return (
        _environment()
        .get_template("job.html")
        .render(
            values,
            title=f"Job {records[0].owner.display_id if records else job_id}",
            sampled_at=now,
            problem=problem,
            live=running and not stale,
            stale=stale,
        )
    )


def _record_values(records: Sequence[JobRecord], terms: Terms, *, now: float | None) -> dict[str, Any]:
    job = combine_records(records)
    window, costs, joules = job_window(job), _job_costs(job), sum(job.energy.values())
    return {
        "job": job,
        "now": now or job.end,
        "window": window,
        "costs": costs,
        "energy": _describe_energy(job.energy, terms.energy.money(joules), terms.carbon.emitted(joules)),
        "largest": _largest_leaks(window, costs, hangs=job.hang is not None),
        "course": _timeline(records),
        "ranks": sorted(job.training.ranks, key=lambda row: -row[2]) if job.training else [],
    }


def _job_costs(job: JobRecord) -> CostsByLeak:
    """Split the job's money by leak in proportion to time, for all GPUs of a job have the same price."""
    if not job.paid:
        return {}
    return {
        currency: {name: amount * job.parts.get(name, 0) / job.paid for name in LEAK_NAMES}
        for currency, amount in job.money.items()
    }
