"""A store and a checkpoint of an older version are read by this one: the reports say the same, the counters go on.

What lies in `recorded` was written by that version's own command line (`recorded/README.md`), and all is asked of this
version's command line and pages: no module of it is imported.
"""

import gzip
import json
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from tests.compat import node
from tests.compat.checkouts import NOW, UPTIME, Checkout, Daemon, close_spawners
from tests.compat.recorded.stores import ANSWERS, HERE, LATE, ROOT, lay_out, uuids

NEW = Checkout(ROOT, Path(sys.executable))
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
GPUS = 8
COVERED = 1.0
"""Seconds after NOW up to which the checkpoint has booked."""
SAMPLED = 900.0
"""Seconds between two samples of a job's course, in the recorded configuration at most."""
TRAINS, CHATS = "41001", "inference/chat-0-4"
Samples = dict[str, Decimal]
"""Values by name and labels, as a page has them."""
AWAY = LATE - COVERED


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    close_spawners()


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_a_report_on_an_older_version_s_store_says_the_same(name: str, tmp_path: Path) -> None:
    lay_out(tmp_path)
    said = NEW.run(tmp_path, "report", "--quiet", "--json", *ANSWERS[name])
    assert (said.status, said.err) == (0, "")
    recorded = (HERE / f"{name}.json").read_text(encoding="utf-8")
    assert json.loads(said.out) == json.loads(recorded)
    assert said.out == recorded, "the same, but written otherwise"


def samples(page: str) -> Samples:
    lines = [line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#")]
    return {head: Decimal(value) for head, _, value in lines if not head.startswith("process_")}


def counters(page: str) -> Samples:
    """Those that Prometheus adds up, but for what a daemon counts of itself since its start."""
    types = [line.split() for line in page.splitlines() if line.startswith("# TYPE ")]
    names = {name for _, _, name, kind in types if kind == "counter"} - OWN
    return {head: value for head, value in samples(page).items() if head.partition("{")[0] in names}


OWN = {
    f"gpu_efficiency_{name}_total"
    for name in (
        "ticks",
        "late_ticks",
        "read_seconds",
        "core_seconds",
        "workload_messages",
        "errors",
        "history_failures",
    )
}


def total(found: Samples, name: str, **labels: str) -> Decimal:
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        (
            value
            for head, value in found.items()
            if head.startswith(f"{name}{{") and all(each in head for each in wanted)
        ),
        Decimal(),
    )


@pytest.fixture(name="before", scope="module")
def _before() -> str:
    """What a scrape was told by the daemon that wrote the checkpoint, at its moment."""
    return gzip.decompress((HERE / "demo.prom.gz").read_bytes()).decode()


def this_boot(store: Path) -> None:
    """Let the store say that its checkpoint was written since this host was booted."""
    with closing(sqlite3.connect(store)) as db, db:
        ((body,),) = db.execute("SELECT body FROM state WHERE name = 'about'").fetchall()
        about = msgspec.msgpack.decode(zlib.decompress(body)) | {"boot": BOOT_ID.read_text(encoding="ascii").strip()}
        db.execute("UPDATE state SET body = ? WHERE name = 'about'", (zlib.compress(msgspec.msgpack.encode(about)),))


@contextmanager
def back(folder: Path, before: str, *, rebooted: bool) -> Iterator[Daemon]:
    """This version's daemon on the older one's store, a minute later, with the same jobs; two samples on."""
    node.lay_out(folder)
    (folder / "history.db").write_bytes(gzip.decompress((HERE / "demo.db.gz").read_bytes()))
    if not rebooted:
        this_boot(folder / "history.db")
    boards = node.Boards(uuids(before))
    boards.say(*[node.BUSY] * GPUS)
    for gpu in range(GPUS):
        node.give(folder, -3600, **{f"gpu{gpu}": TRAINS if gpu < GPUS // 2 else CHATS})
    uptime = 100 if rebooted else UPTIME + LATE
    with node.exporter(boards) as url, node.served(NEW, folder, url, wall=NOW + LATE, uptime=uptime) as daemon:
        for number in (1, 2):
            boards.say(*[node.BUSY] * GPUS)
            node.step(daemon, number)
        yield daemon
        assert daemon.end() == 0, daemon.log()
        assert "Traceback" not in daemon.log()


@pytest.mark.e2e
def test_the_counters_go_on_from_an_older_version_s_checkpoint(before: str, tmp_path: Path) -> None:
    with back(tmp_path, before, rebooted=False) as daemon:
        page = daemon.get("/metrics").body
    was, now = counters(before), counters(page)
    assert {head for head in was.keys() - now.keys() if was[head]} == set(), "a counter that was told is gone"
    assert {head: (was[head], now[head]) for head in was.keys() & now.keys() if now[head] < was[head]} == {}
    paid, seconds = "gpu_efficiency_paid_seconds_total", "gpu_efficiency_seconds_total"
    gone = Decimal(AWAY + 2 * node.PERIOD)
    for uuid in uuids(before):
        assert total(now, paid, uuid=uuid) == total(was, paid, uuid=uuid) + gone
        assert total(now, seconds, uuid=uuid) == total(now, paid, uuid=uuid)
        unseen = total(now, seconds, uuid=uuid, leak="unobserved") - total(was, seconds, uuid=uuid, leak="unobserved")
        assert unseen == Decimal(AWAY), "what nobody saw while no daemon was there"
    for job in (TRAINS, CHATS):
        grown = total(now, "gpu_efficiency_job_paid_seconds_total", job_id=job) - total(
            was, "gpu_efficiency_job_paid_seconds_total", job_id=job
        )
        assert grown > 0
    assert total(now, "gpu_efficiency_job_paid_seconds_total", job_id=TRAINS) == total(
        was, "gpu_efficiency_job_paid_seconds_total", job_id=TRAINS
    ) + gone * (GPUS // 2)


@pytest.mark.e2e
def test_what_was_remembered_of_running_jobs_beside_the_counters_goes_on_too(before: str, tmp_path: Path) -> None:
    """Their start, cost and course: as the older version told them when it closed its books."""
    with back(tmp_path, before, rebooted=False) as daemon:
        receipts = json.loads(daemon.get("/api/v1/receipts").body)["receipts"]
    lives = {(one["owner"]["job_id"], one["life"]): one for one in receipts}
    assert len(lives) == len(receipts)
    for job in (TRAINS, CHATS):
        (mine,) = (one for one in receipts if one["owner"]["job_id"] == job)
        told = json.loads((HERE / f"closed-{job.replace('/', '-')}.json").read_text(encoding="utf-8"))
        assert mine["start"] == told["when"]["start"]
        assert mine["money"]["USD"] > told["money"]
        assert mine["samples"][0][0] < mine["start"] + SAMPLED
        assert len(mine["samples"]) > (NOW - mine["start"]) / SAMPLED
        assert mine["training" if job == TRAINS else "service"]


@pytest.mark.e2e
def test_after_a_reboot_the_older_version_s_books_are_closed_and_kept(before: str, tmp_path: Path) -> None:
    with back(tmp_path, before, rebooted=True) as daemon:
        page, receipts = daemon.get("/metrics").body, json.loads(daemon.get("/api/v1/receipts").body)["receipts"]
        events = [event["kind"] for event in json.loads(daemon.get("/api/v1/events").body)["events"]]
    was, now = samples(before), samples(page)
    for uuid in uuids(before):  # from where the other books end: every second is in one of them
        assert total(now, "gpu_efficiency_paid_seconds_total", uuid=uuid) == Decimal(AWAY + 2 * node.PERIOD)
    closed = {one["owner"]["job_id"]: one for one in receipts if not one["running"]}
    for job in (TRAINS, "41010", "41505", CHATS):
        assert Decimal(closed[job]["paid"]).scaleb(-9) == total(
            was, "gpu_efficiency_job_paid_seconds_total", job_id=job
        )
        assert sum(closed[job]["parts"].values()) == closed[job]["paid"]
    assert {one["owner"]["job_id"] for one in receipts if one["running"]} == {TRAINS, CHATS}
    assert "closed" in events


@pytest.mark.e2e
def test_the_pages_of_jobs_that_an_older_version_has_seen_are_there(before: str, tmp_path: Path) -> None:
    with back(tmp_path, before, rebooted=True) as daemon:
        for job in (TRAINS, CHATS, "41505"):
            page = daemon.get(f"/jobs/{job}")
            assert page.status == 200, page.body
            assert job in page.body
        assert daemon.get("/").status == 200
