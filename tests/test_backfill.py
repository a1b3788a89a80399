"""Tests `gpu-efficiency backfill`: times, values, documents, errors. With a real Prometheus: `e2e/test_backfill.py`."""

import io
import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from exporter.cli import main, openmetrics
from exporter.cli.backfill import DAEMON_METRICS, FINAL_METRICS, SAMPLED_METRICS, BackfillSummary, _notes
from exporter.cli.openmetrics import FamilyHeaders, Scrape, slice_name, write_document, write_folder
from exporter.core.exposition import render
from exporter.core.job_record import JobRecord, JobSample
from exporter.core.ledger import Ledger
from exporter.core.metrics import METRICS
from exporter.core.model import Observation, Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.history.store import HistoryStore
from exporter.trace import TraceHeader, TraceWriter
from tests.worlds import JOB, WORKING, S, device, first, held, reading, seen

BEGIN = 1_767_225_600
"""2026-01-01 00:00 UTC: a boundary of slices and of steps."""
Value = tuple[float, float]
"""Unix seconds, and the value."""
Series = dict[tuple[str, frozenset[tuple[str, str]]], list[Value]]


class Bytes(io.TextIOWrapper):
    """Standard output of a command that writes bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        self.flush()
        self.seek(0)
        return self.read()


def backfill(line: str) -> tuple[int, str, str]:
    """Run `gpu-efficiency backfill LINE`; return status, standard output, standard error."""
    out, err = Bytes(), io.StringIO()
    with closing(out), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(["backfill", *shlex.split(line)])
        except SystemExit as end:
            status = int(end.code or 0)
        return status, out.text(), err.getvalue()


def story(
    seconds: Sequence[float], *, wall: float = BEGIN, owner: Owner = JOB, since: float = 0.0
) -> list[Observation]:
    """A trace of one busy GPU, observed at those seconds; a job holds it from `since`."""
    board = device()
    found = [replace(first([board], [held(owner=owner)] if since == 0 else ()), wall=round((wall + seconds[0]) * S))]
    found[0] = replace(
        found[0], at=round(seconds[0] * S), allocations=() if since else (held(owner=owner, start=seconds[0]),)
    )
    for before, at in pairwise(seconds):
        more = {"allocations": (held(owner=owner, start=since),)} if before < since <= at else {}
        found.append(replace(seen(at, reading(before, at, WORKING), **more), wall=round((wall + at) * S)))
    return found


def recorded(path: Path, observations: Sequence[Observation], **header: Any) -> Path:
    with TraceWriter(path, TraceHeader(**({"host": "n1"} | header))) as trace:
        for observation in observations:
            trace.append(observation)
    return path


def series(document: str) -> Series:
    """All samples by name and labels, parsed by the strict parser of another project."""
    found: Series = defaultdict(list)
    names = []
    for family in parse(document):  # type: ignore[no-untyped-call]
        names.append(family.name)
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())].append((float(sample.timestamp), sample.value))
    assert len(names) == len(set(names))
    told = [
        (line.rsplit(" ", 2)[0], line.rsplit(" ", 1)[1]) for line in document.split("\n") if line and line[0] != "#"
    ]
    assert len(told) == len(set(told))  # that parser passes over a second sample of a moment
    return found


def points(found: Series, name: str, /, **labels: str) -> list[Value]:
    """The one series of that name with those labels."""
    rows = [
        v
        for (each, own), v in found.items()
        if each == f"gpu_efficiency_{name}" and labels.items() <= dict(own).items()
    ]
    assert len(rows) == 1, f"{len(rows)} of {name} {labels}"
    return rows[0]


# -- recordings --


def test_a_scrape_at_the_begin_at_each_step_and_at_the_end_says_what_the_daemon_would_have(tmp_path: Path) -> None:
    observations = story([7.25 + second for second in range(61)])
    status, out, _ = backfill(str(recorded(tmp_path / "a.jsonl", observations)))
    assert status == 0
    found = series(out)
    moments = [8, 15, 30, 45, 60, 68]
    assert [at - BEGIN for at, _ in points(found, "paid_seconds_total")] == moments
    ledger, said = Ledger(), {}
    for observation in observations:
        advance(ledger, observation)
        for moment in moments:
            if observation.wall <= (BEGIN + moment) * S:
                said[moment] = render(
                    take_snapshot(ledger, DaemonMetadata(version="0", source="replay", host="n1")), openmetrics=True
                )
    said[8] = b""  # the state when the first observation was in, which is asked of the values below
    for moment, page in said.items():
        for line in page.decode().splitlines():
            head, _, value = line.rpartition(" ")
            if line[0] != "#" and head.partition("{")[0] not in DAEMON_METRICS and "_info" not in head:
                own = parse(f"# TYPE x gauge\nx{head[head.find('{') :] if '{' in head else ''} 1\n# EOF\n")  # type: ignore[no-untyped-call]
                labels = next(iter(own)).samples[0].labels | {"instance": "n1:19400", "job": "gpu-efficiency"}
                told = dict(found[head.partition("{")[0], frozenset(labels.items())])
                assert told[BEGIN + moment] == pytest.approx(float(value), nan_ok=True), (moment, head)
    assert points(found, "paid_seconds_total")[0] == (BEGIN + 8, 0.0)
    assert points(found, "simulated")[-1] == (BEGIN + 68, 0.0)


def test_only_what_the_daemon_said_of_itself_is_left_out(tmp_path: Path) -> None:
    found = series(backfill(str(recorded(tmp_path / "a.jsonl", story(range(31)))))[1])
    names = {name for name, _ in found}
    assert names.isdisjoint(DAEMON_METRICS)
    assert {metric.name for metric in METRICS} >= names | DAEMON_METRICS
    assert len(names) > 50
    page = render(take_snapshot(Ledger(), DaemonMetadata()), openmetrics=True).decode()
    zero = {line.split("{")[0].split()[0] for line in page.splitlines() if line[0] != "#"}
    assert {"gpu_efficiency_ticks_total", "gpu_efficiency_read_seconds_total"} <= zero & DAEMON_METRICS


def test_a_counter_that_begins_later_was_nought_on_the_page_before(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a.jsonl", story(range(61), since=37.0))
    found = series(backfill(f"{trace} --step 10s")[1])
    paid = [(at - BEGIN, value) for at, value in points(found, "job_paid_seconds_total", job_id="41")]
    assert paid == [(30, 0.0), (40, 3.0), (50, 13.0), (60, 23.0)]
    assert [at - BEGIN for at, _ in points(found, "job_start_timestamp_seconds", job_id="41")] == [40, 50, 60]


def test_the_policy_and_the_prices_are_those_of_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[policy]\nhang_seconds = 123.0\n[[prices]]\nper_gpu_hour = 2.5\ncurrency = 'EUR'\n")
    found = series(backfill(f"{recorded(tmp_path / 'a.jsonl', story(range(31)))} --config {config}")[1])
    assert points(found, "threshold", name="hang_seconds")[-1][1] == 123.0
    assert points(found, "job_price_per_hour", currency="EUR")[-1][1] == 2.5


def test_nothing_is_said_while_nothing_was_observed(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a.jsonl", story([*range(20), *range(100, 121)]))
    paid = points(series(backfill(str(trace))[1]), "paid_seconds_total")
    assert [at - BEGIN for at, _ in paid] == [0, 15, 30, 105, 120]
    assert [value for _, value in paid] == [0.0, 15.0, 19.0, 105.0, 120.0]


def test_a_wall_clock_that_went_back_is_told_and_no_second_is_told_twice(tmp_path: Path) -> None:
    observations = story(range(91))
    late = [replace(each, wall=each.wall - 40 * S) for each in observations[50:]]
    status, out, err = backfill(str(recorded(tmp_path / "a.jsonl", [*observations[:50], *late])))
    paid = points(series(out), "paid_seconds_total")
    assert [at - BEGIN for at, _ in paid] == [0, 15, 30, 45, 50]
    assert paid[-1][1] == 90.0
    assert status == 0
    assert "went back: 35 observations are in time that was written already" in err


def test_another_life_of_the_daemon_counts_from_nought_again(tmp_path: Path) -> None:
    early = recorded(tmp_path / "b.jsonl", story(range(31)))
    late = recorded(tmp_path / "a.jsonl.gz", story(range(31), wall=BEGIN + 60))
    found = series(backfill(f"{late} {early}")[1])
    assert points(found, "paid_seconds_total") == [
        (BEGIN, 0.0), (BEGIN + 15, 15.0), (BEGIN + 30, 30.0), (BEGIN + 60, 0.0), (BEGIN + 75, 15.0), (BEGIN + 90, 30.0),
    ]  # fmt: skip


def test_nodes_are_kept_apart_by_instance_and_have_the_labels_that_were_given(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a.jsonl", story(range(31)))
    b = recorded(tmp_path / "b.jsonl", story(range(31), wall=BEGIN + 10), host="n2")
    line = f"{a} {b} --instance 'gpu-{{host}}' --job x --label cluster=alps --label 'note=a \"b\" \\ c'"
    found = series(backfill(line)[1])
    assert {dict(labels)["instance"] for _, labels in found} == {"gpu-n1", "gpu-n2"}
    assert {(dict(labels)["job"], dict(labels)["cluster"], dict(labels)["note"]) for _, labels in found} == {
        ("x", "alps", 'a "b" \\ c')
    }
    assert [at - BEGIN for at, _ in points(found, "node_gpus", instance="gpu-n2")] == [10, 15, 30, 40]


def test_a_name_with_signs_that_end_lines_elsewhere_stays_one_line(tmp_path: Path) -> None:
    owner = Owner(job_id="41", name="a\u2028b\x85c\nd\x0be")
    found = series(backfill(str(recorded(tmp_path / "a.jsonl", story(range(31), owner=owner))))[1])
    names = {dict(labels)["name"] for name, labels in found if name == "gpu_efficiency_job_info"}
    assert len(names) == 1
    assert "\u2028" in names.pop()


def test_a_recording_that_was_cut_off_is_used_and_told_of(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a.jsonl", story(range(31)))
    trace.write_bytes(trace.read_bytes()[:-10])
    status, out, err = backfill(str(trace))
    assert status == 0
    assert points(series(out), "paid_seconds_total")[-1] == (BEGIN + 29, 29.0)
    assert "is cut off" in err


# -- documents --


def pages(moments: Sequence[int], headers: FamilyHeaders) -> list[Scrape]:
    """Two series of a counter and one of a gauge, of one target."""
    told = []
    for at in moments:
        text = f'# HELP c Count.\n# TYPE c counter\nc_total{{k="a"}} {at}.0\nc_total{{k="b"}} 1\n'
        text += f"# HELP g Gauge.\n# TYPE g gauge\ng {at % 7}\n"
        told.append(Scrape(BEGIN + at, 'instance="n"', headers.parse(text)))
    return told


def test_a_file_for_each_two_hours_is_whole_before_it_has_its_name(tmp_path: Path) -> None:
    headers = FamilyHeaders()
    told = pages([0, 7199, 7200, 30_000], headers)
    for number, path in enumerate(write_folder(iter(told), tmp_path, headers)):
        assert path.name == ["20260101T0000Z.om", "20260101T0200Z.om", "20260101T0800Z.om"][number]
        assert path.read_text().endswith("# EOF\n")
        assert len(list(tmp_path.iterdir())) == number + 1
    assert (tmp_path / "20260101T0000Z.om").read_text() == (
        "# HELP c Count.\n# TYPE c counter\n"
        f'c_total{{k="a",instance="n"}} 0.0 {BEGIN}\nc_total{{k="a",instance="n"}} 7199.0 {BEGIN + 7199}\n'
        f'c_total{{k="b",instance="n"}} 1 {BEGIN}\nc_total{{k="b",instance="n"}} 1 {BEGIN + 7199}\n'
        "# HELP g Gauge.\n# TYPE g gauge\n"
        f'g{{instance="n"}} 0 {BEGIN}\ng{{instance="n"}} 3 {BEGIN + 7199}\n# EOF\n'
    )


def test_one_document_of_many_slices_has_each_family_once_and_each_series_in_one_piece() -> None:
    headers, file = FamilyHeaders(), io.BytesIO()
    write_document(iter(pages([0, 7199, 7200, 30_000], headers)), file, headers)
    lines = file.getvalue().decode().splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# HELP c Count.", "# TYPE c counter", "# HELP g Gauge.", "# TYPE g gauge", "# EOF"
    ]  # fmt: skip
    assert [line.split()[-1] for line in lines if 'k="a"' in line] == [
        str(BEGIN + at) for at in (0, 7199, 7200, 30_000)
    ]
    assert len(series("\n".join(lines) + "\n")) == 3


def test_no_more_than_one_slice_is_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    add = openmetrics._Slice.add

    def counting(self: Any, page: Scrape) -> None:
        nonlocal most
        add(self, page)
        most = max(most, sum(len(told) for family in self._families.values() for told in family.values()))

    monkeypatch.setattr(openmetrics._Slice, "add", counting)
    headers, file = FamilyHeaders(), io.BytesIO()
    write_document((page for at in range(0, 72_000, 60) for page in pages([at], headers)), file, headers)
    assert most < len(file.getvalue()) / 9


def test_slices_are_named_so_that_they_sort_by_time() -> None:
    names = [slice_name(number) for number in range(BEGIN // 7200, BEGIN // 7200 + 5000)]
    assert names == sorted(set(names))


# -- refusals --


@pytest.fixture(name="trace")
def _trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "made-up.jsonl", story(range(31)), simulated=True)
    recorded(tmp_path / "later.jsonl", story(range(31), wall=BEGIN + 20))
    recorded(tmp_path / "other.jsonl", story(range(31)), host="n2")
    recorded(tmp_path / "empty.jsonl", [])
    (tmp_path / "there.om").write_text("mine")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "20260101T0000Z.om").write_text("mine")
    return recorded(tmp_path / "a.jsonl", story(range(31)))


@pytest.mark.parametrize(
    ("line", "status", "why"),
    [
        ("", 2, "give recordings, or --store FILE"),
        ("a.jsonl --store x.db", 2, "the same jobs would be written twice"),
        ("a.jsonl -o x.om --folder x", 2, "--output or --folder, not both"),
        ("a.jsonl made-up.jsonl", 1, "made-up.jsonl: SIMULATED: a model made these figures"),
        ("a.jsonl later.jsonl", 1, "later.jsonl begins 2026-01-01 00:00 UTC, before a.jsonl of the same node n1 ends"),
        ("a.jsonl a.jsonl", 1, "traces of one node must not overlap; omit one of them"),
        ("empty.jsonl", 1, "empty.jsonl holds no observation"),
        ("absent.jsonl", 1, "absent.jsonl: cannot be opened"),
        ("a.jsonl --store", 2, "expected one argument"),
        ("--store absent.db", 1, "absent.db: there is no such store"),
        ("a.jsonl -o there.om", 2, "there.om: a file of that name exists"),
        ("a.jsonl --folder used", 2, "used: has 1 files of a history, 20260101T0000Z.om first"),
        ("a.jsonl -o no/such/folder/x.om", 1, "No such file or directory"),
        ("a.jsonl other.jsonl --instance here", 2, "2 nodes would be one; write {host} where the name belongs"),
        ("a.jsonl --label cluster", 2, "--label cluster: not NAME=VALUE"),
        ("a.jsonl --label 1=2", 2, "not NAME=VALUE"),
        ("a.jsonl --label __x=2", 2, "not NAME=VALUE"),
        ("a.jsonl --label job_id=2", 2, "series have a label job_id of their own"),
        ("a.jsonl --label instance=2", 2, "series have a label instance of their own"),
        ("a.jsonl --step 1.5", 2, "'1.5' is not whole seconds, 120s at most"),
        ("a.jsonl --step 5m", 2, "'5m' is not whole seconds, 120s at most"),
    ],
)
def test_what_cannot_be_a_history_is_refused_with_the_reason_and_nothing_is_written(
    trace: Path, line: str, status: int, why: str
) -> None:
    before = {path: path.read_bytes() for path in trace.parent.rglob("*.om")}
    found, out, err = backfill(line)
    assert (found, out) == (status, "")
    assert why in err
    assert "Traceback" not in err
    assert {path: path.read_bytes() for path in trace.parent.rglob("*.om")} == before
    assert list(trace.parent.rglob("*.part")) == []


def test_a_pipe_is_refused_for_it_cannot_be_looked_into_first(trace: Path) -> None:
    pipe = trace.with_name("pipe.jsonl")
    os.mkfifo(pipe)
    keeper = os.open(pipe, os.O_RDWR)  # or whoever opens it waits for the other end
    try:
        os.write(keeper, trace.read_bytes().splitlines(keepends=True)[0])
        status, out, err = backfill(str(pipe))
    finally:
        os.close(keeper)
    assert (status, out) == (1, "")
    assert "pipe.jsonl is a pipe, but a recording is read twice: give a file" in err


def test_what_is_overwritten_stays_until_it_is_sure_that_there_is_something_else(trace: Path) -> None:
    folder = trace.parent / "used"
    assert backfill("made-up.jsonl --folder used --force")[0] == 1
    assert (folder / "20260101T0000Z.om").read_text() == "mine"
    (folder / "20251231T2200Z.om").write_text("old")
    assert backfill("a.jsonl --folder used --force")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["20260101T0000Z.om"]
    assert backfill("a.jsonl -o there.om --force")[0] == 0
    assert (trace.parent / "there.om").read_bytes() == (folder / "20260101T0000Z.om").read_bytes()


def test_figures_of_a_model_are_marked_where_they_are_wanted(trace: Path) -> None:
    status, out, _ = backfill(f"{trace.parent / 'made-up.jsonl'} --simulated")
    assert status == 0
    assert {value for _, value in points(series(out), "simulated")} == {1.0}


def test_a_recording_that_breaks_in_the_middle_leaves_no_file(trace: Path) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join([*lines[:20], b"broken\n", *lines[20:]]))
    status, _, err = backfill("a.jsonl -o x.om")
    assert (status, list(trace.parent.glob("x.om*"))) == (1, [])
    assert "line 21 is not an observation" in err


def test_files_that_were_whole_before_a_recording_broke_stay_and_are_told_of(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a.jsonl", story([0, 1, 7300, 7320, 7340, 7360]))
    trace.write_bytes(trace.read_bytes() + b"broken\n")
    status, _, err = backfill(f"{trace} --folder {tmp_path / 'h'}")
    assert (status, [path.name for path in (tmp_path / "h").iterdir()]) == (1, ["20260101T0000Z.om"])
    assert "h: 1 complete files are kept" in err
    assert "line 8 is not an observation" in err


def test_what_to_do_next_is_said_with_the_names_quoted(trace: Path) -> None:
    status, _, err = backfill(f"{trace.name} --folder 'my history'")
    assert status == 0
    assert (
        """for file in 'my history'/*.om; do promtool tsdb create-blocks-from openmetrics --quiet "$file" blocks"""
        in err
    )
    assert "older than 15 days: Prometheus deletes it unless --storage.tsdb.retention.time is longer" in err
    assert "create-blocks-from openmetrics --quiet 'my history.om' blocks" in backfill("a.jsonl -o 'my history.om'")[2]


def notes(told: BackfillSummary, now: float, line: str) -> str:
    import argparse  # noqa: PLC0415  for the type alone

    from exporter.cli.backfill import backfill_arguments  # noqa: PLC0415

    parser = argparse.ArgumentParser()
    backfill_arguments(parser)
    return "\n".join(_notes(parser.parse_args(shlex.split(line)), told, now))


def test_the_head_of_prometheus_and_long_documents_are_warned_of() -> None:
    day = BackfillSummary(first=BEGIN, last=BEGIN + 86_400)
    fresh = notes(day, BEGIN + 86_400 + 3600, "a -o x.om")
    assert "of the last 3 hours" in fresh
    assert "--folder instead of --output is faster" in fresh
    assert "15 days" not in fresh
    old = notes(day, BEGIN + 30 * 86_400, "a --folder x")
    assert "of the last 3 hours" not in old
    assert "--folder instead" not in old
    assert "15 days" in old
    assert "--folder instead" not in notes(BackfillSummary(first=BEGIN, last=BEGIN + 3600), BEGIN, "a -o x.om")
    broken = BackfillSummary(first=BEGIN, last=BEGIN + 60, conservation_errors=2)
    assert "2 conservation errors" in notes(broken, BEGIN + 86_400, "a")


# -- stores --


def statement(**changes: Any) -> JobRecord:
    wanted: dict[str, Any] = {
        "node": "n1", "life": "a", "owner": JOB, "start": BEGIN + 10.5, "end": BEGIN + 700.25, "running": False,
        "paid": 1380 * S, "parts": {"useful": 1000 * S, "data_stall": 380 * S}, "energy": {"useful": 5e5},
        "first_work": 12.5,
        "samples": (
            JobSample(
                at=BEGIN + 300.2, paid=580.0, seen=580.0, occupied=580.0, computing=400.0, useful=400.0, joules=2e5,
            ),
            JobSample(
                at=BEGIN + 600.0, paid=1180.0, seen=1180.0, occupied=1e3, computing=800.0, useful=8e2, joules=4e5,
            ),
        ),
    }  # fmt: skip
    return JobRecord(**(wanted | changes))


def stored(folder: Path, *statements: JobRecord, name: str = "history.db") -> str:
    with closing(HistoryStore(folder / name)) as store:
        store.write(job_records=statements)
    return f"--store {folder / name}"


def test_a_store_tells_a_job_at_its_samples_and_the_rest_at_its_ends(tmp_path: Path) -> None:
    status, out, err = backfill(stored(tmp_path, statement(stalls={"storage": 300 * S})))
    assert status == 0, err
    found = series(out)
    assert points(found, "job_stall_seconds_total", cause="storage") == [(BEGIN + 10, 0.0), (BEGIN + 701, 300.0)]
    moments = [10, 301, 600, 701]
    paid = points(found, "job_paid_seconds_total")
    assert paid == list(zip([BEGIN + at for at in moments], [0.0, 580.0, 1180.0, 1380.0], strict=True))
    assert [value for _, value in points(found, "job_energy_joules_total")] == [0.0, 2e5, 4e5, 5e5]
    assert points(found, "job_seconds_total", leak="data_stall") == [(BEGIN + 10, 0.0), (BEGIN + 701, 380.0)]
    assert points(found, "job_seconds_total", leak="hung") == [(BEGIN + 10, 0.0), (BEGIN + 701, 0.0)]
    assert [at - BEGIN for at, _ in points(found, "job_info", user="ada", account="nlp")] == moments
    assert points(found, "job_start_timestamp_seconds")[0] == (BEGIN + 10, BEGIN + 10.5)
    assert points(found, "job_first_work_seconds") == [(BEGIN + 701, 12.5)]
    assert [at - BEGIN for at, _ in points(found, "node_info", node="n1", instance="n1:19400")] == moments
    names = {name for name, _ in found}
    assert names <= SAMPLED_METRICS | FINAL_METRICS | {
        f"gpu_efficiency_{name}" for name in ("node_info", "build_info", "simulated")
    }


def test_two_lives_of_a_job_follow_one_another_and_a_copy_of_a_store_tells_nothing_twice(tmp_path: Path) -> None:
    again = statement(
        life="b", start=BEGIN + 700.5, end=BEGIN + 760.0, paid=120 * S, parts={"useful": 120 * S}, samples=()
    )
    old = statement(end=BEGIN + 650.0, paid=1280 * S, parts={"useful": 1280 * S}, running=True)
    line = f"{stored(tmp_path, old, name='old.db')} {stored(tmp_path, statement(), again)}"
    found = series(backfill(line)[1])
    assert [(at - BEGIN, value) for at, value in points(found, "job_paid_seconds_total")] == [
        (10, 0.0), (301, 580.0), (600, 1180.0), (701, 1380.0), (702, 0.0), (760, 120.0),
    ]  # fmt: skip
    assert [value for _, value in points(found, "job_seconds_total", leak="useful")] == [0.0, 1000.0, 0.0, 120.0]


def test_jobs_of_one_node_that_begin_together_share_a_page(tmp_path: Path) -> None:
    other = statement(owner=Owner(job_id="42"), end=BEGIN + 400.0, samples=statement().samples[:1])
    found = series(backfill(stored(tmp_path, statement(), other))[1])
    assert [at - BEGIN for at, _ in points(found, "node_info")] == [10, 301, 400, 600, 701]
    assert [at - BEGIN for at, _ in points(found, "job_paid_seconds_total", job_id="42")] == [10, 301, 400]


def test_a_job_of_less_than_a_second_has_two_moments(tmp_path: Path) -> None:
    short = statement(start=BEGIN + 5.0, end=BEGIN + 5.0, samples=(), paid=0, parts={}, energy={})
    assert [at - BEGIN for at, _ in points(series(backfill(stored(tmp_path, short))[1]), "job_info")] == [5, 6]


def test_a_model_s_statements_and_an_empty_store_are_refused(tmp_path: Path) -> None:
    line = stored(tmp_path, statement(simulated=True))
    status, out, err = backfill(line)
    assert (status, out) == (1, "")
    assert "n1: SIMULATED" in err
    assert {value for _, value in points(series(backfill(f"{line} --simulated")[1]), "simulated")} == {1.0}
    status, out, err = backfill(stored(tmp_path, name="empty.db"))
    assert (status, out) == (1, "# EOF\n")
    assert "nothing to write" in err


def test_the_document_names_what_a_store_tells_along_the_way() -> None:
    text = (Path(__file__).parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| `paid_seconds_total`")]
    assert {f"gpu_efficiency_job_{name}" for name in row.split("`")[1::2]} == SAMPLED_METRICS | {
        "gpu_efficiency_job_history.sample_seconds"
    }
    known = {metric.name for metric in METRICS}
    assert known >= SAMPLED_METRICS | FINAL_METRICS
    assert SAMPLED_METRICS.isdisjoint(FINAL_METRICS)
    counters = {metric.name for metric in METRICS if metric.type == "counter" and "_job_" in metric.name}
    assert counters <= SAMPLED_METRICS | FINAL_METRICS
