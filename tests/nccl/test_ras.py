"""The client of NCCL's RAS: its protocol, and what it does with servers that are slow, endless, huge or wrong."""

import shutil
import socket
import subprocess
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pytest

from exporter.nccl.connection import NoAnswerError
from exporter.nccl.ras import LIMIT_BYTES, MOST_MEMBERS, MOST_VALUES, RasAnswer, ask, parse_answer
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


COUNTS = ",".join(f'"{number}":{number}' for number in range(1, MOST_VALUES + 1))
HOSTILE = {
    "ranks": '{"hash":"","ranks":[' + ",".join(['{"rank":0}'] * (MOST_VALUES // 5)) + "]}",
    "missing": '{"hash":"","missing_ranks":[' + ",".join(['{"rank":0}'] * (MOST_VALUES // 5)) + "]}",
    "communicators": ",".join(['{"hash":""}'] * (MOST_VALUES // 3 + 1)),
    "counts": '{"hash":"","ranks":[{"rank":0,"collective_counts":{' + COUNTS + "}}]}",
}
"""A few bytes each of more communicators, ranks or counts than any job has."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_more_than_any_job_has_is_refused(kind: str) -> None:
    with pytest.raises(NoAnswerError) as failure:
        parse_answer(f'{{"communicators": [{HOSTILE[kind]}]}}'.encode())
    assert failure.value.outcome == "ras_too_large"


def test_an_answer_of_many_objects_is_refused_before_they_are_made() -> None:
    """16 MiB of the smallest communicators would be 172 MiB of memory."""
    body = b'{"communicators": [' + b",".join([b'{"hash":""}'] * (MOST_MEMBERS + 1)) + b"]}"
    assert len(body) < LIMIT_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(NoAnswerError, match="members"):
            parse_answer(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_the_largest_job_that_fits_is_read() -> None:
    """4,000 ranks in six communicators each, as docs/hangs.md has it."""
    ranks = [rank_of(rank, host=f"10.1.{rank >> 8}.{rank & 255}", AllReduce=10**6) for rank in range(4000)]
    body = document(*(communicator(f"{number}", ranks) for number in range(6))).encode()
    assert len(body) < LIMIT_BYTES
    assert [len(each.ranks) for each in parse_answer(body).communicators] == [4000] * 6


@pytest.mark.parametrize("text", ["x" * 65, "\\u00e9", "a\\nb"])
@pytest.mark.parametrize("place", ['"hash":"%s"', '"hash":"","ranks":[{"rank":0,"host":"%s"}]',
                                   '"hash":"","ranks":[{"rank":0,"collective_counts":{"%s":1}}]'])  # fmt: skip
def test_texts_that_nccl_does_not_have_are_malformed(place: str, text: str) -> None:
    with pytest.raises(NoAnswerError) as failure:
        parse_answer(f'{{"communicators": [{{{place % text}}}]}}'.encode())
    assert failure.value.outcome == "ras_malformed"


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
