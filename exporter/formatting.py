"""Formats numbers, times and texts for pages, terminals and reports.

`space` separates a number from its unit; pages pass a no-break space. Does not escape HTML.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite

from exporter.core.prices import JOULES_PER_KWH

_MANY, _UNITS = 100_000, ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
NO_VALUE = "-"
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
MINUTE, HOUR, DAY = 60, 3600, 86400
_TINY_SHARE = 0.005
"""Shares below this would round to 0 %."""
_CENTS, _LARGE = 0.005, 1000
"""Amounts below _CENTS are shown as "<0.01"; from _LARGE on without decimals."""
_FRESH_SECONDS = 10
"""Ages below this are shown with tenths of a second."""
_LONG_AGO = 300 * DAY
_CURRENCY_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}


def format_time(seconds: float) -> str:
    """Format Unix seconds as date and time in UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_duration(seconds: float) -> str:
    """Format a duration in at most two units: 4.5 s, 45 s, 12 min, 3 h 05 min, 2 d 4 h."""
    if seconds < 60:  # noqa: PLR2004  a minute
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min"
    days, left = divmod(hours, 24)
    return f"{days} d {left} h" if days else f"{hours} h {rest:02d} min"


def format_percent(ratio: float | None) -> str:
    """Format 0-1 as percent with one decimal; None as NO_VALUE."""
    return NO_VALUE if ratio is None else f"{100 * ratio:.1f} %"


def format_amount(value: float | None) -> str:
    """Format with four significant digits and thousands separators, from 100,000 on with an SI prefix."""
    if value is None:
        return NO_VALUE
    if not isfinite(value):
        return str(value)
    if abs(value) >= _MANY:
        scale, unit = next(pair for pair in _UNITS if abs(value) >= pair[0])
        return f"{value / scale:.4g}{unit}" if abs(value) < 1e21 else f"{value:.3e}"  # noqa: PLR2004  1,000 E
    if value == int(value) or abs(value) >= 1000:  # noqa: PLR2004  four digits before the point
        return f"{value:,.0f}"
    return f"{value:.4g}"


def shorten(text: str, width: int) -> str:
    """Truncate in the middle, because names differ at their ends, and replace unprintable characters."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    half = (width - 2) // 2
    return text if len(text) <= width else f"{text[: width - 2 - half]}..{text[-half:]}"


def escape_surrogates(text: str) -> str:
    """Replace lone surrogates, which Python uses for invalid UTF-8 in names and paths, by backslash escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def share(ratio: float) -> str:
    """Format 0-1 as whole percent without the sign; a value above 0 never shows as 0."""
    return "<1" if 0 < ratio < _TINY_SHARE else f"{100 * ratio:.0f}"


def whole_percent(ratio: float, *, space: str = " ") -> str:
    """Format 0-1 as whole percent with the sign."""
    return f"{share(ratio)}{space}%"


def duration(seconds: float, *, space: str = " ") -> str:
    """Format a duration in one or two units: 45 s, 12 min, 3 h 5 min, 2 d 4 h."""
    if seconds < 1.5 * MINUTE:
        return f"{'<1' if 0 < seconds < 1 else f'{seconds:.0f}'}{space}s"
    minutes, hours = round(seconds / MINUTE), round(seconds / HOUR)
    if seconds < 1.5 * HOUR:
        return f"{minutes}{space}min"
    if seconds < DAY:
        return f"{minutes // 60}{space}h {minutes % 60}{space}min"
    return f"{hours // 24}{space}d {hours % 24}{space}h"


def short_duration(seconds: float) -> str:
    """Format a duration in at most five characters: 45s, 12m, 3h05m, 17h, 2d4h, 12d."""
    if seconds < 1.5 * MINUTE:
        return f"{max(0, seconds):.0f}s"
    minutes, hours = round(seconds / MINUTE), round(seconds / HOUR)
    if seconds < 1.5 * HOUR:
        return f"{minutes}m"
    if seconds < DAY:
        return f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 10 * MINUTE else f"{hours}h"
    return f"{hours // 24}d{hours % 24}h" if hours < 10 * 24 else f"{hours // 24}d"


def age(seconds: float, *, space: str = " ") -> str:
    """Format an age: as `duration`, with tenths of a second below 10 s."""
    return f"{seconds:.1f}{space}s" if seconds < _FRESH_SECONDS else duration(seconds, space=space)


def latency(seconds: float, *, space: str = " ") -> str:
    """Format a latency: in milliseconds below a second."""
    return f"{1000 * seconds:.0f}{space}ms" if seconds < 1 else f"{seconds:.1f}{space}s"


def time_of_day(wall: float) -> str:
    """Format Unix seconds as time of day in UTC, to the second."""
    return f"{datetime.fromtimestamp(wall, UTC):%H:%M:%S} UTC"


def date_time(wall: float, *, now: float) -> str:
    """Format Unix seconds as UTC time of day, with the date unless it is today's; as date and year if long ago."""
    when, today = datetime.fromtimestamp(wall, UTC), datetime.fromtimestamp(now, UTC)
    if abs(now - wall) > _LONG_AGO:
        return f"{when:%-d %b %Y}"
    return f"{when:%H:%M}" if when.date() == today.date() else f"{when:%-d %b %H:%M}"


def iso(wall: float) -> str:
    """Format Unix seconds as ISO 8601."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")


def gpu_hours(seconds: float) -> str:
    """Format GPU-seconds as GPU-hours, without a unit."""
    return _with_cents(seconds / HOUR)


def money(amounts: Mapping[str, float], *, space: str = " ") -> str:
    """Format amounts by currency in one line; empty for none."""
    return " + ".join(
        _with_cents(amount, _CURRENCY_SYMBOLS.get(currency) or f"{currency}{space}")
        for currency, amount in sorted(amounts.items())
    )


def _with_cents(amount: float, symbol: str = "") -> str:
    if 0 < amount < _CENTS:
        return f"<{symbol}0.01"
    return f"{symbol}{amount:,.0f}" if amount >= _LARGE else f"{symbol}{amount:,.2f}"


def energy(joules: float, *, space: str = " ") -> str:
    """Format joules as Wh or kWh."""
    kwh = joules / JOULES_PER_KWH
    return f"{1000 * kwh:,.0f}{space}Wh" if kwh < 1 else f"{kwh:,.{1 if kwh < _LARGE else 0}f}{space}kWh"


def co2(grams: float, *, space: str = " ") -> str:
    """Format grams of CO2 as grams or kilograms."""
    kg = grams / 1000
    amount = f"{grams:,.0f}{space}g" if kg < 1 else f"{kg:,.{1 if kg < _LARGE else 0}f}{space}kg"
    return f"{amount} of{space}CO2"


def gibibytes(used: float | None, whole: float | None) -> str:
    """Format bytes as "used/whole" in GiB; empty if `used` is None."""
    if used is None:
        return ""
    return f"{used / 2**30:.0f}" + (f"/{whole / 2**30:.0f}" if whole else "")


def readable_name(name: str) -> str:
    """Replace underscores by spaces: "low parallelism" for `low_parallelism`."""
    return name.replace("_", " ")
