"""Nodes that answer badly: a byte at a time, compressed, or always with less than they have."""

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf, isfinite

import pytest

from exporter.core.job_record import JobRecordQuery
from exporter.report import nodes
from exporter.report.nodes import fetch_records

ONE = JobRecordQuery(job_id="1", since=1.0, until=1e6)


@contextmanager
def answering(body: Callable[[], Iterable[bytes]], *headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that sends these to whoever connects; yields its address, and the request lines it got."""
    asked: list[str] = []
    head = "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", "Connection: close", *headers, "")).encode()

    def serve() -> None:
        with suppress(OSError):  # until it is closed
            while True:
                line, _ = sock.accept()
                with line, suppress(OSError):
                    asked.append(line.recv(65536).decode().partition("\r\n")[0])
                    line.sendall(head)
                    for part in body():
                        line.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", asked
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()


def slowly() -> Iterator[bytes]:
    """A blank every twentieth of a second: no single read takes long."""
    while True:
        time.sleep(0.05)
        yield b" "


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_ANSWER_SECONDS", 0.5)
    with answering(slowly) as (url, _):
        assert fetch_records([url], ONE).unanswered == (f"{url} gave no whole answer within 0.5 s",)


@pytest.mark.parametrize("most", [1 << 20, inf])
def test_a_compressed_answer_counts_by_what_it_becomes(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    monkeypatch.setattr(nodes, "_MAX_BYTES", 4 << 20)
    with answering(lambda: [gzip.compress(bytes(8 << 20))], "Content-Encoding: gzip") as (url, _):
        found = fetch_records([url], ONE, max_bytes=most)
    assert found.cut is isfinite(most)
    assert found.unanswered == (
        () if found.cut else (f"{url}: its answer is longer than 4194304 bytes: is it a daemon of ours?",)
    )


def test_an_answer_may_be_compressed() -> None:
    with answering(lambda: [gzip.compress(b'{"receipts": [], "cut": true}')], "Content-Encoding: gzip") as (url, _):
        assert fetch_records([url], ONE).cut


@pytest.mark.parametrize(("job", "requests"), [("1", 1), ("", 15)])
def test_only_totals_are_asked_for_in_parts(job: str, requests: int) -> None:
    """A part of a job's time has as many records as the whole."""
    wanted = JobRecordQuery(job_id=job, since=0.0, until=60.0 * 4)
    with answering(lambda: [b'{"receipts": [], "cut": true}']) as (url, asked):
        assert fetch_records([url], wanted).cut
    assert len(asked) == requests
