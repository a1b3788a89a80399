"""The benchmark of faults: the law that inputs are judged by, every parser under a few of them, and a short bad day."""

import contextlib
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from exporter.agent.inventory import InventoryFile
from exporter.agent.pause import PauseFile
from exporter.config import ConfigError, load
from exporter.core.job_record import JobRecordQuery
from exporter.core.ledger import Book
from exporter.core.model import SECOND
from exporter.engines.page import MetricsPage
from exporter.history.store import DamagedError, open_read_only
from exporter.schedulers.kubernetes import kubelet as wire
from exporter.schedulers.kubernetes.api import UNREADABLE
from exporter.schedulers.slurm.notation import expand_hostlist
from exporter.sources.base import SourceError
from exporter.trace import TraceError, read_trace
from tests.fuzz import day as days
from tests.fuzz.bombs import BOMBS, Bomb, burst
from tests.fuzz.changing import CHANGES, MOST_BYTES, Changer
from tests.fuzz.day import Day, Met, day, schedule
from tests.fuzz.endurance import measured
from tests.fuzz.soak import Found, rows
from tests.fuzz.targets import TARGETS
from tests.fuzz.targets_files import trace
from tests.fuzz.targets_history import store_file
from tests.fuzz.trying import Target, Trial, Tried, tried
from tests.fuzz.unwell import BOARDS, GPUS, Node
from tests.kubernetes import kubelet
from tests.sources.exporter_pages import gpu, source

DEEP = b"[" * 100_000


def target(feed: Callable[[bytes], object], *refuses: type[Exception]) -> Target:
    return Target(name="x", what="", samples=list, make=lambda: feed, refuses=refuses)


def judged(feed: Callable[[bytes], object], *refuses: type[Exception]) -> Tried:
    trial = Trial(target(feed, *refuses), seconds_each=0.2)
    trial.one(b"one")
    return trial.done()


# -- the law --


def raises(error: BaseException) -> Callable[[bytes], object]:
    def feed(_: bytes) -> None:
        raise error

    return feed


def for_ever(_: bytes) -> None:
    while True:
        pass


def test_what_is_taken_or_refused_with_a_reason_is_lawful() -> None:
    taken, refused = judged(len), judged(raises(ValueError("no number")), ValueError)
    assert (taken.inputs, taken.taken, taken.refused, taken.findings) == (1, 1, 0, [])
    assert (refused.inputs, refused.taken, refused.refused, refused.findings) == (1, 0, 1, [])


@pytest.mark.parametrize(
    ("feed", "word"),
    [
        (raises(KeyError("x")), "KeyError"),
        (raises(RecursionError("deep")), "RecursionError"),
        (raises(MemoryError()), "MemoryError"),
        (raises(AssertionError("a promise")), "a promise"),
        (raises(ValueError(" ")), "ValueError"),
        (for_ever, "TooLongError"),
    ],
)
def test_all_else_is_a_finding(feed: Callable[[bytes], object], word: str) -> None:
    (finding,) = judged(feed, ValueError).findings
    assert word in finding.error
    assert finding.data == b"one"


def test_a_place_is_told_once_and_the_parser_is_a_fresh_one_after_it() -> None:
    made: list[int] = []

    def make() -> Callable[[bytes], object]:
        made.append(1)
        return raises(KeyError("x"))

    found = tried(Target(name="x", what="", samples=list, make=make), [b"a", b"b", b"c"])
    assert (found.inputs, len(found.findings), len(made)) == (3, 1, 4)


def test_the_same_dice_change_the_same_way_and_others_otherwise() -> None:
    samples = [b'{"a": 1, "b": [2, 3]}\n', b"name=value\n" * 3]
    first, again, other = (Changer(samples, seed) for seed in (1, 1, 2))
    ours = [first.one() for _ in range(200)]
    assert ours == [again.one() for _ in range(200)]
    assert ours != [other.one() for _ in range(200)]
    assert len(set(ours)) > 150
    assert max(map(len, ours)) <= MOST_BYTES


@pytest.mark.parametrize("change", dict.fromkeys(CHANGES))
@pytest.mark.parametrize("text", [b"", b"1", b"a 1\nb 2.5\n"])
def test_each_change_stands_any_text(change: Callable[[bytes, random.Random], bytes], text: bytes) -> None:
    dice = random.Random(3)  # noqa: S311
    assert text == b"" or any(change(text, dice) != text for _ in range(20))


# -- every parser --


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_no_parser_breaks_the_law(name: str) -> None:
    samples = TARGETS[name].samples()
    changer = Changer(samples, 11)
    good = tried(TARGETS[name], samples)
    bad = tried(TARGETS[name], (changer.one() for _ in range(120)))
    assert not [*good.findings, *bad.findings]
    assert good.taken >= len(samples) // 2, "hardly a sample is taken: what is changed of them shows little"


_SOON = ("names", "brackets", "includes", "laughs", "nested", "10 MB", "line of 4 MB")


@pytest.mark.parametrize("bomb", [b for b in BOMBS if any(w in b.what for w in _SOON) and "web" not in b.target.name])
def test_a_bomb_does_not_go_off(bomb: Bomb) -> None:
    came = burst(bomb)
    assert came.became in ("taken", "refused")


# -- what it has found --


@pytest.mark.parametrize(
    "text", ["n[1-65536][1-65536][1-65536]", "n" + "[1-2]" * 2000, "n" * 60_000 + "[1-65536]", "n[1-65536][1-9]"]
)
def test_a_hostlist_that_grows_is_refused_before_it_has_grown(text: str) -> None:
    with pytest.raises(ValueError, match="hostlist"):
        expand_hostlist(text)
    assert len(expand_hostlist("n[1-256][1-256]")) == 65_536


def test_an_engine_may_say_a_number_that_is_none() -> None:
    page = MetricsPage(f"vllm:num_requests_running {'9' * 400}\nvllm:num_requests_waiting 3\n")
    assert page.total("vllm_num_requests_running") is None
    assert page.total("vllm_num_requests_waiting") == 3


def test_a_page_of_a_whole_cluster_is_not_this_nodes() -> None:
    with pytest.raises(SourceError, match="1100 GPUs, and no node"):
        source("".join(gpu(number) for number in range(1100))).read(0)


def test_a_kubelet_of_a_million_pods_is_refused() -> None:
    many = kubelet.MESSAGES["ListPodResourcesResponse"](pod_resources=[kubelet.pod("a")] * 10_001)
    with pytest.raises(ValueError, match="10001 pods"):
        wire.read_list(many.SerializeToString())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"a." * 20_000 + b"a = 1", "line 1 has more"),
        (b"a = " + DEEP, "line 1"),
    ],
)
def test_a_configuration_is_refused_with_its_file(tmp_path: Path, text: bytes, word: str) -> None:
    (tmp_path / "c.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"c.toml: .*{word}"):
        load(tmp_path / "c.toml", environ={})


def test_a_port_of_five_thousand_digits_is_none() -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        load(None, environ={"GPU_EFFICIENCY_WEB_LISTEN_ADDRESS": ":" + "1" * 5000})


@pytest.mark.parametrize("line", [b'{"at":1,"wall":1,"x":' + DEEP + b"}\n", b"\xff\n"])
def test_a_recording_is_refused_with_its_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "t.jsonl").write_bytes(trace(1) + line)
    with read_trace(tmp_path / "t.jsonl") as found, pytest.raises(TraceError, match="line 3"):
        list(found)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.trace._LONGEST_LINE", 1 << 16)
    (tmp_path / "t.jsonl").write_bytes(trace(1) + b" " * (1 << 17))
    with (
        read_trace(tmp_path / "t.jsonl") as found,
        pytest.raises(TraceError, match="line 3 has more than 65,536 bytes"),
    ):
        list(found)


def test_files_of_state_may_be_nested_for_ever(tmp_path: Path) -> None:
    (tmp_path / "pause").write_bytes(b'{"x":' + b"[" * 4000)
    assert PauseFile(tmp_path / "pause").poll(), "whatever it says, it was meant as a pause"
    (tmp_path / "inventory.json").write_bytes(b'[{"x":' + DEEP)
    assert InventoryFile(tmp_path / "inventory.json").load() == ()


@pytest.mark.slow
@pytest.mark.parametrize("body", [None, "text", 5, b"\x81\xa4node\xa1\xff"])
@pytest.mark.parametrize(
    ("table", "column"), [("statement", "brief"), ("rest", "body"), ("event", "body"), ("book", "body")]
)
def test_a_damaged_row_is_told_as_damage(tmp_path: Path, table: str, column: str, body: object) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(store_file())
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, 'BLOB NOT NULL', 'BLOB')")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE {table} SET {column} = ?", (body,))  # noqa: S608
    with closing(open_read_only(path)) as store, pytest.raises(DamagedError, match="damaged"):
        store.events(0.0, 5), store.closed_books(), store.job_records(JobRecordQuery())


# -- a bad day --


@pytest.fixture(name="bad", scope="module")
def _bad() -> Day:
    return day(hours=2.5, each=1)


@pytest.mark.slow
def test_a_bad_day_loses_no_second_and_hides_none(bad: Day) -> None:
    assert (bad.largest_error, bad.conservation_errors, bad.lost, bad.fell) == (0, 0, 0.0, 0)
    assert (bad.agent_errors, bad.unanswered, bad.needless) == (0, 0, 0.0)
    assert {met.what for met in bad.met} == {fault.what for fault in days.FAULTS}
    assert all(met.recovered is not None and met.recovered <= 75 for met in bad.met)


@pytest.mark.slow
def test_what_a_fault_hides_is_unobserved_for_as_long_as_it_lasts(bad: Day) -> None:
    hides = {fault.what: fault.boards == GPUS for fault in days.FAULTS}
    for met in bad.met:
        each = met.unobserved / GPUS
        if met.what == "the source talks nonsense":
            assert met.kinds["rejected"] > 10
        elif hides[met.what]:
            assert met.lasted - 10 <= each <= met.lasted + 80, met
        else:
            assert each == 0, met


def test_each_second_nobody_saw_has_its_reason_and_nothing_good_is_refused(bad: Day) -> None:
    by = {met.what: met for met in bad.met}
    assert "source_hung" in by["the source hangs"].reasons
    assert "source_failed" in by["the source raises"].reasons
    assert by["the daemon restarts (20 s away)"].reasons.keys() == {"exporter_down"}
    assert [what for what, met in by.items() if "rejected" in met.kinds] == ["the source talks nonsense"]


def test_a_schedule_is_whole_and_nothing_overlaps() -> None:
    plan = schedule(24, 6, 1)
    assert len(plan) == 6 * len(days.FAULTS)
    assert plan == schedule(24, 6, 1) != schedule(24, 6, 2)
    ends = [begins + lasts for begins, lasts, _ in plan]
    assert all(begins >= end + 100 for end, (begins, _, _) in zip(ends, plan[1:], strict=False))


def change(*, paid: int = 0, parts: int = 0) -> Callable[[Book], None]:
    def spoil(book: Book) -> None:
        book.paid += paid
        book.parts[0] += parts

    return spoil


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        (change(paid=1), "largest_error"),
        (change(paid=-SECOND, parts=-SECOND), "fell"),
        (change(paid=SECOND, parts=SECOND), "lost"),
    ],
)
def test_a_day_of_wrong_books_is_not_called_good(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Book], None], shown: str
) -> None:
    tick = Node.tick

    def spoilt(node: Node) -> object:
        found = tick(node)
        if node.clock.now() > 1100 * SECOND:
            spoil(node.agent.ledger.gpus[BOARDS[3].uuid].book)
        return found

    monkeypatch.setattr(Node, "tick", spoilt)
    assert getattr(day(hours=0.2, each=0), shown) > 0


# -- the rows --


def test_rows_say_no_where_it_is_no() -> None:
    good, never = Met("the source hangs", 1.0, 60.0, recovered=5.0), Met("the source hangs", 2.0, 60.0)
    whole = measured(Day(met=[good], ticks=5, hours=1.0), None)
    assert all(row.met is not False for row in whole.rows)
    bad = measured(Day(met=[good, never], ticks=5, hours=1.0, largest_error=1, lost=0.5, fell=2, needless=8.0), None)
    assert [row.met for row in bad.rows] == [False, False, False, True, False, False]
    assert [row.median for row in bad.rows[:3]] == ["1 ns", "0.500 s", "2"]


def test_a_soak_is_disturbed_by_one_late_tick_or_one_lost_scrape() -> None:
    counts = {
        "late_ticks_total": 0.0,
        "ticks_total": 60.0,
        "unobserved_seconds_total": 0.0,
        "conservation_errors_total": 0.0,
        "errors_total": 0.0,
    }
    well = Found(seconds=61, counts=counts, times=[0.01, 0.02], memory=[50.0, 60.0, 55.0], attackers="flood began: 7\n")
    assert [row.met for row in rows(well)] == [True, True, True, True, None, None]
    late = msgspec.structs.replace(
        well, counts=counts | {"late_ticks_total": 1.0, "ticks_total": 40.0}, failures=["x"], times=[11.0]
    )
    assert [row.met for row in rows(late)][:4] == [False, False, False, False]


@pytest.mark.parametrize(
    "line", [b'{"type":"ADDED","object":{"x":"\xff"}}\n', b'{"type":"ADDED","object":' + DEEP + b"}\n"]
)
def test_a_watch_that_says_what_cannot_be_read_is_asked_anew(line: bytes) -> None:
    """As the watch's own loop catches it: an error of another kind would end the watch for good."""
    feed = TARGETS["watch of the API server"].make()
    with contextlib.suppress(*UNREADABLE):
        feed(line)
    assert tried(TARGETS["watch of the API server"], [line]).findings == []
