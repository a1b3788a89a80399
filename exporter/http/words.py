"""Figures and names in the words of the page: percentages, durations, clock times, and other people's text made safe.

Refuses tags of any size: what comes out is text, a `<time>` or one `<span>` that says why there is no figure.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from urllib.parse import quote

from exporter.http.api import HealthOut, JobOut, WindowOut

MAX_TEXT = 120
"""Longer names are cut: they are people's own, and one must not fill the page."""
TIMES = "\N{MULTIPLICATION SIGN}"
_WANTED = {1: "reset this GPU", 2: "reboot the node", 3: "drain peers", 4: "drain, then reset this GPU"}
_SPACE, _DASH = "\N{NO-BREAK SPACE}", "\N{EN DASH}"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TINY = 0.005
"""What would round to 0 % and is not."""
_SHOWN = ("ttft", "itl")
_FRESH = 10
"""Seconds below which tenths of an age count."""
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}
_CENTS, _WHOLE = 0.005, 1000
"""Money below which it is "less than a cent", and from which on cents do not count."""
_KILO = 1000
_LONG_AGO = 300 * _DAY
_JOULES_PER_KWH = 3.6e6


def text(value: str, *, limit: int = MAX_TEXT) -> str:
    """Make safe to show what a person or a program may have named: cut, printable, escaped.

    Control and direction-changing characters become U+FFFD, so that no name can rearrange the line it stands in.
    """
    shown = value if len(value) <= limit else value[: limit - 1] + "…"
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown))


def plain(name: str) -> str:
    """`low_parallelism` as people say it."""
    return text(name.replace("_", " "))


def percent(ratio: float) -> str:
    """0-1 as whole percent; what is not nothing never shows as 0."""
    return f"{'&lt;1' if 0 < ratio < _TINY else f'{100 * ratio:.0f}'}{_SPACE}%"


def ratio(window: WindowOut, name: str) -> str:
    """One of a window's ratios. A zero, a thing not seen, one that cannot be known and none at all look different."""
    value: float | None = getattr(window, name)
    if value is not None:
        return percent(value)
    if not window.coverage:
        return '<span class="none">no data</span>'
    if name == "driver_utilization":
        return '<span class="unsupported">not reported</span>'
    if name in ("emfu", "product") and window.leaks["unresolved"]:
        return '<span class="unsupported" title="no tensor signal, or a board whose peak is not known">unknown</span>'
    return f'<span class="mute" title="nothing to divide by">{_DASH}</span>'


def duration(seconds: float) -> str:
    """In the one or two units a person would use."""
    if seconds < 1.5 * _MINUTE:
        return f"{'&lt;1' if 0 < seconds < 1 else f'{seconds:.0f}'}{_SPACE}s"
    minutes = round(seconds / _MINUTE)
    if seconds < 1.5 * _HOUR:
        return f"{minutes}{_SPACE}min"
    hours = round(seconds / _HOUR)
    if seconds < _DAY:
        return f"{minutes // 60}{_SPACE}h {minutes % 60}{_SPACE}min"
    return f"{hours // 24}{_SPACE}d {hours % 24}{_SPACE}h"


def brief(seconds: float) -> str:
    """The age of something that ought to be fresh."""
    return f"{seconds:.1f}{_SPACE}s" if seconds < _FRESH else duration(seconds)


def clock(wall: float) -> str:
    """Unix seconds as the time of day, UTC."""
    return f'<time datetime="{iso(wall)}">{datetime.fromtimestamp(wall, UTC):%H:%M:%S} UTC</time>'


def moment(wall: float, *, now: float) -> str:
    """Unix seconds as the time of day, UTC, with the date where it is not today's, or the year where it is long ago."""
    when, today = datetime.fromtimestamp(wall, UTC), datetime.fromtimestamp(now, UTC)
    shown = f"{when:%H:%M}" if when.date() == today.date() else f"{when:%-d %b %H:%M}"
    if abs(now - wall) > _LONG_AGO:
        shown = f"{when:%-d %b %Y}"
    return f'<time datetime="{iso(wall)}">{shown}</time>'


def iso(wall: float) -> str:
    """Unix seconds as ISO 8601."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")


def hours(seconds: float) -> str:
    """GPU-seconds as GPU-hours, a number alone."""
    gpu_hours = seconds / _HOUR
    if 0 < gpu_hours < _CENTS:
        return "&lt;0.01"
    return f"{gpu_hours:,.0f}" if gpu_hours >= _WHOLE else f"{gpu_hours:,.2f}"


def money(amounts: Mapping[str, float]) -> str:
    """Sums by currency in one line; empty where there is none."""
    return " + ".join(_amount(currency, amount) for currency, amount in sorted(amounts.items()))


def _amount(currency: str, amount: float) -> str:
    sign = _SIGNS.get(currency) or f"{text(currency)}{_SPACE}"
    if 0 < amount < _CENTS:
        return f"&lt;{sign}0.01"
    return f"{sign}{amount:,.0f}" if amount >= _WHOLE else f"{sign}{amount:,.2f}"


def energy(joules: float) -> str:
    """Joules as people are billed for them."""
    if joules < _JOULES_PER_KWH:
        return f"{joules * _KILO / _JOULES_PER_KWH:,.0f}{_SPACE}Wh"
    return f"{joules / _JOULES_PER_KWH:,.{1 if joules < _KILO * _JOULES_PER_KWH else 0}f}{_SPACE}kWh"


def job_path(job_id: str) -> str:
    """Where the job has its page. A name that a browser would take for a way up is quoted whole."""
    parts = job_id.split("/")
    climbs = any(part in ("", ".", "..") for part in parts)
    return f"/jobs/{quote(job_id, safe='' if climbs else '/')}"


def complaints(health: HealthOut) -> str:
    """What is wrong with a board, in a few words; empty while nothing is known to be."""
    lost = health.ecc_uncorrected
    found = [
        f"Xid {health.last_xid}" if health.last_xid else "",
        f"the driver asks: {_WANTED.get(health.recovery_action, 'see NVML')}" if health.recovery_action else "",
        f"{lost} uncorrected ECC error{'s' if lost != 1 else ''}" if lost else "",
        "a row remap failed: replace the board" if health.row_remap_failed else "",
        "a row remap waits for a reset" if health.row_remap_pending else "",
    ]
    return "; ".join(filter(None, found))


def own_word(job: JobOut) -> str:
    """What a job says of itself, in a few words; empty where it says nothing."""
    told, said = job.training, job.serving
    found: list[str] = []
    if told is not None:
        found += [
            f"step {told.step:,}" if told.step is not None else "",
            f"MFU {percent(told.mfu)}" if told.mfu is not None else "",
            f"goodput {percent(told.goodput)}" if told.goodput is not None else "",
            f"{told.rework_steps:,} steps again" if told.rework_steps else "",
        ]
    if said is not None:
        found += [
            f"{said.running:.0f} running" if said.running is not None else "",
            f"{said.waiting:.0f} waiting" if said.waiting is not None else "",
            f"KV {percent(said.kv_cache)}" if said.kv_cache is not None else "",
            *(f"{kind} p99 {_latency(one.p99)}" for kind, one in said.latency_seconds.items() if kind in _SHOWN),
        ]
    return ", ".join(filter(None, found))


def _latency(seconds: float) -> str:
    return f"{1000 * seconds:.0f}{_SPACE}ms" if seconds < 1 else f"{seconds:.1f}{_SPACE}s"
