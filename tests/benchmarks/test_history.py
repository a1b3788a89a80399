"""The benchmark of the node's history measures what it says: bytes and sizes are held to here, times are not."""

import pytest

from benchmarks.node.history import history


@pytest.mark.benchmark
def test_it_measures_all_that_it_names_and_what_is_written_is_small() -> None:
    rows = {row.what: row for row in history(quick=True)}
    sizes = {what: row for what, row in rows.items() if row.median.endswith(("KiB", "MiB")) and row.budget}
    assert {row.median.split()[1] for row in sizes.values()} == {"KiB", "MiB"}
    assert all(row.met for row in sizes.values())
    asked = [what for what in rows if what.startswith("Asked for")]
    assert len(asked) == 5
    assert "Asked for one job: 1 receipts" in asked
    assert "Asked for what sums by the week of a year need: 5,000 receipts" in asked
    assert rows["Sums of the year by the command, from its start to its end"].median.endswith(" s")
