"""The gateway over a real unix socket, with the credentials of real users; the nodes' answers are the test's.

Who runs the tests becomes another user for the moment of a connection, for the kernel notes the user then. Names of
these users are the test's too: the host has none.
"""

import asyncio
import json
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlencode

import httpx
import pytest
import uvicorn
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.core.model import Owner
from exporter.schedulers.privacy import UserMask
from exporter.training.unix_socket import ReportListenError, bind_socket
from exporter.web import gateway
from exporter.web.gateway import FoundRecords, GatewayError, Identity, create_gateway_app
from exporter.web.limits import ConnectionLimits
from exporter.web.security import WebConfigWatcher, WebListener
from exporter.web.server import listen, serve
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
USERS = {0: "root", 54321: "ada", 54322: "bob", 54323: "proxy"}
ADA, BOB, PROXY, NAMELESS = 54321, 54322, 54323, 54324
Fetch = Callable[[JobRecordQuery, str], FoundRecords]


def record(job_id: str, user: str, **more: Any) -> JobRecord:
    return JobRecord(
        node="n1", life="n1@1", owner=Owner(job_id, user=user), start=1.0, end=2.0, running=False, paid=10,
        parts={"useful": 10}, energy={}, **more,
    )  # fmt: skip


RECORDS = (record("41", "ada"), record("42", "bob"), record("43", "root"), record("44", ""))


def nodes(wanted: JobRecordQuery, _user: str) -> FoundRecords:
    """Nodes that ignore every filter but the job's id, as a broken or older one might."""
    return FoundRecords(records=tuple(each for each in RECORDS if wanted.job_id in ("", each.owner.job_id)))


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    """A folder that all users may search: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = SimpleNamespace(getpwuid=lambda uid: SimpleNamespace(pw_name=USERS[uid]))
    monkeypatch.setattr(gateway, "pwd", directory)


@contextmanager
def served(sock: socket.socket, fetch: Fetch, identity: Identity) -> Iterator[None]:
    listener, servers = WebListener(WebConfigWatcher(), open_page=True), queue.Queue[uvicorn.Server]()
    app, limits = create_gateway_app(fetch, identity), ConnectionLimits(requests_per_address=32)
    work = serve(app, [(sock, listener)], limits, on_started=servers.put)
    thread = threading.Thread(target=lambda: asyncio.run(work))
    thread.start()
    server = servers.get(timeout=PATIENCE)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


class Answer(NamedTuple):
    """A response."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class Gateway:
    """A running gateway, and what users get of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ask(self, uid: int, target: str, headers: Sequence[tuple[str, str]] = (), *, method: str = "GET") -> Answer:
        """What that user is answered."""
        connection = HTTPConnection("localhost")
        connection.sock = connected(uid, self.path)
        with closing(connection):
            connection.putrequest(method, target)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return Answer(answer.status, answer.read().decode())

    def get(self, uid: int, headers: Sequence[tuple[str, str]] = (), **params: str) -> Answer:
        """What that user is answered about job records."""
        return self.ask(uid, f"/api/v1/receipts?{urlencode(params)}", headers)

    def jobs(self, uid: int, headers: Sequence[tuple[str, str]] = (), **params: str) -> list[str]:
        """The jobs that user is told of."""
        answer = self.get(uid, headers, **params)
        assert answer.status_code == 200, answer.text
        return [each["owner"]["job_id"] for each in answer.json()["receipts"]]


def connected(uid: int, path: Path) -> socket.socket:
    """A connection of that user; nothing else is done as him, for the server is in this process."""
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(PATIENCE)
    os.seteuid(uid)
    try:
        line.connect(f"{path}")
    finally:
        os.seteuid(0)
    return line


@contextmanager
def gateway_of(folder: Path, fetch: Fetch = nodes, **identity: Any) -> Iterator[Gateway]:
    path = folder / "gateway.sock"
    sock = bind_socket(path, socket.SOCK_STREAM, key="gateway.socket")
    try:
        with served(sock, fetch, Identity(**identity)):
            yield Gateway(path)
    finally:
        path.unlink()


def test_each_user_is_told_of_his_own_jobs_alone(folder: Path) -> None:
    """Even where the nodes send others' too; root is a user like the others."""
    with gateway_of(folder) as gate:
        assert (gate.jobs(ADA), gate.jobs(BOB), gate.jobs(0)) == (["41"], ["42"], ["43"])
        assert gate.jobs(ADA, job_id="41") == ["41"]


def test_another_ones_job_is_answered_as_one_that_does_not_exist(folder: Path) -> None:
    with gateway_of(folder) as gate:
        bodies = [gate.get(ADA, job_id=job).json() | {"at": 0.0} for job in ("42", "4711")]
        assert bodies[0] == bodies[1]
        assert bodies[0]["receipts"] == []


def test_the_nodes_are_asked_for_the_users_own_and_nobody_is_asked_for_others(folder: Path) -> None:
    asked: list[tuple[str, str, str]] = []

    def fetch(wanted: JobRecordQuery, user: str) -> FoundRecords:
        asked.append((user, wanted.user, wanted.job_id))
        return nodes(wanted, user)

    with gateway_of(folder, fetch) as gate:
        assert gate.jobs(ADA, user="ada", job_id="41") == ["41"]
        assert gate.jobs(ADA, user="bob") == []
    assert asked == [("ada", "ada", "41")]


@pytest.mark.parametrize("uid", [NAMELESS, 65534])
def test_who_has_no_name_is_told_nothing(folder: Path, uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports 65534 for whom it cannot name here: nobody's jobs are not theirs."""
    monkeypatch.setitem(USERS, 65534, "nobody")
    with gateway_of(folder) as gate:
        assert gate.get(uid).status_code == 403


def test_where_systemd_hides_what_the_kernel_calls_nobody_users_are_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ProcSubset=pid` of the unit leaves no /proc/sys."""
    monkeypatch.setattr(gateway, "_OVERFLOW_UID", folder / "absent")
    monkeypatch.setitem(USERS, 65534, "nobody")
    with gateway_of(folder) as gate:
        assert gate.jobs(ADA) == ["41"]
        assert gate.get(65534).status_code == 403


def test_more_records_than_were_asked_for_are_cut_and_it_is_said(folder: Path) -> None:
    def fetch(_wanted: JobRecordQuery, _user: str) -> FoundRecords:
        return FoundRecords(records=tuple(record(f"{n}", "ada") for n in range(3)))

    with gateway_of(folder, fetch) as gate:
        assert [gate.get(ADA, limit=f"{limit}").json()["cut"] for limit in (2, 3)] == [True, False]


def test_over_tcp_nobody_is_known() -> None:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with served(sock, nodes, Identity(proxy_uid=0, header="X-Remote-User")):
        url = f"http://127.0.0.1:{port}/api/v1/receipts"
        assert httpx.get(url, headers={"X-Remote-User": "ada"}, trust_env=False).status_code == 403


def test_the_sites_proxy_names_the_user_in_one_header(folder: Path) -> None:
    with gateway_of(folder, proxy_uid=PROXY, header="X-Remote-User") as gate:
        assert gate.jobs(PROXY, [("X-Remote-User", "ada")]) == ["41"]
        for headers in ([], [("X-Remote-User", "")], [("X-Remote-User", "ada"), ("X-Remote-User", "bob")]):
            assert gate.get(PROXY, headers).status_code == 403, headers
        assert gate.get(PROXY, [("X-Remote-User", "ada,bob")]).status_code == 403


def test_a_header_of_anybody_else_counts_for_nothing(folder: Path) -> None:
    with gateway_of(folder, proxy_uid=PROXY, header="X-Remote-User") as gate:
        assert gate.jobs(ADA, [("X-Remote-User", "bob")]) == ["41"]
        assert gate.jobs(0, [("X-Remote-User", "bob")]) == ["43"]
    with gateway_of(folder) as gate:
        assert gate.jobs(ADA, [("X-Remote-User", "bob")]) == ["41"]


def test_names_that_the_nodes_hash_are_hashed_here(folder: Path) -> None:
    mask = UserMask(b"k" * 32)

    def fetch(_: JobRecordQuery, user: str) -> FoundRecords:
        assert user == "ada", "Slurm knows the true name"
        return FoundRecords(records=tuple(replace(each, owner=mask.owner(each.owner)) for each in RECORDS))

    with gateway_of(folder, fetch, exported=mask.user) as gate:
        assert gate.jobs(ADA) == gate.jobs(ADA, user="ada") == gate.jobs(ADA, user=mask.user("ada")) == ["41"]
        assert gate.jobs(ADA, user=mask.user("bob")) == []


def test_names_that_the_nodes_drop_are_nobodys(folder: Path) -> None:
    with gateway_of(folder, exported=UserMask(b"k" * 32, drop=True).user) as gate:
        assert gate.get(ADA).status_code == 403


def test_nodes_that_do_not_answer_are_the_reason(folder: Path) -> None:
    def fetch(wanted: JobRecordQuery, user: str) -> FoundRecords:
        if user == "root":
            raise GatewayError("sacct is down")
        return replace(nodes(wanted, user), unanswered=("n2 cannot be reached",), notes=("a note",), cut=True)

    with gateway_of(folder, fetch) as gate:
        assert (gate.get(0).status_code, gate.get(0).json()) == (503, {"detail": "sacct is down"})
        found = gate.get(ADA).json()
        assert (found["notes"], found["cut"], len(found["receipts"])) == (["n2 cannot be reached", "a note"], True, 1)
        missed = gate.get(ADA, job_id="42")
        assert (missed.status_code, missed.json()) == (503, {"detail": "n2 cannot be reached"})


def test_a_user_who_asks_much_waits_and_others_do_not(folder: Path) -> None:
    entered, leave = threading.Semaphore(0), threading.Event()

    def fetch(wanted: JobRecordQuery, user: str) -> FoundRecords:
        if user == "ada":
            entered.release()
            assert leave.wait(PATIENCE)
        return nodes(wanted, user)

    with gateway_of(folder, fetch) as gate:
        lines = [request_of(ADA, gate.path) for _ in range(2)]
        try:
            assert all(entered.acquire(timeout=PATIENCE) for _ in lines)
            assert gate.get(ADA).status_code == 429
            assert gate.jobs(BOB) == ["42"]
        finally:
            leave.set()
        assert all(line.recv(12) == b"HTTP/1.1 200" for line in lines)
        for line in lines:
            line.close()
        wait_for(lambda: gate.get(ADA).status_code == 200, "he may ask again")


def test_more_users_than_there_are_places_wait_and_are_refused_at_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "_REQUESTS", 1)
    monkeypatch.setattr(gateway, "_WAIT_SECONDS", 0.01)
    leave, entered = threading.Event(), threading.Event()

    def fetch(wanted: JobRecordQuery, user: str) -> FoundRecords:
        entered.set()
        assert leave.wait(PATIENCE)
        return nodes(wanted, user)

    with gateway_of(folder, fetch) as gate:
        line = request_of(ADA, gate.path)
        try:
            assert entered.wait(PATIENCE)
            assert gate.get(BOB).json() == {"detail": "too many users ask at once: try again"}
        finally:
            leave.set()
        assert line.recv(12) == b"HTTP/1.1 200"
        line.close()
        assert gate.jobs(BOB) == ["42"]


def request_of(uid: int, path: Path) -> socket.socket:
    """A request of that user that is on its way."""
    line = connected(uid, path)
    line.sendall(b"GET /api/v1/receipts HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return line


def test_misspelt_and_repeated_filters_are_refused(folder: Path) -> None:
    with gateway_of(folder) as gate:
        assert gate.get(ADA, usr="bob").status_code == 422
        answer = gate.ask(ADA, "/api/v1/receipts?job_id=41&job_id=42")
        assert (answer.status_code, answer.json()) == (422, {"detail": "job_id is given twice"})
        assert gate.ask(ADA, "/metrics").status_code == 404
        assert gate.ask(NAMELESS, "/readyz").text == "ok\n"
        assert gate.ask(ADA, "/api/v1/receipts", method="POST").status_code == 405


def test_all_users_may_open_the_socket_and_a_second_gateway_may_not_replace_it(folder: Path) -> None:
    with gateway_of(folder) as gate:
        assert gate.path.stat().st_mode & 0o777 == 0o666
        with pytest.raises(ReportListenError, match=r"in use by another process.*or set gateway\.socket"):
            bind_socket(gate.path, socket.SOCK_STREAM, key="gateway.socket")
