"""A Prometheus on two cores that has seen 10,000 GPUs: raw series of the last hour, recorded ones of a week and a day.

Owns the server it starts and the order in which it is filled: a few scrapes, one evaluation of all rules, the blocks of
the past made from that, then the rest of the hour through remote write, so that the head is as large as in life.
Refuses to measure.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import httpx
from msgspec import Struct

from benchmarks.dashboards.fleet import SCRAPE_SECONDS, Size, raw
from benchmarks.dashboards.past import WINDOW, Recorded, recent, write
from tests.dashboards.past import Past, rules
from tests.dashboards.remote_write import Points
from tests.e2e.running import Labels
from tests.ports import free_port

CORES = 2
_SCRAPES = 6
"""Before the rules are evaluated: a rate of five minutes needs so many."""
_PATIENCE = 300.0
_RECORDED = '{__name__=~".+:.+|ALERTS"}'
_NODES = 24
"""Targets that are sent at a time."""
_LONGEST = 9 * WINDOW


class Filled(Struct, frozen=True):
    """A server with all it has to have."""

    pid: int
    past: Past
    end: int
    """The last sample, Unix seconds."""
    sizes: Mapping[str, int]
    """How much of what."""
    took: float
    """Seconds to fill it."""


@contextmanager
def filled(folder: Path, size: Size) -> Iterator[Filled]:
    """Start one in an empty folder and fill it; it ends with the context. RuntimeError where it cannot be."""
    if shutil.which("prometheus") is None:
        raise RuntimeError("prometheus is not installed: on Debian, apt-get install prometheus")
    began, end = time.monotonic(), int(time.time()) // SCRAPE_SECONDS * SCRAPE_SECONDS
    with _server(folder) as (pid, past):
        sizes = _fill(past, folder, size, end)
        yield Filled(pid, past, end, sizes, time.monotonic() - began)


def _fill(past: Past, folder: Path, size: Size, end: int) -> Mapping[str, int]:
    begin = end - 60 * size.minutes
    first = begin + SCRAPE_SECONDS * _SCRAPES
    scraped = _sent(past, raw(size, end, since=begin, until=first))
    past.record(rules(), start=first, end=first)
    found = list(_evaluated(past, first))
    oldest = int(begin - 86_400 * size.days) // _LONGEST * _LONGEST
    written = write(folder / "tsdb", found, begin=oldest, end=begin)
    _forget(folder / "tsdb")
    _sent(past, raw(size, end, since=first + 1, until=end))
    _sent(past, [recent(found, first, end)])
    _await(lambda: _has(past, oldest + 3600), "the blocks are not read")
    return {**written, "scraped": scraped, "recorded": len(found)}


def _evaluated(past: Past, at: int) -> Iterator[Recorded]:
    pace = {rule.name: int(rule.interval) for rule in rules()}
    for labels, value in past.ask(_RECORDED, at):
        yield Recorded(frozenset(labels.items()), value, pace[labels["__name__"]])


def _sent(past: Past, targets: Iterable[dict[Labels, Points]]) -> int:
    """Write targets, two at a time: one is read there while another is put into words. Returns how many series."""
    left, count = iter(targets), 0
    with ThreadPoolExecutor(CORES) as threads:
        while some := list(islice(left, _NODES)):
            list(threads.map(past.write, some))
            count += sum(map(len, some))
    return count


def _forget(folder: Path) -> None:
    """Put the blocks on the disk and out of the page cache, as the week before lies in life."""
    for path in folder.glob("*/**/*"):
        if path.is_file() and ("chunks" in path.parts or path.name == "index"):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _has(past: Past, at: int) -> bool:
    return bool(past.ask("count(cluster:gpu_efficiency_owned:gpus)", at))


def _await(ready: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _PATIENCE
    while not ready():
        if time.monotonic() > until:
            raise RuntimeError(what)
        time.sleep(1)


@contextmanager
def _server(folder: Path) -> Iterator[tuple[int, Past]]:
    (folder / "prometheus.yaml").write_text("scrape_configs: []\n")
    port = free_port()
    words = [
        "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver", "--log.level=warn",
    ]  # fmt: skip
    with (
        (folder / "log").open("wb") as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=_PATIENCE) as client,
    ):
        process = subprocess.Popen(words, stderr=log, env={**os.environ, "GOMAXPROCS": str(CORES)})
        try:
            _await(lambda: _ready(client, process), "Prometheus does not listen")
            yield process.pid, Past(f"http://127.0.0.1:{port}", client)
        finally:
            process.terminate()
            process.wait(timeout=_PATIENCE)


def _ready(client: httpx.Client, process: "subprocess.Popen[bytes]") -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"Prometheus ended with status {process.returncode}")
    try:
        return client.get("/-/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
