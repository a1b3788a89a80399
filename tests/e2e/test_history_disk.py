"""The whole daemon over a disk that is full, read-only, broken, hanging or taken away: it goes on, says so, heals."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from exporter.core.job_record import JobRecordQuery
from exporter.history.recorder import CHECKPOINT_WAIT_SECONDS
from exporter.history.store import open_read_only
from tests.e2e.running import Page
from tests.history.disk.build import Disk
from tests.history.served import GPUS, Node, Served, Told
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
FAILING_SECONDS, TWICE_SECONDS = 20.0, 10.0
"""How long a disk takes nothing, and how much of that a killed daemon may count twice (docs/adr/history.md)."""
CHECKPOINT_SECONDS, RESUMED_SECONDS = 10, 50
"""Between checkpoints of a daemon over such a disk, and how old its last may be for the next one to go on from it."""
SLACK_SECONDS = 3.0
"""Of an answer on a machine that is busy with other tests; a disk that hangs takes for ever."""


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture(name="node")
def _node(tmp_path: Path, disk: Disk) -> Node:
    return _node_on(disk, tmp_path)


def _node_on(disk: Disk, folder: Path, *, checkpoint_seconds: int = 1) -> Node:
    """Return a node whose daemon writes a checkpoint so often."""
    env = {"GPU_EFFICIENCY_HISTORY_CHECKPOINT_SECONDS": f"{checkpoint_seconds}"} | disk.env
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
    """Of three daemons the disk is full or broken.

    Where nothing can be written, scrapes see no more than a restart goes on from. Where a write comes through and only
    its sync fails, the checkpoint is marked as outrun: scrapes go on, and after a restart all counters begin at 0.
    """
    rules = {"write * 1 0 ENOSPC": True, "write * 1 0 EIO": True, "sync * 1 0 EIO": False}
    disks = [Disk(_folder(tmp_path / f"{number}")) for number in range(len(rules))]
    nodes = [_node_on(disk, disk.folder.parent, checkpoint_seconds=CHECKPOINT_SECONDS) for disk in disks]
    began = time.monotonic()
    with ExitStack() as stack:
        running = [stack.enter_context(_counting(node)) for node in nodes]
        for disk, rule in zip(disks, rules, strict=True):
            disk.fails(rule)
        end = time.monotonic() + FAILING_SECONDS
        while time.monotonic() < end:
            for served in running:
                assert served.scraped() is not None
            time.sleep(0.2)
        last = [served.first() for served in running]
        for served in running:
            served.kill()
    assert all(map(fails, last))
    for disk in disks:
        disk.fails()
    with ExitStack() as stack:
        running = [stack.enter_context(node.running()) for node in nodes]
        for again, before, resumes in zip(running, last, rules.values(), strict=True):
            wait_for(partial(_has_decided, again), "its start")
            if starts_anew := "counters restart at 0" in again.program.log():
                again.told = Told()  # whose pages judge that no counter goes back
                (down,) = re.findall(r"the exporter was down.* for (\d+) s", again.program.log())
                assert int(down) >= RESUMED_SECONDS or not resumes, "a machine that does too much else starts it late"
            page = until(again, works, "it is kept again")
            paid = page.total("paid_seconds_total") + (before.total("paid_seconds_total") if starts_anew else 0)
            assert starts_anew or resumes
            assert paid <= GPUS * (time.monotonic() - began + TWICE_SECONDS)
            assert again.program.end() == 0


def _has_decided(served: Served) -> bool:
    """Whether it goes on from the last checkpoint, or begins anew."""
    return "the exporter was down" in served.program.log()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@contextmanager
def _counting(node: Node) -> Iterator[Served]:
    """A daemon with jobs and a checkpoint."""
    for gpu in range(4):
        node.jobs.begin(gpu)
    with node.running() as served:
        until(served, works, "it is kept")
        until(served, lambda page: page.rows("job_paid_seconds_total"), "the jobs are told of")
        yield served


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
