"""The books of a node, as a reader of /metrics can check them: digit for digit, and from scrape to scrape."""

import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "gpu_efficiency_"
_SUMS = (("seconds_total", "paid_seconds_total", "uuid"), ("job_seconds_total", "job_paid_seconds_total", "job_id"))
"""Parts, their sum, and the label by which they belong together; see docs/accounting.md."""


class Books:
    """Compares each page with the one before it."""

    def __init__(self) -> None:
        self._last: dict[str, Decimal] = {}
        self.sums = self.compared = 0

    def check(self, page: str) -> list[str]:
        """Return what is wrong with the page: a counter that went back, or parts that are not the whole."""
        values = dict(series(page))
        return [*self._counters(values), *self._add_up(values)]

    def _counters(self, values: dict[str, str]) -> Iterator[str]:
        for name, text in values.items():
            if not name.partition("{")[0].endswith("_total"):
                continue
            value = number(text)
            if not value.is_finite():
                yield f"{name} is {text}"
                continue
            self.compared += 1
            if value < self._last.get(name, value):
                yield f"{name} went back from {self._last[name]} to {text}"
            self._last[name] = value
        broken = number(values.get(f"{_PREFIX}conservation_errors_total", "0"))
        if broken:
            yield f"the daemon itself counts {broken} conservation errors"

    def _add_up(self, values: dict[str, str]) -> Iterator[str]:
        for parts, whole, label in _SUMS:
            sums: defaultdict[str, Decimal] = defaultdict(Decimal)
            for name, text in _of(parts, values):
                sums[labels(name)[label]] += number(text)
            for name, text in _of(whole, values):
                owner = labels(name)[label]
                self.sums += 1
                if sums[owner] != number(text):
                    yield f"{whole} of {owner} is {text}, its parts are {sums[owner]}"


def _of(metric: str, values: dict[str, str]) -> Iterator[tuple[str, str]]:
    start = f"{_PREFIX}{metric}{{"
    return ((name, text) for name, text in values.items() if name.startswith(start))


def series(page: str) -> Iterator[tuple[str, str]]:
    """Give each series, as it is written, and the text of its value."""
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, text = line.rpartition(" ")
            yield name, text


def labels(name: str) -> dict[str, str]:
    return dict(_LABEL.findall(name))


def number(text: str) -> Decimal:
    """Read a value; what is no number is NaN."""
    try:
        return Decimal(text.replace("Inf", "Infinity"))
    except InvalidOperation:
        return Decimal("NaN")


def of_job(page: str, metric: str, job: int) -> list[tuple[dict[str, str], Decimal]]:
    """Return a metric's series of one job."""
    own = f'job_id="{job}"'
    start = f"{_PREFIX}{metric}{{"
    return [(labels(name), number(text)) for name, text in series(page) if name.startswith(start) and own in name]
