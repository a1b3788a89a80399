"""The HTML page: self-contained, complete, and safe against names with markup."""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.report.analysis import compare_reports
from exporter.report.html import render_html
from exporter.report.model import JobReport, LayerRatios, ReportComparison, RunPeriod
from exporter.report.ranking import summary_tables
from exporter.report.summary import UsageSummary
from exporter.report.text import ADVICE_TITLE, ReportTable, comparison_tables, report_tables
from tests.report import pages
from tests.report.answers import receipt
from tests.report.read_page import Page

ALL: dict[str, Callable[[], JobReport | ReportComparison | UsageSummary]] = {
    "full": pages.full, "every leak": pages.every_leak, "one leak": pages.one_leak, "all useful": pages.all_useful,
    "unseen": pages.unseen, "empty": pages.empty, "two": pages.two, "many": pages.many,
    "many rude": lambda: pages.many(pages.RUDE[0]), "many long": lambda: pages.many("w" * 400),
    "alike": lambda: compare_reports(pages.full(), pages.full()),
    "nothing": lambda: compare_reports(pages.unseen(), pages.empty()),
    "rude": lambda: pages.rude(pages.RUDE[0]), "long": lambda: pages.rude("w" * 400),
}  # fmt: skip


def tables(found: JobReport | ReportComparison | UsageSummary) -> list[ReportTable]:
    match found:
        case JobReport():
            return list(report_tables(found))
        case ReportComparison():
            return list(comparison_tables(found))
        case UsageSummary():
            return list(summary_tables(found))


def page(found: JobReport | ReportComparison | UsageSummary) -> str:
    return render_html(found, tables(found))


def headline(found: JobReport | ReportComparison | UsageSummary) -> str:
    return next(each.words for each in Page(page(found)).all("p") if each.facts.get("class") == "headline")


each_page = pytest.mark.parametrize("name", ALL)


@each_page
def test_everything_is_closed_and_ids_are_unique(name: str) -> None:
    made = Page(page(ALL[name]()))
    ids = [each.facts["id"] for each in made.all(*SAFE_TAGS) if "id" in each.facts]
    assert len(ids) == len(set(ids))
    assert [each.tag for each in made.root.inside] == ["html"]
    assert made.all("html")[0].facts["lang"] == "en"
    assert [len(made.all(tag)) for tag in ("h1", "main", "header", "footer")] == [1, 1, 1, 1]
    assert made.all("head")[0].inside[-2].words == made.all("h1")[0].words


def _tags(made: Page) -> set[str]:
    found, todo = set(), list(made.root.inside)
    while todo:
        each = todo.pop()
        found.add(each.tag)
        todo += each.inside
    return found


@each_page
def test_every_figure_of_the_tables_is_there(name: str) -> None:
    found = ALL[name]()
    made, told = Page(page(found)), tables(found)
    expected = [[*row] for table in told for row in ((table.head, *table.rows) if table.head else table.rows)
                if table.rows and table.title != ADVICE_TITLE]  # fmt: skip
    assert made.cells() == [[_shown(cell) for cell in row] for row in expected]
    lines = {each.words for each in made.all("li")}
    for table in told:
        if table.title != ADVICE_TITLE:
            assert {_shown(line.strip()) for line in table.prose} <= lines
            assert not table.title or not (table.rows or table.prose) or _shown(table.title) in _titles(made)


def _shown(words: str) -> str:
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in words)


def _titles(made: Page) -> list[str]:
    return [each.words for each in made.all("h1", "h2")]


def test_the_advice_is_said_once_as_cards() -> None:
    found = pages.full()
    assert any(table.title == ADVICE_TITLE for table in tables(found)), "saying calls it otherwise: it is there twice"
    made = Page(page(found))
    cards = [" ".join(each.words.split()) for each in made.all("li") if "leak " in each.facts.get("class", "")]
    assert [card.partition(" 12.3 %")[0].partition(" 10.0 %")[0] for card in cards] == [
        "exposed communication", "throttled", "data stall",
    ]  # fmt: skip
    assert "12.3 %, 3.95 GPU-hours, 7.90 USD" in cards[0]
    assert "Overlap with compute; place ranks closer; find the straggler" in cards[0]
    assert "roletraining" in cards[0]
    assert _titles(made).count(ADVICE_TITLE) == 1


def test_a_job_that_lost_nothing_is_told_so() -> None:
    assert "Nothing was lost." in page(pages.all_useful())
    assert ADVICE_TITLE not in page(pages.empty())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (pages.full(), "2 nodes, 16 GPUs, 32.00 GPU-hours, 64.00 USD: 45.0 % of what was seen became useful work."),
        (pages.all_useful(), "1 node, 8 GPUs, 5.00 GPU-hours, 10.00 USD: 100.0 % became useful work."),
        (pages.one_leak(), "1 node, 1 GPU, 3.00 GPU-hours: 0.0 % became useful work."),
        (pages.unseen(), "1 node, 8 GPUs, 4.00 GPU-hours: nobody knows how much of what was seen became useful work."),
        (
            replace(pages.all_useful(), when=RunPeriod(start=0, end=60, running=True)),
            "1 node, 8 GPUs, 5.00 GPU-hours, 10.00 USD so far: 100.0 % became useful work.",
        ),
        (
            receipt(layers=LayerRatios(gau=1, ectr=0.5, emfu=1, product=0.5, floor=0.2)),
            "1 node, 8 GPUs, 80.00 GPU-hours: between 20.0 % and 50.0 % became useful work.",
        ),
        (pages.two(), "Of job 41 45.0 % became useful work, of job 42 60.0 %: 15.0 points more."),
        (
            compare_reports(pages.second(), pages.full()),
            "Of job 42 60.0 % became useful work, of job 41 45.0 %: 15.0 points less.",
        ),
        (
            compare_reports(pages.second(), pages.second()),
            "Of job 42 60.0 % became useful work, of job 42 60.0 %: as much.",
        ),
        (pages.many(), "3 jobs, 1,280.00 GPU-hours, 2,560.00 USD: 45.0 % became useful work."),
    ],
)  # fmt: skip
def test_one_sentence_says_it(found: JobReport | ReportComparison | UsageSummary, words: str) -> None:
    assert headline(found) == words


def test_any_tables_are_shown() -> None:
    odd = [
        ReportTable(title="A", head=("", "one", "two"), rows=(("x", "1", "-"), ("y", "2.50 USD", "far")),
              prose=("said", "  in")),
        ReportTable(rows=(("a", "b"),)), ReportTable(title="nothing"), ReportTable(head=("only", "a", "head")),
        ReportTable(prose=("alone",)), ReportTable(head=("ragged", "row"), rows=(("1",), ("1", "2", "3"))),
    ]  # fmt: skip
    made = Page(render_html(pages.full(), odd))
    assert made.cells() == [
        ["", "one", "two"], ["x", "1", "-"], ["y", "2.50 USD", "far"], ["a", "b"], ["ragged", "row"], ["1"],
        ["1", "2", "3"],
    ]  # fmt: skip
    assert [each.facts.get("class") for each in made.all("tr")[2].all("th", "td")] == [None, "n", None]
    assert [each.facts.get("class") for each in made.all("li") if each.words in ("said", "in")] == [None, "sub"]
    assert _titles(made)[0] == "Job 41"
    assert Page(render_html(pages.two(), [])).all("h1")[0].words == "Job 41 and job 42"
    assert Page(render_html(pages.many(), [])).all("h1")[0].words == "GPU efficiency: all"


def test_what_is_simulated_is_called_so() -> None:
    simulated = replace(pages.second(), simulated=True)
    for found in (simulated, compare_reports(pages.full(), simulated)):
        assert "SIMULATED" in page(found)
    assert "SIMULATED" not in page(pages.two())


# -- it is self-contained, and names are escaped --


@each_page
def test_its_policy_allows_its_own_style_and_nothing_else(name: str) -> None:
    made = Page(page(ALL[name]()))
    (policy,) = (each.facts["content"] for each in made.all("meta") if "http-equiv" in each.facts)
    (style,) = made.all("style")
    digest = b64encode(sha256(style.words.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = [each.tag for each in made.all("head")[0].inside]
    assert head.index("style") > head.index("meta")
    assert made.all("meta")[1].facts["http-equiv"] == "Content-Security-Policy", "it stands before all it may forbid"


SAFE_TAGS = frozenset({
    "html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section", "h1", "h2", "h3", "p", "b",
    "bdi", "ul", "ol", "li", "dl", "dt", "dd", "div", "span", "wbr", "table", "thead", "tbody", "tr", "th", "td",
    "figure", "figcaption", "svg", "defs", "pattern", "rect", "line", "text", "polygon", "polyline", "desc",
})  # fmt: skip
SAFE_FACTS = frozenset({
    "lang", "charset", "name", "content", "http-equiv", "class", "id", "role", "aria-labelledby", "aria-label",
    "aria-hidden", "tabindex", "scope", "viewbox", "width", "height", "focusable", "patternunits", "patterntransform",
    "x", "y", "x1", "y1", "x2", "y2", "points", "font-size", "text-anchor",
})  # fmt: skip


def only_ours(text: str) -> None:
    made = Page(text)
    assert _tags(made) <= SAFE_TAGS
    for each in made.all(*SAFE_TAGS):
        assert set(each.facts) <= SAFE_FACTS, each.facts
        assert re.fullmatch(r"[a-z0-9 -]*", each.facts.get("class", "")), "a name chose a class"
    assert set(re.findall(r"url\([^)]*\)", text)) <= {"url(#unresolved)", "url(#unobserved)"} or "url(" in str(
        pages.RUDE
    )
    assert "@import" not in made.all("style")[0].words
    assert not any(category(sign) in ("Cc", "Cf", "Cs") and sign != "\n" for sign in text)


@each_page
def test_it_asks_for_nothing(name: str) -> None:
    text = page(ALL[name]())
    only_ours(text)
    assert "http:" not in text
    assert "https:" not in text


@pytest.mark.parametrize("name", pages.RUDE)
def test_names_that_somebody_may_have_given_are_text(name: str) -> None:
    text = page(pages.rude(name))
    only_ours(text)
    assert _shown(name) in Page(text).all("h1")[0].words
    assert page(compare_reports(pages.rude(name), pages.full()))


@pytest.mark.slow
@given(st.text(max_size=40) | st.text(alphabet="<>&\"'/=!-[]{}`\\ \u202e\u2066\x00\x1bax", max_size=40))
def test_whatever_a_name_is_it_is_text(name: str) -> None:
    text = page(pages.rude(name))
    only_ours(text)
    assert _shown(name) in Page(text).all("h1")[0].words


def test_a_long_page_is_not_a_large_one() -> None:
    assert len(page(pages.every_leak())) < 250_000


def cards(found: JobReport) -> Sequence[str]:
    return [each.facts["class"] for each in Page(page(found)).all("li") if "leak " in each.facts.get("class", "")]


def test_a_leak_that_this_program_does_not_know_is_drawn_as_lost() -> None:
    found = pages.full()
    odd = replace(found.parts[0], name="brand_new", layer="another", fix="", team="", watch="")
    changed = replace(found, parts=(odd, *found.parts[1:]))
    assert cards(changed)[0] == "leak gau"
    assert "brand new" in page(changed)
