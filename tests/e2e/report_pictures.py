"""Draws docs/pictures/report-*.png: what `report --html` writes, as Debian's Chromium shows it.

    python -m tests.e2e.report_pictures [FOLDER]

Owns what stands in the pictures: job 41 of the documents, beside another, and sums, all made by hand in
`tests/receipt/pages.py`.
"""

import base64
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from exporter.receipt.html import html
from exporter.receipt.saying import comparison_tables, receipt_tables
from exporter.receipt.summing import summary_tables
from tests.e2e.chromium import Browser, browser
from tests.receipt import pages

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SHOWN = (
    ("job", 1280, False, 1260), ("job", 1280, True, 1260), ("job", 390, False, 1500), ("job", 390, True, 1500),
    ("compare", 1280, False, 700), ("sums", 1280, False, 1560),
)  # fmt: skip
"""Report, width, dark; and the most pixels of its height: what is below is tables."""


def written() -> dict[str, str]:
    """Each report's page."""
    one, two, many = pages.full(), pages.two(), pages.many()
    return {
        "job": html(one, list(receipt_tables(one))), "compare": html(two, list(comparison_tables(two))),
        "sums": html(many, list(summary_tables(many))),
    }  # fmt: skip


def shot(tab: Browser, file: Path, high: int) -> None:
    """The upper part of what is open."""
    tab.call("Emulation.setScrollbarsHidden", hidden=True)
    across, whole = tab.value("innerWidth"), tab.value("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": across, "height": min(high, whole), "scale": 1}
    said = tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    file.write_bytes(base64.b64decode(said["data"]))


def draw(folder: Path) -> None:
    """All pictures."""
    with TemporaryDirectory() as place, browser(Path(place) / "profile") as tab:
        for name, text in written().items():
            (Path(place) / f"{name}.html").write_text(text, encoding="utf-8")
        for name, across, dark, high in SHOWN:
            tab.open((Path(place) / f"{name}.html").as_uri(), width=across, dark=dark)
            device, tone = "phone" if across < 500 else "desk", "dark" if dark else "light"
            shot(tab, folder / f"report-{name}-{device}-{tone}.png", high)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
