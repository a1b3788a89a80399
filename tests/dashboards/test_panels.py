"""Every panel of every board, asked of a real Prometheus: without error, with data, and with the ledger's numbers."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import httpx
import pytest

from dashboards.build import FOLDER
from dashboards.owners import to_bill, whose
from dashboards.parts import Board, Note
from dashboards.small_fleet import SMALL_FLEET
from exporter.core.leaks import LEAKS
from tests.dashboards.expected.row import Expected
from tests.dashboards.expected.tables import BOARDS, EXPECTED, FILLED, MAIN, ODD, TABLES, WHOLE
from tests.dashboards.grafana import Answer, Panel, asker, opened
from tests.dashboards.hang import HUNG_FOR, JOB
from tests.dashboards.past import rules
from tests.dashboards.stories import PRICE
from tests.dashboards.variables import Ask
from tests.dashboards.weeks import OWNED
from tests.dashboards.world import ENDED, RESTARTED, World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
OF_BOARDS = pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board.name)
WHOSE = "All that was paid for"
HOURS = 3


@pytest.fixture(name="ask", scope="module")
def _ask(world: World) -> Iterator[Ask]:
    with httpx.Client(base_url=world.past.url, trust_env=False, timeout=120) as client:
        yield asker(client)


@cache
def panels_of(name: str) -> tuple[dict[str, Any], ...]:
    """Of a board's file, those of folded rows too."""
    drawn = json.loads((FOLDER / f"{BOARDS[name].uid}.json").read_text())["panels"]
    return tuple(each for panel in drawn for each in (panel, *panel.get("panels", ())) if each["type"] != "row")


@cache
def variables_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{BOARDS[name].uid}.json").read_text())["templating"]
    return found


def opens(
    board: Board,
    ask: Ask,
    world: World,
    *,
    chosen: Mapping[str, Sequence[str]],
    minutes: float = HOURS * 60,
    only: Collection[str] = (),
) -> dict[str, Panel]:
    """The board's panels by their titles, or only those."""
    wanted = [panel for panel in panels_of(board.name) if not only or panel["title"] in only]
    drawn = {"templating": variables_of(board.name), "panels": wanted}
    return {panel.title: panel for panel in opened(drawn, ask, world.last(minutes), chosen=chosen)}


def views(
    board: Board, ask: Ask, world: World, cluster: str, *, only: Collection[str] = ()
) -> Iterator[dict[str, Panel]]:
    """The board as it is opened on a cluster; one with a job or a leak to choose, once for each job there or leak."""
    ids = dict.fromkeys(job for node in world.clusters[cluster].nodes for job in node.moments[-1].jobs)
    by_job = any(variable.name == "job_id" for variable in board.variables) and ids
    leaks = next((variable.choices for variable in board.variables if variable.name == "leak"), {})
    jobs = [{"job_id": [job]} for job in ids] if by_job else []
    chosen = [*jobs, *({"leak": [leak]} for leak in leaks)] or [{}]
    return (opens(board, ask, world, chosen={"cluster": [cluster], **each}, only=only) for each in chosen)


def left_empty(wanted: set[str], found: Iterable[dict[str, Panel]]) -> set[str]:
    """Which of them have data in no view; no more views are opened than it takes."""
    for view in found:
        assert failures(view) == {}
        wanted = {title for title in wanted if not filled(view[title])}
        if not wanted:
            break
    return wanted


def failures(panels: dict[str, Panel]) -> dict[str, str]:
    return {
        f"{title} {answer.ref}": f"{answer.error}: {answer.expr}"
        for title, panel in panels.items() for answer in panel.answers if answer.error
    }  # fmt: skip


def filled(panel: Panel) -> bool:
    return any(answer.series for answer in panel.answers)


def asking(board: Board) -> list[str]:
    return [panel.title for panel in board.panels() if not isinstance(panel.kind, Note)]


@OF_BOARDS
def test_every_panel_has_data_of_the_fleet_or_says_which_story_gives_it_some(
    board: Board, ask: Ask, world: World
) -> None:
    assert [panel["title"] for panel in panels_of(board.name) if panel["type"] != "text"] == asking(board)
    of_a_story = {panel.title for panel in board.panels() if panel.fills}
    assert left_empty(set(asking(board)) - of_a_story, views(board, ask, world, MAIN)) == set()


@pytest.mark.parametrize(("board", "story"), FILLED, ids=lambda value: getattr(value, "name", value))
def test_the_story_that_a_panel_names_fills_it(board: Board, story: str, ask: Ask, world: World) -> None:
    wanted = {panel.title for panel in board.panels() if panel.fills == story}
    assert left_empty(wanted, views(board, ask, world, story, only=wanted)) == set()


@OF_BOARDS
@pytest.mark.parametrize("cluster", [*ODD, "no such cluster"])
def test_a_blind_fleet_and_one_without_prices_or_without_anything_break_nothing(
    board: Board, cluster: str, ask: Ask, world: World
) -> None:
    assert failures(opens(board, ask, world, chosen={"cluster": [cluster]})) == {}


@pytest.mark.parametrize(
    ("board", "row"), EXPECTED, ids=lambda v: v.name if isinstance(v, Board) else f"{v.panel}-{v.scenario}"
)
def test_a_panel_says_what_the_ledger_says(board: Board, row: Expected, ask: Ask, world: World) -> None:
    chosen = {"cluster": [row.scenario]} | {name: [value] for name, value in row.variables.items()}
    panel = opens(board, ask, world, chosen=chosen, minutes=row.minutes, only={row.panel})[row.panel]
    (answer,) = (each for each in panel.answers if each.ref == row.letter)
    told = float(row.worth(world.clusters[row.scenario]))
    assert value(answer, row) == pytest.approx(told, rel=row.within, abs=1e-9), answer.expr


@pytest.mark.parametrize(("board", "title"), [("fleet", "Teams, and what nobody holds"), ("chargeback", WHOSE)])
def test_what_teams_and_nobody_hold_is_all_that_is_owned(board: str, title: str, ask: Ask, world: World) -> None:
    panel = opens(BOARDS[board], ask, world, chosen={"cluster": [MAIN]}, only={title})[title]
    hours = {answer.ref: sum(each.points[-1][1] for each in answer.series) for answer in panel.answers}
    seen = sum(world.clusters[MAIN].leaks(HOURS * 60).values()) / 3600
    assert hours["A"] == pytest.approx(OWNED * HOURS, rel=0.01)
    assert hours["B" if board == "fleet" else "C"] == pytest.approx(PRICE * seen, rel=0.01), "no price of a silent node"


@pytest.mark.parametrize(
    ("team", "account", "shown", "bill"),
    [("perception", "vision", "perception", "All"), ("", "vision", "vision", "vision"), ("a", "", "a", "All")],
)
def test_whose_a_job_is_is_its_team_or_its_account(team: str, account: str, shown: str, bill: str, ask: Ask) -> None:
    series = f'label_replace(label_replace(vector(1), "team", "{team}", "", ""), "account", "{account}", "", "")'
    (found,) = ask("query", {"query": whose(series)})["result"]
    assert (found["metric"]["whose"], found["metric"].get("bill", "")) == (shown, bill)


@pytest.mark.parametrize(
    ("team", "bill"), [("vision", "vision"), ("(none)", "All"), ("nobody: free GPUs", "All"), ("nobody", "nobody")]
)
def test_a_name_of_no_owner_leads_to_the_bill_of_all(team: str, bill: str, ask: Ask) -> None:
    series = f'label_replace(vector(1), "team", "{team}", "", "")'
    (found,) = ask("query", {"query": to_bill("team", series, "[(]none[)]|nobody: .*")})["result"]
    assert found["metric"]["bill"] == bill


@OF_BOARDS
def test_a_row_that_leads_to_a_job_or_a_node_knows_its_cluster(board: Board, ask: Ask, world: World) -> None:
    linked = {panel.title for panel in board.panels() if '"home", "All"' in "".join(q.expr for q in panel.queries)}
    for panel in opens(board, ask, world, chosen={"cluster": [MAIN]}, only=linked).values():
        assert {each.labels["home"] for each in panel.answers[0].series} <= {MAIN}, panel.title


@pytest.mark.parametrize("title", ["The worst now: call its owner", "Firing alerts on jobs and GPUs"])
def test_runbooks_are_named_where_they_have_an_address(title: str, ask: Ask, world: World) -> None:
    for chosen, named in (({}, False), ({"runbooks": ["https://wiki.example/runbooks"]}, True)):
        panel = opens(BOARDS["zombies"], ask, world, chosen={"cluster": ["deadlock"], **chosen}, only={title})[title]
        assert ["runbook" in each.labels for each in panel.answers[0].series] == [named]


@pytest.mark.parametrize("cluster", WHOLE)
def test_leaks_add_up_to_what_is_paid_at_every_moment_and_over_all(cluster: str, ask: Ask, world: World) -> None:
    """Also where exporters start, end and restart: in a cluster to the last digit, by the exporter's own law.

    A counter of a job begins with the job, and Prometheus has no rate of what it had at its first scrape: the rates of
    a job's leaks lack that much where an exporter has just started.
    """

    def points(query: str) -> dict[float, float]:
        times = {"start": f"{world.end - 7200:.0f}", "end": f"{world.end:.0f}", "step": "240"}
        (found,) = ask("query_range", {"query": query, **times})["result"]
        return {at: float(value) for at, value in found["values"]}

    of = f'{{cluster="{cluster}"}}'
    paid = points(f"sum(rate(gpu_efficiency_paid_seconds_total{of}[5m])) > 0")
    assert points(f"sum(cluster_leak:gpu_efficiency_seconds:rate5m{of})") == pytest.approx(paid, rel=1e-9)
    hanging = [at for at in paid if at > world.end - HUNG_FOR]
    paid, leaks = (
        points(f"sum(rate(gpu_efficiency_job_paid_seconds_total{of}[5m]))"),
        points(f"sum(job_leak:gpu_efficiency_seconds:rate5m{of})"),
    )
    for at in hanging:
        assert leaks[at] == pytest.approx(paid[at], rel=0.05 if cluster == "hang_moves" else 1e-9)
    titles = {"Of 100 GPU-hours paid", "Of 100 GPU-hours, without rules"}
    for panel in opens(BOARDS["fleet"], ask, world, chosen={"cluster": [cluster]}, only=titles).values():
        assert sum(found.points[-1][1] for found in panel.answers[0].series) == pytest.approx(100), panel.title


@pytest.mark.parametrize(
    ("name", "cluster", "label", "ago"),
    [
        ("Exporters restart", "moves", ("exporters", "1"), RESTARTED),
        ("Large jobs start", "hang_across", ("job_id", JOB), 1500),
        ("Large jobs end", "moves", ("job_id", "inference/chat-2-0"), ENDED - 300),
        ("Xid errors", "lost_gpu", ("gpus", "1"), 1800),
    ],
)
def test_a_mark_of_a_fleet_is_where_it_happened(
    name: str, cluster: str, label: tuple[str, str], ago: float, *, ask: Ask, world: World
) -> None:
    (mark,) = (mark for mark in BOARDS["fleet"].marks if mark.name == name)
    times = {"start": f"{world.end - 7200:.0f}", "end": f"{world.end:.0f}", "step": mark.step}
    found = ask("query_range", {"query": mark.expr.replace("$cluster", cluster), **times})["result"]
    marked = [at - world.end for row in found if label in row["metric"].items() for at, _ in row["values"]]
    assert marked == pytest.approx([-ago], abs=300)


NEED_RULES: Mapping[str, set[str]] = {
    "node": {"Power by what it was spent on"},
    "job": {
        "The largest jobs that run now", "Who the others wait for", "Alerts on it now", "ECTR against eMFU",
        "Its GPUs by leak", "Tokens a second", "MFU, HFU and OFU", "Its time as reported by training",
        "Steps and checkpoints",
    },
    "fleet": set(),
}  # fmt: skip
"""Panels that may stay empty where no rule of ours is loaded; of Fleet in its row for a small one."""
VIEWS: Mapping[str, Sequence[Mapping[str, Sequence[str]]]] = {
    "node": [{"node": ["gpu-node-08"]}, {"node": ["gpu-node-03"]}],
    "job": [{"job_id": ["49001"]}, {"job_id": ["45001"]}, {"job_id": ["inference/chat-2-100"]}],
    "fleet": [{}],
}
_RULES = re.compile(rf"(?<![\w:])({'|'.join(map(re.escape, {rule.name for rule in rules()}))})(?![\w:])")


@pytest.fixture(name="unruled", scope="module")
def _unruled(ask: Ask) -> Ask:
    """The same Prometheus as if it had loaded no rule: what one records has a name that nothing has."""
    return lambda path, given: ask(path, {name: _RULES.sub("nothing_records_it", text) for name, text in given.items()})


@pytest.mark.parametrize("name", NEED_RULES)
def test_a_board_of_one_node_or_job_and_a_small_fleet_need_no_recording_rules(
    name: str, ask: Ask, unruled: Ask, world: World
) -> None:
    only = {panel.title for panel in SMALL_FLEET.panels} if name == "fleet" else set()
    lost, said = set[str](), set[str]()
    for chosen in VIEWS[name]:
        ruled, bare = (
            opens(BOARDS[name], each, world, chosen={"cluster": [MAIN], **chosen}, only=only) for each in (ask, unruled)
        )
        assert failures(bare) == {}
        lost |= {title for title, panel in ruled.items() if filled(panel) and not filled(bare[title])}
        said |= {title for title, panel in bare.items() if filled(panel)}
    assert lost == NEED_RULES[name]
    assert only <= said


@OF_BOARDS
def test_without_recording_rules_a_board_says_so_first(board: Board, ask: Ask, unruled: Ask, world: World) -> None:
    title = "What these figures are of"
    for each, missing in ((ask, False), (unruled, True)):
        chosen = {"cluster": [MAIN], **VIEWS.get(board.name, [{}])[0]}
        panel = opens(board, each, world, chosen=chosen, only={title})[title]
        simulated, unloaded, *_ = panel.answers
        assert (bool(simulated.series), bool(unloaded.series)) == (True, missing)


def test_the_document_names_the_panels_that_need_rules() -> None:
    document = " ".join((FOLDER.parent / "docs" / "dashboards.md").read_text(encoding="utf-8").split())
    assert [title for titles in NEED_RULES.values() for title in titles if f"*{title}*" not in document] == []


@pytest.mark.parametrize(("cluster", "recovered"), [("hang_across", False), ("fleet", False), ("demo", True)])
def test_what_hangs_now_has_not_recovered(cluster: str, recovered: bool, ask: Ask, world: World) -> None:
    title = "Time to detect, time to recover"
    panel = opens(BOARDS["training"], ask, world, chosen={"cluster": [cluster]}, only={title})[title]
    assert [bool(answer.series) for answer in panel.answers] == [True, recovered]
    assert (world.clusters[cluster].states().get("hung", 0) > 0) != recovered


def value(answer: Answer, row: Expected) -> float:
    found = [each for each in answer.series if row.where.items() <= {"currency": "USD", **each.labels}.items()]
    assert len(found) == 1, f"{len(found)} series with {row.where}: {answer}"
    return found[0].points[-1][1]


def test_there_are_three_expectations_a_board_and_one_for_every_leak() -> None:
    assert {name: len(rows) for name, rows in TABLES.items() if len({row.panel for row in rows}) < 3} == {}
    assert {leak.name for leak in LEAKS} - {row.leak for _, row in EXPECTED} == set()
