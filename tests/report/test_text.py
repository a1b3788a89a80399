"""Text output: it fits, and names cannot contain control characters or markup."""

import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from exporter.core.pipes import PIPE_NOTES
from exporter.formatting import format_amount, format_duration, format_percent, shorten
from exporter.report.model import JobIdentity, NodeShare, RankSummary, TargetReached
from exporter.report.text import WIDTH, ReportTable, render_markdown, render_text, report_tables
from tests.report.answers import part, receipt, told


def said(**changed: object) -> str:
    return render_text(report_tables(receipt(**changed)))


def test_long_names_are_cut_in_the_middle_and_nothing_is_wider_than_the_terminal() -> None:
    name = "n" * 40 + "/" + "m" * 80
    nodes = tuple(NodeShare(name=f"{name}{n}", gpus=8, gpu_hours=1e7, product=None, worst="x" * 40, worst_share=0.1)
                  for n in range(12))  # fmt: skip
    found = said(nodes=nodes, who=JobIdentity(job_id=name, name=name, user=name), unseen=(name,))
    assert max(map(len, found.splitlines())) <= WIDTH
    assert "and 2 more; --json has them all" in found


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    found = said(who=JobIdentity(job_id="7", name="\x1b[2J\nroot"), unseen=("\x07",), models=("\x1b[31m",))
    assert not any(sign in found for sign in "\x1b\x07")
    assert 'Job 7 "?[2J?root"' in found


def test_markdown_is_not_written_by_a_name() -> None:
    found = render_markdown(report_tables(receipt(who=JobIdentity(job_id="7", name="a|b*<img src=x>`"))))
    assert "a\\|b\\*\\<img src=x\\>\\`" in found
    assert "\x1b" not in render_markdown(report_tables(receipt(unseen=("\x1b[2J",))))


def test_a_job_without_a_price_has_no_column_of_money() -> None:
    assert "USD" not in said()
    priced = replace(part("data_stall", 40, share=0.5), money=44.0)
    found = said(currency="USD", money=88.0, parts=(priced,))
    assert "data_stall           ectr   measured      40.00   50.0 %  44.00" in found
    assert "allocated                                 80.00  100.0 %  88.00" in found


def test_why_it_waited_adds_up_to_the_waiting() -> None:
    waited = (part("data_stall", 30, share=0.375), part("unattributed_stall", 10, share=0.125))
    found = said(parts=waited, stalls={"storage": 24.0, "cpu_quota": 6.0})
    lines = [line.strip() for line in found.split("Why it waited")[1].split("\n\n")[0].splitlines() if line]
    assert lines == [
        "24.00 GPU-hours: storage (its tasks waited for I/O)",
        "6.00 GPU-hours: its CPU quota (its tasks were throttled)",
        "10.00 GPU-hours: not explained by the host",
    ]
    assert "not explained" not in said(parts=waited, stalls={"storage": 40.0})
    assert "Why it waited" not in said(parts=waited)


def test_an_estimate_is_shown_with_its_bounds() -> None:
    sure, doubtful = part("data_stall", 30, share=0.375), part("exposed_communication", 10, share=0.125)
    assert "between" not in said(parts=(sure, doubtful))
    found = said(parts=(sure, replace(doubtful, low_gpu_hours=8.0, high_gpu_hours=16.04)))
    assert "exposed_communication ectr measured 10.00 12.5 % 10.0 - 20.0 %" in " ".join(found.split())
    assert "lies between the bounds" in found
    near = replace(doubtful, low_gpu_hours=10.0, high_gpu_hours=10.03)
    assert "between" not in said(parts=(sure, near)), "the same tenth of a percent"


@pytest.mark.parametrize("pipe", [UNSET, "fp64", "fp32", "none"])
def test_a_report_without_tensor_work_states_what_is_useful(pipe: str | UnsetType) -> None:
    found = " ".join(said(useful_pipe=pipe).split())
    assert [name for name, note in PIPE_NOTES.items() if note in found] == ([] if pipe is UNSET else [pipe])


def test_what_nobody_told_has_no_line() -> None:
    found = said(truth=told(mfu=0.4))
    assert "MFU                             40.0 %" in found
    assert not any(
        word in found for word in ("HFU", "goodput", "checkpoints", "restarts", "cost a token", "loss  ", "target")
    )


def test_a_loss_that_is_no_number_is_told() -> None:
    assert "loss                            nan" in said(truth=told(loss=float("nan")))


def test_the_target_has_its_cost() -> None:
    found = said(truth=told(target=TargetReached(seconds=5400, cost=12.5)))
    assert "time to target                  1 h 30 min" in found
    assert "cost to target                  12.5 GPU-hours" in found


def test_the_slowest_ranks_are_named() -> None:
    ranks = tuple(RankSummary(rank=str(n), node="a", busy_seconds=2.0 - n / 10, of_median=1.5) for n in range(8))
    found = said(ranks=ranks).splitlines()
    assert [line.split()[0] for line in found if line.endswith("1.50")] == ["0", "1", "2"]


def test_a_job_that_lost_nothing() -> None:
    assert "Nothing was lost." in said(parts=(part("useful", 80, share=1, layer="useful", evidence=""),))


def test_the_floor_is_said_where_it_is_another() -> None:
    layers = receipt().layers.__class__(gau=1, ectr=1, emfu=0.5, product=0.5, floor=0.2)
    assert "= 50.0 % (at least 20.0 %)" in said(layers=layers)


def test_an_empty_table_is_not_there() -> None:
    assert render_text([ReportTable(title="nothing"), ReportTable(prose=("a",))]) == "a\n"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"), (0.0, "0"), (12.0, "12"), (2.5, "2.5"), (5.378e-05, "5.378e-05"), (18588.1, "18,588"),
        (887_520.0, "887.5k"), (1.2e9, "1.2G"), (6.6e25, "6.600e+25"), (-3.0, "-3"), (float("inf"), "inf"),
        (999.96, "1000"),
    ],
)  # fmt: skip
def test_amounts(value: float | None, words: str) -> None:
    assert format_amount(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.25, "4.25 s"), (45.0, "45 s"), (720.0, "12 min"), (11_100.0, "3 h 05 min"), (187_200.0, "2 d 4 h")],
)
def test_times(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_shares_and_names() -> None:
    assert (format_percent(None), format_percent(0.12345), shorten("abcdefgh", 6)) == ("-", "12.3 %", "ab..gh")
