"""Drawings of a report by name, and what is in them."""

from exporter.receipt.comparing import Comparison
from exporter.receipt.drawing import job, pair, sums
from exporter.receipt.model import Receipt
from exporter.receipt.sums.summary import Summary
from tests.receipt.read_page import Element, Page

Found = Receipt | Comparison | Summary


def drawn(found: Found) -> list[Element]:
    match found:
        case Receipt():
            figures = job(found)
        case Comparison():
            figures = pair(found)
        case Summary():
            figures = sums(found)
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
