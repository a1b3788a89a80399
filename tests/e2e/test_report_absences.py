"""A job that leaves nodes and returns, from stores and from a Prometheus: both charge the time it held, and no other.

Three hours of jobs of Kubernetes, a reading and a scrape a minute, through the real core.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.exposition import render
from exporter.core.job_record import JobRecord
from exporter.core.ledger import Ledger
from exporter.core.model import Device, Owner
from exporter.core.pipeline import advance
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.history.job_tracker import JobTracker
from exporter.history.store import HistoryStore
from tests.dashboards.past import Series, prometheus
from tests.e2e.running import Page
from tests.report.commands import run
from tests.report.stored import BEGIN, put
from tests.worlds import WORKING, S, cut, device, first, held, reading, seen

pytestmark = pytest.mark.e2e
END = 180
AT = f"--at {BEGIN + END * 60 + 17}"


class Visit(Struct, frozen=True, kw_only=True):
    """What one node sees of a job, in minutes."""

    node: str
    stays: Sequence[tuple[int, int]] = ((0, END),)
    """When a pod of the job holds the node's GPU."""
    until: int = END
    """When the node is gone, or the time ends."""
    stored_from: int = 0
    """The first scrape that Prometheus still has."""
    reboots: int = END
    """When its daemon begins anew."""
    boards: tuple[Device, ...] = (device(),)

    def played(self, job: str) -> Iterator[tuple[int, Page, list[JobRecord]]]:
        """Yield each minute's page, and the records made in it."""
        owner = Owner(job, scheduler="kubernetes", namespace="ml")
        for life, (begin, end) in enumerate(((0, self.reboots), (self.reboots, self.until))):
            ledger, tracker = Ledger(), JobTracker(node=self.node, ledger_id=f"{self.node}-{life}")
            terms = Terms(node=self.node, prices=(Price(2.0),))
            observed = replace(first(self.boards), at=begin * 60 * S)
            for minute in range(begin, min(end, self.until) + 1):
                at, uuid = minute * 60, self.boards[-1].uuid
                holds = [held(uuid, owner, start=a * 60) for a, b in self.stays if a <= minute <= b]
                observed = replace(observed, allocations=tuple(holds), wall=(BEGIN + at) * S)
                advance(ledger, observed)
                snapshot = take_snapshot(ledger, DaemonMetadata(version="1", source="replay", terms=terms))
                records = tracker.update(snapshot)[1]
                if minute == end < END:
                    records += tracker.all_records(snapshot)
                elif minute == self.until:
                    records += tracker.running_records(snapshot)
                if minute > begin:
                    yield minute, Page(render(snapshot).decode()), records
                observed = seen(at + 60, *(reading(at, at + 60, WORKING, each.uuid) for each in self.boards))


JOBS = {
    "ml/deployment/scaled": (Visit(node="a"), Visit(node="b", stays=((20, 50), (110, 140)))),
    "ml/deployment/rebooted": (Visit(node="a"), Visit(node="b", stays=((20, 50), (110, 140)), reboots=80)),
    "ml/deployment/spot": (Visit(node="a"), Visit(node="b", until=60)),
    "ml/pod/slice": (Visit(node="a", boards=cut(1), stored_from=100),),
}
"""Visits by job: the autoscaler's replica, one whose daemon began anew while it was away, one on a node that vanished,
and a slice of which Prometheus kept only the end."""


@pytest.fixture(name="ask", scope="module")
def _ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    folder, scraped, stores = tmp_path_factory.mktemp("absences"), Series(), dict[str, str]()
    for job, visits in JOBS.items():
        name, kept = job.rpartition("/")[2], list[JobRecord]()
        for visit in visits:
            for minute, page, records in visit.played(job):
                kept += records
                if minute >= visit.stored_from:
                    place = {"cluster": name, "instance": f"{visit.node}:19400"}
                    for (metric, labels), value in page.samples.items():
                        put(scraped, metric, dict(labels) | place, float(value), minute)
        with closing(HistoryStore(folder / f"{name}.db")) as store:
            store.write(job_records=kept)
        stores[job] = f"--store {folder / name}.db"
    with prometheus(folder) as past, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        past.write(scraped)
        yield lambda job: [_report(job, stores[job]), _report(job, f"--prometheus {past.url}")]


def _report(job: str, source: str) -> dict[str, Any]:
    status, out, err = run(f"{job} {source} {AT} --json --quiet")
    assert (status, err) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


def figures(found: dict[str, Any]) -> tuple[float, float]:
    return found["gpu_hours"], found["money"]


@pytest.mark.parametrize("job", ["ml/deployment/scaled", "ml/deployment/rebooted"])
def test_a_replica_costs_while_it_is_there(ask: Callable[[str], list[dict[str, Any]]], job: str) -> None:
    """Three hours on one node, and twice half an hour on another."""
    for found in ask(job):
        assert figures(found) == pytest.approx((4.0, 8.0), abs=0.01)
        assert not [note for note in found["unseen"] if "unobserved" in note or "fell silent" in note]


def test_only_a_daemon_that_began_anew_is_called_so(ask: Callable[[str], list[dict[str, Any]]]) -> None:
    assert not [note for found in ask("ml/deployment/scaled") for note in found["unseen"] if "anew" in note]


def test_a_node_that_vanished_costs_five_minutes_more_and_the_rest_is_told(
    ask: Callable[[str], list[dict[str, Any]]],
) -> None:
    for found in ask("ml/deployment/spot"):
        assert figures(found) == pytest.approx((4 + 5 / 60, 8 + 10 / 60), abs=0.01)
        (note,) = [each for each in found["unseen"] if "fell silent" in each]
        assert note.startswith("node b fell silent while it held GPUs, and the job went on: 1.92 GPU-hours are not")


def test_a_slice_whose_first_hours_are_not_stored_costs_its_share(
    ask: Callable[[str], list[dict[str, Any]]],
) -> None:
    for found in ask("ml/pod/slice"):
        assert figures(found) == pytest.approx((3 / 7, 6 / 7), rel=1e-3)
