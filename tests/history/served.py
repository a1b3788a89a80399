"""Runs the whole daemon with a store on the NVML stand-in, with jobs that start and end; it can be killed at any time.

`Told` compares each scraped page with the page before, whatever happened to the daemon in between.
"""

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path

import httpx

from tests.e2e.running import Labels, Page, Program, command, environment
from tests.e2e.running import _port as port_of
from tests.nvml_stub.build import build
from tests.waiting import PATIENCE, wait_for

GPUS = 8
NOTHING: Mapping[str, str] = {}
_OWN = ("ticks", "late_ticks", "errors", "core_seconds", "read_seconds", "messages", "history_failures")
"""Counters of the process, which start at 0 with it."""
Key = tuple[str, Labels]


class Told:
    """All scraped pages in sequence, as Prometheus sees them."""

    def __init__(self) -> None:
        self.pages = 0
        self.jobs: dict[str, Decimal] = {}
        """Latest GPU-seconds of each job."""
        self.resets: set[Key] = set()
        self._last: dict[Key, Decimal] = {}

    def take(self, page: Page) -> None:
        self.pages += 1
        for key, value in page.samples.items():
            if not _lasting(key[0]):
                continue
            before = self._last.get(key, Decimal())
            assert value >= before, f"{key} went back from {before} to {value}: it counts twice in Prometheus"
            self._last[key] = value
        for labels, value in page.rows("job_paid_seconds_total"):
            job = labels["job_id"]
            self.jobs[job] = max(self.jobs.get(job, Decimal()), value)


def _lasting(name: str) -> bool:
    ours = name.startswith("gpu_efficiency_") and name.endswith("_total")
    return ours and name.removeprefix("gpu_efficiency_").removesuffix("_total") not in _OWN


class Jobs:
    """Jobs in a mapping directory that start and end at random times."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._chance, self._stop = folder, random.Random(seed), threading.Event()  # noqa: S311
        folder.mkdir()
        self.held: dict[int, str] = {}
        self._next = 1000
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(self._chance.uniform(0.05, 0.4)):
            gpu = self._chance.randrange(GPUS)
            self.end(gpu) if gpu in self.held else self.begin(gpu)

    def begin(self, gpu: int) -> None:
        self._next += 1
        self.held[gpu] = f"{self._next}"
        draft = self.folder / f".{gpu}"
        draft.write_text(f"{self._next}\n")
        draft.replace(self.folder / f"{gpu}")

    def end(self, gpu: int) -> None:
        del self.held[gpu]
        (self.folder / f"{gpu}").unlink()

    @contextmanager
    def at_random(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            for gpu in list(self.held):
                self.end(gpu)


class Node:
    """A node whose daemon is started repeatedly on the same store."""

    def __init__(
        self, folder: Path, *, seed: int = 0, store: Path | None = None, env: Mapping[str, str] = NOTHING
    ) -> None:
        self.folder, self.store = folder, store or folder / "history.db"
        self.jobs, self.told = Jobs(folder / "jobs", seed), Told()
        script = folder / "world.txt"
        script.write_text("")
        self._env = {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{script}"} | dict(env)
        self._env |= {"GPU_EFFICIENCY_MAPPING_DIR_PATH": f"{self.jobs.folder}", "GPU_EFFICIENCY_REPORTS_SOCKET": ""}
        self._starts = 0

    @contextmanager
    def running(self, *words: str, program: Sequence[str] = ()) -> Iterator["Served"]:
        """Start the daemon, or an installed `program`; at the end of the block it is killed if it still runs."""
        self._starts += 1
        line = [
            *(program or command()), "serve", "--source", "nvml", "--scheduler", "mapping-dir",
            "--sampling.interval-seconds", "0.2", "--web.listen-address", "127.0.0.1:0",
            "--history.file", f"{self.store}", *words,
        ]  # fmt: skip
        env = environment(**self._env) | ({"PYTHONPATH": ""} if program else {})
        daemon = Program(line, self.folder / f"serve-{self._starts}.log", env)
        try:
            yield Served(daemon, self.told)
        except BaseException as err:
            err.add_note(daemon.log()[-4000:])
            raise
        finally:
            daemon.process.kill()
            daemon.process.wait()
        assert "Traceback" not in daemon.log(), daemon.log()


class Served:
    """One running daemon."""

    def __init__(self, program: Program, told: Told) -> None:
        self.program, self.told, self._port = program, told, 0

    @property
    def port(self) -> int:
        if not self._port:
            self._port = wait_for(lambda: port_of(self.program), "it says where it serves")
        return self._port

    def scraped(self) -> Page | None:
        """Scrape a page and compare it with earlier pages; None if the daemon does not respond."""
        with suppress(httpx.HTTPError):
            answer = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=PATIENCE, trust_env=False)
            if answer.status_code == 200:
                page = Page(answer.text).keeps_the_law()
                self.told.take(page)
                return page
        return None

    def first(self) -> Page:
        return wait_for(self.scraped, "its first page")

    def scraping(self, seconds: float) -> None:
        """Scrape continuously for this many seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.scraped()

    def kill(self) -> None:
        self.program.process.kill()
        self.program.process.wait()
