"""The whole daemon over a disk that is full, read-only, broken, hanging or taken away: it goes on, says so, heals."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from exporter.core.job_record import JobRecordQuery
from exporter.history.recorder import CHECKPOINT_WAIT_SECONDS
from exporter.history.store import open_read_only
from tests.e2e.running import Page
from tests.history.disk.build import Disk
from tests.history.served import Node, Served, Told
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
FAILING_SECONDS = 20.0
SLACK_SECONDS = 3.0
"""Of an answer on a machine that is busy with other tests; a disk that hangs takes for ever."""


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture(name="node")
def _node(tmp_path: Path, disk: Disk) -> Node:
    return _node_on(disk, tmp_path)


def _node_on(disk: Disk, folder: Path) -> Node:
    """Return a node that writes a checkpoint a second."""
    env = {"GPU_EFFICIENCY_HISTORY_CHECKPOINT_SECONDS": "1"} | disk.env
    return Node(folder, store=disk.folder / "history.db", env=env)


@pytest.fixture(name="served")
def _served(node: Node) -> Iterator[Served]:
    with node.running() as served:
        served.first()
        until(served, works, "it is kept")
        yield served


def works(page: Page) -> bool:
    return page.total("history_up") == 1


def fails(page: Page) -> bool:
    return page.total("history_up") == 0


def until(served: Served, true: Callable[[Page], object], what: str) -> Page:
    def look() -> Page | None:
        page = served.scraped()
        return page if page is not None and true(page) else None

    return wait_for(look, what)


def goes_on(served: Served) -> None:
    """It samples, answers soon, and nobody was late for the disk's sake."""
    before, ticks = served.first(), []
    for _ in range(5):
        began = time.monotonic()
        page = served.first()
        assert time.monotonic() - began < CHECKPOINT_WAIT_SECONDS + SLACK_SECONDS
        ticks.append(page.total("ticks_total"))
        time.sleep(0.3)
    assert ticks[-1] >= before.total("ticks_total") + 3
    assert "unobserved" not in {state for state, _ in page.states().values()}


def kept_jobs(node: Node) -> set[str]:
    with closing(open_read_only(node.store)) as store:
        return {one.owner.job_id for one in store.job_records(JobRecordQuery())}


def test_it_goes_on_over_a_disk_that_fails_and_writes_what_waited_when_it_is_well(
    node: Node, served: Served, disk: Disk
) -> None:
    for gpu, rule in enumerate(("write * 1 0 ENOSPC", "* * 1 0 EROFS", "sync * 1 0 EIO", "write * 1 0 hang")):
        _survived(node, served, disk, gpu, rule)
    assert served.program.end() == 0


def _survived(node: Node, served: Served, disk: Disk, gpu: int, rule: str) -> None:
    node.jobs.begin(gpu)
    job = node.jobs.held[gpu]
    until(served, lambda page: page.rows("job_paid_seconds_total", job_id=job), "the job is told of")
    disk.fails(rule)
    node.jobs.end(gpu)
    told = until(served, fails, f"{rule}: it says that nothing is kept")
    assert told.total("history_failures_total") >= gpu
    goes_on(served)
    disk.fails()
    until(served, works, f"{rule}: it is kept again")
    wait_for(lambda: job in kept_jobs(node), f"{rule}: the receipt that waited is written")


def test_killed_over_a_disk_that_hangs_it_takes_back_nothing_that_was_told(
    node: Node, served: Served, disk: Disk
) -> None:
    """For as long as a restart would go on from the last checkpoint, nothing newer is told."""
    disk.fails("write * 1 0 hang")
    for _ in range(4):
        served.first()
        time.sleep(0.3)
    served.kill()
    disk.fails()
    with node.running() as again:
        page = again.first()  # judged by what the one before has told
        assert page.total("unobserved_seconds_total", reason="exporter_down") > 0
        assert again.program.end() == 0


@pytest.mark.slow
def test_killed_over_a_disk_that_took_nothing_for_20_seconds_nothing_goes_back(tmp_path: Path) -> None:
    """Of three daemons the disk is full, or broken: a restart finds a checkpoint from before, or one half written.

    Whatever it goes on from, no counter may be less than a scrape has seen meanwhile (`Told`).
    """
    rules = ("write * 1 0 ENOSPC", "write * 1 0 EIO", "sync * 1 0 EIO")
    with ExitStack() as stack:
        running = [stack.enter_context(_failing(tmp_path / f"{number}", rule)) for number, rule in enumerate(rules)]
        end = time.monotonic() + FAILING_SECONDS
        while time.monotonic() < end:
            for _, _, served in running:
                assert served.scraped() is not None
            time.sleep(0.2)
        for node, disk, served in running:
            assert fails(served.first())
            served.kill()
            disk.fails()
            pages = node.told.pages
            with node.running() as again:
                until(again, works, "it is kept again")
                assert again.first().total("unobserved_seconds_total", reason="exporter_down") > 0
                assert node.told.pages > pages
                assert again.program.end() == 0


@contextmanager
def _failing(folder: Path, rule: str) -> Iterator[tuple[Node, Disk, Served]]:
    """A daemon with a checkpoint, and jobs, on a disk that has just begun to fail."""
    folder.mkdir()
    disk = Disk(folder)
    node = _node_on(disk, folder)
    for gpu in range(4):
        node.jobs.begin(gpu)
    with node.running() as served:
        until(served, works, "it is kept")
        until(served, lambda page: page.rows("job_paid_seconds_total"), "the jobs are told of")
        disk.fails(rule)
        yield node, disk, served


def test_a_stop_does_not_wait_for_a_disk_that_hangs(served: Served, disk: Disk) -> None:
    disk.fails("* * 1 0 hang")
    served.first()
    began = time.monotonic()
    served.program.process.send_signal(signal.SIGTERM)
    assert served.program.gone() == 0
    assert time.monotonic() - began < 15


def test_a_store_that_is_deleted_or_damaged_under_it_is_begun_anew(node: Node, served: Served, disk: Disk) -> None:
    for path in disk.folder.iterdir():
        path.unlink()
    wait_for(lambda: served.scraped() and node.store.exists(), "there is a store again")
    goes_on(served)
    assert served.program.end() == 0
    os.truncate(node.store, 5000)
    node.told = Told()  # what it counted is lost, and it begins at nought
    with node.running() as again:
        until(again, works, "it is kept")
        assert list(disk.folder.glob("history.db.damaged-*"))
        assert "a new one is begun" in again.program.log()


def test_two_daemons_do_not_share_a_store(node: Node, served: Served) -> None:
    with node.running() as other:
        page = wait_for(lambda: _page_of(other), "the other one serves")
        assert fails(page)
        assert "another daemon" in other.program.log()
    assert works(served.first())


def _page_of(served: Served) -> Page | None:
    """Beside the story that the first one tells."""
    served.told = Told()
    return served.scraped()
