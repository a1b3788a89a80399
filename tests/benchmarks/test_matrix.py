"""A node by its size and pace: what the figures of a daemon are made of, by figures worked out by hand."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from benchmarks.node import matrix as measured
from benchmarks.node.matrix import MATRIX, WAVES, matrix, rows, table
from benchmarks.node.watched import QUICK, Case, Pace, Page, Seen, check, held, late, page_in
from benchmarks.rig.noted import Note, Noted, notes, opened, per_tick
from benchmarks.rig.scrapers import Scrapers
from tests.schedulers.mapping import read_mapping
from tests.shared_library import compiler

ROOT = Path(__file__).resolve().parents[2]
USUAL, CUT = Case(8, 1, 8), Case(8, 1, 56, cut=True)


@pytest.fixture
def _compiler() -> None:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in NVML")


# -- cases --


def test_a_case_says_what_it_is() -> None:
    assert (Case(1, 10, 1).words, Case(16, 1, 0).words) == ("1 GPU, 10 Hz, 1 job", "16 GPUs, 1 Hz, 0 jobs")
    assert (CUT.words, CUT.devices, USUAL.devices) == ("56 MIG instances, 1 Hz, 56 jobs", 64, 8)
    assert (CUT.places[0], CUT.places[-1], len(CUT.places)) == ("0.1", "7.7", 56)


def test_jobs_are_dealt_out_in_turn_and_the_daemon_reads_them_so(tmp_path: Path) -> None:
    files = held(Case(2, 1, 5))
    assert files == {"0": "41000\n41002\n41004\n", "1": "41001\n41003\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="ascii")
    assert read_mapping(tmp_path) == {"0": ("41000", "41002", "41004"), "1": ("41001", "41003")}
    assert held(Case(8, 1, 0)) == {}
    assert max(text.count("\n") for text in held(Case(8, 1, 200)).values()) == 25


def test_every_size_pace_and_number_of_jobs_is_among_the_cases_once() -> None:
    cases = [case for wave in WAVES for case in wave]
    assert len(set(cases)) == len(cases)
    assert {case.size for case in cases} == {"1 GPU", "8 GPUs", "16 GPUs", "56 MIG instances"}
    for size in {case.size for case in cases}:
        assert {case.hertz for case in cases if case.size == size} == {1, 10}
    for hertz in (1, 10):
        assert {0, 8, 64, 200} == {case.jobs for case in cases if case.size == "8 GPUs" and case.hertz == hertz}
    of_budgets = (measured.CPU_BUDGETS, measured.PEAK_BUDGETS, measured.SCRAPE_BUDGETS, measured.LATE_BUDGETS)
    assert {case for budgets in of_budgets for case in budgets} <= set(cases)


# -- a daemon that is what its row says --

PAGE = """
# HELP gpu_efficiency_paid_seconds_total Paid.
gpu_efficiency_ticks_total 12
gpu_efficiency_paid_seconds_total{uuid="GPU-0",gpu="0"} 1.25
gpu_efficiency_paid_seconds_total{uuid="GPU-1",gpu="1"} 1.5
gpu_efficiency_job_info{uuid="GPU-0",job_id="41"} 1
gpu_efficiency_job_info{uuid="GPU-1",job_id="41"} 1
gpu_efficiency_job_info{uuid="GPU-1",job_id="42"} 1
gpu_efficiency_job_paid_seconds_total{job_id="43"} 7
"""


def test_a_page_is_counted() -> None:
    found = page_in(PAGE)
    assert found == Page(devices=2, jobs=2, series=7)


SAID = Page(8, 8, 1000)


@pytest.mark.parametrize("page", [replace(SAID, devices=7), replace(SAID, jobs=9)])
def test_a_daemon_that_is_another_case_is_not_measured(page: Page) -> None:
    check(USUAL, seen(), due=0.9)
    with pytest.raises(RuntimeError, match="something else"):
        check(USUAL, seen(page=page), due=0.9)


def test_a_daemon_that_could_not_keep_its_pace_when_alone_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="89 % of the ticks"):
        check(USUAL, seen(came={"alone": 0.89}), due=0.9)


@pytest.mark.parametrize("blind", [{"gets": []}, {"late": {"alone": [0.1], "1 s": []}}, {"servers": {"1 s": []}}])
def test_a_daemon_in_which_nothing_was_seen_is_not_measured(blind: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="no tick or no scrape"):
        check(USUAL, seen(**blind), due=0.9)


# -- notes --


def test_notes_are_read_but_for_one_half_written(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_bytes(pack("<qqqq", 10_000_000, 12_500_000, 0, 0) + pack("<qqqq", 20, 21, 5, 600) + b"half")
    first, second = notes(file)
    assert (first.late_ms, second) == (2.5, Note(20, 21, 5, 600))


def test_only_ticks_due_within_the_phase_count() -> None:
    noted = [Note(due, due + 1_000_000) for due in (1_000_000_000, 2_000_000_000, 3_000_000_000)]
    assert list(late(noted, 1.5, 3.0)) == [1.0]
    assert list(late(noted, 2.0, 3.1)) == [1.0, 1.0]


def test_allocations_are_of_one_tick_and_only_while_they_are_counted() -> None:
    noted = [Note(1, 1), Note(2, 2, 500, 9000), Note(3, 3, 510, 9100), Note(4, 4, 540, 9900)]
    assert list(per_tick(noted)) == [(10, 100), (30, 800)]


@pytest.mark.usefixtures("_compiler")
def test_a_clock_notes_when_a_wait_was_to_end_and_when_it_did(tmp_path: Path) -> None:
    with (tmp_path / "notes").open("wb") as file:
        clock, stop = Noted(file.fileno(), opened()), threading.Event()
        past = time.monotonic_ns() - 50_000_000
        clock.wait(past, stop)
        stop.set()
        clock.wait(past, stop)
    (only,) = notes(tmp_path / "notes")
    assert only.due == past
    assert 50 <= only.late_ms < 60_000


_COUNTING = """
from itertools import repeat
from benchmarks.rig.noted import opened
library = opened()
before = library.counted_calls(), library.counted_bytes()
library.begin_counting()
calls, size = library.counted_calls(), library.counted_bytes()
word = "x"
kept = [(bytes(1000), word * 1000) for _ in repeat(None, 2500)]
print(*before, library.counted_calls() - calls, library.counted_bytes() - size)
"""


@pytest.mark.usefixtures("_compiler")
def test_allocations_are_counted_from_when_it_is_wished() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNTING], cwd=ROOT, capture_output=True, text=True, check=True)
    *before, calls, size = map(int, done.stdout.split())
    assert before == [0, 0]
    assert 5000 <= calls < 8000  # the pairs themselves come from a free list in part
    assert 5_000_000 <= size < 6_000_000


# -- servers --


def test_what_servers_say_is_sorted_by_who_was_scraped(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(port: int, query: str) -> list[dict[str, Any]]:
        assert query == "scrape_duration_seconds%5B21s%5D"
        return [
            {"metric": {"instance": "127.0.0.1:1"}, "values": [[7, f"0.00{port}"]]},
            {"metric": {"instance": "127.0.0.1:2"}, "values": [[7, "0.5"], [8, "0.25"]]},
        ]

    monkeypatch.setattr("benchmarks.rig.scrapers._asked", asked)
    servers = Scrapers({3: Path(), 4: Path()}, {}, (1, 2))
    assert servers.durations(21.0) == {1: [3.0, 4.0], 2: [500.0, 250.0, 500.0, 250.0]}


# -- rows, table, picture --


def seen(**other: Any) -> Seen:
    told: dict[str, Any] = {
        "cpu": {"alone": [0.4, 0.5, 1.8], "15 s": [0.8], "1 s": [2.0, 3.0, 4.0]},
        "peak": {"alone": 60.0, "15 s": 62.0, "1 s": 70.0},
        "switches": {"alone": 18.0, "15 s": 20.0, "1 s": 40.0},
        "late": {"alone": [0.1] * 100, "15 s": [0.2], "1 s": [0.3] * 98 + [4.0, 9.0]},
        "servers": {"15 s": [20.0], "1 s": [30.0, 40.0]},
        "gets": [5.0] * 97 + [8.0, 9.0, 50.0],
        "allocations": 6826, "kib": 569.4, "page": SAID,
        "came": {"alone": 1.0, "15 s": 1.0, "1 s": 0.976},
    }  # fmt: skip
    return Seen(**(told | other))


def test_the_important_case_is_held_against_its_budgets() -> None:
    found = {line.what.split(",")[0].split(" at")[0]: line for line in rows([(USUAL, seen())], Pace())}
    cpu, get = found["CPU of one core"], found["GET /metrics"]
    assert cpu.what.endswith("every 15 s")
    assert (cpu.median, cpu.met) == ("0.80 %", True)
    assert (get.median, get.spread, get.budget, get.met) == ("5.00 ms", "p99 9.00, max 50.00", "<= 10 ms", True)
    assert (found["Resident memory"].median, found["Resident memory"].met) == ("70.0 MiB", True)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"cpu": {"alone": [0.4, 0.5, 2.2], "15 s": [0.8], "1 s": [2.0]}}, "alone"),
        ({"cpu": {"alone": [0.4], "15 s": [1.1], "1 s": [2.0]}}, "every 15 s"),
        ({"peak": {"alone": 60.0, "15 s": 62.0, "1 s": 80.1}}, "Resident"),
        ({"gets": [5.0] * 98 + [11.0, 11.0]}, "GET"),
    ],
)
def test_each_budget_can_be_missed_alone(other: dict[str, Any], what: str) -> None:
    """CPU by all of its time, not by the middle slice; scrapes and ticks by their 99th percentile."""
    (missed,) = [line.what for line in rows([(USUAL, seen(**other))], Pace()) if line.met is False]
    assert what in missed


@pytest.mark.parametrize(("worst", "met"), [([4.0, 9.0], True), ([6.0, 9.0], False)])
def test_lateness_is_judged_where_ticks_are_many(worst: list[float], met: bool) -> None:
    late = {"alone": [7.0], "15 s": [7.0], "1 s": [0.3] * 98 + worst}
    tick = rows([(Case(8, 10, 8), seen(late=late))], Pace())[-1]
    assert (tick.median, tick.spread, tick.met) == ("0.30 ms", f"p99 {worst[0]:.2f}, max 9.00", met)


def test_a_case_without_budgets_is_in_the_table_alone() -> None:
    found = [(Case(8, 10, 64), seen())]
    assert rows(found, Pace()) == []
    ((node, series, came, cpu, peak, switches, get, servers, alone, often, allocated),) = table(found).rows
    assert (node, series, came, cpu) == ("8 GPUs, 10 Hz, 64 jobs", "1,000", "100 / 98", "0.50 / 0.80 / 3.00")
    assert (peak, switches, get) == ("60.0 / 70.0", "18 / 40", "5.00 / 9.00 / 50.00")
    assert (servers, alone, often) == ("35.0 / 40.0", "0.10 / 0.10 / 0.10", "0.30 / 4.00 / 9.00")
    assert allocated == "6,826 (569)"
    assert len(table(found).head) == 11


def test_the_picture_has_a_line_for_each_pace_in_each_plot() -> None:
    found = [(case, seen()) for wave in WAVES for case in wave]
    figure = Figure()
    MATRIX.pictures[0].draw(figure, measured.curves(found))
    drawn = [[len(line.get_xdata()) for line in axes.get_lines()] for axes in figure.axes]  # type: ignore[arg-type]
    assert drawn == [[4, 4], [4, 4], [4, 4], [4, 4]]


# -- for once, all of it --


@pytest.mark.benchmark
@pytest.mark.usefixtures("_compiler")
def test_two_daemons_go_through_all_phases() -> None:
    found = matrix(quick=True)
    assert {line.budget for line in found.rows} == {"<= 1 %", "<= 80 MiB", "<= 10 ms"}
    small, usual = found.tables[0].rows
    assert (small[0], usual[0]) == ("1 GPU, 10 Hz, 1 job", "8 GPUs, 1 Hz, 8 jobs")
    for cells in (small, usual):
        figures = [float(each) for cell in cells[1:] for each in re.findall(r"\d[\d,.]*", cell.replace(",", ""))]
        assert len(figures) == 1 + 2 + 3 + 2 + 2 + 3 + 2 + 3 + 3 + 2
        assert min(figures) > 0
    assert QUICK.slices == 1
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
