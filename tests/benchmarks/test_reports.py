"""The benchmark of reports: what it counts, and that it refuses figures of messages that were not heard."""

import pytest

from benchmarks.node.reports import BUDGET, Look, Size, reports, rows

SIZE = Size(ranks=4, every=2.0, seconds=3)


def test_shares_are_of_a_core_and_both_threads_count() -> None:
    looks = [Look(1.0, 0.002, 0.001, 2), Look(1.0, 0.004, 0.001, 2), Look(2.0, 0.012, 0.002, 4)]
    whole, *parts = rows(looks, SIZE)
    assert (whole.median, whole.spread, whole.budget, whole.met) == ("0.50 %", "0.30 - 0.70", "<= 1 %", True)
    assert [(part.median, part.met) for part in parts] == [("0.40 %", None), ("0.10 %", None)]
    assert "4 ranks, a message every 2 s" in whole.what


def test_the_budget_is_held_against_the_mean() -> None:
    looks = [Look(1.0, 0.0, 0.0, 2), Look(1.0, 0.0, 0.0, 2), Look(1.0, 0.05, 0.0, 2)]
    assert rows(looks, SIZE)[0].met is False
    assert BUDGET == 1.0


def test_figures_of_messages_that_were_not_heard_are_refused() -> None:
    with pytest.raises(RuntimeError, match="1 reports were taken, and about 2 sent"):
        rows([Look(1.0, 0.0, 0.0, 1)], SIZE)


@pytest.mark.benchmark
def test_the_short_form_runs_with_real_ranks() -> None:
    whole, *parts = reports(quick=True)
    assert whole.met is not None
    assert len(parts) == 2
