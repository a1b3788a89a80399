"""Snapshot x catalog -> bytes of the Prometheus text format or of OpenMetrics 1.0.

A small writer of our own, for a scrape must cost milliseconds; prometheus_client's parser is its oracle in the
tests. Owns escaping and number formats. Refuses to know what a metric means.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2s

from exporter.core.catalog import METRICS, Metric, Sample
from exporter.core.snapshot import Snapshot

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_LABEL = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SIGNS: dict[int, str] = {sign: chr(0x2400 + sign) for sign in range(0x20) if chr(sign) not in "\n\t"} | {
    sign: f"\\x{sign:x}" for sign in range(0x7F, 0xA0)
}
"""Control characters as Unicode's pictures of them, or spelt out: nobody sees them, and terminals obey some."""
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_ODD = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
"""As both formats write what is no number; only a job's loss can be."""
MAX_LABEL = 256
"""Longer label values, which only people's own names can be, are cut."""
_SPELT = "backslashreplace"
"""Half a pair of surrogates, which Python makes of bytes that are no UTF-8, cannot be written: it is spelt out."""
_TAIL_BYTES = 4
"""Of a hash of the whole at the end of what was cut, or two jobs with long names would be one series, twice."""


def render(snapshot: Snapshot, *, openmetrics: bool = False, metrics: Sequence[Metric] = METRICS) -> bytes:
    """All of `metrics` as one exposition, without OpenMetrics' closing `# EOF`, which the server appends."""
    lines: list[str] = []
    for metric in metrics:
        samples = list(metric.read(snapshot))
        if samples:
            _write(lines, metric, samples, openmetrics=openmetrics)
    lines.append("")
    return "\n".join(lines).encode()


def _write(lines: list[str], metric: Metric, samples: Iterable[Sample], *, openmetrics: bool) -> None:
    family = metric.name
    if openmetrics and metric.type == "counter":
        family = family.removesuffix("_total")
    lines.append(f"# HELP {family} {metric.help.translate(_HELP)}")
    lines.append(f"# TYPE {family} {metric.type}")
    name, labels = metric.name, metric.labels
    for values, value in samples:
        lines.append(f"{_head(name, labels, values)} {_number(value)}")


@lru_cache(maxsize=8192)
def _head(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Everything of a line but its value, which is all that changes from scrape to scrape."""
    pairs = ",".join([f'{label}="{_escaped(v)}"' for label, v in zip(labels, values, strict=True)])
    return f"{name}{{{pairs}}}" if pairs else name


def _escaped(value: str) -> str:
    if len(value) > MAX_LABEL:
        tail = blake2s(value.encode(errors="surrogatepass"), digest_size=_TAIL_BYTES).hexdigest()
        value = f"{_printable(value[:MAX_LABEL])[: MAX_LABEL - 1 - len(tail)]}…{tail}"
    elif value.isalnum():
        return value
    elif not value.isprintable():
        value = _printable(value)
    return value.translate(_LABEL)


def _printable(value: str) -> str:
    return value.encode(errors=_SPELT).decode().translate(_SIGNS)


def _number(value: float | str) -> str:
    """A string is an exact decimal already; see `catalog.seconds`."""
    return value if isinstance(value, str) else _ODD.get(text := repr(value), text)
