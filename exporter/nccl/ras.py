"""Asks NCCL's RAS subsystem for the state of a job's communicators, and decodes its answer.

The protocol is text over TCP: CLIENT PROTOCOL, TIMEOUT and SET FORMAT are each answered by one line, VERBOSE STATUS by
a document up to the end of the connection. NCCL has JSON from 2.28.7 on; before that the format is refused, and text
made for people is not parsed. CONTROL changes a running job (2.31), and MONITOR does not end (2.29): neither is sent.
Sources: NVIDIA/nccl docs/userguide/source/troubleshooting/ras.rst, src/ras/client.cc, src/ras/client_support.cc.
"""

import socket
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from exporter.nccl.connection import BoundedConnection, NoAnswerError

PROTOCOL = 2
LEG_SECONDS = 5
"""How long RAS may wait for other processes on each leg of its collection: NCCL's own default."""
LIMIT_BYTES = 16 << 20
"""An answer has about 650 bytes for each rank of each communicator: 25,000 of them."""
MOST_MEMBERS = 700_000
"""Members of all objects of an answer, by their colons: real ones have up to 25 for each rank."""
MOST_VALUES = 300_000
"""Values of an answer, as `RasAnswer.values` counts them: real ones have about ten for each rank."""

Text = Annotated[str, Meta(max_length=64, pattern="^[ -~]*$")]
Function = Annotated[str, Meta(max_length=32, pattern="^[ -~]*$")]
Number = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Process = tuple[str, int, int]
"""Address of the host, pid in the process's own pid namespace, and CUDA device: unique in a job."""


class RasRank(Struct, frozen=True):
    """A rank of a communicator that has answered."""

    rank: Number
    host: Text = ""
    """Address of the interface that NCCL's bootstrap uses."""
    pid: Number = -1
    cuda_dev: Number = -1
    nvml_dev: Number = -1
    collective_counts: dict[Function, Number] = {}
    """Collectives that the rank has launched in this communicator, by NCCL's name of the function."""

    @property
    def process(self) -> Process:
        """The process and device of the rank."""
        return self.host, self.pid, self.cuda_dev


class MissingStatus(Struct, frozen=True):
    """Why a rank has not answered; neither: it answers, but is no member of the communicator (yet, or any more)."""

    unresponsive: bool = False
    considered_dead: bool = False


class MissingRank(Struct, frozen=True):
    """A rank of a communicator that has not answered."""

    rank: Number
    host: Text = ""
    pid: Number = -1
    cuda_dev: Number = -1
    nvml_dev: Number = -1
    status: MissingStatus = MissingStatus()

    @property
    def process(self) -> Process:
        """The process and device of the rank."""
        return self.host, self.pid, self.cuda_dev

    @property
    def lost(self) -> bool:
        """Whether its process cannot be reached."""
        return self.status.unresponsive or self.status.considered_dead


class Communicator(Struct, frozen=True):
    """A communicator and its ranks."""

    hash: Text
    secondary_hash: Text = ""
    size: Number = 0
    ranks: tuple[RasRank, ...] = ()
    missing_ranks: tuple[MissingRank, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Both hashes, which together are unique."""
        return self.hash, self.secondary_hash

    @property
    def members(self) -> Iterator[RasRank | MissingRank]:
        """All its ranks, missing ones too."""
        yield from self.ranks
        yield from self.missing_ranks


class RasAnswer(Struct, frozen=True):
    """All communicators of the processes that RAS connects: one NCCL application, over all its nodes."""

    communicators: tuple[Communicator, ...]
    nccl_version: Text = ""

    @property
    def values(self) -> int:
        """How much it is: three values for a communicator, five for a rank, one for each count."""
        ranks = sum(len(each.ranks) + len(each.missing_ranks) for each in self.communicators)
        counts = sum(len(rank.collective_counts) for each in self.communicators for rank in each.ranks)
        return 3 * len(self.communicators) + 5 * ranks + counts


_decode = msgspec.json.Decoder(RasAnswer).decode


def parse_answer(body: bytes) -> RasAnswer:
    """Decode RAS' JSON. Raises NoAnswerError.

    Each communicator, rank and count has a colon, so what is decoded is bounded before it is.
    """
    if (members := body.count(b":")) > MOST_MEMBERS:
        raise NoAnswerError("ras_too_large", f"RAS' answer has {members} members; at most {MOST_MEMBERS} are read")
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as err:  # ValueError: not UTF-8, or a huge number
        raise NoAnswerError("ras_malformed", f"RAS' answer cannot be decoded: {err}") from err
    if answer.values > MOST_VALUES:
        raise NoAnswerError("ras_too_large", f"RAS' answer has {answer.values} values; at most {MOST_VALUES} are read")
    return answer


def ask(sock: socket.socket, *, seconds: float, verify: Callable[[], None] = lambda: None) -> RasAnswer:
    """Ask for the state of all communicators over a connected socket, within `seconds`; the caller closes it.

    `verify` is called once the server has replied, so that a process has accepted the connection; it raises
    NoAnswerError if that process may not speak for the job. Raises NoAnswerError.
    """
    connection = BoundedConnection(sock, seconds=seconds, limit=LIMIT_BYTES, prefix="ras")
    reply = _exchange(connection, f"CLIENT PROTOCOL {PROTOCOL}")
    if not reply.upper().startswith(b"SERVER PROTOCOL "):
        raise NoAnswerError("ras_protocol", f"no RAS server: it replied {reply[:80]!r}")
    verify()
    _expect_ok(_exchange(connection, f"TIMEOUT {LEG_SECONDS}"))
    reply = _exchange(connection, "SET FORMAT json")
    if reply.upper().startswith(b"ERROR"):
        raise NoAnswerError("ras_no_json", "this NCCL has no JSON for RAS: it needs 2.28.7 or newer")
    _expect_ok(reply)
    connection.send(b"VERBOSE STATUS\n")
    return parse_answer(connection.rest())


def _exchange(connection: BoundedConnection, command: str) -> bytes:
    connection.send(f"{command}\n".encode())
    return connection.line()


def _expect_ok(reply: bytes) -> None:
    if reply.upper() != b"OK":
        raise NoAnswerError("ras_protocol", f"RAS replied {reply[:80]!r} instead of OK")
