"""Draws a picture of every board for docs/dashboards, from the simulated world of the tests (`make pictures`).

Owns what each picture shows: cluster, time, choices. Refuses to draw: the panel components of Grafana do, in the tool
`preview`, which is no part of this project. No Grafana server runs; panels of types that those components lack are
drawn simply, and marked so.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from dashboards.build import FOLDER
from tests.dashboards.world import World, world

TARGET = FOLDER.parent / "docs" / "dashboards"
LARGEST = 400_000
"""Bytes of a picture: readers of the documents wait for it."""
WIDTH = 1600


class Picture(Struct, frozen=True):
    """What one board is opened with."""

    board: str
    minutes: int
    """The time shown, up to the end of the world."""
    chosen: Mapping[str, str]
    before: int = 0
    """Minutes before the end of the world up to which it is shown."""
    unfolded: str = ""
    """The one of its folded rows that is shown open, as if a reader had clicked on it."""


PICTURES = (
    Picture("fleet", 3 * 60, {"cluster": "fleet"}),
    Picture("chargeback", 3 * 60, {"cluster": "fleet"}),
    Picture("job", 100, {"cluster": "fleet", "job_id": "49001"}),
    Picture("node", 3 * 60, {"cluster": "fleet", "node": "gpu-node-08"}),
    Picture(
        "training", 10 * 60, {"cluster": "training_waterfall"}, unfolded="What to watch of the leak chosen at the top"
    ),
    Picture(
        "inference",
        300,
        {"cluster": "inference_waterfall"},
        before=280,
        unfolded="What to watch of the leak chosen at the top",
    ),
    Picture("zombies", 205, {"cluster": "fleet", "job_id": "45001"}),
    Picture("quality", 60, {"cluster": "blind"}),
)


def main(words: list[str]) -> int:
    """Draw all of them, or those named; 1 where a panel fails or a picture is too large, 2 where a tool is missing."""
    given = _arguments(words)
    missing = [tool for tool in (given.preview, "pngquant") if not shutil.which(tool)]
    if missing:
        print(f"make pictures needs {' and '.join(missing)}.\n{_NEEDS}", file=sys.stderr)
        return 2
    wanted = [picture for picture in PICTURES if given.only is None or picture.board in given.only]
    clusters = {picture.chosen["cluster"] for picture in wanted}
    print(_PLAINLY)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prometheus").mkdir()
        with world(Path(folder) / "prometheus", clusters=clusters) as simulated:
            troubles = [line for picture in wanted for line in _drawn(picture, simulated, given.preview, Path(folder))]
    for line in troubles:
        print(line, file=sys.stderr)
    return bool(troubles)


_PLAINLY = (
    "Grafana's panel components draw these pictures, no Grafana server; panel types they lack are marked in them."
)
_NEEDS = """\
preview: a tool that renders Grafana dashboards to PNG with Grafana's own panel components, against a Prometheus; it is
no part of this project. `make pictures PREVIEW=/path/to/preview`; it takes --dashboards, --prometheus, --out, --from,
--to, --width and --var, and leaves UID.png and report.json in --out.
pngquant: apt-get install pngquant"""


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dashboards.pictures")
    parser.add_argument("--preview", required=True, metavar="PROGRAM")
    names = [picture.board for picture in PICTURES]
    parser.add_argument("--only", action="append", choices=names, help="draw this board; repeatable")
    return parser.parse_args(words)


def _drawn(picture: Picture, simulated: World, preview: str, folder: Path) -> list[str]:
    """Write one picture; what is wrong with it, in words."""
    uid, out = f"gpu-efficiency-{picture.board}", folder / picture.board
    start, end = (simulated.end - 60 * ago for ago in (picture.minutes + picture.before, picture.before))
    chosen = [f"--var={name}={value}" for name, value in picture.chosen.items()]
    # A second short: what is recorded at both its ends would be one sample too many.
    times = [f"--from={(start + 1) * 1000:.0f}", f"--to={end * 1000:.0f}"]
    (folder / f"{uid}.json").write_text(_folded(FOLDER / f"{uid}.json", picture.unfolded), encoding="utf-8")
    source = [f"--dashboards={folder / uid}.json", f"--prometheus={simulated.past.url}"]
    _run(preview, *source, *times, *chosen, f"--width={WIDTH}", f"--out={out}")
    if not (out / f"{uid}.png").exists():
        return [f"{picture.board}: {preview} left no picture"]
    target = TARGET / f"{picture.board}.png"
    _run("pngquant", "--force", "--nofs", "--speed=1", f"--output={target}", "256", f"{out / uid}.png")
    (board,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["dashboards"]
    failed = [f"{picture.board}: {p['title']}: {p['message']}" for p in board["panels"] if p["status"] == "error"]
    size = target.stat().st_size
    return failed + ([f"{target.name} has {size} bytes, more than {LARGEST}"] if size > LARGEST else [])


def _folded(path: Path, unfolded: str) -> str:
    """The board as one sees it first: the tool would draw all rows open."""
    board = json.loads(path.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        if panel.get("collapsed") and panel["title"] != unfolded:
            panel["panels"] = []
    return json.dumps(board)


def _run(*words: str) -> None:
    subprocess.run(words, check=False)  # noqa: S603  the tools that were asked for


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
