"""Tests the screen: every line fits, nothing overlaps, and its values are the node's."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.top import columns
from exporter.top.columns import COLUMNS, SORTS, ListKind, ListRow, filter_and_sort
from exporter.top.screen import KEYS, RenderedScreen, ViewState, handle_key, list_rows, render_screen
from exporter.top.view import ASCII, UNICODE, TopView, cell_width
from tests.top.nodes import NOW, answers, seen, snapshot, view
from tests.top.test_signs import HOSTILE

SIZES = [(80, 24), (200, 60), (40, 12), (24, 5), (132, 43), (81, 25)]


def drawn(shown: TopView | None = None, *, width: int = 80, height: int = 24, **asked: Any) -> RenderedScreen:
    return render_screen(ViewState(**asked), shown or view(), width=width, height=height)


def text(shown: TopView | None = None, **given_: Any) -> str:
    return "\n".join(line.text for line in drawn(shown, **given_).lines)


def typed(*keys: str, shown: TopView | None = None, width: int = 80, height: int = 24) -> str:
    """Render the screen after some keys."""
    asked, known = ViewState(), shown or view()
    for key in keys:
        now = render_screen(asked, known, width=width, height=height)
        sign = key if len(key) == 1 else None
        asked = handle_key(
            replace(asked, chosen=now.selected) if not asked.opened else asked, key, now.context, char=sign
        )
    return "\n".join(line.text for line in render_screen(asked, known, width=width, height=height).lines)


def hostile() -> Any:
    """Return responses with hostile names in every field that a user may choose."""
    told = answers(snapshot())
    told[0]["node"]["host"] = HOSTILE[0]
    for number, gpu in enumerate(told[0]["gpus"]):
        gpu["model"] = gpu["reason"] = HOSTILE[number % len(HOSTILE)]
        for owner in gpu["owners"]:
            owner.update(user=HOSTILE[number % len(HOSTILE)] * 9, name=HOSTILE[-1 - number % len(HOSTILE)])
    for number, job in enumerate(told[1]["jobs"]):
        job["owner"].update(user=HOSTILE[number], name=HOSTILE[-number] * 30, account=HOSTILE[5])
    return told


@given(
    width=st.integers(1, 220),
    height=st.integers(1, 70),
    kind=st.sampled_from(["gpus", "jobs"]),
    count=st.integers(1, 3),
    opened=st.booleans(),
    ascii_only=st.booleans(),
    problem=st.sampled_from(["", "it is gone"]),
)
def test_every_screen_has_its_size_and_no_line_is_wider(
    width: int, height: int, kind: ListKind, count: int, *, opened: bool, ascii_only: bool, problem: str
) -> None:
    nodes = [seen(told=hostile(), address=f"http://n{n}:1", problem=problem, since=NOW) for n in range(count)]
    shown = view(*nodes, signs=ASCII if ascii_only else UNICODE)
    first = drawn(shown, width=width, height=height, kind=kind)
    asked = ViewState(kind=kind, opened=first.selected if opened else None)
    lines = render_screen(asked, shown, width=width, height=height).lines
    assert len(lines) == height
    for line in lines:
        assert cell_width(line.text) <= width, line.text
        assert line.text.isprintable()
        assert not ascii_only or line.text.isascii()


@pytest.mark.parametrize("kind", ["gpus", "jobs"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 132, 200])
def test_every_cell_stands_below_its_head_and_none_touches_the_next(kind: ListKind, count: int, width: int) -> None:
    shown = view(*(seen(address=f"http://n{n}:1") for n in range(count)))
    first = drawn(shown, kind=kind, width=width)
    rows = screen_rows(first)
    found = columns.layout_columns(rows_in(shown, kind), kind, shown, width=width)
    upto = columns.MARGIN
    for _, size in found:
        upto += size
        for row in rows:
            assert row[upto : upto + 1] in ("", " "), (row, upto)
        upto += columns.GAP
    assert upto <= width


def rows_in(shown: TopView, kind: ListKind) -> list[ListRow]:
    return list_rows(ViewState(kind=kind), shown)


def screen_rows(first: RenderedScreen) -> list[str]:
    """Return the texts of the list's rows."""
    lines = [line.text for line in first.lines]
    at = next(place for place, line in enumerate(lines) if "[GPUs]" in line or "[jobs]" in line)
    return [line for line in lines[at + 2 :][: first.context.page] if line.strip()]


def test_at_80_columns_all_that_was_asked_for_is_there() -> None:
    heads = next(line for line in text().splitlines() if "STATE" in line)
    for head in ("GPU", "STATE", "SINCE", "GAU", "ECTR", "eMFU", "USEFUL", "SMI", "LEAK", "USER", "GiB", "°C"):
        assert head in heads, heads


@pytest.mark.parametrize("kind", ["gpus", "jobs"])
def test_columns_come_with_width_and_none_goes_that_a_narrower_screen_had(kind: ListKind) -> None:
    shown = view()
    rows = rows_in(shown, kind)
    before: set[str] = set()
    for width in range(24, 240):
        names = {column.name for column, _ in columns.layout_columns(rows, kind, shown, width=width)}
        assert before <= names, width
        before = names
    assert len(before) >= len(COLUMNS[kind]) - 2


def test_a_row_says_what_the_node_said_of_the_gpu() -> None:
    told = answers(snapshot())
    gpu = told[0]["gpus"][0]
    gpu.update(state="zombie", state_seconds=59 * 60.0, temperature_celsius=83.6, hang_suspected=False)
    gpu["last_5_minutes"].update(gau=0.5, ectr=0.25, emfu=None, product=0.0, seconds=300.0)
    gpu["last_5_minutes"]["leaks"] = {"idle_allocation": 225.0, "hung": 75.0}
    gpu["owners"] = [dict(gpu["owners"][0], user="grace")]
    row = screen_rows(drawn(view(seen(told=told))))[0]
    assert re.search(r"0 ◌ zombie +59m +50 +25 +- +0 .* 75 idle allo\S* +grace +68/80 84", row), row


def test_what_is_nothing_unseen_and_tiny_looks_different() -> None:
    told = answers(snapshot())
    for gpu, window in zip(
        told[0]["gpus"],
        ({"product": 0.0}, {"product": None}, {"product": None, "coverage": 0.0}, {"product": 0.001}),
        strict=False,
    ):
        gpu["last_5_minutes"].update(window)
    rows = screen_rows(drawn(view(seen(told=told))))
    figures = [row[columns_at(view(seen(told=told)), "useful")] for row in rows[:4]]
    assert [figure.strip() for figure in figures] == ["0", "-", "?", "<1"]


def columns_at(shown: TopView, name: str) -> slice:
    upto = columns.MARGIN
    for column, size in columns.layout_columns(rows_in(shown, "gpus"), "gpus", shown, width=80):
        if column.name == name:
            return slice(upto, upto + size)
        upto += size + columns.GAP
    raise AssertionError(name)


def test_a_suspected_hang_is_told_by_a_sign_and_a_word() -> None:
    told = answers(snapshot())
    told[0]["gpus"][0].update(state="active", hang_suspected=True, hang_confidence=0.625)
    shown = view(seen(told=told))
    assert "! hung?" in screen_rows(drawn(shown))[0]
    assert "hang suspected (62 % of indicators)" in text(shown)
    told[0]["gpus"][0].update(state="hung")
    assert "■ hung " in screen_rows(drawn(view(seen(told=told))))[0]


def test_every_state_has_a_sign_of_its_own() -> None:
    for signs in (UNICODE, ASCII):
        assert len(set(signs.states.values())) == len(signs.states)
        assert len(set(signs.fills.values())) == len(signs.fills)
        assert len(set(signs.levels)) == len(signs.levels)


def test_a_node_that_fell_silent_says_so_and_its_rows_are_was() -> None:
    gone = seen(problem="Connection refused", since=NOW - 35)
    shown = text(view(replace(gone, at=NOW - 37)))
    assert "OLD" in shown
    assert "NOT RESPONDING for 35s; values are 37s old: Connection refused" in shown
    rows = screen_rows(drawn(view(gone)))
    assert all("? was " in row for row in rows)
    assert not any(re.search(r"\d{2,3} *$", row) for row in rows), "power is no figure of the past"


def test_of_several_nodes_one_that_is_silent_does_not_darken_the_others() -> None:
    shown = text(view(seen(), seen(address="http://b:1", gpus=None, jobs=None, problem="no answer", since=NOW - 5)))
    assert "1 NOT RESPONDING" in shown
    assert "b:1" in shown
    assert "? was" not in shown
    assert "● active" in shown


def test_the_bar_has_the_shares_of_the_layers() -> None:
    told = answers(snapshot())
    told[0]["node"]["last_5_minutes"].update(
        seconds=100.0, leaks={"useful": 25.0, "memory_bound": 25.0, "hung": 25.0, "idle_allocation": 25.0}
    )
    bar = next(line for line in text(view(seen(told=told))).splitlines() if "█" in line)
    counts = [bar.count(fill) for fill in "█▓▒░"]
    assert sum(counts) == 78
    assert set(counts) == {19, 20}
    assert bar.strip() == "".join(count * fill for count, fill in zip(counts, "█▓▒░", strict=True))
    assert "75 % of the money leaks" in text(view(seen(told=told)))


def test_money_is_told_where_there_is_a_price() -> None:
    told = answers(snapshot())
    told[2].update(prices={"USD": 20.0})
    told[2]["last_5_minutes"]["money"] = {"USD": {"useful": 1.0, "hung": 3.0}}
    assert "leaks, 15.00 of 20.00 USD per hour: " in text(view(seen(told=told)))


def test_simulated_is_never_overlooked() -> None:
    for width, height in SIZES[:3]:
        assert "SIMULATED" in text(width=width, height=height)
    assert "SIMULATED" in text(view(seen(), seen(address="http://b:1")))
    assert "SIMULATED" in typed("enter")


def test_a_filter_shows_how_many_of_how_many_and_none_is_said() -> None:
    assert "filter: ada_" in typed("slash", "a", "d", "a")
    assert "4 of 8" in typed("slash", "a", "d", "a")
    assert "no row has these words" in typed("slash", "z", "z", "z")


def test_the_column_it_is_sorted_by_is_marked_and_named() -> None:
    for number, (name, column, _) in enumerate(SORTS["gpus"]):
        shown = typed(*["s"] * number, width=200)
        assert f"by {name}" in shown
        head = next(one.heading for one in COLUMNS["gpus"] if one.name == column).split()[-1]
        assert re.search(rf"▾{head}\b|\b{head}▾", shown), shown
        assert re.search(rf"▴{head}\b|\b{head}▴", typed(*["s"] * number, "r", width=200))


def test_with_more_rows_than_room_the_chosen_one_is_always_in_sight() -> None:
    for moves in range(8):
        first = typed(*["down"] * moves, height=12)
        assert f"▸   {moves} " in first
        assert " of 8" in first


def test_scrolling_does_not_move_the_columns() -> None:
    heads = {next(line for line in typed(*["down"] * n, height=12).splitlines() if "STATE" in line) for n in range(8)}
    assert len(heads) == 1


def test_help_explains_every_key() -> None:
    shown = typed("question_mark", height=60, width=100)
    assert [about for *_, about in KEYS if about not in shown] == []


def test_before_the_first_answer_it_says_so() -> None:
    waiting = seen(gpus=None, jobs=None)
    assert "waiting for the first response" in text(view(waiting))
    assert "waiting for the first response" in text(view(waiting, seen(address="http://b:1")))


def test_more_nodes_than_lines_are_counted_and_the_silent_ones_stay() -> None:
    nodes = [seen(address=f"http://n{n}:1") for n in range(30)]
    nodes[29] = replace(nodes[29], problem="Connection refused", since=NOW)
    shown = text(view(*nodes))
    assert "and 26 more nodes" in shown
    assert "n29:1" in shown.split("[GPUs]")[0]


def test_too_small_a_window_is_said() -> None:
    assert text(width=20, height=3).splitlines()[0] == "too small: 20x3"


def test_nodes_without_gpus_or_jobs_are_no_error() -> None:
    gpus, jobs, node = answers(snapshot())
    gpus["gpus"], jobs["jobs"] = [], []
    shown = view(seen(told=(gpus, jobs, node)))
    assert "no GPU" in text(shown)
    assert "no running or recently ended job" in text(shown, kind="jobs")


def hanging(**changes: Any) -> TopView:
    return view(seen(snapshot(2400, scenario="deadlock"), **changes))


@pytest.mark.slow
def test_what_hangs_is_said_before_all_else_and_its_seconds_count_from_the_first() -> None:
    screen = text(hanging())
    first, second, *others = screen.splitlines()
    assert first.startswith(" gpu-node-00")
    assert second.startswith(" Hung since 00:15:00 UTC (25m): job 41001 pretrain of ada: GPUs 0, 1, 3")
    said = " ".join(" ".join((second, *others[:3])).split())
    assert "GPU 2 (pid " in said
    assert "does not, the others wait for it. Dump the stacks of that rank (py-spy dump --pid " in said
    assert len(re.findall(r"■ hung   25m", screen)) == 8, "also of the GPU that they wait for"


def test_what_hangs_is_in_the_list_of_jobs_first_and_on_its_pages() -> None:
    told = answers(snapshot(2400, scenario="deadlock"))
    told[1]["jobs"].insert(0, json.loads(json.dumps(told[1]["jobs"][0])))
    told[1]["jobs"][0]["hang"], told[1]["jobs"][0]["owner"]["job_id"] = None, "7"
    told[1]["jobs"][0]["last_hour"]["seconds"] *= 10  # loses more than the other
    shown = view(seen(told=told))
    jobs = filter_and_sort(list_rows(ViewState(kind="jobs"), shown), "jobs")
    assert [job.owner.job_id for job in jobs] == ["41001", "7"]
    for keys in (("enter",), ("d",)):
        assert "Hung since 00:15:00 UTC (25m): GPUs 0, 1, 3" in typed(*keys, shown=hanging(), width=100, height=40)


def test_a_hang_that_lasts_is_the_first_leak_also_of_a_window_of_which_it_took_least() -> None:
    told = answers(snapshot(2400, scenario="deadlock"))
    for leak in ("hung", "exposed_communication"):
        told[0]["gpus"][0]["last_5_minutes"]["leaks"][leak] = 1.0 if leak == "hung" else 299.0
    row = list_rows(ViewState(), view(seen(told=told)))[0]
    assert [name for name, _ in row.losses] == ["hung", "exposed_communication"]


def test_a_node_that_does_not_respond_says_no_more_that_something_hangs_now() -> None:
    assert "Hung since" not in text(hanging(problem="it is gone", since=NOW))


def test_a_hang_leaves_room_for_the_list() -> None:
    for width, height in SIZES:
        screen = text(hanging(), width=width, height=height)
        assert screen.count("■ hung") >= min(2, height - 5), (width, height)
