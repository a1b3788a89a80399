"""`gpu-efficiency report --html` as a person sees it, in Chromium: on a desk, on a phone, at night, on paper."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.history.store import HistoryStore
from exporter.report.html import render_html
from exporter.report.model import JobReport, ReportComparison
from exporter.report.ranking import summary_tables
from exporter.report.summary import UsageSummary
from exporter.report.svg import text_width
from exporter.report.text import comparison_tables, report_tables
from tests.e2e.chromium import MISSING, Browser, browser, installed
from tests.report import pages
from tests.report.commands import run
from tests.report.stated import BEGIN, sample, stated

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not installed(), reason=MISSING)]
FOUND: dict[str, JobReport | ReportComparison | UsageSummary] = {
    "full": pages.full(), "every_leak": pages.every_leak(), "one_leak": pages.one_leak(), "empty": pages.empty(),
    "rude": pages.rude(pages.RUDE[0]), "long": pages.rude("w" * 400), "two": pages.two(), "many": pages.many(),
}  # fmt: skip
MOST_PAPER = {"full": 4, "every_leak": 6, "two": 2, "many": 5}
OVERLAPS = """(() => {
  const shown = [...document.querySelectorAll('svg[role=img]')].filter(svg => svg.getBoundingClientRect().width);
  return shown.flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    const out = texts.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 2 || box.bottom > frame.bottom + 2).map(([words]) => ['out', words]);
    const over = texts.flatMap(([a, one], n) => texts.slice(n + 1).filter(([, other]) =>
      Math.min(one.right, other.right) - Math.max(one.left, other.left) > 0.5
      && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 4).map(([b]) => ['over', a, b]));
    return [...out, ...over];
  });
})()"""
"""Words that reach out of their drawing, or over others. The boxes of two lines touch: letters do not fill them."""


SMALLEST = """Math.min(...[...document.querySelectorAll('svg text')].map(text => [text, text.getScreenCTM()])
  .filter(([text]) => text.getBoundingClientRect().width)
  .map(([text, matrix]) => matrix.a * text.getAttribute('font-size')))"""
"""Pixels of the smallest letters that are seen in a drawing."""


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    for name, found in FOUND.items():
        match found:
            case JobReport():
                tables = list(report_tables(found))
            case ReportComparison():
                tables = list(comparison_tables(found))
            case UsageSummary():
                tables = list(summary_tables(found))
        (folder / f"{name}.html").write_text(render_html(found, tables), encoding="utf-8")
    return folder


@pytest.fixture(name="tab", scope="module")
def _tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.mark.parametrize("name", FOUND)
def test_on_a_desk_and_on_a_phone_all_of_it_is_there(tab: Browser, folder: Path, name: str) -> None:
    address = (folder / f"{name}.html").as_uri()
    for across in (1280, 768, 390):
        tab.complaints.clear()
        tab.asked_for.clear()
        tab.open(address, width=across)
        assert tab.complaints == []
        assert tab.asked_for == [address]
        assert tab.value("innerWidth") == across, "a phone zooms out where something is wider"
        assert tab.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert tab.value(OVERLAPS) == []
        assert tab.value("document.querySelectorAll('script, img, iframe, link, object').length") == 0
        assert tab.value("getComputedStyle(document.body).marginTop") == "0px", "its style sheet is in force"


def test_the_command_writes_what_the_browser_shows(tab: Browser, tmp_path: Path) -> None:
    kept, page = HistoryStore(tmp_path / "history.db"), tmp_path / "receipt.html"
    kept.write(
        job_records=(stated(samples=tuple(sample(each, 120.0 * each, useful=60.0 * each) for each in range(61))),)
    )
    kept.close()
    assert run(f"7 --store {tmp_path / 'history.db'} --at {BEGIN + 100_000:.0f} --html -o {page}") == (0, "", "")
    tab.complaints.clear()
    tab.open(page.as_uri())
    assert tab.complaints == []
    said = tab.value("document.querySelector('.headline').innerText")
    assert said == "1 node, 2 GPUs, 2.00 GPU-hours, 4.00 USD: 50.0 % became useful work."
    assert tab.value("document.querySelectorAll('figure').length") == 3, "waterfall, layers, and how it went"
    assert tab.value("document.querySelector('.fill.useful').getBoundingClientRect().height") > 50


def test_each_drawing_is_seen_in_one_size(tab: Browser, folder: Path) -> None:
    count = "document.querySelectorAll('svg[role=img]').length"
    seen = "[...document.querySelectorAll('svg[role=img]')].filter(e => e.getBoundingClientRect().height > 40).length"
    figures = "document.querySelectorAll('figure').length"
    for across in (1280, 390):
        tab.open((folder / "every_leak.html").as_uri(), width=across)
        assert tab.value(count) > tab.value(figures) == tab.value(seen) > 3
        assert tab.value(SMALLEST) >= 9.5, "and can be read"


def test_at_night_it_is_dark_and_on_paper_it_is_not(tab: Browser, folder: Path) -> None:
    address, ground = (folder / "full.html").as_uri(), "getComputedStyle(document.body).backgroundColor"
    paid = "getComputedStyle(document.querySelector('.fill.paid')).fill"
    tab.open(address)
    assert (tab.value(ground), tab.value(paid)) == ("rgb(250, 249, 247)", "rgb(74, 72, 68)")
    tab.open(address, dark=True)
    assert (tab.value(ground), tab.value(paid)) == ("rgb(19, 19, 18)", "rgb(185, 180, 172)")
    tab.call("Emulation.setEmulatedMedia", media="print",
             features=[{"name": "prefers-color-scheme", "value": "dark"}])  # fmt: skip
    assert tab.value(paid) == "rgb(74, 72, 68)"


@pytest.mark.parametrize("name", MOST_PAPER)
def test_on_paper_it_has_few_pages_of_a4(tab: Browser, folder: Path, name: str) -> None:
    tab.open((folder / f"{name}.html").as_uri(), dark=True)
    paper = tab.paper()
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", paper)
    assert 1 <= len(boxes) <= MOST_PAPER[name]
    assert {(round(float(wide)), round(float(high))) for wide, high in boxes} == {(595, 842)}


def test_tables_that_are_wider_than_a_phone_scroll_by_themselves(tab: Browser, folder: Path) -> None:
    tab.open((folder / "full.html").as_uri(), width=390)
    wider = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    assert tab.value(f"{wider}.length") > 0
    assert tab.value(f"{wider}.every(e => e.tabIndex === 0 && e.getAttribute('aria-label'))")


def test_no_word_is_wider_than_it_is_taken_for(tab: Browser, folder: Path) -> None:
    tab.open((folder / "every_leak.html").as_uri())
    seen = tab.value("""[...document.querySelectorAll('svg.wide text, svg.narrow text')].map(e =>
      [e.textContent, +e.getAttribute('font-size'), e.classList.contains('bold'), e.getComputedTextLength()])""")
    shown = [(words, size, bold, long) for words, size, bold, long in seen if long]
    assert len(shown) > 100
    for words, size, bold, long in shown:
        assert long <= text_width(words, size, bold=bold) * 1.02 + 0.5, words
