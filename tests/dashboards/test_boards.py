"""The boards as they are written: their files, what they ask for, what they say, their colours and their links."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import words
from dashboards.build import FOLDER, boards, main
from dashboards.drawing import draw
from dashboards.parts import Bars, Board, Column, Lines, Note, Panel, Table, Timeline
from dashboards.series import first_series
from dashboards.small_fleet import SMALL_FLEET
from exporter.colours import contrast
from exporter.core.leak_guide import LEAK_GUIDE
from exporter.core.leaks import LAYERS, LEAK_NAMES, LEAKS
from exporter.core.model import State
from exporter.core.progress import WALL_TIME_PHASES
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS as STORIES
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from tests.alerts.lint import Series, faults_of_query, known_to, rules
from tests.alerts.packs import alerts
from tests.alerts.promql import Selector, parse, walk
from tests.each import each

BOARDS = {board.name: board for board in boards()}
PANELS = [(board, panel) for board in BOARDS.values() for panel in board.panels()]
KNOWN: Mapping[str, Series] = known_to(rules())
OF_PANELS = each("board, panel", PANELS, ids=lambda value: value.title)
ASKING = each("board, panel", [(b, p) for b, p in PANELS if not isinstance(p.kind, Note)], ids=lambda v: v.title)
OF_BOARDS = pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board.name)
_BUILT_IN = re.compile(r"\$\{?__(?:range|rate_interval|interval)\}?")
_CHOSEN = re.compile(r"\$\{?([a-z_]\w+)")
PINNED = re.compile(r'job_id="\$job_id"|instance=~"\$(?:instance|job_instances)"')
FEW = re.compile(r'state=~?"(?:hung|zombie|unowned|unavailable|unobserved)[a-z|]*"')
"""A state that few GPUs of a fleet are in at a time."""


@cache
def text_of(name: str) -> str:
    return draw(BOARDS[name])


def file_of(board: Board) -> dict[str, Any]:
    """As it is drawn now; that the files are so has a test of its own."""
    found: dict[str, Any] = json.loads(text_of(board.name))
    return found


def as_promql(text: str) -> str:
    """A query with a length of time for Grafana's own variables; the chosen ones stand in strings."""
    return _BUILT_IN.sub("5m", text)


def selectors(panel: Panel) -> Iterator[Selector]:
    for query in panel.queries:
        yield from (node for node in walk(parse(as_promql(query.expr))) if isinstance(node, Selector))


def series_of(panel: Panel) -> set[str]:
    return {selector.name for selector in selectors(panel)}


# -- files --


def test_there_are_eight_boards_and_their_files_are_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(BOARDS) == {
        "fleet", "chargeback", "job", "node", "training", "inference", "zombies", "quality",
    }  # fmt: skip
    assert (main(["--check"]), capsys.readouterr().out) == (0, "")


def test_a_file_that_drifts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dashboards.build.boards", lambda: [BOARDS["fleet"]])
    monkeypatch.setattr("dashboards.build.FOLDER", tmp_path)
    (tmp_path / "gpu-efficiency-old.json").write_text("{}")
    assert main([]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-efficiency-fleet.json"]
    assert main(["--check"]) == 0
    (tmp_path / "gpu-efficiency-fleet.json").write_text("{}")
    (tmp_path / "gpu-efficiency-old.json").write_text("{}")
    assert main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "gpu-efficiency-fleet.json is not what its board says" in said
    assert "gpu-efficiency-old.json" in said


@OF_BOARDS
def test_grafana_s_own_types_read_a_file_and_lose_nothing_of_it(board: Board) -> None:
    there = file_of(board)
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(there)))
    # Annotations of Prometheus have fields of their own; __requires is for the import alone.
    assert read | {name: there[name] for name in ("annotations", "__requires")} == there


@OF_BOARDS
def test_ids_are_unique_and_panels_do_not_overlap(board: Board) -> None:
    top = file_of(board)["panels"]
    every = [*top, *(inner for panel in top for inner in panel.get("panels", ()))]
    assert len({panel["id"] for panel in every}) == len(every)
    for row, cells in places(top):
        assert not overlapping(cells), row


@OF_BOARDS
def test_a_file_fits_into_the_annotation_of_a_client_side_apply(board: Board) -> None:
    """It holds the ConfigMap as JSON, and Kubernetes takes 256 KiB with all other annotations."""
    text = (FOLDER / f"{board.uid}.json").read_text(encoding="utf-8")
    applied = json.dumps({"data": {f"{board.uid}.json": text}})
    assert len(applied) < 256 * 1024 - 4096


@OF_BOARDS
def test_a_board_opens_with_few_panels(board: Board) -> None:
    """A reader takes in a screen or two; what answers a further question is in a folded row."""
    shown = [panel for row in board.rows if not row.folded for panel in row.panels if not isinstance(panel.kind, Note)]
    assert len(shown) - 1 <= 16, "the notice is a line"


@OF_BOARDS
def test_rows_that_only_trouble_fills_are_folded(board: Board) -> None:
    """Empty panels one below the other hide those that say something; on the board for the one on call they are it."""
    open_rows = [row for row in board.rows if not row.folded]
    mostly = [row.title for row in open_rows if 2 * sum(bool(panel.fills) for panel in row.panels) > len(row.panels)]
    assert mostly == [] or board.name == "zombies"
    optional = {row.title: row.folded for row in board.rows if row.title.startswith("If it ")}
    assert all(optional.values())


def places(panels: list[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    yield "open", [cell for panel in panels for cell in cells_of(panel)]
    for panel in panels:
        yield panel["title"], [cell for inner in panel.get("panels", ()) for cell in cells_of(inner)]


def cells_of(panel: dict[str, Any]) -> Iterator[tuple[int, int]]:
    spot = panel["gridPos"]
    assert spot["x"] + spot["w"] <= 24
    return ((x, y) for x in range(spot["x"], spot["x"] + spot["w"]) for y in range(spot["y"], spot["y"] + spot["h"]))


def overlapping(cells: list[tuple[int, int]]) -> bool:
    return len(cells) != len(set(cells))


# -- what they ask for --


@ASKING
def test_what_a_panel_asks_for_exists_and_has_the_labels_it_selects_by(board: Board, panel: Panel) -> None:
    assert panel.queries
    for query in panel.queries:
        assert faults_of_query(as_promql(query.expr), KNOWN) == [], query.expr
    chosen = {name for query in panel.queries for name in _CHOSEN.findall(_BUILT_IN.sub("", query.expr))}
    assert chosen - {"__range_s"} <= {variable.name for variable in board.variables}


@ASKING
def test_a_panel_keeps_to_the_chosen_clusters(board: Board, panel: Panel) -> None:  # noqa: ARG001
    for selector in selectors(panel):
        matched = {matcher.label for matcher in selector.matchers}
        assert "cluster" in matched, selector


@ASKING
def test_only_recorded_series_are_asked_for_across_the_fleet(board: Board, panel: Panel) -> None:
    """What is raw is of one node, of one job, of the cluster's own page, or of the few GPUs in trouble.

    Which GPUs do not spin in a hang, and whose they are, is asked of all: a record would be minutes behind the page.
    """
    if panel.title in {each.title for each in SMALL_FLEET.panels}:
        return  # it is folded, and Grafana asks nothing for it until somebody opens it
    for query in panel.queries:
        for selector in (node for node in walk(parse(as_promql(query.expr))) if isinstance(node, Selector)):
            if board.name == "zombies" and selector.name in {"gpu_efficiency_allocation_info", "gpu_efficiency_state"}:
                continue
            text = ",".join(f'{m.label}{m.operator}"{m.value}"' for m in selector.matchers)
            recorded = ":" in selector.name or selector.name in {"ALERTS", "up", "gpu_efficiency_simulated"}
            recorded |= selector.name == "gpu_efficiency_job_hang_culprit"  # of jobs that hang alone
            assert recorded or "_cluster_" in selector.name or PINNED.search(text) or FEW.search(text), selector


def test_one_node_and_one_prometheus_are_a_product_of_their_own() -> None:
    """The board Node and the row for small fleets ask for what exporters export, but one folded panel's energy."""
    assert SMALL_FLEET.folded
    assert SMALL_FLEET.title in {row.title for row in BOARDS["fleet"].rows}
    wanted = [*SMALL_FLEET.panels, *BOARDS["node"].panels()[1:]]
    rules_ = {panel.title for panel in wanted if any(":" in name for name in series_of(panel))}
    assert rules_ == {"Power by what it was spent on"}
    for name in ("fleet", "node", "job"):
        asked = {
            re.sub(r"\|cluster:gpu_efficiency_(owned:gpus|cost_paid:per_hour)", "", variable.query)
            for variable in BOARDS[name].variables
        }
        assert not any(":gpu" in query for query in asked), name


@OF_BOARDS
def test_variables_ask_for_what_exists_and_for_what_was_chosen_before(board: Board) -> None:
    before = {"datasource"}
    for variable in board.variables:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
        assert bool(asked) == bool(variable.query)
        if asked:
            (selector,) = walk(parse(asked[1]))
            assert isinstance(selector, Selector)
            either = next((m.value for m in selector.matchers if m.label == "__name__"), "")
            for query in either.split("|") if either else [asked[1]]:
                assert faults_of_query(query, KNOWN) == []
                labels = KNOWN[query.partition("{")[0]].labels
                assert labels is None or asked[2] in labels
            assert set(_CHOSEN.findall(variable.query)) <= before
        before.add(variable.name)


# -- what they say --


@OF_PANELS
def test_a_panel_says_what_it_shows_what_is_bad_and_what_to_do(board: Board, panel: Panel) -> None:  # noqa: ARG001
    assert all(len(text) > 2 for text in (panel.title, panel.shows, panel.bad, panel.do, panel.empty))
    assert panel.title[0].isupper() or panel.title[0].isdigit() or panel.title.startswith(("eMFU", "x ", "nvidia-smi"))
    assert panel.shows.endswith(".")


def read_as_prose(panel: Panel) -> Iterator[str]:
    """What of a panel is read as it stands: titles, headings, units, what cells say, and legends without labels."""
    yield from (panel.title, panel.unit, panel.empty)
    for query in panel.queries:
        yield from (re.sub(r"{{\w+}}", "", query.legend), query.unit)
    for column in columns(panel):
        yield from (column.title, column.unit, column.empty, *column.texts.values())
    if isinstance(panel.kind, Timeline):
        yield from panel.kind.words


OF_OURS = {"leak", "reason", "kind", "cause", "loss", "layer"}
"""Labels whose values are names of ours, such as idle_context."""


@OF_PANELS
def test_names_of_ours_are_read_in_words(board: Board, panel: Panel) -> None:  # noqa: ARG001
    assert [text for text in read_as_prose(panel) if "_" in re.sub(r"\$\w+|\${[^}]*}", "", text)] == []
    for column in columns(panel):
        sentence = column.title == "Why that source" or panel.title == "Exemptions"
        of_ours = column.of in OF_OURS and not column.hidden and not sentence
        assert not of_ours or column.ours or column.texts, column.title
    wears = panel.kind.colours if isinstance(panel.kind, Lines | Bars) else {}
    for query in panel.queries:
        assert "{{leak}}" not in query.legend or set(wears) >= set(LEAK_NAMES), "renamed with its colour"


@OF_BOARDS
def test_reasons_in_a_legend_are_read_in_words(board: Board) -> None:
    for panel in drawn(board):
        if any(target.get("legendFormat") == "{{reason}}" for target in panel.get("targets", ())):
            in_words = {"id": "renameByRegex", "options": {"regex": "/_/g", "renamePattern": " "}}
            assert in_words in panel["transformations"], panel["title"]


@OF_PANELS
def test_a_number_of_a_gpu_or_a_rank_says_which_of_the_two_it_is(board: Board, panel: Panel) -> None:  # noqa: ARG001
    """`gpu-node-04: 0 rank 0` does not."""
    for query in panel.queries:
        before = re.findall(r"(\w*)\W{{(gpu|rank)}}", query.legend)
        assert all(said == {"gpu": "GPU", "rank": "rank"}[label] for said, label in before), query.legend
        assert ("{{of}}" in query.legend) == ('"of", ", rank $1", "rank"' in query.expr and "{{gpu}}" in query.legend)


@OF_BOARDS
def test_titles_are_unique_on_a_board(board: Board) -> None:
    titles = [panel.title for panel in board.panels()]
    assert sorted(titles) == sorted(set(titles))


@OF_PANELS
def test_what_fills_an_empty_panel_is_a_story(board: Board, panel: Panel) -> None:  # noqa: ARG001
    assert not panel.fills or panel.fills in {*SCENARIOS, *STORIES, *WATERFALL_SCENARIOS}


def links(panel: Panel) -> Iterator[str]:
    columns = panel.kind.columns if isinstance(panel.kind, Table) else ()
    yield from (link.url for link in (panel.link, *(column.link for column in columns)) if link)


@OF_PANELS
def test_links_lead_to_boards_and_their_variables_and_keep_time_and_choices(board: Board, panel: Panel) -> None:
    for url in links(panel):
        if url == "${runbooks:raw}/${__value.raw}.md":
            assert "runbooks" in {variable.name for variable in board.variables}
            continue
        found = re.fullmatch(r"/d/gpu-efficiency-(\w+)\?(.*)", url)
        assert found
        words_ = found[2].split("&")
        assert {"${__url_time_range}", "${datasource:queryparam}"} <= set(words_)
        of_one = {"var-job_id", "var-node"} & {word.partition("=")[0] for word in words_} and isinstance(
            panel.kind, Table
        )
        assert ("var-cluster=${__data.fields.home:percentencode}" if of_one else "${cluster:queryparam}") in words_
        set_ = {word.partition("=")[0].removeprefix("var-") for word in words_ if word.startswith("var-")}
        assert set_ <= {variable.name for variable in BOARDS[found[1]].variables}


@OF_PANELS
def test_a_link_encodes_what_it_reads_of_its_row(board: Board, panel: Panel) -> None:  # noqa: ARG001
    """A name may have a &, # or +; a runbook's has none."""
    read = {each for url in links(panel) for each in re.findall(r"\$\{__(?:value|data)[^}]*\}", url)}
    assert {each for each in read if not each.endswith(":percentencode}")} <= {"${__value.raw}"}
    assert "${__value.raw}" not in "".join(url for url in links(panel) if "runbooks" not in url)


@OF_PANELS
def test_every_table_has_a_way_on(board: Board, panel: Panel) -> None:  # noqa: ARG001
    """A row that names a job, a node, a team, an account or a runbook leads there."""
    if isinstance(panel.kind, Table):
        for column in panel.kind.columns:
            if column.of in {"job_id", "node", "team", "account", "whose", "runbook"}:
                assert column.link or column.texts or column.hidden, f"{panel.title}: {column.title}"


@OF_PANELS
def test_headings_fit_their_columns(board: Board, panel: Panel) -> None:  # noqa: ARG001
    """Seven pixels a letter of Grafana's font at most, the cell's padding, and the arrow of what is sorted by."""
    for column in columns(panel):
        arrow = 16 if isinstance(panel.kind, Table) and column.of == panel.kind.sort else 0
        needed = 7 * len(column.title) + 14 + arrow
        assert not column.width or column.width >= needed, f"{panel.title}: {column.title} needs {needed}"


@OF_PANELS
def test_what_a_link_reads_of_its_row_is_a_column(board: Board, panel: Panel) -> None:  # noqa: ARG001
    read = {name for url in links(panel) for name in re.findall(r"__data\.fields\.(\w+)", url)}
    assert read <= {column.of for column in columns(panel)}


def columns(panel: Panel) -> tuple[Column, ...]:
    return panel.kind.columns if isinstance(panel.kind, Table) else ()


@pytest.mark.slow
@ASKING
def test_every_number_has_a_unit(board: Board, panel: Panel) -> None:
    drawn = next(each for each in flat(file_of(board)) if each["title"] == panel.title)
    assert drawn["fieldConfig"]["defaults"]["unit"]
    for column in columns(panel):
        assert (len(column.of) > 1 and column.of != "Value") or column.unit, f"{panel.title}: {column.title}"


def flat(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


# -- every leak --


def leak_boards() -> list[Panel]:
    return [panel for name in ("training", "inference") for panel in BOARDS[name].panels()]


@pytest.mark.parametrize("seed", LEAK_GUIDE, ids=lambda seed: f"{seed.number}")
def test_each_of_the_twelve_has_its_metric_to_watch_its_team_its_price_and_what_to_do(seed: Any) -> None:
    texts = " ".join(said for panel in leak_boards() for column in columns(panel) for said in column.texts.values())
    assert words.prose(seed.fix) in texts
    assert seed.needs in texts
    asked = {query.expr for panel in leak_boards() for query in panel.queries}
    for wanted in seed.series:
        name, _, where = wanted.partition("{")
        name = name.split(":")[1]  # of single jobs, or of how they are spread
        assert any(name in expr and where.rstrip("}") in expr for expr in asked), wanted


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_each_row_of_the_ledger_has_its_share_its_price_and_its_fix_on_a_panel(leak: Any) -> None:
    asked = {query.expr for panel in leak_boards() for query in panel.queries}
    own = [expr for expr in asked if re.search(rf'leak=~?"[^"]*\b{leak.name}\b', expr)]
    assert any("cost:per_hour" in expr for expr in own)
    assert any("seconds:rate5m" in expr or "share:ratio" in expr for expr in own)


@OF_BOARDS
def test_every_board_says_first_what_is_simulated_and_which_rules_are_missing(board: Board) -> None:
    first = next(row for row in board.rows if not row.folded)
    notice, *_ = first.panels
    assert notice.title == "What these figures are of"
    assert board.rows[0] is first or {row.title for row in board.rows[: board.rows.index(first)]} == {"Find a job"}
    legends = " ".join(query.legend for query in notice.queries)
    assert "SIMULATED" in legends
    assert "load alerts/*.yaml" in legends
    assert ("choose one" in legends) == (board.name in {"node", "job"})


def test_every_alert_that_leads_to_quality_is_listed_there_with_what_to_do_first() -> None:
    boards = {name: rule["annotations"]["dashboard_url"] for name, rule in alerts().items()}
    leading = {name for name, url in boards.items() if url.endswith("gpu-efficiency-quality")}
    (table,) = (panel.kind for panel in BOARDS["quality"].panels() if panel.title == "Alerts on the exporter")
    assert isinstance(table, Table)
    (texts,) = (column.texts for column in table.columns if column.of == "first")
    assert set(texts) == leading


@OF_PANELS
def test_a_link_to_a_job_or_a_node_reads_the_row_s_own_cluster(board: Board, panel: Panel) -> None:  # noqa: ARG001
    """Its first query has it under `home`, out of the label cluster; without one the link opens All."""
    if any("fields.home:" in url for url in links(panel)):
        assert panel.queries[0].expr.endswith('"home", "All", "", ""), "home", "$1", "cluster", "(.+)")')
        assert any(column.of == "home" and column.hidden for column in columns(panel))


@OF_BOARDS
def test_the_currency_stands_at_the_top_and_rows_name_only_another_one(board: Board) -> None:
    of_money = [p for p in board.panels() if any(column.of == "currency" for column in columns(p))]
    assert bool(of_money) == ("currency" in {variable.name for variable in board.variables})
    for panel in of_money:
        assert all('"currency", "", "currency", "$currency")' in query.expr for query in panel.queries), panel.title


@OF_BOARDS
def test_every_board_marks_alerts_jobs_restarts_and_xids(board: Board) -> None:
    """A board of one node or job marks each on its own, one of a fleet large jobs and numbers, once switched on."""
    of_few = {"Job starts", "Job ends", "Exporter restarts", "Xid"}
    of_many = {"Large jobs start", "Large jobs end", "Exporters restart", "Xid errors"}
    marks = {mark["name"]: mark for mark in file_of(board)["annotations"]["list"][1:]}
    events = of_few if board.name in {"node", "job", "zombies"} else of_many
    assert set(marks) - {"Alerts", "Pages", "Tickets"} == events
    assert {"Alerts", "Pages"} & set(marks)
    assert all(marks[name]["enable"] == (events is of_few) for name in events), "of a fleet nobody waits for them"
    for mark in board.marks:
        assert faults_of_query(as_promql(mark.expr), KNOWN) == []
        assert set(_CHOSEN.findall(mark.expr)) <= {variable.name for variable in board.variables}


@OF_BOARDS
def test_boards_of_nodes_and_jobs_lead_to_logs_with_their_time_and_variables(board: Board) -> None:
    links = [link for link in file_of(board)["links"] if link["title"] == "Logs"]
    assert len(links) == (board.name in {"job", "node", "zombies", "quality"})
    for link in links:
        assert link["url"] == "${logs:raw}"
        assert link["keepTime"]
        assert link["includeVars"]
        (variable,) = (each for each in file_of(board)["templating"]["list"] if each["name"] == "logs")
        assert (variable["type"], variable["query"]) == ("textbox", "/explore"), "Grafana's own, until it is set"


@OF_BOARDS
def test_every_file_names_the_panels_that_it_needs(board: Board) -> None:
    written = file_of(board)
    drawn = [*written["panels"], *(inner for row in written["panels"] for inner in row.get("panels", ()))]
    needed = {(each["type"], each["id"]) for each in written["__requires"]}
    panels = {("panel", each["type"]) for each in drawn if each["type"] != "row"}
    assert needed == {("grafana", "grafana"), ("datasource", "prometheus"), *panels}


# -- colours --


@ASKING
def test_money_is_no_time(board: Board, panel: Panel) -> None:  # noqa: ARG001
    if any("{{currency}}" in query.legend for query in panel.queries):
        first = panel.queries[0].expr
        assert (panel.unit or words.unit_of(first_series(first))) in {"short", "none"}


def drawn(board: Board) -> Iterator[dict[str, Any]]:
    """Its panels as Grafana reads them, those of folded rows too."""
    for panel in file_of(board)["panels"]:
        yield from (panel, *panel.get("panels", ()))


def judged(panel: dict[str, Any]) -> set[str]:
    """The colours of its figures: by thresholds, and of single values; transparent is no colour."""
    found = json.dumps(panel.get("fieldConfig"), separators=(",", ":"))
    return set(re.findall(r'"color":"(#[0-9A-F]{6})"', found))


@OF_BOARDS
def test_large_figures_in_colour_can_be_read_on_both_of_grafana_s_grounds(board: Board) -> None:
    """3 to 1 is what WCAG 2.2 AA asks for of large text; the light panel is white, the dark one #181B1F."""
    figures = [panel for panel in drawn(board) if panel["type"] == "stat"]
    assert {panel["options"]["colorMode"] for panel in figures[1:]} <= {"value"}
    colours = {(figure["title"], colour) for figure in figures[1:] for colour in judged(figure)}
    assert {each for each in colours if not seen_everywhere(each[1])} == set()


@OF_BOARDS
def test_text_of_normal_size_stands_on_a_colour_that_it_can_be_read_on(board: Board) -> None:
    """4.5 to 1: no colour of the text has that on white and on #181B1F, so cells and the notice have a ground."""
    notice, *_ = (panel for panel in drawn(board) if panel["type"] == "stat")
    assert notice["options"]["colorMode"] == "background_solid"
    assert (notice["options"]["text"]["titleSize"], notice["options"]["orientation"]) == (14, "horizontal"), "lines"
    assert all(len(target["legendFormat"]) <= 40 for target in notice["targets"]), "as wide as a phone"
    tables = [panel for panel in drawn(board) if panel["type"] == "table"]
    assert "color-text" not in json.dumps(tables)
    colours = {(each["title"], colour) for each in (notice, *tables) for colour in judged(each)}
    assert {each for each in colours if contrast(each[1], words.text_on(each[1])) < 4.5} == set()


def seen_everywhere(colour: str) -> bool:
    return min(contrast(colour, "#FFFFFF"), contrast(colour, "#181B1F")) >= 3


@OF_BOARDS
def test_lines_can_be_seen_on_both_grounds(board: Board) -> None:
    """3 to 1, as for all that a chart is read by: yellow on white has 1.3. Leaks and states have theirs everywhere."""
    for panel in (panel for panel in drawn(board) if panel["type"] == "timeseries"):
        if panel["fieldConfig"]["defaults"]["custom"].get("fillOpacity", 0) == 0:
            for override in panel["fieldConfig"]["overrides"]:
                of = override["matcher"]["options"]
                fixed = [each["value"]["fixedColor"] for each in override["properties"] if each["id"] == "color"]
                assert of in {*words.LEAKS, *words.STATES} or all(map(seen_everywhere, fixed)), (panel["title"], of)


def test_shades_of_judgements_are_told_apart_with_any_colour_vision() -> None:
    shades = [words.on_both(colour) for colour in (words.GOOD, words.EXPECTED, words.WATCH, words.BAD, words.UNKNOWN)]
    assert [(a, b) for n, a in enumerate(shades) for b in shades[n + 1 :] if least(a, b) < 0.06] == []


def test_text_on_a_coloured_cell_can_be_read() -> None:
    colours = {*words.LEAKS.values(), *words.STATES.values(), *words.SEVERITIES.values(), *words.EIGHT}
    for colour in colours:
        shade = words.under_text(colour)
        assert contrast(shade, words.text_on(shade)) >= 4.5, colour
    assert {words.text_on(colour) for colour in ("#4AC6FA", "#E69F00")} == {"#F7F8FA"}, "as @grafana/ui 12.4 draws them"
    assert words.text_on("#FF9ED8") == "#202226"
    cells = {colour for board in BOARDS.values() for panel in drawn(board) for colour in judged(panel)}
    assert words.under_text(words.LEAKS["useful"]) in cells
    assert contrast("#FFFFFF", "#000000") == pytest.approx(21)


def oklab(colour: str) -> tuple[float, float, float]:
    """Lightness, green-red, blue-yellow (Ottosson, "A perceptual color space for image processing", 2020)."""
    red, green, blue = linear(colour)
    return lab(red, green, blue)


def linear(colour: str) -> tuple[float, float, float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return red, green, blue


def lab(red: float, green: float, blue: float) -> tuple[float, float, float]:
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


VISIONS = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""What people without one kind of cone see of linear RGB (Machado, Oliveira, Fernandes 2009, severity 1)."""


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    parts = linear(colour)
    red, green, blue = (max(0.0, sum(a * b for a, b in zip(row, parts, strict=True))) for row in VISIONS[vision])
    return lab(red, green, blue)


def apart(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    return math.dist(one, other)


def least(one: str, other: str) -> float:
    """How far apart two colours look to whoever sees them least apart; black and white are 1 apart."""
    return min(apart(oklab(one), oklab(other)), *(apart(seen(one, v), seen(other, v)) for v in VISIONS))


def test_every_leak_state_layer_and_phase_has_a_colour() -> None:
    assert set(words.LEAKS) == set(LEAK_NAMES)
    assert list(words.LAYERS) == list(LAYERS)
    assert set(words.STATES) == {state.value for state in State}
    assert set(WALL_TIME_PHASES) <= set(words.PHASES)
    for colours in (words.LEAKS, words.LAYERS, words.STATES, words.PHASES):
        assert len(set(colours.values())) == len(colours)
        assert all(re.fullmatch(r"#[0-9A-F]{6}", colour) for colour in colours.values())


@pytest.mark.parametrize(
    "colours",
    [words.LAYERS, words.STATES, dict(enumerate(words.EIGHT))],
    ids=["layers", "states", "gpus"],
)
def test_layers_states_and_gpus_can_be_told_apart_with_any_colour_vision(colours: Mapping[Any, str]) -> None:
    names = list(colours)
    near = {
        (a, b): round(least(colours[a], colours[b]), 3)
        for n, a in enumerate(names) for b in names[n + 1 :] if least(colours[a], colours[b]) < 0.06
    }  # fmt: skip
    assert near == {}


def test_neighbours_in_a_stack_of_leaks_can_be_told_apart_with_any_colour_vision() -> None:
    near = {(a, b): round(least(words.LEAKS[a], words.LEAKS[b]), 3) for a, b in pairwise(words.LEAKS)}
    assert {pair: value for pair, value in near.items() if value < 0.06} == {}


def test_what_is_not_known_never_looks_good() -> None:
    for colour in (words.UNKNOWN, words.QUIET, words.LAYERS["unresolved"], words.STATES["unobserved"]):
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        assert max(red, green, blue) - min(red, green, blue) < 30, "a grey"
        assert least(colour, words.GOOD) > 0.06


@OF_PANELS
def test_what_has_a_colour_of_its_own_wears_it_on_every_panel(board: Board, panel: Panel) -> None:  # noqa: ARG001
    wears = panel.kind.colours if isinstance(panel.kind, Lines | Bars | Timeline) else {}
    fixed = {**words.LEAKS, **words.STATES}
    assert {name: wears[name] for name in wears.keys() & fixed.keys()} == {
        name: fixed[name] for name in wears.keys() & fixed.keys()
    }
    legends = {query.legend for query in panel.queries}
    if isinstance(panel.kind, Lines | Bars) and "{{leak}}" in legends:
        assert set(wears) >= set(LEAK_NAMES)
    if isinstance(panel.kind, Lines | Bars) and "{{state}}" in legends and "_requests" not in panel.queries[0].expr:
        assert set(wears) >= set(words.STATES)


# -- units --


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("cluster:gpu_efficiency_gau:ratio_rate5m", "percentunit"),
        ("job:gpu_efficiency_latency:seconds", "s"),
        ("cluster:gpu_efficiency_owned:gpus", "none"),
        ("gpu_efficiency_power_watts", "watt"),
        ("gpu_efficiency_job_tensor_parallel_lost_bytes_per_second", "Bps"),
        ("job:gpu_efficiency_memory_used:bytes", "bytes"),
        ("gpu_efficiency_state_since_timestamp_seconds", "dateTimeAsIso"),
        ("cluster_leak:gpu_efficiency_cost:per_hour", "short"),
        ("job:gpu_efficiency_arithmetic_intensity:flops_per_byte", "none"),
        ("node:gpu_efficiency_paid_seconds:rate5m", "none"),
        ("gpu_efficiency_last_xid", "short"),
    ],
)
def test_a_unit_is_read_from_the_name(name: str, unit: str) -> None:
    assert name in KNOWN
    assert words.unit_of(name) == unit
