"""Writes a Snapshot's metrics in the Prometheus text format or in OpenMetrics 1.0.

prometheus_client is not used because a scrape must cost milliseconds and its floats would break the ledger's exact
sums; tests check the output with its parser.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2s

from exporter.core.metrics import METRICS, Metric, MetricSample
from exporter.core.snapshot import Snapshot

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_CONTROL_PICTURES: dict[int, str] = {sign: chr(0x2400 + sign) for sign in range(0x20) if chr(sign) not in "\n\t"} | {
    sign: f"\\x{sign:x}" for sign in range(0x7F, 0xA0)
}
"""Control characters are replaced by Unicode's control pictures or by an escape: terminals interpret some of them."""
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
"""Non-finite numbers in both formats; only a job's loss can be one."""
MAX_LABEL_LENGTH = 256
"""Longer label values, which only user-given names can be, are truncated."""
_SURROGATE_ERRORS = "backslashreplace"
"""Lone surrogates, to which Python decodes invalid UTF-8, cannot be encoded and are escaped."""
_HASH_BYTES = 4
"""A truncated value ends with a hash of the whole, or two jobs with long names would have the same series."""


def render(snapshot: Snapshot, *, openmetrics: bool = False, metrics: Sequence[Metric] = METRICS) -> bytes:
    """Render `metrics` as one exposition, without OpenMetrics' closing `# EOF`, which the server appends."""
    lines: list[str] = []
    for metric in metrics:
        samples = list(metric.read(snapshot))
        if samples:
            _write(lines, metric, samples, openmetrics=openmetrics)
    lines.append("")
    return "\n".join(lines).encode()


def _write(lines: list[str], metric: Metric, samples: Iterable[MetricSample], *, openmetrics: bool) -> None:
    family = metric.name
    if openmetrics and metric.type == "counter":
        family = family.removesuffix("_total")
    lines.append(f"# HELP {family} {metric.help.translate(_HELP_ESCAPES)}")
    lines.append(f"# TYPE {family} {metric.type}")
    name, labels = metric.name, metric.labels
    for values, value in samples:
        lines.append(f"{_line_start(name, labels, values)} {_number(value)}")


@lru_cache(maxsize=8192)
def _line_start(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Name and labels of a sample line; cached because only the value changes between scrapes."""
    pairs = ",".join([f'{label}="{_escaped(v)}"' for label, v in zip(labels, values, strict=True)])
    return f"{name}{{{pairs}}}" if pairs else name


def _escaped(value: str) -> str:
    return value if value.isalnum() and len(value) <= MAX_LABEL_LENGTH else label_value(value).translate(_LABEL_ESCAPES)


def label_value(value: str) -> str:
    """Return a label's value as it is exported: printable, and cut if it is too long."""
    if len(value) > MAX_LABEL_LENGTH:
        tail = blake2s(value.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
        return f"{_printable(value[:MAX_LABEL_LENGTH])[: MAX_LABEL_LENGTH - 1 - len(tail)]}…{tail}"
    return value if value.isprintable() else _printable(value)


def _printable(value: str) -> str:
    return value.encode(errors=_SURROGATE_ERRORS).decode().translate(_CONTROL_PICTURES)


def _number(value: float | str) -> str:
    """Format a number; a string is already an exact decimal (see `metrics.seconds`)."""
    return value if isinstance(value, str) else _NOT_FINITE.get(text := repr(value), text)
