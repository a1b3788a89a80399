"""Real processes for the end-to-end tests: start one, wait until it answers, read its pages, end it by its pid.

Owns waiting and what is shown when something fails. Refuses to judge figures, except for the one law that
every page must keep.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx

from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parents[2]
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SERVING = re.compile(r"serving http://\S+:(\d+)/")
Labels = frozenset[tuple[str, str]]


class Page:
    """One scrape in the text format: every sample as the exact decimal that was written."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[tuple[str, Labels], Decimal] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                found = _SAMPLE.fullmatch(line)
                assert found, line
                key = found[1], frozenset(_LABEL.findall(found[2] or ""))
                assert key not in self.samples, f"twice on one page: {line}"
                self.samples[key] = Decimal(found[3])

    def rows(self, name: str, **labels: str) -> list[tuple[dict[str, str], Decimal]]:
        """Samples called gpu_efficiency_`name` with those labels, and their values."""
        wanted = labels.items()
        return [
            (dict(pairs), value)
            for (full, pairs), value in self.samples.items()
            if full == f"gpu_efficiency_{name}" and wanted <= dict(pairs).items()
        ]

    def total(self, name: str, **labels: str) -> Decimal:
        """Sum of those samples; 0 for none."""
        return sum((value for _, value in self.rows(name, **labels)), Decimal())

    def by(self, label: str, name: str, **labels: str) -> dict[str, Decimal]:
        """Sum of those samples by the value of one label."""
        sums: dict[str, Decimal] = {}
        for pairs, value in self.rows(name, **labels):
            sums[pairs[label]] = sums.get(pairs[label], Decimal()) + value
        return sums

    def states(self) -> dict[str, tuple[str, str]]:
        """State and reason of each GPU by its index."""
        return {pairs["gpu"]: (pairs["state"], pairs["reason"]) for pairs, _ in self.rows("state")}

    def keeps_the_law(self) -> Self:
        """Every GPU's and every job's parts add up to what was paid, to the last digit; nothing was caught."""
        paid = self.by("uuid", "paid_seconds_total")
        assert self.by("uuid", "seconds_total") == paid
        assert self.by("job_id", "job_seconds_total") == self.by("job_id", "job_paid_seconds_total")
        assert self.total("unobserved_seconds_total") == self.total("seconds_total", leak="unobserved")
        assert self.total("conservation_errors_total") == 0
        assert self.total("errors_total") == 0
        assert self.total("rejected_total") == 0
        return self


class Program:
    """A started process and the file with what it says on standard error.

    A daemon keeps its history beside that file, not in /var/lib, where those of other tests and runs would find it.
    """

    def __init__(self, words: list[str], said: Path, env: Mapping[str, str]) -> None:
        self.said = said
        env = {"STATE_DIRECTORY": f"{said.parent}"} | dict(env)
        with said.open("wb") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=file, env=env, cwd=said.parent)

    def log(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace")

    def alive(self) -> bool:
        """True while it runs; raises AssertionError with its words when it has ended."""
        status = self.process.poll()
        assert status is None, f"ended with status {status}:\n{self.log()[-4000:]}"
        return True

    def end(self) -> int:
        """Ask it to stop and return its exit status; it is killed if it does not."""
        self.process.send_signal(signal.SIGTERM)
        return self.gone()

    def gone(self) -> int:
        """Wait for its own end and return its exit status."""
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(words: list[str], said: Path, env: Mapping[str, str]) -> Iterator[Program]:
    """A process for the length of a block. What it said comes with any failure."""
    program = Program(words, said, env)
    try:
        yield program
    except BaseException as err:
        err.add_note(f"{' '.join(words[:4])} said:\n{program.log()[-4000:]}")
        raise
    finally:
        if program.process.poll() is None:
            program.process.kill()
        program.process.wait()


class Daemon:
    """A served gpu-efficiency: its address, and its pages."""

    def __init__(self, program: Program, port: int) -> None:
        self.program, self.port = program, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=PATIENCE)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Ask again while it refuses to serve old figures, for a busy machine may keep it from sampling."""

        def look() -> httpx.Response | None:
            answer = self.client.get(path, headers=headers)
            return None if answer.status_code == 503 and "the newest sample is" in answer.text else answer

        return wait_for(look, f"{path} is answered with figures")

    def ready(self) -> bool:
        return self.program.alive() and self.get("/readyz").status_code == 200

    def page(self) -> Page:
        """A scrape, which must keep the law."""
        answer = self.get("/metrics")
        assert answer.status_code == 200, answer.text
        return Page(answer.text).keeps_the_law()

    def until(self, true: Callable[[Page], Any], what: str) -> Page:
        """Scrape until it is true of a page, and return that page."""

        def look() -> Page | None:
            self.program.alive()
            page = self.page()
            return page if true(page) else None

        return wait_for(look, what)

    def after(self, ticks: int) -> Page:
        """The page so many ticks from now."""
        goal = self.page().total("ticks_total") + ticks
        return self.until(lambda page: page.total("ticks_total") >= goal, f"{ticks} more ticks")


def environment(**more: str) -> dict[str, str]:
    """This one without settings of ours or of NVML's stand-in; the code under test is this tree's.

    Nor is the size of a terminal kept, which pytest's workers are told: a program on another would believe it. Go's
    garbage collector runs less often than by default: a Prometheus of these tests spends a fifth less on our panels.
    """
    strange = ("GPU_EFFICIENCY_", "NVML_STUB", "LD_LIBRARY", "STATE_DIRECTORY", "COLUMNS", "LINES")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "GOGC": "400"} | more


def command(*words: str) -> list[str]:
    """The command line of `gpu-efficiency words`."""
    return [sys.executable, "-m", "exporter", *words]


def _port(program: Program) -> int:
    """The port it says it serves on; 0 while it has not said so."""
    found = program.alive() and _SERVING.search(program.log())
    return int(found[1]) if found else 0


@contextmanager
def daemon(folder: Path, *words: str, **env: str) -> Iterator[Daemon]:
    """Serve on a free port of the loopback until the block ends; then SIGTERM must give status 0."""
    listen = ("--web.listen-address", "127.0.0.1:0")
    with running(command(*words, *listen), folder / f"{words[0]}.log", environment(**env)) as program:
        served = Daemon(program, wait_for(lambda: _port(program), "it says where it serves"))
        wait_for(served.ready, "/readyz")
        yield served
        served.client.close()
        if program.process.poll() is None:
            assert program.end() == 0
        assert "Traceback" not in program.log()


class Site:
    """A small HTTP server that says what `page` gives; it can go away and come back at the same address."""

    def __init__(self, page: Callable[[], tuple[bytes, str]]) -> None:
        self._page = page
        self.port = 0
        self.start()

    def start(self) -> None:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, kind = site._page()
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Keep still: the test speaks."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@contextmanager
def site(page: Callable[[], tuple[bytes, str]]) -> Iterator[Site]:
    """A `Site` for the length of a block."""
    made = Site(page)
    try:
        yield made
    finally:
        made.stop()
