"""Renders a report, a comparison or a summary as one self-contained HTML page: headline, charts, advice, all tables.

The page has no script and loads nothing: its Content-Security-Policy allows one style sheet by its hash. Every name
that people chose is escaped.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import UNSET

from exporter.colours import LARGE_CONTRAST, LAYERS, TEXT_CONTRAST, shade
from exporter.core.hangs import HUNG
from exporter.formatting import NO_VALUE, format_percent, readable_name
from exporter.report import charts
from exporter.report.charts import lost_parts, part_kind, waterfall_total
from exporter.report.model import JobReport, LayerRatios, ReportComparison
from exporter.report.summary import SummaryRow, UsageSummary
from exporter.report.svg import escaped
from exporter.report.text import (
    ADVICE_TITLE,
    MAX_LEAKS,
    ReportTable,
    TableRow,
    energy_suffix,
    hang_title,
    plural,
)

_FILLED = ("gau", "ectr", "emfu", "useful")


def _shades(ground: str) -> dict[str, str]:
    """Return the layers' colours so that they stand out from the ground; `useful` is also a text's."""
    return {
        name: shade(LAYERS[name], ground, TEXT_CONTRAST if name == "useful" else LARGE_CONTRAST) for name in _FILLED
    }


LIGHT_COLOURS = {
    "bg": "#faf9f7", "card": "#ffffff", "ink": "#1d1c1a", "mute": "#67635d", "line": "#e5e2dc", "track": "#f1eee9",
    "paid": "#4a4844", "busy": "#5b6b8c",
    "grey": "#8a867f", "pale": "#d8d4cd", "known": "#66a893", "kept": "#8b95a8", "lost": "#9c2a10",
} | _shades("#f1eee9")  # fmt: skip
DARK_COLOURS = {
    "bg": "#131312", "card": "#1c1b1a", "ink": "#ebe8e3", "mute": "#a5a099", "line": "#33312e", "track": "#2b2927",
    "paid": "#b9b4ac", "busy": "#9fb0d4",
    "grey": "#8a867f", "pale": "#45423e", "known": "#1e6b54", "kept": "#727f99", "lost": "#f0866a",
} | _shades("#2b2927")  # fmt: skip
FILL_COLOURS = ("paid", "busy", "kept", "lost", *_FILLED)
"""Fills of one colour; `unresolved` and `unobserved` are hatched."""

_TEMPLATES = Environment(
    loader=PackageLoader("exporter.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: value if isinstance(value, Markup) else _safe_text(str(value)),
)


def _safe_text(text: str) -> Markup:
    """Escape a value of a template; control characters are replaced."""
    return Markup(escaped(text))  # noqa: S704  it is escaped  # nosec B704


def _css_variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())


STYLESHEET = (
    ":root{color-scheme:light dark;"
    + _css_variables(LIGHT_COLOURS)
    + "}@media screen and (prefers-color-scheme:dark){:root{"
    + _css_variables(DARK_COLOURS)
    + "}}"
    + "".join(f".fill.{name}{{fill:var(--{name})}}" for name in FILL_COLOURS)
    + "\n"
    + (resources.files("exporter.report") / "templates" / "style.css").read_text(encoding="utf-8")
)


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLESHEET.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'"
)
_FULL_COVERAGE = 0.995
"""A higher coverage rounds to 100 % and is not mentioned."""
_NUMBER_PATTERN = re.compile(r"[+\-]?\d.{0,19}")
"""A number, possibly with its unit."""
AnyReport = JobReport | ReportComparison | UsageSummary


def render_html(report: AnyReport, tables: Sequence[ReportTable]) -> str:
    """Render the whole file."""
    heading, *others = tables if tables and _is_heading(tables[0]) else (ReportTable(), *tables)
    title = hang_title(report) if isinstance(report, JobReport) else ""
    hang = next((table for table in others if title and table.title == title), None)
    others = [table for table in others if table is not hang]
    context: dict[str, object] = {
        "facts": heading.prose,
        "policy": Markup(CONTENT_SECURITY_POLICY),  # noqa: S704  a constant  # nosec B704
        "stylesheet": Markup(STYLESHEET),  # noqa: S704  likewise  # nosec B704
        "advice_title": ADVICE_TITLE,
        "advice": None,
        "comparison": None,
        "hang": hang,
        "tables": others,
    }
    context |= _page(report) | ({"title": heading.title} if heading.title else {})
    if not isinstance(report, ReportComparison):
        context |= _advice(report, others)
    return _TEMPLATES.get_template("report.html").render(context) + "\n"


def _is_heading(table: ReportTable) -> bool:
    """Whether the table has only a title and facts."""
    return bool(table.title and table.prose and not table.rows)


def _page(report: AnyReport) -> dict[str, object]:
    """Return the title, the headline and the charts."""
    match report:
        case JobReport():
            size = [plural(len(report.nodes), "node"), plural(report.gpus, "GPU")]
            return {
                "title": f"Job {report.who.shown_id}", "simulated": report.simulated, "running": report.when.running,
                "charts": _safe_charts(charts.job_charts(report)), **_useful_part(report, size, report.currency),
                "energy_currency": report.energy_currency,
            }  # fmt: skip
        case ReportComparison(first=first, second=second):
            return {
                "title": f"Job {first.who.shown_id} and job {second.who.shown_id}",
                "simulated": first.simulated or second.simulated, "change": _change(report),
                "comparison": [(each.who.shown_id, _useful_shares(each.layers)) for each in (first, second)],
                "charts": _safe_charts(charts.comparison_charts(report)),
            }  # fmt: skip
        case UsageSummary(whole=whole):
            return {
                "title": f"GPU efficiency: {report.about}", "simulated": report.simulated, "running": False,
                "charts": _safe_charts(charts.summary_charts(report)),
                **_useful_part(whole, [plural(whole.jobs, "job")], report.currency),
                "energy_currency": report.energy_currency,
            }  # fmt: skip


def _safe_charts(drawn: Iterable[str]) -> list[Markup]:
    """Mark drawings as safe HTML: svg.py has escaped all their texts."""
    return [Markup(chart) for chart in drawn]  # noqa: S704  # nosec B704


def _useful_part(totals: JobReport | SummaryRow, size: list[str], currency: str) -> dict[str, object]:
    """Return the size of a job or summary, and its useful share."""
    money = [] if totals.money is None else [f"{totals.money:,.2f} {currency}"]
    return {
        "size": [*size, f"{totals.gpu_hours:,.2f} GPU-hours", *money],
        "shares": _useful_shares(totals.layers),
        "partly_seen": totals.coverage is not None and totals.coverage < _FULL_COVERAGE,
        "currency": currency,
    }


def _useful_shares(ratios: LayerRatios) -> list[str]:
    """Return the useful share, or its minimum and maximum; empty if not known."""
    shares = [format_percent(share) for share in (ratios.floor, ratios.product) if share is not None]
    return [] if ratios.product is None else list(dict.fromkeys(shares))


def _change(comparison: ReportComparison) -> str:
    first, second = comparison.first.layers.product, comparison.second.layers.product
    if first is None or second is None:
        return ""
    change = round(100 * (second - first), 1)
    return f": {abs(change):.1f} points {'more' if change > 0 else 'less'}" if change else ": as much"


# -- advice and tables --


def _advice(report: JobReport | UsageSummary, tables: Sequence[ReportTable]) -> dict[str, object]:
    """Return the largest leaks as cards, which replace the table of advice."""
    hangs = isinstance(report, JobReport) and report.hang is not UNSET
    order = sorted(
        lost_parts(waterfall_total(report)), key=lambda part: (not (hangs and part.name == HUNG), -part.gpu_hours)
    )
    return {
        "advice": order[:MAX_LEAKS] if report.parts else None,
        "tables": [table for table in tables if table.title != ADVICE_TITLE],
    }


def _numeric_columns(rows: Iterable[TableRow]) -> set[int]:
    """Return the columns after the first that have only numbers."""
    rows = tuple(rows)
    columns = range(1, max(len(row) for row in rows))
    return {n for n in columns if _all_numbers([row[n] for row in rows if len(row) > n])}


def _all_numbers(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell not in ("", NO_VALUE)]
    return bool(filled) and all(_NUMBER_PATTERN.fullmatch(cell) for cell in filled)


def _breakable(cell: str) -> Markup:
    """Allow line breaks at underscores: names of leaks are long and phones narrow."""
    return _safe_text(cell).replace("_", Markup("_<wbr>"))


_TEMPLATES.filters |= {
    "breakable": _breakable,
    "energy_suffix": energy_suffix,
    "hundredths": "{:,.2f}".format,
    "numeric_columns": _numeric_columns,
    "part_kind": part_kind,
    "percent": format_percent,
    "readable_name": readable_name,
}
