"""Pictures of records, with one look: which run they are of stands below each, and in the file.

Owns fonts, colours, the stamp, and where pictures lie. A picture says nothing that its record does not hold, and is
drawn again only when its record, or who draws it, has changed.
"""

import hashlib
import inspect
import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.group import Group, Picture
from benchmarks.machine import ROOT
from benchmarks.record import Record

FOLDER = ROOT / "docs" / "pictures"
COLOURS = ("#0b6e99", "#d1603d", "#5b8c5a", "#8c5b8c", "#b8912f", "#6b7280")
"""Told apart by those who see fewer colours, on white: ours is always the first."""
INK, PALE = "#1f2933", "#d5dae0"
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched, and compared
    "svg.hashsalt": "gpu-efficiency-exporter",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "sans-serif"],
    "font.size": 10.0,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def file_of(picture: Picture) -> Path:
    """Where a picture lies."""
    return FOLDER / f"bench-{picture.name}.svg"


def stamp(record: Record) -> str:
    """The line below a picture."""
    one = record.stamp
    return f"{one.day}, commit {one.commit}, {one.machine}. python benchmarks/run.py {record.group} --record"


def mark(picture: Picture, record: Record) -> str:
    """What a file says of what it was drawn from: the record, and the module that draws."""
    code = Path(inspect.getsourcefile(picture.draw) or "").read_text(encoding="utf-8")
    return f"record {record.seal[:16]}, drawn by {hashlib.sha256(code.encode()).hexdigest()[:16]}"


def drawn(picture: Picture, record: Record) -> bytes:
    """Give the picture as SVG: the same bytes for the same record."""
    with mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(_STYLE):
        figure = Figure(figsize=picture.inches, layout="constrained")
        picture.draw(figure, record.curves)
        figure.supxlabel(stamp(record), fontsize=6.5, x=0.01, ha="left", color="#6b7280")
        file = io.BytesIO()
        told = {"Date": None, "Creator": None, "Title": picture.words, "Description": mark(picture, record)}
        figure.savefig(file, format="svg", metadata=told)
    return b"\n".join(line.rstrip() for line in file.getvalue().splitlines()) + b"\n"


def draw(group: Group, record: Record) -> list[Path]:
    """Draw what is missing, or older than its record; give what was written."""
    stale = [picture for picture in group.pictures if not current(picture, record)]
    for picture in stale:
        FOLDER.mkdir(parents=True, exist_ok=True)
        file_of(picture).write_bytes(drawn(picture, record))
    return [file_of(picture) for picture in stale]


def current(picture: Picture, record: Record) -> bool:
    """Whether the file is of this record."""
    try:
        return mark(picture, record) in file_of(picture).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
