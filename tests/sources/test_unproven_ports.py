"""Tests the source ladder beside a real listener on the ports that nobody configured: any user may listen there.

NVML, which sees all boards, is never given up for a stranger's page or host engine: neither at the start, nor when
better sources are tried, five minutes later and after that.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from exporter.config import Config
from exporter.core.model import SECOND
from exporter.registry import DcgmExporterSettings, DcgmSettings
from exporter.sources.base import SourceError
from exporter.sources.selector import RECHECK_INTERVAL, SourceSelector, open_selector
from tests.sources.conformance import START
from tests.sources.exporter_pages import gpu
from tests.sources.nvml_rig import NvmlRig, rigged

STRANGER = 4711
STEP = 10


class PageServer(ThreadingHTTPServer):
    """Serves the page of one board that NVML does not list; counts its connections."""

    accepted = 0

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        self.accepted += 1
        return super().get_request()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(gpu(0, UUID="GPU-invented").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[PageServer]:
    server = PageServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def engine() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    yield from rigged(tmp_path, monkeypatch)


def give_to_a_stranger(monkeypatch: pytest.MonkeyPatch, *sockets: socket.socket) -> None:
    """Make another user the owner of the sockets; who is not root becomes another user than theirs instead."""
    if os.geteuid() == 0:
        for each in sockets:
            os.fchown(each.fileno(), STRANGER, -1)
    else:
        monkeypatch.setattr("exporter.sources.ports.os.geteuid", lambda: STRANGER)


def automatic(page: PageServer, engine: socket.socket) -> Config:
    """Return a configuration whose default addresses are these."""

    class Page(DcgmExporterSettings, frozen=True):
        url: str = f"http://127.0.0.1:{page.server_address[1]}/metrics"

    class Engine(DcgmSettings, frozen=True):
        address: str = f"localhost:{engine.getsockname()[1]}"

    return Config(dcgm_exporter=Page(), dcgm=Engine())


def reads(rig: NvmlRig, ladder: SourceSelector, seconds: range) -> list[tuple[str, int]]:
    """Read as the sampler does; return the source and its number of GPUs at each read that worked."""
    seen = []
    for second in seconds:
        now = START + second * SECOND
        rig.run(now)
        try:
            result = ladder.read(now)
        except SourceError:
            continue
        seen.append((ladder.name, len(result.devices)))
        ladder.try_better(now)
    return seen


def test_nvml_is_never_given_up_for_a_strangers_listener(
    rig: NvmlRig, page: PageServer, engine: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_to_a_stranger(monkeypatch, page.socket, engine)
    with closing(open_selector(automatic(page, engine))) as ladder:
        assert set(reads(rig, ladder, range(0, 3 * RECHECK_INTERVAL // SECOND, STEP))) == {("nvml", 3)}
    assert ladder.reason.count("belongs to user") == 2
    assert page.accepted == 0
    engine.settimeout(0)
    with pytest.raises(BlockingIOError):
        engine.accept()


@pytest.mark.slow
def test_a_page_of_our_own_is_taken_until_its_port_is_a_strangers(
    rig: NvmlRig, page: PageServer, engine: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCGM_BINDINGS", "/nowhere")
    with closing(open_selector(automatic(page, engine))) as ladder:
        assert reads(rig, ladder, range(5)) == [("dcgm-exporter", 1)] * 5
        give_to_a_stranger(monkeypatch, page.socket, engine)
        accepted = page.accepted
        assert set(reads(rig, ladder, range(5, 3 * RECHECK_INTERVAL // SECOND, STEP))) == {("nvml", 3)}
    assert page.accepted == accepted
