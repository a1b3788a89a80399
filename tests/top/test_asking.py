"""Tests polling a node: every failure has a message of one sentence without a password, and none takes forever."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import httpx
import pytest

from exporter.cli.wiring import tls_context
from exporter.config import ConfigError
from exporter.top import client as module
from exporter.top.client import (
    NodeAddressError,
    NodeClient,
    NodePoller,
    NodeUnavailableError,
    parse_target,
)
from exporter.web.app import create_app
from exporter.web.security import WebConfigWatcher
from tests.certificates import Authority
from tests.top.nodes import responses, seen, snapshot
from tests.web.serving import served


def place(url: str, **headers: str) -> module.NodeTarget:
    return parse_target(url, headers=headers)


def answering(answer: httpx.Response) -> NodeClient:
    return NodeClient(place("node:19400"), transport=responses(lambda _: answer))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(503, json={"detail": "the newest sample is 40 s old"}), "the newest sample is 40 s old"),
        (httpx.Response(401, json={"detail": "who are you"}), r"HTTP 401 \(who are you\).*--header"),
        (httpx.Response(403, text="no"), "HTTP 403: pass a user name.*docs/security.md"),
        (httpx.Response(404, text="no"), "HTTP 404: is this the complete address"),
        (httpx.Response(200, text="<html>"), "response is not that of this exporter"),
        (httpx.Response(200, json={"node": {}}), "response is not that of this exporter"),
        (httpx.Response(302, headers={"Location": "http://elsewhere/"}), "HTTP 302"),
        (httpx.Response(500, text="x"), "HTTP 500"),
        (httpx.Response(429, json={"detail": "later\n\x1b[2J" + "x" * 999}), "HTTP 429: later"),
    ],
)
def test_an_answer_that_is_none_is_told_in_one_sentence(answer: httpx.Response, why: str) -> None:
    with answering(answer) as asking, pytest.raises(NodeUnavailableError, match=why) as told:
        asking.gpus()
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 500


def test_an_answer_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    answer = httpx.Response(200, content=b" " * (1 << 21))
    with (
        answering(answer) as asking,
        pytest.raises(NodeUnavailableError, match="is longer than 1048576 bytes: is this a node"),
    ):
        asking.gpus()


@contextmanager
def talking(say: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a server that accepts one connection and calls `say`; yields its address."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            line, _ = listening.accept()
            with line:
                line.recv(65536)
                say(line)
                over.wait(30)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


def test_a_node_that_takes_the_question_and_is_silent_is_not_waited_for() -> None:
    with (
        talking(lambda _: None) as url,
        NodeClient(place(url), timeout=0.2) as asking,
        pytest.raises(NodeUnavailableError, match=r"no response within 0\.2 s"),
    ):
        asking.gpus()


def test_a_node_that_drips_is_not_waited_for_either() -> None:
    stop = threading.Event()

    def drip(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not stop.wait(0.05):
            try:
                line.sendall(b" ")
            except OSError:
                return

    with talking(drip) as url, NodeClient(place(url), timeout=0.2) as asking:
        with pytest.raises(NodeUnavailableError, match=r"not complete after 0\.6 s"):
            asking.gpus()
        stop.set()


def test_the_daemon_says_why_it_has_no_answer() -> None:
    app = create_app(lambda: None, now=lambda: 0, max_age_seconds=10.0, why_not=lambda: "the driver is gone")
    with (
        served(app) as site,
        NodeClient(place(f"127.0.0.1:{site.ports[0]}")) as asking,
        pytest.raises(NodeUnavailableError, match="the driver is gone"),
    ):
        asking.gpus()


@pytest.mark.parametrize("url", ["", "ftp://node", "http://", "http://no de", "node:port", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(NodeAddressError, match="is not a node"):
        place(url)


@pytest.mark.parametrize(
    ("url", "whole"),
    [("node17:19400", "http://node17:19400"), ("https://a/b/", "https://a/b"), ("http://[::1]:1", "http://[::1]:1")],
)
def test_an_address_may_lack_its_scheme_and_have_a_path(url: str, whole: str) -> None:
    assert place(url).url == whole


def test_user_and_password_of_the_address_and_headers_are_sent_and_never_shown() -> None:
    asked: list[httpx.Request] = []

    def note(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(500)

    where = place("http://ada:s3cret@node:1", Team="ml")
    with NodeClient(where, transport=responses(note)) as asking, pytest.raises(NodeUnavailableError) as told:
        asking.gpus()
    assert asked[0].headers["authorization"].startswith("Basic ")
    assert asked[0].headers["team"] == "ml"
    assert "s3cret" not in f"{told.value}{where.address}"
    with NodeClient(place("http://ada:s3cret@127.0.0.1:1")) as asking, pytest.raises(NodeUnavailableError) as told:
        asking.gpus()
    assert "s3cret" not in str(told.value)


def test_a_proxy_is_not_asked_for_what_is_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with served(app) as site, NodeClient(place(f"127.0.0.1:{site.ports[0]}")) as asking:
        assert asking.gpus().gpus


def test_authorities_are_read_once_and_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--ca-file: .*absent.pem: no certificate can be read of it: No such file"):
        tls_context(tmp_path / "absent.pem")
    (tmp_path / "no.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="no certificate can be read of it"):
        tls_context(tmp_path / "no.pem")
    verify = tls_context(None)
    monkeypatch.setattr(module, "public_context", lambda: pytest.fail("built once more"))
    for number in range(3):
        with NodeClient(parse_target(f"https://n{number}:1", headers={}, verify=verify)):
            pass


def test_with_tls_and_a_password_it_is_read_when_both_are_given_and_told_what_is_missing_else(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("server")
    secret = bcrypt.hashpw(b"s3cret", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(
        f"tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\nbasic_auth_users:\n  ada: {secret}\n"
    )
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with served(app, guarding=WebConfigWatcher(tmp_path / "web.yml")) as site:
        told = []
        for user, ca_file in (("", None), ("", authority.certificate), ("ada:s3cret@", authority.certificate)):
            url = f"https://{user}127.0.0.1:{site.ports[0]}"
            node = NodePoller(parse_target(url, headers={}, verify=tls_context(ca_file)))
            with NodeClient(node.target) as asking:
                node.poll(asking)
            told.append(node.state.problem)
    assert "--ca-file" in told[0]
    assert "HTTP 401" in told[1]
    assert told[2] == ""


def test_the_last_answer_stays_when_a_node_falls_silent_and_goes_when_it_is_back() -> None:
    node = NodePoller(place("node:19400"))
    node.state = before = seen()
    with answering(httpx.Response(500)) as asking:
        node.poll(asking)
        first = node.state
        node.poll(asking)
    assert first.gpus is before.gpus
    assert first.at == before.at
    assert not first.live
    assert node.state.since == first.since
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with served(app) as site, NodeClient(place(f"127.0.0.1:{site.ports[0]}")) as asking:
        node.poll(asking)
    assert node.state.live
    assert node.state.problem == ""
