"""A report on a job that hangs: the hang comes first, whichever source it was read from, and ends with the job."""

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from exporter.core.hangs import Hang, HungGpu
from exporter.core.job_record import JobRecord
from exporter.report.html import render_html
from exporter.report.model import JobReport, OngoingHang
from exporter.report.prometheus import ongoing_hang_of
from exporter.report.prometheus_run import PrometheusRunData, RunMetrics
from exporter.report.query import InstanceRun, PrometheusRun, VectorSample
from exporter.report.records import join_records
from exporter.report.text import WIDTH, render_line, render_markdown, render_short, render_text, report_tables
from tests.report.stated import BEGIN, owner, stated

END = BEGIN + 3600.0
HANG = Hang(
    since=END - 1800,
    count=2,
    gpus=(
        HungGpu(gpu="0", spins=True, since=END - 1800, pids=(7,)),
        HungGpu(gpu="1", spins=False, since=END - 1700, pids=(8,)),
    ),
    seconds=3500.0,
    unconfirmed_seconds=700.0,
)
PARTS = {"exposed_communication": 5000 * 10**9, "hung": 2800 * 10**9, "useful": 1000 * 10**9}
ADVICE = "Dump the stacks of that rank (py-spy dump --pid 8), then restart from the last checkpoint."


def record(**changes: object) -> JobRecord:
    return stated(end=END, running=True, paid=8800 * 10**9, parts=PARTS, hang=HANG, **changes)


def joined(*records: JobRecord) -> JobReport:
    return join_records(records, job_id="7", at=BEGIN + 1e6)


def words(text: str) -> str:
    return " ".join(text.split())


def test_it_comes_first_and_counts_from_its_first_second() -> None:
    report = joined(record())
    text = words(render_text(report_tables(report)))
    assert text.index("Hung since") < text.index("Where the time went")
    assert "for 30 min GPU 0 spins without progress; GPU 1 (pid 8) does not, the others wait for it" in text
    assert f"0.97 GPU-hours so far, 0.19 of them before it was confirmed do: {ADVICE}" in text
    first = "1. hung: 0.78 GPU-hours, 1.27 USD, and 0.19 GPU-hours before it was confirmed"
    assert f"What to do first {first} role" in text
    assert "2. exposed_communication: 1.39 GPU-hours" in text
    markdown = render_markdown(report_tables(report))
    assert markdown.index("## Hung since") < markdown.index("Where the time went")


def test_the_page_has_it_above_all_else() -> None:
    page = render_html(joined(record()), list(report_tables(joined(record()))))
    banner, main = page.split("<main>")
    assert "<h2>Hung since" in banner
    assert f"do: {ADVICE}" in banner
    assert "Hung since" not in main
    assert main.index("<h3>hung</h3>") < main.index("<h3>exposed communication</h3>")


def test_the_short_forms_name_it_within_their_lines() -> None:
    report = joined(record())
    lines = render_short(report).splitlines()
    assert len(lines) <= 8
    assert max(map(len, lines)) <= WIDTH
    assert lines[1].startswith("  Hung since ")
    assert lines[1].endswith(", for 30 min, on 2 GPUs")
    assert words(" ".join(lines[2:4])) == f"do: {ADVICE}"
    assert "; hung since " in render_line(report)


def test_of_several_nodes_the_one_that_is_waited_for_is_named() -> None:
    spinning = replace(HANG, gpus=(HANG.gpus[0],), count=1, since=END - 1900)
    records = [record(owner=owner(nodes=2)), record(node="n2", owner=owner(nodes=2))]
    report = joined(records[0], replace(records[1], hang=spinning))
    hang = report.hang
    assert isinstance(hang, OngoingHang)
    assert (hang.since, [(each.node, each.gpus) for each in hang.nodes]) == (END - 1900, [("n1", 2.0), ("n2", 1.0)])
    assert "(py-spy dump --pid 8 on n1)" in hang.do
    assert "n2: GPU 0 spins without progress" in render_text(report_tables(report))


@pytest.mark.parametrize("changes", [{"running": False}, {"hang": None}])
def test_a_hang_that_is_over_has_no_line_and_no_field(changes: dict[str, object]) -> None:
    report = joined(replace(record(), **changes))
    assert report.hang is UNSET
    assert b'"hang"' not in report.json()
    assert "Hung since" not in render_text(report_tables(report))
    assert report.losses[0].name == "exposed_communication"


# -- from Prometheus --


def gauge(name: str, value: float, instance: str = "a", **labels: str) -> VectorSample:
    known = {"__name__": f"gpu_efficiency_job_{name}", "cluster": "", "instance": instance, "job_id": "7"}
    return VectorSample(known | labels, value)


def stored(*gauges: VectorSample, ended: bool = False) -> OngoingHang | None:
    data = object.__new__(PrometheusRunData)
    last = END + 60 if ended else END
    runs = tuple(
        InstanceRun(instance=("", name), start=BEGIN, end=END, last_sample=last, scrape_interval=15) for name in "ab"
    )
    data.run = PrometheusRun(start=BEGIN, end=END, running=not ended, instance_runs=runs)
    data.node_names = {("", "a"): "n1", ("", "b"): "n2"}
    data.metrics = RunMetrics(gauges, {})
    return ongoing_hang_of(data)


SPUN = (gauge("state_gpus", 8, state="hung"), gauge("spin_since_timestamp_seconds", END - 900))


def test_from_series_it_has_its_onset_and_the_rank_that_is_waited_for() -> None:
    culprit = gauge("hang_culprit", 1, rank="3", host="n2", pid="77", gpu="1", collective="AllReduce", sequence="12")
    found = stored(*SPUN, gauge("state_gpus", 8, "b", state="active"), culprit)
    assert found is not None
    assert (found.since, found.seconds, found.gpu_hours) == (END - 900, 900.0, None)
    (node,) = found.nodes
    assert (node.node, node.gpus) == ("n1", 8.0)
    assert node.text == "8 GPUs hang; waits for rank 3 (host n2, pid 77, GPU 1), in AllReduce number 12"
    assert "(py-spy dump --pid 77 on n2)" in found.do


def test_a_hang_of_a_job_that_ended_or_works_is_none() -> None:
    assert stored(*SPUN, ended=True) is None
    assert stored(gauge("state_gpus", 8, state="active")) is None


def test_a_crash_loop_has_no_onset_in_series() -> None:
    found = stored(gauge("state_gpus", 8, state="hung"))
    assert found is not None
    assert (found.seconds, found.do[:12]) == (0.0, "Read the log")
