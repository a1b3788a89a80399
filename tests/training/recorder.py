"""A daemon's listener that only records: it accepts messages on a real unix socket or by HTTP.

Rejects what the schema rejects, with replies like the daemon's.
"""

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from exporter.training.message import Message, ReportRefusedError, decode_message, model_flops
from tests.waiting import PATIENCE


class Recorder:
    """Listens on a unix socket; a context manager. `refuse`: the reply to every message."""

    def __init__(self, path: Path, *, refuse: Mapping[str, str] | None = None) -> None:
        self.path = str(path)
        self.messages: list[Message] = []
        self.refused: list[str] = []
        self.connections = 0
        self._gone = 0
        self._refuse = refuse
        self._came = threading.Condition()
        self._open: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(self.path)
        self._server.listen(64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop like a daemon: unlink the socket and close all connections."""
        Path(self.path).unlink(missing_ok=True)
        for each in (self._server, *self._open):
            each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
        for each in (self._server, *self._open):
            each.close()

    def wait(self, many: int, *, seconds: float = PATIENCE) -> list[Message]:
        """Wait for so many messages and return them; raises AssertionError on timeout."""
        with self._came:
            there = self._came.wait_for(lambda: len(self.messages) >= many, timeout=seconds)
            assert there, f"{len(self.messages)} of {many} messages; refused: {self.refused}"
            return list(self.messages)

    def all(self, *, seconds: float = PATIENCE) -> list[Message]:
        """Wait until all clients have connected and disconnected, and return their messages."""
        with self._came:
            done = self._came.wait_for(lambda: 0 < self.connections == self._gone, timeout=seconds)
            assert done, f"{self._gone} of {self.connections} connections have ended"
            return list(self.messages)

    def take(self, packet: bytes) -> bytes | None:
        """Record a message; returns the rejection if it is invalid."""
        with self._came:
            try:
                self.messages.append(decode_message(packet))
            except ReportRefusedError as error:
                self.refused.append(f"{error}: {packet!r}")
                return json.dumps({"error": str(error), "field": ""}).encode()
            finally:
                self._came.notify_all()
        return None if self._refuse is None else json.dumps(self._refuse).encode()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(link)
            self._threads.append(threading.Thread(target=self._read, args=[link], daemon=True))
            self._threads[-1].start()

    def _read(self, link: socket.socket) -> None:
        while packet := _packet(link):
            answer = self.take(packet)
            if answer:
                with suppress(OSError):  # the client need not read the reply
                    link.send(answer)
        with self._came:
            self._gone += 1
            self._came.notify_all()


def _packet(link: socket.socket) -> bytes:
    try:
        return link.recv(65536)
    except OSError:
        return b""


class WebRecorder:
    """Records messages sent by HTTP to 127.0.0.1; a context manager."""

    def __init__(self, path: Path, *, refuse: Mapping[str, str] | None = None) -> None:
        self.recorder = recorder = Recorder(path)
        self.callers = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                server.callers += 1
                super().setup()

            def do_POST(self) -> None:
                answer = recorder.take(self.rfile.read(int(self.headers["Content-Length"])))
                body = answer or (b"" if refuse is None else json.dumps(refuse).encode())
                self.send_response(400 if body else 204)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Suppress the log of requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/report"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Self:
        self.recorder.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(timeout=10)
        self._server.server_close()
        self.recorder.__exit__()


def summed(messages: list[Message]) -> dict[str, Any]:
    """Sum the messages' figures and seconds by phase (the remainder is compute), with the last step."""
    phases: defaultdict[str, float] = defaultdict(float)
    for each in messages:
        for name, took in each.phases.items():
            phases[name] += took
    seconds = sum(each.seconds for each in messages)
    phases["compute"] += seconds - sum(phases.values())
    steps = [each.step for each in messages if each.step is not None]
    return {
        "seconds": seconds,
        "phases": dict(phases),
        "steps": sum(each.steps for each in messages),
        "step": steps[-1] if steps else None,
        "tokens": sum(each.tokens or 0 for each in messages),
        "padding": sum(each.padding or 0 for each in messages),
        "samples": sum(each.samples or 0 for each in messages),
        "flops": sum(model_flops(each) or 0 for each in messages),
        "checkpoints": sum(each.checkpoints for each in messages),
        "restarts": sum(each.restart for each in messages),
    }
