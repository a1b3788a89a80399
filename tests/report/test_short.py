"""The short forms: they fit, have the most important figures, and no control characters."""

from msgspec.structs import replace

from exporter.report.analysis import compare_reports
from exporter.report.model import FailureCost, JobIdentity, NodeShare
from exporter.report.text import WIDTH, comparison_tables, render_line, render_short, render_text
from tests.report.answers import part, receipt

MOST_LINES = 8
_DEAR = replace(part("data_stall", 40, share=0.5), money=80.0, fix="f" * 100)


def test_the_line() -> None:
    assert render_line(receipt()) == (
        "job 7: 50.0 % useful (GAU 100.0 % x ECTR 50.0 % x eMFU 100.0 %) of 80.00 GPU-hours on 8 GPUs in 10 h 00 min;"
        " most lost to data_stall, 50.0 %"
    )
    found = render_line(receipt(money=160.0, currency="USD", coverage=0.75, expected_nodes=8, gpus=1.0))
    assert found.endswith("data_stall, 50.0 %; 160.00 USD; 75.0 % of it observed; 1 of 8 nodes")
    assert "on 1 GPU in" in found


def test_the_short_form() -> None:
    assert render_short(receipt()).splitlines() == [
        "GPU efficiency of job 7: 10 h 00 min ended",
        "  80.00 GPU-hours on 8 GPUs",
        "  50.0 % useful = GAU 100.0 % x ECTR 50.0 % x eMFU 100.0 %",
        "  lost most to data_stall: 50.0 %, 40.00 GPU-hours",
        "    do: mend it",
        "  all of it: gpu-efficiency report 7",
    ]
    found = render_short(
        receipt(), program="/opt/bin/gpu-efficiency", sources=" --node http://a", where="on node a\x1b"
    )
    assert found.endswith("\n  all of it, on node a?: /opt/bin/gpu-efficiency report 7 --node http://a\n")


def test_the_short_form_at_its_longest_fits() -> None:
    found = render_short(
        receipt(
            who=JobIdentity(job_id="j" * 200, user="u" * 200), money=160.0, currency="USD", energy_kwh=12.3,
            parts=(_DEAR,), simulated=True, expected_nodes=8, coverage=0.5,
            failures=tuple(FailureCost(kind="k" * 30, times=float(n + 1)) for n in range(6)),
        )
    )  # fmt: skip
    lines = found.splitlines()
    assert len(lines) == MOST_LINES
    assert max(map(len, lines[:-1])) <= WIDTH
    assert lines[-1].endswith("j" * 200), "a command that is cut is none"
    assert "80.00 GPU-hours on 8 GPUs, 160.00 USD, 12.3 kWh" in lines[1]
    assert lines[6] == "  50.0 % of the time was observed, 1 of 8 nodes told of it"


def test_what_failed_is_named_with_how_often() -> None:
    failures = (
        FailureCost(kind="hung", times=2.0, gpu_hours=1.0),
        FailureCost(kind="rework", times=None, gpu_hours=1.0),
    )
    assert "  failed: hung 2\n" in render_short(receipt(failures=failures))


def test_a_job_that_runs_and_one_that_was_simulated_say_so() -> None:
    found = render_short(receipt(when=replace(receipt().when, running=True), simulated=True))
    assert found.startswith("GPU efficiency of job 7: 10 h 00 min so far (SIMULATED)\n")


def test_names_obey_nobody() -> None:
    bad = receipt(who=JobIdentity(job_id="7\n\x1b[2J", user="\x07"), parts=(part("a\x1b", 1, share=1.0),))
    assert "\n" not in render_line(bad)
    assert not any(sign in render_line(bad) + render_short(bad) for sign in "\x1b\x07")
    assert len(render_short(bad).splitlines()) <= MOST_LINES


def test_a_job_of_which_nothing_was_seen() -> None:
    nothing = receipt(
        parts=(), nodes=(NodeShare(name="a", gpus=1, gpu_hours=0, product=None, worst="", worst_share=0),),
        layers=replace(receipt().layers, gau=None, product=None),
    )  # fmt: skip
    assert render_line(nothing).startswith("job 7: - useful (GAU - x")
    assert "lost most" not in render_short(nothing)


def test_no_line_and_no_comparison_of_what_was_simulated_looks_measured() -> None:
    simulated = receipt(simulated=True)
    assert render_line(simulated).startswith("job 7 (SIMULATED): ")
    assert "SIMULATED" not in render_line(receipt())
    for found in (compare_reports(simulated, receipt()), compare_reports(receipt(), simulated)):
        assert render_text(comparison_tables(found)).startswith("Two jobs (SIMULATED)\n")
    assert render_text(comparison_tables(compare_reports(receipt(), receipt()))).startswith("Two jobs\n")
