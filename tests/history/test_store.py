"""The store returns what was written, in order and by query; it is kept small, private, and has a single writer."""

import gc
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample, NodeEvent, PriceChange
from exporter.core.model import Owner
from exporter.history.store import (
    ClosedBook,
    DamagedError,
    HistoryError,
    HistoryStore,
    JobRecordSummary,
    LockedError,
    open_if_readable,
    open_or_replace,
    open_read_only,
)

DAY = 86_400.0


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture(name="store")
def _store(path: Path) -> Iterator[HistoryStore]:
    with closing(HistoryStore(path)) as store:
        yield store


def said(job: str = "1", end: float = 100.0, *, life: str = "a", start: float | None = None, **who: Any) -> JobRecord:
    owner = Owner(job_id=job, **({"user": "ada", "account": "nlp", "namespace": "lab"} | who))
    return JobRecord(
        node="n", life=life, owner=owner, start=end - 10 if start is None else start, end=end, running=False,
        paid=10, parts={"useful": 7, "unobserved": 3}, energy={"useful": 1.5},
        samples=(JobSample(end, 1.25, 1, 1, 1, 1, 9),),
    )  # fmt: skip


def jobs(found: Sequence[JobRecord | JobRecordSummary]) -> list[str]:
    return [one.owner.job_id for one in found]


def test_a_statement_comes_out_as_it_was_put_in(store: HistoryStore) -> None:
    one = said()
    store.write(job_records=[one])
    assert store.job_records(JobRecordQuery()) == [one]


def briefs(store: HistoryStore, wanted: JobRecordQuery, *cuts: float) -> list[JobRecordSummary]:
    return sorted(store.summaries(wanted, cuts), key=lambda one: one.end, reverse=True)


def test_sums_are_told_what_they_need_and_samples_of_who_ran_on_both_sides_of_a_cut(store: HistoryStore) -> None:
    course = tuple(JobSample(at, at, at, 1, 1, 1, 9) for at in (92.0, 95.0, 100.0))
    one = replace(said(), samples=course, money={"USD": 2.5}, models=("H100",), whole_gpus=0.5, simulated=True)
    one = replace(one, price_changes=(PriceChange(2**60, {"USD": 1.5}),))
    store.write(job_records=[one])  # from 90 to 100
    (alone,) = briefs(store, JobRecordQuery())
    for field in set(JobRecordSummary.__struct_fields__) - {"samples"}:
        assert getattr(alone, field) == getattr(one, field), field
    assert alone.samples == ()
    for cuts, told in (
        ((80.0, 90.0, 100.0, 110.0), ()),
        ((80.0, 90.5), course),
        ((99.5, 100.0), course),
        ((89.0, 101.0), ()),
    ):
        (found,) = briefs(store, JobRecordQuery(), *cuts)
        assert found.samples == told, cuts


def test_sums_are_told_all_however_many_and_by_which_way_they_are_found(store: HistoryStore) -> None:
    store.write(job_records=[said(f"{n}", 100.0 * n, user="bob" if n % 2 else "ada") for n in range(1, 101)])
    for since in (0.0, 150.0, 5_000.0, 9_950.0, 20_000.0):
        latest = [f"{n}" for n in range(100, 0, -1) if 100.0 * n >= since]
        assert jobs(briefs(store, JobRecordQuery(since=since, limit=3))) == latest
        assert jobs(briefs(store, JobRecordQuery(since=since, user="bob"))) == [job for job in latest if int(job) % 2]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE rest SET body = x'00'",
        "UPDATE rest SET body = NULL",
        "DELETE FROM rest",
        "UPDATE statement SET brief = 7",
    ],
)
def test_sums_of_a_damaged_store_say_so(store: HistoryStore, path: Path, damage: str) -> None:
    store.write(job_records=[said()])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, 'body BLOB NOT NULL', 'body BLOB') WHERE name = 'rest'")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    with pytest.raises(DamagedError, match="damaged"):
        briefs(store, JobRecordQuery(), 95.0)


@pytest.mark.slow
def test_who_reads_for_sums_sees_one_moment_and_keeps_nobody_from_writing(store: HistoryStore, path: Path) -> None:
    store.write(job_records=[said(f"{n}", 100.0 * n) for n in range(1, 4)])
    with closing(open_read_only(path)) as reader:
        told = iter(reader.summaries(JobRecordQuery(), [95.0, 195.0, 295.0]))
        first = next(told)
        store.write(job_records=[said("4", 400.0)])
        store.trim(now=1000.0, keep_seconds=650.0, most_bytes=1 << 30)
        rest = list(told)
        assert all(one.samples for one in (first, *rest))
        assert len(rest) == 2
        assert jobs(briefs(reader, JobRecordQuery())) == ["4"]


def test_sums_that_are_given_up_leave_the_collector_as_it_was(store: HistoryStore) -> None:
    store.write(job_records=[said("1"), said("2")])
    told = store.summaries(JobRecordQuery(), ())
    next(told)
    assert not gc.isenabled()
    told.close()
    assert gc.isenabled()


def test_samples_are_kept_to_the_thousandth(store: HistoryStore) -> None:
    course = tuple(JobSample(1e9 + n / 3, *(n * 1.23456 + k for k in range(6))) for n in range(50))
    one = replace(said(), samples=course)
    store.write(job_records=[one])
    (found,) = store.job_records(JobRecordQuery())
    assert len(found.samples) == 50
    for there, here in zip(found.samples, course, strict=True):
        assert there.at == pytest.approx(here.at, abs=0.000501)
        assert there.joules == pytest.approx(here.joules, abs=0.000501)
        assert there.paid == pytest.approx(here.paid, abs=0.000501)


def test_a_later_word_on_the_same_job_takes_the_place_of_the_first_and_another_life_does_not(
    store: HistoryStore,
) -> None:
    store.write(job_records=[said(end=100.0, start=1.0)])
    store.write(job_records=[said(end=200.0, start=1.0, user="bob"), said(end=150.0, life="b", start=1.0)])
    found = store.job_records(JobRecordQuery())
    assert [(one.life, one.end) for one in found] == [("a", 200.0), ("b", 150.0)]
    assert found[0].samples[0].at == 200.0
    assert jobs(store.job_records(JobRecordQuery(user="bob"))) == ["1"]
    assert rows(store.path, "rest") == 2


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (JobRecordQuery(), ["5", "4", "3", "2", "1"]),
        (JobRecordQuery(limit=2), ["5", "4"]),
        (JobRecordQuery(job_id="3"), ["3"]),
        (JobRecordQuery(user="bob"), ["4"]),
        (JobRecordQuery(account="vision"), ["5"]),
        (JobRecordQuery(namespace="lab"), ["5", "4", "3", "2", "1"]),
        (JobRecordQuery(namespace="prod"), []),
        (JobRecordQuery(since=300.0), ["5", "4", "3"]),
        (JobRecordQuery(until=290.0), ["3", "2", "1"]),
        (JobRecordQuery(since=200.0, until=200.0, user="ada"), ["2"]),
        (JobRecordQuery(user="ada", account="vision", job_id="5"), ["5"]),
    ],
)
def test_what_is_asked_for_is_what_the_filter_says(
    store: HistoryStore, wanted: JobRecordQuery, found: list[str]
) -> None:
    store.write(
        job_records=[
            said(f"{n}", 100.0 * n, user="bob" if n == 4 else "ada", account="vision" if n == 5 else "nlp")
            for n in (3, 1, 5, 2, 4)
        ]
    )
    assert jobs(store.job_records(wanted)) == found
    assert jobs(briefs(store, wanted))[: wanted.limit] == found
    assert (
        sorted(found)
        == sorted(one for one in jobs(store.job_records(JobRecordQuery())) if wanted.matches(_one(store, one)))[
            -wanted.limit :
        ]
    )


def _one(store: HistoryStore, job: str) -> JobRecord:
    return store.job_records(JobRecordQuery(job_id=job))[0]


def test_events_and_books_come_out_in_order(store: HistoryStore) -> None:
    store.write(
        events=[NodeEvent(at=1.0, kind="hung"), NodeEvent(at=3.0, kind="xid"), NodeEvent(at=2.0, kind="hung_over")]
    )
    assert [event.kind for event in store.events(2.0, 10)] == ["xid", "hung_over"]
    assert [event.kind for event in store.events(0.0, 1)] == ["xid"]
    times = {("B", "a"): (2.0, 3.0), ("A", "b"): (1.0, 2.0), ("A", "c"): (1.0, 1.0)}  # c ended at its first reading
    books = [
        ClosedBook(uuid=uuid, life=life, since=since, until=until, paid=1, parts={"useful": 1})
        for (uuid, life), (since, until) in times.items()
    ]
    store.write(closed=books)
    store.write(closed=books)
    assert [(book.uuid, book.life) for book in store.closed_books()] == [("A", "c"), ("A", "b"), ("B", "a")]


def test_a_write_is_all_or_nothing(store: HistoryStore) -> None:
    class TornError(Exception):
        pass

    def torn() -> Iterator[JobRecord]:
        yield said("1")
        raise TornError

    with pytest.raises(TornError):
        store.write(state=[("about", b"new")], job_records=torn())
    assert store.state("about") is None
    assert store.job_records(JobRecordQuery()) == []
    store.write(state=[("about", b"next")])
    assert store.state("about") == b"next"


def test_readers_read_while_it_is_written_and_from_a_copy(store: HistoryStore, path: Path, tmp_path: Path) -> None:
    store.write(job_records=[said()])
    with closing(open_read_only(path)) as reader:
        store.write(job_records=[said("2", 200.0)])
        assert jobs(reader.job_records(JobRecordQuery())) == ["2", "1"]
        with pytest.raises(HistoryError):
            reader.write(job_records=[said("3")])
    store.close()
    copy = tmp_path / "copy.db"
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o440)
    with closing(open_read_only(copy)) as reader:
        assert jobs(reader.job_records(JobRecordQuery())) == ["2", "1"]


def test_one_daemon_writes_and_when_it_is_gone_another_may(store: HistoryStore, path: Path) -> None:
    with pytest.raises(LockedError, match="another daemon"):
        HistoryStore(path)
    store.close()
    HistoryStore(path).close()


def test_a_store_is_not_for_every_user_of_the_node(store: HistoryStore, path: Path) -> None:
    store.write(state=[("about", b"x")])
    for file in path.parent.iterdir():
        assert not stat.S_IMODE(file.stat().st_mode) & stat.S_IRWXO, file


def test_that_the_file_was_taken_away_is_seen(store: HistoryStore, path: Path) -> None:
    assert store.is_current
    path.rename(path.with_suffix(".old"))
    assert not store.is_current
    path.write_bytes(b"")
    assert not store.is_current


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608  ours


def test_the_wal_of_a_file_that_was_replaced_is_never_merged_into_the_new_one(
    store: HistoryStore, path: Path, tmp_path: Path
) -> None:
    backup = tmp_path / "backup.db"
    with closing(HistoryStore(backup)) as other:
        other.write(state=[("ledger", b"of the backup")])
    store.write(state=[("ledger", b"of the file that is replaced")])
    backup.replace(path)
    store.close()
    (wal,) = path.parent.glob(f"{path.name}.replaced-*-wal")
    assert wal.stat().st_size > 0
    with closing(HistoryStore(path)) as again:
        assert again.state("ledger") == b"of the backup"


def test_what_is_too_old_is_forgotten(store: HistoryStore) -> None:
    store.write(job_records=[said(f"{n}", n * DAY) for n in range(1, 11)])
    store.write(events=[NodeEvent(at=n * DAY, kind="xid") for n in range(1, 11)])
    assert store.trim(now=10 * DAY, keep_seconds=6 * DAY, most_bytes=1 << 30) == 3
    assert jobs(store.job_records(JobRecordQuery())) == [f"{n}" for n in range(10, 3, -1)]
    assert len(store.events(0, 100)) == 7
    assert rows(store.path, "rest") == 7


def test_a_clock_that_is_years_ahead_makes_nothing_old(store: HistoryStore, path: Path) -> None:
    """A daemon of the right time, one that starts ten years ahead and writes rows then, and the right one again."""
    ahead = 3660 * DAY
    store.write(job_records=[said(f"{n}", n * DAY) for n in range(1, 11)])
    store.trim(now=10 * DAY, keep_seconds=20 * DAY, most_bytes=1 << 30)
    store.close()
    with closing(HistoryStore(path)) as wrong:
        wrong.write(job_records=[said("ahead", ahead)])
        for _ in range(3):
            assert wrong.trim(now=ahead, keep_seconds=40 * DAY, most_bytes=1 << 30) == 0
    with closing(HistoryStore(path)) as right:
        assert right.trim(now=33 * DAY, keep_seconds=30 * DAY, most_bytes=1 << 30) == 2
        assert len(right.job_records(JobRecordQuery())) == 9


def test_rows_of_an_older_version_say_what_its_daemon_has_seen(store: HistoryStore, path: Path) -> None:
    store.write(job_records=[said(f"{n}", n * DAY) for n in range(1, 11)])
    store.close()
    with closing(HistoryStore(path)) as wrong:
        wrong.write(events=[NodeEvent(at=3660 * DAY, kind="started")])
        assert wrong.trim(now=3660 * DAY, keep_seconds=40 * DAY, most_bytes=1 << 30) == 0


def test_the_oldest_go_before_the_file_is_too_large_and_the_room_is_given_back(store: HistoryStore, path: Path) -> None:
    store.write(state=[("ledger", b"kept")])
    for n in range(20):
        store.write(
            job_records=[said(f"{n * 50 + k}", float(n * 50 + k), name=f"{n}" * 200 + "x" * 800) for k in range(50)]
        )
    store.trim(now=0.0, keep_seconds=1.0, most_bytes=1 << 30)
    before = path.stat().st_size
    assert store.trim(now=0.0, keep_seconds=1.0, most_bytes=before // 2) > 100
    assert path.stat().st_size <= before // 2
    left = jobs(store.job_records(JobRecordQuery(limit=10_000)))
    assert left == [f"{n}" for n in range(999, 999 - len(left), -1)]
    assert store.state("ledger") == b"kept"
    assert store.trim(now=0.0, keep_seconds=1.0, most_bytes=1) > 0
    assert store.trim(now=0.0, keep_seconds=1.0, most_bytes=1) == 0


def test_events_that_come_every_second_take_no_room_from_job_records(store: HistoryStore, path: Path) -> None:
    """A hundred records in a quarter of the limit, then a day of a GPU that fails every other second."""
    store.write(job_records=[said(f"{n}", float(n), name=f"{n}" * 200 + "x" * 800) for n in range(100)])
    store.trim(now=0.0, keep_seconds=1.0, most_bytes=1 << 30)
    limit = 4 * path.stat().st_size
    for hour in range(24):
        store.write(
            events=[NodeEvent(at=hour * 3600.0 + n, kind="xid", uuid="GPU-" + "1" * 36) for n in range(0, 3600, 2)]
        )
        store.trim(now=0.0, keep_seconds=1.0, most_bytes=limit)
        assert path.stat().st_size <= limit
    assert len(store.job_records(JobRecordQuery(limit=1000))) == 100
    events = store.events(0.0, 100_000)
    assert events[0].at == 23 * 3600.0 + 3598
    assert len({event.at for event in events}) == len(events) == (events[0].at - events[-1].at) / 2 + 1


def test_events_keep_their_share_of_a_store_that_is_full_of_job_records(store: HistoryStore, path: Path) -> None:
    store.write(events=[NodeEvent(at=float(n), kind="xid") for n in range(20)])
    store.write(job_records=[said(f"{n}", float(n), name=f"{n}" * 200 + "x" * 800) for n in range(1000)])
    store.trim(now=0.0, keep_seconds=1.0, most_bytes=1 << 30)
    assert store.trim(now=0.0, keep_seconds=1.0, most_bytes=path.stat().st_size // 2) > 100
    assert len(store.events(0.0, 100)) == 20


def test_the_log_beside_it_does_not_grow_for_ever(store: HistoryStore, path: Path) -> None:
    for n in range(300):
        store.write(state=[("ledger", bytes(range(256)) * 100 + bytes([n % 256]))], durable=False)
    store.trim(now=0.0, keep_seconds=0.0, most_bytes=1 << 30)
    assert store.bytes < 200_000
    assert Path(f"{path}-wal").stat().st_size == 0


def test_a_store_of_a_newer_version_is_left_alone(store: HistoryStore, path: Path) -> None:
    store.close()
    with closing(sqlite3.connect(path)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute(f"PRAGMA user_version = {version + 1}")
    for read_only in (False, True):
        with pytest.raises(HistoryError, match="newer version") as caught:
            HistoryStore(path, read_only=read_only)
        assert not isinstance(caught.value, DamagedError)
    with pytest.raises(HistoryError, match="newer version"):
        open_or_replace(path)
    assert path.exists()


def test_a_file_that_is_no_store_of_this_version_is_not_read(path: Path) -> None:
    with pytest.raises(HistoryError, match="no such store"):
        open_read_only(path)
    path.write_bytes(b"")
    with pytest.raises(HistoryError, match="empty, or written by an older version"):
        open_read_only(path)
    with open_if_readable(path) as found:
        assert found is None


@pytest.mark.parametrize("content", [b"this is a text and no database\n" * 400, b"SQLite format 3\0" + b"\xff" * 4080])
def test_a_damaged_file_is_moved_away_and_another_is_begun(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        HistoryStore(path)
    with closing(open_or_replace(path)) as store:
        store.write(job_records=[said()])
    (aside,) = path.parent.glob("history.db.damaged-*")
    assert aside.read_bytes() == content


def test_one_found_damaged_while_it_was_open_is_moved_away_whatever_it_looks_like(
    store: HistoryStore, path: Path
) -> None:
    store.write(job_records=[said()])
    store.close()
    with closing(open_or_replace(path, damaged=True)) as fresh:
        assert fresh.job_records(JobRecordQuery()) == []
    (aside,) = path.parent.glob("history.db.damaged-*")
    with closing(open_read_only(aside)) as old:
        assert jobs(old.job_records(JobRecordQuery())) == ["1"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="does its folder exist"):
        HistoryStore(tmp_path / "nowhere" / "history.db")
    folder = tmp_path / "folder.db"
    folder.mkdir()
    with pytest.raises(HistoryError, match="may this daemon write there"):
        HistoryStore(folder)


def test_of_one_that_may_not_be_written_it_says_who_is_to_let_it(store: HistoryStore, path: Path) -> None:
    store.close()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db, pytest.raises(sqlite3.Error) as caught:
        db.execute("DELETE FROM event")
    from exporter.history.store import translated_errors  # noqa: PLC0415  needed here only

    with pytest.raises(HistoryError, match="let this daemon write it"), translated_errors(path):
        raise caught.value


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (JobRecordQuery(job_id="6_1"), ["7"]),
        (JobRecordQuery(job_id="6_11"), ["6"]),
        (JobRecordQuery(job_id="6+1"), []),
        (JobRecordQuery(job_id="7+1"), ["9"]),
        (JobRecordQuery(job_id="6"), ["6"]),
        (JobRecordQuery(job_id="5_1"), ["5_1"]),
        (JobRecordQuery(array_id="6"), ["8", "7", "6"]),
        (JobRecordQuery(array_id="6", user="bob"), ["8"]),
        (JobRecordQuery(array_id="1"), []),
        (JobRecordQuery(job_id="6_1", since=800.0), []),
    ],
)
def test_a_job_is_found_by_its_place_in_an_array_too(
    store: HistoryStore, wanted: JobRecordQuery, found: list[str]
) -> None:
    store.write(
        job_records=[
            said("6", 600.0, array_id="6", array_task_id="11"),
            said("7", 700.0, array_id="6", array_task_id="1"),
            said("8", 800.0, array_id="6", user="bob"),
            said("9", 900.0, array_id="7", het_job_offset="1", name="array_id\xa16"),
            said("5_1", 1000.0, name="\xa8array_id\xa16\xadarray_task_id\xa11"),
        ]
    )
    assert jobs(store.job_records(wanted)) == found
    assert sorted(jobs(briefs(store, wanted))) == sorted(found)
    assert [one.owner.job_id for one in store.job_records(JobRecordQuery()) if wanted.matches(one)] == found
