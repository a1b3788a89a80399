"""Tests slow connections: each is closed, and none delays the response to another."""

import errno
import gc
import itertools
import logging
import select
import socket
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
from fastapi import Response

from exporter.tls import client_context
from exporter.web.admission import Admission
from exporter.web.limits import ConnectionLimits
from exporter.web.security import WebConfig, WebConfigWatcher
from exporter.web.server import Connection, ConnectionManager, listen
from tests.certificates import Authority
from tests.waiting import PATIENCE, wait_for
from tests.web.serving import PAGE, Served, plain_app, served, until_cut

SOON = {"handshake_seconds": 0.3, "request_seconds": 0.3, "answer_seconds": 0.3, "idle_seconds": 0.3}
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def limits(**changed: float) -> ConnectionLimits:
    return ConnectionLimits(**{"new_burst": 1e6, **changed})  # type: ignore[arg-type]


def answers(line: socket.socket) -> bool:
    """Send a request and read the whole response; False if the connection was closed."""
    got = b""
    try:
        line.sendall(REQUEST)
        while PAGE not in got:
            part = line.recv(65536)
            if not part:
                return False
            got += part
    except ConnectionError:
        return False
    return got.startswith(b"HTTP/1.1 200")


def served_well(site: Served) -> bool:
    with site.client() as client:
        return client.get("/metrics").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("said", [
    b"", b"GET", b"GET / HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\na",
])  # fmt: skip
def test_who_does_not_finish_is_hung_up_on(said: bytes) -> None:
    with served(limits=limits(**SOON)) as site, site.line() as line:
        line.sendall(said)
        assert until_cut(line).count(b"HTTP/1.1 ") <= 1


class Refusing(socket.socket):
    """A listening socket whose first connections the kernel refuses to hand over."""

    errors: list[int]

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors.pop(), "no such luck")
        return super().accept()


def refusing(*errors: int) -> Callable[[str, int], socket.socket]:
    def listening(host: str, port: int) -> socket.socket:
        sock = Refusing(fileno=listen(host, port).detach())
        sock.errors = list(errors)
        return sock

    return listening


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EPERM, errno.EPROTO, errno.EHOSTUNREACH, errno.EMFILE])
def test_a_connection_that_cannot_be_accepted_ends_no_others(error: int, caplog: pytest.LogCaptureFixture) -> None:
    """accept(2) returns pending errors of the network, and EPERM where a firewall forbids it."""
    with served(listening=refusing(error)) as site:
        assert served_well(site)
    assert caplog.messages == ["no connections are accepted for a second: no such luck"]


def test_a_socket_that_does_not_listen_any_more_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with served(listening=refusing(errno.EINVAL)) as site, site.line():
        wait_for(lambda: caplog.messages, "the log has it")
    assert caplog.messages == ["no connections are accepted any more: no such luck: restart the daemon"]


def test_a_byte_now_and_then_buys_no_time() -> None:
    with served(limits=limits(request_seconds=0.5)) as site, site.line() as line:
        line.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert ends(line, itertools.repeat(b"a", 2000), pause=0.05)


def ends(line: socket.socket, parts: Iterable[bytes], *, pause: float = 0.0) -> bool:
    """Send until the server closes the connection; False if it accepted everything."""
    try:
        for part in parts:
            line.sendall(part)
            if pause and select.select([line], [], [], pause)[0] and not line.recv(65536):
                return True
    except ConnectionError:
        return True
    return False


def test_a_connection_at_rest_ends_after_its_time() -> None:
    with served(limits=limits(idle_seconds=0.3)) as site, site.line() as line:
        assert answers(line)
        until_cut(line)


@pytest.mark.slow
def test_who_does_not_take_the_answer_is_hung_up_on() -> None:
    with served(plain_app(b"x" * 30_000_000), limits=limits(answer_seconds=1)) as site, site.line() as line:
        line.sendall(REQUEST)
        assert line.recv(8) == b"HTTP/1.1"
        site.until_alone()
        assert len(until_cut(line)) < 30_000_000


def test_answers_that_nobody_takes_are_bounded_together() -> None:
    bounded = limits(answer_seconds=600, unsent_bytes=50_000_000)
    with served(plain_app(b"x" * 30_000_000), limits=bounded) as site, ExitStack() as stack:
        lines = [stack.enter_context(site.line()) for _ in range(4)]
        for line in lines:
            line.sendall(REQUEST)
            assert line.recv(8) == b"HTTP/1.1"
        assert len(until_cut(lines[0])) < 30_000_000


@pytest.mark.parametrize("head", [b"X: ", b"Host: x\r\nContent-Length: 9999999\r\n\r\n"])
def test_no_request_is_large(head: bytes) -> None:
    with served(limits=limits()) as site, site.line() as line:
        assert ends(line, itertools.chain([b"GET / HTTP/1.1\r\n", head], itertools.repeat(b"a" * 4096, 10_000)))
        assert served_well(site)


def test_a_small_body_means_nothing() -> None:
    with served(limits=limits()) as site, site.client() as client:
        for _ in range(3):
            assert client.request("GET", "/metrics", content=b"x" * 2000).status_code == 200


def test_headers_of_sixteen_kilobytes_are_too_many() -> None:
    with served() as site, site.line() as line:
        line.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000)
        head = until_cut(line)
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"16384 bytes" in head


@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_an_invalid_body_is_answered_once_and_no_error_of_ours(method: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """It comes with the head, and so before the app's own response."""
    with served() as site, site.line() as line:
        line.sendall(method + b" /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n")
        got = until_cut(line)
        assert served_well(site)
    assert got.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert got.count(b"HTTP/1.1") == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_an_invalid_body_after_the_response_has_begun_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    with served(plain_app(b"x" * 1_000_000)) as site, site.line() as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert line.recv(8) == b"HTTP/1.1"
        line.sendall(b"no length\r\n")
        assert b"400 Bad Request" not in until_cut(line)
        assert served_well(site)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_requests_sent_ahead_are_answered_in_turn_and_in_bounds() -> None:
    with served(limits=limits()) as site:
        with site.line() as line:
            line.sendall(REQUEST * 3)
            got = b""
            while got.count(b"HTTP/1.1 200") < 3:
                got += line.recv(65536)
        with site.line() as line:
            assert ends(line, itertools.repeat(REQUEST * 1000, 1000))
            assert served_well(site)


def test_when_there_are_too_many_the_longest_silent_makes_room() -> None:
    with served(limits=limits(connections=4)) as site, ExitStack() as stack:
        lines = [stack.enter_context(site.line(here=f"127.0.0.{2 + n}")) for n in range(4)]
        assert answers(lines[0])
        new = stack.enter_context(site.line(here="127.0.0.9"))
        assert answers(new)
        assert until_cut(lines[1]) == b""
        assert answers(lines[0]), "it had finished something"
        assert answers(lines[2])
        assert answers(lines[3])


def test_one_address_takes_its_own_share_only() -> None:
    with served(limits=limits(connections=6, per_address=2)) as site, ExitStack() as stack:
        honest = stack.enter_context(site.line(here="127.0.0.2"))
        assert answers(honest)
        many = [stack.enter_context(site.line(here="127.0.0.3")) for _ in range(5)]
        assert [until_cut(line) for line in many[:3]] == [b""] * 3
        assert answers(many[4])
        assert answers(honest)


def test_a_crowd_of_newcomers_does_not_put_out_who_reads_regularly() -> None:
    with served(limits=limits(per_address=4)) as site, ExitStack() as stack:
        honest = stack.enter_context(site.line())
        assert answers(honest)
        for _ in range(50):
            stack.enter_context(site.line())
        assert answers(honest)


def test_in_a_flood_the_address_with_most_connections_makes_room() -> None:
    """A scraper keeps its one connection, whoever else scrapes, and however often."""
    with served(limits=limits(connections=9)) as site, ExitStack() as stack:
        scrape = stack.enter_context(site.line(here="127.0.0.9"))
        assert answers(scrape)
        for n in range(30):
            line = stack.enter_context(site.line(here=f"127.0.0.{2 + n % 3}"))
            assert answers(line)
        assert answers(scrape)


def test_of_equal_addresses_the_one_that_was_served_long_ago_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.web.admission._REGULAR_SECONDS", 0.5)
    with served(limits=limits(connections=2)) as site, ExitStack() as stack:
        regular = stack.enter_context(site.line(here="127.0.0.2"))
        assert answers(regular)
        time.sleep(0.6)  # the time that makes it regular
        new = stack.enter_context(site.line(here="127.0.0.3"))
        assert answers(new)
        assert answers(stack.enter_context(site.line(here="127.0.0.4")))
        assert until_cut(new) == b""
        assert answers(regular)


def test_beside_a_regular_newcomers_share_one_allowance_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.web.admission._REGULAR_SECONDS", 0.5)
    with served(limits=limits(newcomers_burst=0, crowd_burst=2, crowd_per_second=1e-6)) as site, ExitStack() as stack:
        regular = stack.enter_context(site.line(here="127.0.0.2"))
        assert answers(regular)
        time.sleep(0.6)  # the time that makes it regular
        new = [stack.enter_context(site.line(here=f"127.0.0.{3 + n}")) for n in range(4)]
        assert [until_cut(line) for line in new[2:]] == [b"", b""]
        assert [answers(line) for line in new[:2]] == [True, True]
        assert answers(stack.enter_context(site.line(here="127.0.0.2")))


def test_beside_a_regular_the_requests_of_newcomers_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("exporter.web.server.time.monotonic", lambda: now[0])
    manager = ConnectionManager(
        uvicorn.Server(uvicorn.Config(plain_app())),
        ConnectionLimits(newcomers_burst=0, crowd_burst=1, crowd_per_second=2),
    )
    with socket.socket() as sock:
        manager.connections.update(Connection(manager, sock, address, WebConfig()) for address in ("a", "b"))
        assert [manager.request_delay("a") for _ in range(5)] == [0.0] * 5, "there is nobody to leave time for"
        manager.admission.note_served("a", 0.0)
        now[0] = 61.0
        assert [manager.request_delay(address) for address in ("a", "b", "c", "b", "a")] == [0.0, 0.0, 0.5, 1.0, 0.0]
        now[0] = 63.0
        assert manager.request_delay("b") == 0.0


def test_the_regulars_are_those_of_today_and_no_flood_displaces_them() -> None:
    """A scraper each minute, of a pod that gets another address each hour, among addresses that come once."""
    admission = Admission(ConnectionLimits())
    for minute in range(60 * 24):
        admission.note_served("scraper", minute * 60.0)
        admission.note_served(f"pod {minute // 60}", minute * 60.0)
        admission.note_served(f"visitor {minute}", minute * 60.0)
    now = (60 * 24 - 1) * 60.0
    assert [admission.is_regular(address, now) for address in ("scraper", "pod 23", "pod 2")] == [True, True, False]
    for n in range(10_000):
        admission.note_served(f"attacker {n}", now)
    now += 60.0
    assert [admission.is_regular(address, now) for address in ("scraper", "pod 23")] == [True, True]
    assert len(admission._served_since) == len(admission._served_at) == 256


def test_beside_a_regular_who_has_asked_for_little_does_not_wait_behind_a_crowd() -> None:
    """As a person who logs in for the first time while twenty addresses guess passwords."""
    admission = Admission(
        ConnectionLimits(newcomers_burst=2, newcomers_per_second=1, crowd_burst=1, crowd_per_second=1e-6)
    )
    admission.note_served("scraper", 0.0)
    flood = [f"attacker {n}" for n in range(20)]
    for tenth in range(610, 900):
        admitted = [admission.admits(address, tenth / 10) for address in flood]
        waits = [admission.request_delay(address, tenth / 10) for address in flood]
    assert not any(admitted)
    assert min(waits) > 60
    assert [admission.admits("person", 90.0) for _ in range(3)] == [True, True, False], "two at once"
    assert [admission.request_delay("person", 90.0) for _ in range(2)] == [0.0, 0.0]
    assert not admission.admits("attacker 3", 91.0), "it has not been quiet for long"
    assert [admission.admits("another", 91.0), admission.request_delay("another", 91.0)] == [True, 0.0]


def test_a_regular_that_asks_for_more_than_a_scraper_is_one_of_the_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attackers who are served for a minute, too, take no more of the time than those who are not."""
    now = [0.0]
    monkeypatch.setattr("exporter.web.server.time.monotonic", lambda: now[0])
    limits = ConnectionLimits(modest_burst=2, modest_per_second=1, newcomers_burst=0, crowd_burst=1, crowd_per_second=2)
    manager = ConnectionManager(uvicorn.Server(uvicorn.Config(plain_app())), limits)
    with socket.socket() as sock:
        manager.connections.update(Connection(manager, sock, address, WebConfig()) for address in ("a", "b"))
        manager.admission.note_served("a", 0.0)
        manager.admission.note_served("b", 0.0)
        now[0] = 61.0
        assert [manager.request_delay("b") for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0], "two are a scraper's"
        assert manager.request_delay("a") == 0.0
        now[0] = 62.0
        assert [manager.request_delay(address) for address in "ab"] == [0.0, 0.0]


def test_connections_of_a_regular_that_opens_more_than_a_scraper_are_those_of_the_crowd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("exporter.web.admission._REGULAR_SECONDS", 0.5)
    few = limits(modest_burst=1, modest_per_second=1e-6, newcomers_burst=0, crowd_burst=1, crowd_per_second=1e-6)
    with served(limits=few) as site, ExitStack() as stack:
        lines = {here: stack.enter_context(site.line(here=here)) for here in ("127.0.0.2", "127.0.0.3")}
        assert [answers(line) for line in lines.values()] == [True, True]
        time.sleep(0.6)  # the time that makes them regular
        more = [stack.enter_context(site.line(here="127.0.0.3")) for _ in range(3)]
        assert until_cut(more[-1]) == b"", "the one connection of the crowd is taken"
        assert answers(more[0])


def test_requests_of_an_address_wait_once_there_are_too_many_and_others_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("exporter.web.server.time.monotonic", lambda: now[0])
    manager = ConnectionManager(
        uvicorn.Server(uvicorn.Config(plain_app())), ConnectionLimits(requests_burst=2, requests_per_second=4)
    )
    with socket.socket() as sock:
        manager.connections.add(Connection(manager, sock, "a", WebConfig()))
        assert [manager.request_delay("a") for _ in range(9)] == [0.0] * 9, "it is alone"
        manager.connections.add(Connection(manager, sock, "b", WebConfig()))
        assert [manager.request_delay("a") for _ in range(4)] == [0.0, 0.0, 0.25, 0.5]
        assert manager.request_delay("b") == 0.0
        now[0] = 1.0
        assert manager.request_delay("a") == 0.0


@pytest.mark.parametrize(
    ("method", "path", "counts"),
    [("GET", "/metrics", 1), ("POST", "/metrics", 0), ("GET", "/healthz", 0), ("GET", "/readyz", 0)],
)
def test_only_who_may_read_more_than_a_probe_becomes_a_regular(
    method: str, path: str, counts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(Admission, "note_served", lambda _admission, address, _now: noted.append(address))
    with served() as site, site.client() as client:
        client.request(method, path)
    assert len(noted) == counts


def test_requests_of_one_address_wait_for_each_other_and_not_those_of_others() -> None:
    gate, busy = threading.Event(), threading.Semaphore(0)
    app = plain_app()

    def wait() -> Response:
        busy.release()
        assert gate.wait(30)
        return Response(b"done")

    app.add_api_route("/wait", wait)
    with served(app, limits=limits(requests_per_address=2), open_page=True) as site, ExitStack() as stack:
        stack.callback(gate.set)
        many = [stack.enter_context(site.line(here="127.0.0.2")) for _ in range(4)]
        for line in many:
            line.sendall(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert all(busy.acquire(timeout=30) for _ in range(2))
        assert not busy.acquire(timeout=0.3)
        assert answers(stack.enter_context(site.line(here="127.0.0.3")))
        gate.set()
        assert all(line.recv(1 << 16).startswith(b"HTTP/1.1 200") for line in many)


def test_who_connects_too_often_is_not_taken() -> None:
    with served(limits=ConnectionLimits(new_burst=3, new_per_second=0.001)) as site, ExitStack() as stack:
        lines = [stack.enter_context(site.line(here="127.0.0.2")) for _ in range(5)]
        assert [answers(line) for line in lines[:3]] == [True] * 3
        assert [until_cut(line) for line in lines[3:]] == [b""] * 2
        assert answers(stack.enter_context(site.line(here="127.0.0.3")))


@pytest.mark.slow
def test_who_is_refused_again_and_again_waits_for_it() -> None:
    slow = limits(refusals_burst=2, refusals_per_second=0.001, refusal_seconds=600)
    with served(limits=slow) as site, site.client() as client:
        assert [client.get("/", headers={"Host": "evil"}).status_code for _ in range(2)] == [403, 403]
        with site.line() as line:
            line.sendall(b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n")
            line.settimeout(0.5)
            with pytest.raises(TimeoutError):
                line.recv(1)
        assert client.get("/").status_code == 200


@contextmanager
def secured(folder: Path, authority: Authority, **changed: float) -> Iterator[Served]:
    cert, key = (authority.certificate.parent / f"server.{end}" for end in ("crt", "key"))
    (folder / "web.yml").write_text(f"tls_server_config: {{cert_file: {cert}, key_file: {key}}}")
    with served(guarding=WebConfigWatcher(folder / "web.yml"), limits=limits(**changed)) as site:
        yield site


HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"\x16", HELLO])
def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path, authority: Authority, said: bytes) -> None:
    with secured(tmp_path, authority, **SOON) as site, site.line() as line:
        line.sendall(said)
        assert until_cut(line) == b""


def test_handshakes_under_way_make_room_as_well(tmp_path: Path, authority: Authority) -> None:
    trusted = client_context(f"{authority.certificate}")
    with secured(tmp_path, authority, connections=3, handshake_seconds=600) as site, ExitStack() as stack:
        lines = [stack.enter_context(site.line()) for _ in range(3)]
        for line in lines:
            line.sendall(HELLO)
        with site.client(verify=trusted) as client:
            assert client.get("/metrics").status_code == 200
        assert until_cut(lines[0]) == b""


@pytest.mark.parametrize(
    ("changed", "here"),
    [({"handshakes_per_address": 2}, "127.0.0.2"), ({"handshakes": 2}, "127.0.0.3")],
    ids=["of an address", "of all"],
)
def test_handshakes_in_progress_are_bounded(
    tmp_path: Path, authority: Authority, changed: dict[str, float], here: str
) -> None:
    trusted = client_context(f"{authority.certificate}")
    with secured(tmp_path, authority, handshake_seconds=600, **changed) as site, ExitStack() as stack:
        client = stack.enter_context(site.client(verify=trusted))
        assert client.get("/metrics").status_code == 200  # established: no handshake puts it out
        lines = [stack.enter_context(site.line(here=here if n < 2 else "127.0.0.2")) for n in range(3)]
        for line in lines:
            line.sendall(HELLO)
        assert until_cut(lines[0]) == b""
        assert client.get("/metrics").status_code == 200
        assert select.select(lines[1:], [], [], 0.2)[0] == []


def test_plain_http_where_tls_is_spoken_gets_nothing(tmp_path: Path, authority: Authority) -> None:
    with secured(tmp_path, authority) as site, site.line() as line:
        line.sendall(REQUEST)
        assert b"HTTP" not in until_cut(line)


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", HELLO, b"GET / HTTP/1.1\r\n\r\n"], ids=["silent", "half a hello", "no TLS"])
@pytest.mark.parametrize(
    ("ended_by", "changed"),
    [
        ("client", {"handshake_seconds": 600}),
        ("time", {"handshake_seconds": 0.2}),
        ("others", {"handshake_seconds": 600, "per_address": 1}),
    ],
)
def test_a_handshake_that_failed_keeps_no_memory(
    tmp_path: Path, authority: Authority, said: bytes, ended_by: str, changed: dict[str, float]
) -> None:
    """Each has a buffer of 256 KiB: in a cycle of references it would stay until all objects are looked through."""
    with secured(tmp_path, authority, **changed) as site, site.client(verify=False) as client, ExitStack() as lines:
        gc.collect()
        gc.disable()
        lines.callback(gc.enable)
        for _ in range(10):
            line = lines.enter_context(site.line())
            line.sendall(said)
            if ended_by == "client":
                line.close()
        deadline = time.monotonic() + PATIENCE
        while len(left := [each for each in gc.get_objects() if isinstance(each, SSLProtocol)]) > 1:
            assert time.monotonic() < deadline, f"{len(left)} are left"
            del left
            client.get("/healthz")
            time.sleep(0.05)
