"""Tests access control: the rule as a table of all cases, and on a real server."""

import itertools
import json
import socket
from base64 import b64encode
from pathlib import Path

import pytest

from exporter.connections import AddressBuckets, Deadline, TokenBucket, client_network, is_loopback, overdue, surplus
from exporter.web.app import create_app
from exporter.web.security import WebConfigWatcher, WebListener, is_own_name_or_address, own_host_names, refusal_reason
from tests.web.serving import plain_app, served, until_cut

NONE = WebConfigWatcher()
LOCAL, REMOTE = "127.0.0.1", "10.1.2.3"
HASH = "$2b$04$VpkVsVErMqhMat/K2rzJb.j.ajGD7Wu8kn5WyRe/MKIU9DMXP5lEO"
"""Hash of the password "right"."""


def test_the_rule() -> None:
    """List every combination of the rule's inputs."""
    loopback = {LOCAL, "::1", "::ffff:127.0.0.1"}
    hosts = ("localhost:1", "node-6:1", "node-7:1", None)
    ends = itertools.product((*loopback, REMOTE, "fd00::1", ""), (LOCAL, REMOTE), hosts)
    flags = list(itertools.product((False, True), repeat=3))
    table = itertools.product(ends, flags)
    for (local, peer, host), (authenticated, open_page, pages) in table:
        inside = local in loopback and peer == LOCAL
        allowed = pages and (authenticated or open_page or (inside and host in hosts[:2]))
        door = WebListener(NONE, serves_pages=pages, open_page=open_page, own_names=frozenset({"node-6"}))
        why = refusal_reason(door, local=local, peer=peer, host=host, authenticated=authenticated)
        assert (why == "") is allowed, (local, peer, host, authenticated, open_page, pages)
        cure = "web.page_address" if not pages else "Host header" if inside else "web.open_page"
        assert allowed or cure in why


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("localhost", True), ("LOCALHOST:19400", True), ("127.0.0.1", True), ("127.0.0.1:80", True),
        ("node-6", True), ("Node-6:19400", True), ("node-6.evil.example", False), ("node-6:19400:1", False),
        ("10.0.0.7:1", True), ("[::1]", True), ("[::1]:19400", True), ("::1", False), ("node-7", False), ("", False),
        ("evil.example:19400", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False),
        ("localhost:evil", False), ("evil:127.0.0.1", False), ("[evil]:80", False),
        ("127.0.0.1:80@evil", False), ("2130706433", False), ("localhost:\u0661", False),
    ],
)  # fmt: skip
def test_a_host_that_is_no_foreign_name(host: str, *, fine: bool) -> None:
    assert is_own_name_or_address(host, {"node-6"}) is fine


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("", set()),
        ("127.0.0.1 localhost\n127.0.1.1\tNode-6.hpc.example Node-6 # as Debian does\n", {"node-6.hpc.example"}),
        ("10.0.0.6 node-6.hpc.example node-6\n::1 localhost node-6 six\n", {"localhost", "six"}),
        ("127.0.0.1 blocked.example\n127.0.0.1 node-6\nnode-6\n \nnode-6 evil.example node-6\n", set()),
    ],
)
def test_a_host_has_its_own_names_and_none_of_dns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, more: set[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node-6")
    assert own_host_names(tmp_path / "missing") == {"node-6"}
    (tmp_path / "hosts").write_text(text)
    assert own_host_names(tmp_path / "hosts") == {"node-6"} | more


def test_over_the_loopback_the_node_answers_to_its_own_name() -> None:
    with served() as site, site.client() as client:
        for name in (socket.gethostname(), f"{socket.gethostname().upper()}:{site.ports[0]}"):
            assert client.get("/api/v1/gpus", headers={"Host": name}).status_code == 404, "the app's own answer"
        assert client.get("/api/v1/gpus", headers={"Host": f"{socket.gethostname()}.evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        (LOCAL, True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("x", False),
    ],
)
def test_the_loopback(address: str, *, inside: bool) -> None:
    assert is_loopback(address) is inside


def test_one_sender_is_an_address_or_a_network_of_64_bits() -> None:
    assert client_network("10.0.0.1") == "10.0.0.1" == client_network("::ffff:10.0.0.1")
    assert client_network("10.0.0.1") != client_network("10.0.0.2")
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:1") != client_network("2001:db8:0:1::1")
    assert client_network("strange") == "strange"


def test_a_bucket_fills_at_its_pace_and_no_further() -> None:
    bucket = TokenBucket(2, 1)
    assert [bucket.take(10.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(11.0), bucket.take(11.5), bucket.take(12.1)] == [True, False, True]
    assert [bucket.take(99.0) for _ in range(3)] == [True, True, False]
    bucket.refund()
    assert [bucket.take(99.0) for _ in range(2)] == [True, False]


def test_of_many_senders_the_one_not_heard_longest_is_forgotten() -> None:
    buckets = AddressBuckets(1, 0.001, most=2)
    assert buckets.bucket_of("10.0.0.1").take(0)
    assert buckets.bucket_of("10.0.0.2").take(0)
    assert not buckets.bucket_of("10.0.0.1").take(0)
    assert buckets.bucket_of("10.0.0.3").take(0)
    assert not buckets.bucket_of("10.0.0.1").take(0)
    assert buckets.bucket_of("10.0.0.2").take(0)


def test_who_is_overdue_and_who_is_too_many() -> None:
    waits = {"new": Deadline(9, 10), "old": Deadline(0, 100), "late": Deadline(0, 5)}
    assert overdue(waits, 10) == ["late"]
    assert surplus(waits, 1, worst=lambda one: waits[one].used_share(10)) == ["late", "new"]
    assert surplus(waits, 3, worst=lambda one: waits[one].used_share(10)) == []


def web_file(folder: Path, text: str) -> WebConfigWatcher:
    (folder / "web.yml").write_text(text)
    return WebConfigWatcher(folder / "web.yml")


def test_only_what_is_meant_for_all_is_served_where_the_page_is_elsewhere() -> None:
    with served(addresses=2) as site, site.client(0) as metrics, site.client(1) as page:
        assert [metrics.get(path).status_code for path in ("/metrics", "/healthz", "/readyz")] == [200] * 3
        refused = [metrics.get(path) for path in (*PRIVATE, "/docs", "/x")]
        assert {answer.status_code for answer in refused} == {403}
        assert all("web.page_address" in answer.text for answer in refused)
        assert [page.get(path).status_code for path in ("/", "/metrics", "/readyz", "/x")] == [200, 200, 200, 404]


def test_a_foreign_page_in_a_browser_reads_nothing() -> None:
    with served() as site, site.client() as client:
        rebound = client.get("/api/v1/gpus", headers={"Host": "evil.example:19400"})
        assert (rebound.status_code, rebound.headers["content-type"]) == (403, "application/json")
        assert "Host" in rebound.json()["detail"]
        assert client.get("/", headers={"Host": "evil.example"}).headers["content-type"].startswith("text/plain")
        assert client.get("/metrics", headers={"Host": "evil.example"}).status_code == 200
        assert client.get("/").status_code == 200
    with served(open_page=True) as site, site.client() as client:
        assert client.get("/", headers={"Host": "node-7"}).status_code == 200


PRIVATE = (
    "/", "/jobs/1", "/jobs/ns/pod", "/api/v1/node", "/api/v1/gpus", "/api/v1/jobs", "/api/v1/receipts",
    "/api/v1/events", "/openapi.json",
)  # fmt: skip
"""Paths served only over the loopback or to authenticated clients."""
WANTED = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}


def test_every_answer_has_its_headers_and_none_says_who_we_are() -> None:
    app = create_app(lambda: None, now=lambda: 0, max_age_seconds=10.0)
    with served(app) as site, site.client() as client:
        asked = ("/", "/metrics", "/healthz", "/readyz", "/api/v1/jobs", "/x", "/jobs/1", "/api/v1/events")
        answers = [client.get(path) for path in asked]
        answers += [client.request(method, "/metrics") for method in ("POST", "TRACE", "OPTIONS", "BREW")]
        assert [answer.status_code for answer in answers] == [503, 503, 200, 503, 503, 404, 404, 200, *[405] * 4]
        for answer in answers:
            assert {key: answer.headers.get(key) for key in WANTED} == WANTED
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert "server" not in answer.headers
            assert "strict-transport-security" not in answer.headers
            assert "uvicorn" not in answer.text.lower()
        assert answers[-1].headers["allow"] == "GET, HEAD"
        with site.line() as line:
            line.sendall(b"GARBAGE\r\n\r\n")
            head = until_cut(line).lower()
    assert head.startswith(b"http/1.1 400")
    assert all(f"{key}: {value}".encode() in head for key, value in WANTED.items())
    assert b"traceback" not in head


def test_the_file_s_headers_win(tmp_path: Path) -> None:
    text = "http_server_config: {headers: {Strict-Transport-Security: max-age=7, X-Frame-Options: deny}}"
    with served(guarding=web_file(tmp_path, text)) as site, site.client() as client:
        for path in ("/", "/metrics", "/x"):
            headers = client.get(path).headers
            assert (headers["strict-transport-security"], headers["x-frame-options"]) == ("max-age=7", "deny")


def test_a_failure_inside_is_an_answer_with_headers_and_without_details() -> None:
    def fails() -> str:
        raise RuntimeError("secret detail")

    app = plain_app()
    app.router.routes.clear()
    app.add_api_route("/readyz", fails)
    app.add_api_route("/metrics", fails)
    with served(app) as site:
        for path in ("/readyz", "/metrics"):
            with site.client() as client:
                answer = client.get(path)
            assert (answer.status_code, answer.headers["x-content-type-options"]) == (500, "nosniff")
            assert "secret" not in answer.text


def test_with_users_the_page_is_theirs_and_probes_are_told_no_reasons(tmp_path: Path) -> None:
    guarding = web_file(tmp_path, f"basic_auth_users: {{ada: '{HASH}'}}")
    with served(plain_app(problem="job 4711 of ada is stuck"), guarding=guarding) as site, site.client() as client:
        ada = ("ada", "right")
        asked = client.get("/metrics")
        assert (asked.status_code, asked.headers["www-authenticate"].split()[0]) == (401, "Basic")
        for path in ("/", "/metrics", "/api/v1/gpus", "/openapi.json", "/x"):
            assert client.get(path).status_code == 401
            assert client.get(path, auth=("ada", "wrong")).status_code in {401, 429}
            assert client.get(path, auth=ada).status_code in {200, 404}
        assert client.get("/", auth=ada, headers={"Host": "node-7"}).status_code == 200
        right = ("Authorization", "Basic " + b64encode(b"ada:right").decode())
        assert client.get("/", headers=[right]).status_code == 200
        assert client.get("/", headers=[right, ("Authorization", "Basic eDp4")]).status_code == 401, "which of the two?"
        assert (client.get("/healthz").status_code, client.get("/healthz").text) == (200, "ok\n")
        assert (client.get("/readyz").status_code, client.get("/readyz").text) == (503, "not ready\n")
        assert "4711" in client.get("/readyz", auth=ada).text
        assert json.loads(client.get("/api/v1/gpus").content)["detail"]
        assert client.head("/readyz").status_code == 503


def test_guessing_at_readiness_computes_one_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def refused(word: bytes, _: bytes) -> bool:
        hashed.append(word)
        return False

    monkeypatch.setattr("exporter.web.security._matches", refused)
    guarding = web_file(tmp_path, f"basic_auth_users: {{ada: '{HASH}'}}")
    with served(plain_app(problem="a job is stuck"), guarding=guarding) as site, site.client() as client:
        for number in range(20):
            assert client.get("/readyz", auth=("ada", f"guess {number}")).text == "not ready\n"
    assert hashed == [b"guess 0"]


def test_readiness_says_that_a_new_file_is_bad(tmp_path: Path) -> None:
    guarding = web_file(tmp_path, "http_server_config: {http2: true}")
    with served(guarding=guarding) as site, site.client() as client:
        assert client.get("/readyz").text == "ok\n"
        (tmp_path / "web.yml").write_text("tls_config: {}")
        guarding.reload_if_changed()
        answer = client.get("/readyz")
        assert (answer.status_code, "tls_config" in answer.text) == (200, True)
        (tmp_path / "web.yml").write_text("http_server_config: {http2: true}")
        guarding.reload_if_changed()
        assert client.get("/readyz").text == "ok\n"


def test_the_file_s_pace_holds_for_all_but_probes(tmp_path: Path) -> None:
    with served(guarding=web_file(tmp_path, "rate_limit: {interval: 1h, burst: 2}")) as site, site.client() as client:
        got = [client.get("/metrics") for _ in range(3)]
        assert [answer.status_code for answer in got] == [200, 200, 429]
        assert got[-1].headers["retry-after"]
        assert [client.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
