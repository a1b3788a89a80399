"""What Prometheus knows of jobs, GPUs and prices in a window of time. Owns those queries; refuses samples over time.

Each fact is the largest that was true in the window: a price that changed within a window counts as its highest.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from exporter.core.money import Price
from exporter.preview.prometheus import Prometheus, Series
from exporter.preview.rests import Gpu
from exporter.preview.tally import Person, priced

P: Final = "gpu_efficiency_"
_SLICES = 28
"""Of 7 and of 4 both: what share of a board a MIG instance can be."""


class Job(Struct, frozen=True):
    """Who holds a GPU, and how long such a one may rest by the policy."""

    person: Person
    workload_class: str


class Board(Struct, frozen=True):
    """A GPU, and whose page it is on."""

    model: str
    page: tuple[str, str, str]
    """Cluster, job and instance of the scrape."""


class Facts:
    """What is known so far; each window adds to it."""

    def __init__(self, server: Prometheus, selector: str) -> None:
        self._server, self._selector = server, selector
        self.jobs: dict[tuple[str, str], Job] = {}
        """By cluster and job id."""
        self.boards: dict[Gpu, Board] = {}
        self.weights: dict[Gpu, float] = {}
        """Of MIG instances."""
        self.limits: dict[tuple[str, str], float] = {}
        """Of jobs that have one of their own, by cluster and job id."""
        self.exempt: set[tuple[str, str]] = set()
        self._prices: dict[tuple[str, str, str, str], Price] = {}
        self._starts: dict[tuple[str, str, str], set[float]] = {}

    def learn(self, start: float, end: float, step: float) -> None:
        """Ask for all that was true in the window."""
        window = f"[{max(1, round(end - start + step))}s]"
        self._learn_jobs(window, end)
        self._learn_boards(window, end)
        for row in self._server.over(self._started(), start, end, step):
            self._starts.setdefault(_page(row), set()).update(float(value) for _, value in row.values)

    def _learn_jobs(self, window: str, end: float) -> None:
        for row in self._largest("job_info", window, "cluster, job_id, name, user, workload_class", end):
            person = Person(*(_label(row, name) for name in ("job_id", "name", "user", "cluster")))
            self.jobs[person.key] = Job(person, _label(row, "workload_class"))
        for row in self._largest("job_zombie_limit_seconds", window, "cluster, job_id", end):
            self.limits[_label(row, "cluster"), _label(row, "job_id")] = float(row.value[1])
        for row in self._largest("job_exempt", window, "cluster, job_id", end):
            self.exempt.add((_label(row, "cluster"), _label(row, "job_id")))

    def _learn_boards(self, window: str, end: float) -> None:
        for row in self._largest("gpu_info", window, "cluster, job, instance, uuid, model", end):
            self.boards[_gpu(row)] = Board(_label(row, "model"), _page(row))
        for row in self._server.now(self._shares(window), end):
            self.weights[_gpu(row)] = max(1, round(float(row.value[1]) * _SLICES)) / _SLICES
        labels = "cluster, job, instance, model, currency"
        for row in self._largest("price_per_gpu_hour", window, labels, end, also='held="true"'):
            price = Price(float(row.value[1]), _label(row, "currency"))
            self._prices[*_page(row), _label(row, "model")] = price

    def _largest(self, name: str, window: str, labels: str, at: float, *, also: str = "") -> Iterator[Series]:
        query = f"max by ({labels}) (max_over_time({self.series(name, also)}{window}))"
        yield from self._server.now(query, at)

    def series(self, name: str, also: str = "") -> str:
        """A selector of one of our metrics, narrowed to what was asked for."""
        return narrowed(f"{P}{name}", self._selector, also)

    def on_holders(self, name: str) -> str:
        """A metric of a GPU, once for each job that holds it."""
        per = "cluster, job, instance, uuid"
        return (
            f"max by (cluster, uuid, job_id) ({self.series('allocation_info')}"
            f" * on ({per}) group_left () {self.series(name)})"
        )

    def _shares(self, window: str) -> str:
        instances = self.series("gpu_info", 'parent!=""')
        return (
            f"max by (cluster, uuid) (rate({self.series('paid_seconds_total')}{window})"
            f" and on (cluster, job, instance, uuid) last_over_time({instances}{window}))"
        )

    def _started(self) -> str:
        pages = f"on (cluster, job, instance) {self.series('build_info')}"
        return f"max by (cluster, job, instance) ({narrowed('process_start_time_seconds', self._selector)} and {pages})"

    def price(self, gpu: Gpu) -> Price | None:
        """What an hour of it costs while somebody holds it; None: nobody has said."""
        board = self.boards.get(gpu)
        price = None if board is None else self._prices.get((*board.page, board.model))
        return None if price is None else priced(price)

    def starts(self, gpu: Gpu) -> set[float]:
        """When the daemon that watches it started."""
        board = self.boards.get(gpu)
        return set() if board is None else self._starts.get(board.page, set())


def narrowed(name: str, selector: str, also: str = "") -> str:
    """NAME{...}, with whichever matchers there are."""
    matchers = ",".join(part for part in (selector, also) if part)
    return f"{name}{{{matchers}}}" if matchers else name


def _label(row: Series, name: str) -> str:
    return row.metric.get(name, "")


def _gpu(row: Series) -> Gpu:
    return _label(row, "cluster"), _label(row, "uuid")


def _page(row: Series) -> tuple[str, str, str]:
    return _label(row, "cluster"), _label(row, "job"), _label(row, "instance")
