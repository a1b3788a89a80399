"""Tests `gpu-efficiency leaks` in its three formats, and the pages with the same table: leaks.md, worked-example.md."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from exporter.agent.agent import Agent
from exporter.cli.tables import leaks, leaks_arguments
from exporter.core.exposition import render
from exporter.core.leak_guide import (
    EXAMPLE_WATERFALLS,
    EXPECTED_USEFUL,
    LEAK_GUIDE,
    LITERATURE,
    OTHER_LEAKS,
    Citation,
    ExpectedLoss,
    LeakGuideEntry,
    OtherLeak,
)
from exporter.core.leaks import LAYER_OF, LEAK_NAMES, LEAKS
from exporter.core.metrics import METRICS
from exporter.core.snapshot import DaemonMetadata
from exporter.simulate.simulation import simulate
from exporter.specs import find_spec
from tests.alerts import packs

ROOT = Path(__file__).parents[1]
EXAMPLE = (ROOT / "docs" / "worked-example.md").read_text(encoding="utf-8")
LAYER = dict(zip(LEAK_NAMES, LAYER_OF, strict=True))
Run = Callable[..., str]


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*flags: str, columns: int | None = None) -> str:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", f"{columns}")
        parser = argparse.ArgumentParser()
        leaks_arguments(parser)
        assert leaks(parser.parse_args(flags)) == 0
        return capsys.readouterr().out

    return run


def flat(text: str) -> str:
    return " ".join(text.split())


# -- for a terminal --


def test_eighty_columns_hold_it(run: Run) -> None:
    lines = run(columns=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    assert len(lines) < 400


def test_where_there_is_no_terminal_it_is_eighty_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: int) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr("os.get_terminal_size", absent)
    assert run() == run(columns=80)


@pytest.mark.parametrize(("columns", "widest"), [(40, 40), (100, 100), (120, 120), (500, 120), (10, 40)])
def test_lines_are_as_long_as_the_terminal_is_wide_and_never_too_long_to_read(
    run: Run, columns: int, widest: int
) -> None:
    """Names of series, files and rows are not broken, so that they can be copied."""
    prose = [line for line in run(columns=columns).splitlines() if not re.search(r"[:{/_]\S{8,}|\w+_total", line)]
    longest = max(map(len, prose))
    assert widest - 8 <= longest <= widest


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_all_that_is_known_is_printed_whatever_the_width(run: Run, columns: int) -> None:
    told = flat(run(columns=columns))
    for seed in LEAK_GUIDE:
        facts = (f"{seed.number} {seed.name}", seed.watch, *seed.series, seed.fix, seed.needs, ", ".join(seed.rows))
        assert [fact for fact in facts if flat(fact) not in told] == []
        assert f"role {seed.team}" in told
        assert not seed.runbook or f"docs/runbooks/{seed.runbook}.md" in told
    rows = {leak.name: leak for leak in LEAKS}
    assert [name for seed in LEAK_GUIDE for name in seed.rows if f"{name}: {rows[name].description}" not in told] == []
    for other in OTHER_LEAKS:
        assert f"{other.row} {rows[other.row].description} ({LAYER[other.row]})" in told
        assert f"first {rows[other.row].fix} (role {rows[other.row].team})" in told
    assert [key for key, s in LITERATURE.items() if f"{key} {s.work}: {s.figure}" not in told] == []


def test_a_range_says_what_it_was_drawn_after(run: Run) -> None:
    told = flat(run(columns=120))
    assert "training 10 to 30 h of 100 ([ivanov2021], [llama2024]) infer. 20 to 55 h of 100 ([pope2022]" in told
    assert "training 0 to 5 h of 100 (E) infer. 2 to 20 h of 100 ([xiang2025])" in told
    assert "training does not occur infer. 1 to 10 h of 100 ([kwon2023])" in told
    assert "What remains useful training 15 to 50 h of 100 ([llama2024]" in told


# -- for programs --


def test_json_holds_the_whole_table(run: Run) -> None:
    tree = msgspec.json.decode(run("--json"))
    assert msgspec.convert(tree["twelve"], tuple[LeakGuideEntry, ...]) == LEAK_GUIDE
    assert msgspec.convert(tree["others"], tuple[OtherLeak, ...]) == OTHER_LEAKS
    assert msgspec.convert(tree["useful"], dict[str, ExpectedLoss]) == EXPECTED_USEFUL
    assert msgspec.convert(tree["literature"], dict[str, Citation]) == LITERATURE
    assert tree["waterfalls"] == EXAMPLE_WATERFALLS
    what = {leak.name: leak.description for leak in LEAKS}
    told = {name: text for kind in tree["twelve"] for name, text in kind["what"].items()}
    assert told | {other["row"]: other["what"] for other in tree["others"]} == what
    assert list(tree) == ["twelve", "others", "useful", "literature", "waterfalls"]


def test_one_form_at_a_time() -> None:
    parser = argparse.ArgumentParser()
    leaks_arguments(parser)
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--json", "--markdown"])
    assert end.value.code == 2


# -- docs/leaks.md --


def test_the_page_is_what_the_command_prints(run: Run) -> None:
    assert run("--markdown") == (ROOT / "docs" / "leaks.md").read_text(encoding="utf-8"), "run `make docs`"


def test_the_page_s_tables_hold(run: Run) -> None:
    """Each row has as many cells as its head: an unescaped | in a selector would end a cell."""
    tables = re.findall(r"(?:^\|.*\n)+", run("--markdown"), re.MULTILINE)
    cells = [[len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()] for table in tables]
    assert [len(set(counts)) for counts in cells] == [1] * 7
    assert [len(counts) - 2 for counts in cells] == [12, 17, 13, 4, 12, len(OTHER_LEAKS), len(LITERATURE)]


def test_the_page_says_what_the_ranges_are_and_how_many_leaks_there_are(run: Run) -> None:
    told = flat(run("--markdown"))
    assert "Every range is an estimate of this project" in told
    grouped = sum(len(entry.rows) for entry in LEAK_GUIDE)
    assert f"sorts {grouped} of the {len(LEAKS)} leaks into twelve" in told
    assert (len(LEAKS) - grouped, len(OTHER_LEAKS)) == (7, 7)


def test_the_page_names_the_leaks_that_are_estimated_until_they_are_reported(run: Run) -> None:
    told = flat(run("--markdown"))
    (named,) = re.findall(r"Four others are estimated from counters until the job reports them: (.*?)\.", told)
    estimated = [leak.name for leak in LEAKS if "or estimated" in leak.evidence]
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(estimated)


def test_a_page_s_links_lead_somewhere(run: Run) -> None:
    for page in (run("--markdown"), EXAMPLE):
        targets = re.findall(r"\]\(([^)#]+)", page)
        assert targets
        assert [target for target in targets if not (ROOT / "docs" / target).is_file()] == []


def test_a_bar_in_a_cell_is_escaped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = msgspec.structs.replace(LEAK_GUIDE[0], watch="this|that")
    monkeypatch.setattr("exporter.cli.tables.LEAK_GUIDE", (odd,))
    assert r"| 1 | this\|that |" in run("--markdown")


# -- docs/worked-example.md --


@pytest.fixture(name="page", scope="module")
def _page() -> str:
    """Metrics of a node after the scenario of the example."""
    agent = Agent(meta=DaemonMetadata())
    agent.run(simulate("carpenter", gpus=1, period_seconds=60).observations)
    snapshot = agent.latest()
    assert snapshot is not None
    return render(snapshot).decode()


def test_the_example_s_series_are_those_of_its_scenario(page: str) -> None:
    shown = [line for line in EXAMPLE.splitlines() if line.startswith("gpu_efficiency_")]
    assert len(shown) == 7
    assert [line for line in shown if line not in page.splitlines()] == []
    elsewhere = [
        line
        for line in page.splitlines()
        if line.startswith("gpu_efficiency_node_seconds_total{") and not line.endswith(" 0.0") and line not in shown
    ]
    assert elsewhere == []


def test_the_example_s_parts_are_what_is_paid_and_multiply_to_a_fifth(page: str) -> None:
    booked = re.findall(r'^gpu_efficiency_node_seconds_total\{.*layer="(\w+)"\} (\S+)$', EXAMPLE, re.MULTILINE)
    by_layer = {layer: 0.0 for layer, _ in booked}
    for layer, seconds in booked:
        by_layer[layer] += float(seconds) / 3600
    assert by_layer == pytest.approx({"gau": 2, "ectr": 2, "emfu": 2.4, "useful": 1.6})
    (paid,) = re.findall(r"^gpu_efficiency_paid_seconds_total\{.*\} (\S+)$", page, re.MULTILINE)
    assert paid == "28800.0"
    assert sum(by_layer.values()) == pytest.approx(8)
    for row in ("(8 - 2) / 8 | 75 %", "(6 - 2) / 6 | 67 %", "1.6 / 4 | 40 %", "1.6 / 8 | 20 %"):
        assert f"| {row} |" in EXAMPLE


@pytest.mark.parametrize("kind", EXAMPLE_WATERFALLS)
def test_the_example_s_waterfalls_are_the_table_s(kind: str) -> None:
    section = EXAMPLE.split(f"## {kind.capitalize()}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\d*) ?\| (\d+) \| (\d+) \| (\d+) \|$", section, re.MULTILINE)
    hours = dict(EXAMPLE_WATERFALLS[kind])
    useful = hours.pop("useful")
    numbers = {row: f"{seed.number}" for seed in LEAK_GUIDE for row in seed.rows}
    left = 100
    for (row, layer, number, amount, money, after), (name, wanted) in zip(rows, hours.items(), strict=True):
        left -= wanted
        assert (row, layer, number) == (name, LAYER[name], numbers.get(name, ""))
        assert (int(amount), int(money), int(after)) == (wanted, 2 * wanted, left)
    assert left == useful
    assert f"| **useful** | useful | | {useful} | {2 * useful} | |\n| **paid** | | | 100 | 200 | |" in section
    assert f"A useful GPU-hour costs ${f'{200 / useful:.2f}'.removesuffix('.00')}.\n" in section


def test_the_example_s_ratios_of_the_waterfalls_are_those_of_their_layers() -> None:
    for kind, hours in EXAMPLE_WATERFALLS.items():
        lost = {name: sum(h for row, h in hours.items() if LAYER[row] == name) for name in ("gau", "ectr", "useful")}
        occupied = 100 - lost["gau"]
        computing = occupied - lost["ectr"]
        useful = lost["useful"]
        ectr, emfu = round(100 * computing / occupied), round(100 * useful / computing)
        assert (
            f"## {kind.capitalize()}\n"
            f"GAU {occupied} / 100 = {occupied} %, ECTR {computing} / {occupied} = {ectr} %, "
            f"eMFU {useful} / {computing} = {emfu} %: {useful} %."
        ) in EXAMPLE


def test_a_series_of_the_example_exists() -> None:
    known = {metric.name for metric in METRICS} | packs.records(*packs.files()).keys()
    named = set(re.findall(r"(?:\w+:)?gpu_efficiency_\w+(?::\w+)?", EXAMPLE))
    assert len(named) > 8
    assert named - known == set()


def test_the_example_holds_a_b200_against_its_dense_peak() -> None:
    spec = find_spec("NVIDIA B200")
    assert spec is not None
    assert spec.peak_flops is not None
    told = flat(EXAMPLE)
    assert f"{900e12 / spec.peak_flops:.0%}" == "40%"
    assert "900 / 2,250 = 40 %; against the sparse peak it would read 20 %" in told
    assert f"holds the B200 to {spec.peak_flops:.2e}".replace("e+", "e") in told
