"""Which stores and answers lie beside this, and how they came here: `python tests/compat/recorded/stores.py CHECKOUT`.

They were written by an older version, driven by its command line alone, and are read by every later one: a store
outlives the version that wrote it. Written anew only for a new form of the store, and then beside these.
"""

import gzip
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, f"{ROOT}")
from tests.compat import node  # noqa: E402  found once this file's root is on the path
from tests.compat.checkouts import NOW, UPTIME, Checkout, close_spawners  # noqa: E402  likewise

HERE = Path(__file__).parent
LATE = 60
"""Seconds after NOW at which the node of `demo` comes back."""


class Store(NamedTuple):
    """What is in a store."""

    jobs: tuple[str, ...]
    """That have ended, or whose books are closed."""
    story: str = ""
    """That the demo played up to NOW, and a second longer; empty: it is another store, after a reboot of the host."""
    node: int = 0
    seconds: int = 3600


STORES = {
    "demo": Store((), "demo", 0, 10800),
    "closed": Store(("41001", "41010", "41505", "inference/chat-0-4")),
    "ended": Store(("inference/chat-1-1", "inference/chat-1-3"), "idle_allocation_twin", 1),
    "lost": Store(("43001",), "lost_gpu", 2),
}
"""By the file's name."""
EVERY = tuple(word for name in STORES for word in ("--store", f"{name}.db"))
ANSWERS = {
    **{
        f"{name}-{job.replace('/', '-')}": ("--store", f"{name}.db", job)
        for name, store in STORES.items()
        for job in store.jobs
    },
    "all": (*EVERY, "--all", "--since", "1d"),
}
"""Words of `report --json`, by the name of the file that has the answer."""


def lay_out(folder: Path) -> None:
    """Put the stores into a folder, each as NAME.db."""
    for name in STORES:
        (folder / f"{name}.db").write_bytes(gzip.decompress((HERE / f"{name}.db.gz").read_bytes()))


def uuids(metrics: str) -> list[str]:
    """The GPUs that a page tells of, by index."""
    lines = [line for line in metrics.splitlines() if line.startswith("gpu_efficiency_paid_seconds_total{")]
    return [line.split('uuid="')[1].split('"')[0] for line in lines]


def _played(old: Checkout, folder: Path, name: str, chance: int) -> None:
    store = STORES[name]
    words = ("demo", store.story, "--node", f"{store.node}", "--preroll", f"{store.seconds}")
    with old.daemon(folder, *words, "--config", "config.toml", chance=chance) as daemon:
        daemon.until_sampled(1)
        daemon.move(2, 0)
        (folder / f"{name}.prom").write_text(daemon.get("/metrics").body, encoding="utf-8")
        (path,) = (folder / "tmp").glob("gpu-efficiency-demo-*/history.db")
        (folder / f"{name}.db").hardlink_to(path)  # the demo takes its folder away when it ends
        daemon.end()


def _closed(old: Checkout, folder: Path) -> None:
    """The demo's node has been booted anew, and nobody runs on it any more."""
    shutil.copyfile(folder / "demo.db", folder / "history.db")
    boards = node.Boards(uuids((folder / "demo.prom").read_text(encoding="utf-8")))
    boards.say(*[node.FREE] * 8)
    with (
        node.exporter(boards) as url,
        node.served(old, folder, url, wall=NOW + LATE, uptime=UPTIME / 2, chance=9) as daemon,
    ):
        for number in range(1, 4):
            node.step(daemon, number)
        daemon.get("/metrics")
        daemon.end()
    (folder / "history.db").rename(folder / "closed.db")


def main(checkout: Path) -> None:
    """Write them all, as the version in that checkout does."""
    old = Checkout(checkout.resolve(), Path(sys.executable))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        node.lay_out(folder)
        print(old.imported(folder))  # noqa: T201  which code it is
        for chance, (name, store) in enumerate(STORES.items()):
            if store.story:
                _played(old, folder, name, chance)
        _closed(old, folder)
        for name in STORES:
            (HERE / f"{name}.db.gz").write_bytes(gzip.compress((folder / f"{name}.db").read_bytes(), mtime=0))
        (HERE / "demo.prom.gz").write_bytes(gzip.compress((folder / "demo.prom").read_bytes(), mtime=0))
        for name, words in ANSWERS.items():
            said = old.run(folder, "report", "--quiet", "--json", *words)
            json.loads(said.out or said.err)
            (HERE / f"{name}.json").write_text(said.out, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    close_spawners()
