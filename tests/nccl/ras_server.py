"""A stand-in for NCCL's RAS server: its text protocol over TCP, with answers that the test provides.

Real RAS needs GPUs. This one follows the published protocol (NVIDIA/nccl docs/userguide/source/troubleshooting/ras.rst
and src/ras/client_support.cc): it accepts CLIENT PROTOCOL, TIMEOUT, SET FORMAT, STATUS and VERBOSE STATUS in any case
of letters, answers anything else with ERROR, and closes the connection after a status. The published client `ncclras`
understands it (test_ras.py runs it where it is installed). It listens on 127.0.0.1 alone.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
TEXT = "NCCL version 2.28.7 compiled with CUDA 13.0\n\nJob summary\n===========\n"


def rank_of(
    rank: int, host: str = "127.0.0.1", pid: int = 0, device: int | None = None, **counts: int
) -> dict[str, Any]:
    """A rank as RAS writes it; pid and device follow from the rank unless given."""
    device = rank if device is None else device
    return {
        "rank": rank, "host": host, "pid": pid or 1000 + rank, "cuda_dev": device, "nvml_dev": device,
        "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False,
                   "abort_flag": False},
        "collective_counts": dict.fromkeys(OPERATIONS, 0) | counts,
    }  # fmt: skip


def missing_rank(
    rank: int, *, host: str = "127.0.0.1", pid: int = 0, unresponsive: bool = True, dead: bool = False
) -> dict[str, Any]:
    """A missing rank as RAS writes it."""
    return {
        "rank": rank, "host": host, "pid": pid or 1000 + rank, "cuda_dev": rank, "nvml_dev": rank,
        "status": {"unresponsive": unresponsive, "considered_dead": dead},
    }  # fmt: skip


def communicator(
    name: str, ranks: Iterable[Mapping[str, Any]], missing: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """A communicator as RAS writes it."""
    present, absent = list(ranks), list(missing)
    return {
        "hash": f"0x{name}", "secondary_hash": f"0x{name}:0x1", "size": len(present) + len(absent),
        "ranks_count": len(present), "missing_ranks_count": len(absent), "ranks": present, "missing_ranks": absent,
    }  # fmt: skip


def document(*communicators: Mapping[str, Any]) -> str:
    """A whole answer in JSON."""
    return json.dumps(
        {
            "nccl_version": "2.29.1", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
            "timestamp": "2026-01-01 00:00:00", "communicators_count": len(communicators),
            "communicators": communicators, "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
        },
        indent=2,
    )  # fmt: skip


class RasServer:
    """Serves answers until `close`; `received` has every command."""

    def __init__(
        self, answer: Callable[[], str | Iterable[bytes]], *, json_format: bool = True,
        protocol: str = "SERVER PROTOCOL 2", address: str = "127.0.0.1", port: int = 0,
    ) -> None:  # fmt: skip
        """`answer` is called for each status; an iterable of bytes is sent piece by piece."""
        self._answer, self._json, self._protocol = answer, json_format, protocol
        self.received: list[str] = []
        self._server = socket.create_server((address, port))
        self.port: int = self._server.getsockname()[1]
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop listening, and wait for the conversations."""
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(20)

    def connect(self) -> socket.socket:
        """A client's connection."""
        return socket.create_connection(("127.0.0.1", self.port))

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), client.makefile("rb") as lines:
            as_json = False
            for line in lines:
                command = line.decode(errors="replace").strip()
                self.received.append(command)
                words = command.upper().split()
                if words in (["STATUS"], ["VERBOSE", "STATUS"]):
                    self._send(client, self._answer() if as_json else TEXT)
                    return
                as_json = as_json or (self._json and words == ["SET", "FORMAT", "JSON"])
                client.sendall(f"{self._reply(command, words)}\n".encode())

    def _reply(self, command: str, words: list[str]) -> str:
        if words[:2] == ["CLIENT", "PROTOCOL"]:
            return self._protocol
        if words[:1] == ["TIMEOUT"]:
            return "OK" if words[1:] and words[1].replace(".", "").isdecimal() else "ERROR: Invalid timeout value"
        if words[:2] == ["SET", "FORMAT"] and self._json:
            return "OK" if words[2:] in (["JSON"], ["TEXT"]) else "ERROR: Invalid format"
        return f"ERROR: Unknown command {command}"  # MONITOR too, as before NCCL 2.29

    def _send(self, client: socket.socket, answer: str | Iterable[bytes]) -> None:
        for piece in (answer.encode(),) if isinstance(answer, str) else answer:
            if self._closed:
                return
            client.sendall(piece)


def endless(piece: bytes, *, pause: float = 0.0) -> Iterable[bytes]:
    """The same bytes again and again."""
    while True:
        yield piece
        time.sleep(pause)
