"""Recordings as a Prometheus would have scraped them: pages at the moments of a scrape.

The core itself says what the daemon would have said: every metric of the catalogue but those of the daemon's own work,
which nobody recorded. Owns the moments, whole seconds of the wall clock, what may be told, and which recordings are one
history. Refuses to write.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct, field

from exporter import __version__
from exporter.cli.openmetrics import Headers, Page, Row
from exporter.config import Config
from exporter.core.catalog import METRICS
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Observation
from exporter.core.pipeline import advance
from exporter.core.snapshot import Meta, take_snapshot
from exporter.trace import Trace, read_trace
from exporter.wording import moment

_P = "gpu_efficiency_"
OWN_WORK = frozenset(
    _P + name
    for name in (
        "ticks_total", "late_ticks_total", "read_seconds_total", "core_seconds_total", "workload_messages_total",
        "errors_total", "scheduler_unanswered_seconds", "config_last_reload_successful",
        "config_last_reload_success_timestamp_seconds", "config_restart_needed",
    )
)  # fmt: skip
"""What only the running daemon could have said of itself: a nought would be a lie."""
_TOLD = tuple(metric for metric in METRICS if metric.name not in OWN_WORK)


class DisorderError(Exception):
    """What was given cannot be one history; the message says why and what to do."""


class Recording(Struct, frozen=True):
    """A trace that is open, and the books it goes to."""

    observations: Iterable[Observation]
    ledger: Ledger
    meta: Meta


class Told(Struct):
    """What there is to say of the history when it is over, and what its families are called."""

    headers: Headers = field(default_factory=Headers)
    first: int = 0
    last: int = 0
    """Unix seconds; 0: nothing was written."""
    backwards: int = 0
    """Observations at which the wall clock stood before a moment that was written already."""
    conservation_errors: int = 0

    def at(self, seconds: int) -> None:
        """Something is written of that moment."""
        self.first = min(self.first or seconds, seconds)
        self.last = max(self.last, seconds)


def pages(texts: Iterable[tuple[int, str]], labels: str, told: Told) -> Iterator[Page]:
    """Pages of one life of a daemon. One behind: a counter that is new on a page was 0 on the page before.

    Nobody could know that then; without the nought `increase()` would leave out what came before a first sample.
    """
    known, held, headers = set[str](), None, told.headers
    for at, text in texts:
        told.at(at)
        rows = headers.read(text)
        new = [row for row in rows if row.family in headers.counters and row.head not in known]
        known.update(row.head for row in new)
        if held is not None:
            held.rows.extend(Row(row.family, row.head, "0.0") for row in new)
            yield held
        held = Page(at, labels, rows)
    if held is not None:
        yield held


def scrapes(recording: Recording, step: int, told: Told) -> Iterator[tuple[int, str]]:
    """What the daemon would have said when it began, at each step of the wall clock, and when it ended.

    Where nothing was observed for longer than a step, nothing is said: the daemon was not there, or gave no answer.
    """
    due, last, seen = 0, 0, 0
    for observation in recording.observations:
        seconds = -(-observation.wall // SECOND)
        if last < due < seconds:
            yield due, _page(recording)
            last = due
        told.backwards += seconds < last
        advance(recording.ledger, observation)
        if not last:
            yield seconds, _page(recording)
            last = seconds
        seen, due = seconds, -(-seconds // step) * step
    if seen > last:
        yield seen, _page(recording)
    told.conservation_errors += recording.ledger.conservation_errors


def _page(recording: Recording) -> str:
    return render(take_snapshot(recording.ledger, recording.meta), openmetrics=True, metrics=_TOLD).decode()


class Source(Struct, frozen=True):
    """A trace that was looked into."""

    name: str
    node: str
    simulated: bool
    begins: int
    """Unix nanoseconds."""
    size: int

    @property
    def first(self) -> int:
        """Of its scrapes."""
        return -(-self.begins // SECOND)


class Recordings:
    """Traces of any number of nodes, replayed side by side. Raises DisorderError and TraceError."""

    def __init__(self, names: Iterable[str], config: Config, told: Told) -> None:
        self._config, self._told = config, told
        self._sources = sorted((look(name) for name in names), key=lambda source: source.begins)
        self._open: dict[str, Trace] = {}
        self._done = 0
        self.truncated: list[tuple[str, str]] = []
        """Names, and what the trace says of its end."""

    @property
    def nodes(self) -> list[str]:
        """Each once."""
        return sorted({source.node for source in self._sources})

    @property
    def simulated(self) -> list[str]:
        """Names of those that a model made."""
        return [source.name for source in self._sources if source.simulated]

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(source.size for source in self._sources)

    @property
    def taken(self) -> int:
        """Bytes that were read."""
        return self._done + sum(trace.taken for trace in self._open.values())

    def pages(self, labels: Mapping[str, str], step: int) -> Iterator[Page]:
        """Of all nodes in the order of time; `labels` are a node's."""
        rows = [self._node(node, labels[node], step) for node in self.nodes]
        return heapq.merge(*rows, key=lambda page: page.at)

    def _node(self, node: str, labels: str, step: int) -> Iterator[Page]:
        """One node's traces one after the other: each is another life of its daemon."""
        before: tuple[str, int] | None = None
        for source in (each for each in self._sources if each.node == node):
            if before is not None and source.first <= before[1]:
                raise DisorderError(
                    f"{source.name} begins {moment(source.first)}, before {before[0]} of the same node {node} ends"
                    f" ({moment(before[1])}): a second can be told once; leave one of the two out"
                )
            last = source.first
            for page in self._life(source, labels, step):
                yield page
                last = page.at
            before = source.name, last

    def _life(self, source: Source, labels: str, step: int) -> Iterator[Page]:
        config, host = self._config, source.node
        meta = Meta(
            version=__version__, source="replay", simulated=source.simulated, host=host, terms=config.terms(host)
        )
        with read_trace(source.name) as trace:
            self._open[source.name] = trace
            recording = Recording(trace, Ledger(config.policy, config.policies()), meta)
            yield from pages(scrapes(recording, step, self._told), labels, self._told)
            del self._open[source.name]
            self._done += source.size
            if trace.truncated:
                self.truncated.append((source.name, trace.truncated))


def look(name: str) -> Source:
    """What a trace is of, and when it begins."""
    with read_trace(name) as trace:
        if trace.size is None:
            raise DisorderError(f"{name} is a pipe, and a recording is looked into before it is replayed: give a file")
        first = next(iter(trace), None)
        if first is None:
            raise DisorderError(f"{name} holds no observation")
        header = trace.header
        return Source(name, header.host or Path(name).name, header.simulated, first.wall, trace.size)
