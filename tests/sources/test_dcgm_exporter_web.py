"""Tests the dcgm-exporter source over real HTTP, and every way in which a server can fail."""

import gzip
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, islice
from pathlib import Path

import pytest

from exporter.config import BoardSettings, Config
from exporter.core.model import SECOND, Health
from exporter.registry import DcgmExporterSettings
from exporter.sources.base import SourceError
from exporter.sources.dcgm_exporter.page import RENAMED_AFTER, DcgmExporterPage, ShownNode
from exporter.sources.dcgm_exporter.source import (
    DcgmExporterSource,
    HttpPageFetcher,
    TrustedPageFetcher,
    open_dcgm_exporter,
    page_fetcher,
)
from exporter.sources.selector import SourceSelector
from tests.sources.exporter_pages import SPECS, Pages, gpu

SAMPLES = Path(__file__).parents[2] / "../shared/samples/dcgm-exporter"
Answer = Callable[[BaseHTTPRequestHandler], None]


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that hung up is what is tested
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Server:
    """An HTTP server with configurable responses, which counts connections."""

    def __init__(self) -> None:
        self.answer: Answer = whole(gpu(0).encode())
        self.connections: set[tuple[str, int]] = set()
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.connections.add(self.client_address)
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = _Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def whole(body: bytes, status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


def config(url: str, timeout_seconds: float = 5.0) -> Config:
    return Config(dcgm_exporter=DcgmExporterSettings(url=url, timeout_seconds=timeout_seconds))


@pytest.mark.parametrize(
    ("sample", "gpus", "power", "remap"),
    [
        ("t4-idle-rafay.prom", 1, 14.512, []),
        ("l40s-idle-upcloud.prom", 1, 35.686, [False]),
        ("l4-x2-idle-kops.prom", 1, 16.365, [False]),  # its one GPU is on the page twice
    ],
)
def test_real_scrapes_over_http(server: Server, sample: str, gpus: int, power: float, remap: list[bool]) -> None:
    path = SAMPLES / sample
    if not path.exists():
        pytest.skip("needs ../shared")
    server.answer = whole(path.read_bytes())
    src = open_dcgm_exporter(config(server.url))
    first = src.read(0)
    batch = src.read(30 * SECOND)
    src.close()
    assert len(batch.devices) == len(batch.readings) == gpus
    assert batch.faults == ()
    # GDDR6 has no sensor and there was no Xid. What is left is the remapping of rows, where the board can.
    assert [health.row_remap_failed for health in first.health] == remap
    assert all(health == Health(health.uuid, row_remap_failed=False) for health in first.health)
    assert power in [r.power_watts for r in batch.readings]
    assert {r.gr_engine_active for r in batch.readings} == {0.0}
    # Stock pages: no sm_active, no NVLink; the boards have no NVLink at all, and their specs say so.
    assert {"gr_engine_active", "tensor_active", "dram_active", "energy_joules"} <= src.signals
    assert not {"sm_active", "nvlink_tx_bytes_per_second"} & src.signals
    assert all(d.spec and "nvlink_rx_bytes_per_second" in d.lacks for d in batch.devices)
    assert all(r.memory_total_bytes and r.memory_used_bytes == 0 for r in batch.readings)


def test_the_operator_s_figures_for_a_board_win_and_an_unknown_board_is_told_once(server: Server) -> None:
    server.answer = whole((gpu(0, modelName="NVIDIA A10G") + gpu(1, modelName="Mine") + gpu(2, modelName="X")).encode())
    boards = {"NVIDIA A10G": BoardSettings(peak_flops=125e12), "Mine": BoardSettings(peak_flops=1e12)}
    src = open_dcgm_exporter(Config(dcgm_exporter=DcgmExporterSettings(url=server.url), specs=boards))
    batches = [src.read(n * SECOND) for n in range(2)]
    src.close()
    known, mine, stranger = (device.spec for device in batches[1].devices)
    assert known is not None
    assert (known.name, known.peak_flops, known.memory_bandwidth_bytes_per_second) == ("A10G", 125e12, 600e9)
    assert mine is not None
    assert (mine.name, mine.peak_flops, mine.memory_bandwidth_bytes_per_second) == ("Mine", 1e12, None)
    assert stranger is None
    assert [[(f.kind, f.uuid) for f in batch.faults] for batch in batches] == [[("unknown_model", "GPU-2")], []]


def test_another_nodes_page_is_refused_also_by_a_source_that_is_opened_again(server: Server) -> None:
    """A load-balanced Service: the refusal closes the source, and the selector opens it again a second later."""
    served, own, other = config(server.url), gpu(0) + gpu(1), gpu(2, Hostname="b") + gpu(3, Hostname="b")
    selector = SourceSelector(("dcgm-exporter",), lambda _: open_dcgm_exporter(served), chance=lambda: 0.5)
    boards, refusals = set[str](), list[bool]()
    for second, page in enumerate((own, own, *(other,) * 4, own, own, other, other, own, own)):
        server.answer = whole(page.encode())
        try:
            boards |= {device.uuid for device in selector.read(2 * second * SECOND).devices}
        except SourceError as refusal:
            refusals.append("shows none of the GPUs it showed before" in str(refusal))
    selector.close()
    assert (boards, refusals) == ({"GPU-0", "GPU-1"}, [True] * 6)


def test_pods_may_come_to_other_gpus_of_the_host_while_the_source_is_closed(server: Server) -> None:
    for number in range(2):
        server.answer = whole(gpu(number, pod=f"pod-{number}", namespace="ml").encode())
        src = open_dcgm_exporter(config(server.url))
        assert [device.uuid for device in src.read(SECOND).devices] == [f"GPU-{number}"]
        src.close()


def pages_read(pages: Iterable[str]) -> list[str]:
    """Read these pages of one address; return which UUIDs each shows, or "refused"."""
    node, shown = ShownNode(), list[str]()
    for page in pages:
        try:
            shown.append(" ".join(DcgmExporterPage("http://exporter/metrics", node=node).read(page.encode(), [])))
        except SourceError as refusal:
            shown.append("refused" if "none of the GPUs it showed before" in str(refusal) else str(refusal))
    return shown


def of_pod(index: int, host: str) -> str:
    return gpu(index, pod=f"pod-{index}", namespace="ml", Hostname=host)


def test_an_exporter_whose_pod_was_replaced_is_this_nodes_again_after_a_while() -> None:
    """Its host may be the pod's name, and it may leave out GPUs without a pod: it then shows other GPUs only."""
    before, after = of_pod(0, "exporter-1"), of_pod(1, "exporter-2")
    shown = pages_read([before, *[after] * (RENAMED_AFTER + 1), before])
    assert shown == ["GPU-0", *["refused"] * RENAMED_AFTER, "GPU-1", "refused"]


@pytest.mark.parametrize(
    "others",
    [
        [of_pod(1, "a"), of_pod(1, "a"), of_pod(2, "b")],  # several nodes take turns
        [of_pod(1, "a"), of_pod(1, "a"), of_pod(0, "own")],  # this node's page comes between
        [of_pod(1, "a") + gpu(2, Hostname="a")],  # it shows free GPUs, so it would show this node's
        [gpu(1, Hostname="own")],  # likewise: its GPUs were exchanged
        [of_pod(1, "")],
    ],
)
def test_another_nodes_pages_are_refused_for_ever(others: list[str]) -> None:
    shown = pages_read([of_pod(0, "own"), *islice(cycle(others), 2 * RENAMED_AFTER + 4)])
    assert set(shown) == {"GPU-0", "refused"}


def test_a_node_whose_exporter_has_shown_free_gpus_does_not_get_another_name() -> None:
    """Another node behind the Service, whose GPUs all have pods, while this one's exporter is down."""
    own = of_pod(0, "own") + gpu(3, Hostname="own")
    shown = pages_read([own, *[of_pod(1, "other")] * (RENAMED_AFTER + 1), own])
    assert shown == ["GPU-0 GPU-3", *["refused"] * (RENAMED_AFTER + 1), "GPU-0 GPU-3"]


def test_one_connection_is_kept(server: Server) -> None:
    src = open_dcgm_exporter(config(server.url))
    for n in range(5):
        src.read(n * SECOND)
    src.close()
    assert len(server.connections) == 1


def test_a_proxy_in_the_environment_is_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    src = open_dcgm_exporter(config(server.url))
    assert "gr_engine_active" in src.signals
    src.close()


@pytest.mark.parametrize(("status", "body"), [(500, b"lost the host engine"), (404, b""), (302, b"")])
def test_any_other_status_is_an_error(server: Server, status: int, body: bytes) -> None:
    server.answer = whole(body, status)
    with pytest.raises(SourceError, match=rf"{server.url} answered HTTP {status}"):
        open_dcgm_exporter(config(server.url))


def test_silence_is_a_timeout(server: Server) -> None:
    def silent(_: BaseHTTPRequestHandler) -> None:
        server.release.wait()

    server.answer = silent
    page = HttpPageFetcher(server.url, timeout_seconds=0.2)
    with pytest.raises(SourceError, match=r"no whole page within 0.2 s.*timeout_seconds"):
        page()
    page.close()


def test_a_page_that_drips_is_a_timeout(server: Server) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "40")
        handler.end_headers()
        for _ in range(40):
            server.release.wait(0.05)
            try:
                handler.wfile.write(b"#")
            except OSError:
                break
        handler.close_connection = True

    server.answer = drip
    page = HttpPageFetcher(server.url, timeout_seconds=0.3)
    with pytest.raises(SourceError, match="no whole page within"):
        page()
    page.close()


def test_a_page_without_end_is_cut_off(server: Server) -> None:
    server.answer = whole(b"#" * 5000)
    page = HttpPageFetcher(server.url, timeout_seconds=5, limit_bytes=4096)
    with pytest.raises(SourceError, match="longer than 4096 bytes"):
        page()
    page.close()


def test_a_page_compressed_on_its_way_is_read(server: Server) -> None:
    body = gzip.compress(gpu(0).encode())

    def squeezed(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    server.answer = squeezed
    src = open_dcgm_exporter(config(server.url))
    assert "gr_engine_active" in src.signals
    src.close()


def test_nobody_there_is_told_in_plain_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused, and nobody else can take it
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/metrics"
        with pytest.raises(SourceError, match=rf"{url} could not be read.*is dcgm-exporter running"):
            open_dcgm_exporter(config(url))


@pytest.mark.parametrize("url", ["", "localhost:9400/metrics", "http://[::1", "ftp://node1/metrics"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(SourceError, match=r"dcgm_exporter\.url"):
        open_dcgm_exporter(config(url))


def test_a_connection_dropped_in_the_middle_is_an_error(server: Server) -> None:
    def drop(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(gpu(0).encode())
        handler.close_connection = True

    server.answer = drop
    with pytest.raises(SourceError, match="could not be read"):
        open_dcgm_exporter(config(server.url))


def test_close_is_passed_on() -> None:
    pages = Pages(gpu(0))
    DcgmExporterSource("http://x/metrics", fetch=pages, lookup=SPECS.get).close()
    assert pages.closed


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:24B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 10 1 0000000000000000 100 0
   1: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid}        0 11 1 00000000 100 0
"""


class Page:
    """A page that is always there."""

    def __call__(self) -> bytes:
        return b"page"

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(("uid", "believed"), [(0, True), (os.geteuid(), True), (4711, False)])
def test_a_port_that_nobody_configured_must_be_roots_or_ours(tmp_path: Path, uid: int, *, believed: bool) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TABLE.format(port=9400, uid=uid))
    fetch = TrustedPageFetcher(Page(), 9400, proc=tmp_path)
    if believed:
        assert fetch() == b"page"
    else:
        with pytest.raises(SourceError, match=r"port 9400 belongs to user 4711, who .*: if that is your dcgm-exporter"):
            fetch()


def test_an_address_that_was_chosen_is_believed() -> None:
    """The default one too, if the source is."""
    other = Config(dcgm_exporter=DcgmExporterSettings(url="http://127.0.0.1:9401/metrics"))
    found = [type(page_fetcher(config)) for config in (Config(), Config(source="dcgm-exporter"), other)]
    assert found == [TrustedPageFetcher, HttpPageFetcher, HttpPageFetcher]
