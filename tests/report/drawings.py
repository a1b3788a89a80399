"""Finds the drawings of a report by name, and their contents."""

from exporter.report import charts
from exporter.report.model import JobReport, ReportComparison
from exporter.report.summary import UsageSummary
from tests.report.read_page import Element, Page

Found = JobReport | ReportComparison | UsageSummary


def drawn(found: Found) -> list[Element]:
    match found:
        case JobReport():
            figures = charts.job_charts(found)
        case ReportComparison():
            figures = charts.comparison_charts(found)
        case UsageSummary():
            figures = charts.summary_charts(found)
    return [svg for figure in figures if figure for svg in Page(figure).drawings()]


def named(found: Found, key: str) -> Element:
    return next(each for each in drawn(found) if each.facts["aria-labelledby"].startswith(key))


def absent(found: Found, key: str) -> bool:
    return not any(each.facts["aria-labelledby"].startswith(key) for each in drawn(found))


def fills(drawing: Element, kind: str) -> list[Element]:
    return [each for each in drawing.all("rect", "polygon") if each.facts.get("class") == f"fill {kind}"]


def wide(drawing: Element, kind: str) -> list[float]:
    return [each.number("width") for each in fills(drawing, kind)]


def words(drawing: Element) -> list[str]:
    return [each.words for each in drawing.all("text")]
