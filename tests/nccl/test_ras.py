"""The client of NCCL's RAS: its protocol, and what it does with servers that are slow, endless, huge or wrong."""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pytest

from exporter.nccl.connection import NoAnswerError
from exporter.nccl.ras import LIMIT_BYTES, MOST_RANKS, RasAnswer, ask, parse_answer
from tests.nccl.ras_server import RasServer, communicator, document, endless, missing_rank, rank_of
from tests.waiting import PATIENCE

Serve = Callable[..., RasServer]
JOB = document(communicator("a", [rank_of(0, AllReduce=7), rank_of(1, AllReduce=6)], [missing_rank(2)]))


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def serve(answer: str | Callable[[], str | Iterable[bytes]] = JOB, **settings: object) -> RasServer:
            server = RasServer((lambda: answer) if isinstance(answer, str) else answer, **settings)  # type: ignore[arg-type]
            stack.callback(server.close)
            return server

        yield serve


def outcome_of(server: RasServer, *, seconds: float = PATIENCE) -> str:
    with server.connect() as sock, pytest.raises(NoAnswerError) as failure:
        ask(sock, seconds=seconds)
    return failure.value.outcome


def test_the_state_of_all_communicators_is_asked_for_in_the_published_protocol(serve: Serve) -> None:
    server = serve()
    with server.connect() as sock:
        answer = ask(sock, seconds=PATIENCE)
    assert server.received == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]
    (found,) = answer.communicators
    assert (found.key, found.size, answer.nccl_version) == (("0xa", "0xa:0x1"), 3, "2.29.1")
    assert [rank.collective_counts["AllReduce"] for rank in found.ranks] == [7, 6]
    assert found.ranks[1].process == ("127.0.0.1", 1001, 1)
    assert [(rank.rank, rank.lost) for rank in found.missing_ranks] == [(2, True)]


def test_the_acceptor_is_verified_before_anything_else_is_asked(serve: Serve) -> None:
    def refuse() -> None:
        raise NoAnswerError("ras_foreign", "another job's")

    server = serve()
    with server.connect() as sock, pytest.raises(NoAnswerError, match="another job"):
        ask(sock, seconds=PATIENCE, verify=refuse)
    assert server.received == ["CLIENT PROTOCOL 2"]


def test_nccl_without_json_is_told_from_what_is_no_ras(serve: Serve) -> None:
    assert outcome_of(serve(json_format=False)) == "ras_no_json"
    assert outcome_of(serve(protocol="HTTP/1.1 400 Bad Request")) == "ras_protocol"
    assert outcome_of(serve(protocol="SERVER PROTOCOL 2\nBUSY")) == "ras_protocol"


@pytest.mark.parametrize(
    "body",
    [
        "", "{}", "[]", "null", "ERROR: no\n", JOB[:-20], '{"communicators": {"a": 1}}',
        '{"communicators": [{"hash": 1}]}',
        '{"communicators": [{"hash": "a", "ranks": [{"rank": "0"}]}]}',
        '{"communicators": [{"hash": "a", "ranks": [{"rank": 1e400}]}]}',
        '{"communicators": [{"hash": "a", "size": ' + "9" * 5000 + "}]}",
        '{"communicators": ' + "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_answer_of_ras_is_malformed(body: str) -> None:
    with pytest.raises(NoAnswerError) as failure:
        parse_answer(body.encode())
    assert failure.value.outcome == "ras_malformed"


def test_bytes_that_are_no_text_are_malformed() -> None:
    with pytest.raises(NoAnswerError, match="cannot be decoded"):
        parse_answer(b'{"communicators": [{"hash": "\xff\xfe"}]}')


def test_more_ranks_than_any_job_has_are_refused() -> None:
    rank = '{"rank":0},' * MOST_RANKS + '{"rank":1}'
    with pytest.raises(NoAnswerError) as failure:
        parse_answer(f'{{"communicators": [{{"hash": "a", "ranks": [{rank}]}}]}}'.encode())
    assert failure.value.outcome == "ras_too_large"


def test_unknown_fields_of_a_later_version_do_not_matter() -> None:
    assert parse_answer(b'{"communicators": [], "later": [{"a": 1}]}') == RasAnswer(())


@pytest.mark.slow
def test_an_endless_answer_ends(serve: Serve) -> None:
    assert outcome_of(serve(lambda: endless(b" " * 65_536))) == "ras_too_large"
    assert outcome_of(serve(lambda: endless(b" ", pause=0.05)), seconds=0.5) == "ras_timeout"
    assert outcome_of(serve(protocol="x" * 5000)) == "ras_too_large"
    assert LIMIT_BYTES < 1 << 30


@pytest.mark.slow
def test_a_server_that_never_replies_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_connection(silent.getsockname()) as sock:
        with pytest.raises(NoAnswerError) as failure:
            ask(sock, seconds=0.3)
        assert failure.value.outcome == "ras_timeout"


def test_a_connection_that_is_closed_early_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        server.accept()[0].close()
        with pytest.raises(NoAnswerError) as failure:
            ask(sock, seconds=PATIENCE)
        assert failure.value.outcome == "ras_closed"


@pytest.mark.skipif(shutil.which("ncclras") is None, reason="needs ncclras")
def test_the_published_client_understands_the_stand_in(serve: Serve) -> None:
    server = serve()
    command = ["ncclras", "-h", "127.0.0.1", "-p", f"{server.port}", "-v", "-f", "json", "-t", "5"]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert parse_answer(shown) == parse_answer(JOB.encode())
