"""Draws docs/pictures/report-*.png: what `report --html` writes, as Debian's Chromium shows it.

    python -m tests.e2e.report_pictures [FOLDER]

Owns what stands in the pictures: job 41 of the documents, beside another, both made by hand in
`tests/report/pages.py`; and the sums of six nodes of the simulated fleet, through the core, stores and the command.
"""

import base64
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from exporter.cli import main
from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.core.ledger import Ledger
from exporter.core.pipeline import advance
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.history.job_tracker import JobTracker
from exporter.history.store import HistoryStore
from exporter.report.html import render_html
from exporter.report.text import comparison_tables, report_tables
from exporter.simulate.simulation import simulate
from tests.e2e.chromium import Browser, browser
from tests.report import pages

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SHOWN = (
    ("job", 1280, False, 1260), ("job", 1280, True, 1260), ("job", 390, False, 1500), ("job", 390, True, 1500),
    ("compare", 1280, False, 700), ("sums", 1280, False, 1560),
)  # fmt: skip
"""Report, width, dark; and the most pixels of its height: what is below is tables."""


def written() -> dict[str, str]:
    """Each report's page."""
    one, two = pages.full(), pages.two()
    return {
        "job": render_html(one, list(report_tables(one))), "compare": render_html(two, list(comparison_tables(two))),
        "sums": sums(),
    }  # fmt: skip


def sums() -> str:
    """What `report --all --html` says of six nodes' stores."""
    with TemporaryDirectory() as place:
        stores = [_node(Path(place), number) for number in range(6)]
        page = Path(place) / "sums.html"
        words = [word for store in stores for word in ("--store", f"{store}")]
        end = stores_end(stores)
        status = main(["report", "--all", "--at", f"{end}", "--since", "4h", *words, "--html", "-o", f"{page}"])
        if status:
            raise SystemExit(status)
        return page.read_text(encoding="utf-8")


def _node(folder: Path, number: int) -> Path:
    """The store of a node that has seen its part of the fleet's story."""
    terms = Terms(node=f"gpu-node-{number:02}", prices=(Price(2.5),))
    ledger, memory = Ledger(), JobTracker(node=terms.node, ledger_id=f"life-{number}", sample_seconds=300)
    meta, told = DaemonMetadata(version="1", source="simulation", simulated=True, terms=terms), list[JobRecord]()
    for observation in simulate("fleet", node=number, period_seconds=10, duration_seconds=10_800).observations:
        advance(ledger, observation)
        last = take_snapshot(ledger, meta)
        told += memory.update(last)[1]
    store = HistoryStore(folder / f"{number}.db")
    store.write(job_records=[*told, *memory.all_records(last)])
    store.close()
    return store.path


def stores_end(stores: list[Path]) -> float:
    """When the last of all statements ends."""
    ends = []
    for path in stores:
        store = HistoryStore(path, read_only=True)
        ends += [statement.end for statement in store.job_records(JobRecordQuery())]
        store.close()
    return max(ends)


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
