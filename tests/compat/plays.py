"""What a case has in hand: a checkout, a folder of its own, and what the old checkout has made for both to read.

Owns how the outputs are gathered, and what is scrubbed of them. Refuses to compare.

Scrubbed are: the paths of the checkout and of the case's folder, the ports that were chosen, the version, the values of
`process_*` and of `gpu_efficiency_history_size_bytes`, the name of the demo's own folder, the `Date` of an answer, and
its length where it is the body's. All other times stand still, and chance is always the same: see
clockwork/sitecustomize.py.
"""

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from tests.compat.checkouts import Answer, Checkout, Daemon, DriverError, Said, shown

Outputs = dict[str, str]
"""What was said, by a name that is also a file's."""
HERE = Path(__file__).parent
CONFIG = """\
source = "dcgm-exporter"
scheduler = "mapping-dir"
[web]
listen_address = "127.0.0.1:1"
[sampling]
interval_seconds = 10
pause_file = "pause"
[reports]
socket = ""
[engines]
enabled = false
[history]
file = "history.db"
[inventory]
file = "gpus.json"
[mapping_dir]
path = "jobs"
[host]
pool = "reserved"
[[prices]]
model = "NVIDIA H100 80GB HBM3"
pool = "reserved"
per_gpu_hour = 2.5
[[prices]]
per_gpu_hour = 1.25
currency = "EUR"
[energy]
price_per_kwh = 0.12
grams_co2_per_kwh = 380
[budget]
idle_per_hour = 50.0
[[workload.rules]]
team = "language"
user = "ada"
[[exemptions]]
id = "nightly"
reason = "waits for the day's checkpoint"
expires = 2027-03-01
user = "cleo"
"""
"""The one configuration of all cases: prices, a budget, rules, and nothing of the machine's own."""
_SCRUBS = (
    (re.compile(r"^(process_\w+|gpu_efficiency_history_size_bytes) \S+$", re.MULTILINE), r"\1 (scrubbed)"),
    (re.compile(r"gpu-efficiency-demo-\w{8}"), "gpu-efficiency-demo-(scrubbed)"),
)
_UNSAID = frozenset({"date"})


class Inputs:
    """Files that both checkouts read; the old one makes them, once."""

    def __init__(self, old: Checkout, folder: Path) -> None:
        self._old, self._folder = old, folder
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def made(self, name: str, make: Callable[[Checkout, Path], None]) -> Path:
        """The file or folder of that name; `make` writes it where it is told, if it is not there yet."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        path = self._folder / name
        with lock:
            if not path.exists():
                workshop = self._folder / f"{name}.workshop"
                shutil.rmtree(workshop, ignore_errors=True)
                workshop.mkdir(parents=True)
                make(self._old, workshop)
                (workshop / name).rename(path)
                shutil.rmtree(workshop)
        return path

    def trace(self, name: str, *words: str) -> Path:
        """The trace that `simulate` with these words writes."""
        return self.made(name, lambda old, folder: must(old.run(folder, "simulate", *words, "-o", name, "--quiet")))


class Play:
    """One case on one checkout."""

    def __init__(self, checkout: Checkout, folder: Path, inputs: Inputs, version: str) -> None:
        self.checkout, self.folder, self.inputs = checkout, folder, inputs
        self.outputs: Outputs = {}
        self._literal = {f"{folder}": "(folder)", f"{checkout.path}": "(checkout)"}
        self._version = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.])")
        folder.mkdir(parents=True)
        self.write("config.toml", CONFIG)

    def write(self, name: str, text: str) -> None:
        """A file in the case's folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def bring(self, path: Path) -> str:
        """Copy an input here; its name."""
        if path.is_dir():
            shutil.copytree(path, self.folder / path.name)
        else:
            shutil.copyfile(path, self.folder / path.name)
        return path.name

    def tell(self, name: str, text: str) -> None:
        """Keep an output."""
        if name in self.outputs:
            raise DriverError(f"two outputs have the name {name}")
        for literal, instead in self._literal.items():
            text = text.replace(literal, instead)
        for pattern, instead in _SCRUBS:
            text = pattern.sub(instead, text)
        self.outputs[name] = self._version.sub("(version)", text)

    def run(self, name: str, *words: str, files: tuple[str, ...] = ()) -> Said:
        """Run a command and keep all that it says, and these of the files that it writes."""
        said = self.checkout.run(self.folder, *words)
        self.tell(name, shown(said, self.folder, files))
        return said

    def meet(self, daemon: Daemon) -> None:
        """Its port is another each time."""
        self.hide_port(daemon.port)

    def hide_port(self, port: int) -> None:
        """Likewise, of a server of our own."""
        self._literal |= {f"127.0.0.1:{port}": "127.0.0.1:(port)", f"localhost:{port}": "localhost:(port)"}

    def ask(self, daemon: Daemon, path: str, *, name: str = "", method: str = "GET", **headers: str) -> Answer:
        """Ask for a page and keep all of the answer."""
        answer = daemon.get(path, method=method, **headers)
        headers = {key: value for key, value in answer.headers.items() if key not in _UNSAID}
        if headers.get("content-length") == f"{len(answer.body.encode())}" or method == "HEAD":
            headers["content-length"] = "(that of the body)"
        told = "\n".join(f"{key}: {value}" for key, value in sorted(headers.items()))
        self.tell(name or f"{method} {path}", f"{answer.status}\n{told}\n\n{answer.body}")
        return answer


def must(said: Said) -> None:
    """Raise DriverError where the command did not succeed."""
    if said.status:
        raise DriverError(f"{' '.join(said.words)}: status {said.status}: {said.err}")
